"""Bounds of rows from some of their scores: no weight of the row is under its own, nor is any of its largest scores.

Some scores of a row give it a normaliser that is not over its own, and the k-th largest of some is not over that of
all. Scores here are products without the scale, which is positive; the four threads of a row add up what each has.
"""

from __future__ import annotations

from typing import Any

import cutlass
import cutlass.cute as cute
from cutlass import Float32, Int32, const_expr

from gossamer.kernels.hopper.device.common import Opaque
from gossamer.kernels.hopper.device.instructions import ROWS, assembly, largest_of_row, of_row, over_quad

LOWEST = -3.4028234e38
STEPS = 3  # of Newton's method
FIRST_STEPS = 4  # where it starts from the largest score
HALVINGS = 10  # of the interval of the k-th largest
MARGIN = 2e-5  # relative, of a bound: powers are approximate
FLAT = 0.02  # alpha - 1 under which no contender is left out by its weight


def power(x: Any, y: Any) -> Any:
    """x^y, of x from 0 up."""
    return cute.math.exp2(cute.math.log2(x, fastmath=True) * y, fastmath=True)


def over_quad_sum(value: Any) -> Any:
    """The sum of the four threads that share a row."""
    value = value + cute.arch.shuffle_sync_bfly(value, offset=1)
    return value + cute.arch.shuffle_sync_bfly(value, offset=2)


