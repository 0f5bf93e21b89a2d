"""dQ by a walk over query tiles, without float32 sums in memory: for a deterministic backward.

Roles as in the forward kernel: one producer warp (items, Q and dO of a tile, rings of K and V), and for each 64 query
rows a warpgroup, which computes S = Q K^T, dP = dO V^T, dS = P (dP - delta) and dQ += dS K with dS from registers.
"""

from __future__ import annotations

from typing import Any

import cutlass
import cutlass.cute as cute
from cutlass import Float32, Int32, const_expr

from gossamer.kernels.hopper.device.backward.query_consume import QueryConsumer
from gossamer.kernels.hopper.device.backward.row_masks import TileRowMasks
from gossamer.kernels.hopper.device.backward.warpgroup import Factors, Lists
from gossamer.kernels.hopper.device.common import NUMBERS, ROWS, WARPGROUP, Opaque
from gossamer.kernels.hopper.device.row_items import ITEM, RowItem
from gossamer.kernels.hopper.device.shell import Block, Shell, array, barriers, items_of, ring_of, tile_memory, tiles
from gossamer.kernels.hopper.device.tiles import partition, tile_layout, tile_loader, tma
from gossamer.kernels.hopper.device.work import TileRows


class ItemTiles(Opaque):
    """What loads Q and dO of an item, by TMA."""

    def __init__(self, block: Any) -> None:
        a, tiles, self.config, self.ring = block.arguments, block.tiles, block.config, block.q
        self.groups, self.q, self.dout = self.config.block_q // ROWS, a.q.atom, a.dout.atom
        self.q_to, self.q_from = partition(a.q, tiles.q, ROWS, self.config.D)
        self.do_to, self.do_from = partition(a.dout, tiles.dout, ROWS, self.config.E)

    @cute.jit
    def load(self, turn, item):
        """Fill the ring's stage, which is empty; returns the item's batch element and head."""
        batch, head, tile = item[RowItem.BATCH, 0], item[RowItem.HEAD, 0], item[RowItem.TILE, 0]
        size, full = const_expr(2 * ROWS * (self.config.D + self.config.E) * self.groups), self.ring.full
        with cute.arch.elect_one():
            cute.arch.mbarrier_arrive_and_expect_tx(full, size)
        for g in cutlass.range_constexpr(self.groups):
            at = tile * self.groups + g
            cute.copy(self.q, self.q_from[None, at, head, batch], self.q_to[None, g], tma_bar_ptr=full)
            cute.copy(self.dout, self.do_from[None, at, head, batch], self.do_to[None, g], tma_bar_ptr=full)
        return batch, head


