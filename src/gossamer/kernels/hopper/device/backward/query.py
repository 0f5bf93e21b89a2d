"""dQ by a walk over query tiles, without float32 sums in memory: for a deterministic backward.

Roles as in the forward kernel: one producer warp (items, Q and dO of a tile, rings of K and V), and for each 64 query
rows a warpgroup, which computes S = Q K^T, dP = dO V^T, dS = P (dP - delta) and dQ += dS K with dS from registers.

Of tiles of 64 x 64 it takes less than sums in memory do: 13.5 ms for 19.3, the whole backward of 64-blocks of which
2.9 % are kept, D 128, H 8, 131,072 positions on an H200 (docs/lab/2026-11-22-hopper-backward.md).
"""

from __future__ import annotations

from typing import Any

import cutlass
import cutlass.cute as cute
from cutlass import Float32, Int32, const_expr
from cutlass.cute.nvgpu import warpgroup

from gossamer.cute import instructions
from gossamer.cute.clearing import KeptKeys, landing_of, looks_for_keys
from gossamer.cute.common import NUMBERS, ROWS, WARPGROUP, Barrier, Opaque, place_of
from gossamer.cute.row_items import ITEM, RowItem
from gossamer.cute.shell import Shell, array, barriers, items_of, ring_of, tile_memory, tiles
from gossamer.cute.tiles import (
    accumulator,
    copied_bytes,
    issue,
    partition,
    product_of,
    rows_of,
    tile_layout,
    tile_loader,
    tma,
    transposed,
)
from gossamer.cute.work import TileRows
from gossamer.kernels.hopper.device.backward.block import QueryArguments, QueryBlock, TileQueryBlock
from gossamer.kernels.hopper.device.backward.common import (
    Kind,
    OneProducer,
    clear,
    put_part,
    put_tile,
    send_tile,
    two_rows,
)
from gossamer.kernels.hopper.device.backward.masks import TileRowMasks


