"""The forward kernel of gathered columns for float32: 64 query rows, and the keys that any of them keeps.

As forward.py, but what is gathered are rows that were split before, with their powers; Q is split where it is used, and
results go straight to memory. A launch is two kernels: the first splits the rows of K and V.
"""

from __future__ import annotations

from typing import Any

import cutlass
import cutlass.cute as cute
import cutlass.utils.hopper_helpers as hopper
from cutlass import Float16, Float32, Int32, const_expr
from cutlass.cute.nvgpu import cpasync, warpgroup
from cutlass.memory import SmemAllocator
from cutlass.tensor_utils import LayoutEnum

from gossamer.kernels.hopper.device.common import ROWS, WARPGROUP, Env, ring
from gossamer.kernels.hopper.device.gather.configurations import SplitConfig
from gossamer.kernels.hopper.device.gather.produce import (
    LINE,
    PIECE,
    PIECES,
    WORDS,
    Gatherer,
    Queries,
    copy,
    role_of,
    smem_layout,
)
from gossamer.kernels.hopper.device.gather.split import Split
from gossamer.kernels.hopper.device.gather.split_consume import SplitConsumer
from gossamer.kernels.hopper.device.row_items import BATCH, BITS, BITSES, HEAD, ITEM, VALID

POWERS = 8  # bytes of the powers of a column
AT_ONCE = 4  # rows that a warp copies a line of


