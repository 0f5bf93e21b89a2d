"""What the selecting kernel is compiled from: what does not fit the chip is refused."""

from __future__ import annotations

from dataclasses import dataclass
from typing import Literal

from gossamer.kernels.hopper.device.configurations import check_memory

STAGED = 8  # fours of scores of a thread that wait for their rows
CADENCE = 8  # tiles after which all warps append what is staged
HELD = 32  # places at most
SEGMENTS = 16  # equal parts of the rows that read a key head


@dataclass(frozen=True)
class SelectConfig:
    """One compiled kernel.

    `places` are those of a thread for the contenders of one of its rows; four threads share a row.
    """

    dtype: str
    D: int  # head size after padding
    places: int
    step: int = 128  # keys
    stages: int = 3
    same: float = -1.0  # alpha - 1 of all heads: 0.5, 1.0, or -1.0 for any
    top: bool = False  # whether the k largest are selected
    weighed: bool = True  # whether those that surely have no weight are left out
    every: int = 2  # how many tiles there are to one of those from which the first bounds come
    bounds: Literal["every", "causal", "intervals"] = "every"

    blocks = 1
    groups = 2  # warpgroups that compute, of 64 rows each

    def __post_init__(self) -> None:
        if self.step % 64 or self.places > HELD or not (self.top or self.weighed):
            raise ValueError(f"the selecting kernel cannot run as {self}")
        check_memory(self)

    @property
    def rows(self) -> int:
        """Of a block."""
        return 64 * self.groups

    @property
    def shared_bytes(self) -> int:
        """Shared memory of a block: Q, the ring of K, contenders, what is staged, and barriers."""
        of_threads = 2 * self.rows * (2 * 8 * self.places + 20 * STAGED)
        return 2 * self.D * (self.rows + self.step * self.stages) + of_threads + 1024
