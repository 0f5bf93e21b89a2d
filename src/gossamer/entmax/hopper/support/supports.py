"""The lists of supports of a warpgroup's rows, with exact normalisers, from their candidates in shared memory.

Formulas are those of `entmax/triton/formulas.py` and `finish.py`; the four threads of a row add up what each has.
"""

from __future__ import annotations

from typing import Any

import cutlass
import cutlass.cute as cute
from cutlass import Float32, Int32, Int64, const_expr

from gossamer.cute.instructions import ROWS, assembly
from gossamer.entmax.hopper.support.largest import BIT, PAIR, TOGETHER
from gossamer.entmax.hopper.support.normaliser import Normaliser

# At alpha 2 a weight under its rounding error is 0: the derivative jumps, and equal scores may lie at the threshold.
LEAST = 4e-7


class Supports(Normaliser):
    """The rows, with their lists and statistics."""

    @cute.jit
    def write(self):
        """Compute and write the lists and the statistics of the rows."""
        c, a = self.config, self.arguments
        for r in cutlass.range_constexpr(ROWS):
            self.after[r] = -Float32.inf
        self.start()
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
            own = cute.arch.popc(self.kept[0, r]) + cute.arch.popc(self.kept[1, r])
            upto = own
            for step in cutlass.range_constexpr(2):
                before = cute.arch.shuffle_sync_up(upto, offset=1 << step, mask_and_clamp=28 << 8)
                upto = upto + (before if rows.quad >= 1 << step else Int32(0))
            size = cute.arch.shuffle_sync(upto, rows.thread.lane | 3)
            first[r] = upto - own
            fits = size <= L and rows.overflowed[r] == 0 and inside[r]
            if rows.quad == 0 and inside[r]:
                a.list_counts[number[r]] = size if fits else Int32(-1)
                if const_expr(c.weighed):  # noqa: SIM102
                    if a.requested != 0 and fits:
                        self.tell(r, number[r], size)
            for half in cutlass.range_constexpr(PAIR):
                self.kept[half, r] = self.kept[half, r] if fits else Int32(0)
            most = cutlass.max(most, own if fits else Int32(0))
        for i in cutlass.range(0, cute.arch.warp_redux_sync(most, kind="max"), TOGETHER, unroll=1):
            for r in cutlass.range_constexpr(ROWS):
                # All are read before the first is written.
                kept = [self.next_kept(r) for _ in range(TOGETHER)]
                keys = [rows.key(r, place) + half for place, half, _ in kept]
                weights = [self.weight(r, place, half) for place, half, _ in kept]
                to = Int64(number[r] - a.first_listed)
                for n, (_, _, there) in enumerate(kept):
                    if there:
                        a.list_keys[to, first[r] + i + n] = keys[n]
                        if const_expr(c.weighed):
                            a.list_weights[to, first[r] + i + n] = weights[n]

    @cute.jit
    def next_kept(self, r: cutlass.Constexpr):
        """Take out the next candidate that is kept: (place, first or second key, whether there is one).

        The first keys of places come before the second ones.
        """
        second = self.kept[0, r] == 0
        bits = self.kept[1, r] if second else self.kept[0, r]
        left = bits & (bits - 1)
        self.kept[1, r] = left if second else self.kept[1, r]
        self.kept[0, r] = Int32(0) if second else left
        place = cutlass.min(cute.arch.popc((bits & -bits) - 1), Int32(self.config.places - 1))
        return place, Int32(1) if second else Int32(0), bits != 0

    def weight(self, r: int, place: Any, half: Any) -> Any:
        """The weight, which stands in the place of a product."""
        at = Int32(self.rows.start[r] + place * self.rows.place + 4 * half)
        return assembly(Float32, "ld.shared.f32 $0, [$1];", at)

    @cute.jit
    def weigh(self):
        """Replace products by weights; candidates without a weight are dropped, those of NaN are not."""
        if const_expr(self.held):
            for places in self.together():
                if places[0] < self.most:
                    for place in places:
                        for r in cutlass.range_constexpr(ROWS):
                            less = self.config.same * self.x[r]
                            powers = [self.line_powers(self.numbers[place, half, r] - less) for half in range(PAIR)]
                            self.weigh_place(r, Int32(place), [p for p, _ in powers], Int32(BIT[place]))
        else:
            for place in cutlass.range(self.most, unroll=1):
                for r in cutlass.range_constexpr(ROWS):
                    powers = [self.powers(t - self.x[r]) for t in self.at(r, place)]
                    self.weigh_place(r, place, [p for p, _ in powers], Int32(1) << place)

    @cute.jit
    def weigh_place(self, r: cutlass.Constexpr, place, powers, bit):
        """Replace the products at one place; `powers` are the weights before they are divided by their sum."""
        weights = [Float32(p * self.factor[r]) for p in powers]
        for half, p in enumerate(weights):
            least = const_expr(LEAST if self.config.same == 1.0 else 0.0)
            self.kept[half, r] = self.kept[half, r] & ~bit if p <= least else self.kept[half, r]
        if place < self.n[r]:
            at = Int32(self.rows.start[r] + place * self.rows.place)
            assembly(None, "st.shared.v2.f32 [$0], {$1, $2};", at, *weights)

    @cute.jit
    def tell(self, r: cutlass.Constexpr, number, size):
        """Write the normaliser, the size of the support and the certificate of a row."""
        a = self.arguments
        lam = self.top[r] + self.x[r] + 0.0 * self.factor[r]
        lam = Float32.inf if self.top[r] == -Float32.inf else lam
        a.lam[number] = lam
        a.support[number] = size
        cut = lam - 1.0 / self.a if self.a > 0.0 else -Float32.inf
        after = self.after[r] * self.rows.scale
        sure = after == -Float32.inf or after <= cut
        a.certified[number] = cutlass.Uint8(1) if sure else cutlass.Uint8(0)
