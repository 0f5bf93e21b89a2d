"""The k largest candidates of a warpgroup's rows; ties to the lowest key.

A thread holds its candidates in registers; the four threads of a row add up what each has.
"""

from __future__ import annotations

from typing import Any

import cutlass
import cutlass.cute as cute
from cutlass import Float32, Int32, const_expr

from gossamer.cute.common import Opaque
from gossamer.cute.instructions import ROWS, assembly, over_quad_max, over_quad_sum
from gossamer.entmax.hopper.support.candidates import TOGETHER, RowCandidates

LAST = 0x7FFFFFFF
BIT = [(1 << i) - (1 << 32) * (i == 31) for i in range(32)]
LOWEST = -2139095041  # `ordered` of -inf
PAIR = 2  # keys of a place


def ordered(score: Any) -> Any:
    """An integer that is ordered as the float32 number: NaN of either sign is the largest; -0 must not occur."""
    code = (
        "{ .reg .pred p; .reg .b32 i, t; mov.b32 i, $1; shr.s32 t, i, 31; and.b32 t, t, 0x7fffffff; xor.b32 i, i, t; "
        "setp.nan.f32 p, $1, $1; selp.b32 $0, 0x7fffffff, i, p; }"
    )
    return assembly(Int32, code, Float32(score), effects=False)


def number(order: Any) -> Any:
    """The float32 number whose `ordered` is this integer."""
    code = "{ .reg .b32 t; shr.s32 t, $1, 31; and.b32 t, t, 0x7fffffff; xor.b32 t, t, $1; mov.b32 $0, t; }"
    return assembly(Float32, code, Int32(order), effects=False)


def entries_of(places: list[int]) -> list[tuple[int, int, int]]:
    """(place, first or second key, row) of all entries of a thread at some places."""
    return [(place, half, r) for place in places for half in range(PAIR) for r in range(ROWS)]


def over_quad_int(value: Any) -> Any:
    """The largest integer of the four threads that share a row."""
    value = cutlass.max(value, cute.arch.shuffle_sync_bfly(value, offset=1))
    return cutlass.max(value, cute.arch.shuffle_sync_bfly(value, offset=2))


