"""The items of SparseK attention: a tile of queries of a head, made of its number and the counts of its list."""

from __future__ import annotations

from dataclasses import dataclass
from enum import IntEnum

import cutlass.cute as cute
from cutlass import Int32

from gossamer.cute.row_items import RowItem
from gossamer.cute.work import WorkList
from gossamer.sparse_k.hopper.configurations import TILE


class SparseKItem(IntEnum):
    """The words of an item beside those of `RowItem`. Its steps: its own keys, those before in its window, its list."""

    FIRST = 4  # key of the window before the tile, a multiple of the step
    WINDOW = 5  # steps of the window before the tile
    EDGES = 6  # the first of these steps, those with a pair outside the window
    WHOLE = 7  # steps of the list whose keys live through the tile
    REST = 8  # the others
    LISTED = 9  # keys of the list
    LIST = 10  # the number of the list
    UNIT = 13  # row of scores and thresholds


@dataclass(frozen=True, eq=False)
class SparseKRows(WorkList):
    """The tiles of each head one after the other, the last first, since neighbours read the same keys."""

    counts: cute.Tensor  # (B U, tiles, 2) int32
    ends: cute.Tensor  # (B U, 1, n) int32, the last: the number of keys that are read where a list is too short
    room: Int32  # the capacity of a list
    heads: Int32  # of a batch element
    units: Int32  # heads of scores of a batch element
    window: Int32

    @cute.jit
    def draw(self, w):
        """The word of item `w` that this lane writes."""
        word = Int32(0)
        if w < self.count:
            lane = cute.arch.lane_idx()
            tiles = cute.size(self.counts, mode=[1])
            tile = tiles - 1 - w % tiles
            batch, head = w // tiles // self.heads, w // tiles % self.heads
            unit = batch * self.units + head // (self.heads // self.units)
            through, listed = self.counts[unit, tile, 0], self.counts[unit, tile, 1]
            if listed > self.room:
                through, listed = Int32(0), self.ends[unit, 0, cute.size(self.ends, mode=[2]) - 1]
            start = tile * TILE
            before = start - self.window if start > self.window else Int32(0)
            first = before // TILE * TILE
            edge = start + TILE - 1 - self.window
            inner = cute.ceil_div(edge, TILE) * TILE if edge > 0 else Int32(0)
            inner = inner if inner > first else first
            inner = inner if inner < start else start
            whole = through // TILE
            words = {
                RowItem.BATCH: batch, RowItem.HEAD: head, RowItem.TILE: tile, RowItem.SLOT: Int32(-1),
                RowItem.VALID: Int32(1), SparseKItem.FIRST: first, SparseKItem.WINDOW: (start - first) // TILE,
                SparseKItem.EDGES: (inner - first) // TILE, SparseKItem.WHOLE: whole,
                SparseKItem.REST: cute.ceil_div(listed, TILE) - whole, SparseKItem.LISTED: listed,
                SparseKItem.LIST: unit * tiles + tile, SparseKItem.UNIT: unit,
            }  # fmt: skip
            for place, value in words.items():
                word = value if lane == int(place) else word
        return word
