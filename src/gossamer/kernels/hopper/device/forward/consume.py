"""The consumer warpgroups of the forward kernel: products, masks, softmax, and the result of an item."""

from __future__ import annotations

from typing import Any

import cutlass
import cutlass.cute as cute
from cutlass import Float32, Int32, const_expr
from cutlass.cute.nvgpu import warpgroup

from gossamer.kernels.hopper.device import instructions
from gossamer.kernels.hopper.device.common import OUT, ROWS, TURN, WARPGROUP, Env, ring
from gossamer.kernels.hopper.device.configurations import ForwardConfig
from gossamer.kernels.hopper.device.forward.masks import Masks
from gossamer.kernels.hopper.device.forward.results import Results
from gossamer.kernels.hopper.device.forward.softmax import Softmax
from gossamer.kernels.hopper.device.row_items import BITS, BITSES, FULL, FULLS, INTERVAL, INTERVALS, SLOT, START, VALID

BOTH = 2  # halves of a step's columns that P has: 0, 1, or both


class Consumer(Masks, Softmax, Results):
    """64 query rows of each item for each warpgroup."""

    config: ForwardConfig
    dtype: Any
    groups: int
    parts: int
    bridges: bool
    turns: bool
    defers: bool
    halves: bool
    late: bool
    asks: bool  # for what masks an item's first step before its S, not beside it

    @cute.jit
    def consume(
        self, mma_qk, mma_pv, mma_half, s_q, s_k, s_v, s_o, bars, item, bounds, lists, pool, sinks, lse,
        part_out, part_lse, lengths, before, exponent, has_sinks, rows,
    ):  # fmt: skip
        """A consumer warpgroup: 64 query rows of each item."""
        c = self.config
        thread, _, _ = cute.arch.thread_idx()
        me = cute.arch.make_warp_uniform(thread // WARPGROUP) - 1
        thread = thread % WARPGROUP
        lane = cute.arch.lane_idx()
        quad = 2 * (lane % 4)
        my_row = me * ROWS + thread // 32 * 16 + lane // 4  # and eight below
        whole_qk, whole_pv = mma_qk.get_slice(0), mma_pv.get_slice(0)
        s_vt = cute.composition(s_v, cute.make_ordered_layout((c.E, c.step, c.stages), order=(1, 0, 2)))
        two = (instructions.ROWS,)
        env = Env(
            me=me, lane=lane, thread=thread, quad=quad, my_row=my_row, rows=rows, mma_qk=mma_qk, mma_pv=mma_pv,
            s_q=s_q, s_k=s_k, s_o=s_o,
            frag_q=whole_qk.make_fragment_A(whole_qk.partition_A(s_q)),
            frag_k=whole_qk.make_fragment_B(whole_qk.partition_B(s_k)),
            frag_v=whole_pv.make_fragment_B(whole_pv.partition_B(s_vt)),
            frag_p=whole_pv.make_fragment_A(whole_pv.partition_shape_A((ROWS, c.step))),
            acc_o=cute.make_rmem_tensor(whole_pv.partition_shape_C((ROWS, c.E)), Float32),
            reference=cute.make_rmem_tensor(two, Float32),
            row_sum=cute.make_rmem_tensor(two, Float32),
            rescale=cute.make_rmem_tensor(two, Float32),
            old_reference=cute.make_rmem_tensor(two, Float32),
            old_sum=cute.make_rmem_tensor(two, Float32),
            start=cute.make_rmem_tensor((2 * instructions.ROWS + 2,), Int32),
            start_words=cute.make_rmem_tensor((instructions.ROWS, c.step // 32), Int32),
            bars=bars, item=item, scratch=item[15, None], lists=lists,
            pool=pool, bounds=bounds, sinks=sinks, has_sinks=has_sinks,
            lse=lse, part_out=part_out, part_lse=part_lse, before=before, exponent=exponent,
            lengths=lengths, length=cute.make_rmem_tensor((1,), Int32),
        )  # fmt: skip
        if const_expr(self.halves):
            whole_half = mma_half.get_slice(0)
            env.mma_half = mma_half
            env.half = cute.make_rmem_tensor((1,), Int32)
            env.half.fill(BOTH)
            env.frag_q_half = whole_half.make_fragment_A(whole_half.partition_A(s_q))
            env.frag_k_half = whole_half.make_fragment_B(
                whole_half.partition_B(cute.flat_divide(s_k, (c.step // 2, c.D)))
            )
        if const_expr(self.turns):  # noqa: SIM102
            if me == 0:
                cute.arch.barrier_arrive(barrier_id=TURN, number_of_threads=2 * WARPGROUP)
        turn = Int32(0)
        kv = Int32(0)
        started = Int32(0)  # the item's first step was done together with the last one of the item before
        cute.arch.mbarrier_wait(bars.q_full, 0)
        running = item[VALID, 0]
        for row in (env.reference, env.row_sum, env.old_reference, env.old_sum):
            row.fill(0.0)
        env.length.fill(0)
        while running != 0:
            stage = ring(turn, c.q_stages)[0]
            count = item[FULLS, stage] + item[INTERVALS, stage] + item[BITSES, stage]
            buffer = stage * self.groups + me
            if started == 0:
                self.begin(env)
                env.acc_o.fill(0.0)
                self.prepare(env, stage)
                if count > 0:
                    self.first(env, buffer, kv)
                    kv += 1
            kv = self.steps(env, stage, kv, started)
            started = Int32(0)
            next_count = Int32(0)
            turn += 1
            if const_expr(self.bridges):
                following, phase = ring(turn, c.q_stages)
                cute.arch.mbarrier_wait(bars.q_full + following, phase)
                running = item[VALID, following]
                next_count = item[FULLS, following] + item[INTERVALS, following] + item[BITSES, following]
                if count > 0 and next_count > 0:
                    started = Int32(1)
            if started != 0:
                self.bridge(env, ring(turn, c.q_stages)[0], kv)
                kv += 1
                at_once = Int32(1)
                if const_expr(self.defers):  # or with the next step, if the item has one
                    at_once = Int32(1) if next_count * self.parts == 1 else Int32(0)
                if at_once != 0:
                    self.finish(env, stage, self.turns)
                    env.acc_o.fill(0.0)
            else:
                if count > 0:
                    self.last(env, kv)
                self.begin(env)
                self.finish(env, stage, False)
            if const_expr(not self.bridges):
                following, phase = ring(turn, c.q_stages)
                cute.arch.mbarrier_wait(bars.q_full + following, phase)
                running = item[VALID, following]

    @cute.jit
    def steps(self, env, stage, kv, started):
        """All steps of an item but the first; `started`: that one was done together with the item before."""
        c = self.config
        item, bounds, lists, me = env.item, env.bounds, env.lists, env.me
        at_full, fulls = item[FULL, stage], item[FULLS, stage] * self.parts
        at_interval, intervals = item[INTERVAL, stage], item[INTERVALS, stage] * self.parts
        at_bits, bitses = item[BITS, stage], item[BITSES, stage] * self.parts
        buffer = stage * self.groups + me
        done = Int32(1)
        if const_expr(self.bridges and self.defers):  # noqa: SIM102
            if started != 0 and fulls + intervals + bitses > 1:
                self.step(env, "second", buffer, kv, stage, 1)
                kv += 1
                done = Int32(2)
        from_full = done
        from_interval = done - fulls if done > fulls else Int32(0)
        from_bits = done - fulls - intervals if done > fulls + intervals else Int32(0)
        column = item[START, stage]
        if const_expr(self.halves):  # noqa: SIM102
            if from_interval > 0 and from_interval < intervals:
                column = lists[0, at_interval + from_interval] * c.block_kv
        unmasked = fulls
        if const_expr(c.lengths):  # the last full tile may hold the end of the keys
            unmasked -= self.parts if fulls > 0 else 0
        for i in cutlass.range(from_full, unmasked, unroll=1):
            self.step(env, "full", buffer, kv, at_full, i)
            kv += 1
        if const_expr(c.lengths):
            for i in cutlass.range(unmasked if unmasked > from_full else from_full, fulls, unroll=1):
                self.step(env, "edge", buffer, kv, at_full, i)
                kv += 1
        # The columns that any row of this warpgroup keeps: both bounds ascend with the rows.
        lowest = cute.arch.make_warp_uniform(bounds[me * ROWS, 0, stage])
        highest = cute.arch.make_warp_uniform(bounds[me * ROWS + ROWS - 1, 1, stage])
        for i in cutlass.range(from_interval, intervals, unroll=1):
            if const_expr(self.halves):
                # Of a window's two edges each of two warpgroups needs one whole and one half of the other: the one that
                # is done with its half goes on, and the edges take as long as one and a half.
                free = i > 0 and i == intervals - 1 if const_expr(self.groups == 2) else False
                upcoming = column
                if i + 1 < intervals:
                    upcoming = lists[0, at_interval + i + 1] * c.block_kv
                middle = column + c.step // 2
                if highest <= middle:
                    self.step(env, "interval", buffer, kv, column, i, 0, free)
                elif lowest >= middle:
                    self.step(env, "interval", buffer, kv, column, i, 1, free)
                else:
                    self.step(env, "interval", buffer, kv, column, i, None, free)
                column = upcoming
            else:
                self.step(env, "interval", buffer, kv, self.column(env, at_interval, i), i)
            kv += 1
        for i in cutlass.range(from_bits, bitses, unroll=1):
            self.step(env, "bits", buffer, kv, at_bits, i)
            kv += 1
        return kv

    @cute.jit
    def product(self, mma, acc, a, b, accumulate: cutlass.Constexpr, half: cutlass.Constexpr = None):
        """Issue acc (+)= a b as one group of asynchronous products; with `half`, over that half of a's columns."""
        warpgroup.fence()
        atom = cute.make_mma_atom(mma.op)
        atom.set(warpgroup.Field.ACCUMULATE, accumulate)
        count = const_expr(cute.size(a, mode=[2]))
        first, end = const_expr((0, count) if half is None else (half * count // 2, (half + 1) * count // 2))
        for i in cutlass.range_constexpr(first, end):
            cute.gemm(atom, acc, a[None, None, i], b[None, None, i], acc)
            atom.set(warpgroup.Field.ACCUMULATE, True)
        warpgroup.commit_group()

    @cute.jit
    def product_of_halves(self, env, v):
        """Issue O += P V over the half of the columns that P has, or both.

        Each way is a group that ends where its products do: one that ended behind a branch would be counted as several,
        and S be waited for together with P V.
        """
        half = cute.arch.make_warp_uniform(env.half[0])
        if half == BOTH:
            self.product(env.mma_pv, env.acc_o, env.frag_p, v, True)
        elif half == 0:
            self.product(env.mma_pv, env.acc_o, env.frag_p, v, True, 0)
        else:
            self.product(env.mma_pv, env.acc_o, env.frag_p, v, True, 1)

    @cute.jit
    def key(self, env, stage, phase):
        """Wait for K of a step."""
        cute.arch.mbarrier_wait(env.bars.k_full + stage, phase)

    @cute.jit
    def value(self, env, stage, phase):
        """Wait for V of a step, whose S was issued before."""
        cute.arch.mbarrier_wait(env.bars.v_full + stage, phase)

    @cute.jit
    def release(self, env, bar):
        if env.lane == 0:
            cute.arch.mbarrier_arrive(bar)

    @cute.jit
    def transform(self, env, acc_s):
        if const_expr(self.config.score == "softcap"):
            instructions.soft_cap(acc_s, env.before)
        elif const_expr(self.config.score == "scale"):
            instructions.multiply(acc_s, env.before)

    @cute.jit
    def first(self, env, buffer, kv):
        """The first step of an item: S and softmax; its P V is issued by the next step."""
        c = self.config
        stage, phase = ring(kv, c.stages)
        acc_s = cute.make_rmem_tensor(env.mma_qk.get_slice(0).partition_shape_C((ROWS, c.step)), Float32)
        self.key(env, stage, phase)
        q, k = env.frag_q[None, None, None, buffer], env.frag_k[None, None, None, stage]
        self.product(env.mma_qk, acc_s, q, k, False)
        warpgroup.wait_group(0)
        self.release(env, env.bars.k_empty + stage)
        self.transform(env, acc_s)
        if env.start[5] != 0:
            instructions.keep(acc_s, self.start_mask(env))
        instructions.start_reference(acc_s, env.reference, env.exponent)
        self.probabilities(env, acc_s, self.softmax(env, acc_s, env.old_sum[0]), False)

    @cute.jit
    def bridge(self, env, following, kv):
        """The first step of the following item together with the last P V of the current one."""
        c = self.config
        stage, phase = ring(kv, c.stages)
        old_stage, old_phase = ring(kv - 1, c.stages)
        acc_s = cute.make_rmem_tensor(env.mma_qk.get_slice(0).partition_shape_C((ROWS, c.step)), Float32)
        if const_expr(self.asks):
            self.prepare(env, following)
        self.key(env, stage, phase)
        if const_expr(self.turns):
            cute.arch.barrier(barrier_id=TURN + env.me, number_of_threads=2 * WARPGROUP)
        q, k = env.frag_q[None, None, None, following * self.groups + env.me], env.frag_k[None, None, None, stage]
        self.product(env.mma_qk, acc_s, q, k, False)
        self.value(env, old_stage, old_phase)
        v = env.frag_v[None, None, None, old_stage]
        if const_expr(self.halves):
            self.product_of_halves(env, v)
            env.half[0] = Int32(BOTH)
        else:
            self.product(env.mma_pv, env.acc_o, env.frag_p, v, True)
        self.pass_turn(env)
        self.begin(env)
        if const_expr(not self.asks):
            self.prepare(env, following)
        warpgroup.wait_group(1)
        self.release(env, env.bars.k_empty + stage)
        self.transform(env, acc_s)
        if env.start[5] != 0:
            instructions.keep(acc_s, self.start_mask(env))
        instructions.start_reference(acc_s, env.reference, env.exponent)
        begun = self.softmax(env, acc_s, env.old_sum[0])
        warpgroup.wait_group(0)
        self.release(env, env.bars.v_empty + old_stage)
        self.probabilities(env, acc_s, begun, False)

    @cute.jit
    def take_turn(self, env, free):
        """Wait for this warpgroup's turn at the tensor cores, but for a step in which all of them are free."""
        if const_expr(self.turns):  # noqa: SIM102
            if not free:
                cute.arch.barrier(barrier_id=TURN + env.me, number_of_threads=2 * WARPGROUP)

    @cute.jit
    def pass_turn(self, env):
        if const_expr(self.turns):
            other = 1 - env.me if const_expr(self.groups == 2) else (env.me + 1) % self.groups
            cute.arch.barrier_arrive(barrier_id=TURN + other, number_of_threads=2 * WARPGROUP)

    @cute.jit
    def step(
        self, env, mode: cutlass.Constexpr, buffer, kv, at, i, half: cutlass.Constexpr = None, free=False
    ):  # fmt: skip
        """S of this step and P V of the one before, softmax of this step while P V runs.

        `at` is the step's first column (mode "interval") or the first entry of the list. With `half` given only that
        half of the step's columns is computed: no row of this warpgroup keeps any other. A step that is `free`, in all
        warpgroups, is done without turns. In mode "second", of any kind of mask, `at` is the item's stage, and the
        result of the item before is finished while S is computed.
        """
        c = self.config
        stage, phase = ring(kv, c.stages)
        old_stage, old_phase = ring(kv - 1, c.stages)
        columns = c.step if const_expr(half is None) else c.step // 2
        mma = env.mma_qk if const_expr(half is None) else env.mma_half
        acc_s = cute.make_rmem_tensor(mma.get_slice(0).partition_shape_C((ROWS, columns)), Float32)
        words = cute.make_rmem_tensor((instructions.ROWS, columns // 32), Int32)
        masked = const_expr(mode != "full")
        if const_expr(mode == "bits"):
            self.words(env, words, at, i)
        elif const_expr(mode == "edge"):
            self.edge_words(env, words, at, i)
        elif const_expr(mode == "second"):
            masked = self.second_words(env, words, at)
        self.key(env, stage, phase)
        self.take_turn(env, free)
        if const_expr(half is None):
            q, k = env.frag_q[None, None, None, buffer], env.frag_k[None, None, None, stage]
        else:
            q, k = env.frag_q_half[None, None, None, buffer], env.frag_k_half[None, None, None, half, 0, stage]
        self.product(mma, acc_s, q, k, False)
        if const_expr(mode == "second"):
            if const_expr(self.late):
                factor, value = self.factors(env, 1 - at)
                packed = self.normalise(env, factor)
                if env.item[SLOT, 1 - at] >= 0:
                    self.write_part(env, 1 - at, factor, value)
            else:
                self.finish(env, 1 - at, self.turns)
        self.value(env, old_stage, old_phase)
        v = env.frag_v[None, None, None, old_stage]
        if const_expr(self.halves and mode == "interval"):
            self.product_of_halves(env, v)
        else:
            self.product(env.mma_pv, env.acc_o, env.frag_p, v, mode != "second")
        if not free:
            self.pass_turn(env)
        if const_expr(mode == "second" and self.late):
            if env.item[SLOT, 1 - at] < 0:
                self.send(env, 1 - at, packed, value, self.turns)
            cute.arch.barrier_arrive(barrier_id=OUT + env.me, number_of_threads=WARPGROUP + 32)
        if const_expr(mode == "interval"):
            lo, hi = self.row_bounds(env, buffer // self.groups)
            instructions.interval_words(words, lo, hi, at + (0 if const_expr(half is None) else half * columns))
        warpgroup.wait_group(1)
        if const_expr(c.hold == 3 and mode == "full"):
            self.transform(env, acc_s)
            warpgroup.wait_group(0)
            self.release(env, env.bars.v_empty + old_stage)
            self.weigh(env, acc_s, buffer, stage)
            self.release(env, env.bars.k_empty + stage)
        else:
            self.release(env, env.bars.k_empty + stage)
            self.transform(env, acc_s)
            if const_expr(mode == "second"):
                if masked:
                    instructions.keep(acc_s, words)
            elif const_expr(mode != "full"):
                instructions.keep(acc_s, words)
            begun = self.softmax(env, acc_s, env.row_sum[0])
            warpgroup.wait_group(0)
            self.release(env, env.bars.v_empty + old_stage)
            self.probabilities(env, acc_s, begun, True, half)
        if const_expr(self.halves):
            env.half[0] = Int32(BOTH if const_expr(half is None) else half)

    @cute.jit
    def last(self, env, kv):
        """The P V of an item's last step."""
        c = self.config
        stage, phase = ring(kv - 1, c.stages)
        self.value(env, stage, phase)
        self.product(env.mma_pv, env.acc_o, env.frag_p, env.frag_v[None, None, None, stage], True)
        warpgroup.wait_group(0)
        self.release(env, env.bars.v_empty + stage)
        if const_expr(self.halves):
            env.half[0] = Int32(BOTH)
