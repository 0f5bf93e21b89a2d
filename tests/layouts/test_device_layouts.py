"""Layouts made on a device: from intervals and from block lists, against matrices written from their definitions.

`DEVICE_LAYOUT_CASES=10000 pytest tests/layouts/test_device_layouts.py -k random` draws more cases.
"""

from __future__ import annotations

import os
from typing import NamedTuple

import numpy as np
import pytest
import torch
from torch._subclasses.fake_tensor import DataDependentOutputException, FakeTensorMode

import gossamer as gs
from gossamer.layouts import BlockLayout
from gossamer.layouts.device import Arrays, Sorted, block_list_layout, interval_layout
from gossamer.layouts.transpose import transpose
from gossamer.layouts.walk import expand
from gossamer.torch import device_arrays
from gossamer.torch.given_layouts import check_layout
from tests.support.definition import dense

CASES = int(os.environ.get("DEVICE_LAYOUT_CASES", "400"))
CHUNKS = 4
xp: Arrays = device_arrays


class Case(NamedTuple):
    """One layout, and what it is to keep (Bl, Hl, Q, K)."""

    layout: BlockLayout
    keep: np.ndarray


def tensor(x):
    return None if x is None else torch.from_numpy(np.ascontiguousarray(x, dtype=np.int32))


def kept_by_intervals(lo, hi, K):
    keep = np.zeros((*lo.shape, K), dtype=bool)
    for at in np.ndindex(*lo.shape):
        keep[at][lo[at] : hi[at]] = True
    return keep


