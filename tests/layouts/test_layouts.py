"""Layouts by expansion back to the dense matrix, in both directions; work items; a million tokens."""

from __future__ import annotations

import gc
import itertools
import resource
import subprocess
import sys
import time
import tracemalloc
import weakref

import numpy as np
import pytest
from hypothesis import HealthCheck, given, settings
from hypothesis import strategies as st

import gossamer as gs
from gossamer.layouts import BlockLayout, build_gather, cached_layout, clear_cache, from_dense, work_items
from gossamer.layouts.build import build
from gossamer.layouts.items import BEGIN, END
from gossamer.patterns.grid import Grid, combine_ids, one_of_each
from gossamer.plan.choice import cheapest
from gossamer.plan.costs import TileCosts
from tests.patterns.test_patterns import DEFINITIONS


def check(pattern, Q, K, block_q, block_kv, q_offset=None):
    dense = pattern.materialize(Q, K, q_offset)
    layout = build(pattern, Q, K, block_q=block_q, block_kv=block_kv, q_offset=q_offset)
    assert (layout.expand() == dense).all()
    assert (BlockLayout(layout.columns).expand() == np.swapaxes(dense, -1, -2)).all()
    assert layout.stats.density == pytest.approx(dense.mean(), abs=1e-12)
    assert layout.stats.useful_pairs <= layout.stats.executed_pairs
    assert pattern.density(Q, K, q_offset) == pytest.approx(dense.mean(), abs=1e-12)
    for walk in (layout.rows, layout.columns):
        check_form(walk)
    return layout


def check_form(walk):
    """What DESIGN.md promises of every walk."""
    for tiles in (walk.full, walk.interval, walk.bits):
        for b, h, t in np.ndindex(*tiles.counts.shape):
            start, count = tiles.starts[b, h, t], tiles.counts[b, h, t]
            assert (np.diff(tiles.indices[start : start + count]) > 0).all()
    if walk.lo.size:
        assert walk.lo.shape == walk.hi.shape == (*walk.lead, walk.rows)
        assert (np.diff(walk.lo) >= 0).all()
        assert (np.diff(walk.hi) >= 0).all()
        assert walk.hi.max() <= walk.columns
    assert len(np.unique(walk.pool.reshape(len(walk.pool), -1), axis=0)) == len(walk.pool) if len(walk.pool) else True


