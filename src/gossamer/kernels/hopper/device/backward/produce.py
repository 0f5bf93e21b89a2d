"""The producer warp and the sending warps of the column kernel."""

from __future__ import annotations

import cutlass
import cutlass.cute as cute
from cutlass import Float32, Int32, const_expr
from cutlass.cute.nvgpu import cpasync

from gossamer.kernels.hopper.device.backward.fields import (
    BOUNDED,
    END,
    ENTRY,
    FIRST,
    FREE_OUT,
    FULL_OUT,
    KEPT,
    KIND,
    MASKED,
    NONE,
    STEP,
    STEP_BATCH,
    STEP_HEAD,
    WORD,
    bulk_add,
)
from gossamer.kernels.hopper.device.column_items import (
    BATCH,
    BITS,
    BITSES,
    COUNT,
    FULL,
    FULLS,
    GROUP,
    HEAD,
    INTERVAL,
    INTERVALS,
    KEYS,
    LEAD,
    SEGMENT,
    SEGMENTS,
    SLOT,
    TILE,
    VALID,
)
from gossamer.kernels.hopper.device.common import ROWS, WARPGROUP, Env, load_item, ring, ticket, within_keys
from gossamer.kernels.hopper.device.configurations import BackwardConfig
from gossamer.kernels.hopper.device.row_items import ITEM


