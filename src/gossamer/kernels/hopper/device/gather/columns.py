"""dK and dV over gathered rows: 64 keys, and the queries that keep any of them, of every query head of the key head.

Of the first warpgroup one warp takes items and loads K and V by TMA, one sends dK and dV, and two fill the rings of Q
and dO and copy the row terms; the second computes as that of the column kernel does for tiles of 64 x 64.
"""

from __future__ import annotations

from typing import Any

import cutlass
import cutlass.cute as cute
from cutlass import Float32, Int32
from cutlass.cute.nvgpu import cpasync
from cutlass.memory import SmemAllocator

from gossamer.kernels.hopper.device.backward.consume import Consumer
from gossamer.kernels.hopper.device.backward.fields import END, ENTRY, KIND, MASKED, STAGES, STEP, WORD
from gossamer.kernels.hopper.device.backward.kernel import Backward
from gossamer.kernels.hopper.device.backward.produce import Producer
from gossamer.kernels.hopper.device.column_items import BATCH, BITS, BITSES, COUNT, GROUP, HEAD, SEGMENTS, TILE, VALID
from gossamer.kernels.hopper.device.common import NUMBERS, ROWS, WARPGROUP, Env, ring, ticket
from gossamer.kernels.hopper.device.gather.configurations import GatherConfig
from gossamer.kernels.hopper.device.gather.produce import (
    AHEAD,
    COPIES,
    THREADS,
    WORDS,
    Filled,
    Gatherer,
    Places,
    copy,
    init_told,
    role_of,
    smem_layout,
    told_of,
    whole_tiles,
)
from gossamer.kernels.hopper.device.row_items import ITEM


