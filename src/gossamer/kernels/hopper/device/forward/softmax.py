"""The softmax of a step: scores to probabilities in 16 bits, relative to a reference of each row."""

from __future__ import annotations

from typing import Any

import cutlass
import cutlass.cute as cute
from cutlass import Float32, Int32, const_expr

from gossamer.kernels.hopper.device import instructions
from gossamer.kernels.hopper.device.common import ROWS
from gossamer.kernels.hopper.device.configurations import ForwardConfig

FINITE = 2.0**100  # a sum that is not below it may have lost a power, which was too large for float32


class Softmax:
    """A reference need not be the row's maximum: what matters is that no power of two overflows.

    So it is raised only when a score is far above it, and most steps need no exchange between threads.
    """

    config: ForwardConfig
    transform: Any

    @cute.jit
    def softmax(self, env, acc_s, known):
        """What of a step's softmax runs beside P V: the exponentials of the first row. `probabilities` takes the rest.

        With `hold` of 2 nothing is compared before: the sums tell, when all is done. `known` is any sum so far.
        """
        if const_expr(self.config.hold == 2):
            powers = cute.make_rmem_tensor_like(acc_s)
            mark = instructions.exponentials(acc_s, 0, env.reference[0], env.exponent, powers, True)
            total = known + mark
        else:
            powers = acc_s
            mark = cute.arch.vote_any_sync(instructions.exceed(acc_s, env.reference, env.exponent))
            if mark:
                instructions.raise_reference(acc_s, env.reference, env.row_sum, env.rescale, env.exponent)
            total = instructions.exponentials(acc_s, 0, instructions.shift_of(env.reference[0]), env.exponent, acc_s)
            total = env.row_sum[0] = env.row_sum[0] + total
        if const_expr(self.config.hold > 0):  # noqa: SIM102
            # This never happens, and keeps the assembler from moving the exponentials behind the wait for P V.
            if total == -1.0:
                env.scratch[0] = Int32(0)
        return powers, mark

    @cute.jit
    def probabilities(self, env, acc_s, begun, rescale: cutlass.Constexpr, half: cutlass.Constexpr = None):
        """What is left of a step's softmax when P V is done, and P in 16 bits; `rescale`: O too, if need be."""
        powers, mark = begun
        if const_expr(self.config.hold == 2):
            totals = [mark, instructions.exponentials(acc_s, 1, env.reference[1], env.exponent, powers)]
            self.convert(env, powers, half)
            # Too large, or not a number: references are raised, and all is made again from the scores.
            if cute.arch.vote_any_sync(not (totals[0] + totals[1] <= instructions.LARGEST_SUM)):
                instructions.raise_reference(acc_s, env.reference, env.row_sum, env.rescale, env.exponent)
                for r in cutlass.range_constexpr(instructions.ROWS):
                    totals[r] = instructions.exponentials(
                        acc_s, r, instructions.shift_of(env.reference[r]), env.exponent, powers
                    )
                self.convert(env, powers, half)
                if const_expr(rescale):
                    instructions.scale_rows(env.acc_o, env.rescale)
            for r in cutlass.range_constexpr(instructions.ROWS):
                env.row_sum[r] = env.row_sum[r] + totals[r]
        else:
            total = instructions.exponentials(acc_s, 1, instructions.shift_of(env.reference[1]), env.exponent, acc_s)
            env.row_sum[1] = env.row_sum[1] + total
            self.convert(env, powers, half)
            if const_expr(rescale):  # noqa: SIM102
                if mark:
                    instructions.scale_rows(env.acc_o, env.rescale)

    @cute.jit
    def weigh(self, env, acc_s, buffer, stage):
        """The softmax of a full step with `hold` of 3, when P V of the step before is done, in place of its scores.

        Nothing is compared before: the sums tell, when all is done. Powers that are too large are exact all the same
        while they are finite, and so is all that they are summed to.
        """
        totals = [Float32(0.0), Float32(0.0)]
        for r in cutlass.range_constexpr(instructions.ROWS):
            totals[r] = instructions.exponentials(acc_s, r, env.reference[r], env.exponent, acc_s)
        self.convert(env, acc_s)
        if cute.arch.vote_any_sync(not (totals[0] + totals[1] <= instructions.LARGEST_SUM)):
            if cute.arch.vote_any_sync(not (totals[0] + totals[1] < FINITE)):
                self.scores_again(env, acc_s, buffer, stage)
                self.transform(env, acc_s)
                instructions.raise_reference(acc_s, env.reference, env.row_sum, env.rescale, env.exponent)
                for r in cutlass.range_constexpr(instructions.ROWS):
                    totals[r] = instructions.exponentials(
                        acc_s, r, instructions.shift_of(env.reference[r]), env.exponent, acc_s
                    )
            else:
                self.lower(env, acc_s, totals)
            self.convert(env, acc_s)
            instructions.scale_rows(env.acc_o, env.rescale)
        for r in cutlass.range_constexpr(instructions.ROWS):
            env.row_sum[r] = env.row_sum[r] + totals[r]

    @cute.jit
    def scores_again(self, env, acc_s, buffer, stage):
        """A step's scores once more, each thread's own from shared memory: a product would need all four warps here."""
        acc_s.fill(0.0)
        row = env.my_row % ROWS
        for d in cutlass.range(self.config.D, unroll=1):
            q = [env.s_q[row + 8 * r, d, buffer].to(Float32) for r in range(instructions.ROWS)]
            for j in cutlass.range_constexpr(cute.size(acc_s) // 4):
                for c in cutlass.range_constexpr(2):
                    k = env.s_k[8 * j + env.quad + c, d, stage].to(Float32)
                    for r in cutlass.range_constexpr(instructions.ROWS):
                        i = const_expr(4 * j + 2 * r + c)
                        acc_s[i] = acc_s[i] + q[r] * k

    @cute.jit
    def lower(self, env, powers, totals):
        """Raise the references of rows whose powers are too large, by what makes their sums one."""
        for r in cutlass.range_constexpr(instructions.ROWS):
            before = env.reference[r]
            largest = cute.arch.fmax(instructions.over_quad(totals[r]), 1.0)
            env.reference[r] = before + cute.math.log2(largest, fastmath=True)
            env.rescale[r] = cute.math.exp2(before - env.reference[r], fastmath=True)
            env.row_sum[r] = env.row_sum[r] * env.rescale[r]
            totals[r] = totals[r] * env.rescale[r]
        instructions.scale_rows(powers, env.rescale)

    @cute.jit
    def convert(self, env, powers, half: cutlass.Constexpr = None):
        """P in 16 bits, of a whole step or of one half of its columns."""
        if const_expr(half is None):
            instructions.convert(powers, env.frag_p)
        else:
            instructions.convert_half(powers, env.frag_p, half)
