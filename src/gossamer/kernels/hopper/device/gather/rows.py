"""Warps that gather scattered rows of their operands into rings in shared memory.

A thread copies 16 bytes of a row at a time (cp.async), to where the 128-byte swizzle of the products wants them, and
arrives at the stage's barrier when its copies are complete. Those are writes of the generic proxy: a consumer that has
waited for the barrier makes them visible to the products by a proxy fence.
"""

from __future__ import annotations

from typing import Any

import cutlass
import cutlass.cute as cute
from cutlass import Boolean, Int32, Int64, const_expr

from gossamer.cute.common import ROWS, Opaque, Ring, ring, within_keys
from gossamer.cute.instructions import assembly
from gossamer.cute.row_items import RowItem
from gossamer.cute.work import ItemRing

PIECE = 16  # bytes of a copy
THREADS = 64  # of the two warps that gather together
PIECES = 8  # of a line
COPIES = ROWS * PIECES // THREADS  # rows of a stage that a thread copies from
LINE = 128  # bytes of a row that lie together in shared memory, their pieces permuted by the row


def copy(
    to: Int32, start: Int64, row: Int32, stride: Int32, past: Boolean | bool, size: int, place: int = 0, line: int = 0
) -> None:
    """Copy `size` bytes of a row, `line` bytes from where it starts, to `place` bytes behind `to`, asynchronously.

    Nothing is read, and zeros are written, for a negative row, and where the copied columns are `past` the last one.
    """
    cached = "cg" if size == PIECE else "ca"
    code = (
        "{ .reg .pred p; .reg .b64 a; setp.lt.or.s32 p, $2, 0, $4; mad.wide.s32 a, $2, $3, $1; "
        f"cp.async.{cached}.shared.global [$0 + {place}], [a + {line}], {size}, p; }}"
    )
    assembly(None, code, Int32(to), Int64(start), Int32(row), Int32(stride), Boolean(past))


