"""Walks through the steps of a node, in ascending order of scores: kernels. A lane is a node.

f(x) = S - C x over the keys up to a step. A new key adds to it, and the threshold rises: past points u - 1, where a key
becomes interior, and points u, where it leaves. Points of keys that are not there yet are passed, too.
"""

from __future__ import annotations

import triton
import triton.language as tl

from gossamer.sparse_k.thresholds_triton.starts import rounded_steps, steps_of


@triton.jit
def _prefixes_of(node, NODE: tl.constexpr, least, N):
    """(prefix, length) of each lane's node."""
    start = node * NODE
    prefix = tl.zeros_like(node)
    length = tl.zeros_like(node) + least
    while tl.max((length <= start).to(tl.int32), 0) > 0:
        prefix = tl.where(length <= start, prefix + 1, prefix)
        length = tl.where(length <= start, length * 2, length)
    return prefix, tl.minimum(length, N)


@triton.jit
def walk_thresholds(
    u_ptr, keys_ptr, scores_ptr, place_ptr, absent_ptr, starts_ptr, sum_ptr, tau_ptr, N, least, nodes, k,
    ONE: tl.constexpr, NODE: tl.constexpr, LANES: tl.constexpr,
):  # fmt: skip
    """tau (rows, N) float32 of the steps of the nodes of program 0.

    Args:
        starts_ptr, sum_ptr: of `find_starts`.
    """
    row = tl.program_id(1).to(tl.int64)
    rows = tl.num_programs(1)
    node = tl.program_id(0) * LANES + tl.arange(0, LANES)
    runs = node < nodes
    node = tl.where(runs, node, 0)
    prefix, length = _prefixes_of(node, NODE, least, N)
    base = (prefix * rows + row) * N
    one = tl.full((), ONE, tl.int64)
    at, each = row * nodes + node, rows * nodes
    leaving = tl.load(starts_ptr + at)
    entering = tl.load(starts_ptr + each + at)
    C = tl.load(starts_ptr + 2 * each + at).to(tl.int64)
    total = tl.load(starts_ptr + 3 * each + at)
    S = tl.load(sum_ptr + at)
    absent = tl.load(absent_ptr + prefix * rows + row)
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
        # And the key of the next step, so that one wait is for all.
        follows = active & (step + 1 < end)
        score = tl.load(u_ptr + row * N + step + 1, mask=follows, other=0.0)
        place = tl.load(place_ptr + row * N + step + 1, mask=follows, other=-1)
        score_a, score_b = rounded_steps(score_a, ONE) / ONE, rounded_steps(score_b, ONE) / ONE
        enters = in_b & (score_b - 1 <= score_a)
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
        steps = one.to(tl.float64) * tl.maximum(C, 1).to(tl.float64)
        tau = point + excess.to(tl.float64) / steps
        # Under 1 the sums hold the root without a wrap, and it has the same bits whichever point is near it.
        tau = tl.where((tl.abs(tau) < 1) & (C > 0), (S - k * one).to(tl.float64) / steps, tau)
        tau = tl.where(flat, float("-inf"), tau)
        tl.store(tau_ptr + row * N + step, tau.to(tl.float32), mask=stops & (step >= node * NODE))
        step += stops.to(tl.int32)
        comes = stops & follows & (place >= absent)
        total += comes.to(tl.int32)
        comes = comes & (place >= leaving)
        interior = place < entering
        C += (comes & interior).to(tl.int64)
        S += tl.where(comes, tl.where(interior, steps_of(score, ONE), one), 0)


@triton.jit
def walk_largest(
    keys_ptr, place_ptr, absent_ptr, starts_ptr, last_ptr, N, least, nodes, k, NODE: tl.constexpr, LANES: tl.constexpr,
):  # fmt: skip
    """Write the last step of each key that leaves the k largest in the nodes of program 0.

    Args:
        starts_ptr: of `find_starts`.
        last_ptr: (rows, N) int32; N - 1 before.
    """
    row = tl.program_id(1).to(tl.int64)
    rows = tl.num_programs(1)
    node = tl.program_id(0) * LANES + tl.arange(0, LANES)
    runs = node < nodes
    node = tl.where(runs, node, 0)
    prefix, _ = _prefixes_of(node, NODE, least, N)
    base = (prefix * rows + row) * N
    at, each = row * nodes + node, rows * nodes
    least_kept = tl.load(starts_ptr + 4 * each + at)
    count = tl.load(starts_ptr + 5 * each + at)
    absent = tl.load(absent_ptr + prefix * rows + row)
    start = node * NODE
    end = tl.where(runs, tl.minimum(start + NODE, N), 0)
    step = start - 1
    while tl.max((step < end).to(tl.int32), 0) > 0:
        active = step < end
        # Up to k keys are kept: the smallest of more leaves.
        passes = active & (count > k)
        key = tl.load(keys_ptr + base + least_kept, mask=passes, other=0)
        place = tl.load(place_ptr + row * N + step + 1, mask=active & (step + 1 < end), other=-1)
        leaves = passes & (key <= step)
        tl.store(last_ptr + row * N + key, step - 1, mask=leaves & (step >= start))
        count -= leaves.to(tl.int32)
        least_kept += passes.to(tl.int32)

        stops = active & (passes == 0)
        step += stops.to(tl.int32)
        comes = stops & (step < end)
        enters = comes & (place >= least_kept) & (place >= absent)
        count += enters.to(tl.int32)
        tl.store(last_ptr + row * N + step, step - 1, mask=comes & (enters == 0))


@triton.jit
def walk_both(
    u_ptr, keys_ptr, scores_ptr, place_ptr, absent_ptr, starts_ptr, sum_ptr, tau_ptr, last_ptr, N, least, nodes, k,
    ONE: tl.constexpr, NODE: tl.constexpr, LANES: tl.constexpr,
):  # fmt: skip
    """`walk_thresholds` in programs of which number 2 is 0, `walk_largest` in the others: each waits for its loads."""
    if tl.program_id(2) == 0:
        walk_thresholds(
            u_ptr, keys_ptr, scores_ptr, place_ptr, absent_ptr, starts_ptr, sum_ptr, tau_ptr, N, least, nodes, k, ONE,
            NODE, LANES,
        )  # fmt: skip
    else:
        walk_largest(keys_ptr, place_ptr, absent_ptr, starts_ptr, last_ptr, N, least, nodes, k, NODE, LANES)
