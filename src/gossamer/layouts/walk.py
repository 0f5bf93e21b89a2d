"""Walk: the tiles that a kernel visits in one direction, and what masks them.

The arrays are numpy arrays or torch tensors; nothing here imports a framework. A layout is a value: nothing
writes to its arrays after it is built.

The ragged edge is defined here, once:
- a tile that reaches past the last column of its walk is never `full`, so a kernel needs no column check there;
- a tile that reaches past the last row may be `full`: those rows do not exist, and what a kernel computes for
  them is never stored;
- bits of rows and columns that do not exist are zero, and `hi` never exceeds the number of columns.
"""

from __future__ import annotations

from collections.abc import Iterator
from dataclasses import dataclass
from typing import Any, NamedTuple

import numpy as np

from gossamer.checks import show, whole
from gossamer.layouts.base import Array, WalkArrays
from gossamer.patterns.grid import WORD, ranges, unpack_bits

# The lists of a walk, in the order in which kernels visit them.
KINDS = ("full", "interval", "bits")


class TileList(NamedTuple):
    """For each tile row, the tile columns to visit: `indices[starts : starts + counts]`, ascending."""

    starts: Array  # (Bl, Hl, T) int32
    counts: Array  # (Bl, Hl, T) int32
    indices: Array  # (n,) int32; entries that no row refers to are undefined

    def listed(self) -> tuple[np.ndarray, np.ndarray]:
        """(row, place) of every listed tile, two numpy arrays: an index into (Bl, Hl, T), and one into `indices`."""
        starts = self.starts.reshape(-1).astype(np.int64)
        return ranges(starts, starts + self.counts.reshape(-1))


@dataclass(frozen=True, eq=False)
class Walk(WalkArrays):
    """One direction: for each tile of rows, the tiles of columns to visit, by kind of mask.

    `rows` and `columns` are numbers of positions, of which a tile has `block_rows` x `block_columns`. Forward and dQ
    walk query rows over key columns; dK and dV walk key rows over query columns, in the same form.

    Bl is 1 or B, Hl is 1 or H; T = ceil(rows / block_rows).
    """

    rows: int
    columns: int
    block_rows: int
    block_columns: int
    full: TileList  # every pair kept: no mask work
    interval: TileList  # row r keeps columns [lo[r], hi[r])
    bits: TileList  # one bit a pair, in `pool`
    lo: Array  # (Bl, Hl, rows) int32, non-decreasing along rows; (1, 1, 0) when there are no interval tiles
    hi: Array  # (Bl, Hl, rows) int32, non-decreasing along rows
    pool_index: Array  # (len(bits.indices),) int32: the pool entry of each listed bits tile
    pool: Array  # (P, block_rows, block_columns // 32) uint32 (torch: int32): bit c of word w is column 32 w + c

    @property
    def lead(self) -> tuple[int, int]:
        """(Bl, Hl)."""
        shape = self.full.counts.shape
        return int(shape[0]), int(shape[1])

    @property
    def lists(self) -> dict[str, TileList]:
        """The three lists by KINDS."""
        return {"full": self.full, "interval": self.interval, "bits": self.bits}

    def arrays(self) -> list[Array]:
        """Every array in a fixed order (see `with_arrays`)."""
        return [*self.full, *self.interval, *self.bits, self.lo, self.hi, self.pool_index, self.pool]

    def with_arrays(self, arrays: list[Array]) -> Walk:
        """The same walk over other arrays, in the order of `arrays()`."""
        each = iter(arrays)
        full, interval, bits = (TileList(next(each), next(each), next(each)) for _ in KINDS)
        return Walk(self.rows, self.columns, self.block_rows, self.block_columns, full, interval, bits, *each)


ARRAYS_PER_WALK = 13  # three of each of three lists, lo, hi, pool_index, pool


def tile_edge(name: str, edge: Any) -> int:
    """The height or width of a tile as an int; it may be an integer of numpy.

    Raises:
        ValueError: it is no positive multiple of 32.
    """
    number = whole(edge)
    if number is None or number < WORD or number % WORD:
        raise ValueError(f"{name} must be a positive multiple of {WORD}, got {show(edge)}")
    return number


def iterate(walk: Walk) -> Iterator[tuple[int, int, int, str, int, int]]:
    """(b, h, tile row, kind, tile column, pool entry or -1) for each listed tile of a numpy walk. Slow and plain."""
    for kind, tiles in walk.lists.items():
        for b, h, t in np.ndindex(*tiles.counts.shape):
            start, count = int(tiles.starts[b, h, t]), int(tiles.counts[b, h, t])
            for at in range(start, start + count):
                entry = int(walk.pool_index[at]) if kind == "bits" else -1
                yield b, h, t, kind, int(tiles.indices[at]), entry


def expand(walk: Walk) -> np.ndarray:
    """The dense boolean mask of a walk, a numpy array (Bl, Hl, rows, columns), or (rows, columns) if Bl = Hl = 1.

    Raises:
        ValueError: a tile is listed twice, or breaks a rule of the ragged edge above.
    """
    walk = walk.on_host()
    br, bc = walk.block_rows, walk.block_columns
    height, width = walk.tiles * br, -(-walk.columns // bc) * bc
    dense = np.zeros((*walk.lead, height, width), dtype=bool)
    columns = np.arange(bc)
    for b, h, t, kind, c, entry in iterate(walk):
        rows = slice(t * br, (t + 1) * br)
        tile = dense[b, h, rows, c * bc : (c + 1) * bc]
        if tile.any():
            raise ValueError(f"layout lists tile ({t}, {c}) of batch element {b}, head {h} more than once")
        if kind == "full":
            if (c + 1) * bc > walk.columns:
                raise ValueError(f"full tile ({t}, {c}) reaches past the last column {walk.columns - 1}")
            tile[:] = True
        elif kind == "interval":
            lo, hi = walk.lo[b, h, rows, None], walk.hi[b, h, rows, None]
            j = c * bc + columns
            tile[: lo.shape[0]] = (j >= lo) & (j < hi)
        else:
            tile[:] = unpack_bits(walk.pool[entry])
            if tile[walk.rows - t * br :].any() or tile[:, walk.columns - c * bc :].any():
                raise ValueError(f"bits tile ({t}, {c}) has bits outside the {walk.rows} x {walk.columns} matrix")
    dense = dense[:, :, : walk.rows, : walk.columns]
    return dense.squeeze((0, 1)) if walk.lead == (1, 1) else dense
