"""dK and dV over groups of particles, and what keys add to the gradients of positions: as over gathered rows.

Pairs are symmetric, so the rows that keep a key are those of its own list. Rows of k and v are gathered, dK and dV are
scattered.
"""

from __future__ import annotations

from typing import Any, NamedTuple

import cutlass
import cutlass.cute as cute
from cutlass import Float32, Int32, const_expr

from gossamer.cute import instructions
from gossamer.cute.column_items import ColumnItem
from gossamer.cute.common import ROWS, WARPGROUP, Opaque, RingPair
from gossamer.cute.shell import array, words
from gossamer.kernels.hopper.device.backward.common import ColumnBarrier, put_tile, two_rows
from gossamer.kernels.hopper.device.backward.consume import ColumnConsumer
from gossamer.kernels.hopper.device.backward.produce import ColumnWork
from gossamer.kernels.hopper.device.gather.block import GatherColumnBlock
from gossamer.kernels.hopper.device.gather.columns import GatherColumns, GatheredColumnMasks, QueryGatherer
from gossamer.kernels.hopper.device.gather.rows import role_of
from gossamer.kernels.hopper.device.gather.serve import CopiedRing, Server
from gossamer.particles.kernels.attention.forward import word_copies
from gossamer.particles.kernels.attention.numbers import POINT
from gossamer.particles.kernels.attention.rows import LANES, ParticleItems, ParticleRows, name_rows, unless_cut
from gossamer.particles.kernels.attention.space import Places, Space


class ParticleColumnArguments(NamedTuple):
    """The parameters of the kernel: those of `GatherColumnArguments`, but for those that are named here."""

    k: cute.Tensor  # (1, H, N, D)
    v: cute.Tensor  # (1, H, N, E)
    dk: cute.Tensor
    dv: cute.Tensor
    pull: cute.Tensor  # (H, N, 4) float32: sums of dS times steps; not written without a Gaussian
    q: cute.Tensor
    dout: cute.Tensor
    terms: cute.Tensor
    work: cute.Tensor
    segments: cute.Tensor
    indices: cute.Tensor
    bits: cute.Tensor
    particles: cute.Tensor  # as of `ParticleForwardArguments`, like those that follow, and the sizes
    theirs: cute.Tensor
    mine: cute.Tensor
    far: cute.Tensor
    part_dk: cute.Tensor
    part_dv: cute.Tensor
    lengths: cute.Tensor
    tile_counter: cute.Tensor
    before: Float32  # the factor of r^2
    exponent: Float32
    factor: Float32
    items: Int32
    size_x: Float32
    size_y: Float32
    size_z: Float32


class ParticleColumnBlock(GatherColumnBlock):
    """Of the kernel of dK and dV of groups of particles."""

    arguments: ParticleColumnArguments  # type: ignore[assignment]
    s_names: cute.Tensor  # (64, 1) int32: the words of an item's keys
    s_points: cute.Tensor | None = None  # (4, 64, stages) float32: of the queries of a step
    space: Any = None  # `Space`


class KeyRows(Opaque):
    """Gathers K and V of an item that was described."""

    def __init__(self, block: ParticleColumnBlock) -> None:
        a, size, lane = block.arguments, block.config.size, cute.arch.lane_idx()
        self.block, self.particles = block, a.particles
        self.k = ParticleRows(a.k, block.k, block.s_k, block.s_names, size, lane, LANES)
        self.v = ParticleRows(a.v, block.v, block.s_v, block.s_names, size, lane, LANES)

    @cute.jit
    def load(self, turn, item):
        block, head = self.block, item[ColumnItem.GROUP, 0]
        name_rows(self.particles, block.s_names, item[ColumnItem.TILE, 0], 0)
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
    dk = ParticleRows(a.dk, block.k, block.s_k, block.s_names, size, lane, LANES)
    dv = ParticleRows(a.dv, block.v, block.s_v, block.s_names, size, lane, LANES)
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


class ParticleGatherer(QueryGatherer):
    """Two warps that fill the rings of Q and dO, with the positions of queries too."""

    def __init__(self, block: ParticleColumnBlock) -> None:
        super().__init__(block)
        self.words = word_copies(block, self.thread)


