"""The consumer warpgroups of the forward kernels: O = softmax(Q K^T) V for 64 query rows of each item.

A consumer is composed of rings, which say how tiles arrive, a mask source (masks.py, gather/masks.py), the softmax and
the epilogue. One step's softmax runs beside the product P V of the step before, also across items.
"""

from __future__ import annotations

from dataclasses import dataclass
from enum import IntEnum
from typing import Any

import cutlass
import cutlass.cute as cute
from cutlass import Int32, const_expr
from cutlass.cute.nvgpu import warpgroup

from gossamer.kernels.hopper.device import instructions
from gossamer.kernels.hopper.device.common import WARPGROUP, Barrier, Opaque, Ring, Thread
from gossamer.kernels.hopper.device.configurations import Hold
from gossamer.kernels.hopper.device.forward.results import Epilogue, Results
from gossamer.kernels.hopper.device.forward.softmax import Softmax
from gossamer.kernels.hopper.device.row_items import RowItem
from gossamer.kernels.hopper.device.tiles import accumulator, issue, product_of, transposed
from gossamer.kernels.hopper.device.work import ItemRing


class Half(IntEnum):
    """The columns of a step that P has."""

    LEFT = 0
    RIGHT = 1
    BOTH = 2


@dataclass(frozen=True)
class Plan:
    """How a consumer runs, as its kernel was compiled."""

    groups: int  # consumer warpgroups of a block
    parts: int  # steps of a tile
    step: int  # keys of a step
    D: int
    E: int
    hold: int  # of `Hold`
    score: str
    overlap_items: bool  # the next item's Q is there while this item's is in use
    warpgroup_barrier: bool  # warpgroups issue their products in turn
    defer_epilogue: bool  # an item's result is finished while the next one's second S is computed
    late_store: bool  # it leaves its registers when the product that overwrites O runs already
    prefetch_mask: bool  # what masks an item's first step is fetched before its S, not beside it
    k_shows_v: bool  # who has waited for K of a step need not wait for V of the step before
    half_steps: bool  # of an interval step of which a warpgroup needs half of the columns no more is computed


