"""The two warpgroups of the kernel of wide heads: P and dV, dS and dK."""

from __future__ import annotations

from typing import Any

import cutlass
import cutlass.cute as cute
from cutlass import Float32, Int32, const_expr
from cutlass.cute.nvgpu import cpasync, warp, warpgroup

from gossamer.kernels.hopper.device import instructions
from gossamer.kernels.hopper.device.backward.consume import Consumer
from gossamer.kernels.hopper.device.backward.fields import BOUNDED, END, ENTRY, FIRST, KEPT, KIND, WORD, high, low
from gossamer.kernels.hopper.device.column_items import BATCH, GROUP, SLOT, TILE, VALID
from gossamer.kernels.hopper.device.common import FAR, ROWS, WARPGROUP, Env, ring

FULL_P = 1  # named barriers 1, 2: P of a step is in shared memory
EMPTY_P = 3  # named barriers 3, 4: it has been read
OUT = 5  # named barriers 5, 6: a warpgroup's result is in shared memory


class WideConsumer:
    """The same 64 keys of each item for both warpgroups, a result each."""

    config: Any
    dtype: Any
    pieces: int
    attended: Any

    turned = Consumer.turned
    product = Consumer.product
    release = Consumer.release
    row = Consumer.row

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
            words=cute.make_rmem_tensor((instructions.ROWS, c.step // 32), Int32),
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
                instructions.convert(acc_s, frag_p)
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
                instructions.convert(acc_dp, frag_ds)
                self.product(mma_dk, acc_dk, frag_ds, frag_q[None, None, None, stage], True)
                n += 1
                m += 1
                kind = self.kind(mine, n)
                warpgroup.wait_group(0)
                self.release(mine, bars.q_empty + stage)
            self.release(mine, bars.q_empty + ring(n, c.q_stages)[0])
            n += 1
            if item[SLOT] < 0:
                instructions.multiply(acc_dk, env.factor)
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
            entry, first, keys = env.steps[ENTRY, stage], env.steps[FIRST, stage], self.attended(env)
            for r in cutlass.range_constexpr(instructions.ROWS):
                key = env.item[TILE] * ROWS + env.my_row + 8 * r
                if kind == BOUNDED:
                    lo, hi = Int32(0), Int32(0)
                    if key < keys:
                        lo, hi = Int32(-FAR), Int32(FAR)
                        if entry >= 0:
                            lo, hi = env.lo[entry, key] - env.quad, env.hi[entry, key] - env.quad
                    for w in cutlass.range_constexpr(c.step // 32):
                        at = first + 32 * w
                        env.words[r, w] = instructions.below(hi - at) & ~instructions.below(lo - at)
                else:
                    # The producer counts rows of a pool of 64 keys an entry.
                    row = entry * self.pieces + env.item[TILE] % self.pieces * ROWS + env.my_row + 8 * r
                    for w in cutlass.range_constexpr(c.step // 32):
                        word = env.pool[row, env.steps[WORD, stage] + w]
                        env.words[r, w] = Int32(cutlass.Uint32(word) >> cutlass.Uint32(env.quad))
                    if const_expr(c.lengths):  # noqa: SIM102
                        if key >= keys:
                            for w in cutlass.range_constexpr(c.step // 32):
                                env.words[r, w] = Int32(0)
        return kind

    @cute.jit
    def probabilities(self, env, acc, lse):
        """Scores to probabilities in place; `slope` is the derivative of the soft cap."""
        if const_expr(self.config.score == "softcap"):
            instructions.soft_cap(acc, env.before)
            for i in cutlass.range_constexpr(cute.size(acc) // 2):
                slope = [1.0 - acc[2 * i + e] * acc[2 * i + e] for e in range(2)]
                env.slope[i] = instructions.pack(slope[0], slope[1], self.dtype)
        for i in cutlass.range_constexpr(cute.size(acc) // 2):
            for e in cutlass.range_constexpr(2):
                acc[2 * i + e] = cute.math.exp2(acc[2 * i + e] * env.exponent - lse[e, i // 2], fastmath=True)

    @cute.jit
    def clear(self, values, words):
        """Elements whose bit is not set become 0. `words` (2, step / 32) begin at this thread's first column."""
        for j in cutlass.range_constexpr(cute.size(values) // 4):
            for r in cutlass.range_constexpr(instructions.ROWS):
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
                packed[i] = instructions.pack(a, b, self.dtype)
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
        if slot < 0:
            packed = cute.make_rmem_tensor_like(acc, self.dtype)
            instructions.convert(acc, packed)
            atom = cute.make_copy_atom(warp.StMatrix8x8x16bOp(transpose=False, num_matrices=4), self.dtype)
            mine = cute.make_tiled_copy_C(atom, mma).get_slice(env.thread)
            # Every warp's last product with what lies there must have ended.
            cute.arch.barrier(barrier_id=OUT + me, number_of_threads=WARPGROUP)
            cute.copy(atom, mine.retile(packed), mine.partition_D(staged))
            cute.arch.fence_view_async_shared()
        else:
            first = tile % self.pieces * ROWS + env.my_row
            for r in cutlass.range_constexpr(instructions.ROWS):
                for j in cutlass.range_constexpr(columns // 8):
                    for e in cutlass.range_constexpr(2):
                        part[slot, first + 8 * r, 8 * j + env.quad + e] = acc[4 * j + 2 * r + e]
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
