"""Lists of rows turned into lists of keys, in a fixed order: pairs are counted, and then placed, in shared memory.

A cell is a key of a key head and one of SEGMENTS parts of the rows that read that head. A block has the cells of one
part, for a range of keys. Pairs are counted by additions to a counter of each key, in any order. They are placed WARPS
rows at a time, of each warp one: each pair sets the bit of its row in a word of its key, and the bits under its own say
how many come before it, whatever the order in which they were set. A pair is named by its place in the lists of rows,
row * L + its place in the row.
"""

from __future__ import annotations

from typing import Any

import cutlass
import cutlass.cute as cute
from cutlass import Int32, Int64, Uint32, const_expr
from cutlass.memory import SmemAllocator

from gossamer.cute.instructions import assembly
from gossamer.entmax.hopper.support.configurations import SEGMENTS

WARP = 32
WARPS = 32
THREADS = WARP * WARPS
WORDS = 3  # of a key: the place of its next pair, and bits of two rounds in turns


class ColumnLists:
    """Count the pairs of each cell, or (`fill`) place them, from where each cell begins.

    Args:
        keys: of a block.
        chunks: 32 places each that hold a list.
    """

    def __init__(self, keys: int, chunks: int, fill: bool) -> None:
        self.keys, self.chunks, self.fill = keys, chunks, fill

    @cute.jit
    def __call__(
        self,
        list_keys: cute.Tensor,  # (rows, L) int32
        list_counts: cute.Tensor,  # (rows,) int32: -1 of a row without a list
        cells: cute.Tensor,  # (B G SEGMENTS K,) int32: counts, to write; or pairs of the key in earlier segments
        begins: cute.Tensor,  # (B G K + 1,) int32: where each key begins
        names: cute.Tensor,  # (pairs,) int32, to write
        K: Int32,
        head_rows: Int32,  # rows that read a key head
        stream: Any,
    ) -> None:
        heads = cute.size(list_counts) // head_rows
        blocks = heads * cute.ceil_div(K, self.keys) * SEGMENTS
        self.kernel(list_keys, list_counts, cells, begins, names, K, head_rows).launch(
            grid=(blocks, 1, 1),
            block=(THREADS, 1, 1),
            stream=stream,
            min_blocks_per_mp=2,
            preferred_smem_carveout=100,
        )

    @cute.kernel
    def kernel(
        self, list_keys: cute.Tensor, list_counts: cute.Tensor, cells: cute.Tensor, begins: cute.Tensor,
        names: cute.Tensor, K: Int32, head_rows: Int32,
    ) -> None:  # fmt: skip
        block, _, _ = cute.arch.block_idx()
        thread, _, _ = cute.arch.thread_idx()
        segment, rest = block % SEGMENTS, block // SEGMENTS
        ranges = cute.ceil_div(K, self.keys)
        head, first_key = rest // ranges, rest % ranges * self.keys
        keys = cutlass.min(K - first_key, Int32(self.keys))
        words = WORDS if self.fill else 1
        shared = SmemAllocator().allocate_tensor(Int32, cute.make_layout(words * self.keys), byte_alignment=16)
        key = Int64(head) * K + first_key
        cell = Int64(head * SEGMENTS + segment) * K + first_key
        for i in cutlass.range(thread, keys, THREADS, unroll=4):
            if const_expr(self.fill):
                shared[i] = begins[key + i] + cells[cell + i]
                shared[self.keys + i] = Int32(0)
                shared[2 * self.keys + i] = Int32(0)
            else:
                shared[i] = Int32(0)
        cute.arch.sync_threads()
        rows = cute.ceil_div(head_rows, SEGMENTS)
        first = head * head_rows + cutlass.min(segment * rows, head_rows)
        last = head * head_rows + cutlass.min((segment + 1) * rows, head_rows)
        warp, lane = cute.arch.make_warp_uniform(thread // WARP), thread % WARP
        self.walk(list_keys, list_counts, names, shared, first, last, warp, lane, first_key, keys)
        if const_expr(not self.fill):
            cute.arch.sync_threads()
            for i in cutlass.range(thread, keys, THREADS, unroll=4):
                cells[cell + i] = shared[i]

    @cute.jit
    def walk(self, list_keys, list_counts, names, shared, first, last, warp, lane, first_key, keys):
        """The rows of a part, WARPS of them at a time; the next ones are loaded meanwhile."""
        base = shared.iterator.toint()
        keys_here = cute.make_rmem_tensor((self.chunks,), Int32)
        ahead = cute.make_rmem_tensor((self.chunks,), Int32)
        bits = cute.make_rmem_tensor((self.chunks,), Int32)
        own = Int32(1) << warp
        L = cute.size(list_keys, mode=[1])
        count = self.load(list_keys, list_counts, first + warp, last, lane, ahead)
        turn = Int32(self.keys)
        for start in cutlass.range(first, last, WARPS, unroll=1):
            number = count
            for c in cutlass.range_constexpr(self.chunks):
                key = ahead[c] - first_key
                there = c * WARP + lane < number and key >= 0 and key < keys
                keys_here[c] = key if there else Int32(-1)
            count = self.load(list_keys, list_counts, start + WARPS + warp, last, lane, ahead)
            for c in cutlass.range_constexpr(self.chunks):
                if keys_here[c] >= 0:
                    if const_expr(self.fill):
                        assembly(None, "red.shared.or.b32 [$0], $1;", Int32(base + 4 * (keys_here[c] + turn)), own)
                    else:
                        assembly(None, "red.shared.add.u32 [$0], $1;", Int32(base + 4 * keys_here[c]), Int32(1))
            if const_expr(self.fill):
                cute.arch.sync_threads()
                for c in cutlass.range_constexpr(self.chunks):
                    if keys_here[c] >= 0:
                        bits[c] = shared[keys_here[c] + turn]
                        before = cute.arch.popc(bits[c] & (own - 1))
                        place = shared[keys_here[c]] + before
                        names[place] = (start + warp) * L + c * WARP + lane
                cute.arch.sync_threads()
                # The last row of a key moves its next place on, and clears the word for the round after the next.
                for c in cutlass.range_constexpr(self.chunks):
                    if keys_here[c] >= 0 and Uint32(bits[c]) >> Uint32(warp) == Uint32(1):
                        shared[keys_here[c]] = shared[keys_here[c]] + cute.arch.popc(bits[c])
                        shared[keys_here[c] + turn] = Int32(0)
                turn = 3 * self.keys - turn

    @cute.jit
    def load(self, list_keys, list_counts, row, last, lane, loaded):
        """Read the keys of a row, one of WARP by each lane, and return their number; 0 past the last row."""
        count = Int32(0)
        if row < last:
            count = list_counts[row]
            for c in cutlass.range_constexpr(self.chunks):
                # What is past the end of a list is not used: the first keys need not wait for their number.
                if c * WARP + lane < (cute.size(list_keys, mode=[1]) if c == 0 else count):
                    loaded[c] = list_keys[Int64(row), c * WARP + lane]
        return count
