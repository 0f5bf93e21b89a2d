"""The softmax of the float32 forward over gathered columns.

Probabilities are split as numbers are: P' = 2^(t - r) f, with t a score in base 2, f the power of the value's row and r
a reference of the query's row, is what is multiplied into the values as they are stored; the row sums add 2^(t - r). So
that neither leaves its range, r follows the largest t + log2 f, what a key adds to the result, and not the largest t:
P' is between 1 and 2^LIMIT where it counts, and 2^(t - r) between 2^-126 and 2^112 there, whatever the rows of V hold
(up to 2^103; in larger ones what is far below a row's largest contribution is lost).
"""

from __future__ import annotations

from typing import Any

import cutlass
import cutlass.cute as cute
from cutlass import Float32, Int32, const_expr

from gossamer.cute import instructions
from gossamer.cute.common import ROWS, Opaque, Thread, ring
from gossamer.kernels.hopper.device.forward.masks import two
from gossamer.kernels.hopper.device.gather.block import Float32Block
from gossamer.kernels.hopper.device.gather.float32.split import BIAS, FIELD, float_bits, split

LIMIT = 12  # log2 of the largest P' that is split
LOWEST = -(1 << 31)
MINE = 0x03030303  # of a mask word that is shifted to a thread's first column: the columns of this thread


class Float32Softmax(Opaque):
    """Of the rows of a warpgroup; fragments as in instructions.py."""

    def __init__(self, block: Float32Block, thread: Thread, mma: Any) -> None:
        """`mma`: P V, of which P' in two halves is the first factor."""
        self.block, self.arguments, self.thread, self.score = block, block.arguments, thread, block.config.score
        self.slots = 2 * block.config.stages
        whole = mma.get_slice(0)
        self.p = [whole.make_fragment_A(whole.partition_shape_A((ROWS, ROWS))) for _ in range(2)]
        self.row = two(Float32)  # factor of the scores of a row
        self.reference, self.row_sum, self.rescale = two(Float32), two(Float32), two(Float32)

    @cute.jit
    def powers_of_two(self, scores, words, kv):
        """Scores to t - r of this module's text, in place.

        Returns the powers of the values' rows, and whether references were raised, and O is to be rescaled.
        """
        count = const_expr(ROWS // 8)
        values = cute.make_rmem_tensor((2 * count,), Float32)  # powers of the rows of V, of this thread's columns
        slot = ring(kv, self.slots)[0]
        for j in cutlass.range_constexpr(count):
            place = cute.assume(2 * (slot * ROWS + 8 * j + self.thread.quad), divby=4)
            found = cute.make_rmem_tensor((4,), Float32)  # powers of (K, V) of this thread's two columns of each eight
            cute.autovec_copy(cute.make_tensor(self.block.s_powers.iterator + place, cute.make_layout(4)), found)
            for e in cutlass.range_constexpr(2):
                values[2 * j + e] = found[2 * e + 1]
                for r in cutlass.range_constexpr(instructions.ROWS):
                    i = const_expr(4 * j + 2 * r + e)
                    scores[i] = scores[i] * found[2 * e]
                    if const_expr(self.score != "fold"):
                        scores[i] = scores[i] * self.row[r]
        if const_expr(self.score == "softcap"):
            instructions.soft_cap(scores, Float32(1.0))
        instructions.keep(scores, words)
        top = [Int32(LOWEST) for _ in range(4)]
        for r in cutlass.range_constexpr(instructions.ROWS):
            factor = self.row[r] if const_expr(self.score == "fold") else self.arguments.exponent
            shift = instructions.shift_of(self.reference[r])
            for i in cutlass.range_constexpr(2 * r, cute.size(scores), 4):
                for e in cutlass.range_constexpr(2):
                    scores[i + e] = scores[i + e] * factor - shift
                k = const_expr(2 * r + i // 4 % 2)
                top[k] = instructions.largest(scores[i], scores[i + 1], top[k])
        # Bits of floats are compared: negative limits are passed always, and the references then are what they were.
        some = cute.recast_tensor(values, Int32)
        most = some[0]
        for i in cutlass.range_constexpr(1, 2 * count):
            most = cutlass.max(most, some[i])
        room = Int32(LIMIT + BIAS) - (most >> FIELD)
        limit = float_bits(Float32(room)) if room >= 0 else Int32(LOWEST)
        kept = [((words[r, 0] | words[r, 1]) & MINE) != 0 for r in range(instructions.ROWS)]
        unset = ((self.reference[0] == -Float32.inf) & kept[0]) | ((self.reference[1] == -Float32.inf) & kept[1])
        above = cutlass.max(cutlass.max(top[0], top[1]), cutlass.max(top[2], top[3])) > limit
        raised = cute.arch.vote_any_sync(unset | above)
        if raised:
            self.raise_references(scores, values)
        return values, raised

    @cute.jit
    def probabilities(self, scores, values):
        """The sums of 2^(t - r), and P' in halves."""
        for r in cutlass.range_constexpr(instructions.ROWS):
            sums = [Float32(0.0) for _ in range(4)]
            for n, i in enumerate(instructions.of_row(scores, r)):
                weight = cute.math.exp2(scores[i], fastmath=True)
                sums[n % 4] = sums[n % 4] + weight
                scores[i] = weight * values[n]
            self.row_sum[r] = self.row_sum[r] + ((sums[0] + sums[1]) + (sums[2] + sums[3]))
        split(scores, *self.p)

    @cute.jit
    def raise_references(self, scores, values):
        """Make what a row's largest contribution has the new reference, and `scores` relative to it."""
        logs = cute.make_rmem_tensor_like(values)
        for i in cutlass.range_constexpr(cute.size(values)):
            logs[i] = cute.math.log2(values[i], fastmath=True)
        for r in cutlass.range_constexpr(instructions.ROWS):
            top = Float32(-Float32.inf)
            for n, i in enumerate(instructions.of_row(scores, r)):
                top = cute.arch.fmax(top, scores[i] + logs[n])
            top = instructions.over_quad(top)
            known = self.reference[r] != -Float32.inf
            by = cute.arch.fmax(top, Float32(0.0)) if known else top
            move = Float32(0.0) if by == -Float32.inf else by
            self.reference[r] = self.reference[r] + by if known else by
            # In two steps: sums of rows whose values were small are large.
            step = cute.math.exp2(move * -0.5, fastmath=True) if known else Float32(1.0)
            self.row_sum[r] = self.row_sum[r] * step * step
            self.rescale[r] = step * step
            for i in instructions.of_row(scores, r):
                scores[i] = scores[i] - move
