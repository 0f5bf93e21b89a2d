"""The consumer warpgroups of the forward kernels: O = softmax(Q K^T) V for 64 query rows of each item.

A consumer is composed of rings, which say how tiles arrive, a mask source (masks.py, gather/masks.py), the softmax and
the epilogue. One step's softmax runs beside the product P V of the step before, also across items.
"""

from __future__ import annotations

from enum import IntEnum
from typing import Any

import cutlass
import cutlass.cute as cute
from cutlass import Int32, const_expr
from cutlass.cute.nvgpu import warpgroup

from gossamer.cute import instructions
from gossamer.cute.common import ROWS, WARPGROUP, Barrier, Opaque, Thread
from gossamer.cute.row_items import RowItem
from gossamer.cute.tiles import (
    accumulator,
    first_factor,
    held_factor,
    hold,
    issue,
    product_of,
    second_factor,
    transposed,
)
from gossamer.kernels.hopper.device.configurations import Hold
from gossamer.kernels.hopper.device.forward.block import StoringBlock
from gossamer.kernels.hopper.device.forward.masks import one, packed_mask
from gossamer.kernels.hopper.device.forward.results import Epilogue
from gossamer.kernels.hopper.device.forward.softmax import Softmax

UNMASKED = ("full", "live")  # steps of which every pair is kept; of live keys with gates


class Half(IntEnum):
    """The columns of a step that P has."""

    LEFT = 0
    RIGHT = 1
    BOTH = 2


