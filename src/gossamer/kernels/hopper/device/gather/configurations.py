"""What the gather kernels are compiled from."""

from __future__ import annotations

from dataclasses import dataclass

from gossamer.kernels.hopper.device.configurations import MULTIPROCESSOR, SHARED_MEMORY

ROWS = 64  # of a group, and columns that are gathered at a time: the layout's own
SIZES = (64, 128)  # head sizes; a smaller one is padded with zeros


@dataclass(frozen=True)
class GatherConfig:
    """One compiled gather kernel.

    `stages` is the depth of the rings of what is gathered, two tensors of 64 rows a stage. `blocks` share a
    multiprocessor.
    """

    direction: str  # "forward", "query": dQ, or "columns": dK and dV
    dtype: str
    size: int  # D and E after padding
    stages: int
    blocks: int = 2
    lengths: bool = False  # keys at and after a length for each batch element are not attended
    score: str = "fold"  # or "scale" (a factor that is not positive), "softcap"

    block_q = block_kv = step = ROWS
    q_stages = 2  # of the forward's Q

    def __post_init__(self) -> None:
        known = self.direction in ("forward", "query", "columns")
        if not known or self.size not in SIZES or self.stages < 2 or self.blocks not in (2, 3):
            raise ValueError(f"no gather kernel as {self}")
        limit = min(SHARED_MEMORY, MULTIPROCESSOR // self.blocks - 1024)
        if self.shared_bytes > limit:
            raise ValueError(f"{self} needs {self.shared_bytes} bytes of shared memory, there are {limit}")

    @property
    def registers(self) -> tuple[int, int]:
        """Of a thread of the first and of the computing warpgroup."""
        if self.blocks == 3:
            return 40, 120
        if self.direction == "columns":
            return (40, 216) if self.size == 64 else (32, 224)
        return 56, 200

    @property
    def blocks_per_processor(self) -> int:
        """Blocks that share a multiprocessor."""
        return self.blocks

    @property
    def D(self) -> int:
        return self.size

    @property
    def E(self) -> int:
        return self.size

    @property
    def k_stages(self) -> int:
        return self.stages

    v_stages = k_stages

    @property
    def shared_bytes(self) -> int:
        """Shared memory of a block: rings, barriers and item descriptions."""
        words = 4 * 2 * ROWS * 2 * self.stages
        return 2 * ROWS * self.size * (2 + 2 * self.stages) + words + 1024


@dataclass(frozen=True)
class Float32Config:
    """The compiled forward kernel of float32 numbers, which are split in two of float16 (gather/float32)."""

    size: int = 64  # D and E after padding
    stages: int = 2
    lengths: bool = False  # keys at and after a length for each batch element are not attended
    score: str = "fold"  # or "scale" (a factor that is not positive), "softcap"

    dtype, direction = "float32", "forward"
    blocks = blocks_per_processor = 2
    q_stages = 2
    registers = 56, 200  # of a thread of the first and of the computing warpgroup

    def __post_init__(self) -> None:
        if self.size != 64 or self.stages < 2:
            raise ValueError(f"no gather kernel as {self}")
        limit = MULTIPROCESSOR // self.blocks - 1024
        if self.shared_bytes > limit:
            raise ValueError(f"{self} needs {self.shared_bytes} bytes of shared memory, there are {limit}")

    @property
    def shared_bytes(self) -> int:
        """Shared memory of a block: Q, rings, words and powers, barriers and item descriptions."""
        tiles = 4 * ROWS * self.size * (self.q_stages + 2 * self.stages)
        return tiles + 4 * (2 * ROWS + 2 * ROWS) * 2 * self.stages + 1024
