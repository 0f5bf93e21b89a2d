"""The result of an item: O divided by its sums, lse, and where they go."""

from __future__ import annotations

from typing import Any

import cutlass
import cutlass.cute as cute
from cutlass import Float32, Int32, const_expr
from cutlass.cute.nvgpu import warp

from gossamer.cute import instructions
from gossamer.cute.common import ROWS, WARPGROUP, Barrier, Opaque, Thread, place_of
from gossamer.cute.row_items import RowItem
from gossamer.cute.tiles import partition, rows_of
from gossamer.kernels.hopper.device.forward.block import StoringBlock
from gossamer.kernels.hopper.device.forward.masks import share_bounds, two
from gossamer.kernels.hopper.device.forward.softmax import Softmax


@cute.jit
def factors(block, stage, row, reference, row_sum):
    """(what O is multiplied by, lse) of the rows of an item, of their references and sums. `row`: a thread's first."""
    a, c, item = block.arguments, block.config, block.items.item
    sink = two(Float32)
    sink.fill(-Float32.inf)
    if a.has_sinks != 0 and item[RowItem.SLOT, stage] < 0:
        if const_expr(c.heads == 1):
            sink.fill(a.sinks[item[RowItem.HEAD, stage]] * instructions.LOG2E)
        else:
            for r in cutlass.range_constexpr(instructions.ROWS):
                head, _ = place_of(c, item[RowItem.HEAD, stage], 0, row + 8 * r)
                sink[r] = a.sinks[head] * instructions.LOG2E
    factor, lse = two(Float32), two(Float32)
    instructions.finish(reference, row_sum, factor, lse, sink)
    return factor, lse


