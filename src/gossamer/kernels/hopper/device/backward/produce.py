"""The producer warp of the column kernels."""

from __future__ import annotations

from dataclasses import dataclass
from typing import Any, NamedTuple

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
    """Items of columns. With lengths, KEYS of an item is how many keys count; an item past them has no segments."""

    lengths: cute.Tensor | None  # (B,) int32
    keys: Int32
    config: Any
    pieces: int = 0  # a listed item is cut into so many items of 64 keys each; 0: it is not cut

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
        """The first key of an item; where dS is saved, that of the listed item: saved dS is read in whole tiles."""
        tile = cute.arch.shuffle_sync(word, ColumnItem.TILE)
        if self.config.keeps and self.pieces:
            tile = tile // self.pieces * self.pieces
        return tile * self.config.block_kv


class RowLoader(Opaque):
    """Fills a ring with tiles of 64 queries of Q or dO, and with one of their row terms: 0 is lse, 1 delta."""

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
        """Fill a half of the ring's n-th use with the 64 queries from `first` on.

        empty: bits of the queries that become zero; None where the configuration clears nothing.
        word: this lane's word of the description of these queries (`Step`); None with dO.
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
    """Which queries the keys of a warpgroup keep by intervals: even lanes hold the first's bounds, odd the second's."""

    def __init__(self, block: TileColumnBlock) -> None:
        self.block = block
        # [begin, end) of the queries that some key keeps, and of those that all keys keep.
        self.some, self.all = two_rows(Int32), two_rows(Int32)

    @cute.jit
    def load(self, lead, tile, intervals):
        """Read the bounds for the keys of a tile; none where it has no tiles of intervals (`intervals` is 0)."""
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
        """The `Kind` of the 64 queries from `first` on for this lane's warpgroup; NOTHING only if `at_end`."""
        kind = Int32(Kind.INTERVAL)
        if self.all[0] <= first and self.all[1] >= first + ROWS:
            kind = Int32(Kind.FULL)
        elif at_end and (self.some[0] >= first + ROWS or self.some[1] <= first):
            kind = Int32(Kind.NOTHING)
        return kind


class Filled(NamedTuple):
    """How far the rings of Q and dO are filled; they may have different numbers of stages."""

    word: Int32  # this lane's of the description of the last 64 queries, see `Step`
    v_pending: Int32  # 1 until the item's V is loaded
    n: Int32  # stages of Q so far
    m: Int32  # stages of dO so far
    half: Int32  # of the n-th stage of Q and of the m-th of dO, the one that is filled next


class Item(NamedTuple):
    """An item: the keys of a tile of a key head."""

    turn: Int32  # items before it
    batch: Int32
    group: Int32  # the key head
    tile: Int32
    keys: Int32  # that are attended, of the batch element
    ragged: Int32  # 1 where the tile reaches past them
    missing: Int32 | None  # as `Producer.missing_keys` gives it
    started: Int32  # `Filled.n` when the item began
    segments: Int32  # how many it has


class QueryTiles(NamedTuple):
    """The tiles of a segment: of one query head, those of full lists first, then those of intervals, then of bits."""

    member: Int32  # which query head of the group, from 0
    head: Int32  # the query head
    lead: Int32  # its row in `lo` and `hi`
    fulls: Int32  # full tiles
    intervals: Int32  # tiles of intervals
    total: Int32  # tiles of all three lists
    at_full: Int32  # full tile i of the segment is lists[:, at_full + i]; the next two likewise
    at_interval: Int32
    at_bits: Int32
    lowest: Int32  # by intervals, only queries in [lowest, highest) keep a key of the item
    highest: Int32
    number: Int32  # of this segment within the item, from 0


class QueryTile(NamedTuple):
    """A tile of queries."""

    kind: Int32  # a `Kind`
    entry: Int32  # the value of `Step.ENTRY`
    at: Int32  # lists[:, at] is this tile


