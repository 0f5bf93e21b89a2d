"""The kernels that write many items in the order in which blocks draw them, as `rows.for_every_head` defines it.

How many items of each length every list has, of those how many of each size, and then of each item how many go before
it. Items are whole rows of full tiles.
"""

from __future__ import annotations

import triton
import triton.language as tl

PLAIN = [
    "T", "ratio", "groups", "lead_b", "lead_g", "lead_j", "lists", "bins", "blocks", "copies", "heads", "of_batch",
    "chunks", "n_items",
]  # fmt: skip
SIZES = 64  # that are told apart
MIDDLE = 32  # the size of items as long as the median
DOUBLINGS = 24  # of the median, up to the longest


@triton.jit
def _lead(l, j, groups, lead_b, lead_g, lead_j):
    """The list of a layout that the j-th head of a group of rows has."""
    return l // groups * lead_b + l % groups * lead_g + j * lead_j


@triton.jit(do_not_specialize=PLAIN)
def length_kernel(
    counts, lengths, histograms, T, ratio, groups, lead_b, lead_g, lead_j, bins, ITEMS: tl.constexpr, BINS: tl.constexpr
):
    """The tiles of the rows of one list, with all heads that are walked for them, and how many rows have each number.

    Args:
        lengths: (lists, T); histograms: (lists, bins), of which a program writes BINS.
    """
    l, k0 = tl.program_id(0), tl.program_id(1) * BINS
    found = tl.zeros((BINS,), dtype=tl.int32)
    for t0 in range(0, T, ITEMS):
        t = t0 + tl.arange(0, ITEMS)
        length = tl.zeros((ITEMS,), dtype=tl.int32)
        for j in range(ratio):
            length += tl.load(counts + _lead(l, j, groups, lead_b, lead_g, lead_j) * T + t, mask=t < T, other=0)
        length = tl.minimum(length, bins - 1)
        if k0 == 0:
            tl.store(lengths + l.to(tl.int64) * T + t, length, mask=t < T)
        inside = (t < T) & (length >= k0) & (length < k0 + BINS)
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


@triton.jit(do_not_specialize=PLAIN)
def many_kernel(
    items, segments, starts, counts, lengths, sizes, middle, T, ratio, groups, lead_b, lead_g, lead_j, lists, copies,
    heads, of_batch, chunks, SIZES: tl.constexpr, MIDDLE: tl.constexpr, DOUBLINGS: tl.constexpr, LISTS: tl.constexpr,
    OWN: tl.constexpr, OTHERS: tl.constexpr, COLUMNS: tl.constexpr, ITEM: tl.constexpr, SEGMENT: tl.constexpr,
):  # fmt: skip
    """Some items of one head: their places are by size, head, length and row, the largest size and length first.

    Their words are those of `hopper.device.row_items`, or `column_items`.
    """
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
    t = tl.program_id(0) % chunks * OWN + tl.arange(0, OWN)
    some, line = t < T, lengths + l.to(tl.int64) * T
    length = tl.load(line + t, mask=some, other=0)
    place = tl.zeros((OWN,), dtype=tl.int32)
    for j0 in range(0, T, OTHERS):
        j = j0 + tl.arange(0, OTHERS)
        other = tl.load(line + j, mask=j < T, other=-1)[None, :]
        first = (other > length[:, None]) | ((other == length[:, None]) & (j[None, :] < t[:, None]))
        place += tl.sum(first.to(tl.int32), 1)
    of = _size(length, tl.load(middle), tl.load(middle + 1) > 0, DOUBLINGS, MIDDLE)
    place += tl.sum(tl.where(of[:, None] == size[None, :], base[None, :], 0), 1)
    nothing = tl.zeros((OWN,), dtype=tl.int32)
    to = items + place.to(tl.int64) * ITEM
    tl.store(to, nothing + b, mask=some)
    tl.store(to + 1, nothing + h, mask=some)
    tl.store(to + 2, t, mask=some)
    tl.store(to + 3, nothing - 1, mask=some)  # no row is cut
    if COLUMNS:
        tl.store(to + 4, (l * T + t) * ratio, mask=some)
        tl.store(to + 5, nothing + ratio, mask=some)
        tl.store(to + 6, nothing + 1, mask=some)
        for word in tl.static_range(7, ITEM):
            tl.store(to + word, nothing, mask=some)
        # Copies have their segments in common.
        some &= nothing + (b - b_own + h - g_own) == 0
        for j in range(ratio):
            lead = _lead(l, j, groups, lead_b, lead_g, lead_j)
            words = segments + ((l * T + t) * ratio + j).to(tl.int64) * SEGMENT
            tl.store(words, nothing + j, mask=some)
            tl.store(words + 1, nothing + lead, mask=some)
            tl.store(words + 2, tl.load(starts + lead * T + t, mask=some, other=0), mask=some)
            tl.store(words + 3, tl.load(counts + lead * T + t, mask=some, other=0), mask=some)
            for word in tl.static_range(4, SEGMENT):
                tl.store(words + word, nothing, mask=some)
    else:
        tl.store(to + 4, tl.load(starts + l * T + t, mask=some, other=0), mask=some)
        tl.store(to + 5, length, mask=some)
        for word in tl.static_range(6, 10):
            tl.store(to + word, nothing, mask=some)
        tl.store(to + 10, nothing + l, mask=some)
        tl.store(to + 11, nothing + 1, mask=some)
        for word in tl.static_range(12, ITEM):
            tl.store(to + word, nothing, mask=some)
