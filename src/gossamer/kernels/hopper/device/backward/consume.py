"""The consumer warpgroups of the column kernel: products, probabilities, gradients of scores, and an item's result."""

from __future__ import annotations

from typing import Any

import cutlass
import cutlass.cute as cute
from cutlass import Float32, Int32, const_expr
from cutlass.cute.nvgpu import warp, warpgroup

from gossamer.kernels.hopper.device import instructions
from gossamer.kernels.hopper.device.backward.fields import (
    BOUNDED,
    END,
    ENTRY,
    FIRST,
    FREE_OUT,
    FULL_OUT,
    KEPT,
    KIND,
    MASKED,
    NONE,
    READY,
    STAGES,
    STEP_BATCH,
    STEP_HEAD,
    WORD,
    add_four,
    high,
    low,
)
from gossamer.kernels.hopper.device.column_items import SCRATCH, SLOT, TILE, VALID
from gossamer.kernels.hopper.device.common import FAR, ROWS, WARPGROUP, Env, ring
from gossamer.kernels.hopper.device.configurations import BackwardConfig


class Consumer:
    """64 keys of each item for each warpgroup."""

    config: BackwardConfig
    dtype: Any
    groups: int
    halves: int = 1  # times 64 queries of a step
    dq_columns: int
    dq_target: Any
    attended: Any
    staging_floats: int

    @cute.jit
    def consume(self, shared, mma_s, mma_dv, mma_dk, mma_dq):
        """A consumer warpgroup: 64 keys of each item."""
        c = self.config
        step = const_expr(ROWS * self.halves)
        thread, _, _ = cute.arch.thread_idx()
        me = cute.arch.make_warp_uniform(thread // WARPGROUP) - 1
        thread = thread % WARPGROUP
        lane = cute.arch.lane_idx()
        whole_s, whole_dv, whole_dk, whole_dq = [m.get_slice(0) for m in (mma_s, mma_dv, mma_dk, mma_dq)]

        turned_ds = cute.flat_divide(self.turned(shared.s_ds, step, c.block_kv, STAGES), (ROWS, step))
        s_kt = cute.flat_divide(self.turned(shared.s_k, c.block_kv, c.D), (self.dq_columns, c.block_kv))
        stmatrix, turning = [
            cute.make_copy_atom(warp.StMatrix8x8x16bOp(transpose=t, num_matrices=4), self.dtype) for t in (False, True)
        ]
        env = Env(
            **shared.__dict__, me=me, lane=lane, thread=thread, quad=2 * (lane % 4),
            my_row=me * ROWS + thread // 32 * 16 + lane // 4,  # and eight below
            mma_s=mma_s, mma_dv=mma_dv, mma_dk=mma_dk, mma_dq=mma_dq, stmatrix=stmatrix,
            turning=cute.make_tiled_copy_C(turning, mma_s).get_slice(thread),
            frag_k=whole_s.make_fragment_A(whole_s.partition_A(cute.flat_divide(shared.s_k, (ROWS, c.D)))),
            frag_v=whole_s.make_fragment_A(whole_s.partition_A(cute.flat_divide(shared.s_v, (ROWS, c.E)))),
            frag_q=whole_s.make_fragment_B(whole_s.partition_B(shared.s_q)),
            frag_do=whole_s.make_fragment_B(whole_s.partition_B(shared.s_do)),
            frag_qt=whole_dk.make_fragment_B(whole_dk.partition_B(self.turned(shared.s_q, step, c.D, c.q_stages))),
            frag_dot=whole_dv.make_fragment_B(whole_dv.partition_B(self.turned(shared.s_do, step, c.E, c.do_stages))),
            frag_kt=whole_dq.make_fragment_B(whole_dq.partition_B(s_kt)),
            frag_dsq=whole_dq.make_fragment_A(
                whole_dq.partition_A(cute.flat_divide(shared.s_ds, (ROWS, c.block_kv)))
            ),
            frag_p=whole_dv.make_fragment_A(whole_dv.partition_shape_A((ROWS, step))),
            frag_ds=whole_dk.make_fragment_A(whole_dk.partition_shape_A((ROWS, step))),
            slope=cute.make_rmem_tensor((step // 4,), Int32),
            acc_s=cute.make_rmem_tensor(whole_s.partition_shape_C((ROWS, step)), Float32),
            acc_dp=cute.make_rmem_tensor(whole_s.partition_shape_C((ROWS, step)), Float32),
            acc_dv=cute.make_rmem_tensor(whole_dv.partition_shape_C((ROWS, c.E)), Float32),
            acc_dk=cute.make_rmem_tensor(whole_dk.partition_shape_C((ROWS, c.D)), Float32),
            goal=cute.make_rmem_tensor((3,), Int32),
            kinds=cute.make_rmem_tensor((self.halves,), Int32),
            mask=cute.make_rmem_tensor((instructions.ROWS, ROWS // 32, self.halves), Int32),
            ds_to=cute.make_tiled_copy_C(turning, mma_s).get_slice(thread).partition_D(turned_ds),
        )  # fmt: skip
        env.mask.fill(0)
        env.goal.fill(0)
        bars, item = env.bars, env.item
        turn, n, m = Int32(0), Int32(0), Int32(0)  # items, stages of Q, stages of dO so far
        cute.arch.mbarrier_wait(bars.k_full, 0)
        running = item[VALID]
        while running != 0:
            env.acc_dk.fill(0.0)
            env.acc_dv.fill(0.0)
            kind = self.look(env, n)
            cute.arch.mbarrier_wait(bars.v_full, turn & 1)
            begin = m
            while kind != END:
                if const_expr(c.single):
                    self.short_step(env, n, m, kind)
                else:
                    self.step(env, n, m, kind, m != begin)
                n += 1
                m += 1
                kind = self.look(env, n)
            if const_expr(not c.single):
                if m != begin:
                    self.last(env, n, m)
                self.release(env, bars.v_empty)
            self.finish(env)
            self.release(env, bars.q_empty + ring(n, c.q_stages)[0])
            n += 1
            turn += 1
            cute.arch.mbarrier_wait(bars.k_full, turn & 1)
            running = item[VALID]

    def turned(self, s: Any, rows: int, columns: int, *stages: int) -> Any:
        """The transpose of a tile in shared memory."""
        order = (1, 0, 2) if stages else (1, 0)
        return cute.composition(s, cute.make_ordered_layout((columns, rows, *stages), order=order))

    @cute.jit
    def look(self, env, n):
        """Wait for stage `n` of Q; returns the kind of its step and loads what masks it."""
        stage, phase = ring(n, self.config.q_stages)
        self.filled(env.bars.q_full + stage, phase)
        for half in cutlass.range_constexpr(self.halves):
            env.kinds[half] = self.look_at(env, stage * self.halves + half, half)
        return env.kinds[0]

    @cute.jit
    def look_at(self, env, place, half: cutlass.Constexpr):
        """The kind of 64 queries of a stage; loads what masks them."""
        c = self.config
        kind = cute.arch.make_warp_uniform(env.steps[KIND, place])
        entry = env.steps[ENTRY, place]
        keys = self.attended(env)
        if kind == BOUNDED:
            for r in cutlass.range_constexpr(instructions.ROWS):
                key = env.item[TILE] * c.block_kv + env.my_row + 8 * r
                env.mask[r, 0, half] = Int32(0)
                env.mask[r, 1, half] = Int32(0)
                if key < keys:
                    env.mask[r, 0, half] = Int32(-FAR)
                    env.mask[r, 1, half] = Int32(FAR)
                    if entry >= 0:
                        env.mask[r, 0, half] = env.lo[entry, key]
                        env.mask[r, 1, half] = env.hi[entry, key]
        elif kind == MASKED:
            word = env.steps[WORD, place] // (ROWS // 32)
            for r in cutlass.range_constexpr(instructions.ROWS):
                row = cute.local_tile(env.pool[entry + env.my_row + 8 * r, None], (ROWS // 32,), (word,))
                for w in cutlass.range_constexpr(ROWS // 32):
                    env.mask[r, w, half] = row[w]
                if const_expr(c.lengths):  # noqa: SIM102
                    if env.item[TILE] * c.block_kv + env.my_row + 8 * r >= keys:
                        for w in cutlass.range_constexpr(ROWS // 32):
                            env.mask[r, w, half] = Int32(0)
        if const_expr(half > 0):  # noqa: SIM102
            if kind == NONE:
                for r in cutlass.range_constexpr(instructions.ROWS):
                    for w in cutlass.range_constexpr(ROWS // 32):
                        env.mask[r, w, half] = Int32(0)
        return kind

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

    @cute.jit
    def scores(self, env, stage):
        """Issue S^T = K Q^T of a stage."""
        self.product(
            env.mma_s, env.acc_s, env.frag_k[None, None, None, env.me, 0], env.frag_q[None, None, None, stage], False
        )

    @cute.jit
    def row(self, s, stage, env):
        """This thread's columns of a row of floats in shared memory: element 2 * j + c is column 8 j + quad + c."""
        stages = const_expr(cute.size(s, mode=[1]))
        pairs = cute.make_tensor(s.iterator, cute.make_layout((2, 4, ROWS // 8, stages), stride=(1, 2, 8, ROWS)))
        mine = pairs[None, env.lane % 4, None, stage]
        found = cute.make_rmem_tensor((2, ROWS // 8), Float32)
        cute.autovec_copy(mine, found)
        return found

    @cute.jit
    def step(self, env, n, m, kind, started):
        """A step: stage `n` of Q and `m` of dO. dQ of a step is computed in the following one.

        While one product runs the next operands are made: P during dP, dS during dQ of the step before. An item's
        first step has no such dQ (`started` is false): the product is issued and what it gives is not used, since
        the compiler lets products run beside other work only where they are issued without a condition.
        """
        c, bars = self.config, env.bars
        stage, _ = ring(n, c.q_stages)
        do_stage, do_phase = ring(m, c.do_stages)
        self.scores(env, stage)
        lse = self.row(env.s_lse, stage * self.halves, env)
        warpgroup.wait_group(1)
        if started:
            self.release(env, bars.do_empty + ring(m - 1, c.do_stages)[0])
            self.release(env, bars.q_empty + ring(n - 1, c.q_stages)[0])
        self.filled(bars.do_full + do_stage, do_phase)
        self.product(
            env.mma_s, env.acc_dp, env.frag_v[None, None, None, env.me, 0], env.frag_do[None, None, None, do_stage],
            False,
        )  # fmt: skip
        warpgroup.wait_group(1)
        self.probabilities(env, stage, kind, lse)
        if const_expr(c.score != "softcap"):
            delta = self.row(env.s_delta, do_stage * self.halves, env)
        acc_dq = cute.make_rmem_tensor(env.mma_dq.get_slice(0).partition_shape_C((ROWS, self.dq_columns)), Float32)
        if const_expr(c.with_dq):
            if started:
                self.ready(env, m - 1)
            self.query_product(env, acc_dq, m - 1)
            warpgroup.wait_group(1)
        else:
            warpgroup.wait_group(0)
        if const_expr(c.score == "softcap"):  # its slopes leave no registers for delta before
            delta = self.row(env.s_delta, do_stage * self.halves, env)
        self.score_gradient(env, do_stage, delta, ring(m, STAGES)[0])
        self.product(env.mma_dv, env.acc_dv, env.frag_p, env.frag_dot[None, None, None, do_stage], True)
        if const_expr(c.with_dq):
            warpgroup.wait_group(1)
            # The other warpgroup may write dS of the step before the last again.
            number = READY + 2 * self.other(env) + (m & 1)
            cute.arch.barrier_arrive(barrier_id=number, number_of_threads=2 * WARPGROUP)
            if started:
                self.put(env, acc_dq)
            self.target(env, stage)
        self.product(env.mma_dk, env.acc_dk, env.frag_ds, env.frag_qt[None, None, None, stage], True)
        if const_expr(self.halves > 1):  # the next S takes the registers of P
            warpgroup.wait_group(1)

    @cute.jit
    def short_step(self, env, n, m, kind):
        """A step of a block of one warpgroup, without dQ. Nothing of it is left for the following one.

        Its registers hold no more; while it makes P or dS, the products of the other block run.
        """
        c, bars = self.config, env.bars
        stage, _ = ring(n, c.q_stages)
        do_stage, do_phase = ring(m, c.do_stages)
        self.scores(env, stage)
        lse = self.row(env.s_lse, stage, env)
        if const_expr(c.score == "softcap"):  # its slopes leave no registers for S beside dP
            warpgroup.wait_group(0)
            self.probabilities(env, stage, kind, lse)
        self.filled(bars.do_full + do_stage, do_phase)
        self.product(
            env.mma_s, env.acc_dp, env.frag_v[None, None, None, 0, 0], env.frag_do[None, None, None, do_stage], False
        )
        if const_expr(c.score != "softcap"):
            warpgroup.wait_group(1)
            self.probabilities(env, stage, kind, lse)
            delta = self.row(env.s_delta, do_stage, env)
        warpgroup.wait_group(0)
        if const_expr(c.score == "softcap"):
            delta = self.row(env.s_delta, do_stage, env)
        self.score_gradient(env, do_stage, delta, 0)
        self.product(env.mma_dv, env.acc_dv, env.frag_p, env.frag_dot[None, None, None, do_stage], True)
        self.product(env.mma_dk, env.acc_dk, env.frag_ds, env.frag_qt[None, None, None, stage], True)
        warpgroup.wait_group(1)
        self.release(env, bars.do_empty + do_stage)
        warpgroup.wait_group(0)
        self.release(env, bars.q_empty + stage)

    @cute.jit
    def last(self, env, n, m):
        """What the last step of an item has left: `n` and `m` are the stages after it."""
        c, bars = self.config, env.bars
        if const_expr(c.with_dq):
            acc_dq = cute.make_rmem_tensor(env.mma_dq.get_slice(0).partition_shape_C((ROWS, self.dq_columns)), Float32)
            self.ready(env, m - 1)
            self.query_product(env, acc_dq, m - 1)
            warpgroup.wait_group(0)
            self.put(env, acc_dq)
        else:
            warpgroup.wait_group(0)
        self.release(env, bars.do_empty + ring(m - 1, c.do_stages)[0])
        self.release(env, bars.q_empty + ring(n - 1, c.q_stages)[0])

    def other(self, env):
        return 1 - env.me

    @cute.jit
    def ready(self, env, m):
        """Wait until dS of step `m` of the other warpgroup is there.

        It may have gone on to the next step by then, and arrived for that one too.
        """
        cute.arch.barrier(barrier_id=READY + 2 * env.me + (m & 1), number_of_threads=2 * WARPGROUP)

    @cute.jit
    def query_product(self, env, acc_dq, m):
        """Issue this warpgroup's part of dQ = dS K of step `m`."""
        half, columns = (0, env.me) if const_expr(self.halves == 1) else (env.me, 0)
        self.product(
            env.mma_dq, acc_dq, env.frag_dsq[None, None, None, half, 0, ring(m, STAGES)[0]],
            env.frag_kt[None, None, None, columns, 0], False,
        )  # fmt: skip

    @cute.jit
    def target(self, env, stage):
        """Remember where dQ of the step in `stage` belongs."""
        if const_expr(self.config.with_dq and self.config.reduce == "direct"):
            place = stage * self.halves + (env.me if const_expr(self.halves > 1) else 0)
            env.goal[0], env.goal[1] = env.steps[FIRST, place], env.steps[STEP_HEAD, place]
            env.goal[2] = env.steps[STEP_BATCH, place]

    @cute.jit
    def probabilities(self, env, stage, kind, lse):
        """S of a step to P."""
        c = self.config
        acc = env.acc_s
        if const_expr(c.score == "softcap"):
            instructions.soft_cap(acc, env.before)
        packed = cute.recast_tensor(env.frag_p, Int32)
        for i in cutlass.range_constexpr(cute.size(acc) // 2):
            if const_expr(i > 0 and i % (ROWS // 4) == 0):
                lse = self.row(env.s_lse, stage * self.halves + i // (ROWS // 4), env)
            p = [acc[2 * i], acc[2 * i + 1]]
            slope = [1.0, 1.0]
            for e in cutlass.range_constexpr(2):
                x = p[e]
                p[e] = cute.math.exp2(x * env.exponent - lse[e, i // 2 % (ROWS // 8)], fastmath=True)
                slope[e] = 1.0 - x * x
            packed[i] = instructions.pack(p[0], p[1], self.dtype)
            if const_expr(c.score == "softcap"):
                env.slope[i] = instructions.pack(slope[0], slope[1], self.dtype)
        for half in cutlass.range_constexpr(self.halves):
            if env.kinds[half] != KEPT:
                words = cute.make_rmem_tensor((instructions.ROWS, ROWS // 32), Int32)
                if env.kinds[half] == BOUNDED:
                    lo, hi = cute.make_rmem_tensor((2,), Int32), cute.make_rmem_tensor((2,), Int32)
                    for r in cutlass.range_constexpr(instructions.ROWS):
                        lo[r], hi[r] = env.mask[r, 0, half], env.mask[r, 1, half]
                    instructions.interval_words(words, lo, hi, env.steps[FIRST, stage * self.halves + half] + env.quad)
                else:
                    for r in cutlass.range_constexpr(instructions.ROWS):
                        for w in cutlass.range_constexpr(ROWS // 32):
                            words[r, w] = Int32(cutlass.Uint32(env.mask[r, w, half]) >> cutlass.Uint32(env.quad))
                self.drop(packed, words, half * ROWS // 4)
        # A store that never happens (no probability is negative) keeps the exponentials before the caller's wait.
        signs = packed[0]
        for i in cutlass.range_constexpr(1, cute.size(packed)):
            signs = signs | packed[i]
        if signs < 0:
            env.item[SCRATCH] = Int32(0)

    @cute.jit
    def score_gradient(self, env, stage, delta, ds_stage):
        """dS = P (dP - delta), in 16 bits in registers and in shared memory."""
        c = self.config
        acc = env.acc_dp
        p = cute.recast_tensor(env.frag_p, Int32)
        for i in cutlass.range_constexpr(cute.size(p)):
            if const_expr(i > 0 and i % (ROWS // 4) == 0):
                delta = self.row(env.s_delta, stage * self.halves + i // (ROWS // 4), env)
            pair = [low(p[i], self.dtype), high(p[i], self.dtype)]
            if const_expr(c.score == "softcap"):
                pair[0] = pair[0] * low(env.slope[i], self.dtype)
                pair[1] = pair[1] * high(env.slope[i], self.dtype)
            for e in cutlass.range_constexpr(2):
                acc[2 * i + e] = pair[e] * (acc[2 * i + e] - delta[e, i // 2 % (ROWS // 8)])
        instructions.convert(acc, env.frag_ds)
        if const_expr(c.with_dq):
            packed = cute.make_tensor(env.frag_ds.iterator, acc.layout)
            cute.copy(env.turning, env.turning.retile(packed), env.ds_to[None, None, None, env.me, 0, ds_stage])
            cute.arch.fence_view_async_shared()

    @cute.jit
    def drop(self, packed, words, begin: cutlass.Constexpr):
        """Probabilities of 64 queries, from register `begin` on, whose bit is not set become zero."""
        for i in cutlass.range_constexpr(ROWS // 4):
            word = words[i % 2, i // 8]
            first = const_expr(1 << (8 * (i // 2 % 4)))
            low = Int32(65535) if (word & first) != 0 else Int32(0)
            high = Int32(-65536) if (word & (2 * first)) != 0 else Int32(0)
            packed[begin + i] = packed[begin + i] & (low | high)

    @cute.jit
    def put(self, env, acc):
        """A warpgroup's part of dQ to global memory, or to its staging memory for the sending warp."""
        vectors = const_expr(cute.size(acc) // 4)
        if const_expr(self.config.reduce == "bulk"):
            cute.arch.barrier(barrier_id=FREE_OUT + env.me, number_of_threads=WARPGROUP + 32)
            layout = cute.make_layout(
                (4, WARPGROUP, vectors, self.groups), stride=(1, 4, 4 * WARPGROUP, self.staging_floats)
            )
            to = cute.make_tensor(env.staging, layout)[None, env.thread, None, env.me]
            cute.autovec_copy(cute.make_tensor(acc.iterator, cute.make_layout((4, vectors))), to)
            cute.arch.fence_view_async_shared()
            cute.arch.barrier_arrive(barrier_id=FULL_OUT + env.me, number_of_threads=WARPGROUP + 32)
        else:
            self.add(env, acc, env.me)

    @cute.jit
    def add(self, env, acc, share):
        """A share of dQ from registers to its sums in global memory."""
        to = self.dq_target(env, env.goal[0], env.goal[1], env.goal[2], share)
        for j in cutlass.range_constexpr(cute.size(acc) // 4):
            at = to.iterator + 4 * (j * WARPGROUP + env.thread)
            add_four(at, *[acc[4 * j + i] for i in range(4)])

    @cute.jit
    def finish(self, env):
        """dK and dV of an item: in 16 bits to shared memory for the sending warp, or as float32 to the parts."""
        item = env.item
        slot = item[SLOT]
        cute.arch.sync_warp()
        if const_expr(not self.config.single):
            self.release(env, env.bars.k_empty)
        cute.arch.barrier(barrier_id=FREE_OUT + env.me, number_of_threads=WARPGROUP + 32)
        if slot < 0:
            instructions.multiply(env.acc_dk, env.factor)
            self.pack(env, env.acc_dk, env.mma_dk, env.s_dk)
            self.pack(env, env.acc_dv, env.mma_dv, env.s_dv)
            cute.arch.fence_view_async_shared()
        else:
            for acc, part in ((env.acc_dk, env.part_dk), (env.acc_dv, env.part_dv)):
                for j in cutlass.range_constexpr(cute.size(acc) // 4):
                    for r in cutlass.range_constexpr(instructions.ROWS):
                        for e in cutlass.range_constexpr(2):
                            part[slot, env.my_row + 8 * r, 8 * j + env.quad + e] = acc[4 * j + 2 * r + e]
        cute.arch.barrier_arrive(barrier_id=FULL_OUT + env.me, number_of_threads=WARPGROUP + 32)

    @cute.jit
    def pack(self, env, acc, mma, s):
        """An accumulator in 16 bits to this warpgroup's part of shared memory."""
        packed = cute.make_rmem_tensor_like(acc, self.dtype)
        instructions.convert(acc, packed)
        mine = cute.make_tiled_copy_C(env.stmatrix, mma).get_slice(env.thread)
        cute.copy(env.stmatrix, mine.retile(packed), mine.partition_D(s)[None, None, None, env.me])
