"""The forward kernel of gathered columns: 64 query rows, and the keys that any of them keeps.

Of the first warpgroup one warp takes items and loads Q by TMA, one stores finished outputs, and two gather K and V; the
second computes as that of the forward kernel of block layouts does. Two or three blocks share a multiprocessor.
"""

from __future__ import annotations

from typing import Any

import cutlass
import cutlass.cute as cute
from cutlass import Float32, Int32
from cutlass.cute.nvgpu import cpasync
from cutlass.memory import SmemAllocator

from gossamer.kernels.hopper.device.common import NUMBERS, ROWS, WARPGROUP, Env, ring
from gossamer.kernels.hopper.device.forward.produce import Producer
from gossamer.kernels.hopper.device.gather.configurations import GatherConfig
from gossamer.kernels.hopper.device.gather.consume import RowConsumer
from gossamer.kernels.hopper.device.gather.produce import (
    THREADS,
    WORDS,
    Bits,
    Gatherer,
    Queries,
    init_rings,
    role_of,
    row_products,
    smem_layout,
)
from gossamer.kernels.hopper.device.row_items import ITEM, VALID


class GatherForward(Queries, Gatherer, RowConsumer):
    """The kernel of one configuration."""

    store = Producer.store

    def __init__(self, config: GatherConfig) -> None:
        self.config = config
        self.dtype = NUMBERS[config.dtype]
        self.groups = self.parts = 1
        self.turns = self.halves = self.late = False
        self.defers = self.bridges = True

    @cute.jit
    def __call__(
        self,
        q: cute.Tensor,  # (B, H, Q, D)
        k: cute.Tensor,  # (B, G, K, D)
        v: cute.Tensor,  # (B, G, K, E)
        out: cute.Tensor,  # (B, H, Q, E)
        lse: cute.Tensor,  # (B, H, Q) float32
        work: cute.Tensor,  # (n, ITEM) int32
        indices: cute.Tensor,  # (columns,) int32
        bits: cute.Tensor,  # (columns / 32, 64) int32
        sinks: cute.Tensor,  # (H,) float32
        part_out: cute.Tensor,  # (slots, 64, E) float32
        part_lse: cute.Tensor,  # (slots, 64) float32
        lengths: cute.Tensor,  # (B,) int32; not read without `lengths` in the configuration
        tickets: cute.Tensor,  # (1,) int32: items taken; zero before and after
        before: Float32,  # factor of a score before the soft cap
        exponent: Float32,  # factor of a score in exp2
        items: Int32,
        has_sinks: Int32,
        blocks: Int32,
        stream: Any,
    ) -> None:
        c = self.config
        q, out = [cute.make_tensor(t.iterator, cute.select(t.layout, [2, 3, 1, 0])) for t in (q, out)]
        q_layout, k_layout = smem_layout(self, c.q_stages), smem_layout(self, c.stages)
        one = cute.select(q_layout, mode=[0, 1])
        tma_q, g_q = cpasync.make_tiled_tma_atom(cpasync.CopyBulkTensorTileG2SOp(), q, one, (ROWS, c.size))
        tma_o, g_o = cpasync.make_tiled_tma_atom(cpasync.CopyBulkTensorTileS2GOp(), out, one, (ROWS, c.size))
        mma_qk, mma_pv = row_products(self)

        @cute.struct
        class Shared:
            q_full: cute.struct.MemRange[cutlass.Int64, c.q_stages]
            q_empty: cute.struct.MemRange[cutlass.Int64, c.q_stages]
            k_full: cute.struct.MemRange[cutlass.Int64, c.stages]
            k_empty: cute.struct.MemRange[cutlass.Int64, c.stages]
            v_full: cute.struct.MemRange[cutlass.Int64, c.stages]
            v_empty: cute.struct.MemRange[cutlass.Int64, c.stages]
            item: cute.struct.MemRange[Int32, ITEM * c.q_stages]
            bits: cute.struct.Align[cute.struct.MemRange[Int32, 2 * c.stages * WORDS], 128]
            q: cute.struct.Align[cute.struct.MemRange[self.dtype, cute.cosize(q_layout)], 1024]
            k: cute.struct.Align[cute.struct.MemRange[self.dtype, cute.cosize(k_layout)], 1024]
            v: cute.struct.Align[cute.struct.MemRange[self.dtype, cute.cosize(k_layout)], 1024]

        self.shared = Shared
        self.q_bytes = cute.size_in_bytes(self.dtype, one)
        self.kernel(
            tma_q, g_q, tma_o, g_o, k, v, lse, work, indices, bits, sinks, part_out, part_lse, lengths, tickets, before,
            exponent, items, has_sinks, q_layout, k_layout, mma_qk, mma_pv,
        ).launch(
            grid=(blocks, 1, 1), block=(2 * WARPGROUP, 1, 1), stream=stream, min_blocks_per_mp=c.blocks,
            preferred_smem_carveout=100,
        )  # fmt: skip

    @cute.kernel
    def kernel(
        self,
        tma_q: cute.CopyAtom,
        g_q: cute.Tensor,
        tma_o: cute.CopyAtom,
        g_o: cute.Tensor,
        k: cute.Tensor,
        v: cute.Tensor,
        lse: cute.Tensor,
        work: cute.Tensor,
        indices: cute.Tensor,
        bits: cute.Tensor,
        sinks: cute.Tensor,
        part_out: cute.Tensor,
        part_lse: cute.Tensor,
        lengths: cute.Tensor,
        tickets: cute.Tensor,
        before: Float32,
        exponent: Float32,
        items: Int32,
        has_sinks: Int32,
        q_layout: cute.ComposedLayout,
        k_layout: cute.ComposedLayout,
        mma_qk: cute.TiledMma,
        mma_pv: cute.TiledMma,
    ) -> None:
        c = self.config
        warp_index = cute.arch.make_warp_uniform(cute.arch.warp_idx())
        if warp_index == 0:
            for atom in (tma_q, tma_o):
                cpasync.prefetch_descriptor(atom)
        storage = SmemAllocator().allocate(self.shared)
        bars = Env(
            **{
                name: getattr(storage, name).data_ptr()
                for name in ("q_full", "q_empty", "k_full", "k_empty", "v_full", "v_empty")
            }
        )
        item = cute.make_tensor(storage.item.data_ptr(), cute.make_layout((ITEM, c.q_stages)))
        if warp_index == 0:
            with cute.arch.elect_one():
                for i in cutlass.range_constexpr(c.q_stages):
                    cute.arch.mbarrier_init(bars.q_full + i, 1)
                    cute.arch.mbarrier_init(bars.q_empty + i, 1 + THREADS // 32)  # the storing and the gathering warps
                init_rings(bars, c.stages)
        cute.arch.mbarrier_init_fence()
        s_q = storage.q.get_tensor(q_layout.outer, swizzle=q_layout.inner)
        s_k = storage.k.get_tensor(k_layout.outer, swizzle=k_layout.inner)
        s_v = storage.v.get_tensor(k_layout.outer, swizzle=k_layout.inner)
        s_bits = cute.make_tensor(storage.bits.data_ptr(), cute.make_layout((ROWS, 2, 2 * c.stages)))
        ratio = cute.size(g_q, mode=[2]) // cute.size(k, mode=[1])
        serving, computing = c.registers
        cute.arch.sync_threads()
        if warp_index < 4:
            cute.arch.setmaxregister_decrease(serving)
            role = role_of(warp_index, c.blocks)
            if role == 0:
                listed = cute.make_tensor(indices.iterator, cute.prepend(indices.layout, cute.make_layout(1)))
                env = Env(work=work, lists=listed, lengths=lengths, items=items, tickets=tickets)
                self.serve(env, tma_q, g_q, s_q, bars, item)
            elif role == 1:
                # The output takes the place of Q.
                self.store(tma_o, g_o, s_q, bars, item, None, None, None, None, 0)
            else:
                told = Env(item=item, full=bars.q_full, empty=bars.q_empty, stages=c.q_stages)
                self.gather(k, v, storage.k.data_ptr(), storage.v.data_ptr(), bars, told, indices, bits, s_bits, ratio)
        else:
            cute.arch.setmaxregister_increase(computing)
            count = cute.make_rmem_tensor((1,), Int32)  # of the steps whose words were read
            count.fill(0)
            self.consume(
                mma_qk, mma_pv, mma_qk, s_q, s_k, s_v, s_q, bars, Bits(item=item, count=count), None, None, s_bits,
                sinks, lse, part_out, part_lse, lengths, before, exponent, has_sinks, cute.size(g_q, mode=[0]),
            )  # fmt: skip

    @cute.jit
    def fetch(self, env, turn):
        """For the storing warp: wait for an item; returns whether there is one."""
        stage, phase = ring(turn, self.config.q_stages)
        cute.arch.mbarrier_wait(env.bars.q_full + stage, phase)
        return env.item[VALID, stage]
