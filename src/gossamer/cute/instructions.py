"""Register-level helpers of the Hopper kernels: packed conversion, row words of a mask, softmax over a fragment.

A fragment of a 64 x N accumulator gives each thread two rows (r = 0, 1: eight rows apart) and, of each eight columns,
a pair: element `4 * j + 2 * r + c` is row r, column `8 * j + 2 * (lane % 4) + c`.
"""

from __future__ import annotations

from typing import Any

import cutlass
import cutlass.cute as cute
from cutlass import Boolean, Float32, Int32, Int64, const_expr
from cutlass._mlir.dialects import llvm

ROWS = 2  # rows of a fragment that a thread holds
LOG2E = 1.4426950408889634
LN2 = 0.6931471805599453
LIMIT = 0x41000000  # the bits of 8.0: the largest power of two, relative to a row's reference, that may be summed
LETTERS = {Int32: "r", Int64: "l", Float32: "f", Boolean: "b"}  # of operands of PTX
LARGEST_SUM = 4096.0  # of a thread's exponentials in a step, relative to the references of its rows


def assembly(result: Any, code: str, *operands: Any, effects: bool = True) -> Any:
    """A line of PTX, of whose operands the result, if it has a type, is $0. `effects`: it stays where it stands."""
    constraints = ["=" + LETTERS[result]] if result else []
    value = llvm.inline_asm(
        result and result.mlir_type, [x.ir_value() for x in operands], code,
        ",".join(constraints + [LETTERS[type(x)] for x in operands]), has_side_effects=effects, is_align_stack=False,
        asm_dialect=llvm.AsmDialect.AD_ATT,
    )  # fmt: skip
    return result(value) if result else None


def pack(a: Float32, b: Float32, dtype: type) -> Int32:
    """Two float32 as one 32-bit register of two 16-bit numbers, `a` in the low half."""
    name = "bf16x2" if dtype is cutlass.BFloat16 else "f16x2"
    return assembly(Int32, f"cvt.rn.{name}.f32 $0, $2, $1;", Float32(a), Float32(b), effects=False)


def below(limit: Int32) -> Int32:
    """A word with bits [0, limit) set; any limit is legal (PTX clamps the shift, LLVM's own shift does not)."""
    code = "{ .reg .b32 t; max.s32 t, $1, 0; shl.b32 t, 1, t; sub.s32 $0, t, 1; }"
    return assembly(Int32, code, Int32(limit), effects=False)


def power_here(x: Float32) -> Float32:
    """Two to the power of x, where it stands and once: the compiler would make it again behind a wait."""
    return assembly(Float32, "ex2.approx.ftz.f32 $0, $1;", Float32(x))


def largest(a: Float32, b: Float32, top: Int32) -> Int32:
    """The largest of `top` and the bits of two floats, as integers: one instruction."""
    code = "{ .reg .b32 x, y; mov.b32 x, $1; mov.b32 y, $2; max.s32 x, x, y; max.s32 $0, x, $3; }"
    return assembly(Int32, code, Float32(a), Float32(b), Int32(top), effects=False)


def places(fragment: Any) -> list[int]:
    """The places of a fragment. A list, since the compiler warns of a `range_constexpr` of 64 or more."""
    return list(range(cute.size(fragment)))


