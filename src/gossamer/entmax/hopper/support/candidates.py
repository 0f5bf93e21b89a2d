"""A warpgroup's 64 rows: their bounds, and the candidates above these, in shared memory.

Every thread holds the scores of two rows, a quarter of the columns of each. Two neighbouring keys, one of which reaches
the bound of the row, are put at the next of the thread's places, without a branch: nothing is shared but within
the four threads of a row, and the order is fixed. While the scores of a tile are looked at, the product of the next one
runs, which the compiler allows where nothing but straight code stands between its issue and its end.

The first bound comes from a sample of the tiles, or all of them: each thread holds the largest score of each of its
columns. Where a thread runs out of places, the candidates of the tile are dropped, those of each row are dealt out anew
to its threads (where they are many, after their bound is computed again from all of them), and the tile is looked at
once more.

Scores here are products without the scale, which is positive.
"""

from __future__ import annotations

from typing import Any

import cutlass
import cutlass.cute as cute
from cutlass import Float32, Int32, const_expr
from cutlass.cute.nvgpu import warpgroup

from gossamer.cute.common import WARPGROUP, Barrier, Thread
from gossamer.cute.instructions import ROWS, assembly, of_row, over_quad_sum, places
from gossamer.cute.tiles import accumulator, held_factor, hold, issue, product_of, second_factor
from gossamer.entmax.hopper.support.block import SupportBlock
from gossamer.entmax.hopper.support.bounds import LOWEST, Bounds
from gossamer.entmax.hopper.support.rows import rows_of, tile_of

PLACES = 64  # columns of a thread, 128 of a row, that each keep the largest score of the sample
# A row overflows, since a list will probably not hold its support, where more scores of the sample are over the first
# bound, or more places hold candidates after a new one, in the first half of the tiles and behind it.
MOST_SAMPLED = 64
MOST_LEFT_EARLY, MOST_LEFT = 64, 92
PARTS = 4  # of a tile that is looked at again
TOGETHER = 4  # places that are looked at in one step


