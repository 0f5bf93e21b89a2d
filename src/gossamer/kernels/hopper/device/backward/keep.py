"""dS of each pair of tiles kept in memory, as the kernel of dQ (kept.py) copies it to shared memory.

A pair is 64 rows of 128 bytes, one a key, as a product reads its first factor transposed: eight times 16 bytes, of
which the c-th lies at place c ^ (key % 8). A thread holds pairs of queries 8 j + 2 t, with t its place of four. So that
it stores 16 bytes at once, and no number is exchanged, queries are in another order: that of `query_of`.
"""

from __future__ import annotations

from typing import Any

import cutlass
import cutlass.cute as cute
from cutlass import Int32

from gossamer.kernels.hopper.device import instructions
from gossamer.kernels.hopper.device.backward.block import TileColumnBlock
from gossamer.kernels.hopper.device.backward.common import Step
from gossamer.kernels.hopper.device.backward.consume import ColumnConsumer
from gossamer.kernels.hopper.device.common import ROWS

PAIR = ROWS * ROWS  # numbers of a pair of tiles
# The query of 64 that lies at a place: of the place's digits (2, 4, 4, 2) the second and the third change places.
QUERIES = (2, 4, 4, 2), (1, 8, 2, 32)


def query_of(place: Any) -> Any:
    """The query of 64 whose dS lies at a place of a row."""
    return place % 2 + place // 2 % 4 * 8 + place // 8 % 4 * 2 + place // 32 * 32


class KeepingConsumer(ColumnConsumer):
    """As `ColumnConsumer`; dS of each step is stored while its last products run."""

    def __init__(self, block: TileColumnBlock, masks: Any) -> None:
        super().__init__(block, masks)
        # Of this thread's first key, its first 16 bytes; those of the key eight below are 8 rows on.
        self.chunk = self.thread.row * (ROWS // 8) + (self.thread.quad // 2 ^ self.thread.row % 8)

    @cute.jit
    def keep(self, stage):
        """Store dS of the step in a stage of Q."""
        words = cute.recast_tensor(self.frag_ds, Int32)
        pair = cute.recast_tensor(self.block.arguments.ds[self.block.steps[Step.PLACE, stage], None], Int32)
        for r in cutlass.range_constexpr(instructions.ROWS):
            for half in cutlass.range_constexpr(2):
                found = cute.make_rmem_tensor((4,), Int32)
                for i in cutlass.range_constexpr(4):
                    found[i] = words[2 * (4 * half + i) + r]
                cute.autovec_copy(found, cute.local_tile(pair, (4,), ((self.chunk ^ 4 * half) + 64 * r,)))
