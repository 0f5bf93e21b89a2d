"""A warpgroup's rows of an item in the kernel of long rows: reading them, their products, sums and masks."""

from __future__ import annotations

from typing import Any, NamedTuple

import cutlass
import cutlass.cute as cute
from cutlass import Float32, Int32, const_expr
from cutlass.cute.nvgpu import warpgroup

from gossamer.cute.common import ROWS as TILE
from gossamer.cute.common import WARPGROUP, Opaque, Thread
from gossamer.cute.instructions import ROWS, over_quad_max, over_quad_sum, places
from gossamer.cute.tiles import accumulator, first_factor, issue, product_of, second_factor
from gossamer.entmax.hopper.long_rows.block import TileItem
from gossamer.entmax.hopper.long_rows.configurations import EIGHT
from gossamer.entmax.hopper.long_rows.rows import KeyTiles, divide_rows, keys_of, sampled, seen
from gossamer.entmax.hopper.long_rows.sums import Sums
from gossamer.kernels.hopper.device.gather.rows import RowCopies

OWN, ALL, TURN = 1, 4, 5  # named barriers: each warpgroup's own, that of all, and each one's turn


class Place(NamedTuple):
    """The rows and keys of an item that a warpgroup has."""

    split: Any  # whether all warpgroups have the same rows
    own: Any  # its first row, in the list of the head
    count: Any  # the number of listed rows of the head
    there: Any  # whether it has rows
    keys: KeyTiles  # the keys of the block
    tiles: Any  # their number of tiles
    part: Any  # the warpgroup has each tile whose number is this, modulo `parts`
    parts: Any
    mine: KeyTiles  # the keys of its rows


class Turns(Opaque):
    """Warpgroups issue their products in turn.

    Warpgroups that issue together also wait together, so that nothing multiplies while all of them add. Every warpgroup
    takes as many turns as every other.
    """

    def __init__(self, me: Any, groups: int) -> None:
        self.me, self.groups = me, groups

    @cute.jit
    def start(self):
        """The first turn is that of the first warpgroup."""
        if self.me == 0:
            cute.arch.barrier_arrive(barrier_id=TURN, number_of_threads=2 * WARPGROUP)

    def take(self) -> None:
        """Wait for this warpgroup's turn."""
        cute.arch.barrier(barrier_id=TURN + self.me, number_of_threads=2 * WARPGROUP)

    @cute.jit
    def give(self):
        """Let the next warpgroup issue its products."""
        following = self.me + 1 if self.me < self.groups - 1 else Int32(0)
        cute.arch.barrier_arrive(barrier_id=TURN + following, number_of_threads=2 * WARPGROUP)


