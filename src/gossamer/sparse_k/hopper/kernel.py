"""The forward of SparseK attention: 128 queries, over their window and the list of keys that live in their tile.

In the first warpgroup one warp takes items and loads Q by TMA, one stores, and two gather K and V. The others compute
like those of the forward kernel of block layouts, and multiply the weights of values by gates.
"""

from __future__ import annotations

from typing import Any

import cutlass.cute as cute
from cutlass import Float32, Int32

from gossamer.cute.common import NUMBERS, ROWS, WARPGROUP, computing_thread
from gossamer.cute.row_items import ITEM, RowItem
from gossamer.cute.shell import Shell, array, barriers, items_of, tile_memory, tiles, words
from gossamer.cute.tiles import tile_layout, tma
from gossamer.kernels.hopper.device.forward.produce import ItemLoader
from gossamer.kernels.hopper.device.forward.results import store_all
from gossamer.kernels.hopper.device.gather.rows import THREADS
from gossamer.kernels.hopper.device.gather.serve import CopiedRing, Server
from gossamer.sparse_k.hopper.block import SparseKArguments, SparseKBlock
from gossamer.sparse_k.hopper.configurations import TERMS, TILE, SparseKConfig
from gossamer.sparse_k.hopper.consume import SparseKConsumer, SparseKMask
from gossamer.sparse_k.hopper.items import SparseKRows
from gossamer.sparse_k.hopper.load import LiveGatherer

GROUPS = TILE // ROWS


class SparseKForward(Shell):
    """The kernel of the forward."""

    threads = WARPGROUP * (GROUPS + 1)
    registers = (40, 232)

    def __init__(self, config: SparseKConfig) -> None:
        self.config, self.dtype = config, NUMBERS[config.dtype]

    @cute.jit
    def __call__(
        self,
        q: cute.Tensor, k: cute.Tensor, v: cute.Tensor, out: cute.Tensor, lse: cute.Tensor, u: cute.Tensor,
        tau: cute.Tensor, last: cute.Tensor, lists: cute.Tensor, counts: cute.Tensor, every: cute.Tensor,
        ends: cute.Tensor, tile_counter: cute.Tensor, exponent: Float32, window: Int32, items: Int32, blocks: Int32,
        stream: Any,
    ) -> None:  # fmt: skip
        """Launch the kernel; the parameters are those of `SparseKArguments`."""
        size = self.config.size
        arguments = SparseKArguments(
            q=tma(q, ROWS, size), out=tma(out, ROWS, size, store=True), k=k, v=v, lse=lse, u=u, tau=tau, last=last,
            lists=lists, counts=counts, every=every, ends=ends, tile_counter=tile_counter, exponent=exponent,
            window=window, items=items,
        )  # fmt: skip
        self.launch(arguments, blocks, stream)

    def layouts(self) -> tuple[Any, Any]:
        """The layouts of Q and of the rings of K and V."""
        c = self.config
        return (
            tile_layout(self.dtype, ROWS, c.size, c.q_stages * GROUPS),
            tile_layout(self.dtype, TILE, c.size, c.stages),
        )

    def memory(self) -> dict[str, Any]:
        c = self.config
        q, rows = (tile_memory(self.dtype, x) for x in self.layouts())
        return {
            **barriers(q=c.q_stages, k=c.stages, v=c.stages), "item": array(Int32, ITEM * c.q_stages),
            "scores": array(Float32, TILE * c.slots, 128),
            "terms": array(Int32, (TERMS - 1) * TILE * c.slots, 128), "q": q, "k": rows, "v": rows,
        }  # fmt: skip

    def block(self, arguments: SparseKArguments, memory: Any) -> SparseKBlock:
        c, warps = self.config, 4 * GROUPS
        q, rows = self.layouts()
        items = items_of(memory, "q", c.q_stages, 1 + THREADS // 32)  # one warp stores, others gather
        k_ring, v_ring = (CopiedRing.of(memory, name, c.stages, readers=warps) for name in ("k", "v"))
        terms = words(memory.terms, TILE, c.slots, TERMS - 1)
        s_q = tiles(memory.q, q)
        return SparseKBlock(
            config=c, arguments=arguments, rings=((items,), (k_ring, v_ring)), items=items, k=k_ring, v=v_ring,
            s_terms=(words(memory.scores, TILE, c.slots), terms[None, None, 0], terms[None, None, 1]),
            s_q=s_q, s_k=tiles(memory.k, rows), s_v=tiles(memory.v, rows),
            s_o=s_q,  # the output takes the place of Q
        )  # fmt: skip

    @cute.jit
    def serve(self, block, warp):
        a = block.arguments
        if warp == 0:
            heads, (scored_units, _) = cute.size(a.q.tensor, mode=[2]), a.u.shape
            units = scored_units // cute.size(a.k, mode=[0])
            work = SparseKRows(
                None, a.tile_counter, a.items, a.counts, a.ends, cute.size(a.lists, mode=[2]), heads, units, a.window
            )
            Server(work, None, block.items, ItemLoader(block), RowItem.VALID).run()
        elif warp == 1:
            store_all(block)
        else:
            LiveGatherer(block, cute.arch.thread_idx()[0] % THREADS).run()

    @cute.jit
    def compute(self, block):
        SparseKConsumer(block, computing_thread(), SparseKMask).run()
