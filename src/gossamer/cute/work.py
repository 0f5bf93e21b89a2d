"""Lists of items of work, from which the blocks of a launch draw, and what of an item lies below its key length."""

from __future__ import annotations

from dataclasses import dataclass
from typing import Any

import cutlass
import cutlass.cute as cute
from cutlass import Int32, const_expr

from gossamer.cute.common import ROWS, Opaque, Ring, within_keys
from gossamer.cute.row_items import ITEM, LISTS, RowItem


@dataclass(frozen=True, eq=False)
class WorkList(Opaque):
    """The items of a launch. Descriptions are read by a warp, a word a lane."""

    items: cute.Tensor  # (n, ITEM) int32
    tile_counter: cute.Tensor  # (1,) int32: items taken; zero before and after
    count: Int32  # of the items that are drawn

    @cute.jit
    def load(self, w, pieces: cutlass.Constexpr = 1):
        """This lane's word of item `w`; all zero (not valid) past the end. A listed item is drawn as `pieces`."""
        lane = cute.arch.lane_idx()
        word = Int32(0)
        if w < self.count and lane < ITEM:
            word = self.items[w // pieces, lane]
        return word

    def first(self) -> Any:
        """This lane's word of the item with which this block starts: that of its own index."""
        block, _, _ = cute.arch.block_idx()
        return self.draw(block)

    def next(self) -> Any:
        """This lane's word of the next item that nobody has taken."""
        return self.draw(self.take())

    def draw(self, w: Any) -> Any:
        """This lane's word of item `w`, as roles are to see it."""
        return self.load(w)

    @cute.jit
    def take(self):
        """The number of the next item that nobody has taken.

        There is one draw for each item, made near its end: blocks that are late take fewer items. The last draw of all
        resets the counter.
        """
        drawn = Int32(0)
        blocks, _, _ = cute.arch.grid_dim()
        if cute.arch.lane_idx() == 0:
            drawn = cute.arch.atomic_add(self.tile_counter.iterator, Int32(1), sem="relaxed", scope="gpu")
            if drawn == self.count - 1:
                self.tile_counter[0] = Int32(0)
        return cute.arch.shuffle_sync(drawn, 0) + blocks


@dataclass(frozen=True, eq=False)
class ItemRing(Ring):
    """A ring of descriptions of items in shared memory."""

    item: cute.Tensor  # (ITEM, stages)

    @cute.jit
    def describe(self, n, word):
        """Write the n-th description, a word of each lane, when there is room; returns its stage."""
        stage, phase = self.place(n)
        lane = cute.arch.lane_idx()
        self.wait_empty(stage, phase)
        if lane < ITEM:
            self.item[lane, stage] = word
        cute.arch.sync_warp()
        return stage

    @cute.jit
    def publish(self, n, word):
        """Fill the n-th use with a description, a word of each lane."""
        stage = self.describe(n, word)
        if cute.arch.lane_idx() == 0:
            cute.arch.mbarrier_arrive(self.full + stage)

    @cute.jit
    def end(self, stage):
        """Publish a description that says that there are no more items."""
        with cute.arch.elect_one():
            cute.arch.mbarrier_arrive(self.full + stage)

    @cute.jit
    def forget(self, stage):
        """This warp has read a description."""
        cute.arch.sync_warp()
        if cute.arch.lane_idx() == 0:
            cute.arch.mbarrier_arrive(self.empty + stage)


@dataclass(frozen=True, eq=False)
class TileRows(WorkList):
    """Items of rows of a block layout. With lengths, their lists are cut at that of their batch element."""

    columns: cute.Tensor  # (n,) int32: tile columns of all lists, ascending in each with lengths
    lengths: cute.Tensor | None  # (B,) int32
    block_kv: int
    has_lengths: bool

    @cute.jit
    def draw(self, w):
        """This lane's word of item `w`."""
        word = self.load(w)
        if const_expr(self.has_lengths):
            batch = cute.arch.shuffle_sync(word, RowItem.BATCH)
            end = cute.ceil_div(within_keys(self.lengths[batch]), self.block_kv)
            for start, count in LISTS.values():
                kept = count_below(
                    self.columns, cute.arch.shuffle_sync(word, start), cute.arch.shuffle_sync(word, count), end
                )
                if cute.arch.lane_idx() == count:
                    word = kept
        return word


@dataclass(frozen=True, eq=False)
class GatheredRows(WorkList):
    """Items of rows with one list of columns each, of which with lengths the last is the end: see `RowItem`."""

    columns: cute.Tensor  # (n,) int32: columns of all lists, ascending in each
    lengths: cute.Tensor  # (B,) int32
    has_lengths: bool

    @cute.jit
    def draw(self, w):
        """This lane's word of item `w`."""
        word = self.load(w)
        if const_expr(self.has_lengths):
            lane = cute.arch.lane_idx()
            limit = within_keys(self.lengths[cute.arch.shuffle_sync(word, RowItem.BATCH)])
            first = cute.arch.shuffle_sync(word, RowItem.BITS_START) * ROWS
            end = cute.arch.shuffle_sync(word, RowItem.FIRST_COLUMN)
            kept = count_below(self.columns, first, end - first, limit)
            if lane == RowItem.FIRST_COLUMN:
                word = first + kept
            if lane == RowItem.BITS_COUNT:
                word = cute.ceil_div(kept, ROWS)
        return word


@cute.jit
def count_below(columns, first, count, limit):
    """How many of the ascending columns `first` to `first + count` are below `limit`.

    The warp looks at 32 places at a time.
    """
    low, high = Int32(0), count
    while low < high:
        step = cute.ceil_div(high - low, 32)
        place = low + cute.arch.lane_idx() * step
        below = Int32(0)
        if place < high:
            below = Int32(1) if columns[first + place] < limit else Int32(0)
        number = cute.arch.popc(cute.arch.vote_ballot_sync(below != 0))
        # The last place found below the limit is counted, the first that is not is the end.
        end = low + number * step
        high = end if end < high else high
        low = low + (number - 1) * step + 1 if number > 0 else high
    return low
