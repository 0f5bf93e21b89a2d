"""The producer warp of the column kernels."""

from __future__ import annotations

from dataclasses import dataclass
from typing import Any

import cutlass
import cutlass.cute as cute
from cutlass import Float32, Int32, const_expr
from cutlass.cute.nvgpu import cpasync

from gossamer.cute.clearing import WARP, outside, unset
from gossamer.cute.column_items import SEGMENT, ColumnItem, Segment
from gossamer.cute.common import FAR, ROWS, Opaque, Ring, within_keys
from gossamer.cute.configurations import Clears
from gossamer.cute.row_items import ITEM
from gossamer.cute.tiles import Tma, partition, tile_loader
from gossamer.cute.work import WorkList
from gossamer.kernels.hopper.device.backward.block import TileColumnBlock
from gossamer.kernels.hopper.device.backward.common import STEP, Kind, Step, two_rows


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
            first = self.first_key(word)
            if lane == ColumnItem.KEYS:
                word = keys
            if lane == ColumnItem.SEGMENT_COUNT and first >= keys:
                word = Int32(0)
        elif const_expr(self.pieces > 0):
            first = self.first_key(word)
            if lane == ColumnItem.SEGMENT_COUNT and first >= self.keys:
                word = Int32(0)
        return word

    def first_key(self, word: Any) -> Any:
        """The first key of an item, or of the tile that it is of: dS that is kept is read of whole tiles."""
        tile = cute.arch.shuffle_sync(word, ColumnItem.TILE)
        if self.config.keeps and self.pieces:
            tile = tile // self.pieces * self.pieces
        return tile * self.config.block_kv


