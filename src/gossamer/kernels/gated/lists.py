"""Lists of the keys that live within ranges of queries: kernels.

A key j that is kept past its window is live in one range of queries, [j + window + 1, last[j]]. The list of a range of
queries has first the keys that live through all of it, then the others that live in some of it, both ascending. It is
made from the list of a longer range. A list that would hold more than its capacity is not written: who reads it takes
every key instead, and masks.
"""

from __future__ import annotations

import triton
import triton.language as tl


@triton.jit
def live_lists(
    last_ptr, parent_ptr, parent_counts_ptr, list_ptr, counts_ptr, N, window, tile, tiles, parent_tile, parent_tiles,
    parent_capacity, capacity, IDENTITY: tl.constexpr, BLOCK: tl.constexpr,
):  # fmt: skip
    """One list: of unit program 1, for the queries of tile program 0.

    Args:
        last_ptr: (units, N) int32.
        parent_ptr: (units, parent_tiles, parent_capacity) int32, with `parent_counts_ptr`; not read with IDENTITY.
        list_ptr: (units, tiles, capacity) int32.
        counts_ptr: (units, tiles, 2) int32: the keys that live through the tile, and all; the second may exceed the
            capacity.
    """
    t, unit = tl.program_id(0), tl.program_id(1).to(tl.int64)
    start = t * tile
    end = tl.minimum(start + tile, N)
    last_ptr += unit * N
    at = unit * tiles + t
    out_ptr = list_ptr + at * capacity

    length = tl.maximum(end - window - 1, 0)  # the keys that may be live
    whole = length
    listed = 0  # of these, those that the parent's list has: all, or none
    parent = parent_ptr
    if not IDENTITY:
        of_parent = unit * parent_tiles + start // parent_tile
        parent += of_parent * parent_capacity
        known = tl.load(parent_counts_ptr + of_parent * 2 + 1)
        whole = tl.where(known <= parent_capacity, known, length)
        listed = tl.where(known <= parent_capacity, known, 0)

    through, some = 0, 0
    for n in range(0, whole, BLOCK):
        entry = n + tl.arange(0, BLOCK)
        there = entry < whole
        key = entry
        if not IDENTITY:
            key = tl.where(entry < listed, tl.load(parent + entry, mask=entry < listed, other=0), entry)
        last = tl.load(last_ptr + key, mask=there, other=-1)
        first = key + window + 1
        live = there & (last >= tl.maximum(first, start)) & (first < end)
        all_of_it = live & (first <= start) & (last >= end - 1)
        ones = all_of_it.to(tl.int32)
        place = through + tl.cumsum(ones, 0) - 1
        tl.store(out_ptr + place, key, mask=all_of_it & (place < capacity))
        through += tl.sum(ones, 0)
        some += tl.sum((live & ~all_of_it).to(tl.int32), 0)

    if some > 0:
        place_of_next = through
        for n in range(0, whole, BLOCK):
            entry = n + tl.arange(0, BLOCK)
            there = entry < whole
            key = entry
            if not IDENTITY:
                key = tl.where(entry < listed, tl.load(parent + entry, mask=entry < listed, other=0), entry)
            last = tl.load(last_ptr + key, mask=there, other=-1)
            first = key + window + 1
            live = there & (last >= tl.maximum(first, start)) & (first < end)
            part = live & ((first > start) | (last < end - 1))
            ones = part.to(tl.int32)
            place = place_of_next + tl.cumsum(ones, 0) - 1
            tl.store(out_ptr + place, key, mask=part & (place < capacity))
            place_of_next += tl.sum(ones, 0)
    tl.store(counts_ptr + at * 2, through)
    tl.store(counts_ptr + at * 2 + 1, through + some)
