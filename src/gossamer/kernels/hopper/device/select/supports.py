"""From the contenders of a warpgroup's rows, in shared memory, to the lists of their supports, with exact normalisers.

Formulas are those of `kernels/entmax/formulas.py` and `finish.py`; the four threads of a row add up what each has.
"""

from __future__ import annotations

from typing import Any

import cutlass
import cutlass.cute as cute
from cutlass import Float32, Int32, Int64, const_expr

from gossamer.kernels.hopper.device.common import Opaque
from gossamer.kernels.hopper.device.instructions import ROWS, assembly, over_quad
from gossamer.kernels.hopper.device.select.bounds import over_quad_sum
from gossamer.kernels.hopper.device.select.contenders import Selector

EPS = 1.2e-7
FAR = -1e30  # stands for a score that is not there: -inf times 0 would be no number
LAST = 0x7FFFFFFF
MOST_STEPS = 60


def ordered(score: Any) -> Any:
    """Integers in the order of float32 numbers; NaN, of either sign, is the largest. -0 must have been made 0."""
    code = (
        "{ .reg .pred p; .reg .b32 i, t; mov.b32 i, $1; shr.s32 t, i, 31; and.b32 t, t, 0x7fffffff; xor.b32 i, i, t; "
        "setp.nan.f32 p, $1, $1; selp.b32 $0, 0x7fffffff, i, p; }"
    )
    return assembly(Int32, code, Float32(score), effects=False)


