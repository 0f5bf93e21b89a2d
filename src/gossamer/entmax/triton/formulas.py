"""Formulas of alpha-entmax over rows of numbers: a = alpha - 1, p = [1 + a t]_+^(1/a) of t = score - lam.

They hold at a = 0, where p is exp(t). A is alpha - 1 where the compiler knows it, -1 where each head has its own. The
normaliser lam of a row is computed as in `entmax/thresholds.py`, by Newton's method on the (1/a)-norm.
"""

from __future__ import annotations

import triton
import triton.language as tl

FAR = tl.constexpr(-1e30)  # stands for a score that is not there: -inf times 0 would be no number
LOWEST = tl.constexpr(-3.4028234e38)  # a bound that only -inf is under
MARGIN = tl.constexpr(2e-6)  # relative, of a bound computed in float32: 16 roundings


@triton.jit
def powers(t, a, A: tl.constexpr):
    """p, and u = p^(2 - alpha), which is -dp/dlam; 0 where 1 + a t is not positive."""
    if A == 0.5:
        u = tl.maximum(t * 0.5 + 1.0, 0.0, propagate_nan=tl.PropagateNan.ALL)
        p = u * u
    elif A == 1.0:
        p = tl.maximum(t + 1.0, 0.0, propagate_nan=tl.PropagateNan.ALL)
        u = tl.where(p > 0.0, 1.0, p)
    elif A == 0.0:
        p = tl.exp(t)
        u = p
    else:
        w = a * t + 1.0
        # log(w) / a without the rounding of w: log(w) t / (w - 1), and t where w is 1.
        rounded = w - 1.0
        log = tl.where(rounded == 0.0, t, tl.log(w) * (t / tl.where(rounded == 0.0, 1.0, rounded)))
        p = tl.where(w <= 0.0, 0.0, tl.exp(log))
        u = tl.where(w <= 0.0, 0.0, p / w)
    return p, u


@triton.jit
def slope(p, a, A: tl.constexpr):
    """u = p^(1 - a), 0 where p is 0."""
    if A == 0.5:
        u = tl.sqrt(p)
    elif A == 0.0:
        u = p
    elif A == 1.0:
        u = tl.where(p > 0.0, 1.0, p)
    else:
        u = tl.where(p == 0.0, 0.0, tl.exp((1.0 - a) * tl.log(p)))
    return u


@triton.jit
def newton(F, U, a, A: tl.constexpr):
    """The step of lam from sums F of p and U of u: F^(1 - a) (F^a - 1) / (a U)."""
    if A == 0.5:
        root = tl.sqrt(F)
        step = 2.0 * root * (root - 1.0) / U
    elif A == 1.0:
        step = (F - 1.0) / U
    else:
        log = tl.log(F)
        grown = tl.exp(a * log)
        rounded = tl.log(grown)
        step = tl.where(rounded == 0.0, log, (grown - 1.0) * (log / tl.where(rounded == 0.0, 1.0, rounded)))
        step = tl.exp((1.0 - a) * log) * step / U
    return step


@triton.jit
def longest(a, n):
    """The most that lam can be over the largest of n scores: (1 - n^-a) / a, and log(n) where a is 0."""
    log = tl.log(n)
    return tl.where(a < 1e-4, log, (1.0 - tl.exp(-a * log)) / tl.maximum(a, 1e-4))


@triton.jit
def cut(lam, a):
    """The score at and under which p is 0; -inf where a is 0."""
    return tl.where(a == 0.0, -float("inf"), lam - 1.0 / tl.where(a == 0.0, 1.0, a))


@triton.jit
def alpha_term(p, a):
    """w = dp/dalpha at a fixed lam: -p log(p)^2 phi, phi(z) = (exp(z) - 1 - z) / z^2 at z = -a log(p)."""
    log = tl.log(tl.where(p > 0.0, p, 1.0))
    z = -a * log
    near = tl.where(z < 0.5, z, 0.0)
    phi = 1.0 + near * (1.0 / 9.0)
    for i in tl.static_range(6):
        phi = 1.0 + near * phi * (1.0 / (8 - i))
    far = tl.where(z < 0.5, 1.0, z)
    phi = tl.where(z < 0.5, 0.5 * phi, (tl.exp(far) - 1.0 - far) / (far * far))
    return -p * log * log * phi


@triton.jit
def ordered(s):
    """Integers in the order of float32 numbers; NaN, of either sign, is the largest. -0 must have been made 0."""
    i = s.to(tl.int32, bitcast=True)
    i = i ^ ((i >> 31) & 0x7FFFFFFF)
    return tl.where(s != s, 0x7FFFFFFF, i)


@triton.jit
def unordered(i):
    """The float32 numbers that such integers stand for."""
    return (i ^ ((i >> 31) & 0x7FFFFFFF)).to(tl.float32, bitcast=True)


@triton.jit
def middle(low, high):
    """The mean of two integers, rounded up, without overflow; low where they are equal."""
    return (low | high) - ((low ^ high) >> 1)
