"""What surrounds the matrix products of the backward: row terms before them, dQ from its float32 sums, sums of parts.

All are bound by memory: sixteen bytes a thread and access, all loads of a thread before the first use.
"""

from __future__ import annotations

from typing import Any

import cutlass
import cutlass.cute as cute
from cutlass import Float32, Int32, const_expr
from cutlass.memory import SmemAllocator

from gossamer.cute.instructions import LOG2E, pack
from gossamer.cute.merges import PartMerge

THREADS = 256
ROWS = 64  # rows of a block
VECTOR = 8  # elements of 16 bits in 16 bytes
NEAR = 2.0**-20  # of an lse to a sink, relative to that or to one


def lanes_of(size: int) -> int:
    """Threads that share a row of `size` columns: a power of two, so that a row stays in one warp."""
    lanes = 1
    while lanes * VECTOR < size:
        lanes *= 2
    return lanes


@cute.jit
def move(row: cute.Tensor, chunk: Int32, values: cute.Tensor, store: cutlass.Constexpr) -> None:
    """Columns [8 chunk, 8 chunk + 8) of a row from or into registers; what lies past its end is left alone, unread."""
    columns, first = cute.size(row), chunk * VECTOR
    if first + VECTOR <= columns:
        whole = cute.local_tile(row, (VECTOR,), (chunk,))
        from_, to = (values, whole) if const_expr(store) else (whole, values)
        cute.autovec_copy(from_, to)
    else:
        for i in cutlass.range_constexpr(VECTOR):
            if first + i < columns:
                if const_expr(store):
                    row[first + i] = values[i]
                else:
                    values[i] = row[first + i]


