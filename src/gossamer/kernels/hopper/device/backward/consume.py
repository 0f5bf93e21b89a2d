"""The computing warpgroup of the column kernels: products, probabilities, gradients of scores, and an item's result."""

from __future__ import annotations

from functools import partial
from typing import Any

import cutlass
import cutlass.cute as cute
from cutlass import Int32, const_expr
from cutlass.cute.nvgpu import warpgroup

from gossamer.cute import instructions
from gossamer.cute.column_items import ColumnItem
from gossamer.cute.common import NUMBERS, ROWS, WARPGROUP, Opaque
from gossamer.cute.tiles import accumulator, issue, product_of, transposed
from gossamer.kernels.hopper.device.backward.block import ColumnBlock
from gossamer.kernels.hopper.device.backward.common import ColumnBarrier, Kind, Step, high, low, put_tile, row_terms
from gossamer.kernels.hopper.device.backward.keep import put_pair


class ColumnConsumer(Opaque):
    """A warpgroup with 64 keys of each item, alone in its block: dK and dV. `masks` says what is kept of each step.

    Nothing of a step is left for the following one, since its registers hold no more; while it makes P or dS, the
    products of the other block run.
    """

    def __init__(self, block: ColumnBlock, masks: Any) -> None:
        config = block.config
        self.config, self.block, self.masks, self.thread = config, block, masks, masks.thread
        dtype, step = NUMBERS[config.dtype], config.step
        self.halves = step // ROWS  # times 64 queries of a step
        self.mma_s = product_of(dtype, step)
        self.mma_dv, self.mma_dk = [
            product_of(dtype, columns, transposed=True, registers=True) for columns in (config.E, config.D)
        ]
        of_s, of_dv, of_dk = [mma.get_slice(0) for mma in (self.mma_s, self.mma_dv, self.mma_dk)]
        k, v = [
            cute.flat_divide(tile[None, None, 0], (ROWS, columns))
            for tile, columns in ((block.s_k, config.D), (block.s_v, config.E))
        ]
        q_transposed = transposed(block.s_q, step, config.D, block.q.stages)
        do_transposed = transposed(block.s_dout, step, config.E, block.dout.stages)
        self.frag_k = of_s.make_fragment_A(of_s.partition_A(k))  # of both warpgroups, as that of V
        self.frag_v = of_s.make_fragment_A(of_s.partition_A(v))
        self.frag_q = of_s.make_fragment_B(of_s.partition_B(block.s_q))
        self.frag_do = of_s.make_fragment_B(of_s.partition_B(block.s_dout))
        self.frag_qt = of_dk.make_fragment_B(of_dk.partition_B(q_transposed))
        self.frag_dot = of_dv.make_fragment_B(of_dv.partition_B(do_transposed))
        self.frag_p = of_dv.make_fragment_A(of_dv.partition_shape_A((ROWS, step)))
        self.frag_ds = of_dk.make_fragment_A(of_dk.partition_shape_A((ROWS, step)))
        self.slope = cute.make_rmem_tensor((step // 4,), Int32)  # derivatives of the soft cap, in 16 bits
        self.acc_s, self.acc_dp = accumulator(self.mma_s, step), accumulator(self.mma_s, step)
        self.acc_dv, self.acc_dk = accumulator(self.mma_dv, config.E), accumulator(self.mma_dk, config.D)

    @cute.jit
    def consume(self):
        """All items."""
        block = self.block
        turn, n, m = Int32(0), Int32(0), Int32(0)  # items, stages of Q, stages of dO so far
        block.k.wait_full(0, turn & 1)
        running = block.item[ColumnItem.VALID]
        while running != 0:
            self.acc_dk.fill(0.0)
            self.acc_dv.fill(0.0)
            kind = self.masks.load(block.q.wait_full_at(n))
            block.v.wait_full(0, turn & 1)
            begin = m
            n, m, kind = self.start(n, m, kind)
            while self.goes_on(kind):
                self.step(n, m, begin)
                n += 1
                m += 1
                kind = self.masks.load(block.q.wait_full_at(n))
            n, m = self.finish(n, m, begin, kind)
            block.q.release_at(n)
            n += 1
            turn += 1
            block.k.wait_full(0, turn & 1)
            running = block.item[ColumnItem.VALID]

    def goes_on(self, kind: Any) -> Any:
        """Whether the loop computes a step of this kind."""
        return kind != Kind.END

    def start(self, n: Any, m: Any, kind: Any) -> Any:
        """What comes before an item's steps: nothing. Returns stages and kind of the first step."""
        return n, m, kind

    @cute.jit
    def step(self, n, m, begin):
        """A step: stage `n` of Q and `m` of dO."""
        c, block = self.config, self.block
        stage, _ = block.q.place(n)
        do_stage, do_phase = block.dout.place(m)
        # S^T = K Q^T
        self.issue_scores(stage)
        lse = row_terms(self.thread, block.lse, stage)
        if const_expr(c.score == "softcap"):  # its slopes leave no registers for S beside dP
            warpgroup.wait_group(0)
            self.probabilities(stage, lse)
        block.dout.wait_full(do_stage, do_phase)
        # dP^T = V dO^T
        self.issue_dp(do_stage)
        if const_expr(c.score != "softcap"):
            warpgroup.wait_group(1)
            self.probabilities(stage, lse)
            delta = row_terms(self.thread, block.delta, do_stage)
        warpgroup.wait_group(0)
        if const_expr(c.score == "softcap"):
            delta = row_terms(self.thread, block.delta, do_stage)
        self.score_gradient(do_stage, delta)
        # dV += P^T dO
        issue(self.mma_dv, self.acc_dv, self.frag_p, self.frag_dot[None, None, None, do_stage], True)
        # dK += dS^T Q
        issue(self.mma_dk, self.acc_dk, self.frag_ds, self.frag_qt[None, None, None, stage], True)
        self.beside_products(stage)
        warpgroup.wait_group(1)
        block.dout.release_at(m)
        warpgroup.wait_group(0)
        block.q.release_at(n)

    def issue_scores(self, stage: Any) -> None:
        k, q = self.frag_k[None, None, None, self.thread.warpgroup, 0], self.frag_q[None, None, None, stage]
        issue(self.mma_s, self.acc_s, k, q, False)

    def issue_dp(self, do_stage: Any) -> None:
        v, do = self.frag_v[None, None, None, self.thread.warpgroup, 0], self.frag_do[None, None, None, do_stage]
        issue(self.mma_s, self.acc_dp, v, do, False)

    @cute.jit
    def transform(self, scores, stage):
        """What is done to the scores of a step beside their factor in exp2."""
        if const_expr(self.config.score == "softcap"):
            instructions.soft_cap(scores, self.block.arguments.before)

    @cute.jit
    def beside_products(self, stage):
        """What is done with dS of a step, in a stage of Q, while dV and dK are computed: it may be stored."""
        c, block, thread = self.config, self.block, self.thread
        if const_expr(c.keeps):
            pair = block.steps[Step.PLACE, stage] + thread.warpgroup * const_expr(c.block_q // ROWS)
            put_pair(block.arguments.ds, pair, thread, self.frag_ds)
            cute.arch.sync_warp()  # every lane has read the place, before one gives the stage back

    @cute.jit
    def probabilities(self, stage, lse):
        """P^T = exp2(S^T - lse) of the pairs that are kept, in 16 bits.

        The compiler would make the exponentials behind the caller's wait, where nothing runs beside them.
        """
        c, a = self.config, self.block.arguments
        power_of_two = instructions.power_here if self.halves > 1 else partial(cute.math.exp2, fastmath=True)
        acc = self.acc_s
        self.transform(acc, stage)
        packed = cute.recast_tensor(self.frag_p, Int32)
        for i in cutlass.range_constexpr(cute.size(acc) // 2):
            if const_expr(i > 0 and i % (ROWS // 4) == 0):
                lse = row_terms(self.thread, self.block.lse, stage * self.halves + i // (ROWS // 4))
            p = [acc[2 * i], acc[2 * i + 1]]
            slope = [1.0, 1.0]
            for e in cutlass.range_constexpr(2):
                x = p[e]
                p[e] = power_of_two(x * a.exponent - lse[e, i // 2 % (ROWS // 8)])
                slope[e] = 1.0 - x * x
            packed[i] = instructions.pack(p[0], p[1], self.frag_p.element_type)
            if const_expr(c.score == "softcap"):
                self.slope[i] = instructions.pack(slope[0], slope[1], self.frag_p.element_type)
        self.masks.clear(packed, stage)
        if const_expr(self.halves == 1):
            # A store that never happens (no probability is negative) keeps them before it, faster than `power_here`.
            signs = packed[0]
            for i in cutlass.range_constexpr(1, cute.size(packed)):
                signs = signs | packed[i]
            if signs < 0:
                self.block.item[ColumnItem.SCRATCH] = Int32(0)

    @cute.jit
    def score_gradient(self, stage, delta):
        """dS^T = P^T (dP^T - delta), in 16 bits."""
        acc, dtype = self.acc_dp, self.frag_p.element_type
        p = cute.recast_tensor(self.frag_p, Int32)
        for i in cutlass.range_constexpr(cute.size(p)):
            if const_expr(i > 0 and i % (ROWS // 4) == 0):
                delta = row_terms(self.thread, self.block.delta, stage * self.halves + i // (ROWS // 4))
            pair = [low(p[i], dtype), high(p[i], dtype)]
            if const_expr(self.config.score == "softcap"):
                pair[0] = pair[0] * low(self.slope[i], dtype)
                pair[1] = pair[1] * high(self.slope[i], dtype)
            for e in cutlass.range_constexpr(2):
                acc[2 * i + e] = pair[e] * (acc[2 * i + e] - delta[e, i // 2 % (ROWS // 8)])
        instructions.convert(acc, self.frag_ds)

    @cute.jit
    def finish(self, n, m, begin, kind):
        """The end of an item: `n` and `m` are the stages after its steps, of which the first was `begin`.

        Returns the stages behind the item's last.
        """
        slot = self.block.item[ColumnItem.SLOT]
        cute.arch.sync_warp()
        self.store(slot)
        return n, m

    @cute.jit
    def store(self, slot):
        """dK and dV of an item: in 16 bits to shared memory for the sending warp, or as float32 to the parts."""
        a, block, thread, threads = self.block.arguments, self.block, self.thread, WARPGROUP + 32
        cute.arch.barrier(barrier_id=ColumnBarrier.STAGING_FREE + thread.warpgroup, number_of_threads=threads)
        if slot < 0:
            instructions.multiply(self.acc_dk, a.factor)
            put_tile(self.acc_dk, self.mma_dk, thread, block.s_dk[None, None, thread.warpgroup])
            put_tile(self.acc_dv, self.mma_dv, thread, block.s_dv[None, None, thread.warpgroup])
            cute.arch.fence_view_async_shared()
        else:
            for acc, part in ((self.acc_dk, a.part_dk), (self.acc_dv, a.part_dv)):
                for j in cutlass.range_constexpr(cute.size(acc) // 4):
                    for r in cutlass.range_constexpr(instructions.ROWS):
                        for e in cutlass.range_constexpr(2):
                            part[slot, thread.row + 8 * r, 8 * j + thread.quad + e] = acc[4 * j + 2 * r + e]
        cute.arch.barrier_arrive(barrier_id=ColumnBarrier.STAGING_FULL + thread.warpgroup, number_of_threads=threads)
