"""The forward kernel of gathered columns for float32: 64 query rows, and the keys that any of them keeps.

As gather/forward.py, but what is gathered are rows that were split before, with their powers; Q is split where it is
used, and results go straight to memory. A launch is two kernels: the first splits the rows of K and V.
"""

from __future__ import annotations

from typing import Any

import cutlass.cute as cute
from cutlass import Float16, Float32, Int32

from gossamer.kernels.hopper.device.common import ROWS, WARPGROUP, Block, computing_thread, named
from gossamer.kernels.hopper.device.forward.produce import ItemLoader
from gossamer.kernels.hopper.device.gather.configurations import GatherConfig
from gossamer.kernels.hopper.device.gather.float32.consume import Float32Consumer
from gossamer.kernels.hopper.device.gather.float32.rows import HalfRows, StepData
from gossamer.kernels.hopper.device.gather.float32.split import SplitRows
from gossamer.kernels.hopper.device.gather.masks import WORDS
from gossamer.kernels.hopper.device.gather.rows import role_of
from gossamer.kernels.hopper.device.gather.serve import Server
from gossamer.kernels.hopper.device.row_items import ITEM, RowItem
from gossamer.kernels.hopper.device.shell import Shell, array, barriers, items_of, ring_of, tile_memory, tiles, words
from gossamer.kernels.hopper.device.tiles import tile_layout, tma
from gossamer.kernels.hopper.device.work import GatheredRows


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
        q: cute.Tensor,  # (B, H, Q, D) float32
        k: cute.Tensor,  # (B, G, K, D) float32
        v: cute.Tensor,  # (B, G, K, E) float32
        k_halves: cute.Tensor,  # (B, G, K, 2 size) float16, written before it is read, as are the two that follow
        v_halves: cute.Tensor,  # (B, G, K, 2 size) float16
        powers: cute.Tensor,  # (B, G, K, 2) float32
        out: cute.Tensor,  # (B, H, Q, E) float32
        lse: cute.Tensor,  # (B, H, Q) float32
        work: cute.Tensor,  # (n, ITEM) int32
        indices: cute.Tensor,  # (columns,) int32
        bits: cute.Tensor,  # (columns / 32, 64) int32
        sinks: cute.Tensor,  # (H,) float32
        part_out: cute.Tensor,  # (slots, 64, E) float32
        part_lse: cute.Tensor,  # (slots, 64) float32
        lengths: cute.Tensor,  # (B,) int32; not read without `lengths` in the configuration
        tile_counter: cute.Tensor,  # (1,) int32: items taken; zero before and after
        before: Float32,  # factor of a score before the soft cap, or one that is not positive
        exponent: Float32,  # factor of a score in exp2
        items: Int32,
        has_sinks: Int32,
        blocks: Int32,
        stream: Any,
    ) -> None:
        self.split(k, v, k_halves, v_halves, powers, stream)
        arguments = named(
            q=tma(q, ROWS, self.config.size), k=k_halves, v=v_halves, powers=powers, out=out, lse=lse, work=work,
            indices=indices, bits=bits, sinks=sinks, part_out=part_out, part_lse=part_lse, lengths=lengths,
            tile_counter=tile_counter, before=before, exponent=exponent, count=items, has_sinks=has_sinks,
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

    def block(self, arguments: Any, memory: Any) -> Block:
        a, c = arguments, self.config
        q, k = self.layouts()
        items = items_of(memory, "q", c.q_stages, 4 + 3)  # the warps that compute and gather
        k_ring, v_ring = ring_of(memory, "k", c.stages, 64, 4), ring_of(memory, "v", c.stages, 32, 4)
        return Block(
            **a._asdict(), config=c, rings=((items,), (k_ring, v_ring)), items=items, k_ring=k_ring,
            v_ring=v_ring, s_words=words(memory.words, ROWS, 2, 2 * c.stages),
            s_powers=words(memory.powers, 2, ROWS, 2 * c.stages),  # of a step's keys and values
            s_q=tiles(memory.q, q), s_k=tiles(memory.k, k), s_v=tiles(memory.v, k),
        )  # fmt: skip

    @cute.jit
    def serve(self, block, warp):
        b, c = block, self.config
        ratio = cute.size(b.q.tensor, mode=[2]) // cute.size(b.k, mode=[1])
        role = role_of(warp, c.blocks)
        if role == 0:
            work = GatheredRows(b.work, b.tile_counter, b.count, b.indices, b.lengths, c.lengths)
            Server(work, None, b.items, ItemLoader(b), RowItem.VALID).run()
        elif role == 1:
            StepData(b, ratio).run()
        elif role == 2:
            HalfRows(b, b.k, b.k_ring, b.s_k.iterator, ratio).run()
        else:
            HalfRows(b, b.v, b.v_ring, b.s_v.iterator, ratio).run()

    @cute.jit
    def compute(self, block):
        Float32Consumer(block, computing_thread(0)).run()