class Consumer(Opaque):
    """A warpgroup with 64 query rows of each item."""

    def __init__(
        self, block: StoringBlock, thread: Thread, source: Any, softmax: type[Softmax] = Softmax,
        epilogue: type[Epilogue] = Epilogue,
    ) -> None:  # fmt: skip
        """`source`: the class of the mask source, `softmax` and `epilogue` those of what is made of scores and of O."""
        c, dtype = block.config, block.s_q.element_type
        self.config, self.thread = c, thread
        self.items, self.k_ring, self.v_ring = block.items, block.k, block.v
        self.groups, self.parts = c.block_q // ROWS, c.block_kv // c.step  # warpgroups; steps of a tile
        self.overlap_items = c.q_stages > 1  # the next item's Q is there while this item's is in use
        # An item's result is finished while the next one's second S is computed, if registers hold both, and leaves
        # them when the product that overwrites O runs already, if they hold it in 16 bits beside O.
        self.defer_epilogue = self.groups < 3
        self.late_store = self.defer_epilogue and c.hold == Hold.UNCHECKED
        # What masks an item's first step is fetched before its S, not beside it, which takes registers.
        self.prefetch_mask = self.groups == 3 or source.with_keys
        # Of an interval step of which a warpgroup needs half of the columns no more is computed.
        self.half_steps = c.step == 128 and self.parts == 1
        self.mma_qk = product_of(dtype, c.step, registers=c.held_q)
        self.mma_pv = product_of(dtype, c.E, transposed=True, registers=True)
        self.softmax = softmax(block, thread, self.mma_pv)
        self.mask = self.source(source, block, thread)
        self.epilogue = epilogue(block, thread, self.softmax, self.mma_pv)
        self.s_q, self.k = block.s_q, second_factor(self.mma_qk, block.s_k)
        if c.held_q:
            self.q = held_factor(self.mma_qk, c.D)
        else:
            self.q = first_factor(self.mma_qk, block.s_q)
        self.v = second_factor(self.mma_pv, transposed(block.s_v, c.step, c.E, c.stages))
        if self.half_steps:
            self.mma_half = product_of(dtype, c.step // 2)
            self.half = one()  # the columns that P has
            self.half.fill(Half.BOTH)
            self.q_half = first_factor(self.mma_half, block.s_q)
            self.k_half = second_factor(self.mma_half, cute.flat_divide(block.s_k, (c.step // 2, c.D)))

    def source(self, kind: Any, block: StoringBlock, thread: Thread) -> Any:
        """The mask source."""
        return kind(block, thread)

    @cute.jit
    def run(self):
        """Item after item. The first step of one is computed together with the last P V of the one before."""
        item, me = self.items.item, self.thread.warpgroup
        if const_expr(self.groups > 1):  # noqa: SIM102
            if me == 0:
                cute.arch.barrier_arrive(barrier_id=Barrier.WARPGROUP_TURN, number_of_threads=2 * WARPGROUP)
        turn = Int32(0)  # items so far
        kv = Int32(0)  # steps so far
        started = Int32(0)  # the item's first step was done together with the last one of the item before
        softmax = self.softmax
        self.items.wait_full(0, 0)
        running = item[RowItem.VALID, 0]
        for rows in (softmax.reference, softmax.row_sum, softmax.old_reference, softmax.old_sum):
            rows.fill(0.0)
        while running != 0:
            stage = self.items.place(turn)[0]
            count = self.mask.count(stage)
            buffer = stage * self.groups + me
            if started == 0:
                self.softmax.begin()
                self.softmax.o.fill(0.0)
                self.mask.prepare(stage)
                if count > 0:
                    self.first(buffer, kv)
                    kv += 1
            kv = self.mask.walk(self, stage, buffer, kv, started)
            started = Int32(0)
            next_count = Int32(0)
            turn += 1
            if const_expr(self.overlap_items):
                following = self.items.wait_full_at(turn)
                running = item[RowItem.VALID, following]
                next_count = self.mask.count(following)
                if count > 0 and next_count > 0:
                    started = Int32(1)
            if started != 0:
                self.bridge(self.items.place(turn)[0], kv)
                kv += 1
                at_once = Int32(1)
                if const_expr(self.defer_epilogue):  # or with the next step, if the item has one
                    at_once = Int32(1) if next_count * self.parts == 1 else Int32(0)
                if at_once != 0:
                    self.epilogue.finish(stage, self.groups > 1)
                    self.softmax.o.fill(0.0)
            else:
                if count > 0:
                    self.last(kv)
                self.softmax.begin()
                self.epilogue.finish(stage, False)
            if const_expr(not self.overlap_items):
                running = item[RowItem.VALID, self.items.wait_full_at(turn)]

    @cute.jit
    def first(self, buffer, kv):
        """The first step of an item: S and softmax; its P V is issued by the next step."""
        k = self.k_ring.place(kv)
        self.hold_q(buffer)
        self.wait_k(k)
        scores = self.issue_scores(buffer, k)  # S = Q K^T
        warpgroup.wait_group(0)
        self.k_ring.release(k[0])
        self.softmax.after_values(scores, self.first_softmax(scores), False)

    @cute.jit
    def bridge(self, following, kv):
        """The first step of the item in stage `following`, together with the last P V of the current one."""
        k, v = self.k_ring.place(kv), self.v_ring.place(kv - 1)
        if const_expr(self.prefetch_mask):
            self.mask.prepare(following)
        self.wait_k(k)
        self.hold_q(following * self.groups + self.thread.warpgroup)
        self.take_turn(False)
        scores = self.issue_scores(following * self.groups + self.thread.warpgroup, k)  # S = Q K^T
        self.wait_v(v)
        self.issue_values(v, True, self.half_steps)  # O += P V
        self.remember(None)
        self.pass_turn(False)
        self.softmax.begin()
        if const_expr(not self.prefetch_mask):
            self.mask.prepare(following)
        warpgroup.wait_group(1)
        self.k_ring.release(k[0])
        begun = self.first_softmax(scores)
        warpgroup.wait_group(0)
        self.v_ring.release(v[0])
        self.softmax.after_values(scores, begun, False)

    @cute.jit
    def open(self, stage, buffer, kv, started, steps):
        """The second of an item's `steps`, where it finishes the item before: the first was done together with that.

        Returns how many steps were done so far, in all and of this item.
        """
        done = Int32(1)
        if const_expr(self.overlap_items and self.defer_epilogue):  # noqa: SIM102
            if started != 0 and steps > 1:
                self.second(stage, buffer, kv)
                kv += 1
                done = Int32(2)
        return kv, done

    @cute.jit
    def second(self, stage, buffer, kv):
        """The second step of an item, of any kind of mask; its S runs while the item before is finished.

        Its P V is the first of the item, and overwrites O.
        """
        epilogue, before = self.epilogue, 1 - stage
        k, v = self.k_ring.place(kv), self.v_ring.place(kv - 1)
        words = packed_mask(self.config.step)
        masked = self.mask.second(words, stage)
        self.wait_k(k)
        self.take_turn(False)
        scores = self.issue_scores(buffer, k)  # S = Q K^T
        if const_expr(self.late_store):
            factor, lse = epilogue.factors(before)
            packed = epilogue.normalise(factor)
            if self.items.item[RowItem.SLOT, before] >= 0:
                epilogue.write_part(before, factor, lse)
        else:
            epilogue.finish(before, self.groups > 1)
        self.wait_v(v)
        self.issue_values(v, False, False)  # O = P V
        self.pass_turn(False)
        if const_expr(self.late_store):
            if self.items.item[RowItem.SLOT, before] < 0:
                epilogue.send(before, packed, lse, self.groups > 1)
            epilogue.sent()
        warpgroup.wait_group(1)
        self.k_ring.release(k[0])
        self.softmax.transform(scores)
        if masked:
            instructions.keep(scores, words)
        self.finish_step(scores, v)

    @cute.jit
    def step(self, mode: cutlass.Constexpr, buffer, kv, at, i, half: cutlass.Constexpr = None, free=False):
        """S of this step and P V of the one before, softmax of this step while P V runs.

        `at` is the step's first column (mode "interval") or the first entry of the list of whose steps it is number
        `i`. With `half` given only that half of the step's columns is computed: no row of this warpgroup keeps any
        other. A step that is `free`, in all warpgroups, is done without turns.
        """
        k, v = self.k_ring.place(kv), self.v_ring.place(kv - 1)
        columns = self.config.step if const_expr(half is None) else self.config.step // 2
        words = packed_mask(columns)
        self.mask.fetch(mode, words, at, i)
        self.wait_k(k)
        self.take_turn(free)
        scores = self.issue_scores(buffer, k, half)  # S = Q K^T
        self.wait_v(v)
        self.issue_values(v, True, self.half_steps and mode == "interval")  # O += P V
        self.pass_turn(free)
        if const_expr(mode == "interval"):
            first = at + (0 if const_expr(half is None) else half * columns)
            self.mask.interval(words, buffer // self.groups, first)
        warpgroup.wait_group(1)
        if const_expr(self.softmax.hold == Hold.UNCHECKED_FULL and mode == "full"):
            self.softmax.transform(scores)
            warpgroup.wait_group(0)
            self.v_ring.release(v[0])
            self.softmax.in_place(scores, buffer, k[0])
            self.k_ring.release(k[0])
            self.remember(half)
        else:
            self.k_ring.release(k[0])
            self.softmax.transform(scores)
            if const_expr(mode not in UNMASKED):
                instructions.keep(scores, words)
            self.finish_step(scores, v, half)

    @cute.jit
    def last(self, kv):
        """The P V of an item's last step."""
        v = self.v_ring.place(kv - 1)
        self.v_ring.wait_full(*v)
        self.issue_values(v, True, False)  # O += P V
        warpgroup.wait_group(0)
        self.v_ring.release(v[0])
        self.remember(None)

    @cute.jit
    def first_softmax(self, scores):
        """The references of an item, and what of the softmax of its first step runs beside P V."""
        self.softmax.transform(scores)
        self.mask.keep_first(scores)
        return self.softmax.first_step(scores)

    @cute.jit
    def finish_step(self, scores, v, half: cutlass.Constexpr = None):
        """P of a step, of its masked scores: what of it does not run beside P V waits for that."""
        begun = self.softmax.beside_values(scores, self.softmax.row_sum[0])
        warpgroup.wait_group(0)
        self.v_ring.release(v[0])
        self.softmax.after_values(scores, begun, True, half)
        self.remember(half)

    @cute.jit
    def remember(self, half: cutlass.Constexpr):
        """Which half of a step's columns P has, or both."""
        if const_expr(self.half_steps):
            self.half[0] = Int32(Half.BOTH if const_expr(half is None) else half)

    @cute.jit
    def hold_q(self, buffer):
        """Read Q of an item into registers, where it is kept there."""
        if const_expr(self.config.held_q):
            hold(self.mma_qk, self.s_q[None, None, buffer], self.q, self.thread.thread)

    @cute.jit
    def issue_scores(self, buffer, place, half: cutlass.Constexpr = None):
        """Issue S = Q K^T of a step, or of half of its columns, and return S. `place`: that of its K."""
        if const_expr(half is None):
            scores = accumulator(self.mma_qk, self.config.step)
            q = self.q if const_expr(self.config.held_q) else self.q[None, None, None, buffer]
            k = self.k[None, None, None, place[0]]
            issue(self.mma_qk, scores, q, k, False)
        else:
            scores = accumulator(self.mma_half, self.config.step // 2)
            q, k = self.q_half[None, None, None, buffer], self.k_half[None, None, None, half, 0, place[0]]
            issue(self.mma_half, scores, q, k, False)
        return scores

    @cute.jit
    def issue_values(self, place, accumulate: cutlass.Constexpr, by_halves: cutlass.Constexpr):
        """Issue O += P V of a step, of all columns, or by halves of those that P has. `place`: that of its V.

        Each way is a group that ends where its products do: one that ended behind a branch would be counted as several,
        and S be waited for together with P V.
        """
        p, o, v = self.softmax.p, self.softmax.o, self.v[None, None, None, place[0]]
        if const_expr(not by_halves):
            issue(self.mma_pv, o, p, v, accumulate)
        else:
            count = const_expr(cute.size(p, mode=[2]))
            half = cute.arch.make_warp_uniform(self.half[0])
            if half == Half.BOTH:
                issue(self.mma_pv, o, p, v, accumulate)
            elif half == Half.LEFT:
                issue(self.mma_pv, o, p, v, accumulate, 0, count // 2)
            else:
                issue(self.mma_pv, o, p, v, accumulate, count // 2, count)

    @cute.jit
    def wait_k(self, place):
        """Wait for K of a step, unless its mask came with it, and was waited for."""
        if const_expr(not self.mask.with_keys):
            self.k_ring.wait_full(*place)

    @cute.jit
    def wait_v(self, place):
        """Wait for V of a step, unless K of the step after it, which was waited for, shows that it is there."""
        if const_expr(not self.mask.with_values):
            self.v_ring.wait_full(*place)

    @cute.jit
    def take_turn(self, free):
        """Wait for this warpgroup's turn at the tensor cores, but for a step in which all of them are free."""
        if const_expr(self.groups > 1):  # noqa: SIM102
            if not free:
                number = Barrier.WARPGROUP_TURN + self.thread.warpgroup
                cute.arch.barrier(barrier_id=number, number_of_threads=2 * WARPGROUP)

    @cute.jit
    def pass_turn(self, free):
        """Let the next warpgroup issue its products."""
        if const_expr(self.groups > 1):  # noqa: SIM102
            if not free:
                me = self.thread.warpgroup
                other = 1 - me if const_expr(self.groups == 2) else (me + 1) % self.groups
                number = Barrier.WARPGROUP_TURN + other
                cute.arch.barrier_arrive(barrier_id=number, number_of_threads=2 * WARPGROUP)
