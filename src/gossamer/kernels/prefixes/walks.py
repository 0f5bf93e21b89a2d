"""Walks through the steps of a node, in ascending order of scores: kernels. A lane is a node.

f(x) = S - C x over the keys up to a step. A new key adds to it, and the threshold rises: past points u - 1, where a key
becomes interior, and points u, where it leaves. Points of keys that are not there yet are passed, too.
"""

from __future__ import annotations

import triton
import triton.language as tl

from gossamer.kernels.prefixes.starts import edge_places, steps_of


@triton.jit
def _first_over(scores_ptr, base, x, length):
    """The first place of which the score minus 1 is over x."""
    low = tl.zeros_like(length)
    high = length
    while tl.max(high - low, 0) > 0:
        search = low < high
        middle = (low + high) // 2
        score = tl.load(scores_ptr + base + middle, mask=search, other=0.0).to(tl.float64)
        over = score - 1 > x
        high = tl.where(search & over, middle, high)
        low = tl.where(search & (over == 0), middle + 1, low)
    return low


@triton.jit
def _prefixes_of(node, NODE: tl.constexpr, least, N):
    """Of each lane the prefix and its length."""
    start = node * NODE
    prefix = tl.zeros_like(node)
    length = tl.zeros_like(node) + least
    while tl.max((length <= start).to(tl.int32), 0) > 0:
        prefix = tl.where(length <= start, prefix + 1, prefix)
        length = tl.where(length <= start, length * 2, length)
    return prefix, tl.minimum(length, N)


@triton.jit
def walk_thresholds(
    u_ptr, keys_ptr, scores_ptr, place_ptr, absent_ptr, bucket_ptr, count_ptr, sum_ptr, total_ptr, tau_ptr, N, least,
    nodes, k, ONE: tl.constexpr, NODE: tl.constexpr, BUCKETS: tl.constexpr, LANES: tl.constexpr,
):  # fmt: skip
    """tau (rows, N) float32 of the steps of the nodes of program 0.

    Args:
        bucket_ptr, count_ptr, sum_ptr, total_ptr: of `find_starts`.
    """
    row = tl.program_id(1).to(tl.int64)
    rows = tl.num_programs(1)
    node = tl.program_id(0) * LANES + tl.arange(0, LANES)
    runs = node < nodes
    node = tl.where(runs, node, 0)
    prefix, length = _prefixes_of(node, NODE, least, N)
    base = (prefix * rows + row) * N
    one = tl.full((), ONE, tl.int64)
    at = row * nodes + node
    bucket = tl.load(bucket_ptr + at)
    C = tl.load(count_ptr + at).to(tl.int64)
    S = tl.load(sum_ptr + at)
    total = tl.load(total_ptr + at)
    absent = tl.load(absent_ptr + prefix * rows + row)
    leaving = tl.where(bucket < 0, absent, edge_places(tl.maximum(bucket, 0), length, BUCKETS))
    x = tl.load(scores_ptr + base + leaving, mask=leaving < length, other=float("inf")).to(tl.float64)
    entering = tl.where(bucket < 0, absent, _first_over(scores_ptr, base, x, length))
    step = node * NODE
    end = tl.where(runs, tl.minimum(step + NODE, N), 0)
    # The keys before the first step are there: the walk begins with what they keep.
    step = step - 1
    while tl.max((step < end).to(tl.int32), 0) > 0:
        active = step < end
        in_a = active & (leaving < length)
        in_b = active & (entering < length)
        score_a = tl.load(scores_ptr + base + leaving, mask=in_a, other=float("inf")).to(tl.float64)
        score_b = tl.load(scores_ptr + base + entering, mask=in_b, other=float("inf")).to(tl.float64)
        key_a = tl.load(keys_ptr + base + leaving, mask=in_a, other=0)
        key_b = tl.load(keys_ptr + base + entering, mask=in_b, other=0)
        enters = score_b - 1 <= score_a
        point = tl.where(enters, score_b - 1, score_a)
        value_a = steps_of(tl.where(in_a, score_a, 0.0), ONE)
        value_b = steps_of(tl.where(in_b, score_b, 0.0), ONE)
        excess = S - k * one - C * tl.where(enters, value_b - one, value_a)
        flat = total <= k
        passes = active & (flat == 0) & (excess > 0)
        there = tl.where(enters, key_b, key_a) <= step
        # A key becomes interior, or leaves.
        C += tl.where(passes & there, tl.where(enters, 1, -1), 0)
        S += tl.where(passes & there, tl.where(enters, value_b - one, -value_a), 0)
        entering += (passes & enters).to(tl.int32)
        leaving += (passes & (enters == 0)).to(tl.int32)

        stops = active & (passes == 0)
        tau = point + excess.to(tl.float64) / one.to(tl.float64) / tl.maximum(C, 1).to(tl.float64)
        tau = tl.where(flat, float("-inf"), tau)
        tl.store(tau_ptr + row * N + step, tau.to(tl.float32), mask=stops & (step >= node * NODE))
        step += stops.to(tl.int32)
        comes = stops & (step < end)
        score = tl.load(u_ptr + row * N + step, mask=comes, other=float("-inf"))
        place = tl.load(place_ptr + row * N + step, mask=comes, other=-1)
        comes = comes & (place >= absent)
        total += comes.to(tl.int32)
        comes = comes & (place >= leaving)
        interior = place < entering
        C += (comes & interior).to(tl.int64)
        S += tl.where(comes, tl.where(interior, steps_of(tl.where(comes, score, 0.0), ONE), one), 0)


@triton.jit
def walk_largest(
    keys_ptr, place_ptr, absent_ptr, bucket_ptr, top_count_ptr, last_ptr, N, least, nodes, k, NODE: tl.constexpr,
    BUCKETS: tl.constexpr, LANES: tl.constexpr,
):  # fmt: skip
    """Write the last step of each key that leaves the k largest in the nodes of program 0.

    Args:
        last_ptr: (rows, N) int32; N - 1 before.
    """
    row = tl.program_id(1).to(tl.int64)
    rows = tl.num_programs(1)
    node = tl.program_id(0) * LANES + tl.arange(0, LANES)
    runs = node < nodes
    node = tl.where(runs, node, 0)
    prefix, length = _prefixes_of(node, NODE, least, N)
    base = (prefix * rows + row) * N
    at = row * nodes + node
    bucket = tl.load(bucket_ptr + at)
    count = tl.load(top_count_ptr + at)
    absent = tl.load(absent_ptr + prefix * rows + row)
    least_kept = tl.where(bucket < 0, absent, edge_places(tl.maximum(bucket, 0), length, BUCKETS))
    start = node * NODE
    step = start - 1
    end = tl.where(runs, tl.minimum(start + NODE, N), 0)
    while tl.max((step < end).to(tl.int32), 0) > 0:
        active = step < end
        # Up to k keys are kept: the smallest of more leaves.
        passes = active & (count > k)
        key = tl.load(keys_ptr + base + least_kept, mask=passes, other=0)
        leaves = passes & (key <= step)
        tl.store(last_ptr + row * N + key, step - 1, mask=leaves & (step >= start))
        count -= leaves.to(tl.int32)
        least_kept += passes.to(tl.int32)

        stops = active & (passes == 0)
        step += stops.to(tl.int32)
        comes = stops & (step < end)
        place = tl.load(place_ptr + row * N + step, mask=comes, other=-1)
        enters = comes & (place >= least_kept) & (place >= absent)
        count += enters.to(tl.int32)
        tl.store(last_ptr + row * N + step, step - 1, mask=comes & (enters == 0))
