"""The kernels that write items in the order in which blocks draw them, as `rows.for_every_head` defines it.

Of each item they count how many go before it. Of many items it is known first how many of every list reach each length.
"""

from __future__ import annotations

from collections import namedtuple

import triton
import triton.language as tl

from gossamer.kernels.hopper.schedule.item_words import item_length, row_length, write

SIZES = 64  # that are told apart
MIDDLE = 32  # the size of items as long as the median
HALVINGS = 20  # of the shortest items, and doublings of the median


# Numbers that kernels are compiled for: that there is one part, or one head.
# parts: of each row
# ratio: heads of a group of rows
Cut = namedtuple("Cut", "parts ratio")
# Numbers of `length_kernel` of which no other kernels are compiled for what divides them; so the others.
LengthNumbers = namedtuple("LengthNumbers", "T groups lead_b lead_g lead_j bins")
ItemNumbers = namedtuple(
    "ItemNumbers",
    "T groups lead_b lead_g lead_j lists bins blocks copies heads of_batch chunks base_1 base_2 n_items",
)
# What `length_kernel` is compiled for; so the others.
LengthForm = namedtuple("LengthForm", "HAS_FULL HAS_INTERVAL HAS_BITS WIDTH ITEMS BINS")
ItemForm = namedtuple(
    "ItemForm",
    "SIZES MIDDLE HALVINGS LISTS BY_COPY OWN OTHERS HAS_FULL HAS_INTERVAL HAS_BITS WIDTH CUT COLUMNS ITEM "
    "SEGMENT MERGE",
)


