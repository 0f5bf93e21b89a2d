"""A warpgroup's 64 rows: their bounds, and the contenders that are above them, in shared memory.

Every thread holds the scores of two rows, a quarter of the columns of each, and keeps those that are not under the
row's bound in places of its own: nothing is shared but within the four threads of a row, and the order is fixed. The
first bound comes from some of the tiles, of which each thread holds the largest score of every place of its own. A
bound is found again when places run out, from all contenders of the row, which are then dealt out anew.

Scores here are products without the scale, which is positive.
"""

from __future__ import annotations

from typing import Any

import cutlass
import cutlass.cute as cute
from cutlass import Float32, Int32, const_expr
from cutlass.cute.nvgpu import warpgroup

from gossamer.kernels.hopper.device.common import Thread
from gossamer.kernels.hopper.device.instructions import ROWS, assembly, places
from gossamer.kernels.hopper.device.select.block import SelectBlock
from gossamer.kernels.hopper.device.select.bounds import LOWEST, PLACE, Bounds, over_quad_sum
from gossamer.kernels.hopper.device.select.configurations import ROWS as BLOCK_ROWS
from gossamer.kernels.hopper.device.select.rows import rows_of, sampled, tile_of
from gossamer.kernels.hopper.device.tiles import accumulator, first_factor, issue, product_of, second_factor