class Largest(Opaque):
    """The rows once all of their keys have been scanned, and their k largest candidates."""

    def __init__(self, rows: RowCandidates) -> None:
        self.rows, self.config, self.arguments, self.a = rows, rows.config, rows.arguments, rows.a
        self.n = rows.counts()
        self.most = cute.arch.warp_redux_sync(cutlass.max(self.n[0], self.n[1]), kind="max")
        places = self.config.places, PAIR, ROWS
        # A bit for each candidate that is kept, for the first and for the second keys of places.
        self.kept = cute.make_rmem_tensor((PAIR, ROWS), Int32)
        self.size = cute.make_rmem_tensor((ROWS,), Int32)  # the number of candidates of a row
        self.top = cute.make_rmem_tensor((ROWS,), Float32)  # the largest product, or NaN
        self.after = cute.make_rmem_tensor((ROWS,), Float32)  # the largest score that was left out
        # Candidates are in registers where alpha is known and a weight takes few instructions. For the k largest they
        # always are, as ordered integers.
        self.held = self.config.same > 0.0
        if self.config.top:
            self.first = cute.make_rmem_tensor((ROWS,), Int32)  # scores under it are dropped
            self.order = cute.make_rmem_tensor(places, Int32)
        if self.held:
            self.numbers = cute.make_rmem_tensor(places, Float32)

    def together(self) -> list[list[int]]:
        """The places of a thread, in groups that are read in one step."""
        every = list(range(self.config.places - 1))
        return [every[i : i + TOGETHER] for i in range(0, len(every), TOGETHER)]

    @cute.jit
    def read(self, r: cutlass.Constexpr, place):
        """(product, whether it is a candidate) for both keys at a place; -0 becomes 0, which it equals."""
        rows = self.rows
        one, other = rows.pair(r, place)
        there = place < self.n[r]
        return (
            (one + 0.0, there and not (one < rows.bound[r])),
            (other + 0.0, there and not (other < rows.bound[r])),
        )

    @cute.jit
    def start(self):
        """Read the candidates and their number."""
        c = self.config
        self.kept.fill(0)
        self.top.fill(-Float32.inf)
        if const_expr(c.top):
            self.order.fill(LOWEST)
        elif const_expr(self.held):
            self.numbers.fill(-Float32.inf)
        for places in self.together():
            if places[0] < self.most:
                for place in places:
                    for r in cutlass.range_constexpr(ROWS):
                        for half, (score, there) in enumerate(self.read(r, Int32(place))):
                            score = score if there else -Float32.inf
                            self.top[r] = cute.arch.fmax(self.top[r], score, nan=True)
                            self.kept[half, r] = self.kept[half, r] | (Int32(BIT[place]) if there else Int32(0))
                            if const_expr(c.top):
                                self.order[place, half, r] = ordered(score)
                            elif const_expr(self.held):
                                self.numbers[place, half, r] = score
        for r in cutlass.range_constexpr(ROWS):
            self.size[r] = over_quad_sum(cute.arch.popc(self.kept[0, r]) + cute.arch.popc(self.kept[1, r]))
            self.top[r] = over_quad_max(self.top[r])

    def is_kept(self, r: int, place: Any, half: int) -> Any:
        """Whether a candidate is kept."""
        return (self.kept[half, r] >> place) & 1 != 0

    @cute.jit
    def choose(self):
        """Find the k-th largest candidate of each row; ties to the lowest key."""
        keep = self.arguments.keep - 1
        low = cute.make_rmem_tensor((ROWS,), Int32)
        high = cute.make_rmem_tensor((ROWS,), Int32)
        held = cute.make_rmem_tensor((ROWS,), Int32)  # how many reach `low`
        over = cute.make_rmem_tensor((ROWS,), Int32)  # how many are over `high`
        between = cute.make_rmem_tensor((ROWS,), Int32)
        counts = cute.make_rmem_tensor((ROWS,), Int32)
        going, step = Int32(0), Int32(0)
        for r in cutlass.range_constexpr(ROWS):
            held[r], over[r] = self.size[r], Int32(0)
            few = held[r] <= keep
            low[r] = Int32(-LAST) if few else ordered(self.rows.bound[r] + 0.0)
            high[r] = Int32(-LAST) if few else ordered(self.top[r])
            going = going | (Int32(1) if low[r] < high[r] else Int32(0))
        while cute.arch.vote_any_sync(going != 0):
            going = Int32(0)
            for r in cutlass.range_constexpr(ROWS):
                # The middle at every third step, and where the width is no int32.
                middle = (low[r] | high[r]) - ((low[r] ^ high[r]) >> 1)
                halved = step % 3 == 2 or high[r] - low[r] < 0
                between[r] = middle if halved else self.expected(low[r], high[r], held[r], over[r], keep)
            self.count(between, counts)
            for r in cutlass.range_constexpr(ROWS):
                if low[r] < high[r]:
                    high[r] = between[r] - 1 if counts[r] < keep else high[r]
                    over[r] = counts[r] if counts[r] < keep else over[r]
                    low[r] = between[r] if counts[r] >= keep else low[r]
                    held[r] = counts[r] if counts[r] >= keep else held[r]
                    high[r] = between[r] if counts[r] == keep else high[r]
                going = going | (Int32(1) if low[r] < high[r] else Int32(0))
            step = step + 1
        tied = Int32(0)
        for r in cutlass.range_constexpr(ROWS):
            self.first[r] = low[r]
            tied = tied | (Int32(1) if held[r] > keep else Int32(0))
        self.keep()
        if cute.arch.vote_any_sync(tied != 0):
            self.break_ties(keep)
        if const_expr(self.config.weighed):
            self.leave(held, keep)

    @cute.jit
    def expected(self, low, high, held, over, keep):
        """The score that probably `keep` scores reach, in an interval whose ends `held` and `over` scores reach.

        The number of scores over a score is taken to fall exponentially.
        """
        log_held = cute.math.log2(Float32(held), fastmath=True)
        log_over = cute.math.log2(cute.arch.fmax(Float32(over), Float32(0.5)), fastmath=True)
        share = (log_held - cute.math.log2(Float32(keep) + 0.5, fastmath=True)) * cute.arch.rcp_approx(
            log_held - log_over
        )
        width = high - low
        ahead = cutlass.max(Int32(share * Float32(width)), Int32(1))
        return low + cutlass.min(ahead, width)

    @cute.jit
    def count(self, least, counts):
        """Count the candidates of each row that reach a score."""
        own = cute.make_rmem_tensor((PAIR, 2, ROWS), Int32)  # sums that do not wait for one another
        own.fill(0)
        for places in self.together():
            if places[0] < self.most:
                for place, half, r in entries_of(places):
                    one = Int32(1) if self.order[place, half, r] >= least[r] else Int32(0)
                    own[half, place % 2, r] = own[half, place % 2, r] + one
        for r in cutlass.range_constexpr(ROWS):
            counts[r] = over_quad_sum((own[0, 0, r] + own[0, 1, r]) + (own[1, 0, r] + own[1, 1, r]))

    @cute.jit
    def keep(self):
        """Drop the candidates under the k-th largest."""
        for places in self.together():
            if places[0] < self.most:
                for place, half, r in entries_of(places):
                    out = self.order[place, half, r] < self.first[r]
                    self.kept[half, r] = self.kept[half, r] & ~(Int32(BIT[place]) if out else Int32(0))

    @cute.jit
    def leave(self, held, keep):
        """Find the largest score that is dropped; it equals the k-th largest where that one has ties."""
        after = cute.make_rmem_tensor((ROWS,), Int32)
        after.fill(LOWEST)
        for places in self.together():
            if places[0] < self.most:
                for place, half, r in entries_of(places):
                    own = self.order[place, half, r]
                    after[r] = cutlass.max(after[r], own) if own < self.first[r] else after[r]
        for r in cutlass.range_constexpr(ROWS):
            left = over_quad_int(after[r])
            self.after[r] = number(self.first[r] if held[r] > keep else left)

    @cute.jit
    def break_ties(self, keep):
        """Keep the lowest keys among the scores that equal the k-th largest, and drop the others."""
        over = cute.make_rmem_tensor((ROWS,), Int32)
        least = cute.make_rmem_tensor((ROWS,), Int32)
        for r in cutlass.range_constexpr(ROWS):
            least[r] = self.first[r] + 1 if self.first[r] < LAST else Int32(LAST)
        self.count(least, over)
        for r in cutlass.range_constexpr(ROWS):
            over[r] = over[r] if self.first[r] < LAST else Int32(0)
            start, end = Int32(0), Int32(LAST)
            while cute.arch.vote_any_sync(start < end):
                between = start + ((end - start) >> 1)
                counted = Int32(0)
                for place in cutlass.range(self.most, unroll=1):
                    key = self.rows.key(r, place)
                    for half, (score, there) in enumerate(self.read(r, place)):
                        same = there and ordered(score) == self.first[r] and key + half <= between
                        counted = counted + (Int32(1) if same else Int32(0))
                enough = over_quad_sum(counted) >= keep - over[r]
                if start < end:
                    start = start if enough else between + 1
                    end = between if enough else end
            for place in cutlass.range(self.most, unroll=1):
                key = self.rows.key(r, place)
                for half, (score, _) in enumerate(self.read(r, place)):
                    out = ordered(score) == self.first[r] and key + half > end
                    self.kept[half, r] = self.kept[half, r] & ~((Int32(1) << place) if out else Int32(0))
