"""A warpgroup of its own for dQ in the column kernel (`reduce="group"`)."""

from __future__ import annotations

from typing import Any

import cutlass
import cutlass.cute as cute
from cutlass import Float32, Int32
from cutlass.cute.nvgpu import warpgroup

from gossamer.kernels.hopper.backward.fields import END, STAGES, VALID, add_four
from gossamer.kernels.hopper.common import ROWS, WARPGROUP, Env, ring
from gossamer.kernels.hopper.config import BackwardConfig


class QueryGroup:
    """dQ = dS K of every step, from dS in shared memory; no other warpgroup waits for another then."""

    config: BackwardConfig
    groups: int
    dq_columns: int
    turned: Any
    product: Any
    release: Any
    follow: Any
    dq_target: Any
    scores: Any
    probabilities: Any
    score_gradient: Any

    @cute.jit
    def short_step(self, env, n, m, kind):
        """A step without dQ, which another warpgroup computes. Nothing is overlapped within this one."""
        c, bars = self.config, env.bars
        stage, _ = ring(n, c.q_stages)
        do_stage, do_phase = ring(m, c.do_stages)
        ds_stage, ds_phase = ring(m, STAGES)
        self.scores(env, stage)
        cute.arch.mbarrier_wait(bars.do_full + do_stage, do_phase)
        warpgroup.wait_group(0)
        self.probabilities(env, stage, kind)
        self.product(
            env.mma_s, env.acc_dp, env.frag_v[None, None, None, env.me, 0], env.frag_do[None, None, None, do_stage],
            False,
        )  # fmt: skip
        cute.arch.mbarrier_wait(bars.ds_empty + ds_stage, ds_phase ^ 1)
        warpgroup.wait_group(0)
        self.score_gradient(env, do_stage, ds_stage)
        cute.arch.sync_warp()
        self.release(env, bars.ds_full + ds_stage)
        self.product(env.mma_dv, env.acc_dv, env.frag_p, env.frag_dot[None, None, None, do_stage], True)
        self.product(env.mma_dk, env.acc_dk, env.frag_ds, env.frag_qt[None, None, None, stage], True)
        warpgroup.wait_group(1)
        self.release(env, bars.do_empty + do_stage)
        warpgroup.wait_group(0)
        self.release(env, bars.q_empty + stage)

    @cute.jit
    def consume_queries(self, shared, mma_dq):
        """The warpgroup of dQ: the halves of its columns, one after the other, added to global memory."""
        c, bars, item = self.config, shared.bars, shared.item
        thread, _, _ = cute.arch.thread_idx()
        thread = thread % WARPGROUP
        whole = mma_dq.get_slice(0)
        s_kt = cute.flat_divide(self.turned(shared.s_k, c.block_kv, c.D), (self.dq_columns, c.block_kv))
        s_dst = self.turned(shared.s_ds, c.block_kv, ROWS, STAGES)
        env = Env(
            **shared.__dict__, lane=cute.arch.lane_idx(),
            frag_kt=whole.make_fragment_B(whole.partition_B(s_kt)),
            frag_dst=whole.make_fragment_A(whole.partition_A(s_dst)),
        )  # fmt: skip
        turn, n, m = Int32(0), Int32(0), Int32(0)
        cute.arch.mbarrier_wait(bars.k_full, 0)
        running = item[VALID]
        while running != 0:
            kind, first, head, batch = self.follow(env, n)
            n += 1
            while kind != END:
                stage, phase = ring(m, STAGES)
                cute.arch.mbarrier_wait(bars.ds_full + stage, phase)
                for half in cutlass.range(self.groups, unroll=1):
                    acc = cute.make_rmem_tensor(whole.partition_shape_C((ROWS, self.dq_columns)), Float32)
                    self.product(
                        mma_dq, acc, env.frag_dst[None, None, None, stage], env.frag_kt[None, None, None, half, 0],
                        False,
                    )  # fmt: skip
                    warpgroup.wait_group(0)
                    if half == self.groups - 1:
                        self.release(env, bars.ds_empty + stage)
                    to = self.dq_target(env, first, head, batch, half)
                    for j in cutlass.range_constexpr(cute.size(acc) // 4):
                        at = to.iterator + 4 * (j * WARPGROUP + thread)
                        add_four(at, *[acc[4 * j + i] for i in range(4)])
                kind, first, head, batch = self.follow(env, n)
                n += 1
                m += 1
            cute.arch.sync_warp()
            self.release(env, bars.k_empty)
            turn += 1
            cute.arch.mbarrier_wait(bars.k_full, turn & 1)
            running = item[VALID]
