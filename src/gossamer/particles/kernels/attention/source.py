"""The parts that the row sources of the three kernels share: lists name the rows of items, and give their positions."""

from __future__ import annotations

from typing import Any, NamedTuple

import cutlass.cute as cute
from cutlass import Float32, Int32

from gossamer.cute.common import ROWS
from gossamer.cute.shell import array, words
from gossamer.kernels.hopper.device.gather.configurations import GatherConfig
from gossamer.kernels.hopper.device.gather.rows import WordCopies
from gossamer.particles.kernels.attention.numbers import POINT
from gossamer.particles.kernels.attention.space import Space, WithPoints


class Named(NamedTuple):
    """The arrays of a row source, which stand behind the lists of a kernel."""

    particles: cute.Tensor  # (64 tiles,) int32: the rows' particles, see `rows`
    theirs: cute.Tensor  # as `Space` has them
    mine: cute.Tensor
    far: cute.Tensor


class Box(NamedTuple):
    """The numbers of a row source, which stand behind those of a kernel: the sizes of the box."""

    x: Float32
    y: Float32
    z: Float32


class Shared(NamedTuple):
    """The memory that the roles of a block share."""

    names: cute.Tensor  # (64, stages) int32: the words of an item's rows
    points: cute.Tensor | None = None  # (4, 64, slots) float32: with a Gaussian, where the gathered rows of a step are
    space: Space | None = None


class NamedRows:
    """Rows of particles: of so many `stages` of items, and with so many `slots` for the positions of a step."""

    def __init__(self, stages: int, slots: int) -> None:
        self.stages, self.slots = stages, slots

    def memory(self, c: GatherConfig) -> dict[str, Any]:
        """The first members of shared memory: the words of rows, and positions."""
        points = {"points": array(Float32, POINT * ROWS * self.slots, 128)} if c.gaussian else {}
        return {**points, "names": array(Int32, ROWS * self.stages, 128)}

    def shared(self, arguments: Any, memory: Any, c: GatherConfig) -> Shared:
        """The memory of rows that roles share."""
        names, named = words(memory.names, ROWS, self.stages), arguments.source
        if not c.gaussian:
            return Shared(names)
        space = Space(named.theirs, named.mine, named.far, arguments.source_numbers, arguments.before)
        return Shared(names, words(memory.points, POINT, ROWS, self.slots), space)

    def words(self, block: Any, thread: Any) -> WordCopies:
        """The copier of the words of a step, and with a Gaussian of the positions of gathered particles."""
        a, source = block.arguments, block.source
        if block.config.gaussian:
            return WithPoints(a.bits, block.s_words, thread, a.source.theirs, source.points)
        return WordCopies(a.bits, block.s_words, thread)

    def ratio(self, arguments: Any) -> Int32:
        """Query heads of a key head: particles have as many of both."""
        return Int32(1)
