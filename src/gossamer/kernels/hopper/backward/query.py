"""dQ by a walk over query tiles, without float32 sums in memory: for a deterministic backward.

Roles as in the forward kernel: one producer warp (items, Q and dO of a tile, rings of K and V), and for each 64 query
rows a warpgroup, which computes S = Q K^T, dP = dO V^T, dS = P (dP - delta) and dQ += dS K with dS from registers.
"""

from __future__ import annotations

from typing import Any

import cutlass
import cutlass.cute as cute
import cutlass.utils.hopper_helpers as hopper
from cutlass import Float32, Int32, const_expr
from cutlass.cute.nvgpu import cpasync, warp, warpgroup
from cutlass.memory import SmemAllocator
from cutlass.tensor_utils import LayoutEnum

from gossamer.kernels.hopper import device
from gossamer.kernels.hopper.common import (
    BATCH,
    BITS,
    BITSES,
    COPY,
    FULL,
    FULLS,
    HEAD,
    INTERVAL,
    INTERVALS,
    ITEM,
    LEAD,
    NUMBERS,
    READ,
    ROWS,
    SLOT,
    TILE,
    VALID,
    WARPGROUP,
    Env,
    ring,
)
from gossamer.kernels.hopper.config import QueryConfig
from gossamer.kernels.hopper.forward.produce import Producer