class SplitForward(Queries, Gatherer, SplitConsumer):
    """The kernel of one configuration."""

    def __init__(self, config: SplitConfig) -> None:
        self.config = config
        self.dtype = Float16
        self.split = Split(config.size)

    @property
    def lines(self) -> int:
        """Lines of a row of halves."""
        return 2 * self.config.size * 2 // LINE

    def products_of(self) -> tuple[Any, Any]:
        """S (64 rows by 64 columns) and what is added to O (64 by the head size), of operands in registers."""
        major, one = cute.nvgpu.OperandMajorMode, (1, 1, 1)
        return tuple(
            hopper.make_trivial_tiled_mma(
                Float16, Float16, major.K, of, Float32, atom_layout_mnk=one, tiler_mn=(ROWS, columns),
                a_source=warpgroup.OperandSource.RMEM,
            )
            for of, columns in ((major.K, ROWS), (major.MN, self.config.size))
        )  # fmt: skip

    @cute.jit
    def __call__(
        self,
        q: cute.Tensor,  # (B, H, Q, D) float32
        k: cute.Tensor,  # (B, G, K, D) float32
        v: cute.Tensor,  # (B, G, K, E) float32
        k_halves: cute.Tensor,  # (B, G, K, 2 size) float16, written before it is read, as are the two that follow
        v_halves: cute.Tensor,  # (B, G, K, 2 size) float16
        powers: cute.Tensor,  # (B, G, K, 2) float32
        out: cute.Tensor,  # (B, H, Q, E) float32
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
        self.split(k, v, k_halves, v_halves, powers, stream)
        rows = cute.make_tensor(q.iterator, cute.select(q.layout, [2, 3, 1, 0]))
        kind = hopper.get_smem_layout_atom(LayoutEnum.ROW_MAJOR, Float32, c.size)
        atom = warpgroup.make_smem_layout_atom(kind, Float32)
        q_layout = cute.tile_to_shape(atom, (ROWS, c.size, c.q_stages), (0, 1, 2))
        k_layout = smem_layout(self, c.stages, 2 * c.size)
        one = cute.select(q_layout, mode=[0, 1])
        tma_q, g_q = cpasync.make_tiled_tma_atom(cpasync.CopyBulkTensorTileG2SOp(), rows, one, (ROWS, c.size))
        mma_s, mma_o = self.products_of()

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
            powers: cute.struct.Align[cute.struct.MemRange[Float32, 2 * c.stages * 2 * ROWS], 128]
            q: cute.struct.Align[cute.struct.MemRange[Float32, cute.cosize(q_layout)], 1024]
            k: cute.struct.Align[cute.struct.MemRange[Float16, cute.cosize(k_layout)], 1024]
            v: cute.struct.Align[cute.struct.MemRange[Float16, cute.cosize(k_layout)], 1024]

        self.shared = Shared
        self.q_bytes = cute.size_in_bytes(Float32, one)
        self.kernel(
            tma_q, g_q, k_halves, v_halves, powers, out, lse, work, indices, bits, sinks, part_out, part_lse, lengths,
            tickets, before, exponent, items, has_sinks, q_layout, k_layout, mma_s, mma_o,
        ).launch(
            grid=(blocks, 1, 1), block=(2 * WARPGROUP, 1, 1), stream=stream, min_blocks_per_mp=c.blocks,
            preferred_smem_carveout=100,
        )  # fmt: skip

    @cute.kernel
    def kernel(
        self,
        tma_q: cute.CopyAtom,
        g_q: cute.Tensor,
        k: cute.Tensor,
        v: cute.Tensor,
        powers: cute.Tensor,
        out: cute.Tensor,
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
        mma_s: cute.TiledMma,
        mma_o: cute.TiledMma,
    ) -> None:
        c = self.config
        warp_index = cute.arch.make_warp_uniform(cute.arch.warp_idx())
        if warp_index == 0:
            cpasync.prefetch_descriptor(tma_q)
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
                    cute.arch.mbarrier_init(bars.q_empty + i, 4 + 3)  # the warps that compute and gather
                for i in cutlass.range_constexpr(c.stages):
                    cute.arch.mbarrier_init(bars.k_full + i, 64)
                    cute.arch.mbarrier_init(bars.v_full + i, 32)
                    cute.arch.mbarrier_init(bars.k_empty + i, 4)
                    cute.arch.mbarrier_init(bars.v_empty + i, 4)
        cute.arch.mbarrier_init_fence()
        s_q = storage.q.get_tensor(q_layout.outer, swizzle=q_layout.inner)
        s_k = storage.k.get_tensor(k_layout.outer, swizzle=k_layout.inner)
        s_v = storage.v.get_tensor(k_layout.outer, swizzle=k_layout.inner)
        s_bits = cute.make_tensor(storage.bits.data_ptr(), cute.make_layout((ROWS, 2, 2 * c.stages)))
        s_powers = cute.make_tensor(storage.powers.data_ptr(), cute.make_layout((2, ROWS, 2 * c.stages)))
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
            else:
                told = Env(item=item, full=bars.q_full, empty=bars.q_empty, stages=c.q_stages)
                if role == 1:
                    self.accompany(powers, bars, told, indices, bits, s_bits, s_powers, ratio)
                elif role == 2:
                    self.gather_one(k, storage.k.data_ptr(), bars.k_full, bars.k_empty, told, indices, ratio)
                else:
                    self.gather_one(v, storage.v.data_ptr(), bars.v_full, bars.v_empty, told, indices, ratio)
        else:
            cute.arch.setmaxregister_increase(computing)
            self.consume(
                mma_s, mma_o, storage.q.data_ptr().toint(), s_k, s_v, bars, item, s_bits, s_powers, sinks, out, lse,
                part_out, part_lse, before, exponent, has_sinks,
            )  # fmt: skip

    @cute.jit
    def gather_one(self, tensor, ring_at, full, empty, told, indices, ratio):
        """A warp that fills the ring of K or of V: a thread copies the same piece of each line of every fourth row."""
        c = self.config
        lane = cute.arch.lane_idx()
        piece, row = lane % PIECES, lane // PIECES
        # Pieces of a line are permuted by the row in eight: two patterns, of rows below four and from there on.
        to = [ring_at.toint() + row * LINE + (piece ^ (row + 4 * odd)) * PIECE for odd in range(2)]
        stride = Int32(2 * tensor.stride[2])
        columns = cute.make_rmem_tensor((ROWS // AT_ONCE,), Int32)
        columns.fill(-1)
        turn, kv = Int32(0), Int32(0)  # items and steps so far
        cute.arch.mbarrier_wait(told.full, 0)
        running = told.item[VALID, 0]
        while running != 0:
            place = ring(turn, told.stages)[0]
            batch, group = told.item[BATCH, place], told.item[HEAD, place] // ratio
            at, steps = told.item[BITS, place], told.item[BITSES, place]
            self.heard(told, place)
            start = tensor[batch, group, None, None].iterator.toint() + PIECE * piece
            if steps > 0:
                for j in cutlass.range_constexpr(ROWS // AT_ONCE):
                    columns[j] = indices[at * ROWS + row + j * AT_ONCE]
            for n in cutlass.range(at, at + steps, unroll=1):
                stage, phase = ring(kv, c.stages)
                cute.arch.mbarrier_wait(empty + stage, phase ^ 1)
                for j in cutlass.range_constexpr(ROWS // AT_ONCE):
                    for line in cutlass.range_constexpr(self.lines):
                        behind = const_expr((j * AT_ONCE + line * ROWS) * LINE)
                        target = to[j % 2] + stage * (ROWS * LINE * self.lines)
                        copy(target, start, columns[j], stride, False, PIECE, behind, line * LINE)
                cute.arch.cp_async_mbarrier_arrive_noinc(full + stage)
                if n + 1 < at + steps:
                    for j in cutlass.range_constexpr(ROWS // AT_ONCE):
                        columns[j] = indices[(n + 1) * ROWS + row + j * AT_ONCE]
                kv += 1
            turn += 1
            place, phase = ring(turn, told.stages)
            cute.arch.mbarrier_wait(told.full + place, phase)
            running = told.item[VALID, place]

    @cute.jit
    def accompany(self, powers, bars, told, indices, bits, s_bits, s_powers, ratio):
        """A warp that copies what belongs to K of each step: its words, and the powers of its columns."""
        c = self.config
        lane = cute.arch.lane_idx()
        columns, upcoming = cute.make_rmem_tensor((2,), Int32), cute.make_rmem_tensor((2,), Int32)
        upcoming.fill(-1)
        turn, kv = Int32(0), Int32(0)  # items and steps so far
        cute.arch.mbarrier_wait(told.full, 0)
        running = told.item[VALID, 0]
        while running != 0:
            place = ring(turn, told.stages)[0]
            batch, group = told.item[BATCH, place], told.item[HEAD, place] // ratio
            at, steps = told.item[BITS, place], told.item[BITSES, place]
            self.heard(told, place)
            start = powers[batch, group, None, None].iterator.toint()
            for i in cutlass.range_constexpr(2):
                if steps > 0:
                    upcoming[i] = indices[at * ROWS + 32 * i + lane]
            for n in cutlass.range(at, at + steps, unroll=1):
                for i in cutlass.range_constexpr(2):
                    columns[i] = upcoming[i]
                    if n + 1 < at + steps:
                        upcoming[i] = indices[(n + 1) * ROWS + 32 * i + lane]
                stage, phase = ring(kv, c.stages)
                slot = ring(kv, 2 * c.stages)[0]
                cute.arch.mbarrier_wait(bars.k_empty + stage, phase ^ 1)
                words = s_bits.iterator.toint() + slot * (4 * WORDS) + lane * PIECE
                copy(words, bits.iterator.toint() + lane * PIECE, n, Int32(4 * WORDS), False, PIECE)
                for i in cutlass.range_constexpr(2):
                    to = s_powers.iterator.toint() + POWERS * (slot * ROWS + 32 * i + lane)
                    copy(to, start, columns[i], Int32(POWERS), False, POWERS)
                cute.arch.cp_async_mbarrier_arrive_noinc(bars.k_full + stage)
                kv += 1
            turn += 1
            place, phase = ring(turn, told.stages)
            cute.arch.mbarrier_wait(told.full + place, phase)
            running = told.item[VALID, place]
