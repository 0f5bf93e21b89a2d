"""The forward kernel: warp-specialised, persistent, one walk of a layout's rows.

One block per multiprocessor. Warp 0 of the first warpgroup is the producer: it takes work items, publishes each one's
description in shared memory, and keeps the rings of Q, K and V filled by TMA. Warps 1, 2, 3 store finished outputs.
Each other warpgroup owns 64 query rows: S = Q K^T and O += P V by wgmma, P from registers, softmax of one step
overlapped with the products of the next one, also from one item to the next, and the warpgroups take turns at the
tensor cores (named barriers).
"""

from __future__ import annotations

from dataclasses import dataclass
from typing import Any, NamedTuple

import cutlass.cute as cute
from cutlass import Float32, Int32

from gossamer.kernels.hopper.device.common import NUMBERS, ROWS, WARPGROUP, Opaque, Ring, computing_thread
from gossamer.kernels.hopper.device.configurations import ForwardConfig, Hold
from gossamer.kernels.hopper.device.forward.consume import Consumer, Plan
from gossamer.kernels.hopper.device.forward.masks import BlockMask, Bounds, Lists
from gossamer.kernels.hopper.device.forward.merge import Merge
from gossamer.kernels.hopper.device.forward.produce import ItemLoader, Producer
from gossamer.kernels.hopper.device.forward.results import Results, Storer
from gossamer.kernels.hopper.device.forward.softmax import Scale, Softmax
from gossamer.kernels.hopper.device.row_items import ITEM, RowItem
from gossamer.kernels.hopper.device.shell import Shell, array, barriers, items_of, ring_of, tile_memory, tiles, words
from gossamer.kernels.hopper.device.tiles import Tma, partition, tile_layout, tile_loader, tma
from gossamer.kernels.hopper.device.work import ItemRing, TileRows

REGISTERS = {(1, 1): (56, 240), (1, 2): (24, 232), (2, 1): (24, 240), (3, 1): (32, 160)}  # by warpgroups and blocks


class Arguments(NamedTuple):
    """The parameters of the kernel."""

    q: Tma
    k: Tma
    v: Tma
    out: Tma
    lse: cute.Tensor
    items: cute.Tensor
    lists: Lists
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
    bounds: cute.Tensor  # (block_q, 2, stages of Q): intervals of their rows
    s_q: cute.Tensor
    s_k: cute.Tensor
    s_v: cute.Tensor
    s_o: cute.Tensor

    @property
    def rings(self) -> Any:
        return (self.items,), (self.k, self.v)


