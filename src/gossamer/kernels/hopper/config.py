"""Tile and stage choices of the Hopper kernels, one per (D, E, direction)."""

from __future__ import annotations

from dataclasses import dataclass
from functools import cache

SHARED_MEMORY = 227 * 1024


@dataclass(frozen=True)
class ForwardConfig:
    """One compiled forward kernel.

    block_q x block_kv is the layout's tile, `step` the keys of one step (a divisor of block_kv), `stages` the depth of
    the K and V rings, `q_stages` that of Q: with two, the next item begins while the current one ends.
    """

    dtype: str
    D: int  # head sizes after padding
    E: int
    block_q: int = 128
    block_kv: int = 128
    step: int = 128
    stages: int = 2
    q_stages: int = 2
    hold: int = 1  # rows whose exponentials are done before P V is waited for
    halves: bool = True  # interval steps of which a warpgroup needs one half of the columns compute no more
    score: str = "fold"  # or "scale" (a factor that is not positive), "softcap"

    def __post_init__(self) -> None:
        if self.block_q not in (128, 192) or self.block_kv != 128 or self.step not in (64, 128):
            raise ValueError(f"no forward kernel for tiles {self.block_q} x {self.block_kv} in steps of {self.step}")
        if self.shared_bytes > SHARED_MEMORY:
            raise ValueError(f"{self} needs {self.shared_bytes} bytes of shared memory, there are {SHARED_MEMORY}")

    @property
    def shared_bytes(self) -> int:
        """Shared memory of a block: rings, barriers and item descriptions."""
        rings = self.q_stages * self.block_q * self.D + self.stages * self.step * (self.D + self.E)
        return 2 * rings + 8 * self.q_stages * self.block_q + 2048


# Padded head sizes: a smaller head is padded with zeros by TMA, exactly.
HEAD_SIZES = (64, 96, 128, 192, 256)


def padded(size: int) -> int:
    """The smallest compiled head size that holds `size`."""
    for candidate in HEAD_SIZES:
        if size <= candidate:
            return candidate
    raise ValueError(f"head size {size} is over {HEAD_SIZES[-1]}")


@cache
def forward_config(dtype: str, D: int, E: int, block_q: int, block_kv: int, score: str) -> ForwardConfig:
    """The configuration for head sizes D, E and a layout of block_q x block_kv tiles."""
    D, E = padded(max(D, E)), padded(E)
    step, stages, q_stages = {64: (128, 2, 2), 96: (128, 2, 2), 128: (128, 2, 2), 192: (64, 2, 2), 256: (64, 2, 1)}[D]
    return ForwardConfig(dtype, D, E, block_q, block_kv, step, stages, q_stages, score=score)
