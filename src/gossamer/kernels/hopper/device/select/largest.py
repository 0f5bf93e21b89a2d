"""The contenders of a warpgroup's rows, in shared memory, and the k largest of them; ties to the lowest key.

The four threads of a row add up what each has.
"""

from __future__ import annotations

from typing import Any

import cutlass
import cutlass.cute as cute
from cutlass import Float32, Int32, const_expr

from gossamer.kernels.hopper.device.common import Opaque
from gossamer.kernels.hopper.device.instructions import ROWS, assembly, below
from gossamer.kernels.hopper.device.select.bounds import over_quad_sum
from gossamer.kernels.hopper.device.select.configurations import HELD
from gossamer.kernels.hopper.device.select.contenders import Selector

LAST = 0x7FFFFFFF
BIT = [(1 << i) - (1 << 32) * (i == 31) for i in range(32)]
LOWEST = -2139095041  # of -inf, as `ordered` has it


def ordered(score: Any) -> Any:
    """Integers in the order of float32 numbers; NaN, of either sign, is the largest. -0 must have been made 0."""
    code = (
        "{ .reg .pred p; .reg .b32 i, t; mov.b32 i, $1; shr.s32 t, i, 31; and.b32 t, t, 0x7fffffff; xor.b32 i, i, t; "
        "setp.nan.f32 p, $1, $1; selp.b32 $0, 0x7fffffff, i, p; }"
    )
    return assembly(Int32, code, Float32(score), effects=False)


def over_quad_int(value: Any) -> Any:
    """The largest integer of the four threads that share a row."""
    value = cutlass.max(value, cute.arch.shuffle_sync_bfly(value, offset=1))
    return cutlass.max(value, cute.arch.shuffle_sync_bfly(value, offset=2))


