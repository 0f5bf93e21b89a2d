"""dK and dV of heads wider than 128: one accumulator fills the registers of a warpgroup, so that two share 64 keys.

The first warpgroup computes S^T = K Q^T, P and dV += P^T dO, the second dP^T = V dO^T, dS and dK += dS^T Q: two
products each, and the tensor cores work for one while the other is between its two. P goes from a thread of the first
to the same thread of the second through shared memory, in 16 bits. An item of the schedule is two of this kernel's, one
for each half of its key tile.

With it the backward of causal heads of 256, H 8, 16,384 positions takes 6.32 ms on an H200, that of Triton 16.60
(docs/lab/2026-11-22-hopper-backward.md).
"""

from __future__ import annotations

from enum import IntEnum
from typing import Any

import cutlass
import cutlass.cute as cute
from cutlass import Int32, const_expr
from cutlass.cute.nvgpu import warpgroup

from gossamer.cute import instructions
from gossamer.cute.column_items import ColumnItem
from gossamer.cute.common import NUMBERS, ROWS, WARPGROUP, Opaque, computing_thread
from gossamer.cute.shell import array, tiles, words
from gossamer.cute.tiles import Tma, accumulator, issue, product_of, transposed
from gossamer.kernels.hopper.device.backward.block import ColumnArguments, WideBlock
from gossamer.kernels.hopper.device.backward.common import (
    Kind,
    OneProducer,
    Step,
    clear,
    high,
    low,
    put_part,
    put_tile,
    row_terms,
    send_tile,
)
from gossamer.kernels.hopper.device.backward.keep import put_pair
from gossamer.kernels.hopper.device.backward.kernel import ColumnKernel
from gossamer.kernels.hopper.device.backward.masks import WideColumnMasks
from gossamer.kernels.hopper.device.configurations import WideConfig


class WideBarrier(IntEnum):
    """The first named barrier of each purpose: those of stages, or of warpgroups, follow one another."""

    P_FULL = 1  # P of a step is in shared memory
    P_EMPTY = 3  # it has been read
    OUTPUT = 5  # a warpgroup's result is in shared memory


