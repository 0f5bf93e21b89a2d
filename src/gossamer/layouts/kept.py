"""Which rows and columns the pairs of a layout have: what the others hold, no result may depend on."""

from __future__ import annotations

import math
from typing import NamedTuple

import numpy as np

from gossamer.layouts.block import BlockLayout
from gossamer.layouts.walk import Walk
from gossamer.patterns.grid import WORD, unpack_bits


class Kept(NamedTuple):
    """What a layout keeps of its rows and keys, of each (Bl, Hl)."""

    first: np.ndarray  # (Bl, Hl, Q) int64: the first key of each row; K where it keeps none
    keys: np.ndarray  # (Bl, Hl, K) bool: those that any row keeps

    @property
    def rows(self) -> np.ndarray:
        """(Bl, Hl, Q) bool: the rows that keep anything."""
        return self.first < self.keys.shape[-1]


def kept_of(layout: BlockLayout) -> Kept:
    """What a layout keeps; one of tensors is read, from the host if it was built there.

    Examples:
        >>> from gossamer.layouts.kept import kept_of
        >>> kept = kept_of(gs.SlidingWindow(2).layout(4, 9, block_q=32, block_kv=32, q_offset=3))
        >>> kept.first.tolist(), kept.keys.astype(int).tolist()
        ([[[1, 2, 3, 4]]], [[[0, 1, 1, 1, 1, 1, 1, 0, 0]]])
    """
    walk = (layout.rows if layout.host is None else layout.host.rows).on_host()
    heads, across, K = math.prod(walk.lead), -(-walk.columns // walk.block_columns), walk.columns
    first = np.full((heads * walk.tiles, walk.block_rows), K, np.int64)
    keys = np.zeros((heads * across, walk.block_columns), bool)
    for kind in (_full, _interval, _bits):
        kind(walk, first, keys)
    of_rows, of_keys = (x.reshape(*walk.lead, -1) for x in (first, keys))
    return Kept(of_rows[..., : walk.rows], of_keys[..., :K])


def _columns(walk: Walk, row: np.ndarray, tile: np.ndarray) -> np.ndarray:
    """Where tile columns are, counted over all leads, of tile rows that are."""
    return row // walk.tiles * -(-walk.columns // walk.block_columns) + tile


def _full(walk: Walk, first: np.ndarray, keys: np.ndarray) -> None:
    row, place = walk.full.listed()
    tile = walk.full.indices[place].astype(np.int64)
    keys[_columns(walk, row, tile)] = True
    of_tiles = np.full(len(first), walk.columns)
    np.minimum.at(of_tiles, row, tile * walk.block_columns)
    first[:] = of_tiles[:, None]


def _interval(walk: Walk, first: np.ndarray, keys: np.ndarray) -> None:
    row, place = walk.interval.listed()
    if not len(row):
        return
    tile, width = walk.interval.indices[place].astype(np.int64), walk.block_columns
    lo, hi = (np.zeros((math.prod(walk.lead), walk.tiles * walk.block_rows), np.int64) for _ in range(2))
    for x, given in (
        (lo, walk.lo),
        (hi, walk.hi),
    ):  # one for all heads where they share it; rows that are not keep none
        x[:, : walk.rows] = np.broadcast_to(given, (*walk.lead, walk.rows)).reshape(-1, walk.rows)
    lo, hi = (x.reshape(-1, walk.block_rows)[row] - tile[:, None] * width for x in (lo, hi))
    lo, hi = lo.clip(0, width), hi.clip(0, width)
    some = hi > lo
    np.minimum.at(first, row, np.where(some, tile[:, None] * width + lo, walk.columns))
    # Where runs of keys begin and end in each tile of keys, one place longer than that.
    at = np.broadcast_to(_columns(walk, row, tile)[:, None] * (width + 1), some.shape)[some]
    begun, ended = (np.bincount(at + x[some], minlength=len(keys) * (width + 1)) for x in (lo, hi))
    keys |= (begun - ended).reshape(len(keys), -1).cumsum(1)[:, :width] > 0


def _bits(walk: Walk, first: np.ndarray, keys: np.ndarray) -> None:
    row, place = walk.bits.listed()
    if not len(row):
        return
    tile, entry = walk.bits.indices[place].astype(np.int64), walk.pool_index[place]
    pool = np.ascontiguousarray(walk.pool).view(np.uint32).astype(np.int64)  # (P, block_rows, words)
    words = np.zeros((len(keys), pool.shape[2]), np.int64)
    np.bitwise_or.at(words, _columns(walk, row, tile), np.bitwise_or.reduce(pool, axis=1)[entry])
    keys |= unpack_bits(words.astype(np.uint32))
    word = (pool != 0).argmax(2)
    lowest = np.take_along_axis(pool, word[..., None], 2).squeeze(2)
    bit = np.log2(np.maximum(lowest & -lowest, 1)).astype(np.int64)
    begin = np.where(lowest != 0, word * WORD + bit, walk.columns)  # of each row of each tile of the pool
    np.minimum.at(first, row, np.minimum(begin[entry] + tile[:, None] * walk.block_columns, walk.columns))