class Producer:
    """Work items, K and V, the rings of Q and dO, and what leaves the block."""

    config: BackwardConfig
    groups: int
    parts: int
    halves: int = 1  # times 64 queries of a step
    dq_columns: int
    bytes: dict[str, int]
    staging_floats: int

    @property
    def sends(self) -> int:
        """Whether the sending warps follow every step."""
        return int(self.config.with_dq and self.config.reduce == "bulk")

    @cute.jit
    def draw(self, env, w):
        """This lane's word of the description of item `w`."""
        word = load_item(env, w)
        if const_expr(self.config.lengths):
            word = self.within(env, word)
        return word

    @cute.jit
    def within(self, env, word):
        """The description with the number of keys that its batch element attends; nothing to walk past them."""
        lane = cute.arch.lane_idx()
        keys = Int32(0)
        if cute.arch.shuffle_sync(word, VALID) != 0:
            keys = within_keys(env.lengths[cute.arch.shuffle_sync(word, BATCH)])
            keys = keys if keys < env.keys else env.keys
        first = cute.arch.shuffle_sync(word, TILE) * self.config.block_kv
        if lane == KEYS:
            word = keys
        if lane == COUNT and first >= keys:
            word = Int32(0)
        return word

    @cute.jit
    def attended(self, env):
        """Keys of the item's batch element that are attended at all."""
        return env.item[KEYS] if const_expr(self.config.lengths) else env.keys

    @cute.jit
    def produce(self, env, tma_q, g_q, tma_k, g_k, tma_v, g_v, tma_do, g_do):
        """The producer warp: for each item K, V and the steps of its segments, then a step that says it is over."""
        c = self.config
        whole = cute.make_layout(1)
        pairs = {}
        for name, tma, s, g, rows, columns in (
            ("q", tma_q, env.s_q, g_q, ROWS, c.D),
            ("do", tma_do, env.s_do, g_do, ROWS, c.E),
            ("k", tma_k, env.s_k, g_k, c.block_kv, c.D),
            ("v", tma_v, env.s_v, g_v, c.block_kv, c.E),
        ):
            tiles = cute.local_tile(g, (rows, columns), (None, 0, None, None))
            halves = cute.flat_divide(s, (rows, columns))  # of a step's queries; K and V are whole
            to, from_ = cpasync.tma_partition(
                tma, 0, whole, cute.group_modes(halves, 0, 2), cute.group_modes(tiles, 0, 2)
            )
            pairs |= {"tma_" + name: tma, name + "_to": to, name + "_from": from_}
        bars, item = env.bars, env.item
        lane = cute.arch.lane_idx()
        load = Env(**pairs)
        w, _, _ = cute.arch.block_idx()
        turn, n, m = Int32(0), Int32(0), Int32(0)  # items, stages of Q, stages of dO so far
        half = Int32(0)  # of the step that is being filled
        word = self.draw(env, w)
        running = Int32(1)
        while running != 0:
            cute.arch.mbarrier_wait(bars.k_empty, (turn & 1) ^ 1)
            if lane < ITEM:
                item[lane] = word
            cute.arch.sync_warp()
            running = item[VALID]
            if running == 0:
                with cute.arch.elect_one():
                    cute.arch.mbarrier_arrive(bars.k_full)
            else:
                batch, group, tile = item[BATCH], item[GROUP], item[TILE]
                at_segment, count = item[SEGMENTS], item[COUNT]
                keys = self.attended(env)
                ragged = Int32(1) if tile * c.block_kv + c.block_kv > keys else Int32(0)
                with cute.arch.elect_one():
                    cute.arch.mbarrier_arrive_and_expect_tx(bars.k_full, self.bytes["k"])
                cute.copy(
                    load.tma_k, load.k_from[None, tile, group, batch], load.k_to[None, 0, 0], tma_bar_ptr=bars.k_full
                )
                owed = Int32(1)  # V comes after the first Q
                first, head, value = Int32(0), Int32(0), Int32(0)
                for s in cutlass.range(count, unroll=1):
                    part = Int32(0)
                    if lane < SEGMENT:
                        part = env.segments[at_segment + s, lane]
                    head = group * env.ratio + cute.arch.shuffle_sync(part, HEAD)
                    lead = cute.arch.shuffle_sync(part, LEAD)
                    fulls = cute.arch.shuffle_sync(part, FULLS)
                    intervals = cute.arch.shuffle_sync(part, INTERVALS)
                    total = fulls + intervals + cute.arch.shuffle_sync(part, BITSES)
                    at_full = cute.arch.shuffle_sync(part, FULL)
                    at_interval = cute.arch.shuffle_sync(part, INTERVAL) - fulls
                    at_bits = cute.arch.shuffle_sync(part, BITS) - fulls - intervals
                    lowest, highest = Int32(0), Int32(0)
                    if intervals > 0:
                        # The queries that any key of the tile keeps: both bounds ascend with the keys.
                        last = tile * c.block_kv + c.block_kv - 1
                        last = last if last < keys else keys - 1
                        lowest, highest = env.lo[lead, tile * c.block_kv], env.hi[lead, last]
                    for i in cutlass.range(total, unroll=1):
                        kind = Int32(KEPT)
                        entry = Int32(0)
                        at = at_full + i
                        if i >= fulls:
                            kind = Int32(BOUNDED)
                            entry = lead
                            at = at_interval + i
                            if i >= fulls + intervals:
                                kind = Int32(MASKED)
                                at = at_bits + i
                                entry = env.lists[1, at] * c.block_kv
                        elif ragged != 0:
                            # Keys that do not exist have score 0: far above a very negative lse, p overflows.
                            kind, entry = Int32(BOUNDED), Int32(-1)
                        begin = env.lists[0, at] * c.block_q
                        for p in cutlass.range(self.parts, unroll=1):
                            first = begin + p * ROWS
                            wanted = first < env.queries
                            if kind == BOUNDED and entry >= 0:
                                wanted = wanted and lowest < first + ROWS and highest > first
                            if wanted:
                                value = kind
                                if lane == FIRST:
                                    value = first
                                if lane == ENTRY:
                                    value = entry
                                if lane == WORD:
                                    value = p * (ROWS // 32)
                                if lane == STEP_HEAD:
                                    value = head
                                if lane == STEP_BATCH:
                                    value = batch
                                self.load_q(env, load, n, half, value, first, head, batch)
                                if owed != 0:
                                    self.load_v(env, load, turn, tile, group, batch)
                                owed = Int32(0)
                                self.load_do(env, load, m, half, first, head, batch)
                                n, m, half = self.following(n, m, half)
                if owed != 0:
                    self.load_v(env, load, turn, tile, group, batch)
                if const_expr(self.halves > 1):  # noqa: SIM102
                    if half != 0:  # the last step is filled up by the queries that it has, of which nothing is kept
                        first, head = cute.arch.shuffle_sync(value, FIRST), cute.arch.shuffle_sync(value, STEP_HEAD)
                        if lane == KIND:
                            value = Int32(NONE)
                        self.load_q(env, load, n, half, value, first, head, batch)
                        self.load_do(env, load, m, half, first, head, batch)
                        n, m, half = self.following(n, m, half)
                word = self.draw(env, ticket(env))  # while the consumers are still two steps behind
                stage, phase = ring(n, c.q_stages)
                cute.arch.mbarrier_wait(bars.q_empty + stage, phase ^ 1)
                if lane < self.halves:
                    env.steps[KIND, stage * self.halves + lane] = Int32(END)
                cute.arch.sync_warp()
                with cute.arch.elect_one():
                    for _ in cutlass.range_constexpr(self.halves):
                        cute.arch.mbarrier_arrive(bars.q_full + stage)
                n += 1
                turn += 1

    def following(self, n, m, half):
        """The place after a half of stage `n` of Q and `m` of dO."""
        if self.halves == 1:
            return n + 1, m + 1, half
        return n + half, m + half, 1 - half

    @cute.jit
    def load_q(self, env, load, n, half, value, first, head, batch):
        """Q and lse of 64 queries of a step, with their description: a word of each lane."""
        c, bars = self.config, env.bars
        stage, phase = ring(n, c.q_stages)
        lane = cute.arch.lane_idx()
        cute.arch.mbarrier_wait(bars.q_empty + stage, phase ^ 1)
        if lane < STEP:
            env.steps[lane, stage * self.halves + half] = value
        cute.arch.sync_warp()
        bar = bars.q_full + stage
        with cute.arch.elect_one():
            cute.arch.mbarrier_arrive_and_expect_tx(bar, self.bytes["q"] + 4 * ROWS)
        from_ = load.q_from[None, first // ROWS, head, batch]
        cute.copy(load.tma_q, from_, load.q_to[None, half, 0, stage], tma_bar_ptr=bar)
        self.load_row(env.terms[0, batch, head, None], first, env.s_lse[None, stage * self.halves + half], bar)

    @cute.jit
    def load_do(self, env, load, m, half, first, head, batch):
        """dO and delta of 64 queries of a step."""
        c, bars = self.config, env.bars
        stage, phase = ring(m, c.do_stages)
        cute.arch.mbarrier_wait(bars.do_empty + stage, phase ^ 1)
        bar = bars.do_full + stage
        with cute.arch.elect_one():
            cute.arch.mbarrier_arrive_and_expect_tx(bar, self.bytes["do"] + 4 * ROWS)
        from_ = load.do_from[None, first // ROWS, head, batch]
        cute.copy(load.tma_do, from_, load.do_to[None, half, 0, stage], tma_bar_ptr=bar)
        self.load_row(env.terms[1, batch, head, None], first, env.s_delta[None, stage * self.halves + half], bar)

    @cute.jit
    def load_row(self, row, first, to, bar):
        """A step's floats of a row of `terms`."""
        atom = cute.make_copy_atom(cpasync.CopyBulkG2SOp(), Float32)
        from_ = cute.local_tile(row, (ROWS,), (first // ROWS,))
        with cute.arch.elect_one():
            cute.copy(atom, from_, to, mbar_ptr=bar)

    @cute.jit
    def load_v(self, env, load, turn, tile, group, batch):
        bars = env.bars
        cute.arch.mbarrier_wait(bars.v_empty, (turn & 1) ^ 1)
        with cute.arch.elect_one():
            cute.arch.mbarrier_arrive_and_expect_tx(bars.v_full, self.bytes["v"])
        cute.copy(load.tma_v, load.v_from[None, tile, group, batch], load.v_to[None, 0, 0], tma_bar_ptr=bars.v_full)

    @cute.jit
    def send(self, env, tma_dk, g_dk, tma_dv, g_dv, me):
        """A sending warp: dQ of each step and dK, dV of each item of warpgroup `me`, from shared to global memory."""
        c, bars, item = self.config, env.bars, env.item
        whole = cute.make_layout(1)
        t_dk = cute.local_tile(g_dk, (ROWS, c.D), (None, 0, None, None))
        t_dv = cute.local_tile(g_dv, (ROWS, c.E), (None, 0, None, None))
        dk_from, dk_to = cpasync.tma_partition(
            tma_dk, 0, whole, cute.group_modes(env.s_dk, 0, 2), cute.group_modes(t_dk, 0, 2)
        )
        dv_from, dv_to = cpasync.tma_partition(
            tma_dv, 0, whole, cute.group_modes(env.s_dv, 0, 2), cute.group_modes(t_dv, 0, 2)
        )
        turn, n = Int32(0), Int32(0)
        cute.arch.mbarrier_wait(bars.k_full, 0)
        running = item[VALID]
        while running != 0:
            batch, group, tile, slot = item[BATCH], item[GROUP], item[TILE], item[SLOT]
            cute.arch.sync_warp()
            if const_expr(not c.single):
                with cute.arch.elect_one():
                    cute.arch.mbarrier_arrive(bars.k_empty)
            if const_expr(self.sends):
                # An item's own batch element stays apart from its steps': a stage of kind END says nothing of it.
                kind, first, head, of = self.follow(env, n, me)
                n += 1
                while kind != END:
                    self.exchange(me)
                    target = self.dq_target(env, first, head, of, me)
                    if const_expr(self.halves == 1) or kind != NONE:
                        with cute.arch.elect_one():
                            bulk_add(target.iterator, env.staging + me * self.staging_floats, 4 * cute.size(target))
                    cute.arch.cp_async_bulk_commit_group()
                    kind, first, head, of = self.follow(env, n, me)
                    n += 1
            self.exchange(me)
            if slot < 0:
                cute.copy(tma_dv, dv_from[None, me], dv_to[None, tile * self.groups + me, group, batch])
                cute.copy(tma_dk, dk_from[None, me], dk_to[None, tile * self.groups + me, group, batch])
                cute.arch.cp_async_bulk_commit_group()
            if const_expr(c.single):
                cute.arch.cp_async_bulk_wait_group(0, read=True)
                cute.arch.sync_warp()
                with cute.arch.elect_one():
                    cute.arch.mbarrier_arrive(bars.k_empty)
                    cute.arch.mbarrier_arrive(bars.v_empty)
            turn += 1
            cute.arch.mbarrier_wait(bars.k_full, turn & 1)
            running = item[VALID]
        cute.arch.cp_async_bulk_wait_group(0, read=True)

    @cute.jit
    def follow(self, env, n, me):
        """(kind, first query, head, batch) of those queries of step `n` whose dQ warpgroup `me` makes or shares."""
        stage, phase = ring(n, self.config.q_stages)
        cute.arch.mbarrier_wait(env.bars.q_full + stage, phase)
        place = stage * self.halves + (me if const_expr(self.halves > 1) else 0)
        kind, first = env.steps[KIND, place], env.steps[FIRST, place]
        head, batch = env.steps[STEP_HEAD, place], env.steps[STEP_BATCH, place]
        cute.arch.sync_warp()
        with cute.arch.elect_one():
            cute.arch.mbarrier_arrive(env.bars.q_empty + stage)
        return kind, first, head, batch

    @cute.jit
    def dq_target(self, env, first, head, batch, me):
        """The floats of dq_sum that warpgroup `me` adds to."""
        row = env.dq_sum[batch, head, first // ROWS, None]
        return cute.local_tile(row, (ROWS * self.dq_columns,), (me if const_expr(self.halves == 1) else 0,))

    @cute.jit
    def exchange(self, me):
        """Let the warpgroup write its staging memory, and wait until it has."""
        threads = WARPGROUP + 32
        cute.arch.cp_async_bulk_wait_group(0, read=True)
        cute.arch.barrier_arrive(barrier_id=FREE_OUT + me, number_of_threads=threads)
        cute.arch.barrier(barrier_id=FULL_OUT + me, number_of_threads=threads)
