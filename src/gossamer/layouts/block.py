"""BlockLayout: where the work is. Tiles and bits that a kernel walks, in either direction.

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
from dataclasses import dataclass, field
from functools import cached_property
from typing import Any, NamedTuple

import numpy as np

Array = Any  # numpy.ndarray or torch.Tensor

WORD = 32


class TileList(NamedTuple):
    """For each tile row, the tile columns to visit: `indices[starts : starts + counts]`, ascending."""

    starts: Array  # (Bl, Hl, T) int32
    counts: Array  # (Bl, Hl, T) int32
    indices: Array  # (n,) int32; entries that no row refers to are undefined


@dataclass(frozen=True, eq=False)
class Walk:
    """One direction: for each tile of rows, the tiles of columns to visit, by kind of mask.

    `rows` and `columns` are counts of positions, `block_rows` and `block_columns` the tile edges. Forward and dQ
    walk query rows over key columns; dK and dV walk key rows over query columns, with the same kernels' ranges.

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
    def tiles(self) -> int:
        """T, the number of tile rows."""
        return -(-self.rows // self.block_rows)

    @property
    def lead(self) -> tuple[int, int]:
        """(Bl, Hl)."""
        shape = self.full.counts.shape
        return int(shape[0]), int(shape[1])

    def arrays(self) -> list[Array]:
        """Every array in a fixed order (see `with_arrays`)."""
        return [*self.full, *self.interval, *self.bits, self.lo, self.hi, self.pool_index, self.pool]

    def on_host(self) -> Walk:
        """The same walk as numpy arrays; itself when it is one. Tensors on a GPU are copied, which waits for it."""
        if isinstance(self.lo, np.ndarray):
            return self
        *arrays, pool = [a.cpu().numpy() for a in self.arrays()]
        return self.with_arrays([*arrays, pool.view(np.uint32)])

    def on_device(self, device: Any) -> Walk:
        """The same walk as torch tensors on `device`."""
        import torch

        def move(array: Array) -> Any:
            if isinstance(array, np.ndarray):
                array = torch.from_numpy(np.ascontiguousarray(array).view(np.int32))
            return array.to(device)

        return self.with_arrays([move(a) for a in self.arrays()])

    def with_arrays(self, arrays: list[Array]) -> Walk:
        """The same walk over other arrays, in the order of `arrays()`."""
        a = list(arrays)
        return Walk(
            self.rows, self.columns, self.block_rows, self.block_columns,
            TileList(*a[0:3]), TileList(*a[3:6]), TileList(*a[6:9]), a[9], a[10], a[11], a[12],
        )  # fmt: skip


ARRAYS_PER_WALK = 13


@dataclass(frozen=True, eq=False)
class BlockLayout:
    """Which tiles of a (Q, K) score matrix to compute, and which pairs in them.

    `rows` walks query tiles (block_q) over key tiles (block_kv). `columns` is its transpose, built on first use.
    """

    rows: Walk
    host: BlockLayout | None = field(default=None, repr=False)  # the numpy layout that this is a device copy of
    _transpose: list[Walk] = field(default_factory=list, repr=False)
    _copies: dict[Any, BlockLayout] = field(default_factory=dict, repr=False)

    @property
    def Q(self) -> int:
        return self.rows.rows

    @property
    def K(self) -> int:
        return self.rows.columns

    @property
    def block_q(self) -> int:
        return self.rows.block_rows

    @property
    def block_kv(self) -> int:
        return self.rows.block_columns

    @property
    def lead(self) -> tuple[int, int]:
        """(Bl, Hl): 1 where batch elements or heads share the layout."""
        return self.rows.lead

    @property
    def columns(self) -> Walk:
        """The transpose: key tiles over query tiles, for dK and dV."""
        if not self._transpose:
            from gossamer.layouts.transpose import transpose

            host = self.host
            self._transpose.append(transpose(self.rows) if host is None else host.columns.on_device(self.device))
        return self._transpose[0]

    @property
    def device(self) -> Any:
        """The torch device of the arrays, or None for numpy."""
        return None if isinstance(self.rows.lo, np.ndarray) else self.rows.lo.device

    def to(self, device: Any) -> BlockLayout:
        """A copy with torch tensors on `device`; made once and kept."""
        import torch

        device = torch.device(device)
        if device.type == "cuda" and device.index is None:
            device = torch.device("cuda", torch.cuda.current_device())
        if self.device == device:
            return self
        copy = self._copies.get(device)
        if copy is None:
            host = self if self.device is None else self.host
            copy = BlockLayout(self.rows.on_device(device), host)
            self._copies[device] = copy
        return copy

    def expand(self) -> np.ndarray:
        """The dense boolean matrix (Q, K), or (Bl, Hl, Q, K) unless Bl == Hl == 1. The oracle of every builder."""
        from gossamer.layouts.dense import expand

        return expand(self.rows)

    @cached_property
    def stats(self) -> Any:
        """Counts of tiles and pairs: see `gossamer.layouts.stats.LayoutStats`."""
        from gossamer.layouts.stats import layout_stats

        return layout_stats(self)

    def __repr__(self) -> str:
        kinds = {name: int(getattr(self.rows, name).counts.sum()) for name in ("full", "interval", "bits")}
        tiles = ", ".join(f"{name}={n}" for name, n in kinds.items())
        return (
            f"BlockLayout(Q={self.Q}, K={self.K}, block_q={self.block_q}, block_kv={self.block_kv}, "
            f"lead={self.lead}, {tiles}, pool={int(self.rows.pool.shape[0])})"
        )


def iterate(walk: Walk) -> Iterator[tuple[int, int, int, str, int, int]]:
    """(b, h, tile row, kind, tile column, pool entry or -1) for each listed tile of a numpy walk. Slow and plain."""
    for kind in ("full", "interval", "bits"):
        tiles: TileList = getattr(walk, kind)
        for b, h, t in np.ndindex(*tiles.counts.shape):
            start, count = int(tiles.starts[b, h, t]), int(tiles.counts[b, h, t])
            for at in range(start, start + count):
                entry = int(walk.pool_index[at]) if kind == "bits" else -1
                yield b, h, t, kind, int(tiles.indices[at]), entry
