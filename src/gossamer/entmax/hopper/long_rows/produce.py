"""The producer warp: it draws items of rows, and keeps the rings of K and V filled by TMA."""

from __future__ import annotations

from typing import Any

import cutlass
import cutlass.cute as cute
from cutlass import Int32
from cutlass.cute.nvgpu import cpasync

from gossamer.cute.common import Opaque, Ring
from gossamer.cute.tiles import LINE, Tma, tile_loader
from gossamer.entmax.hopper.long_rows.block import LongRowsBlock, Pass
from gossamer.entmax.hopper.long_rows.configurations import EIGHT, EVERY
from gossamer.entmax.hopper.long_rows.items import publish, take
from gossamer.entmax.hopper.long_rows.rows import divide_rows, keys_of, sampled, spread


class SampleLoader(Opaque):
    """Fills a stage of a ring with rows at equal distances, eight at once."""

    def __init__(self, ring: Ring, tma: Tma, shared: Any, step: int, columns: int) -> None:
        """`tma` copies eight rows and one line of columns; `shared`: (step, columns, stages)."""
        shape = (EIGHT, LINE, step // EIGHT, columns // LINE, ring.stages)
        stride = (LINE, 1, EIGHT * LINE, step * LINE, step * columns)
        shared = cute.make_tensor(shared.iterator, cute.make_layout(shape, stride=stride))
        tiles = cute.local_tile(tma.tensor, (EIGHT, LINE), (None, None, None, None))
        self.ring, self.atom, self.step, self.columns = ring, tma.atom, step, columns
        self.to, self.from_ = cpasync.tma_partition(
            tma.atom, 0, cute.make_layout(1), cute.group_modes(shared, 0, 2), cute.group_modes(tiles, 0, 2)
        )

    @cute.jit
    def load(self, n, keys, group, batch):
        """Fill the n-th use of the ring."""
        stage = self.ring.wait_empty_at(n)
        full = self.ring.full + stage
        with cute.arch.elect_one():
            cute.arch.mbarrier_arrive_and_expect_tx(full, 2 * self.step * self.columns)
        for i in cutlass.range(self.step // EIGHT, unroll=1):
            eight = sampled(keys, i, self.step)
            for line in cutlass.range_constexpr(self.columns // LINE):
                from_ = self.from_[None, eight, line, group, batch]
                cute.copy(self.atom, from_, self.to[None, i, line, stage], tma_bar_ptr=full)


class Producer(Opaque):
    """Draws items of rows. For each it loads a sample of K, then K for every pass, and V with the last pass."""

    def __init__(self, block: LongRowsBlock) -> None:
        a, c = block.arguments, block.config
        self.block, self.arguments, self.config = block, a, c
        self.k = tile_loader(block.k, a.k, block.s_k, c.step, c.D)
        self.v = tile_loader(block.v, a.v, block.s_v, c.step, c.E)
        self.heads = cute.size(a.q, mode=[1])
        self.ratio = self.heads // cute.size(a.k.tensor, mode=[2])  # query heads of a key head
        self.k_sample = SampleLoader(block.k, a.k_sample, block.s_k, c.step, c.D)

    @cute.jit
    def draw(self, division):
        """(head, first row) of the next item that nobody has taken, longest first; a head of -1 for none."""
        a = self.arguments
        leads = cute.size(a.row_counts)
        head, first, looking = Int32(-1), Int32(0), Int32(1)
        while looking != 0:
            n = take(a.drawn.iterator)
            looking = Int32(0)
            if n < division.items * leads:
                lead = n % leads
                tile = cute.ceil_div(a.row_counts[lead], division.rows) - 1 - n // leads
                looking = Int32(1) if tile < 0 else Int32(0)
                if tile >= 0:
                    head, first = lead, tile * division.rows
        return head, first

    @cute.jit
    def run(self):
        """Load item after item. A decision is awaited before the last tile of its pass is loaded.

        So the consumers cannot be two decisions ahead, which the parity of a barrier would not show.
        """
        c, block = self.config, self.block
        division = divide_rows(block)
        turn, kv, v, decisions = Int32(0), Int32(0), Int32(0), Int32(0)  # items, tiles of K and V, so far
        head, first = self.draw(division)
        while head >= 0:
            publish(block, turn, (Int32(1), head, first))
            turn += 1
            keys = keys_of(block, head, first, division.rows)
            steps = keys.end - keys.begin
            batch, group = head // self.heads, head % self.heads // self.ratio
            self.k_sample.load(kv, keys, group, batch)
            kv += 1
            for _ in cutlass.range_constexpr(c.sampled):
                for i in cutlass.range(spread(steps), unroll=1):
                    self.k.load(kv + i, keys.begin + EVERY // 2 + i * EVERY, group, batch)
                kv += spread(steps)
            ahead = cutlass.min(Int32(c.k_stages), steps) - 1
            for i in cutlass.range(steps, unroll=1):
                self.k.load(kv + i, keys.begin + i, group, batch)
            kv += steps
            running = Int32(1)
            while running != 0:
                for i in cutlass.range(ahead, unroll=1):
                    self.k.load(kv + i, keys.begin + i, group, batch)
                block.decided.wait_full(0, decisions & 1)
                kind = block.s_decided[0]
                decisions += 1
                if kind == Pass.SUMS:
                    for i in cutlass.range(ahead, steps, unroll=1):
                        self.k.load(kv + i, keys.begin + i, group, batch)
                else:
                    for i in cutlass.range(ahead, steps, unroll=1):
                        self.k.load(kv + i, keys.begin + i, group, batch)
                        self.v.load(v + i - ahead, keys.begin + i - ahead, group, batch)
                    for i in cutlass.range(steps - ahead, steps, unroll=1):
                        self.v.load(v + i, keys.begin + i, group, batch)
                    v += steps
                    running = Int32(0)
                kv += steps
            head, first = self.draw(division)
        publish(block, turn, (Int32(0), Int32(0), Int32(0)))
