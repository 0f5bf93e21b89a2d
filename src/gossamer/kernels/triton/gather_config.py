"""Choices of the gather kernels: items and columns of a program without tiles, warps and stages of one with them."""

from __future__ import annotations

from dataclasses import dataclass
from typing import Literal

from gossamer.kernels.contract import GatherChoice
from gossamer.kernels.triton.config import X3, Direction, padded

_SHORT, _LONG = frozenset({"float16", "bfloat16"}), frozenset({"float32"})
# Measured on one H200 (docs/kernels/gather.md): seconds of a pair, of a gathered column and of a row, over those of a
# pair in a full tile of the fastest implementation. float32 products are slow, and its gathers move twice the bytes.
GATHERS = (
    GatherChoice(1, _SHORT, 0.0, 80.0, 600.0),
    GatherChoice(16, _SHORT, 1.7, 80.0, 0.0),
    GatherChoice(64, _SHORT, 1.7, 80.0, 0.0),
    GatherChoice(1, _LONG, 0.0, 24.0, 160.0),
    GatherChoice(64, _LONG, 2.0, 24.0, 0.0),
)


@dataclass(frozen=True)
class RowConfig:
    """How the kernels of `gather_rows` are run.

    Raises:
        ValueError: a size that the kernels cannot run.
    """

    items: int  # of a program
    columns: int  # gathered in one step, for each item
    warps: int = 1

    def __post_init__(self) -> None:
        for name in ("items", "columns", "warps"):
            value = getattr(self, name)
            if value < 1 or value & (value - 1):
                raise ValueError(f"{name} must be a positive power of two, got {value}")


@dataclass(frozen=True)
class GroupConfig:
    """How the kernels of `gather_tiles` are run; their tile is that of the layout."""

    warps: int
    stages: int
    precision: Literal["ieee", "tf32x3", "tf32"] = "ieee"


def lanes(columns: int, bits: int, D: int, E: int) -> int:
    """Threads of a warp next to each other along the columns: each reads 16 bytes of a row."""
    return min(columns, max(1, 32 * (128 // bits) // max(padded(D), padded(E))))


def row_config(direction: Direction, bits: int, D: int, E: int, mean: float) -> RowConfig:
    """The shipped configuration of a kernel without tiles, for rows of `mean` columns."""
    size = max(padded(D), padded(E)) * bits // 16
    # Columns in flight for one warp: what fits its registers without a spill.
    room = max(2, (2048 if direction == "forward" else 1024) // size)
    columns = 2
    while columns < room and columns < mean:
        columns *= 2
    return RowConfig(max(1, min(4, room // columns)), columns)


def group_config(direction: Direction, bits: int, D: int, E: int, block_rows: int) -> GroupConfig:
    """The shipped configuration of a kernel with gathered tiles of `block_rows` rows."""
    size = max(padded(D), padded(E))
    warps = 4 if block_rows == 64 else 2 if block_rows == 32 else 1
    if bits == 32:
        return GroupConfig(max(warps, 4 if size > 64 else 2), 2 if size <= 64 else 1, X3 if size <= 64 else "ieee")
    if size > 128:
        return GroupConfig(8 if block_rows == 64 else 4, 2 if direction == "forward" else 1)
    return GroupConfig(max(warps, 2) if size > 64 else warps, 3 if size <= 64 else 2)
