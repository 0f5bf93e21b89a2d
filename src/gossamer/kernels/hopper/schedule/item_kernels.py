"""The kernels that write many items in the order in which blocks draw them, as `rows.for_every_head` defines it.

How many items of each length every list has, of those how many of each size, and then of each item how many go before
it. They know lists of every kind and rows that are cut; `rows.has_kernels` says for which of those they are taken.
"""

from __future__ import annotations

import triton
import triton.language as tl

PLAIN = [
    "T", "parts", "ratio", "groups", "lead_b", "lead_g", "lead_j", "lists", "bins", "blocks", "copies", "heads",
    "of_batch", "chunks", "base_1", "base_2", "n_items",
]  # fmt: skip
SIZES = 64  # that are told apart
MIDDLE = 32  # the size of items as long as the median
DOUBLINGS = 24  # of the median, up to the longest


@triton.jit
def _lead(l, j, groups, lead_b, lead_g, lead_j):
    """The list of a layout that the j-th head of a group of rows has."""
    return l // groups * lead_b + l % groups * lead_g + j * lead_j


@triton.jit
def _count(counts, row, some, WIDTH: tl.constexpr):
    found = tl.load(counts + row, mask=some, other=0)
    return (found + WIDTH - 1) // WIDTH


@triton.jit
def _row_length(
    full, interval, bits, l, t, some, T, ratio, groups, lead_b, lead_g, lead_j, HAS_FULL: tl.constexpr,
    HAS_INTERVAL: tl.constexpr, HAS_BITS: tl.constexpr, WIDTH: tl.constexpr,
):  # fmt: skip
    """What the rows t of lists l hold, in tiles or steps, with all the heads that are walked for them."""
    found = tl.zeros_like(t)
    for j in range(ratio):
        row = _lead(l, j, groups, lead_b, lead_g, lead_j) * T + t
        if HAS_FULL:
            found += _count(full, row, some, WIDTH)
        if HAS_INTERVAL:
            found += _count(interval, row, some, WIDTH)
        if HAS_BITS:
            found += _count(bits, row, some, WIDTH)
    return found


@triton.jit
def _item_length(length, part, parts):
    return (part + 1) * length // parts - part * length // parts


@triton.jit(do_not_specialize=PLAIN)
def length_kernel(
    full, interval, bits, lengths, histograms, T, parts, ratio, groups, lead_b, lead_g, lead_j, bins,
    HAS_FULL: tl.constexpr, HAS_INTERVAL: tl.constexpr, HAS_BITS: tl.constexpr, WIDTH: tl.constexpr,
    ITEMS: tl.constexpr, BINS: tl.constexpr,
):  # fmt: skip
    """The lengths of the items of one list, (lists, T * parts), and how many have each of some lengths."""
    l, k0 = tl.program_id(0), tl.program_id(1) * BINS
    found = tl.zeros((BINS,), dtype=tl.int32)
    for i0 in range(0, T * parts, ITEMS):
        i = i0 + tl.arange(0, ITEMS)
        some = i < T * parts
        length = _row_length(
            full, interval, bits, l, i // parts, some, T, ratio, groups, lead_b, lead_g, lead_j, HAS_FULL,
            HAS_INTERVAL, HAS_BITS, WIDTH,
        )  # fmt: skip
        length = tl.minimum(_item_length(length, i % parts, parts), bins - 1)
        if k0 == 0:
            tl.store(lengths + l.to(tl.int64) * T * parts + i, length, mask=some)
        inside = some & (length >= k0) & (length < k0 + BINS)
        found += tl.histogram(tl.where(inside, length - k0, 0), BINS, mask=inside)
    k = k0 + tl.arange(0, BINS)
    tl.store(histograms + l.to(tl.int64) * bins + k, found, mask=k < bins)


@triton.jit
def _size(length, median, even, DOUBLINGS: tl.constexpr, MIDDLE: tl.constexpr):
    """How often a length has to be halved to be the median, or doubled, whole times; `even`: no item comes first."""
    long, middle = length.to(tl.int64), median.to(tl.int64)
    found = tl.zeros_like(length) + MIDDLE
    for k in tl.static_range(1, DOUBLINGS + 1):
        found += (long >= (middle << k)).to(tl.int32)
    found = tl.where(even, tl.minimum(found, MIDDLE), found)
    for k in tl.static_range(1, 21):
        found -= ((long << k) <= middle).to(tl.int32)
    return found