class RowTile(Opaque):
    """64 rows of an item. State is in tensors of registers, one number for each row of a thread."""

    def __init__(self, block: Any, thread: Thread) -> None:
        a, c, dtype = block.arguments, block.config, block.s_q.element_type
        self.block, self.arguments, self.config, self.thread = block, a, c, thread
        self.mma = product_of(dtype, c.step)
        self.q = first_factor(self.mma, block.s_q)[None, None, None, thread.warpgroup]
        self.k = second_factor(self.mma, block.s_k)
        self.copies = RowCopies(a.q, block.items, block.s_q.iterator, c.D, thread.thread, threads=WARPGROUP)
        self.sums = Sums(c, a.scale)
        self.lo, self.hi, self.row = (cute.make_rmem_tensor((ROWS,), Int32) for _ in range(3))
        self.own_row = thread.thread // 32 * 16 + thread.lane // 4  # the thread's first of the 64 rows
        self.turns = Turns(thread.warpgroup, c.groups)

    @cute.jit
    def run(self):
        """Compute item after item."""
        block, items = self.block, self.block.items
        self.turns.start()
        division = divide_rows(block)
        turn, kv, v, passes = Int32(0), Int32(0), Int32(0), Int32(0)  # items, tiles of K and V, and passes so far
        stage = items.wait_full_at(turn)
        running = block.s_item[TileItem.VALID, stage]
        while running != 0:
            head, first = block.s_item[TileItem.HEAD, stage], block.s_item[TileItem.FIRST, stage]
            cute.arch.sync_warp()
            items.release(stage)
            kv, v, passes = self.item(self.place(division, head, first), head, kv, v, passes)
            turn += 1
            stage = items.wait_full_at(turn)
            running = block.s_item[TileItem.VALID, stage]

    @cute.jit
    def place(self, division, head, first):
        """The rows and keys of an item that this warpgroup has."""
        split, me, count = division.split, self.thread.warpgroup, self.arguments.row_counts[head]
        own = first if split != 0 else first + TILE * me
        part = me if split != 0 else Int32(0)
        parts = Int32(self.config.groups) if split != 0 else Int32(1)
        keys = keys_of(self.block, head, first, division.rows)
        # A warpgroup without rows releases the stages that it does not read.
        there, begin = own < count, keys.begin
        mine = keys_of(self.block, head, own, TILE) if there else KeyTiles(begin, begin, begin, begin)
        # As warp-uniform values they are not computed again for each tile.
        keys, mine = (KeyTiles(*[cute.arch.make_warp_uniform(x) for x in of]) for of in (keys, mine))
        return Place(split, own, count, there, keys, keys.end - keys.begin, part, parts, mine)

    @cute.jit
    def begin(self, place, head):
        """Read the rows of an item; where there are less than 64, the last one is repeated."""
        a, copies = self.arguments, self.copies
        own, last, heads = cutlass.min(place.own, place.count - 1), place.count - 1, cute.size(a.q, mode=[1])
        copied_rows = copies.columns()
        for j in cutlass.range_constexpr(copies.copies):
            copied_rows[j] = a.row_list[head, cutlass.min(own + copies.row + j * copies.at_once, last)]
        # Products of the last item have read the memory that is written now.
        cute.arch.barrier(barrier_id=OWN + self.thread.warpgroup, number_of_threads=WARPGROUP)
        copies.fill(copies.start(head // heads, head % heads), copied_rows, self.thread.warpgroup)
        self.sums.start_head(a.steepness[head % heads])
        for r in cutlass.range_constexpr(ROWS):
            self.row[r] = a.row_list[head, cutlass.min(own + self.own_row + 8 * r, last)]
            self.lo[r], self.hi[r] = seen(self.block, self.row[r])
        cute.arch.cp_async_commit_group()
        cute.arch.cp_async_wait_group(0)
        cute.arch.fence_view_async_shared()
        cute.arch.barrier(barrier_id=OWN + self.thread.warpgroup, number_of_threads=WARPGROUP)

    @cute.jit
    def product(self, n, in_turn: cutlass.Constexpr = True):
        """The scores of the rows at the n-th tile of K."""
        stage = self.block.k.wait_full_at(n)
        scores = accumulator(self.mma, self.config.step)
        if const_expr(in_turn):
            self.turns.take()
        issue(self.mma, scores, self.q, self.k[None, None, None, stage], False)
        if const_expr(in_turn):
            self.turns.give()
        warpgroup.wait_group(0)
        self.block.k.release(stage)
        return scores

    @cute.jit
    def pass_turns(self, number: cutlass.Constexpr):
        """Take turns and issue nothing."""
        for _ in cutlass.range_constexpr(number):
            self.turns.take()
            self.turns.give()

    @cute.jit
    def mask_sample(self, keys, scores):
        """Set the scores of a sample that a row does not see to -inf."""
        for i in places(scores):
            r = const_expr(i % 4 // 2)
            key = EIGHT * sampled(keys, i // 4, self.config.step) + 2 * (self.thread.lane % 4) + i % 2
            scores[i] = scores[i] if key >= self.lo[r] and key < self.hi[r] else -Float32.inf

    @cute.jit
    def mask(self, place, tile, scores):
        """Set the scores that a row does not see to -inf, in a tile that not every row sees whole."""
        if tile < place.mine.middle or tile >= place.mine.middle_end:
            for i in places(scores):
                r = const_expr(i % 4 // 2)
                j = tile * self.config.step + 2 * (self.thread.lane % 4) + (8 * (i // 4) + i % 2)
                is_seen = j < self.hi[r]
                if const_expr(self.config.bounds == "intervals"):
                    is_seen = is_seen and j >= self.lo[r]
                scores[i] = scores[i] if is_seen else -Float32.inf

    @cute.jit
    def exchange(self, place, passes, kinds, top):
        """Sum over all threads of a row, and over all parts of the keys, in order.

        Args:
            kinds: the sums.
            top: numbers whose largest is taken, or None.
        """
        me, shared = place.part, self.block.s_sums
        for r in cutlass.range_constexpr(ROWS):
            for x in kinds:
                x[r] = over_quad_sum(x[r])
            if const_expr(top is not None):
                top[r] = over_quad_max(top[r])
        if place.split != 0:
            every = kinds if const_expr(top is None) else (*kinds, top)
            if self.thread.lane % 4 == 0:
                for r in cutlass.range_constexpr(ROWS):
                    for n, x in enumerate(every):
                        shared[self.own_row + 8 * r, n, me, passes & 1] = x[r]
            self.wait_for_all()
            for r in cutlass.range_constexpr(ROWS):
                for n, x in enumerate(every):
                    row_parts = shared[self.own_row + 8 * r, n, None, passes & 1]
                    x[r] = row_parts[0]
                    for other in cutlass.range_constexpr(1, self.config.groups):
                        if const_expr(n == len(kinds)):
                            x[r] = cute.arch.fmax(x[r], row_parts[other], nan=True)
                        else:
                            x[r] = x[r] + row_parts[other]

    @cute.jit
    def gather_parts(self, place, acc):
        """Add the parts of a result that warpgroups with the same rows have, in order; the first gets the sum."""
        me, shared = self.thread.warpgroup, self.block.s_o
        if place.split != 0:
            if me > 0:
                for i in places(acc):
                    shared[self.thread.thread, i, me - 1] = acc[i]
            self.wait_for_all()
            if me == 0:
                for other in cutlass.range_constexpr(self.config.groups - 1):
                    for i in places(acc):
                        acc[i] = acc[i] + shared[self.thread.thread, i, other]

    def wait_for_all(self) -> None:
        """Wait for all warpgroups that compute."""
        cute.arch.barrier(barrier_id=ALL, number_of_threads=WARPGROUP * self.config.groups)
