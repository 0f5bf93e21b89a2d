"""The warps of the column kernels that send what computing warpgroups leave in shared memory."""

from __future__ import annotations

from typing import Any

import cutlass
import cutlass.cute as cute
from cutlass import Int32, const_expr

from gossamer.cute.column_items import ColumnItem
from gossamer.cute.common import ROWS, WARPGROUP, Opaque
from gossamer.cute.tiles import partition
from gossamer.kernels.hopper.device.backward.block import ColumnBlock
from gossamer.kernels.hopper.device.backward.common import ColumnBarrier, Kind, Step, bulk_add


class Sender(Opaque):
    """A warp that sends what a computing warpgroup leaves in shared memory: dQ of each step, dK and dV of each item."""

    def __init__(self, block: ColumnBlock, group: Any) -> None:
        self.config, self.block, self.group = block.config, block, group
        self.dk_from, self.dk_to = partition(block.arguments.dk, block.s_dk, ROWS, self.config.D)
        self.dv_from, self.dv_to = partition(block.arguments.dv, block.s_dv, ROWS, self.config.E)

    @cute.jit
    def send(self, groups: cutlass.Constexpr, sends_dq: cutlass.Constexpr):
        """All items of the warpgroup. Of a block's only one, K and V make room for dK and dV."""
        a, block, item, group = self.block.arguments, self.block, self.block.item, self.group
        turn, n = Int32(0), Int32(0)
        block.k.wait_full(0, turn & 1)
        running = item[ColumnItem.VALID]
        while running != 0:
            batch, head, tile = item[ColumnItem.BATCH], item[ColumnItem.GROUP], item[ColumnItem.TILE]
            slot = item[ColumnItem.SLOT]
            cute.arch.sync_warp()
            if const_expr(groups > 1):
                with cute.arch.elect_one():
                    cute.arch.mbarrier_arrive(block.k.empty)
            if const_expr(sends_dq):
                n = self.send_dq(n)
            self.exchange()
            if slot < 0:
                cute.copy(a.dv.atom, self.dv_from[None, group], self.dv_to[None, tile * groups + group, head, batch])
                cute.copy(a.dk.atom, self.dk_from[None, group], self.dk_to[None, tile * groups + group, head, batch])
                cute.arch.cp_async_bulk_commit_group()
            if const_expr(groups == 1):
                cute.arch.cp_async_bulk_wait_group(0, read=True)
                cute.arch.sync_warp()
                with cute.arch.elect_one():
                    cute.arch.mbarrier_arrive(block.k.empty)
                    cute.arch.mbarrier_arrive(block.v.empty)
            turn += 1
            block.k.wait_full(0, turn & 1)
            running = item[ColumnItem.VALID]
        cute.arch.cp_async_bulk_wait_group(0, read=True)

    @cute.jit
    def send_dq(self, n):
        """Add dQ of an item's steps, which begin with stage `n` of Q, to its sums; returns the stage after its last."""
        block = self.block
        # An item's own batch element stays apart from its steps': a stage of kind END says nothing of it.
        kind, first, head, batch = self.follow(n)
        n += 1
        while kind != Kind.END:
            self.exchange()
            # Half of the columns of 64 queries, or all of them.
            shares = const_expr(2 if self.config.step == ROWS else 1)
            row = block.arguments.dq_sum[batch, head, first // ROWS, None]
            share = self.group if const_expr(shares > 1) else 0
            target = cute.local_tile(row, (ROWS * self.config.D // shares,), (share,))
            if const_expr(shares > 1) or kind != Kind.NOTHING:
                with cute.arch.elect_one():
                    staged = block.staging[None, None, None, self.group]
                    bulk_add(target.iterator, staged.iterator, 4 * cute.size(target))
            cute.arch.cp_async_bulk_commit_group()
            kind, first, head, batch = self.follow(n)
            n += 1
        return n

    @cute.jit
    def follow(self, n):
        """(kind, first query, head, batch) of those queries of step `n` whose dQ the warpgroup makes or shares."""
        steps, halves = self.block.steps, self.config.step // ROWS
        stage = self.block.q.wait_full_at(n)
        place = stage * halves + (self.group if const_expr(halves > 1) else 0)
        kind, first = steps[Step.KIND, place], steps[Step.QUERY, place]
        head, batch = steps[Step.HEAD, place], steps[Step.BATCH, place]
        cute.arch.sync_warp()
        with cute.arch.elect_one():
            cute.arch.mbarrier_arrive(self.block.q.empty + stage)
        return kind, first, head, batch

    @cute.jit
    def exchange(self):
        """Let the warpgroup write its staging memory, and wait until it has."""
        threads = WARPGROUP + 32
        cute.arch.cp_async_bulk_wait_group(0, read=True)
        cute.arch.barrier_arrive(barrier_id=ColumnBarrier.STAGING_FREE + self.group, number_of_threads=threads)
        cute.arch.barrier(barrier_id=ColumnBarrier.STAGING_FULL + self.group, number_of_threads=threads)
