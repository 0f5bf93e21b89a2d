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
from gossamer.cute.shell import Shell, array, barriers, items_of, ring_of, tile_memory, tiles, words
from gossamer.cute.tiles import tile_layout
from gossamer.cute.work import GatheredRows, ItemRing
from gossamer.kernels.hopper.device.forward.consume import Consumer
from gossamer.kernels.hopper.device.forward.produce import ItemLoader
from gossamer.kernels.hopper.device.forward.results import store
from gossamer.kernels.hopper.device.gather.block import GatherForwardArguments, GatherForwardBlock
from gossamer.kernels.hopper.device.gather.configurations import GatherConfig
from gossamer.kernels.hopper.device.gather.masks import GatheredMask
from gossamer.kernels.hopper.device.gather.rows import THREADS, Gatherer, RowCopies, WordCopies, role_of
from gossamer.kernels.hopper.device.gather.serve import (
    AHEAD,
    CopiedRing,
    Server,
    heads_of,
    item_rows,
    items_to_gather,
)


class TileRows:
    """The row source of the forward: rows of items are tiles of q and out, which TMA loads and stores.

    `gatherer` fills rings of the class `ring` with what is gathered.
    """

    gatherer, ring = Gatherer, CopiedRing

    def memory(self, c: GatherConfig) -> dict[str, Any]:
        """The first members of shared memory, for what else rows have: nothing."""
        return {}

    def items(self, memory: Any, c: GatherConfig, readers: int) -> ItemRing:
        """The ring of descriptions of items, which come with Q."""
        return items_of(memory, "q", c.q_stages, readers)

    def shared(self, arguments: GatherForwardArguments, memory: Any, c: GatherConfig) -> Any:
        """What else roles share of rows: nothing."""

    def loader(self, block: GatherForwardBlock) -> Any:
        """What loads the rows of an item."""
        return ItemLoader(block)

    def store(self, block: GatherForwardBlock) -> None:
        """The warp that stores results."""
        store(block, 0)

    def words(self, block: GatherForwardBlock, thread: Any) -> WordCopies:
        """What copies the words of a step."""
        return WordCopies(block.arguments.bits, block.s_words, thread)

    def ratio(self, arguments: GatherForwardArguments) -> Any:
        """Query heads of a key head."""
        return heads_of(arguments.q) // heads_of(arguments.k)

    def consumer(self, block: GatherForwardBlock) -> Consumer:
        """The warpgroup that computes."""
        return Consumer(block, computing_thread(), GatheredMask)


class GatherForward(Shell):
    """The kernel of one configuration. `rows`: its row source, as `TileRows` is one."""

    threads = 2 * WARPGROUP

    def __init__(self, config: GatherConfig, rows: Any = None) -> None:
        self.config = c = config
        self.rows = rows or TileRows()
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
            bits=bits, source=None, sinks=sinks, part_out=part_out, part_lse=part_lse, lengths=lengths,
            tile_counter=tile_counter, before=before, exponent=exponent, items=items, has_sinks=has_sinks,
        )  # fmt: skip
        self.launch(arguments, blocks, stream)

    def layout(self, stages: int) -> Any:
        return tile_layout(self.dtype, ROWS, self.config.size, stages)

    def memory(self) -> dict[str, Any]:
        c = self.config
        rows = tile_memory(self.dtype, self.layout(c.stages))
        return {
            **self.rows.memory(c),
            **barriers(q=c.q_stages, k=c.stages, v=c.stages, ahead=self.ahead),
            "item": array(Int32, ITEM * c.q_stages), "ahead": array(Int32, ITEM * self.ahead),
            "words": array(Int32, c.slots * c.words, 128),
            "q": tile_memory(self.dtype, self.layout(c.q_stages)), "k": rows, "v": rows,
        }  # fmt: skip

    def block(self, arguments: Any, memory: Any) -> GatherForwardBlock:
        c, source = self.config, self.rows
        # The storing warp reads items, and those that gather, where they have not their own.
        items = source.items(memory, c, 1 + (0 if self.ahead else THREADS // 32))
        ahead = items_to_gather(memory) if self.ahead else None
        k_ring, v_ring = (ring_of(memory, name, c.stages, THREADS, 4, source.ring) for name in ("k", "v"))
        q = tiles(memory.q, self.layout(c.q_stages))
        return GatherForwardBlock(
            config=c, arguments=arguments, rings=((items,), (k_ring, v_ring), *[(ahead,)] * bool(ahead)), items=items,
            ahead=ahead, k=k_ring, v=v_ring,
            s_words=words(memory.words, c.queries, 2, c.slots), source=source.shared(arguments, memory, c),
            s_q=q, s_k=tiles(memory.k, self.layout(c.stages)), s_v=tiles(memory.v, self.layout(c.stages)),
            s_o=q,  # the output takes the place of Q
        )  # fmt: skip

    @cute.jit
    def serve(self, block, warp):
        """One warp takes items and loads their rows, one stores results, two gather."""
        a, c = block.arguments, self.config
        role = role_of(warp, c.blocks)
        if role == 0:
            work = GatheredRows(a.work, a.tile_counter, a.items, a.indices, a.lengths, c.lengths)
            Server(work, block.ahead, block.items, self.rows.loader(block), RowItem.VALID).run()
        elif role == 1:
            self.rows.store(block)
        else:
            thread = cute.arch.thread_idx()[0] % THREADS
            keys = RowCopies(a.k, block.k, block.s_k.iterator, c.size, thread)
            values = RowCopies(a.v, block.v, block.s_v.iterator, c.size, thread)
            ratio = self.rows.ratio(a)
            items = block.items if const_expr(block.ahead is None) else block.ahead
            words, lengths = self.rows.words(block, thread), a.lengths if const_expr(c.lengths) else None
            self.rows.gatherer(items, a.indices, keys, values, words, ratio, lengths).run()

    @cute.jit
    def compute(self, block):
        self.rows.consumer(block).run()
