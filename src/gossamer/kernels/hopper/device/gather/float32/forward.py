"""The forward kernel of gathered columns for float32: 64 query rows, and the keys that any of them keeps.

As gather/forward.py, but what is gathered are rows that were split before, with their powers; Q is split where it is
used, and results go straight to memory. A launch is two kernels: the first splits the rows of K and V.
"""

from __future__ import annotations

from dataclasses import dataclass
from typing import Any, NamedTuple

import cutlass.cute as cute
from cutlass import Float16, Float32, Int32

from gossamer.kernels.hopper.device.common import ROWS, WARPGROUP, Opaque, Ring, computing_thread
from gossamer.kernels.hopper.device.forward.produce import ItemLoader, ItemServer
from gossamer.kernels.hopper.device.forward.results import Results
from gossamer.kernels.hopper.device.forward.softmax import Scale
from gossamer.kernels.hopper.device.gather.configurations import Float32Config
from gossamer.kernels.hopper.device.gather.float32.consume import Float32Consumer
from gossamer.kernels.hopper.device.gather.float32.rows import HalfRows, StepData
from gossamer.kernels.hopper.device.gather.float32.split import SplitRows
from gossamer.kernels.hopper.device.gather.masks import WORDS
from gossamer.kernels.hopper.device.gather.rows import LINE, role_of
from gossamer.kernels.hopper.device.row_items import ITEM
from gossamer.kernels.hopper.device.shell import Shell, array, barriers, items_of, ring_of, tile_memory, tiles, words
from gossamer.kernels.hopper.device.tiles import Tma, partition, tile_layout, tma
from gossamer.kernels.hopper.device.work import GatheredRows, ItemRing


class Arguments(NamedTuple):
    """The parameters of the kernel."""

    q: Tma
    k: cute.Tensor  # halves
    v: cute.Tensor
    powers: cute.Tensor
    out: cute.Tensor
    lse: cute.Tensor
    items: cute.Tensor
    indices: cute.Tensor
    words: cute.Tensor
    sinks: cute.Tensor
    part_out: cute.Tensor
    part_lse: cute.Tensor
    lengths: cute.Tensor
    tile_counter: cute.Tensor
    scale: Scale
    count: Int32  # of items
    has_sinks: Int32


@dataclass(frozen=True, eq=False)
class Block(Opaque):
    """What the roles of a block share."""

    arguments: Arguments
    items: ItemRing  # with Q
    k: Ring
    v: Ring
    words: cute.Tensor  # (64, 2, twice the stages): a step's mask
    powers: cute.Tensor  # (2, 64, twice the stages): of a step's keys and values
    s_q: cute.Tensor
    s_k: cute.Tensor
    s_v: cute.Tensor
    memory: Any

    @property
    def rings(self) -> Any:
        return (self.items,), (self.k, self.v)


class Float32Forward(Shell):
    """The kernel of one configuration."""

    threads = 2 * WARPGROUP

    def __init__(self, config: Float32Config) -> None:
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
        before: Float32,  # factor of a score before the soft cap
        exponent: Float32,  # factor of a score in exp2
        items: Int32,
        has_sinks: Int32,
        blocks: Int32,
        stream: Any,
    ) -> None:
        self.split(k, v, k_halves, v_halves, powers, stream)
        arguments = Arguments(
            tma(q, ROWS, self.config.size), k_halves, v_halves, powers, out, lse, work, indices, bits, sinks, part_out,
            part_lse, lengths, tile_counter, Scale(before, exponent), items, has_sinks,
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

    def block(self, arguments: Arguments, memory: Any) -> Block:
        c = self.config
        q, k = self.layouts()
        return Block(
            arguments, items_of(memory, "q", c.q_stages, 4 + 3),  # the warps that compute and gather
            ring_of(memory, "k", c.stages, 64, 4), ring_of(memory, "v", c.stages, 32, 4),
            words(memory.words, ROWS, 2, 2 * c.stages), words(memory.powers, 2, ROWS, 2 * c.stages),
            tiles(memory.q, q), tiles(memory.k, k), tiles(memory.v, k), memory,
        )  # fmt: skip

    @cute.jit
    def serve(self, block, warp):
        c, a, m = self.config, block.arguments, block.memory
        ratio = cute.size(a.q.tensor, mode=[2]) // cute.size(a.k, mode=[1])
        lines = 4 * c.size // LINE
        role = role_of(warp, c.blocks)
        if role == 0:
            work = GatheredRows(a.items, a.tile_counter, a.count, a.indices, a.lengths, c.lengths)
            items = ItemLoader(block.items, 1, a.q.atom, *partition(a.q, block.s_q, ROWS, c.size), 4 * ROWS * c.size)
            ItemServer(work, items).run()
        elif role == 1:
            StepData(block.items, a.indices, a.words, a.powers, block.k, block.words, block.powers, ratio).run()
        elif role == 2:
            HalfRows(block.items, a.indices, a.k, block.k, m.k.data_ptr(), lines, ratio).run()
        else:
            HalfRows(block.items, a.indices, a.v, block.v, m.v.data_ptr(), lines, ratio).run()

    @cute.jit
    def compute(self, block):
        a, thread = block.arguments, computing_thread(0)
        shared = block.s_k, block.s_v, block.words, block.powers
        results = Results(a.lse, a.sinks, a.has_sinks, a.part_out, a.part_lse, cute.size(a.out, mode=[2]))
        at = block.memory.q.data_ptr().toint()
        Float32Consumer.of(
            self.config, thread, block.items, block.k, block.v, shared, a.scale, results, a.out, at
        ).run()