class Epilogue(Opaque):
    """Finishes the item before: `softmax` keeps its references and sums while the next item begins."""

    def __init__(self, block: StoringBlock, thread: Thread, softmax: Softmax, mma: Any) -> None:
        """`mma`: P V."""
        self.block, self.arguments, self.thread, self.softmax, self.mma = block, block.arguments, thread, softmax, mma
        self.item, self.groups = block.items.item, block.config.block_q // ROWS
        self.rows = self.count()

    def count(self) -> Any:
        """How many rows a head has."""
        return rows_of(self.arguments.q)

    def place(self, stage: Any, r: int) -> Any:
        """(head, query) of a row of this thread."""
        head, tile = self.item[RowItem.HEAD, stage], self.item[RowItem.TILE, stage]
        return place_of(self.block.config, head, tile, self.thread.row + 8 * r)

    @cute.jit
    def finish(self, stage, q_read: cutlass.Constexpr):
        """The result of an item: normalised, for the store warp, or a part of a split row.

        `q_read`: a barrier since the item's last Q K^T has shown already that every warp has read its Q.
        """
        factor, lse = self.factors(stage)
        if self.item[RowItem.SLOT, stage] < 0:
            self.send(stage, self.normalise(factor), lse, q_read)
        else:
            self.write_part(stage, factor, lse)
        self.sent()

    @cute.jit
    def sent(self):
        """Tell the store warp that the result is in shared memory, or needs no storing."""
        cute.arch.barrier_arrive(barrier_id=Barrier.OUTPUT + self.thread.warpgroup, number_of_threads=WARPGROUP + 32)

    def factors(self, stage: Any) -> Any:
        """(what O is multiplied by, lse) of the rows of an item."""
        return factors(self.block, stage, self.thread.row, self.softmax.old_reference, self.softmax.old_sum)

    @cute.jit
    def normalise(self, factor):
        """O in 16 bits. O itself stays: to write it now would make the assembler wait for products in flight."""
        packed = cute.make_rmem_tensor_like(self.softmax.o, self.block.s_o.element_type)
        instructions.convert_rows(self.softmax.o, packed, factor)
        return packed

    @cute.jit
    def send(self, stage, packed, lse, q_read: cutlass.Constexpr):
        """An item's result into shared memory for the store warp, and its lse."""
        thread, batch = self.thread, self.item[RowItem.BATCH, stage]
        if const_expr(not q_read):
            cute.arch.barrier(barrier_id=Barrier.Q_READ + thread.warpgroup, number_of_threads=WARPGROUP)
        atom = cute.make_copy_atom(warp.StMatrix8x8x16bOp(transpose=False, num_matrices=4), self.block.s_o.element_type)
        mine = cute.make_tiled_copy_C(atom, self.mma).get_slice(thread.thread)
        to = mine.partition_D(self.block.s_o)
        cute.copy(atom, mine.retile(packed), to[None, None, None, stage * self.groups + thread.warpgroup])
        cute.arch.fence_view_async_shared()
        if thread.lane % 4 == 0:
            for r in cutlass.range_constexpr(instructions.ROWS):
                of_head, query = self.place(stage, r)
                if query < self.rows:
                    self.arguments.lse[batch, of_head, query] = lse[r]

    @cute.jit
    def write_part(self, stage, factor, lse):
        """O and lse of a part of a split row, as float32."""
        tile, slot = self.item[RowItem.TILE, stage], self.item[RowItem.SLOT, stage]
        o, part = self.softmax.o, self.arguments.part_out
        for r in cutlass.range_constexpr(instructions.ROWS):
            row = self.thread.row + 8 * r
            _, query = place_of(self.block.config, 0, tile, row)
            if query < self.rows:
                for i in instructions.of_row(o, r):
                    part[slot, row, i // 4 * 8 + self.thread.quad + i % 2] = o[i] * factor[r]
                if self.thread.lane % 4 == 0:
                    self.arguments.part_lse[slot, row] = lse[r]


@cute.jit
def store(block, me):
    """A warp that stores what warpgroup `me` finishes, and gives back the place of Q, which held it."""
    items, item, out = block.items, block.items.item, block.arguments.out
    groups, overlap = block.config.block_q // ROWS, block.config.q_stages > 1
    from_, to = partition(out, block.s_o, ROWS, cute.size(block.s_o, mode=[1]))
    turn = Int32(0)
    running = begin(block, me, turn)
    while running != 0:
        stage = items.place(turn)[0]
        batch, head, tile = item[RowItem.BATCH, stage], item[RowItem.HEAD, stage], item[RowItem.TILE, stage]
        slot = item[RowItem.SLOT, stage]
        turn += 1
        if const_expr(overlap):
            running = begin(block, me, turn)
        cute.arch.barrier(barrier_id=Barrier.OUTPUT + me, number_of_threads=WARPGROUP + 32)
        if slot < 0:
            tile_of_q = from_[None, stage * groups + me]
            cute.copy(out.atom, tile_of_q, to[None, tile * groups + me, head, batch])
            cute.arch.cp_async_bulk_commit_group()
            cute.arch.cp_async_bulk_wait_group(0, read=True)
        cute.arch.sync_warp()
        with cute.arch.elect_one():
            cute.arch.mbarrier_arrive(items.empty + stage)
        if const_expr(not overlap):
            running = begin(block, me, turn)


@cute.jit
def store_all(block):
    """A warp that stores what all warpgroups finish, of items that are not split, beside the next one's Q."""
    items, item, out = block.items, block.items.item, block.arguments.out
    groups = block.config.block_q // ROWS
    from_, to = partition(out, block.s_o, ROWS, cute.size(block.s_o, mode=[1]))
    turn = Int32(0)
    stage = items.wait_full_at(turn)
    running = item[RowItem.VALID, stage]
    while running != 0:
        stage = items.place(turn)[0]
        batch, head, tile = item[RowItem.BATCH, stage], item[RowItem.HEAD, stage], item[RowItem.TILE, stage]
        for g in cutlass.range_constexpr(groups):
            cute.arch.barrier(barrier_id=Barrier.OUTPUT + g, number_of_threads=WARPGROUP + 32)
            cute.copy(out.atom, from_[None, stage * groups + g], to[None, tile * groups + g, head, batch])
            cute.arch.cp_async_bulk_commit_group()
        cute.arch.cp_async_bulk_wait_group(0, read=True)
        items.forget(stage)
        turn += 1
        stage = items.wait_full_at(turn)
        running = item[RowItem.VALID, stage]


@cute.jit
def begin(block, me, turn):
    """Wait for an item, and share what masks it; returns whether there is one."""
    stage = block.items.wait_full_at(turn)
    running = block.items.item[RowItem.VALID, stage]
    if const_expr(block.bounds is not None):  # noqa: SIM102
        if running != 0:
            share_bounds(block, me, stage)
    return running
