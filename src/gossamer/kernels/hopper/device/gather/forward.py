"""The forward kernel of gathered columns: 64 query rows, and the keys that any of them keeps.

Of the first warpgroup one warp takes items and loads Q by TMA, one stores finished outputs, and two gather K and V; the
second computes as that of the forward kernel of block layouts does. Two or three blocks share a multiprocessor.
"""

from __future__ import annotations

from typing import Any

import cutlass.cute as cute
from cutlass import Float32, Int32, const_expr

from gossamer.cute.common import NUMBERS, ROWS, WARPGROUP, computing_thread
from gossamer.cute.row_items import ITEM, RowItem
from gossamer.cute.shell import Shell, array, barriers, items_of, tile_memory, tiles, words
from gossamer.cute.tiles import tile_layout
from gossamer.cute.work import GatheredRows
from gossamer.kernels.hopper.device.forward.consume import Consumer
from gossamer.kernels.hopper.device.forward.produce import ItemLoader
from gossamer.kernels.hopper.device.forward.results import store
from gossamer.kernels.hopper.device.gather.block import GatherForwardArguments, GatherForwardBlock
from gossamer.kernels.hopper.device.gather.configurations import GatherConfig
from gossamer.kernels.hopper.device.gather.masks import GatheredMask
from gossamer.kernels.hopper.device.gather.rows import THREADS, Gatherer, RowCopies, WordCopies, role_of
from gossamer.kernels.hopper.device.gather.serve import AHEAD, CopiedRing, Server, item_rows, items_to_gather


class GatherForward(Shell):
    """The kernel of one configuration."""

    threads = 2 * WARPGROUP
    block_class = GatherForwardBlock

    def __init__(self, config: GatherConfig) -> None:
        self.config = c = config
        self.dtype = NUMBERS[c.dtype]
        self.blocks, self.registers = c.blocks, c.registers
        self.ahead = AHEAD if c.q_stages == 1 else 0  # descriptions of items for the warps that gather

    @cute.jit
    def __call__(
        self,
        q: cute.Tensor, k: cute.Tensor, v: cute.Tensor, out: cute.Tensor, lse: cute.Tensor, work: cute.Tensor,
        indices: cute.Tensor, bits: cute.Tensor, sinks: cute.Tensor, part_out: cute.Tensor, part_lse: cute.Tensor,
        lengths: cute.Tensor, tile_counter: cute.Tensor, before: Float32, exponent: Float32, items: Int32,
        has_sinks: Int32, blocks: Int32, stream: Any,
    ) -> None:  # fmt: skip
        """As in `GatherForwardArguments`."""
        c = self.config
        arguments = GatherForwardArguments(
            q=item_rows(c, q), out=item_rows(c, out, store=True), k=k, v=v, lse=lse, work=work, indices=indices,
            bits=bits, sinks=sinks, part_out=part_out, part_lse=part_lse, lengths=lengths, tile_counter=tile_counter,
            before=before, exponent=exponent, items=items, has_sinks=has_sinks,
        )  # fmt: skip
        self.launch(arguments, blocks, stream)

    def layout(self, stages: int) -> Any:
        return tile_layout(self.dtype, ROWS, self.config.size, stages)

    def memory(self) -> dict[str, Any]:
        c = self.config
        rows = tile_memory(self.dtype, self.layout(c.stages))
        return {
            **barriers(q=c.q_stages, k=c.stages, v=c.stages, ahead=self.ahead),
            "item": array(Int32, ITEM * c.q_stages), "ahead": array(Int32, ITEM * self.ahead),
            "words": array(Int32, c.slots * c.words, 128),
            "q": tile_memory(self.dtype, self.layout(c.q_stages)), "k": rows, "v": rows,
        }  # fmt: skip

    def block(self, arguments: Any, memory: Any) -> GatherForwardBlock:
        c = self.config
        # The storing warp reads items, and those that gather, where they have not their own.
        items = items_of(memory, "q", c.q_stages, 1 + (0 if self.ahead else THREADS // 32))
        ahead = items_to_gather(memory) if self.ahead else None
        k_ring, v_ring = CopiedRing.of(memory, "k", c.stages), CopiedRing.of(memory, "v", c.stages)
        q = tiles(memory.q, self.layout(c.q_stages))
        return self.block_class(
            config=c, arguments=arguments, rings=((items,), (k_ring, v_ring), *[(ahead,)] * bool(ahead)), items=items,
            ahead=ahead, k=k_ring, v=v_ring,
            s_words=words(memory.words, c.queries, 2, c.slots),
            s_q=q, s_k=tiles(memory.k, self.layout(c.stages)), s_v=tiles(memory.v, self.layout(c.stages)),
            s_o=q,  # the output takes the place of Q
        )  # fmt: skip

    @cute.jit
    def serve(self, block, warp):
        a, c = block.arguments, self.config
        role = role_of(warp, c.blocks)
        if role == 0:
            work = GatheredRows(a.work, a.tile_counter, a.items, a.indices, a.lengths, c.lengths)
            Server(work, block.ahead, block.items, ItemLoader(block), RowItem.VALID).run()
        elif role == 1:
            store(block, 0)
        else:
            thread = cute.arch.thread_idx()[0] % THREADS
            keys = RowCopies(a.k, block.k, block.s_k.iterator, c.size, thread)
            values = RowCopies(a.v, block.v, block.s_v.iterator, c.size, thread)
            ratio = cute.size(a.q.tensor, mode=[2]) // cute.size(a.k, mode=[1])
            items = block.items if const_expr(block.ahead is None) else block.ahead
            words, lengths = self.word_copies(block, thread), a.lengths if const_expr(c.lengths) else None
            Gatherer(items, a.indices, keys, values, words, ratio, lengths).run()

    def word_copies(self, block: Any, thread: Any) -> WordCopies:
        """What copies the words of a step."""
        return WordCopies(block.arguments.bits, block.s_words, thread)

    @cute.jit
    def compute(self, block):
        Consumer(block, computing_thread(), GatheredMask).run()
