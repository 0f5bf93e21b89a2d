"""The kernels that order lists of blocks, and that transpose them.

A list is marked in a row of flags, one a block, which are written in ascending order, and kept as bits: word w of a row
holds blocks 32 w to 32 w + 31. The transpose counts and places the bits of a few columns, rows ascending.
"""

from __future__ import annotations

import triton
import triton.language as tl

PLAIN = ["T", "C", "n", "Q", "K", "heads", "groups"]  # of which no other kernel is compiled for other numbers


@triton.jit
def _load_tile(lo, hi, b, h, t, Q, K, bound_b, bound_h, bound_q, BLOCK: tl.constexpr, ROWS: tl.constexpr):
    """Of a block of queries: the key blocks that each query begins and ends in, and those that all of them keep."""
    row = tl.arange(0, ROWS)
    at = b.to(tl.int64) * bound_b + h.to(tl.int64) * bound_h + (t * BLOCK + row).to(tl.int64) * bound_q
    there = (row < BLOCK) & (t * BLOCK + row < Q)
    begin, end = tl.load(lo + at, mask=there, other=0), tl.load(hi + at, mask=there, other=0)
    there &= end > begin
    head = b.to(tl.int64) * bound_b + h.to(tl.int64) * bound_h
    last = tl.load(lo + head + tl.minimum(t * BLOCK + BLOCK, Q).to(tl.int64) * bound_q - bound_q)
    least = tl.load(hi + head + (t * BLOCK).to(tl.int64) * bound_q)
    first, behind = (last + BLOCK - 1) // BLOCK, least // BLOCK
    behind = tl.where(least >= K, (K + BLOCK - 1) // BLOCK, behind)  # the last block ends with the last key
    return there, begin // BLOCK, (end + BLOCK - 1) // BLOCK, first, behind


@triton.jit
def _flags(
    at, limit, c0, C, stride_n, there, begin, end, BOUNDED: tl.constexpr, ENTRIES: tl.constexpr, COLUMNS: tl.constexpr
):
    """Which of the blocks from c0 on are listed, and meet the interval of a query."""
    found = tl.zeros((COLUMNS,), dtype=tl.int32)
    for j0 in range(0, limit, ENTRIES):
        j = j0 + tl.arange(0, ENTRIES)
        x = tl.load(at + j.to(tl.int64) * stride_n, mask=j < limit, other=-1)
        some = (x >= c0) & (x < c0 + COLUMNS) & (x < C)
        found += tl.histogram(tl.where(some, x - c0, 0).to(tl.int32), COLUMNS, mask=some)
    listed = found > 0
    if BOUNDED:
        # What is begun and not ended yet.
        begun = tl.histogram(tl.maximum(begin - c0, 0), COLUMNS, mask=there & (begin < c0 + COLUMNS))
        ended = tl.histogram(tl.maximum(end - c0, 0), COLUMNS, mask=there & (end < c0 + COLUMNS))
        listed &= tl.cumsum(begun - ended, 0) > 0
    return listed


@triton.jit(do_not_specialize=PLAIN)
def order_kernel(
    indices, counts, lo, hi, row_starts, row_counts, row_indices, listed_bits, kept_bits, T, C, n, Q, K, heads, stride_b,
    stride_h, stride_t, stride_n, count_b, count_h, count_t, bound_b, bound_h, bound_q, HAS_COUNTS: tl.constexpr,
    BOUNDED: tl.constexpr, KINDS: tl.constexpr, TRANSPOSE: tl.constexpr, KEPT: tl.constexpr, BLOCK: tl.constexpr,
    ROWS: tl.constexpr, ENTRIES: tl.constexpr, COLUMNS: tl.constexpr,
):  # fmt: skip
    """One list: its blocks ascending, the full ones first, and zeros behind; and its bits.

    Args:
        listed_bits, kept_bits: (Bl * Hl, words, T): that a tile is listed, and that all that exists in it is kept.
    """
    at = tl.program_id(0)
    t, head = at % T, at // T
    b, h = head // heads, head % heads
    limit = n
    if HAS_COUNTS:
        given = tl.load(counts + b.to(tl.int64) * count_b + h.to(tl.int64) * count_h + t.to(tl.int64) * count_t)
        limit = tl.minimum(tl.maximum(given.to(tl.int64), 0), n.to(tl.int64)).to(tl.int32)
    entries = indices + b.to(tl.int64) * stride_b + h.to(tl.int64) * stride_h + t.to(tl.int64) * stride_t
    there, begin, end, first, behind = 0, 0, 0, 0, 0
    if BOUNDED:
        there, begin, end, first, behind = _load_tile(lo, hi, b, h, t, Q, K, bound_b, bound_h, bound_q, BLOCK, ROWS)
    base = row_indices + at.to(tl.int64) * n
    word, words = tl.arange(0, COLUMNS // 32), (C + 31) // 32
    done = 0
    for kind in tl.static_range(KINDS):
        before = done
        for c0 in range(0, C, COLUMNS):
            c = c0 + tl.arange(0, COLUMNS)
            listed = _flags(entries, limit, c0, C, stride_n, there, begin, end, BOUNDED, ENTRIES, COLUMNS)
            kept = listed
            if BOUNDED:
                kept = listed & (c >= first) & (c < behind)
            if TRANSPOSE and kind == 0:
                to = (head.to(tl.int64) * words + c0 // 32 + word) * T + t
                bit = tl.arange(0, 32)[None, :]
                some = c0 // 32 + word < words
                bits = tl.sum(tl.reshape(listed.to(tl.int32), (COLUMNS // 32, 32)) << bit, 1)
                tl.store(listed_bits + to, bits, mask=some)
                if KEPT:
                    bits = tl.sum(tl.reshape(kept.to(tl.int32), (COLUMNS // 32, 32)) << bit, 1)
                    tl.store(kept_bits + to, bits, mask=some)
            wanted = listed
            if KINDS == 2:
                full = kept & (c < K // BLOCK)  # a tile that reaches past the last key is never full
                wanted = full if kind == 0 else listed & (full == 0)
            number = wanted.to(tl.int32)
            tl.store(base + done + tl.cumsum(number, 0) - 1, c, mask=wanted)
            done += tl.sum(number, 0)
        of_kind = kind * tl.num_programs(0).to(tl.int64) + at
        tl.store(row_starts + of_kind, at * n + before)
        tl.store(row_counts + of_kind, done - before)
    for j0 in range(0, n, ENTRIES):
        j = j0 + tl.arange(0, ENTRIES)
        tl.store(base + j, tl.zeros((ENTRIES,), dtype=tl.int32), mask=(j >= done) & (j < n))


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


@triton.jit(do_not_specialize=[*PLAIN, "whole"])
def count_kernel(
    listed_bits, kept_bits, counts, sums, T, C, groups, whole, KINDS: tl.constexpr, KEPT: tl.constexpr,
    ROWS: tl.constexpr, COLUMNS: tl.constexpr,
):  # fmt: skip
    """How many rows list each of a few columns: counts (KINDS, Bl * Hl, C), and their sums (KINDS, programs)."""
    at, programs = tl.program_id(0), tl.num_programs(0)
    head, c0 = at // groups, at % groups * COLUMNS
    shift = c0 % 32 + tl.arange(0, COLUMNS)
    line = (head.to(tl.int64) * ((C + 31) // 32) + c0 // 32) * T
    c = c0 + tl.arange(0, COLUMNS)
    for kind in tl.static_range(KINDS):
        found = tl.zeros((ROWS, COLUMNS), dtype=tl.int32)
        for t0 in range(0, T, ROWS):
            t = t0 + tl.arange(0, ROWS)
            found += _bits(listed_bits, kept_bits, line, t, T, whole, shift, kind, KINDS, KEPT)
        number = tl.sum(found, 0)
        lists = (programs // groups).to(tl.int64) * C
        tl.store(counts + kind * lists + head.to(tl.int64) * C + c, number, mask=c < C)
        tl.store(sums + kind * programs + at, tl.sum(number, 0))


@triton.jit(do_not_specialize=[*PLAIN, "whole"])
def place_kernel(
    listed_bits, kept_bits, counts, sums, starts, indices, T, C, groups, whole, KINDS: tl.constexpr,
    KEPT: tl.constexpr, ROWS: tl.constexpr, COLUMNS: tl.constexpr, SUMS: tl.constexpr,
):  # fmt: skip
    """The rows that list each of a few columns, ascending; the lists of a kind follow one another, by head and column."""
    at, programs = tl.program_id(0), tl.num_programs(0)
    head, c0 = at // groups, at % groups * COLUMNS
    shift = c0 % 32 + tl.arange(0, COLUMNS)
    line = (head.to(tl.int64) * ((C + 31) // 32) + c0 // 32) * T
    c = c0 + tl.arange(0, COLUMNS)
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
            found = _bits(listed_bits, kept_bits, line, t, T, whole, shift, kind, KINDS, KEPT)
            to = start[None, :] + tl.cumsum(found, 0) - 1
            tl.store(indices + to, tl.broadcast_to(t[:, None], (ROWS, COLUMNS)), mask=found > 0)
            start += tl.sum(found, 0)
