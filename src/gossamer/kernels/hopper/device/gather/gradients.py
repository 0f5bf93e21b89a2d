"""dQ, dK and dV over gathered columns: 64 query rows, and the keys that any of them keeps.

dQ of the rows stays in registers. What they add to dK and dV of the 64 keys of a step is made whole, of all rows, and
added to float32 sums in memory, a row of which is found by the key's index: in whatever order the blocks arrive. P and
dS pass through shared memory, since they are read along the other dimension there.
"""

from __future__ import annotations

from typing import Any

import cutlass
import cutlass.cute as cute
from cutlass import Float32, Int32, Int64, const_expr
from cutlass.cute.nvgpu import warp, warpgroup

from gossamer.cute import instructions
from gossamer.cute.common import NUMBERS, ROWS, WARPGROUP, Barrier
from gossamer.cute.row_items import RowItem
from gossamer.cute.shell import tile_memory, tiles
from gossamer.cute.tiles import accumulator, issue, product_of, tile_layout, transposed
from gossamer.kernels.hopper.device.backward.common import clear, put_tile, two_rows
from gossamer.kernels.hopper.device.backward.query import QueryConsumer, probabilities, score_gradients
from gossamer.kernels.hopper.device.gather.block import GatherGradientArguments, GatherGradientBlock
from gossamer.kernels.hopper.device.gather.query import GatheredRowMasks, GatherQuery
from gossamer.kernels.hopper.device.gather.serve import item_rows

PART = 128  # columns of dK and dV that are made at a time
FLOAT = 4  # bytes
P, DS = 0, 1  # places in shared memory of what is read along the other dimension there


def add_four(to: Int64, key: Int32, values: list[Any], place: int) -> None:
    """Add four float32 to memory, where they lie together `place` bytes behind `to`, unless there is no such key."""
    code = (
        "{ .reg .pred p; setp.ge.s32 p, $1, 0; "
        f"@p red.relaxed.gpu.global.add.v4.f32 [$0 + {place}], {{$2, $3, $4, $5}}; }}"
    )
    instructions.assembly(None, code, Int64(to), Int32(key), *[Float32(x) for x in values])