class Selector(Bounds):
    """The rows of a warpgroup. What changes is in tensors of registers, one number for each row of a thread."""

    def __init__(self, block: SelectBlock, thread: Thread) -> None:
        c, dtype = block.config, block.s_q.element_type
        first = block.s_scores.iterator.toint() + 4 * (4 * thread.row + thread.lane % 4)
        super().__init__(block, [first + 4 * 4 * 8 * r for r in range(ROWS)])
        self.block, self.thread, self.quad = block, thread, thread.lane % 4
        self.mma = product_of(dtype, c.step)
        self.q, self.k = first_factor(self.mma, block.s_q), second_factor(self.mma, block.s_k)
        self.rows = rows_of(block)
        self.of_head(self.rows.head)
        self.lo = cute.make_rmem_tensor((ROWS,), Int32)
        self.hi = cute.make_rmem_tensor((ROWS,), Int32)
        self.given_up = cute.make_rmem_tensor((ROWS,), Int32)
        # From the place of a score to that of its key.
        self.keys_behind = PLACE * c.places
        self.room = c.places * PLACE

    @cute.jit
    def run(self):
        """All tiles."""
        c, rows, thread = self.config, self.rows, self.thread
        Q = cute.size(self.arguments.q.tensor, mode=[0])
        K = cute.size(self.arguments.k.tensor, mode=[0])
        for r in cutlass.range_constexpr(ROWS):
            row = rows.tile * BLOCK_ROWS + thread.row + 8 * r
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
            self.given_up[r] = Int32(0)
        # Of the rows of a warp: a tile outside of all is not looked at, and one inside of all has no mask.
        least_lo = cute.arch.warp_redux_sync(cutlass.min(self.lo[0], self.lo[1]), kind="min")
        most_lo = cute.arch.warp_redux_sync(cutlass.max(self.lo[0], self.lo[1]), kind="max")
        least_hi = cute.arch.warp_redux_sync(cutlass.min(self.hi[0], self.hi[1]), kind="min")
        most_hi = cute.arch.warp_redux_sync(cutlass.max(self.hi[0], self.hi[1]), kind="max")
        sample = sampled(rows.tiles, c.every)
        self.block.q.wait_full(thread.warpgroup, 0)
        largest = accumulator(self.mma, c.step)
        largest.fill(-Float32.inf)
        for step in cutlass.range(sample, unroll=1):
            scores = self.product(step)
            key = (rows.begin + tile_of(step, sample, c.every)) * c.step
            if key < most_hi and key + c.step > least_lo:
                if key + c.step > least_hi or key < most_lo:
                    self.mask(scores, key)
                for i in places(scores):
                    largest[i] = cute.arch.fmax(largest[i], scores[i])
        self.start_bounds(largest)
        for step in cutlass.range(sample, sample + rows.tiles, unroll=1):
            scores = self.product(step)
            key = (rows.begin + tile_of(step, sample, c.every)) * c.step
            if key < most_hi and key + c.step > least_lo:
                if key + c.step > least_hi or key < most_lo:
                    self.mask(scores, key)
                self.keep(scores, key)
        cute.arch.sync_warp()

    @cute.jit
    def product(self, step):
        """The scores of a step's tile."""
        stage = self.block.k.wait_full_at(step)
        scores = accumulator(self.mma, self.config.step)
        own = self.q[None, None, None, self.thread.warpgroup]
        issue(self.mma, scores, own, self.k[None, None, None, stage], False)
        warpgroup.wait_group(0)
        self.block.k.release(stage)
        return scores

    @cute.jit
    def mask(self, scores, key):
        """Scores of keys that a row does not see become -inf."""
        for i in places(scores):
            r = const_expr(i % 4 // 2)
            j = key + self.thread.quad + (8 * (i // 4) + i % 2)
            seen = j < self.hi[r]
            if const_expr(self.config.bounds == "intervals"):
                seen = seen and j >= self.lo[r]
            scores[i] = scores[i] if seen else -Float32.inf

    @cute.jit
    def keep(self, scores, key):
        """Append the contenders of a tile: by fours of scores, of which most have none in a whole warp.

        Score i is of row i // 2 % 2 and column 8 (i // 4) + i % 2.
        """
        fours = self.fours(scores)
        if cute.arch.vote_any_sync(self.needed(fours, 0) > self.room or self.needed(fours, 1) > self.room):
            self.refresh()
            fours = self.fours(scores)
            for r in cutlass.range_constexpr(ROWS):
                # All four threads of a row give it up together.
                over = Int32(1) if self.needed(fours, r) > self.room else Int32(0)
                if over_quad_sum(over) != 0:
                    self.given_up[r] = Int32(1)
                    self.bound[r] = Float32.inf
                    self.next[r] = self.start[r]
        some = cute.arch.warp_redux_sync(fours, kind="or")
        number = key + self.thread.quad
        for j in cutlass.range_constexpr(self.config.step // 8):
            if some & (1 << j) != 0:
                for n in cutlass.range_constexpr(4):
                    r, column = const_expr(n // 2), const_expr(8 * j + n % 2)
                    self.next[r] = self.append(scores[4 * j + n], self.bound[r], self.next[r], number + column)

    def fours(self, scores: Any) -> Any:
        """A bit for each four scores of this thread of which one is not under the bound of its row."""
        parts = [Int32(0)] * 4
        for j in range(self.config.step // 8):
            code = (
                "{ .reg .pred p; .reg .f32 a, b; max.NaN.f32 a, $1, $2; max.NaN.f32 b, $3, $4; "
                "setp.geu.f32 p, a, $5; setp.geu.or.f32 p, b, $6, p; mov.b32 $0, $7; "
                f"@p or.b32 $0, $7, {1 << j}; }}"
            )
            four = [Float32(scores[4 * j + n]) for n in range(4)]
            bounds = [Float32(self.bound[r]) for r in range(ROWS)]
            parts[j % 4] = assembly(Int32, code, *four, *bounds, parts[j % 4], effects=False)
        return (parts[0] | parts[1]) | (parts[2] | parts[3])

    def append(self, score: Any, bound: Any, place: Any, key: Any) -> Any:
        """Keep a score that is not under the bound at a place in shared memory; the next free place."""
        code = (
            "{ .reg .pred p; setp.geu.f32 p, $1, $2; mov.b32 $0, $3; @p st.shared.f32 [$3], $1; "
            f"@p st.shared.b32 [$3 + {self.keys_behind}], $4; @p add.s32 $0, $3, {PLACE}; }}"
        )
        return assembly(Int32, code, Float32(score), Float32(bound), Int32(place), Int32(key))

    def needed(self, fours: Any, r: int) -> Any:
        """The bytes that the places of a row may take with those of a tile: two of each four are of a row."""
        return self.next[r] - self.start[r] + cute.arch.popc(fours) * (2 * PLACE)

    @cute.jit
    def refresh(self):
        """Find the bounds again from the contenders, and take out those that are under them."""
        cute.arch.sync_warp()
        n = self.counts()
        most = cute.arch.warp_redux_sync(cutlass.max(n[0], n[1]), kind="max")
        self.bounds_again(n, most)
        total = cute.make_rmem_tensor((ROWS,), Int32)
        total.fill(0)
        for place in cutlass.range(most, unroll=1):
            for r in cutlass.range_constexpr(ROWS):
                at = self.start[r] + place * PLACE
                score = assembly(Float32, "ld.shared.f32 $0, [$1];", Int32(at))
                key = assembly(Int32, f"ld.shared.b32 $0, [$1 + {self.keys_behind}];", Int32(at))
                kept = place < n[r] and not (score < self.bound[r])
                rank, more = self.rank(kept)
                rank = rank + total[r]
                cute.arch.sync_warp()
                if kept:
                    to = self.start[r] - 4 * self.quad + (rank >> 2) * PLACE + 4 * (rank & 3)
                    assembly(None, "st.shared.f32 [$0], $1;", Int32(to), Float32(score))
                    assembly(None, f"st.shared.b32 [$0 + {self.keys_behind}], $1;", Int32(to), Int32(key))
                total[r] = total[r] + more
        for r in cutlass.range_constexpr(ROWS):
            self.next[r] = self.start[r] + ((total[r] + 3 - self.quad) >> 2) * PLACE
        cute.arch.sync_warp()

    @cute.jit
    def rank(self, kept):
        """How many threads of the row with a lower number keep theirs, and how many do."""
        bits = cute.arch.vote_ballot_sync(kept)
        quad = (Int32(bits) >> (self.thread.lane & 28)) & 15
        return cute.arch.popc(quad & ((Int32(1) << self.quad) - 1)), cute.arch.popc(quad)
