"""A warpgroup with 64 rows of an item: their dQ and delta, in one pass over their keys.

With u = p^(2 - alpha) and dP = dO V^T, delta is sum u dP / sum u, and dQ = scale sum u (dP - delta) k. The sums of
u (dP - guess) k and of u k are kept apart until delta is known; the guess, the delta of a sample of the keys, keeps
them from cancelling.
"""

from __future__ import annotations

from typing import Any

import cutlass
import cutlass.cute as cute
from cutlass import Float32, Int64, const_expr
from cutlass.cute.nvgpu import warpgroup

from gossamer.kernels.hopper.device.common import ROWS as TILE
from gossamer.kernels.hopper.device.common import WARPGROUP, Thread
from gossamer.kernels.hopper.device.gather.rows import RowCopies
from gossamer.kernels.hopper.device.instructions import ROWS, convert, of_row, pack, places
from gossamer.kernels.hopper.device.tiled.query_block import TiledQueryBlock
from gossamer.kernels.hopper.device.tiled.row_tile import RowTile
from gossamer.kernels.hopper.device.tiled.sums import over_quad_sum, powers, two
from gossamer.kernels.hopper.device.tiles import (
    accumulator,
    first_factor,
    issue,
    product_of,
    second_factor,
    transposed,
)


class QueryConsumer(RowTile):
    """dQ of a warpgroup's rows."""

    def __init__(self, block: TiledQueryBlock, thread: Thread) -> None:
        super().__init__(block, thread)
        c, a, dtype = block.config, block.arguments, block.s_q.element_type
        self.dout = first_factor(self.mma, block.s_dout)[None, None, None, thread.warpgroup]
        self.v = second_factor(self.mma, block.s_v)
        self.mma_k = product_of(dtype, c.D, transposed=True, registers=True)
        self.k_turned = second_factor(self.mma_k, transposed(block.s_k, c.step, c.D, c.k_stages))
        self.with_dp, self.without = accumulator(self.mma_k, c.D), accumulator(self.mma_k, c.D)
        of_k = self.mma_k.get_slice(0)
        self.t, self.u = (of_k.make_fragment_A(of_k.partition_shape_A((TILE, c.step))) for _ in range(2))
        self.gradients = RowCopies(a.dout, block.items, block.s_dout.iterator, c.E, thread.thread, threads=WARPGROUP)
        self.guess = two()
        self.sum_u, self.sum_dp = two(), two()

    def fill(self, batch: Any, head: Any, rows: Any) -> None:
        super().fill(batch, head, rows)
        self.gradients.fill(self.gradients.start(batch, head), rows, self.thread.warpgroup)

    @cute.jit
    def item(self, place, head, n, v, passes):
        """Everything of an item."""
        sums, lead = self.sums, Int64(head) * cute.size(self.arguments.q, mode=[2])
        self.begin(place, head)
        for r in cutlass.range_constexpr(ROWS):
            sums.lam[r] = self.arguments.lam[lead + self.row[r]]
        sums.begin()
        scores, dp = self.products(n, True)
        self.mask_sample(place.keys, scores)
        self.guess.fill(0.0)
        self.start()
        self.weigh(scores, dp)
        for r in cutlass.range_constexpr(ROWS):
            total = over_quad_sum(self.sum_u[r])
            self.guess[r] = over_quad_sum(self.sum_dp[r]) / (total if total != 0.0 else Float32(1.0))
        n += 1
        self.start()
        self.with_dp.fill(0.0)
        self.without.fill(0.0)
        self.walk(place, n)
        self.exchange(place, passes, (self.sum_u, self.sum_dp), None)
        passes += 1
        rest, acc = two(), self.with_dp
        for r in cutlass.range_constexpr(ROWS):
            rest[r] = self.sum_dp[r] / (self.sum_u[r] if self.sum_u[r] != 0.0 else Float32(1.0))
        for i in places(acc):
            acc[i] = acc[i] - rest[i % 4 // 2] * self.without[i]
        self.gather_parts(place, acc)
        if place.split == 0 or self.thread.warpgroup == 0:
            self.write(place, lead, rest)
        return n + place.tiles, v, passes

    @cute.jit
    def start(self):
        """Sums begin."""
        self.sum_u.fill(0.0)
        self.sum_dp.fill(0.0)

    @cute.jit
    def products(self, n, sample: cutlass.Constexpr):
        """Those of Q with the n-th tile of K, which products that follow read again but of a `sample`; of dO with V."""
        block, step = self.block, self.config.step
        scores, dp = accumulator(self.mma, step), accumulator(self.mma, step)
        stage = block.k.wait_full_at(n)
        of_v = block.v.wait_full_at(n)
        if const_expr(not sample):
            self.turns.take()
        issue(self.mma, scores, self.q, self.k[None, None, None, stage], False)
        issue(self.mma, dp, self.dout, self.v[None, None, None, of_v], False)
        if const_expr(not sample):
            self.turns.give()
        warpgroup.wait_group(0)
        block.v.release(of_v)
        if const_expr(sample):
            block.k.release(stage)
        return scores, dp

    @cute.jit
    def weigh(self, scores, dp):
        """u (dP - guess) in the place of products with K, u in that of dP; their sums are added."""
        sums = self.sums
        for r in cutlass.range_constexpr(ROWS):
            total, with_dp = [Float32(0.0), Float32(0.0)], [Float32(0.0), Float32(0.0)]
            for n, i in enumerate(of_row(scores, r)):
                w = cute.arch.fmax(scores[i] * sums.c[r] + sums.d[r], Float32(0.0), nan=True)
                _, u = powers(self.config.same, sums.exponent, w)
                t = u * (dp[i] - self.guess[r])
                total[n % 2], with_dp[n % 2] = total[n % 2] + u, with_dp[n % 2] + t
                scores[i], dp[i] = t, u
            self.sum_u[r] = self.sum_u[r] + (total[0] + total[1])
            self.sum_dp[r] = self.sum_dp[r] + (with_dp[0] + with_dp[1])

    @cute.jit
    def walk(self, place, n):
        """All tiles of keys."""
        block = self.block
        own = place.part
        for i in cutlass.range(place.tiles, unroll=1):
            tile = place.keys.begin + i
            if i == own and tile >= place.mine.begin and tile < place.mine.end:
                scores, dp = self.products(n + i, False)
                self.mask(place, tile, scores)
                self.weigh(scores, dp)
                convert(scores, self.t)
                convert(dp, self.u)
                stage = block.k.place(n + i)[0]
                keys = self.k_turned[None, None, None, stage]
                self.turns.take()
                issue(self.mma_k, self.with_dp, self.t, keys, True)
                issue(self.mma_k, self.without, self.u, keys, True)
                self.turns.give()
                warpgroup.wait_group(0)
                block.k.release(stage)
            else:
                block.k.release(block.k.wait_full_at(n + i))
                block.v.release(block.v.wait_full_at(n + i))
                if i == own:
                    self.pass_turns(2)
            own = own + place.parts if i == own else own
        if own < place.rounds:
            self.pass_turns(2)

    @cute.jit
    def write(self, place, lead, rest):
        """Write dQ and delta."""
        a, dtype, acc = self.arguments, self.block.s_q.element_type, self.with_dp
        columns, quad = cute.size(a.dq, mode=[1]), self.thread.lane % 4
        for r in cutlass.range_constexpr(ROWS):
            number = lead + self.row[r]
            if place.own + self.own_row + 8 * r < place.count:
                of_r = of_row(acc, r)
                for n in cutlass.range_constexpr(len(of_r) // 2):
                    i = const_expr(of_r[2 * n])
                    if 4 * n + quad < columns:
                        a.dq[number, 4 * n + quad] = pack(acc[i] * a.scale, acc[i + 1] * a.scale, dtype)
                if quad == 0:
                    a.delta[number] = self.guess[r] + rest[r]
