"""The producer warp and the store warps of the forward kernel."""

from __future__ import annotations

import cutlass
import cutlass.cute as cute
from cutlass import Int32, const_expr
from cutlass.cute.nvgpu import cpasync

from gossamer.kernels.hopper.device.common import (
    BOUNDS,
    FAR,
    OUT,
    ROWS,
    WARPGROUP,
    Env,
    load_item,
    ring,
    ticket,
    within_keys,
)
from gossamer.kernels.hopper.device.configurations import ForwardConfig
from gossamer.kernels.hopper.device.row_items import (
    BATCH,
    BITS,
    BITSES,
    FIRST,
    FULL,
    FULLS,
    HEAD,
    INTERVAL,
    INTERVALS,
    ITEM,
    LEAD,
    SLOT,
    START,
    TILE,
    VALID,
)

# The next item is drawn this many keys before the last load of an item, and then published with its Q: not before the
# item's third tile is loaded, since consumers finish the item before it during the second, nor before its results have
# left. Nothing here waits before the first load of an item.
DRAW = 768
PUBLISH = 512
EARLIEST = 2


class Producer:
    """Work items, the rings of Q, K and V, and what leaves the block."""

    config: ForwardConfig
    groups: int
    parts: int
    bridges: bool
    bytes: dict[str, int]

    @cute.jit
    def draw(self, env, w):
        """This lane's word of the description of item `w`, its lists cut at the length of its batch element."""
        word = load_item(env, w)
        if const_expr(self.config.lengths):
            batch = cute.arch.shuffle_sync(word, BATCH)
            within = cute.ceil_div(within_keys(env.lengths[batch]), self.config.block_kv)
            for at, count in ((FULL, FULLS), (INTERVAL, INTERVALS), (BITS, BITSES)):
                kept = self.listed_below(
                    env, cute.arch.shuffle_sync(word, at), cute.arch.shuffle_sync(word, count), within
                )
                if cute.arch.lane_idx() == count:
                    word = kept
        return word

    @cute.jit
    def listed_below(self, env, first, count, limit):
        """How many of the ascending tile columns `first` to `first + count` of the lists are below `limit`.

        The warp looks at 32 places at a time.
        """
        low, high = Int32(0), count
        while low < high:
            step = cute.ceil_div(high - low, 32)
            place = low + cute.arch.lane_idx() * step
            below = Int32(0)
            if place < high:
                below = Int32(1) if env.lists[0, first + place] < limit else Int32(0)
            found = cute.arch.popc(cute.arch.vote_ballot_sync(below != 0))
            # The last place found below the limit is counted, the first that is not is the end.
            end = low + found * step
            high = end if end < high else high
            low = low + (found - 1) * step + 1 if found > 0 else high
        return low

    @cute.jit
    def produce(
        self, tma_q, g_q, tma_k, g_k, tma_v, g_v, s_q, s_k, s_v, bars, item, work, lists, lengths, tickets, items,
        ratio,
    ):  # fmt: skip
        """The producer warp: items and Q, then K and V of each step, K one step ahead of V."""
        c = self.config
        t_q = cute.local_tile(g_q, (ROWS, c.D), (None, 0, None, None))
        t_k = cute.local_tile(g_k, (c.step, c.D), (None, 0, None, None))
        t_v = cute.local_tile(g_v, (c.step, c.E), (None, 0, None, None))
        whole = cute.make_layout(1)
        q_to, q_from = cpasync.tma_partition(tma_q, 0, whole, cute.group_modes(s_q, 0, 2), cute.group_modes(t_q, 0, 2))
        k_to, k_from = cpasync.tma_partition(tma_k, 0, whole, cute.group_modes(s_k, 0, 2), cute.group_modes(t_k, 0, 2))
        v_to, v_from = cpasync.tma_partition(tma_v, 0, whole, cute.group_modes(s_v, 0, 2), cute.group_modes(t_v, 0, 2))
        env = Env(
            tma_q=tma_q, q_from=q_from, q_to=q_to, bars=bars, item=item, work=work, lists=lists,
            items=items, lengths=lengths, tickets=tickets,
            k=(tma_k, k_from, k_to), v=(tma_v, v_from, v_to),
        )  # fmt: skip
        w, _, _ = cute.arch.block_idx()
        turn = Int32(0)  # items so far
        kv = Int32(0)  # steps so far
        owed = Int32(0)  # the V of the step before is still to be loaded: K runs one step ahead of V
        v_block, v_group, v_batch = Int32(0), Int32(0), Int32(0)
        word = self.draw(env, w)
        following = self.publish(env, turn, word)
        running = item[VALID, 0]
        while running != 0:
            stage = ring(turn, c.q_stages)[0]
            batch, head = item[BATCH, stage], item[HEAD, stage]
            group = head // ratio
            fulls, intervals = item[FULLS, stage], item[INTERVALS, stage]
            at_full = item[FULL, stage]
            at_interval = item[INTERVAL, stage] - fulls
            at_bits = item[BITS, stage] - fulls - intervals
            count = fulls + intervals + item[BITSES, stage]
            turn += 1
            upcoming = Int32(0)
            draw_at, publish_at = count - DRAW // c.block_kv, count - PUBLISH // c.block_kv
            draw_at = draw_at if draw_at > 0 else Int32(0)
            publish_at = publish_at if publish_at > EARLIEST else Int32(EARLIEST)
            if count == 0:
                word = self.draw(env, ticket(env))
            for i in cutlass.range(count, unroll=1):
                column = following
                n = i + 1
                if n < count:
                    at = n + (at_full if n < fulls else (at_interval if n < fulls + intervals else at_bits))
                    following = lists[0, at]
                for p in cutlass.range_constexpr(self.parts):
                    block = column * self.parts + p
                    self.load(env, "k", kv, block, group, batch)
                    if owed != 0:
                        self.load(env, "v", kv - 1, v_block, v_group, v_batch)
                    owed = Int32(1)
                    v_block, v_group, v_batch = block, group, batch
                    kv += 1
                if i == draw_at:
                    word = self.draw(env, ticket(env))
                if const_expr(self.bridges):  # noqa: SIM102
                    if i >= publish_at:  # noqa: SIM102
                        if self.left(env, turn):
                            upcoming = self.publish(env, turn, word)
                            publish_at = Int32(FAR)
            if const_expr(self.bridges):
                if publish_at < FAR:
                    upcoming = self.publish(env, turn, word)
                stage = ring(turn, c.q_stages)[0]
                # The next item's first K comes before this item's last V, as the consumers use them.
                if item[FULLS, stage] + item[INTERVALS, stage] + item[BITSES, stage] == 0 and owed != 0:
                    self.load(env, "v", kv - 1, v_block, v_group, v_batch)
                    owed = Int32(0)
            else:
                if owed != 0:
                    self.load(env, "v", kv - 1, v_block, v_group, v_batch)
                owed = Int32(0)
                upcoming = self.publish(env, turn, word)
            following = upcoming
            running = item[VALID, ring(turn, c.q_stages)[0]]

    @cute.jit
    def left(self, env, turn):
        """Whether there is room for an item: the results of the one two before it have left."""
        stage, phase = ring(turn, self.config.q_stages)
        return cute.arch.vote_all_sync(cute.arch.mbarrier_test_wait(env.bars.q_empty + stage, phase ^ 1))

    @cute.jit
    def publish(self, env, turn, word):
        """Put an item's description and Q into shared memory; returns the column of its first tile."""
        c = self.config
        item, bars = env.item, env.bars
        stage, phase = ring(turn, c.q_stages)
        lane = cute.arch.lane_idx()
        cute.arch.mbarrier_wait(bars.q_empty + stage, phase ^ 1)
        if lane < ITEM:
            item[lane, stage] = word
        cute.arch.sync_warp()
        column = Int32(0)
        if item[VALID, stage] != 0:
            with cute.arch.elect_one():
                cute.arch.mbarrier_arrive_and_expect_tx(bars.q_full + stage, self.bytes["q"] * self.groups)
            for g in cutlass.range_constexpr(self.groups):
                cute.copy(
                    env.tma_q,
                    env.q_from[None, item[TILE, stage] * self.groups + g, item[HEAD, stage], item[BATCH, stage]],
                    env.q_to[None, stage * self.groups + g],
                    tma_bar_ptr=bars.q_full + stage,
                )
            fulls, intervals = item[FULLS, stage], item[INTERVALS, stage]
            if fulls + intervals + item[BITSES, stage] > 0:
                first = item[FULL, stage]
                if fulls == 0:
                    first = item[INTERVAL, stage] if intervals > 0 else item[BITS, stage]
                column = env.lists[0, first]
        else:
            with cute.arch.elect_one():
                cute.arch.mbarrier_arrive(bars.q_full + stage)
        return column

    @cute.jit
    def load(self, env, name: cutlass.Constexpr, at, block, group, batch):
        """K or V of step `at` into its ring."""
        stage, phase = ring(at, self.config.stages)
        full, empty = getattr(env.bars, name + "_full") + stage, getattr(env.bars, name + "_empty") + stage
        tma, source, target = getattr(env, name)
        cute.arch.mbarrier_wait(empty, phase ^ 1)
        with cute.arch.elect_one():
            cute.arch.mbarrier_arrive_and_expect_tx(full, self.bytes[name])
        cute.copy(tma, source[None, block, group, batch], target[None, stage], tma_bar_ptr=full)

    @cute.jit
    def store(self, tma_o, g_o, s_o, bars, item, bounds, lists, lo, hi, me):
        """A store warp: fetches the bounds of warpgroup `me`'s rows, sends its finished output, frees its Q."""
        c = self.config
        t_o = cute.local_tile(g_o, (ROWS, c.E), (None, 0, None, None))
        o_from, o_to = cpasync.tma_partition(
            tma_o, 0, cute.make_layout(1), cute.group_modes(s_o, 0, 2), cute.group_modes(t_o, 0, 2)
        )
        env = Env(bars=bars, item=item, bounds=bounds, lists=lists, lo=lo, hi=hi, me=me, rows=cute.size(g_o, mode=[0]))
        turn = Int32(0)
        running = self.fetch(env, turn)
        while running != 0:
            stage = ring(turn, c.q_stages)[0]
            batch, head, tile, slot = item[BATCH, stage], item[HEAD, stage], item[TILE, stage], item[SLOT, stage]
            turn += 1
            if const_expr(self.bridges):
                running = self.fetch(env, turn)
            cute.arch.barrier(barrier_id=OUT + me, number_of_threads=WARPGROUP + 32)
            if slot < 0:
                cute.copy(
                    tma_o, o_from[None, stage * self.groups + me], o_to[None, tile * self.groups + me, head, batch]
                )
                cute.arch.cp_async_bulk_commit_group()
                cute.arch.cp_async_bulk_wait_group(0, read=True)
            cute.arch.sync_warp()
            with cute.arch.elect_one():
                cute.arch.mbarrier_arrive(bars.q_empty + stage)
            if const_expr(not self.bridges):
                running = self.fetch(env, turn)

    @cute.jit
    def fetch(self, env, turn):
        """Wait for an item and put what masks its steps into shared memory; returns whether there is one."""
        c = self.config
        item = env.item
        stage, phase = ring(turn, c.q_stages)
        cute.arch.mbarrier_wait(env.bars.q_full + stage, phase)
        running = item[VALID, stage]
        if running != 0:
            if item[INTERVALS, stage] > 0:
                mine, lead, found = env.me * ROWS + cute.arch.lane_idx(), item[LEAD, stage], []
                for i in cutlass.range_constexpr(ROWS // 32):
                    row = item[TILE, stage] * c.block_q + mine + 32 * i
                    row = row if row < env.rows else env.rows - 1
                    found.append((env.lo[lead, row], env.hi[lead, row]))
                start = env.lists[0, item[INTERVAL, stage]] * c.block_kv
                for i in cutlass.range_constexpr(ROWS // 32):
                    env.bounds[mine + 32 * i, 0, stage], env.bounds[mine + 32 * i, 1, stage] = found[i]
                item[START, stage] = start
            if const_expr(c.lengths):
                first = item[FULL, stage]
                if item[FULLS, stage] == 0:
                    first = item[INTERVAL, stage] if item[INTERVALS, stage] > 0 else item[BITS, stage]
                item[FIRST, stage] = env.lists[0, first] * c.block_kv
            cute.arch.barrier_arrive(barrier_id=BOUNDS + env.me, number_of_threads=WARPGROUP + 32)
        return running
