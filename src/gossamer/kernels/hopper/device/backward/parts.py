"""The sums of split rows and columns: float32 parts added in slot order, so that the same inputs give the same bits."""

from __future__ import annotations

from typing import Any

import cutlass
import cutlass.cute as cute
from cutlass import Float32

from gossamer.kernels.hopper.device.backward.rows import THREADS, VECTOR, lanes_of, store
from gossamer.kernels.hopper.device.merges import PartMerge

AHEAD = 4  # parts whose loads are in flight together


class Sum:
    """dQ, dK or dV of split tiles of `block` rows; `size` is the head size after padding."""

    def __init__(self, size: int, block: int) -> None:
        self.size = size
        self.block = block
        self.lanes = lanes_of(size)

    @cute.jit
    def __call__(
        self,
        result: cute.Tensor,  # (B, heads, rows, columns) 16-bit
        parts: cute.Tensor,  # (slots, block, size) float32
        merges: cute.Tensor,  # (m, MERGE) int32
        factor: Float32,
        stream: Any,
    ) -> None:
        grid = (cute.ceil_div(self.block * self.lanes, THREADS), cute.size(merges, mode=[0]), 1)
        self.kernel(result, parts, merges, factor).launch(grid=grid, block=(THREADS, 1, 1), stream=stream)

    @cute.kernel
    def kernel(
        self,
        result: cute.Tensor,
        parts: cute.Tensor,
        merges: cute.Tensor,
        factor: Float32,
    ) -> None:
        group, merge, _ = cute.arch.block_idx()
        thread, _, _ = cute.arch.thread_idx()
        chunk, place = thread % self.lanes, group * (THREADS // self.lanes) + thread // self.lanes
        batch = merges[merge, PartMerge.BATCH]
        head = merges[merge, PartMerge.HEAD]
        row = merges[merge, PartMerge.TILE] * self.block + place
        first = merges[merge, PartMerge.SLOT]
        count = merges[merge, PartMerge.COUNT]
        rows, columns = cute.size(result, mode=[2]), cute.size(result, mode=[3])
        if row < rows and place < self.block and chunk * VECTOR < columns:
            total = cute.make_rmem_tensor((VECTOR,), Float32)
            total.fill(0.0)
            for i in cutlass.range(0, count, AHEAD):
                found = cute.make_rmem_tensor((VECTOR, AHEAD), Float32)
                found.fill(0.0)
                for n in cutlass.range_constexpr(AHEAD):
                    if i + n < count:
                        part = parts[first + i + n, place, None]
                        cute.autovec_copy(cute.local_tile(part, (VECTOR,), (chunk,)), found[None, n])
                for n in cutlass.range_constexpr(AHEAD):
                    for e in cutlass.range_constexpr(VECTOR):
                        total[e] = total[e] + found[e, n]
            packed = cute.make_rmem_tensor((VECTOR,), result.element_type)
            for e in cutlass.range_constexpr(VECTOR):
                packed[e] = result.element_type(total[e] * factor)
            store(packed, result[batch, head, row, None], chunk)
