"""The pairs that a pattern keeps, listed for some rows at a time."""

from __future__ import annotations

from collections.abc import Iterator

import numpy as np

from gossamer.patterns.base import Pattern
from gossamer.patterns.grid import EMPTY, FULL, Grid, Sizes, distinct, ranges, unpack_bits

# Pairs listed together: bounds the scratch memory of a list.
PAIRS_AT_ONCE = 2**22
# Rows in its smallest part: a multiple of every group of rows, and the edge of the tiles it looks into.
ROWS_AT_ONCE = 128


def pair_chunks(pattern: Pattern, sizes: Sizes) -> Iterator[tuple[int, int, np.ndarray, np.ndarray]]:
    """(start, stop, rows, keys): the kept pairs of query rows [start, stop) in row-major order, a bounded number."""
    pattern = pattern.lower(sizes)
    interval = pattern.intervals(sizes)
    start, rows = 0, ROWS_AT_ONCE
    while start < sizes.Q:
        stop = min(start + rows, sizes.Q)
        listed = pattern.listed_pairs(sizes, start, stop)
        if listed is None and interval is not None:
            which, keys = ranges(interval[0][start:stop], interval[1][start:stop])
            listed = which + start, keys
        elif listed is None:
            listed = pairs_by_tiles(pattern, sizes, start, stop)
        yield start, stop, *listed
        each = max(1, len(listed[0])) / (stop - start)
        # Rows may keep more than those before them: no more than twice as many at a time.
        rows = min(2 * rows, max(1, min(512, int(PAIRS_AT_ONCE / each) // ROWS_AT_ONCE)) * ROWS_AT_ONCE)
        start = stop


def pairs_by_tiles(pattern: Pattern, sizes: Sizes, start: int, stop: int) -> tuple[np.ndarray, np.ndarray]:
    """The kept pairs of query rows [start, stop), in row-major order; `start` is a multiple of ROWS_AT_ONCE."""
    grid = Grid(*sizes, ROWS_AT_ONCE, ROWS_AT_ONCE)
    ti, tj = pattern.tile_candidates(grid, start // ROWS_AT_ONCE, -(-stop // ROWS_AT_ONCE))
    ti, tj = np.divmod(distinct(ti.astype(np.int64) * grid.nk + tj), grid.nk)
    classes = pattern.tile_classes(grid, ti, tj)
    ti, tj, classes = (a[classes != EMPTY] for a in (ti, tj, classes))
    keys = [np.zeros(0, dtype=np.int64)]
    step = PAIRS_AT_ONCE // ROWS_AT_ONCE**2
    for at in range(0, len(ti), step):
        t, u = ti[at : at + step], tj[at : at + step]
        packed = grid.existing(t, u)
        mixed = np.nonzero(classes[at : at + step] != FULL)[0]
        packed[mixed] &= pattern.shared_tile_masks(grid, t[mixed], u[mixed])
        tile, row, column = np.nonzero(unpack_bits(packed))
        keys.append((t[tile] * ROWS_AT_ONCE + row) * sizes.K + u[tile] * ROWS_AT_ONCE + column)
    rows, columns = np.divmod(np.sort(np.concatenate(keys)), sizes.K)
    return rows, columns
