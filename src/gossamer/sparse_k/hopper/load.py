"""Warps that gather the keys and values of SparseK attention, and the terms of gates and masks for those of a list."""

from __future__ import annotations

from typing import Any

import cutlass
import cutlass.cute as cute
from cutlass import Int32, Int64

from gossamer.cute.common import Opaque, ring
from gossamer.cute.instructions import assembly
from gossamer.cute.row_items import RowItem
from gossamer.kernels.hopper.device.gather.rows import THREADS, RowCopies, copy
from gossamer.sparse_k.hopper.block import SparseKBlock
from gossamer.sparse_k.hopper.configurations import TILE
from gossamer.sparse_k.hopper.items import SparseKItem

WARP = 32
HELD = TILE // WARP  # keys of a step that a lane holds: every 32nd
MINE = TILE // THREADS  # keys whose terms a thread copies


class Spread:
    """The keys of a step that the lanes of a warp hold: `keys[j]` is the key whose row a thread copies as its j-th."""

    def __init__(self, held: Any, copies: RowCopies) -> None:
        self.held, self.copies = held, copies

    def __getitem__(self, j: int) -> Any:
        first = j * self.copies.at_once
        return cute.arch.shuffle_sync(self.held[first // WARP], first % WARP + self.copies.row)


class LiveGatherer(Opaque):
    """Two warps that fill the rings of K and V for item after item."""

    def __init__(self, block: SparseKBlock, thread: Any) -> None:
        a, c = block.arguments, block.config
        self.block, self.arguments, self.config, self.thread = block, a, c, thread
        self.keys = RowCopies(a.k, block.k, block.s_k.iterator, c.size, thread, rows=TILE)
        self.values = RowCopies(a.v, block.v, block.s_v.iterator, c.size, thread, rows=TILE)
        self.ratio = cute.size(a.q.tensor, mode=[2]) // cute.size(a.k, mode=[1])  # query heads of a key head
        self.N, self.room = cute.size(a.k, mode=[2]), cute.size(a.lists, mode=[2])
        self.held, self.upcoming = (cute.make_rmem_tensor((HELD,), Int32) for _ in range(2))
        self.upcoming.fill(-1)

    @cute.jit
    def run(self):
        """Gather item after item."""
        items, a = self.block.items, self.arguments
        item = items.item
        turn, kv = Int32(0), Int32(0)  # items and steps so far
        items.wait_full(0, 0)
        running = item[RowItem.VALID, 0]
        while running != 0:
            place = items.place(turn)[0]
            batch, group = item[RowItem.BATCH, place], item[RowItem.HEAD, place] // self.ratio
            start, first = item[RowItem.TILE, place] * TILE, item[SparseKItem.FIRST, place]
            near = 1 + item[SparseKItem.WINDOW, place]  # steps of the window
            through = near + item[SparseKItem.WHOLE, place]
            steps = through + item[SparseKItem.REST, place]
            listed, unit = item[SparseKItem.LISTED, place], item[SparseKItem.UNIT, place]
            list_start = a.lists.iterator.toint() + 4 * (Int64(item[SparseKItem.LIST, place]) * self.room)
            if listed > self.room:
                list_start = a.every.iterator.toint() + 4 * (Int64(unit) * self.N)
            k_start, v_start = self.keys.start(batch, group), self.values.start(batch, group)
            items.forget(place)
            self.find(Int32(0), start, first, near, listed, list_start)
            for i in cutlass.range(steps, unroll=1):
                for n in cutlass.range_constexpr(HELD):
                    self.held[n] = self.upcoming[n]
                if i + 1 < steps:
                    self.find(i + 1, start, first, near, listed, list_start)
                stage = self.keys.ring.wait_empty_at(kv)
                self.keys.fill(k_start, Spread(self.held, self.keys), stage)
                if i >= near:
                    self.terms(kv, (i - near) * TILE, listed, unit, list_start, i >= through)
                cute.arch.cp_async_mbarrier_arrive_noinc(self.keys.ring.full + stage)
                self.values.ring.wait_empty_at(kv)
                self.values.fill(v_start, Spread(self.held, self.values), stage)
                cute.arch.cp_async_mbarrier_arrive_noinc(self.values.ring.full + stage)
                kv += 1
            turn += 1
            place = items.wait_full_at(turn)
            running = item[RowItem.VALID, place]

    @cute.jit
    def find(self, i, start, first, near, listed, list_start):
        """Read this lane's keys of step `i`; -1 where there are none."""
        lane = cute.arch.lane_idx()
        if i < near:
            column = start if i == 0 else first + (i - 1) * TILE
            for n in cutlass.range_constexpr(HELD):
                key = column + n * WARP + lane
                self.upcoming[n] = key if key < self.N else Int32(-1)
        else:
            entry = (i - near) * TILE + lane
            for n in cutlass.range_constexpr(HELD):
                self.upcoming[n] = read(list_start, entry + n * WARP, listed)

    @cute.jit
    def terms(self, kv, entry, listed, unit, list_start, partly):
        """Issue this thread's copies of the terms of gates and masks, for a step that begins at an entry of a list."""
        a = self.arguments
        u, key, last = (x.iterator.toint() for x in self.block.s_terms)
        slot = ring(kv, self.config.slots)[0]
        warp, lane = self.thread // WARP, cute.arch.lane_idx()
        row = 4 * (Int64(unit) * self.N)
        for n in cutlass.range_constexpr(MINE):
            place = (warp * MINE + n) * WARP + lane
            mine = self.held[n] if warp == 0 else self.held[MINE + n]
            to = (slot * TILE + place) * 4
            copy(u + to, a.u.iterator.toint() + row, mine, Int32(4), False, 4)
            if partly:
                at = entry + place
                at = at if at < listed else Int32(-1)
                copy(key + to, list_start, at, Int32(4), False, 4)
                copy(last + to, a.last.iterator.toint() + row, mine, Int32(4), False, 4)


def read(start: Any, entry: Any, end: Any) -> Any:
    """An entry of a list of int32 in global memory, -1 at and after its end."""
    code = (
        "{ .reg .pred p; .reg .b64 a; setp.lt.s32 p, $2, $3; mad.wide.s32 a, $2, 4, $1; mov.b32 $0, -1; "
        "@p ld.global.b32 $0, [a]; }"
    )
    return assembly(Int32, code, Int64(start), Int32(entry), Int32(end))
