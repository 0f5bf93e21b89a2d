"""The result of an item: O divided by its sums, lse, and where they go."""

from __future__ import annotations

from dataclasses import dataclass
from typing import Any, NamedTuple

import cutlass
import cutlass.cute as cute
from cutlass import Float32, Int32, const_expr
from cutlass.cute.nvgpu import warp

from gossamer.kernels.hopper.device import instructions
from gossamer.kernels.hopper.device.common import ROWS, WARPGROUP, Barrier, Opaque, Thread
from gossamer.kernels.hopper.device.forward.masks import two
from gossamer.kernels.hopper.device.forward.softmax import Softmax
from gossamer.kernels.hopper.device.row_items import RowItem
from gossamer.kernels.hopper.device.tiles import Tma, partition
from gossamer.kernels.hopper.device.work import ItemRing


class Results(NamedTuple):
    """Where results go besides `out`, and what they are made with."""

    lse: cute.Tensor  # (B, H, Q) float32
    sinks: cute.Tensor  # (H,) float32
    has_sinks: Int32
    part_out: cute.Tensor  # (slots, block_q, E) float32
    part_lse: cute.Tensor  # (slots, block_q) float32
    rows: Int32  # of a head


@dataclass(frozen=True, eq=False)
class Epilogue(Opaque):
    """Finishes the item before: `softmax` keeps its references and sums while the next item begins."""

    groups: int
    results: Results
    thread: Thread
    item: cute.Tensor
    softmax: Softmax
    s_o: cute.Tensor  # a tile of 64 rows for each stage of Q, in its place
    mma: Any  # of P V

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

    @cute.jit
    def factors(self, stage):
        """(what O is multiplied by, lse) of the rows of an item."""
        sink = -Float32.inf
        if self.results.has_sinks != 0 and self.item[RowItem.SLOT, stage] < 0:
            sink = self.results.sinks[self.item[RowItem.HEAD, stage]] * instructions.LOG2E
        factor, lse = two(Float32), two(Float32)
        instructions.finish(self.softmax.old_reference, self.softmax.old_sum, factor, lse, sink)
        return factor, lse

    @cute.jit
    def normalise(self, factor):
        """O in 16 bits. O itself stays: to write it now would make the assembler wait for products in flight."""
        packed = cute.make_rmem_tensor_like(self.softmax.o, self.s_o.element_type)
        instructions.convert_rows(self.softmax.o, packed, factor)
        return packed

    @cute.jit
    def send(self, stage, packed, lse, q_read: cutlass.Constexpr):
        """An item's result into shared memory for the store warp, and its lse."""
        item, thread = self.item, self.thread
        batch, head, tile = item[RowItem.BATCH, stage], item[RowItem.HEAD, stage], item[RowItem.TILE, stage]
        if const_expr(not q_read):
            cute.arch.barrier(barrier_id=Barrier.Q_READ + thread.warpgroup, number_of_threads=WARPGROUP)
        atom = cute.make_copy_atom(warp.StMatrix8x8x16bOp(transpose=False, num_matrices=4), self.s_o.element_type)
        mine = cute.make_tiled_copy_C(atom, self.mma).get_slice(thread.thread)
        to = mine.partition_D(self.s_o)
        cute.copy(atom, mine.retile(packed), to[None, None, None, stage * self.groups + thread.warpgroup])
        cute.arch.fence_view_async_shared()
        if thread.lane % 4 == 0:
            for r in cutlass.range_constexpr(instructions.ROWS):
                row = tile * (self.groups * ROWS) + thread.row + 8 * r
                if row < self.results.rows:
                    self.results.lse[batch, head, row] = lse[r]

    @cute.jit
    def write_part(self, stage, factor, lse):
        """O and lse of a part of a split row, as float32."""
        tile, slot = self.item[RowItem.TILE, stage], self.item[RowItem.SLOT, stage]
        o, part = self.softmax.o, self.results.part_out
        for r in cutlass.range_constexpr(instructions.ROWS):
            row = self.thread.row + 8 * r
            if tile * (self.groups * ROWS) + row < self.results.rows:
                for j in cutlass.range_constexpr(cute.size(o) // 4):
                    for e in cutlass.range_constexpr(2):
                        part[slot, row, 8 * j + self.thread.quad + e] = o[4 * j + 2 * r + e] * factor[r]
                if self.thread.lane % 4 == 0:
                    self.results.part_lse[slot, row] = lse[r]


@dataclass(frozen=True, eq=False)
class Storer(Opaque):
    """A warp that stores what its warpgroup finishes, and gives back the place of Q, which held it."""

    items: ItemRing  # with Q
    bounds: Any  # `Bounds`: what the warp puts into shared memory before; or None
    tma: Tma  # of the result
    s_o: cute.Tensor
    groups: int
    warpgroup: Any
    overlap_items: bool

    @cute.jit
    def run(self):
        """Item after item."""
        from_, to = partition(self.tma, self.s_o, ROWS, cute.size(self.s_o, mode=[1]))
        item, me = self.items.item, self.warpgroup
        turn = Int32(0)
        running = self.begin(turn)
        while running != 0:
            stage = self.items.place(turn)[0]
            batch, head, tile = item[RowItem.BATCH, stage], item[RowItem.HEAD, stage], item[RowItem.TILE, stage]
            slot = item[RowItem.SLOT, stage]
            turn += 1
            if const_expr(self.overlap_items):
                running = self.begin(turn)
            cute.arch.barrier(barrier_id=Barrier.OUTPUT + me, number_of_threads=WARPGROUP + 32)
            if slot < 0:
                tile_of_q = from_[None, stage * self.groups + me]
                cute.copy(self.tma.atom, tile_of_q, to[None, tile * self.groups + me, head, batch])
                cute.arch.cp_async_bulk_commit_group()
                cute.arch.cp_async_bulk_wait_group(0, read=True)
            cute.arch.sync_warp()
            with cute.arch.elect_one():
                cute.arch.mbarrier_arrive(self.items.empty + stage)
            if const_expr(not self.overlap_items):
                running = self.begin(turn)

    @cute.jit
    def begin(self, turn):
        """Wait for an item, and fetch what masks it; returns whether there is one."""
        stage, phase = self.items.place(turn)
        self.items.wait_full(stage, phase)
        running = self.items.item[RowItem.VALID, stage]
        if const_expr(self.bounds is not None):  # noqa: SIM102
            if running != 0:
                self.bounds.load(stage)
        return running
