"""One consumer warpgroup a block, for tiles of 64 x 64: its steps with dQ, in two blocks of a multiprocessor."""

from __future__ import annotations

from typing import Any

import cutlass
import cutlass.cute as cute
from cutlass import Float32, const_expr
from cutlass.cute.nvgpu import warpgroup

from gossamer.kernels.hopper.backward.fields import FULL_DS, add_four
from gossamer.kernels.hopper.common import ROWS, WARPGROUP, ring
from gossamer.kernels.hopper.config import BackwardConfig


class Single:
    """dQ = dS K of the warpgroup's own 64 keys, 64 columns at a time, added from registers."""

    config: BackwardConfig
    dq_columns: int
    scores: Any
    probabilities: Any
    score_gradient: Any
    product: Any
    release: Any
    target: Any
    dq_target: Any

    @cute.jit
    def single_step(self, env, n, m, kind):
        """A step: stage `n` of Q and `m` of dO. Nothing of it is left for the following one.

        While the warpgroup of one block makes dS or adds dQ, the products of the other block run. The shares of dQ
        are a loop: two in a row would have registers of their own, and ptxas would run every product by itself.
        """
        c, bars = self.config, env.bars
        stage, _ = ring(n, c.q_stages)
        do_stage, do_phase = ring(m, c.do_stages)
        self.scores(env, stage)
        lse = self.row(env.s_lse, stage, env)
        if const_expr(c.score == "softcap"):  # its slopes leave no registers for S beside dP
            warpgroup.wait_group(0)
            self.probabilities(env, stage, kind, lse)
        cute.arch.mbarrier_wait(bars.do_full + do_stage, do_phase)
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
        self.score_gradient(env, delta, 0)
        self.product(env.mma_dv, env.acc_dv, env.frag_p, env.frag_dot[None, None, None, do_stage], True)
        if const_expr(c.with_dq):
            cute.arch.barrier(barrier_id=FULL_DS, number_of_threads=WARPGROUP)
            self.target(env, stage)
        self.product(env.mma_dk, env.acc_dk, env.frag_ds, env.frag_qt[None, None, None, stage], True)
        warpgroup.wait_group(1)
        self.release(env, bars.do_empty + do_stage)
        if const_expr(c.with_dq):
            for share in cutlass.range(c.D // self.dq_columns, unroll=1):
                acc = cute.make_rmem_tensor(env.mma_dq.get_slice(0).partition_shape_C((ROWS, self.dq_columns)), Float32)
                self.product(
                    env.mma_dq, acc, env.frag_dsq[None, None, None, 0], env.frag_kt[None, None, None, share, 0], False
                )
                warpgroup.wait_group(0)
                self.add(env, acc, share)
        warpgroup.wait_group(0)
        self.release(env, bars.q_empty + stage)

    @cute.jit
    def add(self, env, acc, share):
        """A share of dQ from registers to its sums in global memory."""
        to = self.dq_target(env, env.goal[0], env.goal[1], env.goal[2], share)
        for j in cutlass.range_constexpr(cute.size(acc) // 4):
            at = to.iterator + 4 * (j * WARPGROUP + env.thread)
            add_four(at, *[acc[4 * j + i] for i in range(4)])
