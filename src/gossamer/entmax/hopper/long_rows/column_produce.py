"""The warps that serve the kernel of dK and dV: one draws tiles of keys, and two gather rows."""

from __future__ import annotations

import cutlass
import cutlass.cute as cute
from cutlass import Float32, Int32

from gossamer.cute.common import ROWS as TILE
from gossamer.cute.common import Opaque
from gossamer.cute.tiles import tile_loader
from gossamer.entmax.hopper.long_rows.column_block import ColumnItem, Kind, LongRowsColumnsBlock
from gossamer.entmax.hopper.long_rows.items import publish, take
from gossamer.entmax.hopper.long_rows.rows import any_row, seen
from gossamer.kernels.hopper.device.gather.rows import THREADS, RowCopies

NOWHERE = -1e30  # the place on the line of a missing row, at which no weight is positive


class KeyServer(Opaque):
    """Draws items, and loads their K and V by TMA."""

    def __init__(self, block: LongRowsColumnsBlock) -> None:
        a, c = block.arguments, block.config
        self.block, self.arguments, self.config = block, a, c
        self.k = tile_loader(block.keys, a.k, block.s_k, TILE, c.D)
        self.v = tile_loader(block.keys, a.v, block.s_v, TILE, c.E)
        self.G = cute.size(a.k.tensor, mode=[2])

    @cute.jit
    def run(self):
        """Serve item after item."""
        a, c, block = self.arguments, self.config, self.block
        leads = self.G * cute.size(a.k.tensor, mode=[3])
        count = leads * cute.ceil_div(cute.size(a.k.tensor, mode=[0]), c.keys)
        count = count if any_row(a.row_counts) != 0 else Int32(0)
        turn, n = Int32(0), self.take(count)
        while n < count:
            lead, tile = n % leads, n // leads
            publish(block, turn, (Int32(1), lead, tile))
            block.keys.wait_empty_at(turn)
            with cute.arch.elect_one():
                cute.arch.mbarrier_arrive_and_expect_tx(block.keys.full, c.groups * (self.k.bytes + self.v.bytes))
            for g in cutlass.range_constexpr(c.groups):
                for one in (self.k, self.v):
                    at = one.from_[None, tile * c.groups + g, lead % self.G, lead // self.G]
                    cute.copy(one.atom, at, one.to[None, g], tma_bar_ptr=block.keys.full)
            turn += 1
            n = self.take(count)
        publish(block, turn, (Int32(0), Int32(0), Int32(0)))

    @cute.jit
    def take(self, count):
        """The number of the next item that nobody has taken; without rows there are no items."""
        n = count
        if count > 0:
            n = take(self.arguments.drawn.iterator + 1)
        return n


class RowGatherer(Opaque):
    """Two warps that gather the rows which see any key of an item, and mark its end by a stage."""

    def __init__(self, block: LongRowsColumnsBlock) -> None:
        a, c = block.arguments, block.config
        self.block, self.arguments, self.config = block, a, c
        self.thread = cute.arch.thread_idx()[0] % THREADS
        self.queries = RowCopies(a.q, block.rows, block.s_q.iterator, c.D, self.thread)
        self.gradients = RowCopies(a.dout, block.rows, block.s_dout.iterator, c.E, self.thread)
        self.rows = self.queries.columns()

    @cute.jit
    def run(self):
        """Serve item after item."""
        a, c, block = self.arguments, self.config, self.block
        items, heads = block.items, cute.size(a.q, mode=[1])
        ratio = heads // cute.size(a.k.tensor, mode=[2])
        turn, n = Int32(0), Int32(0)  # items and stages so far
        stage = items.wait_full_at(turn)
        running = block.s_item[ColumnItem.VALID, stage]
        while running != 0:
            lead, first = block.s_item[ColumnItem.LEAD, stage], block.s_item[ColumnItem.TILE, stage] * c.keys
            cute.arch.sync_warp()
            items.release(stage)
            for member in cutlass.range(ratio, unroll=1):
                n = self.head(lead * ratio + member, heads, first, n)
            to = block.rows.wait_empty_at(n)
            self.describe(to, Int32(Kind.END))
            cute.arch.mbarrier_arrive(block.rows.full + to)
            cute.arch.mbarrier_arrive(block.rows.full + to)
            n += 1
            turn += 1
            stage = items.wait_full_at(turn)
            running = block.s_item[ColumnItem.VALID, stage]

    @cute.jit
    def head(self, head, heads, first, n):
        """Gather the rows of a head that see any of the keys from `first` on; returns the number of stages so far."""
        a, c, block = self.arguments, self.config, self.block
        count = a.row_counts[head]
        end = cutlass.min(first + c.keys, cute.size(a.k.tensor, mode=[0]))
        start = self.count_rows(head, count, first, True)
        stop = self.count_rows(head, count, end, False)
        batch, query_head = head // heads, head % heads
        q_start, do_start = self.queries.start(batch, query_head), self.gradients.start(batch, query_head)
        steepness, lead = a.steepness[query_head], head * cute.size(a.q, mode=[2])
        for at in cutlass.range(start, stop, TILE, unroll=1):
            for j in cutlass.range_constexpr(self.queries.copies):
                place = at + self.queries.row + j * self.queries.at_once
                self.rows[j] = a.row_list[head, place] if place < stop else Int32(-1)
            line, delta, lo, hi = Float32(NOWHERE), Float32(0.0), Int32(0), Int32(0)
            whole = Int32(1)
            if at + self.thread < stop:
                row = a.row_list[head, at + self.thread]
                lo, hi = seen(block, row)
                line, delta = 1.0 - steepness * a.lam[lead + row], a.delta[lead + row]
                whole = Int32(1) if lo <= first and hi >= end else Int32(0)
            kind = Int32(Kind.FULL) if cute.arch.vote_all_sync(whole != 0) else Int32(Kind.MASKED)
            stage = block.rows.wait_empty_at(n)
            self.queries.fill(q_start, self.rows, stage)
            self.gradients.fill(do_start, self.rows, stage)
            cute.arch.cp_async_mbarrier_arrive_noinc(block.rows.full + stage)
            self.describe(stage, kind)
            block.s_line[self.thread, stage], block.s_delta[self.thread, stage] = line, delta
            block.s_lo[self.thread, stage], block.s_hi[self.thread, stage] = lo, hi
            cute.arch.mbarrier_arrive(block.rows.full + stage)
            n += 1
        return n

    @cute.jit
    def describe(self, stage, kind):
        """Write the kind of a half of a stage."""
        if cute.arch.lane_idx() == 0:
            self.block.s_kind[self.thread // 32, stage] = kind

    @cute.jit
    def count_rows(self, head, count, key, ends: cutlass.Constexpr):
        """The number of rows of a head whose keys end at or before `key` (`ends`), or begin before it; 32 at once."""
        a, low, high = self.arguments, Int32(0), count
        while low < high:
            step = cute.ceil_div(high - low, 32)
            place = low + cute.arch.lane_idx() * step
            counted = Int32(0)
            if place < high:
                lo, hi = seen(self.block, a.row_list[head, place])
                counted = Int32(1) if (hi <= key if cutlass.const_expr(ends) else lo < key) else Int32(0)
            passed = cute.arch.popc(cute.arch.vote_ballot_sync(counted != 0))
            end = low + passed * step
            high = end if end < high else high
            low = low + (passed - 1) * step + 1 if passed > 0 else high
        return low
