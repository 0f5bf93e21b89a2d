"""The consumer warpgroup of the float32 forward over gathered columns: products of numbers split in two (split.py).

A score is a sum of three products of halves, times the powers of its query and its key.

The products of a step are summed from zero, the small ones first, and added to O in float32: tensor cores cut off what
they add, and over many steps that would be seen.
"""

from __future__ import annotations

import cutlass
import cutlass.cute as cute
from cutlass import Boolean, Float16, Float32, Int32, Int64, const_expr
from cutlass.cute.nvgpu import warpgroup

from gossamer.cute import instructions
from gossamer.cute.common import ROWS, Opaque, Thread
from gossamer.cute.row_items import RowItem
from gossamer.cute.tiles import accumulator, product_of, second_factor, transposed
from gossamer.kernels.hopper.device.forward.masks import packed_mask
from gossamer.kernels.hopper.device.forward.results import factors
from gossamer.kernels.hopper.device.gather.block import Float32Block
from gossamer.kernels.hopper.device.gather.float32.softmax import Float32Softmax
from gossamer.kernels.hopper.device.gather.float32.split import (
    BIAS,
    TOP,
    VALUE_SHIFT,
    down,
    exponent_field,
    largest_bits,
    power,
    split,
)
from gossamer.kernels.hopper.device.gather.masks import GatheredWords

LINE = 32  # float32 numbers in 128 bytes
HALVES = ((1, 0), (0, 1), (0, 0))  # of two factors, 0 is hi and 1 is lo: the products that are summed
UNDO = 2.0 ** (VALUE_SHIFT - TOP)  # what results are multiplied by


def load_pair(address: Int32, place: int) -> Int64:
    """Two float32 of shared memory, `place` bytes behind an address."""
    return instructions.assembly(Int64, f"ld.shared.b64 $0, [$1 + {place}];", Int32(address))


def store_pair(address: Int64, place: int, a: Float32, b: Float32, wanted: Boolean) -> None:
    """Two float32 to global memory, `place` bytes behind an address, if they are wanted."""
    code = f"@$3 st.global.v2.f32 [$0 + {place}], {{$1, $2}};"
    instructions.assembly(None, code, Int64(address), Float32(a), Float32(b), Boolean(wanted))


