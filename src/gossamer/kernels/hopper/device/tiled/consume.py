"""A warpgroup with 64 rows of an item: an estimate of their normalisers, passes that improve them, and one for out."""

from __future__ import annotations

from typing import Any

import cutlass
import cutlass.cute as cute
from cutlass import Float32, Int32, const_expr
from cutlass.cute.nvgpu import warpgroup

from gossamer.kernels.hopper.device.common import ROWS as TILE
from gossamer.kernels.hopper.device.common import WARPGROUP, Opaque, Thread
from gossamer.kernels.hopper.device.gather.rows import RowCopies
from gossamer.kernels.hopper.device.instructions import ROWS, assembly, convert, places
from gossamer.kernels.hopper.device.tiled.block import Pass, TiledBlock, TileItem
from gossamer.kernels.hopper.device.tiled.configurations import EIGHT
from gossamer.kernels.hopper.device.tiled.results import write
from gossamer.kernels.hopper.device.tiled.rows import Keys, division, keys_of, sampled, seen
from gossamer.kernels.hopper.device.tiled.sums import SAMPLE_STEPS, Sums, longest, over_quad_max, over_quad_sum, two
from gossamer.kernels.hopper.device.tiles import (
    accumulator,
    first_factor,
    issue,
    product_of,
    second_factor,
    transposed,
)

MOST_STEPS = 60
SLACK = 1e-5  # relative, of the largest score: it was rounded
OWN, ALL = 1, 4  # named barriers: of each warpgroup, and of all


