"""What thresholds are computed with: scores as keys of an order, and as whole steps of 1 / one: kernels.

The order key of a score has the score in its upper half and the step in its lower one: of equal scores the earlier is
larger, so that all keys differ. A key that is not there is NONE.
"""

from __future__ import annotations

import triton
import triton.language as tl

NONE = tl.constexpr(-(2**63))
MOST = tl.constexpr(2**63 - 1)


@triton.jit
def steps_of(score, one):
    """Scores of float64 in steps of 1 / one, modulo 2^64."""
    whole = 18446744073709551616.0  # 2^64, of which what is infinite counts as a multiple
    x = tl.where(tl.abs(score) == float("inf"), 0.0, score)
    x = tl.floor(x * one.to(tl.float64) + 0.5)
    x = x - tl.floor(x / whole) * whole
    return tl.where(x >= whole / 2, x - whole, x).to(tl.int64)


@triton.jit
def on_grid(score, one):
    """Scores of float64 as multiples of 1 / one, which all but the smallest of float32 are."""
    wide = one.to(tl.float64)
    return tl.where(tl.abs(score) < 0.001, tl.floor(score * wide + 0.5) / wide, score)


@triton.jit
def score_of(key):
    """The score of an order key, as float64."""
    order = (key >> 32).to(tl.int32)
    return tl.where(order < 0, order ^ 0x7FFFFFFF, order).to(tl.float32, bitcast=True).to(tl.float64)


@triton.jit
def before(x):
    """The float32 before x; of 0 a negative number over all steps."""
    bits = x.to(tl.int32, bitcast=True)
    lower = tl.where(bits >= 0, bits - 1, bits + 1).to(tl.float32, bitcast=True)
    return tl.where(x == 0, -1e-30, tl.where(x == float("-inf"), x, lower))


@triton.jit
def after(x):
    """The float32 after x."""
    return -before(-x)


@triton.jit
def largest_under(a, b):
    """The largest float32 that is at most a + b, of float64."""
    s = a + b
    part = s - a
    rest = (a - (s - part)) + (b - part)
    rest = tl.where(tl.abs(s) == float("inf"), b, rest)
    near = s.to(tl.float32)
    wide = near.to(tl.float64)
    return tl.where((wide > s) | ((wide == s) & (rest < 0)), before(near), near)


@triton.jit
def prepare(
    u_ptr, key_ptr, score_ptr, steps_ptr, theta_ptr, tau_ptr, counts_ptr, sums_ptr, N, listed, one,
    BLOCK: tl.constexpr,
):  # fmt: skip
    """The numbers of block program 0 of row program 1, and the node of all steps, of which nothing is known.

    Args:
        u_ptr: (rows, N) float32.
        key_ptr, score_ptr, steps_ptr: (rows, N) int64, float32, int64; a NaN is not there.
        theta_ptr, tau_ptr, counts_ptr, sums_ptr: as of a level of one node, see `solve_states`.
    """
    row = tl.program_id(1).to(tl.int64)
    one = tl.full((), one, tl.int64)
    at = tl.program_id(0) * BLOCK + tl.arange(0, BLOCK)
    there = at < N
    u = tl.load(u_ptr + row * N + at, mask=there, other=0.0)
    present = u > float("-inf")
    u = tl.where(u == 0, 0.0, u)
    bits = u.to(tl.int32, bitcast=True)
    order = tl.where(bits < 0, bits ^ 0x7FFFFFFF, bits).to(tl.int64)
    tl.store(key_ptr + row * N + at, tl.where(present, (order << 32) | (N - 1 - at).to(tl.int64), NONE), mask=there)
    wide = tl.where(present, u, 0.0).to(tl.float64)
    tl.store(score_ptr + row * N + at, tl.where(present, on_grid(wide, one).to(tl.float32), float("-inf")), mask=there)
    tl.store(steps_ptr + row * N + at, steps_of(wide, one), mask=there)
    if tl.program_id(0) == 0:
        tl.store(theta_ptr + row * 2, NONE)
        tl.store(theta_ptr + row * 2 + 1, MOST)
        tl.store(tau_ptr + row * 2, float("-inf"))
        tl.store(tau_ptr + row * 2 + 1, float("inf"))
        tl.store(counts_ptr + row, listed)
        tl.store(sums_ptr + row * 4 + tl.arange(0, 4), tl.zeros((4,), tl.int64))
