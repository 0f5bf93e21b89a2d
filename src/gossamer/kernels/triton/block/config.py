"""Tile choices of the kernels: which rows and columns a program holds, for each direction, head size, type and GPU.

Semantics never enter here. A layout tile is cut into parts of `rows` resident rows and walked in steps of `columns`.
"""

from __future__ import annotations

from dataclasses import dataclass, replace
from typing import Literal

from gossamer.kernels.relaunch import padded
from gossamer.kernels.triton.config import ARCHITECTURES, BUCKETS, X3, Direction, architecture


@dataclass(frozen=True)
class TileConfig:
    """One way to run one kernel.

    Raises:
        ValueError: a size that the kernels cannot run.
    """

    rows: int  # resident rows of a program: queries (forward, dQ) or keys (dK and dV)
    columns: int  # rows streamed in one step: keys, or queries
    warps: int
    stages: int
    precision: Literal["ieee", "tf32x3", "tf32"] = "ieee"  # of float32 products; 16-bit products ignore it
    tma: bool = False  # stream through tensor descriptors (sm_90 and later), when the operands' strides allow it

    def __post_init__(self) -> None:
        for name, least in (("rows", 16), ("columns", 32)):
            value = getattr(self, name)
            if value < least or value & (value - 1):
                raise ValueError(f"{name} must be a power of two and at least {least}, got {value}")
        if self.warps not in (4, 8):
            raise ValueError(f"warps must be 4 or 8, got {self.warps}")
        if not 1 <= self.stages <= 5:
            raise ValueError(f"stages must be 1 to 5, got {self.stages}")
        if self.precision not in ("ieee", "tf32x3", "tf32"):
            raise ValueError(f"precision must be ieee, tf32x3 or tf32, got {self.precision!r}")

    def fit(self, tile_rows: int, tile_columns: int) -> TileConfig:
        """The same with sizes that divide a layout tile, whose edges are multiples of 32."""
        rows = min(self.rows, tile_rows & -tile_rows)
        columns = min(self.columns, tile_columns & -tile_columns)
        if (rows, columns) == (self.rows, self.columns):
            return self
        return replace(self, rows=rows, columns=columns, warps=4 if rows <= 64 else self.warps)


T = TileConfig

# (direction, bits of a number, bucket) -> configuration by architecture.
TABLE: dict[tuple[Direction, int, int], dict[int, TileConfig]] = {
    ("forward", 16, 64): {80: T(128, 64, 4, 3), 89: T(128, 64, 4, 3), 90: T(128, 64, 4, 3), 100: T(128, 64, 4, 3)},
    ("forward", 16, 128): {80: T(128, 64, 8, 2), 89: T(128, 32, 8, 2), 90: T(128, 64, 8, 3), 100: T(128, 64, 8, 3)},
    ("forward", 16, 256): {80: T(128, 32, 8, 2), 89: T(64, 32, 4, 2), 90: T(128, 64, 8, 2), 100: T(128, 64, 8, 2)},
    ("dq", 16, 64): {80: T(128, 64, 8, 2), 89: T(128, 64, 8, 2), 90: T(64, 64, 4, 3, tma=True), 100: T(128, 64, 8, 2)},
    ("dq", 16, 128): {80: T(128, 32, 8, 2), 89: T(64, 32, 4, 2), 90: T(128, 64, 8, 3), 100: T(128, 64, 8, 2)},
    ("dq", 16, 256): {80: T(64, 32, 8, 2), 89: T(32, 32, 4, 1), 90: T(64, 64, 8, 2), 100: T(64, 32, 8, 2)},
    ("dkdv", 16, 64): {80: T(128, 64, 8, 2), 89: T(64, 64, 4, 2), 90: T(64, 64, 4, 3), 100: T(128, 64, 8, 2)},
    ("dkdv", 16, 128): {80: T(64, 64, 8, 2), 89: T(64, 32, 4, 2), 90: T(128, 64, 8, 3), 100: T(128, 64, 8, 2)},
    ("dkdv", 16, 256): {80: T(64, 32, 8, 2), 89: T(32, 32, 4, 1), 90: T(64, 32, 8, 2), 100: T(64, 32, 8, 2)},
    ("forward", 32, 64): {sm: T(32, 32, 8, 1) for sm in ARCHITECTURES} | {90: T(128, 64, 8, 2, X3)},
    ("forward", 32, 128): {sm: T(32, 32, 8, 1) for sm in ARCHITECTURES} | {90: T(128, 32, 8, 2, X3)},
    ("forward", 32, 256): {sm: T(16, 32, 8, 1) for sm in ARCHITECTURES},
    ("dq", 32, 64): {sm: T(32, 32, 8, 1) for sm in ARCHITECTURES} | {90: T(128, 64, 8, 2, X3)},
    ("dq", 32, 128): {sm: T(16, 32, 8, 1) for sm in ARCHITECTURES} | {90: T(32, 32, 4, 2, X3)},
    ("dq", 32, 256): {sm: T(16, 32, 8, 1) for sm in ARCHITECTURES},
    ("dkdv", 32, 64): {sm: T(32, 32, 8, 1) for sm in ARCHITECTURES} | {90: T(128, 64, 8, 2, X3)},
    ("dkdv", 32, 128): {sm: T(16, 32, 8, 1) for sm in ARCHITECTURES} | {90: T(32, 32, 4, 2, X3)},
    ("dkdv", 32, 256): {sm: T(16, 32, 8, 1) for sm in ARCHITECTURES},
}