class GradientConsumer(QueryConsumer):
    """A warpgroup with 64 query rows of each item, which adds what they give to dK and dV."""

    late = False

    def __init__(self, block: GatherGradientBlock, masks: Any) -> None:
        super().__init__(block, masks)
        c, dtype = self.config, NUMBERS[self.config.dtype]
        self.columns = min(PART, c.size)
        self.mma_sum = product_of(dtype, self.columns, transposed=True, first_transposed=True)
        of_sum, exchanged = self.mma_sum.get_slice(0), transposed(block.s_exchanged, ROWS, ROWS, 2)
        self.frag_turned = of_sum.make_fragment_A(of_sum.partition_A(exchanged))
        self.frag_rows = [self.parts_of(x[None, None, 0]) for x in (block.s_dout, block.s_q)]
        self.s_exchanged = block.s_exchanged
        self.key = two_rows(Int32)  # of this thread's rows of dK and dV
        self.place = cute.make_rmem_tensor((instructions.ROWS,), Int64)  # of those rows, in bytes

    def parts_of(self, rows: Any) -> Any:
        """Rows of an item as the second factor of what is summed over them, in parts of their columns."""
        turned = transposed(rows, ROWS, self.config.size)
        of_sum, parts = self.mma_sum.get_slice(0), cute.flat_divide(turned, (self.columns, ROWS))
        return of_sum.make_fragment_B(of_sum.partition_B(parts))

    @cute.jit
    def prepare(self):
        """Rows that a tile does not fill, or that keep nothing, become zero: what they hold would be summed."""
        c, thread = self.config, self.thread
        used = const_expr(c.heads * c.queries)
        for rows in (self.block.s_q, self.block.s_dout):
            if const_expr(used < ROWS):
                for i in cutlass.range(thread.thread, (ROWS - used) * c.size, WARPGROUP, unroll=1):
                    rows[used + i // c.size, i % c.size, 0] = rows.element_type(0.0)
            for r in cutlass.range_constexpr(instructions.ROWS):
                if self.lse[r] == Float32.inf:
                    self.empty_row(rows, r)
        cute.arch.fence_view_async_shared()
        self.meet()

    @cute.jit
    def empty_row(self, rows, r: cutlass.Constexpr):
        """Clear a row of this thread's, which four threads share."""
        zeros = cute.make_rmem_tensor((8,), rows.element_type)
        zeros.fill(0.0)
        for i in cutlass.range(self.thread.lane % 4, self.config.size // 8, 4, unroll=1):
            cute.autovec_copy(zeros, cute.local_tile(rows[self.thread.row + 8 * r, None, 0], (8,), (i,)))

    def meet(self) -> None:
        """All of the warpgroup are here."""
        cute.arch.barrier(barrier_id=Barrier.OUTPUT, number_of_threads=WARPGROUP)

    @cute.jit
    def find_keys(self, entry):
        """Which keys this thread's rows of a step's dK and dV are."""
        a, item = self.block.arguments, self.item
        group = item[RowItem.BATCH] * cute.size(a.k, mode=[1]) + item[RowItem.HEAD] // self.block.ratio
        first = Int64(group) * cute.size(a.k, mode=[2])
        for r in cutlass.range_constexpr(instructions.ROWS):
            self.key[r] = a.indices[entry * ROWS + self.thread.row + 8 * r]
            self.place[r] = (first + self.key[r]) * (FLOAT * self.config.size)

    @cute.jit
    def step(self, kind: cutlass.Constexpr, kv, first, entry=None, part=None, column=None):
        """S, dP, dV, dK and dQ of step `kv`; no product is in flight when it ends."""
        c, block, a = self.config, self.block, self.block.arguments
        k_stage, k_phase = block.k.place(kv)
        v_stage, v_phase = block.v.place(kv)
        acc_s, acc_dp = accumulator(self.mma_s, c.step), accumulator(self.mma_s, c.step)
        words = cute.make_rmem_tensor((instructions.ROWS, c.step // 32), Int32)
        self.find_keys(entry)
        self.masks.load(words, kind, kv, entry, part, column)
        block.k.wait_full(k_stage, k_phase)
        # S = Q K^T
        issue(self.mma_s, acc_s, self.frag_q, self.frag_k[None, None, None, k_stage], False)
        block.v.wait_full(v_stage, v_phase)
        # dP = dO V^T
        issue(self.mma_s, acc_dp, self.frag_do, self.frag_v[None, None, None, v_stage], False)
        warpgroup.wait_group(1)
        cap = const_expr(c.score == "softcap")
        factor = cute.make_rmem_tensor_like(acc_s)  # of dS, by the derivative of the cap
        if const_expr(cap):
            instructions.soft_cap(acc_s, a.before)
            for i in instructions.places(acc_s):
                factor[i] = 1.0 - acc_s[i] * acc_s[i]
        probabilities(acc_s, self.lse, a.exponent, False)
        clear(acc_s, words)
        put_tile(acc_s, self.mma_s, self.thread, self.s_exchanged[None, None, P])
        warpgroup.wait_group(0)
        block.v.release_at(kv)
        if const_expr(cap):
            for i in instructions.places(acc_s):
                acc_s[i] = acc_s[i] * factor[i]
        score_gradients(acc_s, acc_dp, self.delta, self.frag_ds)
        self.put_score_gradients(acc_s)
        cute.arch.fence_view_async_shared()
        self.meet()
        # dV = P^T dO
        for n in cutlass.range_constexpr(c.size // self.columns):
            self.add_product(P, n, a.dv_sum)
        # dK = dS^T Q
        for n in cutlass.range_constexpr(c.size // self.columns - 1):
            self.add_product(DS, n, a.dk_sum, a.factor)
        acc = self.start_product(DS, c.size // self.columns - 1)
        # dQ += dS K
        issue(self.mma_dq, self.acc_dq, self.frag_ds, self.frag_kt[None, None, None, k_stage], True)
        warpgroup.wait_group(0)
        block.k.release_at(kv)
        self.meet()  # the next step writes what every warp has read
        self.add(acc, c.size // self.columns - 1, a.dk_sum, a.factor)

    @cute.jit
    def put_score_gradients(self, like):
        """dS to shared memory, behind P."""
        packed = cute.make_rmem_tensor_like(like, self.s_exchanged.element_type)
        to, from_ = cute.recast_tensor(packed, Int32), cute.recast_tensor(self.frag_ds, Int32)
        for i in instructions.places(to):
            to[i] = from_[i]
        atom = cute.make_copy_atom(warp.StMatrix8x8x16bOp(transpose=False, num_matrices=4), packed.element_type)
        mine = cute.make_tiled_copy_C(atom, self.mma_s).get_slice(self.thread.thread)
        cute.copy(atom, mine.retile(packed), mine.partition_D(self.s_exchanged[None, None, DS]))

    def start_product(self, which: int, n: int) -> Any:
        """Issue the sum over rows of P times a part of dO, or of dS times one of Q."""
        acc = accumulator(self.mma_sum, self.columns)
        turned, rows = self.frag_turned[None, None, None, which], self.frag_rows[which][None, None, None, n, 0]
        issue(self.mma_sum, acc, turned, rows, False)
        return acc

    @cute.jit
    def add_product(self, which: cutlass.Constexpr, n: cutlass.Constexpr, sums, factor=None):
        """As `start_product`, and add it to sums in memory, times a factor."""
        acc = self.start_product(which, n)
        warpgroup.wait_group(0)
        self.add(acc, n, sums, factor)

    @cute.jit
    def add(self, acc, n: cutlass.Constexpr, sums, factor=None):
        """Add part n of the columns of a step's dK or dV to sums (B, G, K, size).

        Of each two times eight columns a thread has two pairs; it gives one to its neighbour, and has four together.
        """
        if const_expr(factor is not None):
            instructions.multiply(acc, factor)
        odd = self.thread.lane % 2
        column = 8 * odd + self.thread.quad - 2 * odd
        start = sums.iterator.toint() + FLOAT * (n * self.columns + column)
        for r in cutlass.range_constexpr(instructions.ROWS):
            to = start + self.place[r]
            for j in cutlass.range_constexpr(0, self.columns // 8, 2):
                here, there = [[acc[4 * i + 2 * r + e] for e in range(2)] for i in (j, j + 1)]
                given = [here[e] if odd != 0 else there[e] for e in range(2)]
                found = [cute.arch.shuffle_sync_bfly(x, offset=1) for x in given]
                four = [
                    found[0] if odd != 0 else here[0], found[1] if odd != 0 else here[1],
                    there[0] if odd != 0 else found[0], there[1] if odd != 0 else found[1],
                ]  # fmt: skip
                add_four(to, self.key[r], four, FLOAT * 8 * j)


class GatherGradients(GatherQuery):
    """The kernel of one configuration."""

    block_class = GatherGradientBlock

    @cute.jit
    def __call__(
        self,
        q: cute.Tensor, k: cute.Tensor, v: cute.Tensor, dout: cute.Tensor, terms: cute.Tensor, dk_sum: cute.Tensor,
        dv_sum: cute.Tensor, dq: cute.Tensor, work: cute.Tensor, indices: cute.Tensor, bits: cute.Tensor,
        part_dq: cute.Tensor, lengths: cute.Tensor, tile_counter: cute.Tensor, before: Float32, exponent: Float32,
        factor: Float32, items: Int32, blocks: Int32, stream: Any,
    ) -> None:  # fmt: skip
        """As in `GatherGradientArguments`."""
        c = self.config
        arguments = GatherGradientArguments(
            q=item_rows(c, q), dout=item_rows(c, dout), dq=item_rows(c, dq, store=True), k=k, v=v, terms=terms,
            dk_sum=dk_sum, dv_sum=dv_sum, work=work, indices=indices, bits=bits, part_dq=part_dq, lengths=lengths,
            tile_counter=tile_counter, before=before, exponent=exponent, factor=factor, items=items,
        )  # fmt: skip
        self.launch(arguments, blocks, stream)

    def exchanged(self) -> Any:
        """The layout of P, and of dS, in shared memory."""
        return tile_layout(NUMBERS[self.config.dtype], ROWS, ROWS, 2)

    def memory(self) -> dict[str, Any]:
        return {**super().memory(), "exchanged": tile_memory(NUMBERS[self.config.dtype], self.exchanged())}

    def block(self, arguments: Any, memory: Any) -> GatherGradientBlock:
        block: Any = super().block(arguments, memory)
        block.s_exchanged = tiles(memory.exchanged, self.exchanged())
        return block

    def prepared(self, block: GatherGradientBlock) -> GatherGradientBlock:
        a = block.arguments
        block.ratio = cute.size(a.q.tensor, mode=[2]) // cute.size(a.k, mode=[1])
        return block

    @cute.jit
    def compute(self, block):
        GradientConsumer(block, GatheredRowMasks(block)).consume()
