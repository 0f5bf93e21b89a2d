"""The kernel of long rows: their scores by wgmma, pass after pass, until the weights of each row sum to 1.

One warp of the first warpgroup draws items and loads K and V by TMA; the other warpgroups compute, 64 rows each.

With it the forward at alpha 1.25, 16 heads of 64, 8192 tokens, takes 1.26 ms on an H200 (`alpha_1.25` in
benchmarks/results/entmax_h200.jsonl), by Triton 2.83 (docs/lab/2026-11-28-entmax-tiles.md).
"""

from __future__ import annotations

from typing import Any

import cutlass.cute as cute
from cutlass import Float32, Int32

from gossamer.cute.common import NUMBERS, WARPGROUP, computing_thread
from gossamer.cute.common import ROWS as TILE
from gossamer.cute.shell import Shell, array, barriers, ring_of, tile_memory, tiles, words
from gossamer.cute.tiles import LINE, tile_layout, tma
from gossamer.entmax.hopper.long_rows.block import LongRowsArguments, LongRowsBlock, TileItem
from gossamer.entmax.hopper.long_rows.configurations import EIGHT, SUMS, LongRowsConfig
from gossamer.entmax.hopper.long_rows.consume import Consumer
from gossamer.entmax.hopper.long_rows.produce import Producer


class LongRows(Shell):
    """The kernel of long rows."""

    def __init__(self, config: LongRowsConfig) -> None:
        self.config, self.dtype = config, NUMBERS[config.dtype]
        self.threads = WARPGROUP * (config.groups + 1)
        self.registers = (32, 160) if config.groups == 3 else (24, 240)

    @cute.jit
    def __call__(
        self,
        q: cute.Tensor, k: cute.Tensor, v: cute.Tensor, steepness: cute.Tensor, lo: cute.Tensor, hi: cute.Tensor,
        row_list: cute.Tensor, row_counts: cute.Tensor, drawn: cute.Tensor, out: cute.Tensor, lam: cute.Tensor,
        support: cute.Tensor, certified: cute.Tensor, scale: Float32, near: Float32, offset: Int32, few: Int32,
        blocks: Int32, stream: Any,
    ) -> None:  # fmt: skip
        """Launch the kernel; the parameters are those of `LongRowsArguments`."""
        c = self.config
        arguments = LongRowsArguments(
            q=q, k=tma(k, c.step, c.D), k_sample=tma(k, EIGHT, LINE), v=tma(v, c.step, c.E), steepness=steepness, lo=lo,
            hi=hi, row_list=row_list, row_counts=row_counts, drawn=drawn, out=out, lam=lam, support=support,
            certified=certified, scale=scale, near=near, offset=offset, few=few,
        )  # fmt: skip
        self.launch(arguments, blocks, stream)

    def layouts(self) -> tuple[Any, Any, Any]:
        """The layouts of Q and of the rings of K and V."""
        c = self.config
        return (
            tile_layout(self.dtype, TILE, c.D, c.groups), tile_layout(self.dtype, c.step, c.D, c.k_stages),
            tile_layout(self.dtype, c.step, c.E, c.v_stages),
        )  # fmt: skip

    def memory(self) -> dict[str, Any]:
        c = self.config
        q, k, v = (tile_memory(self.dtype, x) for x in self.layouts())
        return {
            **barriers(items=2, k=c.k_stages, v=c.v_stages, decided=1), "item": array(Int32, len(TileItem) * 2),
            "decision": array(Int32, 1), "q": q, "k": k, "v": v,
            "o": array(Float32, TILE * c.E * (c.groups - 1), 128),
            "sums": array(Float32, 2 * TILE * SUMS * c.groups, 128),
        }  # fmt: skip

    def block(self, arguments: LongRowsArguments, memory: Any) -> LongRowsBlock:
        c = self.config
        q, k, v = self.layouts()
        warps = 4 * c.groups
        items, decided = ring_of(memory, "items", 2, 1, warps), ring_of(memory, "decided", 1, 1, 1)
        k_ring, v_ring = ring_of(memory, "k", c.k_stages, 1, warps), ring_of(memory, "v", c.v_stages, 1, warps)
        return LongRowsBlock(
            config=c, arguments=arguments, rings=((items,), (k_ring,), (v_ring,), (decided,)), items=items, k=k_ring,
            v=v_ring, decided=decided, s_item=words(memory.item, len(TileItem), 2),
            s_decided=words(memory.decision, 1), s_q=tiles(memory.q, q), s_k=tiles(memory.k, k),
            s_v=tiles(memory.v, v), s_o=words(memory.o, WARPGROUP, c.E // 2, c.groups - 1),
            s_sums=words(memory.sums, TILE, SUMS, c.groups, 2),
        )  # fmt: skip

    @cute.jit
    def serve(self, block, warp):
        """Draw items and load tiles, by one warp."""
        if warp == 0:
            Producer(block).run()

    @cute.jit
    def compute(self, block):
        Consumer(block, computing_thread()).run()
