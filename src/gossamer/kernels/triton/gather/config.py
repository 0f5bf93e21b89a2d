"""Choices of the gather kernels: items and columns of a program without tiles, warps and stages of one with them."""

from __future__ import annotations

from dataclasses import dataclass
from typing import Literal

from gossamer.kernels.relaunch import padded
from gossamer.kernels.triton.config import X3, Direction
from gossamer.plan.capability import GatherChoice

_SHORT, _LONG = frozenset({"float16", "bfloat16"}), frozenset({"float32"})
GATHERS = (
    GatherChoice(1, _SHORT, max_head_dim=256, min_sm=80, spread=True),
    GatherChoice(16, _SHORT, max_head_dim=256, min_sm=80, reuse=2.0, spread=True),
    GatherChoice(64, _SHORT, max_head_dim=128, min_sm=90, reuse=2.0, spread=True),
    GatherChoice(1, _LONG, max_head_dim=256, min_sm=80, spread=True),
    GatherChoice(16, _LONG, max_head_dim=128, min_sm=80, reuse=2.0, spread=True),
)


@dataclass(frozen=True)
class RowConfig:
    """How the kernels of `rows` are run.

    Raises:
        ValueError: a size that the kernels cannot run.
    """

    items: int  # of a program
    columns: int  # gathered in one step, for each item
    warps: int = 1
    registers: int | None = None  # that a thread may use; None leaves it to the compiler, which then spreads the loads

    def __post_init__(self) -> None:
        for name in ("items", "columns", "warps"):
            value = getattr(self, name)
            if value < 1 or value & (value - 1):
                raise ValueError(f"{name} must be a positive power of two, got {value}")
        if self.registers is not None and not 24 <= self.registers <= 255:
            raise ValueError(f"registers must be from 24 to 255, got {self.registers}")


@dataclass(frozen=True)
class GroupConfig:
    """How the kernels of `tiles` are run; their tile is that of the layout."""

    warps: int
    stages: int
    precision: Literal["ieee", "tf32x3", "tf32"] = "ieee"


def piece(size: int, bits: int) -> int:
    """Numbers of a gathered row in one block: 128 bytes, or half a row that is longer than two of these."""
    return max(min(padded(size), 1024 // bits), padded(size) // 2)


def row_config(direction: Direction, bits: int, D: int, E: int) -> RowConfig:
    """The shipped configuration of a kernel without tiles.

    Measured for rows of 64 numbers; the others follow the same rule: as many items as fill the threads, two or four
    columns a step, and as many registers as hold most of what a step loads.
    """
    size = max(padded(D), padded(E))
    threads = max(1, piece(size, bits) * bits // 128)  # of an item
    halves = size > piece(size, bits)
    warps = 2 if direction == "forward" and bits == 16 else 1
    if bits == 16:
        columns, registers = 2 if halves and direction != "forward" else 4, 128 if halves else 96
    else:
        columns, registers = 4, 96 if direction == "dkdv" else 128
    return RowConfig(32 * warps // threads, columns, warps, registers)


def group_config(direction: Direction, bits: int, D: int, E: int, block_rows: int) -> GroupConfig:
    """The shipped configuration of a kernel with gathered tiles of `block_rows` rows.

    Measured for 16-bit rows: tiles of 16 and 64 with 64 numbers, tiles of 64 with 128; the others fit and are right.
    """
    size = max(padded(D), padded(E))
    warps = {16: 1, 32: 2, 64: 4}[block_rows]
    if bits == 32:  # ordinary products would hold whole rows in registers
        if block_rows == 64:
            # Of products with 16 columns, eight warps reach past the shared memory (Triton 3.6).
            return GroupConfig(4 if min(padded(D), padded(E)) == 16 else 8, 1, X3)
        return GroupConfig(4 if size > 64 else 2, 2 if size <= 64 else 1, X3)
    if size > 128:
        return GroupConfig(8 if block_rows == 64 else 4, 2 if direction == "forward" else 1)
    if size > 64:
        return GroupConfig(max(warps, 2), 3 if direction == "forward" else 2)
    return GroupConfig(warps, 2 if block_rows == 64 and direction != "dkdv" else 3)
