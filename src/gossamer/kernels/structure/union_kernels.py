"""The kernel that unites the lists of keys of neighbouring queries.

The keys of each list are marked in a row of bits of the program's own, which stays in the level-2 cache. What any of
the rows holds is the union; how many of its bits are set before a key is the place of that key.
"""

from __future__ import annotations

from collections import namedtuple

import triton
import triton.language as tl

from gossamer.kernels.structure.block_kernels import below, popcount

# The numbers of the kernel, of which it is compiled for none.
UnionNumbers = namedtuple(
    "UnionNumbers",
    "n_groups T n Q K heads room stride_b stride_h stride_q stride_n count_b count_h count_q bound_b bound_h bound_q",
)
# What the kernel is compiled for.
UnionForm = namedtuple("UnionForm", "HAS_COUNTS BOUNDED QUERIES ENTRIES WORDS")


@triton.jit
def _mark(indices, counts, lo, hi, own, b, h, q, numbers, FORM: tl.constexpr):
    """The keys of one list as bits."""
    n, K = numbers.n, numbers.K
    stride_b, stride_h, stride_q, stride_n, count_b, count_h, count_q, bound_b, bound_h, bound_q = numbers[7:]
    ENTRIES: tl.constexpr = FORM.ENTRIES
    limit = n.to(tl.int64)
    if FORM.HAS_COUNTS:
        given = tl.load(counts + b * count_b + h * count_h + q * count_q).to(tl.int64)
        limit = tl.minimum(tl.maximum(given, 0), limit)
    first, behind = limit * 0, limit * 0 + K
    if FORM.BOUNDED:
        at = b * bound_b + h * bound_h + q * bound_q
        first = tl.maximum(first, tl.load(lo + at))
        behind = tl.minimum(behind, tl.load(hi + at))
    line = indices + b * stride_b + h * stride_h + q * stride_q
    for j0 in range(0, n, ENTRIES):
        j = j0 + tl.arange(0, ENTRIES)
        x = tl.load(line + j.to(tl.int64) * stride_n, mask=j < limit, other=-1)
        some = (x >= first) & (x < behind)
        c = tl.where(some, x, 0).to(tl.int32)
        tl.atomic_or(own + c // 32, 1 << c % 32, mask=some, sem="relaxed")


@triton.jit(do_not_specialize=["numbers"])
def union_kernel(
    indices, counts, lo, hi, starts, listed_counts, listed, bits, marks, numbers: UnionNumbers, FORM: tl.constexpr
):
    """Some groups of queries: the keys that any of them lists, ascending, -1 behind, and who lists which.

    Args:
        marks: (programs, QUERIES, words): bits of the keys that each query of a group lists.
    """
    QUERIES: tl.constexpr = FORM.QUERIES
    ENTRIES: tl.constexpr = FORM.ENTRIES
    WORDS: tl.constexpr = FORM.WORDS
    n_groups, T, _n, Q, K, heads, room = numbers[:7]
    words = (K + 31) // 32
    own = marks + tl.program_id(0).to(tl.int64) * QUERIES * words
    j = tl.arange(0, 32)[None, :]
    for own_group in range((n_groups - tl.program_id(0) + tl.num_programs(0) - 1) // tl.num_programs(0)):
        group = tl.program_id(0) + own_group * tl.num_programs(0)
        head, t = group // T, group % T
        b, h = (head // heads).to(tl.int64), (head % heads).to(tl.int64)
        for w0 in range(0, QUERIES * words, ENTRIES):
            w = w0 + tl.arange(0, ENTRIES)
            tl.store(own + w, tl.zeros((ENTRIES,), dtype=tl.int32), mask=w < QUERIES * words)
        tl.debug_barrier()
        for p in range(QUERIES):
            q = t * QUERIES + p
            if q < Q:
                _mark(indices, counts, lo, hi, own + p * words, b, h, q.to(tl.int64), numbers, FORM)
        tl.debug_barrier()
        to = listed + group.to(tl.int64) * room
        total = group * 0  # of the union so far
        for w0 in range(0, words, WORDS):
            w = w0 + tl.arange(0, WORDS)
            union = tl.zeros((WORDS,), dtype=tl.int32)
            for p in range(QUERIES):
                union |= tl.load(own + p * words + w, mask=w < words, other=0)
            number = popcount(union)
            place = (total + tl.cumsum(number, 0) - number)[:, None] + popcount(union[:, None] & below(j))
            tl.store(to + place, w[:, None] * 32 + j, mask=(union[:, None] >> j & 1) > 0)
            total += tl.sum(number, 0)
        for k0 in range(total // ENTRIES * ENTRIES, room, ENTRIES):
            k = k0 + tl.arange(0, ENTRIES)
            tl.store(to + k, tl.zeros((ENTRIES,), dtype=tl.int32) - 1, mask=(k >= total) & (k < room))
        tl.store(starts + group, group * room)
        tl.store(listed_counts + group, total)
        tl.debug_barrier()
        line = group.to(tl.int64) * (room // 32)
        for w0 in range(0, room // 32, WORDS):
            w = w0 + tl.arange(0, WORDS)
            k = w[:, None] * 32 + j
            c = tl.load(to + k, mask=k < total, other=-1)
            some, c = c >= 0, tl.where(c >= 0, c, 0)
            for p in range(QUERIES):
                known = tl.load(own + p * words + c // 32, mask=some, other=0) >> c % 32 & 1
                tl.store(bits + (line + w) * QUERIES + p, tl.xor_sum(known << j, 1), mask=w < room // 32)
        tl.debug_barrier()
