"""The configuration of the kernel of supports; one that does not fit the chip is refused."""

from __future__ import annotations

from dataclasses import dataclass

from gossamer.cute.configurations import check_memory
from gossamer.entmax.hopper.key_bounds import Bounds

MOST_PLACES = 32  # of a thread: a bit of a word for each
SEGMENTS = 16  # equal parts of the rows that read a key head


@dataclass(frozen=True)
class SupportConfig:
    """The configuration of one compiled kernel.

    A thread has `places` for the candidates of one of its rows, two neighbouring keys each. The last place takes
    those that find no other. Four threads share a row.
    """

    dtype: str
    D: int  # head size after padding
    places: int
    step: int = 128  # keys
    stages: int = 3
    same: float = -1.0  # alpha - 1 of all heads: 0.5, 1.0, or -1.0 for any
    top: bool = False  # whether the k largest are kept
    weighed: bool = True  # whether keys that surely have no weight are left out
    bounds: Bounds = "every"

    blocks = 1
    groups = 2  # warpgroups that compute, of 64 rows each

    def __post_init__(self) -> None:
        if self.step % 64 or self.places > MOST_PLACES or not (self.top or self.weighed):
            raise ValueError(f"the kernel of supports cannot run as {self}")
        check_memory(self)

    @property
    def rows(self) -> int:
        """The rows of a block."""
        return 64 * self.groups

    @property
    def threads(self) -> int:
        """The threads that compute."""
        return 2 * self.rows

    @property
    def place(self) -> int:
        """The bytes from a thread's place to its next one: for two rows, the scores of two keys and the first key."""
        return 2 * 12 * self.threads

    @property
    def shared_bytes(self) -> int:
        """Shared memory of a block: the ring of K, candidates, where Q is at first, and barriers."""
        return 2 * self.D * self.step * self.stages + self.places * self.place + 1024