@cute.jit
def probabilities(scores: cute.Tensor, lse: cute.Tensor, exponent: Float32, capped: cutlass.Constexpr) -> None:
    """Scores to exp2(exponent * score - lse) in place, times the derivative of tanh where `capped`."""
    for j in cutlass.range_constexpr(cute.size(scores) // 4):
        for i in cutlass.range_constexpr(4 * j, 4 * j + 4):
            score = scores[i]
            p = cute.math.exp2(score * exponent - lse[i % 4 // 2], fastmath=True)
            if const_expr(capped):
                p = p * (1.0 - score * score)
            scores[i] = p


@cute.jit
def score_gradients(p: cute.Tensor, dp: cute.Tensor, delta: cute.Tensor, to: cute.Tensor) -> None:
    """dS = P (dP - delta) in 16 bits."""
    packed = cute.recast_tensor(to, Int32)
    for j in cutlass.range_constexpr(cute.size(packed) // 2):
        for r in cutlass.range_constexpr(instructions.ROWS):
            i = const_expr(4 * j + 2 * r)
            a, b = p[i] * (dp[i] - delta[r]), p[i + 1] * (dp[i + 1] - delta[r])
            packed[2 * j + r] = instructions.pack(a, b, to.element_type)


class QueryConsumer(Opaque):
    """A warpgroup with 64 query rows of each item. `masks` says what is kept of each step.

    A stage of the ring of Q is an item, with its dO; Q makes room for the item's dQ.
    """

    late = True  # dQ of a step ends in the next one, which gives its K back

    def __init__(self, block: QueryBlock, masks: Any) -> None:
        config = block.config
        self.config, self.block, self.item, self.masks, self.thread = config, block, block.item, masks, masks.thread
        dtype, group = NUMBERS[config.dtype], self.thread.warpgroup
        self.mma_s = product_of(dtype, config.step)
        self.mma_dq = product_of(dtype, config.D, transposed=True, registers=True)
        of_s, of_dq = self.mma_s.get_slice(0), self.mma_dq.get_slice(0)
        self.frag_q = of_s.make_fragment_A(of_s.partition_A(block.s_q))[None, None, None, group]
        self.frag_do = of_s.make_fragment_A(of_s.partition_A(block.s_dout))[None, None, None, group]
        self.frag_k = of_s.make_fragment_B(of_s.partition_B(block.s_k))
        self.frag_v = of_s.make_fragment_B(of_s.partition_B(block.s_v))
        k_transposed = transposed(block.s_k, config.step, config.D, block.k.stages)
        self.frag_kt = of_dq.make_fragment_B(of_dq.partition_B(k_transposed))
        self.frag_ds = of_dq.make_fragment_A(of_dq.partition_shape_A((ROWS, config.step)))
        self.acc_dq = accumulator(self.mma_dq, config.D)
        self.lse, self.delta = two_rows(Float32), two_rows(Float32)
        self.s_dq = block.s_q[None, None, group]

    @cute.jit
    def consume(self):
        """All items."""
        item, block = self.item, self.block
        turn, kv = Int32(0), Int32(0)  # items, steps so far
        block.q.wait_full(0, turn & 1)
        running = item[RowItem.VALID]
        while running != 0:
            batch, head, tile = item[RowItem.BATCH], item[RowItem.HEAD], item[RowItem.TILE]
            bounds = self.load_rows(batch, head, tile)
            self.prepare()
            self.acc_dq.fill(0.0)
            first = kv
            kv = self.masks.walk(self, bounds, kv)
            if const_expr(self.late):
                warpgroup.wait_group(0)
                if kv != first:
                    block.k.release_at(kv - 1)
            self.finish(batch, head)
            turn += 1
            block.q.wait_full(0, turn & 1)
            running = item[RowItem.VALID]

    def prepare(self) -> None:
        """What is to be done with an item's rows when they are there: nothing."""

    @cute.jit
    def load_rows(self, batch, head, tile):
        """Load the terms of this thread's rows, and what masks them; returns what `masks` has found of the item."""
        a, rows = self.block.arguments, rows_of(self.block.arguments.dq)
        bounds = self.masks.begin(batch)
        for r in cutlass.range_constexpr(instructions.ROWS):
            of_head, row = place_of(self.config, head, tile, self.thread.row + 8 * r)
            row = row if row < rows else rows - 1
            self.lse[r] = a.terms[0, batch, of_head, row]
            self.delta[r] = a.terms[1, batch, of_head, row]
            if const_expr(self.masks.has_bounds):
                self.masks.load_row(bounds, r, row)
        return bounds

    @cute.jit
    def step(self, kind: cutlass.Constexpr, kv, first, entry=None, part=None, column=None):
        """S and dP of step `kv` while dQ of the one before ends (the item's first has none); then dS, and dQ begins.

        entry: its tile, which is the column of one of intervals, the pool entry of one of bits; part: the step in it;
        column: the tile column, where the end of the keys matters besides.
        """
        c, block, a = self.config, self.block, self.block.arguments
        k_stage, k_phase = block.k.place(kv)
        v_stage, v_phase = block.v.place(kv)
        acc_s, acc_dp = accumulator(self.mma_s, c.step), accumulator(self.mma_s, c.step)
        words = cute.make_rmem_tensor((instructions.ROWS, c.step // 32), Int32)
        self.masks.load(words, kind, kv, entry, part, column)
        block.k.wait_full(k_stage, k_phase)
        # S = Q K^T
        issue(self.mma_s, acc_s, self.frag_q, self.frag_k[None, None, None, k_stage], False)
        block.v.wait_full(v_stage, v_phase)
        warpgroup.wait_group(1)
        if kv != first:
            block.k.release_at(kv - 1)
        # dP = dO V^T
        issue(self.mma_s, acc_dp, self.frag_do, self.frag_v[None, None, None, v_stage], False)
        warpgroup.wait_group(1)
        self.transform(acc_s, kv)
        probabilities(acc_s, self.lse, a.exponent, c.score == "softcap")
        if const_expr(kind is not Kind.FULL):
            clear(acc_s, words)
        warpgroup.wait_group(0)
        block.v.release_at(kv)
        self.score_gradients(acc_s, acc_dp, kv)
        # dQ += dS K
        issue(self.mma_dq, self.acc_dq, self.frag_ds, self.frag_kt[None, None, None, k_stage], True)

    @cute.jit
    def transform(self, scores, kv):
        """What is done to the scores of step `kv` beside their factor in exp2."""
        if const_expr(self.config.score == "softcap"):
            instructions.soft_cap(scores, self.block.arguments.before)

    @cute.jit
    def score_gradients(self, p, dp, kv):
        """dS of step `kv`."""
        score_gradients(p, dp, self.delta, self.frag_ds)

    @cute.jit
    def finish(self, batch, head):
        """dQ of an item: times the scale, by TMA, or as a part of a split row."""
        c, a, thread = self.config, self.block.arguments, self.thread
        tile, slot = self.item[RowItem.TILE], self.item[RowItem.SLOT]
        cute.arch.barrier(barrier_id=Barrier.Q_READ + thread.warpgroup, number_of_threads=WARPGROUP)
        if const_expr(c.clears):  # rows that keep nothing, whatever Q and dO hold there
            for i in instructions.places(self.acc_dq):
                self.acc_dq[i] = Float32(0.0) if self.lse[i % 4 // 2] == Float32.inf else self.acc_dq[i]
        if slot < 0:
            instructions.multiply(self.acc_dq, a.factor)
            put_tile(self.acc_dq, self.mma_dq, thread, self.s_dq)
            cute.arch.fence_view_async_shared()
        else:
            put_part(self.acc_dq, a.part_dq, slot, thread.row, thread.quad)
        cute.arch.barrier(barrier_id=Barrier.Q_READ + thread.warpgroup, number_of_threads=WARPGROUP)
        if thread.thread < 32:
            if slot < 0:
                send_tile(a.dq, self.s_dq, c.D, tile * (c.block_q // ROWS) + thread.warpgroup, head, batch)
            cute.arch.sync_warp()
            with cute.arch.elect_one():
                cute.arch.mbarrier_arrive(self.block.q.empty)


class ItemTiles(Opaque):
    """What loads Q and dO of an item, by TMA."""

    def __init__(self, block: QueryBlock) -> None:
        a, self.config, self.ring = block.arguments, block.config, block.q
        self.groups, self.q, self.dout = self.config.block_q // ROWS, a.q.atom, a.dout.atom
        self.q_to, self.q_from = partition(a.q, block.s_q, ROWS, self.config.D)
        self.do_to, self.do_from = partition(a.dout, block.s_dout, ROWS, self.config.E)
        self.bytes = self.groups * (copied_bytes(self.q_to) + copied_bytes(self.do_to))  # of an item

    @cute.jit
    def load(self, turn, item):
        """Fill the ring's stage, which is empty; returns the item's batch element and head."""
        batch, head, tile = item[RowItem.BATCH, 0], item[RowItem.HEAD, 0], item[RowItem.TILE, 0]
        full = self.ring.full
        with cute.arch.elect_one():
            cute.arch.mbarrier_arrive_and_expect_tx(full, self.bytes)
        for g in cutlass.range_constexpr(self.groups):
            at = tile * self.groups + g
            cute.copy(self.q, self.q_from[None, at, head, batch], self.q_to[None, g], tma_bar_ptr=full)
            cute.copy(self.dout, self.do_from[None, at, head, batch], self.do_to[None, g], tma_bar_ptr=full)
        return batch, head


class QueryGradient(OneProducer, Shell):
    """The kernel of one configuration."""

    block_class: type[QueryBlock] = TileQueryBlock
    ahead = 0  # descriptions of items for warps that gather
    words = 0  # of shared memory, which mask steps of gathered columns

    def __init__(self, config: Any) -> None:
        self.config = c = config
        self.groups = c.block_q // ROWS
        self.threads = WARPGROUP * (self.groups + 1)
        self.registers = {1: (24, 232), 2: (40, 232), 3: (32, 160)}[self.groups]
        self.blocks = c.blocks
        self.carveout = 100 if self.blocks > 1 else None
        self.lands = looks_for_keys(c)  # tiles of K and V at a barrier of their own, where rows of them are cleared

    @cute.jit
    def __call__(
        self,
        q: cute.Tensor, k: cute.Tensor, v: cute.Tensor, dout: cute.Tensor, terms: cute.Tensor, dq: cute.Tensor,
        work: cute.Tensor, lists: cute.Tensor, lo: cute.Tensor, hi: cute.Tensor, pool: cute.Tensor,
        part_dq: cute.Tensor, lengths: cute.Tensor | None, tile_counter: cute.Tensor, before: Float32,
        exponent: Float32, factor: Float32, items: Int32, blocks: Int32, stream: Any,
    ) -> None:  # fmt: skip
        """As in `QueryArguments`."""
        c = self.config
        arguments = QueryArguments(
            q=tma(q, ROWS, c.D), dout=tma(dout, ROWS, c.E), k=tma(k, c.step, c.D),
            v=tma(v, c.step, c.E), dq=tma(dq, ROWS, c.D, store=True), terms=terms, work=work,
            lists=lists, lo=lo, hi=hi, pool=pool, part_dq=part_dq, lengths=lengths, tile_counter=tile_counter,
            before=before, exponent=exponent, factor=factor, items=items,
        )  # fmt: skip
        self.launch(arguments, blocks, stream)

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
            **barriers(q=1, ahead=self.ahead, k=c.k_stages, v=c.v_stages, landed=int(self.lands)),
            "item": array(Int32, ITEM), "ahead": array(Int32, ITEM * self.ahead),
            "words": array(Int32, self.words, 128),
            **{name: tile_memory(NUMBERS[c.dtype], layout) for name, layout in self.layouts().items()},
        }  # fmt: skip

    def block(self, arguments: Any, memory: Any) -> Any:
        c, q = self.config, items_of(memory, "q", 1, self.groups)
        held = {f"s_{name}": tiles(getattr(memory, name), layout) for name, layout in self.layouts().items()}
        k, v = [ring_of(memory, x, n, 1, 4 * self.groups) for x, n in (("k", c.k_stages), ("v", c.v_stages))]
        landing = landing_of(memory, self.lands)
        return self.block_class(
            config=c, arguments=arguments, rings=((q,), (k,), (v,), *[(landing,)] * self.lands), q=q, k=k, v=v,
            item=q.item[None, 0], landing=landing, **held,
        )  # fmt: skip

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
        load_k = tile_loader(block.k, a.k, block.s_k, c.step, c.D, block.landing)
        load_v = tile_loader(block.v, a.v, block.s_v, c.step, c.E, block.landing)
        kept = KeptKeys(a, c, cute.size(a.k.tensor, mode=[0]), cute.size(a.q.tensor, mode=[0]))
        columns = a.lists[0, None]
        work = TileRows(a.work, a.tile_counter, a.items, columns, a.lengths, c.block_kv, c.lengths)
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
                kept.begin(batch, item[RowItem.LEAD], intervals)
                for i in cutlass.range(count, unroll=1):
                    at = i + (at_full if i < fulls else (at_interval if i < fulls + intervals else at_bits))
                    column = columns[at]
                    for part in cutlass.range_constexpr(steps):
                        block_of = column * steps + part
                        missing = kept.missing(block_of * c.step, i >= fulls and i < fulls + intervals, c.step)
                        load_k.load(kv, block_of, group, batch, missing)
                        load_v.load(kv, block_of, group, batch, missing)
                        kv += 1
                word = work.next()
            else:
                with cute.arch.elect_one():
                    cute.arch.mbarrier_arrive(block.q.full)