@dataclass(frozen=True, eq=False)
class Consumer(Opaque):
    """A warpgroup with 64 query rows of each item."""

    plan: Plan
    thread: Thread
    items: ItemRing  # with Q
    k_ring: Ring
    v_ring: Ring
    mask: Any  # the mask source
    softmax: Softmax
    epilogue: Epilogue
    mma_qk: Any
    mma_pv: Any
    mma_half: Any
    q: Any  # fragments of what the products read
    k: Any
    v: Any
    half: Any  # the columns that P has; and the fragments of products of half of them
    q_half: Any
    k_half: Any

    @classmethod
    def of(
        cls, plan: Plan, items: ItemRing, k_ring: Ring, v_ring: Ring, mask: Any, softmax: Softmax, results: Results,
        s_v: Any, s_o: Any,
    ) -> Consumer:  # fmt: skip
        """The consumer of these tiles in shared memory, besides those of which `softmax` can make scores again."""
        thread, s_q, s_k = softmax.thread, softmax.s_q, softmax.s_k
        p, dtype = plan, s_q.element_type
        mma_qk, mma_pv = product_of(dtype, p.step), product_of(dtype, p.E, transposed=True, registers=True)
        qk, pv = mma_qk.get_slice(0), mma_pv.get_slice(0)
        s_vt = transposed(s_v, p.step, p.E, v_ring.stages)
        q, k = qk.make_fragment_A(qk.partition_A(s_q)), qk.make_fragment_B(qk.partition_B(s_k))
        v = pv.make_fragment_B(pv.partition_B(s_vt))
        mma_half = half = q_half = k_half = None
        if p.half_steps:
            mma_half = product_of(dtype, p.step // 2)
            whole = mma_half.get_slice(0)
            half = cute.make_rmem_tensor((1,), Int32)
            half.fill(Half.BOTH)
            q_half = whole.make_fragment_A(whole.partition_A(s_q))
            k_half = whole.make_fragment_B(whole.partition_B(cute.flat_divide(s_k, (p.step // 2, p.D))))
        epilogue = Epilogue(p.groups, results, thread, items.item, softmax, s_o, mma_pv)
        return cls(
            plan, thread, items, k_ring, v_ring, mask, softmax, epilogue, mma_qk, mma_pv, mma_half, q, k, v, half,
            q_half, k_half,
        )  # fmt: skip

    @cute.jit
    def run(self):
        """Item after item. The first step of one is computed together with the last P V of the one before."""
        p, item, me = self.plan, self.items.item, self.thread.warpgroup
        if const_expr(p.warpgroup_barrier):  # noqa: SIM102
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
        self.mask.reset()
        while running != 0:
            stage = self.items.place(turn)[0]
            count = self.mask.count(stage)
            buffer = stage * p.groups + me
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
            if const_expr(p.overlap_items):
                following, phase = self.items.place(turn)
                self.items.wait_full(following, phase)
                running = item[RowItem.VALID, following]
                next_count = self.mask.count(following)
                if count > 0 and next_count > 0:
                    started = Int32(1)
            if started != 0:
                self.bridge(self.items.place(turn)[0], kv)
                kv += 1
                at_once = Int32(1)
                if const_expr(p.defer_epilogue):  # or with the next step, if the item has one
                    at_once = Int32(1) if next_count * p.parts == 1 else Int32(0)
                if at_once != 0:
                    self.epilogue.finish(stage, p.warpgroup_barrier)
                    self.softmax.o.fill(0.0)
            else:
                if count > 0:
                    self.last(kv)
                self.softmax.begin()
                self.epilogue.finish(stage, False)
            if const_expr(not p.overlap_items):
                following, phase = self.items.place(turn)
                self.items.wait_full(following, phase)
                running = item[RowItem.VALID, following]

    @cute.jit
    def first(self, buffer, kv):
        """The first step of an item: S and softmax; its P V is issued by the next step."""
        k = self.k_ring.place(kv)
        scores = accumulator(self.mma_qk, self.plan.step)
        self.wait_k(k)
        self.issue_scores(scores, buffer, k)  # S = Q K^T
        warpgroup.wait_group(0)
        self.k_ring.release(k[0])
        self.softmax.after_values(scores, self.first_softmax(scores), False)

    @cute.jit
    def bridge(self, following, kv):
        """The first step of the item in stage `following`, together with the last P V of the current one."""
        p, k, v = self.plan, self.k_ring.place(kv), self.v_ring.place(kv - 1)
        scores = accumulator(self.mma_qk, p.step)
        if const_expr(p.prefetch_mask):
            self.mask.prepare(following)
        self.wait_k(k)
        self.take_turn(False)
        self.issue_scores(scores, following * p.groups + self.thread.warpgroup, k)  # S = Q K^T
        self.wait_v(v)
        self.issue_values(v, True, p.half_steps)  # O += P V
        if const_expr(p.half_steps):
            self.half[0] = Int32(Half.BOTH)
        self.pass_turn(False)
        self.softmax.begin()
        if const_expr(not p.prefetch_mask):
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
        if const_expr(self.plan.overlap_items and self.plan.defer_epilogue):  # noqa: SIM102
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
        p, epilogue, before = self.plan, self.epilogue, 1 - stage
        k, v = self.k_ring.place(kv), self.v_ring.place(kv - 1)
        scores, words = accumulator(self.mma_qk, p.step), self.packed_mask(p.step)
        masked = self.mask.second(words, stage)
        self.wait_k(k)
        self.take_turn(False)
        self.issue_scores(scores, buffer, k)  # S = Q K^T
        if const_expr(p.late_store):
            factor, lse = epilogue.factors(before)
            packed = epilogue.normalise(factor)
            if self.items.item[RowItem.SLOT, before] >= 0:
                epilogue.write_part(before, factor, lse)
        else:
            epilogue.finish(before, p.warpgroup_barrier)
        self.wait_v(v)
        self.issue_values(v, False, False)  # O = P V
        self.pass_turn(False)
        if const_expr(p.late_store):
            if self.items.item[RowItem.SLOT, before] < 0:
                epilogue.send(before, packed, lse, p.warpgroup_barrier)
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
        p, k, v = self.plan, self.k_ring.place(kv), self.v_ring.place(kv - 1)
        columns = p.step if const_expr(half is None) else p.step // 2
        mma = self.mma_qk if const_expr(half is None) else self.mma_half
        scores, words = accumulator(mma, columns), self.packed_mask(columns)
        self.mask.fetch(mode, words, at, i)
        self.wait_k(k)
        self.take_turn(free)
        self.issue_scores(scores, buffer, k, half)  # S = Q K^T
        self.wait_v(v)
        self.issue_values(v, True, p.half_steps and mode == "interval")  # O += P V
        self.pass_turn(free)
        if const_expr(mode == "interval"):
            first = at + (0 if const_expr(half is None) else half * columns)
            self.mask.interval(words, buffer // p.groups, first)
        warpgroup.wait_group(1)
        if const_expr(p.hold == Hold.UNCHECKED_FULL and mode == "full"):
            self.softmax.transform(scores)
            warpgroup.wait_group(0)
            self.v_ring.release(v[0])
            self.softmax.in_place(scores, buffer, k[0])
            self.k_ring.release(k[0])
            self.remember(half)
        else:
            self.k_ring.release(k[0])
            self.softmax.transform(scores)
            if const_expr(mode != "full"):
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
        if self.mask.masks_first():
            instructions.keep(scores, self.mask.first())
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
        if const_expr(self.plan.half_steps):
            self.half[0] = Int32(Half.BOTH if const_expr(half is None) else half)

    @cute.jit
    def issue_scores(self, scores, buffer, k, half: cutlass.Constexpr = None):
        """Issue S = Q K^T of a step, or of half of its columns. `k`: the place of its K."""
        if const_expr(half is None):
            issue(self.mma_qk, scores, self.q[None, None, None, buffer], self.k[None, None, None, k[0]], False)
        else:
            columns = self.k_half[None, None, None, half, 0, k[0]]
            issue(self.mma_half, scores, self.q_half[None, None, None, buffer], columns, False)

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

    def packed_mask(self, columns: int) -> Any:
        """Registers for the mask words of a step."""
        return cute.make_rmem_tensor((instructions.ROWS, columns // 32), Int32)

    @cute.jit
    def wait_k(self, place):
        """Wait for K of a step, unless its mask came with it, and was waited for."""
        if const_expr(not self.mask.with_keys):
            self.k_ring.wait_full(*place)

    @cute.jit
    def wait_v(self, place):
        """Wait for V of a step, unless K of the step after it, which was waited for, shows that it is there."""
        if const_expr(not self.plan.k_shows_v):
            self.v_ring.wait_full(*place)

    @cute.jit
    def take_turn(self, free):
        """Wait for this warpgroup's turn at the tensor cores, but for a step in which all of them are free."""
        if const_expr(self.plan.warpgroup_barrier):  # noqa: SIM102
            if not free:
                number = Barrier.WARPGROUP_TURN + self.thread.warpgroup
                cute.arch.barrier(barrier_id=number, number_of_threads=2 * WARPGROUP)

    @cute.jit
    def pass_turn(self, free):
        """Let the next warpgroup issue its products."""
        if const_expr(self.plan.warpgroup_barrier):  # noqa: SIM102
            if not free:
                me = self.thread.warpgroup
                other = 1 - me if const_expr(self.plan.groups == 2) else (me + 1) % self.plan.groups
                number = Barrier.WARPGROUP_TURN + other
                cute.arch.barrier_arrive(barrier_id=number, number_of_threads=2 * WARPGROUP)
