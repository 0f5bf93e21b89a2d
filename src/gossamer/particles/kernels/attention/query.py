"""dQ over groups of particles, and what rows add to the gradients of positions: as over gathered columns.

Rows of q and dout are gathered, dQ is scattered. dx of a row is the sum of dS (x_j - x_i), less a factor.
"""

from __future__ import annotations

from typing import Any

import cutlass
import cutlass.cute as cute
from cutlass import Float32, Int32, const_expr

from gossamer.cute import instructions
from gossamer.cute.common import WARPGROUP, Barrier, ring
from gossamer.kernels.hopper.device.backward.common import put_tile, two_rows
from gossamer.kernels.hopper.device.backward.query import QueryConsumer
from gossamer.kernels.hopper.device.gather.block import GatherQueryArguments, GatherQueryBlock
from gossamer.kernels.hopper.device.gather.configurations import GatherConfig
from gossamer.kernels.hopper.device.gather.query import GatheredRowMasks, GatherQuery
from gossamer.particles.kernels.attention.forward import ParticleLoader
from gossamer.particles.kernels.attention.rows import ParticleItems, ParticleRows, particle_of, unless_cut
from gossamer.particles.kernels.attention.source import Box, Named, NamedRows
from gossamer.particles.kernels.attention.space import Places


class ParticleQueryConsumer(QueryConsumer):
    """A warpgroup with the 64 rows of each item, which are particles."""

    def __init__(self, block: GatherQueryBlock, masks: Any) -> None:
        super().__init__(block, masks)
        self.words, self.factors = two_rows(Int32), two_rows(Float32)
        self.gaussian = self.config.gaussian
        self.places = Places(block.source.space, block.source.points, self.thread) if self.gaussian else None
        dq, names, size = block.arguments.dq, block.source.names, self.config.size
        self.rows = ParticleRows(dq, block.q, block.s_q, names, size, self.thread.thread, WARPGROUP)

    @cute.jit
    def load_rows(self, batch, head, tile):
        """Load the terms of this thread's rows, and what masks them."""
        a = self.block.arguments
        bounds = self.masks.begin(batch)
        for r in cutlass.range_constexpr(instructions.ROWS):
            self.words[r] = self.block.source.names[self.thread.row + 8 * r, 0]
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
            self.places.write(self.block.arguments.source_result[head, None, None], self.words)
        cute.arch.sync_warp()
        self.block.q.release(0)


class GradientRows(NamedRows):
    """The row source of dQ: a warp gathers the rows of q and dout, and those who compute dQ scatter it."""

    def items(self, memory: Any) -> ParticleItems:
        """The ring of descriptions of items, which come with Q and dO."""
        return ParticleItems.of(memory, "q", 1, 4)

    def loader(self, block: GatherQueryBlock) -> ParticleLoader:
        """The loader of the rows of an item."""
        a = block.arguments
        return ParticleLoader(block, block.q, [(a.q, block.s_q), (a.dout, block.s_dout)])

    def consumer(self, block: GatherQueryBlock) -> ParticleQueryConsumer:
        """The warpgroup that computes."""
        return ParticleQueryConsumer(block, GatheredRowMasks(block))


class ParticleQuery:
    """The kernel of one configuration: that over gathered columns, with rows of particles."""

    def __init__(self, config: GatherConfig) -> None:
        self.gathered = GatherQuery(config, GradientRows(1, config.slots))

    @cute.jit
    def __call__(
        self,
        q: cute.Tensor, k: cute.Tensor, v: cute.Tensor, dout: cute.Tensor, terms: cute.Tensor, dq: cute.Tensor,
        pull: cute.Tensor, work: cute.Tensor, indices: cute.Tensor, bits: cute.Tensor, particles: cute.Tensor,
        theirs: cute.Tensor, mine: cute.Tensor, far: cute.Tensor, part_dq: cute.Tensor, lengths: cute.Tensor,
        tile_counter: cute.Tensor, before: Float32, exponent: Float32, factor: Float32, items: Int32, blocks: Int32,
        size_x: Float32, size_y: Float32, size_z: Float32, stream: Any,
    ) -> None:  # fmt: skip
        """The parameters of `GatherQueryArguments`, `Named` and `Box`; `before` is the factor of r^2.

        pull: (H, N, 4) float32: sums of dS times steps; not written without a Gaussian.
        """
        arguments = GatherQueryArguments(
            q=q, dout=dout, dq=dq, source_result=pull, k=k, v=v, terms=terms, work=work, indices=indices, bits=bits,
            source=Named(particles, theirs, mine, far), part_dq=part_dq, lengths=lengths, tile_counter=tile_counter,
            before=before, exponent=exponent, factor=factor, items=items, source_numbers=Box(size_x, size_y, size_z),
        )  # fmt: skip
        self.gathered.launch(arguments, blocks, stream)