class Largest(Opaque):
    """The rows of a selector when all of their keys have been looked at."""

    def __init__(self, rows: Selector) -> None:
        self.rows, self.config, self.arguments, self.a = rows, rows.config, rows.arguments, rows.a
        self.n = rows.counts()
        self.most = cute.arch.warp_redux_sync(cutlass.max(self.n[0], self.n[1]), kind="max")
        self.kept = cute.make_rmem_tensor((ROWS,), Int32)  # a bit for each contender that is not left out
        for r in range(ROWS):
            self.kept[r] = below(self.n[r])
        self.after = cute.make_rmem_tensor((ROWS,), Float32)  # the largest score that was left out
        self.first = cute.make_rmem_tensor((ROWS,), Int32)  # ordered: scores under it are left out

    def score(self, r: int, place: Any) -> Any:
        """A product; -0 becomes 0: they are equal."""
        at = self.rows.start[r] + place * self.rows.place
        return assembly(Float32, "ld.shared.f32 $0, [$1];", Int32(at)) + 0.0

    def key(self, r: int, place: Any) -> Any:
        at = self.rows.start[r] + place * self.rows.place
        return assembly(Int32, f"ld.shared.b32 $0, [$1 + {self.rows.keys_behind}];", Int32(at))

    def is_kept(self, r: int, place: Any) -> Any:
        """Whether a contender is one of this row, and of the k largest if those are wanted."""
        return (self.kept[r] >> place) & 1 != 0

    @cute.jit
    def choose(self):
        """Find the k-th largest contender of each row; ties to the lowest key."""
        keep = self.arguments.keep - 1
        order = cute.make_rmem_tensor((HELD, ROWS), Int32)
        low = cute.make_rmem_tensor((ROWS,), Int32)
        high = cute.make_rmem_tensor((ROWS,), Int32)
        held = cute.make_rmem_tensor((ROWS,), Int32)  # how many are not under `low`
        between = cute.make_rmem_tensor((ROWS,), Int32)
        found = cute.make_rmem_tensor((ROWS,), Int32)
        order.fill(-LAST)
        low.fill(LAST)
        high.fill(-LAST)
        for some in cutlass.range_constexpr(0, HELD, 4):
            if some < self.most:
                for place in cutlass.range_constexpr(some, some + 4):
                    for r in cutlass.range_constexpr(ROWS):
                        own = ordered(self.score(r, Int32(place)))
                        if place < self.n[r]:
                            order[place, r] = own
                            low[r] = cutlass.min(low[r], own)
                            high[r] = cutlass.max(high[r], own)
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
                between[r] = (low[r] | high[r]) - ((low[r] ^ high[r]) >> 1)
            self.count(order, between, found)
            for r in cutlass.range_constexpr(ROWS):
                if low[r] < high[r]:
                    high[r] = between[r] - 1 if found[r] < keep else high[r]
                    low[r] = between[r] if found[r] >= keep else low[r]
                    held[r] = found[r] if found[r] >= keep else held[r]
                    high[r] = between[r] if found[r] == keep else high[r]
                going = going | (Int32(1) if low[r] < high[r] else Int32(0))
        tied = Int32(0)
        for r in cutlass.range_constexpr(ROWS):
            self.first[r] = low[r]
            tied = tied | (Int32(1) if held[r] > keep else Int32(0))
        self.keep(order)
        if cute.arch.vote_any_sync(tied != 0):
            self.break_ties(order, keep)
        if const_expr(self.config.weighed):
            self.leave(order, held, keep)

    @cute.jit
    def count(self, order, least, found):
        """How many contenders of each row are not under a score."""
        found.fill(0)
        for some in cutlass.range_constexpr(0, HELD, 4):
            if some < self.most:
                for place in cutlass.range_constexpr(some, some + 4):
                    for r in cutlass.range_constexpr(ROWS):
                        found[r] = found[r] + (Int32(1) if order[place, r] >= least[r] else Int32(0))
        for r in cutlass.range_constexpr(ROWS):
            found[r] = over_quad_sum(found[r])

    @cute.jit
    def keep(self, order):
        """Leave out what is under the k-th largest."""
        for r in cutlass.range_constexpr(ROWS):
            kept = Int32(0)
            for place in cutlass.range_constexpr(HELD):
                kept = kept | (Int32(BIT[place]) if order[place, r] >= self.first[r] else Int32(0))
            self.kept[r] = self.kept[r] & kept

    @cute.jit
    def leave(self, order, held, keep):
        """Find the largest score of those that are left out; it is the k-th where that one has equals."""
        for r in cutlass.range_constexpr(ROWS):
            after = Int32(LOWEST)
            for place in cutlass.range_constexpr(HELD):
                after = cutlass.max(after, order[place, r]) if order[place, r] < self.first[r] else after
            after = over_quad_int(after)
            after = self.first[r] if held[r] > keep else after
            self.after[r] = assembly(
                Float32,
                "{ .reg .b32 t; shr.s32 t, $1, 31; and.b32 t, t, 0x7fffffff; xor.b32 t, t, $1; mov.b32 $0, t; }",
                Int32(after), effects=False,
            )  # fmt: skip

    @cute.jit
    def break_ties(self, order, keep):
        """Of the scores equal to the k-th largest the lowest keys are kept: the others are left out."""
        over = cute.make_rmem_tensor((ROWS,), Int32)
        least = cute.make_rmem_tensor((ROWS,), Int32)
        for r in cutlass.range_constexpr(ROWS):
            least[r] = self.first[r] + 1 if self.first[r] < LAST else Int32(LAST)
        self.count(order, least, over)
        for r in cutlass.range_constexpr(ROWS):
            over[r] = over[r] if self.first[r] < LAST else Int32(0)
            start, end = Int32(0), Int32(LAST)
            while cute.arch.vote_any_sync(start < end):
                between = start + ((end - start) >> 1)
                found = Int32(0)
                for place in cutlass.range(self.most, unroll=4):
                    same = place < self.n[r] and ordered(self.score(r, place)) == self.first[r]
                    found = found + (Int32(1) if same and self.key(r, place) <= between else Int32(0))
                enough = over_quad_sum(found) >= keep - over[r]
                if start < end:
                    start = start if enough else between + 1
                    end = between if enough else end
            for place in cutlass.range(self.most, unroll=1):
                same = ordered(self.score(r, place)) == self.first[r] and self.key(r, place) > end
                self.kept[r] = self.kept[r] & ~((Int32(1) << place) if same else Int32(0))
