"""dK and dV of heads wider than 128: one accumulator fills the registers of a warpgroup, so that two share 64 keys.

The first warpgroup computes S^T = K Q^T, P and dV += P^T dO, the second dP^T = V dO^T, dS and dK += dS^T Q: two
products each, and the tensor cores work for one while the other is between its two. P goes from a thread of the first
to the same thread of the second through shared memory, in 16 bits. An item of the schedule is two of this kernel's, one
for each half of its key tile.
"""

from __future__ import annotations

from typing import Any

import cutlass
import cutlass.cute as cute
import cutlass.utils.hopper_helpers as hopper
from cutlass import Float32, Int32, const_expr
from cutlass.cute.nvgpu import cpasync, warpgroup
from cutlass.memory import SmemAllocator

from gossamer.kernels.hopper.device.backward.fields import STEP
from gossamer.kernels.hopper.device.backward.kernel import BARRIERS, Backward
from gossamer.kernels.hopper.device.backward.produce import Producer
from gossamer.kernels.hopper.device.backward.wide_consume import WideConsumer
from gossamer.kernels.hopper.device.column_items import COUNT, TILE
from gossamer.kernels.hopper.device.common import NUMBERS, ROWS, WARPGROUP, Env, load_item
from gossamer.kernels.hopper.device.configurations import WideConfig
from gossamer.kernels.hopper.device.row_items import ITEM

GROUPS = 2


