"""The forward kernel of groups of particles: as that of gathered columns, but rows of q, out and lse are scattered too.

A warp takes items and gathers Q, one scatters finished outputs. With a Gaussian a score is q.k and a factor times r^2.
"""

from __future__ import annotations

from typing import Any

import cutlass
import cutlass.cute as cute
from cutlass import Float32, Int32, const_expr

from gossamer.cute import instructions
from gossamer.cute.common import WARPGROUP, Barrier, Opaque, Ring, computing_thread, ring
from gossamer.cute.row_items import RowItem
from gossamer.kernels.hopper.device.forward.consume import Consumer
from gossamer.kernels.hopper.device.forward.results import Epilogue, factors
from gossamer.kernels.hopper.device.gather.block import GatherForwardArguments, GatherForwardBlock
from gossamer.kernels.hopper.device.gather.configurations import GatherConfig
from gossamer.kernels.hopper.device.gather.forward import GatherForward
from gossamer.kernels.hopper.device.gather.masks import GatheredMask
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
from gossamer.particles.kernels.attention.source import Box, Named, NamedRows
from gossamer.particles.kernels.attention.space import Places


class ParticleLoader(Opaque):
    """Gathers the rows of an item that was described."""

    def __init__(self, block: Any, ring: Any, tensors: Any) -> None:
        """`tensors`: those of which an item has rows, each with its tiles in shared memory."""
        self.block, self.ring, lane = block, ring, cute.arch.lane_idx()
        self.copies = [
            ParticleRows(tensor, ring, tiles, block.source.names, block.config.size, lane, LANES)
            for tensor, tiles in tensors
        ]

    @cute.jit
    def load(self, turn, item):
        stage = self.ring.place(turn)[0]
        name_rows(self.block.arguments.source.particles, self.block.source.names, item[RowItem.TILE, stage], stage)
        for copies in self.copies:
            copies.load(item[RowItem.HEAD, stage], stage)
        cute.arch.cp_async_mbarrier_arrive_noinc(self.ring.full + stage)
        self.ring.described(stage)


class ParticleEpilogue(Epilogue):
    """Finishes an item whose rows are particles; those of cut lists are not numbers."""

    block: GatherForwardBlock

    def count(self) -> Any:
        return cute.size(self.arguments.q, mode=[2])

    @cute.jit
    def factors(self, stage):
        factor, lse = factors(self.block, stage, self.thread.row, self.softmax.old_reference, self.softmax.old_sum)
        for r in cutlass.range_constexpr(instructions.ROWS):
            word = self.block.source.names[self.thread.row + 8 * r, stage]
            factor[r], lse[r] = unless_cut(word, factor[r]), unless_cut(word, lse[r])
        return factor, lse

    def place(self, stage: Any, r: int) -> Any:
        head = self.item[RowItem.HEAD, stage]
        return head, place_or_far(self.block.source.names[self.thread.row + 8 * r, stage])


@cute.jit
def scatter(block):
    """A warp that writes what the warpgroup finishes to its particles, and gives back the place of Q, which held it."""
    items, item, overlap = block.items, block.items.item, const_expr(block.config.q_stages > 1)
    rows = ParticleRows(
        block.arguments.out, items, block.s_o, block.source.names, block.config.size, cute.arch.lane_idx(), LANES
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
        self.places = Places(block.source.space, block.source.points, thread)

    @cute.jit
    def prepare(self, stage):
        """Fetch what masks the first step of an item, and where its rows are."""
        self.places.begin(self.item[RowItem.TILE, stage])
        super().prepare(stage)


class GaussianSoftmax(ParticleSoftmax):
    """The softmax of scores that depend on the distance as well."""

    mask: PlacedMask

    @cute.jit
    def transform(self, scores):
        """Scores of the step whose words were fetched last."""
        self.mask.places.add_squares(scores, ring(self.mask.fetched[0] - 1, self.mask.slots)[0])


class ForwardRows(NamedRows):
    """The row source of the forward: a warp gathers the rows of q, one scatters those of out.

    Who gathers K and V fences what it has copied before it arrives, so that who computes need not.
    """

    gatherer, ring = FencingGatherer, Ring

    def items(self, memory: Any, c: GatherConfig, readers: int) -> ParticleItems:
        """The ring of descriptions of items, which come with Q."""
        return ParticleItems.of(memory, "q", c.q_stages, readers)

    def loader(self, block: GatherForwardBlock) -> ParticleLoader:
        """The loader of the rows of an item."""
        return ParticleLoader(block, block.items, [(block.arguments.q, block.s_q)])

    def store(self, block: GatherForwardBlock) -> None:
        """The warp that stores results."""
        scatter(block)

    def consumer(self, block: GatherForwardBlock) -> Consumer:
        """The warpgroup that computes."""
        thread = computing_thread()
        if not block.config.gaussian:
            return Consumer(block, thread, GatheredMask, ParticleSoftmax, ParticleEpilogue)
        consumer = Consumer(block, thread, PlacedMask, GaussianSoftmax, ParticleEpilogue)
        softmax: Any = consumer.softmax
        softmax.mask = consumer.mask  # which knows where rows and columns are
        return consumer


class ParticleForward:
    """The kernel of one configuration: that over gathered columns, with rows of particles."""

    def __init__(self, config: GatherConfig) -> None:
        self.gathered = GatherForward(config, ForwardRows(config.q_stages, config.slots))

    @cute.jit
    def __call__(
        self,
        q: cute.Tensor, k: cute.Tensor, v: cute.Tensor, out: cute.Tensor, lse: cute.Tensor, work: cute.Tensor,
        indices: cute.Tensor, bits: cute.Tensor, particles: cute.Tensor, theirs: cute.Tensor, mine: cute.Tensor,
        far: cute.Tensor, sinks: cute.Tensor, part_out: cute.Tensor, part_lse: cute.Tensor, lengths: cute.Tensor,
        tile_counter: cute.Tensor, before: Float32, exponent: Float32, items: Int32, has_sinks: Int32, blocks: Int32,
        size_x: Float32, size_y: Float32, size_z: Float32, stream: Any,
    ) -> None:  # fmt: skip
        """The parameters of `GatherForwardArguments`, `Named` and `Box`; `before` is the factor of r^2."""
        arguments = GatherForwardArguments(
            q=q, out=out, k=k, v=v, lse=lse, work=work, indices=indices, bits=bits,
            source=Named(particles, theirs, mine, far), sinks=sinks, part_out=part_out, part_lse=part_lse,
            lengths=lengths, tile_counter=tile_counter, before=before, exponent=exponent, items=items,
            has_sinks=has_sinks, source_numbers=Box(size_x, size_y, size_z),
        )  # fmt: skip
        self.gathered.launch(arguments, blocks, stream)
