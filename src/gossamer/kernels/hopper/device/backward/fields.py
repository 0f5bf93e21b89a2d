"""What the roles of the column kernels share: the words of a step, named barriers, 16-bit pairs, bulk copies."""

from __future__ import annotations

from enum import IntEnum
from typing import Any

import cutlass
import cutlass.cute as cute
from cutlass import Float32, Int32
from cutlass._mlir.dialects import llvm
from cutlass.cutlass_dsl import T, dsl_user_op

STEP = 8  # words of the description of 64 queries
STAGES = 2  # of dS


class Step(IntEnum):
    """The words that describe 64 queries of a step.

    QUERY is the first one; ENTRY an interval's row in lo and hi, -1 for all keys that exist, and of bits the first row
    in the pool; WORD the first word in such a row.
    """

    KIND, QUERY, ENTRY, WORD, HEAD, BATCH = range(6)


class Kind(IntEnum):
    """What 64 queries of a step keep: all pairs, an interval of each key, those whose bit is set.

    END: there is no such step, the item is over. NOTHING: they fill up a step.
    """

    FULL, INTERVAL, BITS, END, NOTHING = range(5)


class ColumnBarrier(IntEnum):
    """The first named barrier of each purpose: those of warpgroups follow one another."""

    SCORE_GRADIENT = 1  # dS of the other warpgroup is there, of steps with even and with odd numbers
    STAGING_FULL = 5  # a warpgroup has written its staging memory
    STAGING_FREE = 7  # its staging memory may be written


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
