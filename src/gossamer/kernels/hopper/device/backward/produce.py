"""The producer warp and the sending warps of the column kernels."""

from __future__ import annotations

from dataclasses import dataclass
from typing import Any

import cutlass
import cutlass.cute as cute
from cutlass import Float32, Int32, const_expr
from cutlass.cute.nvgpu import cpasync

from gossamer.kernels.hopper.device.backward.block import ColumnBlock, TileColumnBlock
from gossamer.kernels.hopper.device.backward.common import STEP, ColumnBarrier, Kind, Step, bulk_add
from gossamer.kernels.hopper.device.column_items import SEGMENT, ColumnItem, Segment
from gossamer.kernels.hopper.device.common import ROWS, WARPGROUP, Opaque, Ring, within_keys
from gossamer.kernels.hopper.device.row_items import ITEM
from gossamer.kernels.hopper.device.tiles import Tma, partition, tile_loader
from gossamer.kernels.hopper.device.work import WorkList


@dataclass(frozen=True, eq=False)
class ColumnWork(WorkList):
    """Items of columns. With lengths a description says how many keys count; what lies past the keys walks nothing."""

    lengths: cute.Tensor | None  # (B,) int32
    keys: Int32
    config: Any
    pieces: int = 0  # of 64 keys, each an item of its own, of an item that is listed; 0: it is one item

    @cute.jit
    def draw(self, w):
        """This lane's word of item `w`."""
        word, lane = self.load(w, self.pieces or 1), cute.arch.lane_idx()
        if const_expr(self.pieces > 0):  # noqa: SIM102
            if lane == ColumnItem.TILE:
                word = word * self.pieces + w % self.pieces
        if const_expr(self.config.lengths):
            keys = Int32(0)
            if cute.arch.shuffle_sync(word, ColumnItem.VALID) != 0:
                keys = within_keys(self.lengths[cute.arch.shuffle_sync(word, ColumnItem.BATCH)])
                keys = keys if keys < self.keys else self.keys
            first = cute.arch.shuffle_sync(word, ColumnItem.TILE) * self.config.block_kv
            if lane == ColumnItem.KEYS:
                word = keys
            if lane == ColumnItem.SEGMENT_COUNT and first >= keys:
                word = Int32(0)
        elif const_expr(self.pieces > 0):
            tile = cute.arch.shuffle_sync(word, ColumnItem.TILE)
            if lane == ColumnItem.SEGMENT_COUNT and tile * ROWS >= self.keys:
                word = Int32(0)
        return word


