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
from cutlass.cute.nvgpu import cpasync, warp, warpgroup
from cutlass.memory import SmemAllocator

from gossamer.kernels.hopper import device
from gossamer.kernels.hopper.backward.consume import Consumer
from gossamer.kernels.hopper.backward.fields import (
    BATCH,
    BOUNDED,
    COPY,
    COUNT,
    END,
    ENTRY,
    FIRST,
    GROUP,
    ITEM,
    KEPT,
    KIND,
    SLOT,
    STEP,
    TILE,
    VALID,
    WORD,
    high,
    low,
)
from gossamer.kernels.hopper.backward.kernel import BARRIERS, Backward
from gossamer.kernels.hopper.backward.produce import Producer
from gossamer.kernels.hopper.common import FAR, NUMBERS, ROWS, WARPGROUP, Env, ring
from gossamer.kernels.hopper.config import WideConfig

GROUPS = 2
FULL_P = 1  # named barriers 1, 2: P of a step is in shared memory
EMPTY_P = 3  # named barriers 3, 4: it has been read
OUT = 5  # named barriers 5, 6: a warpgroup's result is in shared memory


class Wide(Producer):
    """The kernel of one configuration."""

    config: Any
    smem_layout: Any = Backward.smem_layout
    turned = Consumer.turned
    product = Consumer.product
    release = Consumer.release
    row = Consumer.row

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
        part_dk: cute.Tensor,  # (copies * slots, tile_kv, D) float32
        part_dv: cute.Tensor,  # (copies * slots, tile_kv, E) float32
        tickets: cute.Tensor,  # (1,) int32: items taken; zero before and after
        before: Float32,  # factor of a score before the soft cap
        exponent: Float32,  # factor of a score in exp2
        factor: Float32,  # factor of dK
        items: Int32,
        copies: Int32,
        heads: Int32,  # key heads that are copies of one list: G or 1
        slots: Int32,
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
            lo, hi, pool, part_dk, part_dv, tickets, before, exponent, factor, items * self.pieces, copies, heads,
            slots, k_layout, v_layout, q_layout, do_layout, mma_s, mma_dv, mma_dk,
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
        tickets: cute.Tensor,
        before: Float32,
        exponent: Float32,
        factor: Float32,
        items: Int32,
        copies: Int32,
        heads: Int32,
        slots: Int32,
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
            terms=terms, work=work, segments=segments, lists=lists, lo=lo, hi=hi, pool=pool, tickets=tickets,
            before=before, exponent=exponent, factor=factor, items=items, copies=copies, heads=heads, slots=slots,
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
    def load_item(self, env, w):
        """This lane's word of the description of item `w`; all zero (not valid) past the end. Its tile has 64 keys."""
        lane = cute.arch.lane_idx()
        word = Int32(0)
        if w < env.items * env.copies:
            copy = w // env.items
            at = w - copy * env.items
            if lane < ITEM:
                word = env.work[at // self.pieces, lane]
            if lane == BATCH:
                word += copy // env.heads
            if lane == GROUP:
                word += copy % env.heads
            if lane == COPY:
                word = copy
            if lane == TILE:
                word = word * self.pieces + at % self.pieces
        # A half past the last key has nothing to walk.
        tile = cute.arch.shuffle_sync(word, TILE)
        if lane == COUNT and tile * ROWS >= env.keys:
            word = Int32(0)
        return word

    @cute.jit
    def values(self, env, mma_s, mma_dv, tma_dv, g_dv, part_dv):
        """The first warpgroup: P and dV."""
        c, bars, item = self.config, env.bars, env.item
        thread, _, _ = cute.arch.thread_idx()
        thread, lane = thread % WARPGROUP, cute.arch.lane_idx()
        whole_s, whole_dv = mma_s.get_slice(0), mma_dv.get_slice(0)
        frag_k = whole_s.make_fragment_A(whole_s.partition_A(env.s_k))
        frag_q = whole_s.make_fragment_B(whole_s.partition_B(env.s_q))
        frag_do = whole_dv.make_fragment_B(whole_dv.partition_B(self.turned(env.s_do, c.step, c.E, c.do_stages)))
        frag_p = whole_dv.make_fragment_A(whole_dv.partition_shape_A((ROWS, c.step)))
        acc_s = cute.make_rmem_tensor(whole_s.partition_shape_C((ROWS, c.step)), Float32)
        acc_dv = cute.make_rmem_tensor(whole_dv.partition_shape_C((ROWS, c.E)), Float32)
        mine = Env(
            **env.__dict__, lane=lane, thread=thread, quad=2 * (lane % 4), my_row=thread // 32 * 16 + lane // 4,
            words=cute.make_rmem_tensor((device.ROWS, c.step // 32), Int32),
            slope=cute.make_rmem_tensor((c.step // 4,), Int32),
        )  # fmt: skip
        mine.words.fill(-1)
        turn, n, m = Int32(0), Int32(0), Int32(0)  # items, stages of Q, stages of dO so far
        cute.arch.mbarrier_wait(bars.k_full, 0)
        running = item[VALID]
        while running != 0:
            acc_dv.fill(0.0)
            kind = self.look(mine, n)
            while kind != END:
                stage, _ = ring(n, c.q_stages)
                self.product(mma_s, acc_s, frag_k, frag_q[None, None, None, stage], False)
                lse = self.row(env.s_lse, stage, mine)
                warpgroup.wait_group(0)
                self.probabilities(mine, acc_s, lse)
                self.release(mine, bars.q_empty + stage)
                if kind != KEPT:
                    self.clear(acc_s, mine.words)
                device.convert(acc_s, frag_p)
                self.hand(mine, acc_s, frag_p, m)
                do_stage, do_phase = ring(m, c.do_stages)
                cute.arch.mbarrier_wait(bars.do_full + do_stage, do_phase)
                self.product(mma_dv, acc_dv, frag_p, frag_do[None, None, None, do_stage], True)
                n += 1
                m += 1
                kind = self.look(mine, n)
                warpgroup.wait_group(0)
                self.release(mine, bars.do_empty + do_stage)
            self.release(mine, bars.q_empty + ring(n, c.q_stages)[0])
            n += 1
            self.finish(mine, acc_dv, mma_dv, env.s_dv, tma_dv, g_dv, part_dv, c.E, 0)
            turn += 1
            cute.arch.mbarrier_wait(bars.k_full, turn & 1)
            running = item[VALID]

    @cute.jit
    def keys(self, env, mma_s, mma_dk, tma_dk, g_dk, part_dk):
        """The second warpgroup: dS and dK."""
        c, bars, item = self.config, env.bars, env.item
        thread, _, _ = cute.arch.thread_idx()
        thread, lane = thread % WARPGROUP, cute.arch.lane_idx()
        whole_s, whole_dk = mma_s.get_slice(0), mma_dk.get_slice(0)
        frag_v = whole_s.make_fragment_A(whole_s.partition_A(env.s_v))
        frag_do = whole_s.make_fragment_B(whole_s.partition_B(env.s_do))
        frag_q = whole_dk.make_fragment_B(whole_dk.partition_B(self.turned(env.s_q, c.step, c.D, c.q_stages)))
        frag_ds = whole_dk.make_fragment_A(whole_dk.partition_shape_A((ROWS, c.step)))
        acc_dp = cute.make_rmem_tensor(whole_s.partition_shape_C((ROWS, c.step)), Float32)
        acc_dk = cute.make_rmem_tensor(whole_dk.partition_shape_C((ROWS, c.D)), Float32)
        p = cute.make_rmem_tensor((4, c.step // 16), Int32)
        mine = Env(**env.__dict__, lane=lane, thread=thread, quad=2 * (lane % 4), my_row=thread // 32 * 16 + lane // 4)
        for stage in cutlass.range_constexpr(2):
            cute.arch.barrier_arrive(barrier_id=EMPTY_P + stage, number_of_threads=2 * WARPGROUP)
        turn, n, m = Int32(0), Int32(0), Int32(0)  # items, stages of Q, stages of dO so far
        cute.arch.mbarrier_wait(bars.k_full, 0)
        running = item[VALID]
        while running != 0:
            acc_dk.fill(0.0)
            cute.arch.mbarrier_wait(bars.v_full, turn & 1)
            kind = self.kind(mine, n)
            while kind != END:
                stage, _ = ring(n, c.q_stages)
                do_stage, do_phase = ring(m, c.do_stages)
                cute.arch.mbarrier_wait(bars.do_full + do_stage, do_phase)
                self.product(mma_s, acc_dp, frag_v, frag_do[None, None, None, do_stage], False)
                delta = self.row(env.s_delta, do_stage, mine)
                cute.arch.barrier(barrier_id=FULL_P + (m & 1), number_of_threads=2 * WARPGROUP)
                cute.autovec_copy(env.s_p[None, thread, None, m & 1], p)
                cute.arch.barrier_arrive(barrier_id=EMPTY_P + (m & 1), number_of_threads=2 * WARPGROUP)
                warpgroup.wait_group(0)
                for i in cutlass.range_constexpr(c.step // 4):
                    acc_dp[2 * i] = low(p[i], self.dtype) * (acc_dp[2 * i] - delta[0, i // 2])
                    acc_dp[2 * i + 1] = high(p[i], self.dtype) * (acc_dp[2 * i + 1] - delta[1, i // 2])
                self.release(mine, bars.do_empty + do_stage)
                device.convert(acc_dp, frag_ds)
                self.product(mma_dk, acc_dk, frag_ds, frag_q[None, None, None, stage], True)
                n += 1
                m += 1
                kind = self.kind(mine, n)
                warpgroup.wait_group(0)
                self.release(mine, bars.q_empty + stage)
            self.release(mine, bars.q_empty + ring(n, c.q_stages)[0])
            n += 1
            if item[SLOT] < 0:
                device.multiply(acc_dk, env.factor)
            self.finish(mine, acc_dk, mma_dk, env.s_dk, tma_dk, g_dk, part_dk, c.D, 1)
            turn += 1
            cute.arch.mbarrier_wait(bars.k_full, turn & 1)
            running = item[VALID]

    @cute.jit
    def kind(self, env, n):
        """Wait for stage `n` of Q; returns the kind of its step."""
        stage, phase = ring(n, self.config.q_stages)
        cute.arch.mbarrier_wait(env.bars.q_full + stage, phase)
        return cute.arch.make_warp_uniform(env.steps[KIND, stage])

    @cute.jit
    def look(self, env, n):
        """As `kind`; makes the words that mask the step."""
        c = self.config
        kind = self.kind(env, n)
        if kind != KEPT and kind != END:
            stage, _ = ring(n, c.q_stages)
            entry, first = env.steps[ENTRY, stage], env.steps[FIRST, stage]
            for r in cutlass.range_constexpr(device.ROWS):
                key = env.item[TILE] * ROWS + env.my_row + 8 * r
                if kind == BOUNDED:
                    lo, hi = Int32(0), Int32(0)
                    if key < env.keys:
                        lo, hi = Int32(-FAR), Int32(FAR)
                        if entry >= 0:
                            lo, hi = env.lo[entry, key] - env.quad, env.hi[entry, key] - env.quad
                    for w in cutlass.range_constexpr(c.step // 32):
                        at = first + 32 * w
                        env.words[r, w] = device.below(hi - at) & ~device.below(lo - at)
                else:
                    # The producer counts rows of a pool of 64 keys an entry.
                    row = entry * self.pieces + env.item[TILE] % self.pieces * ROWS + env.my_row + 8 * r
                    for w in cutlass.range_constexpr(c.step // 32):
                        word = env.pool[row, env.steps[WORD, stage] + w]
                        env.words[r, w] = Int32(cutlass.Uint32(word) >> cutlass.Uint32(env.quad))
        return kind

    @cute.jit
    def probabilities(self, env, acc, lse):
        """Scores to probabilities in place; `slope` is the derivative of the soft cap."""
        if const_expr(self.config.score == "softcap"):
            device.soft_cap(acc, env.before)
            for i in cutlass.range_constexpr(cute.size(acc) // 2):
                slope = [1.0 - acc[2 * i + e] * acc[2 * i + e] for e in range(2)]
                env.slope[i] = device.pack(slope[0], slope[1], self.dtype)
        for i in cutlass.range_constexpr(cute.size(acc) // 2):
            for e in cutlass.range_constexpr(2):
                acc[2 * i + e] = cute.math.exp2(acc[2 * i + e] * env.exponent - lse[e, i // 2], fastmath=True)

    @cute.jit
    def clear(self, values, words):
        """Elements whose bit is not set become 0. `words` (2, step / 32) begin at this thread's first column."""
        for j in cutlass.range_constexpr(cute.size(values) // 4):
            for r in cutlass.range_constexpr(device.ROWS):
                word = words[r, j // 4]
                for e in cutlass.range_constexpr(2):
                    bit, i = const_expr(1 << (8 * (j % 4) + e)), const_expr(4 * j + 2 * r + e)
                    values[i] = values[i] if (word & bit) != 0 else Float32(0.0)

    @cute.jit
    def hand(self, env, acc, frag_p, m):
        """Leave P, times the derivative of the soft cap, for the second warpgroup."""
        c = self.config
        packed = cute.make_rmem_tensor((4, c.step // 16), Int32)
        p = cute.recast_tensor(frag_p, Int32)
        for i in cutlass.range_constexpr(cute.size(packed)):
            if const_expr(c.score == "softcap"):
                slope = env.slope[i]
                a, b = acc[2 * i] * low(slope, self.dtype), acc[2 * i + 1] * high(slope, self.dtype)
                packed[i] = device.pack(a, b, self.dtype)
            else:
                packed[i] = p[i]
        cute.arch.barrier(barrier_id=EMPTY_P + (m & 1), number_of_threads=2 * WARPGROUP)
        cute.autovec_copy(packed, env.s_p[None, env.thread, None, m & 1])
        cute.arch.barrier_arrive(barrier_id=FULL_P + (m & 1), number_of_threads=2 * WARPGROUP)

    @cute.jit
    def finish(self, env, acc, mma, staged, tma, g, part, columns: cutlass.Constexpr, me: cutlass.Constexpr):
        """A warpgroup's result of an item: in 16 bits by TMA, or as a part of a split column."""
        item, bars = env.item, env.bars
        batch, group, tile, slot = item[BATCH], item[GROUP], item[TILE], item[SLOT]
        place = item[COPY] * env.slots + slot
        if slot < 0:
            packed = cute.make_rmem_tensor_like(acc, self.dtype)
            device.convert(acc, packed)
            atom = cute.make_copy_atom(warp.StMatrix8x8x16bOp(transpose=False, num_matrices=4), self.dtype)
            mine = cute.make_tiled_copy_C(atom, mma).get_slice(env.thread)
            # Every warp's last product with what lies there must have ended.
            cute.arch.barrier(barrier_id=OUT + me, number_of_threads=WARPGROUP)
            cute.copy(atom, mine.retile(packed), mine.partition_D(staged))
            cute.arch.fence_view_async_shared()
        else:
            first = tile % self.pieces * ROWS + env.my_row
            for r in cutlass.range_constexpr(device.ROWS):
                for j in cutlass.range_constexpr(columns // 8):
                    for e in cutlass.range_constexpr(2):
                        part[place, first + 8 * r, 8 * j + env.quad + e] = acc[4 * j + 2 * r + e]
        cute.arch.barrier(barrier_id=OUT + me, number_of_threads=WARPGROUP)
        if env.thread < 32:
            if slot < 0:
                tiles = cute.local_tile(g, (ROWS, columns), (None, 0, None, None))
                from_, to = cpasync.tma_partition(
                    tma, 0, cute.make_layout(1), cute.group_modes(staged, 0, 2), cute.group_modes(tiles, 0, 2)
                )
                cute.copy(tma, from_, to[None, tile, group, batch])
                cute.arch.cp_async_bulk_commit_group()
                cute.arch.cp_async_bulk_wait_group(0, read=True)
            cute.arch.sync_warp()
            with cute.arch.elect_one():
                cute.arch.mbarrier_arrive(bars.k_empty)
                if const_expr(me == 1):
                    cute.arch.mbarrier_arrive(bars.v_empty)
