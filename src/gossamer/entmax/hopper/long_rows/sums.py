"""Weights of scores, their sums over keys, and the steps that bring the sum of the weights of a row to 1.

With a = alpha - 1 a product x of q and k is put on the line z = 1 + a (scale x - lam); w is z within [0, 1], the
weight p = w^(1 / a), and its derivative by lam is -u, u = w^(1 / a - 1). Where lam is not under the largest score no z
is over 1. Where lam is under it, the clamped weights still sum to more than 1: one instruction clamps z at both ends.
"""

from __future__ import annotations

from typing import Any

import cutlass
import cutlass.cute as cute
from cutlass import Float32, const_expr

from gossamer.cute.common import Opaque
from gossamer.cute.instructions import ROWS, assembly, of_row
from gossamer.entmax.hopper.long_rows.configurations import LongRowsConfig

EPS = 1.2e-7
SAMPLE_STEPS = 6
HUGE = 2.0**120  # turns every w but 0 into 1
STRAIGHT = 1e-3  # exponents times logarithms under which a power is its logarithm


def two() -> Any:
    """A tensor of registers with a number for each row of a thread."""
    return cute.make_rmem_tensor((ROWS,), Float32)


def clamped(x: Any, c: Any, d: Any) -> Any:
    """c x + d clamped to [0, 1]; 0 for NaN."""
    return assembly(Float32, "fma.rn.sat.f32 $0, $1, $2, $3;", Float32(x), Float32(c), Float32(d), effects=False)


def not_zero(w: Any) -> Any:
    """1 for every w but 0."""
    return assembly(Float32, "mul.rn.sat.f32 $0, $1, $2;", Float32(w), Float32(HUGE), effects=False)


def powers(same: float, exponent: Any, w: Any) -> tuple[Any, Any]:
    """(p, u) of w. `exponent` is that of u, a tensor of one number, where alpha is not known."""
    if same == 0.5:
        return w * w, w
    if same == 0.25:
        square = w * w
        return square * square, square * w
    if same == 1.0:
        return w, not_zero(w)
    u = cute.math.exp2(exponent[0] * cute.math.log2(w, fastmath=True), fastmath=True)
    return u * w, u


class Sums(Opaque):
    """The lines of a thread's two rows, and the sums over its columns."""

    def __init__(self, config: LongRowsConfig, scale: Any) -> None:
        self.config, self.scale = config, scale
        self.a = two()  # alpha - 1 of the head, twice
        self.lam, self.c, self.d = two(), two(), two()
        self.F, self.U, self.W = two(), two(), two()  # the sums of p, u and -du/dlam
        self.top = two()  # the largest product
        self.size = two()  # how many weights are not 0
        self.exponent = cute.make_rmem_tensor((1,), Float32)  # of u, where alpha is not known

    @cute.jit
    def start_head(self, steepness):
        """Take the alpha of a head."""
        self.exponent[0] = cute.arch.rcp_approx(steepness) - 1.0
        for r in cutlass.range_constexpr(ROWS):
            self.a[r] = steepness

    @cute.jit
    def begin(self):
        """Begin a pass."""
        for r in cutlass.range_constexpr(ROWS):
            self.F[r], self.U[r], self.W[r] = Float32(0.0), Float32(0.0), Float32(0.0)
            self.size[r] = Float32(0.0)
            self.c[r] = self.a[r] * self.scale
            self.d[r] = 1.0 - self.a[r] * self.lam[r]

    def second(self, w: Any) -> Any:
        """The second derivative of a weight without `second_factor`."""
        return not_zero(w) if self.config.same == 0.5 else w * w

    @property
    def second_factor(self) -> float:
        return 0.5 if self.config.same == 0.5 else 0.75

    @cute.jit
    def add(self, scores, largest: cutlass.Constexpr):
        """Add a tile. `largest`: whether the largest product is looked for."""
        for r in cutlass.range_constexpr(ROWS):
            F, U, W = ([Float32(0.0), Float32(0.0)] for _ in range(3))
            top = [self.top[r], self.top[r]]
            for n, i in enumerate(of_row(scores, r)):
                w = clamped(scores[i], self.c[r], self.d[r])
                p, u = powers(self.config.same, self.exponent, w)
                F[n % 2], U[n % 2] = F[n % 2] + p, U[n % 2] + u
                if const_expr(self.config.halley):
                    W[n % 2] = W[n % 2] + self.second(w)
                if const_expr(largest):
                    top[n % 2] = cute.arch.fmax(top[n % 2], scores[i], nan=True)
            self.F[r] = self.F[r] + (F[0] + F[1])
            self.U[r] = self.U[r] + (U[0] + U[1])
            if const_expr(self.config.halley):
                self.W[r] = self.W[r] + self.second_factor * (W[0] + W[1])
            if const_expr(largest):
                self.top[r] = cute.arch.fmax(top[0], top[1], nan=True)

    @cute.jit
    def weigh(self, scores):
        """Add a tile, and replace its scores by their weights."""
        for r in cutlass.range_constexpr(ROWS):
            F, U, size = [Float32(0.0), Float32(0.0)], [Float32(0.0), Float32(0.0)], Float32(0.0)
            for n, i in enumerate(of_row(scores, r)):
                w = clamped(scores[i], self.c[r], self.d[r])
                p, u = powers(self.config.same, self.exponent, w)
                F[n % 2], U[n % 2] = F[n % 2] + p, U[n % 2] + u
                if const_expr(self.config.requested):
                    size = size + not_zero(w)
                scores[i] = p
            self.F[r] = self.F[r] + (F[0] + F[1])
            self.U[r] = self.U[r] + (U[0] + U[1])
            self.size[r] = self.size[r] + size

    @cute.jit
    def advanced(self, r: cutlass.Constexpr, low, high):
        """lam after a step towards F = 1, or the middle of the interval where the step leaves it."""
        F, U, W = self.F[r], self.U[r], self.W[r]
        log = cute.math.log(F)
        move = log
        if const_expr(self.config.halley):
            # F^b is nearly straight.
            inverse = cute.arch.rcp_approx(U)
            b = 1.0 - F * W * inverse * inverse
            b = cute.arch.fmin(cute.arch.fmax(b, Float32(-0.9)), Float32(0.9))
            curved = b * log
            power = (1.0 - cute.math.exp(-curved)) * cute.arch.rcp_approx(b)
            move = log if cute.arch.fmax(curved, -curved) < STRAIGHT else power
        new = self.lam[r] + move * F * cute.arch.rcp_approx(U)
        return new if new >= low and new <= high else 0.5 * (low + high)


@cute.jit
def longest(a, n):
    """The largest possible difference of lam and the largest of n scores."""
    log = cute.math.log(n)
    most = (1.0 - cute.math.exp(-a * log)) / cute.arch.fmax(a, Float32(1e-4))
    return (log if a < 1e-4 else most) * (1.0 + 4.0 * EPS)
