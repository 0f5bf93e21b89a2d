"""Dilation as a view: the arithmetic of residue classes, and patterns as pieces that are plain inside them."""

from __future__ import annotations

import numpy as np
import pytest
from hypothesis import given, settings
from hypothesis import strategies as st

import gossamer as gs
from gossamer.patterns.grid import Sizes
from gossamer.patterns.pieces import Piece, branch_pieces, pieces
from gossamer.plan.residue import runs

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
