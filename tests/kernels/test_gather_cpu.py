"""Graphs on a CPU: sampled products and sums over lists against dense float64, however heads and rows are cut."""

from __future__ import annotations

import math
import subprocess
import sys
from dataclasses import dataclass, field, replace
from functools import cache
from pathlib import Path
from typing import Any

import numpy as np
import pytest
import torch
from torch import Tensor

import gossamer as gs
from gossamer.kernels.blocked import IMPLEMENTATION, gather_lists
from gossamer.kernels.contract import Terms
from gossamer.layouts.gather import build_gather
from gossamer.plan.plan import choose, plan_of
from gossamer.plan.problem import Problem
from gossamer.testing.graphs import random_graph
from gossamer.testing.tolerance import check, exact_results, plain_results
from tests.support.launches import backward, forward

RESULTS = ("out", "lse", "dq", "dk", "dv", "dsink")


def graph(Q: int, K: int, most: int, seed: int, hub: bool = False) -> gs.CSR:
    """Up to `most` random keys a row, every fifth row without any; with a row of all keys and a key of all rows."""
    rng = np.random.default_rng(seed)
    mask = rng.random((Q, K)) < rng.integers(0, most + 1, Q)[:, None] / K
    if hub:
        mask[3] = mask[:, 5] = True
    mask[::5] = False
    return gs.CSR(np.cumsum([0, *mask.sum(1)]), np.nonzero(mask)[1], K)


@dataclass(frozen=True)
class Case:
    """Sizes, the pattern of them, and score terms."""

    name: str
    pattern: gs.Pattern
    B: int = 1
    H: int = 2
    G: int = 2
    Q: int = 60
    K: int = 80
    D: int = 16
    E: int = 16
    terms: dict[str, Any] = field(default_factory=dict)


A, OTHER = graph(60, 80, 9, 1), graph(60, 80, 20, 2, hub=True)
EMPTY = gs.CSR([0] * 61, [], 80)
EVERY = {"softcap": 1.5, "alibi_slopes": (0.1, -0.2, 0.3, 0.05), "sink_logits": (0.5, -1.0, -math.inf, 3.0)}
CASES = [
    Case("graph", A),
    Case("hubs", OTHER, D=24, E=40),
    Case("nothing", EMPTY),
    Case("one-feature", A, D=1, E=1),
    Case("grouped", OTHER, B=2, H=6, G=2),
    Case("by-head", gs.PerHead([A, OTHER, A, EMPTY]), B=2, H=4, G=2),
    Case("by-batch", gs.PerBatch([OTHER, A]), B=2, H=4, G=4),
    Case("by-both", gs.PerBatch([gs.PerHead([A, OTHER]), gs.PerHead([OTHER, OTHER])]), B=2, G=1),
    Case("scale", OTHER, terms={"scale": -0.7}),
    Case("softcap", OTHER, terms={"softcap": 0.6}),
    Case("alibi", OTHER, B=2, H=4, G=2, terms={"alibi_slopes": EVERY["alibi_slopes"], "q_offset": 7}),
    Case("sinks", A, B=2, H=4, G=2, terms={"sink_logits": EVERY["sink_logits"]}),
    Case("lengths", OTHER, B=3, terms={"key_lengths": (80, 0, 31)}),
    Case("every-term", gs.PerHead([A, OTHER, OTHER, A]), B=2, H=4, G=2, terms=EVERY | {"key_lengths": (80, 9)}),
]
CUTS = {  # of heads together, rows together, and the longest run of a sum
    "as shipped": (1 << 18, 1 << 21, 256),
    "head by head": (1, 1 << 21, 7),
    "some rows of a head": (1, 0, 256),
    "a few heads": (1500, 1 << 21, 33),
}


def terms_of(case: Case, dtype: torch.dtype) -> Terms:
    """The terms of a case as a launch is given them."""
    given = {"scale": case.D**-0.5, "q_offset": case.K - case.Q} | case.terms
    kinds = {"alibi_slopes": dtype, "sink_logits": dtype, "key_lengths": torch.int32}
    return Terms(**given | {name: torch.tensor(given[name], dtype=kinds[name]) for name in kinds.keys() & given.keys()})