class RowCandidates(Bounds):
    """The candidates of a warpgroup's rows. State is in tensors of registers, one number for each row of a thread."""

    def __init__(self, block: SupportBlock, thread: Thread) -> None:
        c, dtype = block.config, block.s_q.element_type
        first = block.s_candidates.iterator.toint() + 8 * (thread.warpgroup * WARPGROUP + thread.thread)
        super().__init__(block, [first + 8 * c.threads * r for r in range(ROWS)])
        self.block, self.thread, self.quad = block, thread, thread.lane % 4
        self.mma = product_of(dtype, c.step, registers=True)
        self.q, self.k = held_factor(self.mma, c.D), second_factor(self.mma, block.s_k)
        self.rows = rows_of(block)
        self.start_head(self.rows.head)
        self.lo = cute.make_rmem_tensor((ROWS,), Int32)
        self.hi = cute.make_rmem_tensor((ROWS,), Int32)
        self.overflowed = cute.make_rmem_tensor((ROWS,), Int32)
        self.limit = cute.make_rmem_tensor((ROWS,), Int32)  # the last place; the first one once a row has overflowed
        self.before = cute.make_rmem_tensor((ROWS,), Int32)  # the next place before a tile
        self.overflows = c.weighed and not c.top

    @cute.jit
    def run(self):
        """Scan the tiles: first the sample for the bounds, then all for the candidates."""
        c, rows, thread = self.config, self.rows, self.thread
        Q = cute.size(self.arguments.q.tensor, mode=[0])
        K = cute.size(self.arguments.k.tensor, mode=[0])
        for r in cutlass.range_constexpr(ROWS):
            row = rows.tile * c.rows + thread.row + 8 * r
            lo, hi = Int32(0), Int32(K)
            if const_expr(c.bounds == "causal"):
                hi = cutlass.min(row + self.arguments.offset + 1, Int32(K))
            if row >= Q:
                hi = Int32(0)
            elif const_expr(c.bounds == "intervals"):
                lo, hi = self.arguments.lo[row], self.arguments.hi[row]
            self.lo[r], self.hi[r] = lo, hi
            self.bound[r] = Float32(LOWEST)
            self.next[r] = self.start[r]
            self.limit[r] = self.start[r] + (c.places - 1) * c.place
            self.overflowed[r] = Int32(0)
        # A tile that all rows of the warp see whole needs no mask.
        self.most_lo = cute.arch.warp_redux_sync(cutlass.max(self.lo[0], self.lo[1]), kind="max")
        self.least_hi = cute.arch.warp_redux_sync(cutlass.min(self.hi[0], self.hi[1]), kind="min")
        self.block.q.wait_full(thread.warpgroup, 0)
        self.hold_q()
        one, other = accumulator(self.mma, c.step), accumulator(self.mma, c.step)
        # With 64 keys a tile, even and odd tiles have columns of their own.
        largest = cute.make_rmem_tensor((PLACES,), Float32)
        largest.fill(-Float32.inf)
        ready = self.begin(one, Int32(0), cutlass.Boolean(False))
        self.end(one, Int32(0))
        for step in cutlass.range(0, rows.sample, 2, unroll=1):
            ready = self.begin(other, step + 1, ready)
            self.raise_to(largest, one, 0)
            self.end(other, step + 1)
            ready = self.begin(one, step + 2, ready)
            self.raise_to(largest, other, PLACES - c.step // 2)
            self.end(one, step + 2)
        self.start_bounds(largest)
        if const_expr(self.overflows):
            if self.going(largest) != 0:
                self.keep_all(one, other)
            else:
                for step in cutlass.range(rows.sample + 1, rows.sample + rows.tiles + 1, unroll=1):
                    self.block.k.release(self.block.k.wait_full_at(step))
        else:
            self.keep_all(one, other)
        cute.arch.sync_warp()

    @cute.jit
    def hold_q(self):
        """Read Q into registers; its memory is free once all warps have done so."""
        hold(self.mma, self.block.s_q[None, None, self.thread.warpgroup], self.q, self.thread.thread)
        cute.arch.barrier(barrier_id=Barrier.Q_READ, number_of_threads=self.config.threads)

    @cute.jit
    def keep_all(self, one, other):
        """Keep the candidates of all tiles; `one` holds the scores of the first."""
        sample, ready = self.rows.sample, cutlass.Boolean(False)
        for step in cutlass.range(sample, sample + self.rows.tiles, 2, unroll=1):
            ready = self.begin(other, step + 1, ready)
            self.take(one, self.key_of(step))
            self.end(other, step + 1)
            self.check(one, self.key_of(step))
            ready = self.begin(one, step + 2, ready)
            self.take(other, self.key_of(step + 1))
            self.end(one, step + 2)
            self.check(other, self.key_of(step + 1))

    def key_of(self, step: Any) -> Any:
        """The first key of a step's tile."""
        return tile_of(self.rows, step, self.arguments.every) * self.config.step

    @cute.jit
    def begin(self, scores, step, ready):
        """Issue the product of a step's tile; returns whether the next tile has arrived.

        Args:
            ready: whether this tile is known to have arrived.
        """
        k = self.block.k
        stage, phase = k.place(step)
        if not ready:
            k.wait_full(stage, phase)
        issue(self.mma, scores, self.q, self.k[None, None, None, stage], False)
        following, phase = k.place(step + 1)
        return cute.arch.mbarrier_test_wait(k.full + following, phase)

    @cute.jit
    def end(self, scores, step):
        """Wait for the scores of a step's tile, and mask them."""
        warpgroup.wait_group(0)
        stage, _ = self.block.k.place(step)
        self.block.k.release(stage)
        key = self.key_of(step)
        if key + self.config.step > self.least_hi or key < self.most_lo:
            self.mask(scores, key)

    @cute.jit
    def mask(self, scores, key):
        """Set the scores of keys that a row does not see to -inf."""
        for i in places(scores):
            r = const_expr(i % 4 // 2)
            j = key + self.thread.quad + (8 * (i // 4) + i % 2)
            seen = j < self.hi[r]
            if const_expr(self.config.bounds == "intervals"):
                seen = seen and j >= self.lo[r]
            scores[i] = scores[i] if seen else -Float32.inf

    def raise_to(self, largest: Any, scores: Any, first: int) -> None:
        """Raise the largest score of each column, from column `first` on.

        Inline code computes it in place, so that the next product may take the registers of the scores.
        """
        for i in places(scores):
            larger = assembly(Float32, "max.f32 $0, $1, $2;", Float32(largest[first + i]), Float32(scores[i]))
            largest[first + i] = larger

    @cute.jit
    def going(self, largest):
        """Overflow rows whose sample is mostly over the bound; returns the number of warps with other rows."""
        some = Int32(0)
        for r in cutlass.range_constexpr(ROWS):
            over = Int32(0)
            for i in of_row(largest, r):
                over = over + (Int32(1) if largest[i] >= self.bound[r] else Int32(0))
            self.overflow_row(r, over_quad_sum(over) > MOST_SAMPLED)
            some = some | (Int32(1) if self.overflowed[r] == 0 and self.lo[r] < self.hi[r] else Int32(0))
        group, number = self.thread.warpgroup, self.thread.thread // 32
        own = Int32(1) if cute.arch.vote_any_sync(some != 0) else Int32(0)
        if self.thread.lane == 0:
            self.block.s_going[number, group] = own
        cute.arch.barrier(barrier_id=Barrier.WARPGROUP_TURN + group, number_of_threads=WARPGROUP)
        warps = Int32(0)
        for w in cutlass.range_constexpr(4):
            warps = warps + self.block.s_going[w, group]
        return cute.arch.make_warp_uniform(warps)

    def take(self, scores: Any, key: Any, strides: list[Any] | None = None) -> None:
        """Put pairs of keys with a candidate at the next places; the last place takes what does not fit.

        Score i belongs to row i // 2 % 2 and column 8 (i // 4) + i % 2. The sign of score - bound says whether it
        is a candidate: that of NaN is not set, and a bound of -0 becomes 0. Additions run on other units than
        comparisons, whose rate limits this loop.

        Args:
            strides: bytes to the next place, for equal parts of the tile; 0 leaves a part out.
        """
        count = self.config.step // 8
        less = [Float32(0.0) - self.bound[r] for r in range(ROWS)]
        for r in range(ROWS):
            self.before[r] = self.next[r]
        for j in range(count):
            own = Int32(key + self.thread.quad + 8 * j)
            step = Int32(self.place if strides is None else strides[j * len(strides) // count])
            for r in range(ROWS):
                code = (
                    "{ .reg .pred p; .reg .f32 a, b; .reg .b32 x, y, t; add.f32 a, $1, $3; add.f32 b, $2, $3; "
                    "mov.b32 x, a; mov.b32 y, b; and.b32 t, x, y; and.b32 t, t, 0x80000000; setp.eq.u32 p, t, 0; "
                    f"@p st.shared.v2.f32 [$4], {{$1, $2}}; @p st.shared.b32 [$4 + {self.keys_behind[r]}], $5; "
                    "add.s32 t, $4, $7; min.s32 t, t, $6; selp.b32 $0, t, $4, p; }"
                )
                pair = [Float32(scores[4 * j + 2 * r + n]) for n in range(2)]
                self.next[r] = assembly(Int32, code, *pair, less[r], self.next[r], own, self.limit[r], step)

    @cute.jit
    def check(self, scores, key):
        """Scan a tile again if one of its rows may have run out of places: as a whole, then by parts."""
        if self.out_of_places():
            late = key >= (self.rows.begin + self.rows.tiles // 2) * self.config.step
            most = Int32(MOST_LEFT) if late else Int32(MOST_LEFT_EARLY)
            again = Int32(1)
            self.take_back()
            for part in cutlass.range(1 + PARTS, unroll=1):
                if again != 0:
                    if part == 0 or cute.arch.vote_any_sync(self.crowded(0) or self.crowded(1)):
                        self.make_room()
                        for r in cutlass.range_constexpr(ROWS):
                            # A row overflows in all of its four threads together.
                            many = over_quad_sum(Int32(1) if self.crowded(r) else Int32(0)) != 0
                            if const_expr(self.overflows):
                                many = many or over_quad_sum(self.counts()[r]) > most
                            self.overflow_row(r, many)
                    whole = part == 0
                    self.take(
                        scores, key, [Int32(self.place) if whole or part == 1 + p else Int32(0) for p in range(PARTS)]
                    )
                    if whole:
                        again = Int32(1) if self.out_of_places() else Int32(0)
                        if again != 0:
                            self.take_back()

    @cute.jit
    def out_of_places(self):
        """Whether a row of the warp may have run out of places in the last tile."""
        return cute.arch.vote_any_sync(self.next[0] == self.last(0) or self.next[1] == self.last(1))

    @cute.jit
    def take_back(self):
        """Drop the candidates of the last tile."""
        for r in cutlass.range_constexpr(ROWS):
            self.next[r] = self.before[r]

    def last(self, r: int) -> Any:
        """The last place of a row."""
        return self.start[r] + (self.config.places - 1) * self.place

    def crowded(self, r: int) -> Any:
        """Whether a row may have too few places for a part of a tile."""
        return self.next[r] + (self.config.step // 8 // PARTS) * self.place > self.last(r)

    @cute.jit
    def overflow_row(self, r: cutlass.Constexpr, overflowed):
        """Mark a row as overflowed: it has no candidates from now on. All four threads of the row take part."""
        if overflowed:
            self.overflowed[r] = Int32(1)
            self.bound[r] = Float32.inf
            self.next[r] = self.start[r]
            self.limit[r] = self.start[r]

    @cute.jit
    def make_room(self):
        """Deal the candidates of each row out anew to its threads; where they are many, raise the bounds first."""
        cute.arch.sync_warp()
        n = self.counts()
        most = cute.arch.warp_redux_sync(cutlass.max(n[0], n[1]), kind="max")
        many = [over_quad_sum(n[r]) > 3 * (self.config.places - 1) for r in range(ROWS)]
        if cute.arch.vote_any_sync(many[0] or many[1]):
            self.bounds_again(n, most)
        total = cute.make_rmem_tensor((ROWS,), Int32)
        total.fill(0)
        for first in cutlass.range(0, most, TOGETHER, unroll=1):
            # All are read before the first is written, and none is written behind them.
            moved = [
                (place, r, *self.pair(r, place), self.key(r, place))
                for place in [cutlass.min(first + i, Int32(self.config.places - 1)) for i in range(TOGETHER)]
                for r in range(ROWS)
            ]
            cute.arch.sync_warp()
            for place, r, one, other, key in moved:
                kept = place < n[r] and not (one < self.bound[r] and other < self.bound[r])
                rank, more = self.rank(kept)
                rank = rank + total[r]
                if kept:
                    to = self.start[r] - 8 * self.quad + (rank >> 2) * self.place + 8 * (rank & 3)
                    code = f"st.shared.v2.f32 [$0], {{$1, $2}}; st.shared.b32 [$0 + {self.keys_behind[r]}], $3;"
                    assembly(None, code, Int32(to), one, other, key)
                total[r] = total[r] + more
            cute.arch.sync_warp()
        for r in cutlass.range_constexpr(ROWS):
            self.next[r] = self.start[r] + ((total[r] + 3 - self.quad) >> 2) * self.place
        cute.arch.sync_warp()

    @cute.jit
    def rank(self, kept):
        """(how many threads of the row with a lower number keep their pair, how many of all do)."""
        bits = cute.arch.vote_ballot_sync(kept)
        quad = (Int32(bits) >> (self.thread.lane & 28)) & 15
        return cute.arch.popc(quad & ((Int32(1) << self.quad) - 1)), cute.arch.popc(quad)
