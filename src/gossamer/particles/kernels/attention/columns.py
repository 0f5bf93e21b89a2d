"""dK and dV over groups of particles, and what keys add to the gradients of positions: as over gathered rows.

Pairs are symmetric, so the rows that keep a key are those of its own list. Rows of k and v are gathered, dK and dV are
scattered.
"""

from __future__ import annotations

from typing import Any

import cutlass
import cutlass.cute as cute
from cutlass import Float32, Int32, const_expr

from gossamer.cute import instructions
from gossamer.cute.column_items import ColumnItem
from gossamer.cute.common import WARPGROUP, Opaque, RingPair
from gossamer.kernels.hopper.device.backward.common import ColumnBarrier, put_tile, two_rows
from gossamer.kernels.hopper.device.backward.consume import ColumnConsumer
from gossamer.kernels.hopper.device.gather.block import GatherColumnArguments, GatherColumnBlock
from gossamer.kernels.hopper.device.gather.columns import GatherColumns, GatheredColumnMasks
from gossamer.kernels.hopper.device.gather.configurations import GatherConfig
from gossamer.kernels.hopper.device.gather.serve import CopiedRing
from gossamer.particles.kernels.attention.rows import LANES, ParticleItems, ParticleRows, name_rows, unless_cut
from gossamer.particles.kernels.attention.source import Box, Named, NamedRows
from gossamer.particles.kernels.attention.space import Places


class KeyRows(Opaque):
    """Gathers K and V of an item that was described."""

    def __init__(self, block: GatherColumnBlock) -> None:
        a, size, lane = block.arguments, block.config.size, cute.arch.lane_idx()
        self.block, self.particles, self.names = block, a.source.particles, block.source.names
        self.k = ParticleRows(a.k, block.k, block.s_k, self.names, size, lane, LANES)
        self.v = ParticleRows(a.v, block.v, block.s_v, self.names, size, lane, LANES)

    @cute.jit
    def load(self, turn, item):
        block, head = self.block, item[ColumnItem.GROUP, 0]
        name_rows(self.particles, self.names, item[ColumnItem.TILE, 0], 0)
        self.k.load(head, 0)
        cute.arch.cp_async_mbarrier_arrive_noinc(block.k.full)
        block.k.described(0)
        block.v.wait_empty_at(turn)
        self.v.load(head, 0)
        cute.arch.cp_async_mbarrier_arrive_noinc(block.v.full)


@cute.jit
def scatter(block):
    """A warp that writes dK and dV, which lie in the places of K and V, to their particles, and gives those back."""
    a, item, size, lane = block.arguments, block.item, block.config.size, cute.arch.lane_idx()
    dk = ParticleRows(a.dk, block.k, block.s_k, block.source.names, size, lane, LANES)
    dv = ParticleRows(a.dv, block.v, block.s_v, block.source.names, size, lane, LANES)
    threads, turn = WARPGROUP + LANES, Int32(0)
    block.k.wait_full(0, turn & 1)
    running = item[ColumnItem.VALID]
    while running != 0:
        head = item[ColumnItem.GROUP]
        cute.arch.barrier_arrive(barrier_id=ColumnBarrier.STAGING_FREE, number_of_threads=threads)
        cute.arch.barrier(barrier_id=ColumnBarrier.STAGING_FULL, number_of_threads=threads)
        dk.store(head, 0)
        dv.store(head, 0)
        cute.arch.sync_warp()
        block.k.release(0)
        block.v.release(0)
        turn += 1
        block.k.wait_full(0, turn & 1)
        running = item[ColumnItem.VALID]