class Producer(Opaque):
    """The warp that takes items and loads K, V, and Q and dO of each step, by TMA.

    A step has 64 queries or, where its two halves are filled one after the other, 128.
    """

    def __init__(self, block: TileColumnBlock, work: ColumnWork) -> None:
        self.config, self.block, self.work = block.config, block, work
        c, a = block.config, block.arguments
        self.halves = c.step // ROWS
        self.layout_kv = c.block_kv * (work.pieces or 1)  # keys of a tile of the layout
        self.load_q = RowLoader(block, block.q, a.q, block.s_q, c.D, 0, block.lse)
        self.load_do = RowLoader(block, block.dout, a.dout, block.s_dout, c.E, 1, block.delta)
        self.load_k = tile_loader(block.k, a.k, block.s_k, c.block_kv, c.D, block.landing)
        self.load_v = tile_loader(block.v, a.v, block.s_v, c.block_kv, c.E, block.landing)
        self.lane = cute.arch.lane_idx()
        self.edge_kinds = EdgeKinds(block)

    @cute.jit
    def produce(self):
        """For each item K, V and the steps of its segments, then a step that says it is over."""
        block, work, item = self.block, self.work, self.block.item
        turn = Int32(0)  # items so far
        filled = Filled(*[Int32(0)] * len(Filled._fields))
        word = work.first()
        running = Int32(1)
        while running != 0:
            missing = self.missing_keys(word)
            block.k.wait_empty(0, turn & 1)
            self.publish(word)
            running = item[ColumnItem.VALID]
            if running == 0:
                with cute.arch.elect_one():
                    cute.arch.mbarrier_arrive(block.k.full)
            else:
                filled = self.load_item(turn, missing, filled)
                word = work.next()  # while the consumers are still two steps behind
                filled = self.end_item(filled)
                turn += 1

    @cute.jit
    def publish(self, word):
        """Write the item's description for the other warps. K's stage is empty: they read it once K is full."""
        if self.lane < ITEM:
            self.block.item[self.lane] = word
        cute.arch.sync_warp()

    @cute.jit
    def load_item(self, turn, missing, filled):
        """Load K, then Q and dO of every tile of every segment, and V behind the first Q. Returns `Filled`."""
        c, block, words = self.config, self.block, self.block.item
        batch, group, tile = words[ColumnItem.BATCH], words[ColumnItem.GROUP], words[ColumnItem.TILE]
        at_segment, count = words[ColumnItem.SEGMENT_START], words[ColumnItem.SEGMENT_COUNT]
        keys = block.attended
        ragged = Int32(1) if tile * c.block_kv + c.block_kv > keys else Int32(0)
        item = Item(turn, batch, group, tile, keys, ragged, missing, filled.n, count)
        self.load_k.fill(0, block.k.full, tile, group, batch, missing)
        filled = filled._replace(v_pending=Int32(1), word=Int32(0))
        for s in cutlass.range(count, unroll=1):
            tiles = self.segment(item, at_segment, s)
            for place in cutlass.range(tiles.total, unroll=1):
                filled = self.load_tile(item, tiles, place, filled)
        if filled.v_pending != 0:
            self.load_v.load(turn, tile, group, batch, missing)
        if const_expr(self.halves > 1):  # noqa: SIM102
            if filled.half != 0:
                filled = self.fill_up(item, filled)
        return filled

    @cute.jit
    def segment(self, item, at_segment, number):
        """The tiles of a segment of an item, whose segments begin at `at_segment`."""
        c, a, keys = self.config, self.block.arguments, item.keys
        part = self.segment_word(at_segment + number)
        member = cute.arch.shuffle_sync(part, Segment.HEAD)
        head = item.group * self.block.ratio + member
        lead = cute.arch.shuffle_sync(part, Segment.LEAD)
        fulls = cute.arch.shuffle_sync(part, Segment.FULL_COUNT)
        intervals = cute.arch.shuffle_sync(part, Segment.INTERVAL_COUNT)
        total = fulls + intervals + cute.arch.shuffle_sync(part, Segment.BITS_COUNT)
        at_full = cute.arch.shuffle_sync(part, Segment.FULL_START)
        at_interval = cute.arch.shuffle_sync(part, Segment.INTERVAL_START) - fulls
        at_bits = cute.arch.shuffle_sync(part, Segment.BITS_START) - fulls - intervals
        lowest, highest = Int32(0), Int32(0)
        if intervals > 0:
            # Both bounds ascend with the keys: the first key keeps the first query, the last key the last.
            last_key = item.tile * c.block_kv + c.block_kv - 1
            last_key = last_key if last_key < keys else keys - 1
            lowest, highest = a.lo[lead, item.tile * c.block_kv], a.hi[lead, last_key]
        if const_expr(c.edges):
            self.edge_kinds.load(lead, item.tile, intervals)
        return QueryTiles(
            member, head, lead, fulls, intervals, total, at_full, at_interval, at_bits, lowest, highest, number
        )

    @cute.jit
    def segment_word(self, s):
        """This lane's word of segment `s` of all."""
        word = Int32(0)
        if self.lane < SEGMENT:
            word = self.block.arguments.segments[s, self.lane]
        return word

    @cute.jit
    def load_tile(self, item, tiles, place, filled):
        """Load Q and dO of the tile at a place of a segment, 64 queries at a time. Returns `Filled`."""
        c, queries = self.config, self.block.queries
        tile = self.tile(item, tiles, self.in_order(tiles, place))
        begin = self.block.arguments.lists[0, tile.at] * c.block_q
        end = cutlass.min(begin + c.block_q, queries)
        for p in cutlass.range(c.block_q // ROWS, unroll=1):
            first = begin + p * ROWS
            wanted = first < queries
            if const_expr(not c.keeps):  # noqa: SIM102  dS that is saved is read of every tile.
                if tile.kind == Kind.INTERVAL and tile.entry >= 0:
                    wanted = wanted and tiles.lowest < first + ROWS and tiles.highest > first
            if wanted:
                word = tile.kind
                if const_expr(c.edges):
                    word = self.kind_of_each(item, tiles, tile, place, first, end, filled.n)
                if const_expr(c.keeps):
                    word = self.saved_at(item, tiles, tile, p, word)
                word = self.described(item, tiles, tile, p, first, word)
                filled = self.load_queries(item, tile.kind, first, tiles.head, filled._replace(word=word))
        return filled

    @cute.jit
    def in_order(self, tiles, place):
        """The number of the tile that is loaded at a place of a segment.

        With `edges` the first tile of intervals is loaded before the full tiles: a warpgroup may skip queries in the
        first step of an item alone, and of that tile it may keep nothing.
        """
        early = Int32(1) if const_expr(self.config.edges) and tiles.intervals > 0 else Int32(0)
        i = place
        if place < early:
            i = tiles.fulls
        elif place < tiles.fulls + early:
            i = place - early
        return i

    @cute.jit
    def tile(self, item, tiles, i):
        """Tile `i` of a segment."""
        kind, entry, at = Int32(Kind.FULL), Int32(0), tiles.at_full + i
        if i >= tiles.fulls:
            kind, entry, at = Int32(Kind.INTERVAL), tiles.lead, tiles.at_interval + i
            if i >= tiles.fulls + tiles.intervals:
                kind = Int32(Kind.BITS)
                at = tiles.at_bits + i
                entry = self.block.arguments.lists[1, at] * self.config.block_kv
        elif item.ragged != 0:
            # A key past the end has score 0: with a very negative lse, p = exp(0 - lse) would overflow.
            kind, entry = Int32(Kind.INTERVAL), Int32(-1)
        return QueryTile(kind, entry, at)

    @cute.jit
    def kind_of_each(self, item, tiles, tile, place, first, end, n):
        """The `Kind` of 64 queries; of intervals, lanes from `Step.KEPT` on have that of each warpgroup's keys.

        NOTHING is given in an item's first and last step alone: elsewhere such queries stay INTERVAL.
        """
        word, following = tile.kind, first + ROWS
        last = tiles.number == item.segments - 1 and place == tiles.total - 1
        last = last and (following >= end or following >= tiles.highest)
        if tile.kind == Kind.INTERVAL and tile.entry >= 0 and self.lane >= Step.KEPT:
            word = self.edge_kinds.kind(first, n == item.started or last)
        return word

    @cute.jit
    def saved_at(self, item, tiles, tile, p, word):
        """`word`, but in lane `Step.PLACE` the number of the 64 x 64 pair of tiles whose dS is saved (keep.py)."""
        c, a, words = self.config, self.block.arguments, self.block.item
        pieces = const_expr(self.work.pieces or 1)
        key_parts = const_expr(self.work.pieces or c.block_kv // ROWS)
        if self.lane == Step.PLACE:
            of_head = words[ColumnItem.PLACE] + words[ColumnItem.NEXT_PLACE] * tiles.member
            word = (of_head + a.lists[2, tile.at]) * key_parts + item.tile % pieces
            word = word * (c.block_q // ROWS) + p
        return word

    @cute.jit
    def described(self, item, tiles, tile, p, first, word):
        """This lane's word of the description of the 64 queries from `first` on, the p-th of their tile."""
        for place, known, times in (
            (Step.QUERY, first, 1), (Step.ENTRY, tile.entry, 1), (Step.WORD, p, ROWS // 32), (Step.HEAD, tiles.head, 1),
            (Step.BATCH, item.batch, 1),
        ):  # fmt: skip
            if self.lane == place:
                word = known * times
        return word

    @cute.jit
    def load_queries(self, item, kind, first, head, filled):
        """Load Q and dO of 64 queries, and V between the item's first Q and dO. Returns `Filled`."""
        empty = self.empty_queries(kind, first, head, item.batch)
        self.load_q.load(filled.n, filled.half, first, head, item.batch, empty, filled.word)
        if filled.v_pending != 0:
            self.load_v.load(item.turn, item.tile, item.group, item.batch, item.missing)
        self.load_do.load(filled.m, filled.half, first, head, item.batch, empty)
        n, m, half = self.following(filled.n, filled.m, filled.half)
        return Filled(n=n, m=m, half=half, v_pending=Int32(0), word=filled.word)

    @cute.jit
    def fill_up(self, item, filled):
        """Fill the second half of an item's last step with the first's queries, as `Kind.NOTHING`. Returns `Filled`."""
        first = cute.arch.shuffle_sync(filled.word, Step.QUERY)
        head = cute.arch.shuffle_sync(filled.word, Step.HEAD)
        word = filled.word
        if self.lane == Step.KIND:
            word = Int32(Kind.NOTHING)
        empty = self.empty_queries(Int32(Kind.NOTHING), first, head, item.batch)
        self.load_q.load(filled.n, filled.half, first, head, item.batch, empty, word)
        self.load_do.load(filled.m, filled.half, first, head, item.batch, empty)
        n, m, half = self.following(filled.n, filled.m, filled.half)
        return Filled(n=n, m=m, half=half, v_pending=filled.v_pending, word=word)

    @cute.jit
    def end_item(self, filled):
        """A stage of Q that says that the item is over. Returns `Filled`."""
        block = self.block
        stage = block.q.wait_empty_at(filled.n)
        if self.lane < self.halves:
            block.steps[Step.KIND, stage * self.halves + self.lane] = Int32(Kind.END)
        cute.arch.sync_warp()
        with cute.arch.elect_one():
            for _ in cutlass.range_constexpr(self.halves):
                cute.arch.mbarrier_arrive(block.q.full + stage)
        return filled._replace(n=filled.n + 1)

    @cute.jit
    def missing_keys(self, word):
        """A bit for each of this lane's keys that no query of the item attends: bit i is the tile's key lane + 32 i.

        `Landing.clear` makes these keys zero. Intervals tell them (if the item has tiles of intervals alone), the pool,
        or the key length. None where the configuration clears no keys.

        word: this lane's word of the item.
        """
        c, a, lane = self.config, self.block.arguments, self.lane
        found = None
        if const_expr(c.lengths or c.clears >= Clears.INTERVALS):
            first = cute.arch.shuffle_sync(word, ColumnItem.TILE) * c.block_kv
            segment = cute.arch.shuffle_sync(word, ColumnItem.SEGMENT_START)
            count = cute.arch.shuffle_sync(word, ColumnItem.SEGMENT_COUNT)
            found = Int32(-1) if const_expr(c.clears >= Clears.INTERVALS) else Int32(0)
            found = found if count > 0 else Int32(0)
            for s in cutlass.range(count if const_expr(c.clears >= Clears.INTERVALS) else 0, unroll=1):
                part = self.segment_word(segment + s)
                lead = cute.arch.shuffle_sync(part, Segment.LEAD)
                intervals = cute.arch.shuffle_sync(part, Segment.INTERVAL_COUNT)
                others = cute.arch.shuffle_sync(part, Segment.FULL_COUNT)
                others += cute.arch.shuffle_sync(part, Segment.BITS_COUNT)
                if const_expr(c.clears == Clears.KEYS):
                    found = found & unset(a.pool, lead, first, self.block.keys, self.layout_kv, c.block_kv)
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
        """A bit for each of this lane's queries that keeps no key: bit i is query first + lane + 32 i.

        `Landing.clear` makes these queries zero. 0 for a full tile; None where the configuration clears nothing.
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
        """(n, m, half) after a half of stage `n` of Q and `m` of dO is filled."""
        if self.halves == 1:
            return n + 1, m + 1, half
        return n + half, m + half, 1 - half
