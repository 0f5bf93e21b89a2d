"""dQ over gathered columns: 64 query rows, and the keys that any of them keeps.

Of the first warpgroup one warp takes items, tells the two that gather, and loads Q and dO by TMA; the second computes
as that of dQ by rows does for block layouts.
"""

from __future__ import annotations

from typing import Any

import cutlass
import cutlass.cute as cute
from cutlass import Float32, Int32

from gossamer.kernels.hopper.device.backward.common import Kind
from gossamer.kernels.hopper.device.backward.query import ItemTiles, QueryConsumer, QueryGradient
from gossamer.kernels.hopper.device.common import ROWS, Opaque, computing_thread
from gossamer.kernels.hopper.device.gather.configurations import GatherConfig
from gossamer.kernels.hopper.device.gather.masks import WORDS, GatheredWords
from gossamer.kernels.hopper.device.gather.rows import THREADS, Gatherer, RowCopies, WordCopies, role_of
from gossamer.kernels.hopper.device.gather.serve import AHEAD, CopiedRing, Server, items_to_gather
from gossamer.kernels.hopper.device.row_items import RowItem
from gossamer.kernels.hopper.device.shell import Block, words
from gossamer.kernels.hopper.device.tiles import tma
from gossamer.kernels.hopper.device.work import GatheredRows


class GatheredRowMasks(Opaque):
    """The mask source of dQ over gathered columns: words that come with the keys of each step."""

    has_bounds = False

    def __init__(self, block: Block) -> None:
        self.thread, self.item, self.k = computing_thread(), block.q.item, block.k
        self.packed = GatheredWords(block.words, 2 * self.k.stages, self.thread, block.config.lengths)

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


class GatherQuery(QueryGradient):
    """The kernel of one configuration."""

    ahead = AHEAD

    def __init__(self, config: GatherConfig) -> None:
        super().__init__(config)
        self.registers = config.registers
        self.words = 2 * config.stages * WORDS

    @cute.jit
    def __call__(
        self,
        q: cute.Tensor,  # (B, H, Q, D)
        k: cute.Tensor,  # (B, G, K, D)
        v: cute.Tensor,  # (B, G, K, E)
        dout: cute.Tensor,  # (B, H, Q, E)
        terms: cute.Tensor,  # (2, B, H, Qp) float32: lse in base 2, delta
        dq: cute.Tensor,  # (B, H, Q, D)
        work: cute.Tensor,  # (n, ITEM) int32, as for the forward
        indices: cute.Tensor,  # (columns,) int32
        bits: cute.Tensor,  # (columns / 32, 64) int32
        part_dq: cute.Tensor,  # (slots, 64, D) float32, without the scale
        lengths: cute.Tensor,  # (B,) int32; not read without `lengths` in the configuration
        tile_counter: cute.Tensor,  # (1,) int32: items taken; zero before and after
        before: Float32,  # factor of a score before the soft cap
        exponent: Float32,  # factor of a score in exp2
        factor: Float32,  # the scale
        items: Int32,
        blocks: Int32,
        stream: Any,
    ) -> None:
        size = self.config.size
        self.start(
            blocks, stream, q=tma(q, ROWS, size), dout=tma(dout, ROWS, size), dq=tma(dq, ROWS, size, store=True), k=k,
            v=v, terms=terms, items=work, indices=indices, words=bits, part_dq=part_dq, lengths=lengths,
            tile_counter=tile_counter, before=before, exponent=exponent, factor=factor, count=items,
        )  # fmt: skip

    def block(self, arguments: Any, memory: Any) -> Block:
        block, stages = super().block(arguments, memory), self.config.stages
        block.k, block.v = CopiedRing.of(memory, "k", stages), CopiedRing.of(memory, "v", stages)
        block.ahead = items_to_gather(memory)
        block.rings = (block.q,), (block.ahead,), (block.k, block.v)
        block.words = words(memory.words, ROWS, 2, 2 * stages)  # a step's mask
        block.k_at, block.v_at = memory.k.data_ptr(), memory.v.data_ptr()
        return block

    @cute.jit
    def serve(self, block, warp):
        """One warp takes items, two gather, one has nothing to do."""
        c, a = self.config, block.arguments
        role = role_of(warp, c.blocks)
        if role == 0:
            work = GatheredRows(a.items, a.tile_counter, a.count, a.indices, a.lengths, c.lengths)
            Server(work, block.ahead, block.q, ItemTiles(block), RowItem.VALID).run()
        elif role >= 2:
            thread = cute.arch.thread_idx()[0] % THREADS
            keys = RowCopies(a.k, block.k, block.k_at, c.size, thread)
            values = RowCopies(a.v, block.v, block.v_at, c.size, thread)
            ratio = cute.size(a.q.tensor, mode=[2]) // cute.size(a.k, mode=[1])
            copied_words = WordCopies(a.words, block.words, thread)
            Gatherer(block.ahead, a.indices, keys, values, copied_words, ratio).run()

    @cute.jit
    def compute(self, block):
        QueryConsumer(block, GatheredRowMasks(block)).consume()
