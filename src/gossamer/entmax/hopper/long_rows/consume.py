"""A warpgroup with 64 rows of an item: it estimates their normalisers, improves them by passes, and computes out."""

from __future__ import annotations

from typing import Any

import cutlass
import cutlass.cute as cute
from cutlass import Float32, Int32, const_expr
from cutlass.cute.nvgpu import warpgroup

from gossamer.cute.common import WARPGROUP, Thread
from gossamer.cute.instructions import ROWS, assembly, convert, over_quad_max, over_quad_sum, places
from gossamer.cute.tiles import accumulator, held_factor, issue, product_of, second_factor, transposed
from gossamer.entmax.hopper.long_rows.block import LongRowsBlock, Pass
from gossamer.entmax.hopper.long_rows.configurations import EVERY
from gossamer.entmax.hopper.long_rows.results import write_rows
from gossamer.entmax.hopper.long_rows.row_tile import ALL, RowTile
from gossamer.entmax.hopper.long_rows.rows import spread
from gossamer.entmax.hopper.long_rows.sums import SAMPLE_STEPS, longest, two

MOST_STEPS = 60
SLACK = 1e-5  # relative, of the largest score: it was rounded


class Consumer(RowTile):
    """The forward of a warpgroup's rows."""

    def __init__(self, block: LongRowsBlock, thread: Thread) -> None:
        super().__init__(block, thread)
        c = block.config
        self.mma_pv = product_of(block.s_q.element_type, c.E, transposed=True, registers=True)
        self.v = second_factor(self.mma_pv, transposed(block.s_v, c.step, c.E, c.v_stages))
        self.o = accumulator(self.mma_pv, c.E)
        self.p = held_factor(self.mma_pv, c.step)
        self.low, self.high, self.most, self.bad = two(), two(), two(), two()

    @cute.jit
    def item(self, place, head, kv, v, passes):
        """Compute an item; returns the numbers of tiles of K and V and of passes so far."""
        tiles, sums = place.tiles, self.sums
        self.begin(place, head)
        self.estimate(place, kv)
        kv += 1
        some = spread(tiles)
        for step in cutlass.range_constexpr(self.config.sampled):
            if some > 0:
                self.walk_sums(place, kv, some, EVERY, False)
                self.refine(place, passes, step == 0)
            kv += some
            passes += 1
        self.walk_sums(place, kv, tiles, 1, True)
        kv += tiles
        going = self.improve(place, passes, True)
        passes += 1
        steps = Int32(1)
        while going != 0:
            self.decide(Pass.SUMS)
            self.walk_sums(place, kv, tiles, 1, False)
            kv += tiles
            going = self.improve(place, passes, False)
            passes += 1
            steps += 1
            going = going if steps < MOST_STEPS else Int32(0)
        self.decide(Pass.OUT)
        self.walk_values(place, kv, v)
        self.exchange(place, passes, (sums.F, sums.U, sums.size), None)
        passes += 1
        self.gather_parts(place, self.o)
        if place.split == 0 or self.thread.warpgroup == 0:
            write_rows(self, head, place.own, place.count)
        return kv + tiles, v + tiles, passes

    @cute.jit
    def estimate(self, place, kv):
        """Estimate normalisers: the weights of a sample of the keys, scaled up to all keys, sum to 1."""
        sums = self.sums
        scores = self.product(kv, False)
        self.mask_sample(place.keys, scores)
        number, each = two(), two()
        for r in cutlass.range_constexpr(ROWS):
            sums.top[r], number[r] = -Float32.inf, Float32(0.0)
        for i in places(scores):
            r = const_expr(i % 4 // 2)
            number[r] = number[r] + (Float32(1.0) if scores[i] > -Float32.inf else Float32(0.0))
            sums.top[r] = cute.arch.fmax(sums.top[r], scores[i])
        for r in cutlass.range_constexpr(ROWS):
            number_seen = Float32(cutlass.max(self.hi[r] - self.lo[r], Int32(1)))
            each[r] = number_seen / cute.arch.fmax(over_quad_sum(number[r]), Float32(1.0))
            self.most[r] = longest(sums.a[r], number_seen)
            sums.top[r] = over_quad_max(sums.top[r])
            top = sums.top[r] * sums.scale
            sums.lam[r] = top if top > -Float32.inf and top < Float32.inf else Float32(0.0)
            self.low[r], self.high[r] = sums.lam[r], sums.lam[r] + self.most[r]
        for _ in cutlass.range(SAMPLE_STEPS, unroll=1):
            sums.begin()
            sums.add(scores, False)
            for r in cutlass.range_constexpr(ROWS):
                for x in (sums.F, sums.U, sums.W):
                    x[r] = each[r] * over_quad_sum(x[r])
                x, F = sums.lam[r], sums.F[r]
                self.low[r] = x if F >= 1.0 else self.low[r]
                self.high[r] = x if F < 1.0 else self.high[r]
                sums.lam[r] = sums.advanced(r, self.low[r], self.high[r])

    @cute.jit
    def refine(self, place, passes, first: cutlass.Constexpr):
        """Move the normalisers by sums over the larger sample. `first`: the interval is that of the smaller one."""
        sums = self.sums
        self.exchange(place, passes, (sums.F, sums.U, sums.W, sums.size), None)
        for r in cutlass.range_constexpr(ROWS):
            each = Float32(self.hi[r] - self.lo[r]) * cute.arch.rcp_approx(cute.arch.fmax(sums.size[r], Float32(1.0)))
            for x in (sums.F, sums.U, sums.W):
                x[r] = each * x[r]
            x, F = sums.lam[r], sums.F[r]
            if const_expr(first):
                top = sums.top[r] * sums.scale
                self.low[r], self.high[r] = top, top + self.most[r]
            self.low[r] = cute.arch.fmax(self.low[r], x) if F >= 1.0 else self.low[r]
            self.high[r] = cute.arch.fmin(self.high[r], x) if F < 1.0 else self.high[r]
            new = sums.advanced(r, self.low[r], self.high[r])
            sums.lam[r] = new if sums.size[r] > 0.0 and new > -Float32.inf and new < Float32.inf else x

    @cute.jit
    def walk_sums(self, place, kv, tiles, every: cutlass.Constexpr, largest: cutlass.Constexpr):
        """Compute the sums of a pass.

        Args:
            every: one tile in so many is walked, `tiles` in all. In a sample the keys that rows see are counted.
            largest: whether the largest score is looked for as well.
        """
        sums, step = self.sums, self.config.step
        sums.begin()
        own = place.part
        for i in cutlass.range(tiles, unroll=1):
            tile = place.keys.begin + every // 2 + i * every
            if i == own and tile >= place.mine.begin and tile < place.mine.end:
                scores = self.product(kv + i)
                self.mask(place, tile, scores)
                sums.add(scores, largest)
                if const_expr(every > 1):
                    for r in cutlass.range_constexpr(ROWS):
                        keys = cutlass.min(self.hi[r], (tile + 1) * step) - cutlass.max(self.lo[r], tile * step)
                        # Once for the four threads of a row.
                        keys = keys if keys > 0 and self.thread.lane % 4 == 0 else Int32(0)
                        sums.size[r] = sums.size[r] + Float32(keys)
            else:
                self.block.k.release(self.block.k.wait_full_at(kv + i))
                if i == own:
                    self.pass_turns(1)
            own = own + place.parts if i == own else own
        if own < cute.ceil_div(tiles, place.parts) * place.parts:
            self.pass_turns(1)

    @cute.jit
    def walk_values(self, place, kv, v):
        """Compute the sums and out in the last pass."""
        self.sums.begin()
        self.o.fill(0.0)
        own = place.part
        for i in cutlass.range(place.tiles, unroll=1):
            tile = place.keys.begin + i
            if i == own and tile >= place.mine.begin and tile < place.mine.end:
                scores = self.product(kv + i)
                self.mask(place, tile, scores)
                self.sums.weigh(scores)
                convert(scores, self.p)
                stage = self.block.v.wait_full_at(v + i)
                self.turns.take()
                issue(self.mma_pv, self.o, self.p, self.v[None, None, None, stage], True)
                self.turns.give()
                warpgroup.wait_group(0)
                self.block.v.release(stage)
            else:
                self.block.k.release(self.block.k.wait_full_at(kv + i))
                self.block.v.release(self.block.v.wait_full_at(v + i))
                if i == own:
                    self.pass_turns(2)
            own = own + place.parts if i == own else own
        if own < cute.ceil_div(place.tiles, place.parts) * place.parts:
            self.pass_turns(2)

    @cute.jit
    def improve(self, place, passes, first: cutlass.Constexpr):
        """Move the normalisers by the sums of a pass; returns whether any row of the block needs another pass."""
        sums = self.sums
        self.exchange(place, passes, (sums.F, sums.U, sums.W), sums.top if const_expr(first) else None)
        going = Int32(0)
        for r in cutlass.range_constexpr(ROWS):
            x, F = sums.lam[r], sums.F[r]
            if const_expr(first):
                top = sums.top[r] * sums.scale
                slack = SLACK * (1.0 + cute.arch.fmax(top, -top))
                self.low[r], self.high[r] = top, top + self.most[r] + slack
                # NaN if a score is NaN or inf; -inf stands for no key.
                self.bad[r] = top - top if top > -Float32.inf or top != top else Float32(0.0)
            self.low[r] = cute.arch.fmax(self.low[r], x) if F >= 1.0 else self.low[r]
            self.high[r] = cute.arch.fmin(self.high[r], x) if F < 1.0 else self.high[r]
            log = cute.math.log(F)
            far = cute.arch.fmax(log, -log) > self.arguments.near and self.high[r] > self.low[r]
            solvable = self.bad[r] == 0.0 and self.low[r] > -Float32.inf
            going = Int32(1) if far and solvable and place.there else going
            sums.lam[r] = sums.advanced(r, self.low[r], self.high[r]) if solvable else Float32(0.0)
        return self.any(going)

    def any(self, value: Any) -> Any:
        """Whether any computing thread has another number than 0."""
        code = (
            "{ .reg .pred p, q; setp.ne.s32 p, $1, 0; "
            f"barrier.cta.red.or.pred q, {ALL}, {WARPGROUP * self.config.groups}, p; selp.s32 $0, 1, 0, q; }}"
        )
        return cute.arch.make_warp_uniform(assembly(Int32, code, Int32(value)))

    @cute.jit
    def decide(self, kind: cutlass.Constexpr):
        """Tell the producer what kind of pass begins."""
        if self.thread.warpgroup == 0 and self.thread.thread == 0:
            self.block.s_decided[0] = Int32(kind)
            cute.arch.mbarrier_arrive(self.block.decided.full)