class RowLoader(Opaque):
    """What fills a ring with tiles of 64 queries of Q or dO, and their row terms: the first or the second of them."""

    def __init__(
        self, block: TileColumnBlock, ring: Ring, tma: Tma, tiles: Any, columns: int, term: int, to: Any
    ) -> None:
        self.ring, self.tma, self.steps, self.halves = ring, tma, block.steps, block.config.step // ROWS
        self.tiles, self.landing = cute.flat_divide(tiles, (ROWS, columns)), block.landing
        self.to, self.from_ = partition(tma, self.tiles, ROWS, columns)
        self.bytes = 2 * ROWS * columns + 4 * ROWS
        self.terms, self.term, self.shared_terms = block.arguments.terms, term, to

    @cute.jit
    def load(self, n, half, first, head, batch, empty, word=None):
        """Fill a half of the n-th use with the queries from `first` on; `word` describes them, a word of each lane.

        empty: which of them become zero, as of `Landing.clear`; None where the configuration clears nothing.
        """
        stage = self.ring.wait_empty_at(n)
        if const_expr(word is not None):
            if cute.arch.lane_idx() < STEP:
                self.steps[cute.arch.lane_idx(), stage * self.halves + half] = word
            cute.arch.sync_warp()
        full = self.ring.full + stage
        if const_expr(empty is not None):
            dirty = cute.arch.vote_any_sync(empty != 0)
            self.issue(self.landing.target(full, dirty), stage, half, first, head, batch)
            if dirty:
                self.landing.clear(full, self.tiles[None, None, half, 0, stage], empty)
        else:
            self.issue(full, stage, half, first, head, batch)

    @cute.jit
    def issue(self, full, stage, half, first, head, batch):
        """Issue the copies of a half of a stage, which arrive at the barrier `full`."""
        with cute.arch.elect_one():
            cute.arch.mbarrier_arrive_and_expect_tx(full, self.bytes)
        from_ = self.from_[None, first // ROWS, head, batch]
        cute.copy(self.tma.atom, from_, self.to[None, half, 0, stage], tma_bar_ptr=full)
        terms, to = self.terms[self.term, batch, head, None], self.shared_terms[None, stage * self.halves + half]
        from_ = cute.local_tile(terms, (ROWS,), (first // ROWS,))
        with cute.arch.elect_one():
            cute.copy(cute.make_copy_atom(cpasync.CopyBulkG2SOp(), Float32), from_, to, mbar_ptr=full)


class EdgeKinds(Opaque):
    """What a warpgroup's keys keep of an interval tile: even lanes know it of the first, odd lanes of the second."""

    def __init__(self, block: TileColumnBlock) -> None:
        self.block = block
        # The first query that some key keeps and the one behind the last; and those of all keys.
        self.some, self.all = two_rows(Int32), two_rows(Int32)

    @cute.jit
    def load(self, lead, tile, intervals):
        """Of the keys of a tile, if it has so many intervals."""
        a, keys = self.block.arguments, self.block.attended
        first = tile * self.block.config.block_kv + cute.arch.lane_idx() % 2 * ROWS
        for bounds in (self.some, self.all):
            bounds[0], bounds[1] = Int32(FAR), Int32(-FAR)
        if intervals > 0 and first < keys:
            last = cutlass.min(first + ROWS, keys) - 1  # both bounds ascend with the keys
            self.some[0], self.some[1] = a.lo[lead, first], a.hi[lead, last]
            if first + ROWS <= keys:
                self.all[0], self.all[1] = a.lo[lead, last], a.hi[lead, first]

    @cute.jit
    def kind(self, first, at_end):
        """Of 64 queries; only at an end of an item it may be nothing."""
        kind = Int32(Kind.INTERVAL)
        if self.all[0] <= first and self.all[1] >= first + ROWS:
            kind = Int32(Kind.FULL)
        elif at_end and (self.some[0] >= first + ROWS or self.some[1] <= first):
            kind = Int32(Kind.NOTHING)
        return kind


class Producer(Opaque):
    """The warp that takes items and loads K, V, and Q and dO of each step, by TMA."""

    def __init__(self, block: TileColumnBlock, work: ColumnWork) -> None:
        self.config, self.block, self.work = block.config, block, work
        c, a = block.config, block.arguments
        self.halves, self.down = c.step // ROWS, c.block_kv * (work.pieces or 1)  # keys of a tile of the layout
        self.load_q = RowLoader(block, block.q, a.q, block.s_q, c.D, 0, block.lse)
        self.load_do = RowLoader(block, block.dout, a.dout, block.s_dout, c.E, 1, block.delta)
        self.load_k = tile_loader(block.k, a.k, block.s_k, c.block_kv, c.D, block.landing)
        self.load_v = tile_loader(block.v, a.v, block.s_v, c.block_kv, c.E, block.landing)

    @cute.jit
    def produce(self):
        """For each item K, V and the steps of its segments, then a step that says it is over."""
        c, block, work, item = self.config, self.block, self.work, self.block.item
        a, steps = block.arguments, block.steps
        lane = cute.arch.lane_idx()
        turn, n, m = Int32(0), Int32(0), Int32(0)  # items, stages of Q, stages of dO so far
        half = Int32(0)  # of the step that is being filled
        own = EdgeKinds(block)
        pieces, down = const_expr(work.pieces or 1), const_expr(work.pieces or c.block_kv // ROWS)
        word = work.first()
        running = Int32(1)
        while running != 0:
            missing = self.missing_keys(word)
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
                self.load_k.fill(0, block.k.full, tile, group, batch, missing)
                started = n
                v_pending = Int32(1)  # V comes after the first Q
                first, head, value = Int32(0), Int32(0), Int32(0)
                for s in cutlass.range(count, unroll=1):
                    part = Int32(0)
                    if lane < SEGMENT:
                        part = a.segments[at_segment + s, lane]
                    share = cute.arch.shuffle_sync(part, Segment.HEAD)
                    head = group * block.ratio + share
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
                    if const_expr(c.edges):
                        own.load(lead, tile, intervals)
                    # The first tile of an interval comes first: of its first step a warpgroup may keep nothing.
                    early = Int32(1) if const_expr(c.edges) and intervals > 0 else Int32(0)
                    for place in cutlass.range(total, unroll=1):
                        i = place
                        if place < early:
                            i = fulls
                        elif place < fulls + early:
                            i = place - early
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
                        end = cutlass.min(begin + c.block_q, block.queries)
                        for p in cutlass.range(c.block_q // ROWS, unroll=1):
                            first = begin + p * ROWS
                            wanted = first < block.queries
                            if const_expr(not c.keeps):  # noqa: SIM102  What is kept of dS is read of every tile.
                                if kind == Kind.INTERVAL and entry >= 0:
                                    wanted = wanted and lowest < first + ROWS and highest > first
                            if wanted:
                                value = kind
                                if const_expr(c.edges):
                                    following = first + ROWS
                                    last = s == count - 1 and place == total - 1
                                    last = last and (following >= end or following >= highest)
                                    if kind == Kind.INTERVAL and entry >= 0 and lane >= Step.KEPT:
                                        value = own.kind(first, n == started or last)
                                if const_expr(c.keeps):  # noqa: SIM102
                                    if lane == Step.PLACE:
                                        of_head = item[ColumnItem.PLACE] + item[ColumnItem.NEXT_PLACE] * share
                                        value = (of_head + a.lists[2, at]) * down + tile % pieces
                                        value = value * (c.block_q // ROWS) + p
                                for word_place, known, times in (
                                    (Step.QUERY, first, 1), (Step.ENTRY, entry, 1), (Step.WORD, p, ROWS // 32),
                                    (Step.HEAD, head, 1), (Step.BATCH, batch, 1),
                                ):  # fmt: skip
                                    if lane == word_place:
                                        value = known * times
                                empty = self.empty_queries(kind, first, head, batch)
                                self.load_q.load(n, half, first, head, batch, empty, value)
                                if v_pending != 0:
                                    self.load_v.load(turn, tile, group, batch, missing)
                                v_pending = Int32(0)
                                self.load_do.load(m, half, first, head, batch, empty)
                                n, m, half = self.following(n, m, half)
                if v_pending != 0:
                    self.load_v.load(turn, tile, group, batch, missing)
                if const_expr(self.halves > 1):  # noqa: SIM102
                    if half != 0:  # the last step is filled up by the queries that it has, of which nothing is kept
                        first = cute.arch.shuffle_sync(value, Step.QUERY)
                        head = cute.arch.shuffle_sync(value, Step.HEAD)
                        if lane == Step.KIND:
                            value = Int32(Kind.NOTHING)
                        empty = self.empty_queries(Int32(Kind.NOTHING), first, head, batch)
                        self.load_q.load(n, half, first, head, batch, empty, value)
                        self.load_do.load(m, half, first, head, batch, empty)
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

    @cute.jit
    def missing_keys(self, word):
        """Of an item's keys a bit for each of this lane's that no query of it attends, as `Landing.clear` has them.

        It is told by their intervals, where the item has nothing else, and by a length. None where the configuration
        clears nothing.

        word: this lane's of the item.
        """
        c, a, lane = self.config, self.block.arguments, cute.arch.lane_idx()
        found = None
        if const_expr(c.lengths or c.clears >= Clears.INTERVALS):
            first = cute.arch.shuffle_sync(word, ColumnItem.TILE) * c.block_kv
            segment = cute.arch.shuffle_sync(word, ColumnItem.SEGMENT_START)
            count = cute.arch.shuffle_sync(word, ColumnItem.SEGMENT_COUNT)
            found = Int32(-1) if const_expr(c.clears >= Clears.INTERVALS) else Int32(0)
            found = found if count > 0 else Int32(0)
            for s in cutlass.range(count if const_expr(c.clears >= Clears.INTERVALS) else 0, unroll=1):
                part = Int32(0)
                if lane < SEGMENT:
                    part = a.segments[segment + s, lane]
                lead = cute.arch.shuffle_sync(part, Segment.LEAD)
                intervals = cute.arch.shuffle_sync(part, Segment.INTERVAL_COUNT)
                others = cute.arch.shuffle_sync(part, Segment.FULL_COUNT)
                others += cute.arch.shuffle_sync(part, Segment.BITS_COUNT)
                if const_expr(c.clears == Clears.KEYS):
                    found = found & unset(a.pool, lead, first, self.block.keys, self.down, c.block_kv)
                elif others > 0:
                    found = Int32(0)
                elif found != 0 and intervals > 0:
                    for i in cutlass.range_constexpr(c.block_kv // WARP):
                        key = first + lane + WARP * i
                        if key < self.block.keys:  # noqa: SIM102  Nothing is read behind the last one.
                            if a.lo[lead, key] < a.hi[lead, key]:
                                found = found & ~(1 << i)
            if const_expr(c.lengths):
                keys = cute.arch.shuffle_sync(word, ColumnItem.KEYS)
                if count > 0:
                    found = found | outside(Int32(0), keys - first, c.block_kv)
            # What lies past the keys is zero anyway.
            found = found & ~outside(Int32(0), self.block.keys - first, c.block_kv)
        return found

    @cute.jit
    def empty_queries(self, kind, first, head, batch):
        """Of 64 queries from `first` on a bit for each of this lane's that keeps nothing, as `Landing.clear` has them.

        In a full tile none does. None where the configuration clears nothing.
        """
        found = None
        if const_expr(self.config.clears):
            found = Int32(0)
            if kind != Kind.FULL:
                for i in cutlass.range_constexpr(ROWS // WARP):
                    query = first + cute.arch.lane_idx() + WARP * i
                    keeps_nothing = self.block.arguments.terms[0, batch, head, query] == Float32.inf
                    if keeps_nothing and query < self.block.queries:
                        found = found | (1 << i)
        return found

    def following(self, n: Any, m: Any, half: Any) -> Any:
        """The place after a half of stage `n` of Q and `m` of dO."""
        if self.halves == 1:
            return n + 1, m + 1, half
        return n + half, m + half, 1 - half
