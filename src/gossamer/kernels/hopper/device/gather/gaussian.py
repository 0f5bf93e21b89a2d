"""The forward kernel of gathered columns with a Gaussian of the distance: a score is q.k less a factor times r^2.

Positions of the columns come with the words of a step, in the frame of their 64 rows, whose own are in registers. r^2
is of float32 differences. Where rows are so far apart that no frame holds nearest images, differences are folded.
"""

from __future__ import annotations

from typing import Any, NamedTuple

import cutlass
import cutlass.cute as cute
from cutlass import Float32, Int32, const_expr

from gossamer.kernels.hopper.device import instructions
from gossamer.kernels.hopper.device.common import ROWS, computing_thread, ring
from gossamer.kernels.hopper.device.forward.consume import Consumer
from gossamer.kernels.hopper.device.forward.masks import one
from gossamer.kernels.hopper.device.forward.softmax import Softmax
from gossamer.kernels.hopper.device.gather.block import GatherForwardBlock
from gossamer.kernels.hopper.device.gather.forward import GatherForward
from gossamer.kernels.hopper.device.gather.masks import GatheredMask
from gossamer.kernels.hopper.device.gather.rows import PIECE, WordCopies, copy
from gossamer.kernels.hopper.device.gather.serve import item_rows
from gossamer.kernels.hopper.device.row_items import RowItem
from gossamer.kernels.hopper.device.shell import array, words
from gossamer.kernels.hopper.device.tiles import Tma

POINT = 4  # numbers of a position: three parts and one more
AXES = 3


class Space(NamedTuple):
    """What tells where rows and columns are."""

    theirs: Any  # (columns, 4) float32: of columns, in the frame of their rows
    mine: Any  # (rows, 4) float32
    far: Any  # (tiles,) int32: 1 where differences are folded
    sizes: Any  # of the box, three numbers
    factor: Any  # of r^2, not positive


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


class PlacedMask(GatheredMask):
    """The mask source, which knows where the rows of an item are."""

    def __init__(self, block: Any, thread: Any) -> None:
        super().__init__(block, thread)
        self.space = block.space
        self.at = cute.make_rmem_tensor((instructions.ROWS, POINT), Float32)
        self.at.fill(0.0)
        self.far = one()
        self.far.fill(0)

    @cute.jit
    def prepare(self, stage):
        """Fetch what masks the first step of an item, and where its rows are."""
        tile = self.item[RowItem.TILE, stage]
        for r in cutlass.range_constexpr(instructions.ROWS):
            row = cute.make_rmem_tensor((POINT,), Float32)
            cute.autovec_copy(self.space.mine[tile * ROWS + self.thread.row + 8 * r, None], row)
            for axis in cutlass.range_constexpr(AXES):
                self.at[r, axis] = row[axis]
        self.far[0] = self.space.far[tile]
        super().prepare(stage)


