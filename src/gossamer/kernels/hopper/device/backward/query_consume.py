"""The consumer warpgroups of the kernel of dQ by rows: products, probabilities, gradients of scores, and the result."""

from __future__ import annotations

from typing import Any

import cutlass
import cutlass.cute as cute
from cutlass import Float32, Int32, const_expr
from cutlass.cute.nvgpu import cpasync, warp, warpgroup

from gossamer.kernels.hopper.device import instructions
from gossamer.kernels.hopper.device.common import READ, ROWS, WARPGROUP, Env, ring, within_keys
from gossamer.kernels.hopper.device.configurations import QueryConfig
from gossamer.kernels.hopper.device.row_items import (
    BATCH,
    BITS,
    BITSES,
    FULL,
    FULLS,
    HEAD,
    INTERVAL,
    INTERVALS,
    LEAD,
    SLOT,
    TILE,
    VALID,
)


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
        for r in cutlass.range_constexpr(instructions.ROWS):
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
        for r in cutlass.range_constexpr(instructions.ROWS):
            i = const_expr(4 * j + 2 * r)
            a, b = p[i] * (dp[i] - delta[r]), p[i + 1] * (dp[i + 1] - delta[r])
            packed[2 * j + r] = instructions.pack(a, b, to.element_type)


class QueryConsumer:
    """64 query rows of each item for each warpgroup."""

    config: QueryConfig
    dtype: Any
    groups: int
    parts: int

    @cute.jit
    def consume(
        self, mma_s, mma_dq, tma_dq, g_dq, s_q, s_g, s_k, s_v, bars, item, terms, lists, lo, hi, pool, part_dq,
        lengths, before, exponent, factor,
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
        two = (instructions.ROWS,)
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
            bars=bars, pool=pool, before=before, exponent=exponent, factor=factor, item=item,
            s_dq=s_q[None, None, me], tma_dq=tma_dq, g_dq=g_dq, part_dq=part_dq,
        )  # fmt: skip
        if const_expr(c.lengths):
            env.length = cute.make_rmem_tensor((1,), Int32)
        turn = Int32(0)
        kv = Int32(0)
        cute.arch.mbarrier_wait(bars.q_full, 0)
        running = item[VALID]
        while running != 0:
            batch, head, first, row_list = item[BATCH], item[HEAD], item[TILE] * c.block_q + my_row, item[LEAD]
            intervals = item[INTERVALS]
            if const_expr(c.lengths):
                env.length[0] = within_keys(lengths[batch]) - env.quad
            for r in cutlass.range_constexpr(instructions.ROWS):
                row = first + 8 * r
                row = row if row < rows else rows - 1
                env.lse[r] = terms[0, batch, head, row]
                env.delta[r] = terms[1, batch, head, row]
                env.lo[r], env.hi[r] = Int32(0), Int32(0)
                if intervals > 0:
                    env.lo[r] = lo[row_list, row] - env.quad
                    env.hi[r] = hi[row_list, row] - env.quad
                if const_expr(c.lengths):
                    env.hi[r] = cutlass.min(env.hi[r], env.length[0])
            env.acc_dq.fill(0.0)
            fresh = kv  # the item's first step has no product in flight
            fulls = item[FULLS] * self.parts
            unmasked = fulls
            if const_expr(c.lengths):  # the last full tile may hold the end of the keys
                unmasked -= self.parts if fulls > 0 else 0
            for _ in cutlass.range(unmasked, unroll=1):
                self.step(env, "full", kv, fresh, Int32(0), Int32(0), Int32(0))
                kv += 1
            if const_expr(c.lengths):
                for i in cutlass.range(unmasked, fulls, unroll=1):
                    column = lists[0, item[FULL] + i // self.parts]
                    self.step(env, "edge", kv, fresh, Int32(0), i % self.parts, column)
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
                    column = Int32(0)
                    if const_expr(mode == "bits" and c.lengths):
                        column = lists[0, at + i // self.parts]
                    self.step(env, mode, kv, fresh, current, i % self.parts, column)
                    kv += 1
            warpgroup.wait_group(0)
            if kv != fresh:
                self.release(env, bars.k_empty + ring(kv - 1, c.k_stages)[0])
            self.finish(env, batch, head)
            turn += 1
            cute.arch.mbarrier_wait(bars.q_full, turn & 1)
            running = item[VALID]

    @cute.jit
    def step(self, env, mode: cutlass.Constexpr, kv, fresh, at, part, column):
        """S and dP of this step while dQ of the one before ends; then dS, and dQ begins.

        `at` is the tile column (mode "interval") or the pool entry of the step's tile, `part` the step in the tile.
        Where the end of the keys matters besides, `column` is the tile column: in a full tile that may hold it (mode
        "edge"), and in tiles of bits of a configuration with lengths.
        """
        c = self.config
        bars = env.bars
        k_stage, k_phase = ring(kv, c.k_stages)
        v_stage, v_phase = ring(kv, c.v_stages)
        shape = env.mma_s.get_slice(0).partition_shape_C((ROWS, c.step))
        acc_s, acc_dp = cute.make_rmem_tensor(shape, Float32), cute.make_rmem_tensor(shape, Float32)
        words = cute.make_rmem_tensor((instructions.ROWS, c.step // 32), Int32)
        self.mask(env, words, mode, kv, at, part, column)
        self.filled(bars.k_full + k_stage, k_phase)
        self.product(env.mma_s, acc_s, env.frag_q, env.frag_k[None, None, None, k_stage], False)
        self.filled(bars.v_full + v_stage, v_phase)
        warpgroup.wait_group(1)
        if kv != fresh:
            self.release(env, bars.k_empty + ring(kv - 1, c.k_stages)[0])
        self.product(env.mma_s, acc_dp, env.frag_g, env.frag_v[None, None, None, v_stage], False)
        warpgroup.wait_group(1)
        if const_expr(c.score == "softcap"):
            instructions.soft_cap(acc_s, env.before)
        probabilities(acc_s, env.lse, env.exponent, c.score == "softcap")
        if const_expr(mode != "full"):
            clear(acc_s, words)
        warpgroup.wait_group(0)
        self.release(env, bars.v_empty + v_stage)
        score_gradients(acc_s, acc_dp, env.delta, env.frag_ds)
        self.product(env.mma_dq, env.acc_dq, env.frag_ds, env.frag_kt[None, None, None, k_stage], True)

    @cute.jit
    def mask(self, env, words, mode: cutlass.Constexpr, kv, at, part, column):
        """The words of what step `kv` keeps, shifted to this thread's columns; arguments as for `step`."""
        c = self.config
        if const_expr(mode == "bits"):
            for r in cutlass.range_constexpr(instructions.ROWS):
                row = env.pool[at * c.block_q + env.my_row + 8 * r, None]
                for n in cutlass.range_constexpr(c.step // 32):
                    word = row[part * (c.step // 32) + n]
                    words[r, n] = Int32(cutlass.Uint32(word) >> cutlass.Uint32(env.quad))
        elif const_expr(mode == "edge"):
            words.fill(-1)
        if const_expr(mode == "edge" or (mode == "bits" and c.lengths)):
            first = column * c.block_kv + part * c.step
            for n in cutlass.range_constexpr(c.step // 32):
                within = instructions.below(env.length[0] - first - 32 * n)
                for r in cutlass.range_constexpr(instructions.ROWS):
                    words[r, n] = words[r, n] & within
        if const_expr(mode == "interval"):
            instructions.interval_words(words, env.lo, env.hi, at * c.block_kv + part * c.step)

    @cute.jit
    def finish(self, env, batch, head):
        """dQ of an item: times the scale, by TMA, or as a part of a split row."""
        c = self.config
        tile, slot = env.item[TILE], env.item[SLOT]
        cute.arch.barrier(barrier_id=READ + env.me, number_of_threads=WARPGROUP)
        if slot < 0:
            packed = cute.make_rmem_tensor_like(env.acc_dq, self.dtype)
            instructions.multiply(env.acc_dq, env.factor)
            instructions.convert(env.acc_dq, packed)
            atom = cute.make_copy_atom(warp.StMatrix8x8x16bOp(transpose=False, num_matrices=4), self.dtype)
            mine = cute.make_tiled_copy_C(atom, env.mma_dq).get_slice(env.thread)
            cute.copy(atom, mine.retile(packed), mine.partition_D(env.s_dq))
            cute.arch.fence_view_async_shared()
        else:
            for r in cutlass.range_constexpr(instructions.ROWS):
                for j in cutlass.range_constexpr(c.D // 8):
                    for e in cutlass.range_constexpr(2):
                        env.part_dq[slot, env.my_row + 8 * r, 8 * j + env.quad + e] = env.acc_dq[4 * j + 2 * r + e]
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
    def filled(self, bar, phase):
        """Wait until a stage is there."""
        cute.arch.mbarrier_wait(bar, phase)

    @cute.jit
    def release(self, env, bar):
        if env.lane == 0:
            cute.arch.mbarrier_arrive(bar)
