"""dQ from dS that the column kernel has kept in memory: one product for each pair of tiles of 64 x 64.

One warp takes items, which are those of the rows of the layout, and loads 64 keys of K and their dS for each step. For
each 64 query rows a warpgroup adds dQ += dS K, both from shared memory. dQ leaves while the next item is computed.

It takes less than dQ by rows: 4.93 ms for 6.83, the whole backward of causal heads of 256, B 2, H 16, 8192 positions on
an H200 (docs/lab/2026-11-24-kept-ds.md).
"""

from __future__ import annotations

from typing import Any, NamedTuple

import cutlass
import cutlass.cute as cute
from cutlass import Float32, Int32, const_expr
from cutlass.cute.nvgpu import cpasync, warpgroup

from gossamer.cute import instructions
from gossamer.cute.clearing import KeptKeys, Landing, landing_of
from gossamer.cute.common import NUMBERS, ROWS, WARPGROUP, Barrier, Block, Opaque, Ring, computing_thread
from gossamer.cute.row_items import ITEM, RowItem
from gossamer.cute.shell import Shell, array, barriers, items_of, ring_of, tile_memory, tiles
from gossamer.cute.tiles import (
    Tma,
    accumulator,
    first_factor,
    issue,
    partition,
    product_of,
    second_factor,
    tile_layout,
    tma,
    transposed,
)
from gossamer.cute.work import ItemRing, TileRows
from gossamer.kernels.hopper.device.backward.common import OneProducer, put_part, put_tile
from gossamer.kernels.hopper.device.backward.keep import PAIR, QUERIES, pair_of, query_of
from gossamer.kernels.hopper.device.configurations import KeptConfig


class KeptArguments(NamedTuple):
    """The parameters of the kernel."""

    ds: cute.Tensor  # (pairs of tiles of 64 x 64, 64 * 64): see `keep`; those of a pair of the layout's by keys
    k: Tma  # (B, G, K, D)
    dq: Tma  # (B, H, Q, D)
    work: cute.Tensor  # (n, ITEM) int32, as for the forward, with `RowItem.PLACE`
    lists: cute.Tensor  # (1 or 2, entries) int32: tile column
    part_dq: cute.Tensor  # (slots, block_q, D) float32, without the scale
    lengths: cute.Tensor | None  # (B,) int32, None without `lengths` in the configuration
    tile_counter: cute.Tensor  # (1,) int32: items taken; zero before and after
    factor: Float32  # the scale
    items: Int32  # of `work`


class KeptBlock(Block):
    """What the roles of a block share."""

    arguments: KeptArguments
    items: ItemRing
    k: Ring  # K and dS of a step
    s_k: cute.Tensor  # (64, D, stages)
    s_ds: cute.Tensor  # (keys, queries, warpgroups * stages)
    s_dq: cute.Tensor  # (64, D, warpgroups)
    landing: Landing | None = None  # of tiles that are cleared, with lengths


