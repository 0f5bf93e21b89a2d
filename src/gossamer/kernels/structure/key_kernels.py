"""The kernels that order lists of keys, one for each query, and that turn them into lists of queries for each key."""

from __future__ import annotations

from collections import namedtuple

import triton
import triton.language as tl

from gossamer.kernels.search import at_most

# The numbers of a kernel, of which it is compiled for none.
RowNumbers = namedtuple(
    "RowNumbers",
    "lists Q n K heads none stride_b stride_h stride_q stride_n count_b count_h count_q bound_b bound_h bound_q",
)
ColumnNumbers = namedtuple("ColumnNumbers", "keys entries programs n Q steps")
# What the kernel of rows is compiled for.
RowForm = namedtuple("RowForm", "HAS_COUNTS BOUNDED CODED LISTS N")


@triton.jit(do_not_specialize=["numbers"])
def rows_kernel(
    indices, counts, lo, hi, starts, listed_counts, listed, codes, numbers: RowNumbers, FORM: tl.constexpr
):  # fmt: skip
    """Some lists: their keys ascending, each once, -1 behind; and of each its place among the keys of all heads.

    Args:
        codes: as large as `listed`: head * K + key, and `none` behind.
        FORM: N is a power of two that holds n.
    """
    LISTS: tl.constexpr = FORM.LISTS
    N: tl.constexpr = FORM.N
    lists, Q, n, K, heads = numbers.lists, numbers.Q, numbers.n, numbers.K, numbers.heads
    r = tl.program_id(0) * LISTS + tl.arange(0, LISTS)
    there = r < lists
    head, q = r // Q, (r % Q).to(tl.int64)
    b, h = (head // heads).to(tl.int64), (head % heads).to(tl.int64)
    limit = q * 0 + n
    if FORM.HAS_COUNTS:
        at = b * numbers.count_b + h * numbers.count_h + q * numbers.count_q
        given = tl.load(counts + at, mask=there, other=0).to(tl.int64)
        limit = tl.minimum(tl.maximum(given, 0), limit)
    first, behind = q * 0, q * 0 + K
    if FORM.BOUNDED:
        at = b * numbers.bound_b + h * numbers.bound_h + q * numbers.bound_q
        first = tl.maximum(first, tl.load(lo + at, mask=there, other=0))
        behind = tl.minimum(behind, tl.load(hi + at, mask=there, other=0))
    j = tl.arange(0, N)[None, :]
    line = indices + b * numbers.stride_b + h * numbers.stride_h + q * numbers.stride_q
    read = there[:, None] & (j < limit[:, None])
    x = tl.load(line[:, None] + j.to(tl.int64) * numbers.stride_n, mask=read, other=-1)
    x = tl.where((x >= first[:, None]) & (x < behind[:, None]), x, K).to(tl.int32)
    x = tl.sort(x)
    own = listed + r.to(tl.int64)[:, None] * n
    inside = there[:, None] & (j < n)
    tl.store(own + j, x, mask=inside)
    tl.debug_barrier()  # before reading the writes of other threads
    before = tl.load(own + j - 1, mask=inside & (j > 0), other=-1)
    new = inside & (x < K) & (x != before)
    place, number = tl.cumsum(new.to(tl.int32), 1) - 1, tl.sum(new.to(tl.int32), 1)
    tl.debug_barrier()  # before writing over what they read
    rest = inside & (j >= number[:, None])
    tl.store(own + place, x, mask=new)
    tl.store(own + j, x * 0 - 1, mask=rest)
    if FORM.CODED:
        to = codes + r.to(tl.int64)[:, None] * n
        tl.store(to + place, x + head[:, None] * K, mask=new)
        tl.store(to + j, x * 0 + numbers.none, mask=rest)
    tl.store(starts + r, r * n, mask=there)
    tl.store(listed_counts + r, number, mask=there)


@triton.jit(do_not_specialize=["numbers"])
def columns_kernel(codes, places, starts, counts, queries, numbers: ColumnNumbers, BLOCK: tl.constexpr):
    """Of ordered codes: where those of each key begin, how many they are, and the query of each.

    Args:
        places: the place of each code in the lists of queries, which have room for n keys each.
        numbers: the keys of all heads, for which the first `programs` are.
    """
    keys, entries, programs = numbers.keys, numbers.entries, numbers.programs
    at = tl.program_id(0)
    if at < programs:
        key = at * BLOCK + tl.arange(0, BLOCK)
        some = key < keys
        start = at_most(codes, entries, numbers.steps, key - 1, some)
        tl.store(starts + key, start, mask=some)
        tl.store(counts + key, at_most(codes, entries, numbers.steps, key, some) - start, mask=some)
    else:
        entry = (at - programs) * BLOCK + tl.arange(0, BLOCK)
        place = tl.load(places + entry, mask=entry < entries, other=0)
        tl.store(queries + entry, (place // numbers.n % numbers.Q).to(tl.int32), mask=entry < entries)
