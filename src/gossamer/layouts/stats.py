"""Counts of a layout: tiles by kind, useful and executed pairs, balance."""

from __future__ import annotations

import math
from dataclasses import dataclass

import numpy as np

from gossamer.layouts.walk import TileList, Walk
from gossamer.layouts.work_list import row_lengths
from gossamer.patterns.grid import Grid, ranges
from gossamer.patterns.tiles import interval_overlap


@dataclass(frozen=True)
class LayoutStats:
    """Averages are over the layout's batch elements and heads (Bl x Hl)."""

    full_tiles: float
    interval_tiles: float
    bits_tiles: float
    all_tiles: int  # tiles of the dense matrix
    useful_pairs: float  # pairs kept
    executed_pairs: float  # existing pairs of the listed tiles
    density: float  # useful over Q * K
    longest_row: int  # tiles of the longest tile row
    mean_row: float
    pool_tiles: int
    bytes: int  # of all arrays, the transpose not counted

    @property
    def overhead(self) -> float:
        """Executed over useful pairs: 1.0 is perfect; infinite when nothing is kept."""
        return self.executed_pairs / self.useful_pairs if self.useful_pairs else float("inf")

    @property
    def balance(self) -> float:
        """Longest over mean tile row: 1.0 is perfect."""
        return self.longest_row / self.mean_row if self.mean_row else 1.0


def walk_stats(walk: Walk) -> LayoutStats:
    """Count the tiles and pairs of a walk; one on a GPU is copied to the CPU first."""
    walk = walk.on_host()
    grid = Grid(walk.rows, walk.columns, 0, walk.block_rows, walk.block_columns)
    copies = math.prod(walk.lead)
    lengths = row_lengths(walk)
    useful = executed = 0
    per_entry = np.bitwise_count(walk.pool).sum(axis=(1, 2), dtype=np.int64)
    for b, h in np.ndindex(*walk.lead):
        for kind, tiles in walk.lists.items():
            t, at = _listed(tiles, b, h)
            if not len(t):  # without interval tiles there are no lo and hi to look into
                continue
            c = tiles.indices[at].astype(np.int64)
            area = grid.area(t, c)
            executed += int(area.sum())
            if kind == "full":
                useful += int(area.sum())
            elif kind == "interval":
                useful += int(interval_overlap((walk.lo[b, h], walk.hi[b, h]), grid, t, c).sum())
            else:
                useful += int(per_entry[walk.pool_index[at]].sum())
    return LayoutStats(
        full_tiles=float(walk.full.counts.sum()) / copies,
        interval_tiles=float(walk.interval.counts.sum()) / copies,
        bits_tiles=float(walk.bits.counts.sum()) / copies,
        all_tiles=walk.tiles * -(-walk.columns // walk.block_columns),
        useful_pairs=useful / copies,
        executed_pairs=executed / copies,
        density=useful / copies / (walk.rows * walk.columns),
        longest_row=int(lengths.max(initial=0)),
        mean_row=float(lengths.mean()) if lengths.size else 0.0,
        pool_tiles=len(walk.pool),
        bytes=sum(int(a.nbytes) for a in walk.arrays()),
    )


def _listed(tiles: TileList, b: int, h: int) -> tuple[np.ndarray, np.ndarray]:
    """(tile row, place in `indices`) of each listed tile."""
    starts = tiles.starts[b, h].astype(np.int64)
    return ranges(starts, starts + tiles.counts[b, h])