# For layouts of 64 x 64 tiles: (direction, bucket) -> configuration, 16-bit types, sm_90 and later.
SMALL: dict[tuple[Direction, int], TileConfig] = {
    ("forward", 64): T(64, 64, 4, 3),
    ("forward", 128): T(64, 64, 4, 3),
    ("dq", 64): T(64, 64, 4, 3, tma=True),
    ("dq", 128): T(64, 64, 4, 2),
    ("dkdv", 64): T(64, 64, 4, 3),
    ("dkdv", 128): T(64, 32, 4, 3),
}

# What `benchmarks/tune_triton.py` times on sm_90 beside the table, for 16-bit types, by (direction, bucket).
CANDIDATES: dict[tuple[Direction, int], tuple[TileConfig, ...]] = {
    ("forward", 64): (T(128, 128, 8, 3), T(128, 64, 4, 3), T(128, 64, 8, 3), T(128, 128, 8, 2, tma=True),
                      T(128, 64, 8, 3, tma=True), T(64, 64, 4, 3), T(64, 128, 4, 2, tma=True)),
    ("forward", 128): (T(128, 64, 8, 3, tma=True), T(128, 128, 8, 3), T(128, 128, 8, 2, tma=True),
                       T(64, 64, 4, 3), T(64, 64, 4, 3, tma=True), T(64, 64, 4, 2, tma=True)),
    ("forward", 256): (T(128, 64, 8, 2, tma=True), T(128, 32, 8, 3), T(64, 64, 4, 2), T(64, 64, 4, 2, tma=True)),
    ("dq", 64): (T(128, 64, 8, 3), T(128, 64, 4, 3), T(128, 128, 8, 2, tma=True), T(64, 64, 4, 3, tma=True)),
    ("dq", 128): (T(128, 64, 8, 3, tma=True), T(128, 128, 8, 2, tma=True), T(64, 64, 4, 2), T(64, 64, 4, 2, tma=True)),
    ("dq", 256): (T(64, 64, 8, 2, tma=True), T(64, 32, 4, 2), T(64, 32, 8, 2), T(128, 32, 8, 2)),
    ("dkdv", 64): (T(128, 64, 8, 2), T(128, 128, 8, 2), T(64, 64, 4, 3), T(128, 64, 8, 3, tma=True)),
    ("dkdv", 128): (T(128, 64, 8, 3, tma=True), T(128, 32, 8, 3), T(64, 32, 4, 3), T(64, 64, 4, 2),
                    T(64, 32, 4, 3, tma=True), T(64, 64, 4, 2, tma=True)),
    ("dkdv", 256): (T(64, 64, 8, 1), T(64, 32, 4, 2), T(64, 64, 8, 2), T(64, 32, 8, 2, tma=True)),
}  # fmt: skip


def config(direction: Direction, bits: int, D: int, E: int, sm: int, tile: tuple[int, int] = (128, 128)) -> TileConfig:
    """The shipped configuration for layouts of `tile` (block_q, block_kv)."""
    size = max(padded(D), padded(E))
    bucket = next(b for b in BUCKETS if size <= b)
    if tile == (64, 64) and bits == 16 and architecture(sm) >= 90 and (direction, bucket) in SMALL:
        return SMALL[direction, bucket]
    return TABLE[direction, bits, bucket][architecture(sm)]
