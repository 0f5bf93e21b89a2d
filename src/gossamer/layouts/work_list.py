"""Work items: which program computes which range of which tile row, longest first, long rows split."""

from __future__ import annotations

from collections.abc import Mapping
from typing import NamedTuple

import numpy as np

from gossamer.layouts.items import BEGIN, COUNT, END, FIRST, ITEM, LEAD, MERGE, SLOT, TILE
from gossamer.layouts.walk import Walk


class WorkItems(NamedTuple):
    """The items of a walk, for each of its Bl x Hl lists.

    A range counts tiles in the order full, interval, bits of the row's lists. A row done by one item has slot -1;
    the parts of a split row have consecutive slots, whose results are combined in slot order.
    """

    items: np.ndarray  # (n, ITEM) int32, longest range first; their fields are those of `layouts.items`
    merges: np.ndarray  # (m, MERGE) int32

    @property
    def slots(self) -> int:
        """The number of partial results."""
        return int(self.merges[:, COUNT].sum())


# A split row costs a write and a read of its accumulator for each part, about as much as one tile: not for less.
FEWEST_TILES = 16
# In float32 a tile takes more than twice as long.
FEWEST_IN_FLOAT32 = 8
# A part may take this share of the time that each multiprocessor works.
PARTS_PER_PROCESSOR = 4


def row_lengths(walk: Walk) -> np.ndarray:
    """Tiles listed for each tile row of a numpy walk, (Bl, Hl, T) int64."""
    return sum(tiles.counts.astype(np.int64) for tiles in walk.lists.values())


def most_listed(walk: Walk) -> int:
    """The most tiles that a row of a walk may list, from its shapes: of arrays on a device, which are not read."""
    entries = sum(int(tiles.indices.shape[0]) for tiles in walk.lists.values())
    return min(-(-walk.columns // walk.block_columns), entries)


def item_limit(
    listed: int, longest: int, copies: int, processors: int, limit: int | None = None, fewest: int = FEWEST_TILES
) -> int:
    """The most tiles in a work item, for rows that would keep one of `processors` busy for too long.

    Args:
        listed: tiles in all rows of a walk; longest: in its longest row.
        copies: how often the rows are computed, by batch elements and heads that share them.
        limit: replaces the automatic one.
        fewest: tiles for which a row is not split.
    """
    automatic = max(fewest, listed * copies // (processors * PARTS_PER_PROCESSOR))
    return min(limit or automatic, max(longest, 1))


def work_items(walk: Walk, limit: int) -> WorkItems:
    """Split the rows of a numpy walk into ranges of at most `limit` tiles; empty rows get one empty item each.

    Raises:
        ValueError: `limit` is not positive, or the walk's arrays are not numpy arrays.
    """
    if limit < 1:
        raise ValueError(f"limit must be at least 1 tile, got {limit}")
    if not isinstance(walk.lo, np.ndarray):
        raise ValueError("work items are made from a layout of numpy arrays, got torch tensors")
    lengths = row_lengths(walk).reshape(-1)
    row, begin, end, slot, pieces = split_rows(lengths, limit)
    lead, tile = np.divmod(row, walk.tiles)
    items = fill(len(row), ITEM, {LEAD: lead, TILE: tile, BEGIN: begin, END: end, SLOT: slot})
    return WorkItems(items, merges_of(pieces, walk.tiles))


def merges_of(pieces: np.ndarray, tiles: int) -> np.ndarray:
    """The merges (m, MERGE) of rows that are split, in `tiles` tile rows of each list, from the pieces of every row."""
    row = np.flatnonzero(pieces > 1)
    lead, tile = np.divmod(row, tiles)
    fields = {LEAD: lead, TILE: tile, FIRST: np.cumsum(pieces[row]) - pieces[row], COUNT: pieces[row]}
    return fill(len(row), MERGE, fields)


def fill(number: int, width: int, fields: Mapping[int, np.ndarray]) -> np.ndarray:
    """(number, width) int32 rows with some fields written, the others 0."""
    rows = np.zeros((number, width), dtype=np.int32)
    for field, value in fields.items():
        rows[:, field] = value
    return rows


def split_rows(lengths: np.ndarray, limit: int) -> tuple[np.ndarray, np.ndarray, np.ndarray, np.ndarray, np.ndarray]:
    """Split rows of given lengths into ranges of at most `limit`, equal to within one.

    Returns:
        Of each range, longest first: its row, begin, end and slot (-1 for a row that is not split; slots are numbered
        along the rows); and of each row, its number of ranges (1 for an empty one).
    """
    pieces = np.maximum(1, -(-lengths // limit))
    row = np.repeat(np.arange(len(lengths)), pieces)
    piece = np.arange(len(row)) - np.repeat(np.cumsum(pieces) - pieces, pieces)
    begin, end = piece * lengths[row] // pieces[row], (piece + 1) * lengths[row] // pieces[row]
    split = pieces > 1
    slot = np.full(len(row), -1, dtype=np.int64)
    slot[split[row]] = np.arange(int(pieces[split].sum()))
    order = np.argsort(begin - end, kind="stable")
    return row[order], begin[order], end[order], slot[order], pieces
