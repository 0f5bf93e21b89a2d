"""The computing warpgroups of dQ by rows: products, probabilities, gradients of scores, and the result."""

from __future__ import annotations

from typing import Any

import cutlass
import cutlass.cute as cute
from cutlass import Float32, Int32, const_expr
from cutlass.cute.nvgpu import warpgroup

from gossamer.kernels.hopper.device import instructions
from gossamer.kernels.hopper.device.backward.row_masks import Kind
from gossamer.kernels.hopper.device.backward.warpgroup import clear, put_part, put_tile, send_tile, two_rows
from gossamer.kernels.hopper.device.common import NUMBERS, ROWS, WARPGROUP, Barrier, Opaque
from gossamer.kernels.hopper.device.row_items import RowItem
from gossamer.kernels.hopper.device.tiles import accumulator, issue, product_of, transposed


@cute.jit
def probabilities(scores: cute.Tensor, lse: cute.Tensor, exponent: Float32, capped: cutlass.Constexpr) -> None:
    """Scores to exp2(exponent * score - lse) in place, times the derivative of tanh where `capped`."""
    for j in cutlass.range_constexpr(cute.size(scores) // 4):
        for i in cutlass.range_constexpr(4 * j, 4 * j + 4):
            score = scores[i]
            p = cute.math.exp2(score * exponent - lse[i % 4 // 2], fastmath=True)
            if const_expr(capped):
                p = p * (1.0 - score * score)
            scores[i] = p


@cute.jit
def score_gradients(p: cute.Tensor, dp: cute.Tensor, delta: cute.Tensor, to: cute.Tensor) -> None:
    """dS = P (dP - delta) in 16 bits."""
    packed = cute.recast_tensor(to, Int32)
    for j in cutlass.range_constexpr(cute.size(packed) // 2):
        for r in cutlass.range_constexpr(instructions.ROWS):
            i = const_expr(4 * j + 2 * r)
            a, b = p[i] * (dp[i] - delta[r]), p[i + 1] * (dp[i + 1] - delta[r])
            packed[2 * j + r] = instructions.pack(a, b, to.element_type)


class QueryConsumer(Opaque):
    """A warpgroup with 64 query rows of each item. `masks` says what is kept of each step.

    A stage of the ring of Q is an item, with its dO; Q makes room for the item's dQ.
    """

    def __init__(self, block: Any, masks: Any) -> None:
        config, tiles = block.config, block.tiles
        self.config, self.block, self.item, self.masks, self.thread = config, block, block.item, masks, masks.thread
        dtype, group = NUMBERS[config.dtype], self.thread.warpgroup
        self.mma_s = product_of(dtype, config.step)
        self.mma_dq = product_of(dtype, config.D, transposed=True, registers=True)
        of_s, of_dq = self.mma_s.get_slice(0), self.mma_dq.get_slice(0)
        self.frag_q = of_s.make_fragment_A(of_s.partition_A(tiles.q))[None, None, None, group]
        self.frag_do = of_s.make_fragment_A(of_s.partition_A(tiles.dout))[None, None, None, group]
        self.frag_k = of_s.make_fragment_B(of_s.partition_B(tiles.k))
        self.frag_v = of_s.make_fragment_B(of_s.partition_B(tiles.v))
        k_transposed = transposed(tiles.k, config.step, config.D, block.k.stages)
        self.frag_kt = of_dq.make_fragment_B(of_dq.partition_B(k_transposed))
        self.frag_ds = of_dq.make_fragment_A(of_dq.partition_shape_A((ROWS, config.step)))
        self.acc_dq = accumulator(self.mma_dq, config.D)
        self.lse, self.delta = two_rows(Float32), two_rows(Float32)
        self.s_dq = tiles.q[None, None, group]

    @cute.jit
    def consume(self):
        """All items."""
        item, block = self.item, self.block
        turn, kv = Int32(0), Int32(0)  # items, steps so far
        block.q.wait_full(0, turn & 1)
        running = item[RowItem.VALID]
        while running != 0:
            batch, head, tile = item[RowItem.BATCH], item[RowItem.HEAD], item[RowItem.TILE]
            bounds = self.load_rows(batch, head, tile)
            self.acc_dq.fill(0.0)
            first = kv
            kv = self.masks.walk(self, bounds, kv)
            warpgroup.wait_group(0)
            if kv != first:
                block.k.release_at(kv - 1)
            self.finish(batch, head)
            turn += 1
            block.q.wait_full(0, turn & 1)
            running = item[RowItem.VALID]

    @cute.jit
    def load_rows(self, batch, head, tile):
        """Load the terms of this thread's rows, and what masks them; returns what `masks` has found of the item."""
        a, first = self.block.arguments, tile * self.config.block_q + self.thread.row
        rows = cute.size(a.dq.tensor, mode=[0])
        bounds = self.masks.begin(batch)
        for r in cutlass.range_constexpr(instructions.ROWS):
            row = first + 8 * r
            row = row if row < rows else rows - 1
            self.lse[r] = a.terms[0, batch, head, row]
            self.delta[r] = a.terms[1, batch, head, row]
            if const_expr(self.masks.has_bounds):
                self.masks.load_row(bounds, r, row)
        return bounds

    @cute.jit
    def step(self, kind: cutlass.Constexpr, place, kv, first):
        """S and dP of step `kv` while dQ of the one before ends (the item's first has none); then dS, and dQ begins."""
        c, block, factors = self.config, self.block, self.block.arguments.factors
        k_stage, k_phase = block.k.place(kv)
        v_stage, v_phase = block.v.place(kv)
        acc_s, acc_dp = accumulator(self.mma_s, c.step), accumulator(self.mma_s, c.step)
        words = cute.make_rmem_tensor((instructions.ROWS, c.step // 32), Int32)
        self.masks.load(words, kind, place, kv)
        block.k.wait_full(k_stage, k_phase)
        # S = Q K^T
        issue(self.mma_s, acc_s, self.frag_q, self.frag_k[None, None, None, k_stage], False)
        block.v.wait_full(v_stage, v_phase)
        warpgroup.wait_group(1)
        if kv != first:
            block.k.release_at(kv - 1)
        # dP = dO V^T
        issue(self.mma_s, acc_dp, self.frag_do, self.frag_v[None, None, None, v_stage], False)
        warpgroup.wait_group(1)
        if const_expr(c.score == "softcap"):
            instructions.soft_cap(acc_s, factors.before_cap)
        probabilities(acc_s, self.lse, factors.exponent, c.score == "softcap")
        if const_expr(kind is not Kind.FULL):
            clear(acc_s, words)
        warpgroup.wait_group(0)
        block.v.release_at(kv)
        score_gradients(acc_s, acc_dp, self.delta, self.frag_ds)
        # dQ += dS K
        issue(self.mma_dq, self.acc_dq, self.frag_ds, self.frag_kt[None, None, None, k_stage], True)

    @cute.jit
    def finish(self, batch, head):
        """dQ of an item: times the scale, by TMA, or as a part of a split row."""
        c, a, thread = self.config, self.block.arguments, self.thread
        tile, slot = self.item[RowItem.TILE], self.item[RowItem.SLOT]
        cute.arch.barrier(barrier_id=Barrier.Q_READ + thread.warpgroup, number_of_threads=WARPGROUP)
        if slot < 0:
            instructions.multiply(self.acc_dq, a.factors.scale)
            put_tile(self.acc_dq, self.mma_dq, thread, self.s_dq)
            cute.arch.fence_view_async_shared()
        else:
            put_part(self.acc_dq, a.part_dq, slot, thread.row, thread.quad)
        cute.arch.barrier(barrier_id=Barrier.Q_READ + thread.warpgroup, number_of_threads=WARPGROUP)
        if thread.thread < 32:
            if slot < 0:
                send_tile(a.dq, self.s_dq, c.D, tile * (c.block_q // ROWS) + thread.warpgroup, head, batch)
            cute.arch.sync_warp()
            with cute.arch.elect_one():
                cute.arch.mbarrier_arrive(self.block.q.empty)
