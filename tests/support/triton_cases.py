"""Cases and the float64 comparison that the interpreter tests and the GPU tests of the Triton kernels share."""

from __future__ import annotations

from dataclasses import dataclass, field
from typing import Any

import numpy as np
import torch

from gossamer.kernels.contract import Terms
from gossamer.kernels.triton.block.config import TileConfig
from gossamer.layouts import BlockLayout, from_dense
from gossamer.layouts.build import build
from gossamer.patterns import BigBird, Causal, Dense, Dilated, Document, Pattern, PerHead, SlidingWindow
from gossamer.patterns.base import Intervals
from gossamer.patterns.grid import Sizes
from gossamer.plan.problem import Problem
from gossamer.testing.inputs import POISONS, unkept
from gossamer.testing.tolerance import exact_results
from tests.support.launches import backward, forward
from tests.support.unkept import Run, check_unkept


@dataclass(frozen=True)
class PaddedDocuments(Pattern):
    """Documents of `each` positions: the last third of their queries keep nothing, the first fifth of keys nobody."""

    each: int

    def _keep(self, i: np.ndarray, j: np.ndarray, sizes: Sizes) -> np.ndarray:
        same = i // self.each == j // self.each
        return same & (i % self.each < 2 * self.each // 3) & (j % self.each >= self.each // 5)

    def _intervals(self, sizes: Sizes) -> Intervals:
        i = np.arange(sizes.Q) + sizes.q_offset
        first, end = i // self.each * self.each + self.each // 5, (i // self.each + 1) * self.each
        lo = np.where(i % self.each < 2 * self.each // 3, first, end)
        return np.clip(lo, 0, sizes.K), np.clip(end, 0, sizes.K)


@dataclass(frozen=True)
class Case:
    """One problem: sizes, what is kept (a pattern, or a random density for each batch element or head), terms."""

    name: str
    keep: Pattern | float
    B: int = 1
    H: int = 2
    G: int = 2
    Q: int = 130
    K: int = 150
    D: int = 32
    E: int = 32
    dtype: torch.dtype = torch.float32
    tile: tuple[int, int] = (64, 64)
    lead: tuple[int, int] = (1, 1)
    scale: float | None = None
    terms: dict[str, Any] = field(default_factory=dict)
    limit: int | None = None
    on_device: bool = False  # a layout of which the host knows nothing
    strided: bool = False  # inputs as (B, N, H, D) seen as (B, H, N, D)


RESULTS = ("out", "lse", "dq", "dk", "dv", "dsink")
TERMS = {"softcap": 1.5, "alibi": (0.1, 0.4), "sink": (0.5, -1.0)}

CASES = [
    Case("dense", Dense(), K=130),
    Case("causal", Causal()),
    Case("causal-split", Causal(), limit=1, tile=(32, 32)),
    Case("causal-more-queries", Causal(), Q=150, K=97),
    Case("window-half", SlidingWindow(40), dtype=torch.float16, G=1),
    Case("window-both-sides-batch", SlidingWindow(20, 10), B=2, G=1),
    Case("window-on-device", SlidingWindow(40), on_device=True),
    Case("bigbird", BigBird(32, random_blocks=1), Q=190, K=190, limit=2),
    Case("dilated", Dilated(5, 0, 7), Q=190, K=190),
    Case("document-per-batch", Document(np.repeat([[0, 1, 2], [3, 3, 4]], 50, axis=1)), B=2, Q=150, K=150),
    Case("per-head", PerHead([SlidingWindow(30), Dilated(4, 0, 5)]), limit=1),
    Case("per-head-grouped", PerHead([SlidingWindow(30), Dilated(4, 0, 5)]), G=1),
    Case("random", 0.3, D=20, E=33, Q=101, K=67),
    Case("random-per-batch-and-head", 0.2, B=2, lead=(2, 2), limit=1, Q=70, K=90),
    Case("random-grouped-lists", 0.2, B=2, G=1, lead=(2, 2), Q=70, K=90),
    Case("empty-rows", 0.01, Q=90, K=70),
    Case("nothing-kept", 0.0, Q=40, K=40),
    Case("head-sizes", Causal(), D=1, E=80, Q=40, K=40),
    Case("large-heads", Causal(), D=72, E=256, Q=40, K=40, H=1, G=1, dtype=torch.float16),
    Case("one-query", Causal(), Q=1, K=200, tile=(32, 64), limit=1),
    Case("one-query-on-device", Causal(), Q=1, K=200, tile=(32, 64), limit=1, on_device=True),
    Case("few-queries-on-device", 0.02, B=3, H=4, lead=(3, 1), Q=5, K=330, tile=(32, 32), limit=2, on_device=True),
    Case("few-queries-of-each-head", 0.3, B=2, lead=(2, 2), Q=9, K=200, tile=(32, 64), limit=1, on_device=True),
    Case("uneven-tiles", 0.4, tile=(96, 32), Q=100, K=100),
    Case("strided", SlidingWindow(40), strided=True, G=1),
    Case("negative-scale", Causal(), scale=-0.3, Q=70, K=70),
    Case("zero-scale", 0.3, scale=0.0, Q=70, K=70),
    Case("softcap", SlidingWindow(40), terms={"softcap": 1.5}),
    Case("alibi", Causal(), terms={"alibi": (0.1, 0.4)}, Q=70, K=90),
    Case("alibi-absolute", SlidingWindow(30, 20), terms={"alibi": (0.1, 0.4), "absolute": True}, Q=70, K=90),
    Case(
        "alibi-each",
        0.3,
        B=2,
        terms={"alibi": ((0.1, 0.4), (0.2, -0.05)), "absolute": True, "softcap": 2.0},
        Q=70,
        K=90,
    ),
    Case("alibi-each-signed", Causal(), B=2, G=1, terms={"alibi": ((0.1, 0.4), (0.2, 0.0))}, Q=70, K=90, limit=1),
    Case("sink", 0.05, terms={"sink": (0.5, -1.0)}, Q=70, K=90),
    Case("sink-split", Causal(), terms={"sink": (0.5, -torch.inf)}, limit=1, Q=70, K=90, tile=(32, 32)),
    Case("lengths", Dense(), B=2, terms={"lengths": (100, 0)}),
    Case("lengths-bits", 0.3, B=2, terms={"lengths": (150, 33)}, limit=1),
    Case("every-term", SlidingWindow(60), B=2, G=1, terms=TERMS | {"lengths": (150, 70)}, dtype=torch.float16),
    Case("padded", PaddedDocuments(20), K=130, G=1),
    Case("padded-on-device", PaddedDocuments(30), B=2, K=130, on_device=True, terms={"sink": (0.5, -1.0)}),
    Case("window-lengths", SlidingWindow(30), B=2, terms={"lengths": (150, 60), "sink": (0.5, -1.0)}),
    Case("offset", Causal(), terms={"q_offset": 3, "alibi": (0.1, 0.4)}, Q=70, K=90),
]


def make(case: Case, device: str) -> tuple[Problem, BlockLayout, torch.Tensor, Terms, list[torch.Tensor]]:
    """(problem, layout on `device`, dense mask, terms, [q, k, v, dout, dlse]) of a case; random, seeded by its name."""
    c = case
    seed = sum(map(ord, c.name))
    generator = torch.Generator().manual_seed(seed)

    def draw(heads: int, n: int, size: int) -> torch.Tensor:
        shape = (c.B, n, heads, size) if c.strided else (c.B, heads, n, size)
        x = torch.randn(shape, generator=generator).to(c.dtype).to(device)
        return x.transpose(1, 2) if c.strided else x

    offset = c.terms.get("q_offset", c.K - c.Q)
    if isinstance(c.keep, Pattern):
        mask = c.keep.materialize(c.Q, c.K, q_offset=offset)
        layout = build(c.keep, c.Q, c.K, block_q=c.tile[0], block_kv=c.tile[1], q_offset=offset)
    else:
        mask = np.random.default_rng(seed).random((*c.lead, c.Q, c.K)) < c.keep
        layout = from_dense(mask, block_q=c.tile[0], block_kv=c.tile[1])
    layout = layout.to(device)
    if c.on_device:
        layout = BlockLayout(layout.rows)
    capability = torch.cuda.get_device_capability() if device == "cuda" else (9, 0)
    processors = torch.cuda.get_device_properties(device).multi_processor_count if device == "cuda" else 1
    problem = Problem(
        c.B, c.H, c.G, c.Q, c.K, c.D, c.E, str(c.dtype).removeprefix("torch."), "cuda",
        sm=capability[0] * 10 + capability[1], processors=processors, backward=True,
    )  # fmt: skip
    values = {name: torch.tensor(c.terms[name], device=device) for name in ("alibi", "sink") if name in c.terms}
    lengths = torch.tensor(c.terms["lengths"], device=device) if "lengths" in c.terms else None
    terms = Terms(
        scale=c.D**-0.5 if c.scale is None else c.scale, q_offset=offset, softcap=c.terms.get("softcap"),
        key_lengths=lengths, sink_logits=values.get("sink"), alibi_slopes=values.get("alibi"),
        absolute=c.terms.get("absolute", False),
    )  # fmt: skip
    inputs = [draw(c.H, c.Q, c.D), draw(c.G, c.K, c.D), draw(c.G, c.K, c.E), draw(c.H, c.Q, c.E)]
    dlse = torch.randn(c.B, c.H, c.Q, generator=generator).to(device)
    return problem, layout, torch.from_numpy(mask).to(device), terms, [*inputs, dlse]


def expected(mask: torch.Tensor, terms: Terms, inputs: list[torch.Tensor]) -> dict[str, torch.Tensor]:
    """Every result in float64, by name, of [q, k, v, dout, dlse]."""
    q, k, v, dout, dlse = inputs
    return dict(zip(RESULTS, exact_results(q, k, v, mask, terms, dout, dlse), strict=False))


def check(case: Case, device: str, tiles: TileConfig | None = None) -> None:
    """Forward and backward of a case against float64, with `tiles` instead of the shipped configurations."""
    from gossamer.kernels.triton.block import launch_block as launch

    problem, layout, mask, terms, inputs = make(case, device)
    options: dict[str, Any] = {"tiles": tiles, "limit": case.limit}

    def run(q: torch.Tensor, k: torch.Tensor, v: torch.Tensor, *cotangents: torch.Tensor) -> tuple[torch.Tensor, ...]:
        out, lse = forward(launch, problem, layout, terms, q, k, v, **options)
        return out, lse, *backward(launch, problem, layout, terms, *cotangents, q, k, v, out, lse, **options)

    compare(case, mask, terms, inputs, run(*inputs))
    check_case_unkept(case, mask, terms, inputs, run)


def check_case_unkept(case: Case, mask: torch.Tensor, terms: Terms, inputs: list[torch.Tensor], run: Run) -> None:
    """No result depends on what no kept pair has, where a case has any of that."""
    there = unkept(mask, terms, (case.B, case.H, case.Q), case.G)
    if there.rows.any() or there.keys.any():
        poisons = POISONS if mask.is_cuda else POISONS[:1]  # the interpreter takes long
        check_unkept(run, there, inputs, sinks=terms.sink_logits is not None, poisons=poisons)


def compare(case: Case, mask: torch.Tensor, terms: Terms, inputs: list[torch.Tensor], found: tuple[Any, ...]) -> None:
    """(out, lse, dq, dk, dv), and dsink where there are sinks, against float64."""
    got = dict(zip(RESULTS, found, strict=False))
    limit = 2e-6 if case.dtype == torch.float32 else 2e-3 if case.dtype == torch.float16 else 1.5e-2
    for name, reference in expected(mask, terms, inputs).items():
        value = got.pop(name)
        assert value.shape == reference.shape, name
        finite = torch.isfinite(reference)
        assert torch.equal(torch.isfinite(value), finite), f"{name} is infinite or NaN in other places"
        assert torch.equal(value[~finite].double(), reference[~finite]), name
        error = (value[finite].double() - reference[finite]).norm()
        assert error <= limit * max(float(reference[finite].norm()), 1e-3), (
            f"{name}: error {float(error):.2e} beside {float(reference[finite].norm()):.2e}"
        )
    assert not got
