"""The column kernel of the backward: warp-specialised, persistent, one walk of a layout's columns.

Warp 0 takes work items and keeps the rings of Q (with lse) and dO (with delta) filled by TMA; a stage of Q carries a
description of its step. Warps 1 and 2 send what the two other warpgroups leave in shared memory: dQ of every step by
bulk reduction, dK and dV at the end of an item. Each of those owns 64 keys: S^T = K Q^T, dP^T = V dO^T, then
dV += P^T dO and dK += dS^T Q with P^T and dS^T from registers. dQ = dS K needs the dS of both: it goes through shared
memory, and each computes half of dQ, one step later. Tiles of 64 x 64 have one consumer warpgroup and no dQ.
"""

from __future__ import annotations

from typing import Any

import cutlass
import cutlass.cute as cute
import cutlass.utils.hopper_helpers as hopper
from cutlass import Float32, Int32, const_expr
from cutlass.cute.nvgpu import cpasync, warpgroup
from cutlass.memory import SmemAllocator
from cutlass.tensor_utils import LayoutEnum

from gossamer.kernels.hopper.device.backward.consume import Consumer
from gossamer.kernels.hopper.device.backward.fields import STAGES, STEP
from gossamer.kernels.hopper.device.backward.produce import Producer
from gossamer.kernels.hopper.device.common import NUMBERS, ROWS, WARPGROUP, Env
from gossamer.kernels.hopper.device.configurations import BackwardConfig
from gossamer.kernels.hopper.device.row_items import ITEM

RINGS = ("q_full", "q_empty", "do_full", "do_empty")
BARRIERS = ("k_full", "k_empty", "v_full", "v_empty")


