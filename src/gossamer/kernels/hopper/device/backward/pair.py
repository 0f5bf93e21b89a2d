"""The two computing warpgroups of the column kernel for tiles of 128 keys: dK, dV, and dQ where it is asked for."""

from __future__ import annotations

from typing import Any

import cutlass.cute as cute
from cutlass import Int32, const_expr
from cutlass.cute.nvgpu import warp, warpgroup

from gossamer.cute.column_items import ColumnItem
from gossamer.cute.common import NUMBERS, ROWS, WARPGROUP
from gossamer.cute.tiles import accumulator, issue, product_of, transposed
from gossamer.kernels.hopper.device.backward.block import TileColumnBlock
from gossamer.kernels.hopper.device.backward.common import STAGES, ColumnBarrier, Kind, row_terms
from gossamer.kernels.hopper.device.backward.consume import ColumnConsumer


class PairConsumer(ColumnConsumer):
    """A warpgroup with 64 keys of each item, beside another one. dQ = dS K needs the dS of both.

    It goes through shared memory, and each computes half of dQ, one step later: half of the columns, or one of two
    times 64 queries.
    """

    def __init__(self, block: TileColumnBlock, masks: Any) -> None:
        super().__init__(block, masks)
        config = block.config
        if not config.with_dq:
            return
        dtype, step, thread = NUMBERS[config.dtype], config.step, self.thread
        self.dq_columns = config.D // 2 * self.halves
        self.mma_dq = product_of(dtype, self.dq_columns, transposed=True)
        of_dq = self.mma_dq.get_slice(0)
        k_transposed = transposed(block.s_k[None, None, 0], config.block_kv, config.D)
        k_transposed = cute.flat_divide(k_transposed, (self.dq_columns, config.block_kv))
        ds = cute.flat_divide(block.s_ds, (ROWS, config.block_kv))
        self.frag_kt = of_dq.make_fragment_B(of_dq.partition_B(k_transposed))
        self.frag_dsq = of_dq.make_fragment_A(of_dq.partition_A(ds))
        ds_transposed = cute.flat_divide(transposed(block.s_ds, step, config.block_kv, STAGES), (ROWS, step))
        self.ds_atom = cute.make_copy_atom(warp.StMatrix8x8x16bOp(transpose=True, num_matrices=4), dtype)
        self.ds_copy = cute.make_tiled_copy_C(self.ds_atom, self.mma_s).get_slice(thread.thread)
        self.ds_to = self.ds_copy.partition_D(ds_transposed)

    @cute.jit
    def step(self, n, m, begin):
        """A step: stage `n` of Q and `m` of dO. dQ of a step is computed in the following one.

        While one product runs the next operands are made: P during dP, dS during dQ of the step before. An item's
        first step has no such dQ: the product is issued and what it gives is not used, since the compiler lets products
        run beside other work only where they are issued without a condition.
        """
        c, block = self.config, self.block
        started = m != begin
        stage, _ = block.q.place(n)
        do_stage, do_phase = block.dout.place(m)
        # S^T = K Q^T
        self.issue_scores(stage)
        lse = row_terms(self.thread, block.lse, stage * self.halves)
        warpgroup.wait_group(1)
        if started:
            block.dout.release_at(m - 1)
            block.q.release_at(n - 1)
        block.dout.wait_full(do_stage, do_phase)
        # dP^T = V dO^T
        self.issue_dp(do_stage)
        warpgroup.wait_group(1)
        self.probabilities(stage, lse)
        if const_expr(c.score != "softcap"):
            delta = row_terms(self.thread, block.delta, do_stage * self.halves)
        if const_expr(c.with_dq):
            acc_dq = accumulator(self.mma_dq, self.dq_columns)
            if started:
                self.wait_for_other(m - 1)
            self.issue_dq(acc_dq, m - 1)
            warpgroup.wait_group(1)
        else:
            warpgroup.wait_group(0)
        if const_expr(c.score == "softcap"):  # its slopes leave no registers for delta before
            delta = row_terms(self.thread, block.delta, do_stage * self.halves)
        self.score_gradient(do_stage, delta)
        if const_expr(c.with_dq):
            self.put_score_gradient(m)
        # dV += P^T dO
        issue(self.mma_dv, self.acc_dv, self.frag_p, self.frag_dot[None, None, None, do_stage], True)
        if const_expr(c.with_dq):
            warpgroup.wait_group(1)
            self.tell_other(m)
            if started:
                self.put_dq(acc_dq)
        # dK += dS^T Q
        issue(self.mma_dk, self.acc_dk, self.frag_ds, self.frag_qt[None, None, None, stage], True)
        self.beside_products(stage)
        if const_expr(self.halves > 1):  # the next S takes the registers of P
            warpgroup.wait_group(1)

    def goes_on(self, kind: Any) -> Any:
        """Whether the loop computes a step of this kind: a last one that is left out ends it."""
        return kind < Kind.END if self.config.edges else super().goes_on(kind)

    @cute.jit
    def start(self, n, m, kind):
        """Leave out an item's first step, of which this warpgroup's keys keep nothing."""
        if const_expr(self.config.edges):  # noqa: SIM102
            if kind == Kind.NOTHING:
                self.leave_out(m)
                n += 1
                m += 1
                kind = self.masks.load(self.block.q.wait_full_at(n))
        return n, m, kind

    @cute.jit
    def leave_out(self, m):
        """Of step `m`, of which this warpgroup's keys keep nothing, zeros for dQ.

        No product is issued here: the compiler would end those of all steps before the next begins.
        """
        stage, phase = self.block.dout.place(m)
        self.block.dout.wait_full(stage, phase)
        if const_expr(self.config.with_dq):
            cute.recast_tensor(self.frag_ds, Int32).fill(0)
            self.put_score_gradient(m)
            self.tell_other(m)

    @cute.jit
    def finish(self, n, m, begin, kind):
        """The end of an item, with what its last step has left, and a last one that is left out."""
        c, block = self.config, self.block
        if m != begin:
            # The order of each is that by which its loop is faster.
            if const_expr(c.with_dq and not c.edges):
                self.last_dq(m - 1)
            else:
                warpgroup.wait_group(0)
            block.dout.release_at(m - 1)
            block.q.release_at(n - 1)
            if const_expr(c.with_dq and c.edges):
                self.last_dq(m - 1)
        if const_expr(c.edges):  # noqa: SIM102
            if kind == Kind.NOTHING:
                self.leave_out(m)
                if const_expr(c.with_dq):
                    self.last_dq(m)
                block.dout.release_at(m)
                block.q.release_at(n)
                n += 1
                m += 1
                block.q.wait_full_at(n)
        block.v.release(0)
        slot = block.item[ColumnItem.SLOT]
        cute.arch.sync_warp()
        block.k.release(0)
        self.store(slot)
        return n, m

    @cute.jit
    def last_dq(self, m):
        """dQ of step `m`, beside nothing."""
        acc_dq = accumulator(self.mma_dq, self.dq_columns)
        self.wait_for_other(m)
        self.issue_dq(acc_dq, m)
        warpgroup.wait_group(0)
        self.put_dq(acc_dq)

    def tell_other(self, m: Any) -> None:
        """The other warpgroup may read dS of step `m`, and write that of the step before the last again."""
        number = ColumnBarrier.SCORE_GRADIENT + 2 * (1 - self.thread.warpgroup) + (m & 1)
        cute.arch.barrier_arrive(barrier_id=number, number_of_threads=2 * WARPGROUP)

    @cute.jit
    def wait_for_other(self, m):
        """Wait until dS of step `m` of the other warpgroup is there.

        It may have gone on to the next step by then, and arrived for that one too.
        """
        number = ColumnBarrier.SCORE_GRADIENT + 2 * self.thread.warpgroup + (m & 1)
        cute.arch.barrier(barrier_id=number, number_of_threads=2 * WARPGROUP)

    @cute.jit
    def issue_dq(self, acc_dq, m):
        """Issue this warpgroup's part of dQ = dS K of step `m`."""
        group = self.thread.warpgroup
        half, columns = (0, group) if const_expr(self.halves == 1) else (group, 0)
        ds = self.frag_dsq[None, None, None, half, 0, m & (STAGES - 1)]
        issue(self.mma_dq, acc_dq, ds, self.frag_kt[None, None, None, columns, 0], False)

    @cute.jit
    def put_score_gradient(self, m):
        """dS of step `m` to shared memory, for dQ."""
        packed = cute.make_tensor(self.frag_ds.iterator, self.acc_dp.layout)
        to = self.ds_to[None, None, None, self.thread.warpgroup, 0, m & (STAGES - 1)]
        cute.copy(self.ds_copy, self.ds_copy.retile(packed), to)
        cute.arch.fence_view_async_shared()

    @cute.jit
    def put_dq(self, acc):
        """A warpgroup's part of dQ to its staging memory, for the sending warp."""
        thread, threads = self.thread, WARPGROUP + 32
        cute.arch.barrier(barrier_id=ColumnBarrier.STAGING_FREE + thread.warpgroup, number_of_threads=threads)
        from_ = cute.make_tensor(acc.iterator, cute.make_layout((4, const_expr(cute.size(acc) // 4))))
        cute.autovec_copy(from_, self.block.staging[None, thread.thread, None, thread.warpgroup])
        cute.arch.fence_view_async_shared()
        cute.arch.barrier_arrive(barrier_id=ColumnBarrier.STAGING_FULL + thread.warpgroup, number_of_threads=threads)
