"""The mask source of dQ by rows over a block layout."""

from __future__ import annotations

from enum import Enum
from typing import Any, NamedTuple

import cutlass
import cutlass.cute as cute
from cutlass import Int32, const_expr

from gossamer.kernels.hopper.device import instructions
from gossamer.kernels.hopper.device.backward.warpgroup import shift, two_rows
from gossamer.kernels.hopper.device.common import Opaque, computing_thread, within_keys
from gossamer.kernels.hopper.device.row_items import RowItem


class Kind(Enum):
    """What a step keeps: all pairs; those of keys that exist; an interval of each row; those whose bit is set."""

    FULL, EDGE, INTERVAL, BITS = range(4)


class Place(NamedTuple):
    """A step of a walk of tiles."""

    entry: Any  # its tile: the column of one of intervals, the pool entry of one of bits
    part: Any  # the step in the tile
    column: Any  # the tile column, where the end of the keys matters besides


class TileRowMasks(Opaque):
    """The mask source of a block layout: the lists of an item's row of tiles."""

    has_bounds = True

    def __init__(self, block: Any) -> None:
        self.config, self.thread, self.item = block.config, computing_thread(), block.item
        self.lists, self.lengths = block.arguments.lists, block.arguments.lengths
        self.steps = self.config.block_kv // self.config.step  # of a tile
        self.lo, self.hi = two_rows(Int32), two_rows(Int32)  # bounds of this thread's rows, less its first column
        self.length = cute.make_rmem_tensor((1,), Int32)  # keys that are attended, likewise

    @cute.jit
    def begin(self, batch):
        """Load what the whole item needs; returns its row of bounds and the number of its tiles of intervals."""
        lead, intervals = self.item[RowItem.LEAD], self.item[RowItem.INTERVAL_COUNT]
        if const_expr(self.config.lengths):
            self.length[0] = within_keys(self.lengths[batch]) - self.thread.quad
        return lead, intervals

    @cute.jit
    def load_row(self, bounds, r: cutlass.Constexpr, row):
        """Load the interval of a row of this thread."""
        lead, intervals = bounds
        self.lo[r], self.hi[r] = Int32(0), Int32(0)
        if intervals > 0:
            self.lo[r] = self.lists.lo[lead, row] - self.thread.quad
            self.hi[r] = self.lists.hi[lead, row] - self.thread.quad
        if const_expr(self.config.lengths):
            self.hi[r] = cutlass.min(self.hi[r], self.length[0])

    @cute.jit
    def walk(self, consumer, bounds, kv):
        """All steps of an item: of its full tiles, of those of intervals, of those of bits."""
        c, item, entries = self.config, self.item, self.lists.entries
        first = kv
        fulls = item[RowItem.FULL_COUNT] * self.steps
        unmasked = fulls
        if const_expr(c.lengths):  # the last full tile may hold the end of the keys
            unmasked -= self.steps if fulls > 0 else 0
        for _ in cutlass.range(unmasked, unroll=1):
            consumer.step(Kind.FULL, Place(None, None, None), kv, first)
            kv += 1
        if const_expr(c.lengths):
            for i in cutlass.range(unmasked, fulls, unroll=1):
                column = entries[0, item[RowItem.FULL_START] + i // self.steps]
                consumer.step(Kind.EDGE, Place(None, i % self.steps, column), kv, first)
                kv += 1
        for kind, row in ((Kind.INTERVAL, 0), (Kind.BITS, 1)):
            at = item[RowItem.INTERVAL_START] if const_expr(kind is Kind.INTERVAL) else item[RowItem.BITS_START]
            tiles = bounds[1] if const_expr(kind is Kind.INTERVAL) else item[RowItem.BITS_COUNT]
            upcoming = Int32(0)
            if tiles > 0:
                upcoming = entries[row, at]
            for i in cutlass.range(tiles * self.steps, unroll=1):
                current, following = upcoming, (i + 1) // self.steps
                if following < tiles:
                    upcoming = entries[row, at + following]
                column = Int32(0)
                if const_expr(kind is Kind.BITS and c.lengths):
                    column = entries[0, at + i // self.steps]
                consumer.step(kind, Place(current, i % self.steps, column), kv, first)
                kv += 1
        return kv

    @cute.jit
    def load(self, words, kind: cutlass.Constexpr, place, kv):
        """The words of what a step keeps, shifted to this thread's columns."""
        c, thread = self.config, self.thread
        if const_expr(kind is Kind.BITS):
            for r in cutlass.range_constexpr(instructions.ROWS):
                row = self.lists.pool[place.entry * c.block_q + thread.row + 8 * r, None]
                for n in cutlass.range_constexpr(c.step // 32):
                    words[r, n] = shift(row[place.part * (c.step // 32) + n], thread)
        elif const_expr(kind is Kind.EDGE):
            words.fill(-1)
        if const_expr(kind is Kind.EDGE or (kind is Kind.BITS and c.lengths)):
            first = place.column * c.block_kv + place.part * c.step
            for n in cutlass.range_constexpr(c.step // 32):
                within = instructions.below(self.length[0] - first - 32 * n)
                for r in cutlass.range_constexpr(instructions.ROWS):
                    words[r, n] = words[r, n] & within
        if const_expr(kind is Kind.INTERVAL):
            instructions.interval_words(words, self.lo, self.hi, place.entry * c.block_kv + place.part * c.step)
