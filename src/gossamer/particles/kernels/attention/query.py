"""dQ over groups of particles, and what rows add to the gradients of positions: as over gathered columns.

Rows of q and dout are gathered, dQ is scattered. dx of a row is the sum of dS (x_j - x_i), less a factor.
"""

from __future__ import annotations

from typing import Any, NamedTuple

import cutlass
import cutlass.cute as cute
from cutlass import Float32, Int32, const_expr

from gossamer.cute import instructions
from gossamer.cute.common import ROWS, WARPGROUP, Barrier, ring
from gossamer.cute.row_items import RowItem
from gossamer.cute.shell import array, words
from gossamer.cute.work import GatheredRows
from gossamer.kernels.hopper.device.backward.common import put_tile, two_rows
from gossamer.kernels.hopper.device.backward.query import QueryConsumer
from gossamer.kernels.hopper.device.gather.block import GatherQueryBlock
from gossamer.kernels.hopper.device.gather.query import GatheredRowMasks, GatherQuery
from gossamer.kernels.hopper.device.gather.rows import THREADS, Gatherer, RowCopies, role_of
from gossamer.kernels.hopper.device.gather.serve import Server
from gossamer.particles.kernels.attention.forward import ParticleLoader, word_copies
from gossamer.particles.kernels.attention.numbers import POINT
from gossamer.particles.kernels.attention.rows import ParticleItems, ParticleRows, particle_of, unless_cut
from gossamer.particles.kernels.attention.space import Places, Space


class ParticleQueryArguments(NamedTuple):
    """The parameters of the kernel: those of `GatherQueryArguments`, but for those that are named here."""

    q: cute.Tensor  # (1, H, N, D)
    dout: cute.Tensor  # (1, H, N, E)
    dq: cute.Tensor  # (1, H, N, D)
    pull: cute.Tensor  # (H, N, 4) float32: sums of dS times steps; not written without a Gaussian
    k: cute.Tensor
    v: cute.Tensor
    terms: cute.Tensor
    work: cute.Tensor
    indices: cute.Tensor
    bits: cute.Tensor
    particles: cute.Tensor  # as of `ParticleForwardArguments`, like those that follow, and the sizes
    theirs: cute.Tensor
    mine: cute.Tensor
    far: cute.Tensor
    part_dq: cute.Tensor
    lengths: cute.Tensor
    tile_counter: cute.Tensor
    before: Float32  # the factor of r^2
    exponent: Float32
    factor: Float32
    items: Int32
    size_x: Float32
    size_y: Float32
    size_z: Float32


class ParticleQueryBlock(GatherQueryBlock):
    """Of the kernel of dQ of groups of particles."""

    arguments: ParticleQueryArguments  # type: ignore[assignment]
    s_names: cute.Tensor  # (64, 1) int32: the words of an item's rows
    s_points: cute.Tensor | None = None  # (4, 64, slots) float32: of the columns of a step
    space: Any = None  # `Space`