class Preprocess:
    """Row terms of the backward: lse in base 2 and delta; zeroes the sums of dQ.

    A row that keeps nothing has an lse of +inf here, and a delta of 0 (of -dlse under a sink), whatever dout holds. A
    sink is its lse then, and its out is 0 in every column. So are those of a row whose probabilities sum to less than a
    millionth of the sink, and whose values cancel exactly: what it would add to dV is below the rounding there.

    `size` is E after padding, `zeroed` the columns of `dq_sum` (0: there is none).
    """

    def __init__(self, size: int, zeroed: int) -> None:
        self.lanes = lanes_of(size)
        self.zeroed = zeroed

    @cute.jit
    def __call__(
        self,
        out: cute.Tensor,  # (B, H, Q, E)
        dout: cute.Tensor,  # (B, H, Q, E)
        lse: cute.Tensor,  # (B, H, Q) float32
        dlse: cute.Tensor,  # (B, H, Q) float32
        terms: cute.Tensor,  # (2, B, H, Qp) float32
        dq_sum: cute.Tensor,  # (B, H, Qp / 64, 64 * zeroed) float32
        sinks: cute.Tensor,  # (H,) float32
        has_dlse: Int32,
        has_sinks: Int32,
        stream: Any,
    ) -> None:
        grid = (cute.size(terms, mode=[3]) // ROWS, cute.size(terms, mode=[2]), cute.size(terms, mode=[1]))
        self.kernel(out, dout, lse, dlse, terms, dq_sum, sinks, has_dlse, has_sinks).launch(
            grid=grid, block=(THREADS, 1, 1), stream=stream
        )

    @cute.kernel
    def kernel(
        self,
        out: cute.Tensor,
        dout: cute.Tensor,
        lse: cute.Tensor,
        dlse: cute.Tensor,
        terms: cute.Tensor,
        dq_sum: cute.Tensor,
        sinks: cute.Tensor,
        has_dlse: Int32,
        has_sinks: Int32,
    ) -> None:
        tile, head, batch = cute.arch.block_idx()
        thread, _, _ = cute.arch.thread_idx()
        rows, columns = cute.size(out, mode=[2]), cute.size(out, mode=[3])
        chunk, place = thread % self.lanes, thread // self.lanes
        at_once = const_expr(THREADS // self.lanes)
        steps = const_expr(ROWS // at_once)
        allocator = SmemAllocator()
        deltas = allocator.allocate_tensor(Float32, cute.make_layout(ROWS), byte_alignment=16)
        gives = allocator.allocate_tensor(Int32, cute.make_layout(ROWS), byte_alignment=16)  # whether out is not 0
        # Rows of 64 columns have eight lanes and 32 rows at once; wider ones take more steps.
        a = cute.make_rmem_tensor((VECTOR, steps), out.element_type)
        b = cute.make_rmem_tensor((VECTOR, steps), out.element_type)
        a.fill(0.0)
        b.fill(0.0)
        for i in cutlass.range_constexpr(steps):
            row = tile * ROWS + i * at_once + place
            if row < rows and chunk * VECTOR < columns:
                move(out[batch, head, row, None], chunk, a[None, i], False)
                move(dout[batch, head, row, None], chunk, b[None, i], False)
        if const_expr(self.zeroed):
            zero = cute.make_rmem_tensor((4,), Float32)
            zero.fill(0.0)
            for i in cutlass.range_constexpr(ROWS * self.zeroed // (4 * THREADS)):
                to = cute.local_tile(dq_sum[batch, head, tile, None], (4,), (i * THREADS + thread,))
                cute.autovec_copy(zero, to)
        for i in cutlass.range_constexpr(steps):
            total, some = Float32(0.0), Int32(0)
            for n in cutlass.range_constexpr(VECTOR):
                total += Float32(a[n, i]) * Float32(b[n, i])
                some = Int32(1) if Float32(a[n, i]) != 0.0 else some
            lane = const_expr(self.lanes // 2)
            while const_expr(lane > 0):
                total += cute.arch.shuffle_sync_bfly(total, offset=lane)
                some = some | cute.arch.shuffle_sync_bfly(some, offset=lane)
                lane = const_expr(lane // 2)
            if chunk == 0:
                deltas[i * at_once + place], gives[i * at_once + place] = total, some
        cute.arch.sync_threads()
        if thread < ROWS:
            row = tile * ROWS + thread
            value, delta = Float32.inf, Float32(0.0)
            if row < rows:
                found = Float32(lse[batch, head, row])
                if found != -Float32.inf:
                    value, delta = found * LOG2E, deltas[thread]
                    if has_sinks != 0 and gives[thread] == 0:
                        sink = sinks[head]
                        size = cute.arch.fmax(cute.arch.fmax(sink, -sink), Float32(1.0))
                        if cute.arch.fmax(found - sink, sink - found) <= NEAR * size:
                            value, delta = Float32.inf, Float32(0.0)
                    if has_dlse != 0:
                        delta = delta - dlse[batch, head, row]
            terms[0, batch, head, row] = value
            terms[1, batch, head, row] = delta


@cute.jit
def postprocess(
    dq_sum: cute.Tensor,  # (B, H, Qp / 64, 64 * D) float32, D after padding
    dq: cute.Tensor,  # (B, H, Q, D)
    factor: Float32,
    stream: Any,
) -> None:
    """dQ in 16 bits from its float32 sums, times the scale.

    The sums of 64 rows lie as a warpgroup's accumulator does (see this package's docstring), so they go through shared
    memory, whose rows are padded by 16 bytes: neither side then has a bank conflict.
    """
    grid = (cute.ceil_div(cute.size(dq, mode=[2]), ROWS), cute.size(dq, mode=[1]), cute.size(dq, mode=[0]))
    postprocess_kernel(dq_sum, dq, factor).launch(grid=grid, block=(THREADS, 1, 1), stream=stream)


@cute.kernel
def postprocess_kernel(dq_sum: cute.Tensor, dq: cute.Tensor, factor: Float32) -> None:
    tile, head, batch = cute.arch.block_idx()
    thread, _, _ = cute.arch.thread_idx()
    rows, columns = cute.size(dq, mode=[2]), cute.size(dq, mode=[3])
    size = const_expr(cute.size(dq_sum, mode=[3]) // ROWS)  # D after padding
    pitch = const_expr(size + VECTOR)
    staged = SmemAllocator().allocate_tensor(
        dq.element_type, cute.make_layout((ROWS, size), stride=(pitch, 1)), byte_alignment=16
    )
    words = cute.recast_tensor(staged, Int32)  # (64, size / 2)
    steps = const_expr(size // 16)
    sums = cute.make_rmem_tensor((4, steps), Float32)
    source = dq_sum[batch, head, tile, None]
    for i in cutlass.range_constexpr(steps):
        cute.autovec_copy(cute.local_tile(source, (4,), (i * THREADS + thread,)), sums[None, i])
    t, half = thread % 128, thread // 128
    row = 16 * (t // 32) + t % 32 // 4
    for i in cutlass.range_constexpr(steps):
        for r in cutlass.range_constexpr(2):
            word = pack(sums[2 * r, i] * factor, sums[2 * r + 1, i] * factor, dq.element_type)
            words[row + 8 * r, 4 * (2 * i + half) + t % 4] = word
    cute.arch.sync_threads()
    chunks = const_expr(size // VECTOR)
    for i in cutlass.range_constexpr(ROWS * chunks // THREADS):
        at = i * THREADS + thread
        row, chunk = at // chunks, at % chunks
        if tile * ROWS + row < rows and chunk * VECTOR < columns:
            packed = cute.make_rmem_tensor((VECTOR,), dq.element_type)
            cute.autovec_copy(cute.local_tile(staged[row, None], (VECTOR,), (chunk,)), packed)
            move(dq[batch, head, tile * ROWS + row, None], chunk, packed, True)


AHEAD = 4  # parts whose loads are in flight together


@cute.jit
def sum_parts(
    result: cute.Tensor,  # (B, heads, rows, columns) 16-bit
    parts: cute.Tensor,  # (slots, rows of a tile, columns after padding) float32
    merges: cute.Tensor,  # (m, MERGE) int32
    factor: Float32,
    stream: Any,
) -> None:
    """dQ, dK or dV of split tiles: float32 parts added in slot order, so that the same inputs give the same bits."""
    threads = cute.size(parts, mode=[1]) * lanes_of(cute.size(parts, mode=[2]))
    grid = (cute.ceil_div(threads, THREADS), cute.size(merges, mode=[0]), 1)
    sum_kernel(result, parts, merges, factor).launch(grid=grid, block=(THREADS, 1, 1), stream=stream)


@cute.kernel
def sum_kernel(result: cute.Tensor, parts: cute.Tensor, merges: cute.Tensor, factor: Float32) -> None:
    group, merge, _ = cute.arch.block_idx()
    thread, _, _ = cute.arch.thread_idx()
    block, lanes = const_expr(cute.size(parts, mode=[1])), const_expr(lanes_of(cute.size(parts, mode=[2])))
    chunk, place = thread % lanes, group * (THREADS // lanes) + thread // lanes
    batch = merges[merge, PartMerge.BATCH]
    head = merges[merge, PartMerge.HEAD]
    row = merges[merge, PartMerge.TILE] * block + place
    first = merges[merge, PartMerge.SLOT]
    count = merges[merge, PartMerge.COUNT]
    rows, columns = cute.size(result, mode=[2]), cute.size(result, mode=[3])
    if row < rows and place < block and chunk * VECTOR < columns:
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
        move(result[batch, head, row, None], chunk, packed, True)
