"""The softmax of a step of a group of particles, in the registers of its scores.

A score becomes a power, less its row's reference, once: the powers are compared, and raised to. A row has no reference
until it keeps a pair; then its own is found, however small, so that none is lost.
"""

from __future__ import annotations

from typing import Any

import cutlass
import cutlass.cute as cute
from cutlass import Float32, Int32, const_expr

from gossamer.cute import instructions
from gossamer.kernels.hopper.device.forward.masks import two
from gossamer.kernels.hopper.device.forward.softmax import Softmax

INFINITE = 0x7F800000  # the bits of infinity


class ParticleSoftmax(Softmax):
    """A `Softmax` whose scores become powers in place."""

    def __init__(self, block: Any, thread: Any, mma: Any) -> None:
        super().__init__(block, thread, mma)
        self.unknown = two(Int32)  # of each row: infinity while it has no reference, else 0

    @cute.jit
    def first_step(self, scores):
        """The references of an item's rows, of its first scores."""
        self.reference.fill(0.0)
        self.unknown.fill(INFINITE)
        return self.beside_values(scores, None)

    @cute.jit
    def beside_values(self, scores, known):
        """Powers in place of scores, less their references, of which none is far below."""
        top = [self.unknown[0], self.unknown[1]]
        for j in cutlass.range_constexpr(cute.size(scores) // 2):
            r = const_expr(j % 2)
            for i in (2 * j, 2 * j + 1):
                scores[i] = scores[i] * self.exponent - self.reference[r]
            top[r] = instructions.largest(scores[2 * j], scores[2 * j + 1], top[r])
        mark = cute.arch.vote_any_sync(cutlass.max(top[0], top[1]) > instructions.LIMIT)
        if mark:
            self.raise_powers(scores)
        self.row_sum[0] = self.row_sum[0] + self.exponentials(scores, 0)
        return scores, mark

    @cute.jit
    def after_values(self, scores, begun, rescale: cutlass.Constexpr, half: cutlass.Constexpr = None):
        """Finish a step's softmax once P V is done, and convert P to 16 bits; `rescale`: O too, if need be."""
        _, mark = begun
        self.row_sum[1] = self.row_sum[1] + self.exponentials(scores, 1)
        self.convert(scores, half)
        if const_expr(rescale):  # noqa: SIM102
            if mark:
                instructions.scale_rows(self.o, self.rescale)

    @cute.jit
    def raise_powers(self, powers):
        """Raise references to the largest powers, and take that from all."""
        for r in cutlass.range_constexpr(instructions.ROWS):
            top = instructions.largest_of_row(powers, r)
            rise = cute.arch.fmax(top, 0.0)
            self.rescale[r] = cute.math.exp2(-rise, fastmath=True)
            if self.unknown[r] != 0:
                rise = top if top > -Float32.inf else Float32(0.0)
                self.rescale[r] = Float32(1.0)
                self.unknown[r] = Int32(0) if top > -Float32.inf else Int32(INFINITE)
            self.reference[r] = self.reference[r] + rise
            self.row_sum[r] = self.row_sum[r] * self.rescale[r]
            for i in instructions.of_row(powers, r):
                powers[i] = powers[i] - rise

    @cute.jit
    def exponentials(self, powers, r: cutlass.Constexpr):
        """Two to the powers of a row, in place; returns their sum."""
        sums = [Float32(0.0), Float32(0.0), Float32(0.0), Float32(0.0)]
        for n, i in enumerate(instructions.of_row(powers, r)):
            powers[i] = cute.math.exp2(powers[i], fastmath=True)
            sums[n % 4] = sums[n % 4] + powers[i]
        return (sums[0] + sums[1]) + (sums[2] + sums[3])