class Bounds(Opaque):
    """Those of a thread's rows; contenders are in shared memory, from `start` on, `next` is the first free place."""

    def __init__(self, block: Any, start: list[Any]) -> None:
        self.config, self.arguments, self.start = block.config, block.arguments, start
        self.place = 4 * 4 * block.config.rows  # bytes from a thread's place to its next one
        self.bound = cute.make_rmem_tensor((ROWS,), Float32)
        self.next = cute.make_rmem_tensor((ROWS,), Int32)

    def of_head(self, head: Any) -> None:
        """Read the alpha of a head."""
        self.a = self.arguments.steepness[head]
        self.scale = self.arguments.scale
        self.unscale = 1.0 / self.scale
        self.flat = self.a < FLAT
        self.inverse = 1.0 / cute.arch.fmax(self.a, Float32(FLAT))  # how far under lam a weight is 0

    @cute.jit
    def under(self, lam):
        """The product under which a weight is 0, of a number that lam is not under."""
        found = (lam - self.inverse - MARGIN * (cute.arch.fmax(lam, -lam) + self.inverse)) * self.unscale
        return -Float32.inf if self.flat else found

    def counts(self) -> list[Any]:
        """How many contenders this thread has of each of its rows."""
        return [(self.next[r] - self.start[r]) // self.place for r in range(ROWS)]

    @cute.jit
    def read(self, r: cutlass.Constexpr, place, count, none: cutlass.Constexpr):
        """A contender's score, or `none` past the last."""
        score = assembly(Float32, "ld.shared.f32 $0, [$1];", Int32(self.start[r] + place * self.place))
        return score if place < count else Float32(none)

    @cute.jit
    def start_bounds(self, largest):
        """The first bounds, of scores in registers: as an accumulator, -inf where there is none."""
        c, keep = self.config, self.arguments.keep
        top = [largest_of_row(largest, r) for r in range(ROWS)]
        if const_expr(c.weighed):
            lam = cute.make_rmem_tensor((ROWS,), Float32)
            for r in cutlass.range_constexpr(ROWS):
                lam[r] = top[r] * self.scale
            for _ in cutlass.range(FIRST_STEPS, unroll=1):
                sums = [[Float32(0.0), Float32(0.0)] for r in range(ROWS)]
                for r in cutlass.range_constexpr(ROWS):
                    for i in of_row(largest, r):
                        f, u = self.weights(largest[i], lam[r])
                        sums[r] = [sums[r][0] + f, sums[r][1] + u]
                for r in cutlass.range_constexpr(ROWS):
                    F, U = sums[r]
                    lam[r] = self.moved(lam[r], over_quad_sum(F), over_quad_sum(U))
            for r in cutlass.range_constexpr(ROWS):
                found = self.under(lam[r])
                self.bound[r] = found if found > self.bound[r] else self.bound[r]
        for r in cutlass.range_constexpr(ROWS):
            if const_expr(c.top):
                low = Float32.inf
                for i in of_row(largest, r):
                    low = cute.arch.fmin(low, largest[i])
                low = -over_quad(-low)
                # With a score at every place these are as many as are wanted.
                enough = low > -Float32.inf
                low = cute.arch.fmax(low, self.bound[r])
                high = top[r]
                for _ in cutlass.range(HALVINGS, unroll=1):
                    middle = 0.5 * (low + high)
                    over = Int32(0)
                    for i in of_row(largest, r):
                        over = over + (Int32(1) if largest[i] >= middle else Int32(0))
                    many = over_quad_sum(over) >= keep
                    low = middle if many else low
                    high = high if many else middle
                self.bound[r] = cute.arch.fmax(self.bound[r], low) if enough else self.bound[r]

    @cute.jit
    def bounds_again(self, n, most):
        """The bounds of all contenders; where they are under what they were, they stay.

        Args:
            n: how many this thread has of each row.
            most: of all threads of the warp.
        """
        c = self.config
        top = cute.make_rmem_tensor((ROWS,), Float32)
        bottom = cute.make_rmem_tensor((ROWS,), Float32)
        top.fill(-Float32.inf)
        bottom.fill(Float32.inf)
        for place in cutlass.range(most, unroll=4):
            for r in cutlass.range_constexpr(ROWS):
                score = self.read(r, place, n[r], float("nan"))
                top[r] = cute.arch.fmax(top[r], score)
                if const_expr(c.top):
                    bottom[r] = cute.arch.fmin(bottom[r], score)
        found = cute.make_rmem_tensor((ROWS,), Float32)
        for r in cutlass.range_constexpr(ROWS):
            top[r], bottom[r], found[r] = over_quad(top[r]), -over_quad(-bottom[r]), self.bound[r]
        if const_expr(c.weighed):
            self.weigh(n, most, top, found)
        if const_expr(c.top):
            self.kth(n, most, top, bottom, found)
        for r in cutlass.range_constexpr(ROWS):
            self.bound[r] = found[r] if found[r] > self.bound[r] else self.bound[r]

    @cute.jit
    def kth(self, n, most, top, bottom, found):
        """A bound that at least `keep` contenders are not under, of rows that have as many; `top` falls to it."""
        low = cute.make_rmem_tensor((ROWS,), Float32)
        enough = cute.make_rmem_tensor((ROWS,), Int32)
        for r in cutlass.range_constexpr(ROWS):
            low[r] = cute.arch.fmax(bottom[r], self.bound[r])
            enough[r] = Int32(1) if over_quad_sum(n[r]) >= self.arguments.keep else Int32(0)
        for _ in cutlass.range(HALVINGS, unroll=1):
            over = cute.make_rmem_tensor((ROWS,), Int32)
            middle = cute.make_rmem_tensor((ROWS,), Float32)
            for r in cutlass.range_constexpr(ROWS):
                over[r] = Int32(0)
                middle[r] = 0.5 * (low[r] + top[r])
            for place in cutlass.range(most, unroll=4):
                for r in cutlass.range_constexpr(ROWS):
                    score = self.read(r, place, n[r], -float("inf"))
                    over[r] = over[r] + (Int32(1) if score >= middle[r] else Int32(0))
            for r in cutlass.range_constexpr(ROWS):
                many = over_quad_sum(over[r]) >= self.arguments.keep
                low[r] = middle[r] if many else low[r]
                top[r] = top[r] if many else middle[r]
        for r in cutlass.range_constexpr(ROWS):
            found[r] = cute.arch.fmax(found[r], low[r]) if enough[r] != 0 else found[r]

    @cute.jit
    def weigh(self, n, most, top, found):
        """The bound by the weights of the contenders: lam rises to that of these alone."""
        lam = cute.make_rmem_tensor((ROWS,), Float32)
        for r in cutlass.range_constexpr(ROWS):
            # No row has a lam under its largest score, or under what its bound came from.
            lam[r] = cute.arch.fmax(self.bound[r] * self.scale + self.inverse, top[r] * self.scale)
        for _ in cutlass.range(STEPS, unroll=1):
            F = cute.make_rmem_tensor((ROWS,), Float32)
            U = cute.make_rmem_tensor((ROWS,), Float32)
            F.fill(0.0)
            U.fill(0.0)
            for place in cutlass.range(most, unroll=4):
                for r in cutlass.range_constexpr(ROWS):
                    f, u = self.weights(self.read(r, place, n[r], -1e30), lam[r])
                    F[r], U[r] = F[r] + f, U[r] + u
            for r in cutlass.range_constexpr(ROWS):
                lam[r] = self.moved(lam[r], over_quad_sum(F[r]), over_quad_sum(U[r]))
        for r in cutlass.range_constexpr(ROWS):
            bound = self.under(lam[r])
            found[r] = bound if bound > found[r] else found[r]

    @cute.jit
    def weights(self, score, lam):
        """About p, and u = p^(2 - alpha), of a product."""
        w = cute.arch.fmax(score * (self.scale * self.a) + (1.0 - self.a * lam), Float32(0.0))
        p, u = w, Float32(0.0)
        if const_expr(self.config.same == 0.5):
            p, u = w * w, w
        elif const_expr(self.config.same == 1.0):
            u = Float32(1.0) if w > 0.0 else Float32(0.0)
        else:
            u = power(w, self.inverse - 1.0) if w > 0.0 else Float32(0.0)
            p = u * w
        return p, u

    @cute.jit
    def moved(self, lam, total, slope):
        """lam after a step of Newton's method from sums of p and u; it stays where it would fall or is no number."""
        move = total - 1.0
        if const_expr(self.config.same == 0.5):
            root = cute.math.sqrt(total, fastmath=True)
            move = 2.0 * root * (root - 1.0) * cute.arch.rcp_approx(slope)
        elif const_expr(self.config.same == 1.0):
            move = move * cute.arch.rcp_approx(slope)
        else:
            move = (total - power(total, 1.0 - self.a)) * self.inverse * cute.arch.rcp_approx(slope)
        return lam + move if move > 0.0 and move < 1e30 else lam
