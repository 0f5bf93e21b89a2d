"""The mask sources of block layouts: of the column kernels, and of dQ by rows."""

from __future__ import annotations

import cutlass
import cutlass.cute as cute
from cutlass import Int32, const_expr

from gossamer.cute import instructions
from gossamer.cute.column_items import ColumnItem
from gossamer.cute.common import FAR, ROWS, Opaque, Thread, computing_thread, within_keys
from gossamer.cute.row_items import RowItem
from gossamer.kernels.hopper.device.backward.block import TileColumnBlock, TileQueryBlock, WideBlock
from gossamer.kernels.hopper.device.backward.common import Kind, Step, shift, two_rows

WORDS = ROWS // 32  # of a key and 64 queries


@cute.jit
def clear_pairs(packed, words, begin: cutlass.Constexpr = 0):
    """16-bit elements of 64 queries, from register `begin` on, whose bit is not set become zero."""
    for i in cutlass.range_constexpr(ROWS // 4):
        word = words[i % 2, i // 8]
        first = const_expr(1 << (8 * (i // 2 % 4)))
        low = Int32(65535) if (word & first) != 0 else Int32(0)
        high = Int32(-65536) if (word & (2 * first)) != 0 else Int32(0)
        packed[begin + i] = packed[begin + i] & (low | high)


class TileColumnMasks(Opaque):
    """What the steps of a warpgroup's 64 keys keep: their descriptions say where it is written."""

    def __init__(self, block: TileColumnBlock) -> None:
        self.config, self.thread, self.block = block.config, computing_thread(), block
        self.halves = self.config.step // ROWS
        self.kinds = cute.make_rmem_tensor((self.halves,), Int32)
        # Of each of this thread's keys the two words, or the first query that it keeps and the one behind the last.
        self.kept = cute.make_rmem_tensor((instructions.ROWS, WORDS, self.halves), Int32)
        self.kept.fill(0)

    @cute.jit
    def load(self, stage):
        """Load what masks the step in a stage of Q; returns its kind."""
        for half in cutlass.range_constexpr(self.halves):
            self.kinds[half] = self.load_half(stage * self.halves + half, half)
        return self.kinds[0]

    @cute.jit
    def load_half(self, place, half: cutlass.Constexpr):
        """The kind of 64 queries; loads what masks them."""
        steps, a, kept = self.block.steps, self.block.arguments, self.kept
        kind = cute.arch.make_warp_uniform(steps[Step.KIND, place])
        entry = steps[Step.ENTRY, place]
        keys = self.block.attended
        if const_expr(self.config.edges):  # noqa: SIM102
            if kind == Kind.INTERVAL:
                kind = cute.arch.make_warp_uniform(steps[Step.KEPT + self.thread.warpgroup, place])
        if kind == Kind.INTERVAL:
            for r in cutlass.range_constexpr(instructions.ROWS):
                key = self.block.item[ColumnItem.TILE] * self.config.block_kv + self.thread.row + 8 * r
                kept[r, 0, half], kept[r, 1, half] = Int32(0), Int32(0)
                if key < keys:
                    kept[r, 0, half], kept[r, 1, half] = Int32(-FAR), Int32(FAR)
                    if entry >= 0:
                        kept[r, 0, half], kept[r, 1, half] = a.lo[entry, key], a.hi[entry, key]
        elif kind == Kind.BITS:
            word = steps[Step.WORD, place] // WORDS
            for r in cutlass.range_constexpr(instructions.ROWS):
                row = cute.local_tile(a.pool[entry + self.thread.row + 8 * r, None], (WORDS,), (word,))
                for w in cutlass.range_constexpr(WORDS):
                    kept[r, w, half] = row[w]
                if const_expr(self.config.lengths):
                    key = self.block.item[ColumnItem.TILE] * self.config.block_kv + self.thread.row + 8 * r
                    if key >= keys:
                        kept[r, None, half].fill(0)
        if const_expr(half > 0):  # noqa: SIM102
            if kind == Kind.NOTHING:
                kept[None, None, half].fill(0)
        return kind

    @cute.jit
    def clear(self, packed, stage):
        """16-bit elements of the step in a stage of Q that it does not keep become zero."""
        for half in cutlass.range_constexpr(self.halves):
            if self.kinds[half] != Kind.FULL:
                words = cute.make_rmem_tensor((instructions.ROWS, WORDS), Int32)
                if self.kinds[half] == Kind.INTERVAL:
                    lo, hi = self.kept[None, 0, half], self.kept[None, 1, half]
                    first = self.block.steps[Step.QUERY, stage * self.halves + half] + self.thread.quad
                    instructions.interval_words(words, lo, hi, first)
                else:
                    for r in cutlass.range_constexpr(instructions.ROWS):
                        for w in cutlass.range_constexpr(WORDS):
                            words[r, w] = shift(self.kept[r, w, half], self.thread)
                clear_pairs(packed, words, half * ROWS // 4)


class WideColumnMasks(Opaque):
    """As `TileColumnMasks`, of items of 64 keys in tiles of one or two times as many: words for a step's scores."""

    def __init__(self, block: WideBlock, thread: Thread) -> None:
        self.config, self.thread, self.block = block.config, thread, block
        self.words = cute.make_rmem_tensor((instructions.ROWS, WORDS), Int32)
        self.words.fill(-1)

    @cute.jit
    def load(self, stage):
        """Load what masks the step in a stage of Q; returns its kind."""
        steps, a, item, column = self.block.steps, self.block.arguments, self.block.item, self.thread.quad
        kind = cute.arch.make_warp_uniform(steps[Step.KIND, stage])
        if kind != Kind.FULL and kind != Kind.END:
            entry, first, keys = steps[Step.ENTRY, stage], steps[Step.QUERY, stage], self.block.attended
            for r in cutlass.range_constexpr(instructions.ROWS):
                key = item[ColumnItem.TILE] * ROWS + self.thread.row + 8 * r
                if kind == Kind.INTERVAL:
                    lo, hi = Int32(0), Int32(0)
                    if key < keys:
                        lo, hi = Int32(-FAR), Int32(FAR)
                        if entry >= 0:
                            lo, hi = a.lo[entry, key] - column, a.hi[entry, key] - column
                    for w in cutlass.range_constexpr(WORDS):
                        at = first + 32 * w
                        self.words[r, w] = instructions.below(hi - at) & ~instructions.below(lo - at)
                else:
                    # The producer counts rows of a pool of 64 keys an entry.
                    pieces = const_expr(self.config.tile_kv // ROWS)
                    row = entry * pieces + item[ColumnItem.TILE] % pieces * ROWS + self.thread.row + 8 * r
                    for w in cutlass.range_constexpr(WORDS):
                        self.words[r, w] = shift(a.pool[row, steps[Step.WORD, stage] + w], self.thread)
                    if const_expr(self.config.lengths):  # noqa: SIM102
                        if key >= keys:
                            self.words[r, None].fill(0)
        return kind


class TileRowMasks(Opaque):
    """The mask source of a block layout: the lists of an item's row of tiles."""

    has_bounds = True

    def __init__(self, block: TileQueryBlock) -> None:
        self.config, self.thread, self.item = block.config, computing_thread(), block.item
        self.arguments = block.arguments
        self.steps = self.config.block_kv // self.config.step  # of a tile
        self.lo, self.hi = two_rows(Int32), two_rows(Int32)  # bounds of this thread's rows, less its first column
        self.length = cute.make_rmem_tensor((1,), Int32)  # keys that are attended, likewise

    @cute.jit
    def begin(self, batch):
        """Load what the whole item needs; returns its row of bounds and the number of its tiles of intervals."""
        lead, intervals = self.item[RowItem.LEAD], self.item[RowItem.INTERVAL_COUNT]
        if const_expr(self.config.lengths):
            self.length[0] = within_keys(self.arguments.lengths[batch]) - self.thread.quad
        return lead, intervals

    @cute.jit
    def load_row(self, bounds, r: cutlass.Constexpr, row):
        """Load the interval of a row of this thread."""
        lead, intervals = bounds
        self.lo[r], self.hi[r] = Int32(0), Int32(0)
        if intervals > 0:
            self.lo[r] = self.arguments.lo[lead, row] - self.thread.quad
            self.hi[r] = self.arguments.hi[lead, row] - self.thread.quad
        if const_expr(self.config.lengths):
            self.hi[r] = cutlass.min(self.hi[r], self.length[0])

    @cute.jit
    def walk(self, consumer, bounds, kv):
        """All steps of an item: of its full tiles, of those of intervals, of those of bits."""
        c, item, entries = self.config, self.item, self.arguments.lists
        first = kv
        fulls = item[RowItem.FULL_COUNT] * self.steps
        unmasked = fulls
        if const_expr(c.lengths):  # the last full tile may hold the end of the keys
            unmasked -= self.steps if fulls > 0 else 0
        for _ in cutlass.range(unmasked, unroll=1):
            consumer.step(Kind.FULL, kv, first)
            kv += 1
        if const_expr(c.lengths):
            for i in cutlass.range(unmasked, fulls, unroll=1):
                column = entries[0, item[RowItem.FULL_START] + i // self.steps]
                consumer.step(Kind.EDGE, kv, first, part=i % self.steps, column=column)
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
                consumer.step(kind, kv, first, current, i % self.steps, column)
                kv += 1
        return kv

    @cute.jit
    def load(self, words, kind: cutlass.Constexpr, kv, entry, part, column):
        """The words of what a step keeps, shifted to this thread's columns."""
        c, thread = self.config, self.thread
        if const_expr(kind is Kind.BITS):
            for r in cutlass.range_constexpr(instructions.ROWS):
                row = self.arguments.pool[entry * c.block_q + thread.row + 8 * r, None]
                for n in cutlass.range_constexpr(c.step // 32):
                    words[r, n] = shift(row[part * (c.step // 32) + n], thread)
        elif const_expr(kind is Kind.EDGE):
            words.fill(-1)
        if const_expr(kind is Kind.EDGE or (kind is Kind.BITS and c.lengths)):
            first = column * c.block_kv + part * c.step
            for n in cutlass.range_constexpr(c.step // 32):
                within = instructions.below(self.length[0] - first - 32 * n)
                for r in cutlass.range_constexpr(instructions.ROWS):
                    words[r, n] = words[r, n] & within
        if const_expr(kind is Kind.INTERVAL):
            instructions.interval_words(words, self.lo, self.hi, entry * c.block_kv + part * c.step)
