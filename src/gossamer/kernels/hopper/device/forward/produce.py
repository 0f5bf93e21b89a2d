"""The producer warp of the forward kernel: it takes items and keeps the rings of Q, K and V filled by TMA."""

from __future__ import annotations

import cutlass
import cutlass.cute as cute
from cutlass import Int32, const_expr

from gossamer.cute.clearing import KeptKeys, looks_for_keys
from gossamer.cute.common import FAR, ROWS, Opaque
from gossamer.cute.row_items import RowItem
from gossamer.cute.tiles import copied_bytes, partition, tile_loader
from gossamer.cute.work import TileRows
from gossamer.kernels.hopper.device.forward.block import ForwardBlock, RowBlock
from gossamer.kernels.hopper.device.forward.masks import first_entry, tiles_of

# The next item is drawn this many keys before the last load of an item, and then published with its Q: not before the
# item's third tile is loaded, since consumers finish the item before it during the second, nor before its results have
# left. Nothing here waits before the first load of an item.
DRAW = 768
PUBLISH = 512
EARLIEST = 2


class ItemLoader(Opaque):
    """Publishes items: a description in shared memory, and Q by TMA, which arrive together."""

    def __init__(self, block: RowBlock) -> None:
        self.ring, self.groups = block.items, block.config.block_q // ROWS  # tiles of an item
        q, columns = block.arguments.q, cute.size(block.s_q, mode=[1])
        self.atom, (self.to, self.from_) = q.atom, partition(q, block.s_q, ROWS, columns)
        self.bytes = self.groups * copied_bytes(self.to)  # of an item's Q

    @cute.jit
    def load(self, turn, item):
        """Load the Q of an item that was described."""
        stage = self.ring.place(turn)[0]
        with cute.arch.elect_one():
            cute.arch.mbarrier_arrive_and_expect_tx(self.ring.full + stage, self.bytes)
        for g in cutlass.range_constexpr(self.groups):
            tile = item[RowItem.TILE, stage] * self.groups + g
            at = self.from_[None, tile, item[RowItem.HEAD, stage], item[RowItem.BATCH, stage]]
            cute.copy(self.atom, at, self.to[None, stage * self.groups + g], tma_bar_ptr=self.ring.full + stage)


class Producer(Opaque):
    """Items and Q, then K and V of each step, K one step ahead of V."""

    def __init__(self, block: ForwardBlock) -> None:
        a, c = block.arguments, block.config
        self.config, self.overlap_items = c, c.q_stages > 1
        self.work = TileRows(a.work, a.tile_counter, a.items, a.lists[0, None], a.lengths, c.block_kv, c.lengths)
        self.items = ItemLoader(block)
        self.k = tile_loader(block.k, a.k, block.s_k, c.step, c.D)
        self.v = tile_loader(block.v, a.v, block.s_v, c.step, c.E, block.landing)
        self.kept = KeptKeys(a, c, cute.size(a.k.tensor, mode=[0]), cute.size(a.q.tensor, mode=[0]))
        self.ratio = cute.size(a.q.tensor, mode=[2]) // cute.size(a.k.tensor, mode=[2])  # query heads of a key head

    @cute.jit
    def run(self):
        """Item after item."""
        c, work, item = self.config, self.work, self.items.ring.item
        parts = const_expr(c.block_kv // c.step)
        turn = Int32(0)  # items so far
        kv = Int32(0)  # steps so far
        owed = Int32(0)  # the V of the step before is still to be loaded: K runs one step ahead of V
        v_block, v_group, v_batch = Int32(0), Int32(0), Int32(0)
        v_missing = Int32(0) if const_expr(looks_for_keys(c)) else None
        word = work.first()
        following = self.publish(turn, word)
        running = item[RowItem.VALID, 0]
        while running != 0:
            stage = self.items.ring.place(turn)[0]
            batch, head = item[RowItem.BATCH, stage], item[RowItem.HEAD, stage]
            group = head // self.ratio
            fulls, intervals = item[RowItem.FULL_COUNT, stage], item[RowItem.INTERVAL_COUNT, stage]
            at_full = item[RowItem.FULL_START, stage]
            at_interval = item[RowItem.INTERVAL_START, stage] - fulls
            at_bits = item[RowItem.BITS_START, stage] - fulls - intervals
            count = fulls + intervals + item[RowItem.BITS_COUNT, stage]
            self.kept.begin(batch, item[RowItem.LEAD, stage], intervals)
            turn += 1
            upcoming = Int32(0)
            draw_at, publish_at = count - DRAW // c.block_kv, count - PUBLISH // c.block_kv
            draw_at = draw_at if draw_at > 0 else Int32(0)
            publish_at = publish_at if publish_at > EARLIEST else Int32(EARLIEST)
            if count == 0:
                word = work.next()
            for i in cutlass.range(count, unroll=1):
                column = following
                n = i + 1
                if n < count:
                    at = n + (at_full if n < fulls else (at_interval if n < fulls + intervals else at_bits))
                    following = work.columns[at]
                for p in cutlass.range_constexpr(parts):
                    block = column * parts + p
                    self.k.load(kv, block, group, batch)
                    if owed != 0:
                        self.v.load(kv - 1, v_block, v_group, v_batch, v_missing)
                    owed = Int32(1)
                    v_block, v_group, v_batch = block, group, batch
                    if const_expr(looks_for_keys(c)):
                        v_missing = self.kept.missing(block * c.step, i >= fulls and i < fulls + intervals, c.step)
                    kv += 1
                if i == draw_at:
                    word = work.next()
                if const_expr(self.overlap_items):  # noqa: SIM102
                    if i >= publish_at:  # noqa: SIM102
                        if self.has_room(turn):
                            upcoming = self.publish(turn, word)
                            publish_at = Int32(FAR)
            if const_expr(self.overlap_items):
                if publish_at < FAR:
                    upcoming = self.publish(turn, word)
                # The next item's first K comes before this item's last V, as the consumers use them.
                if tiles_of(item, self.items.ring.place(turn)[0]) == 0 and owed != 0:
                    self.v.load(kv - 1, v_block, v_group, v_batch, v_missing)
                    owed = Int32(0)
            else:
                if owed != 0:
                    self.v.load(kv - 1, v_block, v_group, v_batch, v_missing)
                owed = Int32(0)
                upcoming = self.publish(turn, word)
            following = upcoming
            running = item[RowItem.VALID, self.items.ring.place(turn)[0]]

    @cute.jit
    def has_room(self, turn):
        """Whether there is room for an item: the results of the one two before it have left."""
        stage, phase = self.items.ring.place(turn)
        return cute.arch.vote_all_sync(cute.arch.mbarrier_test_wait(self.items.ring.empty + stage, phase ^ 1))

    @cute.jit
    def publish(self, turn, word):
        """Publish an item; returns the column of its first tile."""
        stage, item = self.items.ring.describe(turn, word), self.items.ring.item
        column = Int32(0)
        if item[RowItem.VALID, stage] != 0:
            self.items.load(turn, item)
            if tiles_of(item, stage) > 0:
                column = self.work.columns[first_entry(item, stage)]
        else:
            self.items.ring.end(stage)
        return column
