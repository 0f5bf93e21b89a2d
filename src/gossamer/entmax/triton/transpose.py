"""Lists of rows turned into lists of keys on the device, in a fixed order and without synchronisation.

A cell is a key of a key head and one of SEGMENTS equal parts of the rows that read that head. Pairs are counted by
cell and placed into their cell in any order; then each finds its place among the others of its cell, which are few.
A pair is named by its place in the lists of rows, row * L + its place in the row.
"""

from __future__ import annotations

import triton
import triton.language as tl

SEGMENTS = 16


@triton.jit(do_not_specialize=["K"])
def before_kernel(
    cells,  # (B G, SEGMENTS, K) int32: pairs of each key in each segment; then those in earlier segments
    ends,  # (B G K + 1,) int32, to write: a 0, then the pairs of each key
    K, SEGMENTS: tl.constexpr, STEP: tl.constexpr,
):  # fmt: skip
    """Sums over the segments of STEP keys of a head."""
    head = tl.program_id(1).to(tl.int64)
    key = tl.program_id(0) * STEP + tl.arange(0, STEP)
    so_far = tl.zeros([STEP], tl.int32)
    for segment in tl.static_range(SEGMENTS):
        at = cells + (head * SEGMENTS + segment) * K + key
        number = tl.load(at, mask=key < K, other=0)
        tl.store(at, so_far, mask=key < K)
        so_far += number
    tl.store(ends + 1 + head * K + key, so_far, mask=key < K)
    tl.store(ends + head * K + key, 0, mask=(key == 0) & (head == 0))


@triton.jit
def pairs(
    list_keys, list_counts, H, Q, K, n_rows, L: tl.constexpr, RP: tl.constexpr, VECTOR: tl.constexpr,
    GROUP: tl.constexpr, SEGMENTS: tl.constexpr,
):  # fmt: skip
    """(name, cell, exists) [RP, VECTOR] of the pairs of some rows."""
    number = tl.program_id(0) * RP + tl.arange(0, RP)
    place = tl.program_id(1) * VECTOR + tl.arange(0, VECTOR)
    count = tl.load(list_counts + number, mask=number < n_rows, other=0)
    there = place[None, :] < count[:, None]
    name = number.to(tl.int64)[:, None] * L + place[None, :]
    key = tl.load(list_keys + name, mask=there, other=0)
    head = number // Q
    owner = head // GROUP  # of the key heads of all batch elements: H is a multiple of GROUP
    local = (head % GROUP).to(tl.int64) * Q + number % Q
    segment = local * SEGMENTS // (Q.to(tl.int64) * GROUP)
    cell = (owner.to(tl.int64)[:, None] * K + key) * SEGMENTS + segment[:, None]
    return name, cell, there


@triton.jit(do_not_specialize=["Q", "K", "n_rows"])
def count_kernel(
    list_keys,  # (rows, L) int32
    list_counts,  # (rows,) int32
    cells,  # (B G K SEGMENTS + 1,) int32, zero before
    H, Q, K, n_rows,
    L: tl.constexpr, RP: tl.constexpr, VECTOR: tl.constexpr, GROUP: tl.constexpr, SEGMENTS: tl.constexpr,
):  # fmt: skip
    """The number of pairs of each cell."""
    _, cell, there = pairs(list_keys, list_counts, H, Q, K, n_rows, L, RP, VECTOR, GROUP, SEGMENTS)
    tl.atomic_add(cells + cell, 1, mask=there, sem="relaxed")


@triton.jit(do_not_specialize=["Q", "K", "n_rows"])
def place_kernel(
    list_keys,  # (rows, L) int32
    list_counts,  # (rows,) int32
    ends,  # (B G K SEGMENTS + 1,) int32: where each cell ends; then where it begins
    names,  # (pairs,) int32, to write
    H, Q, K, n_rows,
    L: tl.constexpr, RP: tl.constexpr, VECTOR: tl.constexpr, GROUP: tl.constexpr, SEGMENTS: tl.constexpr,
):  # fmt: skip
    """Every pair into its cell."""
    name, cell, there = pairs(list_keys, list_counts, H, Q, K, n_rows, L, RP, VECTOR, GROUP, SEGMENTS)
    place = tl.atomic_add(ends + cell, -1, mask=there, sem="relaxed") - 1
    tl.store(names + place, name.to(tl.int32), mask=there)


@triton.jit(do_not_specialize=["Q", "K", "n_rows"])
def order_kernel(
    list_keys,  # (rows, L) int32
    list_counts,  # (rows,) int32
    begins,  # (B G K SEGMENTS + 1,) int32: where each cell begins
    names,  # (pairs,) int32
    ordered_names,  # (pairs,) int32, to write
    H, Q, K, n_rows,
    L: tl.constexpr, RP: tl.constexpr, VECTOR: tl.constexpr, GROUP: tl.constexpr, SEGMENTS: tl.constexpr,
):  # fmt: skip
    """The pairs of each cell in the order of their names."""
    name, cell, there = pairs(list_keys, list_counts, H, Q, K, n_rows, L, RP, VECTOR, GROUP, SEGMENTS)
    begin = tl.load(begins + cell, mask=there, other=0)
    end = tl.load(begins + cell + 1, mask=there, other=0)
    name = name.to(tl.int32)
    before = tl.zeros([RP, VECTOR], tl.int32)
    for i in range(tl.max(tl.max(end - begin, 1), 0)):
        other = tl.load(names + begin + i, mask=begin + i < end, other=0x7FFFFFFF)
        before += (other < name).to(tl.int32)
    tl.store(ordered_names + begin + before, name, mask=there)