@triton.jit(do_not_specialize=PLAIN)
def size_kernel(
    histograms, sizes, middle, lists, bins, n_items, blocks, slack, SIZES: tl.constexpr, MIDDLE: tl.constexpr,
    DOUBLINGS: tl.constexpr, LISTS: tl.constexpr, BINS: tl.constexpr, FEW_BINS: tl.constexpr,
):  # fmt: skip
    """How many items of each size one list has (lists, SIZES), and what sizes follow from: (2,), see `_size`."""
    own = tl.program_id(0)
    nothing = tl.sum(tl.zeros((BINS,), dtype=tl.int32), 0)
    below, longer, longest = nothing, nothing, nothing
    total = tl.sum(tl.zeros((BINS,), dtype=tl.int64), 0)
    for k0 in range(0, bins, BINS):
        k = k0 + tl.arange(0, BINS)
        number = tl.zeros((BINS,), dtype=tl.int32)
        for l0 in range(0, lists, LISTS):
            l = l0 + tl.arange(0, LISTS)
            at = histograms + l[:, None].to(tl.int64) * bins + k[None, :]
            number += tl.sum(tl.load(at, mask=(l < lists)[:, None] & (k < bins)[None, :], other=0), 0)
        # The median is the greatest length that more than half of all items reach.
        reached = n_items - below - tl.cumsum(number, 0) + number
        longer += tl.sum(((reached > n_items // 2) & (k < bins)).to(tl.int32), 0)
        below += tl.sum(number, 0)
        total += tl.sum(k.to(tl.int64) * number, 0)
        longest = tl.maximum(longest, tl.max(tl.where(number > 0, k, 0), 0))
    median = tl.maximum(longer - 1, 1)
    even = ((longest.to(tl.int64) * (lists * blocks)).to(tl.float32) <= slack * total.to(tl.float32)).to(tl.int32)
    if own == 0:
        tl.store(middle, median)
        tl.store(middle + 1, even)
    size = tl.arange(0, SIZES)
    found = tl.zeros((SIZES,), dtype=tl.int32)
    for k0 in range(0, bins, FEW_BINS):
        k = k0 + tl.arange(0, FEW_BINS)
        number = tl.load(histograms + own.to(tl.int64) * bins + k, mask=k < bins, other=0)
        of = _size(k, median, even > 0, DOUBLINGS, MIDDLE)
        found += tl.sum(tl.where(of[:, None] == size[None, :], number[:, None], 0), 0)
    tl.store(sizes + own * SIZES + size, found)


@triton.jit
def _before(l, g, groups, batches, of_batch, heads, copies):
    """How many heads of all batch elements before head g have list l."""
    batch = tl.where(batches > 1, l // groups, 0)
    head = tl.where(groups > 1, l % groups, 0)
    whole = tl.minimum(tl.maximum(g // of_batch - batch, 0), copies // heads)
    here = (g // of_batch >= batch) & (g // of_batch < batch + copies // heads)
    return whole * heads + tl.where(here, tl.minimum(tl.maximum(g % of_batch - head, 0), heads), 0)


@triton.jit
def _starts(starts, counts, row, some, begin, end, base, before, CUT: tl.constexpr, WIDTH: tl.constexpr):
    """The first entry of a kind in the range of an item, how many, and how many tiles go before the next kind."""
    first = tl.load(starts + row, mask=some, other=0) // WIDTH + base
    number = _count(counts, row, some, WIDTH)
    behind = before + number
    if CUT:
        skipped = tl.minimum(tl.maximum(begin - before, 0), number)
        number = tl.minimum(tl.maximum(end - before, 0), number) - skipped
        first += skipped
    return first, number, behind


@triton.jit
def _write(
    items, segments, merges, place, l, i, copy, b, h, some, full, interval, bits, full_starts, interval_starts,
    bits_starts, T, parts, ratio, groups, lead_b, lead_g, lead_j, lists, base_1, base_2, HAS_FULL: tl.constexpr,
    HAS_INTERVAL: tl.constexpr, HAS_BITS: tl.constexpr, WIDTH: tl.constexpr, CUT: tl.constexpr, COLUMNS: tl.constexpr,
    ITEM: tl.constexpr, SEGMENT: tl.constexpr, MERGE: tl.constexpr,
):  # fmt: skip
    """The words of items i of lists l: see `hopper.device.row_items`, `column_items` and `merges`."""
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
        lead = _lead(l, j, groups, lead_b, lead_g, lead_j)
        at = lead * T + t
        begin, end, before = nothing, nothing, nothing
        if CUT:
            length = _row_length(
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
            first, number, before = _starts(full_starts, full, at, some, begin, end, 0, before, CUT, WIDTH)
        tl.store(words, first, mask=some)
        tl.store(words + 1, number, mask=some)
        first, number = nothing, nothing
        if HAS_INTERVAL:
            first, number, before = _starts(
                interval_starts, interval, at, some, begin, end, base_1, before, CUT, WIDTH
            )  # fmt: skip
        tl.store(words + 2, first, mask=some)
        tl.store(words + 3, number, mask=some)
        first, number = nothing, nothing
        if HAS_BITS:
            first, number, before = _starts(bits_starts, bits, at, some, begin, end, base_2, before, CUT, WIDTH)
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


@triton.jit(do_not_specialize=PLAIN)
def many_kernel(
    items, segments, merges, full, interval, bits, full_starts, interval_starts, bits_starts, lengths, sizes, middle,
    T, parts, ratio, groups, lead_b, lead_g, lead_j, lists, copies, heads, of_batch, chunks, base_1, base_2,
    SIZES: tl.constexpr, MIDDLE: tl.constexpr, DOUBLINGS: tl.constexpr, LISTS: tl.constexpr, OWN: tl.constexpr,
    OTHERS: tl.constexpr, HAS_FULL: tl.constexpr, HAS_INTERVAL: tl.constexpr, HAS_BITS: tl.constexpr,
    WIDTH: tl.constexpr, CUT: tl.constexpr, COLUMNS: tl.constexpr, ITEM: tl.constexpr, SEGMENT: tl.constexpr,
    MERGE: tl.constexpr,
):  # fmt: skip
    """Some items of one head: their places are by size, head, length and row, the largest size and length first."""
    g = tl.program_id(0) // chunks
    batches = lists // groups
    b, h = g // of_batch, g % of_batch
    b_own, g_own = tl.where(batches > 1, b, 0), tl.where(groups > 1, h, 0)
    l = b_own * groups + g_own
    # Items of heads before of the same size, and of all heads of larger ones.
    smaller = tl.zeros((SIZES,), dtype=tl.int32)
    larger = tl.zeros((SIZES,), dtype=tl.int32)
    mine = tl.zeros((SIZES,), dtype=tl.int32)
    size = tl.arange(0, SIZES)
    for l0 in range(0, lists, LISTS):
        other = l0 + tl.arange(0, LISTS)
        known = (other < lists)[:, None]
        number = tl.load(sizes + other[:, None] * SIZES + size[None, :], mask=known, other=0)
        smaller += tl.sum(number * _before(other, g, groups, batches, of_batch, heads, copies)[:, None], 0)
        larger += tl.sum(number, 0) * copies
        mine += tl.sum(tl.where((other == l)[:, None], number, 0), 0)
    larger -= mine  # those of its own list are counted one by one
    base = smaller + tl.cumsum(larger, 0, reverse=True) - larger
    i = tl.program_id(0) % chunks * OWN + tl.arange(0, OWN)
    some = i < T * parts
    line = lengths + l.to(tl.int64) * T * parts
    length = tl.load(line + i, mask=some, other=0)
    place = tl.zeros((OWN,), dtype=tl.int32)
    for j0 in range(0, T * parts, OTHERS):
        j = j0 + tl.arange(0, OTHERS)
        other = tl.load(line + j, mask=j < T * parts, other=-1)[None, :]
        first = (other > length[:, None]) | ((other == length[:, None]) & (j[None, :] < i[:, None]))
        place += tl.sum(first.to(tl.int32), 1)
    of = _size(length, tl.load(middle), tl.load(middle + 1) > 0, DOUBLINGS, MIDDLE)
    place += tl.sum(tl.where(of[:, None] == size[None, :], base[None, :], 0), 1)
    nothing = tl.zeros((OWN,), dtype=tl.int32)
    copy = (b - b_own) * heads + h - g_own
    _write(
        items, segments, merges, place, nothing + l, i, nothing + copy, nothing + b, nothing + h, some, full, interval,
        bits, full_starts, interval_starts, bits_starts, T, parts, ratio, groups, lead_b, lead_g, lead_j, lists,
        base_1, base_2, HAS_FULL, HAS_INTERVAL, HAS_BITS, WIDTH, CUT, COLUMNS, ITEM, SEGMENT, MERGE,
    )  # fmt: skip
