"""The keys of prefixes of a row in the order of their scores: kernels.

A row is sorted once. Steps t of [L / 2, L) are computed with the keys before L alone. At least half of these are there
at each of these steps: a walk in their order does not pass many that are not there yet.
"""

from __future__ import annotations

import triton
import triton.language as tl


@triton.jit
def count_places(key_ptr, counts_ptr, N, least, blocks, BLOCK: tl.constexpr):
    """Count the sorted keys of block program 0 that are before the length `least << program 2`.

    Args:
        key_ptr: (rows, N) int32: the keys of row program 1 in ascending order of their scores.
        counts_ptr: (prefixes, rows, blocks) int32.
    """
    block, row, prefix = tl.program_id(0), tl.program_id(1).to(tl.int64), tl.program_id(2)
    at = block * BLOCK + tl.arange(0, BLOCK)
    key = tl.load(key_ptr + row * N + at, mask=at < N, other=N)
    length = tl.minimum(least << prefix, N)
    rows = tl.num_programs(1)
    tl.store(counts_ptr + (prefix * rows + row) * blocks + block, tl.sum((key < length).to(tl.int32), 0))


@triton.jit
def write_prefixes(
    key_ptr, score_ptr, ends_ptr, keys_ptr, scores_ptr, place_ptr, absent_ptr, N, least, blocks, BLOCK: tl.constexpr,
):  # fmt: skip
    """Write the keys of block program 0 that are before the length `least << program 2`, by blocks.

    Args:
        key_ptr, score_ptr: (rows, N), sorted.
        ends_ptr: (prefixes, rows, blocks) int32: sums of `count_places` up to each block.
        keys_ptr, scores_ptr: (prefixes, rows, N).
        place_ptr: (rows, N) int32: the place of each key in the shortest prefix that has it.
        absent_ptr: (prefixes, rows) int32, zero before: the number of keys of -inf.
    """
    block, row, prefix = tl.program_id(0), tl.program_id(1).to(tl.int64), tl.program_id(2)
    rows = tl.num_programs(1)
    at = block * BLOCK + tl.arange(0, BLOCK)
    key = tl.load(key_ptr + row * N + at, mask=at < N, other=N)
    score = tl.load(score_ptr + row * N + at, mask=at < N, other=0.0)
    length = tl.minimum(least << prefix, N)
    there = key < length
    ones = there.to(tl.int32)
    end = tl.load(ends_ptr + (prefix * rows + row) * blocks + block)
    place = end - tl.sum(ones, 0) + tl.cumsum(ones, 0) - 1
    to = (prefix * rows + row) * N + place
    tl.store(keys_ptr + to, key, mask=there)
    tl.store(scores_ptr + to, score, mask=there)
    gone = tl.sum((there & (score == float("-inf"))).to(tl.int32), 0)
    if gone > 0:
        tl.atomic_add(absent_ptr + prefix * rows + row, gone, sem="relaxed")
    shorter = tl.where(prefix == 0, 0, tl.minimum((least << prefix) // 2, N))
    tl.store(place_ptr + row * N + key, place, mask=there & (key >= shorter))
