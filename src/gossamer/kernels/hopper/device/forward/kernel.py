"""The forward kernel: warp-specialised, persistent, one walk of a layout's rows.

`config.blocks` blocks for each multiprocessor. Warp 0 of the first warpgroup is the producer: it takes work items,
writes each one's description to shared memory, and fills the rings of Q, K and V by TMA. The warps behind it store
outputs, one for each consumer.
Each other warpgroup is a consumer of 64 query rows: S = Q K^T and O += P V by wgmma, P in registers. The softmax of a
step runs beside P V of the step before, across items too. Consumers take turns at the tensor cores (named barriers), as
in FlashAttention-3.
"""

from __future__ import annotations

from typing import Any

import cutlass.cute as cute
from cutlass import Float32, Int32

from gossamer.cute.clearing import landing_of, looks_for_keys
from gossamer.cute.common import NUMBERS, ROWS, WARPGROUP, computing_thread
from gossamer.cute.row_items import ITEM
from gossamer.cute.shell import Shell, array, barriers, items_of, ring_of, tile_memory, tiles, words
from gossamer.cute.tiles import tile_layout, tma
from gossamer.kernels.hopper.device.configurations import ForwardConfig
from gossamer.kernels.hopper.device.forward.block import ForwardArguments, ForwardBlock
from gossamer.kernels.hopper.device.forward.consume import Consumer
from gossamer.kernels.hopper.device.forward.masks import BlockMask
from gossamer.kernels.hopper.device.forward.merge import Merge
from gossamer.kernels.hopper.device.forward.produce import Producer
from gossamer.kernels.hopper.device.forward.results import store

REGISTERS = {
    (1, 1): (56, 240),
    (1, 2): (24, 232),
    (2, 1): (24, 240),
    (3, 1): (32, 160),
}  # (consumers, blocks): registers of a thread of the producer, of a consumer


class Forward(Shell):
    """The kernel of one configuration."""

    def __init__(self, config: ForwardConfig) -> None:
        self.config = c = config
        self.dtype = NUMBERS[c.dtype]
        self.groups = groups = c.block_q // ROWS
        self.threads = WARPGROUP * (groups + 1)
        self.blocks = c.blocks
        self.registers = REGISTERS[groups, c.blocks]
        self.merge = Merge(c.E, c.block_q)

    @cute.jit
    def __call__(
        self,
        q: cute.Tensor, k: cute.Tensor, v: cute.Tensor, out: cute.Tensor, lse: cute.Tensor, work: cute.Tensor,
        lists: cute.Tensor, lo: cute.Tensor, hi: cute.Tensor, pool: cute.Tensor, sinks: cute.Tensor,
        part_out: cute.Tensor, part_lse: cute.Tensor, merges: cute.Tensor, lengths: cute.Tensor,
        tile_counter: cute.Tensor, before: Float32, exponent: Float32, items: Int32, has_sinks: Int32, blocks: Int32,
        cut: Int32, stream: Any,
    ) -> None:  # fmt: skip
        """As in `ForwardArguments`; `merges` (m, MERGE) int32 are those of rows that are `cut`, by a second kernel."""
        c = self.config
        arguments = ForwardArguments(
            q=tma(q, ROWS, c.D), k=tma(k, c.step, c.D), v=tma(v, c.step, c.E), out=tma(out, ROWS, c.E, store=True),
            lse=lse, work=work, lists=lists, lo=lo, hi=hi, pool=pool, sinks=sinks, part_out=part_out,
            part_lse=part_lse, lengths=lengths, tile_counter=tile_counter, before=before, exponent=exponent,
            items=items, has_sinks=has_sinks,
        )  # fmt: skip
        self.launch(arguments, blocks, stream)
        if cut != 0:
            self.merge(out, lse, part_out, part_lse, merges, sinks, has_sinks, stream)

    def layouts(self) -> tuple[Any, Any, Any]:
        """The shared-memory layouts of the rings of Q, K and V."""
        c, n = self.config, self.dtype
        q = tile_layout(n, ROWS, c.D, c.q_stages * self.groups)
        return q, tile_layout(n, c.step, c.D, c.stages), tile_layout(n, c.step, c.E, c.stages)

    def memory(self) -> dict[str, Any]:
        c = self.config
        q, k, v = self.layouts()
        return {
            **barriers(q=c.q_stages, k=c.stages, v=c.stages, landed=int(looks_for_keys(c))),
            "item": array(Int32, ITEM * c.q_stages), "bounds": array(Int32, 2 * c.block_q * c.q_stages),
            "q": tile_memory(self.dtype, q), "k": tile_memory(self.dtype, k), "v": tile_memory(self.dtype, v),
        }  # fmt: skip

    def block(self, arguments: ForwardArguments, memory: Any) -> ForwardBlock:
        c, warps = self.config, 4 * self.groups
        q, k, v = self.layouts()
        o = tile_layout(self.dtype, ROWS, c.E)
        # The output of a warpgroup takes the place of its Q.
        o_outer = cute.append(o.outer, cute.make_layout(c.q_stages * self.groups, stride=ROWS * c.D))
        items = items_of(memory, "q", c.q_stages, self.groups)
        k_ring, v_ring = [ring_of(memory, name, c.stages, 1, warps) for name in ("k", "v")]
        landing = landing_of(memory, looks_for_keys(c))
        return ForwardBlock(
            config=c, arguments=arguments, items=items, k=k_ring, v=v_ring, landing=landing,
            rings=((items,), (k_ring, v_ring), *[(landing,)] * (landing is not None)),
            bounds=words(memory.bounds, c.block_q, 2, c.q_stages),
            s_q=tiles(memory.q, q), s_k=tiles(memory.k, k), s_v=tiles(memory.v, v),
            s_o=memory.q.get_tensor(o_outer, swizzle=o.inner),
        )  # fmt: skip

    @cute.jit
    def serve(self, block, warp):
        if warp == 0:
            Producer(block).run()
        elif warp <= self.groups:
            store(block, warp - 1)

    @cute.jit
    def compute(self, block):
        Consumer(block, computing_thread(), BlockMask).run()
