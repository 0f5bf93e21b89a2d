"""What masks the steps of an item of a block layout: lists of tiles that are kept whole, by intervals of rows, by bits.

A mask source tells the consumer how many tiles an item walks, walks them (`walk`), and gives a step's packed mask: a
word holds 32 columns of a row, shifted to a thread's first; a step has words for the two rows of a thread.
"""

from __future__ import annotations

from dataclasses import dataclass
from typing import Any, NamedTuple

import cutlass
import cutlass.cute as cute
from cutlass import Int32, const_expr

from gossamer.kernels.hopper.device import instructions
from gossamer.kernels.hopper.device.common import FAR, ROWS, WARPGROUP, Barrier, Opaque, Thread, within_keys
from gossamer.kernels.hopper.device.configurations import ForwardConfig
from gossamer.kernels.hopper.device.row_items import RowItem


class Lists(NamedTuple):
    """The lists of a block layout's rows."""

    entries: cute.Tensor  # (2, n) int32: tile column, pool entry
    lo: cute.Tensor  # (Bl * Hl, Q) int32: the interval of a row
    hi: cute.Tensor
    pool: cute.Tensor  # (P * block_q, block_kv / 32) int32: a bit a pair


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


@dataclass(frozen=True, eq=False)
class Bounds(Opaque):
    """Intervals of an item's rows, which a warp puts into shared memory for the warpgroup that it serves."""

    config: ForwardConfig
    lists: Lists
    item: cute.Tensor
    shared: cute.Tensor  # (block_q, 2, stages)
    warpgroup: Int32
    rows: Int32  # of a head

    @cute.jit
    def load(self, stage):
        """Put what masks the steps of an item into shared memory."""
        c, item = self.config, self.item
        if item[RowItem.INTERVAL_COUNT, stage] > 0:
            mine, lead = self.warpgroup * ROWS + cute.arch.lane_idx(), item[RowItem.LEAD, stage]
            found = []
            for i in cutlass.range_constexpr(ROWS // 32):
                row = item[RowItem.TILE, stage] * c.block_q + mine + 32 * i
                row = row if row < self.rows else self.rows - 1
                found.append((self.lists.lo[lead, row], self.lists.hi[lead, row]))
            start = self.lists.entries[0, item[RowItem.INTERVAL_START, stage]] * c.block_kv
            for i in cutlass.range_constexpr(ROWS // 32):
                self.shared[mine + 32 * i, 0, stage], self.shared[mine + 32 * i, 1, stage] = found[i]
            item[RowItem.FIRST_INTERVAL, stage] = start
        if const_expr(c.lengths):
            item[RowItem.FIRST_COLUMN, stage] = self.lists.entries[0, first_entry(item, stage)] * c.block_kv
        cute.arch.barrier_arrive(barrier_id=Barrier.BOUNDS + self.warpgroup, number_of_threads=WARPGROUP + 32)


@dataclass(frozen=True, eq=False)
class BlockMask(Opaque):
    """The mask source of a block layout. What masks an item's first step is fetched before that step, and kept."""

    config: ForwardConfig
    groups: int
    thread: Thread
    item: cute.Tensor
    bounds: cute.Tensor  # (block_q, 2, stages) in shared memory
    lists: Lists
    lengths: cute.Tensor
    column: Any  # the first step's; then its rows' intervals, whether anything masks it, and its words
    lo: Any
    hi: Any
    masked: Any
    words: Any
    length: Any  # of the item's batch element, less this thread's first column

    with_keys = False  # it is in memory, and needs no key to be there

    @classmethod
    def of(
        cls, config: ForwardConfig, groups: int, thread: Thread, item: Any, bounds: Any, lists: Lists, lengths: Any
    ) -> BlockMask:
        column, lo, hi, masked = one(), two(), two(), one()
        words = cute.make_rmem_tensor((instructions.ROWS, config.step // 32), Int32)
        return cls(config, groups, thread, item, bounds, lists, lengths, column, lo, hi, masked, words, one())

    @property
    def parts(self) -> int:
        """Steps of a tile."""
        return self.config.block_kv // self.config.step

    def reset(self) -> None:
        """No item has begun."""
        self.length.fill(0)

    @cute.jit
    def count(self, stage):
        """How many tiles an item walks."""
        return tiles_of(self.item, stage)

    @cute.jit
    def column_of(self, start, i):
        """The first column of step `i` of a list."""
        return self.lists.entries[0, start + i // self.parts] * self.config.block_kv + i % self.parts * self.config.step

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
            self.length[0] = within_keys(self.lengths[item[RowItem.BATCH, stage]]) - self.thread.quad
        lo, hi = self.row_bounds(stage)
        by_interval = fulls == 0 and intervals > 0
        for r in cutlass.range_constexpr(instructions.ROWS):
            end = self.length[0] if const_expr(self.config.lengths) else Int32(FAR)
            self.lo[r] = lo[r] if by_interval else -FAR
            self.hi[r] = hi[r] if by_interval else end
        self.masked[0] = Int32(1) if fulls == 0 or self.config.lengths else Int32(0)
        if fulls + intervals == 0:  # noqa: SIM102
            if item[RowItem.BITS_COUNT, stage] > 0:
                self.bits(self.words, item[RowItem.BITS_START, stage], Int32(0))

    def masks_first(self) -> Any:
        """Whether anything masks an item's first step."""
        return self.masked[0] != 0

    @cute.jit
    def first(self):
        """The packed mask of an item's first step; all ones when its tile is full."""
        words = cute.make_rmem_tensor((instructions.ROWS, self.config.step // 32), Int32)
        instructions.interval_words(words, self.lo, self.hi, self.column[0])
        for r in cutlass.range_constexpr(instructions.ROWS):
            for n in cutlass.range_constexpr(self.config.step // 32):
                words[r, n] = words[r, n] & self.words[r, n]
        return words

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
                self.bits(words, item[RowItem.BITS_START, stage], 1 - fulls - intervals)
        elif const_expr(self.config.lengths):
            self.edge(words, item[RowItem.FULL_START, stage], 1)
            masked = fulls >= 2
        return masked

    @cute.jit
    def fetch(self, mode: cutlass.Constexpr, words, start, i):
        """The packed mask of step `i` of a list, as far as it is in global memory."""
        if const_expr(mode == "bits"):
            self.bits(words, start, i)
        elif const_expr(mode == "edge"):
            self.edge(words, start, i)

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
            lo[r] = self.bounds[self.thread.row + 8 * r, 0, stage] - self.thread.quad
            hi[r] = self.bounds[self.thread.row + 8 * r, 1, stage] - self.thread.quad
            if const_expr(self.config.lengths):
                hi[r] = cutlass.min(hi[r], self.length[0])
        return lo, hi

    @cute.jit
    def bits(self, words, start, i):
        """The words of step `i` of a list of bits tiles."""
        c = self.config
        entry, part = self.lists.entries[1, start + i // self.parts], i % self.parts
        for r in cutlass.range_constexpr(instructions.ROWS):
            row = self.lists.pool[entry * c.block_q + self.thread.row + 8 * r, None]
            for n in cutlass.range_constexpr(cute.size(words, mode=[1])):
                word = cutlass.Uint32(row[part * (c.step // 32) + n])
                words[r, n] = Int32(word >> cutlass.Uint32(self.thread.quad))
        if const_expr(c.lengths):
            self.below_length(words, self.column_of(start, i), True)

    @cute.jit
    def edge(self, words, start, i):
        """The words of step `i` of a list of full tiles that holds the end of the keys."""
        self.below_length(words, self.column_of(start, i), False)

    @cute.jit
    def below_length(self, words, first, kept: cutlass.Constexpr):
        """The words of columns from `first` on that are below the key length, and, where `kept`, were set before."""
        for n in cutlass.range_constexpr(cute.size(words, mode=[1])):
            within = instructions.below(self.length[0] - first - 32 * n)
            for r in cutlass.range_constexpr(instructions.ROWS):
                words[r, n] = words[r, n] & within if const_expr(kept) else within

    @cute.jit
    def walk(self, consumer, stage, buffer, kv, started):
        """All steps of an item but the first; returns the number of steps so far."""
        c, item, parts, me = self.config, self.item, self.parts, self.thread.warpgroup
        full_start, fulls = item[RowItem.FULL_START, stage], item[RowItem.FULL_COUNT, stage] * parts
        interval_start, intervals = item[RowItem.INTERVAL_START, stage], item[RowItem.INTERVAL_COUNT, stage] * parts
        bits_start, bitses = item[RowItem.BITS_START, stage], item[RowItem.BITS_COUNT, stage] * parts
        kv, done = consumer.open(stage, buffer, kv, started, fulls + intervals + bitses)
        from_interval = done - fulls if done > fulls else Int32(0)
        from_bits = done - fulls - intervals if done > fulls + intervals else Int32(0)
        column = item[RowItem.FIRST_INTERVAL, stage]
        if const_expr(consumer.plan.half_steps):  # noqa: SIM102
            if from_interval > 0 and from_interval < intervals:
                column = self.lists.entries[0, interval_start + from_interval] * c.block_kv
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
        lowest = cute.arch.make_warp_uniform(self.bounds[me * ROWS, 0, stage])
        highest = cute.arch.make_warp_uniform(self.bounds[me * ROWS + ROWS - 1, 1, stage])
        for i in cutlass.range(from_interval, intervals, unroll=1):
            if const_expr(consumer.plan.half_steps):
                # Of a window's two edges each of two warpgroups needs one whole and one half of the other: the one that
                # is done with its half goes on, and the edges take as long as one and a half.
                free = i > 0 and i == intervals - 1 if const_expr(self.groups == 2) else False
                upcoming = column
                if i + 1 < intervals:
                    upcoming = self.lists.entries[0, interval_start + i + 1] * c.block_kv
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
