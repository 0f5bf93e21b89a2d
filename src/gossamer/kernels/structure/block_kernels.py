"""The kernels that order lists of blocks, and that transpose them.

The blocks of a list are marked in a row of bits: word w holds blocks 32 w to 32 w + 31. How many bits are set before a
block is its place in the list, so that an entry that is repeated is written where it is already. The transpose counts
and places the bits of a few columns, rows ascending.
"""

from __future__ import annotations

from collections import namedtuple

import triton
import triton.language as tl

# Of no argument are other kernels compiled for numbers that something divides: they change from call to call.
SIZES = ["T", "C", "groups", "whole"]

# The numbers of `order_kernel`.
OrderNumbers = namedtuple(
    "OrderNumbers",
    "T C n Q K heads groups stride_b stride_h stride_t stride_n count_b count_h count_t bound_b bound_h bound_q",
)
# What `order_kernel` is compiled for.
OrderForm = namedtuple("OrderForm", "HAS_COUNTS BOUNDED KINDS KEPT BLOCK LISTS ENTRIES WORDS")
# What the kernels of the transpose are compiled for.
ColumnForm = namedtuple("ColumnForm", "KINDS KEPT ROWS COLUMNS SUMS")


@triton.jit
def below(places):
    """Words of which the bits at places below each number are set."""
    part = (1 << tl.minimum(tl.maximum(places, 0), 31)) - 1
    return tl.where(places >= 32, -1, part)


@triton.jit
def popcount(words):
    x = words.to(tl.uint32, bitcast=True)
    x = x - ((x >> 1) & 0x55555555)
    x = (x & 0x33333333) + ((x >> 2) & 0x33333333)
    x = (x + (x >> 4)) & 0x0F0F0F0F
    return ((x * 0x01010101) >> 24).to(tl.int32)


@triton.jit
def _entries(lists, limit, there, j0, C, stride_n, ENTRIES: tl.constexpr):
    """Entries j0 and on of some lists, (lists, ENTRIES): which are blocks, and which those are."""
    j = j0 + tl.arange(0, ENTRIES)[None, :]
    x = tl.load(lists[:, None] + j.to(tl.int64) * stride_n, mask=there[:, None] & (j < limit[:, None]), other=-1)
    some = (x >= 0) & (x < C)
    return some, tl.where(some, x, 0).to(tl.int32)