def drawn(case: Case, dtype: torch.dtype) -> list[Tensor]:
    """q, k, v, dout and dlse."""
    c, g = case, torch.Generator().manual_seed(3)
    shapes = (c.B, c.H, c.Q, c.D), (c.B, c.G, c.K, c.D), (c.B, c.G, c.K, c.E), (c.B, c.H, c.Q, c.E)
    wide = torch.float64 if dtype == torch.float64 else torch.float32
    return [*(torch.randn(s, generator=g).to(dtype) for s in shapes), torch.randn(shapes[3][:3], generator=g).to(wide)]


def compute(case: Case, dtype: torch.dtype, terms: Terms, inputs: list[Tensor]) -> list[Tensor]:
    """What the launches give, in memory that was NaN."""
    c, (q, k, v, dout, dlse) = case, inputs
    # A layout of its own: parts are kept with it.
    layout = build_gather(c.pattern, c.Q, c.K, block_q=1, q_offset=c.K - c.Q).to("cpu")
    problem = Problem(c.B, c.H, c.G, c.Q, c.K, c.D, c.E, str(dtype).removeprefix("torch."), "cpu", backward=True)
    out, lse = forward(IMPLEMENTATION, problem, layout, terms, q, k, v)
    return [out, lse, *backward(IMPLEMENTATION, problem, layout, terms, dout, dlse, q, k, v, out, lse)]


@cache
def expected(case: str, dtype: torch.dtype) -> tuple[list[Tensor], list[Tensor]]:
    """By dense attention, in float64 and in the type of the inputs."""
    c = next(found for found in CASES if found.name == case)
    mask, wide = torch.from_numpy(c.pattern.materialize(c.Q, c.K)), dtype == torch.float64
    terms = terms_of(c, torch.float64 if wide else torch.float32)
    inputs = drawn(c, dtype)
    return exact_results(*inputs[:3], mask, terms, *inputs[3:]), plain_results(*inputs[:3], mask, terms, *inputs[3:])


TYPES = (torch.float16, torch.bfloat16, torch.float32, torch.float64)
WAYS = [(dtype, cut) for dtype in TYPES for cut in CUTS if dtype == torch.float32 or cut == "as shipped"]


@pytest.mark.parametrize(("dtype", "cut"), WAYS, ids=str)
@pytest.mark.parametrize("case", CASES, ids=lambda case: case.name)
def test_numbers(case: Case, dtype: torch.dtype, cut: str, monkeypatch: pytest.MonkeyPatch) -> None:
    together, rows, longest = CUTS[cut]
    monkeypatch.setattr(gather_lists, "HEADS_TOGETHER", together)
    monkeypatch.setattr(gather_lists, "ROWS_TOGETHER", rows)
    monkeypatch.setattr(gather_lists, "LONGEST_SUM", longest)
    if rows == 0:
        monkeypatch.setattr(gather_lists, "KEYS_OF_A_PART", 0)
    inputs = drawn(case, dtype)
    found = compute(case, dtype, terms_of(case, torch.float64 if dtype == torch.float64 else torch.float32), inputs)
    exact, low = expected(case.name, dtype)
    assert len(found) == len(exact)
    for name, actual, true, plain in zip(RESULTS, found, exact, low, strict=False):
        check(name, actual, true, plain)
    empty = exact[1] == -torch.inf
    assert (found[0][empty] == 0).all() and (found[2][empty] == 0).all()