def kept_by_lists(indices, counts, Q, K, block):
    keep = np.zeros((*indices.shape[:2], Q, K), dtype=bool)
    for b, h, t in np.ndindex(*indices.shape[:3]):
        listed = indices[b, h, t].tolist()
        for c in listed if counts is None else listed[: counts[b, h, t]]:
            if 0 <= c < -(-K // block):
                keep[b, h, t * block : (t + 1) * block, c * block : (c + 1) * block] = True
    return keep


def of_intervals(lo, hi, K, block_q, block_kv):
    layout = interval_layout(tensor(lo), tensor(hi), K, block_q=block_q, block_kv=block_kv, xp=xp)
    return Case(layout, kept_by_intervals(lo, hi, K))


def of_lists(indices, counts, lo, hi, Q, K, block):
    layout = block_list_layout(tensor(indices), tensor(counts), tensor(lo), tensor(hi), Q, K, block=block, xp=xp)
    keep = kept_by_lists(indices, counts, Q, K, block)
    return Case(layout, keep if lo is None else keep & kept_by_intervals(lo, hi, K))


def check(case: Case):
    """The layout keeps what it is to, lists what it has to and no more, in both directions."""
    layout, keep = case
    check_walk(layout.rows, keep, layout.block_q, layout.block_kv)
    check_walk(layout.columns, keep.swapaxes(-1, -2), layout.block_kv, layout.block_q)
    rebuilt = transpose(layout.rows.on_host())
    assert (expand(rebuilt) == expand(layout.columns)).all()
    check_layout(layout.rows, *tensors_of(keep))
    check_layout(layout.columns, *tensors_of(keep.swapaxes(-1, -2)))


def tensors_of(keep):
    B, H, Q, K = keep.shape
    return torch.zeros(B, H, Q, 1), torch.zeros(B, H, K, 1)


def check_walk(walk, keep, block_rows, block_columns):
    rows, columns = keep.shape[2:]
    assert (walk.rows, walk.columns, walk.block_rows, walk.block_columns) == (rows, columns, block_rows, block_columns)
    for x in walk.arrays():
        assert x.dtype == torch.int32
    walk = walk.on_host()
    assert walk.lead == keep.shape[:2]
    assert (expand(walk).reshape(keep.shape) == keep).all()
    assert walk.lo.shape == walk.hi.shape == ((*walk.lead, rows) if len(walk.interval.indices) else (1, 1, 0))
    assert (np.diff(walk.lo) >= 0).all()
    assert (np.diff(walk.hi) >= 0).all()
    assert not walk.bits.counts.any()
    for b, h, t in np.ndindex(*walk.full.counts.shape):
        band = keep[b, h, t * block_rows : (t + 1) * block_rows]
        some, every = [], []
        for c in range(-(-columns // block_columns)):
            tile = band[:, c * block_columns : (c + 1) * block_columns]
            if tile.all() and (c + 1) * block_columns <= columns:
                every.append(c)
            elif tile.any():
                some.append(c)
        for tiles, expected in ((walk.full, every), (walk.interval, some)):
            start, count = tiles.starts[b, h, t], tiles.counts[b, h, t]
            assert 0 <= start <= start + count <= len(tiles.indices)
            assert tiles.indices[start : start + count].tolist() == expected


# -- random cases -----------------------------------------------------------------------------------------------


def draw_size(rng):
    return int(rng.choice([1, 31, 32, 33, 64, 128, int(rng.integers(1, 330))]))


def draw_bounds(rng, lead, Q, K):
    """Non-decreasing bounds: anything, narrow and with jumps, a band, packed documents; some rows keep nothing."""
    form = rng.integers(5)
    if form == 0:
        lo, hi = np.sort(np.sort(rng.integers(0, K + 1, (2, *lead, Q)), axis=-1), axis=0)
    elif form == 1:
        lo = np.sort(rng.integers(0, K + 1, (*lead, Q)), axis=-1)
        hi = np.minimum(lo + rng.integers(0, 40), K)
    elif form == 2:
        i = np.broadcast_to(np.arange(Q) + rng.integers(-Q, K + 1), (*lead, Q))
        lo, hi = np.clip(i - rng.integers(0, K + 1), 0, K), np.clip(i + rng.integers(0, K + 1), 0, K)
    elif form == 3:
        edges = np.sort(np.append(rng.integers(0, K + 1, 5), [0, K]))
        document = np.sort(rng.integers(0, 6, (*lead, Q)), axis=-1)
        lo, hi = edges[document], edges[document + 1]
    else:
        lo = np.zeros((*lead, Q), dtype=int)
        hi = np.full((*lead, Q), K)
    hi = np.maximum(lo, hi)
    if rng.random() < 0.5:  # rows that keep nothing lie where the bounds of their neighbours let them
        empty = rng.random((*lead, Q)) < rng.choice([0.1, 0.6, 1.0])
        some = rng.random() < 0.5
        lo = np.where(empty & some, hi, lo)
        lo = np.maximum.accumulate(lo, axis=-1)
        hi = np.where(empty & (not some), lo, hi)
        hi = np.maximum(lo, np.maximum.accumulate(hi, axis=-1))
    return lo, hi


def draw_intervals(rng):
    lead, Q, K = tuple(rng.integers(1, 4, 2)), draw_size(rng), draw_size(rng)
    block_q, block_kv = (int(x) for x in rng.choice([32, 64, 96, 128], 2))
    return of_intervals(*draw_bounds(rng, lead, Q, K), K, block_q, block_q if rng.random() < 0.5 else block_kv)


def draw_lists(rng):
    lead, Q, K, block = tuple(rng.integers(1, 4, 2)), draw_size(rng), draw_size(rng), int(rng.choice([32, 64, 96]))
    if rng.random() < 0.3:
        Q, K = -(-Q // block) * block, -(-K // block) * block
    T, C = -(-Q // block), -(-K // block)
    n = int(rng.choice([0, 1, rng.integers(1, C + 1), 3 * C]))
    indices = rng.integers(*[(-2, C + 3), (0, C), (0, 1), (-1, 1)][rng.integers(4)], (*lead, T, n))
    if n and rng.random() < 0.2:
        indices[rng.random(indices.shape) < 0.2] = rng.choice([2**31 - 1, -(2**31), C])
    counts = rng.integers(0, n + 1, (*lead, T)) if rng.random() < 0.5 else None
    lo = hi = None
    if rng.random() < 0.6:
        lo, hi = draw_bounds(rng, tuple(x if rng.random() < 0.5 else 1 for x in lead), Q, K)
    return of_lists(indices, counts, lo, hi, Q, K, block)


@pytest.mark.parametrize("chunk", range(CHUNKS))
@pytest.mark.parametrize("draw", [draw_intervals, draw_lists])
def test_random(draw, chunk):
    for seed in range(chunk, CASES // 2, CHUNKS):
        try:
            check(draw(np.random.default_rng(seed)))
        except Exception as error:
            error.add_note(f"seed {seed}")
            raise


# -- extremes ---------------------------------------------------------------------------------------------------


def test_no_row_keeps_anything():
    for at in (0, 5, 32, 100):
        none = np.full((1, 2, 70), at)
        case = of_intervals(none, none, 100, 32, 32)
        check(case)
        for walk in (case.layout.rows, case.layout.columns):
            assert not walk.full.counts.any()
            assert not walk.interval.counts.any()
        check(of_lists(np.zeros((1, 2, 3, 2), dtype=int), None, none, none, 70, 100, 32))


@pytest.mark.parametrize(("Q", "K"), [(1, 1), (1, 200), (200, 1), (32, 32), (33, 31)])
def test_few_positions(Q, K):
    lo, hi = np.zeros((1, 1, Q), dtype=int), np.full((1, 1, Q), K)
    check(of_intervals(lo, hi, K, 32, 64))
    check(of_lists(np.zeros((1, 1, -(-Q // 32), 1), dtype=int), None, lo, hi, Q, K, 32))


def test_room_is_enough_for_the_longest_lists():
    """Each row, or each tile row, jumps as far as bounds that do not decrease can."""
    for Q, K, block in ((320, 320, 32), (32, 3200, 32), (3200, 32, 32)):
        step = np.arange(Q)
        for lo in (step * K // Q, step // block * block * K // Q, np.minimum(step * 7, K), np.zeros(Q, dtype=int)):
            for width in (1, block, K):
                hi = np.minimum(lo + width, K)
                check(of_intervals(lo[None, None], hi[None, None], K, block, block))
                check(of_intervals(lo[None, None], hi[None, None], K, 2 * block, block))
    lo = 1 + np.arange(3200) * 800 // 3200  # two edges that both pass over half of all keys, off the edges of tiles
    case = of_intervals(lo[None, None], lo[None, None] + 798, 1600, 32, 64)
    check(case)
    assert int(case.layout.rows.interval.counts.sum()) > 100 + 25


def test_tiles_that_jumps_pass_over_are_not_listed():
    """Queries of several documents in one tile, each with the last keys of its own: those between are kept by none."""
    last = 1000 * np.arange(1, 33)[None, None]
    case = of_intervals(last - 10, last, 32_000, 32, 32)
    check(case)
    assert int(case.layout.rows.interval.counts.sum()) < 2 * 32


def test_lists_with_all_that_is_ignored():
    indices = np.array([3, -1, 3, 0, 99, 2, -1, 0, 1]).reshape(1, 1, 1, 9)
    counts = np.array(8).reshape(1, 1, 1)
    case = of_lists(indices, counts, None, None, 32, 4 * 32, 32)
    check(case)
    rows = case.layout.rows
    assert rows.full.indices[: int(rows.full.counts)].tolist() == [0, 2, 3]


def test_wide_integers_are_masked_before_they_are_narrowed():
    indices = torch.tensor([2**32, 1, -(2**32), 2**33 + 1]).reshape(1, 1, 1, 4)
    layout = block_list_layout(indices, None, None, None, 32, 64, block=32, xp=xp)
    assert (layout.expand() == (np.arange(64) >= 32)).all()


@pytest.mark.parametrize("lead", [(2, 3), (1, 1)])
def test_arrays_of_any_strides(lead):
    """Transposed, expanded and cut from larger ones, as those of contiguous ones."""
    rng = np.random.default_rng(5)
    lo, hi = (tensor(x) for x in draw_bounds(rng, lead, 100, 120))
    indices, counts = tensor(rng.integers(-1, 4, (*lead, 4, 5))), tensor(rng.integers(0, 6, (*lead, 4)))
    odd = [
        lo.mT.contiguous().mT,
        torch.stack([hi, hi], -1)[..., 0],
        indices.permute(3, 2, 1, 0).contiguous().permute(3, 2, 1, 0),
        torch.cat([counts, counts])[::1][: lead[0]],
    ]
    shared = [x[:1, :1].expand_as(x) for x in odd]
    for given in (odd, shared):
        plain = [x.contiguous() for x in given]
        for make in (of_bounds, of_all):
            for x, expected in zip(arrays_of(make(*given)), arrays_of(make(*plain)), strict=True):
                assert torch.equal(x, expected)


def of_bounds(lo, hi, indices, counts):
    return interval_layout(lo, hi, 120, block_q=32, block_kv=32, xp=xp)


def of_all(lo, hi, indices, counts):
    return block_list_layout(indices, counts, lo, hi, 100, 120, block=32, xp=xp)


@pytest.mark.parametrize(("Q", "K"), [(128, 96), (128, 90), (120, 96), (120, 90)])
def test_interval_lists_are_empty_where_shapes_say_so(Q, K):
    layout = of_lists(np.zeros((2, 1, 4, 2), dtype=int), None, None, None, Q, K, 32).layout
    for walk, ragged in ((layout.rows, K % 32), (layout.columns, Q % 32)):
        assert bool(len(walk.interval.indices)) == bool(walk.lo.numel()) == bool(ragged)
        assert not len(walk.bits.indices)


def test_wrong_arguments():
    x = torch.zeros(1, 2, 64, dtype=torch.int32)
    for block in (0, 16, 33, True):
        with pytest.raises(ValueError, match="block_q must be a positive multiple of 32"):
            interval_layout(x, x, 64, block_q=block, block_kv=32, xp=xp)
    edge = np.int64(32)
    assert interval_layout(x, x, 64, block_q=edge, block_kv=edge, xp=xp).block_q == 32
    assert gs.Causal().layout(64, 64, block_q=edge, block_kv=edge).block_kv == 32
    for lo, hi in ((x, x[:, :1]), (x[0], x[0]), (x[:, :0], x[:, :0])):
        with pytest.raises(ValueError, match="lo and hi must be of one shape"):
            interval_layout(lo, hi, 64, block_q=32, block_kv=32, xp=xp)
    for K in (0, -1, 2**31):
        with pytest.raises(ValueError, match="K must be from 1"):
            interval_layout(x, x, K, block_q=32, block_kv=32, xp=xp)
    indices = torch.zeros(2, 2, 2, 3, dtype=torch.int32)

    def make(indices=indices, counts=None, lo=None, hi=None, Q=64, K=64, block=32):
        return block_list_layout(indices, counts, lo, hi, Q, K, block=block, xp=xp)

    with pytest.raises(ValueError, match="indices must be of shape"):
        make(indices[:, :, :1])
    with pytest.raises(ValueError, match="indices must be of shape"):
        make(indices[0])
    with pytest.raises(ValueError, match="counts must be of shape"):
        make(counts=torch.zeros(2, 1, 2))
    with pytest.raises(ValueError, match="both be given"):
        make(lo=x)
    with pytest.raises(ValueError, match="lo must be of shape"):
        make(lo=torch.zeros(3, 2, 64), hi=torch.zeros(3, 2, 64))
    with pytest.raises(ValueError, match="one shape"):
        make(lo=x, hi=torch.zeros(2, 2, 64))
    with pytest.raises(ValueError, match="Q must be from 1"):
        make(Q=0)
    with pytest.raises(ValueError, match="block must be"):
        make(block=48)


def test_more_tiles_than_are_addressed_are_refused():
    with FakeTensorMode():
        x = torch.zeros(64, 64, 2**20, dtype=torch.int32)
        with pytest.raises(ValueError, match="at most 2147483647 can be addressed"):
            interval_layout(x, x, 2**20, block_q=32, block_kv=32, xp=xp)
        indices = torch.zeros(64, 64, 2**10, 2**10, dtype=torch.int32)
        with pytest.raises(ValueError, match="at most 2147483647 can be addressed"):
            block_list_layout(indices, None, None, None, 2**15, 2**15, block=32, xp=xp)


# -- frameworks -----------------------------------------------------------------------------------------------------


class NumpyArrays:
    """The operations once more, as plain as they are."""

    def fused(self, like):
        return None

    def arange(self, n, like):
        return np.arange(n, dtype=np.int32)

    def full(self, shape, value, like):
        return np.full(shape, value, dtype=np.int32)

    def int32(self, x):
        return x.astype(np.int32)

    def broadcast_to(self, x, shape):
        return np.broadcast_to(x, shape).copy()

    def where(self, condition, x, y):
        return np.where(condition, x, y)

    def fill(self, x, condition, value):
        return np.where(condition, x.dtype.type(value), x)

    def minimum(self, x, y):
        return np.minimum(x, y)

    def maximum(self, x, y):
        return np.maximum(x, y)

    def at_least(self, x, low):
        return np.maximum(x, low)

    def total(self, x):
        return x.sum(-1, dtype=np.int32)

    def cumsum(self, x):
        return x.cumsum(-1, dtype=np.int32)

    def cummax(self, x):
        return np.maximum.accumulate(x, -1)

    def sort(self, x):
        return np.sort(x, -1)

    def stable_sort(self, x):
        places = np.argsort(x, kind="stable")
        return Sorted(x[places], places)

    def searchsorted(self, ordered, x, right=False):
        found = np.empty(x.shape, dtype=np.int32)
        for at in np.ndindex(*x.shape[:-1]):
            found[at] = np.searchsorted(ordered[at], x[at], side="right" if right else "left")
        return found

    def take(self, x, places):
        return np.take_along_axis(x, places, -1)

    def one_bit(self, places):
        return np.left_shift(np.uint32(1), places.astype(np.uint32)).view(np.int32)

    def bits_below(self, places):
        bits = np.left_shift(np.uint64(1), np.clip(places, 0, 32).astype(np.uint64)) - np.uint64(1)
        return bits.astype(np.uint32).view(np.int32)

    def sums_at(self, places, values, size):
        found = np.zeros((*values.shape[:-1], size), dtype=np.int32)
        for at in np.ndindex(*values.shape[:-1]):
            np.add.at(found[at], places[at], values[at])
        return found

    def extend(self, x, n):
        return np.concatenate([x, np.repeat(x[..., -1:], n - x.shape[-1], -1)], -1)

    def divides(self, block, n):
        return n % block == 0

    def concatenate(self, parts):
        return np.concatenate(parts, -1)


@pytest.mark.parametrize("draw", [draw_intervals, draw_lists])
def test_other_frameworks_give_the_same(draw, monkeypatch):
    """Whatever has the operations of the protocol: numpy here, whose arrays have no method of torch's."""
    for seed in range(40):
        expected = draw(np.random.default_rng(seed)).layout
        with monkeypatch.context() as patch:
            patch.setattr(f"{__name__}.xp", NumpyArrays())
            patch.setattr(f"{__name__}.tensor", lambda x: None if x is None else np.asarray(x, dtype=np.int32))
            found = draw(np.random.default_rng(seed)).layout
        for x, y in zip(arrays_of(found), arrays_of(expected), strict=True):
            assert x.dtype == np.int32
            assert (x == y.numpy()).all()


@pytest.mark.parametrize("draw", [draw_intervals, draw_lists])
def test_sizes_that_are_left_open(draw, monkeypatch):
    """Nothing that a compiled function does not know is needed, and tiles that fit are right without it."""
    monkeypatch.setattr(device_arrays, "divides", lambda block, n: False)
    for seed in range(40):
        check(draw(np.random.default_rng(seed)))


# -- what waits for nothing ---------------------------------------------------------------------------------------


def arrays_of(layout):
    return [*layout.rows.arrays(), *layout.columns.arrays()]


def by_intervals(lo, hi, indices, counts):
    return arrays_of(interval_layout(lo, hi, 300, block_q=64, block_kv=64, xp=xp))


def by_intervals_of_other_blocks(lo, hi, indices, counts):
    return arrays_of(interval_layout(lo, hi, 300, block_q=32, block_kv=128, xp=xp))


def by_lists(lo, hi, indices, counts):
    return arrays_of(block_list_layout(indices, counts, None, None, 250, 300, block=64, xp=xp))


def by_both(lo, hi, indices, counts):
    return arrays_of(block_list_layout(indices, None, lo, hi, 250, 300, block=64, xp=xp))


WAYS = [by_intervals, by_intervals_of_other_blocks, by_lists, by_both]


def arguments():
    rng = np.random.default_rng(0)
    lo, hi = draw_bounds(rng, (2, 3), 250, 300)
    return [tensor(x) for x in (lo, hi, rng.integers(-1, 6, (2, 3, 4, 7)), rng.integers(0, 8, (2, 3, 4)))]


@pytest.mark.parametrize("way", WAYS)
def test_nothing_is_read_back(way):
    with FakeTensorMode() as mode:
        found = way(*(mode.from_tensor(x) for x in arguments()))
        with pytest.raises(DataDependentOutputException):  # the mode tells
            found[0].max().item()
    assert [tuple(x.shape) for x in found] == [tuple(x.shape) for x in way(*arguments())]


@pytest.mark.parametrize("way", WAYS)
def test_compiles_as_a_whole(way):
    found = torch.compile(way, fullgraph=True, backend="eager")(*arguments())
    for x, expected in zip(found, way(*arguments()), strict=True):
        assert torch.equal(x, expected)


def test_the_modules_of_operations_match():
    """Every operation of the protocol is one of torch's, with arguments of the same names."""
    names = [name for name in vars(Arrays) if not name.startswith("_")]
    assert names
    for name in names:
        ours, theirs = getattr(device_arrays, name).__code__, vars(Arrays)[name].__code__
        assert ours.co_varnames[: ours.co_argcount] == theirs.co_varnames[1 : theirs.co_argcount]


# -- a call -------------------------------------------------------------------------------------------------------


@pytest.mark.parametrize("draw", [draw_intervals, draw_lists])
def test_attention(draw):
    for seed in range(6):
        layout, keep = draw(np.random.default_rng(1000 + seed))
        B, H, Q, K = keep.shape
        torch.manual_seed(seed)
        q, k, v, dout = (torch.randn(B, H, n, 16) for n in (Q, K, K, Q))
        for x in (q, k, v):
            x.requires_grad_()
        out = gs.attention(q, k, v, layout)
        found = [out, *torch.autograd.grad(out, (q, k, v), dout)]
        exact = [x.detach().double().requires_grad_() for x in (q, k, v)]
        wanted, _ = dense(*exact, keep)
        for x, expected in zip(found, [wanted, *torch.autograd.grad(wanted, exact, dout.double())], strict=True):
            assert torch.allclose(x.double(), expected, atol=2e-5, rtol=2e-5)
