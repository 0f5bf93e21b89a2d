"""The kernel of dQ of rows without a list: tiles of such rows over their keys, and delta of each row.

Of the first warpgroup one warp draws items and loads K and V by TMA; the others compute, 64 rows each.
"""

from __future__ import annotations

from typing import Any

import cutlass.cute as cute
from cutlass import Float32, Int32

from gossamer.kernels.hopper.device.common import NUMBERS, WARPGROUP, computing_thread
from gossamer.kernels.hopper.device.common import ROWS as TILE
from gossamer.kernels.hopper.device.shell import Shell, array, barriers, ring_of, tile_memory, tiles, words
from gossamer.kernels.hopper.device.tiled.block import TileItem
from gossamer.kernels.hopper.device.tiled.configurations import EIGHT, SUMS, TiledQueryConfig
from gossamer.kernels.hopper.device.tiled.produce import QueryProducer
from gossamer.kernels.hopper.device.tiled.query_block import TiledQueryArguments, TiledQueryBlock
from gossamer.kernels.hopper.device.tiled.query_consume import QueryConsumer
from gossamer.kernels.hopper.device.tiles import LINE, tile_layout, tma


class TiledQuery(Shell):
    """The kernel of one configuration."""

    def __init__(self, config: TiledQueryConfig) -> None:
        self.config, self.dtype = config, NUMBERS[config.dtype]
        self.threads = WARPGROUP * (config.groups + 1)
        self.registers = (32, 160) if config.groups == 3 else (24, 240)

    @cute.jit
    def __call__(
        self,
        q: cute.Tensor, k: cute.Tensor, v: cute.Tensor, dout: cute.Tensor, steepness: cute.Tensor, lo: cute.Tensor,
        hi: cute.Tensor, row_list: cute.Tensor, row_counts: cute.Tensor, drawn: cute.Tensor, lam: cute.Tensor,
        delta: cute.Tensor, dq: cute.Tensor, scale: Float32, offset: Int32, few: Int32, blocks: Int32, stream: Any,
    ) -> None:  # fmt: skip
        """As in `TiledQueryArguments`."""
        c = self.config
        arguments = TiledQueryArguments(
            q=q, k=tma(k, c.step, c.D), k_sample=tma(k, EIGHT, LINE), v=tma(v, c.step, c.E),
            v_sample=tma(v, EIGHT, LINE), dout=dout, steepness=steepness, lo=lo, hi=hi, row_list=row_list,
            row_counts=row_counts, drawn=drawn, lam=lam, delta=delta, dq=dq, scale=scale, offset=offset, few=few,
        )  # fmt: skip
        self.launch(arguments, blocks, stream)

    def layouts(self) -> dict[str, Any]:
        """Of Q and dO, and of the rings of K and V."""
        c = self.config
        return {
            "q": tile_layout(self.dtype, TILE, c.D, c.groups), "dout": tile_layout(self.dtype, TILE, c.E, c.groups),
            "k": tile_layout(self.dtype, c.step, c.D, c.k_stages),
            "v": tile_layout(self.dtype, c.step, c.E, c.v_stages),
        }  # fmt: skip

    def memory(self) -> dict[str, Any]:
        c = self.config
        return {
            **barriers(items=2, k=c.k_stages, v=c.v_stages), "item": array(Int32, len(TileItem) * 2),
            **{name: tile_memory(self.dtype, x) for name, x in self.layouts().items()},
            "o": array(Float32, TILE * c.D * (c.groups - 1), 128),
            "sums": array(Float32, 2 * TILE * SUMS * c.groups, 128),
        }  # fmt: skip

    def block(self, arguments: TiledQueryArguments, memory: Any) -> TiledQueryBlock:
        c = self.config
        warps = 4 * c.groups
        items = ring_of(memory, "items", 2, 1, warps)
        k_ring, v_ring = ring_of(memory, "k", c.k_stages, 1, warps), ring_of(memory, "v", c.v_stages, 1, warps)
        shared = {f"s_{name}": tiles(getattr(memory, name), x) for name, x in self.layouts().items()}
        return TiledQueryBlock(
            config=c, arguments=arguments, rings=((items,), (k_ring,), (v_ring,)), items=items, k=k_ring, v=v_ring,
            s_item=words(memory.item, len(TileItem), 2), s_o=words(memory.o, WARPGROUP, c.D // 2, c.groups - 1),
            s_sums=words(memory.sums, TILE, SUMS, c.groups, 2), **shared,
        )  # fmt: skip

    @cute.jit
    def serve(self, block, warp):
        """One warp loads."""
        if warp == 0:
            QueryProducer(block).run()

    @cute.jit
    def compute(self, block):
        QueryConsumer(block, computing_thread()).run()
