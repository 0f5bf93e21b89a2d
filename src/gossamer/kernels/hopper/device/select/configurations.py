"""What the selecting kernel is compiled from: what does not fit the chip is refused."""

from __future__ import annotations

from dataclasses import dataclass
from typing import Literal

from gossamer.kernels.hopper.device.configurations import check_memory

GROUPS = 2  # warpgroups that compute, of 64 rows each
ROWS = 64 * GROUPS  # of a block
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
    rows = ROWS

    def __post_init__(self) -> None:
        if self.step % 64 or self.places < self.step // 4 or not (self.top or self.weighed):
            raise ValueError(f"the selecting kernel cannot run as {self}")
        check_memory(self)

    @property
    def shared_bytes(self) -> int:
        """Shared memory of a block: Q, the ring of K, contenders and barriers."""
        return 2 * self.D * (ROWS + self.step * self.stages) + 8 * 4 * ROWS * self.places + 1024
