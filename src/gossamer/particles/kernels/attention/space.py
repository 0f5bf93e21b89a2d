"""Where rows and columns of a group are, and what the distance does to scores and to gradients.

Positions of the columns come with the words of a step, in the frame of their 64 rows, whose own are in registers. r^2
is of float32 differences. Where rows are so far apart that no frame holds nearest images, differences are folded.
"""

from __future__ import annotations

from typing import Any, NamedTuple

import cutlass
import cutlass.cute as cute
from cutlass import Float32, Int32, const_expr

from gossamer.cute import instructions
from gossamer.cute.common import ROWS, Opaque, Thread
from gossamer.kernels.hopper.device.gather.rows import PIECE, WordCopies, copy
from gossamer.particles.kernels.attention.numbers import POINT
from gossamer.particles.kernels.attention.rows import particle_of, unless_cut

AXES = 3


class Space(NamedTuple):
    """The positions of rows and columns."""

    theirs: cute.Tensor  # (columns, 4) float32: of columns, in the frame of their rows
    mine: cute.Tensor  # (rows, 4) float32
    far: cute.Tensor  # (tiles,) int32: 1 where differences are folded
    sizes: tuple[Float32, Float32, Float32]  # of the box
    factor: Float32  # of r^2 beside q.k, not positive


class WithPoints(WordCopies):
    """The words of a step, and the positions of its columns."""

    def __init__(self, words: Any, shared: Any, thread: Any, points: Any, shared_points: Any) -> None:
        """`points`: (columns, 4) float32 in global memory; `shared_points`: (4, 64, slots)."""
        super().__init__(words, shared, thread)
        self.points, self.shared_points = points, shared_points

    @cute.jit
    def fill(self, step, slot):
        """Issue this thread's copies of a step."""
        super().fill(step, slot)
        size = const_expr(4 * POINT * ROWS)
        from_ = self.points.iterator.toint() + self.thread * PIECE
        to = self.shared_points.iterator.toint() + slot * size + self.thread * PIECE
        copy(to, from_, step, Int32(size), False, PIECE)


class Places(Opaque):
    """Where this thread's two rows of an item are, and what they add up to of steps to the columns."""

    def __init__(self, space: Space, points: Any, thread: Thread) -> None:
        """`points`: (4, 64, slots) float32 in shared memory."""
        self.space, self.points, self.thread = space, points, thread
        self.at = cute.make_rmem_tensor((instructions.ROWS, POINT), Float32)
        self.at.fill(0.0)
        self.pull = cute.make_rmem_tensor((instructions.ROWS, POINT), Float32)  # sums of dS times steps
        self.pull.fill(0.0)
        self.far = cute.make_rmem_tensor((1,), Int32)
        self.far.fill(0)

    @cute.jit
    def begin(self, tile):
        """An item begins."""
        for r in cutlass.range_constexpr(instructions.ROWS):
            row = cute.make_rmem_tensor((POINT,), Float32)
            cute.autovec_copy(self.space.mine[tile * ROWS + self.thread.row + 8 * r, None], row)
            for axis in cutlass.range_constexpr(AXES):
                self.at[r, axis] = row[axis]
        self.pull.fill(0.0)
        self.far[0] = self.space.far[tile]

    @cute.jit
    def add_squares(self, scores, slot):
        """Add the factor times r^2 to the scores of the step whose positions are in a slot."""
        if self.far[0] != 0:
            self._visit(scores, slot, True, False)
        else:
            self._visit(scores, slot, False, False)

    @cute.jit
    def add_pull(self, gradients, slot):
        """Add what the gradients of a step's scores give to the sums."""
        if self.far[0] != 0:
            self._visit(gradients, slot, True, True)
        else:
            self._visit(gradients, slot, False, True)

    @cute.jit
    def _visit(self, numbers, slot, folded: cutlass.Constexpr, pulls: cutlass.Constexpr):
        """Visit all pairs of a step."""
        for j in cutlass.range_constexpr(cute.size(numbers) // 4):
            for c in cutlass.range_constexpr(2):
                point = cute.make_rmem_tensor((POINT,), Float32)
                cute.autovec_copy(self.points[None, 8 * j + self.thread.quad + c, slot], point)
                for r in cutlass.range_constexpr(instructions.ROWS):
                    i = const_expr(4 * j + 2 * r + c)
                    s = Float32(0.0)
                    for axis in cutlass.range_constexpr(AXES):
                        step = point[axis] - self.at[r, axis]
                        if const_expr(folded):
                            step = nearest(step, self.space.sizes[axis])
                        if const_expr(pulls):
                            self.pull[r, axis] = self.pull[r, axis] + numbers[i] * step
                        else:
                            s = s + step * step
                    if const_expr(not pulls):
                        numbers[i] = numbers[i] + self.space.factor * s

    @cute.jit
    def write(self, to, words):
        """Write the sums to rows of (N, 4), by the words of this thread's rows."""
        for r in cutlass.range_constexpr(instructions.ROWS):
            for axis in cutlass.range_constexpr(AXES):
                total = self.pull[r, axis]
                total = total + cute.arch.shuffle_sync_bfly(total, offset=1)
                self.pull[r, axis] = total + cute.arch.shuffle_sync_bfly(total, offset=2)
            particle = particle_of(words[r])
            if self.thread.lane % 4 == 0 and particle >= 0:
                row = cute.make_rmem_tensor((POINT,), Float32)
                row.fill(0.0)
                for axis in cutlass.range_constexpr(AXES):
                    row[axis] = unless_cut(words[r], self.pull[r, axis])
                cute.autovec_copy(row, to[particle, None])


@cute.jit
def nearest(step: Any, size: Any) -> Any:
    """A difference to the nearest image."""
    step = step - size if step > 0.5 * size else step
    return step + size if step < -0.5 * size else step