class Wide(Producer, WideConsumer):
    """The kernel of one configuration."""

    config: Any
    smem_layout: Any = Backward.smem_layout

    def __init__(self, config: WideConfig) -> None:
        self.config = c = config
        self.dtype = NUMBERS[c.dtype]
        self.parts = c.block_q // c.step
        self.pieces = c.tile_kv // ROWS  # items of this kernel in an item of the schedule
        self.threads = WARPGROUP * (GROUPS + 1)

    @cute.jit
    def __call__(
        self,
        q: cute.Tensor,  # (B, H, Q, D)
        k: cute.Tensor,  # (B, G, K, D)
        v: cute.Tensor,  # (B, G, K, E)
        dout: cute.Tensor,  # (B, H, Q, E)
        terms: cute.Tensor,  # (2, B, H, Qp) float32
        dq_sum: cute.Tensor,  # unread: the arguments are those of the column kernel
        dk: cute.Tensor,  # (B, G, K, D)
        dv: cute.Tensor,  # (B, G, K, E)
        work: cute.Tensor,  # (n, ITEM) int32
        segments: cute.Tensor,  # (m, SEGMENT) int32
        lists: cute.Tensor,  # (2, entries): tile column; pool entry
        lo: cute.Tensor,  # (Bl * Hl, K)
        hi: cute.Tensor,
        pool: cute.Tensor,  # (P * tile_kv, block_q / 32)
        part_dk: cute.Tensor,  # (slots, tile_kv, D) float32
        part_dv: cute.Tensor,  # (slots, tile_kv, E) float32
        lengths: cute.Tensor | None,  # (B,) int32, None without `lengths` in the configuration
        tickets: cute.Tensor,  # (1,) int32: items taken; zero before and after
        before: Float32,  # factor of a score before the soft cap
        exponent: Float32,  # factor of a score in exp2
        factor: Float32,  # factor of dK
        items: Int32,
        blocks: Int32,
        stream: Any,
    ) -> None:
        c = self.config
        q, k, v, dout, dk, dv = [
            cute.make_tensor(t.iterator, cute.select(t.layout, [2, 3, 1, 0])) for t in (q, k, v, dout, dk, dv)
        ]  # (rows, columns, head, batch)
        k_layout, v_layout = self.smem_layout(ROWS, c.D), self.smem_layout(ROWS, c.E)
        q_layout, do_layout = self.smem_layout(c.step, c.D, c.q_stages), self.smem_layout(c.step, c.E, c.do_stages)
        load, store = cpasync.CopyBulkTensorTileG2SOp(), cpasync.CopyBulkTensorTileS2GOp()
        q_one, do_one = cute.select(q_layout, mode=[0, 1]), cute.select(do_layout, mode=[0, 1])
        tma_q, g_q = cpasync.make_tiled_tma_atom(load, q, q_one, (c.step, c.D))
        tma_k, g_k = cpasync.make_tiled_tma_atom(load, k, k_layout, (ROWS, c.D))
        tma_v, g_v = cpasync.make_tiled_tma_atom(load, v, v_layout, (ROWS, c.E))
        tma_do, g_do = cpasync.make_tiled_tma_atom(load, dout, do_one, (c.step, c.E))
        tma_dk, g_dk = cpasync.make_tiled_tma_atom(store, dk, k_layout, (ROWS, c.D))
        tma_dv, g_dv = cpasync.make_tiled_tma_atom(store, dv, v_layout, (ROWS, c.E))
        major, one = cute.nvgpu.OperandMajorMode, (1, 1, 1)
        mma_s = hopper.make_trivial_tiled_mma(
            self.dtype, self.dtype, major.K, major.K, Float32, atom_layout_mnk=one, tiler_mn=(ROWS, c.step)
        )
        mma_dv, mma_dk = [
            hopper.make_trivial_tiled_mma(
                self.dtype, self.dtype, major.K, major.MN, Float32, atom_layout_mnk=one, tiler_mn=(ROWS, columns),
                a_source=warpgroup.OperandSource.RMEM,
            )
            for columns in (c.E, c.D)
        ]  # fmt: skip
        # dV is sent from the place of K, which its warpgroup alone reads, and dK from that of V.
        elements = max(cute.cosize(k_layout), cute.cosize(v_layout))

        @cute.struct
        class Shared:
            q_full: cute.struct.MemRange[cutlass.Int64, c.q_stages]
            q_empty: cute.struct.MemRange[cutlass.Int64, c.q_stages]
            do_full: cute.struct.MemRange[cutlass.Int64, c.do_stages]
            do_empty: cute.struct.MemRange[cutlass.Int64, c.do_stages]
            once: cute.struct.MemRange[cutlass.Int64, len(BARRIERS)]
            item: cute.struct.MemRange[Int32, ITEM]
            steps: cute.struct.MemRange[Int32, STEP * c.q_stages]
            lse: cute.struct.Align[cute.struct.MemRange[Float32, c.step * c.q_stages], 128]
            delta: cute.struct.Align[cute.struct.MemRange[Float32, c.step * c.do_stages], 128]
            p: cute.struct.Align[cute.struct.MemRange[Int32, 2 * ROWS * c.step // 2], 128]
            k: cute.struct.Align[cute.struct.MemRange[self.dtype, elements], 1024]
            v: cute.struct.Align[cute.struct.MemRange[self.dtype, elements], 1024]
            q: cute.struct.Align[cute.struct.MemRange[self.dtype, cute.cosize(q_layout)], 1024]
            do: cute.struct.Align[cute.struct.MemRange[self.dtype, cute.cosize(do_layout)], 1024]

        self.shared = Shared
        self.bytes = {
            name: cute.size_in_bytes(self.dtype, layout)
            for name, layout in (("q", q_one), ("k", k_layout), ("v", v_layout), ("do", do_one))
        }
        self.kernel(
            tma_q, g_q, tma_k, g_k, tma_v, g_v, tma_do, g_do, tma_dk, g_dk, tma_dv, g_dv, terms, work, segments, lists,
            lo, hi, pool, part_dk, part_dv, lengths, tickets, before, exponent, factor, items * self.pieces,
            k_layout, v_layout, q_layout, do_layout, mma_s, mma_dv, mma_dk,
        ).launch(grid=(blocks, 1, 1), block=(self.threads, 1, 1), stream=stream, min_blocks_per_mp=1)  # fmt: skip

    @cute.kernel
    def kernel(
        self,
        tma_q: cute.CopyAtom,
        g_q: cute.Tensor,
        tma_k: cute.CopyAtom,
        g_k: cute.Tensor,
        tma_v: cute.CopyAtom,
        g_v: cute.Tensor,
        tma_do: cute.CopyAtom,
        g_do: cute.Tensor,
        tma_dk: cute.CopyAtom,
        g_dk: cute.Tensor,
        tma_dv: cute.CopyAtom,
        g_dv: cute.Tensor,
        terms: cute.Tensor,
        work: cute.Tensor,
        segments: cute.Tensor,
        lists: cute.Tensor,
        lo: cute.Tensor,
        hi: cute.Tensor,
        pool: cute.Tensor,
        part_dk: cute.Tensor,
        part_dv: cute.Tensor,
        lengths: cute.Tensor | None,
        tickets: cute.Tensor,
        before: Float32,
        exponent: Float32,
        factor: Float32,
        items: Int32,
        k_layout: cute.ComposedLayout,
        v_layout: cute.ComposedLayout,
        q_layout: cute.ComposedLayout,
        do_layout: cute.ComposedLayout,
        mma_s: cute.TiledMma,
        mma_dv: cute.TiledMma,
        mma_dk: cute.TiledMma,
    ) -> None:
        c = self.config
        warp_index = cute.arch.make_warp_uniform(cute.arch.warp_idx())
        if warp_index == 0:
            for atom in (tma_q, tma_k, tma_v, tma_do, tma_dk, tma_dv):
                cpasync.prefetch_descriptor(atom)
        storage = SmemAllocator().allocate(self.shared)
        once = storage.once.data_ptr()
        bars = Env(
            **{name: getattr(storage, name).data_ptr() for name in ("q_full", "q_empty", "do_full", "do_empty")},
            **{name: once + i for i, name in enumerate(BARRIERS)},
        )
        if warp_index == 0:
            with cute.arch.elect_one():
                cute.arch.mbarrier_init(bars.k_full, 1)
                cute.arch.mbarrier_init(bars.v_full, 1)
                cute.arch.mbarrier_init(bars.k_empty, GROUPS)  # the item's description is read by both
                cute.arch.mbarrier_init(bars.v_empty, 1)
                for full, empty, stages in (
                    (bars.q_full, bars.q_empty, c.q_stages), (bars.do_full, bars.do_empty, c.do_stages)
                ):  # fmt: skip
                    for i in cutlass.range_constexpr(stages):
                        cute.arch.mbarrier_init(full + i, 1)
                        cute.arch.mbarrier_init(empty + i, 4 * GROUPS)
        cute.arch.mbarrier_init_fence()
        s_k = storage.k.get_tensor(k_layout.outer, swizzle=k_layout.inner)
        s_v = storage.v.get_tensor(v_layout.outer, swizzle=v_layout.inner)
        p_layout = cute.make_layout((4, WARPGROUP, c.step // 16, 2), stride=(1, 4, 4 * WARPGROUP, ROWS * c.step // 2))
        env = Env(
            bars=bars,
            item=cute.make_tensor(storage.item.data_ptr(), cute.make_layout(ITEM)),
            steps=cute.make_tensor(storage.steps.data_ptr(), cute.make_layout((STEP, c.q_stages))),
            s_lse=cute.make_tensor(storage.lse.data_ptr(), cute.make_layout((c.step, c.q_stages))),
            s_delta=cute.make_tensor(storage.delta.data_ptr(), cute.make_layout((c.step, c.do_stages))),
            s_p=cute.make_tensor(storage.p.data_ptr(), p_layout),
            s_k=s_k, s_v=s_v,
            s_q=storage.q.get_tensor(q_layout.outer, swizzle=q_layout.inner),
            s_do=storage.do.get_tensor(do_layout.outer, swizzle=do_layout.inner),
            s_dv=storage.k.get_tensor(v_layout.outer, swizzle=v_layout.inner),
            s_dk=storage.v.get_tensor(k_layout.outer, swizzle=k_layout.inner),
            terms=terms, work=work, segments=segments, lists=lists, lo=lo, hi=hi, pool=pool, lengths=lengths,
            tickets=tickets, before=before, exponent=exponent, factor=factor, items=items,
            queries=cute.size(g_q, mode=[0]), keys=cute.size(g_k, mode=[0]),
            ratio=cute.size(g_q, mode=[2]) // cute.size(g_k, mode=[2]),
        )  # fmt: skip
        cute.arch.sync_threads()
        if warp_index < 4:
            cute.arch.setmaxregister_decrease(24)
            if warp_index == 0:
                self.produce(env, tma_q, g_q, tma_k, g_k, tma_v, g_v, tma_do, g_do)
        else:
            cute.arch.setmaxregister_increase(240)
            if warp_index < 8:
                self.values(env, mma_s, mma_dv, tma_dv, g_dv, part_dv)
            else:
                self.keys(env, mma_s, mma_dk, tma_dk, g_dk, part_dk)

    @cute.jit
    def draw(self, env, w):
        """This lane's word of the description of item `w`. Its tile has 64 keys."""
        lane = cute.arch.lane_idx()
        word = load_item(env, w, self.pieces)
        if lane == TILE:
            word = word * self.pieces + w % self.pieces
        # A half past the last key has nothing to walk.
        if const_expr(self.config.lengths):
            word = self.within(env, word)
        else:
            tile = cute.arch.shuffle_sync(word, TILE)
            if lane == COUNT and tile * ROWS >= env.keys:
                word = Int32(0)
        return word
