"""The selecting kernel: scores of 128 query rows by wgmma, of which those above a rising bound are kept.

Of the first warpgroup one warp loads Q and K by TMA; the two others own 64 rows each.
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
from gossamer.entmax.hopper.support.block import SelectArguments, SelectBlock
from gossamer.entmax.hopper.support.candidates import Selector
from gossamer.entmax.hopper.support.configurations import SelectConfig
from gossamer.entmax.hopper.support.rows import rows_of, steps_of, tile_of
from gossamer.entmax.hopper.support.supports import Supports


class Select(Shell):
    """The kernel of one configuration."""

    threads = WARPGROUP * (SelectConfig.groups + 1)
    registers = (24, 240)

    def __init__(self, config: SelectConfig) -> None:
        self.config = config
        self.dtype = NUMBERS[config.dtype]

    @cute.jit
    def __call__(
        self,
        q: cute.Tensor, k: cute.Tensor, steepness: cute.Tensor, lo: cute.Tensor, hi: cute.Tensor,
        list_keys: cute.Tensor, list_weights: cute.Tensor, list_counts: cute.Tensor, lam: cute.Tensor,
        support: cute.Tensor, certified: cute.Tensor, scale: Float32, first_block: Int32, offset: Int32, keep: Int32,
        every: Int32, first_listed: Int32, told: Int32, blocks: Int32, stream: Any,
    ) -> None:  # fmt: skip
        """As in `SelectArguments`; `blocks` of rows are computed."""
        c = self.config
        arguments = SelectArguments(
            q=tma(q, TILE, c.D), k=tma(k, c.step, c.D), steepness=steepness, lo=lo, hi=hi, list_keys=list_keys,
            list_weights=list_weights, list_counts=list_counts, lam=lam, support=support, certified=certified,
            scale=scale, first_block=first_block, offset=offset, keep=keep, every=every, first_listed=first_listed,
            told=told,
        )  # fmt: skip
        self.launch(arguments, blocks, stream)

    def layouts(self) -> tuple[Any, Any]:
        """Of Q and of the ring of K."""
        c = self.config
        return tile_layout(self.dtype, TILE, c.D, c.groups), tile_layout(self.dtype, c.step, c.D, c.stages)

    def memory(self) -> dict[str, Any]:
        c = self.config
        _, k = self.layouts()
        return {
            **barriers(q=c.groups, k=c.stages), "going": array(Int32, 4 * c.groups), "k": tile_memory(self.dtype, k),
            "contenders": array(Int32, c.place // 4 * c.places, 1024),
        }  # fmt: skip

    def block(self, arguments: SelectArguments, memory: Any) -> SelectBlock:
        c = self.config
        q, k = self.layouts()
        # Q is where the last places are, until it is in registers.
        q_at = memory.contenders.data_ptr() + (c.places * c.place - 2 * c.D * c.rows) // 4
        q_ring = ring_of(memory, "q", c.groups, 1, 1)
        k_ring = ring_of(memory, "k", c.stages, 1, 4 * c.groups)
        return SelectBlock(
            config=c, arguments=arguments, rings=((q_ring,), (k_ring,)), q=q_ring, k=k_ring,
            s_q=cute.make_tensor(cute.recast_ptr(q_at, q.inner, dtype=self.dtype), q.outer),
            s_k=tiles(memory.k, k), s_going=words(memory.going, 4, c.groups),
            s_contenders=words(memory.contenders, c.place // 4, c.places),
        )  # fmt: skip

    @cute.jit
    def serve(self, block, warp):
        """One warp loads."""
        if warp == 0:
            a, c = block.arguments, self.config
            rows = rows_of(block)
            of_q = tile_loader(block.q, a.q, block.s_q, TILE, c.D)
            of_k = tile_loader(block.k, a.k, block.s_k, c.step, c.D)
            for g in cutlass.range_constexpr(c.groups):
                of_q.load(Int32(g), rows.tile * c.groups + g, rows.head, rows.batch)
            for step in cutlass.range(steps_of(rows), unroll=1):
                of_k.load(step, tile_of(rows, step, a.every), rows.group, rows.batch)

    @cute.jit
    def compute(self, block):
        rows = Selector(block, computing_thread())
        rows.run()
        Supports(rows).write()
