"""The consumer warpgroup of the float32 forward over gathered columns: products of numbers split in two (split.py).

A score is a sum of three products of halves, times the powers of its query and its key.

The products of a step are summed from zero, the small ones first, and added to O in float32: tensor cores cut off what
they add, and over many steps that would be seen.
"""

from __future__ import annotations

from typing import Any

import cutlass
import cutlass.cute as cute
from cutlass import Boolean, Float16, Float32, Int32, Int64, const_expr
from cutlass._mlir.dialects import llvm
from cutlass.cute.nvgpu import warpgroup
from cutlass.cutlass_dsl import T, dsl_user_op

from gossamer.kernels.hopper.device import instructions
from gossamer.kernels.hopper.device.common import ROWS, WARPGROUP, Env, ring
from gossamer.kernels.hopper.device.gather.configurations import SplitConfig
from gossamer.kernels.hopper.device.gather.produce import step_words
from gossamer.kernels.hopper.device.gather.split import (
    BIAS,
    TOP,
    VALUE_SHIFT,
    down,
    exponent_field,
    largest_bits,
    power,
    split,
)
from gossamer.kernels.hopper.device.gather.split_softmax import SplitSoftmax
from gossamer.kernels.hopper.device.row_items import BATCH, BITS, BITSES, FIRST, HEAD, SLOT, TILE, VALID

LINE = 32  # float32 numbers in 128 bytes
HALVES = ((1, 0), (0, 1), (0, 0))  # of two factors, 0 is hi and 1 is lo: the products that are summed
UNDO = 2.0 ** (VALUE_SHIFT - TOP)  # what results are multiplied by


@dsl_user_op
def load_pair(address: Int32, place: int, *, loc: Any = None, ip: Any = None) -> Int64:
    """Two float32 of shared memory, `place` bytes behind an address."""
    return Int64(
        llvm.inline_asm(
            T.i64(), [Int32(address).ir_value(loc=loc, ip=ip)], f"ld.shared.b64 $0, [$1 + {place}];", "=l,r",
            has_side_effects=True, is_align_stack=False, asm_dialect=llvm.AsmDialect.AD_ATT, loc=loc, ip=ip,
        )
    )  # fmt: skip


@dsl_user_op
def store_pair(
    address: Int64, place: int, a: Float32, b: Float32, wanted: Boolean, *, loc: Any = None, ip: Any = None
) -> None:
    """Two float32 to global memory, `place` bytes behind an address, if they are wanted."""
    operands = [x.ir_value(loc=loc, ip=ip) for x in (Int64(address), Float32(a), Float32(b), Boolean(wanted))]
    llvm.inline_asm(
        None, operands, f"@$3 st.global.v2.f32 [$0 + {place}], {{$1, $2}};", "l,f,f,b", has_side_effects=True,
        is_align_stack=False, asm_dialect=llvm.AsmDialect.AD_ATT, loc=loc, ip=ip,
    )  # fmt: skip