class Supports(Opaque):
    """The rows of a selector when all of their keys have been looked at."""

    def __init__(self, rows: Selector) -> None:
        self.rows, self.config, self.arguments, self.a = rows, rows.config, rows.arguments, rows.a
        self.n = rows.counts()
        self.most = cute.arch.warp_redux_sync(cutlass.max(self.n[0], self.n[1]), kind="max")
        self.top = cute.make_rmem_tensor((ROWS,), Float32)  # the largest scores
        self.x = cute.make_rmem_tensor((ROWS,), Float32)  # how far lam is over them
        self.factor = cute.make_rmem_tensor((ROWS,), Float32)  # 1 over the sum of the weights; NaN with NaN or inf
        self.after = cute.make_rmem_tensor((ROWS,), Float32)  # the largest score that was left out
        self.first = cute.make_rmem_tensor((ROWS,), Int32)  # ordered: scores under it are left out
        self.tie = cute.make_rmem_tensor((ROWS,), Int32)  # of those equal to it, keys over this one

    def score(self, r: int, place: Any) -> Any:
        """A product; -0 becomes 0: they are equal."""
        at = self.rows.start[r] + place * self.rows.place
        return assembly(Float32, "ld.shared.f32 $0, [$1];", Int32(at)) + 0.0

    def key(self, r: int, place: Any) -> Any:
        at = self.rows.start[r] + place * self.rows.place
        return assembly(Int32, f"ld.shared.b32 $0, [$1 + {self.rows.keys_behind}];", Int32(at))

    @cute.jit
    def kept(self, r: cutlass.Constexpr, place, score):
        """Whether a contender is one of this row, and of the k largest if those are wanted."""
        there = place < self.n[r]
        if const_expr(self.config.top):
            order = ordered(score)
            equal = order == self.first[r] and self.key(r, place) <= self.tie[r]
            there = there and (order > self.first[r] or equal)
        return there

    @cute.jit
    def write(self):
        """Everything of the rows."""
        c, a = self.config, self.arguments
        for r in cutlass.range_constexpr(ROWS):
            self.after[r] = -Float32.inf
        if const_expr(c.top):
            self.choose()
        if const_expr(c.weighed):
            self.normalise()
        rows = self.rows
        Q = cute.size(a.q.tensor, mode=[0])
        lead = rows.rows.batch * cute.size(a.q.tensor, mode=[2]) + rows.rows.head
        L = cute.size(a.list_keys, mode=[1])
        number = [lead * Q + rows.rows.tile * c.rows + rows.thread.row + 8 * r for r in range(ROWS)]
        inside = [rows.rows.tile * c.rows + rows.thread.row + 8 * r < Q for r in range(ROWS)]
        own = cute.make_rmem_tensor((ROWS,), Int32)  # how many of a row are listed by this thread, then by those before
        size = cute.make_rmem_tensor((ROWS,), Int32)
        own.fill(0)
        for place in cutlass.range(self.most, unroll=4):
            for r in cutlass.range_constexpr(ROWS):
                score = self.score(r, place)
                own[r] = own[r] + (Int32(1) if self.weighs(r, place, score, self.weight(r, score)) else Int32(0))
        for r in cutlass.range_constexpr(ROWS):
            upto = own[r]
            for step in cutlass.range_constexpr(2):
                before = cute.arch.shuffle_sync_up(upto, offset=1 << step, mask_and_clamp=28 << 8)
                upto = upto + (before if rows.quad >= 1 << step else Int32(0))
            size[r] = cute.arch.shuffle_sync(upto, rows.thread.lane | 3)
            own[r] = upto - own[r]
            fits = size[r] <= L and rows.given_up[r] == 0 and inside[r]
            if rows.quad == 0 and inside[r]:
                a.list_counts[number[r]] = size[r] if fits else Int32(-1)
                if const_expr(c.weighed):  # noqa: SIM102
                    if a.told != 0 and fits:
                        self.tell(r, number[r], size[r])
            own[r] = own[r] if fits else Int32(LAST - 2**16)
        for place in cutlass.range(self.most, unroll=2):
            for r in cutlass.range_constexpr(ROWS):
                score = self.score(r, place)
                p = self.weight(r, score)
                if self.weighs(r, place, score, p) and own[r] < L:
                    to = Int64(number[r] - a.first_listed)
                    a.list_keys[to, own[r]] = self.key(r, place)
                    if const_expr(c.weighed):
                        a.list_weights[to, own[r]] = p
                    own[r] = own[r] + 1

    @cute.jit
    def weight(self, r: cutlass.Constexpr, score):
        """The weight of a product; of a row with what is no finite number NaN."""
        p = Float32(1.0)
        if const_expr(self.config.weighed):
            p, _ = self.powers(r, score)
            p = p * self.factor[r]
        return p

    @cute.jit
    def weighs(self, r: cutlass.Constexpr, place, score, p):
        """Whether a contender is listed."""
        return self.kept(r, place, score) and not p == 0.0  # noqa: SIM201 - NaN is listed

    @cute.jit
    def tell(self, r: cutlass.Constexpr, number, size):
        """Write what is known of a row."""
        a = self.arguments
        lam = self.top[r] + self.x[r] + 0.0 * self.factor[r]
        lam = Float32.inf if self.top[r] == -Float32.inf else lam
        a.lam[number] = lam
        a.support[number] = size
        cut = lam - 1.0 / self.a if self.a > 0.0 else -Float32.inf
        after = self.after[r] * self.rows.scale
        sure = after == -Float32.inf or after <= cut
        a.certified[number] = cutlass.Uint8(1) if sure else cutlass.Uint8(0)

    @cute.jit
    def choose(self):
        """Find the k-th largest contender of each row; ties to the lowest key."""
        keep = self.arguments.keep - 1
        low = cute.make_rmem_tensor((ROWS,), Int32)
        high = cute.make_rmem_tensor((ROWS,), Int32)
        held = cute.make_rmem_tensor((ROWS,), Int32)  # how many are not under `low`
        for r in cutlass.range_constexpr(ROWS):
            low[r], high[r] = Int32(LAST), Int32(-LAST)
        for place in cutlass.range(self.most, unroll=4):
            for r in cutlass.range_constexpr(ROWS):
                order = ordered(self.score(r, place))
                low[r] = cutlass.min(low[r], order) if place < self.n[r] else low[r]
                high[r] = cutlass.max(high[r], order) if place < self.n[r] else high[r]
        going = Int32(0)
        for r in cutlass.range_constexpr(ROWS):
            low[r] = -over_quad_int(-low[r])
            high[r] = over_quad_int(high[r])
            held[r] = over_quad_sum(self.n[r])
            few = held[r] <= keep
            low[r] = Int32(-LAST) if few else low[r]
            high[r] = Int32(-LAST) if few else high[r]
            going = going | (Int32(1) if low[r] < high[r] else Int32(0))
        while cute.arch.vote_any_sync(going != 0):
            going = Int32(0)
            for r in cutlass.range_constexpr(ROWS):
                between = (low[r] | high[r]) - ((low[r] ^ high[r]) >> 1)
                found = over_quad_sum(self.counted(r, between))
                if low[r] < high[r]:
                    high[r] = between - 1 if found < keep else high[r]
                    low[r] = between if found >= keep else low[r]
                    held[r] = found if found >= keep else held[r]
                    high[r] = between if found == keep else high[r]
                going = going | (Int32(1) if low[r] < high[r] else Int32(0))
        tied = Int32(0)
        for r in cutlass.range_constexpr(ROWS):
            self.first[r], self.tie[r] = low[r], Int32(LAST)
            tied = tied | (Int32(1) if held[r] > keep else Int32(0))
        if cute.arch.vote_any_sync(tied != 0):
            self.break_ties(keep)
        if const_expr(self.config.weighed):
            for place in cutlass.range(self.most, unroll=1):
                for r in cutlass.range_constexpr(ROWS):
                    score = self.score(r, place)
                    out = place < self.n[r] and not self.kept(r, place, score)
                    self.after[r] = cute.arch.fmax(self.after[r], score) if out else self.after[r]
            for r in cutlass.range_constexpr(ROWS):
                self.after[r] = over_quad(self.after[r])

    @cute.jit
    def counted(self, r: cutlass.Constexpr, least):
        """How many contenders of this thread are not under a score."""
        found = Int32(0)
        for place in cutlass.range(self.most, unroll=4):
            enough = place < self.n[r] and ordered(self.score(r, place)) >= least
            found = found + (Int32(1) if enough else Int32(0))
        return found

    @cute.jit
    def break_ties(self, keep):
        """Of the scores equal to the k-th largest the lowest keys are kept: find the last of these."""
        for r in cutlass.range_constexpr(ROWS):
            over = over_quad_sum(self.counted(r, self.first[r] + 1) if self.first[r] < LAST else Int32(0))
            start, end = Int32(0), Int32(LAST)
            while cute.arch.vote_any_sync(start < end):
                between = start + ((end - start) >> 1)
                found = Int32(0)
                for place in cutlass.range(self.most, unroll=4):
                    same = place < self.n[r] and ordered(self.score(r, place)) == self.first[r]
                    found = found + (Int32(1) if same and self.key(r, place) <= between else Int32(0))
                enough = over_quad_sum(found) >= keep - over
                if start < end:
                    start = start if enough else between + 1
                    end = between if enough else end
            self.tie[r] = end

    @cute.jit
    def powers(self, r: cutlass.Constexpr, score):
        """p, and u = p^(2 - alpha), of a product at the normaliser as it is."""
        t = cute.arch.fmax(score * self.rows.scale - self.top[r], Float32(FAR)) - self.x[r]
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
        """Find lam, by Newton's method within an interval that is halved every fourth step."""
        rows, c = self.rows, self.config
        bad = cute.make_rmem_tensor((ROWS,), Float32)  # 0, or NaN where a score is no finite number
        for r in cutlass.range_constexpr(ROWS):
            self.top[r], bad[r] = -Float32.inf, Float32(0.0)
        for place in cutlass.range(self.most, unroll=4):
            for r in cutlass.range_constexpr(ROWS):
                score = self.score(r, place)
                if self.kept(r, place, score):
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
        step, going = Int32(0), Int32(1)
        while cute.arch.vote_any_sync(going != 0):
            F = cute.make_rmem_tensor((ROWS,), Float32)
            U = cute.make_rmem_tensor((ROWS,), Float32)
            F.fill(0.0)
            U.fill(0.0)
            for place in cutlass.range(self.most, unroll=4):
                for r in cutlass.range_constexpr(ROWS):
                    score = self.score(r, place)
                    kept = self.kept(r, place, score)
                    p, u = self.powers(r, score if kept else -Float32.inf)
                    F[r], U[r] = F[r] + p, U[r] + u
            going = Int32(0)
            for r in cutlass.range_constexpr(ROWS):
                total, slope, x = over_quad_sum(F[r]), over_quad_sum(U[r]), self.x[r]
                low[r] = x if total >= 1.0 else low[r]
                high[r] = x if total < 1.0 else high[r]
                move = self.newton(total, slope)
                new = cute.arch.fmin(cute.arch.fmax(x + move, low[r]), high[r])
                size = cute.arch.fmax(move, -move)
                far = size > 64.0 * EPS * (1.0 + x) and high[r] > low[r] and step < MOST_STEPS
                new = 0.5 * (low[r] + high[r]) if far and step % 4 == 3 else new
                new = new if move == move else x
                # What the sum of the weights is there; the last step is so small that its square does not count.
                total = total - (new - x) * slope
                self.factor[r] = 1.0 / (total if total > 0.0 else Float32(1.0))
                self.x[r] = new
                going = going | (Int32(1) if far else Int32(0))
            step = step + 1
        for r in cutlass.range_constexpr(ROWS):
            self.factor[r] = self.factor[r] + bad[r]


def over_quad_int(value: Any) -> Any:
    """The largest integer of the four threads that share a row."""
    value = cutlass.max(value, cute.arch.shuffle_sync_bfly(value, offset=1))
    return cutlass.max(value, cute.arch.shuffle_sync_bfly(value, offset=2))
