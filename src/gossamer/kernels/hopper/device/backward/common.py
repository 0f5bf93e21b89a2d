"""What the kernels of the backward share: words of a step, masked elements, 16-bit pairs, and how results leave.

A thread holds two rows of an accumulator of 64 rows, eight apart, and of each eight columns a pair (instructions.py).
"""

from __future__ import annotations

from enum import IntEnum
from typing import Any

import cutlass
import cutlass.cute as cute
from cutlass import Float32, Int32, const_expr
from cutlass._mlir.dialects import llvm
from cutlass.cute.nvgpu import warp
from cutlass.cutlass_dsl import T, dsl_user_op

from gossamer.cute import instructions
from gossamer.cute.common import ROWS, WARPGROUP
from gossamer.cute.tiles import Tma, partition

STEP = 8  # words of the description of 64 queries
STAGES = 2  # of dS


class Step(IntEnum):
    """The words that describe 64 queries of a step.

    QUERY is the first one; ENTRY an interval's row in lo and hi, -1 for all keys that exist, and of bits the first row
    in the pool; WORD the first word in such a row; KEPT, for each of two warpgroups, the kind for its keys alone, where
    KIND is INTERVAL and the configuration has `edges`; PLACE where dS is kept.
    """

    KIND, QUERY, ENTRY, WORD, HEAD, BATCH, KEPT, PLACE = range(8)


class Kind(IntEnum):
    """What a step of rows, or 64 queries of one of columns, keeps: all pairs, an interval of each row, set bits.

    END: there is no such step, the item is over. NOTHING: they fill up a step, or none of a warpgroup's keys keeps any.
    EDGE: the keys of rows that exist. What a step of columns computes comes before END.
    """

    FULL, INTERVAL, BITS, END, NOTHING, EDGE = range(6)


class ColumnBarrier(IntEnum):
    """The first named barrier of each purpose: those of warpgroups follow one another."""

    SCORE_GRADIENT = 1  # dS of the other warpgroup is there, of steps with even and with odd numbers
    STAGING_FULL = 5  # a warpgroup has written its staging memory
    STAGING_FREE = 7  # its staging memory may be written


class OneProducer:
    """Of a kernel that is served by one warp of a warpgroup, the others of which have nothing to do."""

    @cute.jit
    def serve(self, block, warp):
        if warp == 0:
            self.produce(block)


def _half(code: str, pair: Int32, loc: Any, ip: Any) -> Float32:
    return Float32(
        llvm.inline_asm(
            T.f32(), [Int32(pair).ir_value(loc=loc, ip=ip)], code, "=f,r",
            has_side_effects=False, is_align_stack=False, asm_dialect=llvm.AsmDialect.AD_ATT, loc=loc, ip=ip,
        )
    )  # fmt: skip


@dsl_user_op
def low(pair: Int32, dtype: type, *, loc: Any = None, ip: Any = None) -> Float32:
    """The first of two 16-bit numbers in a register."""
    if dtype is cutlass.BFloat16:
        return _half("{ .reg .b32 t; shl.b32 t, $1, 16; mov.b32 $0, t; }", pair, loc, ip)
    return _half("{ .reg .b16 a, b; mov.b32 {a, b}, $1; cvt.f32.f16 $0, a; }", pair, loc, ip)


@dsl_user_op
def high(pair: Int32, dtype: type, *, loc: Any = None, ip: Any = None) -> Float32:
    """The second of two 16-bit numbers in a register."""
    if dtype is cutlass.BFloat16:
        return _half("{ .reg .b32 t; and.b32 t, $1, 0xffff0000; mov.b32 $0, t; }", pair, loc, ip)
    return _half("{ .reg .b16 a, b; mov.b32 {a, b}, $1; cvt.f32.f16 $0, b; }", pair, loc, ip)


