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
from cutlass import Float32, Int32, Int64, const_expr
from cutlass.cute.nvgpu import warpgroup

from gossamer.kernels.hopper.device.common import WARPGROUP, Barrier, Thread
from gossamer.kernels.hopper.device.instructions import ROWS, assembly, of_row, places
from gossamer.kernels.hopper.device.select.block import SelectBlock
from gossamer.kernels.hopper.device.select.bounds import LOWEST, Bounds, over_quad_sum
from gossamer.kernels.hopper.device.select.configurations import CADENCE, STAGED
from gossamer.kernels.hopper.device.select.rows import rows_of, sampled, tile_of
from gossamer.kernels.hopper.device.tiles import accumulator, first_factor, issue, product_of, second_factor

MOST_SAMPLED = 96  # scores of a sample, and
MOST_LEFT = 108  # contenders, over new bounds of a row whose support a list will hold


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
        self.sample = sampled(self.rows.tiles, c.every)
        self.of_head(self.rows.head)
        self.lo = cute.make_rmem_tensor((ROWS,), Int32)
        self.hi = cute.make_rmem_tensor((ROWS,), Int32)
        self.given_up = cute.make_rmem_tensor((ROWS,), Int32)
        # From the place of a score to that of its key.
        self.keys_behind = self.place * c.places
        self.room = c.places * self.place
        self.threads = 2 * c.rows
        number = thread.warpgroup * WARPGROUP + thread.thread
        self.staged_at = block.s_staged.iterator.toint() + 16 * number
        self.staged_keys = block.s_staged_keys.iterator.toint() + 4 * number
        self.staged = cute.make_rmem_tensor((1,), Int32)
        self.staged[0] = Int32(0)
        self.gives_up = c.weighed and not c.top

    @cute.jit
    def run(self):
        """All tiles."""
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
            self.given_up[r] = Int32(0)
        # Of the rows of a warp: a tile outside of all is not looked at, and one inside of all has no mask.
        self.least_lo = cute.arch.warp_redux_sync(cutlass.min(self.lo[0], self.lo[1]), kind="min")
        self.most_lo = cute.arch.warp_redux_sync(cutlass.max(self.lo[0], self.lo[1]), kind="max")
        self.least_hi = cute.arch.warp_redux_sync(cutlass.min(self.hi[0], self.hi[1]), kind="min")
        self.most_hi = cute.arch.warp_redux_sync(cutlass.max(self.hi[0], self.hi[1]), kind="max")
        self.block.q.wait_full(thread.warpgroup, 0)
        largest = accumulator(self.mma, c.step)
        largest.fill(-Float32.inf)
        for step in cutlass.range(self.sample, unroll=1):
            scores = self.product(step)
            key = (rows.begin + tile_of(step, self.sample, c.every)) * c.step
            if key < self.most_hi and key + c.step > self.least_lo:
                if key + c.step > self.least_hi or key < self.most_lo:
                    self.mask(scores, key)
                for i in places(scores):
                    largest[i] = cute.arch.fmax(largest[i], scores[i])
        self.start_bounds(largest)
        if const_expr(self.gives_up):
            if self.going(largest) != 0:
                self.keep_all()
            else:
                for step in cutlass.range(self.sample, self.sample + rows.tiles, unroll=1):
                    self.block.k.release(self.block.k.wait_full_at(step))
        else:
            self.keep_all()
        self.append()
        cute.arch.sync_warp()

    @cute.jit
    def keep_all(self):
        """The contenders of all tiles."""
        c, rows, size = self.config, self.rows, self.config.step
        for step in cutlass.range(self.sample, self.sample + rows.tiles, unroll=1):
            scores = self.product(step)
            key = (rows.begin + tile_of(step, self.sample, c.every)) * size
            if key < self.most_hi and key + size > self.least_lo:
                if key + size > self.least_hi or key < self.most_lo:
                    self.mask(scores, key)
                self.keep(scores, key)

    @cute.jit
    def going(self, largest):
        """Give up rows of which too much of the sample is over the first bound; how many warps have others."""
        some = Int32(0)
        for r in cutlass.range_constexpr(ROWS):
            over = Int32(0)
            for i in of_row(largest, r):
                over = over + (Int32(1) if largest[i] >= self.bound[r] else Int32(0))
            self.give_up(r, over_quad_sum(over) > MOST_SAMPLED)
            some = some | (Int32(1) if self.given_up[r] == 0 and self.lo[r] < self.hi[r] else Int32(0))
        warpgroup, warp = self.thread.warpgroup, self.thread.thread // 32
        own = Int32(1) if cute.arch.vote_any_sync(some != 0) else Int32(0)
        if self.thread.lane == 0:
            self.block.s_going[warp, warpgroup] = own
        cute.arch.barrier(barrier_id=Barrier.WARPGROUP_TURN + warpgroup, number_of_threads=WARPGROUP)
        found = Int32(0)
        for w in cutlass.range_constexpr(4):
            found = found + self.block.s_going[w, warpgroup]
        return cute.arch.make_warp_uniform(found)

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
        """Take the contenders of a tile, by fours of scores of which one is a contender, without a branch for each.

        Score i is of row i // 2 % 2 and column 8 (i // 4) + i % 2.
        """
        fours = self.fours(scores)
        count = cute.arch.popc(fours)
        # All warps append after the same tiles: each product waits for the slowest of them.
        due = (key // self.config.step) % CADENCE == 0
        if cute.arch.vote_any_sync(due or self.staged[0] + count > STAGED):
            # Where a thread has more than fit at all, one half of its fours follows the other.
            halves = Int32(2) if cute.arch.vote_any_sync(count > STAGED) else Int32(1)
            for half in cutlass.range(halves, unroll=1):
                self.append()
                low = const_expr((1 << STAGED) - 1)
                part = fours & (low if half == 0 else ~low) if halves == 2 else fours
                self.stage(scores, key, part)
        else:
            self.stage(scores, key, fours)

    @cute.jit
    def stage(self, scores, key, fours):
        """Put fours of scores behind those that are staged."""
        number = key + self.thread.quad
        for j in cutlass.range_constexpr(self.config.step // 8):
            code = (
                f"{{ .reg .pred p; .reg .b32 t, a, b; and.b32 t, $6, {1 << j}; setp.ne.b32 p, t, 0; "
                f"mad.lo.s32 a, $5, {16 * self.threads}, $7; mad.lo.s32 b, $5, {4 * self.threads}, $8; "
                "@p st.shared.v4.f32 [a], {$1, $2, $3, $4}; @p st.shared.b32 [b], $9; "
                "mov.b32 $0, $5; @p add.s32 $0, $5, 1; }"
            )
            four = [Float32(scores[4 * j + n]) for n in range(4)]
            own = Int32(self.staged_at), Int32(self.staged_keys), Int32(number + 8 * j)
            self.staged[0] = assembly(Int32, code, *four, self.staged[0], Int32(fours), *own)

    @cute.jit
    def append(self):
        """Append the contenders among the staged scores to those of their rows."""
        most = cute.arch.warp_redux_sync(self.staged[0], kind="max")
        for i in cutlass.range(most, unroll=1):
            if cute.arch.vote_any_sync(self.full(0) or self.full(1)):
                self.refresh()
                for r in cutlass.range_constexpr(ROWS):
                    # All four threads of a row give it up together.
                    many = over_quad_sum(Int32(1) if self.full(r) else Int32(0)) != 0
                    if const_expr(self.gives_up):
                        many = many or over_quad_sum(self.counts()[r]) > MOST_LEFT
                    self.give_up(r, many)
            at = self.staged_at + i * (16 * self.threads)
            key = assembly(Int32, "ld.shared.b32 $0, [$1];", Int32(self.staged_keys + i * (4 * self.threads)))
            pairs = [assembly(Int64, f"ld.shared.b64 $0, [$1 + {8 * r}];", Int32(at)) for r in range(ROWS)]
            for n in cutlass.range_constexpr(4):
                r = const_expr(n // 2)
                half = ("x", "y")[n % 2]
                score = assembly(
                    Float32, f"{{ .reg .b32 x, y; mov.b64 {{x, y}}, $1; mov.b32 $0, {half}; }}", pairs[r], effects=False
                )
                score = score if i < self.staged[0] else -Float32.inf
                place = self.next[r]
                self.next[r] = self.behind(score, self.bound[r], place)
                self.put(score, self.bound[r], place, key + n % 2)
        self.staged[0] = Int32(0)

    def full(self, r: int) -> Any:
        """Whether a row has no places for two contenders."""
        return self.next[r] - self.start[r] > self.room - 2 * self.place

    @cute.jit
    def give_up(self, r: cutlass.Constexpr, given_up):
        """A row that is given up has no contenders from now on; all four threads of the row take part."""
        if given_up:
            self.given_up[r] = Int32(1)
            self.bound[r] = Float32.inf
            self.next[r] = self.start[r]

    def fours(self, scores: Any) -> Any:
        """A bit for each four scores of this thread of which one is not under the bound of its row.

        The sign of a score less the bound tells; that of NaN is not set. 0 is taken for a bound of -0.
        """
        code = (
            "{ .reg .f32 a, b, c, d; .reg .b32 w, x, y, z; add.f32 a, $1, $5; add.f32 b, $2, $5; add.f32 c, $3, $6; "
            "add.f32 d, $4, $6; mov.b32 w, a; mov.b32 x, b; mov.b32 y, c; mov.b32 z, d; lop3.b32 w, w, x, y, 0x80; "
            "and.b32 w, w, z; shf.l.wrap.b32 $0, w, $7, 1; }"
        )
        less = [Float32(0.0) - self.bound[r] for r in range(ROWS)]
        parts = []
        for first in range(0, self.config.step // 8, 8):
            none = Int32(0)
            for j in reversed(range(first, first + 8)):
                four = [Float32(scores[4 * j + n]) for n in range(4)]
                none = assembly(Int32, code, *four, *less, none, effects=False)
            parts.append((none ^ 255) << first)
        return parts[0] | parts[1] if len(parts) > 1 else parts[0]

    def behind(self, score: Any, bound: Any, place: Any) -> Any:
        """The place behind one that a score takes if it is not under the bound."""
        code = f"{{ .reg .pred p; setp.geu.f32 p, $1, $2; mov.b32 $0, $3; @p add.s32 $0, $3, {self.place}; }}"
        return assembly(Int32, code, Float32(score), Float32(bound), Int32(place), effects=False)

    def put(self, score: Any, bound: Any, place: Any, key: Any) -> None:
        """Keep a score that is not under the bound at a place in shared memory."""
        code = (
            "{ .reg .pred p; setp.geu.f32 p, $0, $1; @p st.shared.f32 [$2], $0; "
            f"@p st.shared.b32 [$2 + {self.keys_behind}], $3; }}"
        )
        assembly(None, code, Float32(score), Float32(bound), Int32(place), Int32(key))

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
                at = self.start[r] + place * self.place
                score = assembly(Float32, "ld.shared.f32 $0, [$1];", Int32(at))
                key = assembly(Int32, f"ld.shared.b32 $0, [$1 + {self.keys_behind}];", Int32(at))
                kept = place < n[r] and not (score < self.bound[r])
                rank, more = self.rank(kept)
                rank = rank + total[r]
                cute.arch.sync_warp()
                if kept:
                    to = self.start[r] - 4 * self.quad + (rank >> 2) * self.place + 4 * (rank & 3)
                    assembly(None, "st.shared.f32 [$0], $1;", Int32(to), Float32(score))
                    assembly(None, f"st.shared.b32 [$0 + {self.keys_behind}], $1;", Int32(to), Int32(key))
                total[r] = total[r] + more
        for r in cutlass.range_constexpr(ROWS):
            self.next[r] = self.start[r] + ((total[r] + 3 - self.quad) >> 2) * self.place
        cute.arch.sync_warp()

    @cute.jit
    def rank(self, kept):
        """How many threads of the row with a lower number keep theirs, and how many do."""
        bits = cute.arch.vote_ballot_sync(kept)
        quad = (Int32(bits) >> (self.thread.lane & 28)) & 15
        return cute.arch.popc(quad & ((Int32(1) << self.quad) - 1)), cute.arch.popc(quad)
