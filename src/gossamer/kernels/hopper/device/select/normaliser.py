"""The normalisers of rows, at any alpha, on their contenders: see `kernels/entmax/formulas.py`."""

from __future__ import annotations

from typing import Any

import cutlass
import cutlass.cute as cute
from cutlass import Float32, Int32, const_expr

from gossamer.kernels.hopper.device.instructions import ROWS, over_quad
from gossamer.kernels.hopper.device.select.bounds import over_quad_sum
from gossamer.kernels.hopper.device.select.configurations import HELD
from gossamer.kernels.hopper.device.select.contenders import Selector
from gossamer.kernels.hopper.device.select.largest import Largest

EPS = 1.2e-7
FAR = -1e30  # stands for a score that is not there: -inf times 0 would be no number
MOST_STEPS = 60


class Normaliser(Largest):
    """The rows of a selector, with what their weights need.

    Where alpha is known, and a weight takes few instructions, a thread holds its contenders in registers.
    """

    def __init__(self, rows: Selector) -> None:
        super().__init__(rows)
        self.top = cute.make_rmem_tensor((ROWS,), Float32)  # the largest scores
        self.x = cute.make_rmem_tensor((ROWS,), Float32)  # how far lam is over them
        self.factor = cute.make_rmem_tensor((ROWS,), Float32)  # 1 over the sum of the weights; NaN with NaN or inf
        self.held = self.config.same > 0.0
        if self.held:
            self.relative = cute.make_rmem_tensor((HELD, ROWS), Float32)  # less the largest of the row

    def over(self, r: int, score: Any) -> Any:
        """A product as a score, less the largest of its row."""
        return cute.arch.fmax(score * self.rows.scale - self.top[r], Float32(FAR))

    @cute.jit
    def hold(self):
        """Read the contenders into registers."""
        self.relative.fill(FAR)
        for some in cutlass.range_constexpr(0, HELD, 4):
            if some < self.most:
                for place in cutlass.range_constexpr(some, some + 4):
                    for r in cutlass.range_constexpr(ROWS):
                        t = self.over(r, self.score(r, Int32(place)))
                        self.relative[place, r] = t if self.is_kept(r, place) else Float32(FAR)

    @cute.jit
    def sums(self, F, U):
        """Add p to F and u to U, of the contenders of this thread."""
        if const_expr(self.held):
            for some in cutlass.range_constexpr(0, HELD, 4):
                if some < self.most:
                    for place in cutlass.range_constexpr(some, some + 4):
                        for r in cutlass.range_constexpr(ROWS):
                            p, u = self.powers(self.relative[place, r] - self.x[r])
                            F[r], U[r] = F[r] + p, U[r] + u
        else:
            for place in cutlass.range(self.most, unroll=4):
                for r in cutlass.range_constexpr(ROWS):
                    t = self.over(r, self.score(r, place))
                    p, u = self.powers((t if self.is_kept(r, place) else Float32(FAR)) - self.x[r])
                    F[r], U[r] = F[r] + p, U[r] + u

    @cute.jit
    def powers(self, t):
        """p, and u = p^(2 - alpha), of a score less lam."""
        p, u = Float32(0.0), Float32(0.0)
        if const_expr(self.config.same == 0.5):
            u = cute.arch.fmax(t * 0.5 + 1.0, Float32(0.0))
            p = u * u
        elif const_expr(self.config.same == 1.0):
            p = cute.arch.fmax(t + 1.0, Float32(0.0))
            u = Float32(1.0) if p > 0.0 else Float32(0.0)
        else:
            w = self.a * t + 1.0
            # log(w) / a without the rounding of w: log(w) t / (w - 1), and t where w is 1.
            rounded = w - 1.0
            inner = cute.arch.fmax(w, Float32(1e-37))
            log = t if rounded == 0.0 else cute.math.log(inner) * (t / rounded)
            p = cute.math.exp(log) if w > 0.0 else Float32(0.0)
            u = p / inner
        return p, u

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
        """`newton` of any alpha."""
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
            self.top[r], bad[r] = -Float32.inf, Float32(0.0)
        for place in cutlass.range(self.most, unroll=4):
            for r in cutlass.range_constexpr(ROWS):
                score = self.score(r, place)
                if self.is_kept(r, place):
                    score = score * rows.scale
                    self.top[r] = cute.arch.fmax(self.top[r], score)
                    bad[r] = bad[r] + (score - score)
        low = cute.make_rmem_tensor((ROWS,), Float32)
        high = cute.make_rmem_tensor((ROWS,), Float32)
        for r in cutlass.range_constexpr(ROWS):
            self.top[r] = over_quad(self.top[r])
            bad[r] = over_quad_sum(bad[r])
            number = over_quad_sum(self.n[r])
            if const_expr(c.top):
                number = cutlass.min(number, self.arguments.keep - 1)
            log = cute.math.log(Float32(cutlass.max(number, Int32(1))))
            longest = log
            if self.a >= 1e-4:
                longest = (1.0 - cute.math.exp(-self.a * log)) / self.a
            low[r], high[r] = Float32(0.0), longest * (1.0 + 4.0 * EPS)
            self.x[r] = Float32(0.0)
            if const_expr(not c.top):
                # What the bound was made of is under lam, by its margin.
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
                far = size > 64.0 * EPS * (1.0 + x) and high[r] > low[r] and step < MOST_STEPS
                new = 0.5 * (low[r] + high[r]) if far and step % 8 == 7 else new
                new = new if move == move else x
                # What the sum of the weights is there; the last step is so small that its square does not count.
                total = total - (new - x) * slope
                self.factor[r] = 1.0 / (total if total > 0.0 else Float32(1.0))
                self.x[r] = new
                going = going | (Int32(1) if far else Int32(0))
            step = step + 1
        for r in cutlass.range_constexpr(ROWS):
            self.factor[r] = self.factor[r] + bad[r]