@cute.jit
def role_of(warp, blocks: cutlass.Constexpr):
    """What a warp of the first warpgroup does: 0 and 1 serve, 2 and 3 gather.

    Warps of the same index share a scheduler, and those that gather issue most. So they are others in every other one
    of the `blocks` of a multiprocessor, which are as far apart as there are multiprocessors.
    """
    block, _, _ = cute.arch.block_idx()
    grid, _, _ = cute.arch.grid_dim()
    return cute.arch.make_warp_uniform(warp ^ ((block * blocks // grid) & 1) * 2)


class RowCopies(Opaque):
    """What a thread of one or two warps copies of a tensor: a piece of each line of some of a stage's rows."""

    def __init__(
        self, tensor: Any, ring: Ring, shared: Any, size: int, thread: Any, threads: int = THREADS, rows: int = ROWS
    ) -> None:
        """`tensor`: (B, heads, rows, columns) of 16 bits; `shared`: the address of stages, `rows` of `size` numbers."""
        self.tensor, self.ring, self.lines = tensor, ring, 2 * size // LINE  # of a row
        self.at_once = threads // PIECES  # rows
        self.rows, self.copies = rows, rows // self.at_once  # rows of a stage that this thread copies from
        self.piece, self.row = thread % PIECES, thread // PIECES  # of each line; the first row of a stage
        # A row may end before the padded size: with a piece, since its columns are a multiple of 8.
        columns = cute.size(tensor, mode=[3])
        self.past = [LINE * line + PIECE * self.piece >= 2 * columns for line in range(self.lines)]
        # Pieces of a line are permuted by the row in eight.
        eighth = [self.row + i for i in range(0, PIECES, self.at_once)]
        self.to = [shared.toint() + self.row * LINE + (self.piece ^ (row % PIECES)) * PIECE for row in eighth]
        self.stride = Int32(2 * tensor.stride[2])  # of rows, in bytes

    def columns(self) -> Any:
        """Registers for the indices of this thread's rows of a step."""
        return cute.make_rmem_tensor((self.copies,), Int32)

    def start(self, batch: Any, head: Any) -> Any:
        """The address of this thread's piece of row 0 of a head."""
        strides = self.tensor.stride
        at = 2 * (Int64(batch) * strides[0] + Int64(head) * strides[1])
        return self.tensor.iterator.toint() + at + PIECE * self.piece

    @cute.jit
    def listed(self, indices, first, to, limit=None):
        """The indices of this thread's rows of the step whose list begins at `first`; -1 of those from `limit` on."""
        for j in cutlass.range_constexpr(self.copies):
            to[j] = indices[first + self.row + j * self.at_once]
            if const_expr(limit is not None):
                to[j] = to[j] if to[j] < limit else Int32(-1)

    @cute.jit
    def fill(self, start, rows, stage):
        """Issue this thread's copies of a stage; rows that the list does not fill become zero."""
        for j in cutlass.range_constexpr(self.copies):
            to = self.to[j % len(self.to)] + stage * (self.rows * LINE * self.lines)
            for line in cutlass.range_constexpr(self.lines):
                place = cutlass.const_expr((j * self.at_once + line * self.rows) * LINE)
                copy(to, start, rows[j], self.stride, self.past[line], PIECE, place, line * LINE)


class WordCopies(Opaque):
    """The words of a step, as many pieces as half of 64 threads; of fewer queries fewer."""

    def __init__(self, words: cute.Tensor, shared: cute.Tensor, thread: Any) -> None:
        """`words`: (columns / 32, queries) int32 in global memory; `shared`: (queries, 2, slots)."""
        self.words, self.shared, self.thread = words, shared, thread
        queries, _, self.slots = shared.shape
        self.bytes = 4 * 2 * queries  # of a step

    @cute.jit
    def fill(self, step, slot):
        """Issue this thread's copy of a step's words."""
        size = min(PIECE, self.bytes)
        if self.thread < self.bytes // size:
            from_ = self.words.iterator.toint() + self.thread * size
            to = self.shared.iterator.toint() + slot * self.bytes + self.thread * size
            copy(to, from_, step, Int32(self.bytes), False, size)


class ItemGatherer(Opaque):
    """Warps that gather for item after item: `gather` says what, and returns the number of steps so far."""

    items: ItemRing
    ratio: Any  # query heads of a key head
    lengths: Any = None  # (B,) int32: keys that are attended, where the configuration has them

    @cute.jit
    def limit(self, batch):
        """The first key of a batch element that is not attended, None without lengths. It is not to be read."""
        found = None
        if const_expr(self.lengths is not None):
            found = within_keys(self.lengths[batch])
        return found

    @cute.jit
    def run(self):
        """Item after item."""
        item = self.items.item
        turn, kv = Int32(0), Int32(0)  # items and steps so far
        self.items.wait_full(0, 0)
        running = item[RowItem.VALID, 0]
        while running != 0:
            place = self.items.place(turn)[0]
            batch, group = item[RowItem.BATCH, place], item[RowItem.HEAD, place] // self.ratio
            at, steps = item[RowItem.BITS_START, place], item[RowItem.BITS_COUNT, place]
            self.items.forget(place)
            kv = self.gather(batch, group, at, steps, kv)
            turn += 1
            place = self.items.wait_full_at(turn)
            running = item[RowItem.VALID, place]


class Gatherer(ItemGatherer):
    """Two warps that fill the rings of K and V for item after item, and with K the words of a step."""

    def __init__(
        self, items: ItemRing, indices: Any, keys: RowCopies, values: RowCopies, words: WordCopies, ratio: Any,
        lengths: Any = None,
    ) -> None:  # fmt: skip
        """`indices`: (columns,) int32."""
        self.lengths = lengths
        self.items, self.indices, self.keys, self.values, self.words = items, indices, keys, values, words
        self.ratio = ratio
        self.columns, self.upcoming = keys.columns(), keys.columns()
        self.upcoming.fill(-1)

    @cute.jit
    def gather(self, batch, group, at, steps, kv):
        """Gather K and V of an item."""
        keys, values, indices, columns, upcoming = self.keys, self.values, self.indices, self.columns, self.upcoming
        k_start, v_start, limit = keys.start(batch, group), values.start(batch, group), self.limit(batch)
        if steps > 0:
            keys.listed(indices, at * ROWS, upcoming, limit)
        for i in cutlass.range(steps, unroll=1):
            for j in cutlass.range_constexpr(cute.size(columns)):
                columns[j] = upcoming[j]
            if i + 1 < steps:
                keys.listed(indices, (at + i + 1) * ROWS, upcoming, limit)
            stage = keys.ring.wait_empty_at(kv)
            keys.fill(k_start, columns, stage)
            self.words.fill(at + i, ring(kv, self.words.slots)[0])
            cute.arch.cp_async_mbarrier_arrive_noinc(keys.ring.full + stage)
            values.ring.wait_empty_at(kv)
            values.fill(v_start, columns, stage)
            cute.arch.cp_async_mbarrier_arrive_noinc(values.ring.full + stage)
            kv += 1
        return kv
