"""Patterns against their definitions, written here independently: plain loops over pairs of positions."""

from __future__ import annotations

import copy
import itertools
import pickle
import time
import tracemalloc
from dataclasses import dataclass

import numpy as np
import pytest
import scipy.sparse
from hypothesis import given, settings
from hypothesis import strategies as st

import gossamer as gs
from gossamer.layouts import build_gather
from gossamer.patterns.grid import Grid, Sizes

SIZES = [(17, 17), (40, 40), (9, 40), (40, 9), (1, 33), (33, 1)]


def matrix(Q, K, kept, q_offset=None):
    """The dense matrix of a definition over positions, by a double loop."""
    offset = K - Q if q_offset is None else q_offset
    return np.array([[bool(kept(r + offset, j)) for j in range(K)] for r in range(Q)])


DEFINITIONS = {
    "dense": (gs.Dense(), lambda i, j, K: True),
    "causal": (gs.Causal(), lambda i, j, K: j <= i),
    "window": (gs.SlidingWindow(5), lambda i, j, K: i - 5 <= j <= i),
    "window both": (gs.SlidingWindow(5, 3), lambda i, j, K: i - 5 <= j <= i + 3),
    "window 0": (gs.SlidingWindow(0), lambda i, j, K: i == j),
    "unbounded left": (gs.SlidingWindow(None, 2), lambda i, j, K: j <= i + 2),
    "unbounded": (gs.SlidingWindow(None, None), lambda i, j, K: True),
    "causal sinks": (gs.SlidingWindow(4, 0, 3), lambda i, j, K: j <= i and (j >= i - 4 or j < 3)),
    "sinks": (gs.SlidingWindow(4, 1, 3), lambda i, j, K: i - 4 <= j <= i + 1 or j < 3),
    "strictly causal": (gs.SlidingWindow(None, -1), lambda i, j, K: j < i),
    "before": (gs.SlidingWindow(9, -3), lambda i, j, K: i - 9 <= j <= i - 3),
    "behind": (gs.SlidingWindow(-2, 7), lambda i, j, K: i + 2 <= j <= i + 7),
    "behind, unbounded": (gs.SlidingWindow(-2, None), lambda i, j, K: i + 2 <= j),
    "no key": (gs.SlidingWindow(2, -3), lambda i, j, K: False),
    "far behind": (gs.SlidingWindow(1 - 2**31, 2**31 - 1), lambda i, j, K: i + 2**31 - 1 <= j),
    "strictly causal sinks": (gs.SlidingWindow(5, -2, 3), lambda i, j, K: i - 5 <= j <= i - 2 or (j < 3 and j <= i)),
    "sinks behind": (gs.SlidingWindow(-2, 4, 3), lambda i, j, K: i + 2 <= j <= i + 4 or j < 3),
    "unbounded sinks": (gs.SlidingWindow(None, None, 3), lambda i, j, K: True),
    "local": (gs.Local(6), lambda i, j, K: i // 6 == j // 6),
    "segment": (gs.DilatedSegment(12, 3, 2), lambda i, j, K: i // 12 == j // 12 and i % 12 % 3 == j % 12 % 3 == 2),
    "longformer": (gs.Longformer(7, (0, 5)), lambda i, j, K: abs(i - j) <= 3 or i in (0, 5) or j in (0, 5)),
    "longformer dilated": (gs.Longformer(6, (), 3), lambda i, j, K: abs(i - j) <= 9 and (i - j) % 3 == 0),
    "dilated": (gs.Dilated(4, 2, 3), lambda i, j, K: any(j == i - m * 3 for m in range(-2, 5))),
    "strided": (gs.Strided(5, 2), lambda i, j, K: i >= j and (i - j <= 2 or (i - j) % 5 == 0)),
    "powers": (gs.PowerStrided(), lambda i, j, K: i == j or any(i - j == 2**m for m in range(9))),
    "powers of 3": (gs.PowerStrided(3, 2), lambda i, j, K: i - j in (0, 1, 2, 3, 9, 27)),
    "predicate": (gs.Predicate(lambda i, j: (i + 2 * j) % 3 == 0), lambda i, j, K: (i + 2 * j) % 3 == 0),
    "and": (gs.SlidingWindow(9) & gs.Strided(4, 0), lambda i, j, K: 0 <= i - j <= 9 and (i - j) % 4 == 0),
    "or": (gs.SlidingWindow(2) | gs.Dilated(3, 0, 5), lambda i, j, K: i - j in (0, 1, 2, 5, 10, 15)),
    "not": (~gs.Causal(), lambda i, j, K: j > i),
}

# Defined in tests of their own, by sizes, batch elements or heads.
APART = {"BigBird", "BlockMask", "CSR", "Document", "LongNet", "Neighborhood", "PerBatch", "PerHead", "Tree"}


def test_every_pattern_has_a_definition():
    defined = {type(pattern).__name__ for pattern, _ in DEFINITIONS.values()}
    assert defined | APART >= set(gs.patterns.__all__) - {"Pattern"}


@pytest.mark.parametrize("name", DEFINITIONS)
@pytest.mark.parametrize(("Q", "K"), SIZES)
def test_pattern_is_its_definition(name, Q, K):
    pattern, kept = DEFINITIONS[name]
    if isinstance(pattern, gs.Longformer) and pattern.global_tokens and max(pattern.global_tokens) >= K:
        with pytest.raises(ValueError, match="global_tokens"):
            pattern.materialize(Q, K)
        return
    for q_offset in (None, 3, -4):
        expected = matrix(Q, K, lambda i, j: kept(i, j, K), q_offset)
        assert (pattern.materialize(Q, K, q_offset) == expected).all()
        assert pattern.density(Q, K, q_offset) == pytest.approx(expected.mean(), abs=1e-12)


def test_keep_broadcasts_and_knows_no_keys_outside():
    i, j = np.arange(4)[:, None], np.arange(-2, 8)[None, :]
    kept = gs.Dense().keep(i, j, 4, 5)
    assert kept.shape == (4, 10)
    assert (kept == ((j >= 0) & (j < 5))).all()
    assert gs.Causal().keep(2, 1, 4, 4).shape == ()
    with pytest.raises(ValueError, match="integer positions"):
        gs.Causal().keep(np.array([0.5]), np.array([1]), 4, 4)


def test_negative_positions_never_wrap():
    # Q > K: the first rows have negative positions, and none of the indexed patterns may read from the end.
    ids = np.array([0, 0, 1, 1])
    assert not gs.Document(ids).materialize(8, 4)[:4].any()
    assert not gs.Longformer(0, (3,)).materialize(8, 4)[0, :3].any()
    assert not gs.Local(2).materialize(8, 4)[:4].any()


# -- block patterns ----------------------------------------------------------------------------------------------


def test_block_mask_counts_rows_and_keys_from_zero():
    mask = np.array([[1, 0, 0], [0, 1, 1]], dtype=bool)
    expected = np.kron(mask, np.ones((4, 4), dtype=bool))[:7, :10]
    for q_offset in (None, 0, 5):
        assert (gs.BlockMask(mask, 4).materialize(7, 10, q_offset) == expected).all()
    per_head = gs.BlockMask(np.stack([mask, ~mask]), 4)
    assert per_head.lead == (1, 2)
    assert (per_head.materialize(8, 12)[0, 1] == np.kron(~mask, np.ones((4, 4), dtype=bool))).all()
    assert per_head.mask.shape == (2, 2, 3)
    assert per_head.block == 4


def big_bird_blocks(n, window, g, random, causal):
    """(must, may) block matrices: what every draw keeps, and where the random blocks of a row may lie."""
    must, may = np.zeros((n, n), dtype=bool), np.zeros((n, n), dtype=bool)
    for row in range(n):
        for column in range(n):
            is_global = row < g or row >= n - g or column < g or column >= n - g
            must[row, column] = is_global or abs(row - column) <= window // 2
            may[row, column] = not must[row, column] and (not causal or column <= row - 2)
    return must, may


@pytest.mark.parametrize("causal", [False, True])
@pytest.mark.parametrize(("block", "window", "g", "random"), [(4, 3, 1, 3), (4, 1, 0, 2), (3, 5, 2, 1), (8, 3, 1, 0)])
@pytest.mark.parametrize("N", [4, 30, 64, 101])
def test_big_bird(block, window, g, random, causal, N):
    pattern = gs.BigBird(block, window, g, random, seed=5, causal=causal)
    dense = pattern.materialize(N, N)
    if causal:
        lower = np.tril(np.ones((N, N), dtype=bool))
        assert not (dense & ~lower).any()
        dense = dense | ~lower
    n = -(-N // block)
    edges = np.arange(0, N, block)
    every = np.logical_and.reduceat(np.logical_and.reduceat(dense, edges, axis=0), edges, axis=1)
    some = np.logical_or.reduceat(
        np.logical_or.reduceat(dense & np.tril(dense) if causal else dense, edges, 0), edges, 1
    )
    must, may = big_bird_blocks(n, window, g, random, causal)
    if causal:
        must &= np.tril(np.ones((n, n), dtype=bool))
        some &= np.tril(np.ones((n, n), dtype=bool))
        every = every & np.tril(np.ones((n, n), dtype=bool))
    assert (every == some).all(), "blocks are whole"
    assert not (must & ~some).any(), "global and window blocks are kept"
    drawn = some & ~must
    assert not (drawn & ~may).any(), "random blocks lie where they may"
    middle = np.arange(n)[g : max(g, n - g)]
    assert (drawn.sum(1)[middle] == np.minimum(random, may.sum(1)[middle])).all()
    others = np.setdiff1d(np.arange(n), middle)
    assert not drawn[others].any()


def test_big_bird_draws_differ_by_row_and_seed_and_cover_all_candidates():
    first = gs.BigBird(1, 1, 0, 2, seed=0).materialize(40, 40)
    assert (first == gs.BigBird(1, 1, 0, 2, seed=0).materialize(40, 40)).all()
    assert (first != gs.BigBird(1, 1, 0, 2, seed=1).materialize(40, 40)).any()
    seen = sum(gs.BigBird(1, 1, 0, 2, seed=s).materialize(12, 12).astype(int) for s in range(400))
    off_diagonal = seen[~np.eye(12, dtype=bool)]
    # 2 of 11 candidates: 400 * 2 / 11 = 73 times each, standard deviation 7.7
    assert off_diagonal.min() > 73 - 5 * 7.7
    assert off_diagonal.max() < 73 + 5 * 7.7


def test_big_bird_draws_what_it_always_drew():
    """A model was trained with the blocks of its seed."""
    drawn = {1: (5, 7, 8), 2: (7, 9, 10), 3: (6, 7, 8), 4: (1, 2, 7), 5: (2, 3, 9), 6: (1, 8, 10), 10: (5, 6, 7)}
    dense = gs.BigBird(1).materialize(12, 12)
    for row, blocks in drawn.items():
        assert set(np.flatnonzero(dense[row]).tolist()) == {0, row - 1, row, row + 1, 11, *blocks}
    # Some rows have fewer blocks than are to be drawn.
    causal = gs.BigBird(1, 1, 0, 6, seed=2, causal=True).materialize(12, 12)
    for row, blocks in {7: range(6), 8: range(1, 7), 9: (0, 1, 2, 3, 4, 7), 10: (0, 3, 4, 5, 7, 8)}.items():
        assert set(np.flatnonzero(causal[row]).tolist()) == {row, *blocks}


def test_more_random_blocks_than_there_are_take_no_longer():
    begin = time.perf_counter()
    assert gs.BigBird(1, random_blocks=100_000).materialize(6, 6).all()
    assert gs.BigBird(1, random_blocks=2**31 - 1).density(1500, 1500) == 1.0
    assert time.perf_counter() - begin < 5


def test_equal_heads_are_counted_once():
    """LongNet's heads are alike where they are equal modulo every dilation, in compositions too."""
    begin = time.perf_counter()
    many, few = (gs.LongNet((24, 48), (2, 3), heads=heads) for heads in (10**6 + 1, 6))
    each = [few.at(0, h).density(48, 48) for h in range(6)]
    expected = (sum(each) * (10**6 // 6) + sum(each[: 10**6 % 6 + 1])) / (10**6 + 1)
    assert many.density(48, 48) == pytest.approx(expected, rel=1e-12)
    batch = gs.PerBatch([gs.Causal(), gs.Local(5)])
    for combined in (~many, many & gs.Causal(), gs.LongNet((48,), (5,), heads=10**6 + 1) | many, many & batch):
        parts, which = combined.distinct()
        assert which.shape == combined.lead and len(parts) <= 60
        for b, h in ((0, 0), (combined.lead[0] - 1, 7), (0, 10**6), (combined.lead[0] - 1, 123_457)):
            assert parts[which[b, h]] == combined.at(b, h)
    assert time.perf_counter() - begin < 5


def test_big_bird_needs_square():
    with pytest.raises(ValueError, match="as many queries as keys"):
        gs.BigBird().materialize(64, 128)


# -- documents, lists, heads -----------------------------------------------------------------------------------------


def along_an_axis(p, n, before, after, border):
    """The keys that a query at p sees on an axis of n points: NATTEN's windows keep their length at the edges."""
    if border == "cut":
        return range(max(p - before, 0), min(p + after, n - 1) + 1)
    start, window = p - before, before + after + 1
    while start < 0:
        start += 1
    while start + window > n:
        start -= 1
    return range(start, start + window)


BOTH = [(b, c) for b in (False, True) for c in (False, True)]
NEIGHBORHOODS = [
    ((37,), (4,), "cut"),
    ((5, 8), ((1, 2), (3, 0)), "cut"),
    ((3, 4, 5), (1, 2, (0, 1)), "cut"),
    ((2, 1, 3, 4), (9, 0, 1, (2, 1)), "cut"),
    ((37,), (4,), "shift"),
    ((9,), (4,), "shift"),  # a window as long as the axis: all see all
    ((40,), ((5, 4),), "shift"),  # kernel_size=10 of NATTEN
    ((5, 8), (1, 3), "shift"),
    ((8, 5), (3, 2), "shift"),
    ((7, 9), ((3, 2), (1, 4)), "shift"),
    ((6, 5, 7), ((3, 0), 1, 2), "shift"),  # to one side: moved like any other
    ((6, 5, 7), (2, (0, 2), (1, 0)), "shift"),
    ((6, 5, 7), (3, 1, (2, 1)), "shift", (True, False, False)),  # is_causal of NATTEN, which cuts that axis
    ((6, 5, 7), ((3, 0), 1, 9), ["shift", "cut", "shift"], [False, True, np.True_]),
    ((9, 4), (3, (20, 0)), "cut", True),
    ((6, 5, 7), ((3, 0), 1, (0, 2)), ("shift", "cut", "shift")),
    ((5, 1, 3, 6), (2, 0, 1, (2, 3)), "shift"),
    ((3, 3, 3, 3), (1, 1, 1, 1), ["cut", "shift", "cut", "shift"]),
]


@pytest.mark.parametrize(("shape", "reach", "border", "causal"), [(*x, False)[:4] for x in NEIGHBORHOODS])
def test_neighborhood(shape, reach, border, causal):
    """A box around each point, by listing coordinates; positions outside the grid see nothing."""
    pattern, K = gs.Neighborhood(shape, reach, border=border, causal=causal), int(np.prod(shape))
    causes = [causal] * len(shape) if isinstance(causal, bool) else causal
    sides = [side if isinstance(side, tuple) else (side, side) for side in reach]
    sides = [(before, 0 if cause else after) for (before, after), cause in zip(sides, causes, strict=True)]
    each = [border] * len(shape) if isinstance(border, str) else border
    each = ["cut" if cause else how for how, cause in zip(each, causes, strict=True)]
    points = list(np.ndindex(*shape))

    def kept(i, j):
        if not 0 <= i < K:
            return False
        axes = zip(points[i], points[j], shape, sides, each, strict=True)
        return all(b in along_an_axis(a, n, *side, how) for a, b, n, side, how in axes)

    for Q, q_offset in ((K, None), (7, None), (K + 9, None), (K, 5), (K, -6), (1, 3)):
        expected = matrix(Q, K, kept, q_offset)
        assert (pattern.materialize(Q, K, q_offset) == expected).all()
        assert pattern.density(Q, K, q_offset) == pytest.approx(expected.mean(), abs=1e-12)
        sizes = Sizes(Q, K, K - Q if q_offset is None else q_offset)
        rows, keys = pattern.listed_pairs(sizes, 0, Q)
        assert np.array_equal(rows * K + keys, np.flatnonzero(expected))
        for block_q, block_kv in ((32, 32), (32, 64), (64, 32)):
            layout = pattern.layout(Q, K, block_q=block_q, block_kv=block_kv, q_offset=q_offset)
            assert np.array_equal(layout.expand(), expected)
            grid = Grid(Q, K, sizes.q_offset, block_q, block_kv)
            assert len(pattern.tile_candidates(grid, 0, grid.nq)[0]) <= pattern.tile_bound(grid)
        for block_q in (1, 16):
            assert np.array_equal(build_gather(pattern, Q, K, block_q=block_q, q_offset=q_offset).expand(), expected)


def natten(kernel, causal, n, p):
    """The keys that a query at p sees on an axis of n points, by the definition of NATTEN (is_causal, kernel_size).

    A window of `kernel` keys has kernel // 2 of them before its centre, which is the point nearest to p whose window
    lies inside; a causal one ends at p, and loses what lies before the axis.
    """
    if causal:
        return [j for j in range(n) if j <= p and p - j < kernel]
    left, right = kernel // 2, kernel // 2 - (kernel % 2 == 0)
    centres = [c for c in range(n) if c - left >= 0 and c + right < n]
    centre = min(centres, key=lambda c: abs(c - p))
    return [j for j in range(n) if centre - left <= j <= centre + right]


def of_natten(shape, kernels, causal):
    """The pattern of NATTEN's arguments, as docs/models/natten.md says it."""
    reach = [w - 1 if cause else (w // 2, (w - 1) // 2) for w, cause in zip(kernels, causal, strict=True)]
    return gs.Neighborhood(shape, reach, border="shift", causal=causal)


@pytest.mark.parametrize("kernel", range(1, 9))
@pytest.mark.parametrize("causal", [False, True])
def test_natten_of_every_kernel_size(kernel, causal):
    """na1d, na2d and na3d of both parities, each axis causal or not, on axes as short as the kernel and longer."""
    cases = [((n,), (kernel,), (causal,)) for n in range(kernel, kernel + 5)]
    cases += [
        ((max(kernel, 3), max(other, 5)), (kernel, other), (causal, not causal)) for other in (1, 2, 3, 4, 5, 6, 7, 8)
    ]
    cases += [((kernel, 3, max(4, 9 - kernel)), (kernel, 2, 9 - kernel), (causal, b, c)) for b, c in BOTH]
    for shape, kernels, causes in cases:
        pattern, points = of_natten(shape, kernels, causes), list(np.ndindex(*shape))
        expected = np.zeros((len(points), len(points)), bool)
        for i, point in enumerate(points):
            axes = zip(kernels, causes, shape, point, strict=True)
            for there in itertools.product(*[natten(*axis) for axis in axes]):
                expected[i, np.ravel_multi_index(there, shape)] = True
        N = len(points)
        assert np.array_equal(pattern.materialize(N, N), expected), (shape, kernels, causes)
        assert pattern.pairs_kept(Sizes(N, N, 0)) == expected.sum()
        assert np.array_equal(pattern.layout(N, N, block_q=32, block_kv=64).expand(), expected)
        rows, keys = pattern.listed_pairs(Sizes(N, N, 0), 0, N)
        assert np.array_equal(rows * N + keys, np.flatnonzero(expected))


def test_shifted_neighborhoods_have_as_many_neighbours_everywhere():
    pattern = gs.Neighborhood((7, 9), (2, (3, 2)), border="shift")
    assert (pattern.materialize(63, 63).sum(axis=1) == 5 * 6).all()
    assert pattern == gs.Neighborhood((7, 9), (2, (3, 2)), ("shift", "shift")) != gs.Neighborhood((7, 9), (2, (3, 2)))
    moved = gs.Neighborhood((9, 8), ((3, 0), (0, 2)), border="shift")  # to one side alone, and no axis is causal
    assert moved.border == ("shift", "shift") and (moved.materialize(72, 72).sum(axis=1) == 4 * 3).all()
    causal = gs.Neighborhood((9, 8), (3, 2), border="shift", causal=(True, False))
    assert causal.border == ("cut", "shift") and causal != moved
    assert causal == gs.Neighborhood((9, 8), ((3, 0), 2), ("cut", "shift"))
    assert not causal.materialize(72, 72)[:8, 8:].any()  # the first row of the grid sees no later one


def test_a_neighborhood_of_a_long_video_is_quick():
    """Every plane is like the others: few tiles are evaluated, whatever the length."""
    pattern, N = gs.Neighborhood((32, 64, 64), ((3, 0), 6, 6)), 2**17
    begin = time.perf_counter()
    stats = pattern.layout(N, N, block_q=64, block_kv=64).stats
    assert time.perf_counter() - begin < 10
    assert stats.useful_pairs == pytest.approx(pattern.density(N, N) * N**2)
    shifted = gs.Neighborhood((32, 64, 64), (3, 6, 6), border="shift", causal=(True, False, False))
    stats = shifted.layout(N, N, block_q=64, block_kv=64).stats
    assert time.perf_counter() - begin < 20
    assert stats.useful_pairs == pytest.approx(shifted.density(N, N) * N**2) and shifted.density(N, N) * N > 169


def test_document():
    ids = np.array([3, 3, 3, 7, 7, 1])
    assert (gs.Document(ids).materialize(6, 6) == (ids[:, None] == ids[None, :])).all()
    assert (gs.Document(ids).materialize(2, 6) == (ids[4:, None] == ids[None, :])).all()
    assert (gs.Document.from_cu_seqlens([0, 3, 5, 6]).materialize(6, 6) == gs.Document(ids).materialize(6, 6)).all()
    batch = gs.Document(np.stack([ids, ids[::-1]]))
    assert batch.lead == (2, 1)
    assert (batch.materialize(6, 6)[1, 0] == (ids[::-1, None] == ids[None, ::-1])).all()
    again = np.array([0, 1, 0, 1])
    assert (gs.Document(again).materialize(4, 4) == (again[:, None] == again[None, :])).all()


def test_csr_sources_agree():
    rng = np.random.default_rng(3)
    dense = rng.random((13, 29)) < 0.2
    scipy_matrix = scipy.sparse.csr_array(dense.astype(float))
    scipy_matrix.data[:] = 0.0  # stored entries count, values do not
    pattern = gs.CSR.from_scipy(scipy_matrix)
    assert (pattern.materialize(13, 29) == dense).all()
    assert pattern == gs.CSR(scipy_matrix.indptr, scipy_matrix.indices, 29)
    rows, columns = np.nonzero(dense)
    twice = scipy.sparse.coo_array((np.ones(2 * len(rows)), (np.tile(rows, 2), np.tile(columns, 2))), (13, 29))
    assert gs.CSR.from_scipy(twice) == pattern
    assert (pattern.materialize(13, 29, q_offset=4) == dense).all()


@pytest.mark.filterwarnings("ignore:Sparse CSR tensor support is in beta", "ignore:Sparse invariant checks")
def test_csr_from_torch():
    torch = pytest.importorskip("torch")
    dense = np.random.default_rng(3).random((5, 7)) < 0.4
    rows, columns = np.nonzero(dense)
    coo = torch.sparse_coo_tensor(np.stack([rows, columns]), torch.ones(len(rows)), (5, 7), check_invariants=True)
    crow, values = torch.tensor([0, *np.cumsum(dense.sum(1))]), torch.ones(len(rows))
    csr = torch.sparse_csr_tensor(crow, torch.from_numpy(columns.copy()), values, (5, 7), check_invariants=True)
    for tensor in (coo, csr):
        assert (gs.CSR.from_torch(tensor).materialize(5, 7) == dense).all()


@pytest.mark.parametrize("kind", ["numpy", "torch"])
def test_csr_from_edge_index(kind):
    """Row: the target, which attends; column: the source. Several equal edges are one."""
    rng = np.random.default_rng(4)
    edges = np.stack([rng.integers(0, 7, 40), rng.integers(0, 5, 40)])
    expected = np.zeros((5, 7), dtype=bool)
    for source, target in edges.T:
        expected[target, source] = True
    given = pytest.importorskip("torch").from_numpy(edges) if kind == "torch" else edges
    assert (gs.CSR.from_edge_index(given, (7, 5)).materialize(5, 7) == expected).all()
    assert (gs.CSR.from_edge_index(given, 9).materialize(9, 9)[:5, :7] == expected).all()
    assert not gs.CSR.from_edge_index(given[:, :0], 3).materialize(3, 3).any()


def test_empty_csr_rows():
    pattern = gs.CSR([0, 0, 2, 2], [1, 3], 4)
    assert pattern.materialize(3, 4).tolist() == [[False] * 4, [False, True, False, True], [False] * 4]
    assert not gs.CSR([0, 0], [], 4).materialize(1, 4).any()


def test_per_head_and_composition_by_head():
    heads = gs.PerHead([gs.SlidingWindow(2), gs.Dilated(2, 0, 3)])
    assert heads.lead == (1, 2)
    dense = (heads & gs.Causal()).materialize(9, 9)
    assert dense.shape == (1, 2, 9, 9)
    assert (dense[0, 0] == gs.SlidingWindow(2).materialize(9, 9)).all()
    assert (dense[0, 1] == gs.Dilated(2, 0, 3).materialize(9, 9)).all()
    assert (~heads).materialize(9, 9)[0, 1, 0, 0] == np.False_
    batch = gs.Document(np.zeros((3, 9), dtype=int))
    assert (heads & batch).materialize(9, 9).shape == (3, 2, 9, 9)
    with pytest.raises(ValueError, match="different batch elements or heads"):
        heads & gs.PerHead([gs.Causal()] * 3)


def test_per_batch():
    heads = gs.PerHead([gs.Causal(), gs.Dense()])
    batch = gs.PerBatch([gs.Longformer(4, [0, 5]), gs.Longformer(4, [7]) & heads, gs.Local(3)])
    assert batch.lead == (3, 2) and batch == gs.PerBatch(batch.patterns) != gs.PerBatch(batch.patterns[::-1])
    dense = (batch | gs.Dilated(3, 0, 4)).materialize(9, 11)
    for b, mine in enumerate(batch.patterns):
        expected = (mine | gs.Dilated(3, 0, 4)).materialize(9, 11)
        assert (dense[b] == expected).all()
    assert batch.density(9, 11) == pytest.approx(batch.materialize(9, 11).mean())
    same = gs.PerHead([gs.PerBatch([gs.Causal(), gs.Local(2)]), gs.Dense()])
    other = gs.PerBatch([gs.PerHead([gs.Causal(), gs.Dense()]), gs.PerHead([gs.Local(2), gs.Dense()])])
    assert (same.materialize(6, 6) == other.materialize(6, 6)).all()
    assert np.array_equal(other.layout(40, 70, block_q=32, block_kv=32).expand(), other.materialize(40, 70))
    with pytest.raises(
        ValueError, match=r"none may differ by batch element itself.*the same heads; got \(B, H\) = \(3, 2\)"
    ):
        gs.PerBatch([batch, batch])


IDS, BLOCKS = np.arange(40) // 7, np.random.default_rng(0).random((5, 5)) < 0.5
ONE = [
    (gs.Document(IDS[None]), gs.Document(IDS)),
    (gs.BlockMask(BLOCKS[None], 8), gs.BlockMask(BLOCKS, 8)),
    (gs.BlockMask(BLOCKS[None, None], 8), gs.BlockMask(BLOCKS, 8)),
    (gs.PerHead([gs.Strided(5, 2)]), gs.Strided(5, 2)),
    (gs.PerHead([gs.Document(IDS[None])]), gs.Document(IDS)),
    (gs.PerBatch([gs.Dilated(3, 1, 4)]), gs.Dilated(3, 1, 4)),
    (gs.LongNet((8, 16), (1, 2), heads=1), (gs.DilatedSegment(8) | gs.DilatedSegment(16, 2)) & gs.Causal()),
]


@pytest.mark.parametrize(("one", "plain"), ONE, ids=lambda p: repr(p)[:30])
def test_one_batch_element_or_head_is_none(one, plain):
    window = gs.SlidingWindow(9)
    for found, same in ((one, plain), (one & window, plain & window), (~one | window, ~plain | window)):
        dense = same.materialize(40, 40)
        assert found.lead == (1, 1) and (found.materialize(40, 40) == dense).all()
        assert (found.layout(40, 40, block_q=32, block_kv=32).expand() == dense).all()
        assert found.density(40, 40) == pytest.approx(dense.mean())


# -- values ------------------------------------------------------------------------------------------------------------


def test_patterns_are_values():
    assert gs.SlidingWindow(4) == gs.SlidingWindow(np.int64(4))
    assert hash(gs.BlockMask(np.eye(3, dtype=bool), 8)) == hash(gs.BlockMask(np.eye(3, dtype=bool), 8))
    assert gs.BlockMask(np.eye(3, dtype=bool), 8) != gs.BlockMask(~np.eye(3, dtype=bool), 8)
    assert gs.SlidingWindow(4) & gs.Causal() == gs.SlidingWindow(4) & gs.Causal()
    assert gs.SlidingWindow(4) & gs.Causal() != gs.SlidingWindow(4) | gs.Causal()
    fn = lambda i, j: i > j  # noqa: E731
    assert gs.Predicate(fn) == gs.Predicate(fn)
    assert gs.Predicate(fn) != gs.Predicate(lambda i, j: i > j)
    with pytest.raises(AttributeError):
        gs.SlidingWindow(4).left = 5
    source = np.zeros((2, 2), dtype=bool)
    mask = gs.BlockMask(source, 8)
    source[:] = True
    assert not mask.mask.any()


def test_a_pattern_of_ones_own_is_told_apart():
    """Equal patterns share their layouts: one that differs and seems equal would be computed as the other."""

    class Plain(gs.Pattern):
        def __init__(self, reach):
            self.reach = reach

        def _keep(self, i, j, sizes):
            return abs(i - j) <= self.reach

    @dataclass
    class Changing(gs.Pattern):
        reach: int
        _keep = Plain._keep

    @dataclass(eq=False)
    class Writable(Changing):
        pass

    @dataclass(frozen=True, eq=False)
    class Unhashable(gs.Pattern):
        reach: np.ndarray
        _keep = Plain._keep

    @dataclass(frozen=True, eq=False)
    class Right(gs.Pattern):
        reach: int
        _keep = Plain._keep

    @dataclass(frozen=True)
    class Short(gs.Pattern):
        reach: int
        _keep = Plain._keep

    class Keyed(Plain):
        def _key(self):
            return (self.reach,)

    with pytest.raises(TypeError, match=r"Plain must be a frozen dataclass or define _key; reach would not tell"):
        Plain(3)
    for kind in (Changing, Writable):
        with pytest.raises(TypeError, match=f"{kind.__name__} must be a frozen dataclass"):
            kind(3)
    with pytest.raises(TypeError, match=r"Unhashable\._key must give what can be hashed"):
        Unhashable(np.arange(3))
    for kind in (Right, Short, Keyed):
        assert kind(3) == kind(3) and kind(3) != kind(5) and kind(3).handle != kind(5).handle
        assert hash(kind(3)) == hash(kind(3)) and kind(3).density(9, 9) == gs.SlidingWindow(3, 3).density(9, 9)


@pytest.mark.parametrize("use", [bool, lambda p: p and p, lambda p: not p])
def test_truth_value_says_what_to_use(use):
    with pytest.raises(ValueError, match=r"& \| ~"):
        use(gs.Causal())


@pytest.mark.parametrize(
    ("make", "message"),
    [
        (
            lambda: gs.SlidingWindow(-(2**31)),
            r"left must be an integer in \[-2147483647, \d+\] or None \(unbounded\), got",
        ),
        (lambda: gs.SlidingWindow(1, -(2**31)), r"right must be .* or None \(unbounded\), got -2147483648"),
        (lambda: gs.SlidingWindow(2.5), "left"),
        (lambda: gs.SlidingWindow(1, True), "right"),
        (lambda: gs.SlidingWindow(1, 0, None), "sinks"),
        (lambda: gs.Local(0), "block"),
        (lambda: gs.BlockMask(np.zeros((2, 2)), 4), "mask"),
        (lambda: gs.BlockMask(np.zeros((0, 2), dtype=bool), 4), "mask"),
        (lambda: gs.BlockMask([[True], [True, False]], 4), "mask"),
        (lambda: gs.BigBird(window_blocks=2), "window_blocks"),
        (lambda: gs.BigBird(causal=1), "causal"),
        (lambda: gs.Longformer(4, (-1,)), "global_tokens"),
        (lambda: gs.Longformer(4, 7), "global_tokens"),
        (lambda: gs.Dilated(1, 0, 0), "dilation"),
        (lambda: gs.Strided(0, 1), "stride"),
        (lambda: gs.PowerStrided(1), "base"),
        (lambda: gs.Document([0.5]), "ids"),
        (lambda: gs.Document([]), "ids"),
        (lambda: gs.Document.from_cu_seqlens([0, 4, 2]), "cu_seqlens"),
        (lambda: gs.CSR([0, 2], [1, 1], 4), "strictly"),
        (lambda: gs.CSR([0, 2], [2, 1], 4), "strictly"),
        (lambda: gs.CSR([0, 1], [4], 4), r"\[0, 4\)"),
        (lambda: gs.CSR([0, 2], [1], 4), "indptr"),
        (lambda: gs.CSR([1, 2], [1], 4), "indptr"),
        (lambda: gs.CSR.from_scipy(np.eye(3)), "matrix"),
        (lambda: gs.CSR.from_torch(np.eye(3)), "tensor"),
        (lambda: gs.CSR.from_scipy(np.zeros((2, 90), int)), r"ndarray of shape \(2, 90\).*from_edge_index takes"),
        (lambda: gs.CSR.from_edge_index(np.zeros((3, 4), int), 5), "edge_index must have shape"),
        (lambda: gs.CSR.from_edge_index(np.zeros((2, 4)), 5), "edge_index must be .* integer"),
        (lambda: gs.CSR.from_edge_index([[0, 4], [1, 1]], 4), r"sources in \[0, 4\).*got \[0, 4\]"),
        (lambda: gs.CSR.from_edge_index([[0, 1], [1, -1]], 4), r"targets in \[0, 4\).*got \[-1, 1\]"),
        (lambda: gs.CSR.from_edge_index([[0], [0]], (4, 4, 4)), "num_nodes must be one number or"),
        (lambda: gs.CSR.from_edge_index([[0], [0]], 0), "num_nodes must be an integer"),
        (lambda: gs.Neighborhood((4, 4), (1,)), "shape and reach must have a value for each axis"),
        (lambda: gs.Neighborhood(4, 1), "shape must be a list with a number for each axis"),
        (lambda: gs.Neighborhood((4, 4), True), "reach must be an integer"),
        (lambda: gs.Neighborhood((4, 4), -1), r"reach must be an integer in \[0"),
        (lambda: gs.SlidingWindow.of_size(0), r"size must be an integer in \[1"),
        (lambda: gs.SlidingWindow.of_size(None), "size must be an integer"),
        (lambda: gs.Neighborhood((), ()), "at least one"),
        (lambda: gs.Neighborhood((4, 0), (1, 1)), "shape must be an integer"),
        (lambda: gs.Neighborhood((4, 4), (1, -1)), "reach must be an integer"),
        (lambda: gs.Neighborhood((4, 4), (1, (1, 2, 3))), r"a number or \(before, after\) for each axis"),
        (lambda: gs.Neighborhood((2**16, 2**16), (1, 1)), "the number of points in shape"),
        (lambda: gs.Neighborhood((4, 4), (1, 1)).materialize(16, 17), "has 16 points, needs K=17"),
        (lambda: gs.Neighborhood((4, 4), (1, 1), border="move"), 'border must be "cut" or "shift".* got \'move\''),
        (lambda: gs.Neighborhood((4, 4), (1, 1), border=("cut",)), "border must be .* one of them for each axis"),
        (lambda: gs.Neighborhood((4, 4), (1, 1), border=None), "border must be .* got None"),
        (lambda: gs.Neighborhood((4, 4), (1, 1), causal=1), "causal must be True or False, or one.* got 1"),
        (lambda: gs.Neighborhood((4, 4), 1, causal=None), "causal must be True or False.* got None"),
        (lambda: gs.Neighborhood((4, 4), 1, causal=(True,)), r"causal must be .* for each axis; got \(True,\)"),
        (lambda: gs.Neighborhood((4, 4), 1, causal="time"), "causal must be .* got 'time'"),
        (
            lambda: gs.Neighborhood((4, 4), ((2, 1), 1), causal=True),
            r"reach must be a number or \(before, 0\) on an axis that is causal; axis 0 is, and reaches 1",
        ),
        (
            lambda: gs.Neighborhood((9, 4), (2, 2), border="shift"),
            "reach must be within shape .*of axis 1 it makes windows of 5, and shape has 4 points there",
        ),
        (lambda: gs.Predicate(3), "fn"),
        (lambda: gs.Predicate(lambda i, j: i + j).materialize(3, 3), "fn of Predicate"),
        (
            lambda: gs.Predicate(lambda b, h, i, j: i >= j).materialize(3, 3),
            r"raised TypeError: .*numpy arrays of positions, fn\(i, j\).*from_flex\(mask_mod, Q, K\) makes a pattern",
        ),
        (
            lambda: gs.Predicate(lambda i, j: IDS[i] == IDS[j]).layout(40, 40, block_q=64, block_kv=64),
            r"fn of Predicate raised IndexError: .*positions may lie outside the sequence .*np\.clip\(i, 0, len",
        ),
        (lambda: gs.PerHead([]), "patterns"),
        (lambda: gs.PerHead(gs.Causal()), "patterns"),
        (lambda: gs.PerBatch([]), "one for each batch element"),
        (lambda: gs.Causal().materialize(0, 4), "Q"),
        (lambda: gs.Causal().layout(4, 4, block_q=64, block_kv=40), "block_kv"),
        (lambda: gs.Causal().materialize(4, 4, -(2**31)), "q_offset must be an integer in"),
        (lambda: gs.Causal().density(4, 4, 10**20), r"q_offset must be an integer in .* or None \(K - Q\), got 10"),
        (lambda: gs.CSR([0, 1], [0], 4).materialize(2, 4), "CSR has 1 rows"),
        (lambda: gs.Document([0, 1]).materialize(3, 3), "ids of Document"),
        (lambda: gs.BlockMask(np.eye(3, dtype=bool), 4).materialize(16, 12), "blocks of 4"),
    ],
)
def test_errors_name_the_argument(make, message):
    with pytest.raises(ValueError, match=message):
        make()


class Broken:
    """An object that cannot be shown."""

    def __repr__(self):
        raise KeyError("x" * 1000)


class Shapeless:
    """An object that cannot be asked for a shape."""

    @property
    def shape(self):
        raise RuntimeError


HUGE = {
    "digits": (10**5000, "<integer of 16610 bits>"),
    "negative digits": (-(10**5000), "-<integer of 16610 bits>"),
    "digits in a list": ([10**5000], "[<integer of 16610 bits>]"),
    "text": ("x" * 10**6, "'" + "x" * 76 + "... (1000000 characters)"),
    "bytes": (b"x" * 10**6, "b'" + "x" * 75 + "... (1000000 characters)"),
    "list": ([1] * 10**6, ("[" + "1, " * 26)[:77] + "... (1000000 entries)"),
    "nested": ([[1] * 10**4] * 10**4, ("[[" + "1, " * 26)[:77] + "... (10000 entries)"),
    "dictionary": (dict.fromkeys(range(10**4)), "... (10000 entries)"),
    "array": (np.zeros((999, 99)), "ndarray of shape (999, 99), dtype float64"),
    "pattern": (gs.PerHead([gs.Causal()] * 1000), "... (10018 characters)"),
    "broken": (Broken(), "<Broken instance at "),
    "shapeless": (Shapeless(), "<Shapeless, repr failed: RuntimeError>"),
    "broken in a list": ([Broken()], "[<Broken instance at "),
    "short": ("causal", "'causal'"),
    "short list": ([1] * 26, str([1] * 26)),
}


@pytest.mark.parametrize("name", HUGE)
def test_values_are_shortened_in_messages(name):
    """At most 80 characters of one, and how much there was; nothing is formatted that is not shown."""
    value, shown = HUGE[name]
    tracemalloc.start()
    with pytest.raises(ValueError, match="sinks must be an integer") as error:
        gs.SlidingWindow(3, 0, value)
    peak = tracemalloc.get_traced_memory()[1]
    tracemalloc.stop()
    assert shown in str(error.value)
    assert len(str(error.value)) < 180 and peak < 2**18


@pytest.mark.parametrize("value", [10**5000, "x" * 10**4, b"x" * 10**3, [7] * 10**3, [10**5000] * 30], ids=type)
def test_every_constructor_shortens_what_it_was_given(value):
    for make in (gs.SlidingWindow, gs.Document, gs.PerHead, lambda x: gs.Neighborhood(x, x), lambda x: gs.Strided(1, x),
                 lambda x: gs.Neighborhood((1,), (x,)), lambda x: gs.LongNet(x, (1,), heads=1), gs.CSR.from_scipy,
                 lambda x: gs.Causal().layout(8, 8, block_q=x, block_kv=32), gs.BlockMask, gs.Tree, gs.Predicate,
                 lambda x: gs.CSR(x, x, 3), lambda x: gs.BlockMask([[True]], x)):  # fmt: skip
        try:
            pattern = make(value)
        except (ValueError, TypeError) as error:
            assert len(str(error)) < 400
        else:
            with pytest.raises(ValueError) as refused:
                pattern.materialize(3, 5)
            assert len(str(refused.value)) < 400


def test_patterns_are_shortened_in_messages():
    many = gs.PerHead([gs.Causal()] * 1000)
    grid = gs.Neighborhood((1,) * 1000, (0,) * 1000)
    for refused in (lambda: many.check(8, 8, H=2), lambda: many & gs.PerHead([gs.Dense()] * 3), lambda: bool(many),
                    lambda: gs.PerHead([many] * 1000), lambda: grid.check(2, 2), lambda: gs.PerBatch([gs.Causal(), 3]),
                    lambda: gs.Neighborhood((2**31 - 1,) * 1000, (0,) * 1000)):  # fmt: skip
        with pytest.raises(ValueError) as error:
            refused()
        assert len(str(error.value)) < 400


def test_what_a_function_raised_is_shortened():
    def fails(i, j):
        raise KeyError("x" * 10_000)

    with pytest.raises(ValueError, match="fn of Predicate raised KeyError: 'x") as error:
        gs.Predicate(fails).materialize(3, 3)
    assert len(str(error.value)) < 400


@settings(max_examples=60, deadline=None)
@given(st.data())
def test_random_csr_survives_the_round_trip(data):
    Q, K = data.draw(st.integers(1, 70)), data.draw(st.integers(1, 70))
    rng = np.random.default_rng(data.draw(st.integers(0, 2**16)))
    dense = rng.random((Q, K)) < data.draw(st.sampled_from([0.0, 0.05, 0.5, 1.0]))
    pattern = gs.CSR.from_scipy(scipy.sparse.coo_array(dense))
    assert (pattern.materialize(Q, K) == dense).all()
    assert pattern.density(Q, K) == pytest.approx(dense.mean())


def test_patterns_survive_pickling_and_copying():
    for pattern in (gs.SlidingWindow(4) & gs.Causal(), gs.CSR([0, 1], [2], 3), gs.Document([0, 0, 1])):
        hash(pattern)
        for twin in (pickle.loads(pickle.dumps(pattern)), copy.deepcopy(pattern)):
            assert twin == pattern
            assert twin.handle == pattern.handle
    assert b"handle" not in pickle.dumps(gs.Causal())
    assert not pickle.loads(pickle.dumps(gs.Document([0, 1]))).ids.flags.writeable


@pytest.mark.parametrize("size", [1, 2, 39, 40, 41, 2**31 - 1])
@pytest.mark.parametrize("sinks", [0, 1, 50])
def test_a_window_of_so_many_keys(size: int, sinks: int) -> None:
    """As transformers counts a sliding window: kv_idx > q_idx - sliding_window, causal; sinks are the first keys."""
    for Q in (1, 7, 40):
        want = [[j <= i and (j > i - size or j < sinks) for j in range(40)] for i in range(40 - Q, 40)]
        assert np.array_equal(gs.SlidingWindow.of_size(size, sinks=sinks).materialize(Q, 40), want)


@pytest.mark.parametrize("border", ["cut", "shift"])
@pytest.mark.parametrize("shape", [(9,), (7, 8), (7, 9, 7)])
def test_one_reach_for_all_axes(shape: tuple[int, ...], border: str) -> None:
    """Of reach r, a query in the middle sees 2 r + 1 points on each axis: NATTEN's kernel_size."""
    for reach in (0, 1, np.int16(3)):
        found = gs.Neighborhood(shape, reach, border)
        kept = found.materialize(found.points, found.points).sum(1)
        assert found == gs.Neighborhood(shape, [reach] * len(shape), border)
        assert kept.max() == (2 * int(reach) + 1) ** len(shape) and (border == "cut" or kept.min() == kept.max())