class KeptConsumer(Opaque):
    """A warpgroup with 64 query rows of each item."""

    def __init__(self, block: KeptBlock) -> None:
        c = block.config
        self.block, self.thread, dtype = block, computing_thread(), NUMBERS[c.dtype]
        self.groups, self.steps = c.block_q // ROWS, c.block_kv // ROWS
        self.mma = product_of(dtype, c.D, transposed=True, first_transposed=True)
        self.ds = first_factor(self.mma, transposed(block.s_ds, ROWS, ROWS, self.groups * c.stages))
        self.k = second_factor(self.mma, transposed(block.s_k, ROWS, c.D, c.stages))
        self.acc = accumulator(self.mma, c.D)
        shape, strides = QUERIES
        rows = cute.make_layout((shape, c.D), stride=(strides, ROWS))
        self.s_dq = cute.composition(block.s_dq[None, None, self.thread.warpgroup], rows)

    @cute.jit
    def consume(self):
        """All items."""
        block, item = self.block, self.block.items.item
        turn, n = Int32(0), Int32(0)  # items, steps so far
        stage = block.items.wait_full_at(turn)
        running = item[RowItem.VALID, stage]
        while running != 0:
            batch, head = item[RowItem.BATCH, stage], item[RowItem.HEAD, stage]
            tile, slot = item[RowItem.TILE, stage], item[RowItem.SLOT, stage]
            count = item[RowItem.FULL_COUNT, stage] + item[RowItem.INTERVAL_COUNT, stage]
            count += item[RowItem.BITS_COUNT, stage]
            block.items.forget(stage)
            self.acc.fill(0.0)
            first = n
            for _ in cutlass.range(count * self.steps, unroll=1):
                self.step(n, first)
                n += 1
            warpgroup.wait_group(0)
            if n != first:
                block.k.release_at(n - 1)
            self.finish(batch, head, tile, slot)
            turn += 1
            stage = block.items.wait_full_at(turn)
            running = item[RowItem.VALID, stage]
        if self.thread.thread < 32:
            cute.arch.cp_async_bulk_wait_group(0, read=True)

    @cute.jit
    def step(self, n, first):
        """dQ += dS K of step `n`; the step before, if it is of the same item, has ended then."""
        stage = self.block.k.wait_full_at(n)
        ds = self.ds[None, None, None, stage * self.groups + self.thread.warpgroup]
        issue(self.mma, self.acc, ds, self.k[None, None, None, stage], True)
        warpgroup.wait_group(1)
        if n != first:
            self.block.k.release_at(n - 1)

    @cute.jit
    def finish(self, batch, head, tile, slot):
        """dQ of an item: times the scale, by TMA, or as a part of a split row."""
        a, thread, group = self.block.arguments, self.thread, self.thread.warpgroup
        if slot < 0:
            if thread.thread < 32:  # dQ of the item before has left
                cute.arch.cp_async_bulk_wait_group(0, read=True)
            instructions.multiply(self.acc, a.factor)
            put_tile(self.acc, self.mma, thread, self.s_dq, Barrier.Q_READ + group)
            cute.arch.fence_view_async_shared()
            cute.arch.barrier(barrier_id=Barrier.OUTPUT + group, number_of_threads=WARPGROUP)
            if thread.thread < 32:
                from_, to = partition(a.dq, self.block.s_dq, ROWS, self.block.config.D)
                cute.copy(a.dq.atom, from_[None, group], to[None, tile * self.groups + group, head, batch])
                cute.arch.cp_async_bulk_commit_group()
        else:
            place = thread.row % ROWS  # the second row of a thread is eight places on
            apart = const_expr(query_of(8) - query_of(0))
            put_part(self.acc, a.part_dq, slot, group * ROWS + query_of(place), thread.quad, apart)