class SplitConsumer(SplitSoftmax):
    """64 query rows of each item. Fragments as in instructions.py."""

    config: SplitConfig

    @cute.jit
    def consume(
        self, mma_s, mma_o, q_at, s_k, s_v, bars, item, s_bits, s_powers, sinks, out, lse, part_out, part_lse, before,
        exponent, has_sinks,
    ):  # fmt: skip
        """Item after item. The first S of one is computed beside the last P V of the one before."""
        c = self.config
        thread, _, _ = cute.arch.thread_idx()
        thread = thread % WARPGROUP
        lane = cute.arch.lane_idx()
        whole_s, whole_o = mma_s.get_slice(0), mma_o.get_slice(0)
        s_vt = cute.composition(s_v, cute.make_ordered_layout((2 * c.size, ROWS, c.stages), order=(1, 0, 2)))
        two = (instructions.ROWS,)
        env = Env(
            lane=lane, quad=2 * (lane % 4), my_row=thread // 32 * 16 + lane // 4, mma_s=mma_s, mma_o=mma_o, q_at=q_at,
            q=whole_s.make_fragment_A(whole_s.partition_shape_A((ROWS, 2 * c.size))),
            k=whole_s.make_fragment_B(whole_s.partition_B(s_k)),
            p=[whole_o.make_fragment_A(whole_o.partition_shape_A((ROWS, ROWS))) for _ in range(2)],
            v=whole_o.make_fragment_B(whole_o.partition_B(cute.flat_divide(s_vt, (c.size, ROWS)))),
            acc_o=cute.make_rmem_tensor(whole_o.partition_shape_C((ROWS, c.size)), Float32),
            row=cute.make_rmem_tensor(two, Float32),  # factor of the scores of a row
            reference=cute.make_rmem_tensor(two, Float32), row_sum=cute.make_rmem_tensor(two, Float32),
            rescale=cute.make_rmem_tensor(two, Float32),
            bars=bars, item=item, pool=s_bits, powers=s_powers, sinks=sinks, has_sinks=has_sinks, out=out, lse=lse,
            part_out=part_out, part_lse=part_lse, before=before, exponent=exponent,
            length=cute.make_rmem_tensor((1,), Int32),
        )  # fmt: skip
        env.length.fill(0)
        env.row.fill(0.0)
        env.rescale.fill(1.0)
        self.begin(env)
        turn, kv, started = Int32(0), Int32(0), Int32(0)
        cute.arch.mbarrier_wait(bars.q_full, 0)
        running = item[VALID, 0]
        while running != 0:
            stage = ring(turn, c.q_stages)[0]
            at, count = item[BITS, stage], item[BITSES, stage]
            if started == 0 and count > 0:
                self.query(env, stage)
                self.first(env, at, kv)
                kv += 1
            for i in cutlass.range(1, count, unroll=1):
                self.step(env, at + i, kv)
                kv += 1
            turn += 1
            following, phase = ring(turn, c.q_stages)
            cute.arch.mbarrier_wait(bars.q_full + following, phase)
            running = item[VALID, following]
            started = Int32(0)
            if count > 0 and item[BITSES, following] > 0:
                started = Int32(1)
            if started != 0:
                self.bridge(env, stage, following, kv)
                kv += 1
            else:
                if count > 0:
                    self.last(env, kv)
                self.finish(env, stage)
                self.begin(env)

    @cute.jit
    def begin(self, env):
        """The state of an item of which nothing is computed."""
        env.reference.fill(-Float32.inf)
        env.row_sum.fill(0.0)
        env.acc_o.fill(0.0)

    @cute.jit
    def release(self, env, bar):
        if env.lane == 0:
            cute.arch.mbarrier_arrive(bar)

    @cute.jit
    def query(self, env, stage):
        """Q of an item into registers, scaled and split, and the factors of its rows' scores."""
        c = self.config
        count = const_expr(c.size // 8)
        words = cute.make_rmem_tensor((instructions.ROWS * count,), Int64)
        # As TMA leaves them: 128 bytes of each row together, their 16-byte pieces permuted by the row.
        start = env.q_at + stage * (4 * ROWS * c.size) + 4 * LINE * env.my_row + 4 * (env.quad % 4)
        piece = (env.quad // 4) ^ (env.lane // 4)
        for j in cutlass.range_constexpr(count):
            address = start + 16 * (piece ^ const_expr(2 * (j % 4)))
            for r in cutlass.range_constexpr(instructions.ROWS):
                place = const_expr(j // 4 * (4 * LINE * ROWS) + r * (8 * 4 * LINE))
                words[instructions.ROWS * j + r] = load_pair(address, place)
        numbers = cute.recast_tensor(words, Float32)
        for r in cutlass.range_constexpr(instructions.ROWS):
            places = [4 * j + 2 * r + e for j in range(count) for e in range(2)]
            bits = largest_bits(numbers, places)
            for offset in (1, 2):
                bits = cutlass.max(bits, cute.arch.shuffle_sync_bfly(bits, offset=offset))
            field = cutlass.min(exponent_field(bits), Int32(2 * BIAS))
            env.row[r] = power(field) * (env.exponent if const_expr(c.score == "fold") else env.before)
            factor = down(field)
            for i in places:
                numbers[i] = numbers[i] * factor
        halves = cute.recast_tensor(env.q, Int32)
        size = const_expr(cute.size(halves) // 2)
        high, low = [cute.make_rmem_tensor((2 * size,), Float16) for _ in range(2)]
        split(numbers, high, low)
        first, second = cute.recast_tensor(high, Int32), cute.recast_tensor(low, Int32)
        for i in cutlass.range_constexpr(size):
            halves[i], halves[size + i] = first[i], second[i]
        if const_expr(c.lengths):  # lists ascend: what is below the length comes first
            env.length[0] = env.item[FIRST, stage] - env.quad

    @cute.jit
    def words(self, env, words, at, kv):
        """Wait for K of step `at`, with the step's words and powers. A fence makes it visible to the products."""
        c = self.config
        stage, phase = ring(kv, c.stages)
        cute.arch.mbarrier_wait(env.bars.k_full + stage, phase)
        step_words(env, words, ring(kv, 2 * c.stages)[0], at, c.lengths)

    @cute.jit
    def products(self, mma, acc, pairs: cutlass.Constexpr):
        """Issue acc = the sum of the products of `pairs` as one group of asynchronous products."""
        warpgroup.fence()
        atom = cute.make_mma_atom(mma.op)
        atom.set(warpgroup.Field.ACCUMULATE, False)
        for a, b in pairs:
            cute.gemm(atom, acc, a, b, acc)
            atom.set(warpgroup.Field.ACCUMULATE, True)
        warpgroup.commit_group()

    @cute.jit
    def issue_s(self, env, acc_s, kv):
        """S of a step."""
        stage, count = ring(kv, self.config.stages)[0], const_expr(self.config.size // 16)
        pairs = [
            (env.q[None, None, a * count + i], env.k[None, None, b * count + i, stage])
            for a, b in HALVES
            for i in range(count)
        ]
        self.products(env.mma_s, acc_s, pairs)

    @cute.jit
    def issue_o(self, env, part, kv):
        """P V of a step."""
        stage = ring(kv, self.config.stages)[0]
        pairs = [
            (env.p[a][None, None, i], env.v[None, None, i, b, 0, stage]) for a, b in HALVES for i in range(ROWS // 16)
        ]
        self.products(env.mma_o, part, pairs)

    @cute.jit
    def first(self, env, at, kv):
        """The first step of an item whose Q is in registers; its P V is issued by what follows."""
        c = self.config
        acc_s = cute.make_rmem_tensor(env.mma_s.get_slice(0).partition_shape_C((ROWS, ROWS)), Float32)
        words = cute.make_rmem_tensor((instructions.ROWS, ROWS // 32), Int32)
        self.words(env, words, at, kv)
        cute.arch.fence_view_async_shared()
        self.issue_s(env, acc_s, kv)
        warpgroup.wait_group(0)
        self.release(env, env.bars.k_empty + ring(kv, c.stages)[0])
        values, _ = self.powers_of_two(env, acc_s, words, kv)
        self.probabilities(env, acc_s, values)

    @cute.jit
    def step(self, env, at, kv):
        """S of a step and P V of the one before, which runs beside the first half of the softmax."""
        c = self.config
        acc_s = cute.make_rmem_tensor(env.mma_s.get_slice(0).partition_shape_C((ROWS, ROWS)), Float32)
        part = cute.make_rmem_tensor_like(env.acc_o)
        words = cute.make_rmem_tensor((instructions.ROWS, ROWS // 32), Int32)
        self.words(env, words, at, kv)
        self.value(env, kv)
        self.issue_s(env, acc_s, kv)
        self.issue_o(env, part, kv - 1)
        warpgroup.wait_group(1)
        self.release(env, env.bars.k_empty + ring(kv, c.stages)[0])
        values, raised = self.powers_of_two(env, acc_s, words, kv)
        warpgroup.wait_group(0)
        self.release(env, env.bars.v_empty + ring(kv - 1, c.stages)[0])
        self.add(env, part)
        if raised:
            instructions.scale_rows(env.acc_o, env.rescale)
        self.probabilities(env, acc_s, values)

    @cute.jit
    def bridge(self, env, stage, following, kv):
        """The last P V of an item and its result, and the first step of the item that follows."""
        c = self.config
        part = cute.make_rmem_tensor_like(env.acc_o)
        acc_s = cute.make_rmem_tensor(env.mma_s.get_slice(0).partition_shape_C((ROWS, ROWS)), Float32)
        words = cute.make_rmem_tensor((instructions.ROWS, ROWS // 32), Int32)
        self.value(env, kv)
        self.issue_o(env, part, kv - 1)
        self.query(env, following)
        self.words(env, words, env.item[BITS, following], kv)
        cute.arch.fence_view_async_shared()
        self.issue_s(env, acc_s, kv)
        warpgroup.wait_group(1)
        self.release(env, env.bars.v_empty + ring(kv - 1, c.stages)[0])
        self.add(env, part)
        self.finish(env, stage)
        self.begin(env)
        warpgroup.wait_group(0)
        self.release(env, env.bars.k_empty + ring(kv, c.stages)[0])
        values, _ = self.powers_of_two(env, acc_s, words, kv)
        self.probabilities(env, acc_s, values)

    @cute.jit
    def last(self, env, kv):
        """The last P V of an item."""
        part = cute.make_rmem_tensor_like(env.acc_o)
        self.value(env, kv)
        self.issue_o(env, part, kv - 1)
        warpgroup.wait_group(0)
        self.release(env, env.bars.v_empty + ring(kv - 1, self.config.stages)[0])
        self.add(env, part)

    @cute.jit
    def value(self, env, kv):
        """Wait for V of the step before, and make what was waited for visible to the products."""
        stage, phase = ring(kv - 1, self.config.stages)
        cute.arch.mbarrier_wait(env.bars.v_full + stage, phase)
        cute.arch.fence_view_async_shared()

    @cute.jit
    def add(self, env, part):
        for i in cutlass.range_constexpr(cute.size(part)):
            env.acc_o[i] = env.acc_o[i] + part[i]

    @cute.jit
    def finish(self, env, stage):
        """The result of an item, whole or a part of a list that was cut, to memory; its place becomes free."""
        c, item = self.config, env.item
        batch, head, tile, slot = item[BATCH, stage], item[HEAD, stage], item[TILE, stage], item[SLOT, stage]
        sink = -Float32.inf
        if env.has_sinks != 0 and slot < 0:
            sink = env.sinks[head] * instructions.LOG2E
        factor = cute.make_rmem_tensor((instructions.ROWS,), Float32)
        value = cute.make_rmem_tensor((instructions.ROWS,), Float32)
        instructions.finish(env.reference, env.row_sum, factor, value, sink)
        cute.arch.sync_warp()
        self.release(env, env.bars.q_empty + stage)
        # A row of the result has an even number of columns, or room for one more.
        columns = cute.size(env.out, mode=[3]) if slot < 0 else Int32(c.size)
        for r in cutlass.range_constexpr(instructions.ROWS):
            place = env.my_row + 8 * r
            row = tile * ROWS + place
            if row < cute.size(env.out, mode=[2]):
                to = env.out[batch, head, row, None].iterator.toint()
                if slot >= 0:
                    to = env.part_out[slot, place, None].iterator.toint()
                to += 4 * env.quad
                scale = factor[r] * UNDO
                for j in cutlass.range_constexpr(c.size // 8):
                    i = const_expr(4 * j + 2 * r)
                    wanted = 8 * j + env.quad < columns
                    store_pair(to, 32 * j, env.acc_o[i] * scale, env.acc_o[i + 1] * scale, wanted)
                if env.lane % 4 == 0:
                    if slot < 0:
                        env.lse[batch, head, row] = value[r]
                    else:
                        env.part_lse[slot, place] = value[r]
