"""What masks the steps of an item of a block layout: lists of tiles that are kept whole, by intervals of rows, by bits.

A mask source tells the consumer how many tiles an item walks, walks them (`walk`), and gives a step's packed mask: a
word holds 32 columns of a row, shifted to a thread's first; a step has words for the two rows of a thread.
"""

from __future__ import annotations

from typing import Any

import cutlass
import cutlass.cute as cute
from cutlass import Int32, const_expr

from gossamer.cute import instructions
from gossamer.cute.common import FAR, ROWS, WARPGROUP, Barrier, Opaque, Thread, within_keys
from gossamer.cute.row_items import RowItem
from gossamer.kernels.hopper.device.forward.block import ForwardBlock


@cute.jit
def tiles_of(item, stage):
    """How many tiles an item walks."""
    return item[RowItem.FULL_COUNT, stage] + item[RowItem.INTERVAL_COUNT, stage] + item[RowItem.BITS_COUNT, stage]


@cute.jit
def first_entry(item, stage):
    """The list entry of the first tile that an item walks."""
    first = item[RowItem.FULL_START, stage]
    if item[RowItem.FULL_COUNT, stage] == 0:
        has_interval = item[RowItem.INTERVAL_COUNT, stage] > 0
        first = item[RowItem.INTERVAL_START, stage] if has_interval else item[RowItem.BITS_START, stage]
    return first


def one() -> Any:
    """A register for a number that changes."""
    return cute.make_rmem_tensor((1,), Int32)


def two(dtype: Any = Int32) -> Any:
    """Registers for something of each row of a thread."""
    return cute.make_rmem_tensor((instructions.ROWS,), dtype)