class Forward(Shell):
    """The kernel of one configuration."""

    def __init__(self, config: ForwardConfig) -> None:
        self.config = c = config
        self.dtype = NUMBERS[c.dtype]
        self.groups = groups = c.block_q // ROWS
        self.threads = WARPGROUP * (groups + 1)
        self.blocks = c.blocks
        self.registers = REGISTERS[groups, c.blocks]
        parts = c.block_kv // c.step
        self.plan = Plan(
            groups, parts, c.step, c.D, c.E, c.hold, c.score,
            overlap_items=c.q_stages > 1,
            warpgroup_barrier=groups > 1,
            defer_epilogue=groups < 3,  # registers hold both results
            late_store=groups < 3 and c.hold == Hold.UNCHECKED,  # and in 16 bits beside O
            prefetch_mask=groups == 3,  # and that beside S
            k_shows_v=False,
            half_steps=c.halves and parts == 1 and c.step == 128,
        )  # fmt: skip
        self.merge = Merge(c.E, c.block_q)

    @cute.jit
    def __call__(
        self,
        q: cute.Tensor,  # (B, H, Q, D)
        k: cute.Tensor,  # (B, G, K, D)
        v: cute.Tensor,  # (B, G, K, E)
        out: cute.Tensor,  # (B, H, Q, E)
        lse: cute.Tensor,  # (B, H, Q) float32
        work: cute.Tensor,  # (n, ITEM) int32
        lists: cute.Tensor,  # (2, n): tile column, pool entry
        lo: cute.Tensor,  # (Bl * Hl, Q)
        hi: cute.Tensor,
        pool: cute.Tensor,  # (P * block_q, block_kv / 32)
        sinks: cute.Tensor,  # (H,) float32
        part_out: cute.Tensor,  # (slots, block_q, E) float32
        part_lse: cute.Tensor,  # (slots, block_q) float32
        merges: cute.Tensor,  # (m, MERGE) int32
        lengths: cute.Tensor,  # (B,) int32; not read without `lengths` in the configuration
        tile_counter: cute.Tensor,  # (1,) int32: items taken; zero before and after
        before: Float32,  # factor of a score before the soft cap
        exponent: Float32,  # factor of a score in exp2
        items: Int32,
        has_sinks: Int32,
        blocks: Int32,
        cut: Int32,  # whether rows are cut, and their parts merged by a second kernel
        stream: Any,
    ) -> None:
        c = self.config
        arguments = Arguments(
            tma(q, ROWS, c.D), tma(k, c.step, c.D), tma(v, c.step, c.E), tma(out, ROWS, c.E, store=True), lse, work,
            Lists(lists, lo, hi, pool), sinks, part_out, part_lse, lengths, tile_counter, Scale(before, exponent),
            items, has_sinks,
        )  # fmt: skip
        self.launch(arguments, blocks, stream)
        if cut != 0:
            self.merge(out, lse, part_out, part_lse, merges, sinks, has_sinks, stream)

    def layouts(self) -> tuple[Any, Any, Any]:
        """Of the rings of Q, K and V."""
        c, n = self.config, self.dtype
        q = tile_layout(n, ROWS, c.D, c.q_stages * self.groups)
        return q, tile_layout(n, c.step, c.D, c.stages), tile_layout(n, c.step, c.E, c.stages)

    def memory(self) -> dict[str, Any]:
        c = self.config
        q, k, v = self.layouts()
        return {
            **barriers(q=c.q_stages, k=c.stages, v=c.stages),
            "item": array(Int32, ITEM * c.q_stages), "bounds": array(Int32, 2 * c.block_q * c.q_stages),
            "q": tile_memory(self.dtype, q), "k": tile_memory(self.dtype, k), "v": tile_memory(self.dtype, v),
        }  # fmt: skip

    def block(self, arguments: Arguments, memory: Any) -> Block:
        c, warps = self.config, 4 * self.groups
        q, k, v = self.layouts()
        o = tile_layout(self.dtype, ROWS, c.E)
        # The output of a warpgroup takes the place of its Q.
        o_outer = cute.append(o.outer, cute.make_layout(c.q_stages * self.groups, stride=ROWS * c.D))
        return Block(
            arguments,
            items_of(memory, "q", c.q_stages, self.groups),
            ring_of(memory, "k", c.stages, 1, warps), ring_of(memory, "v", c.stages, 1, warps),
            words(memory.bounds, c.block_q, 2, c.q_stages),
            tiles(memory.q, q), tiles(memory.k, k), tiles(memory.v, v), memory.q.get_tensor(o_outer, swizzle=o.inner),
        )  # fmt: skip

    @cute.jit
    def serve(self, block, warp):
        if warp == 0:
            self.producer(block).run()
        elif warp <= self.groups:
            a, me = block.arguments, warp - 1
            bounds = Bounds(self.config, a.lists, block.items.item, block.bounds, me, cute.size(a.out.tensor, mode=[0]))
            overlap = self.plan.overlap_items
            Storer(block.items, bounds, a.out, block.s_o, self.groups, me, overlap).run()

    def producer(self, block: Block) -> Producer:
        c, a = self.config, block.arguments
        work = TileRows(
            a.items, a.tile_counter, a.count, a.lists.entries[0, None], a.lengths, c.block_kv, c.lengths
        )  # fmt: skip
        size = self.groups * ROWS * c.D * self.dtype.width // 8
        items = ItemLoader(
            block.items, self.groups, a.q.atom, *partition(a.q, block.s_q, ROWS, c.D), size
        )  # fmt: skip
        k, v = tile_loader(block.k, a.k, block.s_k, c.step, c.D), tile_loader(block.v, a.v, block.s_v, c.step, c.E)
        ratio = cute.size(a.q.tensor, mode=[2]) // cute.size(a.k.tensor, mode=[2])
        return Producer(c, work, items, k, v, ratio, self.plan.overlap_items)

    @cute.jit
    def compute(self, block):
        a, thread = block.arguments, computing_thread()
        scratch = block.items.item[RowItem.SCRATCH, None]
        softmax = Softmax.of(self.plan, a.scale, thread, block.s_q, block.s_k, scratch)
        mask = BlockMask.of(self.config, self.groups, thread, block.items.item, block.bounds, a.lists, a.lengths)
        rows = cute.size(a.q.tensor, mode=[0])
        results = Results(a.lse, a.sinks, a.has_sinks, a.part_out, a.part_lse, rows)
        Consumer.of(self.plan, block.items, block.k, block.v, mask, softmax, results, block.s_v, block.s_o).run()
