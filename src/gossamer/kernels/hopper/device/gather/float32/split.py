"""Numbers of float32 as pairs of float16, for products of 16-bit numbers that are as exact as those of float32.

A row x becomes [hi | lo] with x = (hi + lo) 2^(e - 14): e is the exponent of its largest number, hi that number times
2^(14 - e) rounded to float16, lo what is left, rounded as well. Both hold 11 bits. A number that is at least 2^-17 of
the row's largest keeps 22 bits, and of a smaller one the error is 2^-39 of the largest. a b = hi hi + hi lo + lo hi
then leaves out 2^-22 of a product at most. (Ootomo and Yokota, "Recovering single precision accuracy from Tensor Cores
while surpassing the FP32 theoretical peak performance", IJHPCA 2022, split by powers of two in the same way.)

Exponents are taken no lower than LEAST: rows whose largest number is under 2^-115 lose bits. Infinities become NaN.
"""

from __future__ import annotations

from typing import Any

import cutlass
import cutlass.cute as cute
from cutlass import Float16, Float32, Int32
from cutlass._mlir.dialects import llvm

from gossamer.cute import instructions

THREADS = 256
VECTOR = 8  # numbers of a row that a thread splits: 16 bytes of hi and 16 of lo
FIELD = 23  # place of the exponent in the bits of a float32
BIAS = 127
TOP = 14  # exponent of a row's largest number before it is split
LEAST = -98
# What is stored with a row is 2^(e - shift). Scores: q k = (q' k') 2^(e_k - 28) 2^e_q; the factor of a query is not
# stored. Values: so that the power of usual ones is near 1, see consume.py.
KEY_SHIFT, VALUE_SHIFT = 2 * TOP, 1


def half(word: Int32, high: bool) -> Float32:
    """One of the two float16 in a word."""
    code = "{ .reg .b16 a, b; mov.b32 {a, b}, $1; cvt.f32.f16 $0, " + ("b" if high else "a") + "; }"
    return instructions.assembly(Float32, code, Int32(word), effects=False)


@cute.jit
def split(source: cute.Tensor, high: cute.Tensor, low: cute.Tensor) -> None:
    """Float32 registers to two of float16, element by element in flat order."""
    first, second = cute.recast_tensor(high, Int32), cute.recast_tensor(low, Int32)
    for i in cutlass.range_constexpr(cute.size(first)):
        a, b = source[2 * i], source[2 * i + 1]
        word = instructions.pack(a, b, Float16)
        first[i], second[i] = word, instructions.pack(a - half(word, False), b - half(word, True), Float16)


def largest_bits(values: Any, places: Any) -> Int32:
    """The bits of the largest magnitude; a NaN is above all."""
    bits = cute.recast_tensor(values, Int32)
    found = Int32(0)
    for i in places:
        found = cutlass.max(found, bits[i] & 0x7FFFFFFF)
    return found


def power(field: Int32) -> Float32:
    """The power of two with this biased exponent."""
    return Float32(llvm.bitcast(Float32.mlir_type, (Int32(field) << FIELD).ir_value()))


def float_bits(x: Float32) -> Int32:
    """The bits of a number."""
    return Int32(llvm.bitcast(Int32.mlir_type, Float32(x).ir_value()))


def exponent_field(bits: Int32) -> Int32:
    """The biased exponent of a number's bits, no less than that of 2^LEAST."""
    return cutlass.max(bits >> FIELD, Int32(BIAS + LEAST))


def down(field: Int32) -> Float32:
    """What brings a number of this biased exponent to 2^TOP."""
    return power(TOP + 2 * BIAS - field)


class SplitRows:
    """Splits the rows of K and V. `size` is that of heads after padding: a row becomes 2 `size` numbers."""

    def __init__(self, size: int) -> None:
        self.size = size
        self.lanes = size // VECTOR  # threads of a row
        self.rows = THREADS // self.lanes  # of a block

    @cute.jit
    def __call__(
        self,
        k: cute.Tensor,  # (B, G, K, D) float32
        v: cute.Tensor,  # (B, G, K, E) float32
        k_halves: cute.Tensor,  # (B, G, K, 2 size) float16
        v_halves: cute.Tensor,  # (B, G, K, 2 size) float16
        powers: cute.Tensor,  # (B, G, K, 2) float32
        stream: Any,
    ) -> None:
        batch, heads, keys = (cute.size(k, mode=[i]) for i in range(3))
        self.kernel(k, v, k_halves, v_halves, powers).launch(
            grid=(cute.ceil_div(keys, self.rows), heads, batch), block=(THREADS, 1, 1), stream=stream
        )

    @cute.kernel
    def kernel(
        self, k: cute.Tensor, v: cute.Tensor, k_halves: cute.Tensor, v_halves: cute.Tensor, powers: cute.Tensor
    ) -> None:
        block, head, batch = cute.arch.block_idx()
        thread, _, _ = cute.arch.thread_idx()
        row, lane = block * self.rows + thread // self.lanes, thread % self.lanes
        if row < cute.size(k, mode=[2]):
            found = []
            for x in (k, v):
                values = cute.make_rmem_tensor((VECTOR,), Float32)
                values.fill(0.0)
                self.load(x[batch, head, row, None], lane, values)
                found.append(values)
            both = cute.make_rmem_tensor((2,), Float32)
            self.send(found[0], k_halves[batch, head, row, None], lane, both, 0, KEY_SHIFT)
            self.send(found[1], v_halves[batch, head, row, None], lane, both, 1, VALUE_SHIFT)
            if lane == 0:
                cute.autovec_copy(both, powers[batch, head, row, None])

    @cute.jit
    def load(self, row, lane, to):
        """This thread's numbers of a row; what lies past its end stays zero. Columns are a multiple of VECTOR."""
        if lane * VECTOR < cute.size(row):
            cute.autovec_copy(cute.local_tile(row, (VECTOR,), (lane,)), to)

    @cute.jit
    def send(self, values, to, lane, both, place: cutlass.Constexpr, shift: cutlass.Constexpr):
        """Split and store them, with the row's power."""
        bits = largest_bits(values, range(VECTOR))
        for i in cutlass.range_constexpr(self.lanes.bit_length() - 1):
            bits = cutlass.max(bits, cute.arch.shuffle_sync_bfly(bits, offset=1 << i))
        field = exponent_field(bits)
        both[place] = power(field - shift)
        factor = down(field)
        for i in cutlass.range_constexpr(VECTOR):
            values[i] = values[i] * factor
        high, low = cute.make_rmem_tensor((VECTOR,), Float16), cute.make_rmem_tensor((VECTOR,), Float16)
        split(values, high, low)
        cute.autovec_copy(high, cute.local_tile(to, (VECTOR,), (lane,)))
        cute.autovec_copy(low, cute.local_tile(to, (VECTOR,), (lane + self.lanes,)))