def of_row(fragment: Any, r: int) -> list[int]:
    """The places of a row in a fragment, by columns."""
    return [i for i in places(fragment) if i % 4 // 2 == r]


@cute.jit
def convert_half(source: cute.Tensor, target: cute.Tensor, half: cutlass.Constexpr) -> None:
    """Convert into one half of the columns, as `convert` does; the other half becomes zero."""
    packed = cute.recast_tensor(target, Int32)
    count = const_expr(cute.size(packed) // 2)
    for i in cutlass.range_constexpr(count):
        packed[half * count + i] = pack(source[2 * i], source[2 * i + 1], target.element_type)
        packed[(1 - half) * count + i] = Int32(0)


@cute.jit
def soft_cap(scores: cute.Tensor, factor: Float32) -> None:
    """Scores to tanh(factor * score): the exponential form, since the hardware's tanh is good to 2**-11 only."""
    for i in places(scores):
        grown = cute.math.exp2(scores[i] * (factor * (2.0 * LOG2E)), fastmath=True)
        scores[i] = 1.0 - 2.0 * cute.arch.rcp_approx(grown + 1.0)


@cute.jit
def multiply(scores: cute.Tensor, factor: Float32) -> None:
    """Scores times a factor of any sign."""
    for i in places(scores):
        scores[i] = scores[i] * factor


@cute.jit
def convert(source: cute.Tensor, target: cute.Tensor) -> None:
    """float32 registers to 16 bits, element by element in flat order."""
    packed = cute.recast_tensor(target, Int32)
    for i in places(packed):
        packed[i] = pack(source[2 * i], source[2 * i + 1], target.element_type)


@cute.jit
def convert_rows(source: cute.Tensor, target: cute.Tensor, factor: cute.Tensor) -> None:
    """Convert each row times its factor, as `convert` does."""
    packed = cute.recast_tensor(target, Int32)
    for i in places(packed):
        scale = factor[i % ROWS]
        packed[i] = pack(source[2 * i] * scale, source[2 * i + 1] * scale, target.element_type)


@cute.jit
def keep(scores: cute.Tensor, words: cute.Tensor) -> None:
    """Scores whose bit is not set become -inf. `words` (2, step / 32) begin at this thread's first column."""
    for i in places(scores):
        bit = const_expr(1 << (8 * (i // 4 % 4) + i % 2))
        scores[i] = scores[i] if (words[i % 4 // 2, i // 16] & bit) != 0 else -Float32.inf


@cute.jit
def interval_words(words: cute.Tensor, lo: cute.Tensor, hi: cute.Tensor, first: Int32) -> None:
    """Bits of [lo, hi) for each row; `first` is the column of bit 0 of word 0."""
    for r in cutlass.range_constexpr(ROWS):
        for w in cutlass.range_constexpr(cute.size(words, mode=[1])):
            words[r, w] = below(hi[r] - first - 32 * w) & ~below(lo[r] - first - 32 * w)


def shifted(word: Int32, columns: Int32) -> Int32:
    """A mask word from the column on that is so many behind its first."""
    return Int32(cutlass.Uint32(word) >> cutlass.Uint32(columns))


@cute.jit
def keep_below(words: cute.Tensor, n: cutlass.Constexpr, limit: Int32) -> None:
    """Clear the bits of columns in word `n` that are not below a limit, which is relative to bit 0 of word 0."""
    within = below(limit - 32 * n)
    for r in cutlass.range_constexpr(ROWS):
        words[r, n] = words[r, n] & within


@cute.jit
def exceed(scores: cute.Tensor, reference: cute.Tensor, exponent: Float32) -> cutlass.Boolean:
    """Whether any power of two of this thread is above the limit, or a row has no reference yet.

    Their bits are compared, those of negative powers as 0; without a reference a power is infinite or not a number.
    """
    count = const_expr(cute.size(scores) // 4)
    tops = []
    for r in cutlass.range_constexpr(ROWS):
        top = [Int32(0), Int32(0)]
        for j in cutlass.range_constexpr(count):
            pair = [scores[4 * j + 2 * r + c] * exponent - reference[r] for c in range(2)]
            top[j % 2] = largest(pair[0], pair[1], top[j % 2])
        tops.append(cutlass.max(top[0], top[1]))
    return cutlass.max(tops[0], tops[1]) > LIMIT


@cute.jit
def start_reference(scores: cute.Tensor, reference: cute.Tensor, exponent: Float32) -> None:
    """A row's first reference: of its largest score among a quarter of the columns; -inf if none of those is kept."""
    for r in cutlass.range_constexpr(ROWS):
        reference[r] = largest_of_row(scores, r, 5) * exponent


@cute.jit
def largest_of_row(scores: cute.Tensor, r: cutlass.Constexpr, every: cutlass.Constexpr = 1) -> Float32:
    """The largest score of row `r`, of every so many of this thread's pairs of columns."""
    top = scores[2 * r]
    for i in cutlass.range_constexpr(2 * r, cute.size(scores), 4 * every):
        top = cute.arch.fmax(top, cute.arch.fmax(scores[i], scores[i + 1]))
    return over_quad(top)


@cute.jit
def over_quad(value: Float32) -> Float32:
    """The largest value of the four threads that share a row."""
    value = cute.arch.fmax(value, cute.arch.shuffle_sync_bfly(value, offset=1))
    return cute.arch.fmax(value, cute.arch.shuffle_sync_bfly(value, offset=2))


def over_quad_sum(value: Any) -> Any:
    """The sum of the four threads that share a row."""
    value = value + cute.arch.shuffle_sync_bfly(value, offset=1)
    return value + cute.arch.shuffle_sync_bfly(value, offset=2)


def over_quad_max(value: Any) -> Any:
    """The largest value of the four threads that share a row; NaN if one of them has it."""
    value = cute.arch.fmax(value, cute.arch.shuffle_sync_bfly(value, offset=1), nan=True)
    return cute.arch.fmax(value, cute.arch.shuffle_sync_bfly(value, offset=2), nan=True)


@cute.jit
def raise_reference(
    scores: cute.Tensor, reference: cute.Tensor, row_sum: cute.Tensor, rescale: cute.Tensor, exponent: Float32
) -> None:
    """Make the row's largest power of two its new reference; `rescale` is the factor for what was summed before."""
    for r in cutlass.range_constexpr(ROWS):
        before = reference[r]
        reference[r] = cute.arch.fmax(largest_of_row(scores, r) * exponent, before)
        rescale[r] = cute.math.exp2(before - shift_of(reference[r]), fastmath=True)
        row_sum[r] = row_sum[r] * rescale[r]


@cute.jit
def shift_of(reference: Float32) -> Float32:
    """The exponent to subtract from the powers of a row; 0 while nothing is kept, since (-inf) - (-inf) is NaN."""
    return Float32(0.0) if reference == -Float32.inf else reference


@cute.jit
def exponentials(
    scores: cute.Tensor, r: cutlass.Constexpr, shift: Float32, exponent: Float32, powers: cute.Tensor,
    here: cutlass.Constexpr = False,
) -> Float32:  # fmt: skip
    """Two to the powers of row `r`, less `shift`, into the same places of `powers`; returns their sum.

    It is that of this thread's columns only: a row's sum is reduced over the quad once, at the end. `here`: see
    `power_here`.
    """
    sums = [Float32(0.0), Float32(0.0), Float32(0.0), Float32(0.0)]
    for n, i in enumerate(of_row(scores, r)):
        power = scores[i] * exponent - shift
        powers[i] = power_here(power) if const_expr(here) else cute.math.exp2(power, fastmath=True)
        sums[n % 4] = sums[n % 4] + powers[i]
    return (sums[0] + sums[1]) + (sums[2] + sums[3])


@cute.jit
def scale_rows(acc: cute.Tensor, factor: cute.Tensor) -> None:
    """Each row of a fragment times its factor."""
    for i in places(acc):
        acc[i] = acc[i] * factor[i % 4 // 2]


@cute.jit
def finish(
    reference: cute.Tensor,
    row_sum: cute.Tensor,
    factor: cute.Tensor,
    lse: cute.Tensor,
    sink: cute.Tensor,
) -> None:
    """Reduce the sums over the quad; `factor` = 1 / sum (0 for a row that keeps nothing), lse in natural logarithm.

    `reference` is -inf for a row that keeps nothing, `sink` a row's sink logit times log2(e), -inf for none.
    """
    for r in cutlass.range_constexpr(ROWS):
        total = over_quad_sum(row_sum[r])
        top = reference[r]
        shift = cute.arch.fmax(top, sink[r])
        shift = Float32(0.0) if shift == -Float32.inf else shift
        shrink = cute.math.exp2(top - shift, fastmath=True)
        total = total * shrink + cute.math.exp2(sink[r] - shift, fastmath=True)
        empty = total == 0.0
        factor[r] = Float32(0.0) if empty else shrink * cute.arch.rcp_approx(total)
        value = (shift + cute.math.log2(total, fastmath=True)) * LN2
        lse[r] = -Float32.inf if empty else value