class RowLoader(Opaque):
    """What fills a ring with tiles of 64 queries of Q or dO, and their row terms: the first or the second of them."""

    def __init__(
        self, block: TileColumnBlock, ring: Ring, tma: Tma, tiles: Any, columns: int, term: int, to: Any
    ) -> None:
        self.ring, self.tma, self.steps, self.halves = ring, tma, block.steps, block.config.step // ROWS
        self.to, self.from_ = partition(tma, cute.flat_divide(tiles, (ROWS, columns)), ROWS, columns)
        self.bytes = 2 * ROWS * columns + 4 * ROWS
        self.terms, self.term, self.shared_terms = block.arguments.terms, term, to

    @cute.jit
    def load(self, n, half, first, head, batch, word=None):
        """Fill a half of the n-th use with the queries from `first` on; `word` describes them, a word of each lane."""
        stage = self.ring.wait_empty_at(n)
        if const_expr(word is not None):
            if cute.arch.lane_idx() < STEP:
                self.steps[cute.arch.lane_idx(), stage * self.halves + half] = word
            cute.arch.sync_warp()
        full = self.ring.full + stage
        with cute.arch.elect_one():
            cute.arch.mbarrier_arrive_and_expect_tx(full, self.bytes)
        from_ = self.from_[None, first // ROWS, head, batch]
        cute.copy(self.tma.atom, from_, self.to[None, half, 0, stage], tma_bar_ptr=full)
        terms, to = self.terms[self.term, batch, head, None], self.shared_terms[None, stage * self.halves + half]
        from_ = cute.local_tile(terms, (ROWS,), (first // ROWS,))
        with cute.arch.elect_one():
            cute.copy(cute.make_copy_atom(cpasync.CopyBulkG2SOp(), Float32), from_, to, mbar_ptr=full)


class Producer(Opaque):
    """The warp that takes items and loads K, V, and Q and dO of each step, by TMA."""

    def __init__(self, block: TileColumnBlock, work: ColumnWork) -> None:
        self.config, self.block, self.work = block.config, block, work
        c, a = block.config, block.arguments
        self.halves = c.step // ROWS
        self.load_q = RowLoader(block, block.q, a.q, block.s_q, c.D, 0, block.lse)
        self.load_do = RowLoader(block, block.dout, a.dout, block.s_dout, c.E, 1, block.delta)
        self.load_k = tile_loader(block.k, a.k, block.s_k, c.block_kv, c.D)
        self.load_v = tile_loader(block.v, a.v, block.s_v, c.block_kv, c.E)

    @cute.jit
    def produce(self):
        """For each item K, V and the steps of its segments, then a step that says it is over."""
        c, block, work, item = self.config, self.block, self.work, self.block.item
        a, steps = block.arguments, block.steps
        lane = cute.arch.lane_idx()
        turn, n, m = Int32(0), Int32(0), Int32(0)  # items, stages of Q, stages of dO so far
        half = Int32(0)  # of the step that is being filled
        word = work.first()
        running = Int32(1)
        while running != 0:
            block.k.wait_empty(0, turn & 1)
            if lane < ITEM:
                item[lane] = word
            cute.arch.sync_warp()
            running = item[ColumnItem.VALID]
            if running == 0:
                with cute.arch.elect_one():
                    cute.arch.mbarrier_arrive(block.k.full)
            else:
                batch, group, tile = item[ColumnItem.BATCH], item[ColumnItem.GROUP], item[ColumnItem.TILE]
                at_segment, count = item[ColumnItem.SEGMENT_START], item[ColumnItem.SEGMENT_COUNT]
                keys = block.attended
                ragged = Int32(1) if tile * c.block_kv + c.block_kv > keys else Int32(0)
                self.load_k.fill(0, block.k.full, tile, group, batch)
                v_pending = Int32(1)  # V comes after the first Q
                first, head, value = Int32(0), Int32(0), Int32(0)
                for s in cutlass.range(count, unroll=1):
                    part = Int32(0)
                    if lane < SEGMENT:
                        part = a.segments[at_segment + s, lane]
                    head = group * block.ratio + cute.arch.shuffle_sync(part, Segment.HEAD)
                    lead = cute.arch.shuffle_sync(part, Segment.LEAD)
                    fulls = cute.arch.shuffle_sync(part, Segment.FULL_COUNT)
                    intervals = cute.arch.shuffle_sync(part, Segment.INTERVAL_COUNT)
                    total = fulls + intervals + cute.arch.shuffle_sync(part, Segment.BITS_COUNT)
                    at_full = cute.arch.shuffle_sync(part, Segment.FULL_START)
                    at_interval = cute.arch.shuffle_sync(part, Segment.INTERVAL_START) - fulls
                    at_bits = cute.arch.shuffle_sync(part, Segment.BITS_START) - fulls - intervals
                    lowest, highest = Int32(0), Int32(0)
                    if intervals > 0:
                        # The queries that any key of the tile keeps: both bounds ascend with the keys.
                        last = tile * c.block_kv + c.block_kv - 1
                        last = last if last < keys else keys - 1
                        lowest, highest = a.lo[lead, tile * c.block_kv], a.hi[lead, last]
                    for i in cutlass.range(total, unroll=1):
                        kind = Int32(Kind.FULL)
                        entry = Int32(0)
                        at = at_full + i
                        if i >= fulls:
                            kind = Int32(Kind.INTERVAL)
                            entry = lead
                            at = at_interval + i
                            if i >= fulls + intervals:
                                kind = Int32(Kind.BITS)
                                at = at_bits + i
                                entry = a.lists[1, at] * c.block_kv
                        elif ragged != 0:
                            # Keys that do not exist have score 0: far above a very negative lse, p overflows.
                            kind, entry = Int32(Kind.INTERVAL), Int32(-1)
                        begin = a.lists[0, at] * c.block_q
                        for p in cutlass.range(c.block_q // ROWS, unroll=1):
                            first = begin + p * ROWS
                            wanted = first < block.queries
                            if kind == Kind.INTERVAL and entry >= 0:
                                wanted = wanted and lowest < first + ROWS and highest > first
                            if wanted:
                                value = kind
                                for place, known, times in (
                                    (Step.QUERY, first, 1), (Step.ENTRY, entry, 1), (Step.WORD, p, ROWS // 32),
                                    (Step.HEAD, head, 1), (Step.BATCH, batch, 1),
                                ):  # fmt: skip
                                    if lane == place:
                                        value = known * times
                                self.load_q.load(n, half, first, head, batch, value)
                                if v_pending != 0:
                                    self.load_v.load(turn, tile, group, batch)
                                v_pending = Int32(0)
                                self.load_do.load(m, half, first, head, batch)
                                n, m, half = self.following(n, m, half)
                if v_pending != 0:
                    self.load_v.load(turn, tile, group, batch)
                if const_expr(self.halves > 1):  # noqa: SIM102
                    if half != 0:  # the last step is filled up by the queries that it has, of which nothing is kept
                        first = cute.arch.shuffle_sync(value, Step.QUERY)
                        head = cute.arch.shuffle_sync(value, Step.HEAD)
                        if lane == Step.KIND:
                            value = Int32(Kind.NOTHING)
                        self.load_q.load(n, half, first, head, batch, value)
                        self.load_do.load(m, half, first, head, batch)
                        n, m, half = self.following(n, m, half)
                word = work.next()  # while the consumers are still two steps behind
                stage = block.q.wait_empty_at(n)
                if lane < self.halves:
                    steps[Step.KIND, stage * self.halves + lane] = Int32(Kind.END)
                cute.arch.sync_warp()
                with cute.arch.elect_one():
                    for _ in cutlass.range_constexpr(self.halves):
                        cute.arch.mbarrier_arrive(block.q.full + stage)
                n += 1
                turn += 1

    def following(self, n: Any, m: Any, half: Any) -> Any:
        """The place after a half of stage `n` of Q and `m` of dO."""
        if self.halves == 1:
            return n + 1, m + 1, half
        return n + half, m + half, 1 - half


class Sender(Opaque):
    """A warp that sends what a computing warpgroup leaves in shared memory: dQ of each step, dK and dV of each item."""

    def __init__(self, block: ColumnBlock, group: Any) -> None:
        self.config, self.block, self.group = block.config, block, group
        self.dk_from, self.dk_to = partition(block.arguments.dk, block.s_dk, ROWS, self.config.D)
        self.dv_from, self.dv_to = partition(block.arguments.dv, block.s_dv, ROWS, self.config.E)

    @cute.jit
    def send(self, groups: cutlass.Constexpr, sends_dq: cutlass.Constexpr):
        """All items of the warpgroup. Of a block's only one, K and V make room for dK and dV."""
        a, block, item, group = self.block.arguments, self.block, self.block.item, self.group
        turn, n = Int32(0), Int32(0)
        block.k.wait_full(0, turn & 1)
        running = item[ColumnItem.VALID]
        while running != 0:
            batch, head, tile = item[ColumnItem.BATCH], item[ColumnItem.GROUP], item[ColumnItem.TILE]
            slot = item[ColumnItem.SLOT]
            cute.arch.sync_warp()
            if const_expr(groups > 1):
                with cute.arch.elect_one():
                    cute.arch.mbarrier_arrive(block.k.empty)
            if const_expr(sends_dq):
                n = self.send_dq(n)
            self.exchange()
            if slot < 0:
                cute.copy(a.dv.atom, self.dv_from[None, group], self.dv_to[None, tile * groups + group, head, batch])
                cute.copy(a.dk.atom, self.dk_from[None, group], self.dk_to[None, tile * groups + group, head, batch])
                cute.arch.cp_async_bulk_commit_group()
            if const_expr(groups == 1):
                cute.arch.cp_async_bulk_wait_group(0, read=True)
                cute.arch.sync_warp()
                with cute.arch.elect_one():
                    cute.arch.mbarrier_arrive(block.k.empty)
                    cute.arch.mbarrier_arrive(block.v.empty)
            turn += 1
            block.k.wait_full(0, turn & 1)
            running = item[ColumnItem.VALID]
        cute.arch.cp_async_bulk_wait_group(0, read=True)

    @cute.jit
    def send_dq(self, n):
        """Add dQ of an item's steps, which begin with stage `n` of Q, to its sums; returns the stage after its last."""
        block = self.block
        # An item's own batch element stays apart from its steps': a stage of kind END says nothing of it.
        kind, first, head, batch = self.follow(n)
        n += 1
        while kind != Kind.END:
            self.exchange()
            # Half of the columns of 64 queries, or all of them.
            shares = const_expr(2 if self.config.step == ROWS else 1)
            row = block.arguments.dq_sum[batch, head, first // ROWS, None]
            share = self.group if const_expr(shares > 1) else 0
            target = cute.local_tile(row, (ROWS * self.config.D // shares,), (share,))
            if const_expr(shares > 1) or kind != Kind.NOTHING:
                with cute.arch.elect_one():
                    staged = block.staging[None, None, None, self.group]
                    bulk_add(target.iterator, staged.iterator, 4 * cute.size(target))
            cute.arch.cp_async_bulk_commit_group()
            kind, first, head, batch = self.follow(n)
            n += 1
        return n

    @cute.jit
    def follow(self, n):
        """(kind, first query, head, batch) of those queries of step `n` whose dQ the warpgroup makes or shares."""
        steps, halves = self.block.steps, self.config.step // ROWS
        stage = self.block.q.wait_full_at(n)
        place = stage * halves + (self.group if const_expr(halves > 1) else 0)
        kind, first = steps[Step.KIND, place], steps[Step.QUERY, place]
        head, batch = steps[Step.HEAD, place], steps[Step.BATCH, place]
        cute.arch.sync_warp()
        with cute.arch.elect_one():
            cute.arch.mbarrier_arrive(self.block.q.empty + stage)
        return kind, first, head, batch

    @cute.jit
    def exchange(self):
        """Let the warpgroup write its staging memory, and wait until it has."""
        threads = WARPGROUP + 32
        cute.arch.cp_async_bulk_wait_group(0, read=True)
        cute.arch.barrier_arrive(barrier_id=ColumnBarrier.STAGING_FREE + self.group, number_of_threads=threads)
        cute.arch.barrier(barrier_id=ColumnBarrier.STAGING_FULL + self.group, number_of_threads=threads)
