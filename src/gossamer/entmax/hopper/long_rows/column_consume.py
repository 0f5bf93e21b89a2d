"""A warpgroup with 64 keys: it adds all rows without a list to their dK and dV, in order."""

from __future__ import annotations

from typing import Any

import cutlass
import cutlass.cute as cute
from cutlass import Float32, Int32, Int64, const_expr
from cutlass.cute.nvgpu import warpgroup

from gossamer.cute.common import ROWS as TILE
from gossamer.cute.common import Opaque, Thread
from gossamer.cute.instructions import ROWS, assembly, convert, pack, places
from gossamer.cute.tiles import accumulator, first_factor, held_factor, issue, product_of, second_factor, transposed
from gossamer.entmax.hopper.long_rows.column_block import ColumnItem, Kind, LongRowsColumnsBlock
from gossamer.entmax.hopper.long_rows.row_tile import Turns
from gossamer.entmax.hopper.long_rows.sums import powers


class ColumnConsumer(Opaque):
    """The dK and dV of 64 keys; products here have keys as rows and query rows as columns."""

    def __init__(self, block: LongRowsColumnsBlock, thread: Thread) -> None:
        a, c, dtype = block.arguments, block.config, block.s_q.element_type
        self.block, self.arguments, self.config, self.thread = block, a, c, thread
        self.mma = product_of(dtype, c.step)
        self.mma_k, self.mma_v = (product_of(dtype, n, transposed=True, registers=True) for n in (c.D, c.E))
        self.k = first_factor(self.mma, block.s_k)[None, None, None, thread.warpgroup]
        self.v = first_factor(self.mma, block.s_v)[None, None, None, thread.warpgroup]
        self.q, self.dout = second_factor(self.mma, block.s_q), second_factor(self.mma, block.s_dout)
        self.q_turned = second_factor(self.mma_k, transposed(block.s_q, c.step, c.D, c.stages))
        self.dout_turned = second_factor(self.mma_v, transposed(block.s_dout, c.step, c.E, c.stages))
        self.dk, self.dv = accumulator(self.mma_k, c.D), accumulator(self.mma_v, c.E)
        self.p, self.ds = (held_factor(self.mma_v, c.step) for _ in range(2))
        self.exponent = cute.make_rmem_tensor((1,), Float32)
        self.turns = Turns(thread.warpgroup, c.groups)
        self.own = thread.thread // 32 * 16 + thread.lane // 4  # the first key of a thread; the second is eight below

    @cute.jit
    def run(self):
        """Compute item after item."""
        a, c, block = self.arguments, self.config, self.block
        items, heads = block.items, cute.size(a.q, mode=[1])
        self.turns.start()
        turn, n = Int32(0), Int32(0)
        place = items.wait_full_at(turn)
        running = block.s_item[ColumnItem.VALID, place]
        while running != 0:
            lead, tile = block.s_item[ColumnItem.LEAD, place], block.s_item[ColumnItem.TILE, place]
            cute.arch.sync_warp()
            items.release(place)
            key = tile * c.keys + TILE * self.thread.warpgroup + self.own
            self.dk.fill(0.0)
            self.dv.fill(0.0)
            block.keys.wait_full(0, turn & 1)
            some = Int32(0)
            stage, kind = self.next_stage(n)
            while kind != Kind.END:
                self.step(stage, kind, key, lead * (heads // cute.size(a.k.tensor, mode=[2])) % heads)
                some = Int32(1)
                n += 1
                stage, kind = self.next_stage(n)
            cute.arch.sync_warp()
            block.rows.release(stage)
            n += 1
            block.keys.release(Int32(0))
            if some != 0:
                self.add(a.dk, self.dk, lead, key, a.scale)
                self.add(a.dv, self.dv, lead, key, Float32(1.0))
            turn += 1
            place = items.wait_full_at(turn)
            running = block.s_item[ColumnItem.VALID, place]

    @cute.jit
    def next_stage(self, n):
        """(stage, kind) at the n-th use of the ring of rows."""
        stage = self.block.rows.wait_full_at(n)
        kind = cutlass.max(self.block.s_kind[0, stage], self.block.s_kind[1, stage])
        return stage, cute.arch.make_warp_uniform(kind)

    @cute.jit
    def step(self, stage, kind, key, head):
        """Add the rows of a stage."""
        a, c, block, quad = self.arguments, self.config, self.block, 2 * (self.thread.lane % 4)
        steepness = a.steepness[head]
        if const_expr(c.same == -1.0):
            self.exponent[0] = cute.arch.rcp_approx(steepness) - 1.0
        scores, dp = accumulator(self.mma, c.step), accumulator(self.mma, c.step)
        self.turns.take()
        issue(self.mma, scores, self.k, self.q[None, None, None, stage], False)
        issue(self.mma, dp, self.v, self.dout[None, None, None, stage], False)
        self.turns.give()
        warpgroup.wait_group(0)
        if kind == Kind.MASKED:
            for i in places(scores):
                column, own = const_expr(8 * (i // 4) + i % 2), key + const_expr(8 * (i % 4 // 2))
                is_seen = own >= block.s_lo[quad + column, stage] and own < block.s_hi[quad + column, stage]
                scores[i] = scores[i] if is_seen else -Float32.inf
        factor = steepness * a.scale
        for j in cutlass.range_constexpr(cute.size(scores) // 4):
            for n in cutlass.range_constexpr(2):
                line, delta = block.s_line[quad + 8 * j + n, stage], block.s_delta[quad + 8 * j + n, stage]
                for r in cutlass.range_constexpr(ROWS):
                    i = const_expr(4 * j + 2 * r + n)
                    w = cute.arch.fmax(scores[i] * factor + line, Float32(0.0), nan=True)
                    p, u = powers(c.same, self.exponent, w)
                    scores[i] = p
                    dp[i] = u * (dp[i] - delta)
        convert(scores, self.p)
        convert(dp, self.ds)
        self.turns.take()
        issue(self.mma_v, self.dv, self.p, self.dout_turned[None, None, None, stage], True)
        issue(self.mma_k, self.dk, self.ds, self.q_turned[None, None, None, stage], True)
        self.turns.give()
        warpgroup.wait_group(0)
        block.rows.release(stage)

    @cute.jit
    def add(self, to, acc, lead, key, factor):
        """Add sums to the gradients that the lists have given."""
        K, columns = cute.size(self.arguments.k.tensor, mode=[0]), cute.size(to, mode=[1])
        dtype = self.block.s_q.element_type
        for r in cutlass.range_constexpr(ROWS):
            if key + 8 * r < K:
                number = Int64(lead) * K + key + 8 * r
                for j in cutlass.range_constexpr(cute.size(acc) // 4):
                    column = 4 * j + self.thread.lane % 4
                    if column < columns:
                        low, high = unpack(to[number, column], dtype)
                        i = const_expr(4 * j + 2 * r)
                        to[number, column] = pack(low + acc[i] * factor, high + acc[i + 1] * factor, dtype)


def unpack(pair: Any, dtype: Any) -> tuple[Any, Any]:
    """Two 16-bit numbers as float32."""
    if dtype is cutlass.BFloat16:
        codes = "shl.b32 $0, $1, 16;", "and.b32 $0, $1, 0xffff0000;"
    else:
        half = "{{ .reg .b16 a, b; mov.b32 {{a, b}}, $1; cvt.f32.f16 $0, {}; }}"
        codes = half.format("a"), half.format("b")
    low, high = (assembly(Float32, code, Int32(pair), effects=False) for code in codes)
    return low, high
