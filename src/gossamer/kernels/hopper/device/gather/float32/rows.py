"""The warps that gather for float32: rows of halves, one warp for K and one for V, and a step's words and powers."""

from __future__ import annotations

from dataclasses import dataclass
from typing import Any

import cutlass
import cutlass.cute as cute
from cutlass import Int32, const_expr

from gossamer.kernels.hopper.device.common import ROWS, Opaque, Ring, ring
from gossamer.kernels.hopper.device.gather.masks import WORDS
from gossamer.kernels.hopper.device.gather.rows import LINE, PIECE, PIECES, copy
from gossamer.kernels.hopper.device.row_items import RowItem
from gossamer.kernels.hopper.device.work import ItemRing

POWERS = 8  # bytes of the powers of a column
AT_ONCE = 4  # rows that a warp copies a line of


@dataclass(frozen=True, eq=False)
class HalfRows(Opaque):
    """A warp that fills the ring of K or of V: a thread copies the same piece of each line of every fourth row."""

    items: ItemRing
    indices: cute.Tensor  # (columns,) int32
    tensor: cute.Tensor  # (B, G, K, 2 size) float16
    ring: Ring
    at: Any  # the ring's tiles in shared memory
    lines: int  # of a row
    ratio: Any  # query heads of a key head

    @cute.jit
    def run(self):
        """Item after item."""
        item, indices, tensor = self.items.item, self.indices, self.tensor
        lane = cute.arch.lane_idx()
        piece, row = lane % PIECES, lane // PIECES
        # Pieces of a line are permuted by the row in eight: two patterns, of rows below four and from there on.
        to = [self.at.toint() + row * LINE + (piece ^ (row + 4 * odd)) * PIECE for odd in range(2)]
        stride = Int32(2 * tensor.stride[2])
        columns = cute.make_rmem_tensor((ROWS // AT_ONCE,), Int32)
        columns.fill(-1)
        turn, kv = Int32(0), Int32(0)  # items and steps so far
        self.items.wait_full(0, 0)
        running = item[RowItem.VALID, 0]
        while running != 0:
            place = self.items.place(turn)[0]
            batch, group = item[RowItem.BATCH, place], item[RowItem.HEAD, place] // self.ratio
            at, steps = item[RowItem.BITS_START, place], item[RowItem.BITS_COUNT, place]
            self.items.forget(place)
            start = tensor[batch, group, None, None].iterator.toint() + PIECE * piece
            if steps > 0:
                for j in cutlass.range_constexpr(ROWS // AT_ONCE):
                    columns[j] = indices[at * ROWS + row + j * AT_ONCE]
            for n in cutlass.range(at, at + steps, unroll=1):
                stage, phase = self.ring.place(kv)
                self.ring.wait_empty(stage, phase)
                for j in cutlass.range_constexpr(ROWS // AT_ONCE):
                    for line in cutlass.range_constexpr(self.lines):
                        behind = const_expr((j * AT_ONCE + line * ROWS) * LINE)
                        target = to[j % 2] + stage * (ROWS * LINE * self.lines)
                        copy(target, start, columns[j], stride, False, PIECE, behind, line * LINE)
                cute.arch.cp_async_mbarrier_arrive_noinc(self.ring.full + stage)
                if n + 1 < at + steps:
                    for j in cutlass.range_constexpr(ROWS // AT_ONCE):
                        columns[j] = indices[(n + 1) * ROWS + row + j * AT_ONCE]
                kv += 1
            turn += 1
            place, phase = self.items.place(turn)
            self.items.wait_full(place, phase)
            running = item[RowItem.VALID, place]


@dataclass(frozen=True, eq=False)
class StepData(Opaque):
    """A warp that copies what belongs to K of each step: its words, and the powers of its columns."""

    items: ItemRing
    indices: cute.Tensor  # (columns,) int32
    words: cute.Tensor  # (columns / 32, 64) int32
    powers: cute.Tensor  # (B, G, K, 2) float32
    ring: Ring  # of K
    s_words: cute.Tensor
    s_powers: cute.Tensor
    ratio: Any  # query heads of a key head

    @cute.jit
    def run(self):
        """Item after item."""
        item, indices = self.items.item, self.indices
        lane = cute.arch.lane_idx()
        piece = lane * PIECE
        columns, upcoming = cute.make_rmem_tensor((2,), Int32), cute.make_rmem_tensor((2,), Int32)
        upcoming.fill(-1)
        turn, kv = Int32(0), Int32(0)  # items and steps so far
        self.items.wait_full(0, 0)
        running = item[RowItem.VALID, 0]
        while running != 0:
            place = self.items.place(turn)[0]
            batch, group = item[RowItem.BATCH, place], item[RowItem.HEAD, place] // self.ratio
            at, steps = item[RowItem.BITS_START, place], item[RowItem.BITS_COUNT, place]
            self.items.forget(place)
            start = self.powers[batch, group, None, None].iterator.toint()
            for i in cutlass.range_constexpr(2):
                if steps > 0:
                    upcoming[i] = indices[at * ROWS + 32 * i + lane]
            for n in cutlass.range(at, at + steps, unroll=1):
                for i in cutlass.range_constexpr(2):
                    columns[i] = upcoming[i]
                    if n + 1 < at + steps:
                        upcoming[i] = indices[(n + 1) * ROWS + 32 * i + lane]
                stage, phase = self.ring.place(kv)
                slot = ring(kv, 2 * self.ring.stages)[0]
                self.ring.wait_empty(stage, phase)
                words = self.s_words.iterator.toint() + slot * (4 * WORDS) + piece
                copy(words, self.words.iterator.toint() + piece, n, Int32(4 * WORDS), False, PIECE)
                for i in cutlass.range_constexpr(2):
                    to = self.s_powers.iterator.toint() + POWERS * (slot * ROWS + 32 * i + lane)
                    copy(to, start, columns[i], Int32(POWERS), False, POWERS)
                cute.arch.cp_async_mbarrier_arrive_noinc(self.ring.full + stage)
                kv += 1
            turn += 1
            place, phase = self.items.place(turn)
            self.items.wait_full(place, phase)
            running = item[RowItem.VALID, place]