class Consumer(Opaque):
    """What changes is in tensors of registers, one number for each row of a thread."""

    def __init__(self, block: TiledBlock, thread: Thread) -> None:
        a, c, dtype = block.arguments, block.config, block.s_q.element_type
        self.block, self.arguments, self.config, self.thread = block, a, c, thread
        self.mma, self.mma_pv = product_of(dtype, c.step), product_of(dtype, c.E, transposed=True, registers=True)
        self.q = first_factor(self.mma, block.s_q)[None, None, None, thread.warpgroup]
        self.k = second_factor(self.mma, block.s_k)
        self.v = second_factor(self.mma_pv, transposed(block.s_v, c.step, c.E, c.v_stages))
        self.o = accumulator(self.mma_pv, c.E)
        of_pv = self.mma_pv.get_slice(0)
        self.p = of_pv.make_fragment_A(of_pv.partition_shape_A((TILE, c.step)))
        self.copies = RowCopies(a.q, block.items, block.s_q.iterator, c.D, thread.thread, threads=WARPGROUP)
        self.sums = Sums(c, a.scale)
        self.lo, self.hi, self.row = (cute.make_rmem_tensor((ROWS,), Int32) for _ in range(3))
        self.low, self.high, self.most, self.bad = two(), two(), two(), two()
        self.own_row = thread.thread // 32 * 16 + thread.lane // 4  # of the 64

    @cute.jit
    def run(self):
        """Item after item."""
        block, items = self.block, self.block.items
        of_launch = division(block)
        turn, kv, v, passes = Int32(0), Int32(0), Int32(0), Int32(0)  # items, tiles of K and V, and passes so far
        stage = items.wait_full_at(turn)
        running = block.s_item[TileItem.VALID, stage]
        while running != 0:
            head, first = block.s_item[TileItem.HEAD, stage], block.s_item[TileItem.FIRST, stage]
            cute.arch.sync_warp()
            items.release(stage)
            kv, v, passes = self.item(of_launch, head, first, kv, v, passes)
            turn += 1
            stage = items.wait_full_at(turn)
            running = block.s_item[TileItem.VALID, stage]

    @cute.jit
    def item(self, of_launch, head, first, kv, v, passes):
        """Everything of an item."""
        me, a = self.thread.warpgroup, self.arguments
        count = a.row_counts[head]
        own = first if of_launch.split != 0 else first + TILE * me
        part = me if of_launch.split != 0 else Int32(0)
        parts = Int32(self.config.groups) if of_launch.split != 0 else Int32(1)
        keys = keys_of(self.block, head, first, of_launch.rows)
        begin, tiles = keys.begin, keys.end - keys.begin
        # A warpgroup without rows gives back what it does not read.
        there = own < count
        mine = keys_of(self.block, head, own, TILE) if there else Keys(begin, begin, begin, begin)
        self.begin(head, cutlass.min(own, count - 1), count)
        self.estimate(keys, kv)
        kv += 1
        place = (begin, tiles, part, parts, mine)
        self.walk_sums(place, kv, True)
        kv += tiles
        going = self.improve(place, passes, True, there)
        passes += 1
        steps = Int32(1)
        while going != 0:
            self.decide(Pass.SUMS)
            self.walk_sums(place, kv, False)
            kv += tiles
            going = self.improve(place, passes, False, there)
            passes += 1
            steps += 1
            going = going if steps < MOST_STEPS else Int32(0)
        self.decide(Pass.OUT)
        self.walk_values(place, kv, v)
        self.exchange(place, passes)
        passes += 1
        write(self, head, of_launch.split, own, count)
        return kv + tiles, v + tiles, passes

    @cute.jit
    def begin(self, head, own, count):
        """Read the rows of an item, from `own` on: where there are less than 64, the last one stands for the others."""
        a, copies = self.arguments, self.copies
        of_threads = copies.columns()
        for j in cutlass.range_constexpr(copies.copies):
            of_threads[j] = a.row_list[head, cutlass.min(own + copies.row + j * copies.at_once, count - 1)]
        heads = cute.size(a.q, mode=[1])
        # Products of the item before have read what is written now.
        cute.arch.barrier(barrier_id=OWN + self.thread.warpgroup, number_of_threads=WARPGROUP)
        copies.fill(copies.start(head // heads, head % heads), of_threads, self.thread.warpgroup)
        steepness = a.steepness[head % heads]
        self.sums.of_head(steepness)
        for r in cutlass.range_constexpr(ROWS):
            self.row[r] = a.row_list[head, cutlass.min(own + self.own_row + 8 * r, count - 1)]
            self.lo[r], self.hi[r] = seen(self.block, self.row[r])
            number = cutlass.max(self.hi[r] - self.lo[r], Int32(1))
            self.most[r] = longest(steepness, Float32(number))
        cute.arch.cp_async_commit_group()
        cute.arch.cp_async_wait_group(0)
        cute.arch.fence_view_async_shared()
        cute.arch.barrier(barrier_id=OWN + self.thread.warpgroup, number_of_threads=WARPGROUP)

    @cute.jit
    def product(self, n):
        """The products of the rows with the n-th tile of K."""
        stage = self.block.k.wait_full_at(n)
        scores = accumulator(self.mma, self.config.step)
        issue(self.mma, scores, self.q, self.k[None, None, None, stage], False)
        warpgroup.wait_group(0)
        self.block.k.release(stage)
        return scores

    @cute.jit
    def estimate(self, keys, kv):
        """A normaliser whose weights, of a sample of the keys, times the keys there are to each, sum to 1."""
        sums, c = self.sums, self.config
        scores = self.product(kv)
        number = two()
        for r in cutlass.range_constexpr(ROWS):
            sums.top[r], number[r] = -Float32.inf, Float32(0.0)
        for i in places(scores):
            r = const_expr(i % 4 // 2)
            key = EIGHT * sampled(keys, i // 4, c.step) + 2 * (self.thread.lane % 4) + i % 2
            is_seen = key >= self.lo[r] and key < self.hi[r]
            scores[i] = scores[i] if is_seen else -Float32.inf
            number[r] = number[r] + (Float32(1.0) if is_seen else Float32(0.0))
            sums.top[r] = cute.arch.fmax(sums.top[r], scores[i])
        each = two()
        for r in cutlass.range_constexpr(ROWS):
            of_sample = over_quad_sum(number[r])
            each[r] = Float32(cutlass.max(self.hi[r] - self.lo[r], Int32(1))) / cute.arch.fmax(of_sample, Float32(1.0))
            top = over_quad_max(sums.top[r]) * sums.scale
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
        for r in cutlass.range_constexpr(ROWS):
            self.low[r], self.high[r], sums.top[r] = -Float32.inf, Float32.inf, -Float32.inf

    @cute.jit
    def walk_sums(self, place, kv, largest: cutlass.Constexpr):
        """The sums of a pass."""
        begin, tiles, part, parts, mine = place
        self.sums.begin()
        own = part
        for i in cutlass.range(tiles, unroll=1):
            tile = begin + i
            if i == own and tile >= mine.begin and tile < mine.end:
                scores = self.product(kv + i)
                if tile < mine.middle or tile >= mine.middle_end:
                    self.mask(scores, tile * self.config.step)
                self.sums.add(scores, largest)
            else:
                self.block.k.release(self.block.k.wait_full_at(kv + i))
            own = own + parts if i == own else own

    @cute.jit
    def walk_values(self, place, kv, v):
        """The last pass: sums, and out."""
        begin, tiles, part, parts, mine = place
        self.sums.begin()
        self.o.fill(0.0)
        own = part
        for i in cutlass.range(tiles, unroll=1):
            tile = begin + i
            if i == own and tile >= mine.begin and tile < mine.end:
                scores = self.product(kv + i)
                if tile < mine.middle or tile >= mine.middle_end:
                    self.mask(scores, tile * self.config.step)
                self.sums.weigh(scores)
                convert(scores, self.p)
                stage = self.block.v.wait_full_at(v + i)
                issue(self.mma_pv, self.o, self.p, self.v[None, None, None, stage], True)
                warpgroup.wait_group(0)
                self.block.v.release(stage)
            else:
                self.block.k.release(self.block.k.wait_full_at(kv + i))
                self.block.v.release(self.block.v.wait_full_at(v + i))
            own = own + parts if i == own else own

    @cute.jit
    def mask(self, scores, key):
        """Scores of keys that a row does not see become -inf."""
        for i in places(scores):
            r = const_expr(i % 4 // 2)
            j = key + 2 * (self.thread.lane % 4) + (8 * (i // 4) + i % 2)
            is_seen = j < self.hi[r]
            if const_expr(self.config.bounds == "intervals"):
                is_seen = is_seen and j >= self.lo[r]
            scores[i] = scores[i] if is_seen else -Float32.inf

    @cute.jit
    def exchange(self, place, passes):
        """The sums of a pass over all threads of a row, and over all parts of the keys, in order."""
        _, _, part, parts, _ = place
        sums = self.sums
        kinds = (sums.F, sums.U, sums.W, sums.top)
        for r in cutlass.range_constexpr(ROWS):
            for x in kinds[:3]:
                x[r] = over_quad_sum(x[r])
            sums.top[r] = over_quad_max(sums.top[r])
        if parts > 1:
            shared = self.block.s_sums
            if self.thread.lane % 4 == 0:
                for r in cutlass.range_constexpr(ROWS):
                    for n, x in enumerate(kinds):
                        shared[self.own_row + 8 * r, n, part, passes & 1] = x[r]
            self.wait_for_all()
            for r in cutlass.range_constexpr(ROWS):
                row = self.own_row + 8 * r
                for n, x in enumerate(kinds):
                    x[r] = shared[row, n, 0, passes & 1]
                for other in cutlass.range_constexpr(1, self.config.groups):
                    for n, x in enumerate(kinds[:3]):
                        x[r] = x[r] + shared[row, n, other, passes & 1]
                    sums.top[r] = cute.arch.fmax(sums.top[r], shared[row, 3, other, passes & 1], nan=True)

    def wait_for_all(self) -> None:
        """Wait for all warpgroups that compute."""
        cute.arch.barrier(barrier_id=ALL, number_of_threads=WARPGROUP * self.config.groups)

    @cute.jit
    def improve(self, place, passes, first: cutlass.Constexpr, there):
        """A step of the normalisers, from the sums of a pass; whether any row of the block needs another pass."""
        self.exchange(place, passes)
        sums = self.sums
        going = Int32(0)
        for r in cutlass.range_constexpr(ROWS):
            x, F = sums.lam[r], sums.F[r]
            if const_expr(first):
                top = sums.top[r] * sums.scale
                slack = SLACK * (1.0 + cute.arch.fmax(top, -top))
                self.low[r], self.high[r] = top, top + self.most[r] + slack
                # NaN, if a score is NaN or inf; -inf is no key.
                self.bad[r] = top - top if top > -Float32.inf or top != top else Float32(0.0)
            self.low[r] = cute.arch.fmax(self.low[r], x) if F >= 1.0 else self.low[r]
            self.high[r] = cute.arch.fmin(self.high[r], x) if F < 1.0 else self.high[r]
            log = cute.math.log(F)
            far = cute.arch.fmax(log, -log) > self.arguments.near and self.high[r] > self.low[r]
            found = self.bad[r] == 0.0 and self.low[r] > -Float32.inf
            going = Int32(1) if far and found and there else going
            sums.lam[r] = sums.advanced(r, self.low[r], self.high[r]) if found else Float32(0.0)
        return self.any(going)

    def any(self, value: Any) -> Any:
        """Whether a thread of those that compute has another number than 0."""
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
