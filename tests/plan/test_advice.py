"""What `explain` says of the ways to compute a call, by plans of a GPU that is not there."""

from __future__ import annotations

from dataclasses import replace
from typing import Any

import pytest
import torch

import gossamer as gs
from gossamer.plan import advice
from gossamer.plan.capability import reasons
from gossamer.plan.plan import Plan, refusals
from gossamer.plan.problem import Problem
from gossamer.plan.table import load
from gossamer.testing.graphs import random_graph

pytest.importorskip("triton")

PROBLEM = Problem(1, 8, 8, 4096, 4096, 128, 128, "bfloat16", "cuda", sm=90, processors=132)


@pytest.fixture(autouse=True)
def gpu(monkeypatch: pytest.MonkeyPatch) -> None:
    """Kernels of a GPU, which nothing launches."""
    for name in ("hopper", "triton"):
        monkeypatch.setattr(type(load(name)), "unavailable", lambda self: [])


def planned(problem: Problem) -> Plan:
    able = [load(name) for name in ("hopper", "triton") if not refusals(name, problem)]
    return Plan(problem, tuple(able), ())  # type: ignore[arg-type]


def advised(problem: Problem, pattern: gs.Pattern | None, **more: Any) -> tuple[str, ...]:
    given = {"fill": 1.0, "planned_again": ()} | more
    return advice.advice(planned(problem), pattern, 0, **given)


def test_the_ways_of_a_call_by_their_time() -> None:
    found = advice.ways(planned(PROBLEM), gs.BigBird(64), 0)
    times = [cost for _, cost in found]
    assert found[0][0] == "hopper 64 x 64" and times == sorted(times) and len(found) == 4
    assert [way for way, _ in advice.ways(planned(PROBLEM), gs.Causal(), 0)] == ["hopper 128 x 128"]


def test_seconds_of_an_h200() -> None:
    """Measured at 4096 positions: 51 us of causal attention, 105 of all pairs."""
    call = planned(PROBLEM)
    assert advice.least(call, advice.ways(call, gs.Causal(), 0)) == pytest.approx(51e-6, rel=0.35)
    assert advice.all_pairs(call) == pytest.approx(105e-6, rel=0.3)
    for other in ({"sm": 80}, {"dtype": "float32"}, {"E": 257}):
        assert advice.all_pairs(planned(replace(PROBLEM, **other))) is None


@pytest.mark.parametrize("q_offset", [None, -3, 0, 40, 98, 99, 10**6])
@pytest.mark.parametrize(
    "pattern",
    [
        gs.Dense(), gs.Causal(), gs.SlidingWindow(5, 1), gs.SlidingWindow(5, sinks=3), gs.SlidingWindow(5, 2, sinks=3),
        gs.Dilated(3, 0, 4), gs.Dilated(3, 1, 4), ~gs.Causal(), gs.Causal() & ~gs.Local(16), gs.BigBird(8, causal=True),
        gs.PerHead([gs.Causal(), gs.Local(1)]), gs.PerHead([gs.Causal(), gs.Local(2)]),
        gs.CSR.from_edge_index([[0, 0], [1, 99]], 100), gs.CSR.from_edge_index([[99], [0]], 100),
    ],
    ids=str,
)  # fmt: skip
def test_what_is_causal(pattern: gs.Pattern, q_offset: int | None) -> None:
    """No kept key behind its query; where no key is behind any, Dense() is what it is compared with."""
    for Q in (100, *(37, 1) * pattern.reads_positions):
        offset = 100 - Q if q_offset is None else q_offset
        behind = ~gs.Causal().materialize(Q, 100, offset)
        want = bool(behind.any()) and not bool((pattern.materialize(Q, 100, offset) & behind).any())
        assert advice.is_causal(pattern, Q, 100, offset) == want


def test_what_dense_attention_executes() -> None:
    call, stats = planned(PROBLEM), gs.Causal().layout(4096, 4096, block_q=128, block_kv=128).stats
    assert advice.executed_by_dense(call, False, 0) == 4096**2
    assert advice.executed_by_dense(call, True, 0) == stats.executed_pairs
    assert advice.all_pairs(call, True, 0) == pytest.approx(51e-6, rel=0.35)