def packed_mask(columns: int) -> Any:
    """Registers for the mask words of so many columns."""
    return cute.make_rmem_tensor((instructions.ROWS, columns // 32), Int32)


@cute.jit
def share_bounds(block, me, stage):
    """Put the intervals of an item's rows into shared memory for warpgroup `me`, and the columns of its first tiles."""
    a, c, item = block.arguments, block.config, block.items.item
    if item[RowItem.INTERVAL_COUNT, stage] > 0:
        mine, lead = me * ROWS + cute.arch.lane_idx(), item[RowItem.LEAD, stage]
        rows = cute.size(a.out.tensor, mode=[0])
        found = []
        for i in cutlass.range_constexpr(ROWS // 32):
            row = item[RowItem.TILE, stage] * c.block_q + mine + 32 * i
            row = row if row < rows else rows - 1
            found.append((a.lo[lead, row], a.hi[lead, row]))
        start = a.lists[0, item[RowItem.INTERVAL_START, stage]] * c.block_kv
        for i in cutlass.range_constexpr(ROWS // 32):
            block.bounds[mine + 32 * i, 0, stage], block.bounds[mine + 32 * i, 1, stage] = found[i]
        item[RowItem.FIRST_INTERVAL, stage] = start
    if const_expr(c.lengths):
        item[RowItem.FIRST_COLUMN, stage] = a.lists[0, first_entry(item, stage)] * c.block_kv
    cute.arch.barrier_arrive(barrier_id=Barrier.BOUNDS + me, number_of_threads=WARPGROUP + 32)


class BlockMask(Opaque):
    """The mask source of a block layout. What masks an item's first step is fetched before that step, and kept."""

    with_keys = with_values = False  # it is in memory, and needs no key to be there

    def __init__(self, block: ForwardBlock, thread: Thread) -> None:
        self.block, self.arguments, self.config, self.thread = block, block.arguments, block.config, thread
        self.item, self.parts = block.items.item, self.config.block_kv // self.config.step
        self.column = one()  # the first step's; then its rows' intervals, whether anything masks it, and its words
        self.lo, self.hi, self.masked = two(), two(), one()
        self.words = packed_mask(self.config.step)
        self.length = one()  # of the item's batch element, less this thread's first column
        self.length.fill(0)

    def count(self, stage: Any) -> Any:
        """How many tiles an item walks."""
        return tiles_of(self.item, stage)

    @cute.jit
    def column_of(self, start, i):
        """The first column of step `i` of a list."""
        return (
            self.arguments.lists[0, start + i // self.parts] * self.config.block_kv + i % self.parts * self.config.step
        )

    @cute.jit
    def prepare(self, stage):
        """Fetch what masks the first step of an item: column, bounds and words of its rows."""
        item = self.item
        fulls, intervals = item[RowItem.FULL_COUNT, stage], item[RowItem.INTERVAL_COUNT, stage]
        self.words.fill(-1)
        cute.arch.barrier(barrier_id=Barrier.BOUNDS + self.thread.warpgroup, number_of_threads=WARPGROUP + 32)
        self.column[0] = item[RowItem.FIRST_INTERVAL, stage]
        if const_expr(self.config.lengths):
            self.column[0] = item[RowItem.FIRST_COLUMN, stage]
            self.length[0] = within_keys(self.arguments.lengths[item[RowItem.BATCH, stage]]) - self.thread.quad
        lo, hi = self.row_bounds(stage)
        by_interval = fulls == 0 and intervals > 0
        for r in cutlass.range_constexpr(instructions.ROWS):
            end = self.length[0] if const_expr(self.config.lengths) else Int32(FAR)
            self.lo[r] = lo[r] if by_interval else -FAR
            self.hi[r] = hi[r] if by_interval else end
        self.masked[0] = Int32(1) if fulls == 0 or self.config.lengths else Int32(0)
        if fulls + intervals == 0:  # noqa: SIM102
            if item[RowItem.BITS_COUNT, stage] > 0:
                self.fetch("bits", self.words, item[RowItem.BITS_START, stage], Int32(0))

    @cute.jit
    def keep_first(self, scores):
        """Mask the scores of an item's first step."""
        if self.masked[0] != 0:
            words = packed_mask(self.config.step)
            instructions.interval_words(words, self.lo, self.hi, self.column[0])
            for r in cutlass.range_constexpr(instructions.ROWS):
                for n in cutlass.range_constexpr(cute.size(words, mode=[1])):
                    words[r, n] = words[r, n] & self.words[r, n]
            instructions.keep(scores, words)

    @cute.jit
    def second(self, words, stage):
        """The packed mask of an item's second step, of whatever kind; returns whether it has any."""
        item, parts = self.item, self.parts
        fulls, intervals = item[RowItem.FULL_COUNT, stage] * parts, item[RowItem.INTERVAL_COUNT, stage] * parts
        masked = fulls < 2
        words.fill(-1)
        if fulls < 2:
            if fulls + intervals >= 2:
                self.interval(words, stage, self.column_of(item[RowItem.INTERVAL_START, stage], 1 - fulls))
            else:
                self.fetch("bits", words, item[RowItem.BITS_START, stage], 1 - fulls - intervals)
        elif const_expr(self.config.lengths):
            self.fetch("edge", words, item[RowItem.FULL_START, stage], 1)
            masked = fulls >= 2
        return masked

    @cute.jit
    def fetch(self, mode: cutlass.Constexpr, words, start, i):
        """The packed mask of step `i` of a list, as far as it is in global memory."""
        c, quad = self.config, self.thread.quad
        if const_expr(mode == "bits"):
            entry, part = self.arguments.lists[1, start + i // self.parts], i % self.parts
            for r in cutlass.range_constexpr(instructions.ROWS):
                row = self.arguments.pool[entry * c.block_q + self.thread.row + 8 * r, None]
                for n in cutlass.range_constexpr(cute.size(words, mode=[1])):
                    words[r, n] = instructions.shifted(row[part * (c.step // 32) + n], quad)
        elif const_expr(mode == "edge"):  # of a list of full tiles, the one that holds the end of the keys
            words.fill(-1)
        if const_expr(mode == "edge" or (mode == "bits" and c.lengths)):
            limit = self.length[0] - self.column_of(start, i)
            for n in cutlass.range_constexpr(cute.size(words, mode=[1])):
                instructions.keep_below(words, n, limit)

    @cute.jit
    def interval(self, words, stage, first):
        """The packed mask of the columns from `first` on by the intervals of the rows of the item in `stage`."""
        lo, hi = self.row_bounds(stage)
        instructions.interval_words(words, lo, hi, first)

    @cute.jit
    def row_bounds(self, stage):
        """The intervals of this thread's rows of the item in `stage`, shifted to its first column."""
        lo, hi = two(), two()
        for r in cutlass.range_constexpr(instructions.ROWS):
            lo[r] = self.block.bounds[self.thread.row + 8 * r, 0, stage] - self.thread.quad
            hi[r] = self.block.bounds[self.thread.row + 8 * r, 1, stage] - self.thread.quad
            if const_expr(self.config.lengths):
                hi[r] = cutlass.min(hi[r], self.length[0])
        return lo, hi

    @cute.jit
    def walk(self, consumer, stage, buffer, kv, started):
        """All steps of an item but the first; returns the number of steps so far."""
        c, item, parts, me = self.config, self.item, self.parts, self.thread.warpgroup
        lists, bounds = self.arguments.lists, self.block.bounds
        full_start, fulls = item[RowItem.FULL_START, stage], item[RowItem.FULL_COUNT, stage] * parts
        interval_start, intervals = item[RowItem.INTERVAL_START, stage], item[RowItem.INTERVAL_COUNT, stage] * parts
        bits_start, bitses = item[RowItem.BITS_START, stage], item[RowItem.BITS_COUNT, stage] * parts
        kv, done = consumer.open(stage, buffer, kv, started, fulls + intervals + bitses)
        from_interval = done - fulls if done > fulls else Int32(0)
        from_bits = done - fulls - intervals if done > fulls + intervals else Int32(0)
        column = item[RowItem.FIRST_INTERVAL, stage]
        if const_expr(consumer.half_steps):  # noqa: SIM102
            if from_interval > 0 and from_interval < intervals:
                column = lists[0, interval_start + from_interval] * c.block_kv
        unmasked = fulls
        if const_expr(c.lengths):  # the last full tile may hold the end of the keys
            unmasked -= parts if fulls > 0 else 0
        for i in cutlass.range(done, unmasked, unroll=1):
            consumer.step("full", buffer, kv, full_start, i)
            kv += 1
        if const_expr(c.lengths):
            for i in cutlass.range(unmasked if unmasked > done else done, fulls, unroll=1):
                consumer.step("edge", buffer, kv, full_start, i)
                kv += 1
        # The columns that any row of this warpgroup keeps: both bounds ascend with the rows.
        lowest = cute.arch.make_warp_uniform(bounds[me * ROWS, 0, stage])
        highest = cute.arch.make_warp_uniform(bounds[me * ROWS + ROWS - 1, 1, stage])
        for i in cutlass.range(from_interval, intervals, unroll=1):
            if const_expr(consumer.half_steps):
                # Of a window's two edges each of two warpgroups needs one whole and one half of the other: the one that
                # is done with its half goes on, and the edges take as long as one and a half.
                free = i > 0 and i == intervals - 1 if const_expr(consumer.groups == 2) else False
                upcoming = column
                if i + 1 < intervals:
                    upcoming = lists[0, interval_start + i + 1] * c.block_kv
                middle = column + c.step // 2
                if highest <= middle:
                    consumer.step("interval", buffer, kv, column, i, 0, free)
                elif lowest >= middle:
                    consumer.step("interval", buffer, kv, column, i, 1, free)
                else:
                    consumer.step("interval", buffer, kv, column, i, None, free)
                column = upcoming
            else:
                consumer.step("interval", buffer, kv, self.column_of(interval_start, i), i)
            kv += 1
        for i in cutlass.range(from_bits, bitses, unroll=1):
            consumer.step("bits", buffer, kv, bits_start, i)
            kv += 1
        return kv
