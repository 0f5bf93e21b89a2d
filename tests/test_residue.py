"""Dilation as a view: the arithmetic of classes, patterns as pieces, and attention computed in parts."""

from __future__ import annotations

import math
from dataclasses import replace
from functools import cache
from typing import Any

import numpy as np
import pytest
import torch
from hypothesis import given, settings
from hypothesis import strategies as st
from test_contract import Exact, no_gpu

import gossamer as gs
from gossamer.kernels.contract import reasons
from gossamer.kernels.table import load
from gossamer.layouts.residue import runs
from gossamer.patterns.grid import Sizes
from gossamer.patterns.pieces import Piece, branch_pieces, pieces
from gossamer.testing import inputs, tolerance
from gossamer.testing.cases import Case, square
from gossamer.torch import parts, split

POSITIVE = st.integers(1, 40)


@given(Q=POSITIVE, K=POSITIVE, q_offset=st.integers(-60, 60), dilation=st.integers(1, 20))
def test_runs_hold_every_row_and_key_once(Q: int, K: int, q_offset: int, dilation: int) -> None:
    found = runs(Q, K, q_offset, dilation)
    rows, keys = [], []
    for run in found:
        for n in range(run.classes):
            rows += [(run.row + n + dilation * t, run.first + n, run.q_offset + t) for t in range(run.Q)]
            keys += [(run.first + n + dilation * t, run.first + n, t) for t in range(run.K)]
    assert len(found) <= 4
    assert sorted(rows) == [(r, (r + q_offset) % dilation, (r + q_offset) // dilation) for r in range(Q)]
    assert sorted(keys) == [(j, j % dilation, j // dilation) for j in range(K)]
    assert not (Q == K and q_offset == 0 and Q % dilation == 0) or len(found) == 1


def scattered(found: tuple[Piece, ...], sizes: Sizes, which: int | None = None) -> np.ndarray:
    """How many pieces keep each pair (Q, K); of one class alone where `which` says so."""
    total = np.zeros((sizes.Q, sizes.K), dtype=int)
    for inner, dilation in found:
        for run in runs(*sizes, dilation):
            if not run.Q or not run.K:
                continue
            kept = inner.materialize(run.Q, run.K, run.q_offset)
            for n in range(run.classes):
                if which is None or (run.first + n - which) % dilation == 0:
                    total[run.row + n :: dilation, run.first + n :: dilation] += kept
    return total


DILATED = st.builds(gs.Dilated, st.integers(0, 6), st.integers(0, 4), st.integers(1, 9))
TERM = st.one_of(
    DILATED,
    st.builds(gs.SlidingWindow, st.integers(0, 9), st.integers(0, 3), st.integers(0, 3)),
    st.builds(gs.Longformer, st.integers(0, 9), st.lists(st.integers(0, 19), max_size=2), st.integers(1, 6)),
    st.builds(gs.Strided, st.integers(2, 9), st.integers(0, 9)),
    st.builds(lambda block: gs.Local(block) & gs.Causal(), st.integers(1, 12)),
)


@settings(max_examples=150, deadline=None)
@given(first=TERM, more=st.lists(TERM, max_size=3), Q=POSITIVE, K=st.integers(20, 45), q_offset=st.integers(-9, 30))
def test_pieces_are_disjoint_and_make_the_pattern(
    first: gs.Pattern, more: list[gs.Pattern], Q: int, K: int, q_offset: int
) -> None:
    for term in more:
        first = first | term
    sizes = Sizes(Q, K, q_offset)
    assert (scattered(pieces(first, sizes), sizes) == first.materialize(Q, K, q_offset)).all()


@pytest.mark.parametrize("causal", [True, False])
@pytest.mark.parametrize(
    ("segments", "dilations"), [((8, 16), (1, 2)), ((32, 16, 8), (4, 2, 1)), ((12, 24), (2, 4)), ((24, 24), (2, 6))]
)
def test_branches_are_disjoint_pieces(segments: tuple[int, ...], dilations: tuple[int, ...], causal: bool) -> None:
    pattern = gs.LongNet(segments, dilations, heads=7, causal=causal)
    found = branch_pieces(pattern)
    assert found is not None
    for Q, K, q_offset in ((64, 64, 0), (30, 61, 31), (50, 40, -7)):
        dense = pattern.materialize(Q, K, q_offset)
        for h in range(7):
            assert (scattered(found, Sizes(Q, K, q_offset), h) == dense[0, h]).all()


@pytest.mark.parametrize(("segments", "dilations"), [((30, 64), (1, 4)), ((12, 24), (2, 3)), ((10, 12), (1, 4))])
def test_branches_that_do_not_nest_are_one_pattern(segments: tuple[int, ...], dilations: tuple[int, ...]) -> None:
    assert branch_pieces(gs.LongNet(segments, dilations, heads=2)) is None


def test_longnet_is_its_definition() -> None:
    """arXiv:2307.02486, equations 3 to 7 and section 2.4: rows s, s + r, ... of each segment, s = head mod r."""
    segments, dilations, heads, N = (8, 12, 20), (1, 3, 4), 5, 47
    pattern = gs.LongNet(segments, dilations, heads=heads)
    expected = np.zeros((heads, N, N), dtype=bool)
    for h in range(heads):
        for w, r in zip(segments, dilations, strict=True):
            for start in range(0, N, w):
                members = [p for p in range(start, min(start + w, N)) if (p - start) % r == h % r]
                for i in members:
                    expected[h, i, [j for j in members if j <= i]] = True
    assert (pattern.materialize(N, N)[0] == expected).all()
    layout = pattern.layout(N, N, block_q=32, block_kv=32)
    assert (layout.expand()[0] == expected).all()
    assert pattern.density(N, N) == pytest.approx(expected.mean())
    branch = gs.DilatedSegment(12, 3, 2)
    assert branch.keep(np.array([14, 17]), np.array([17, 20]), 30, 30).tolist() == [True, True]
    for given_, message in (
        (((8,), (1, 2)), "must be as many"), (((), ()), "must be as many"), (((0,), (1,)), "segments"),
        ((8, (1,)), "list of positive"),
    ):  # fmt: skip
        with pytest.raises(ValueError, match=message):
            gs.LongNet(*given_, heads=2)  # type: ignore[arg-type]
    with pytest.raises(ValueError, match="offset must be below"):
        gs.DilatedSegment(8, 2, 2)


def test_heads_as_views() -> None:
    assert split.progressions([0, 2, 4, 5, 9]) == [(0, 3, 2), (5, 2, 4)]
    for group in (1, 2, 4):
        for members in ([0, 1, 2, 3, 4, 5, 6, 7], [0, 2, 4, 6], [1, 2, 3, 7], [4, 5, 6, 7], [0, 1, 4, 5]):
            seen = []
            for h in split.head_runs(members, group):
                assert h.number % h.key_number == 0
                for n in range(h.number):
                    head = h.start + n * h.step
                    assert head // group == h.key_start + n // (h.number // h.key_number) * h.key_step
                    seen.append(head)
            assert sorted(seen) == members
    assert len(split.head_runs([0, 2, 4, 6], 1)) == len(split.head_runs([2, 3, 4, 5], 2)) == 1


# -- attention in parts ---------------------------------------------------------------------------------------------

HEADS = [gs.SlidingWindow(9), gs.Dilated(9, 0, 8), gs.SlidingWindow(3), gs.Dilated(9, 0, 8)]
CASES = (
    square("divides", 160, lambda: gs.Dilated(6, 3, 5), "one"),
    square("one_row_more", 163, lambda: gs.Dilated(30, 0, 7), H=4, G=2),
    square("fewer_queries", 90, lambda: gs.Dilated(12, 2, 7), K=200, B=2, H=4, G=1),
    square("more_queries", 150, lambda: gs.Dilated(12, 0, 8), K=70, B=3, G=1),
    square("negative_positions", 100, lambda: gs.Dilated(9, 4, 6), K=80, q_offset=-31, B=2),
    square("one_query", 1, lambda: gs.Dilated(40, 0, 3), K=199, B=2, H=4, G=2),
    square("few_keys", 40, lambda: gs.Dilated(3, 3, 11), K=7, q_offset=0, B=2, D=8),  # at most one in a class
    square("odd_sizes", 131, lambda: gs.Dilated(9, 0, 4), D=17, E=23, H=3, G=1),
    square("many_batches", 60, lambda: gs.Dilated(9, 0, 3), B=5, H=2, key_lengths=(60, 0, 31, 1, 59)),
    square(
        "terms", 130, lambda: gs.Dilated(20, 0, 4), B=2, H=4, G=2, key_lengths=(130, 61), softcap=3.0,
        sink_logits=True, alibi_slopes=True,
    ),
    square("folded_terms", 130, lambda: gs.Dilated(20, 0, 4), B=2, H=4, G=2, sink_logits=True, alibi_slopes=True),
    square("per_head", 200, lambda: gs.PerHead(HEADS), H=4, B=2),
    square("per_head_grouped", 200, lambda: gs.PerHead(HEADS), H=4, G=2, sink_logits=True),
    square("per_head_one_key_head", 200, lambda: gs.PerHead(HEADS), H=4, G=1, alibi_slopes=True),
    square("longformer", 200, lambda: gs.Longformer(20, (0, 77, 150), 8), B=2),
    square("longformer_sinks", 120, lambda: gs.Longformer(20, (0, 77), 8), K=200, H=4, G=2, sink_logits=True),
    square("strided", 300, lambda: gs.Strided(16, 20)),
    square("several", 220, lambda: gs.Dilated(9, 3, 4) | gs.Dilated(8, 3, 6) | gs.SlidingWindow(5) | gs.Local(20)),
    square("longnet", 256, lambda: gs.LongNet((32, 64, 128), (1, 2, 4), heads=6), H=6, B=2),
    square("longnet_grouped", 256, lambda: gs.LongNet((32, 64, 128), (1, 2, 8), heads=12), H=12, G=3),
    square("longnet_one_key_head", 130, lambda: gs.LongNet((32, 64), (2, 4), heads=8), H=8, G=1, B=2),
    square(
        "longnet_terms", 250, lambda: gs.LongNet((32, 64), (2, 4), heads=3, causal=False), H=3, K=260,
        sink_logits=True, alibi_slopes=True,
    ),
)  # fmt: skip


@pytest.fixture
def always(monkeypatch: pytest.MonkeyPatch) -> list[split.Split]:
    """Parts are taken whatever they cost; the splits that were."""
    cheaper, forward, taken = split._cheaper, parts.forward, []

    def take(found: Any, pattern: Any, p: Any, sizes: Any, cost: Any) -> Any:
        cost.call = lambda *a, **k: math.inf
        return cheaper(found, pattern, p, sizes, cost)

    def run(found: Any, *rest: Any) -> Any:
        taken.append(found)
        return forward(found, *rest)

    monkeypatch.setattr(split, "_cheaper", take)
    monkeypatch.setattr(split, "_classes_cost", lambda *a: 0.0)
    monkeypatch.setattr(parts, "forward", run)
    monkeypatch.setattr(split, "_known", split._known.copy())
    split._known.clear()
    monkeypatch.setattr(parts, "split_for", lambda plan, terms, handle: parts_of(plan, terms, handle))
    return taken


def parts_of(plan: Any, terms: Any, handle: int) -> Any:
    """What `parts.split_for` finds, forgotten by the plan."""
    plan.splits.clear()
    try:
        return SPLIT_FOR(plan, terms, handle)
    finally:
        plan.splits.clear()


SPLIT_FOR = parts.split_for


@cache
def exact_of(case: Case, dtype: str, device: str) -> Exact:
    return Exact(case, dtype, device)


def parameters() -> list[Any]:
    found = [("blocked", "cpu", "float64"), ("blocked", "cpu", "float32")]
    gpu = [("triton", "cuda", "bfloat16"), ("hopper", "cuda", "bfloat16"), ("blocked", "cuda", "float32")]
    return [pytest.param(*x, id="-".join(x)) for x in found] + [
        pytest.param(*x, id="-".join(x), marks=[pytest.mark.gpu, no_gpu]) for x in gpu
    ]


def run(e: Exact, name: str, leaves: list[torch.Tensor], backward: bool) -> list[torch.Tensor]:
    case, t = e.case, e.terms
    sink = leaves[3] if len(leaves) > 3 else None
    with torch.set_grad_enabled(backward):
        out, lse = gs.attention(
            *leaves[:3], e.pattern, q_offset=case.q_offset, key_lengths=t.key_lengths, softcap=t.softcap,
            sink_logits=sink, alibi_slopes=t.alibi_slopes, return_lse=True, implementation=name,
        )  # fmt: skip
        if not backward:
            return [out, lse]
        loss = (out * e.dout).sum() + (torch.where(lse.isinf(), 0.0, lse) * e.dlse).sum()
        return [out.detach(), lse.detach(), *torch.autograd.grad(loss, leaves)]


def refused(name: str, e: Exact, backward: bool) -> list[str]:
    implementation = load(name)
    assert not isinstance(implementation, str), implementation
    return reasons(inputs.problem_of(e.case, e.dtype, e.device, backward=backward), implementation.capability)


@pytest.mark.parametrize("case", CASES, ids=str)
@pytest.mark.parametrize(("name", "device", "dtype"), parameters())
def test_parts_are_exact(
    name: str, device: str, dtype: str, case: Case, poison: None, always: list[split.Split]
) -> None:
    """Every number of a call in parts, from inputs that NaN surrounds."""
    e = exact_of(case, dtype, device)
    backward = not refused(name, e, True)
    if refused(name, e, False):
        with pytest.raises(gs.Unsupported):
            run(e, name, e.leaves, False)
        return
    leaves = [*(surrounded(x) for x in e.leaves[:3]), *e.leaves[3:]]
    found = run(e, name, leaves, backward)
    assert always, "computed as one"
    if "one" in case.tags:
        assert len(always[0].parts) == 1
    for what, actual, exact, low in zip(("out", "lse", "dq", "dk", "dv", "dsink"), found, e.exact, e.low, strict=False):
        assert actual.shape == exact.shape and actual.is_contiguous()
        tolerance.check(what, actual, exact, low)
    empty = e.exact[1] == -torch.inf
    assert (found[0][empty] == 0).all() and (found[1][empty] == -torch.inf).all()
    again = run(e, name, leaves, backward)
    assert all(torch.equal(a, b) for a, b in zip(found, again, strict=True))


@pytest.mark.parametrize("name", ["longformer", "several", "longnet", "per_head_one_key_head", "odd_sizes"])
def test_parts_of_kernels_that_write_16_bits_alone(
    name: str, always: list[split.Split], monkeypatch: pytest.MonkeyPatch
) -> None:
    """As those of Hopper do: results go through tensors of the inputs' type where they are joined in float32."""
    blocked = load("blocked")
    assert not isinstance(blocked, str)
    kind = type(blocked)
    monkeypatch.setattr(kind, "capability", replace(blocked.capability, float32_results=False))

    def narrow(original: Any, written: int) -> Any:
        def run(self: Any, *given: Any, into: Any) -> Any:
            assert all(x.dtype == torch.bfloat16 for x in into[:written])
            return original(self, *given, into=into)

        return run

    monkeypatch.setattr(kind, "forward", narrow(kind.forward, 1))
    monkeypatch.setattr(kind, "backward", narrow(kind.backward, 3))
    test_parts_are_exact("blocked", "cpu", "bfloat16", next(c for c in CASES if c.name == name), None, always)


def surrounded(x: torch.Tensor) -> torch.Tensor:
    """The same values, NaN before and after each head, the last rows those of the allocation."""
    B, heads, N, size = x.shape
    room = torch.full((B * heads * (N + 3), size), math.nan, dtype=x.dtype, device=x.device)
    view = room.view(B, heads, N + 3, size)[:, :, 3:]
    with torch.no_grad():
        view.copy_(x)
    return view.requires_grad_()


def test_calls_are_few(always: list[split.Split]) -> None:
    """All classes of equal size in one call, of every batch element where these lie at one stride."""
    seen = []
    blocked = load("blocked")
    assert not isinstance(blocked, str)
    original = type(blocked).forward

    def forward(self: Any, problem: Any, *rest: Any, **more: Any) -> Any:
        seen.append((problem.B, problem.H, problem.Q))
        return original(self, problem, *rest, **more)

    with pytest.MonkeyPatch.context() as patch:
        patch.setattr(type(blocked), "forward", forward)
        x = torch.randn(3, 2, 130, 8)
        gs.attention(x, x, x, gs.Dilated(5, 0, 4), implementation="blocked")
        assert seen == [(2, 6, 33), (2, 6, 32)]
        seen.clear()
        y = torch.randn(3, 130, 2, 8).transpose(1, 2)
        gs.attention(y, y, y, gs.Dilated(5, 0, 4), implementation="blocked")
        assert seen == [(3, 2, 33)] * 2 + [(3, 2, 32)] * 2  # the two classes of a run are fewer than the batch


def test_no_class_that_has_queries_and_keys() -> None:
    q, k = torch.randn(2, 1, 8, requires_grad=True), torch.randn(2, 3, 8)
    out, lse = gs.attention(q, k, k, gs.Dilated(4, 6, 7), q_offset=33, return_lse=True)
    assert not out.any() and (lse == -torch.inf).all() and not torch.autograd.grad(out.sum(), q)[0].any()


def test_the_cheaper_way_is_taken_and_told() -> None:
    x = torch.randn(1, 2, 4096, 16)
    told = gs.explain(x, x, x, gs.Dilated(15, 0, 16))
    assert len(told.parts) == 1 and "16 views of plain windows" in told.parts[0]
    assert "16 views of plain windows" in str(told)
    plain = gs.explain(x, x, x, gs.SlidingWindow(15))
    assert not plain.parts
    assert told.useful_flops == pytest.approx(gs.Dilated(15, 0, 16).density(4096, 4096) * 4096**2 * 2 * 64)
    assert told.executed_flops < 1.05 * plain.executed_flops
    small = torch.randn(1, 2, 64, 16)
    assert not gs.explain(small, small, small, gs.Dilated(15, 0, 16)).parts
    assert not gs.explain(x, x, x, gs.Dilated(15, 0, 16), implementation="reference").parts
    heads = gs.explain(x, x, x, gs.PerHead([gs.SlidingWindow(63), gs.Dilated(31, 0, 64)]))
    assert len(heads.parts) == 2 and heads.useful_flops == pytest.approx(heads.density * 4096**2 * 2 * 64)


def test_longest_part_first() -> None:
    x = torch.randn(1, 3, 8192, 16)
    pattern = gs.PerHead([gs.Dilated(15, 0, 64), gs.Dilated(255, 0, 16), gs.SlidingWindow(63)])
    told = gs.explain(x, x, x, pattern)
    assert "left=255" in told.parts[0] and len(told.parts) == 3


# -- merge ----------------------------------------------------------------------------------------------------------


def counted(q: torch.Tensor, k: torch.Tensor, v: torch.Tensor, count: torch.Tensor) -> tuple[torch.Tensor, ...]:
    """Softmax in which key j counts count[..., i, j] times in row i."""
    s = (q @ k.mT) * q.shape[-1] ** -0.5
    weight = count * torch.exp(s)
    total = weight.sum(-1)
    return weight @ v / total.clamp(min=1e-300)[..., None], torch.log(total)


def test_merge_by_lse_counts_a_key_for_each_branch() -> None:
    pattern = gs.LongNet((8, 16, 48), (1, 2, 3), heads=3)
    leaves = [torch.randn(2, 3, 48, 4, dtype=torch.float64, requires_grad=True) for _ in range(3)]
    count = sum(torch.from_numpy(b.materialize(48, 48)) * 1.0 for b in pattern.branches())
    assert float(count.max()) > 1
    found = gs.attention(*leaves, pattern, merge="lse", return_lse=True)
    exact = counted(*leaves, count)
    douts = [torch.randn_like(x) for x in exact]
    pairs = []
    for results in (found, exact):
        pairs.append([*results, *torch.autograd.grad(list(results), leaves, douts)])
    for actual, wanted in zip(*pairs, strict=True):
        torch.testing.assert_close(actual, wanted, rtol=1e-9, atol=1e-9)


def test_merge_of_unions_and_its_errors() -> None:
    x = torch.randn(1, 2, 40, 8)
    union = gs.SlidingWindow(3) | gs.Dilated(3, 0, 4) | gs.SlidingWindow(1)
    sinks = torch.randn(2)
    out, lse = gs.attention(x, x, x, union, merge="lse", return_lse=True, sink_logits=sinks)
    ones = [gs.SlidingWindow(3), gs.Dilated(3, 0, 4), gs.SlidingWindow(1)]
    results = [
        gs.attention(x, x, x, p, return_lse=True, sink_logits=s) for p, s in zip(ones, (sinks, None, None), strict=True)
    ]
    again = gs.merge([r[0] for r in results], [r[1] for r in results])
    torch.testing.assert_close((out, lse), again)
    with pytest.raises(ValueError, match="must be a union"):
        gs.attention(x, x, x, gs.SlidingWindow(3), merge="lse")
    with pytest.raises(ValueError, match="merge must be"):
        gs.attention(x, x, x, union, merge="sum")
    with pytest.raises(ValueError, match="as many"):
        gs.merge([out], [])
    with pytest.raises(ValueError, match="of one shape"):
        gs.merge([out, out[:, :1]], [lse, lse])


def test_merge_gradient_with_rows_that_keep_nothing() -> None:
    outs = [torch.randn(2, 5, 3, dtype=torch.float64, requires_grad=True) for _ in range(3)]
    lses = [torch.randn(2, 5, dtype=torch.float64) for _ in range(3)]
    lses[1][0, 0] = lses[2][1, 1] = -torch.inf
    for x in lses:
        x[0, 3] = -torch.inf
        x.requires_grad_()
    out, lse = gs.merge(outs, lses)
    assert lse[0, 3] == -torch.inf and (out[0, 3] == 0).all()
    finite = [torch.randn(2, 5, dtype=torch.float64, requires_grad=True) for _ in range(3)]
    assert torch.autograd.gradcheck(lambda *x: gs.merge(x[:3], x[3:]), (*outs, *finite))
    grads = torch.autograd.grad((out.sum(), torch.where(lse.isinf(), 0.0, lse).sum()), (*outs, *lses))
    assert all(bool(g.isfinite().all()) for g in grads)