class Float32Consumer(Opaque):
    """64 query rows of each item. Fragments as in instructions.py."""

    def __init__(self, block: Float32Block, thread: Thread) -> None:
        self.block, self.arguments, self.thread, self.config = block, block.arguments, thread, block.config
        self.items, self.k_ring, self.v_ring = block.items, block.k, block.v
        size, stages = self.config.size, self.config.stages
        self.mma_s = product_of(Float16, ROWS, registers=True)
        self.mma_o = product_of(Float16, size, transposed=True, registers=True)
        whole = self.mma_s.get_slice(0)
        self.q = whole.make_fragment_A(whole.partition_shape_A((ROWS, 2 * size)))  # both halves, in registers
        self.k = second_factor(self.mma_s, block.s_k)
        s_vt = transposed(block.s_v, ROWS, 2 * size, stages)
        self.v = second_factor(self.mma_o, cute.flat_divide(s_vt, (size, ROWS)))
        self.o = accumulator(self.mma_o, size)
        self.softmax = Float32Softmax(block, thread, self.mma_o)
        self.words = GatheredWords(block.s_words, 2 * stages, thread, self.config)

    @cute.jit
    def run(self):
        """Item after item. The first S of one is computed beside the last P V of the one before."""
        item = self.items.item
        self.softmax.row.fill(0.0)
        self.softmax.rescale.fill(1.0)
        self.begin()
        turn, kv, started = Int32(0), Int32(0), Int32(0)
        self.items.wait_full(0, 0)
        running = item[RowItem.VALID, 0]
        while running != 0:
            stage = self.items.place(turn)[0]
            at, count = item[RowItem.BITS_START, stage], item[RowItem.BITS_COUNT, stage]
            if started == 0 and count > 0:
                self.query(stage)
                self.first(at, kv)
                kv += 1
            for i in cutlass.range(1, count, unroll=1):
                self.step(at + i, kv)
                kv += 1
            turn += 1
            following = self.items.wait_full_at(turn)
            running = item[RowItem.VALID, following]
            started = Int32(0)
            if count > 0 and item[RowItem.BITS_COUNT, following] > 0:
                started = Int32(1)
            if started != 0:
                self.bridge(stage, following, kv)
                kv += 1
            else:
                if count > 0:
                    self.last(kv)
                self.finish(stage)
                self.begin()

    @cute.jit
    def begin(self):
        """The state of an item of which nothing is computed."""
        self.softmax.reference.fill(-Float32.inf)
        self.softmax.row_sum.fill(0.0)
        self.o.fill(0.0)

    @cute.jit
    def query(self, stage):
        """Q of an item into registers, scaled and split, and the factors of its rows' scores."""
        a, c, thread, block = self.arguments, self.config, self.thread, self.block
        count = const_expr(c.size // 8)
        words = cute.make_rmem_tensor((instructions.ROWS * count,), Int64)
        # As TMA leaves them: 128 bytes of each row together, their 16-byte pieces permuted by the row.
        start = block.s_q.iterator.toint() + stage * (4 * ROWS * c.size) + 4 * LINE * thread.row + 4 * (thread.quad % 4)
        piece = (thread.quad // 4) ^ (thread.lane // 4)
        for j in cutlass.range_constexpr(count):
            address = start + 16 * (piece ^ const_expr(2 * (j % 4)))
            for r in cutlass.range_constexpr(instructions.ROWS):
                place = const_expr(j // 4 * (4 * LINE * ROWS) + r * (8 * 4 * LINE))
                words[instructions.ROWS * j + r] = load_pair(address, place)
        numbers = cute.recast_tensor(words, Float32)
        for r in cutlass.range_constexpr(instructions.ROWS):
            places = instructions.of_row(numbers, r)
            bits = largest_bits(numbers, places)
            for offset in (1, 2):
                bits = cutlass.max(bits, cute.arch.shuffle_sync_bfly(bits, offset=offset))
            field = cutlass.min(exponent_field(bits), Int32(2 * BIAS))
            self.softmax.row[r] = power(field) * (a.exponent if const_expr(c.score == "fold") else a.before)
            factor = down(field)
            for i in places:
                numbers[i] = numbers[i] * factor
        halves = cute.recast_tensor(self.q, Int32)
        size = const_expr(cute.size(halves) // 2)
        high, low = [cute.make_rmem_tensor((2 * size,), Float16) for _ in range(2)]
        split(numbers, high, low)
        first, second = cute.recast_tensor(high, Int32), cute.recast_tensor(low, Int32)
        for i in cutlass.range_constexpr(size):
            halves[i], halves[size + i] = first[i], second[i]
        self.words.begin(self.items.item, stage)

    @cute.jit
    def fetch(self, at, kv):
        """Wait for K of step `at`, with the step's words, which are returned, and powers.

        A fence makes it visible to the products.
        """
        words = packed_mask(ROWS)
        self.k_ring.wait_full_at(kv)
        self.words.read(words, kv, at)
        return words

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
    def issue_s(self, kv):
        """Issue S = Q K^T of a step."""
        scores = accumulator(self.mma_s, ROWS)
        stage, count = self.k_ring.place(kv)[0], const_expr(self.config.size // 16)
        pairs = [
            (self.q[None, None, a * count + i], self.k[None, None, b * count + i, stage])
            for a, b in HALVES
            for i in range(count)
        ]
        self.products(self.mma_s, scores, pairs)
        return scores

    @cute.jit
    def issue_o(self, kv):
        """Issue P V of a step, which is to be added to O."""
        part = cute.make_rmem_tensor_like(self.o)
        stage = self.v_ring.place(kv)[0]
        pairs = [
            (self.softmax.p[a][None, None, i], self.v[None, None, i, b, 0, stage])
            for a, b in HALVES
            for i in range(ROWS // 16)
        ]
        self.products(self.mma_o, part, pairs)
        return part

    @cute.jit
    def first(self, at, kv):
        """The first step of an item whose Q is in registers; its P V is issued by what follows."""
        words = self.fetch(at, kv)
        cute.arch.fence_view_async_shared()
        scores = self.issue_s(kv)
        warpgroup.wait_group(0)
        self.k_ring.release_at(kv)
        values, _ = self.softmax.powers_of_two(scores, words, kv)
        self.softmax.probabilities(scores, values)

    @cute.jit
    def step(self, at, kv):
        """S of a step and P V of the one before, which runs beside the first half of the softmax."""
        words = self.fetch(at, kv)
        self.value(kv)
        scores, part = self.issue_s(kv), self.issue_o(kv - 1)
        warpgroup.wait_group(1)
        self.k_ring.release_at(kv)
        values, raised = self.softmax.powers_of_two(scores, words, kv)
        warpgroup.wait_group(0)
        self.add(part, kv)
        if raised:
            instructions.scale_rows(self.o, self.softmax.rescale)
        self.softmax.probabilities(scores, values)

    @cute.jit
    def bridge(self, stage, following, kv):
        """The last P V of an item and its result, and the first step of the item that follows."""
        self.value(kv)
        part = self.issue_o(kv - 1)
        self.query(following)
        words = self.fetch(self.items.item[RowItem.BITS_START, following], kv)
        cute.arch.fence_view_async_shared()
        scores = self.issue_s(kv)
        warpgroup.wait_group(1)
        self.add(part, kv)
        self.finish(stage)
        self.begin()
        warpgroup.wait_group(0)
        self.k_ring.release_at(kv)
        values, _ = self.softmax.powers_of_two(scores, words, kv)
        self.softmax.probabilities(scores, values)

    @cute.jit
    def last(self, kv):
        """The last P V of an item."""
        self.value(kv)
        part = self.issue_o(kv - 1)
        warpgroup.wait_group(0)
        self.add(part, kv)

    @cute.jit
    def value(self, kv):
        """Wait for V of the step before, and make what was waited for visible to the products."""
        self.v_ring.wait_full_at(kv - 1)
        cute.arch.fence_view_async_shared()

    @cute.jit
    def add(self, part, kv):
        """Give back V of the step before, and add its P V to O."""
        self.v_ring.release_at(kv - 1)
        for i in cutlass.range_constexpr(cute.size(part)):
            self.o[i] = self.o[i] + part[i]

    @cute.jit
    def finish(self, stage):
        """The result of an item, whole or a part of a list that was cut, to memory; its place becomes free."""
        a, c, item, thread = self.arguments, self.config, self.items.item, self.thread
        batch, head, tile = item[RowItem.BATCH, stage], item[RowItem.HEAD, stage], item[RowItem.TILE, stage]
        slot = item[RowItem.SLOT, stage]
        factor, value = factors(self.block, stage, self.thread.row, self.softmax.reference, self.softmax.row_sum)
        cute.arch.sync_warp()
        self.items.release(stage)
        # A row of the result has an even number of columns, or room for one more.
        columns = cute.size(a.out, mode=[3]) if slot < 0 else Int32(c.size)
        for r in cutlass.range_constexpr(instructions.ROWS):
            place = thread.row + 8 * r
            row = tile * ROWS + place
            if row < cute.size(a.out, mode=[2]):
                to = a.out[batch, head, row, None].iterator.toint()
                if slot >= 0:
                    to = a.part_out[slot, place, None].iterator.toint()
                to += 4 * thread.quad
                scale = factor[r] * UNDO
                for j in cutlass.range_constexpr(c.size // 8):
                    i = const_expr(4 * j + 2 * r)
                    wanted = 8 * j + thread.quad < columns
                    store_pair(to, 32 * j, self.o[i] * scale, self.o[i + 1] * scale, wanted)
                if thread.lane % 4 == 0:
                    if slot < 0:
                        a.lse[batch, head, row] = value[r]
                    else:
                        a.part_lse[slot, place] = value[r]