class ParticleColumnConsumer(ColumnConsumer):
    """A warpgroup with the 64 keys of each item, which are particles."""

    def __init__(self, block: ParticleColumnBlock, masks: Any) -> None:
        super().__init__(block, masks)
        self.gaussian = self.config.gaussian
        self.places = Places(block.space, block.s_points, self.thread) if self.gaussian else None

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
        """What dS adds to the gradients of positions."""
        if const_expr(self.gaussian):
            self.places.add_pull(self.acc_dp, stage)
            cute.arch.sync_warp()  # No product uses the positions, and one lane gives the stage back.

    @cute.jit
    def store(self, slot):
        """dK and dV of an item to shared memory for the warp that scatters them, and the sums of positions."""
        block, thread, threads = self.block, self.thread, WARPGROUP + LANES
        found, factors, ones = two_rows(Int32), two_rows(Float32), two_rows(Float32)
        for r in cutlass.range_constexpr(instructions.ROWS):
            found[r] = block.s_names[thread.row + 8 * r, 0]
            factors[r] = unless_cut(found[r], block.arguments.factor)
            ones[r] = unless_cut(found[r], Float32(1.0))
        cute.arch.barrier(barrier_id=ColumnBarrier.STAGING_FREE, number_of_threads=threads)
        instructions.scale_rows(self.acc_dk, factors)
        instructions.scale_rows(self.acc_dv, ones)
        put_tile(self.acc_dk, self.mma_dk, thread, block.s_dk[None, None, 0])
        put_tile(self.acc_dv, self.mma_dv, thread, block.s_dv[None, None, 0])
        if const_expr(self.gaussian):
            self.places.write(block.arguments.pull[block.item[ColumnItem.GROUP], None, None], found)
        cute.arch.barrier_arrive(barrier_id=ColumnBarrier.STAGING_FULL, number_of_threads=threads)


class ParticleColumns(GatherColumns):
    """The kernel of one configuration."""

    block_class = ParticleColumnBlock

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
        """As in `ParticleColumnArguments`."""
        arguments = ParticleColumnArguments(
            k=k, v=v, dk=dk, dv=dv, pull=pull, q=q, dout=dout, terms=terms, work=work, segments=segments,
            indices=indices, bits=bits, particles=particles, theirs=theirs, mine=mine, far=far, part_dk=part_dk,
            part_dv=part_dv, lengths=lengths, tile_counter=tile_counter, before=before, exponent=exponent,
            factor=factor, items=items, size_x=size_x, size_y=size_y, size_z=size_z,
        )  # fmt: skip
        self.launch(arguments, blocks, stream)

    def memory(self) -> dict[str, Any]:
        c = self.config
        points = {"points": array(Float32, POINT * ROWS * c.stages, 128)} if c.gaussian else {}
        return {**points, "names": array(Int32, ROWS, 128), **super().memory()}

    def keys(self, arguments: Any) -> Any:
        return cute.size(arguments.k, mode=[2])

    def block(self, arguments: Any, memory: Any) -> ParticleColumnBlock:
        c, a = self.config, arguments
        block = super().block(arguments, memory)
        assert isinstance(block, ParticleColumnBlock)
        block.k = ParticleItems.of(memory, "k", 1, 1)
        block.v = CopiedRing.of(memory, "v", 1, LANES, 1)
        block.item = block.k.item[None, 0]
        _, *rest = block.rings
        block.rings = (RingPair(block.k, block.v),), *rest
        block.s_names = words(memory.names, ROWS, 1)
        if c.gaussian:
            block.s_points = words(memory.points, POINT, ROWS, c.stages)
            block.space = Space(a.theirs, a.mine, a.far, (a.size_x, a.size_y, a.size_z), a.before)
        return block

    def prepared(self, block: GatherColumnBlock) -> GatherColumnBlock:
        block.ratio = Int32(1)
        return block

    @cute.jit
    def serve(self, block, warp):
        """One warp takes items and gathers their keys, one scatters results, two gather queries."""
        c, a = self.config, block.arguments
        role = role_of(warp, c.blocks)
        if role == 0:
            work = ColumnWork(a.work, a.tile_counter, a.items, a.lengths, block.keys, c)
            Server(work, block.ahead, block.k, KeyRows(block), ColumnItem.VALID).run()
        elif role == 1:
            scatter(block)
        else:
            ParticleGatherer(block).run()

    @cute.jit
    def compute(self, block):
        ParticleColumnConsumer(block, GatheredColumnMasks(block)).consume()
