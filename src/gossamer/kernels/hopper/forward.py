"""The forward kernel: warp-specialised, persistent, one walk of a layout's rows.

One block per multiprocessor. Warp 0 of the first warpgroup is the producer: it takes work items, publishes each one's
description in shared memory, and keeps the rings of Q, K and V filled by TMA. Warps 1, 2, 3 store finished outputs.
Each other warpgroup owns 64 query rows: S = Q K^T and O += P V by wgmma, P from registers, softmax of one step
overlapped with the products of the next one, also from one item to the next, and the warpgroups take turns at the
tensor cores (named barriers).
"""

from __future__ import annotations

from typing import Any

import cutlass
import cutlass.cute as cute
import cutlass.utils.hopper_helpers as hopper
from cutlass import Float32, Int32, const_expr
from cutlass.cute.nvgpu import cpasync, warp, warpgroup
from cutlass.memory import SmemAllocator
from cutlass.tensor_utils import LayoutEnum

from gossamer.kernels.hopper import device
from gossamer.kernels.hopper.config import ForwardConfig

WARPGROUP = 128
ROWS = 64  # query rows of a warpgroup
ITEM = 16  # 32-bit words of an item's description
# Fields of a description; see schedule.py.
BATCH, HEAD, TILE, SLOT, FULL, FULLS, INTERVAL, INTERVALS, BITS, BITSES, LEAD, COPY, VALID, START = range(14)
TURN = 1  # named barriers 1, 2, 3: a warpgroup's turn at the tensor cores
READ = 4  # named barriers 4, 5, 6: every warp of a warpgroup has read its Q
OUT = 7  # named barriers 7, 8, 9: a warpgroup's output is in shared memory
BOUNDS = 10  # named barriers 10, 11, 12: the bounds of an item's rows are in shared memory
FAR = 1 << 30
SLACK = 8.0  # a row's largest power of two may reach 2 ** SLACK
NUMBERS = {"bfloat16": cutlass.BFloat16, "float16": cutlass.Float16}


