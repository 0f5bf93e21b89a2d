"""dQ over gathered columns: 64 query rows, and the keys that any of them keeps.

Of the first warpgroup one warp takes items, tells the two that gather, and loads Q and dO by TMA; the second computes
as that of dQ by rows does for block layouts.
"""

from __future__ import annotations

from typing import Any

import cutlass
import cutlass.cute as cute
from cutlass import Float32, Int32
from cutlass.cute.nvgpu import cpasync
from cutlass.memory import SmemAllocator

from gossamer.kernels.hopper.device.backward.query_consume import QueryConsumer
from gossamer.kernels.hopper.device.common import NUMBERS, ROWS, WARPGROUP, Env, ring, ticket
from gossamer.kernels.hopper.device.gather.configurations import GatherConfig
from gossamer.kernels.hopper.device.gather.produce import (
    AHEAD,
    WORDS,
    Bits,
    Filled,
    Gatherer,
    Items,
    Places,
    init_rings,
    init_told,
    role_of,
    row_products,
    smem_layout,
    step_words,
    told_of,
    whole_tiles,
)
from gossamer.kernels.hopper.device.row_items import BATCH, FIRST, HEAD, ITEM, TILE, VALID


class Ends(Env):
    """In the place of the lengths of batch elements: where an item's list ends."""

    def __getitem__(self, batch: Any) -> Any:
        return self.item[FIRST]


