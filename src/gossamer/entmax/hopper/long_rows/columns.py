"""The kernel of dK and dV of rows without a list: tiles of keys, each of which walks these rows in order.

Of the first warpgroup one warp draws tiles and loads K and V by TMA, and two gather Q and dO; the others compute.
"""

from __future__ import annotations

from typing import Any

import cutlass.cute as cute
from cutlass import Float32, Int32

from gossamer.cute.common import NUMBERS, WARPGROUP, computing_thread
from gossamer.cute.common import ROWS as TILE
from gossamer.cute.shell import Shell, array, barriers, ring_of, tile_memory, tiles, words
from gossamer.cute.tiles import tile_layout, tma
from gossamer.entmax.hopper.long_rows.column_block import ColumnItem, LongRowsColumnsArguments, LongRowsColumnsBlock
from gossamer.entmax.hopper.long_rows.column_consume import ColumnConsumer
from gossamer.entmax.hopper.long_rows.column_produce import KeyServer, RowGatherer
from gossamer.entmax.hopper.long_rows.configurations import LongRowsColumnsConfig
from gossamer.kernels.hopper.device.gather.rows import THREADS
from gossamer.kernels.hopper.device.gather.serve import CopiedRing


class LongRowsColumns(Shell):
    """The kernel of dK and dV of long rows."""

    def __init__(self, config: LongRowsColumnsConfig) -> None:
        self.config, self.dtype = config, NUMBERS[config.dtype]
        self.threads = WARPGROUP * (config.groups + 1)
        self.registers = (32, 160) if config.groups == 3 else (40, 232)

    @cute.jit
    def __call__(
        self,
        q: cute.Tensor, k: cute.Tensor, v: cute.Tensor, dout: cute.Tensor, steepness: cute.Tensor, lo: cute.Tensor,
        hi: cute.Tensor, row_list: cute.Tensor, row_counts: cute.Tensor, drawn: cute.Tensor, lam: cute.Tensor,
        delta: cute.Tensor, dk: cute.Tensor, dv: cute.Tensor, scale: Float32, offset: Int32, blocks: Int32, stream: Any,
    ) -> None:  # fmt: skip
        """Launch the kernel; the parameters are those of `LongRowsColumnsArguments`."""
        c = self.config
        arguments = LongRowsColumnsArguments(
            q=q, k=tma(k, TILE, c.D), v=tma(v, TILE, c.E), dout=dout, steepness=steepness, lo=lo, hi=hi,
            row_list=row_list, row_counts=row_counts, drawn=drawn, lam=lam, delta=delta, dk=dk, dv=dv, scale=scale,
            offset=offset,
        )  # fmt: skip
        self.launch(arguments, blocks, stream)

    def layouts(self) -> dict[str, Any]:
        """The layouts of K and V, and of the rings of Q and dO."""
        c = self.config
        return {
            "k": tile_layout(self.dtype, TILE, c.D, c.groups), "v": tile_layout(self.dtype, TILE, c.E, c.groups),
            "q": tile_layout(self.dtype, c.step, c.D, c.stages), "dout": tile_layout(self.dtype, c.step, c.E, c.stages),
        }  # fmt: skip

    def memory(self) -> dict[str, Any]:
        c = self.config
        return {
            **barriers(items=2, keys=1, rows=c.stages), "item": array(Int32, len(ColumnItem) * 2),
            "kind": array(Int32, 2 * c.stages),
            **{name: tile_memory(self.dtype, x) for name, x in self.layouts().items()},
            **{name: array(Float32, c.step * c.stages, 128) for name in ("line", "delta")},
            **{name: array(Int32, c.step * c.stages, 128) for name in ("lo", "hi")},
        }  # fmt: skip

    def block(self, arguments: LongRowsColumnsArguments, memory: Any) -> LongRowsColumnsBlock:
        c = self.config
        warps = 4 * c.groups
        items = ring_of(memory, "items", 2, 1, warps + THREADS // 32)
        keys = ring_of(memory, "keys", 1, 1, warps)
        rows = CopiedRing.of(memory, "rows", c.stages, 2 * THREADS, warps)  # what is copied, and what is written
        shared = {name: tiles(getattr(memory, name), x) for name, x in self.layouts().items()}
        terms = {name: words(getattr(memory, name), c.step, c.stages) for name in ("line", "delta", "lo", "hi")}
        return LongRowsColumnsBlock(
            config=c, arguments=arguments, rings=((items,), (keys,), (rows,)), items=items, keys=keys, rows=rows,
            s_item=words(memory.item, len(ColumnItem), 2), s_kind=words(memory.kind, 2, c.stages),
            **{f"s_{name}": x for name, x in (shared | terms).items()},
        )  # fmt: skip

    @cute.jit
    def serve(self, block, warp):
        """Draw items and load keys by one warp, and gather rows by two."""
        if warp == 0:
            KeyServer(block).run()
        elif warp >= 2:
            RowGatherer(block).run()

    @cute.jit
    def compute(self, block):
        ColumnConsumer(block, computing_thread()).run()