class ParticleQueryConsumer(QueryConsumer):
    """A warpgroup with the 64 rows of each item, which are particles."""

    def __init__(self, block: ParticleQueryBlock, masks: Any) -> None:
        super().__init__(block, masks)
        self.words, self.factors = two_rows(Int32), two_rows(Float32)
        self.gaussian = self.config.gaussian
        self.places = Places(block.space, block.s_points, self.thread) if self.gaussian else None
        dq = block.arguments.dq
        self.rows = ParticleRows(dq, block.q, block.s_q, block.s_names, self.config.size, self.thread.thread, WARPGROUP)

    @cute.jit
    def load_rows(self, batch, head, tile):
        """Load the terms of this thread's rows, and what masks them."""
        a = self.block.arguments
        bounds = self.masks.begin(batch)
        for r in cutlass.range_constexpr(instructions.ROWS):
            self.words[r] = self.block.s_names[self.thread.row + 8 * r, 0]
            particle = cutlass.max(particle_of(self.words[r]), 0)
            self.lse[r], self.delta[r] = a.terms[0, batch, head, particle], a.terms[1, batch, head, particle]
            self.factors[r] = unless_cut(self.words[r], a.factor)
        if const_expr(self.gaussian):
            self.places.begin(tile)
        return bounds

    @cute.jit
    def transform(self, scores, kv):
        """Add what is of the distance."""
        if const_expr(self.gaussian):
            self.places.add_squares(scores, self.slot(kv))

    @cute.jit
    def score_gradients(self, p, dp, kv):
        """dS, and what it adds to the gradients of positions."""
        if const_expr(self.gaussian):
            for i in instructions.places(p):
                p[i] = p[i] * (dp[i] - self.delta[i % 4 // 2])
            instructions.convert(p, self.frag_ds)
            self.places.add_pull(p, self.slot(kv))
        else:
            super().score_gradients(p, dp, kv)

    def slot(self, kv: Any) -> Any:
        """Where the positions of a step are."""
        return ring(kv, self.config.slots)[0]

    @cute.jit
    def finish(self, batch, head):
        """dQ of an item, times the scale, and the sums of its positions."""
        thread, barrier = self.thread, Barrier.Q_READ
        cute.arch.barrier(barrier_id=barrier, number_of_threads=WARPGROUP)
        instructions.scale_rows(self.acc_dq, self.factors)
        put_tile(self.acc_dq, self.mma_dq, thread, self.s_dq)
        cute.arch.barrier(barrier_id=barrier, number_of_threads=WARPGROUP)
        self.rows.store(head, 0)
        if const_expr(self.gaussian):
            self.places.write(self.block.arguments.pull[head, None, None], self.words)
        cute.arch.sync_warp()
        self.block.q.release(0)


class ParticleQuery(GatherQuery):
    """The kernel of one configuration."""

    block_class = ParticleQueryBlock

    @cute.jit
    def __call__(
        self,
        q: cute.Tensor, k: cute.Tensor, v: cute.Tensor, dout: cute.Tensor, terms: cute.Tensor, dq: cute.Tensor,
        pull: cute.Tensor, work: cute.Tensor, indices: cute.Tensor, bits: cute.Tensor, particles: cute.Tensor,
        theirs: cute.Tensor, mine: cute.Tensor, far: cute.Tensor, part_dq: cute.Tensor, lengths: cute.Tensor,
        tile_counter: cute.Tensor, before: Float32, exponent: Float32, factor: Float32, items: Int32, blocks: Int32,
        size_x: Float32, size_y: Float32, size_z: Float32, stream: Any,
    ) -> None:  # fmt: skip
        """As in `ParticleQueryArguments`."""
        arguments = ParticleQueryArguments(
            q=q, dout=dout, dq=dq, pull=pull, k=k, v=v, terms=terms, work=work, indices=indices, bits=bits,
            particles=particles, theirs=theirs, mine=mine, far=far, part_dq=part_dq, lengths=lengths,
            tile_counter=tile_counter, before=before, exponent=exponent, factor=factor, items=items, size_x=size_x,
            size_y=size_y, size_z=size_z,
        )  # fmt: skip
        self.launch(arguments, blocks, stream)

    def memory(self) -> dict[str, Any]:
        c = self.config
        points = {"points": array(Float32, POINT * ROWS * c.slots, 128)} if c.gaussian else {}
        return {**points, "names": array(Int32, ROWS, 128), **super().memory()}

    def block(self, arguments: Any, memory: Any) -> ParticleQueryBlock:
        c, a = self.config, arguments
        block = super().block(arguments, memory)
        assert isinstance(block, ParticleQueryBlock)
        block.q = items = ParticleItems.of(memory, "q", 1, 4)
        block.item = items.item[None, 0]
        _, *rest = block.rings
        block.rings = (items,), *rest
        block.s_names = words(memory.names, ROWS, 1)
        if c.gaussian:
            block.s_points = words(memory.points, POINT, ROWS, c.slots)
            block.space = Space(a.theirs, a.mine, a.far, (a.size_x, a.size_y, a.size_z), a.before)
        return block

    @cute.jit
    def serve(self, block, warp):
        """One warp takes items and gathers their rows, two gather columns, one has nothing to do."""
        c, a = self.config, block.arguments
        role = role_of(warp, c.blocks)
        if role == 0:
            work = GatheredRows(a.work, a.tile_counter, a.items, a.indices, a.lengths, False)
            loader = ParticleLoader(block, block.q, [(a.q, block.s_q), (a.dout, block.s_dout)])
            Server(work, block.ahead, block.q, loader, RowItem.VALID).run()
        elif role >= 2:
            thread = cute.arch.thread_idx()[0] % THREADS
            keys = RowCopies(a.k, block.k, block.s_k.iterator, c.size, thread)
            values = RowCopies(a.v, block.v, block.s_v.iterator, c.size, thread)
            Gatherer(block.ahead, a.indices, keys, values, word_copies(block, thread), Int32(1)).run()

    @cute.jit
    def compute(self, block):
        ParticleQueryConsumer(block, GatheredRowMasks(block)).consume()
