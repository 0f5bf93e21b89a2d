"""The kernels that make structure on a GPU, against the array operations that define what they give.

`STRUCTURE_CASES=300 TRITON_INTERPRET=1 pytest tests/kernels/test_structure_kernels.py -k random` draws more cases.
"""

from __future__ import annotations

import os
from typing import Any

import numpy as np
import pytest
import torch

import gossamer as gs
from gossamer.layouts.device import block_list_layout, interval_layout, key_list_layout
from gossamer.layouts.gather import queries_of
from gossamer.layouts.walk import KINDS, Walk
from gossamer.layouts.work_list import most_listed
from gossamer.torch import device_arrays
from gossamer.torch.structure.base import Sizes
from tests.layouts.test_device_layouts import draw_bounds, draw_size
from tests.support.processes import INTERPRETING, compiled, in_interpreter
from tests.support.thorough import more

pytest.importorskip("triton")

from gossamer.cute import column_items, row_items
from gossamer.cute.column_items import ColumnItem
from gossamer.kernels.hopper.schedule.columns import column_work
from gossamer.kernels.hopper.schedule.cuts import FEW, parts_by_capacity
from gossamer.kernels.hopper.schedule.fused_items import fused_items
from gossamer.kernels.hopper.schedule.rows import sharing, work
from gossamer.kernels.structure import block_lists as block_lists_kernels
from gossamer.kernels.structure import intervals as intervals_kernels
from gossamer.kernels.structure import unions as unions_kernels
from gossamer.layouts.device.arrays import BlockLists, IntervalLists, KeyUnions
from gossamer.patterns.reach import Bounds

CASES = int(os.environ.get("STRUCTURE_CASES", "16" if INTERPRETING else "40"))
COUNT_TYPES = (torch.int8, torch.uint8, torch.int16, torch.int32, torch.int64)


class Kernels:
    """A `Fused` without the operators, whose kernels are of GPUs alone."""

    def block_lists(self, *arguments):
        return BlockLists(*block_lists_kernels.block_lists(*arguments))

    def key_unions(self, *arguments):
        return KeyUnions(*unions_kernels.key_unions(*arguments))

    def interval_lists(self, *arguments):
        return IntervalLists(*intervals_kernels.interval_lists(*arguments))

    def turned(self, lo, hi, columns):
        return Bounds(*intervals_kernels.turned(lo, hi, columns))


class ArraysWithKernels:
    """torch's operations, with the kernels for tensors of any device."""

    def __getattr__(self, name: str) -> Any:
        return getattr(device_arrays, name)

    def fused(self, like):
        return Kernels()


with_kernels = ArraysWithKernels()


