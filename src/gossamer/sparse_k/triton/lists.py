"""Lists of the keys that live within ranges of queries: kernels.

A key j that is kept past its window is live in one range of queries, [j + window + 1, last[j]]. The list of a range of
queries is made from that of a longer one, and the longest from that of all keys that ever live, ascending. Lists that
tiles are computed from have first the keys that live through all of the range. A list that would hold more than its
capacity is not written: who reads it takes every key instead, and masks.
"""

from __future__ import annotations

import triton
import triton.language as tl


@triton.jit
def _lives(last_ptr, key, window, N):
    return (key < N) & (tl.load(last_ptr + key, mask=key < N, other=-1) > key + window)


@triton.jit
def count_live(last_ptr, counts_ptr, N, window, blocks, BLOCK: tl.constexpr):
    """(units, blocks) int32: the keys of a block that ever live."""
    block, unit = tl.program_id(0), tl.program_id(1).to(tl.int64)
    key = block * BLOCK + tl.arange(0, BLOCK)
    lives = _lives(last_ptr + unit * N, key, window, N)
    tl.store(counts_ptr + unit * blocks + block, tl.sum(lives.to(tl.int32), 0))


@triton.jit
def write_live(last_ptr, ends_ptr, list_ptr, N, window, blocks, BLOCK: tl.constexpr):
    """(units, N) int32: the keys that ever live, with the sums of their counts up to each block."""
    block, unit = tl.program_id(0), tl.program_id(1).to(tl.int64)
    key = block * BLOCK + tl.arange(0, BLOCK)
    lives = _lives(last_ptr + unit * N, key, window, N)
    ones = lives.to(tl.int32)
    place = tl.load(ends_ptr + unit * blocks + block) - tl.sum(ones, 0) + tl.cumsum(ones, 0) - 1
    tl.store(list_ptr + unit * N + place, key, mask=lives)


@triton.jit
def _entries(last_ptr, parent, n, whole, listed, window, start, end, BLOCK: tl.constexpr):
    """Keys n, ... of a longer list, the ranges in which they live, and whether these meet that of the queries."""
    entry = n + tl.arange(0, BLOCK)
    key = tl.where(entry < listed, tl.load(parent + entry, mask=entry < listed, other=0), entry)
    last = tl.load(last_ptr + key, mask=entry < whole, other=-1)
    first = key + window + 1
    return key, first, last, (entry < whole) & (last >= tl.maximum(first, start)) & (first < end)


@triton.jit
def live_lists(
    last_ptr, parent_ptr, parent_counts_ptr, list_ptr, counts_ptr, N, window, tile, tiles, parent_tile, parent_tiles,
    parent_capacity, count_stride, capacity, ORDERED: tl.constexpr, BLOCK: tl.constexpr,
):  # fmt: skip
    """One list: of unit program 1, for the queries of tile program 0.

    Args:
        last_ptr: (units, N) int32.
        parent_ptr: (units, parent_tiles, parent_capacity) int32. Their lengths are the last numbers of rows of
            `parent_counts_ptr`, of `count_stride` numbers each.
        list_ptr: (units, tiles, capacity) int32.
        counts_ptr: (units, tiles, 2) int32: the keys that live through the tile, which come first with ORDERED, and
            all; the second may exceed the capacity.
    """
    t, unit = tl.program_id(0), tl.program_id(1).to(tl.int64)
    start = t * tile
    end = tl.minimum(start + tile, N)
    last_ptr += unit * N
    at = unit * tiles + t
    out_ptr = list_ptr + at * capacity

    length = tl.maximum(end - window - 1, 0)  # the keys that may be live
    of_parent = unit * parent_tiles + start // parent_tile
    parent = parent_ptr + of_parent * parent_capacity
    known = tl.load(parent_counts_ptr + of_parent * count_stride + count_stride - 1)
    whole = tl.where(known <= parent_capacity, known, length)
    listed = tl.where(known <= parent_capacity, known, 0)  # of these, those that the parent's list has: all, or none

    through, some = 0, 0
    for n in range(0, whole, BLOCK):
        key, first, last, live = _entries(last_ptr, parent, n, whole, listed, window, start, end, BLOCK)
        taken = live
        if ORDERED:
            taken = live & (first <= start) & (last >= end - 1)
        ones = taken.to(tl.int32)
        place = through + tl.cumsum(ones, 0) - 1
        tl.store(out_ptr + place, key, mask=taken & (place < capacity))
        through += tl.sum(ones, 0)
        some += tl.sum(live.to(tl.int32), 0)
    if some > through:
        place_of_next = through
        for n in range(0, whole, BLOCK):
            key, first, last, live = _entries(last_ptr, parent, n, whole, listed, window, start, end, BLOCK)
            part = live & ((first > start) | (last < end - 1))
            ones = part.to(tl.int32)
            place = place_of_next + tl.cumsum(ones, 0) - 1
            tl.store(out_ptr + place, key, mask=part & (place < capacity))
            place_of_next += tl.sum(ones, 0)
    tl.store(counts_ptr + at * 2, through)
    tl.store(counts_ptr + at * 2 + 1, some)
