"""Kernels of the gradient of thresholds: a step's gradient is shared by its interior keys, or by those equal to tau.

A key takes part in two ranges of steps: those at which it is inside, and those at which it equals tau. Numbers
of keys are sums of integers, and sums over ranges differences of prefix sums in float64, each in one order.
"""

from __future__ import annotations

import triton
import triton.language as tl


@triton.jit
def _first_over(tau_ptr, x, N, there, EQUAL: tl.constexpr):
    """The first step whose threshold is over x, or at least x with EQUAL; NaN counts as over all."""
    low = tl.zeros(x.shape, tl.int32)
    high = low + N
    while tl.max(high - low, 0) > 0:
        search = low < high
        middle = (low + high) // 2
        tau = tl.load(tau_ptr + middle, mask=search & there, other=0.0).to(tl.float64)
        under = tau <= x
        if EQUAL:
            under = tau < x
        high = tl.where(search & (under == 0), middle, high)
        low = tl.where(search & under, middle + 1, low)
    return low


@triton.jit
def find_ranges(u_ptr, tau_ptr, ranges_ptr, changes_ptr, N, rows, BLOCK: tl.constexpr):
    """The two ranges of each key, and by how much they change the number of keys of a step.

    Args:
        u_ptr, tau_ptr: (rows, N) float32, tau non-decreasing.
        ranges_ptr: (3, rows, N) int32: the steps at which a key enters, at which it leaves, and at which tau passes it.
        changes_ptr: (2, rows, N) int32, zero before.
    """
    row = tl.program_id(1).to(tl.int64)
    key = tl.program_id(0) * BLOCK + tl.arange(0, BLOCK)
    there = key < N
    score = tl.load(u_ptr + row * N + key, mask=there, other=0.0).to(tl.float64)
    tau_ptr += row * N
    leaves = tl.maximum(_first_over(tau_ptr, score, N, there, True), key)
    enters = tl.minimum(tl.maximum(_first_over(tau_ptr, score - 1, N, there, False), key), leaves)
    equal = tl.maximum(_first_over(tau_ptr, score, N, there, False), leaves)
    equal = tl.where(score > float("-inf"), equal, leaves)
    at = row * N + key
    tl.store(ranges_ptr + at, enters, mask=there)
    tl.store(ranges_ptr + rows * N + at, leaves, mask=there)
    tl.store(ranges_ptr + 2 * rows * N + at, equal, mask=there)
    inside = changes_ptr + row * N
    tl.atomic_add(inside + enters, 1, mask=there & (enters < N), sem="relaxed")
    tl.atomic_add(inside + leaves, -1, mask=there & (leaves < N), sem="relaxed")
    is_tau = inside + rows * N
    tl.atomic_add(is_tau + leaves, 1, mask=there & (leaves < N), sem="relaxed")
    tl.atomic_add(is_tau + equal, -1, mask=there & (equal < N), sem="relaxed")


@triton.jit
def sum_shares(dtau_ptr, counts_ptr, shares_ptr, totals_ptr, N, rows, blocks, BLOCK: tl.constexpr):
    """Prefix sums of the shares within a block of steps.

    Args:
        counts_ptr: (2, rows, N) int32: the numbers of interior keys of a step, and of those equal to tau.
        shares_ptr: (2, rows, N) float64, and `totals_ptr` (2, rows, blocks) float64.
    """
    block, row = tl.program_id(0), tl.program_id(1).to(tl.int64)
    step = block * BLOCK + tl.arange(0, BLOCK)
    there = step < N
    at = row * N + step
    dtau = tl.load(dtau_ptr + at, mask=there, other=0.0).to(tl.float64)
    inside = tl.load(counts_ptr + at, mask=there, other=0)
    equal = tl.load(counts_ptr + rows * N + at, mask=there, other=0)
    # The gradient of a threshold of -inf goes to no key, and stays out of the sums: it may be NaN.
    share = tl.where(inside > 0, dtau / tl.maximum(inside, 1).to(tl.float64), 0.0)
    tl.store(shares_ptr + at, tl.cumsum(share, 0), mask=there)
    tl.store(totals_ptr + row * blocks + block, tl.sum(share, 0))
    share = tl.where((inside == 0) & (equal > 0), dtau / tl.maximum(equal, 1).to(tl.float64), 0.0)
    tl.store(shares_ptr + rows * N + at, tl.cumsum(share, 0), mask=there)
    tl.store(totals_ptr + (rows + row) * blocks + block, tl.sum(share, 0))


@triton.jit
def sum_totals(totals_ptr, blocks, BLOCK: tl.constexpr):
    """Replace the totals of a row's blocks by the sums before each block."""
    row = tl.program_id(0).to(tl.int64)
    before = tl.zeros((1,), tl.float64)
    for b in range(0, blocks, BLOCK):
        block = b + tl.arange(0, BLOCK)
        total = tl.load(totals_ptr + row * blocks + block, mask=block < blocks, other=0.0)
        tl.store(totals_ptr + row * blocks + block, tl.cumsum(total, 0) - total + before, mask=block < blocks)
        before += tl.sum(total, 0)


@triton.jit
def _sum_before(shares_ptr, totals_ptr, step, there, BLOCK: tl.constexpr):
    """The sum of the shares before a step."""
    before = tl.maximum(step - 1, 0)
    some = there & (step > 0)
    return tl.load(shares_ptr + before, mask=some, other=0.0) + tl.load(
        totals_ptr + before // BLOCK, mask=some, other=0.0
    )


@triton.jit
def add_ranges(ranges_ptr, shares_ptr, totals_ptr, du_ptr, N, rows, blocks, SUMMED: tl.constexpr, BLOCK: tl.constexpr):
    """du (rows, N) float32; sums are of blocks of SUMMED steps."""
    row = tl.program_id(1).to(tl.int64)
    key = tl.program_id(0) * BLOCK + tl.arange(0, BLOCK)
    there = key < N
    at = row * N + key
    enters = tl.load(ranges_ptr + at, mask=there, other=0)
    leaves = tl.load(ranges_ptr + rows * N + at, mask=there, other=0)
    equal = tl.load(ranges_ptr + 2 * rows * N + at, mask=there, other=0)
    shares, totals = shares_ptr + row * N, totals_ptr + row * blocks
    du = _sum_before(shares, totals, leaves, there, SUMMED) - _sum_before(shares, totals, enters, there, SUMMED)
    shares, totals = shares_ptr + (rows + row) * N, totals_ptr + (rows + row) * blocks
    du += _sum_before(shares, totals, equal, there, SUMMED) - _sum_before(shares, totals, leaves, there, SUMMED)
    tl.store(du_ptr + at, du.to(tl.float32), mask=there)
