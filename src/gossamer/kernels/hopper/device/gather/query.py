"""dQ over gathered columns: 64 query rows, and the keys that any of them keeps.

Of the first warpgroup one warp takes items, tells the two that gather, and loads Q and dO by TMA; the second computes
as that of dQ by rows does for block layouts.
"""

from __future__ import annotations

from dataclasses import dataclass
from typing import Any, NamedTuple

import cutlass
import cutlass.cute as cute
from cutlass import Float32, Int32

from gossamer.kernels.hopper.device.backward.query import ItemTiles
from gossamer.kernels.hopper.device.backward.query_consume import QueryConsumer, RowRings, RowTiles
from gossamer.kernels.hopper.device.backward.row_masks import Kind, Place
from gossamer.kernels.hopper.device.backward.warpgroup import Factors
from gossamer.kernels.hopper.device.common import NUMBERS, ROWS, WARPGROUP, Opaque, Ring, Thread, computing_thread
from gossamer.kernels.hopper.device.gather.configurations import GatherConfig
from gossamer.kernels.hopper.device.gather.masks import WORDS, GatheredWords
from gossamer.kernels.hopper.device.gather.rows import THREADS, Gatherer, RowCopies, WordCopies, role_of
from gossamer.kernels.hopper.device.gather.serve import AHEAD, CopiedRing, Server, items_to_gather
from gossamer.kernels.hopper.device.row_items import ITEM, RowItem
from gossamer.kernels.hopper.device.shell import Shell, array, barriers, items_of, tile_memory, tiles, words
from gossamer.kernels.hopper.device.tiles import Tma, tile_layout, tma
from gossamer.kernels.hopper.device.work import GatheredRows, ItemRing


class Arguments(NamedTuple):
    """Parameters of the kernel, in order."""

    q: Tma
    dout: Tma
    dq: Tma
    k: cute.Tensor
    v: cute.Tensor
    terms: cute.Tensor
    items: cute.Tensor
    indices: cute.Tensor
    words: cute.Tensor
    part_dq: cute.Tensor
    lengths: cute.Tensor
    tile_counter: cute.Tensor
    factors: Factors
    count: Int32


@dataclass(frozen=True, eq=False)
class Block(Opaque):
    """What the roles of a block share."""

    arguments: Arguments
    ahead: ItemRing
    ring: RowRings
    tiles: RowTiles
    words: cute.Tensor  # (64, 2, twice the stages): a step's mask
    k_at: Any
    v_at: Any

    @property
    def rings(self) -> Any:
        return (self.ring.q,), (self.ahead,), (self.ring.k, self.ring.v)


class GatheredRowMasks(Opaque):
    """The mask source of dQ over gathered columns: words that come with the keys of each step."""

    has_bounds = False

    def __init__(self, config: GatherConfig, thread: Thread, item: cute.Tensor, k: Ring, shared: cute.Tensor) -> None:
        self.thread, self.item, self.k = thread, item, k
        self.packed = GatheredWords(shared, 2 * k.stages, thread, config.lengths)

    def begin(self, batch: Any) -> None:
        """An item begins."""
        self.packed.begin(self.item, 0)

    @cute.jit
    def walk(self, consumer, bounds, kv):
        """All steps of an item."""
        first, start = kv, self.item[RowItem.BITS_START, 0]
        for i in cutlass.range(self.item[RowItem.BITS_COUNT, 0], unroll=1):
            consumer.step(Kind.BITS, Place(start + i, None, None), kv, first)
            kv += 1
        return kv

    @cute.jit
    def load(self, words, kind: cutlass.Constexpr, place, kv):
        """The words of a step, shifted to this thread's columns."""
        stage, phase = self.k.place(kv)
        cute.arch.mbarrier_wait(self.k.full + stage, phase)
        self.packed.read(words, kv, place.entry)


class GatherQuery(Shell):
    """The kernel of one configuration."""

    threads = 2 * WARPGROUP

    def __init__(self, config: GatherConfig) -> None:
        self.config = config
        self.blocks, self.registers = config.blocks, config.registers

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
        arguments = Arguments(
            tma(q, ROWS, size), tma(dout, ROWS, size), tma(dq, ROWS, size, store=True), k, v, terms, work, indices,
            bits, part_dq, lengths, tile_counter, Factors(before, exponent, factor), items,
        )  # fmt: skip
        self.launch(arguments, blocks, stream)

    def layouts(self) -> RowTiles:
        """Of the tiles in shared memory."""
        c = self.config
        one, all_stages = [tile_layout(NUMBERS[c.dtype], ROWS, c.size, stages) for stages in (1, c.stages)]
        return RowTiles(one, one, all_stages, all_stages)

    def memory(self) -> dict[str, Any]:
        c = self.config
        held = {name: tile_memory(NUMBERS[c.dtype], layout) for name, layout in self.layouts()._asdict().items()}
        return {
            **barriers(q=1, ahead=AHEAD, k=c.stages, v=c.stages),
            "item": array(Int32, ITEM), "ahead": array(Int32, ITEM * AHEAD),
            "words": array(Int32, 2 * c.stages * WORDS, 128), **held,
        }  # fmt: skip

    def block(self, arguments: Arguments, memory: Any) -> Block:
        stages = self.config.stages
        rings = RowRings(
            items_of(memory, "q", 1, 1), CopiedRing.of(memory, "k", stages), CopiedRing.of(memory, "v", stages)
        )
        held = RowTiles(*[tiles(getattr(memory, name), x) for name, x in self.layouts()._asdict().items()])
        packed = words(memory.words, ROWS, 2, 2 * stages)
        return Block(arguments, items_to_gather(memory), rings, held, packed, memory.k.data_ptr(), memory.v.data_ptr())

    @cute.jit
    def serve(self, block, warp):
        """One warp takes items, two gather, one has nothing to do."""
        c, a = self.config, block.arguments
        role = role_of(warp, c.blocks)
        if role == 0:
            work = GatheredRows(a.items, a.tile_counter, a.count, a.indices, a.lengths, c.lengths)
            own = ItemTiles(c, a, block.ring.q, block.tiles)
            Server(work, block.ahead, block.ring.q, own, RowItem.VALID).run()
        elif role >= 2:
            thread = cute.arch.thread_idx()[0] % THREADS
            keys = RowCopies(a.k, block.ring.k, block.k_at, c.size, thread)
            values = RowCopies(a.v, block.ring.v, block.v_at, c.size, thread)
            ratio = cute.size(a.q.tensor, mode=[2]) // cute.size(a.k, mode=[1])
            copied_words = WordCopies(a.words, block.words, thread)
            Gatherer(block.ahead, a.indices, keys, values, copied_words, ratio).run()

    @cute.jit
    def compute(self, block):
        c, a, item = self.config, block.arguments, block.ring.q.item
        masks = GatheredRowMasks(c, computing_thread(), item, block.ring.k, block.words)
        QueryConsumer(c, item[None, 0], block.ring, block.tiles, masks, a.terms, a.factors, a.dq, a.part_dq).consume()
