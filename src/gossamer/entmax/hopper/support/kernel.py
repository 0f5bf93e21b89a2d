"""The kernel of supports: scores of 128 query rows by wgmma; those above a rising bound are kept as candidates.

One warp of the first warpgroup loads Q and K by TMA; the two other warpgroups own 64 rows each.
"""

from __future__ import annotations

from typing import Any

import cutlass
import cutlass.cute as cute
from cutlass import Float32, Int32

from gossamer.cute.common import NUMBERS, WARPGROUP, computing_thread
from gossamer.cute.common import ROWS as TILE
from gossamer.cute.shell import Shell, array, barriers, ring_of, tile_memory, tiles, words
from gossamer.cute.tiles import tile_layout, tile_loader, tma
from gossamer.entmax.hopper.support.block import SupportArguments, SupportBlock
from gossamer.entmax.hopper.support.candidates import RowCandidates
from gossamer.entmax.hopper.support.configurations import SupportConfig
from gossamer.entmax.hopper.support.rows import rows_of, steps_of, tile_of
from gossamer.entmax.hopper.support.supports import Supports


class SupportLists(Shell):
    """The kernel of supports."""

    threads = WARPGROUP * (SupportConfig.groups + 1)
    registers = (24, 240)

    def __init__(self, config: SupportConfig) -> None:
        self.config = config
        self.dtype = NUMBERS[config.dtype]

    @cute.jit
    def __call__(
        self,
        q: cute.Tensor, k: cute.Tensor, steepness: cute.Tensor, lo: cute.Tensor, hi: cute.Tensor,
        list_keys: cute.Tensor, list_weights: cute.Tensor, list_counts: cute.Tensor, lam: cute.Tensor,
        support: cute.Tensor, certified: cute.Tensor, scale: Float32, first_block: Int32, offset: Int32, keep: Int32,
        every: Int32, first_listed: Int32, requested: Int32, blocks: Int32, stream: Any,
    ) -> None:  # fmt: skip
        """Launch `blocks` blocks of rows; the parameters are those of `SupportArguments`."""
        c = self.config
        arguments = SupportArguments(
            q=tma(q, TILE, c.D), k=tma(k, c.step, c.D), steepness=steepness, lo=lo, hi=hi, list_keys=list_keys,
            list_weights=list_weights, list_counts=list_counts, lam=lam, support=support, certified=certified,
            scale=scale, first_block=first_block, offset=offset, keep=keep, every=every, first_listed=first_listed,
            requested=requested,
        )  # fmt: skip
        self.launch(arguments, blocks, stream)

    def layouts(self) -> tuple[Any, Any]:
        """The layouts of Q and of the ring of K."""
        c = self.config
        return tile_layout(self.dtype, TILE, c.D, c.groups), tile_layout(self.dtype, c.step, c.D, c.stages)

    def memory(self) -> dict[str, Any]:
        c = self.config
        _, k = self.layouts()
        return {
            **barriers(q=c.groups, k=c.stages), "going": array(Int32, 4 * c.groups), "k": tile_memory(self.dtype, k),
            "candidates": array(Int32, c.place // 4 * c.places, 1024),
        }  # fmt: skip

    def block(self, arguments: SupportArguments, memory: Any) -> SupportBlock:
        c = self.config
        q, k = self.layouts()
        # Until Q is in registers it lies where the last places will be.
        q_at = memory.candidates.data_ptr() + (c.places * c.place - 2 * c.D * c.rows) // 4
        q_ring = ring_of(memory, "q", c.groups, 1, 1)
        k_ring = ring_of(memory, "k", c.stages, 1, 4 * c.groups)
        return SupportBlock(
            config=c, arguments=arguments, rings=((q_ring,), (k_ring,)), q=q_ring, k=k_ring,
            s_q=cute.make_tensor(cute.recast_ptr(q_at, q.inner, dtype=self.dtype), q.outer),
            s_k=tiles(memory.k, k), s_going=words(memory.going, 4, c.groups),
            s_candidates=words(memory.candidates, c.place // 4, c.places),
        )  # fmt: skip

    @cute.jit
    def serve(self, block, warp):
        """Load Q and K, by one warp."""
        if warp == 0:
            a, c = block.arguments, self.config
            rows = rows_of(block)
            q_loader = tile_loader(block.q, a.q, block.s_q, TILE, c.D)
            k_loader = tile_loader(block.k, a.k, block.s_k, c.step, c.D)
            for g in cutlass.range_constexpr(c.groups):
                q_loader.load(Int32(g), rows.tile * c.groups + g, rows.head, rows.batch)
            for step in cutlass.range(steps_of(rows), unroll=1):
                k_loader.load(step, tile_of(rows, step, a.every), rows.group, rows.batch)

    @cute.jit
    def compute(self, block):
        rows = RowCandidates(block, computing_thread())
        rows.run()
        Supports(rows).write()
