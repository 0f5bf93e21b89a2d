"""The transpose of a walk: key tiles over query tiles, with transposed bits and the query interval of each key."""

from __future__ import annotations

from typing import NamedTuple

import numpy as np

from gossamer.layouts.walk import KINDS, TileList, Walk
from gossamer.patterns.grid import WORD, pack_bits, ranges, unpack_bits

# Pool entries transposed together: bounds the scratch memory.
ENTRIES_AT_ONCE = 1024


def transpose(walk: Walk) -> Walk:
    """The walk of the transposed matrix, both of numpy arrays."""
    slots, slot = _distinct(walk)
    parts = [_transpose_one(walk, b, h) for b, h in slots]
    nk = -(-walk.columns // walk.block_columns)
    lists: dict[str, TileList] = {}
    for kind in KINDS:
        counts = np.stack([np.bincount(p.tiles[kind].row, minlength=nk) for p in parts])
        ends = np.cumsum(counts.reshape(-1)).reshape(counts.shape)
        indices = np.concatenate([p.tiles[kind].column for p in parts]).astype(np.int32)
        lists[kind] = TileList((ends - counts).astype(np.int32)[slot], counts.astype(np.int32)[slot], indices)
    pool_index = np.concatenate([p.tiles["bits"].entry for p in parts])
    pool = _transpose_pool(walk)
    if (pool_index < 0).any():  # full tiles that reach past the last query: see `_transpose_one`
        whole = np.zeros((1, walk.block_columns, walk.block_rows), dtype=bool)
        whole[:, :, : walk.rows % walk.block_rows] = True
        entry = pack_bits(whole)
        same: np.ndarray = np.flatnonzero(
            (pool == entry).all(axis=(1, 2))
        )  # of a bits tile that keeps just those queries
        pool_index = np.where(pool_index < 0, same[0] if len(same) else len(pool), pool_index)
        if not len(same):
            pool = np.concatenate([pool, entry])
    lo = hi = np.zeros((1, 1, 0), dtype=np.int32)
    if len(lists["interval"].indices):
        lo, hi = (np.stack(side).astype(np.int32)[slot] for side in zip(*((p.lo, p.hi) for p in parts), strict=True))
    return Walk(
        walk.columns, walk.rows, walk.block_columns, walk.block_rows,
        **lists, lo=lo, hi=hi, pool_index=pool_index.astype(np.int32), pool=pool,
    )  # fmt: skip


def _distinct(walk: Walk) -> tuple[list[tuple[int, int]], np.ndarray]:
    """The batch elements and heads with lists of their own, and which of them each (b, h) shares."""
    seen: dict[tuple[bytes, ...], int] = {}
    slots: list[tuple[int, int]] = []
    slot = np.zeros(walk.lead, dtype=np.int64)
    for b, h in np.ndindex(*walk.lead):
        key = tuple(a[b, h].tobytes() for t in walk.lists.values() for a in (t.starts, t.counts))
        if walk.lo.size:
            key += (walk.lo[b, h].tobytes(), walk.hi[b, h].tobytes())
        if key not in seen:
            seen[key] = len(slots)
            slots.append((b, h))
        slot[b, h] = seen[key]
    return slots, slot


class _Tiles(NamedTuple):
    """The tiles of one kind, by rows and then by columns of the transpose."""

    row: np.ndarray
    column: np.ndarray
    entry: np.ndarray | None = None  # of the pool, for bits


class _Transposed(NamedTuple):
    """The lists of one batch element and head: tiles by their kind, and intervals of queries."""

    tiles: dict[str, _Tiles]
    lo: np.ndarray
    hi: np.ndarray


def _transpose_one(walk: Walk, b: int, h: int) -> _Transposed:
    """The lists of one batch element and head."""
    lists: dict[str, _Tiles] = {}
    for kind, tiles in walk.lists.items():
        starts = tiles.starts[b, h].astype(np.int64)
        t, at = ranges(starts, starts + tiles.counts[b, h])
        c = tiles.indices[at].astype(np.int64)
        order = np.lexsort((t, c))
        lists[kind] = _Tiles(c[order], t[order], walk.pool_index[at][order] if kind == "bits" else None)
    lo = hi = np.zeros(walk.columns, dtype=np.int64)
    if walk.lo.size:
        keys = np.arange(walk.columns)
        lo = np.searchsorted(walk.hi[b, h], keys, side="right")
        hi = np.maximum(lo, np.searchsorted(walk.lo[b, h], keys, side="right"))
    if walk.rows % walk.block_rows:
        # A full tile may reach past the last query, but a full tile of the transpose may not reach past its last
        # column: it becomes an interval tile where the intervals agree, else a bits tile (entry -1: all that exists).
        c, t, _ = lists["full"]
        last = t == walk.tiles - 1
        covered = (lo <= (walk.tiles - 1) * walk.block_rows) & (hi >= walk.rows)
        edges = np.arange(0, walk.columns, walk.block_columns)
        agrees = np.logical_and.reduceat(covered, edges)[c] & last
        # Where other interval tiles exist already; a layout without any keeps its bits.
        agrees &= walk.lo.size > 0
        lists["full"] = _Tiles(c[~last], t[~last])
        lists["interval"] = _with_tiles(lists["interval"], c[agrees], t[agrees], None)
        rest = last & ~agrees
        lists["bits"] = _with_tiles(lists["bits"], c[rest], t[rest], np.full(int(rest.sum()), -1))
    return _Transposed(lists, lo, hi)


def _with_tiles(tiles: _Tiles, c: np.ndarray, t: np.ndarray, entries: np.ndarray | None) -> _Tiles:
    """More tiles added to a list, in order again."""
    c, t = np.concatenate([tiles.row, c]), np.concatenate([tiles.column, t])
    order = np.lexsort((t, c))
    merged = None if entries is None or tiles.entry is None else np.concatenate([tiles.entry, entries])[order]
    return _Tiles(c[order], t[order], merged)


def _transpose_pool(walk: Walk) -> np.ndarray:
    pool = np.zeros((len(walk.pool), walk.block_columns, walk.block_rows // WORD), dtype=np.uint32)
    for at in range(0, len(pool), ENTRIES_AT_ONCE):
        chunk = slice(at, at + ENTRIES_AT_ONCE)
        pool[chunk] = pack_bits(unpack_bits(walk.pool[chunk]).swapaxes(1, 2))
    return pool
