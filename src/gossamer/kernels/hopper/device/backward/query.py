"""dQ by a walk over query tiles, without float32 sums in memory: for a deterministic backward.

Roles as in the forward kernel: one producer warp (items, Q and dO of a tile, rings of K and V), and for each 64 query
rows a warpgroup, which computes S = Q K^T, dP = dO V^T, dS = P (dP - delta) and dQ += dS K with dS from registers.
"""

from __future__ import annotations

from typing import Any

import cutlass
import cutlass.cute as cute
import cutlass.utils.hopper_helpers as hopper
from cutlass import Float32, Int32
from cutlass.cute.nvgpu import cpasync, warpgroup
from cutlass.memory import SmemAllocator
from cutlass.tensor_utils import LayoutEnum

from gossamer.kernels.hopper.device.backward.query_consume import QueryConsumer
from gossamer.kernels.hopper.device.common import NUMBERS, ROWS, WARPGROUP, Env, ring, ticket
from gossamer.kernels.hopper.device.configurations import QueryConfig
from gossamer.kernels.hopper.device.forward.produce import Producer
from gossamer.kernels.hopper.device.row_items import (
    BATCH,
    BITS,
    BITSES,
    FULL,
    FULLS,
    HEAD,
    INTERVAL,
    INTERVALS,
    ITEM,
    TILE,
    VALID,
)


