"""Lower bounds of the scores that matter in a row: those with a weight, and the k largest.

The normaliser of some scores of a row is at most that of all, and so is their k-th largest score: scores under these
bounds are dropped. Scores here are products without the scale, which is positive; the four threads of a row add up
what each has.
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
HALVINGS = 4  # of the same interval, of candidates
MARGIN = 2e-5  # relative margin of a bound, since powers are approximate
FLAT = 0.02  # alpha - 1 under which candidates are not dropped by their weights


def power(x: Any, y: Any) -> Any:
    """x^y, of x from 0 up."""
    return cute.math.exp2(cute.math.log2(x, fastmath=True) * y, fastmath=True)


class Bounds(Opaque):
    """The bounds of a thread's rows, and their places in shared memory: from `start` on, `next` is the first free one.

    A place holds the scores of two neighbouring keys for one row of the thread; the first of these keys
    of both rows follows.
    """

    def __init__(self, block: Any, start: list[Any]) -> None:
        self.config, self.arguments, self.start = block.config, block.arguments, start
        self.place = block.config.place  # bytes from a thread's place to its next one
        self.keys_behind = [8 * block.config.threads * (ROWS - r) + 4 * r for r in range(ROWS)]  # from the scores on
        self.bound = cute.make_rmem_tensor((ROWS,), Float32)
        self.next = cute.make_rmem_tensor((ROWS,), Int32)

    def start_head(self, head: Any) -> None:
        """Read the alpha of a head, and what follows from it."""
        self.a = self.arguments.steepness[head]
        self.scale = self.arguments.scale
        self.unscale = 1.0 / self.scale
        self.flat = self.a < FLAT
        self.inverse = 1.0 / cute.arch.fmax(self.a, Float32(FLAT))  # how far under lam a weight is 0

    @cute.jit
    def under(self, lam):
        """The product under which weights are 0; `lam` is at most the normaliser."""
        bound = (lam - self.inverse - MARGIN * (cute.arch.fmax(lam, -lam) + self.inverse)) * self.unscale
        return -Float32.inf if self.flat else bound

    def counts(self) -> list[Any]:
        """The number of places that this thread has taken for each of its rows."""
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
        """The scores of the two keys at a place; `none` past the last one that is taken."""
        one, other = self.pair(r, place)
        there = place < count
        return one if there else Float32(none), other if there else Float32(none)

    @cute.jit
    def start_bounds(self, largest):
        """Set the first bounds, from scores in registers that lie as in an accumulator; -inf stands for none."""
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
                bound = self.under(lam[r])
                self.bound[r] = bound if bound > self.bound[r] else self.bound[r]
        if const_expr(c.top):
            self.start_kth(largest, top)

    @cute.jit
    def start_kth(self, largest, top):
        """Set the first bounds of the k-th largest scores; `top` are the largest scores of the rows."""
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
        """Raise the bounds by all candidates; they never fall.

        Args:
            n: how many places this thread has taken of each row.
            most: of all threads of the warp.
        """
        c = self.config
        top = cute.make_rmem_tensor((ROWS,), Float32)
        low = cute.make_rmem_tensor((ROWS,), Float32)
        over = cute.make_rmem_tensor((ROWS,), Int32)
        raised = cute.make_rmem_tensor((ROWS,), Float32)
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
            top[r], low[r], raised[r] = over_quad(top[r]), -over_quad(-low[r]), self.bound[r]
            over[r] = over_quad_sum(over[r])
        if const_expr(c.weighed):
            self.weigh(n, most, top, raised)
        if const_expr(c.top):
            self.kth(n, most, top, low, over, raised)
        for r in cutlass.range_constexpr(ROWS):
            self.bound[r] = raised[r] if raised[r] > self.bound[r] else self.bound[r]

    @cute.jit
    def kth(self, n, most, top, low, over, raised):
        """Raise `raised` to a bound that at least `keep` candidates reach, in rows with as many; `top` falls to it.

        Args:
            low: the least candidate of each row; `over`: how many there are.
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
            raised[r] = cute.arch.fmax(raised[r], low[r]) if enough[r] else raised[r]

    @cute.jit
    def weigh(self, n, most, top, raised):
        """Raise `raised` by the weights of the candidates: one step of Newton's method towards their normaliser."""
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
            raised[r] = bound if bound > raised[r] else raised[r]

    @cute.jit
    def weights(self, score, lam):
        """(p, u = p^(2 - alpha)) of a product, approximately."""
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
        """lam after a step of Newton's method from sums of p and u; unchanged where it would fall or become NaN."""
        move = total - 1.0
        if const_expr(self.config.same == 0.5):
            root = cute.math.sqrt(total, fastmath=True)
            move = 2.0 * root * (root - 1.0) * cute.arch.rcp_approx(slope)
        elif const_expr(self.config.same == 1.0):
            move = move * cute.arch.rcp_approx(slope)
        else:
            move = (total - power(total, 1.0 - self.a)) * self.inverse * cute.arch.rcp_approx(slope)
        return lam + move if move > 0.0 and move < 1e30 else lam