class GatherColumns(Gatherer, Filled, Consumer):
    """The kernel of one configuration."""

    draw = Producer.draw
    within = Producer.within
    attended = Producer.attended
    send = Producer.send
    sends = Producer.sends
    exchange = Producer.exchange
    products: Any = Backward.products

    def __init__(self, config: GatherConfig) -> None:
        self.config = config
        self.dtype = NUMBERS[config.dtype]
        self.groups = self.parts = 1
        self.dq_columns = config.size  # of products that are never made
        self.staging_floats = 0

    @cute.jit
    def __call__(
        self,
        q: cute.Tensor,  # (B, H, Q, D)
        k: cute.Tensor,  # (B, G, K, D)
        v: cute.Tensor,  # (B, G, K, E)
        dout: cute.Tensor,  # (B, H, Q, E)
        terms: cute.Tensor,  # (2, B, H, Qp) float32: lse in base 2, delta
        dk: cute.Tensor,  # (B, G, K, D)
        dv: cute.Tensor,  # (B, G, K, E)
        work: cute.Tensor,  # (n, ITEM) int32
        segments: cute.Tensor,  # (m, SEGMENT) int32
        indices: cute.Tensor,  # (rows,) int32
        bits: cute.Tensor,  # (rows / 32, 64) int32
        part_dk: cute.Tensor,  # (slots, 64, D) float32
        part_dv: cute.Tensor,  # (slots, 64, E) float32
        lengths: cute.Tensor,  # (B,) int32; not read without `lengths` in the configuration
        tickets: cute.Tensor,  # (1,) int32: items taken; zero before and after
        before: Float32,  # factor of a score before the soft cap
        exponent: Float32,  # factor of a score in exp2
        factor: Float32,  # factor of dK
        items: Int32,
        blocks: Int32,
        stream: Any,
    ) -> None:
        c = self.config
        k, v, dk, dv = [cute.make_tensor(t.iterator, cute.select(t.layout, [2, 3, 1, 0])) for t in (k, v, dk, dv)]
        layout, ring_layout = smem_layout(self, 1), smem_layout(self, c.stages)
        one = cute.select(layout, mode=[0, 1])
        load, store = cpasync.CopyBulkTensorTileG2SOp(), cpasync.CopyBulkTensorTileS2GOp()
        (tma_k, g_k), (tma_v, g_v) = [cpasync.make_tiled_tma_atom(load, t, one, (ROWS, c.size)) for t in (k, v)]
        (tma_dk, g_dk), (tma_dv, g_dv) = [cpasync.make_tiled_tma_atom(store, t, one, (ROWS, c.size)) for t in (dk, dv)]
        mma_s, mma_dv, mma_dk, mma_dq = self.products()

        @cute.struct
        class Shared:
            q_full: cute.struct.MemRange[cutlass.Int64, c.stages]
            q_empty: cute.struct.MemRange[cutlass.Int64, c.stages]
            do_full: cute.struct.MemRange[cutlass.Int64, c.stages]
            do_empty: cute.struct.MemRange[cutlass.Int64, c.stages]
            told_full: cute.struct.MemRange[cutlass.Int64, AHEAD]
            told_empty: cute.struct.MemRange[cutlass.Int64, AHEAD]
            k_full: cutlass.Int64
            k_empty: cutlass.Int64
            v_full: cutlass.Int64
            v_empty: cutlass.Int64
            item: cute.struct.MemRange[Int32, ITEM]
            told: cute.struct.MemRange[Int32, ITEM * AHEAD]
            steps: cute.struct.MemRange[Int32, STEP * c.stages]
            lse: cute.struct.Align[cute.struct.MemRange[Float32, ROWS * c.stages], 128]
            delta: cute.struct.Align[cute.struct.MemRange[Float32, ROWS * c.stages], 128]
            bits: cute.struct.Align[cute.struct.MemRange[Int32, c.stages * WORDS], 128]
            k: cute.struct.Align[cute.struct.MemRange[self.dtype, cute.cosize(layout)], 1024]
            v: cute.struct.Align[cute.struct.MemRange[self.dtype, cute.cosize(layout)], 1024]
            q: cute.struct.Align[cute.struct.MemRange[self.dtype, cute.cosize(ring_layout)], 1024]
            do: cute.struct.Align[cute.struct.MemRange[self.dtype, cute.cosize(ring_layout)], 1024]

        self.shared = Shared
        self.bytes = cute.size_in_bytes(self.dtype, one)
        self.kernel(
            tma_k, g_k, tma_v, g_v, tma_dk, g_dk, tma_dv, g_dv, q, dout, terms, work, segments, indices, bits, part_dk,
            part_dv, lengths, tickets, before, exponent, factor, items, layout, ring_layout, mma_s, mma_dv, mma_dk,
            mma_dq,
        ).launch(
            grid=(blocks, 1, 1), block=(2 * WARPGROUP, 1, 1), stream=stream, min_blocks_per_mp=c.blocks,
            preferred_smem_carveout=100,
        )  # fmt: skip

    @cute.kernel
    def kernel(
        self,
        tma_k: cute.CopyAtom,
        g_k: cute.Tensor,
        tma_v: cute.CopyAtom,
        g_v: cute.Tensor,
        tma_dk: cute.CopyAtom,
        g_dk: cute.Tensor,
        tma_dv: cute.CopyAtom,
        g_dv: cute.Tensor,
        q: cute.Tensor,
        dout: cute.Tensor,
        terms: cute.Tensor,
        work: cute.Tensor,
        segments: cute.Tensor,
        indices: cute.Tensor,
        bits: cute.Tensor,
        part_dk: cute.Tensor,
        part_dv: cute.Tensor,
        lengths: cute.Tensor,
        tickets: cute.Tensor,
        before: Float32,
        exponent: Float32,
        factor: Float32,
        items: Int32,
        layout: cute.ComposedLayout,
        ring_layout: cute.ComposedLayout,
        mma_s: cute.TiledMma,
        mma_dv: cute.TiledMma,
        mma_dk: cute.TiledMma,
        mma_dq: cute.TiledMma,
    ) -> None:
        c = self.config
        warp_index = cute.arch.make_warp_uniform(cute.arch.warp_idx())
        if warp_index == 0:
            for atom in (tma_k, tma_v, tma_dk, tma_dv):
                cpasync.prefetch_descriptor(atom)
        storage = SmemAllocator().allocate(self.shared)
        rings = ("q_full", "q_empty", "do_full", "do_empty")
        bars = Env(
            **{name: getattr(storage, name).data_ptr() for name in rings},
            **{name: getattr(storage, name).ptr for name in ("k_full", "k_empty", "v_full", "v_empty")},
        )
        told = told_of(storage)
        if warp_index == 0:
            with cute.arch.elect_one():
                for bar in (bars.k_full, bars.k_empty, bars.v_full, bars.v_empty):
                    cute.arch.mbarrier_init(bar, 1)
                init_told(told)
                for i in cutlass.range_constexpr(c.stages):
                    cute.arch.mbarrier_init(bars.q_full + i, THREADS + 1)  # and the step's description
                    cute.arch.mbarrier_init(bars.do_full + i, THREADS)
                    cute.arch.mbarrier_init(bars.q_empty + i, 4)
                    cute.arch.mbarrier_init(bars.do_empty + i, 4)
        cute.arch.mbarrier_init_fence()
        s_k, s_v = [x.get_tensor(layout.outer, swizzle=layout.inner) for x in (storage.k, storage.v)]
        s_q, s_do = [x.get_tensor(ring_layout.outer, swizzle=ring_layout.inner) for x in (storage.q, storage.do)]
        s_lse, s_delta = [
            cute.make_tensor(x.data_ptr(), cute.make_layout((ROWS, c.stages))) for x in (storage.lse, storage.delta)
        ]
        s_bits = cute.make_tensor(storage.bits.data_ptr(), cute.make_layout((ROWS, 2, c.stages)))
        env = Env(
            bars=bars, told=told,
            item=cute.make_tensor(storage.item.data_ptr(), cute.make_layout(ITEM)),
            steps=cute.make_tensor(storage.steps.data_ptr(), cute.make_layout((STEP, c.stages))),
            s_lse=s_lse, s_delta=s_delta, s_k=s_k[None, None, 0], s_v=s_v[None, None, 0], s_q=s_q, s_do=s_do,
            s_ds=self.unused(storage.q), s_dk=s_k, s_dv=s_v, rings=(storage.q.data_ptr(), storage.do.data_ptr()),
            q=q, dout=dout, terms=terms, work=work, segments=segments, indices=indices, lo=Places(), hi=Places(),
            bits=bits, s_bits=s_bits, pool=self.pool(s_bits), part_dk=part_dk, part_dv=part_dv, lengths=lengths,
            tickets=tickets, before=before, exponent=exponent, factor=factor, items=items,
            keys=cute.size(g_k, mode=[0]), ratio=cute.size(q, mode=[1]) // cute.size(g_k, mode=[2]),
        )  # fmt: skip
        serving, computing = c.registers
        cute.arch.sync_threads()
        if warp_index < 4:
            cute.arch.setmaxregister_decrease(serving)
            role = role_of(warp_index, c.blocks)
            if role == 0:
                self.serve(env, tma_k, g_k, tma_v, g_v)
            elif role == 1:
                self.send(env, tma_dk, g_dk, tma_dv, g_dv, 0)
            else:
                self.gather_queries(env)
        else:
            cute.arch.setmaxregister_increase(computing)
            self.consume(env, mma_s, mma_dv, mma_dk, mma_dq)

    def pool(self, s_bits: Any) -> Any:
        """The words of the stages as tiles of a pool."""
        layout = cute.make_layout(((ROWS, self.config.stages), 2), stride=((1, 2 * ROWS), ROWS))
        return cute.make_tensor(s_bits.iterator, layout)

    def unused(self, memory: Any) -> Any:
        """In the place of dS in shared memory, which only products of dQ would read."""
        layout = smem_layout(self, STAGES, ROWS)
        return memory.get_tensor(layout.outer, swizzle=layout.inner)

    @cute.jit
    def serve(self, env, tma_k, g_k, tma_v, g_v):
        """Publish items: to the warps that gather as soon as they listen, with K and V when there is room."""
        c, bars, item = self.config, env.bars, env.item
        k_to, k_from = whole_tiles(tma_k, env.s_k, g_k, c.size)
        v_to, v_from = whole_tiles(tma_v, env.s_v, g_v, c.size)
        lane = cute.arch.lane_idx()
        w, _, _ = cute.arch.block_idx()
        word = self.draw(env, w)
        turn, running = Int32(0), Int32(1)
        while running != 0:
            self.tell(env.told, turn, word)
            cute.arch.mbarrier_wait(bars.k_empty, (turn & 1) ^ 1)
            if lane < ITEM:
                item[lane] = word
            cute.arch.sync_warp()
            running = item[VALID]
            if running != 0:
                batch, group, tile = item[BATCH], item[GROUP], item[TILE]
                with cute.arch.elect_one():
                    cute.arch.mbarrier_arrive_and_expect_tx(bars.k_full, self.bytes)
                cute.copy(tma_k, k_from[None, tile, group, batch], k_to, tma_bar_ptr=bars.k_full)
                cute.arch.mbarrier_wait(bars.v_empty, (turn & 1) ^ 1)
                with cute.arch.elect_one():
                    cute.arch.mbarrier_arrive_and_expect_tx(bars.v_full, self.bytes)
                cute.copy(tma_v, v_from[None, tile, group, batch], v_to, tma_bar_ptr=bars.v_full)
                word = self.draw(env, ticket(env))
            else:
                with cute.arch.elect_one():
                    cute.arch.mbarrier_arrive(bars.k_full)
            turn += 1

    @cute.jit
    def gather_queries(self, env):
        """Fill the rings of Q and dO, with a description of each step and one that says that an item is over."""
        c, bars, told, indices = self.config, env.bars, env.told, env.indices
        thread, _, _ = cute.arch.thread_idx()
        thread = thread % THREADS
        queries, gradients = self.source(env.q, env.rings[0], thread), self.source(env.dout, env.rings[1], thread)
        rows, upcoming = cute.make_rmem_tensor((COPIES + 1,), Int32), cute.make_rmem_tensor((COPIES + 1,), Int32)
        upcoming.fill(-1)
        turn, n, m = Int32(0), Int32(0), Int32(0)  # items, stages of Q, stages of dO so far
        cute.arch.mbarrier_wait(told.full, 0)
        running = told.item[VALID, 0]
        while running != 0:
            place = ring(turn, told.stages)[0]
            batch, group = told.item[BATCH, place], told.item[GROUP, place]
            segment, count = told.item[SEGMENTS, place], told.item[COUNT, place]
            self.heard(told, place)
            for s in cutlass.range(segment, segment + count, unroll=1):
                head = group * env.ratio + env.segments[s, HEAD]
                first, steps = env.segments[s, BITS], env.segments[s, BITSES]
                q_start, do_start = self.start(queries, batch, head), self.start(gradients, batch, head)
                lse = env.terms[0, batch, head, None].iterator.toint()
                delta = env.terms[1, batch, head, None].iterator.toint()
                if steps > 0:
                    self.listed(indices, queries.row, first * ROWS, upcoming)
                    upcoming[COPIES] = indices[first * ROWS + thread]
                for i in cutlass.range(steps, unroll=1):
                    for j in cutlass.range_constexpr(COPIES + 1):
                        rows[j] = upcoming[j]
                    at = (first + i) * ROWS
                    if i + 1 < steps:
                        self.listed(indices, queries.row, at + ROWS, upcoming)
                        upcoming[COPIES] = indices[at + ROWS + thread]
                    stage, phase = ring(n, c.stages)
                    cute.arch.mbarrier_wait(bars.q_empty + stage, phase ^ 1)
                    if thread == 0:
                        env.steps[KIND, stage], env.steps[ENTRY, stage] = Int32(MASKED), stage * ROWS
                        env.steps[WORD, stage] = Int32(0)
                        cute.arch.mbarrier_arrive(bars.q_full + stage)
                    self.fill(queries, q_start, rows, stage)
                    self.fill_words(env.bits, env.s_bits, first + i, stage, thread)
                    self.term(env.s_lse, lse, rows[COPIES], stage, thread)
                    cute.arch.cp_async_mbarrier_arrive_noinc(bars.q_full + stage)
                    n += 1
                    stage, phase = ring(m, c.stages)
                    cute.arch.mbarrier_wait(bars.do_empty + stage, phase ^ 1)
                    self.fill(gradients, do_start, rows, stage)
                    self.term(env.s_delta, delta, rows[COPIES], stage, thread)
                    cute.arch.cp_async_mbarrier_arrive_noinc(bars.do_full + stage)
                    m += 1
            stage, phase = ring(n, c.stages)
            cute.arch.mbarrier_wait(bars.q_empty + stage, phase ^ 1)
            if thread == 0:
                env.steps[KIND, stage] = Int32(END)
                cute.arch.mbarrier_arrive(bars.q_full + stage)
            cute.arch.mbarrier_arrive(bars.q_full + stage)
            n += 1
            turn += 1
            place, phase = ring(turn, told.stages)
            cute.arch.mbarrier_wait(told.full + place, phase)
            running = told.item[VALID, place]

    @cute.jit
    def term(self, shared, start, row, stage, thread):
        """Copy the term of this thread's row of a stage."""
        copy(shared.iterator.toint() + 4 * (stage * ROWS + thread), start, row, Int32(4), False, 4)