@cute.jit
def probabilities(scores: cute.Tensor, lse: cute.Tensor, exponent: Float32, capped: cutlass.Constexpr) -> None:
    """Scores to exp2(exponent * score - lse) in place, times the derivative of tanh where `capped`."""
    for j in cutlass.range_constexpr(cute.size(scores) // 4):
        for i in cutlass.range_constexpr(4 * j, 4 * j + 4):
            score = scores[i]
            p = cute.math.exp2(score * exponent - lse[i % 4 // 2], fastmath=True)
            if const_expr(capped):
                p = p * (1.0 - score * score)
            scores[i] = p


@cute.jit
def clear(values: cute.Tensor, words: cute.Tensor) -> None:
    """Elements whose bit is not set become 0. `words` (2, step / 32) begin at this thread's first column."""
    for j in cutlass.range_constexpr(cute.size(values) // 4):
        for r in cutlass.range_constexpr(device.ROWS):
            word = words[r, j // 4]
            for c in cutlass.range_constexpr(2):
                bit = const_expr(1 << (8 * (j % 4) + c))
                i = const_expr(4 * j + 2 * r + c)
                values[i] = values[i] if (word & bit) != 0 else Float32(0.0)


@cute.jit
def score_gradients(p: cute.Tensor, dp: cute.Tensor, delta: cute.Tensor, to: cute.Tensor) -> None:
    """dS = P (dP - delta) in 16 bits."""
    packed = cute.recast_tensor(to, Int32)
    for j in cutlass.range_constexpr(cute.size(packed) // 2):
        for r in cutlass.range_constexpr(device.ROWS):
            i = const_expr(4 * j + 2 * r)
            a, b = p[i] * (dp[i] - delta[r]), p[i + 1] * (dp[i + 1] - delta[r])
            packed[2 * j + r] = device.pack(a, b, to.element_type)


class QueryGradient:
    """The kernel of one configuration."""

    load_item = Producer.load_item
    ticket = Producer.ticket

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
        part_dq: cute.Tensor,  # (copies * slots, block_q, D) float32, without the scale
        tickets: cute.Tensor,  # (1,) int32: items taken; zero before and after
        before: Float32,  # factor of a score before the soft cap
        exponent: Float32,  # factor of a score in exp2
        factor: Float32,  # the scale
        items: Int32,
        copies: Int32,
        heads: Int32,  # heads that are copies of one list: H or 1
        slots: Int32,
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
            tickets, before, exponent, factor, items, copies, heads, slots, q_layout, g_layout, k_layout, v_layout,
            mma_s, mma_dq,
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
        tickets: cute.Tensor,
        before: Float32,
        exponent: Float32,
        factor: Float32,
        items: Int32,
        copies: Int32,
        heads: Int32,
        slots: Int32,
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
                    tickets, items, copies, heads,
                )  # fmt: skip
        else:
            cute.arch.setmaxregister_increase(self.consumer_registers)
            self.consume(
                mma_s, mma_dq, tma_dq, g_dq, s_q, s_g, s_k, s_v, bars, item, terms, lists, lo, hi, pool, part_dq,
                before, exponent, factor, slots,
            )  # fmt: skip

    @cute.jit
    def produce(
        self, tma_q, g_q, tma_g, g_g, tma_k, g_k, tma_v, g_v, s_q, s_g, s_k, s_v, bars, item, work, lists, tickets,
        items, copies, heads,
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
        env = Env(work=work, items=items, copies=copies, heads=heads, tickets=tickets)
        lane = cute.arch.lane_idx()
        w, _, _ = cute.arch.block_idx()
        reserved = self.ticket(env)
        word = self.load_item(env, w)
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
                word = self.load_item(env, reserved)
                reserved = self.ticket(env)
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
            else:
                with cute.arch.elect_one():
                    cute.arch.mbarrier_arrive(bars.q_full)

    @cute.jit
    def consume(
        self, mma_s, mma_dq, tma_dq, g_dq, s_q, s_g, s_k, s_v, bars, item, terms, lists, lo, hi, pool, part_dq, before,
        exponent, factor, slots,
    ):  # fmt: skip
        """A consumer warpgroup: 64 query rows of each item."""
        c = self.config
        thread, _, _ = cute.arch.thread_idx()
        me = cute.arch.make_warp_uniform(thread // WARPGROUP) - 1
        thread = thread % WARPGROUP
        lane = cute.arch.lane_idx()
        my_row = me * ROWS + thread // 32 * 16 + lane // 4  # and eight below
        rows = cute.size(g_dq, mode=[0])
        whole_s, whole_dq = mma_s.get_slice(0), mma_dq.get_slice(0)
        s_kt = cute.composition(s_k, cute.make_ordered_layout((c.D, c.step, c.k_stages), order=(1, 0, 2)))
        two = (device.ROWS,)
        env = Env(
            me=me, lane=lane, thread=thread, quad=2 * (lane % 4), my_row=my_row, rows=rows, mma_s=mma_s, mma_dq=mma_dq,
            frag_q=whole_s.make_fragment_A(whole_s.partition_A(s_q))[None, None, None, me],
            frag_g=whole_s.make_fragment_A(whole_s.partition_A(s_g))[None, None, None, me],
            frag_k=whole_s.make_fragment_B(whole_s.partition_B(s_k)),
            frag_v=whole_s.make_fragment_B(whole_s.partition_B(s_v)),
            frag_kt=whole_dq.make_fragment_B(whole_dq.partition_B(s_kt)),
            frag_ds=whole_dq.make_fragment_A(whole_dq.partition_shape_A((ROWS, c.step))),
            acc_dq=cute.make_rmem_tensor(whole_dq.partition_shape_C((ROWS, c.D)), Float32),
            lse=cute.make_rmem_tensor(two, Float32), delta=cute.make_rmem_tensor(two, Float32),
            lo=cute.make_rmem_tensor(two, Int32), hi=cute.make_rmem_tensor(two, Int32),
            bars=bars, pool=pool, before=before, exponent=exponent, factor=factor, item=item, slots=slots,
            s_dq=s_q[None, None, me], tma_dq=tma_dq, g_dq=g_dq, part_dq=part_dq,
        )  # fmt: skip
        turn = Int32(0)
        kv = Int32(0)
        cute.arch.mbarrier_wait(bars.q_full, 0)
        running = item[VALID]
        while running != 0:
            batch, head, first, row_list = item[BATCH], item[HEAD], item[TILE] * c.block_q + my_row, item[LEAD]
            intervals = item[INTERVALS]
            for r in cutlass.range_constexpr(device.ROWS):
                row = first + 8 * r
                row = row if row < rows else rows - 1
                env.lse[r] = terms[0, batch, head, row]
                env.delta[r] = terms[1, batch, head, row]
                env.lo[r], env.hi[r] = Int32(0), Int32(0)
                if intervals > 0:
                    env.lo[r] = lo[row_list, row] - env.quad
                    env.hi[r] = hi[row_list, row] - env.quad
            env.acc_dq.fill(0.0)
            fresh = kv  # the item's first step has no product in flight
            for _ in cutlass.range(item[FULLS] * self.parts, unroll=1):
                self.step(env, "full", kv, fresh, Int32(0), Int32(0))
                kv += 1
            for mode, row in (("interval", 0), ("bits", 1)):
                at = item[INTERVAL] if const_expr(mode == "interval") else item[BITS]
                tiles = intervals if const_expr(mode == "interval") else item[BITSES]
                upcoming = Int32(0)
                if tiles > 0:
                    upcoming = lists[row, at]
                for i in cutlass.range(tiles * self.parts, unroll=1):
                    current, following = upcoming, (i + 1) // self.parts
                    if following < tiles:
                        upcoming = lists[row, at + following]
                    self.step(env, mode, kv, fresh, current, i % self.parts)
                    kv += 1
            warpgroup.wait_group(0)
            if kv != fresh:
                self.release(env, bars.k_empty + ring(kv - 1, c.k_stages)[0])
            self.finish(env, batch, head)
            turn += 1
            cute.arch.mbarrier_wait(bars.q_full, turn & 1)
            running = item[VALID]

    @cute.jit
    def step(self, env, mode: cutlass.Constexpr, kv, fresh, at, part):
        """S and dP of this step while dQ of the one before ends; then dS, and dQ begins.

        `at` is the tile column (mode "interval") or the pool entry of the step's tile, `part` the step in the tile.
        """
        c = self.config
        bars = env.bars
        k_stage, k_phase = ring(kv, c.k_stages)
        v_stage, v_phase = ring(kv, c.v_stages)
        shape = env.mma_s.get_slice(0).partition_shape_C((ROWS, c.step))
        acc_s, acc_dp = cute.make_rmem_tensor(shape, Float32), cute.make_rmem_tensor(shape, Float32)
        words = cute.make_rmem_tensor((device.ROWS, c.step // 32), Int32)
        if const_expr(mode == "bits"):
            for r in cutlass.range_constexpr(device.ROWS):
                row = env.pool[at * c.block_q + env.my_row + 8 * r, None]
                for n in cutlass.range_constexpr(c.step // 32):
                    word = row[part * (c.step // 32) + n]
                    words[r, n] = Int32(cutlass.Uint32(word) >> cutlass.Uint32(env.quad))
        elif const_expr(mode == "interval"):
            device.interval_words(words, env.lo, env.hi, at * c.block_kv + part * c.step)
        cute.arch.mbarrier_wait(bars.k_full + k_stage, k_phase)
        self.product(env.mma_s, acc_s, env.frag_q, env.frag_k[None, None, None, k_stage], False)
        cute.arch.mbarrier_wait(bars.v_full + v_stage, v_phase)
        warpgroup.wait_group(1)
        if kv != fresh:
            self.release(env, bars.k_empty + ring(kv - 1, c.k_stages)[0])
        self.product(env.mma_s, acc_dp, env.frag_g, env.frag_v[None, None, None, v_stage], False)
        warpgroup.wait_group(1)
        if const_expr(c.score == "softcap"):
            device.soft_cap(acc_s, env.before)
        probabilities(acc_s, env.lse, env.exponent, c.score == "softcap")
        if const_expr(mode != "full"):
            clear(acc_s, words)
        warpgroup.wait_group(0)
        self.release(env, bars.v_empty + v_stage)
        score_gradients(acc_s, acc_dp, env.delta, env.frag_ds)
        self.product(env.mma_dq, env.acc_dq, env.frag_ds, env.frag_kt[None, None, None, k_stage], True)

    @cute.jit
    def finish(self, env, batch, head):
        """dQ of an item: times the scale, by TMA, or as a part of a split row."""
        c = self.config
        tile, slot = env.item[TILE], env.item[SLOT]
        place = env.item[COPY] * env.slots + slot
        cute.arch.barrier(barrier_id=READ + env.me, number_of_threads=WARPGROUP)
        if slot < 0:
            packed = cute.make_rmem_tensor_like(env.acc_dq, self.dtype)
            device.multiply(env.acc_dq, env.factor)
            device.convert(env.acc_dq, packed)
            atom = cute.make_copy_atom(warp.StMatrix8x8x16bOp(transpose=False, num_matrices=4), self.dtype)
            mine = cute.make_tiled_copy_C(atom, env.mma_dq).get_slice(env.thread)
            cute.copy(atom, mine.retile(packed), mine.partition_D(env.s_dq))
            cute.arch.fence_view_async_shared()
        else:
            for r in cutlass.range_constexpr(device.ROWS):
                for j in cutlass.range_constexpr(c.D // 8):
                    for e in cutlass.range_constexpr(2):
                        env.part_dq[place, env.my_row + 8 * r, 8 * j + env.quad + e] = env.acc_dq[4 * j + 2 * r + e]
        cute.arch.barrier(barrier_id=READ + env.me, number_of_threads=WARPGROUP)
        if env.thread < 32:
            if slot < 0:
                tiles = cute.local_tile(env.g_dq, (ROWS, c.D), (None, 0, None, None))
                from_, to = cpasync.tma_partition(
                    env.tma_dq, 0, cute.make_layout(1), cute.group_modes(env.s_dq, 0, 2), cute.group_modes(tiles, 0, 2)
                )
                cute.copy(env.tma_dq, from_, to[None, tile * self.groups + env.me, head, batch])
                cute.arch.cp_async_bulk_commit_group()
                cute.arch.cp_async_bulk_wait_group(0, read=True)
            cute.arch.sync_warp()
            with cute.arch.elect_one():
                cute.arch.mbarrier_arrive(env.bars.q_empty)

    @cute.jit
    def product(self, mma, acc, a, b, accumulate: cutlass.Constexpr):
        """Issue acc (+)= a b as one group of asynchronous products."""
        warpgroup.fence()
        atom = cute.make_mma_atom(mma.op)
        atom.set(warpgroup.Field.ACCUMULATE, accumulate)
        for i in cutlass.range_constexpr(cute.size(a, mode=[2])):
            cute.gemm(atom, acc, a[None, None, i], b[None, None, i], acc)
            atom.set(warpgroup.Field.ACCUMULATE, True)
        warpgroup.commit_group()

    @cute.jit
    def release(self, env, bar):
        if env.lane == 0:
            cute.arch.mbarrier_arrive(bar)
