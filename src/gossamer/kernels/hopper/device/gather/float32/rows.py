"""The warps that gather for float32: rows of halves, one warp for K and one for V, and a step's words and powers."""

from __future__ import annotations

from typing import Any

import cutlass
import cutlass.cute as cute
from cutlass import Int32

from gossamer.cute.common import ROWS, Ring, ring
from gossamer.kernels.hopper.device.forward.masks import two
from gossamer.kernels.hopper.device.gather.block import Float32Block
from gossamer.kernels.hopper.device.gather.rows import PIECE, ItemGatherer, RowCopies, WordCopies, copy

POWERS = 8  # bytes of the powers of a column


class HalfRows(ItemGatherer):
    """A warp that fills the ring of K or of V."""

    def __init__(self, block: Float32Block, tensor: cute.Tensor, ring: Ring, shared: Any, ratio: Any) -> None:
        """`tensor`: (B, G, K, 2 size) float16; `shared`: the address of the ring's tiles."""
        self.items, self.indices, self.ratio = block.items, block.arguments.indices, ratio
        self.rows = RowCopies(tensor, ring, shared, 2 * block.config.size, cute.arch.lane_idx(), 32)
        self.columns = self.rows.columns()
        self.columns.fill(-1)

    @cute.jit
    def gather(self, batch, group, at, steps, kv):
        """Gather K or V of an item."""
        rows, ring = self.rows, self.rows.ring
        start = rows.tensor[batch, group, None, None].iterator.toint() + PIECE * rows.piece
        if steps > 0:
            rows.listed(self.indices, at * ROWS, self.columns)
        for n in cutlass.range(at, at + steps, unroll=1):
            stage = ring.wait_empty_at(kv)
            rows.fill(start, self.columns, stage)
            cute.arch.cp_async_mbarrier_arrive_noinc(ring.full + stage)
            if n + 1 < at + steps:
                rows.listed(self.indices, (n + 1) * ROWS, self.columns)
            kv += 1
        return kv


class StepData(ItemGatherer):
    """A warp that copies what belongs to K of each step: its words, and the powers of its columns."""

    def __init__(self, block: Float32Block, ratio: Any) -> None:
        self.items, self.ratio, self.block, self.arguments = block.items, ratio, block, block.arguments
        self.columns, self.upcoming = two(), two()
        self.upcoming.fill(-1)
        self.words = WordCopies(self.arguments.bits, block.s_words, cute.arch.lane_idx())

    @cute.jit
    def gather(self, batch, group, at, steps, kv):
        """Copy the words and powers of an item."""
        a, block, columns, upcoming = self.arguments, self.block, self.columns, self.upcoming
        lane = cute.arch.lane_idx()
        start = a.powers[batch, group, None, None].iterator.toint()
        for i in cutlass.range_constexpr(2):
            if steps > 0:
                upcoming[i] = a.indices[at * ROWS + 32 * i + lane]
        for n in cutlass.range(at, at + steps, unroll=1):
            for i in cutlass.range_constexpr(2):
                columns[i] = upcoming[i]
                if n + 1 < at + steps:
                    upcoming[i] = a.indices[(n + 1) * ROWS + 32 * i + lane]
            slot = ring(kv, 2 * block.k.stages)[0]
            stage = block.k.wait_empty_at(kv)
            self.words.fill(n, slot)
            for i in cutlass.range_constexpr(2):
                to = block.s_powers.iterator.toint() + POWERS * (slot * ROWS + 32 * i + lane)
                copy(to, start, columns[i], Int32(POWERS), False, POWERS)
            cute.arch.cp_async_mbarrier_arrive_noinc(block.k.full + stage)
            kv += 1
        return kv
