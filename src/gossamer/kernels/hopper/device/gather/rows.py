"""Warps that gather scattered rows of their operands into rings in shared memory.

A thread copies 16 bytes of a row at a time (cp.async), to where the 128-byte swizzle of the products wants them, and
arrives at the stage's barrier when its copies are complete. Those are writes of the generic proxy: a consumer that has
waited for the barrier makes them visible to the products by a proxy fence.
"""

from __future__ import annotations

from dataclasses import dataclass
from typing import Any

import cutlass
import cutlass.cute as cute
from cutlass import Boolean, Int32, Int64
from cutlass._mlir.dialects import llvm
from cutlass.cutlass_dsl import dsl_user_op

from gossamer.kernels.hopper.device.common import ROWS, Opaque, Ring, ring
from gossamer.kernels.hopper.device.gather.masks import WORDS
from gossamer.kernels.hopper.device.row_items import RowItem
from gossamer.kernels.hopper.device.work import ItemRing

PIECE = 16  # bytes of a copy
THREADS = 64  # of the two warps that gather together
PIECES = 8  # of a line
AT_ONCE = THREADS // PIECES  # rows
COPIES = ROWS // AT_ONCE  # rows of a stage that a thread copies from
LINE = 128  # bytes of a row that lie together in shared memory, their pieces permuted by the row


@dsl_user_op
def copy(
    to: Int32, start: Int64, row: Int32, stride: Int32, past: Boolean | bool, size: int, place: int = 0, line: int = 0,
    *, loc: Any = None, ip: Any = None,
) -> None:  # fmt: skip
    """Copy `size` bytes of a row, `line` bytes from where it starts, to `place` bytes behind `to`, asynchronously.

    Nothing is read, and zeros are written, for a negative row, and where the copied columns are `past` the last one.
    """
    operands = [x.ir_value(loc=loc, ip=ip) for x in (Int32(to), Int64(start), Int32(row), Int32(stride), Boolean(past))]
    cached = "cg" if size == PIECE else "ca"
    llvm.inline_asm(
        None, operands,
        "{ .reg .pred p; .reg .b64 a; setp.lt.or.s32 p, $2, 0, $4; mad.wide.s32 a, $2, $3, $1; "
        f"cp.async.{cached}.shared.global [$0 + {place}], [a + {line}], {size}, p; }}",
        "r,l,r,r,b", has_side_effects=True, is_align_stack=False, asm_dialect=llvm.AsmDialect.AD_ATT, loc=loc, ip=ip,
    )  # fmt: skip