def leaves(K, Q):
    """Strategies of simple patterns that fit Q rows and K keys."""
    small = st.integers(0, 90)
    rng = st.integers(0, 2**16).map(np.random.default_rng)

    def block_mask(r, block):
        return gs.BlockMask(r.random((-(-Q // block), -(-K // block))) < 0.4, block)

    def fits(pattern):
        try:
            pattern.check(Q, K)
        except ValueError:
            return False
        return True

    options = [
        st.sampled_from([pattern for pattern, _ in DEFINITIONS.values() if fits(pattern)]),
        st.builds(gs.SlidingWindow, small, small, st.sampled_from([0, 0, 3, 40])),
        st.builds(gs.SlidingWindow, st.none() | small, st.none() | st.just(0)),
        st.builds(gs.Local, st.integers(1, 150)),
        st.builds(
            lambda w, g, d: gs.Longformer(w, [t for t in g if t < K], d), small, st.lists(small), st.integers(1, 5)
        ),
        st.builds(gs.Dilated, st.integers(0, 20), st.integers(0, 9), st.integers(1, 9)),
        st.builds(gs.Strided, st.integers(1, 60), small),
        st.builds(gs.PowerStrided, st.integers(2, 4), st.integers(0, 40)),
        st.builds(lambda w, r: gs.DilatedSegment(w, r, w % r), st.integers(1, 150), st.integers(1, 9)),
        rng.map(lambda r: gs.Document(np.sort(r.integers(0, 5, K)))),
        rng.map(lambda r: gs.Document(r.integers(0, 3, K))),
        st.builds(block_mask, rng, st.sampled_from([16, 32, 48, 64, 128])),
        st.integers(2, 8).map(lambda n: gs.Predicate(lambda i, j: (i * 7 + j) % n == 0)),
        rng.map(lambda r: csr(r, Q, K)),
        st.builds(
            neighborhood,
            st.just(K),
            st.sampled_from([4, 10, 64]),
            st.integers(0, 3),
            st.integers(0, 2),
            st.integers(0, 9),
            st.sampled_from(["cut", "shift", "shift"]),
            st.booleans(),
        ),
        # A batch element or head alone, told by an array or a list that could hold more.
        rng.map(lambda r: gs.Document(np.sort(r.integers(0, 5, (1, K))))),
        rng.map(lambda r: gs.BlockMask(block_mask(r, 32).mask[None], 32)),
        st.builds(gs.SlidingWindow, small, small).map(lambda p: gs.PerHead([p])),
    ]
    if K >= Q:
        options.append(rng.map(lambda r: gs.Tree([int(r.integers(-1, t)) if t else -1 for t in range(Q)])))
    if Q == K:
        options.append(
            st.builds(
                gs.BigBird, st.sampled_from([16, 32, 40]), st.sampled_from([1, 3]), st.integers(0, 2),
                st.integers(0, 3), st.integers(0, 9), st.booleans(),
            )
        )  # fmt: skip
    return st.one_of(options)


def neighborhood(K, n, before, after, x, border, causal):
    """In rows of n points where they divide the keys; a window that is moved is as long as its axis at most."""
    after = 0 if causal and K % n == 0 else after
    shape, reach = ((K // n, n), ((before, after), (x, x))) if K % n == 0 else ((K,), ((before, x),))
    if border == "shift":
        halves = [(length - 1) // 2 for length in shape]
        reach = tuple((min(b, half), min(a, half)) for half, (b, a) in zip(halves, reach, strict=True))
    return gs.Neighborhood(shape, reach, border, (causal, False) if K % n == 0 else False)


def csr(rng, Q, K):
    dense = rng.random((Q, K)) < 0.03
    return gs.CSR(np.concatenate([[0], np.cumsum(dense.sum(1))]), np.nonzero(dense)[1], K)


def compositions(leaf):
    def extend(inner):
        pair = st.tuples(inner, inner)
        return st.one_of(pair.map(lambda p: p[0] & p[1]), pair.map(lambda p: p[0] | p[1]), inner.map(lambda p: ~p))

    return st.recursive(leaf, extend, max_leaves=4)


@settings(max_examples=150, deadline=None, suppress_health_check=[HealthCheck.too_slow])
@given(st.data())
def test_layouts_expand_to_the_pattern(data):
    K = data.draw(st.sampled_from([1, 64, 100, 128, 200, 257]), label="K")
    Q = data.draw(st.one_of(st.just(K), st.sampled_from([1, 63, 128, 190, 300])), label="Q")
    block_q, block_kv = data.draw(st.sampled_from([(64, 64), (128, 64), (64, 128), (128, 128), (96, 32)]), label="tile")
    pattern = data.draw(compositions(leaves(K, Q)), label="pattern")
    q_offset = data.draw(st.sampled_from([None, None, 0, 17, -30]), label="q_offset")
    check(pattern, Q, K, block_q, block_kv, q_offset)


@settings(max_examples=25, deadline=None, suppress_health_check=[HealthCheck.too_slow])
@given(st.data())
def test_layouts_by_head_and_batch(data):
    N = data.draw(st.sampled_from([64, 100, 200]), label="N")
    heads = data.draw(st.lists(compositions(leaves(N, N)), min_size=2, max_size=3), label="heads")
    heads.append(heads[0])
    pattern = gs.PerHead(heads)
    if data.draw(st.booleans(), label="by batch"):
        pattern = pattern & gs.Document(np.random.default_rng(0).integers(0, 3, (2, N)).cumsum(axis=1) // 40)
    check(pattern, N, N, 64, 64)


def test_a_transposed_tile_at_the_edge_shares_its_bits():
    """A full tile that is cut at the last query looks like one that keeps as many queries."""
    mask = np.ones((4, 4), dtype=bool)
    mask[1:3, 0] = False
    layout = check(gs.BlockMask(mask[None], 32), 128, 128, 96, 32)
    assert len(layout.columns.pool) == len(layout.rows.pool) == 1


def test_kinds_are_the_cheapest_that_fit():
    window = build(gs.SlidingWindow(512), 2048, 2048, block_q=128, block_kv=128)
    assert len(window.rows.bits.indices) == 0
    assert window.rows.full.counts[0, 0, 8] == 3
    assert window.rows.interval.counts[0, 0, 8] == 2
    dense = build(gs.Dense(), 256, 256, block_q=128, block_kv=128)
    assert dense.stats.full_tiles == 4
    assert dense.stats.overhead == 1.0
    ragged = build(gs.Dense(), 256, 250, block_q=128, block_kv=128)
    assert (ragged.stats.full_tiles, ragged.stats.interval_tiles) == (2, 2)
    packed = build(gs.Document.from_cu_seqlens([0, 300, 512]) & gs.Causal(), 512, 512, block_q=128, block_kv=128)
    assert len(packed.rows.bits.indices) == 0
    blocks = build(gs.BigBird(128), 2048, 2048, block_q=128, block_kv=128)
    assert blocks.stats.full_tiles == blocks.stats.executed_pairs / 128**2
    sinks = build(gs.SlidingWindow(300, 0, 4), 2048, 2048, block_q=128, block_kv=128)
    assert sinks.stats.interval_tiles > 0
    assert sinks.stats.bits_tiles > 0
    assert sinks.stats.pool_tiles <= 4


def test_equal_heads_share_their_lists():
    heads = gs.PerHead([gs.Dilated(31, 0, 8)] * 4 + [gs.SlidingWindow(63)] * 4)
    layout = build(heads, 1024, 1024, block_q=128, block_kv=128)
    one = build(gs.Dilated(31, 0, 8), 1024, 1024, block_q=128, block_kv=128)
    assert len(layout.rows.bits.indices) == len(one.rows.bits.indices)
    assert len(layout.columns.bits.indices) == len(one.columns.bits.indices)


def test_bits_are_pooled():
    layout = build(gs.Dilated(255, 0, 16), 16384, 16384, block_q=128, block_kv=128)
    assert len(layout.rows.pool) == 3
    assert len(layout.columns.pool) == 3


def test_expand_refuses_a_tile_listed_twice():
    layout = from_dense(np.ones((64, 64), dtype=bool), block_q=32, block_kv=32)
    walk = layout.rows
    twice = walk.full._replace(indices=np.zeros_like(walk.full.indices))
    arrays = walk.arrays()
    with pytest.raises(ValueError, match="more than once"):
        BlockLayout(walk.with_arrays([*twice, *arrays[3:]])).expand()


@pytest.mark.parametrize("limit", [1, 3, 7, 1000])
def test_work_items_cover_every_row_once(limit):
    pattern = gs.PerHead([gs.BigBird(32), gs.SlidingWindow(100) & ~gs.Local(64)])
    walk = build(pattern, 640, 640, block_q=32, block_kv=32).rows
    lengths = (walk.full.counts + walk.interval.counts + walk.bits.counts).reshape(-1)
    work = work_items(walk, limit)
    ranges = {}
    slots = {}
    for lead, tile, begin, end, slot, _ in work.items.tolist():
        assert end - begin <= limit
        ranges.setdefault(lead * walk.tiles + tile, []).append((begin, end))
        if slot >= 0:
            slots[slot] = (lead, tile, begin)
    for row, length in enumerate(lengths):
        pieces = sorted(ranges[row])
        assert pieces[0][0] == 0
        assert pieces[-1][1] == length
        assert all(a[1] == b[0] for a, b in itertools.pairwise(pieces))
    assert (np.diff(work.items[:, END] - work.items[:, BEGIN]) <= 0).all(), "longest first"
    assert sorted(slots) == list(range(work.slots))
    for lead, tile, first, count in work.merges.tolist():
        begins = [slots[s] for s in range(first, first + count)]
        assert all(b[:2] == (lead, tile) for b in begins)
        assert begins == sorted(begins)


def test_cache_is_shared():
    pytest.importorskip("torch")
    clear_cache()
    sizes = {"block_q": 64, "block_kv": 64, "q_offset": 0, "device": "cpu"}
    first = cached_layout(gs.SlidingWindow(30), 256, 256, **sizes)
    assert first is cached_layout(gs.SlidingWindow(30), 256, 256, **sizes)
    clear_cache()
    again = cached_layout(gs.SlidingWindow(30), 256, 256, **sizes)
    assert again is not first
    assert (again.expand() == first.expand()).all()


@pytest.mark.parametrize("pattern", [gs.BigBird(48), gs.SlidingWindow(30), gs.Document(np.arange(512) // 70)], ids=str)
def test_what_a_layout_holds_on_a_cpu_is_counted(pattern):
    """Its lists, and the masks that the blocked implementation keeps for it; equal intervals are counted apart."""
    torch = pytest.importorskip("torch")
    from gossamer.kernels.blocked.batches import plan_batches
    from gossamer.layouts.cache import bytes_of
    from gossamer.plan.problem import Problem

    layout = build(pattern, 512, 512, block_q=64, block_kv=64).to("cpu")
    masks = plan_batches(layout, Problem(1, 1, 1, 512, 512, 8, 8, "float32", "cpu")).masks
    assert isinstance(masks.kept, torch.Tensor) and masks.kept.nbytes > 0
    lists = sum(x.nbytes for x in layout.rows.arrays())
    alike = len(layout.rows.interval.indices) - len(masks.bounds)
    assert bytes_of(layout) == lists + masks.kept.nbytes + (alike - 2) * 64 * 64


def test_device_copies_expand_and_transpose():
    torch = pytest.importorskip("torch")
    pattern = gs.SlidingWindow(70, 0, 3) | gs.BigBird(32)
    layout = build(pattern, 200, 200, block_q=64, block_kv=64)
    copy = layout.to("cpu")
    assert copy is layout.to(torch.device("cpu"))
    assert (copy.expand() == layout.expand()).all()
    assert (BlockLayout(copy.columns).expand() == layout.expand().T).all()
    assert copy.stats == layout.stats


@pytest.mark.parametrize(
    "kind", [lambda p: build(p, 64, 64, block_q=32, block_kv=32), lambda p: build_gather(p, 64, 64, block_q=16)]
)
def test_a_forgotten_layout_is_freed_at_once(kind):
    """With its copies, whose memory may be a GPU's: the collector of cycles comes late, and not for a GPU's sake."""
    pytest.importorskip("torch")
    layout = kind(gs.SlidingWindow(7) | gs.Dilated(3, 0, 8))
    copy = layout.to("cpu")
    assert copy.host.rows is layout.rows and copy.host.columns is layout.columns
    alive = [weakref.ref(x) for x in (layout, copy, copy.columns)]
    gc.disable()
    try:
        del layout, copy
        assert [x() for x in alive] == [None] * 3
    finally:
        gc.enable()


MILLION = {
    "window": "gs.SlidingWindow(4096)",
    "sinks": "gs.SlidingWindow(4096, 0, 4)",
    "big bird": "gs.BigBird(64)",
    "causal big bird": "gs.BigBird(64, causal=True)",
    "dilated": "gs.Dilated(255, 0, 16)",
    "longformer": "gs.Longformer(512, (0, 1, 2, 5000))",
    "powers": "gs.PowerStrided()",
    "documents": "gs.Document(np.arange(N) // 1000)",
    "documents & window": "gs.Document(np.arange(N) // 1000) & gs.SlidingWindow(512)",
    "documents & dilated": "gs.Document(np.arange(N) // 2000) & gs.Dilated(255, 0, 16)",
    "window | big bird": "gs.SlidingWindow(256) | gs.BigBird(64)",
}


def test_a_million_tokens_in_two_seconds_and_two_gibibytes():
    # One process, one core: each build is timed by processor time, the memory is the peak of all of them.
    program = f"""
import resource, time
import numpy as np
import gossamer as gs
N = 1048576
for name, text in {MILLION!r}.items():
    started = time.process_time()
    layout = eval(text).layout(N, N, block_q=128, block_kv=128)
    spent = time.process_time() - started
    print(f"{{spent:.2f}} s  {{name}}: {{layout!r}}")
    assert spent < 2.0, (name, spent)
peak = resource.getrusage(resource.RUSAGE_SELF).ru_maxrss / 2**20
print(f"peak {{peak:.2f}} GiB")
assert peak < 2.0, peak
"""
    done = subprocess.run([sys.executable, "-c", program], capture_output=True, text=True, timeout=300, check=False)
    assert done.returncode == 0, done.stdout + done.stderr


def test_density_at_a_million_tokens():
    N = 2**20
    started = time.process_time()
    assert gs.Causal().density(N, N) == pytest.approx(0.5, rel=1e-5)
    assert gs.SlidingWindow(4095).density(N, N) == pytest.approx(4096 / N, rel=3e-3)
    assert gs.Strided(1024, 0).density(N, N) == pytest.approx(1 / 2048, rel=2e-3)
    assert (gs.Causal() & gs.BigBird(64)).density(N, N) < gs.BigBird(64).density(N, N)
    assert time.process_time() - started < 5.0
    assert resource.getrusage(resource.RUSAGE_SELF).ru_maxrss < 4 * 2**20


def random_matrix(N, each=1):
    """About `each` entries a row, anywhere."""
    return gs.CSR.from_edge_index(np.random.default_rng(0).integers(0, N, (2, each * N)), N)


def test_a_random_matrix_is_laid_out_by_its_entries(monkeypatch):
    """Nearly every entry has a tile of its own: those that look alike are evaluated once, and none is held in full."""
    evaluated, peaks = [], []
    tile_masks = gs.CSR.tile_masks
    monkeypatch.setattr(
        gs.CSR, "tile_masks", lambda self, grid, ti, tj: evaluated.append(len(ti)) or tile_masks(self, grid, ti, tj)
    )
    sizes = (2**17, 2**18)
    for N in sizes:
        matrix = random_matrix(N)
        evaluated.clear()
        tracemalloc.start()
        layout = build(matrix, N, N, block_q=64, block_kv=64)
        peaks.append(tracemalloc.get_traced_memory()[1])
        tracemalloc.stop()
        assert layout.stats.useful_pairs == len(matrix.indices)
        assert sum(evaluated) < 2 * len(layout.rows.pool) < 20_000 < len(layout.rows.bits.indices)
    assert (peaks[1] - peaks[0]) / (sizes[1] - sizes[0]) < 256  # bytes for each more entry; its tile has 512


@pytest.mark.parametrize("each", [1, 3, 12])
@pytest.mark.parametrize("sums", ["of numbers", "that are all alike"])
def test_tiles_of_a_matrix_are_told_apart(monkeypatch, each, sums):
    """Equal ids, equal tiles, also where numbers have the same sum."""
    from gossamer.patterns import csr as module

    if sums == "that are all alike":
        monkeypatch.setattr(module, "_numbers", lambda places: np.ones(len(places), dtype=np.uint64))
    N = 700
    matrix = random_matrix(N, each)
    dense = matrix.materialize(N, N)
    module._remembered_ids.cache_clear()
    for block_q, block_kv in ((32, 32), (64, 32), (32, 128)):
        grid = Grid(N, N, 0, block_q, block_kv)
        ti, tj = (x.ravel() for x in np.divmod(np.arange(grid.nq * grid.nk), grid.nk))
        seen = {}
        for t, c, number in zip(ti, tj, matrix.tile_ids(grid, ti, tj), strict=True):
            tile = dense[t * block_q : (t + 1) * block_q, c * block_kv : (c + 1) * block_kv]
            where = tuple(np.argwhere(tile).ravel())
            assert seen.setdefault(number, where) == where
        if sums == "of numbers":
            assert len(seen) == len(set(seen.values()))
        assert (build(matrix, N, N, block_q=block_q, block_kv=block_kv).expand() == dense).all()
    module._remembered_ids.cache_clear()


@settings(max_examples=200, deadline=None)
@given(st.data())
def test_ids_are_combined_exactly(data):
    n = data.draw(st.integers(0, 30))
    columns = data.draw(st.integers(1, 4))
    reach = st.sampled_from([1, 3, 2**40, 2**62])
    ids = [
        np.array([data.draw(st.integers(-m, m)) for _ in range(n)], dtype=np.int64)
        for m in [data.draw(reach) for _ in range(columns)]
    ]
    combined = combine_ids(*ids)
    for a in range(n):
        for b in range(a):
            assert (combined[a] == combined[b]) == all(x[a] == x[b] for x in ids)
    one, which = one_of_each(combined)
    assert len(one) == len(set(combined.tolist())) and (combined[one][which] == combined).all()
    assert (np.diff(combined[one]) > 0).all()


def test_the_cheapest_tile_is_chosen():
    options = tuple(
        TileCosts(size, size, pair, 0.28 * pair, row=400.0) for size, pair in ((128, 1.0), (64, 1 / 0.9), (32, 5.0))
    )
    slow = options[1]._replace(pair=10.0, bits=2.8)

    def tile(pattern, options=options):
        return options[cheapest(pattern, 2048, 2048, tiles=options, q_offset=0)][:2]

    assert tile(gs.BigBird(64)) == (64, 64)
    assert tile(gs.SlidingWindow(30)) == (64, 64)
    assert tile(gs.SlidingWindow(1024)) == (128, 128)
    assert tile(gs.BigBird(128)) == (128, 128)
    assert tile(gs.BigBird(64), options[:1]) == (128, 128)
    assert tile(gs.BigBird(64), (options[0], slow)) == (128, 128)
