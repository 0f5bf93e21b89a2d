"""The normalisers of rows from their candidates, at any alpha: see `entmax/triton/formulas.py`."""

from __future__ import annotations

from typing import Any

import cutlass
import cutlass.cute as cute
from cutlass import Float32, Int32, const_expr

from gossamer.cute.instructions import ROWS, over_quad_sum
from gossamer.entmax.hopper.support.candidates import RowCandidates
from gossamer.entmax.hopper.support.largest import Largest, entries_of, number

EPS = 1.2e-7
FAR = -1e30  # stands for no score: -inf times 0 would be NaN
MOST_STEPS = 60
# A step of at most this, relative to 1 + x, is the last: what is left is about its square, which does not count. The
# derivative is continuous at alpha 1.5.
NEAR = {0.5: 2e-4}


class Normaliser(Largest):
    """The rows, with the normalisers of their weights."""

    def __init__(self, rows: RowCandidates) -> None:
        super().__init__(rows)
        self.x = cute.make_rmem_tensor((ROWS,), Float32)  # how far lam is over the largest score
        self.factor = cute.make_rmem_tensor((ROWS,), Float32)  # 1 over the sum of the weights; NaN with NaN or inf

    @cute.jit
    def hold(self):
        """Replace candidates in registers by 1 + a t, where t is a score minus the largest of its row."""
        for places in self.together():
            if places[0] < self.most:
                for place, half, r in entries_of(places):
                    product = self.numbers[place, half, r]
                    if const_expr(self.config.top):
                        product = number(self.order[place, half, r])
                        product = product if self.is_kept(r, place, half) else -Float32.inf
                    t = product * self.rows.scale - self.top[r]
                    self.numbers[place, half, r] = t * self.config.same + 1.0

    @cute.jit
    def at(self, r: cutlass.Constexpr, place):
        """The candidates at a place minus the largest score; a dropped one is far under all others."""
        return [
            cute.arch.fmax(score * self.rows.scale - self.top[r], Float32(FAR))
            if self.is_kept(r, place, half)
            else Float32(FAR)
            for half, (score, _) in enumerate(self.read(r, place))
        ]

    @cute.jit
    def sums(self, F, U):
        """Add p and u of this thread's candidates to F and U."""
        if const_expr(self.held):
            less = [self.config.same * self.x[r] for r in range(ROWS)]
            for places in self.together():
                if places[0] < self.most:
                    for place, half, r in entries_of(places):
                        p, u = self.line_powers(self.numbers[place, half, r] - less[r])
                        F[r], U[r] = F[r] + p, U[r] + u
        else:
            for place in cutlass.range(self.most, unroll=2):
                for r in cutlass.range_constexpr(ROWS):
                    for t in self.at(r, place):
                        p, u = self.powers(t - self.x[r])
                        F[r], U[r] = F[r] + p, U[r] + u

    @cute.jit
    def line_powers(self, z):
        """(p, u = p^(2 - alpha)) of 1 + a t, at alpha 1.5 and 2."""
        u = cute.arch.fmax(z, Float32(0.0))
        p = u
        if const_expr(self.config.same == 0.5):
            p = u * u
        else:
            u = Float32(1.0) if u > 0.0 else Float32(0.0)
        return p, u

    @cute.jit
    def powers(self, t):
        """(p, u = p^(2 - alpha)) of a score minus lam, at any alpha."""
        w = self.a * t + 1.0
        # log(w) / a without the rounding of w: log(w) t / (w - 1), and t where w is 1.
        rounded = w - 1.0
        inner = cute.arch.fmax(w, Float32(1e-37))
        log = t if rounded == 0.0 else cute.math.log(inner) * (t / rounded)
        p = cute.math.exp(log) if w > 0.0 else Float32(0.0)
        return p, p / inner

    def newton(self, F: Any, U: Any) -> Any:
        """The step of lam from sums F of p and U of u: F^(1 - a) (F^a - 1) / (a U)."""
        if self.config.same == 0.5:
            root = cute.math.sqrt(F, fastmath=True)
            return 2.0 * root * (root - 1.0) * cute.arch.rcp_approx(U)
        if self.config.same == 1.0:
            return (F - 1.0) * cute.arch.rcp_approx(U)
        return self.general_newton(F, U)

    @cute.jit
    def general_newton(self, F, U):
        """The step of `newton` at any alpha."""
        log = cute.math.log(F)
        grown = cute.math.exp(self.a * log)
        rounded = cute.math.log(grown)
        step = log if rounded == 0.0 else (grown - 1.0) * (log / rounded)
        return cute.math.exp((1.0 - self.a) * log) * step / U

    @cute.jit
    def normalise(self):
        """Find lam, by Newton's method within an interval that is halved every eighth step."""
        rows, c = self.rows, self.config
        bad = cute.make_rmem_tensor((ROWS,), Float32)  # 0, or NaN where a score is no finite number
        for r in cutlass.range_constexpr(ROWS):
            bad[r] = Float32(0.0) if self.size[r] == 0 else self.top[r] - self.top[r]
            self.top[r] = self.top[r] * rows.scale
        low = cute.make_rmem_tensor((ROWS,), Float32)
        high = cute.make_rmem_tensor((ROWS,), Float32)
        for r in cutlass.range_constexpr(ROWS):
            number = self.size[r]
            if const_expr(c.top):
                number = cutlass.min(number, self.arguments.keep - 1)
            log = cute.math.log(Float32(cutlass.max(number, Int32(1))))
            longest = log
            if self.a >= 1e-4:
                longest = (1.0 - cute.math.exp(-self.a * log)) / self.a
            low[r], high[r] = Float32(0.0), longest * (1.0 + 4.0 * EPS)
            self.x[r] = Float32(0.0)
            if const_expr(not c.top):
                # The normaliser that gave the bound is at most lam.
                start = rows.bound[r] * rows.scale + rows.inverse - self.top[r]
                self.x[r] = start if start > 0.0 and start < high[r] else Float32(0.0)
        if const_expr(self.held):
            self.hold()
        step, going = Int32(0), Int32(1)
        while cute.arch.vote_any_sync(going != 0):
            F = cute.make_rmem_tensor((ROWS,), Float32)
            U = cute.make_rmem_tensor((ROWS,), Float32)
            F.fill(0.0)
            U.fill(0.0)
            self.sums(F, U)
            going = Int32(0)
            for r in cutlass.range_constexpr(ROWS):
                total, slope, x = over_quad_sum(F[r]), over_quad_sum(U[r]), self.x[r]
                low[r] = x if total >= 1.0 else low[r]
                high[r] = x if total < 1.0 else high[r]
                move = self.newton(total, slope)
                new = cute.arch.fmin(cute.arch.fmax(x + move, low[r]), high[r])
                size = cute.arch.fmax(move, -move)
                far = size > NEAR.get(c.same, 64.0 * EPS) * (1.0 + x) and high[r] > low[r] and step < MOST_STEPS
                new = 0.5 * (low[r] + high[r]) if far and step % 8 == 7 else new
                new = new if move == move else x
                # The sum of the weights at the new lam, up to the square of the step.
                total = total - (new - x) * slope
                self.factor[r] = 1.0 / (total if total > 0.0 else Float32(1.0))
                self.x[r] = new
                going = going | (Int32(1) if far else Int32(0))
            step = step + 1
        for r in cutlass.range_constexpr(ROWS):
            self.factor[r] = self.factor[r] + bad[r]
