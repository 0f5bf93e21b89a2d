"""The configurations of the kernels of long rows; one that does not fit the chip is refused."""

from __future__ import annotations

from dataclasses import dataclass

from gossamer.cute.common import ROWS
from gossamer.cute.configurations import check_memory
from gossamer.entmax.hopper.key_bounds import Bounds

SIZES = (64, 128)  # head sizes; a smaller one is padded with zeros
SUMS = 4  # numbers of a row that warpgroups with parts of its keys exchange: the sums of a pass, and the largest score
EIGHT = 8  # keys that follow one another in a sample
EVERY = 8  # one tile of keys in so many is in the larger sample
FEWEST = 3  # tiles of the larger sample; there is none with fewer
TERMS = 4  # terms of a row for dK and dV: its place on the line, delta, and its first and last key


def padded(size: int) -> int:
    """The head size of the kernels that takes one of up to 128."""
    return 64 if size <= 64 else 128


@dataclass(frozen=True)
class LongRowsConfig:
    """The configuration of one compiled kernel.

    A block has `groups` warpgroups. Where there are many tiles each has 64 rows of its own; where there are few all
    have the same 64 rows, and each takes its part of the keys.
    """

    dtype: str
    D: int  # head sizes after padding
    E: int
    same: float = -1.0  # alpha - 1 of all heads: 0.25, 0.5, 1.0, or -1.0 for any over 0
    bounds: Bounds = "every"
    groups: int = 3
    step: int = 128  # keys
    k_stages: int = 6
    v_stages: int = 3
    sampled: int = 2  # steps on the larger sample
    requested: bool = True  # whether normalisers and sizes of supports are written

    blocks = 1

    def __post_init__(self) -> None:
        if self.D not in SIZES or self.E not in SIZES or self.step % 64 or self.groups not in (2, 3):
            raise ValueError(f"no kernel of tiles of rows as {self}")
        check_memory(self)

    @property
    def rows(self) -> int:
        """The rows of a block, where there are many tiles."""
        return ROWS * self.groups

    @property
    def halley(self) -> bool:
        """Whether the second derivative of a weight costs no more than an addition."""
        return self.same in (0.25, 0.5)

    @property
    def shared_bytes(self) -> int:
        """Shared memory of a block: Q, the rings of K and V, out and sums of parts, and barriers."""
        tiles = self.rows * self.D + self.step * (self.k_stages * self.D + self.v_stages * self.E)
        parts = 4 * ROWS * (self.E * (self.groups - 1) + 2 * SUMS * self.groups)
        return 2 * tiles + parts + 1024


def long_rows_config(dtype: str, D: int, E: int, same: float, bounds: Bounds, requested: bool = True) -> LongRowsConfig:
    """The configuration for a call with heads of up to 128."""
    size = padded(D), padded(E)
    if max(size) == 64:
        return LongRowsConfig(dtype, *size, same, bounds, requested=requested)
    return LongRowsConfig(dtype, *size, same, bounds, groups=2, step=64, requested=requested)


@dataclass(frozen=True)
class LongRowsColumnsConfig:
    """The configuration of a kernel of dK and dV: each of `groups` warpgroups has 64 keys; all read the same rows."""

    dtype: str
    D: int  # head sizes after padding
    E: int
    same: float = -1.0  # as of `LongRowsConfig`
    bounds: Bounds = "every"
    groups: int = 3
    stages: int = 4

    blocks = 1
    step = ROWS  # rows

    def __post_init__(self) -> None:
        if self.D not in SIZES or self.E not in SIZES or self.groups not in (2, 3):
            raise ValueError(f"no kernel of dK and dV of tiles of rows as {self}")
        check_memory(self)

    @property
    def keys(self) -> int:
        """The keys of a block."""
        return ROWS * self.groups

    @property
    def shared_bytes(self) -> int:
        """Shared memory of a block: K and V, the ring of Q, dO and the terms of rows, and barriers."""
        return (
            (self.D + self.E) * 2 * (self.keys + self.step * self.stages) + 4 * TERMS * self.step * self.stages + 1024
        )


def long_rows_columns_config(dtype: str, D: int, E: int, same: float, bounds: Bounds) -> LongRowsColumnsConfig:
    """The configuration for a call with heads of up to 128."""
    size = padded(D), padded(E)
    if max(size) == 64:
        return LongRowsColumnsConfig(dtype, *size, same, bounds)
    return LongRowsColumnsConfig(dtype, *size, same, bounds, groups=2, stages=3)
