"""Lists of rows turned into lists of keys, in a fixed order: pairs are counted, and then placed, in shared memory.

A cell is a key of a key head and one of SEGMENTS parts of the rows that read that head. A block has the cells of one
part, for a range of keys, as counters in shared memory: one warp walks the rows in their order, in each of which a key
stands once, so that the place that an addition returns does not depend on chance. A pair is named by its place in the
lists of rows, row * L + its place in the row.
"""

from __future__ import annotations

from typing import Any

import cutlass
import cutlass.cute as cute
from cutlass import Int32, Int64, const_expr
from cutlass.memory import SmemAllocator

from gossamer.kernels.hopper.device.instructions import assembly
from gossamer.kernels.hopper.device.select.configurations import SEGMENTS

THREADS = 128
WARP = 32


class ColumnLists:
    """Count the pairs of each cell, or (`fill`) place them, from where each cell begins; `keys` of a block."""

    def __init__(self, keys: int, fill: bool) -> None:
        self.keys, self.fill = keys, fill

    @cute.jit
    def __call__(
        self,
        list_keys: cute.Tensor,  # (rows, L) int32
        list_counts: cute.Tensor,  # (rows,) int32: -1 of a row without a list
        cells: cute.Tensor,  # (B G K SEGMENTS + 1,) int32: counts, behind a 0, to write; or where each cell begins
        names: cute.Tensor,  # (pairs,) int32, to write
        K: Int32,
        of_head: Int32,  # rows that read a key head
        stream: Any,
    ) -> None:
        heads = cute.size(list_counts) // of_head
        blocks = heads * cute.ceil_div(K, self.keys) * SEGMENTS
        self.kernel(list_keys, list_counts, cells, names, K, of_head).launch(
            grid=(blocks, 1, 1), block=(THREADS, 1, 1), stream=stream
        )

    @cute.kernel
    def kernel(
        self, list_keys: cute.Tensor, list_counts: cute.Tensor, cells: cute.Tensor, names: cute.Tensor, K: Int32,
        of_head: Int32,
    ) -> None:  # fmt: skip
        block, _, _ = cute.arch.block_idx()
        thread, _, _ = cute.arch.thread_idx()
        segment, rest = block % SEGMENTS, block // SEGMENTS
        ranges = cute.ceil_div(K, self.keys)
        head, first_key = rest // ranges, rest % ranges * self.keys
        keys = cutlass.min(K - first_key, Int32(self.keys))
        counters = SmemAllocator().allocate_tensor(Int32, cute.make_layout(self.keys), byte_alignment=16)
        cell = (Int64(head) * K + first_key) * SEGMENTS + segment
        for i in cutlass.range(thread, keys, THREADS, unroll=16):
            if const_expr(self.fill):
                counters[i] = cells[cell + i * SEGMENTS]
            else:
                counters[i] = Int32(0)
        cute.arch.sync_threads()
        rows = cute.ceil_div(of_head, SEGMENTS)
        first = head * of_head + cutlass.min(segment * rows, of_head)
        last = head * of_head + cutlass.min((segment + 1) * rows, of_head)
        warp, lane = cute.arch.make_warp_uniform(thread // WARP), thread % WARP
        if const_expr(self.fill):
            if warp == 0:
                self.walk(list_keys, list_counts, names, counters, first, last, WARP, lane, first_key, keys)
        else:
            self.walk(
                list_keys, list_counts, names, counters, first + WARP * warp, last, THREADS, lane, first_key, keys
            )
            cute.arch.sync_threads()
            if block == 0 and thread == 0:
                cells[0] = Int32(0)
            for i in cutlass.range(thread, keys, THREADS, unroll=16):
                cells[cell + i * SEGMENTS + 1] = counters[i]

    @cute.jit
    def walk(
        self, list_keys, list_counts, names, counters, first, last, step: cutlass.Constexpr, lane, first_key, keys
    ):
        """The rows of a warp, WARP of them at a time and as many of the keys of each."""
        L = cute.size(list_keys, mode=[1])
        base = counters.iterator.toint()
        found = cute.make_rmem_tensor((WARP,), Int32)
        for start in cutlass.range(first, last, step, unroll=1):
            own = start + lane
            count = list_counts[own] if own < last else Int32(0)
            most = cute.arch.warp_redux_sync(count, kind="max")
            for chunk in cutlass.range(0, most, WARP, unroll=1):
                for i in cutlass.range_constexpr(WARP):
                    found[i] = Int32(-1)
                    if chunk + lane < cute.arch.shuffle_sync(count, i):
                        found[i] = list_keys[Int64(start + i), chunk + lane]
                for i in cutlass.range_constexpr(WARP):
                    # Rows are added one after the other: additions of a row are of different keys.
                    found[i] = self.add(base, found[i] - first_key, keys)
                    cute.arch.sync_warp()
                if const_expr(self.fill):
                    for i in cutlass.range_constexpr(WARP):
                        if found[i] >= 0:
                            names[found[i]] = (start + i) * L + chunk + lane

    def add(self, base: Any, key: Any, keys: Any) -> Any:
        """One more of a key, if it is of this block; what was counted before, or -1."""
        code = (
            "{ .reg .pred p; .reg .b32 at; setp.lt.u32 p, $2, $3; mad.lo.s32 at, $2, 4, $1; mov.b32 $0, -1; "
            "@p atom.shared.add.u32 $0, [at], 1; }"
        )
        return assembly(Int32, code, Int32(base), Int32(key), Int32(keys))
