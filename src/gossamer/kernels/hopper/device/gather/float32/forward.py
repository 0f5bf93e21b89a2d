"""The forward kernel of gathered columns for float32: 64 query rows, and the keys that any of them keeps.

As gather/forward.py, but what is gathered are rows that were split before, with their powers; Q is split where it is
used, and results go straight to memory. A launch is two kernels: the first splits the rows of K and V.

A proximity graph of 131,072 points, 8 heads of 64, takes 1.10 ms on an H200, groups of one row by Triton 2.44
(docs/lab/2026-11-22-gather.md).
"""

from __future__ import annotations

from typing import Any

import cutlass.cute as cute
from cutlass import Float16, Float32, Int32

from gossamer.cute.common import ROWS, WARPGROUP, computing_thread
from gossamer.cute.row_items import ITEM, RowItem
from gossamer.cute.shell import Shell, array, barriers, items_of, ring_of, tile_memory, tiles, words
from gossamer.cute.tiles import tile_layout, tma
from gossamer.cute.work import GatheredRows
from gossamer.kernels.hopper.device.forward.produce import ItemLoader
from gossamer.kernels.hopper.device.gather.block import Float32Arguments, Float32Block
from gossamer.kernels.hopper.device.gather.configurations import GatherConfig
from gossamer.kernels.hopper.device.gather.float32.consume import Float32Consumer
from gossamer.kernels.hopper.device.gather.float32.rows import HalfRows, StepData
from gossamer.kernels.hopper.device.gather.float32.split import SplitRows
from gossamer.kernels.hopper.device.gather.masks import WORDS
from gossamer.kernels.hopper.device.gather.rows import role_of
from gossamer.kernels.hopper.device.gather.serve import Server


class Float32Forward(Shell):
    """The kernel of one configuration."""

    threads = 2 * WARPGROUP

    def __init__(self, config: GatherConfig) -> None:
        self.config = config
        self.blocks, self.registers = config.blocks, config.registers
        self.split = SplitRows(config.size)

    @cute.jit
    def __call__(
        self,
        q: cute.Tensor, k: cute.Tensor, v: cute.Tensor, k_halves: cute.Tensor, v_halves: cute.Tensor,
        powers: cute.Tensor, out: cute.Tensor, lse: cute.Tensor, work: cute.Tensor, indices: cute.Tensor,
        bits: cute.Tensor, sinks: cute.Tensor, part_out: cute.Tensor, part_lse: cute.Tensor, lengths: cute.Tensor,
        tile_counter: cute.Tensor, before: Float32, exponent: Float32, items: Int32, has_sinks: Int32, blocks: Int32,
        stream: Any,
    ) -> None:  # fmt: skip
        """As in `Float32Arguments`, but k and v are float32; halves and powers are written before they are read."""
        self.split(k, v, k_halves, v_halves, powers, stream)
        arguments = Float32Arguments(
            q=tma(q, ROWS, self.config.size), k=k_halves, v=v_halves, powers=powers, out=out, lse=lse, work=work,
            indices=indices, bits=bits, sinks=sinks, part_out=part_out, part_lse=part_lse, lengths=lengths,
            tile_counter=tile_counter, before=before, exponent=exponent, items=items, has_sinks=has_sinks,
        )  # fmt: skip
        self.launch(arguments, blocks, stream)

    def layouts(self) -> tuple[Any, Any]:
        """Of the rings of Q, and of K and V."""
        c = self.config
        return tile_layout(Float32, ROWS, c.size, c.q_stages), tile_layout(Float16, ROWS, 2 * c.size, c.stages)

    def memory(self) -> dict[str, Any]:
        c = self.config
        q, k = self.layouts()
        return {
            **barriers(q=c.q_stages, k=c.stages, v=c.stages), "item": array(Int32, ITEM * c.q_stages),
            "words": array(Int32, 2 * c.stages * WORDS, 128), "powers": array(Float32, 2 * c.stages * 2 * ROWS, 128),
            "q": tile_memory(Float32, q), "k": tile_memory(Float16, k), "v": tile_memory(Float16, k),
        }  # fmt: skip

    def block(self, arguments: Float32Arguments, memory: Any) -> Float32Block:
        c = self.config
        q, k = self.layouts()
        items = items_of(memory, "q", c.q_stages, 4 + 3)  # the warps that compute and gather
        k_ring, v_ring = ring_of(memory, "k", c.stages, 64, 4), ring_of(memory, "v", c.stages, 32, 4)
        return Float32Block(
            config=c, arguments=arguments, rings=((items,), (k_ring, v_ring)), items=items, k=k_ring, v=v_ring,
            s_words=words(memory.words, ROWS, 2, 2 * c.stages), s_powers=words(memory.powers, 2, ROWS, 2 * c.stages),
            s_q=tiles(memory.q, q), s_k=tiles(memory.k, k), s_v=tiles(memory.v, k),
        )  # fmt: skip

    @cute.jit
    def serve(self, block, warp):
        a, c = block.arguments, self.config
        ratio = cute.size(a.q.tensor, mode=[2]) // cute.size(a.k, mode=[1])
        role = role_of(warp, c.blocks)
        if role == 0:
            work = GatheredRows(a.work, a.tile_counter, a.items, a.indices, a.lengths, c.lengths)
            Server(work, None, block.items, ItemLoader(block), RowItem.VALID).run()
        elif role == 1:
            StepData(block, ratio).run()
        elif role == 2:
            HalfRows(block, a.k, block.k, block.s_k.iterator, ratio).run()
        else:
            HalfRows(block, a.v, block.v, block.s_v.iterator, ratio).run()

    @cute.jit
    def compute(self, block):
        Float32Consumer(block, computing_thread(0)).run()