def ring(count: Int32, stages: int) -> tuple[Any, Any]:
    """(stage, phase) of the `count`-th use of a ring."""
    if stages & (stages - 1) == 0:
        return count & (stages - 1), (count >> (stages.bit_length() - 1)) & 1
    return count % stages, (count // stages) & 1


class Env:
    """What a role's functions share. Opaque to the tracer, which would thread a namespace through every branch."""

    def __init__(self, **values: Any) -> None:
        self.__dict__.update(values)

    def __extract_mlir_values__(self) -> list[Any]:
        return []

    def __new_from_mlir_values__(self, values: list[Any]) -> Env:
        return self

    def __getattr__(self, name: str) -> Any:
        raise AttributeError(name)


class Forward:
    """The kernel of one configuration."""

    def __init__(self, config: ForwardConfig) -> None:
        self.config = c = config
        self.dtype = NUMBERS[c.dtype]
        self.groups = c.block_q // ROWS
        self.parts = c.block_kv // c.step
        self.threads = WARPGROUP * (self.groups + 1)
        self.producer_registers, self.consumer_registers = {1: (56, 256), 2: (24, 240), 3: (32, 160)}[self.groups]
        self.turns = self.groups > 1
        self.bridges = config.q_stages > 1  # the next item's Q is there while this item's is in use
        # The next item is published after this many tiles of the current one.
        self.ahead = 2 if self.bridges else 1 << 30

    def smem_layout(self, rows: int, columns: int, stages: int | None = None) -> Any:
        atom = warpgroup.make_smem_layout_atom(
            hopper.get_smem_layout_atom(LayoutEnum.ROW_MAJOR, self.dtype, columns), self.dtype
        )
        if stages is None:
            return cute.tile_to_shape(atom, (rows, columns), (0, 1))
        return cute.tile_to_shape(atom, (rows, columns, stages), (0, 1, 2))

    @cute.jit
    def __call__(
        self,
        q: cute.Tensor,  # (B, H, Q, D)
        k: cute.Tensor,  # (B, G, K, D)
        v: cute.Tensor,  # (B, G, K, E)
        out: cute.Tensor,  # (B, H, Q, E)
        lse: cute.Tensor,  # (B, H, Q) float32
        work: cute.Tensor,  # (n, ITEM) int32
        lists: cute.Tensor,  # (2, n): tile column, pool entry
        lo: cute.Tensor,  # (Bl * Hl, Q)
        hi: cute.Tensor,
        pool: cute.Tensor,  # (P * block_q, block_kv / 32)
        sinks: cute.Tensor,  # (H,) float32
        part_out: cute.Tensor,  # (copies * slots, block_q, E) float32
        part_lse: cute.Tensor,  # (copies * slots, block_q) float32
        tickets: cute.Tensor,  # (1,) int32: items taken; zero before and after
        before: Float32,  # factor of a score before the soft cap
        exponent: Float32,  # factor of a score in exp2
        items: Int32,
        copies: Int32,
        heads: Int32,  # heads that are copies of one list: H or 1
        slots: Int32,
        has_sinks: Int32,
        blocks: Int32,
        stream: Any,
    ) -> None:
        c = self.config
        q, k, v, out = [
            cute.make_tensor(t.iterator, cute.select(t.layout, [2, 3, 1, 0])) for t in (q, k, v, out)
        ]  # (rows, columns, head, batch)
        q_layout = self.smem_layout(ROWS, c.D, c.q_stages * self.groups)
        k_layout = self.smem_layout(c.step, c.D, c.stages)
        v_layout = self.smem_layout(c.step, c.E, c.stages)
        o_layout = self.smem_layout(ROWS, c.E)
        load, store = cpasync.CopyBulkTensorTileG2SOp(), cpasync.CopyBulkTensorTileS2GOp()
        q_one, k_one, v_one = [cute.select(s, mode=[0, 1]) for s in (q_layout, k_layout, v_layout)]
        tma_q, g_q = cpasync.make_tiled_tma_atom(load, q, q_one, (ROWS, c.D))
        tma_k, g_k = cpasync.make_tiled_tma_atom(load, k, k_one, (c.step, c.D))
        tma_v, g_v = cpasync.make_tiled_tma_atom(load, v, v_one, (c.step, c.E))
        tma_o, g_o = cpasync.make_tiled_tma_atom(store, out, o_layout, (ROWS, c.E))
        major = cute.nvgpu.OperandMajorMode
        mma_qk = hopper.make_trivial_tiled_mma(
            self.dtype, self.dtype, major.K, major.K, Float32, atom_layout_mnk=(1, 1, 1), tiler_mn=(ROWS, c.step)
        )
        mma_pv = hopper.make_trivial_tiled_mma(
            self.dtype, self.dtype, major.K, major.MN, Float32, atom_layout_mnk=(1, 1, 1), tiler_mn=(ROWS, c.E),
            a_source=warpgroup.OperandSource.RMEM,
        )  # fmt: skip

        @cute.struct
        class Shared:
            q_full: cute.struct.MemRange[cutlass.Int64, c.q_stages]
            q_empty: cute.struct.MemRange[cutlass.Int64, c.q_stages]
            k_full: cute.struct.MemRange[cutlass.Int64, c.stages]
            k_empty: cute.struct.MemRange[cutlass.Int64, c.stages]
            v_full: cute.struct.MemRange[cutlass.Int64, c.stages]
            v_empty: cute.struct.MemRange[cutlass.Int64, c.stages]
            item: cute.struct.MemRange[Int32, ITEM * c.q_stages]
            bounds: cute.struct.MemRange[Int32, 2 * c.block_q * c.q_stages]
            q: cute.struct.Align[cute.struct.MemRange[self.dtype, cute.cosize(q_layout)], 1024]
            k: cute.struct.Align[cute.struct.MemRange[self.dtype, cute.cosize(k_layout)], 1024]
            v: cute.struct.Align[cute.struct.MemRange[self.dtype, cute.cosize(v_layout)], 1024]

        self.shared = Shared
        self.bytes = {
            name: cute.size_in_bytes(self.dtype, layout) for name, layout in (("q", q_one), ("k", k_one), ("v", v_one))
        }
        self.kernel(
            tma_q, g_q, tma_k, g_k, tma_v, g_v, tma_o, g_o, lse, work, lists, lo, hi, pool, sinks, part_out, part_lse,
            tickets, before, exponent, items, copies, heads, slots, has_sinks, q_layout, k_layout, v_layout, o_layout,
            mma_qk, mma_pv,
        ).launch(grid=(blocks, 1, 1), block=(self.threads, 1, 1), stream=stream, min_blocks_per_mp=1)  # fmt: skip

    @cute.kernel
    def kernel(
        self,
        tma_q: cute.CopyAtom,
        g_q: cute.Tensor,
        tma_k: cute.CopyAtom,
        g_k: cute.Tensor,
        tma_v: cute.CopyAtom,
        g_v: cute.Tensor,
        tma_o: cute.CopyAtom,
        g_o: cute.Tensor,
        lse: cute.Tensor,
        work: cute.Tensor,
        lists: cute.Tensor,
        lo: cute.Tensor,
        hi: cute.Tensor,
        pool: cute.Tensor,
        sinks: cute.Tensor,
        part_out: cute.Tensor,
        part_lse: cute.Tensor,
        tickets: cute.Tensor,
        before: Float32,
        exponent: Float32,
        items: Int32,
        copies: Int32,
        heads: Int32,
        slots: Int32,
        has_sinks: Int32,
        q_layout: cute.ComposedLayout,
        k_layout: cute.ComposedLayout,
        v_layout: cute.ComposedLayout,
        o_layout: cute.ComposedLayout,
        mma_qk: cute.TiledMma,
        mma_pv: cute.TiledMma,
    ) -> None:
        c = self.config
        warp_index = cute.arch.make_warp_uniform(cute.arch.warp_idx())
        if warp_index == 0:
            for atom in (tma_q, tma_k, tma_v, tma_o):
                cpasync.prefetch_descriptor(atom)
        storage = SmemAllocator().allocate(self.shared)
        bars = Env(
            **{
                name: getattr(storage, name).data_ptr()
                for name in ("q_full", "q_empty", "k_full", "k_empty", "v_full", "v_empty")
            }
        )
        item = cute.make_tensor(storage.item.data_ptr(), cute.make_layout((ITEM, c.q_stages)))
        bounds = cute.make_tensor(storage.bounds.data_ptr(), cute.make_layout((c.block_q, 2, c.q_stages)))
        if warp_index == 0:
            with cute.arch.elect_one():
                for i in cutlass.range_constexpr(c.q_stages):
                    cute.arch.mbarrier_init(bars.q_full + i, 1)
                    cute.arch.mbarrier_init(bars.q_empty + i, self.groups)
                for i in cutlass.range_constexpr(c.stages):
                    for full, empty in ((bars.k_full, bars.k_empty), (bars.v_full, bars.v_empty)):
                        cute.arch.mbarrier_init(full + i, 1)
                        cute.arch.mbarrier_init(empty + i, 4 * self.groups)
        cute.arch.mbarrier_init_fence()
        s_q = storage.q.get_tensor(q_layout.outer, swizzle=q_layout.inner)
        s_k = storage.k.get_tensor(k_layout.outer, swizzle=k_layout.inner)
        s_v = storage.v.get_tensor(v_layout.outer, swizzle=v_layout.inner)
        # The output of a warpgroup takes the place of its Q.
        o_outer = cute.append(o_layout.outer, cute.make_layout(c.q_stages * self.groups, stride=ROWS * c.D))
        s_o = storage.q.get_tensor(o_outer, swizzle=o_layout.inner)
        cute.arch.sync_threads()
        if warp_index < 4:
            cute.arch.setmaxregister_decrease(self.producer_registers)
            if warp_index == 0:
                self.produce(
                    tma_q, g_q, tma_k, g_k, tma_v, g_v, s_q, s_k, s_v, bars, item, work, lists, tickets, items, copies,
                    heads, cute.size(g_q, mode=[2]) // cute.size(g_k, mode=[2]),
                )  # fmt: skip
            elif warp_index <= self.groups:
                self.store(tma_o, g_o, s_o, bars, item, bounds, lists, lo, hi, warp_index - 1)
        else:
            cute.arch.setmaxregister_increase(self.consumer_registers)
            self.consume(
                mma_qk, mma_pv, s_q, s_k, s_v, s_o, bars, item, bounds, lists, pool, sinks, lse,
                part_out, part_lse, before, exponent, slots, has_sinks, cute.size(g_q, mode=[0]),
            )  # fmt: skip

    @cute.jit
    def load_item(self, env, w):
        """This lane's word of the description of item `w`; all zero (not valid) past the end."""
        lane = cute.arch.lane_idx()
        word = Int32(0)
        if w < env.items * env.copies:
            copy = w // env.items
            if lane < ITEM:
                word = env.work[w - copy * env.items, lane]
            if lane == BATCH:
                word += copy // env.heads
            if lane == HEAD:
                word += copy % env.heads
            if lane == COPY:
                word = copy
        return word

    @cute.jit
    def produce(
        self, tma_q, g_q, tma_k, g_k, tma_v, g_v, s_q, s_k, s_v, bars, item, work, lists, tickets, items, copies,
        heads, ratio,
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
            items=items, copies=copies, heads=heads, tickets=tickets,
        )  # fmt: skip
        w, _, _ = cute.arch.block_idx()
        reserved = self.ticket(env)
        turn = Int32(0)  # items so far
        kv = Int32(0)  # steps so far
        owed = Int32(0)  # the V of the step before is still to be loaded: K runs one step ahead of V
        v_block, v_group, v_batch = Int32(0), Int32(0), Int32(0)
        word = self.load_item(env, w)
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
            word = self.load_item(env, reserved)
            reserved = self.ticket(env)
            turn += 1
            upcoming = Int32(0)
            for i in cutlass.range(count, unroll=1):
                column = following
                n = i + 1
                if n < count:
                    at = n + (at_full if n < fulls else (at_interval if n < fulls + intervals else at_bits))
                    following = lists[0, at]
                for p in cutlass.range_constexpr(self.parts):
                    block = column * self.parts + p
                    stage, phase = ring(kv, c.stages)
                    cute.arch.mbarrier_wait(bars.k_empty + stage, phase ^ 1)
                    with cute.arch.elect_one():
                        cute.arch.mbarrier_arrive_and_expect_tx(bars.k_full + stage, self.bytes["k"])
                    cute.copy(
                        tma_k, k_from[None, block, group, batch], k_to[None, stage], tma_bar_ptr=bars.k_full + stage
                    )
                    if owed != 0:
                        self.load_v(tma_v, v_from, v_to, bars, kv - 1, v_block, v_group, v_batch)
                    owed = Int32(1)
                    v_block, v_group, v_batch = block, group, batch
                    kv += 1
                if i == self.ahead:
                    upcoming = self.publish(env, turn, word)
            if const_expr(self.bridges):
                if count <= self.ahead:
                    upcoming = self.publish(env, turn, word)
                stage = ring(turn, c.q_stages)[0]
                # The next item's first K comes before this item's last V, as the consumers use them.
                if item[FULLS, stage] + item[INTERVALS, stage] + item[BITSES, stage] == 0 and owed != 0:
                    self.load_v(tma_v, v_from, v_to, bars, kv - 1, v_block, v_group, v_batch)
                    owed = Int32(0)
            else:
                if owed != 0:
                    self.load_v(tma_v, v_from, v_to, bars, kv - 1, v_block, v_group, v_batch)
                owed = Int32(0)
                upcoming = self.publish(env, turn, word)
            following = upcoming
            running = item[VALID, ring(turn, c.q_stages)[0]]

    @cute.jit
    def ticket(self, env):
        """The number of the next item that nobody has taken. Each block starts with the item of its own index.

        Each block draws once for each of its items and once more; the last draw of all resets the counter.
        """
        drawn = Int32(0)
        blocks, _, _ = cute.arch.grid_dim()
        if cute.arch.lane_idx() == 0:
            drawn = cute.arch.atomic_add(env.tickets.iterator, Int32(1), sem="relaxed", scope="gpu")
            if drawn == env.items * env.copies + blocks - 1:
                env.tickets[0] = Int32(0)
        return cute.arch.shuffle_sync(drawn, 0) + blocks

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
    def load_v(self, tma_v, v_from, v_to, bars, kv, block, group, batch):
        c = self.config
        stage, phase = ring(kv, c.stages)
        cute.arch.mbarrier_wait(bars.v_empty + stage, phase ^ 1)
        with cute.arch.elect_one():
            cute.arch.mbarrier_arrive_and_expect_tx(bars.v_full + stage, self.bytes["v"])
        cute.copy(tma_v, v_from[None, block, group, batch], v_to[None, stage], tma_bar_ptr=bars.v_full + stage)

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
                for i in cutlass.range_constexpr(ROWS // 32):
                    place = env.me * ROWS + 32 * i + cute.arch.lane_idx()
                    row = item[TILE, stage] * c.block_q + place
                    row = row if row < env.rows else env.rows - 1
                    env.bounds[place, 0, stage] = env.lo[item[LEAD, stage], row]
                    env.bounds[place, 1, stage] = env.hi[item[LEAD, stage], row]
                item[START, stage] = env.lists[0, item[INTERVAL, stage]] * c.block_kv
            cute.arch.barrier_arrive(barrier_id=BOUNDS + env.me, number_of_threads=WARPGROUP + 32)
        return running

    @cute.jit
    def consume(
        self, mma_qk, mma_pv, s_q, s_k, s_v, s_o, bars, item, bounds, lists, pool, sinks, lse,
        part_out, part_lse, before, exponent, slots, has_sinks, rows,
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
        two = (device.ROWS,)
        env = Env(
            me=me, lane=lane, thread=thread, quad=quad, my_row=my_row, rows=rows, mma_qk=mma_qk, mma_pv=mma_pv, s_o=s_o,
            frag_q=whole_qk.make_fragment_A(whole_qk.partition_A(s_q)),
            frag_k=whole_qk.make_fragment_B(whole_qk.partition_B(s_k)),
            frag_v=whole_pv.make_fragment_B(whole_pv.partition_B(s_vt)),
            frag_p=whole_pv.make_fragment_A(whole_pv.partition_shape_A((ROWS, c.step))),
            acc_o=cute.make_rmem_tensor(whole_pv.partition_shape_C((ROWS, c.E)), Float32),
            row_max=cute.make_rmem_tensor(two, Float32),
            row_sum=cute.make_rmem_tensor(two, Float32),
            rescale=cute.make_rmem_tensor(two, Float32),
            lo=cute.make_rmem_tensor(two, Int32),
            hi=cute.make_rmem_tensor(two, Int32),
            start=cute.make_rmem_tensor((2 * device.ROWS + 1,), Int32),
            start_words=cute.make_rmem_tensor((device.ROWS, c.step // 32), Int32),
            bars=bars, item=item, scratch=item[15, None], lists=lists,
            pool=pool, bounds=bounds, sinks=sinks, has_sinks=has_sinks,
            lse=lse, part_out=part_out, part_lse=part_lse, slots=slots, before=before, exponent=exponent,
            slack=SLACK / exponent,
        )  # fmt: skip
        if const_expr(self.turns):  # noqa: SIM102
            if me == 0:
                cute.arch.barrier_arrive(barrier_id=TURN, number_of_threads=2 * WARPGROUP)
        turn = Int32(0)
        kv = Int32(0)
        started = Int32(0)  # the item's first step was done together with the last one of the item before
        cute.arch.mbarrier_wait(bars.q_full, 0)
        running = item[VALID, 0]
        env.row_max.fill(0.0)
        env.row_sum.fill(0.0)
        env.lo.fill(0)
        env.hi.fill(0)
        while running != 0:
            stage = ring(turn, c.q_stages)[0]
            at_full, fulls = item[FULL, stage], item[FULLS, stage]
            at_interval, intervals = item[INTERVAL, stage], item[INTERVALS, stage]
            at_bits, bitses = item[BITS, stage], item[BITSES, stage]
            count = fulls + intervals + bitses
            buffer = stage * self.groups + me
            if started == 0:
                env.row_max.fill(-Float32.inf)
                env.row_sum.fill(0.0)
                env.acc_o.fill(0.0)
                self.prepare(env, stage)
                if count > 0:
                    self.first(env, buffer, kv)
                    kv += 1
            from_full = Int32(1) if fulls > 0 else Int32(0)
            from_interval = Int32(1) if fulls == 0 and intervals > 0 else Int32(0)
            from_bits = Int32(1) if fulls == 0 and intervals == 0 else Int32(0)
            for i in cutlass.range(from_full, fulls * self.parts, unroll=1):
                self.step(env, "full", buffer, kv, at_full, i)
                kv += 1
            for i in cutlass.range(from_interval, intervals * self.parts, unroll=1):
                self.step(env, "interval", buffer, kv, at_interval, i)
                kv += 1
            for i in cutlass.range(from_bits, bitses * self.parts, unroll=1):
                self.step(env, "bits", buffer, kv, at_bits, i)
                kv += 1
            started = Int32(0)
            turn += 1
            if const_expr(self.bridges):
                following, phase = ring(turn, c.q_stages)
                cute.arch.mbarrier_wait(bars.q_full + following, phase)
                running = item[VALID, following]
                next_count = item[FULLS, following] + item[INTERVALS, following] + item[BITSES, following]
                if count > 0 and next_count > 0:
                    started = Int32(1)
            if started != 0:
                self.bridge(env, ring(turn, c.q_stages)[0], stage, kv)
                kv += 1
            else:
                if count > 0:
                    self.last(env, kv)
                self.finish(env, stage, env.row_max, env.row_sum, False)
            if const_expr(not self.bridges):
                following, phase = ring(turn, c.q_stages)
                cute.arch.mbarrier_wait(bars.q_full + following, phase)
                running = item[VALID, following]

    @cute.jit
    def prepare(self, env, stage):
        """Load what masks the steps of an item: its rows' bounds and, for the first step, column and words."""
        item = env.item
        fulls, intervals = item[FULLS, stage], item[INTERVALS, stage]
        env.start_words.fill(-1)
        cute.arch.barrier(barrier_id=BOUNDS + env.me, number_of_threads=WARPGROUP + 32)
        env.start[0] = item[START, stage]
        for r in cutlass.range_constexpr(device.ROWS):
            env.lo[r] = env.bounds[env.my_row + 8 * r, 0, stage] - env.quad
            env.hi[r] = env.bounds[env.my_row + 8 * r, 1, stage] - env.quad
            masked = fulls == 0 and intervals > 0
            env.start[1 + r] = env.lo[r] if masked else -FAR
            env.start[3 + r] = env.hi[r] if masked else FAR
        if fulls + intervals == 0:  # noqa: SIM102
            if item[BITSES, stage] > 0:
                self.words(env, env.start_words, False, item[BITS, stage], Int32(0))

    @cute.jit
    def finish(self, env, stage, row_max, row_sum, read: cutlass.Constexpr):
        """The result of an item: normalised, with lse, into shared memory for the store warp (or a slot's floats).

        `read`: a barrier since the item's last Q K^T has shown already that every warp has read its Q.
        """
        c = self.config
        item = env.item
        batch, head, tile, slot = item[BATCH, stage], item[HEAD, stage], item[TILE, stage], item[SLOT, stage]
        sink = -Float32.inf
        if env.has_sinks != 0 and slot < 0:
            sink = env.sinks[head] * device.LOG2E
        factor = cute.make_rmem_tensor((device.ROWS,), Float32)
        value = cute.make_rmem_tensor((device.ROWS,), Float32)
        device.finish(row_max, row_sum, factor, value, env.exponent, sink)
        device.scale_rows(env.acc_o, factor)
        if slot < 0:
            packed = cute.make_rmem_tensor_like(env.acc_o, self.dtype)
            device.convert(env.acc_o, packed)
            if const_expr(not read):
                cute.arch.barrier(barrier_id=READ + env.me, number_of_threads=WARPGROUP)
            atom = cute.make_copy_atom(warp.StMatrix8x8x16bOp(transpose=False, num_matrices=4), self.dtype)
            mine = cute.make_tiled_copy_C(atom, env.mma_pv).get_slice(env.thread)
            to = mine.partition_D(env.s_o)
            cute.copy(atom, mine.retile(packed), to[None, None, None, stage * self.groups + env.me])
            cute.arch.fence_view_async_shared()
            if env.lane % 4 == 0:
                for r in cutlass.range_constexpr(device.ROWS):
                    row = tile * c.block_q + env.my_row + 8 * r
                    if row < env.rows:
                        env.lse[batch, head, row] = value[r]
        else:
            place = item[COPY, stage] * env.slots + slot
            for r in cutlass.range_constexpr(device.ROWS):
                row = env.my_row + 8 * r
                for j in cutlass.range_constexpr(c.E // 8):
                    for e in cutlass.range_constexpr(2):
                        env.part_out[place, row, 8 * j + env.quad + e] = env.acc_o[4 * j + 2 * r + e]
                if env.lane % 4 == 0:
                    env.part_lse[place, row] = value[r]
        cute.arch.barrier_arrive(barrier_id=OUT + env.me, number_of_threads=WARPGROUP + 32)

    @cute.jit
    def product(self, mma, acc, a, b, accumulate: cutlass.Constexpr):
        """Issue acc (+)= a b as one group of asynchronous products."""
        warpgroup.fence()
        atom = cute.make_mma_atom(mma.op)
        atom.set(warpgroup.Field.ACCUMULATE, accumulate)
        for i in cutlass.range_constexpr(cute.size(a, mode=[2])):
            cute.gemm(atom, acc, a[None, None, i], b[None, None, i], acc)
            atom.set(warpgroup.Field.ACCUMULATE, True)
        warpgroup.commit_group()

    @cute.jit
    def release(self, env, bar):
        if env.lane == 0:
            cute.arch.mbarrier_arrive(bar)

    @cute.jit
    def words(self, env, words, interval, at, i):
        """The mask words of step `i` of a list, shifted to this thread's columns. `interval` is a Python bool."""
        c = self.config
        tile, part = at + i // self.parts, i % self.parts
        if const_expr(interval):
            first = env.lists[0, tile] * c.block_kv + part * c.step
            device.interval_words(words, env.lo, env.hi, first)
        else:
            entry = env.lists[1, tile]
            for r in cutlass.range_constexpr(device.ROWS):
                row = env.pool[entry * c.block_q + env.my_row + 8 * r, None]
                for n in cutlass.range_constexpr(c.step // 32):
                    words[r, n] = Int32(cutlass.Uint32(row[part * (c.step // 32) + n]) >> cutlass.Uint32(env.quad))

    @cute.jit
    def transform(self, env, acc_s):
        if const_expr(self.config.score == "softcap"):
            device.soft_cap(acc_s, env.before)
        elif const_expr(self.config.score == "scale"):
            device.multiply(acc_s, env.before)

    @cute.jit
    def start_mask(self, env):
        """Words of an item's first step; all ones when its tile is full."""
        lo, hi = cute.make_rmem_tensor((device.ROWS,), Int32), cute.make_rmem_tensor((device.ROWS,), Int32)
        for r in cutlass.range_constexpr(device.ROWS):
            lo[r], hi[r] = env.start[1 + r], env.start[3 + r]
        words = cute.make_rmem_tensor((device.ROWS, self.config.step // 32), Int32)
        device.interval_words(words, lo, hi, env.start[0])
        for r in cutlass.range_constexpr(device.ROWS):
            for n in cutlass.range_constexpr(self.config.step // 32):
                words[r, n] = words[r, n] & env.start_words[r, n]
        return words

    @cute.jit
    def first(self, env, buffer, kv):
        """The first step of an item: S and softmax; its P V is issued by the next step."""
        c = self.config
        stage, phase = ring(kv, c.stages)
        acc_s = cute.make_rmem_tensor(env.mma_qk.get_slice(0).partition_shape_C((ROWS, c.step)), Float32)
        cute.arch.mbarrier_wait(env.bars.k_full + stage, phase)
        q, k = env.frag_q[None, None, None, buffer], env.frag_k[None, None, None, stage]
        self.product(env.mma_qk, acc_s, q, k, False)
        words = self.start_mask(env)
        warpgroup.wait_group(0)
        self.release(env, env.bars.k_empty + stage)
        self.transform(env, acc_s)
        device.keep(acc_s, words)
        self.start_softmax(env, acc_s, 0)
        device.convert(acc_s, env.frag_p)

    @cute.jit
    def bridge(self, env, following, current, kv):
        """The first step of the following item together with the last P V and the result of the current one."""
        c = self.config
        stage, phase = ring(kv, c.stages)
        old = kv - 1
        old_stage, old_phase = ring(old, c.stages)
        acc_s = cute.make_rmem_tensor(env.mma_qk.get_slice(0).partition_shape_C((ROWS, c.step)), Float32)
        self.prepare(env, following)
        cute.arch.mbarrier_wait(env.bars.k_full + stage, phase)
        if const_expr(self.turns):
            cute.arch.barrier(barrier_id=TURN + env.me, number_of_threads=2 * WARPGROUP)
        q, k = env.frag_q[None, None, None, following * self.groups + env.me], env.frag_k[None, None, None, stage]
        self.product(env.mma_qk, acc_s, q, k, False)
        cute.arch.mbarrier_wait(env.bars.v_full + old_stage, old_phase)
        self.product(env.mma_pv, env.acc_o, env.frag_p, env.frag_v[None, None, None, old_stage], True)
        self.pass_turn(env)
        words = self.start_mask(env)
        old_max = cute.make_rmem_tensor((device.ROWS,), Float32)
        old_sum = cute.make_rmem_tensor((device.ROWS,), Float32)
        for r in cutlass.range_constexpr(device.ROWS):
            old_max[r], old_sum[r] = env.row_max[r], env.row_sum[r]
        env.row_max.fill(-Float32.inf)
        env.row_sum.fill(0.0)
        warpgroup.wait_group(1)
        self.release(env, env.bars.k_empty + stage)
        self.transform(env, acc_s)
        device.keep(acc_s, words)
        self.start_softmax(env, acc_s, c.hold)
        warpgroup.wait_group(0)
        self.release(env, env.bars.v_empty + old_stage)
        device.convert(acc_s, env.frag_p)
        self.finish(env, current, old_max, old_sum, self.turns)
        env.acc_o.fill(0.0)

    @cute.jit
    def pass_turn(self, env):
        if const_expr(self.turns):
            other = 1 - env.me if const_expr(self.groups == 2) else (env.me + 1) % self.groups
            cute.arch.barrier_arrive(barrier_id=TURN + other, number_of_threads=2 * WARPGROUP)

    @cute.jit
    def step(self, env, mode: cutlass.Constexpr, buffer, kv, at, i):
        """S of this step and P V of the one before, softmax of this step while P V runs."""
        c = self.config
        stage, phase = ring(kv, c.stages)
        old = kv - 1
        old_stage, old_phase = ring(old, c.stages)
        acc_s = cute.make_rmem_tensor(env.mma_qk.get_slice(0).partition_shape_C((ROWS, c.step)), Float32)
        words = cute.make_rmem_tensor((device.ROWS, c.step // 32), Int32)
        if const_expr(mode != "full"):
            self.words(env, words, mode == "interval", at, i)
        cute.arch.mbarrier_wait(env.bars.k_full + stage, phase)
        if const_expr(self.turns):
            cute.arch.barrier(barrier_id=TURN + env.me, number_of_threads=2 * WARPGROUP)
        q, k = env.frag_q[None, None, None, buffer], env.frag_k[None, None, None, stage]
        self.product(env.mma_qk, acc_s, q, k, False)
        cute.arch.mbarrier_wait(env.bars.v_full + old_stage, old_phase)
        self.product(env.mma_pv, env.acc_o, env.frag_p, env.frag_v[None, None, None, old_stage], True)
        self.pass_turn(env)
        warpgroup.wait_group(1)
        self.release(env, env.bars.k_empty + stage)
        self.transform(env, acc_s)
        if const_expr(mode != "full"):
            device.keep(acc_s, words)
        top = cute.make_rmem_tensor((device.ROWS,), Float32)
        device.tops(acc_s, top)
        # The reference of a row need not be its maximum: what matters is that no power of two overflows. So it is
        # raised, and O rescaled, only when a score is far above it, and most steps need no exchange between threads.
        above = top[0] > env.row_max[0] + env.slack or top[1] > env.row_max[1] + env.slack
        raised = cute.arch.vote_any_sync(above)
        if raised:
            device.raise_reference(top, env.row_max, env.row_sum, env.rescale, env.exponent)
        device.exponentials(acc_s, env.row_max, env.row_sum, env.exponent, mode != "full", c.hold, env.scratch)
        warpgroup.wait_group(0)
        self.release(env, env.bars.v_empty + old_stage)
        device.convert(acc_s, env.frag_p)
        if raised:
            device.scale_rows(env.acc_o, env.rescale)

    @cute.jit
    def start_softmax(self, env, acc_s, hold: cutlass.Constexpr):
        """The softmax of an item's first step."""
        top = cute.make_rmem_tensor((device.ROWS,), Float32)
        device.tops(acc_s, top)
        device.raise_reference(top, env.row_max, env.row_sum, env.rescale, env.exponent)
        device.exponentials(acc_s, env.row_max, env.row_sum, env.exponent, True, hold, env.scratch)

    @cute.jit
    def last(self, env, kv):
        """The P V of an item's last step."""
        c = self.config
        old = kv - 1
        stage, phase = ring(old, c.stages)
        cute.arch.mbarrier_wait(env.bars.v_full + stage, phase)
        self.product(env.mma_pv, env.acc_o, env.frag_p, env.frag_v[None, None, None, stage], True)
        warpgroup.wait_group(0)
        self.release(env, env.bars.v_empty + stage)