@dsl_user_op
def bulk_add(target: cute.Pointer, source: cute.Pointer, size: int, *, loc: Any = None, ip: Any = None) -> None:
    """Add `size` bytes of float32 in shared memory to global memory, asynchronously: one thread issues it."""
    from_ = source.toint(loc=loc, ip=ip).ir_value(loc=loc, ip=ip)
    llvm.inline_asm(
        None, [target.llvm_ptr, from_, Int32(size).ir_value(loc=loc, ip=ip)],
        "cp.reduce.async.bulk.global.shared::cta.bulk_group.add.f32 [$0], [$1], $2;", "l,r,r",
        has_side_effects=True, is_align_stack=False, asm_dialect=llvm.AsmDialect.AD_ATT, loc=loc, ip=ip,
    )  # fmt: skip


def two_rows(dtype: Any) -> cute.Tensor:
    """A number for each row of a thread, in registers."""
    return cute.make_rmem_tensor((instructions.ROWS,), dtype)


@cute.jit
def shift(word, thread):
    """A mask word from this thread's first column on."""
    return Int32(cutlass.Uint32(word) >> cutlass.Uint32(thread.quad))


@cute.jit
def clear(values: cute.Tensor, words: cute.Tensor) -> None:
    """Elements whose bit is not set become 0. `words` (2, step / 32) begin at this thread's first column."""
    for j in cutlass.range_constexpr(cute.size(values) // 4):
        for r in cutlass.range_constexpr(instructions.ROWS):
            word = words[r, j // 4]
            for c in cutlass.range_constexpr(2):
                bit, i = const_expr(1 << (8 * (j % 4) + c)), const_expr(4 * j + 2 * r + c)
                values[i] = values[i] if (word & bit) != 0 else Float32(0.0)


@cute.jit
def put_tile(acc, mma, thread, to, barrier: cutlass.Constexpr = None):
    """An accumulator to a tile in shared memory, in its type; before, all of the warpgroup meet at `barrier`."""
    packed = cute.make_rmem_tensor_like(acc, to.element_type)
    instructions.convert(acc, packed)
    atom = cute.make_copy_atom(warp.StMatrix8x8x16bOp(transpose=False, num_matrices=4), to.element_type)
    mine = cute.make_tiled_copy_C(atom, mma).get_slice(thread.thread)
    if const_expr(barrier is not None):
        cute.arch.barrier(barrier_id=barrier, number_of_threads=WARPGROUP)
    cute.copy(atom, mine.retile(packed), mine.partition_D(to))


@cute.jit
def put_part(acc, part, slot, row, column, apart: cutlass.Constexpr = 8):
    """An accumulator to a slot of the float32 parts of split tiles, (slots, rows, columns).

    `apart`: from the first row of a thread to its second.
    """
    for r in cutlass.range_constexpr(instructions.ROWS):
        for j in cutlass.range_constexpr(cute.size(acc) // 4):
            for e in cutlass.range_constexpr(2):
                part[slot, row + apart * r, 8 * j + column + e] = acc[4 * j + 2 * r + e]


@cute.jit
def send_tile(tma: Tma, source, columns: cutlass.Constexpr, tile, head, batch):
    """64 rows from shared to global memory; returns when they have been read."""
    from_, to = partition(tma, source, ROWS, columns)
    cute.copy(tma.atom, from_, to[None, tile, head, batch])
    cute.arch.cp_async_bulk_commit_group()
    cute.arch.cp_async_bulk_wait_group(0, read=True)


@cute.jit
def row_terms(thread, terms, place):
    """Terms of 64 queries for this thread's columns: element (e, j) is of column 8 j + thread.quad + e."""
    places = const_expr(cute.size(terms, mode=[1]))
    pairs = cute.make_tensor(terms.iterator, cute.make_layout((2, 4, ROWS // 8, places), stride=(1, 2, 8, ROWS)))
    found = cute.make_rmem_tensor((2, ROWS // 8), Float32)
    cute.autovec_copy(pairs[None, thread.lane % 4, None, place], found)
    return found