class ParticleColumnConsumer(ColumnConsumer):
    """A warpgroup with the 64 keys of each item, which are particles."""

    def __init__(self, block: GatherColumnBlock, masks: Any) -> None:
        super().__init__(block, masks)
        self.gaussian = self.config.gaussian
        self.places = Places(block.source.space, block.source.points, self.thread) if self.gaussian else None

    @cute.jit
    def start(self, n, m, kind):
        if const_expr(self.gaussian):
            self.places.begin(self.block.item[ColumnItem.TILE])
        return n, m, kind

    @cute.jit
    def transform(self, scores, stage):
        """Add what is of the distance."""
        if const_expr(self.gaussian):
            self.places.add_squares(scores, stage)

    @cute.jit
    def beside_products(self, stage):
        """Add dS to the gradients of positions."""
        if const_expr(self.gaussian):
            self.places.add_pull(self.acc_dp, stage)
            cute.arch.sync_warp()  # No product uses the positions, and one lane gives the stage back.

    @cute.jit
    def store(self, slot):
        """dK and dV of an item to shared memory for the warp that scatters them, and the sums of positions."""
        block, thread, threads = self.block, self.thread, WARPGROUP + LANES
        numbers, factors, ones = two_rows(Int32), two_rows(Float32), two_rows(Float32)
        for r in cutlass.range_constexpr(instructions.ROWS):
            numbers[r] = block.source.names[thread.row + 8 * r, 0]
            factors[r] = unless_cut(numbers[r], block.arguments.factor)
            ones[r] = unless_cut(numbers[r], Float32(1.0))
        cute.arch.barrier(barrier_id=ColumnBarrier.STAGING_FREE, number_of_threads=threads)
        instructions.scale_rows(self.acc_dk, factors)
        instructions.scale_rows(self.acc_dv, ones)
        put_tile(self.acc_dk, self.mma_dk, thread, block.s_dk[None, None, 0])
        put_tile(self.acc_dv, self.mma_dv, thread, block.s_dv[None, None, 0])
        if const_expr(self.gaussian):
            self.places.write(block.arguments.source_result[block.item[ColumnItem.GROUP], None, None], numbers)
        cute.arch.barrier_arrive(barrier_id=ColumnBarrier.STAGING_FULL, number_of_threads=threads)


class NamedKeys(NamedRows):
    """The row source of dK and dV: a warp gathers the rows of k and v, one scatters those of dk and dv."""

    def rings(self, block: GatherColumnBlock, memory: Any) -> tuple[Any, ...]:
        """The rings of items, which come with K, and of V, which the block gets, as they are set up."""
        block.k, block.v = ParticleItems.of(memory, "k", 1, 1), CopiedRing.of(memory, "v", 1, LANES, 1)
        return (RingPair(block.k, block.v),)

    def loader(self, block: GatherColumnBlock) -> KeyRows:
        """The loader of the keys of an item."""
        return KeyRows(block)

    def store(self, block: GatherColumnBlock) -> None:
        """The warp that stores results."""
        scatter(block)

    def count(self, arguments: GatherColumnArguments) -> Any:
        """How many keys a head has."""
        return cute.size(arguments.k, mode=[2])

    def consumer(self, block: GatherColumnBlock) -> ParticleColumnConsumer:
        """The warpgroup that computes."""
        return ParticleColumnConsumer(block, GatheredColumnMasks(block))


class ParticleColumns:
    """The kernel of one configuration: that over gathered rows, with keys of particles."""

    def __init__(self, config: GatherConfig) -> None:
        self.gathered = GatherColumns(config, NamedKeys(1, config.stages))

    @cute.jit
    def __call__(
        self,
        q: cute.Tensor, k: cute.Tensor, v: cute.Tensor, dout: cute.Tensor, terms: cute.Tensor, dk: cute.Tensor,
        dv: cute.Tensor, pull: cute.Tensor, work: cute.Tensor, segments: cute.Tensor, indices: cute.Tensor,
        bits: cute.Tensor, particles: cute.Tensor, theirs: cute.Tensor, mine: cute.Tensor, far: cute.Tensor,
        part_dk: cute.Tensor, part_dv: cute.Tensor, lengths: cute.Tensor, tile_counter: cute.Tensor, before: Float32,
        exponent: Float32, factor: Float32, items: Int32, blocks: Int32, size_x: Float32, size_y: Float32,
        size_z: Float32, stream: Any,
    ) -> None:  # fmt: skip
        """Launch with `GatherColumnArguments`, `Named` and `Box`; `before`: the factor of r^2; `pull`: as for dQ."""
        arguments = GatherColumnArguments(
            k=k, v=v, dk=dk, dv=dv, source_result=pull, q=q, dout=dout, terms=terms, work=work, segments=segments,
            indices=indices, bits=bits, source=Named(particles, theirs, mine, far), part_dk=part_dk, part_dv=part_dv,
            lengths=lengths, tile_counter=tile_counter, before=before, exponent=exponent, factor=factor, items=items,
            source_numbers=Box(size_x, size_y, size_z),
        )  # fmt: skip
        self.gathered.launch(arguments, blocks, stream)