class QueryGradient(QueryConsumer):
    """The kernel of one configuration."""

    draw = Producer.draw
    listed_below = Producer.listed_below

    def __init__(self, config: QueryConfig) -> None:
        self.config = c = config
        self.dtype = NUMBERS[c.dtype]
        self.groups = c.block_q // ROWS
        self.parts = c.block_kv // c.step
        self.threads = WARPGROUP * (self.groups + 1)
        self.producer_registers, self.consumer_registers = {1: (24, 232), 2: (40, 232), 3: (32, 160)}[self.groups]

    def smem_layout(self, rows: int, columns: int, stages: int) -> Any:
        atom = warpgroup.make_smem_layout_atom(
            hopper.get_smem_layout_atom(LayoutEnum.ROW_MAJOR, self.dtype, columns), self.dtype
        )
        return cute.tile_to_shape(atom, (rows, columns, stages), (0, 1, 2))

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
        lists: cute.Tensor,  # (2, n): tile column, pool entry
        lo: cute.Tensor,  # (Bl * Hl, Q)
        hi: cute.Tensor,
        pool: cute.Tensor,  # (P * block_q, block_kv / 32)
        part_dq: cute.Tensor,  # (slots, block_q, D) float32, without the scale
        lengths: cute.Tensor | None,  # (B,) int32, None without `lengths` in the configuration
        tickets: cute.Tensor,  # (1,) int32: items taken; zero before and after
        before: Float32,  # factor of a score before the soft cap
        exponent: Float32,  # factor of a score in exp2
        factor: Float32,  # the scale
        items: Int32,
        blocks: Int32,
        stream: Any,
    ) -> None:
        c = self.config
        q, k, v, dout, dq = [
            cute.make_tensor(t.iterator, cute.select(t.layout, [2, 3, 1, 0])) for t in (q, k, v, dout, dq)
        ]  # (rows, columns, head, batch)
        q_layout = self.smem_layout(ROWS, c.D, self.groups)
        g_layout = self.smem_layout(ROWS, c.E, self.groups)
        k_layout = self.smem_layout(c.step, c.D, c.k_stages)
        v_layout = self.smem_layout(c.step, c.E, c.v_stages)
        load, store = cpasync.CopyBulkTensorTileG2SOp(), cpasync.CopyBulkTensorTileS2GOp()
        q_one, g_one, k_one, v_one = [cute.select(s, mode=[0, 1]) for s in (q_layout, g_layout, k_layout, v_layout)]
        tma_q, g_q = cpasync.make_tiled_tma_atom(load, q, q_one, (ROWS, c.D))
        tma_g, g_g = cpasync.make_tiled_tma_atom(load, dout, g_one, (ROWS, c.E))
        tma_k, g_k = cpasync.make_tiled_tma_atom(load, k, k_one, (c.step, c.D))
        tma_v, g_v = cpasync.make_tiled_tma_atom(load, v, v_one, (c.step, c.E))
        tma_dq, g_dq = cpasync.make_tiled_tma_atom(store, dq, q_one, (ROWS, c.D))
        major = cute.nvgpu.OperandMajorMode
        mma_s = hopper.make_trivial_tiled_mma(
            self.dtype, self.dtype, major.K, major.K, Float32, atom_layout_mnk=(1, 1, 1), tiler_mn=(ROWS, c.step)
        )
        mma_dq = hopper.make_trivial_tiled_mma(
            self.dtype, self.dtype, major.K, major.MN, Float32, atom_layout_mnk=(1, 1, 1), tiler_mn=(ROWS, c.D),
            a_source=warpgroup.OperandSource.RMEM,
        )  # fmt: skip

        @cute.struct
        class Shared:
            q_full: cutlass.Int64
            q_empty: cutlass.Int64
            k_full: cute.struct.MemRange[cutlass.Int64, c.k_stages]
            k_empty: cute.struct.MemRange[cutlass.Int64, c.k_stages]
            v_full: cute.struct.MemRange[cutlass.Int64, c.v_stages]
            v_empty: cute.struct.MemRange[cutlass.Int64, c.v_stages]
            item: cute.struct.MemRange[Int32, ITEM]
            q: cute.struct.Align[cute.struct.MemRange[self.dtype, cute.cosize(q_layout)], 1024]
            g: cute.struct.Align[cute.struct.MemRange[self.dtype, cute.cosize(g_layout)], 1024]
            k: cute.struct.Align[cute.struct.MemRange[self.dtype, cute.cosize(k_layout)], 1024]
            v: cute.struct.Align[cute.struct.MemRange[self.dtype, cute.cosize(v_layout)], 1024]

        self.shared = Shared
        self.bytes = {
            name: cute.size_in_bytes(self.dtype, layout)
            for name, layout in (("q", q_one), ("g", g_one), ("k", k_one), ("v", v_one))
        }
        self.kernel(
            tma_q, g_q, tma_g, g_g, tma_k, g_k, tma_v, g_v, tma_dq, g_dq, terms, work, lists, lo, hi, pool, part_dq,
            lengths, tickets, before, exponent, factor, items, q_layout, g_layout, k_layout,
            v_layout, mma_s, mma_dq,
        ).launch(
            grid=(blocks, 1, 1), block=(self.threads, 1, 1), stream=stream,
            min_blocks_per_mp=c.blocks_per_processor,
            # For two blocks the compiler would otherwise ask the driver, which need not be there.
            preferred_smem_carveout=100 if c.blocks_per_processor > 1 else None,
        )  # fmt: skip

    @cute.kernel
    def kernel(
        self,
        tma_q: cute.CopyAtom,
        g_q: cute.Tensor,
        tma_g: cute.CopyAtom,
        g_g: cute.Tensor,
        tma_k: cute.CopyAtom,
        g_k: cute.Tensor,
        tma_v: cute.CopyAtom,
        g_v: cute.Tensor,
        tma_dq: cute.CopyAtom,
        g_dq: cute.Tensor,
        terms: cute.Tensor,
        work: cute.Tensor,
        lists: cute.Tensor,
        lo: cute.Tensor,
        hi: cute.Tensor,
        pool: cute.Tensor,
        part_dq: cute.Tensor,
        lengths: cute.Tensor | None,
        tickets: cute.Tensor,
        before: Float32,
        exponent: Float32,
        factor: Float32,
        items: Int32,
        q_layout: cute.ComposedLayout,
        g_layout: cute.ComposedLayout,
        k_layout: cute.ComposedLayout,
        v_layout: cute.ComposedLayout,
        mma_s: cute.TiledMma,
        mma_dq: cute.TiledMma,
    ) -> None:
        c = self.config
        warp_index = cute.arch.make_warp_uniform(cute.arch.warp_idx())
        if warp_index == 0:
            for atom in (tma_q, tma_g, tma_k, tma_v, tma_dq):
                cpasync.prefetch_descriptor(atom)
        storage = SmemAllocator().allocate(self.shared)
        bars = Env(
            q_full=storage.q_full.ptr, q_empty=storage.q_empty.ptr,
            k_full=storage.k_full.data_ptr(), k_empty=storage.k_empty.data_ptr(),
            v_full=storage.v_full.data_ptr(), v_empty=storage.v_empty.data_ptr(),
        )  # fmt: skip
        item = cute.make_tensor(storage.item.data_ptr(), cute.make_layout(ITEM))
        if warp_index == 0:
            with cute.arch.elect_one():
                cute.arch.mbarrier_init(bars.q_full, 1)
                cute.arch.mbarrier_init(bars.q_empty, self.groups)
                for full, empty, stages in (
                    (bars.k_full, bars.k_empty, c.k_stages), (bars.v_full, bars.v_empty, c.v_stages)
                ):  # fmt: skip
                    for i in cutlass.range_constexpr(stages):
                        cute.arch.mbarrier_init(full + i, 1)
                        cute.arch.mbarrier_init(empty + i, 4 * self.groups)
        cute.arch.mbarrier_init_fence()
        s_q = storage.q.get_tensor(q_layout.outer, swizzle=q_layout.inner)
        s_g = storage.g.get_tensor(g_layout.outer, swizzle=g_layout.inner)
        s_k = storage.k.get_tensor(k_layout.outer, swizzle=k_layout.inner)
        s_v = storage.v.get_tensor(v_layout.outer, swizzle=v_layout.inner)
        cute.arch.sync_threads()
        if warp_index < 4:
            cute.arch.setmaxregister_decrease(self.producer_registers)
            if warp_index == 0:
                self.produce(
                    tma_q, g_q, tma_g, g_g, tma_k, g_k, tma_v, g_v, s_q, s_g, s_k, s_v, bars, item, work, lists,
                    lengths, tickets, items,
                )  # fmt: skip
        else:
            cute.arch.setmaxregister_increase(self.consumer_registers)
            self.consume(
                mma_s, mma_dq, tma_dq, g_dq, s_q, s_g, s_k, s_v, bars, item, terms, lists, lo, hi, pool, part_dq,
                lengths, before, exponent, factor,
            )  # fmt: skip

    @cute.jit
    def produce(
        self, tma_q, g_q, tma_g, g_g, tma_k, g_k, tma_v, g_v, s_q, s_g, s_k, s_v, bars, item, work, lists, lengths,
        tickets, items,
    ):  # fmt: skip
        """The producer warp: items with their Q and dO, then K and V of each step."""
        c = self.config
        ratio = cute.size(g_q, mode=[2]) // cute.size(g_k, mode=[2])
        whole = cute.make_layout(1)

        def partition(tma, shared, source, rows, columns):
            tiles = cute.local_tile(source, (rows, columns), (None, 0, None, None))
            return cpasync.tma_partition(tma, 0, whole, cute.group_modes(shared, 0, 2), cute.group_modes(tiles, 0, 2))

        q_to, q_from = partition(tma_q, s_q, g_q, ROWS, c.D)
        g_to, g_from = partition(tma_g, s_g, g_g, ROWS, c.E)
        k_to, k_from = partition(tma_k, s_k, g_k, c.step, c.D)
        v_to, v_from = partition(tma_v, s_v, g_v, c.step, c.E)
        env = Env(
            work=work, lists=lists, lengths=lengths, items=items, tickets=tickets
        )  # fmt: skip
        lane = cute.arch.lane_idx()
        w, _, _ = cute.arch.block_idx()
        word = self.draw(env, w)
        turn = Int32(0)  # items so far
        kv = Int32(0)  # steps so far
        running = Int32(1)
        while running != 0:
            cute.arch.mbarrier_wait(bars.q_empty, (turn & 1) ^ 1)
            if lane < ITEM:
                item[lane] = word
            cute.arch.sync_warp()
            running = item[VALID]
            turn += 1
            if running != 0:
                batch, head, tile = item[BATCH], item[HEAD], item[TILE]
                with cute.arch.elect_one():
                    cute.arch.mbarrier_arrive_and_expect_tx(
                        bars.q_full, (self.bytes["q"] + self.bytes["g"]) * self.groups
                    )
                for g in cutlass.range_constexpr(self.groups):
                    at = tile * self.groups + g
                    cute.copy(tma_q, q_from[None, at, head, batch], q_to[None, g], tma_bar_ptr=bars.q_full)
                    cute.copy(tma_g, g_from[None, at, head, batch], g_to[None, g], tma_bar_ptr=bars.q_full)
                group = head // ratio
                fulls, intervals = item[FULLS], item[INTERVALS]
                at_full, at_interval = item[FULL], item[INTERVAL] - fulls
                at_bits = item[BITS] - fulls - intervals
                count = fulls + intervals + item[BITSES]
                for i in cutlass.range(count, unroll=1):
                    at = i + (at_full if i < fulls else (at_interval if i < fulls + intervals else at_bits))
                    column = lists[0, at]
                    for p in cutlass.range_constexpr(self.parts):
                        block = column * self.parts + p
                        stage, phase = ring(kv, c.k_stages)
                        cute.arch.mbarrier_wait(bars.k_empty + stage, phase ^ 1)
                        with cute.arch.elect_one():
                            cute.arch.mbarrier_arrive_and_expect_tx(bars.k_full + stage, self.bytes["k"])
                        cute.copy(
                            tma_k, k_from[None, block, group, batch], k_to[None, stage], tma_bar_ptr=bars.k_full + stage
                        )
                        stage, phase = ring(kv, c.v_stages)
                        cute.arch.mbarrier_wait(bars.v_empty + stage, phase ^ 1)
                        with cute.arch.elect_one():
                            cute.arch.mbarrier_arrive_and_expect_tx(bars.v_full + stage, self.bytes["v"])
                        cute.copy(
                            tma_v, v_from[None, block, group, batch], v_to[None, stage], tma_bar_ptr=bars.v_full + stage
                        )
                        kv += 1
                word = self.draw(env, ticket(env))
            else:
                with cute.arch.elect_one():
                    cute.arch.mbarrier_arrive(bars.q_full)
