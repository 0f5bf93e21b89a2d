"""The result of an item: O divided by its sums, lse, and where they go."""

from __future__ import annotations

from typing import Any

import cutlass
import cutlass.cute as cute
from cutlass import Float32, const_expr
from cutlass.cute.nvgpu import warp

from gossamer.kernels.hopper.device import instructions
from gossamer.kernels.hopper.device.common import OUT, READ, WARPGROUP
from gossamer.kernels.hopper.device.configurations import ForwardConfig
from gossamer.kernels.hopper.device.row_items import BATCH, HEAD, SLOT, TILE


class Results:
    """References and sums of an item's rows are kept while the next item begins."""

    config: ForwardConfig
    dtype: Any
    groups: int

    @cute.jit
    def begin(self, env):
        """Keep the references and sums of the rows of an item, and start those of the next."""
        for r in cutlass.range_constexpr(instructions.ROWS):
            env.old_reference[r], env.old_sum[r] = env.reference[r], env.row_sum[r]
        env.reference.fill(-Float32.inf)
        env.row_sum.fill(0.0)

    @cute.jit
    def finish(self, env, stage, read: cutlass.Constexpr):
        """The result of an item whose sums are kept: normalised, for the store warp, or a part of a split row.

        `read`: a barrier since the item's last Q K^T has shown already that every warp has read its Q.
        """
        factor, value = self.factors(env, stage)
        if env.item[SLOT, stage] < 0:
            self.send(env, stage, self.normalise(env, factor), value, read)
        else:
            self.write_part(env, stage, factor, value)
        cute.arch.barrier_arrive(barrier_id=OUT + env.me, number_of_threads=WARPGROUP + 32)

    @cute.jit
    def factors(self, env, stage):
        """(what O is multiplied by, lse) of the rows of an item."""
        sink = -Float32.inf
        if env.has_sinks != 0 and env.item[SLOT, stage] < 0:
            sink = env.sinks[env.item[HEAD, stage]] * instructions.LOG2E
        factor = cute.make_rmem_tensor((instructions.ROWS,), Float32)
        value = cute.make_rmem_tensor((instructions.ROWS,), Float32)
        instructions.finish(env.old_reference, env.old_sum, factor, value, sink)
        return factor, value

    @cute.jit
    def normalise(self, env, factor):
        """O in 16 bits. O itself stays: to write it now would make the assembler wait for products in flight."""
        packed = cute.make_rmem_tensor_like(env.acc_o, self.dtype)
        instructions.convert_rows(env.acc_o, packed, factor)
        return packed

    @cute.jit
    def send(self, env, stage, packed, value, read: cutlass.Constexpr):
        """An item's result into shared memory for the store warp, and its lse."""
        item = env.item
        batch, head, tile = item[BATCH, stage], item[HEAD, stage], item[TILE, stage]
        if const_expr(not read):
            cute.arch.barrier(barrier_id=READ + env.me, number_of_threads=WARPGROUP)
        atom = cute.make_copy_atom(warp.StMatrix8x8x16bOp(transpose=False, num_matrices=4), self.dtype)
        mine = cute.make_tiled_copy_C(atom, env.mma_pv).get_slice(env.thread)
        to = mine.partition_D(env.s_o)
        cute.copy(atom, mine.retile(packed), to[None, None, None, stage * self.groups + env.me])
        cute.arch.fence_view_async_shared()
        if env.lane % 4 == 0:
            for r in cutlass.range_constexpr(instructions.ROWS):
                row = tile * self.config.block_q + env.my_row + 8 * r
                if row < env.rows:
                    env.lse[batch, head, row] = value[r]

    @cute.jit
    def write_part(self, env, stage, factor, value):
        """O and lse of a part of a split row, as float32."""
        c = self.config
        tile, slot = env.item[TILE, stage], env.item[SLOT, stage]
        for r in cutlass.range_constexpr(instructions.ROWS):
            row = env.my_row + 8 * r
            if tile * c.block_q + row < env.rows:
                for j in cutlass.range_constexpr(c.E // 8):
                    for e in cutlass.range_constexpr(2):
                        env.part_out[slot, row, 8 * j + env.quad + e] = env.acc_o[4 * j + 2 * r + e] * factor[r]
                if env.lane % 4 == 0:
                    env.part_lse[slot, row] = value[r]
