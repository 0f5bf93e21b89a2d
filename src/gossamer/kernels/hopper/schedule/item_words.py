"""What items say: the device functions that read what rows list, and write the words of items, segments and merges."""

from __future__ import annotations

import triton
import triton.language as tl


@triton.jit
def lead_of(l, j, groups, lead_b, lead_g, lead_j):
    """The list of a layout that the j-th head of a group of rows has."""
    return l // groups * lead_b + l % groups * lead_g + j * lead_j


@triton.jit
def count_of(counts, row, some, WIDTH: tl.constexpr):
    found = tl.load(counts + row, mask=some, other=0)
    return (found + WIDTH - 1) // WIDTH


@triton.jit
def row_length(
    full, interval, bits, l, t, some, T, ratio, groups, lead_b, lead_g, lead_j, HAS_FULL: tl.constexpr,
    HAS_INTERVAL: tl.constexpr, HAS_BITS: tl.constexpr, WIDTH: tl.constexpr,
):  # fmt: skip
    """What the rows t of lists l hold, in tiles or steps, with all the heads that are walked for them."""
    found = tl.zeros_like(t)
    for j in range(ratio):
        row = lead_of(l, j, groups, lead_b, lead_g, lead_j) * T + t
        if HAS_FULL:
            found += count_of(full, row, some, WIDTH)
        if HAS_INTERVAL:
            found += count_of(interval, row, some, WIDTH)
        if HAS_BITS:
            found += count_of(bits, row, some, WIDTH)
    return found


@triton.jit
def item_length(length, part, parts):
    return (part + 1) * length // parts - part * length // parts


@triton.jit
def range_of(starts, counts, row, some, begin, end, base, before, CUT: tl.constexpr, WIDTH: tl.constexpr):
    """The first entry of a kind in the range of an item, how many, and how many tiles go before the next kind."""
    first = tl.load(starts + row, mask=some, other=0) // WIDTH + base
    number = count_of(counts, row, some, WIDTH)
    behind = before + number
    if CUT:
        skipped = tl.minimum(tl.maximum(begin - before, 0), number)
        number = tl.minimum(tl.maximum(end - before, 0), number) - skipped
        first += skipped
    return first, number, behind


@triton.jit
def write(
    items, segments, merges, place, l, i, copy, b, h, some, full, interval, bits, full_starts, interval_starts,
    bits_starts, T, parts, ratio, groups, lead_b, lead_g, lead_j, lists, base_1, base_2, HAS_FULL: tl.constexpr,
    HAS_INTERVAL: tl.constexpr, HAS_BITS: tl.constexpr, WIDTH: tl.constexpr, CUT: tl.constexpr, COLUMNS: tl.constexpr,
    ITEM: tl.constexpr, SEGMENT: tl.constexpr, MERGE: tl.constexpr,
):  # fmt: skip
    """The words of items i of lists l: see `cute.row_items`, `column_items` and `merges`."""
    nothing = tl.zeros_like(i)
    t, part = i // parts, i % parts
    row = l * T + t
    slots = lists * T * parts
    slot = nothing - 1
    if CUT:
        slot = row * parts + part + copy * slots
    to = items + place.to(tl.int64) * ITEM
    tl.store(to, b, mask=some)
    tl.store(to + 1, h, mask=some)
    tl.store(to + 2, t, mask=some)
    tl.store(to + 3, slot, mask=some)
    if COLUMNS:
        tl.store(to + 4, row * ratio, mask=some)
        tl.store(to + 5, nothing + ratio, mask=some)
        tl.store(to + 6, nothing + 1, mask=some)
        for word in tl.static_range(7, ITEM):
            tl.store(to + word, nothing, mask=some)
        some &= copy == 0
    last = nothing
    for j in range(ratio):
        lead = lead_of(l, j, groups, lead_b, lead_g, lead_j)
        at = lead * T + t
        begin, end, before = nothing, nothing, nothing
        if CUT:
            length = row_length(
                full, interval, bits, l, t, some, T, ratio, groups, lead_b, lead_g, lead_j, HAS_FULL, HAS_INTERVAL,
                HAS_BITS, WIDTH,
            )  # fmt: skip
            begin, end = part * length // parts, (part + 1) * length // parts
        if COLUMNS:
            to = segments + (row * ratio + j).to(tl.int64) * SEGMENT
            tl.store(to, nothing + j, mask=some)
            tl.store(to + 1, lead, mask=some)
            words = to + 2
        else:
            words = to + 4
        first, number = nothing, nothing
        if HAS_FULL:
            first, number, before = range_of(full_starts, full, at, some, begin, end, 0, before, CUT, WIDTH)
        tl.store(words, first, mask=some)
        tl.store(words + 1, number, mask=some)
        first, number = nothing, nothing
        if HAS_INTERVAL:
            first, number, before = range_of(
                interval_starts, interval, at, some, begin, end, base_1, before, CUT, WIDTH
            )  # fmt: skip
        tl.store(words + 2, first, mask=some)
        tl.store(words + 3, number, mask=some)
        first, number = nothing, nothing
        if HAS_BITS:
            first, number, before = range_of(bits_starts, bits, at, some, begin, end, base_2, before, CUT, WIDTH)
            if WIDTH > 1:  # the end of the list of gathered columns
                known = tl.load(bits + at, mask=some, other=0)
                if CUT:
                    known = tl.minimum(known, end * WIDTH)
                last = tl.load(bits_starts + at, mask=some, other=0) + known
        tl.store(words + 4, first, mask=some)
        tl.store(words + 5, number, mask=some)
    if not COLUMNS:
        tl.store(to + 10, l, mask=some)
        tl.store(to + 11, nothing + 1, mask=some)
        tl.store(to + 12, nothing, mask=some)
        tl.store(to + 13, last, mask=some)
        tl.store(to + 14, nothing, mask=some)
        tl.store(to + 15, nothing, mask=some)
        if CUT:
            some &= part == 0
            to = merges + (copy * lists * T + row).to(tl.int64) * MERGE
            tl.store(to, b, mask=some)
            tl.store(to + 1, h, mask=some)
            tl.store(to + 2, t, mask=some)
            tl.store(to + 3, slot, mask=some)
            tl.store(to + 4, nothing + parts, mask=some)
            for word in tl.static_range(5, MERGE):
                tl.store(to + word, nothing, mask=some)
