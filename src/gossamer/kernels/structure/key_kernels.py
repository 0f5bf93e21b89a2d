"""The kernels that order lists of keys, one for each query, and that turn them into lists of queries for each key."""

from __future__ import annotations

import triton
import triton.language as tl

# Of no argument are other kernels compiled for numbers that something divides: they change from call to call.
SIZES = ["lists", "Q", "n", "K", "heads", "none"]
STRIDES = [
    "stride_b", "stride_h", "stride_q", "stride_n", "count_b", "count_h", "count_q", "bound_b", "bound_h", "bound_q"
]  # fmt: skip


@triton.jit
def number_below(values, x, n, steps):
    """How many of n ascending values are less than each x; `steps` halve n to nothing."""
    low, high = x * 0, x * 0 + n
    for _ in range(steps):
        open = low < high
        middle = low + (high - low) // 2
        less = tl.load(values + middle, mask=open, other=0) < x
        low, high = tl.where(open & less, middle + 1, low), tl.where(open & (less == 0), middle, high)
    return low


@triton.jit(do_not_specialize=[*SIZES, *STRIDES])
def rows_kernel(
    indices, counts, lo, hi, starts, listed_counts, listed, codes, lists, Q, n, K, heads, none, stride_b, stride_h,
    stride_q, stride_n, count_b, count_h, count_q, bound_b, bound_h, bound_q, HAS_COUNTS: tl.constexpr,
    BOUNDED: tl.constexpr, CODED: tl.constexpr, LISTS: tl.constexpr, N: tl.constexpr,
):  # fmt: skip
    """Some lists: their keys ascending, each once, -1 behind; and of each its place among the keys of all heads.

    Args:
        codes: as large as `listed`: head * K + key, and `none` behind.
        N: a power of two that holds n.
    """
    r = tl.program_id(0) * LISTS + tl.arange(0, LISTS)
    there = r < lists
    head, q = r // Q, (r % Q).to(tl.int64)
    b, h = (head // heads).to(tl.int64), (head % heads).to(tl.int64)
    limit = q * 0 + n
    if HAS_COUNTS:
        given = tl.load(counts + b * count_b + h * count_h + q * count_q, mask=there, other=0).to(tl.int64)
        limit = tl.minimum(tl.maximum(given, 0), limit)
    first, behind = q * 0, q * 0 + K
    if BOUNDED:
        at = b * bound_b + h * bound_h + q * bound_q
        first = tl.maximum(first, tl.load(lo + at, mask=there, other=0))
        behind = tl.minimum(behind, tl.load(hi + at, mask=there, other=0))
    j = tl.arange(0, N)[None, :]
    line = indices + b * stride_b + h * stride_h + q * stride_q
    x = tl.load(line[:, None] + j.to(tl.int64) * stride_n, mask=there[:, None] & (j < limit[:, None]), other=-1)
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
    if CODED:
        to = codes + r.to(tl.int64)[:, None] * n
        tl.store(to + place, x + head[:, None] * K, mask=new)
        tl.store(to + j, x * 0 + none, mask=rest)
    tl.store(starts + r, r * n, mask=there)
    tl.store(listed_counts + r, number, mask=there)


@triton.jit(do_not_specialize=["keys", "entries", "programs", "n", "Q", "steps"])
def columns_kernel(
    codes, places, starts, counts, queries, keys, entries, programs, n, Q, steps, BLOCK: tl.constexpr
):  # fmt: skip
    """Of ordered codes: where those of each key begin, how many they are, and the query of each.

    Args:
        places: the place of each code in the lists of queries, which have room for n keys each.
        keys: of all heads, for which the first `programs` are.
    """
    at = tl.program_id(0)
    if at < programs:
        key = at * BLOCK + tl.arange(0, BLOCK)
        start = number_below(codes, key, entries, steps)
        tl.store(starts + key, start, mask=key < keys)
        tl.store(counts + key, number_below(codes, key + 1, entries, steps) - start, mask=key < keys)
    else:
        entry = (at - programs) * BLOCK + tl.arange(0, BLOCK)
        place = tl.load(places + entry, mask=entry < entries, other=0)
        tl.store(queries + entry, (place // n % Q).to(tl.int32), mask=entry < entries)
