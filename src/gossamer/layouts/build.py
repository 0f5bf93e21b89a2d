"""From a pattern to a BlockLayout, through tiles and never through an N x N array."""

from __future__ import annotations

import numpy as np

from gossamer.layouts.block import BlockLayout
from gossamer.layouts.walk import TileList, Walk, tile_edge
from gossamer.patterns.base import Intervals, Pattern, above
from gossamer.patterns.grid import Grid
from gossamer.patterns.tiles import KIND_BITS, KIND_FULL, KIND_INTERVAL, KeptTiles, kept_tiles, unique_tiles


def build(pattern: Pattern, Q: int, K: int, *, block_q: int, block_kv: int, q_offset: int | None = None) -> BlockLayout:
    """The layout of a pattern, as numpy arrays; `q_offset` defaults to K - Q.

    Raises:
        ValueError: the pattern does not fit Q and K, or a block edge is not a positive multiple of 32.
    """
    sizes = pattern._sizes(Q, K, q_offset)
    edges = [tile_edge(name, edge) for name, edge in (("block_q", block_q), ("block_kv", block_kv))]
    pattern.check(sizes.Q, sizes.K, placed=q_offset is not None)
    grid = Grid(*sizes, *edges)
    parts, slot = pattern.distinct()
    # Rows that are counted from 0 have the positions that the user of the layout says.
    known = q_offset is not None or pattern.reads_positions
    walk = _assemble(grid, slot, [kept_tiles(part, grid) for part in parts])
    return BlockLayout(walk, q_offset=sizes.q_offset if known else None)


def _assemble(grid: Grid, slot: np.ndarray, built: list[tuple[KeptTiles, Intervals | None]]) -> Walk:
    """Stack the tiles of each distinct pattern, of which batch elements and heads have those that `slot` says."""
    lists = [_stack([tiles for tiles, _ in built], kind, grid.nq) for kind in (KIND_FULL, KIND_INTERVAL, KIND_BITS)]
    full, interval, bits = (TileList(t.starts[slot], t.counts[slot], t.indices) for t in lists)
    packed = np.concatenate([tiles.packed for tiles, _ in built])
    base = np.cumsum([0, *(len(tiles.packed) for tiles, _ in built)])
    entries = [t.entry[t.kind == KIND_BITS] + at for (t, _), at in zip(built, base, strict=False)]
    entry = np.concatenate(entries)
    if len(built) > 1:
        packed, same = unique_tiles(packed)
        entry = same[entry] if len(same) else entry
    lo = hi = np.zeros((1, 1, 0), dtype=np.int32)
    if len(interval.indices):
        nothing = (np.zeros(grid.Q, dtype=np.int64), np.zeros(grid.Q, dtype=np.int64))
        rows = [intervals or nothing for _, intervals in built]
        lo, hi = (np.stack(side).astype(np.int32)[slot] for side in zip(*rows, strict=True))
        hi = np.maximum(lo, hi)
    return Walk(
        grid.Q, grid.K, grid.block_q, grid.block_kv,
        full=full, interval=interval, bits=bits, lo=lo, hi=hi, pool_index=entry.astype(np.int32), pool=packed,
    )  # fmt: skip


def _stack(parts: list[KeptTiles], kind: int, nq: int) -> TileList:
    """The tiles of one kind of every part: starts and counts (parts, T)."""
    counts = np.stack([np.bincount(t.ti[t.kind == kind], minlength=nq) for t in parts])
    ends = np.cumsum(counts.reshape(-1)).reshape(counts.shape)
    total = int(counts.sum())
    if total >= 2**31:
        raise ValueError(f"the layout would list {total} tiles; at most {2**31 - 1} can be addressed")
    indices = np.concatenate([t.tj[t.kind == kind] for t in parts])
    return TileList((ends - counts).astype(np.int32), counts.astype(np.int32), indices.astype(np.int32))


above.build = build
