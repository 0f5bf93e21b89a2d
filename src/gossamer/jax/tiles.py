"""The tiles of a block layout as arrays of JAX: of each row those that it visits, rows of a like number together.

Made from a layout of numpy arrays, once. All shapes follow from the pattern, none from batch or heads, so that the same
lists serve every shard of a call.
"""

from __future__ import annotations

from typing import Any, NamedTuple

import numpy as np

from gossamer.layouts.block import BlockLayout
from gossamer.layouts.kept import keeps_all
from gossamer.layouts.walk import Walk

FULL, INTERVAL, NOTHING = -1, -2, -3  # what masks a tile; an entry of the pool is its number
PIECE = 16  # tiles of a long row that are computed at a time
Array = Any  # numpy.ndarray or jax.Array


class TileLists(NamedTuple):
    """One direction of a layout, as data. L = Bl * Hl lists, each of T rows of tiles."""

    starts: Array  # (L * T,) int32: where the tiles of a row begin
    counts: Array  # (L * T,) int32
    columns: Array  # (n,) int32: tile columns
    masks: Array  # (n,) int32: FULL, INTERVAL or an entry of the pool
    lo: Array  # (L, T * block_rows) int32: row r of an interval tile keeps columns [lo[r], hi[r]); (0, 0) without any
    hi: Array
    pool: Array  # (P, block_rows, block_columns // 32) uint32
    groups: tuple[Array, ...]  # rows (n,) int32 with a like number of tiles
    places: Array  # (L * T,) int32: where a row is in all groups, one after the other; those of no tile come last


class Extent(NamedTuple):
    """One direction of a layout, as configuration."""

    rows: int
    columns: int
    block_rows: int
    block_columns: int
    lead: tuple[int, int]  # (Bl, Hl)
    widths: tuple[int, ...]  # the most tiles of a row, of each group
    unkept: bool = True  # whether there may be rows or columns that are of no pair

    @property
    def tiles(self) -> int:
        """T, of one list."""
        return -(-self.rows // self.block_rows)

    @property
    def tile_columns(self) -> int:
        return -(-self.columns // self.block_columns)


class Walked(NamedTuple):
    """One direction of a layout."""

    extent: Extent
    lists: TileLists


def both_directions(layout: BlockLayout) -> tuple[Walked, Walked]:
    """The rows of a layout of numpy arrays, and its columns."""
    unkept = not all(keeps_all(layout))
    return walked(layout.rows, unkept), walked(layout.columns, unkept)


def walked(walk: Walk, unkept: bool) -> Walked:
    """A walk of numpy arrays as lists; `unkept` as an extent has it."""
    starts, counts, columns, masks = _merged(walk)
    groups, widths = _groups(counts)
    places = np.full(len(counts), sum(map(len, groups)), dtype=np.int32)
    listed = np.concatenate([*groups, np.zeros(0, np.int32)])
    places[listed] = np.arange(len(listed))
    Bl, Hl = walk.lead
    extent = Extent(walk.rows, walk.columns, walk.block_rows, walk.block_columns, (Bl, Hl), widths, unkept)
    lo = hi = np.zeros((0, 0), np.int32)
    if walk.lo.size:
        lo, hi = _padded(walk.lo, extent), _padded(walk.hi, extent)
    lists = TileLists(starts, counts, columns, masks, lo, hi, walk.pool, groups, places)
    return Walked(extent, lists)


def _merged(walk: Walk) -> tuple[np.ndarray, np.ndarray, np.ndarray, np.ndarray]:
    """(starts, counts, columns, masks): the three lists of each row as one, ascending."""
    every = []
    for kind, tiles in walk.lists.items():
        row, at = tiles.listed()
        mask = walk.pool_index[at] if kind == "bits" else np.full(len(at), FULL if kind == "full" else INTERVAL)
        every.append((row, tiles.indices[at], mask))
    row, column, mask = (np.concatenate(parts) for parts in zip(*every, strict=True))
    order = np.lexsort((column, row))
    Bl, Hl = walk.lead
    counts = np.bincount(row, minlength=Bl * Hl * walk.tiles)
    starts = np.cumsum(counts) - counts
    one = np.zeros(1, np.int32) if not len(order) else np.zeros(0, np.int32)  # of an array something is always read
    return (
        starts.astype(np.int32), counts.astype(np.int32), np.concatenate([column[order], one]).astype(np.int32),
        np.concatenate([mask[order], one]).astype(np.int32),
    )  # fmt: skip


def _groups(counts: np.ndarray) -> tuple[tuple[np.ndarray, ...], tuple[int, ...]]:
    """Rows by their number of tiles: with the most of them, those of over half of it, and so on down.

    Rows of over PIECE tiles are one group, longest first: they are computed piece by piece, as many as each has.
    """
    found: list[np.ndarray] = []
    widths: list[int] = []
    left = np.flatnonzero(counts)
    order = np.argsort(-counts[left], kind="stable")
    left = left[order]
    while len(left):
        most = int(counts[left].max())
        chosen = counts[left] > (PIECE if most > PIECE else most // 2)
        rows = left[chosen] if most > PIECE else np.sort(left[chosen])
        found.append(rows.astype(np.int32))
        widths.append(most)
        left = left[~chosen]
    return tuple(found), tuple(widths)


def _padded(bound: np.ndarray, extent: Extent) -> np.ndarray:
    """Bounds of the rows of whole tiles, (L, T * block_rows)."""
    flat = np.ascontiguousarray(bound, dtype=np.int32).reshape(-1, extent.rows)
    return np.pad(flat, ((0, 0), (0, extent.tiles * extent.block_rows - extent.rows)))