def test_the_verdict() -> None:
    """It opens what is printed: times where they were measured, else pairs; then a reason for each other one."""
    q = torch.zeros(1, 2, 256, 16)
    found = gs.explain(q, q, q, gs.SlidingWindow(31))
    first, *lines = str(found).splitlines()
    tiles, kept = gs.SlidingWindow(31).layout(256, 256, block_q=64, block_kv=64).stats, 256 * 32 - 31 * 16
    want = (
        f"This call runs on blocked: it executes {tiles.executed_pairs:,.0f} of the 65,536 pairs of a head, "
        f"to keep {kept:,}; dense attention, Causal(), would execute 40,960. "
        f"By counted work it takes about {found.of_dense:.2g} of the time of that. "
        "Seconds were not measured for float32 on this cpu."
    )
    assert found.of_dense is not None and 0.4 < found.of_dense < 28672 / 40960 + 0.1
    assert first == found.verdict == want
    assert lines[: len(found.reasons) + 1] == [*found.refused, ""]
    assert found.refused[-1] == "not reference: comes after the one chosen"
    assert replace(found, reasons={"a": ["x", "y", "z"]}).refused == ["not a: x (and 2 more in `reasons`)"]
    measured = replace(found, measured=True, seconds=26e-6, dense_seconds=51e-6)
    text = "This call runs on blocked, in about 26 us; dense attention, Causal(), would take about 51 us."
    assert measured.verdict == text
    assert replace(measured, backward="triton", backward_seconds=2e-3).verdict == (
        "This call runs on blocked, forward in about 26 us, backward on triton in about 2 ms; "
        "dense attention, Causal(), would take about 51 us forward."
    )
    keeps = replace(measured, backward="hopper", backward_bytes=2**30)
    assert ("backward by", "hopper, keeps dS for dQ: 1,024 MiB") in keeps.rows()
    parts = replace(measured, seconds=None, estimates=(3e-3, 9e-3))
    assert "in about 3 ms; dense" in parts.verdict and ("estimated", "3 ms in parts, 9 ms as one call") in parts.rows()
    assert ("counted", "in parts: 1.00, as one call: 3.00") in replace(parts, measured=False).rows()
    assert " us" not in replace(parts, measured=False).verdict
    x = torch.zeros(4, 2, 512, 32)
    parts = gs.explain(x, x, x, gs.Dilated(31, 0, 8))
    assert parts.estimates is not None and parts.of_dense is not None and 0.2 < parts.of_dense < 1
    graph = gs.CSR.from_edge_index([[0], [1]], 256)  # causal as it is given, not in the order that is computed
    assert "Causal()" in gs.explain(q, q, q, graph).verdict
    assert "Dense(), would execute 65,536." in gs.explain(q, q, q, graph.reordered()).verdict


def test_few_queries_of_many_keys_are_cut() -> None:
    """A decoding step has few pairs, but one program of `small` would walk all its keys."""
    small = load("small")
    assert not isinstance(small, str)
    step = replace(PROBLEM, Q=1, K=20000, H=32)
    assert reasons(step, small.capability) == ["walks every row from end to end: 20,000 positions are over 512"]
    assert not reasons(replace(step, K=500), small.capability)
    backward = replace(PROBLEM, B=1, H=1, G=1, Q=600, K=26, backward=True)
    assert reasons(backward, small.capability) == ["walks every row from end to end: 600 positions are over 256"]
    assert not reasons(replace(backward, backward=False), small.capability)


def test_what_would_be_faster() -> None:
    assert advised(PROBLEM, gs.Causal()) == ()
    (slopes,) = advised(replace(PROBLEM, score_terms=frozenset({"alibi_slopes", "softcap"})), gs.Causal())
    assert slopes.startswith("without alibi_slopes it would take about") and slopes.endswith("by hopper 128 x 128")
    (short,) = advised(replace(PROBLEM, dtype="float32"), gs.Causal())
    assert short.startswith("in bfloat16 it would take about")
    graph = random_graph(4096, 8)
    (sparse,) = advised(PROBLEM, graph, fill=7.96)
    assert sparse.startswith("8.0 pairs are executed for each that is kept; CSR.reordered()")
    assert advised(PROBLEM, None, planned_again=["q_offset is a tensor"]) == (
        "repetitions are looked at again on the host: q_offset is a tensor",
    )


@pytest.mark.parametrize("terms", [{"softcap": 30.0}, {"alibi_slopes": torch.ones(2)}, {"sink_logits": torch.ones(2)}])
def test_terms_that_cost_a_cpu_its_fused_attention(terms: dict[str, Any]) -> None:
    q = torch.zeros(1, 2, 256, 16)
    said = gs.explain(q, q, q, gs.Causal(), **terms).faster
    (term,) = terms
    assert [text for text in said if text.startswith(f"without {term} fused attention computes it")] == list(said)
    assert bool(said) == (term != "sink_logits")


def test_what_a_call_is_planned_again_for() -> None:
    q = torch.zeros(1, 2, 40, 8)
    known = gs.explain(q, q, q, gs.Causal())
    assert known.faster == () and known.seconds is None
    given = q, q, q, torch.ones(40, 40, dtype=torch.bool)
    (found,) = gs.explain(*given).faster
    assert "pattern is a tensor" in found and ("faster", found) in gs.explain(*given).rows()


@pytest.mark.parametrize(
    ("pattern", "N", "want"),
    [
        # Measured on an H200, H 8, D 128: the fastest, or one within a fifth of it (docs/lab/2026-11-22-host-time.md,
        # docs/lab/2026-11-22-measured-costs.md).
        (gs.BigBird(16, random_blocks=8), 2048, {"hopper 128 x 128"}),
        (gs.BigBird(64, random_blocks=1), 4096, {"hopper 64 x 64"}),
        (random_graph(2048, 20), 2048, {"triton gather 1"}),
        (random_graph(1024, 102), 1024, {"hopper 64 x 64"}),
        (gs.SlidingWindow(54), 512, {"hopper 64 x 64", "triton 64 x 64"}),
    ],
    ids=lambda x: str(x)[:40] if isinstance(x, gs.Pattern) else None,
)
def test_small_problems_take_what_was_measured_to_be_fast(pattern: gs.Pattern, N: int, want: set[str]) -> None:
    assert advice.ways(planned(replace(PROBLEM, Q=N, K=N)), pattern, 0)[0][0] in want
