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
        counters = SmemAllocator().allocate_tensor(Int32, cute.make_layout(self.keys + WARP), byte_alignment=16)
        cell = (Int64(head) * K + first_key) * SEGMENTS + segment
        for i in cutlass.range(thread, keys, THREADS, unroll=16):
            if const_expr(self.fill):
                counters[i] = cells[cell + i * SEGMENTS]
            else:
                counters[i] = Int32(0)
        if thread < WARP:
            counters[self.keys + thread] = Int32(-(2**30))
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
        """The rows of a warp, WARP of them at a time; the first keys of the next ones are loaded meanwhile."""
        base = counters.iterator.toint()
        found = cute.make_rmem_tensor((WARP,), Int32)
        ahead = cute.make_rmem_tensor((WARP,), Int32)
        count = self.load(list_keys, list_counts, first, last, lane, ahead)
        for start in cutlass.range(first, last, step, unroll=1):
            for i in cutlass.range_constexpr(WARP):
                found[i] = ahead[i]
            of_rows = count
            count = self.load(list_keys, list_counts, start + step, last, lane, ahead)
            self.take(list_keys, names, base, found, start, of_rows, Int32(0), lane, first_key, keys)
            most = cute.arch.warp_redux_sync(of_rows, kind="max")
            for chunk in cutlass.range(WARP, most, WARP, unroll=1):
                for i in cutlass.range_constexpr(WARP):
                    if chunk + lane < cute.arch.shuffle_sync(of_rows, i):
                        found[i] = list_keys[Int64(start + i), chunk + lane]
                self.take(list_keys, names, base, found, start, of_rows, chunk, lane, first_key, keys)

    @cute.jit
    def load(self, list_keys, list_counts, start, last, lane, found):
        """How many keys the rows from `start` on have, of a lane one row's; the first keys of all of them."""
        for i in cutlass.range_constexpr(WARP):
            # What is past the end of a list is not used, so that its length need not be known.
            if start + i < last and lane < cute.size(list_keys, mode=[1]):
                found[i] = list_keys[Int64(start + i), lane]
        count = Int32(0)
        if start + lane < last:
            count = list_counts[start + lane]
        return count

    @cute.jit
    def take(self, list_keys, names, base, found, start, of_rows, chunk, lane, first_key, keys):
        """Add what is loaded of WARP rows, one row after the other: additions of a row are of different keys."""
        for i in cutlass.range_constexpr(WARP):
            there = chunk + lane < cute.arch.shuffle_sync(of_rows, i)
            key = found[i] - first_key
            there = there and key >= 0 and key < keys
            # A counter of each lane's own takes what is not counted, so that no addition has a condition.
            found[i] = base + 4 * (key if there else self.keys + lane)
        for i in cutlass.range_constexpr(WARP):
            found[i] = assembly(Int32, "atom.shared.add.u32 $0, [$1], 1;", Int32(found[i]))
            cute.arch.sync_warp()
        if const_expr(self.fill):
            L = cute.size(list_keys, mode=[1])
            for i in cutlass.range_constexpr(WARP):
                if found[i] >= 0:
                    names[found[i]] = (start + i) * L + chunk + lane
