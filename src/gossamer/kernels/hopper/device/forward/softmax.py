"""The softmax of a step: scores to probabilities in 16 bits, relative to a reference of each row."""

from __future__ import annotations

from dataclasses import dataclass
from typing import Any, NamedTuple

import cutlass
import cutlass.cute as cute
from cutlass import Float32, Int32, const_expr

from gossamer.kernels.hopper.device import instructions
from gossamer.kernels.hopper.device.common import ROWS, Opaque, Thread
from gossamer.kernels.hopper.device.configurations import Hold
from gossamer.kernels.hopper.device.forward.masks import two
from gossamer.kernels.hopper.device.tiles import accumulator, product_of

FINITE = 2.0**100  # a sum that is not below it may have lost a power, which was too large for float32


class Scale(NamedTuple):
    """Factors of a score."""

    before: Float32  # before the soft cap, or one that is not positive
    exponent: Float32  # in exp2


@dataclass(frozen=True, eq=False)
class Softmax(Opaque):
    """The references and sums of a warpgroup's rows, and what is made of scores with them.

    A reference need not be the row's maximum: what matters is that no power of two overflows. So it is raised only when
    a score is far above it, and most steps need no exchange between threads.
    """

    hold: int  # of `Hold`
    score: str
    scale: Scale
    thread: Thread
    s_q: cute.Tensor  # of which a step's scores can be computed again
    s_k: cute.Tensor
    scratch: cute.Tensor  # a word of shared memory that nobody reads
    p: Any  # probabilities in 16 bits, the first factor of P V
    o: Any  # the accumulator of P V: rescaled when references are raised
    reference: Any
    row_sum: Any  # of this thread's columns
    rescale: Any
    old_reference: Any  # of the item before, while its result is not finished
    old_sum: Any

    @classmethod
    def of(cls, plan: Any, scale: Scale, thread: Thread, s_q: Any, s_k: Any, scratch: Any) -> Softmax:
        """The softmax of scores of these tiles."""
        pv = product_of(s_q.element_type, plan.E, transposed=True, registers=True)
        p = pv.get_slice(0).make_fragment_A(pv.get_slice(0).partition_shape_A((ROWS, plan.step)))
        o, rows = accumulator(pv, plan.E), [two(Float32) for _ in range(5)]
        return cls(plan.hold, plan.score, scale, thread, s_q, s_k, scratch, p, o, *rows)

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
            instructions.soft_cap(scores, self.scale.before)
        elif const_expr(self.score == "scale"):
            instructions.multiply(scores, self.scale.before)

    @cute.jit
    def first_step(self, scores):
        """The references of an item's rows, of its first scores; then as `beside_values`."""
        instructions.start_reference(scores, self.reference, self.scale.exponent)
        return self.beside_values(scores, self.old_sum[0])

    @cute.jit
    def beside_values(self, scores, known):
        """What of a step's softmax runs beside P V: the exponentials of the first row. `after_values` takes the rest.

        Unchecked, nothing is compared before: the sums tell, when all is done. `known` is any sum so far.
        """
        exponent = self.scale.exponent
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
                self.scratch[0] = Int32(0)
        return powers, mark

    @cute.jit
    def after_values(self, scores, begun, rescale: cutlass.Constexpr, half: cutlass.Constexpr = None):
        """What is left of a step's softmax when P V is done, and P in 16 bits; `rescale`: O too, if need be."""
        powers, mark = begun
        exponent = self.scale.exponent
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
            totals[r] = instructions.exponentials(scores, r, self.reference[r], self.scale.exponent, scores)
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
        exponent = self.scale.exponent
        instructions.raise_reference(scores, self.reference, self.row_sum, self.rescale, exponent)
        shifts = [instructions.shift_of(self.reference[r]) for r in range(instructions.ROWS)]
        return [instructions.exponentials(scores, r, shift, exponent, powers) for r, shift in enumerate(shifts)]

    @cute.jit
    def scores_again(self, scores, buffer, stage):
        """A step's scores once more, each thread's own from shared memory: a product would need all four warps here."""
        scores.fill(0.0)
        row = self.thread.row % ROWS
        for d in cutlass.range(cute.size(self.s_k, mode=[1]), unroll=1):
            q = [self.s_q[row + 8 * r, d, buffer].to(Float32) for r in range(instructions.ROWS)]
            for j in cutlass.range_constexpr(cute.size(scores) // 4):
                for c in cutlass.range_constexpr(2):
                    k = self.s_k[8 * j + self.thread.quad + c, d, stage].to(Float32)
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
