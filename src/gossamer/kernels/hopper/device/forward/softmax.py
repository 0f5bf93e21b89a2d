"""The softmax of a step: scores to probabilities in 16 bits, relative to a reference of each row."""

from __future__ import annotations

from typing import Any

import cutlass
import cutlass.cute as cute
from cutlass import Float32, Int32, const_expr

from gossamer.cute import instructions
from gossamer.cute.common import ROWS, Opaque, Thread
from gossamer.cute.row_items import RowItem
from gossamer.cute.tiles import accumulator
from gossamer.kernels.hopper.device.configurations import Hold
from gossamer.kernels.hopper.device.forward.block import RowBlock
from gossamer.kernels.hopper.device.forward.masks import two

FINITE = 2.0**100  # a sum that is not below it may have lost a power, which was too large for float32


class Softmax(Opaque):
    """The references and sums of a warpgroup's rows, and what is made of scores with them.

    A reference need not be the row's maximum: what matters is that no power of two overflows. So it is raised only when
    a score is far above it, and most steps need no exchange between threads.
    """

    def __init__(self, block: RowBlock, thread: Thread, mma: Any) -> None:
        """`mma`: P V, of which P in 16 bits is the first factor, and O the accumulator."""
        self.block, self.arguments, self.thread = block, block.arguments, thread
        self.hold, self.score, self.exponent = block.config.hold, block.config.score, self.arguments.exponent
        self.p = mma.get_slice(0).make_fragment_A(mma.get_slice(0).partition_shape_A((ROWS, block.config.step)))
        self.o = accumulator(mma, block.config.E)  # rescaled when references are raised
        self.reference, self.rescale = two(Float32), two(Float32)
        self.row_sum = two(Float32)  # of this thread's columns
        self.old_reference, self.old_sum = two(Float32), two(Float32)  # of the item before, until that is finished

    @cute.jit
    def begin(self):
        """Keep the references and sums of the rows of an item, and start those of the next."""
        for r in cutlass.range_constexpr(instructions.ROWS):
            self.old_reference[r], self.old_sum[r] = self.reference[r], self.row_sum[r]
        self.reference.fill(-Float32.inf)
        self.row_sum.fill(0.0)

    @cute.jit
    def transform(self, scores):
        """What is done to a score beside its factor in exp2."""
        if const_expr(self.score == "softcap"):
            instructions.soft_cap(scores, self.arguments.before)
        elif const_expr(self.score == "scale"):
            instructions.multiply(scores, self.arguments.before)

    @cute.jit
    def first_step(self, scores):
        """The references of an item's rows, of its first scores; then as `beside_values`."""
        instructions.start_reference(scores, self.reference, self.exponent)
        return self.beside_values(scores, self.old_sum[0])

    @cute.jit
    def beside_values(self, scores, known):
        """What of a step's softmax runs beside P V: the exponentials of the first row. `after_values` takes the rest.

        Unchecked, nothing is compared before: the sums tell, when all is done. `known` is any sum so far.
        """
        exponent = self.exponent
        if const_expr(self.hold == Hold.UNCHECKED):
            powers = cute.make_rmem_tensor_like(scores)
            mark = instructions.exponentials(scores, 0, self.reference[0], exponent, powers, True)
            total = known + mark
        else:
            powers = scores
            mark = cute.arch.vote_any_sync(instructions.exceed(scores, self.reference, exponent))
            if mark:
                instructions.raise_reference(scores, self.reference, self.row_sum, self.rescale, exponent)
            total = instructions.exponentials(scores, 0, instructions.shift_of(self.reference[0]), exponent, scores)
            total = self.row_sum[0] = self.row_sum[0] + total
        if const_expr(self.hold != Hold.COMPILER):  # noqa: SIM102
            # This never happens, and keeps the assembler from moving the exponentials behind the wait for P V.
            if total == -1.0:
                self.block.items.item[RowItem.SCRATCH, 0] = Int32(0)
        return powers, mark

    @cute.jit
    def after_values(self, scores, begun, rescale: cutlass.Constexpr, half: cutlass.Constexpr = None):
        """What is left of a step's softmax when P V is done, and P in 16 bits; `rescale`: O too, if need be."""
        powers, mark = begun
        exponent = self.exponent
        if const_expr(self.hold == Hold.UNCHECKED):
            totals = [mark, instructions.exponentials(scores, 1, self.reference[1], exponent, powers)]
            self.convert(powers, half)
            # Too large, or not a number: references are raised, and all is made again from the scores.
            if cute.arch.vote_any_sync(not (totals[0] + totals[1] <= instructions.LARGEST_SUM)):
                totals = self.raise_references(scores, powers)
                self.convert(powers, half)
                if const_expr(rescale):
                    instructions.scale_rows(self.o, self.rescale)
            for r in cutlass.range_constexpr(instructions.ROWS):
                self.row_sum[r] = self.row_sum[r] + totals[r]
        else:
            total = instructions.exponentials(scores, 1, instructions.shift_of(self.reference[1]), exponent, scores)
            self.row_sum[1] = self.row_sum[1] + total
            self.convert(powers, half)
            if const_expr(rescale):  # noqa: SIM102
                if mark:
                    instructions.scale_rows(self.o, self.rescale)

    @cute.jit
    def in_place(self, scores, buffer, stage):
        """The softmax of a step that keeps all pairs, when P V of the step before is done, in place of its scores.

        Nothing is compared before: the sums tell, when all is done. Powers that are too large are exact all the same
        while they are finite, and so is all that they are summed to.
        """
        totals = [Float32(0.0), Float32(0.0)]
        for r in cutlass.range_constexpr(instructions.ROWS):
            totals[r] = instructions.exponentials(scores, r, self.reference[r], self.exponent, scores)
        self.convert(scores)
        if cute.arch.vote_any_sync(not (totals[0] + totals[1] <= instructions.LARGEST_SUM)):
            if cute.arch.vote_any_sync(not (totals[0] + totals[1] < FINITE)):
                self.scores_again(scores, buffer, stage)
                self.transform(scores)
                totals = self.raise_references(scores, scores)
            else:
                totals = self.lower(scores, totals)
            self.convert(scores)
            instructions.scale_rows(self.o, self.rescale)
        for r in cutlass.range_constexpr(instructions.ROWS):
            self.row_sum[r] = self.row_sum[r] + totals[r]

    def raise_references(self, scores: Any, powers: Any) -> list[Any]:
        """Raise the references of a step's rows to their largest scores, and make powers again; returns their sums."""
        instructions.raise_reference(scores, self.reference, self.row_sum, self.rescale, self.exponent)
        shifts = [instructions.shift_of(self.reference[r]) for r in range(instructions.ROWS)]
        return [instructions.exponentials(scores, r, shift, self.exponent, powers) for r, shift in enumerate(shifts)]

    @cute.jit
    def scores_again(self, scores, buffer, stage):
        """A step's scores once more, each thread's own from shared memory: a product would need all four warps here."""
        scores.fill(0.0)
        row, s_q, s_k = self.thread.row % ROWS, self.block.s_q, self.block.s_k
        for d in cutlass.range(cute.size(s_k, mode=[1]), unroll=1):
            q = [s_q[row + 8 * r, d, buffer].to(Float32) for r in range(instructions.ROWS)]
            for j in cutlass.range_constexpr(cute.size(scores) // 4):
                for c in cutlass.range_constexpr(2):
                    k = s_k[8 * j + self.thread.quad + c, d, stage].to(Float32)
                    for r in cutlass.range_constexpr(instructions.ROWS):
                        i = const_expr(4 * j + 2 * r + c)
                        scores[i] = scores[i] + q[r] * k

    @cute.jit
    def lower(self, powers, totals):
        """Raise the references of rows whose powers are too large, by what makes their sums one; returns the sums."""
        for r in cutlass.range_constexpr(instructions.ROWS):
            before = self.reference[r]
            largest = cute.arch.fmax(instructions.over_quad(totals[r]), 1.0)
            self.reference[r] = before + cute.math.log2(largest, fastmath=True)
            self.rescale[r] = cute.math.exp2(before - self.reference[r], fastmath=True)
            self.row_sum[r] = self.row_sum[r] * self.rescale[r]
            totals[r] = totals[r] * self.rescale[r]
        instructions.scale_rows(powers, self.rescale)
        return totals

    @cute.jit
    def convert(self, powers, half: cutlass.Constexpr = None):
        """P in 16 bits, of a whole step or of one half of its columns."""
        if const_expr(half is None):
            instructions.convert(powers, self.p)
        else:
            instructions.convert_half(powers, self.p, half)