class Kept(OneProducer, Shell):
    """The kernel of one configuration."""

    def __init__(self, config: KeptConfig) -> None:
        self.config, self.blocks, self.groups = config, config.blocks, config.block_q // ROWS
        self.threads = WARPGROUP * (self.groups + 1)
        self.registers = {1: (24, 232), 2: (40, 232), 3: (32, 160)}[self.groups]
        self.carveout = 100 if self.blocks > 1 else None

    @cute.jit
    def __call__(
        self,
        ds: cute.Tensor, k: cute.Tensor, dq: cute.Tensor, work: cute.Tensor, lists: cute.Tensor,
        part_dq: cute.Tensor, lengths: cute.Tensor | None, tile_counter: cute.Tensor, factor: Float32, items: Int32,
        blocks: Int32, stream: Any,
    ) -> None:  # fmt: skip
        """As in `KeptArguments`."""
        D = self.config.D
        arguments = KeptArguments(
            ds=ds, k=tma(k, ROWS, D), dq=tma(dq, ROWS, D, store=True), work=work, lists=lists, part_dq=part_dq,
            lengths=lengths, tile_counter=tile_counter, factor=factor, items=items,
        )  # fmt: skip
        self.launch(arguments, blocks, stream)

    def layouts(self) -> dict[str, Any]:
        """Of the tiles in shared memory."""
        c, dtype = self.config, NUMBERS[self.config.dtype]
        return {
            "k": tile_layout(dtype, ROWS, c.D, c.stages), "dq": tile_layout(dtype, ROWS, c.D, self.groups),
            "ds": tile_layout(dtype, ROWS, ROWS, self.groups * c.stages),
        }  # fmt: skip

    def memory(self) -> dict[str, Any]:
        return {
            **barriers(items=2, k=self.config.stages, landed=int(self.config.lengths)), "item": array(Int32, 2 * ITEM),
            **{name: tile_memory(NUMBERS[self.config.dtype], layout) for name, layout in self.layouts().items()},
        }  # fmt: skip

    def block(self, arguments: KeptArguments, memory: Any) -> KeptBlock:
        held = {f"s_{name}": tiles(getattr(memory, name), layout) for name, layout in self.layouts().items()}
        readers = 4 * self.groups
        items, k = items_of(memory, "items", 2, readers), ring_of(memory, "k", self.config.stages, 1, readers)
        landing = landing_of(memory, self.config.lengths)
        rings = (items,), (k,), *[(landing,)] * self.config.lengths
        return KeptBlock(
            config=self.config, arguments=arguments, items=items, k=k, rings=rings, landing=landing, **held
        )  # fmt: skip

    @cute.jit
    def compute(self, block):
        KeptConsumer(block).consume()

    @cute.jit
    def produce(self, block):
        """The producer warp: items, then K and dS of each step."""
        c, a, groups = self.config, block.arguments, self.groups
        steps = c.block_kv // ROWS
        ratio = cute.size(a.dq.tensor, mode=[2]) // cute.size(a.k.tensor, mode=[2])
        k_to, k_from = partition(a.k, block.s_k, ROWS, c.D)
        # Pairs of tiles as they lie in memory.
        pairs = cute.make_tensor(
            cute.recast_ptr(block.s_ds.iterator, dtype=NUMBERS[c.dtype]), cute.make_layout((PAIR, groups * c.stages))
        )
        copy_pair = cute.make_copy_atom(cpasync.CopyBulkG2SOp(), NUMBERS[c.dtype])
        columns = a.lists[0, None]
        kept = KeptKeys(a, c, cute.size(a.k.tensor, mode=[0]))
        work = TileRows(a.work, a.tile_counter, a.items, columns, a.lengths, c.block_kv, c.lengths)
        word = work.first()
        turn, n = Int32(0), Int32(0)  # items, steps so far
        running = Int32(1)
        while running != 0:
            block.items.publish(turn, word)
            turn += 1
            running = cute.arch.shuffle_sync(word, RowItem.VALID)
            if running != 0:
                batch = cute.arch.shuffle_sync(word, RowItem.BATCH)
                group = cute.arch.shuffle_sync(word, RowItem.HEAD) // ratio
                before = cute.arch.shuffle_sync(word, RowItem.PLACE)
                fulls = cute.arch.shuffle_sync(word, RowItem.FULL_COUNT)
                intervals = cute.arch.shuffle_sync(word, RowItem.INTERVAL_COUNT)
                count = fulls + intervals + cute.arch.shuffle_sync(word, RowItem.BITS_COUNT)
                at_full = cute.arch.shuffle_sync(word, RowItem.FULL_START)
                at_interval = cute.arch.shuffle_sync(word, RowItem.INTERVAL_START) - fulls
                at_bits = cute.arch.shuffle_sync(word, RowItem.BITS_START) - fulls - intervals
                kept.begin(batch, None, None)
                for i in cutlass.range(count, unroll=1):
                    at = i + (at_full if i < fulls else (at_interval if i < fulls + intervals else at_bits))
                    column = columns[at]
                    for part in cutlass.range_constexpr(steps):
                        stage = block.k.wait_empty_at(n)
                        full = told = block.k.full + stage
                        missing = kept.missing((column * steps + part) * ROWS, None, ROWS)
                        dirty = None
                        if const_expr(c.lengths):
                            dirty = cute.arch.vote_any_sync(missing != 0)
                            full = block.landing.target(told, dirty)
                        with cute.arch.elect_one():
                            cute.arch.mbarrier_arrive_and_expect_tx(full, 2 * (ROWS * c.D + groups * PAIR))
                        from_ = k_from[None, column * steps + part, group, batch]
                        cute.copy(a.k.atom, from_, k_to[None, stage], tma_bar_ptr=full)
                        for g in cutlass.range_constexpr(groups):
                            pair = pair_of(a.ds, ((before + at) * steps + part) * groups + g)
                            with cute.arch.elect_one():
                                cute.copy(copy_pair, pair, pairs[None, stage * groups + g], mbar_ptr=full)
                        if const_expr(c.lengths):  # noqa: SIM102
                            if dirty:
                                block.landing.clear(told, block.s_k[None, None, stage], missing)
                        n += 1
                word = work.next()