class WideConsumer(Opaque):
    """A warpgroup that shares 64 keys of each item with another one, and makes one of the two results.

    In each step it multiplies its own `fixed` tile by a tile of `streamed`, and adds what becomes of that, times a tile
    of `summed`, to its result.
    """

    makes_dk: bool  # the second warpgroup; the first makes dV

    def __init__(
        self, block: WideBlock, fixed: Any, streamed: Any, summed: Any, columns: int, result: Tma, shared: Any,
        part: Any,
    ) -> None:  # fmt: skip
        self.config, self.block, self.thread = block.config, block, computing_thread(0)
        self.columns, self.result, self.shared, self.part = columns, result, shared, part
        dtype, step = NUMBERS[self.config.dtype], self.config.step
        self.mma_s, self.mma = product_of(dtype, step), product_of(dtype, columns, transposed=True, registers=True)
        of_s, of_result = self.mma_s.get_slice(0), self.mma.get_slice(0)
        summed = transposed(summed, step, columns, cute.size(summed, mode=[2]))
        self.frag_fixed = of_s.make_fragment_A(of_s.partition_A(fixed[None, None, 0]))
        self.frag_streamed = of_s.make_fragment_B(of_s.partition_B(streamed))
        self.frag_summed = of_result.make_fragment_B(of_result.partition_B(summed))
        self.frag = of_result.make_fragment_A(of_result.partition_shape_A((ROWS, step)))
        self.acc_s, self.acc = accumulator(self.mma_s, step), accumulator(self.mma, columns)

    @cute.jit
    def consume(self):
        """All items."""
        block, item = self.block, self.block.item
        turn, n, m = Int32(0), Int32(0), Int32(0)  # items, stages of Q, stages of dO so far
        block.k.wait_full(0, turn & 1)
        running = item[ColumnItem.VALID]
        while running != 0:
            self.acc.fill(0.0)
            if const_expr(self.makes_dk):
                block.v.wait_full(0, turn & 1)
            kind = self.wait_for_step(n)
            while kind != Kind.END:
                self.step(n, m, kind)
                done_n, done_m = n, m
                n += 1
                m += 1
                kind = self.wait_for_step(n)
                warpgroup.wait_group(0)
                # The last product of a step has read what it summed up: Q for dK, dO for dV.
                if const_expr(self.makes_dk):
                    cute.arch.sync_warp()  # every lane has read the step's description
                    block.q.release_at(done_n)
                else:
                    block.dout.release_at(done_m)
            block.q.release_at(n)
            n += 1
            self.finish()
            turn += 1
            block.k.wait_full(0, turn & 1)
            running = item[ColumnItem.VALID]

    @cute.jit
    def move_p(self, p, m, wait: cutlass.Constexpr, arrive: cutlass.Constexpr, to_shared: cutlass.Constexpr):
        """Move P of a step between registers and shared memory, when the other warpgroup has done the opposite."""
        cute.arch.barrier(barrier_id=wait + (m & 1), number_of_threads=2 * WARPGROUP)
        shared = self.block.p[None, self.thread.thread, None, m & 1]
        if const_expr(to_shared):
            cute.autovec_copy(p, shared)
        else:
            cute.autovec_copy(shared, p)
        cute.arch.barrier_arrive(barrier_id=arrive + (m & 1), number_of_threads=2 * WARPGROUP)

    @cute.jit
    def finish(self):
        """The result of an item: in 16 bits by TMA, or as a part of a split column."""
        item, thread, output = self.block.item, self.thread, WideBarrier.OUTPUT + self.makes_dk
        batch, group = item[ColumnItem.BATCH], item[ColumnItem.GROUP]
        tile, slot = item[ColumnItem.TILE], item[ColumnItem.SLOT]
        if slot < 0:
            # Every warp's last product with what lies there must have ended.
            put_tile(self.acc, self.mma, thread, self.shared[None, None, 0], output)
            cute.arch.fence_view_async_shared()
        else:
            first = tile % const_expr(self.config.tile_kv // ROWS) * ROWS + thread.row
            put_part(self.acc, self.part, slot, first, thread.quad)
        cute.arch.barrier(barrier_id=output, number_of_threads=WARPGROUP)
        if thread.thread < 32:
            if slot < 0:
                send_tile(self.result, self.shared[None, None, 0], self.columns, tile, group, batch)
            cute.arch.sync_warp()
            with cute.arch.elect_one():
                cute.arch.mbarrier_arrive(self.block.k.empty)
                if const_expr(self.makes_dk):
                    cute.arch.mbarrier_arrive(self.block.v.empty)


class ValueConsumer(WideConsumer):
    """The first warpgroup: P and dV."""

    makes_dk = False

    def __init__(self, block: WideBlock) -> None:
        a, columns = block.arguments, block.config.E
        super().__init__(block, block.s_k, block.s_q, block.s_dout, columns, a.dv, block.s_dv, a.part_dv)
        self.masks = WideColumnMasks(block, self.thread)
        self.slope = cute.make_rmem_tensor((self.config.step // 4,), Int32)  # derivatives of the soft cap, in 16 bits

    @cute.jit
    def wait_for_step(self, n):
        """Wait for stage `n` of Q, and load what masks its step; returns its kind."""
        return self.masks.load(self.block.q.wait_full_at(n))

    @cute.jit
    def step(self, n, m, kind):
        """A step: stage `n` of Q and `m` of dO."""
        block = self.block
        stage, _ = block.q.place(n)
        # S^T = K Q^T
        issue(self.mma_s, self.acc_s, self.frag_fixed, self.frag_streamed[None, None, None, stage], False)
        lse = row_terms(self.thread, block.lse, stage)
        warpgroup.wait_group(0)
        self.probabilities(lse)
        cute.arch.sync_warp()  # every lane has read the step's description
        block.q.release_at(n)
        if kind != Kind.FULL:
            clear(self.acc_s, self.masks.words)
        instructions.convert(self.acc_s, self.frag)
        self.hand_over(m)
        do_stage = block.dout.wait_full_at(m)
        # dV += P^T dO
        issue(self.mma, self.acc, self.frag, self.frag_summed[None, None, None, do_stage], True)

    @cute.jit
    def probabilities(self, lse):
        """Scores to probabilities in place; `slope` is the derivative of the soft cap."""
        acc, a = self.acc_s, self.block.arguments
        if const_expr(self.config.score == "softcap"):
            instructions.soft_cap(acc, a.before)
            for i in cutlass.range_constexpr(cute.size(acc) // 2):
                slope = [1.0 - acc[2 * i + e] * acc[2 * i + e] for e in range(2)]
                self.slope[i] = instructions.pack(slope[0], slope[1], self.frag.element_type)
        for i in cutlass.range_constexpr(cute.size(acc) // 2):
            for e in cutlass.range_constexpr(2):
                acc[2 * i + e] = cute.math.exp2(acc[2 * i + e] * a.exponent - lse[e, i // 2], fastmath=True)

    @cute.jit
    def hand_over(self, m):
        """Leave P, times the derivative of the soft cap, for the second warpgroup."""
        c, acc, dtype = self.config, self.acc_s, self.frag.element_type
        packed = cute.make_rmem_tensor((4, c.step // 16), Int32)
        p = cute.recast_tensor(self.frag, Int32)
        for i in cutlass.range_constexpr(cute.size(packed)):
            if const_expr(c.score == "softcap"):
                slope = self.slope[i]
                a, b = acc[2 * i] * low(slope, dtype), acc[2 * i + 1] * high(slope, dtype)
                packed[i] = instructions.pack(a, b, dtype)
            else:
                packed[i] = p[i]
        self.move_p(packed, m, WideBarrier.P_EMPTY, WideBarrier.P_FULL, True)


class KeyConsumer(WideConsumer):
    """The second warpgroup: dS and dK."""

    makes_dk = True

    def __init__(self, block: WideBlock) -> None:
        a, columns = block.arguments, block.config.D
        super().__init__(block, block.s_v, block.s_dout, block.s_q, columns, a.dk, block.s_dk, a.part_dk)
        self.p = cute.make_rmem_tensor((4, self.config.step // 16), Int32)
        for stage in range(2):
            cute.arch.barrier_arrive(barrier_id=WideBarrier.P_EMPTY + stage, number_of_threads=2 * WARPGROUP)

    @cute.jit
    def wait_for_step(self, n):
        """Wait for stage `n` of Q; returns the kind of its step."""
        return cute.arch.make_warp_uniform(self.block.steps[Step.KIND, self.block.q.wait_full_at(n)])

    @cute.jit
    def step(self, n, m, kind):
        """A step: stage `n` of Q and `m` of dO."""
        block, acc, p, dtype = self.block, self.acc_s, self.p, self.frag.element_type
        stage, _ = block.q.place(n)
        do_stage = block.dout.wait_full_at(m)
        # dP^T = V dO^T
        issue(self.mma_s, acc, self.frag_fixed, self.frag_streamed[None, None, None, do_stage], False)
        delta = row_terms(self.thread, block.delta, do_stage)
        self.move_p(p, m, WideBarrier.P_FULL, WideBarrier.P_EMPTY, False)
        warpgroup.wait_group(0)
        # dS^T = P^T (dP^T - delta)
        for i in cutlass.range_constexpr(self.config.step // 4):
            acc[2 * i] = low(p[i], dtype) * (acc[2 * i] - delta[0, i // 2])
            acc[2 * i + 1] = high(p[i], dtype) * (acc[2 * i + 1] - delta[1, i // 2])
        block.dout.release_at(m)
        instructions.convert(acc, self.frag)
        # dK += dS^T Q
        issue(self.mma, self.acc, self.frag, self.frag_summed[None, None, None, stage], True)
        if const_expr(self.config.keeps):
            put_pair(block.arguments.ds, block.steps[Step.PLACE, stage], self.thread, self.frag)

    @cute.jit
    def finish(self):
        """dK of an item, times the scale."""
        if self.block.item[ColumnItem.SLOT] < 0:
            instructions.multiply(self.acc, self.block.arguments.factor)
        WideConsumer.finish(self)


class Wide(OneProducer, ColumnKernel):
    """The kernel of one configuration."""

    threads = 3 * WARPGROUP
    registers = 24, 240
    carveout = None
    block_class = WideBlock
    readers = 2, 1, 8, 8  # the item's description, which comes with K, is read by both warpgroups

    def __init__(self, config: WideConfig) -> None:
        self.config = config
        self.stages = config.q_stages, config.do_stages
        self.pieces = config.tile_kv // ROWS
        self.exchanged = ROWS * config.step

    def memory(self) -> dict[str, Any]:
        held = self.layouts()
        result = array(NUMBERS[self.config.dtype], max(cute.cosize(held["k"]), cute.cosize(held["v"])), 1024)
        return super().memory() | {"k": result, "v": result}

    def block(self, arguments: ColumnArguments, memory: Any) -> WideBlock:
        """dV is sent from the place of K, which its warpgroup alone reads, and dK from that of V."""
        held = self.layouts()
        block: WideBlock = super().block(arguments, memory)
        block.s_dk, block.s_dv = tiles(memory.v, held["k"]), tiles(memory.k, held["v"])
        block.p = words(memory.exchanged, 4, WARPGROUP, self.config.step // 16, 2)
        return block

    @cute.jit
    def compute(self, block):
        """The first warpgroup makes dV, the second dK."""
        if cute.arch.make_warp_uniform(cute.arch.warp_idx()) < 8:
            ValueConsumer(block).consume()
        else:
            KeyConsumer(block).consume()