@triton.jit(do_not_specialize=["numbers"])
def length_kernel(full, interval, bits, lengths, reached, totals, numbers: LengthNumbers, cut: Cut, FORM: tl.constexpr):
    """The lengths of the items of one list, and how many reach some of all lengths.

    Args:
        lengths: (lists, T * parts).
        reached: (lists, bins), of lengths from 0.
        totals: (lists, 2) int64: the longest, and the sum of all.
    """
    ITEMS: tl.constexpr = FORM.ITEMS
    BINS: tl.constexpr = FORM.BINS
    T, groups, lead_b, lead_g, lead_j, bins = numbers
    parts = cut.parts
    counts, sizes = (full, interval, bits), (T, parts, cut.ratio, groups, lead_b, lead_g, lead_j)
    l, k0 = tl.program_id(0), tl.program_id(1) * BINS
    line = lengths + l.to(tl.int64) * T * parts
    found = tl.zeros((BINS,), dtype=tl.int32)
    greater, longest = tl.zeros((ITEMS,), dtype=tl.int32), tl.zeros((ITEMS,), dtype=tl.int32)
    total = tl.zeros((ITEMS,), dtype=tl.int64)
    for i0 in range(0, T * parts, ITEMS):
        i = i0 + tl.arange(0, ITEMS)
        some = i < T * parts
        length = row_length(counts, l, i // parts, some, sizes, FORM)
        length = tl.minimum(item_length(length, i % parts, parts), bins - 1)
        if k0 == 0:
            tl.store(line + i, length, mask=some)
        inside = some & (length >= k0) & (length < k0 + BINS)
        found += tl.histogram(tl.where(inside, length - k0, 0), BINS, mask=inside)
        greater += (some & (length >= k0 + BINS)).to(tl.int32)
        longest = tl.maximum(longest, tl.where(some, length, 0))
        total += tl.where(some, length, 0)
    k = k0 + tl.arange(0, BINS)
    tl.store(reached + l.to(tl.int64) * bins + k, tl.sum(greater, 0) + tl.cumsum(found, 0, reverse=True), mask=k < bins)
    if k0 == 0:
        tl.store(totals + 2 * l, tl.max(longest, 0).to(tl.int64))
        tl.store(totals + 2 * l + 1, tl.sum(total, 0))


@triton.jit
def _median(reached, lists, bins, half, LISTS: tl.constexpr, POINTS: tl.constexpr):
    """The greatest length that more than half of all items reach, by some lengths at a time; at least 1."""
    median, stride = bins * 0, bins
    while stride > 1:
        stride = (stride + POINTS - 1) // POINTS
        k = median + tl.arange(0, POINTS) * stride
        number = tl.zeros((POINTS,), dtype=tl.int32)
        for l0 in range(0, lists, LISTS):
            l = l0 + tl.arange(0, LISTS)
            at = reached + l[:, None].to(tl.int64) * bins + k[None, :]
            number += tl.sum(tl.load(at, mask=(l < lists)[:, None] & (k < bins)[None, :], other=0), 0)
        median += (tl.sum((number > half).to(tl.int32), 0) - 1) * stride
    return tl.maximum(median, 1)


@triton.jit
def _least(size, median, even, bins, MIDDLE: tl.constexpr, HALVINGS: tl.constexpr):
    """The least length of some sizes: how often it has to be halved to be the median, or doubled, whole times.

    Args:
        even: no item comes first.
    """
    doubled = tl.minimum(tl.maximum(size - MIDDLE, 0), HALVINGS).to(tl.int64)
    halved = tl.minimum(tl.maximum(MIDDLE + 1 - size, 0), 31)
    long = tl.where(even, bins, tl.minimum(median.to(tl.int64) << doubled, bins).to(tl.int32))
    short = tl.where(size > MIDDLE - HALVINGS, (median >> halved) + 1, 0)
    return tl.where(size > MIDDLE, long, short)


@triton.jit
def _before(l, g, groups, batches, of_batch, heads, copies):
    """How many heads of all batch elements before head g have list l."""
    batch = tl.where(batches > 1, l // groups, 0)
    head = tl.where(groups > 1, l % groups, 0)
    whole = tl.minimum(tl.maximum(g // of_batch - batch, 0), copies // heads)
    here = (g // of_batch >= batch) & (g // of_batch < batch + copies // heads)
    return whole * heads + tl.where(here, tl.minimum(tl.maximum(g % of_batch - head, 0), heads), 0)


@triton.jit(do_not_specialize=["numbers"])
def many_kernel(
    items, segments, merges, full, interval, bits, full_starts, interval_starts, bits_starts, lengths, reached, totals,
    numbers: ItemNumbers, cut: Cut, slack, FORM: tl.constexpr,
):  # fmt: skip
    """Some items of one head: their places are by size, head, length and row, the largest size and length first."""
    SIZES: tl.constexpr = FORM.SIZES
    MIDDLE: tl.constexpr = FORM.MIDDLE
    HALVINGS: tl.constexpr = FORM.HALVINGS
    LISTS: tl.constexpr = FORM.LISTS
    OWN: tl.constexpr = FORM.OWN
    OTHERS: tl.constexpr = FORM.OTHERS
    T, groups, lead_b, lead_g, lead_j, lists, bins, blocks = numbers[:8]
    copies, heads, of_batch, chunks, base_1, base_2, n_items = numbers[8:]
    parts = cut.parts
    g = tl.program_id(0) // chunks
    batches = lists // groups
    b, h = g // of_batch, g % of_batch
    b_own, g_own = tl.where(batches > 1, b, 0), tl.where(groups > 1, h, 0)
    l = b_own * groups + g_own
    longest, total = tl.zeros((LISTS,), dtype=tl.int64), tl.zeros((LISTS,), dtype=tl.int64)
    for l0 in range(0, lists, LISTS):
        other = l0 + tl.arange(0, LISTS)
        longest = tl.maximum(longest, tl.load(totals + 2 * other, mask=other < lists, other=0))
        total += tl.load(totals + 2 * other + 1, mask=other < lists, other=0)
    most = tl.max(longest, 0) * (lists * blocks)
    even = most.to(tl.float32) <= slack * tl.sum(total, 0).to(tl.float32)
    median = _median(reached, lists, bins, n_items // 2, LISTS, SIZES)
    size = tl.arange(0, SIZES)
    least = _least(size, median, even, bins, MIDDLE, HALVINGS)
    less = _least(size + 1, median, even, bins, MIDDLE, HALVINGS)  # than this
    # Items of heads before of the same size, and of all heads of larger ones.
    smaller = tl.zeros((SIZES,), dtype=tl.int32)
    larger = tl.zeros((SIZES,), dtype=tl.int32)
    mine = tl.zeros((SIZES,), dtype=tl.int32)
    for l0 in range(0, lists, LISTS):
        other = l0 + tl.arange(0, LISTS)
        at, known = reached + other[:, None].to(tl.int64) * bins, (other < lists)[:, None]
        number = tl.load(at + least[None, :], mask=known & (least < bins)[None, :], other=0)
        number -= tl.load(at + less[None, :], mask=known & (less < bins)[None, :], other=0)
        smaller += tl.sum(number * _before(other, g, groups, batches, of_batch, heads, copies)[:, None], 0)
        larger += tl.sum(number, 0) * copies
        mine += tl.sum(tl.where((other == l)[:, None], number, 0), 0)
    larger -= mine  # those of its own list are counted by their lengths
    base = smaller + tl.cumsum(larger, 0, reverse=True) - larger
    i0 = tl.program_id(0) % chunks * OWN
    i = i0 + tl.arange(0, OWN)
    some = i < T * parts
    line = lengths + l.to(tl.int64) * T * parts
    length = tl.load(line + i, mask=some, other=0)
    place = tl.load(reached + l.to(tl.int64) * bins + length + 1, mask=some & (length + 1 < bins), other=0)
    for j0 in range(0, tl.minimum(i0 + OWN, T * parts), OTHERS):
        j = j0 + tl.arange(0, OTHERS)
        other = tl.load(line + j, mask=j < T * parts, other=-1)[None, :]
        place += tl.sum(((other == length[:, None]) & (j[None, :] < i[:, None])).to(tl.int32), 1)
    of = (length[:, None] >= least[None, :]) & (length[:, None] < less[None, :])
    place += tl.sum(tl.where(of, base[None, :], 0), 1)
    nothing = tl.zeros((OWN,), dtype=tl.int32)
    copy = (b - b_own) * heads + h - g_own
    sizes = (T, parts, cut.ratio, groups, lead_b, lead_g, lead_j, lists, base_1, base_2)
    write(
        (items, segments, merges), place, nothing + l, i, nothing + copy, nothing + b, nothing + h, some,
        (full, interval, bits), (full_starts, interval_starts, bits_starts), sizes, FORM,
    )  # fmt: skip


@triton.jit(do_not_specialize=["numbers"])
def few_kernel(
    items, segments, merges, full, interval, bits, full_starts, interval_starts, bits_starts,
    numbers: ItemNumbers, cut: Cut, FORM: tl.constexpr,
):  # fmt: skip
    """Some items: their places are by length, head and row, the longest first; or each copy's by length and row."""
    OWN: tl.constexpr = FORM.OWN
    OTHERS: tl.constexpr = FORM.OTHERS
    BY_COPY: tl.constexpr = FORM.BY_COPY
    T, groups, lead_b, lead_g, lead_j, lists, _bins, _blocks, copies, heads, of_batch = numbers[:11]
    parts, base_1, base_2 = cut.parts, numbers.base_1, numbers.base_2
    counts, sizes = (full, interval, bits), (T, parts, cut.ratio, groups, lead_b, lead_g, lead_j)
    batches, of_list = lists // groups, T * parts
    n = lists * of_list
    x = tl.program_id(0) * OWN + tl.arange(0, OWN)
    some = x < n * copies
    copy, x = x // n, x % n
    l, i = x // of_list, x % of_list
    b = tl.where(batches > 1, l // groups, 0) + copy // heads
    h = tl.where(groups > 1, l % groups, 0) + copy % heads
    g = b * of_batch + h
    length = row_length(counts, l, i // parts, some, sizes, FORM)
    length = item_length(length, i % parts, parts)[:, None]
    place = tl.zeros((OWN,), dtype=tl.int32)
    for y0 in range(0, n, OTHERS):
        y = y0 + tl.arange(0, OTHERS)
        of, j = y // of_list, y % of_list
        other = row_length(counts, of, j // parts, y < n, sizes, FORM)
        other = tl.where(y < n, item_length(other, j % parts, parts), -1)[None, :]
        longer, equal = (other > length).to(tl.int32), (other == length).to(tl.int32)
        before = (y[None, :] < x[:, None]).to(tl.int32)
        if BY_COPY:
            place += tl.sum(longer + equal * before, 1)
        else:
            before *= (of[None, :] == l[:, None]).to(tl.int32)
            before += _before(of[None, :], g[:, None], groups, batches, of_batch, heads, copies)
            place += tl.sum(longer * copies + equal * before, 1)
    if BY_COPY:
        place += copy * n
    starts = (full_starts, interval_starts, bits_starts)
    every = sizes + (lists, base_1, base_2)  # noqa: RUF005  (Triton reads no stars)
    write((items, segments, merges), place, l, i, copy, b, h, some, counts, starts, every, FORM)