class GatherQuery(Items, Gatherer, Filled, QueryConsumer):
    """The kernel of one configuration."""

    def __init__(self, config: GatherConfig) -> None:
        self.config = config
        self.dtype = NUMBERS[config.dtype]
        self.groups = self.parts = 1

    @cute.jit
    def __call__(
        self,
        q: cute.Tensor,  # (B, H, Q, D)
        k: cute.Tensor,  # (B, G, K, D)
        v: cute.Tensor,  # (B, G, K, E)
        dout: cute.Tensor,  # (B, H, Q, E)
        terms: cute.Tensor,  # (2, B, H, Qp) float32: lse in base 2, delta
        dq: cute.Tensor,  # (B, H, Q, D)
        work: cute.Tensor,  # (n, ITEM) int32, as for the forward
        indices: cute.Tensor,  # (columns,) int32
        bits: cute.Tensor,  # (columns / 32, 64) int32
        part_dq: cute.Tensor,  # (slots, 64, D) float32, without the scale
        lengths: cute.Tensor,  # (B,) int32; not read without `lengths` in the configuration
        tickets: cute.Tensor,  # (1,) int32: items taken; zero before and after
        before: Float32,  # factor of a score before the soft cap
        exponent: Float32,  # factor of a score in exp2
        factor: Float32,  # the scale
        items: Int32,
        blocks: Int32,
        stream: Any,
    ) -> None:
        c = self.config
        q, dout, dq = [cute.make_tensor(t.iterator, cute.select(t.layout, [2, 3, 1, 0])) for t in (q, dout, dq)]
        layout, ring_layout = smem_layout(self, 1), smem_layout(self, c.stages)
        one = cute.select(layout, mode=[0, 1])
        load, store = cpasync.CopyBulkTensorTileG2SOp(), cpasync.CopyBulkTensorTileS2GOp()
        tma_q, g_q = cpasync.make_tiled_tma_atom(load, q, one, (ROWS, c.size))
        tma_g, g_g = cpasync.make_tiled_tma_atom(load, dout, one, (ROWS, c.size))
        tma_dq, g_dq = cpasync.make_tiled_tma_atom(store, dq, one, (ROWS, c.size))
        mma_s, mma_dq = row_products(self)

        @cute.struct
        class Shared:
            q_full: cutlass.Int64
            q_empty: cutlass.Int64
            told_full: cute.struct.MemRange[cutlass.Int64, AHEAD]
            told_empty: cute.struct.MemRange[cutlass.Int64, AHEAD]
            k_full: cute.struct.MemRange[cutlass.Int64, c.stages]
            k_empty: cute.struct.MemRange[cutlass.Int64, c.stages]
            v_full: cute.struct.MemRange[cutlass.Int64, c.stages]
            v_empty: cute.struct.MemRange[cutlass.Int64, c.stages]
            item: cute.struct.MemRange[Int32, ITEM]
            told: cute.struct.MemRange[Int32, ITEM * AHEAD]
            bits: cute.struct.Align[cute.struct.MemRange[Int32, 2 * c.stages * WORDS], 128]
            q: cute.struct.Align[cute.struct.MemRange[self.dtype, cute.cosize(layout)], 1024]
            g: cute.struct.Align[cute.struct.MemRange[self.dtype, cute.cosize(layout)], 1024]
            k: cute.struct.Align[cute.struct.MemRange[self.dtype, cute.cosize(ring_layout)], 1024]
            v: cute.struct.Align[cute.struct.MemRange[self.dtype, cute.cosize(ring_layout)], 1024]

        self.shared = Shared
        self.bytes = cute.size_in_bytes(self.dtype, one)
        self.kernel(
            tma_q, g_q, tma_g, g_g, tma_dq, g_dq, k, v, terms, work, indices, bits, part_dq, lengths, tickets, before,
            exponent, factor, items, layout, ring_layout, mma_s, mma_dq,
        ).launch(
            grid=(blocks, 1, 1), block=(2 * WARPGROUP, 1, 1), stream=stream, min_blocks_per_mp=c.blocks,
            preferred_smem_carveout=100,
        )  # fmt: skip

    @cute.kernel
    def kernel(
        self,
        tma_q: cute.CopyAtom,
        g_q: cute.Tensor,
        tma_g: cute.CopyAtom,
        g_g: cute.Tensor,
        tma_dq: cute.CopyAtom,
        g_dq: cute.Tensor,
        k: cute.Tensor,
        v: cute.Tensor,
        terms: cute.Tensor,
        work: cute.Tensor,
        indices: cute.Tensor,
        bits: cute.Tensor,
        part_dq: cute.Tensor,
        lengths: cute.Tensor,
        tickets: cute.Tensor,
        before: Float32,
        exponent: Float32,
        factor: Float32,
        items: Int32,
        layout: cute.ComposedLayout,
        ring_layout: cute.ComposedLayout,
        mma_s: cute.TiledMma,
        mma_dq: cute.TiledMma,
    ) -> None:
        c = self.config
        warp_index = cute.arch.make_warp_uniform(cute.arch.warp_idx())
        if warp_index == 0:
            for atom in (tma_q, tma_g, tma_dq):
                cpasync.prefetch_descriptor(atom)
        storage = SmemAllocator().allocate(self.shared)
        bars = Env(
            q_full=storage.q_full.ptr, q_empty=storage.q_empty.ptr,
            **{name: getattr(storage, name).data_ptr() for name in ("k_full", "k_empty", "v_full", "v_empty")},
        )  # fmt: skip
        told = told_of(storage)
        item = cute.make_tensor(storage.item.data_ptr(), cute.make_layout(ITEM))
        if warp_index == 0:
            with cute.arch.elect_one():
                cute.arch.mbarrier_init(bars.q_full, 1)
                cute.arch.mbarrier_init(bars.q_empty, 1)
                init_told(told)
                init_rings(bars, c.stages)
        cute.arch.mbarrier_init_fence()
        s_q = storage.q.get_tensor(layout.outer, swizzle=layout.inner)
        s_g = storage.g.get_tensor(layout.outer, swizzle=layout.inner)
        s_k = storage.k.get_tensor(ring_layout.outer, swizzle=ring_layout.inner)
        s_v = storage.v.get_tensor(ring_layout.outer, swizzle=ring_layout.inner)
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
                self.serve(env, tma_q, g_q, s_q, tma_g, g_g, s_g, bars, told, item)
            elif role >= 2:
                self.gather(k, v, storage.k.data_ptr(), storage.v.data_ptr(), bars, told, indices, bits, s_bits, ratio)
        else:
            cute.arch.setmaxregister_increase(computing)
            places = Places()
            self.consume(
                mma_s, mma_dq, tma_dq, g_dq, s_q, s_g, s_k, s_v, bars, Bits(item=item), terms, places, places, places,
                s_bits, part_dq, Ends(item=item), before, exponent, factor,
            )  # fmt: skip

    @cute.jit
    def mask(self, env, words, mode: cutlass.Constexpr, kv, at, part, column):
        """The words of step `at` of all lists, which come with K, shifted to this thread's columns."""
        c = self.config
        stage, phase = ring(kv, c.stages)
        cute.arch.mbarrier_wait(env.bars.k_full + stage, phase)
        slot = ring(kv, 2 * c.stages)[0]
        step_words(env, words, slot, at, c.lengths)

    @cute.jit
    def serve(self, env, tma_q, g_q, s_q, tma_g, g_g, s_g, bars, told, item):
        """Publish items: to the warps that gather as soon as they listen, with Q and dO when there is room."""
        c = self.config
        q_to, q_from = whole_tiles(tma_q, s_q, g_q, c.size)
        g_to, g_from = whole_tiles(tma_g, s_g, g_g, c.size)
        lane = cute.arch.lane_idx()
        w, _, _ = cute.arch.block_idx()
        word = self.draw(env, w)
        turn, running = Int32(0), Int32(1)
        while running != 0:
            self.tell(told, turn, word)
            cute.arch.mbarrier_wait(bars.q_empty, (turn & 1) ^ 1)
            if lane < ITEM:
                item[lane] = word
            cute.arch.sync_warp()
            running = item[VALID]
            if running != 0:
                batch, head, tile = item[BATCH], item[HEAD], item[TILE]
                with cute.arch.elect_one():
                    cute.arch.mbarrier_arrive_and_expect_tx(bars.q_full, 2 * self.bytes)
                cute.copy(tma_q, q_from[None, tile, head, batch], q_to[None, 0], tma_bar_ptr=bars.q_full)
                cute.copy(tma_g, g_from[None, tile, head, batch], g_to[None, 0], tma_bar_ptr=bars.q_full)
                word = self.draw(env, ticket(env))
            else:
                with cute.arch.elect_one():
                    cute.arch.mbarrier_arrive(bars.q_full)
            turn += 1
