"""The forward kernel: warp-specialised, persistent, one walk of a layout's rows.

One block per multiprocessor. Warp 0 of the first warpgroup is the producer: it takes work items, publishes each one's
description in shared memory, and keeps the rings of Q, K and V filled by TMA. Warps 1, 2, 3 store finished outputs.
Each other warpgroup owns 64 query rows: S = Q K^T and O += P V by wgmma, P from registers, softmax of one step
overlapped with the products of the next one, also from one item to the next, and the warpgroups take turns at the
tensor cores (named barriers).
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

from gossamer.kernels.hopper.device.common import NUMBERS, ROWS, WARPGROUP, Env
from gossamer.kernels.hopper.device.configurations import ForwardConfig
from gossamer.kernels.hopper.device.forward.consume import Consumer
from gossamer.kernels.hopper.device.forward.merge import Merge
from gossamer.kernels.hopper.device.forward.produce import Producer
from gossamer.kernels.hopper.device.row_items import ITEM


class Forward(Producer, Consumer):
    """The kernel of one configuration."""

    def __init__(self, config: ForwardConfig) -> None:
        self.config = c = config
        self.dtype = NUMBERS[c.dtype]
        self.groups = c.block_q // ROWS
        self.parts = c.block_kv // c.step
        self.threads = WARPGROUP * (self.groups + 1)
        self.producer_registers, self.consumer_registers = {
            (1, 1): (56, 240), (1, 2): (24, 232), (2, 1): (24, 240), (3, 1): (32, 160),
        }[self.groups, c.blocks]  # fmt: skip
        self.turns = self.groups > 1
        # An item's result is finished while the next one's second S is computed, where registers hold both.
        self.defers = self.groups < 3
        # Where registers hold it beside O, a result leaves them when the product that overwrites O runs already.
        self.late = self.defers and config.hold == 2
        # What masks an item's first step is fetched while its S is computed, where registers hold that too.
        self.asks = self.groups == 3
        self.halves = bool(config.halves) and self.parts == 1 and config.step == 128
        self.bridges = config.q_stages > 1  # the next item's Q is there while this item's is in use
        self.merge = Merge(c.E, c.block_q)

    def smem_layout(self, rows: int, columns: int, stages: int | None = None) -> Any:
        atom = warpgroup.make_smem_layout_atom(
            hopper.get_smem_layout_atom(LayoutEnum.ROW_MAJOR, self.dtype, columns), self.dtype
        )
        if stages is None:
            return cute.tile_to_shape(atom, (rows, columns), (0, 1))
        return cute.tile_to_shape(atom, (rows, columns, stages), (0, 1, 2))

    @cute.jit
    def __call__(
        self,
        q: cute.Tensor,  # (B, H, Q, D)
        k: cute.Tensor,  # (B, G, K, D)
        v: cute.Tensor,  # (B, G, K, E)
        out: cute.Tensor,  # (B, H, Q, E)
        lse: cute.Tensor,  # (B, H, Q) float32
        work: cute.Tensor,  # (n, ITEM) int32
        lists: cute.Tensor,  # (2, n): tile column, pool entry
        lo: cute.Tensor,  # (Bl * Hl, Q)
        hi: cute.Tensor,
        pool: cute.Tensor,  # (P * block_q, block_kv / 32)
        sinks: cute.Tensor,  # (H,) float32
        part_out: cute.Tensor,  # (slots, block_q, E) float32
        part_lse: cute.Tensor,  # (slots, block_q) float32
        merges: cute.Tensor,  # (m, MERGE) int32
        lengths: cute.Tensor,  # (B,) int32; not read without `lengths` in the configuration
        tickets: cute.Tensor,  # (1,) int32: items taken; zero before and after
        before: Float32,  # factor of a score before the soft cap
        exponent: Float32,  # factor of a score in exp2
        items: Int32,
        has_sinks: Int32,
        blocks: Int32,
        cut: Int32,  # whether rows are cut, and their parts merged by a second kernel
        stream: Any,
    ) -> None:
        c = self.config
        results = out
        q, k, v, out = [
            cute.make_tensor(t.iterator, cute.select(t.layout, [2, 3, 1, 0])) for t in (q, k, v, out)
        ]  # (rows, columns, head, batch)
        q_layout = self.smem_layout(ROWS, c.D, c.q_stages * self.groups)
        k_layout = self.smem_layout(c.step, c.D, c.stages)
        v_layout = self.smem_layout(c.step, c.E, c.stages)
        o_layout = self.smem_layout(ROWS, c.E)
        load, store = cpasync.CopyBulkTensorTileG2SOp(), cpasync.CopyBulkTensorTileS2GOp()
        q_one, k_one, v_one = [cute.select(s, mode=[0, 1]) for s in (q_layout, k_layout, v_layout)]
        tma_q, g_q = cpasync.make_tiled_tma_atom(load, q, q_one, (ROWS, c.D))
        tma_k, g_k = cpasync.make_tiled_tma_atom(load, k, k_one, (c.step, c.D))
        tma_v, g_v = cpasync.make_tiled_tma_atom(load, v, v_one, (c.step, c.E))
        tma_o, g_o = cpasync.make_tiled_tma_atom(store, out, o_layout, (ROWS, c.E))
        major = cute.nvgpu.OperandMajorMode
        mma_qk = hopper.make_trivial_tiled_mma(
            self.dtype, self.dtype, major.K, major.K, Float32, atom_layout_mnk=(1, 1, 1), tiler_mn=(ROWS, c.step)
        )
        mma_pv = hopper.make_trivial_tiled_mma(
            self.dtype, self.dtype, major.K, major.MN, Float32, atom_layout_mnk=(1, 1, 1), tiler_mn=(ROWS, c.E),
            a_source=warpgroup.OperandSource.RMEM,
        )  # fmt: skip

        mma_half = hopper.make_trivial_tiled_mma(
            self.dtype, self.dtype, major.K, major.K, Float32, atom_layout_mnk=(1, 1, 1), tiler_mn=(ROWS, c.step // 2)
        )

        @cute.struct
        class Shared:
            q_full: cute.struct.MemRange[cutlass.Int64, c.q_stages]
            q_empty: cute.struct.MemRange[cutlass.Int64, c.q_stages]
            k_full: cute.struct.MemRange[cutlass.Int64, c.stages]
            k_empty: cute.struct.MemRange[cutlass.Int64, c.stages]
            v_full: cute.struct.MemRange[cutlass.Int64, c.stages]
            v_empty: cute.struct.MemRange[cutlass.Int64, c.stages]
            item: cute.struct.MemRange[Int32, ITEM * c.q_stages]
            bounds: cute.struct.MemRange[Int32, 2 * c.block_q * c.q_stages]
            q: cute.struct.Align[cute.struct.MemRange[self.dtype, cute.cosize(q_layout)], 1024]
            k: cute.struct.Align[cute.struct.MemRange[self.dtype, cute.cosize(k_layout)], 1024]
            v: cute.struct.Align[cute.struct.MemRange[self.dtype, cute.cosize(v_layout)], 1024]

        self.shared = Shared
        self.bytes = {
            name: cute.size_in_bytes(self.dtype, layout) for name, layout in (("q", q_one), ("k", k_one), ("v", v_one))
        }
        self.kernel(
            tma_q, g_q, tma_k, g_k, tma_v, g_v, tma_o, g_o, lse, work, lists, lo, hi, pool, sinks, part_out, part_lse,
            lengths, tickets, before, exponent, items, has_sinks, q_layout, k_layout, v_layout,
            o_layout, mma_qk, mma_pv, mma_half,
        ).launch(
            grid=(blocks, 1, 1), block=(self.threads, 1, 1), stream=stream, min_blocks_per_mp=c.blocks,
            preferred_smem_carveout=100,
        )  # fmt: skip
        if cut != 0:
            self.merge(results, lse, part_out, part_lse, merges, sinks, has_sinks, stream)

    @cute.kernel
    def kernel(
        self,
        tma_q: cute.CopyAtom,
        g_q: cute.Tensor,
        tma_k: cute.CopyAtom,
        g_k: cute.Tensor,
        tma_v: cute.CopyAtom,
        g_v: cute.Tensor,
        tma_o: cute.CopyAtom,
        g_o: cute.Tensor,
        lse: cute.Tensor,
        work: cute.Tensor,
        lists: cute.Tensor,
        lo: cute.Tensor,
        hi: cute.Tensor,
        pool: cute.Tensor,
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
        v_layout: cute.ComposedLayout,
        o_layout: cute.ComposedLayout,
        mma_qk: cute.TiledMma,
        mma_pv: cute.TiledMma,
        mma_half: cute.TiledMma,
    ) -> None:
        c = self.config
        warp_index = cute.arch.make_warp_uniform(cute.arch.warp_idx())
        if warp_index == 0:
            for atom in (tma_q, tma_k, tma_v, tma_o):
                cpasync.prefetch_descriptor(atom)
        storage = SmemAllocator().allocate(self.shared)
        bars = Env(
            **{
                name: getattr(storage, name).data_ptr()
                for name in ("q_full", "q_empty", "k_full", "k_empty", "v_full", "v_empty")
            }
        )
        item = cute.make_tensor(storage.item.data_ptr(), cute.make_layout((ITEM, c.q_stages)))
        bounds = cute.make_tensor(storage.bounds.data_ptr(), cute.make_layout((c.block_q, 2, c.q_stages)))
        if warp_index == 0:
            with cute.arch.elect_one():
                for i in cutlass.range_constexpr(c.q_stages):
                    cute.arch.mbarrier_init(bars.q_full + i, 1)
                    cute.arch.mbarrier_init(bars.q_empty + i, self.groups)
                for i in cutlass.range_constexpr(c.stages):
                    for full, empty in ((bars.k_full, bars.k_empty), (bars.v_full, bars.v_empty)):
                        cute.arch.mbarrier_init(full + i, 1)
                        cute.arch.mbarrier_init(empty + i, 4 * self.groups)
        cute.arch.mbarrier_init_fence()
        s_q = storage.q.get_tensor(q_layout.outer, swizzle=q_layout.inner)
        s_k = storage.k.get_tensor(k_layout.outer, swizzle=k_layout.inner)
        s_v = storage.v.get_tensor(v_layout.outer, swizzle=v_layout.inner)
        # The output of a warpgroup takes the place of its Q.
        o_outer = cute.append(o_layout.outer, cute.make_layout(c.q_stages * self.groups, stride=ROWS * c.D))
        s_o = storage.q.get_tensor(o_outer, swizzle=o_layout.inner)
        cute.arch.sync_threads()
        if warp_index < 4:
            cute.arch.setmaxregister_decrease(self.producer_registers)
            if warp_index == 0:
                self.produce(
                    tma_q, g_q, tma_k, g_k, tma_v, g_v, s_q, s_k, s_v, bars, item, work, lists, lengths, tickets, items,
                    cute.size(g_q, mode=[2]) // cute.size(g_k, mode=[2]),
                )  # fmt: skip
            elif warp_index <= self.groups:
                self.store(tma_o, g_o, s_o, bars, item, bounds, lists, lo, hi, warp_index - 1)
        else:
            cute.arch.setmaxregister_increase(self.consumer_registers)
            self.consume(
                mma_qk, mma_pv, mma_half, s_q, s_k, s_v, s_o, bars, item, bounds, lists, pool, sinks, lse,
                part_out, part_lse, lengths, before, exponent, has_sinks, cute.size(g_q, mode=[0]),
            )  # fmt: skip
