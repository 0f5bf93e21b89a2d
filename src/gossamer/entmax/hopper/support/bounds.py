"""Bounds of rows from some of their scores: no weight of the row is under its own, nor is any of its largest scores.

Some scores of a row give it a normaliser that is not over its own, and the k-th largest of some is not over that of
all. Scores here are products without the scale, which is positive; the four threads of a row add up what each has.
"""

from __future__ import annotations

from typing import Any

import cutlass
import cutlass.cute as cute
from cutlass import Float32, Int32, Int64, const_expr

from gossamer.cute.common import Opaque
from gossamer.cute.instructions import ROWS, assembly, largest_of_row, of_row, over_quad, over_quad_sum

LOWEST = -3.4028234e38
FIRST_STEPS = 4  # of Newton's method, from the largest score
FIRST_HALVINGS = 6  # of the interval of the k-th largest score of a sample
HALVINGS = 4  # of that of contenders
MARGIN = 2e-5  # relative, of a bound: powers are approximate
FLAT = 0.02  # alpha - 1 under which no contender is left out by its weight


def power(x: Any, y: Any) -> Any:
    """x^y, of x from 0 up."""
    return cute.math.exp2(cute.math.log2(x, fastmath=True) * y, fastmath=True)


class Bounds(Opaque):
    """Those of a thread's rows. Its places in shared memory are from `start` on, `next` is the first free one.

    A place of a row holds the scores of two neighbouring keys, and of both rows of the thread the first of these keys
    follow.
    """

    def __init__(self, block: Any, start: list[Any]) -> None:
        self.config, self.arguments, self.start = block.config, block.arguments, start
        self.place = block.config.place  # bytes from a thread's place to its next one
        self.keys_behind = [8 * block.config.threads * (ROWS - r) + 4 * r for r in range(ROWS)]  # from the scores on
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
        """How many places this thread has taken of each of its rows."""
        return [(self.next[r] - self.start[r]) // self.place for r in range(ROWS)]

    def pair(self, r: int, place: Any) -> list[Any]:
        """The scores of the two keys at a place; one of them may be under the bound."""
        both = assembly(Int64, "ld.shared.b64 $0, [$1];", Int32(self.start[r] + place * self.place))
        code = "{{ .reg .b32 x, y; mov.b64 {{x, y}}, $1; mov.b32 $0, {}; }}"
        return [assembly(Float32, code.format(half), both, effects=False) for half in "xy"]

    def key(self, r: int, place: Any) -> Any:
        """The first of the two keys at a place."""
        at = Int32(self.start[r] + place * self.place)
        return assembly(Int32, f"ld.shared.b32 $0, [$1 + {self.keys_behind[r]}];", at)

    @cute.jit
    def scores(self, r: cutlass.Constexpr, place, count, none: cutlass.Constexpr):
        """As `pair`; `none` past the last place that is taken."""
        one, other = self.pair(r, place)
        there = place < count
        return one if there else Float32(none), other if there else Float32(none)

    @cute.jit
    def start_bounds(self, largest):
        """The first bounds, of scores in registers: as an accumulator, -inf where there is none."""
        c = self.config
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
        if const_expr(c.top):
            self.start_kth(largest, top)

    @cute.jit
    def start_kth(self, largest, top):
        """The first bounds of the k-th largest scores; `top` are the largest ones."""
        low = cute.make_rmem_tensor((ROWS,), Float32)
        high = cute.make_rmem_tensor((ROWS,), Float32)
        middle = cute.make_rmem_tensor((ROWS,), Float32)
        low.fill(Float32.inf)
        for r in cutlass.range_constexpr(ROWS):
            for i in of_row(largest, r):
                low[r] = cute.arch.fmin(low[r], largest[i])
            low[r] = -over_quad(-low[r])
        # With a score at every place these are as many as are wanted.
        enough = [low[r] > -Float32.inf for r in range(ROWS)]
        for r in cutlass.range_constexpr(ROWS):
            low[r], high[r] = cute.arch.fmax(low[r], self.bound[r]), top[r]
        for _ in cutlass.range(FIRST_HALVINGS, unroll=1):
            over = [[Int32(0), Int32(0)] for r in range(ROWS)]
            for r in cutlass.range_constexpr(ROWS):
                middle[r] = 0.5 * (low[r] + high[r])
                for n, i in enumerate(of_row(largest, r)):
                    over[r][n % 2] = over[r][n % 2] + (Int32(1) if largest[i] >= middle[r] else Int32(0))
            for r in cutlass.range_constexpr(ROWS):
                many = over_quad_sum(over[r][0] + over[r][1]) >= self.arguments.keep
                low[r] = middle[r] if many else low[r]
                high[r] = high[r] if many else middle[r]
        for r in cutlass.range_constexpr(ROWS):
            self.bound[r] = cute.arch.fmax(self.bound[r], low[r]) if enough[r] else self.bound[r]

    @cute.jit
    def bounds_again(self, n, most):
        """The bounds of all contenders; where they are under what they were, they stay.

        Args:
            n: how many places this thread has taken of each row.
            most: of all threads of the warp.
        """
        c = self.config
        top = cute.make_rmem_tensor((ROWS,), Float32)
        low = cute.make_rmem_tensor((ROWS,), Float32)
        over = cute.make_rmem_tensor((ROWS,), Int32)
        found = cute.make_rmem_tensor((ROWS,), Float32)
        top.fill(-Float32.inf)
        low.fill(Float32.inf)
        over.fill(0)
        for place in cutlass.range(most, unroll=4):
            for r in cutlass.range_constexpr(ROWS):
                for score in self.scores(r, place, n[r], float("nan")):
                    top[r] = cute.arch.fmax(top[r], score)
                    if const_expr(c.top):
                        low[r] = cute.arch.fmin(low[r], score if score >= self.bound[r] else Float32.inf)
                        over[r] = over[r] + (Int32(1) if score >= self.bound[r] else Int32(0))
        for r in cutlass.range_constexpr(ROWS):
            top[r], low[r], found[r] = over_quad(top[r]), -over_quad(-low[r]), self.bound[r]
            over[r] = over_quad_sum(over[r])
        if const_expr(c.weighed):
            self.weigh(n, most, top, found)
        if const_expr(c.top):
            self.kth(n, most, top, low, over, found)
        for r in cutlass.range_constexpr(ROWS):
            self.bound[r] = found[r] if found[r] > self.bound[r] else self.bound[r]

    @cute.jit
    def kth(self, n, most, top, low, over, found):
        """A bound that at least `keep` contenders are not under, of rows that have as many; `top` falls to it.

        Args:
            low: the least contender of each row; `over`: how many there are.
        """
        enough = [over[r] >= self.arguments.keep for r in range(ROWS)]
        middle = cute.make_rmem_tensor((ROWS,), Float32)
        for _ in cutlass.range(HALVINGS, unroll=1):
            for r in cutlass.range_constexpr(ROWS):
                middle[r] = 0.5 * (low[r] + top[r])
                over[r] = Int32(0)
            for place in cutlass.range(most, unroll=4):
                for r in cutlass.range_constexpr(ROWS):
                    for score in self.scores(r, place, n[r], -float("inf")):
                        over[r] = over[r] + (Int32(1) if score >= middle[r] else Int32(0))
            for r in cutlass.range_constexpr(ROWS):
                many = over_quad_sum(over[r]) >= self.arguments.keep
                low[r] = middle[r] if many else low[r]
                top[r] = top[r] if many else middle[r]
        for r in cutlass.range_constexpr(ROWS):
            found[r] = cute.arch.fmax(found[r], low[r]) if enough[r] else found[r]

    @cute.jit
    def weigh(self, n, most, top, found):
        """The bound by the weights of the contenders, towards whose lam a step of Newton's method is taken."""
        lam = cute.make_rmem_tensor((ROWS,), Float32)
        for r in cutlass.range_constexpr(ROWS):
            # No row has a lam under its largest score, or under what its bound came from.
            lam[r] = cute.arch.fmax(self.bound[r] * self.scale + self.inverse, top[r] * self.scale)
        F = cute.make_rmem_tensor((ROWS,), Float32)
        U = cute.make_rmem_tensor((ROWS,), Float32)
        F.fill(0.0)
        U.fill(0.0)
        for place in cutlass.range(most, unroll=4):
            for r in cutlass.range_constexpr(ROWS):
                for score in self.scores(r, place, n[r], -1e30):
                    f, u = self.weights(score, lam[r])
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