@triton.jit(do_not_specialize=["numbers"])
def order_kernel(
    indices, counts, lo, hi, row_starts, row_counts, row_indices, listed_bits, kept_bits, before,
    numbers: OrderNumbers, FORM: tl.constexpr,
):  # fmt: skip
    """Some lists of a head: their blocks ascending, the full ones first, and zeros behind; and their bits.

    Args:
        listed_bits, kept_bits: (Bl * Hl, words, T): that a tile is listed, and that all that exists in it is kept.
        before: (2, Bl * Hl, words, T): how many full tiles are in words before each, and how many others.
    """
    BOUNDED: tl.constexpr = FORM.BOUNDED
    KINDS: tl.constexpr = FORM.KINDS
    BLOCK: tl.constexpr = FORM.BLOCK
    LISTS: tl.constexpr = FORM.LISTS
    ENTRIES: tl.constexpr = FORM.ENTRIES
    WORDS: tl.constexpr = FORM.WORDS
    T, C, n, Q, K, heads, groups = numbers[:7]
    stride_b, stride_h, stride_t, stride_n, count_b, count_h, count_t, bound_b, bound_h, bound_q = numbers[7:]
    at = tl.program_id(0)
    head, t = at // groups, at % groups * LISTS + tl.arange(0, LISTS)
    there, b, h = t < T, (head // heads).to(tl.int64), (head % heads).to(tl.int64)
    words, row = (C + 31) // 32, head.to(tl.int64) * T + t
    limit = tl.zeros((LISTS,), dtype=tl.int32) + n
    if FORM.HAS_COUNTS:
        given = tl.load(counts + b * count_b + h * count_h + t.to(tl.int64) * count_t, mask=there, other=0)
        limit = tl.minimum(tl.maximum(given.to(tl.int64), 0), n).to(tl.int32)
    lists = indices + b * stride_b + h * stride_h + t.to(tl.int64) * stride_t
    bounds = b * bound_b + h * bound_h
    first, behind = tl.zeros((LISTS,), dtype=tl.int32), tl.zeros((LISTS,), dtype=tl.int32) + C
    if BOUNDED:
        last = bounds + (tl.minimum(t * BLOCK + BLOCK, Q) - 1).to(tl.int64) * bound_q
        first = (tl.load(lo + last, mask=there, other=0) + BLOCK - 1) // BLOCK
        least = tl.load(hi + bounds + (t * BLOCK).to(tl.int64) * bound_q, mask=there, other=0)
        behind = tl.where(least >= K, C, least // BLOCK)  # the last block ends with the last key
    full_end = tl.minimum(behind, K // BLOCK)  # a tile that reaches past the last key is never full
    word = tl.arange(0, WORDS)[:, None]
    line = head.to(tl.int64) * words * T + t  # of the first word of each list
    for w0 in range(0, words, WORDS):
        some = (w0 + word < words) & there[None, :]
        to = listed_bits + line[None, :] + (w0 + word).to(tl.int64) * T
        tl.store(to, tl.zeros((WORDS, LISTS), dtype=tl.int32), mask=some)
    tl.debug_barrier()
    for j0 in range(0, n, ENTRIES):
        some, c = _entries(lists, limit, there, j0, C, stride_n, ENTRIES)
        if BOUNDED:
            met = tl.zeros((LISTS, ENTRIES), dtype=tl.int32) > 0
            for q in range(BLOCK):
                r = t * BLOCK + q
                known = there & (r < Q)
                begin = tl.load(lo + bounds + r.to(tl.int64) * bound_q, mask=known, other=0)
                end = tl.load(hi + bounds + r.to(tl.int64) * bound_q, mask=known, other=0)
                # In blocks; of none where nothing is kept.
                begin, end = begin // BLOCK, tl.where(end > begin, (end + BLOCK - 1) // BLOCK, 0)
                met |= (c >= begin[:, None]) & (c < end[:, None])
            some &= met
        to = listed_bits + line[:, None] + (c // 32).to(tl.int64) * T
        tl.atomic_or(to, 1 << c % 32, mask=some, sem="relaxed")
    tl.debug_barrier()
    full, others = tl.zeros((LISTS,), dtype=tl.int32), tl.zeros((LISTS,), dtype=tl.int32)
    plane = tl.num_programs(0).to(tl.int64) // groups * words * T
    for w0 in range(0, words, WORDS):
        some = (w0 + word < words) & there[None, :]
        to = line[None, :] + (w0 + word).to(tl.int64) * T
        listed = tl.load(listed_bits + to, mask=some, other=0)
        left = below(first[None, :] - (w0 + word) * 32)
        if FORM.KEPT:
            tl.store(kept_bits + to, listed & below(behind[None, :] - (w0 + word) * 32) & ~left, mask=some)
        chosen = listed
        if KINDS == 2:
            chosen = listed & below(full_end[None, :] - (w0 + word) * 32) & ~left
            number = popcount(listed & ~chosen)
            tl.store(before + plane + to, others[None, :] + tl.cumsum(number, 0) - number, mask=some)
            others += tl.sum(number, 0)
        number = popcount(chosen)
        tl.store(before + to, full[None, :] + tl.cumsum(number, 0) - number, mask=some)
        full += tl.sum(number, 0)
    tl.store(row_starts + row, (row * n).to(tl.int32), mask=there)
    tl.store(row_counts + row, full, mask=there)
    if KINDS == 2:
        behind_all = tl.num_programs(0).to(tl.int64) // groups * T + row
        tl.store(row_starts + behind_all, (row * n).to(tl.int32) + full, mask=there)
        tl.store(row_counts + behind_all, others, mask=there)
    empty_count = row_counts + KINDS * (tl.num_programs(0).to(tl.int64) // groups * T) + row
    tl.store(empty_count, tl.zeros((LISTS,), dtype=tl.int32), mask=there)
    tl.debug_barrier()
    for j0 in range(0, n, ENTRIES):
        j = j0 + tl.arange(0, ENTRIES)[None, :]
        unused = there[:, None] & (j >= (full + others)[:, None]) & (j < n)
        tl.store(row_indices + (row * n)[:, None] + j, tl.zeros((LISTS, ENTRIES), dtype=tl.int32), mask=unused)
        some, c = _entries(lists, limit, there, j0, C, stride_n, ENTRIES)
        to = line[:, None] + (c // 32).to(tl.int64) * T
        listed = tl.load(listed_bits + to, mask=some, other=0)
        some &= (listed >> c % 32 & 1) > 0
        place = tl.load(before + to, mask=some, other=0)
        if KINDS == 2:
            base = c // 32 * 32
            chosen = listed & below(full_end[:, None] - base) & ~below(first[:, None] - base)
            inside = (chosen >> c % 32 & 1) > 0
            other = full[:, None] + tl.load(before + plane + to, mask=some, other=0)
            place = tl.where(inside, place, other)
            listed = tl.where(inside, chosen, listed & ~chosen)
        place += popcount(listed & below(c % 32))
        tl.store(row_indices + (row * n)[:, None] + place, c, mask=some)


@triton.jit
def _bits(listed_bits, kept_bits, at, t, T, whole, shift, kind: tl.constexpr, KINDS: tl.constexpr, KEPT: tl.constexpr):
    """Which of some columns the rows t list as a kind, (rows, columns) of 0 and 1."""
    listed = tl.load(listed_bits + at + t, mask=t < T, other=0)[:, None] >> shift[None, :]
    if KINDS == 1:
        return listed & 1
    kept = listed
    if KEPT:
        kept = tl.load(kept_bits + at + t, mask=t < T, other=0)[:, None] >> shift[None, :]
    full = kept & (t < whole)[:, None].to(tl.int32)  # a tile that reaches past the last query is never full here
    return full & 1 if kind == 0 else listed & ~full & 1


@triton.jit
def _few_columns(T, C, groups, COLUMNS: tl.constexpr):
    """(program, programs, head, columns, where they are in their words, the first word of each) of a program."""
    at, programs = tl.program_id(0), tl.num_programs(0)
    head, c0 = at // groups, at % groups * COLUMNS
    shift = c0 % 32 + tl.arange(0, COLUMNS)
    line = (head.to(tl.int64) * ((C + 31) // 32) + c0 // 32) * T
    return at, programs, head, c0 + tl.arange(0, COLUMNS), shift, line


@triton.jit(do_not_specialize=SIZES)
def count_kernel(listed_bits, kept_bits, counts, sums, T, C, groups, whole, FORM: tl.constexpr):
    """How many rows list each of a few columns: counts (KINDS + 1, Bl * Hl, C), then zeros; sums (KINDS, programs)."""
    KINDS: tl.constexpr = FORM.KINDS
    ROWS: tl.constexpr = FORM.ROWS
    COLUMNS: tl.constexpr = FORM.COLUMNS
    at, programs, head, c, shift, line = _few_columns(T, C, groups, COLUMNS)
    empty_counts = counts + (KINDS * (programs // groups) + head).to(tl.int64) * C + c
    tl.store(empty_counts, tl.zeros((COLUMNS,), dtype=tl.int32), mask=c < C)
    for kind in tl.static_range(KINDS):
        counted = tl.zeros((ROWS, COLUMNS), dtype=tl.int32)
        for t0 in range(0, T, ROWS):
            t = t0 + tl.arange(0, ROWS)
            counted += _bits(listed_bits, kept_bits, line, t, T, whole, shift, kind, KINDS, FORM.KEPT)
        number = tl.sum(counted, 0)
        lists = (programs // groups).to(tl.int64) * C
        tl.store(counts + kind * lists + head.to(tl.int64) * C + c, number, mask=c < C)
        tl.store(sums + kind * programs + at, tl.sum(number, 0))


@triton.jit(do_not_specialize=SIZES)
def place_kernel(listed_bits, kept_bits, counts, sums, starts, indices, T, C, groups, whole, FORM: tl.constexpr):
    """The rows that list each of a few columns, ascending; lists of a kind follow one another, by head and column."""
    KINDS: tl.constexpr = FORM.KINDS
    ROWS: tl.constexpr = FORM.ROWS
    COLUMNS: tl.constexpr = FORM.COLUMNS
    SUMS: tl.constexpr = FORM.SUMS
    at, programs, head, c, shift, line = _few_columns(T, C, groups, COLUMNS)
    for kind in tl.static_range(KINDS):
        before = tl.zeros((SUMS,), dtype=tl.int32)
        for s0 in range(0, kind * programs + at, SUMS):
            s = s0 + tl.arange(0, SUMS)
            before += tl.load(sums + s, mask=s < kind * programs + at, other=0)
        place = kind * (programs // groups).to(tl.int64) * C + head.to(tl.int64) * C + c
        number = tl.load(counts + place, mask=c < C, other=0)
        start = tl.sum(before, 0) + tl.cumsum(number, 0) - number
        tl.store(starts + place, start, mask=c < C)
        for t0 in range(0, T, ROWS):
            t = t0 + tl.arange(0, ROWS)
            placed = _bits(listed_bits, kept_bits, line, t, T, whole, shift, kind, KINDS, FORM.KEPT)
            to = start[None, :] + tl.cumsum(placed, 0) - 1
            tl.store(indices + to, tl.broadcast_to(t[:, None], (ROWS, COLUMNS)), mask=placed > 0)
            start += tl.sum(placed, 0)
