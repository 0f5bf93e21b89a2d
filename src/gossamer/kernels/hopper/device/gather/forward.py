"""The forward kernel of gathered columns: 64 query rows, and the keys that any of them keeps.

Of the first warpgroup one warp takes items and loads Q by TMA, one stores finished outputs, and two gather K and V; the
second computes as that of the forward kernel of block layouts does. Two or three blocks share a multiprocessor.
"""

from __future__ import annotations

from dataclasses import dataclass
from typing import Any, NamedTuple

import cutlass.cute as cute
from cutlass import Float32, Int32

from gossamer.kernels.hopper.device.common import NUMBERS, ROWS, WARPGROUP, Opaque, Ring, computing_thread
from gossamer.kernels.hopper.device.configurations import Hold
from gossamer.kernels.hopper.device.forward.consume import Consumer, Plan
from gossamer.kernels.hopper.device.forward.masks import one
from gossamer.kernels.hopper.device.forward.produce import ItemLoader, ItemServer
from gossamer.kernels.hopper.device.forward.results import Results, Storer
from gossamer.kernels.hopper.device.forward.softmax import Scale, Softmax
from gossamer.kernels.hopper.device.gather.configurations import GatherConfig
from gossamer.kernels.hopper.device.gather.masks import WORDS, GatheredMask
from gossamer.kernels.hopper.device.gather.rows import THREADS, Gatherer, RowCopies, WordCopies, role_of
from gossamer.kernels.hopper.device.gather.serve import CopiedRing
from gossamer.kernels.hopper.device.row_items import ITEM, RowItem
from gossamer.kernels.hopper.device.shell import Shell, array, barriers, items_of, tile_memory, tiles, words
from gossamer.kernels.hopper.device.tiles import Tma, partition, tile_layout, tma
from gossamer.kernels.hopper.device.work import GatheredRows, ItemRing


class Arguments(NamedTuple):
    """The parameters of the kernel."""

    q: Tma
    out: Tma
    k: cute.Tensor
    v: cute.Tensor
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
    s_q: cute.Tensor
    s_k: cute.Tensor
    s_v: cute.Tensor
    k_at: Any
    v_at: Any

    @property
    def rings(self) -> Any:
        return (self.items,), (self.k, self.v)


class GatherForward(Shell):
    """The kernel of one configuration."""

    threads = 2 * WARPGROUP

    def __init__(self, config: GatherConfig) -> None:
        self.config = c = config
        self.dtype = NUMBERS[c.dtype]
        self.blocks, self.registers = c.blocks, c.registers
        self.plan = Plan(
            1, 1, ROWS, c.size, c.size, Hold.COMPILER, c.score, overlap_items=True, warpgroup_barrier=False,
            defer_epilogue=True, late_store=False, prefetch_mask=True,
            k_shows_v=True,  # a thread that gathers arrives when all that it has copied so far is complete
            half_steps=False,
        )  # fmt: skip

    @cute.jit
    def __call__(
        self,
        q: cute.Tensor,  # (B, H, Q, D)
        k: cute.Tensor,  # (B, G, K, D)
        v: cute.Tensor,  # (B, G, K, E)
        out: cute.Tensor,  # (B, H, Q, E)
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
        size = self.config.size
        arguments = Arguments(
            tma(q, ROWS, size), tma(out, ROWS, size, store=True), k, v, lse, work, indices, bits, sinks, part_out,
            part_lse, lengths, tile_counter, Scale(before, exponent), items, has_sinks,
        )  # fmt: skip
        self.launch(arguments, blocks, stream)

    def layout(self, stages: int) -> Any:
        return tile_layout(self.dtype, ROWS, self.config.size, stages)

    def memory(self) -> dict[str, Any]:
        c = self.config
        rows = tile_memory(self.dtype, self.layout(c.stages))
        return {
            **barriers(q=c.q_stages, k=c.stages, v=c.stages),
            "item": array(Int32, ITEM * c.q_stages), "words": array(Int32, 2 * c.stages * WORDS, 128),
            "q": tile_memory(self.dtype, self.layout(c.q_stages)), "k": rows, "v": rows,
        }  # fmt: skip

    def block(self, arguments: Arguments, memory: Any) -> Block:
        c = self.config
        readers = 1 + THREADS // 32  # the storing and the gathering warps
        q, k, v = [
            tiles(x, self.layout(n)) for x, n in ((memory.q, c.q_stages), (memory.k, c.stages), (memory.v, c.stages))
        ]
        return Block(
            arguments, items_of(memory, "q", c.q_stages, readers), CopiedRing.of(memory, "k", c.stages),
            CopiedRing.of(memory, "v", c.stages),
            words(memory.words, ROWS, 2, 2 * c.stages), q, k, v, memory.k.data_ptr(), memory.v.data_ptr(),
        )  # fmt: skip

    @cute.jit
    def serve(self, block, warp):
        c, a = self.config, block.arguments
        role = role_of(warp, c.blocks)
        if role == 0:
            work = GatheredRows(a.items, a.tile_counter, a.count, a.indices, a.lengths, c.lengths)
            size = ROWS * c.size * self.dtype.width // 8
            items = ItemLoader(block.items, 1, a.q.atom, *partition(a.q, block.s_q, ROWS, c.size), size)
            ItemServer(work, items).run()
        elif role == 1:
            Storer(block.items, None, a.out, block.s_q, 1, 0, True).run()  # the output takes the place of Q
        else:
            self.gatherer(block).run()

    def gatherer(self, block: Block) -> Gatherer:
        a, size = block.arguments, self.config.size
        thread, _, _ = cute.arch.thread_idx()
        thread = thread % THREADS
        keys = RowCopies.of(a.k, block.k, block.k_at, size, thread)
        values = RowCopies.of(a.v, block.v, block.v_at, size, thread)
        ratio = cute.size(a.q.tensor, mode=[2]) // cute.size(a.k, mode=[1])
        return Gatherer(block.items, a.indices, keys, values, WordCopies(a.words, block.words, thread), ratio)

    @cute.jit
    def compute(self, block):
        c, a, thread = self.config, block.arguments, computing_thread()
        fetched = one()
        fetched.fill(0)
        scratch = block.items.item[RowItem.SCRATCH, None]
        softmax = Softmax.of(self.plan, a.scale, thread, block.s_q, block.s_k, scratch)
        mask = GatheredMask.of(block.items.item, block.k, fetched, block.words, 2 * c.stages, thread, c.lengths)
        rows = cute.size(a.q.tensor, mode=[0])
        results = Results(a.lse, a.sinks, a.has_sinks, a.part_out, a.part_lse, rows)
        Consumer.of(self.plan, block.items, block.k, block.v, mask, softmax, results, block.s_v, block.s_q).run()
