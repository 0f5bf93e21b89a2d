"""The forward kernel of groups of particles: as that of gathered columns, but rows of q, out and lse are scattered too.

A warp takes items and gathers Q, one scatters finished outputs. With a Gaussian a score is q.k and a factor times r^2.
"""

from __future__ import annotations

from typing import Any, NamedTuple

import cutlass
import cutlass.cute as cute
from cutlass import Float32, Int32, const_expr

from gossamer.cute import instructions
from gossamer.cute.common import ROWS, WARPGROUP, Barrier, Opaque, computing_thread, ring
from gossamer.cute.row_items import RowItem
from gossamer.cute.shell import array, ring_of, words
from gossamer.cute.work import GatheredRows
from gossamer.kernels.hopper.device.forward.consume import Consumer
from gossamer.kernels.hopper.device.forward.results import Epilogue, factors
from gossamer.kernels.hopper.device.gather.block import GatherForwardBlock
from gossamer.kernels.hopper.device.gather.forward import GatherForward
from gossamer.kernels.hopper.device.gather.masks import GatheredMask
from gossamer.kernels.hopper.device.gather.rows import THREADS, RowCopies, WordCopies, role_of
from gossamer.kernels.hopper.device.gather.serve import Server
from gossamer.particles.kernels.attention.numbers import POINT
from gossamer.particles.kernels.attention.rows import (
    LANES,
    FencingGatherer,
    ParticleItems,
    ParticleRows,
    name_rows,
    place_or_far,
    unless_cut,
)
from gossamer.particles.kernels.attention.softmax import ParticleSoftmax
from gossamer.particles.kernels.attention.space import Places, Space, WithPoints


class ParticleForwardArguments(NamedTuple):
    """The parameters of the kernel: as `GatherForwardArguments`, but q and out as they are."""

    q: cute.Tensor  # (1, H, N, D)
    out: cute.Tensor  # (1, H, N, E)
    k: cute.Tensor
    v: cute.Tensor
    lse: cute.Tensor
    work: cute.Tensor
    indices: cute.Tensor
    bits: cute.Tensor
    particles: cute.Tensor  # (64 tiles,) int32: the rows' particles, see `particles.rows`
    theirs: cute.Tensor  # as `Space` has them, like those at the end
    mine: cute.Tensor
    far: cute.Tensor
    sinks: cute.Tensor
    part_out: cute.Tensor
    part_lse: cute.Tensor
    lengths: cute.Tensor
    tile_counter: cute.Tensor
    before: Float32  # the factor of r^2
    exponent: Float32
    items: Int32
    has_sinks: Int32
    size_x: Float32
    size_y: Float32
    size_z: Float32


class ParticleForwardBlock(GatherForwardBlock):
    """Of the forward kernel of groups of particles."""

    arguments: ParticleForwardArguments  # type: ignore[assignment]
    s_names: cute.Tensor  # (64, stages of Q) int32: the words of an item's rows
    s_points: cute.Tensor | None = None  # (4, 64, slots) float32: of the columns of a step
    space: Any = None  # `Space`


class ParticleLoader(Opaque):
    """Gathers the rows of an item that was described."""

    def __init__(self, block: Any, ring: Any, tensors: Any) -> None:
        """`tensors`: those of which an item has rows, each with its tiles in shared memory."""
        self.block, self.ring, lane = block, ring, cute.arch.lane_idx()
        self.copies = [
            ParticleRows(tensor, ring, tiles, block.s_names, block.config.size, lane, LANES)
            for tensor, tiles in tensors
        ]

    @cute.jit
    def load(self, turn, item):
        stage = self.ring.place(turn)[0]
        name_rows(self.block.arguments.particles, self.block.s_names, item[RowItem.TILE, stage], stage)
        for copies in self.copies:
            copies.load(item[RowItem.HEAD, stage], stage)
        cute.arch.cp_async_mbarrier_arrive_noinc(self.ring.full + stage)
        self.ring.described(stage)


class ParticleEpilogue(Epilogue):
    """Finishes an item whose rows are particles; those of cut lists are not numbers."""

    block: ParticleForwardBlock

    def count(self) -> Any:
        return cute.size(self.arguments.q, mode=[2])

    @cute.jit
    def factors(self, stage):
        factor, lse = factors(self.block, stage, self.thread.row, self.softmax.old_reference, self.softmax.old_sum)
        for r in cutlass.range_constexpr(instructions.ROWS):
            word = self.block.s_names[self.thread.row + 8 * r, stage]
            factor[r], lse[r] = unless_cut(word, factor[r]), unless_cut(word, lse[r])
        return factor, lse

    def place(self, stage: Any, r: int) -> Any:
        head = self.item[RowItem.HEAD, stage]
        return head, place_or_far(self.block.s_names[self.thread.row + 8 * r, stage])


@cute.jit
def scatter(block):
    """A warp that writes what the warpgroup finishes to its particles, and gives back the place of Q, which held it."""
    items, item, overlap = block.items, block.items.item, const_expr(block.config.q_stages > 1)
    rows = ParticleRows(
        block.arguments.out, items, block.s_o, block.s_names, block.config.size, cute.arch.lane_idx(), LANES
    )
    turn = Int32(0)
    running = item[RowItem.VALID, items.wait_full_at(turn)]
    while running != 0:
        stage = items.place(turn)[0]
        head = item[RowItem.HEAD, stage]
        turn += 1
        if const_expr(overlap):
            running = item[RowItem.VALID, items.wait_full_at(turn)]
        cute.arch.barrier(barrier_id=Barrier.OUTPUT, number_of_threads=WARPGROUP + 32)
        rows.store(head, stage)
        items.forget(stage)
        if const_expr(not overlap):
            running = item[RowItem.VALID, items.wait_full_at(turn)]


