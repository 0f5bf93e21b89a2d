"""dQ over gathered columns: 64 query rows, and the keys that any of them keeps.

Of the first warpgroup one warp takes items, tells the two that gather, and loads Q and dO by TMA; the second computes
as that of dQ by rows does for block layouts.
"""

from __future__ import annotations

from typing import Any

import cutlass
import cutlass.cute as cute
from cutlass import Float32, Int32, const_expr

from gossamer.cute.common import Opaque, computing_thread
from gossamer.cute.row_items import RowItem
from gossamer.cute.shell import items_of, words
from gossamer.cute.work import GatheredRows, ItemRing
from gossamer.kernels.hopper.device.backward.common import Kind
from gossamer.kernels.hopper.device.backward.query import ItemTiles, QueryConsumer, QueryGradient
from gossamer.kernels.hopper.device.gather.block import GatherQueryArguments, GatherQueryBlock
from gossamer.kernels.hopper.device.gather.configurations import GatherConfig
from gossamer.kernels.hopper.device.gather.masks import GatheredWords
from gossamer.kernels.hopper.device.gather.rows import THREADS, Gatherer, RowCopies, WordCopies, role_of
from gossamer.kernels.hopper.device.gather.serve import (
    AHEAD,
    CopiedRing,
    Server,
    heads_of,
    item_rows,
    items_to_gather,
)


class GatheredRowMasks(Opaque):
    """The mask source of dQ over gathered columns: words that come with the keys of each step."""

    has_bounds = False

    def __init__(self, block: GatherQueryBlock) -> None:
        self.thread, self.item, self.k = computing_thread(), block.q.item, block.k
        self.packed = GatheredWords(block.s_words, block.config.slots, self.thread, block.config)

    def begin(self, batch: Any) -> None:
        """An item begins."""
        self.packed.begin(self.item, 0)

    @cute.jit
    def walk(self, consumer, bounds, kv):
        """All steps of an item."""
        first, start = kv, self.item[RowItem.BITS_START, 0]
        for i in cutlass.range(self.item[RowItem.BITS_COUNT, 0], unroll=1):
            consumer.step(Kind.BITS, kv, first, start + i)
            kv += 1
        return kv

    @cute.jit
    def load(self, words, kind: cutlass.Constexpr, kv, entry, part, column):
        """The words of a step, shifted to this thread's columns."""
        stage, phase = self.k.place(kv)
        cute.arch.mbarrier_wait(self.k.full + stage, phase)
        self.packed.read(words, kv, entry)


class TileRows:
    """The row source of dQ: rows of items are tiles of q, dout and dq, which TMA loads and stores."""

    def memory(self, c: GatherConfig) -> dict[str, Any]:
        """The first members of shared memory, for what else rows have: nothing."""
        return {}

    def items(self, memory: Any) -> ItemRing:
        """The ring of descriptions of items, which come with Q and dO."""
        return items_of(memory, "q", 1, 1)

    def shared(self, arguments: Any, memory: Any, c: GatherConfig) -> Any:
        """What else roles share of rows: nothing."""

    def loader(self, block: GatherQueryBlock) -> Any:
        """What loads the rows of an item."""
        return ItemTiles(block)

    def words(self, block: GatherQueryBlock, thread: Any) -> WordCopies:
        """What copies the words of a step."""
        return WordCopies(block.arguments.bits, block.s_words, thread)

    def ratio(self, arguments: Any) -> Any:
        """Query heads of a key head."""
        return heads_of(arguments.q) // heads_of(arguments.k)

    def consumer(self, block: GatherQueryBlock) -> QueryConsumer:
        """The warpgroup that computes."""
        return QueryConsumer(block, GatheredRowMasks(block))


class GatherQuery(QueryGradient):
    """The kernel of one configuration. `rows`: its row source, as `TileRows` is one."""

    block_class = GatherQueryBlock
    ahead = AHEAD

    def __init__(self, config: GatherConfig, rows: Any = None) -> None:
        super().__init__(config)
        self.rows = rows or TileRows()
        self.registers = config.registers
        self.words = config.slots * config.words
        self.lands = False

    @cute.jit
    def __call__(
        self,
        q: cute.Tensor, k: cute.Tensor, v: cute.Tensor, dout: cute.Tensor, terms: cute.Tensor, dq: cute.Tensor,
        work: cute.Tensor, indices: cute.Tensor, bits: cute.Tensor, part_dq: cute.Tensor, lengths: cute.Tensor,
        tile_counter: cute.Tensor, before: Float32, exponent: Float32, factor: Float32, items: Int32, blocks: Int32,
        stream: Any,
    ) -> None:  # fmt: skip
        """As in `GatherQueryArguments`."""
        c = self.config
        arguments = GatherQueryArguments(
            q=item_rows(c, q), dout=item_rows(c, dout), dq=item_rows(c, dq, store=True), source_result=None, k=k, v=v,
            terms=terms, work=work, indices=indices, bits=bits, source=None, part_dq=part_dq, lengths=lengths,
            tile_counter=tile_counter, before=before, exponent=exponent, factor=factor, items=items,
        )  # fmt: skip
        self.launch(arguments, blocks, stream)

    def memory(self) -> dict[str, Any]:
        return {**self.rows.memory(self.config), **super().memory()}

    def block(self, arguments: Any, memory: Any) -> GatherQueryBlock:
        block: GatherQueryBlock = super().block(arguments, memory)
        stages = self.config.stages
        block.q, block.source = self.rows.items(memory), self.rows.shared(arguments, memory, self.config)
        block.item = block.q.item[None, 0]
        block.k, block.v = CopiedRing.of(memory, "k", stages), CopiedRing.of(memory, "v", stages)
        block.ahead = items_to_gather(memory)
        block.rings = (block.q,), (block.ahead,), (block.k, block.v)
        block.s_words = words(memory.words, self.config.queries, 2, self.config.slots)
        return block

    @cute.jit
    def serve(self, block, warp):
        """One warp takes items, two gather, one has nothing to do."""
        c, a = self.config, block.arguments
        role = role_of(warp, c.blocks)
        if role == 0:
            work = GatheredRows(a.work, a.tile_counter, a.items, a.indices, a.lengths, c.lengths)
            Server(work, block.ahead, block.q, self.rows.loader(block), RowItem.VALID).run()
        elif role >= 2:
            thread = cute.arch.thread_idx()[0] % THREADS
            keys = RowCopies(a.k, block.k, block.s_k.iterator, c.size, thread)
            values = RowCopies(a.v, block.v, block.s_v.iterator, c.size, thread)
            ratio, copied_words = self.rows.ratio(a), self.rows.words(block, thread)
            lengths = a.lengths if const_expr(c.lengths) else None
            Gatherer(block.ahead, a.indices, keys, values, copied_words, ratio, lengths).run()

    @cute.jit
    def compute(self, block):
        self.rows.consumer(block).consume()