class GaussianSoftmax(Softmax):
    """Of scores that depend on the distance as well."""

    mask: PlacedMask
    points: Any  # (4, 64, slots) float32

    @cute.jit
    def transform(self, scores):
        """Scores of the step whose words were fetched last."""
        if self.mask.far[0] != 0:
            self.add(scores, True)
        else:
            self.add(scores, False)

    @cute.jit
    def add(self, scores, folded: cutlass.Constexpr):
        """Add the factor times r^2."""
        _, _, slots = self.points.shape
        slot = ring(self.mask.fetched[0] - 1, slots)[0]
        space, at = self.mask.space, self.mask.at
        for j in cutlass.range_constexpr(cute.size(scores) // 4):
            for c in cutlass.range_constexpr(2):
                point = cute.make_rmem_tensor((POINT,), Float32)
                cute.autovec_copy(self.points[None, 8 * j + self.thread.quad + c, slot], point)
                for r in cutlass.range_constexpr(instructions.ROWS):
                    i = const_expr(4 * j + 2 * r + c)
                    s = Float32(0.0)
                    for axis in cutlass.range_constexpr(AXES):
                        step = point[axis] - at[r, axis]
                        if const_expr(folded):
                            step = nearest(step, space.sizes[axis])
                        s = s + step * step
                    scores[i] = scores[i] + space.factor * s


@cute.jit
def nearest(step: Any, size: Any) -> Any:
    """A difference to the nearest image."""
    step = step - size if step > 0.5 * size else step
    return step + size if step < -0.5 * size else step


class GaussianConsumer(Consumer):
    """A warpgroup with 64 query rows of each item."""

    softmax: GaussianSoftmax
    softmax_kind = GaussianSoftmax

    def __init__(self, block: Any, thread: Any) -> None:
        super().__init__(block, thread, PlacedMask)
        self.softmax.mask, self.softmax.points = self.mask, block.s_points


class GaussianBlock(GatherForwardBlock):
    """Of the forward kernel with distances."""

    space: Space
    s_points: cute.Tensor  # (4, 64, twice the stages) float32: of the columns of a step


class GaussianArguments(NamedTuple):
    """The parameters of the kernel: those of `GatherForwardArguments`, and what `Space` is made of."""

    q: Tma
    out: Tma
    k: cute.Tensor
    v: cute.Tensor
    lse: cute.Tensor
    work: cute.Tensor
    indices: cute.Tensor
    bits: cute.Tensor
    sinks: cute.Tensor
    part_out: cute.Tensor
    part_lse: cute.Tensor
    lengths: cute.Tensor
    tile_counter: cute.Tensor
    before: Float32  # the factor of r^2
    exponent: Float32
    items: Int32
    has_sinks: Int32
    theirs: cute.Tensor
    mine: cute.Tensor
    far: cute.Tensor
    size_x: Float32
    size_y: Float32
    size_z: Float32


class GaussianForward(GatherForward):
    """The kernel of one configuration."""

    block_class = GaussianBlock

    @cute.jit
    def __call__(
        self,
        q: cute.Tensor, k: cute.Tensor, v: cute.Tensor, out: cute.Tensor, lse: cute.Tensor, work: cute.Tensor,
        indices: cute.Tensor, bits: cute.Tensor, theirs: cute.Tensor, mine: cute.Tensor, far: cute.Tensor,
        sinks: cute.Tensor, part_out: cute.Tensor, part_lse: cute.Tensor, lengths: cute.Tensor,
        tile_counter: cute.Tensor, before: Float32, exponent: Float32, items: Int32, has_sinks: Int32, blocks: Int32,
        size_x: Float32, size_y: Float32, size_z: Float32, stream: Any,
    ) -> None:  # fmt: skip
        """As in `GaussianArguments`."""
        c = self.config
        arguments = GaussianArguments(
            q=item_rows(c, q), out=item_rows(c, out, store=True), k=k, v=v, lse=lse, work=work, indices=indices,
            bits=bits, sinks=sinks, part_out=part_out, part_lse=part_lse, lengths=lengths, tile_counter=tile_counter,
            before=before, exponent=exponent, items=items, has_sinks=has_sinks, theirs=theirs, mine=mine, far=far,
            size_x=size_x, size_y=size_y, size_z=size_z,
        )  # fmt: skip
        self.launch(arguments, blocks, stream)

    def memory(self) -> dict[str, Any]:
        return {"points": array(Float32, POINT * ROWS * self.config.slots, 128), **super().memory()}

    def block(self, arguments: Any, memory: Any) -> GatherForwardBlock:
        block, a = super().block(arguments, memory), arguments
        assert isinstance(block, GaussianBlock)
        block.s_points = words(memory.points, POINT, ROWS, self.config.slots)
        block.space = Space(a.theirs, a.mine, a.far, (a.size_x, a.size_y, a.size_z), a.before)
        return block

    def word_copies(self, block: Any, thread: Any) -> WordCopies:
        return WithPoints(block.arguments.bits, block.s_words, thread, block.arguments.theirs, block.s_points)

    @cute.jit
    def compute(self, block):
        GaussianConsumer(block, computing_thread()).run()