class Backward(Producer, Consumer):
    """The kernel of one configuration."""

    def __init__(self, config: BackwardConfig) -> None:
        self.config = c = config
        self.dtype = NUMBERS[c.dtype]
        self.groups = c.block_kv // ROWS
        self.parts = c.block_q // ROWS
        self.halves = c.step // ROWS
        self.threads = WARPGROUP * (self.groups + 1)
        # Of a step's dQ each warpgroup makes half: half of the columns, or one of two halves of the queries.
        self.dq_columns = c.D // self.groups * self.halves
        self.staging_floats = ROWS * c.D // 2 * self.halves  # that half, or a warpgroup's dK (and dV) in 16 bits
        self.consumer_registers = 232 if c.single else 240  # one warpgroup a block: two blocks share the registers

    def smem_layout(self, rows: int, columns: int, stages: int | None = None, within: int = 0) -> Any:
        """A tile in shared memory; its swizzle is the widest that divides `within` columns, or all of them."""
        atom = warpgroup.make_smem_layout_atom(
            hopper.get_smem_layout_atom(LayoutEnum.ROW_MAJOR, self.dtype, within or columns), self.dtype
        )
        if stages is None:
            return cute.tile_to_shape(atom, (rows, columns), (0, 1))
        return cute.tile_to_shape(atom, (rows, columns, stages), (0, 1, 2))

    def products(self) -> tuple[Any, Any, Any, Any]:
        """The products of a warpgroup: S^T and dP^T, dV, dK, dQ."""
        c, major = self.config, cute.nvgpu.OperandMajorMode
        n, one = self.dtype, (1, 1, 1)
        mma_s = hopper.make_trivial_tiled_mma(
            n, n, major.K, major.K, Float32, atom_layout_mnk=one, tiler_mn=(ROWS, c.step)
        )
        mma_dv, mma_dk = [
            hopper.make_trivial_tiled_mma(
                n, n, major.K, major.MN, Float32, atom_layout_mnk=one, tiler_mn=(ROWS, columns),
                a_source=warpgroup.OperandSource.RMEM,
            )
            for columns in (c.E, c.D)
        ]  # fmt: skip
        mma_dq = hopper.make_trivial_tiled_mma(
            n, n, major.K, major.MN, Float32, atom_layout_mnk=one, tiler_mn=(ROWS, self.dq_columns)
        )
        return mma_s, mma_dv, mma_dk, mma_dq

    @cute.jit
    def __call__(
        self,
        q: cute.Tensor,  # (B, H, Q, D)
        k: cute.Tensor,  # (B, G, K, D)
        v: cute.Tensor,  # (B, G, K, E)
        dout: cute.Tensor,  # (B, H, Q, E)
        terms: cute.Tensor,  # (2, B, H, Qp) float32
        dq_sum: cute.Tensor,  # (B, H, Qp / 64, 64 * D) float32
        dk: cute.Tensor,  # (B, G, K, D)
        dv: cute.Tensor,  # (B, G, K, E)
        work: cute.Tensor,  # (n, ITEM) int32
        segments: cute.Tensor,  # (m, SEGMENT) int32
        lists: cute.Tensor,  # (2, entries): tile column; pool entry
        lo: cute.Tensor,  # (Bl * Hl, K)
        hi: cute.Tensor,
        pool: cute.Tensor,  # (P * block_kv, block_q / 32)
        part_dk: cute.Tensor,  # (slots, block_kv, D) float32
        part_dv: cute.Tensor,  # (slots, block_kv, E) float32
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
        # Half of 96 columns, which dQ takes from K, would end within a wider swizzle.
        k_layout = self.smem_layout(c.block_kv, c.D, within=self.dq_columns if c.D == 96 else 0)
        v_layout = self.smem_layout(c.block_kv, c.E)
        q_layout, do_layout = self.smem_layout(c.step, c.D, c.q_stages), self.smem_layout(c.step, c.E, c.do_stages)
        ds_layout = self.smem_layout(c.step, c.block_kv, STAGES)
        dk_layout, dv_layout = self.smem_layout(ROWS, c.D), self.smem_layout(ROWS, c.E)
        load, store = cpasync.CopyBulkTensorTileG2SOp(), cpasync.CopyBulkTensorTileS2GOp()
        q_one, do_one = self.smem_layout(ROWS, c.D), self.smem_layout(ROWS, c.E)
        tma_q, g_q = cpasync.make_tiled_tma_atom(load, q, q_one, (ROWS, c.D))
        tma_k, g_k = cpasync.make_tiled_tma_atom(load, k, k_layout, (c.block_kv, c.D))
        tma_v, g_v = cpasync.make_tiled_tma_atom(load, v, v_layout, (c.block_kv, c.E))
        tma_do, g_do = cpasync.make_tiled_tma_atom(load, dout, do_one, (ROWS, c.E))
        tma_dk, g_dk = cpasync.make_tiled_tma_atom(store, dk, dk_layout, (ROWS, c.D))
        tma_dv, g_dv = cpasync.make_tiled_tma_atom(store, dv, dv_layout, (ROWS, c.E))
        mma_s, mma_dv, mma_dk, mma_dq = self.products()
        floats = 0 if c.single else self.groups * self.staging_floats
        results = 0 if c.single or self.halves > 1 else c.block_kv * c.E

        @cute.struct
        class Shared:
            q_full: cute.struct.MemRange[cutlass.Int64, c.q_stages]
            q_empty: cute.struct.MemRange[cutlass.Int64, c.q_stages]
            do_full: cute.struct.MemRange[cutlass.Int64, c.do_stages]
            do_empty: cute.struct.MemRange[cutlass.Int64, c.do_stages]
            once: cute.struct.MemRange[cutlass.Int64, len(BARRIERS)]
            item: cute.struct.MemRange[Int32, ITEM]
            steps: cute.struct.MemRange[Int32, STEP * self.halves * c.q_stages]
            lse: cute.struct.Align[cute.struct.MemRange[Float32, c.step * c.q_stages], 128]
            delta: cute.struct.Align[cute.struct.MemRange[Float32, c.step * c.do_stages], 128]
            k: cute.struct.Align[cute.struct.MemRange[self.dtype, cute.cosize(k_layout)], 1024]
            v: cute.struct.Align[cute.struct.MemRange[self.dtype, cute.cosize(v_layout)], 1024]
            q: cute.struct.Align[cute.struct.MemRange[self.dtype, cute.cosize(q_layout)], 1024]
            do: cute.struct.Align[cute.struct.MemRange[self.dtype, cute.cosize(do_layout)], 1024]
            ds: cute.struct.Align[cute.struct.MemRange[self.dtype, cute.cosize(ds_layout) * int(c.with_dq)], 1024]
            staging: cute.struct.Align[cute.struct.MemRange[Float32, floats], 1024]
            out: cute.struct.Align[cute.struct.MemRange[self.dtype, results], 1024]

        self.shared = Shared
        self.bytes = {
            name: cute.size_in_bytes(self.dtype, layout)
            for name, layout in (("q", q_one), ("k", k_layout), ("v", v_layout), ("do", do_one))
        }
        self.kernel(
            tma_q, g_q, tma_k, g_k, tma_v, g_v, tma_do, g_do, tma_dk, g_dk, tma_dv, g_dv, terms, dq_sum, work,
            segments, lists, lo, hi, pool, part_dk, part_dv, lengths, tickets, before, exponent, factor, items,
            k_layout, v_layout, q_layout, do_layout, ds_layout, dk_layout, dv_layout, mma_s, mma_dv, mma_dk, mma_dq,
        ).launch(
            grid=(blocks, 1, 1), block=(self.threads, 1, 1), stream=stream, min_blocks_per_mp=c.blocks_per_processor,
            # For two blocks the compiler would otherwise ask the driver, which need not be there.
            preferred_smem_carveout=100 if c.blocks_per_processor > 1 else None,
        )  # fmt: skip

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
        dq_sum: cute.Tensor,
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
        ds_layout: cute.ComposedLayout,
        dk_layout: cute.ComposedLayout,
        dv_layout: cute.ComposedLayout,
        mma_s: cute.TiledMma,
        mma_dv: cute.TiledMma,
        mma_dk: cute.TiledMma,
        mma_dq: cute.TiledMma,
    ) -> None:
        c = self.config
        warp_index = cute.arch.make_warp_uniform(cute.arch.warp_idx())
        if warp_index == 0:
            for atom in (tma_q, tma_k, tma_v, tma_do, tma_dk, tma_dv):
                cpasync.prefetch_descriptor(atom)
        storage = SmemAllocator().allocate(self.shared)
        once = storage.once.data_ptr()
        bars = Env(
            **{name: getattr(storage, name).data_ptr() for name in RINGS},
            **{name: once + i for i, name in enumerate(BARRIERS)},
        )
        if warp_index == 0:
            with cute.arch.elect_one():
                senders = self.groups
                cute.arch.mbarrier_init(bars.k_full, 1)
                cute.arch.mbarrier_init(bars.v_full, 1)
                # Where K and V make room for dK and dV, who sends these gives them back.
                cute.arch.mbarrier_init(bars.k_empty, 1 if c.single else 4 * self.groups + senders)
                cute.arch.mbarrier_init(bars.v_empty, 1 if c.single else 4 * self.groups)
                for i in cutlass.range_constexpr(c.q_stages):
                    cute.arch.mbarrier_init(bars.q_full + i, self.halves)
                    cute.arch.mbarrier_init(bars.q_empty + i, 4 * self.groups + senders * self.sends)
                for i in cutlass.range_constexpr(c.do_stages):
                    cute.arch.mbarrier_init(bars.do_full + i, self.halves)
                    cute.arch.mbarrier_init(bars.do_empty + i, 4 * self.groups)
        cute.arch.mbarrier_init_fence()
        s_k = storage.k.get_tensor(k_layout.outer, swizzle=k_layout.inner)
        s_v = storage.v.get_tensor(v_layout.outer, swizzle=v_layout.inner)
        s_q = storage.q.get_tensor(q_layout.outer, swizzle=q_layout.inner)
        s_do = storage.do.get_tensor(do_layout.outer, swizzle=do_layout.inner)
        # Without dQ there is no dS in shared memory, and this is never used.
        s_ds = (storage.ds if c.with_dq else storage.q).get_tensor(ds_layout.outer, swizzle=ds_layout.inner)
        # dK in 16 bits takes the place of a warpgroup's dQ, or of K; dV the rest of that place, its own, or that of V.
        sent_dk, sent_dv = (storage.k if c.single else storage.staging).data_ptr(), storage.v.data_ptr()
        apart, dv_apart = 2 * self.staging_floats, ROWS * c.E
        if const_expr(self.halves > 1):
            sent_dv, dv_apart = storage.staging.data_ptr() + ROWS * c.D // 2, apart
        elif const_expr(not c.single):
            sent_dv = storage.out.data_ptr()
        dk_outer = cute.append(dk_layout.outer, cute.make_layout(self.groups, stride=apart))
        dv_outer = cute.append(dv_layout.outer, cute.make_layout(self.groups, stride=dv_apart))
        s_dk = cute.make_tensor(cute.recast_ptr(sent_dk, dk_layout.inner, dtype=self.dtype), dk_outer)
        s_dv = cute.make_tensor(cute.recast_ptr(sent_dv, dv_layout.inner, dtype=self.dtype), dv_outer)
        env = Env(
            bars=bars,
            item=cute.make_tensor(storage.item.data_ptr(), cute.make_layout(ITEM)),
            steps=cute.make_tensor(storage.steps.data_ptr(), cute.make_layout((STEP, self.halves * c.q_stages))),
            s_lse=cute.make_tensor(storage.lse.data_ptr(), cute.make_layout((ROWS, self.halves * c.q_stages))),
            s_delta=cute.make_tensor(storage.delta.data_ptr(), cute.make_layout((ROWS, self.halves * c.do_stages))),
            staging=storage.staging.data_ptr(), s_k=s_k, s_v=s_v, s_q=s_q, s_do=s_do, s_ds=s_ds, s_dk=s_dk, s_dv=s_dv,
            terms=terms, dq_sum=dq_sum, work=work, segments=segments, lists=lists, lo=lo, hi=hi, pool=pool,
            part_dk=part_dk, part_dv=part_dv, lengths=lengths, tickets=tickets, before=before,
            exponent=exponent, factor=factor, items=items,
            queries=cute.size(g_q, mode=[0]), keys=cute.size(g_k, mode=[0]),
            ratio=cute.size(g_q, mode=[2]) // cute.size(g_k, mode=[2]),
        )  # fmt: skip
        cute.arch.sync_threads()
        if warp_index < 4:
            cute.arch.setmaxregister_decrease(24)
            if warp_index == 0:
                self.produce(env, tma_q, g_q, tma_k, g_k, tma_v, g_v, tma_do, g_do)
            elif warp_index <= self.groups:
                self.send(env, tma_dk, g_dk, tma_dv, g_dv, warp_index - 1)
        else:
            cute.arch.setmaxregister_increase(self.consumer_registers)
            self.consume(env, mma_s, mma_dv, mma_dk, mma_dq)
