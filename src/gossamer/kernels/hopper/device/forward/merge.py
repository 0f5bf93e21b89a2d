"""Merging the parts of split rows by log-sum-exp, in slot order: one warp for each query row."""

from __future__ import annotations

from typing import Any

import cutlass
import cutlass.cute as cute
from cutlass import Float32, Int32

from gossamer.cute.instructions import LN2, LOG2E
from gossamer.cute.merges import PartMerge

WARPS = 4


class Merge:
    """The merge kernel for head size E and tiles of `block_q` rows."""

    def __init__(self, E: int, block_q: int) -> None:
        self.columns = E // 32
        self.block_q = block_q

    @cute.jit
    def __call__(
        self,
        out: cute.Tensor,  # (B, H, Q, E)
        lse: cute.Tensor,  # (B, H, Q)
        part_out: cute.Tensor,  # (slots, block_q, E)
        part_lse: cute.Tensor,  # (slots, block_q)
        merges: cute.Tensor,  # (m, MERGE)
        sinks: cute.Tensor,  # (H,)
        has_sinks: Int32,
        stream: Any,
    ) -> None:
        self.kernel(out, lse, part_out, part_lse, merges, sinks, has_sinks).launch(
            grid=(-(-self.block_q // WARPS), cute.size(merges, mode=[0]), 1), block=(32 * WARPS, 1, 1), stream=stream
        )

    @cute.kernel
    def kernel(
        self,
        out: cute.Tensor,
        lse: cute.Tensor,
        part_out: cute.Tensor,
        part_lse: cute.Tensor,
        merges: cute.Tensor,
        sinks: cute.Tensor,
        has_sinks: Int32,
    ) -> None:
        group, merge, _ = cute.arch.block_idx()
        lane = cute.arch.lane_idx()
        place = group * WARPS + cute.arch.warp_idx()
        batch = merges[merge, PartMerge.BATCH]
        head = merges[merge, PartMerge.HEAD]
        row = merges[merge, PartMerge.TILE] * self.block_q + place
        first = merges[merge, PartMerge.SLOT]
        count = merges[merge, PartMerge.COUNT]
        if row < cute.size(out, mode=[2]) and place < self.block_q:
            top = -Float32.inf
            for i in cutlass.range(lane, count, 32):
                top = cute.arch.fmax(top, part_lse[first + i, place])
            for i in cutlass.range_constexpr(5):
                top = cute.arch.fmax(top, cute.arch.shuffle_sync_bfly(top, offset=1 << i))
            sink = -Float32.inf
            if has_sinks != 0:
                sink = sinks[head]
            top = cute.arch.fmax(top, sink)
            shift = Float32(0.0) if top == -Float32.inf else top
            total = cute.math.exp2((sink - shift) * LOG2E, fastmath=True)
            acc = cute.make_rmem_tensor((self.columns,), Float32)
            acc.fill(0.0)
            for i in cutlass.range(count, unroll=4):
                weight = cute.math.exp2((part_lse[first + i, place] - shift) * LOG2E, fastmath=True)
                total += weight
                for n in cutlass.range_constexpr(self.columns):
                    acc[n] = acc[n] + weight * part_out[first + i, place, 32 * n + lane]
            empty = total == 0.0
            factor = Float32(0.0) if empty else 1.0 / total
            for n in cutlass.range_constexpr(self.columns):
                column = 32 * n + lane
                if column < cute.size(out, mode=[3]):
                    out[batch, head, row, column] = out.element_type(acc[n] * factor)
            if lane == 0:
                value = shift + cute.math.log2(total, fastmath=True) * LN2
                lse[batch, head, row] = -Float32.inf if empty else value