def draw_lists(rng):
    """(indices, counts, lo, hi, Q, K, block): unsorted, repeated, -1, far away, some empty."""
    lead = tuple(int(x) for x in rng.integers(1, 4, 2))
    block = int(rng.choice([32, 64, 96]))
    Q, K = draw_size(rng), draw_size(rng) * int(rng.choice([1, 1, 7]))
    T, C = -(-Q // block), -(-K // block)
    n = int(rng.choice([0, 1, 2, C, 40, rng.integers(1, C + 3)]))
    wide = rng.random() < 0.3
    indices = rng.integers(-2, C + 2, (*lead, T, n))
    if rng.random() < 0.3:
        far = [2**31 - 1, -(2**31), *([2**32, -(2**32) + 1, 2**40] if wide else [])]
        indices = np.where(rng.random(indices.shape) < 0.3, rng.choice(far, indices.shape), indices)
    if rng.random() < 0.1:
        indices[:] = -1
    indices = torch.from_numpy(indices).to(torch.int64 if wide else torch.int32)
    counts = None
    if rng.random() < 0.5:
        counts = torch.from_numpy(rng.integers(-1 if rng.random() < 0.5 else 0, n + 3, (*lead, T)))
        counts = counts.to(COUNT_TYPES[rng.integers(5)]) if counts.min() >= 0 else counts
    lo = hi = None
    if rng.random() < 0.6:
        bounds = draw_bounds(rng, tuple(x if rng.random() < 0.5 else 1 for x in lead), Q, K)
        lo, hi = (torch.from_numpy(np.ascontiguousarray(x, dtype=np.int32)) for x in bounds)
    return indices, counts, lo, hi, Q, K, block


def listed(tiles):
    """Of every list its entries."""
    counts, starts = tiles.counts.reshape(-1).tolist(), tiles.starts.reshape(-1).tolist()
    return [tiles.indices[start : start + count].tolist() for start, count in zip(starts, counts, strict=True)]


def check_walks(found, expected, padded):
    """The same arrays; entries that no list refers to only where they are `padded`."""
    for kind in KINDS:
        one, other = found.lists[kind], expected.lists[kind]
        assert torch.equal(one.starts, other.starts)
        assert torch.equal(one.counts, other.counts)
        assert one.indices.shape == other.indices.shape
        assert torch.equal(one.indices, other.indices) if padded else listed(one) == listed(other)
    for one, other in zip(found.arrays(), expected.arrays(), strict=True):
        assert one.dtype == other.dtype == torch.int32
        assert one.shape == other.shape
    for name in ("lo", "hi", "pool_index", "pool"):
        assert torch.equal(getattr(found, name), getattr(expected, name))


def check_lists(indices, counts, lo, hi, Q, K, block, transpose=True):
    given = indices, counts, lo, hi, Q, K
    found = block_list_layout(*given, block=block, xp=with_kernels, transpose=transpose)
    expected = block_list_layout(*given, block=block, xp=device_arrays, transpose=transpose)
    check_walks(found.rows, expected.rows, True)
    if transpose:
        check_walks(found.columns, expected.columns, False)


@pytest.mark.skipif(not INTERPRETING, reason="interprets")
@pytest.mark.parametrize("chunk", range(4))
def test_random_lists(chunk):
    for seed in range(chunk, CASES, 4):
        try:
            check_lists(*draw_lists(np.random.default_rng(seed)))
        except Exception as error:
            error.add_note(f"seed {seed}")
            raise


def check_unions(rng, prepare=lambda x: x):
    """Lists of keys: all arrays are those of array operations."""
    heads = int(rng.choice([1, 1, 2, 3, 16, 40, 64]))
    block = int(rng.choice([16, 32, 64])) if heads == 1 else queries_of(heads)
    lead, Q = tuple(int(x) for x in rng.integers(1, 4, 2)), int(rng.choice([1, 5, rng.integers(1, 70)]))
    K = int(rng.choice([1, 31, 64, rng.integers(1, 400), 2500]))
    n = int(rng.choice([1, 3, 40, min(K, 300)]))
    indices = rng.integers(-2, K + 2, (*lead, Q, n))
    wide = rng.random() < 0.3
    if rng.random() < 0.3:
        far = [2**31 - 1, -(2**31), *([2**32, 2**40] if wide else [])]
        indices = np.where(rng.random(indices.shape) < 0.3, rng.choice(far, indices.shape), indices)
    indices = torch.from_numpy(indices).to(torch.int64 if wide else torch.int32)
    counts = None
    if rng.random() < 0.5:
        counts = torch.from_numpy(rng.integers(0, n + 3, (*lead, Q))).to(COUNT_TYPES[rng.integers(5)])
    lo = hi = None
    if rng.random() < 0.5:
        bounds = draw_bounds(rng, tuple(x if rng.random() < 0.5 else 1 for x in lead), Q, K)
        lo, hi = (torch.from_numpy(np.ascontiguousarray(x, dtype=np.int32)) for x in bounds)
    sizes = {"block_q": block, "heads": heads, "transpose": False}
    want = key_list_layout(indices, counts, lo, hi, Q, K, xp=device_arrays, **sizes).rows
    given = [None if x is None else prepare(x) for x in (indices, counts, lo, hi)]
    found = key_list_layout(*given, Q, K, xp=with_kernels, **sizes).rows
    for one, other in zip(found.arrays(), want.arrays(), strict=True):
        assert one.dtype == torch.int32
        assert torch.equal(one.cpu(), other)


@pytest.mark.skipif(not INTERPRETING, reason="interprets")
@pytest.mark.parametrize("chunk", range(2))
def test_random_unions(chunk):
    for seed in range(chunk, CASES // 4, 2):
        try:
            check_unions(np.random.default_rng(seed))
        except Exception as error:
            error.add_note(f"seed {seed}")
            raise


def draw_layout(rng):
    """A layout that a device made: of blocks, of intervals, of keys."""
    lead = tuple(int(x) for x in rng.choice([1, 2, 4], 2))
    form = rng.integers(4)
    Q, K = (int(rng.choice([1, 64, rng.integers(1, 1500)])) for _ in range(2))
    lo, hi = (
        (torch.from_numpy(np.ascontiguousarray(x, dtype=np.int32))) for x in draw_bounds(rng, lead, Q, K)
    )  # fmt: skip
    if form == 0:
        return interval_layout(lo, hi, K, block_q=64, block_kv=int(rng.choice([32, 64])), xp=device_arrays)
    rows, entries = (Q, K) if form == 1 else (-(-Q // 32), -(-K // 32))
    n = int(rng.integers(1, min(entries, 30) + 1))
    indices = torch.from_numpy(rng.integers(-1, entries + 1, (*lead, rows, n), dtype=np.int32))
    # Lists of very different lengths, so that there are many sizes.
    counts = torch.from_numpy((n * rng.random((*lead, rows)) ** int(rng.choice([1, 4]))).astype(np.int32))
    if form == 1:
        return key_list_layout(indices, counts, lo, hi, Q, K, block_q=64, xp=device_arrays)
    bounds = (lo, hi) if form == 2 else (None, None)
    return block_list_layout(indices, counts, *bounds, Q, K, block=32, xp=device_arrays)


def packed_bounds(rng, Q, K):
    """Those of packed sequences, before and behind which rows and keys are of none."""
    edges = (torch.from_numpy(np.sort(rng.integers(0, n + 1, 5))) for n in (Q, K))
    packed = gs.PackedSequences(*edges, pattern=gs.Causal() if rng.random() < 0.5 else None)
    lo, hi = packed.reached(packed.rule.interval, torch.zeros(1, 1, Q, dtype=torch.int32), Sizes(1, 1, 1, Q, K))
    return Bounds(lo, hi)


def check_intervals(lo, hi, K, block_q, block_kv, transpose=True):
    found, expected = (
        interval_layout(lo, hi, K, block_q=block_q, block_kv=block_kv, xp=xp, transpose=transpose)
        for xp in (with_kernels, device_arrays)
    )
    for one, other in ((found.rows, expected.rows), *([(found.columns, expected.columns)] * transpose)):
        for kind in KINDS:
            assert torch.equal(one.lists[kind].counts, other.lists[kind].counts)
            assert listed(one.lists[kind]) == listed(other.lists[kind])
        for name in ("lo", "hi", "pool_index", "pool"):
            assert torch.equal(getattr(one, name), getattr(other, name))
        assert {x.dtype for x in one.arrays()} == {torch.int32}


@pytest.mark.skipif(not INTERPRETING, reason="interprets")
@pytest.mark.parametrize("chunk", range(2))
def test_random_intervals(chunk):
    for seed in range(chunk, CASES, 2):
        rng = np.random.default_rng(seed)
        lead, Q, K = tuple(int(x) for x in rng.integers(1, 4, 2)), draw_size(rng), draw_size(rng)
        bounds = draw_bounds(rng, lead, Q, K)
        lo, hi = (torch.from_numpy(np.ascontiguousarray(x, dtype=np.int32)) for x in bounds)
        if rng.random() < 0.3:
            lo, hi = (x.contiguous() for x in packed_bounds(rng, Q, K))
        blocks = [int(x) for x in rng.choice([32, 64, 96, 128], 2)]
        try:
            check_intervals(lo, hi, K, *blocks, transpose=bool(rng.random() < 0.8))
        except Exception as error:
            error.add_note(f"seed {seed}")
            raise


def known(words, places):
    """Items or segments on the host; what begins no list of an entry is 0."""
    words = words.cpu().clone()
    for first, number in places.values():
        words[:, first] *= words[:, number] > 0
    return words


def check_items(layout, rng, prepare=lambda walk: walk):
    """The items of rows and of columns, those of array operations in their order."""
    Bl, Hl = layout.lead
    ratio = int(rng.choice([1, 2, 4]))
    H = Hl if Hl > 1 else ratio * int(rng.choice([1, 3]))
    ratio = ratio if H % ratio == 0 else 1
    B = Bl if Bl > 1 else int(rng.choice([1, 3]))
    blocks = int(rng.choice([1, 4, rng.integers(1, 40), 132]))
    split = None if rng.random() < 0.8 else int(rng.integers(1, 4))
    walk, shape = layout.rows, (Bl, Hl, layout.rows.tiles)
    copies, heads = sharing(H, B, walk)
    blocked = isinstance(walk, Walk)
    few, most = blocked and walk.rows * FEW <= walk.block_rows, most_listed(walk) if blocked else None
    parts = parts_by_capacity(shape, copies, blocks, split, few, most)
    want = work(layout, copies, heads, blocks, split)
    found = fused_items(prepare(walk), shape, parts, copies, heads, blocks)
    assert torch.equal(known(found.items, row_items.LISTS), known(want.items, row_items.LISTS))
    assert found.merges.shape == want.merges.shape
    assert found.slots == want.slots
    if found.slots:
        assert torch.equal(found.merges.cpu(), want.merges)
    walk, shape = layout.columns, (Bl, Hl // ratio if Hl > 1 else 1, layout.columns.tiles)
    copies, heads = sharing(H // ratio, B, walk)
    want = column_work(layout, copies, heads, ratio, blocks, split)
    found = fused_items(prepare(walk), shape, 1, copies, heads, blocks, ratio)
    one, other = found.items.cpu().clone(), want.items.clone()
    at, to = one[:, ColumnItem.SEGMENT_START], other[:, ColumnItem.SEGMENT_START]
    segments, others = (known(x.segments, column_items.LISTS) for x in (found, want))
    for j in range(ratio):
        assert torch.equal(segments[at + j], others[to + j])
    one[:, ColumnItem.SEGMENT_START] = other[:, ColumnItem.SEGMENT_START] = 0
    assert torch.equal(one, other)


@pytest.mark.skipif(not INTERPRETING, reason="interprets")
@pytest.mark.parametrize("chunk", range(4))
def test_random_items(chunk):
    for seed in range(chunk, CASES, 4):
        rng = np.random.default_rng(seed)
        try:
            check_items(draw_layout(rng), rng)
        except Exception as error:
            error.add_note(f"seed {seed}")
            raise


@pytest.mark.slow
@pytest.mark.skipif(INTERPRETING, reason="is interpreting")
def test_in_interpreter():
    in_interpreter(__file__, "test_random_lists", "test_random_unions", "test_random_intervals", "test_random_items")


COMPILE = """
import sys
from gossamer.kernels.hopper.schedule import item_kernels as items
from gossamer.kernels.relaunch import PLAIN, Pointer, compiled_for, filled, parameters
from gossamer.kernels.structure import block_kernels as blocks
from gossamer.kernels.structure import interval_kernels as intervals
from gossamer.kernels.structure import union_kernels as unions

work = []
for two in (False, True):
    values = {
        "KINDS": 1 + two, "KEPT": two, "HAS_COUNTS": two, "BOUNDED": two, "BLOCK": 64, "LISTS": 8, "ENTRIES": 128,
        "WORDS": 64, "QUERIES": 64 if two else 4, "ROWS": 256, "COLUMNS": 8, "SUMS": 256,
    }
    work.append((blocks.order_kernel, filled(blocks.OrderForm, values)))
    work.append((unions.union_kernel, filled(unions.UnionForm, values | {"ENTRIES": 1024})))
    form = filled(blocks.ColumnForm, values)
    work += [(blocks.count_kernel, form), (blocks.place_kernel, form)]
    values = {"SIZES": 64, "MIDDLE": 32, "HALVINGS": 20, "LISTS": 8, "OWN": 64, "OTHERS": 128, "COLUMNS": two}
    values |= {"HAS_FULL": True, "HAS_INTERVAL": two, "HAS_BITS": two, "WIDTH": 1 + 63 * two, "MERGE": 8}
    values |= {"CUT": not two, "BY_COPY": two, "ITEM": 16, "SEGMENT": 8, "BINS": 2048, "ITEMS": 1024}
    work.append((items.few_kernel, filled(items.ItemForm, values)))
    work.append((items.many_kernel, filled(items.ItemForm, values)))
work.append((items.length_kernel, filled(items.LengthForm, values)))
tile = intervals.IntervalForm(128, 128, 128, 128, 256)
work += [(intervals.turn_kernel, None), (intervals.count_tiles_kernel, tile), (intervals.place_tiles_kernel, tile)]
types = {"totals": "int64"}
for kernel, form in work:
    given = types | ({"indices": "int64", "counts": "uint8"} if "numbers" in parameters(kernel) else {})
    values = {"FORM": form, "slack": 0.5, "COLUMNS": 256} | dict.fromkeys(kernel.do_not_specialize or (), PLAIN)
    signature = [
        kind(*(PLAIN for _ in kind._fields)) if kind
        else values[name] if name in values
        else Pointer(given.get(name, "int32"), False)
        for name, kind in parameters(kernel).items()
    ]
    compiled_for(kernel, signature, {"num_warps": 4, "enable_fp_fusion": True}, int(sys.argv[1]))
"""


@pytest.mark.slow
@pytest.mark.parametrize("sm", [90, *more(80, 100)])
def test_kernels_compile(sm, tmp_path):
    compiled(COMPILE, sm, cache=tmp_path)
