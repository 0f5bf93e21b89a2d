"""The warps that gather for float32: rows of halves, one warp for K and one for V, and a step's words and powers."""

from __future__ import annotations

from typing import Any

import cutlass
import cutlass.cute as cute
from cutlass import Int32

from gossamer.kernels.hopper.device.common import ROWS, Ring, ring
from gossamer.kernels.hopper.device.forward.masks import two
from gossamer.kernels.hopper.device.gather.rows import PIECE, ItemGatherer, RowCopies, WordCopies, copy

POWERS = 8  # bytes of the powers of a column


class HalfRows(ItemGatherer):
    """A warp that fills the ring of K or of V."""

    def __init__(self, block: Any, tensor: cute.Tensor, ring: Ring, shared: Any, ratio: Any) -> None:
        """`tensor`: (B, G, K, 2 size) float16; `shared`: the address of the ring's tiles."""
        self.items, self.indices, self.ratio = block.items, block.indices, ratio
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

    def __init__(self, block: Any, ratio: Any) -> None:
        self.items, self.ratio, self.block = block.items, ratio, block
        self.columns, self.upcoming = two(), two()
        self.upcoming.fill(-1)
        self.words = WordCopies(block.bits, block.s_words, cute.arch.lane_idx())

    @cute.jit
    def gather(self, batch, group, at, steps, kv):
        """Copy the words and powers of an item."""
        block, lane, columns, upcoming = self.block, cute.arch.lane_idx(), self.columns, self.upcoming
        start = block.powers[batch, group, None, None].iterator.toint()
        for i in cutlass.range_constexpr(2):
            if steps > 0:
                upcoming[i] = block.indices[at * ROWS + 32 * i + lane]
        for n in cutlass.range(at, at + steps, unroll=1):
            for i in cutlass.range_constexpr(2):
                columns[i] = upcoming[i]
                if n + 1 < at + steps:
                    upcoming[i] = block.indices[(n + 1) * ROWS + 32 * i + lane]
            slot = ring(kv, 2 * block.k_ring.stages)[0]
            stage = block.k_ring.wait_empty_at(kv)
            self.words.fill(n, slot)
            for i in cutlass.range_constexpr(2):
                to = block.s_powers.iterator.toint() + POWERS * (slot * ROWS + 32 * i + lane)
                copy(to, start, columns[i], Int32(POWERS), False, POWERS)
            cute.arch.cp_async_mbarrier_arrive_noinc(block.k_ring.full + stage)
            kv += 1
        return kv