class QueryGradient(Shell):
    """The kernel of one configuration."""

    ahead = 0  # descriptions of items for warps that gather
    words = 0  # of shared memory, which mask steps of gathered columns

    def __init__(self, config: Any) -> None:
        self.config = c = config
        self.groups = c.block_q // ROWS
        self.threads = WARPGROUP * (self.groups + 1)
        self.registers = {1: (24, 232), 2: (40, 232), 3: (32, 160)}[self.groups]
        self.blocks = c.blocks_per_processor
        self.carveout = 100 if self.blocks > 1 else None

    @cute.jit
    def __call__(
        self,
        q: cute.Tensor,  # (B, H, Q, D)
        k: cute.Tensor,  # (B, G, K, D)
        v: cute.Tensor,  # (B, G, K, E)
        dout: cute.Tensor,  # (B, H, Q, E)
        terms: cute.Tensor,  # (2, B, H, Qp) float32: lse in base 2, delta
        dq: cute.Tensor,  # (B, H, Q, D)
        work: cute.Tensor,  # (n, ITEM) int32, as for the forward
        lists: cute.Tensor,  # (2, n): tile column, pool entry
        lo: cute.Tensor,  # (Bl * Hl, Q)
        hi: cute.Tensor,
        pool: cute.Tensor,  # (P * block_q, block_kv / 32)
        part_dq: cute.Tensor,  # (slots, block_q, D) float32, without the scale
        lengths: cute.Tensor | None,  # (B,) int32, None without `lengths` in the configuration
        tile_counter: cute.Tensor,  # (1,) int32: items taken; zero before and after
        before: Float32,  # factor of a score before the soft cap
        exponent: Float32,  # factor of a score in exp2
        factor: Float32,  # the scale
        items: Int32,
        blocks: Int32,
        stream: Any,
    ) -> None:
        c = self.config
        self.start(
            blocks, stream, q=tma(q, ROWS, c.D), dout=tma(dout, ROWS, c.E), k=tma(k, c.step, c.D),
            v=tma(v, c.step, c.E), dq=tma(dq, ROWS, c.D, store=True), terms=terms, items=work,
            lists=Lists(lists, lo, hi, pool), part_dq=part_dq, lengths=lengths, tile_counter=tile_counter,
            factors=Factors(before, exponent, factor), count=items,
        )  # fmt: skip

    def layouts(self) -> dict[str, Any]:
        """Of the tiles in shared memory."""
        c, dtype = self.config, NUMBERS[self.config.dtype]
        return {
            "q": tile_layout(dtype, ROWS, c.D, self.groups), "dout": tile_layout(dtype, ROWS, c.E, self.groups),
            "k": tile_layout(dtype, c.step, c.D, c.k_stages), "v": tile_layout(dtype, c.step, c.E, c.v_stages),
        }  # fmt: skip

    def memory(self) -> dict[str, Any]:
        c = self.config
        return {
            **barriers(q=1, ahead=self.ahead, k=c.k_stages, v=c.v_stages), "item": array(Int32, ITEM),
            "ahead": array(Int32, ITEM * self.ahead), "words": array(Int32, self.words, 128),
            **{name: tile_memory(NUMBERS[c.dtype], layout) for name, layout in self.layouts().items()},
        }  # fmt: skip

    def block(self, arguments: Any, memory: Any) -> Block:
        c, q = self.config, items_of(memory, "q", 1, self.groups)
        held = Block(**{name: tiles(getattr(memory, name), layout) for name, layout in self.layouts().items()})
        k, v = [ring_of(memory, x, n, 1, 4 * self.groups) for x, n in (("k", c.k_stages), ("v", c.v_stages))]
        return Block(
            config=c, arguments=arguments, tiles=held, item=q.item[None, 0],
            q=q,  # with Q and dO of an item
            k=k, v=v, rings=((q,), (k,), (v,)),
        )  # fmt: skip

    @cute.jit
    def serve(self, block, warp):
        if warp == 0:
            self.produce(block)

    @cute.jit
    def compute(self, block):
        QueryConsumer(block, TileRowMasks(block)).consume()

    @cute.jit
    def produce(self, block):
        """The producer warp: items with their Q and dO, then K and V of each step."""
        c, a, item = self.config, block.arguments, block.item
        steps = c.block_kv // c.step  # of a tile
        ratio = cute.size(a.q.tensor, mode=[2]) // cute.size(a.k.tensor, mode=[2])
        own = ItemTiles(block)
        load_k = tile_loader(block.k, a.k, block.tiles.k, c.step, c.D)
        load_v = tile_loader(block.v, a.v, block.tiles.v, c.step, c.E)
        columns = a.lists.entries[0, None]
        work = TileRows(a.items, a.tile_counter, a.count, columns, a.lengths, c.block_kv, c.lengths)
        word = work.first()
        turn, kv = Int32(0), Int32(0)  # items, steps so far
        running = Int32(1)
        while running != 0:
            block.q.describe(turn, word)
            running = item[RowItem.VALID]
            turn += 1
            if running != 0:
                batch, head = own.load(turn, block.q.item)
                group = head // ratio
                fulls, intervals = item[RowItem.FULL_COUNT], item[RowItem.INTERVAL_COUNT]
                at_full, at_interval = item[RowItem.FULL_START], item[RowItem.INTERVAL_START] - fulls
                at_bits = item[RowItem.BITS_START] - fulls - intervals
                count = fulls + intervals + item[RowItem.BITS_COUNT]
                for i in cutlass.range(count, unroll=1):
                    at = i + (at_full if i < fulls else (at_interval if i < fulls + intervals else at_bits))
                    column = columns[at]
                    for part in cutlass.range_constexpr(steps):
                        load_k.load(kv, column * steps + part, group, batch)
                        load_v.load(kv, column * steps + part, group, batch)
                        kv += 1
                word = work.next()
            else:
                with cute.arch.elect_one():
                    cute.arch.mbarrier_arrive(block.q.full)
