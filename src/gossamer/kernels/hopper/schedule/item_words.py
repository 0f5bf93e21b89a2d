"""What items say: the device functions that read what rows list, and write the words of items, segments and merges."""

from __future__ import annotations

import triton
import triton.language as tl


@triton.jit
def lead_of(l, j, sizes):
    """The list of a layout that the j-th head of a group of rows has."""
    _T, _parts, _ratio, groups, lead_b, lead_g, lead_j = sizes
    return l // groups * lead_b + l % groups * lead_g + j * lead_j


@triton.jit
def count_of(counts, row, some, WIDTH: tl.constexpr):
    found = tl.load(counts + row, mask=some, other=0)
    return (found + WIDTH - 1) // WIDTH


@triton.jit
def row_length(counts, l, t, some, sizes, FORM: tl.constexpr):
    """What the rows t of lists l hold, in tiles or steps, with all the heads that are walked for them.

    Args:
        counts: of full tiles, of those of intervals, and of those of bits.
        sizes: T, parts, ratio, groups, lead_b, lead_g and lead_j: see `fused_items`.
    """
    full, interval, bits = counts
    T, _parts, ratio = sizes[:3]
    found = tl.zeros_like(t)
    for j in range(ratio):
        row = lead_of(l, j, sizes) * T + t
        if FORM.HAS_FULL:
            found += count_of(full, row, some, FORM.WIDTH)
        if FORM.HAS_INTERVAL:
            found += count_of(interval, row, some, FORM.WIDTH)
        if FORM.HAS_BITS:
            found += count_of(bits, row, some, FORM.WIDTH)
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
def write(written, place, l, i, copy, b, h, some, counts, starts, sizes, FORM: tl.constexpr):
    """The words of items i of lists l: see `cute.row_items`, `column_items` and `merges`.

    Args:
        written: items, segments and merges.
        starts: of each kind, as `counts` are.
        sizes: those of `row_length`, lists, base_1 and base_2.
    """
    items, segments, merges = written
    full, interval, bits = counts
    full_starts, interval_starts, bits_starts = starts
    T, parts, ratio = sizes[:3]
    lists, base_1, base_2 = sizes[7:]
    WIDTH: tl.constexpr = FORM.WIDTH
    CUT: tl.constexpr = FORM.CUT
    ITEM: tl.constexpr = FORM.ITEM
    MERGE: tl.constexpr = FORM.MERGE
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
    if FORM.COLUMNS:
        tl.store(to + 4, row * ratio, mask=some)
        tl.store(to + 5, nothing + ratio, mask=some)
        tl.store(to + 6, nothing + 1, mask=some)
        for word in tl.static_range(7, ITEM):
            tl.store(to + word, nothing, mask=some)
        some &= copy == 0
    last = nothing
    for j in range(ratio):
        lead = lead_of(l, j, sizes[:7])
        at = lead * T + t
        begin, end, before = nothing, nothing, nothing
        if CUT:
            length = row_length(counts, l, t, some, sizes[:7], FORM)
            begin, end = part * length // parts, (part + 1) * length // parts
        if FORM.COLUMNS:
            to = segments + (row * ratio + j).to(tl.int64) * FORM.SEGMENT
            tl.store(to, nothing + j, mask=some)
            tl.store(to + 1, lead, mask=some)
            words = to + 2
        else:
            words = to + 4
        first, number = nothing, nothing
        if FORM.HAS_FULL:
            first, number, before = range_of(full_starts, full, at, some, begin, end, 0, before, CUT, WIDTH)
        tl.store(words, first, mask=some)
        tl.store(words + 1, number, mask=some)
        first, number = nothing, nothing
        if FORM.HAS_INTERVAL:
            first, number, before = range_of(
                interval_starts, interval, at, some, begin, end, base_1, before, CUT, WIDTH
            )  # fmt: skip
        tl.store(words + 2, first, mask=some)
        tl.store(words + 3, number, mask=some)
        first, number = nothing, nothing
        if FORM.HAS_BITS:
            first, number, before = range_of(bits_starts, bits, at, some, begin, end, base_2, before, CUT, WIDTH)
            if WIDTH > 1:  # the end of the list of gathered columns
                known = tl.load(bits + at, mask=some, other=0)
                if CUT:
                    known = tl.minimum(known, end * WIDTH)
                last = tl.load(bits_starts + at, mask=some, other=0) + known
        tl.store(words + 4, first, mask=some)
        tl.store(words + 5, number, mask=some)
    if not FORM.COLUMNS:
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