class PlacedMask(GatheredMask):
    """The mask source, which knows where the rows of an item are."""

    def __init__(self, block: Any, thread: Any) -> None:
        super().__init__(block, thread)
        self.places = Places(block.space, block.s_points, thread)

    @cute.jit
    def prepare(self, stage):
        """Fetch what masks the first step of an item, and where its rows are."""
        self.places.begin(self.item[RowItem.TILE, stage])
        super().prepare(stage)


class GaussianSoftmax(ParticleSoftmax):
    """Of scores that depend on the distance as well."""

    mask: PlacedMask

    @cute.jit
    def transform(self, scores):
        """Scores of the step whose words were fetched last."""
        self.mask.places.add_squares(scores, ring(self.mask.fetched[0] - 1, self.mask.slots)[0])


class ParticleConsumer(Consumer):
    """A warpgroup with the 64 rows of each item."""

    softmax_kind = ParticleSoftmax
    epilogue_kind = ParticleEpilogue


class GaussianConsumer(ParticleConsumer):
    softmax: GaussianSoftmax
    softmax_kind = GaussianSoftmax

    def __init__(self, block: Any, thread: Any) -> None:
        super().__init__(block, thread, PlacedMask)
        self.softmax.mask = self.mask


class ParticleForward(GatherForward):
    """The kernel of one configuration."""

    block_class = ParticleForwardBlock

    @cute.jit
    def __call__(
        self,
        q: cute.Tensor, k: cute.Tensor, v: cute.Tensor, out: cute.Tensor, lse: cute.Tensor, work: cute.Tensor,
        indices: cute.Tensor, bits: cute.Tensor, particles: cute.Tensor, theirs: cute.Tensor, mine: cute.Tensor,
        far: cute.Tensor, sinks: cute.Tensor, part_out: cute.Tensor, part_lse: cute.Tensor, lengths: cute.Tensor,
        tile_counter: cute.Tensor, before: Float32, exponent: Float32, items: Int32, has_sinks: Int32, blocks: Int32,
        size_x: Float32, size_y: Float32, size_z: Float32, stream: Any,
    ) -> None:  # fmt: skip
        """As in `ParticleForwardArguments`."""
        arguments = ParticleForwardArguments(
            q=q, out=out, k=k, v=v, lse=lse, work=work, indices=indices, bits=bits, particles=particles, theirs=theirs,
            mine=mine, far=far, sinks=sinks, part_out=part_out, part_lse=part_lse, lengths=lengths,
            tile_counter=tile_counter, before=before, exponent=exponent, items=items, has_sinks=has_sinks,
            size_x=size_x, size_y=size_y, size_z=size_z,
        )  # fmt: skip
        self.launch(arguments, blocks, stream)

    def memory(self) -> dict[str, Any]:
        c = self.config
        points = {"points": array(Float32, POINT * ROWS * c.slots, 128)} if c.gaussian else {}
        return {**points, "names": array(Int32, ROWS * c.q_stages, 128), **super().memory()}

    def block(self, arguments: Any, memory: Any) -> ParticleForwardBlock:
        c, a = self.config, arguments
        block = super().block(arguments, memory)
        assert isinstance(block, ParticleForwardBlock)
        items = ParticleItems.of(memory, "q", c.q_stages, 1 + (0 if self.ahead else THREADS // 32))
        _, _, *rest = block.rings
        # Who gathers fences what it has copied before it arrives, so that who computes need not.
        block.k, block.v = (ring_of(memory, name, c.stages, THREADS, 4) for name in ("k", "v"))
        block.items, block.rings = items, ((items,), (block.k, block.v), *rest)
        block.s_names = words(memory.names, ROWS, c.q_stages)
        if c.gaussian:
            block.s_points = words(memory.points, POINT, ROWS, c.slots)
            block.space = Space(a.theirs, a.mine, a.far, (a.size_x, a.size_y, a.size_z), a.before)
        return block

    @cute.jit
    def serve(self, block, warp):
        a, c = block.arguments, self.config
        role = role_of(warp, c.blocks)
        if role == 0:
            work = GatheredRows(a.work, a.tile_counter, a.items, a.indices, a.lengths, False)
            loader = ParticleLoader(block, block.items, [(a.q, block.s_q)])
            Server(work, block.ahead, block.items, loader, RowItem.VALID).run()
        elif role == 1:
            scatter(block)
        else:
            thread = cute.arch.thread_idx()[0] % THREADS
            keys = RowCopies(a.k, block.k, block.s_k.iterator, c.size, thread)
            values = RowCopies(a.v, block.v, block.s_v.iterator, c.size, thread)
            items = block.items if const_expr(block.ahead is None) else block.ahead
            FencingGatherer(items, a.indices, keys, values, word_copies(block, thread), Int32(1)).run()

    @cute.jit
    def compute(self, block):
        if const_expr(self.config.gaussian):
            GaussianConsumer(block, computing_thread()).run()
        else:
            ParticleConsumer(block, computing_thread(), GatheredMask).run()


def word_copies(block: Any, thread: Any) -> WordCopies:
    """What copies the words of a step, and with a Gaussian the positions of its columns."""
    a = block.arguments
    if block.config.gaussian:
        return WithPoints(a.bits, block.s_words, thread, a.theirs, block.s_points)
    return WordCopies(a.bits, block.s_words, thread)
