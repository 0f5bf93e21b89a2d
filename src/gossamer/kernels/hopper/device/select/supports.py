"""From the contenders of a warpgroup's rows, in shared memory, to the lists of their supports, with exact normalisers.

Formulas are those of `kernels/entmax/formulas.py` and `finish.py`; the four threads of a row add up what each has.
"""

from __future__ import annotations

import cutlass
import cutlass.cute as cute
from cutlass import Float32, Int32, Int64, const_expr

from gossamer.kernels.hopper.device.instructions import ROWS, assembly
from gossamer.kernels.hopper.device.select.configurations import HELD
from gossamer.kernels.hopper.device.select.largest import BIT
from gossamer.kernels.hopper.device.select.normaliser import Normaliser


class Supports(Normaliser):
    """The rows of a selector when all of their keys have been looked at."""

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
            self.weigh()
        rows = self.rows
        Q = cute.size(a.q.tensor, mode=[0])
        lead = rows.rows.batch * cute.size(a.q.tensor, mode=[2]) + rows.rows.head
        L = cute.size(a.list_keys, mode=[1])
        number = [lead * Q + rows.rows.tile * c.rows + rows.thread.row + 8 * r for r in range(ROWS)]
        inside = [rows.rows.tile * c.rows + rows.thread.row + 8 * r < Q for r in range(ROWS)]
        first = cute.make_rmem_tensor((ROWS,), Int32)  # the place of this thread's first key in the list of its row
        most = Int32(0)
        for r in cutlass.range_constexpr(ROWS):
            own = cute.arch.popc(self.kept[r])
            upto = own
            for step in cutlass.range_constexpr(2):
                before = cute.arch.shuffle_sync_up(upto, offset=1 << step, mask_and_clamp=28 << 8)
                upto = upto + (before if rows.quad >= 1 << step else Int32(0))
            size = cute.arch.shuffle_sync(upto, rows.thread.lane | 3)
            first[r] = upto - own
            fits = size <= L and rows.given_up[r] == 0 and inside[r]
            if rows.quad == 0 and inside[r]:
                a.list_counts[number[r]] = size if fits else Int32(-1)
                if const_expr(c.weighed):  # noqa: SIM102
                    if a.told != 0 and fits:
                        self.tell(r, number[r], size)
            self.kept[r] = self.kept[r] if fits else Int32(0)
            most = cutlass.max(most, own if fits else Int32(0))
        for i in cutlass.range(cute.arch.warp_redux_sync(most, kind="max"), unroll=2):
            for r in cutlass.range_constexpr(ROWS):
                bits = self.kept[r]
                if bits != 0:
                    place = cute.arch.popc((bits & -bits) - 1)
                    to = Int64(number[r] - a.first_listed)
                    a.list_keys[to, first[r] + i] = self.key(r, place)
                    if const_expr(c.weighed):
                        a.list_weights[to, first[r] + i] = self.score(r, place)
                self.kept[r] = bits & (bits - 1)

    @cute.jit
    def weigh(self):
        """Put weights where the products were; contenders without one are left out, and NaN is not."""
        if const_expr(self.held):
            for some in cutlass.range_constexpr(0, HELD, 4):
                if some < self.most:
                    for place in cutlass.range_constexpr(some, some + 4):
                        for r in cutlass.range_constexpr(ROWS):
                            self.weigh_one(r, Int32(place), self.relative[place, r], Int32(BIT[place]))
        else:
            for place in cutlass.range(self.most, unroll=1):
                for r in cutlass.range_constexpr(ROWS):
                    self.weigh_one(r, place, self.over(r, self.score(r, place)), Int32(1) << place)

    @cute.jit
    def weigh_one(self, r: cutlass.Constexpr, place, t, bit):
        """As `weigh`, of one place."""
        p, _ = self.powers(t - self.x[r])
        p = p * self.factor[r]
        if place < self.n[r]:
            assembly(None, "st.shared.f32 [$0], $1;", Int32(self.rows.start[r] + place * self.rows.place), Float32(p))
        self.kept[r] = self.kept[r] & ~bit if p == 0.0 else self.kept[r]

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