@cute.jit
def role_of(warp, blocks: cutlass.Constexpr):
    """What a warp of the first warpgroup does: 0 and 1 serve, 2 and 3 gather.

    Warps of the same index share a scheduler, and those that gather issue most. So they are others in every other one
    of the `blocks` of a multiprocessor, which are as far apart as there are multiprocessors.
    """
    block, _, _ = cute.arch.block_idx()
    grid, _, _ = cute.arch.grid_dim()
    return cute.arch.make_warp_uniform(warp ^ ((block * blocks // grid) & 1) * 2)


@dataclass(frozen=True, eq=False)
class RowCopies(Opaque):
    """What a thread of two warps copies of a tensor: the same piece of each line of eight of a stage's 64 rows."""

    tensor: cute.Tensor  # (B, heads, rows, columns) of 16 bits
    ring: Ring
    lines: int  # of a row
    row: Any  # this thread's first row of a stage
    piece: Any  # of each line
    past: list[Any]  # whether that of a line is behind the last column
    to: Any
    stride: Any  # of rows, in bytes

    @classmethod
    def of(cls, tensor: Any, ring: Ring, shared: Any, size: int, thread: Any) -> RowCopies:
        """`shared`: the address of stages of rows of `size` numbers."""
        piece, row = thread % PIECES, thread // PIECES
        lines = 2 * size // LINE
        # A row may end before the padded size: with a piece, since its columns are a multiple of 8.
        past = [LINE * line + PIECE * piece >= 2 * cute.size(tensor, mode=[3]) for line in range(lines)]
        to = shared.toint() + row * LINE + (piece ^ row) * PIECE
        return cls(tensor, ring, lines, row, piece, past, to, Int32(2 * tensor.stride[2]))

    def start(self, batch: Any, head: Any) -> Any:
        """The address of this thread's piece of row 0 of a head."""
        strides = self.tensor.stride
        at = 2 * (Int64(batch) * strides[0] + Int64(head) * strides[1])
        return self.tensor.iterator.toint() + at + PIECE * self.piece

    @cute.jit
    def listed(self, indices, first, to):
        """The indices of this thread's rows of the step whose list begins at `first`."""
        for j in cutlass.range_constexpr(COPIES):
            to[j] = indices[first + self.row + j * AT_ONCE]

    @cute.jit
    def fill(self, start, rows, stage):
        """Issue this thread's copies of a stage; rows that the list does not fill become zero."""
        to = self.to + stage * (ROWS * LINE * self.lines)
        for j in cutlass.range_constexpr(COPIES):
            for line in cutlass.range_constexpr(self.lines):
                place = cutlass.const_expr((j * AT_ONCE + line * ROWS) * LINE)
                copy(to, start, rows[j], self.stride, self.past[line], PIECE, place, line * LINE)


@dataclass(frozen=True, eq=False)
class WordCopies(Opaque):
    """The words of a step, as many pieces as half of 64 threads."""

    words: cute.Tensor  # (columns / 32, 64) int32 in global memory
    shared: cute.Tensor  # (64, 2, slots)
    thread: Any

    @cute.jit
    def fill(self, step, slot):
        """Issue this thread's copy of a step's words."""
        if self.thread < WORDS * 4 // PIECE:
            from_ = self.words.iterator.toint() + self.thread * PIECE
            to = self.shared.iterator.toint() + slot * (4 * WORDS) + self.thread * PIECE
            copy(to, from_, step, Int32(4 * WORDS), False, PIECE)


@dataclass(frozen=True, eq=False)
class Gatherer(Opaque):
    """Two warps that fill the rings of K and V for item after item, and with K the words of a step."""

    items: ItemRing
    indices: cute.Tensor  # (columns,) int32
    keys: RowCopies
    values: RowCopies
    words: WordCopies
    ratio: Any  # query heads of a key head

    @cute.jit
    def run(self):
        """Item after item."""
        keys, values, item = self.keys, self.values, self.items.item
        columns, upcoming = cute.make_rmem_tensor((COPIES,), Int32), cute.make_rmem_tensor((COPIES,), Int32)
        upcoming.fill(-1)
        turn, kv = Int32(0), Int32(0)  # items and steps so far
        self.items.wait_full(0, 0)
        running = item[RowItem.VALID, 0]
        while running != 0:
            place = self.items.place(turn)[0]
            batch, group = item[RowItem.BATCH, place], item[RowItem.HEAD, place] // self.ratio
            at, steps = item[RowItem.BITS_START, place], item[RowItem.BITS_COUNT, place]
            self.items.forget(place)
            k_start, v_start = keys.start(batch, group), values.start(batch, group)
            if steps > 0:
                keys.listed(self.indices, at * ROWS, upcoming)
            for i in cutlass.range(steps, unroll=1):
                for j in cutlass.range_constexpr(COPIES):
                    columns[j] = upcoming[j]
                if i + 1 < steps:
                    keys.listed(self.indices, (at + i + 1) * ROWS, upcoming)
                stage, phase = keys.ring.place(kv)
                keys.ring.wait_empty(stage, phase)
                keys.fill(k_start, columns, stage)
                self.words.fill(at + i, ring(kv, 2 * keys.ring.stages)[0])
                cute.arch.cp_async_mbarrier_arrive_noinc(keys.ring.full + stage)
                values.ring.wait_empty(stage, phase)
                values.fill(v_start, columns, stage)
                cute.arch.cp_async_mbarrier_arrive_noinc(values.ring.full + stage)
                kv += 1
            turn += 1
            place, phase = self.items.place(turn)
            self.items.wait_full(place, phase)
            running = item[RowItem.VALID, place]
