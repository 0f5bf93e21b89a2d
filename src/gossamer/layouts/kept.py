"""The rows and columns of a layout that have pairs: no result may depend on what the others hold."""

from __future__ import annotations

import math
from typing import NamedTuple

import numpy as np

from gossamer.layouts.block import BlockLayout
from gossamer.layouts.walk import Walk
from gossamer.patterns.grid import WORD

AT_ONCE = 2**24  # rows that are looked at together


class KeptRows(NamedTuple):
    """The rows and keys of a layout that have pairs, of each (Bl, Hl)."""

    first: np.ndarray  # (Bl, Hl, Q) int64: the first key of each row; K where it keeps none
    keys: np.ndarray  # (Bl, Hl, K) bool: those that any row keeps

    @property
    def rows(self) -> np.ndarray:
        """(Bl, Hl, Q) bool: the rows that keep anything."""
        return self.first < self.keys.shape[-1]


def kept_of(layout: BlockLayout) -> KeptRows:
    """The rows and keys that a layout keeps; one of tensors is read, from the host if it was built there.

    Examples:
        >>> from gossamer.layouts.kept import kept_of
        >>> kept = kept_of(gs.SlidingWindow(2).layout(4, 9, block_q=32, block_kv=32, q_offset=3))
        >>> kept.first.tolist(), kept.keys.astype(int).tolist()
        ([[[1, 2, 3, 4]]], [[[0, 1, 1, 1, 1, 1, 1, 0, 0]]])
    """
    host = _on_host(layout)
    walk, columns = host.rows, host.columns
    first = np.full((math.prod(walk.lead) * walk.tiles, walk.block_rows), walk.columns, np.int64)
    for kind in (_full, _interval, _bits):
        kind(walk, first)
    return KeptRows(_existing(walk, first), _existing(columns, rows_kept(columns)))


def keeps_all(layout: BlockLayout) -> tuple[bool, bool]:
    """Whether every row of a layout keeps a key, and whether every key is kept by a row."""
    host = _on_host(layout)
    return every_row_kept(host.rows), every_row_kept(host.columns)


def every_row_kept(walk: Walk, listed: bool = False) -> bool:
    """Whether every row of a walk of numpy arrays keeps something; `listed`: of the tile rows that list a tile."""
    full, interval, bits = (tiles.counts.reshape(-1) for tiles in walk.lists.values())
    at = np.flatnonzero((full == 0) & (interval + bits >= int(listed)))  # tile rows of which a row may keep nothing
    together = max(1, AT_ONCE // walk.block_rows)
    exist = (np.arange(walk.tiles * walk.block_rows) < walk.rows).reshape(walk.tiles, -1)
    for first in range(0, at.size, together):
        some = at[first : first + together]
        if (~rows_kept(walk, some) & exist[some % walk.tiles]).any():
            return False
    return True


def rows_kept(walk: Walk, some: np.ndarray | None = None) -> np.ndarray:
    """(n, block_rows) bool: the rows of some tile rows, or of all, counted over all leads, that keep anything."""
    some = np.arange(walk.full.counts.size) if some is None else some
    full, interval, bits = (tiles.counts.reshape(-1)[some] for tiles in walk.lists.values())
    kept = np.repeat(full[:, None] > 0, walk.block_rows, axis=1)
    if interval.any():
        lo, hi = (_of_tiles(walk, x)[some] for x in (walk.lo, walk.hi))
        starts = walk.interval.starts.reshape(-1)[some]
        for n in range(int(interval.max())):  # of lists that are given, not all that a row's interval meets are listed
            listed = np.flatnonzero(interval > n)
            begin = walk.interval.indices[starts[listed] + n][:, None].astype(np.int64) * walk.block_columns
            kept[listed] |= np.maximum(lo[listed], begin) < np.minimum(hi[listed], begin + walk.block_columns)
    entry_rows, starts = walk.pool.any(axis=-1), walk.bits.starts.reshape(-1)[some]
    for n in range(int(bits.max(initial=0))):
        listed = np.flatnonzero(bits > n)
        kept[listed] |= entry_rows[walk.pool_index[starts[listed] + n]]
    return kept


def _on_host(layout: BlockLayout) -> BlockLayout:
    """The layout of numpy arrays."""
    if layout.host is not None:
        return layout.host
    return layout if layout.rows.device is None else BlockLayout(layout.rows.on_host())


def _existing(walk: Walk, tiles: np.ndarray) -> np.ndarray:
    """(Bl, Hl, rows) of what is given for the rows of all tiles."""
    return tiles.reshape(*walk.lead, -1)[..., : walk.rows]


def _of_tiles(walk: Walk, bounds: np.ndarray) -> np.ndarray:
    """Bounds of rows as (tile rows of all leads, block_rows) int64; a row that does not exist has 0 in both."""
    made = np.zeros((*walk.lead, walk.tiles * walk.block_rows), np.int64)
    made[..., : walk.rows] = bounds  # one for all heads where they share it
    return made.reshape(-1, walk.block_rows)


def _full(walk: Walk, first: np.ndarray) -> None:
    row, place = walk.full.listed()
    tile = walk.full.indices[place].astype(np.int64)
    tile_ends = np.full(len(first), walk.columns)
    np.minimum.at(tile_ends, row, tile * walk.block_columns)
    first[:] = tile_ends[:, None]


def _interval(walk: Walk, first: np.ndarray) -> None:
    row, place = walk.interval.listed()
    if not len(row):
        return
    tile, width = walk.interval.indices[place].astype(np.int64), walk.block_columns
    lo, hi = (_of_tiles(walk, x)[row] - tile[:, None] * width for x in (walk.lo, walk.hi))
    lo, hi = lo.clip(0, width), hi.clip(0, width)
    np.minimum.at(first, row, np.where(hi > lo, tile[:, None] * width + lo, walk.columns))


def _bits(walk: Walk, first: np.ndarray) -> None:
    row, place = walk.bits.listed()
    if not len(row):
        return
    tile, entry = walk.bits.indices[place].astype(np.int64), walk.pool_index[place]
    pool = np.ascontiguousarray(walk.pool).view(np.uint32).astype(np.int64)  # (P, block_rows, words)
    word = (pool != 0).argmax(2)
    lowest = np.take_along_axis(pool, word[..., None], 2).squeeze(2)
    bit = np.log2(np.maximum(lowest & -lowest, 1)).astype(np.int64)
    begin = np.where(lowest != 0, word * WORD + bit, walk.columns)  # of each row of each tile of the pool
    np.minimum.at(first, row, np.minimum(begin[entry] + tile[:, None] * walk.block_columns, walk.columns))
