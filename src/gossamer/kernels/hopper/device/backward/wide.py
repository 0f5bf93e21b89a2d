"""dK and dV of heads wider than 128: one accumulator fills the registers of a warpgroup, so that two share 64 keys.

The first warpgroup computes S^T = K Q^T, P and dV += P^T dO, the second dP^T = V dO^T, dS and dK += dS^T Q: two
products each, and the tensor cores work for one while the other is between its two. P goes from a thread of the first
to the same thread of the second through shared memory, in 16 bits. An item of the schedule is two of this kernel's, one
for each half of its key tile.
"""

from __future__ import annotations

from typing import Any

import cutlass.cute as cute

from gossamer.kernels.hopper.device.backward.kernel import ColumnBlock, ColumnKernel
from gossamer.kernels.hopper.device.backward.wide_consume import KeyConsumer, ValueConsumer
from gossamer.kernels.hopper.device.common import NUMBERS, ROWS, WARPGROUP
from gossamer.kernels.hopper.device.configurations import WideConfig
from gossamer.kernels.hopper.device.shell import array, tiles, words


class Wide(ColumnKernel):
    """The kernel of one configuration."""

    threads = 3 * WARPGROUP
    registers = 24, 240
    carveout = None
    readers = 2, 1, 8, 8  # the item's description, which comes with K, is read by both warpgroups

    def __init__(self, config: WideConfig) -> None:
        self.config = config
        self.stages = config.q_stages, config.do_stages
        self.pieces = config.tile_kv // ROWS
        self.exchanged = ROWS * config.step

    def memory(self) -> dict[str, Any]:
        held = self.layouts()
        result = array(NUMBERS[self.config.dtype], max(cute.cosize(held["k"]), cute.cosize(held["v"])), 1024)
        return super().memory() | {"k": result, "v": result}

    def block(self, arguments: Any, memory: Any) -> ColumnBlock:
        """dV is sent from the place of K, which its warpgroup alone reads, and dK from that of V."""
        held, block = self.layouts(), super().block(arguments, memory)
        block.dk, block.dv = tiles(memory.v, held["k"]), tiles(memory.k, held["v"])
        block.p = words(memory.exchanged, 4, WARPGROUP, self.config.step // 16, 2)
        return block

    @cute.jit
    def serve(self, block, warp):
        if warp == 0:
            self.produce(block)

    @cute.jit
    def compute(self, block):
        """The first warpgroup makes dV, the second dK."""
        if cute.arch.make_warp_uniform(cute.arch.warp_idx()) < 8:
            ValueConsumer(block).consume()
        else:
            KeyConsumer(block).consume()
