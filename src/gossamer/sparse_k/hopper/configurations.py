"""The configuration of the kernel of SparseK attention."""

from __future__ import annotations

from dataclasses import dataclass

from gossamer.cute.configurations import check_memory
from gossamer.kernels.hopper.device.configurations import Hold

TILE = 128  # queries of an item, and keys of a step
SIZES = (64, 128)  # head sizes; a smaller one is padded with zeros
TERMS = 3  # terms of a key: its score, its place, and the last query that keeps it


@dataclass(frozen=True)
class SparseKConfig:
    """The configuration of one compiled kernel, with two warpgroups of 64 queries; see `ForwardConfig` as well."""

    dtype: str
    size: int  # D and E after padding
    gates: bool  # whether gates multiply values
    stages: int = 2
    hold: int = Hold.FIRST_ROW

    block_q = block_kv = step = TILE
    q_stages = 2
    blocks = heads = 1
    lengths = held_q = False
    score = "fold"

    def __post_init__(self) -> None:
        if self.size not in SIZES or self.stages < 2:
            raise ValueError(f"no kernel of SparseK attention as {self}")
        check_memory(self)

    @property
    def D(self) -> int:
        return self.size

    @property
    def E(self) -> int:
        return self.size

    @property
    def slots(self) -> int:
        """The steps whose terms are held: a consumer reads those of a step after it released its K."""
        return 2 * self.stages

    @property
    def shared_bytes(self) -> int:
        """Shared memory of a block: rings, terms, barriers and item descriptions."""
        return 2 * TILE * self.size * (self.q_stages + 2 * self.stages) + 4 * TERMS * TILE * self.slots + 2048