def test_cuts_are_what_they_say(monkeypatch: pytest.MonkeyPatch) -> None:
    """Heads side by side, in whole groups of a key head or parts of one; or rows of a head, each once."""
    problem = Problem(2, 6, 2, 60, 80, 16, 16, "float32", "cpu")
    layout = build_gather(OTHER, 60, 80, block_q=1).to("cpu")
    whole = gather_lists.plan_parts(layout, problem)
    assert [(part.first, part.heads) for part in whole] == [(0, 12)]
    size = int(layout.rows.counts.sum()) + 140
    for most, heads in ((5 * size, 3), (7 * size, 6), (2 * size, 1)):
        monkeypatch.setattr(gather_lists, "HEADS_TOGETHER", most)
        parts = gather_lists.plan_parts(layout, problem)
        assert [part.first for part in parts] == list(range(0, 12, heads))
        assert len({id(part.lists) for part in parts}) == 1
    monkeypatch.setattr(gather_lists, "ROWS_TOGETHER", 100)
    monkeypatch.setattr(gather_lists, "KEYS_OF_A_PART", 0)
    parts = gather_lists.plan_parts(layout, problem)[: len(gather_lists.plan_parts(layout, problem)) // 12]
    assert [part.begin for part in parts] == [0, *(part.end for part in parts[:-1])] and parts[-1].end == 60
    assert all(len(part.lists.keys) <= 100 or part.end == part.begin + 1 for part in parts)


def test_a_long_row_is_added_in_runs() -> None:
    """5 * 10^4 equal terms in sequence would lose two digits."""
    K = 100_000
    case = Case("hub", gs.CSR([0, K // 2], np.arange(0, K, 2), K), H=1, G=1, Q=1, K=K, D=4, E=4)
    q, k, v, dout, dlse = (torch.zeros_like(x) for x in drawn(case, torch.float32))
    found = compute(case, torch.float32, terms_of(case, torch.float32), [q, k, v + 0.1, dout + 1, dlse])
    assert abs(float(found[1]) - math.log(K // 2)) < 2e-6
    assert float((found[0] - 0.1).abs().max()) < 1e-6
    assert float((found[4].sum(2) - 1.0).abs().max()) < 1e-5


def test_who_is_gathered() -> None:
    """Graphs are, on a CPU alone; windows and the blocks of BigBird are not."""
    N = 4096
    for dtype in ("bfloat16", "float32", "float64"):
        for directions in (False, True):
            problem = Problem(1, 4, 2, N, N, 64, 64, dtype, "cpu", backward=directions)
            for degree in (1, 10, 64):
                assert (
                    str(choose(plan_of(problem, backward=directions), random_graph(N, degree), 0)) == "blocked gather 1"
                )
            for pattern in (gs.SlidingWindow(63), gs.SlidingWindow(256), gs.BigBird(64), gs.Causal(), gs.Local(16)):
                assert choose(plan_of(problem, backward=directions), pattern, 0).form == "block"
    on_gpu = replace(problem, device="cuda", sm=90)
    assert not any(choice.reads(on_gpu) for choice in IMPLEMENTATION.capability.gathers)


def test_nothing_is_said_of_sparse_tensors() -> None:
    """torch warns of its own, once in a process."""
    code = """if True:
        import torch, gossamer as gs
        q = torch.randn(1, 2, 4, 8, requires_grad=True)
        gs.attention(q, q, q, gs.CSR([0, 1, 1, 2, 2], [3, 0], 4)).sum().backward()
    """
    subprocess.run([sys.executable, "-W", "error", "-c", code], check=True, timeout=300)


POWER_LAW = """
import resource
import numpy as np
import torch
import gossamer as gs
from gossamer.testing.graphs import power_law_graph

def peak():
    return resource.getrusage(resource.RUSAGE_SELF).ru_maxrss / 2**20

N = 170_000
listed = power_law_graph(N, 1_100_000)
rows, hub = np.diff(listed.indptr), np.arange(0, N, 2)
before, after = np.split(listed.indices, [listed.indptr[10]])
rows[9] = len(hub)
pattern = gs.CSR(np.cumsum([0, *rows]), np.concatenate([before[: listed.indptr[9]], hub, after]), N)
q, k, v = (torch.randn(1, 4, 170_000, 64, requires_grad=True) for _ in range(3))
before = peak()
out = gs.attention(q, k, v, pattern)
out.backward(torch.ones_like(out))
assert all(torch.isfinite(x.grad).all() for x in (q, k, v))
print(peak() - before)
"""


@pytest.mark.slow
@pytest.mark.skipif(not Path("/proc/self/statm").exists(), reason="the peak of resident memory is counted in KiB there")
def test_memory_of_a_power_law_graph() -> None:
    """Of 1.2 million edges, 85,000 in one row: a few tensors of 166 MiB, and nothing as large as edges x features."""
    done = subprocess.run([sys.executable, "-c", POWER_LAW], capture_output=True, text=True, check=True, timeout=600)
    assert float(done.stdout) < 2.0, done.stdout
