"""dK and dV over gathered rows: 64 keys, and the queries that keep any of them, of every query head of the key head.

Of the first warpgroup one warp takes items and loads K and V by TMA, one sends dK and dV, and two fill the rings of Q
and dO and copy the row terms; the second computes as that of the column kernel does for tiles of 64 x 64.
"""

from __future__ import annotations

from dataclasses import dataclass, replace
from typing import Any, NamedTuple

import cutlass
import cutlass.cute as cute
from cutlass import Float32, Int32, const_expr

from gossamer.kernels.hopper.device import instructions
from gossamer.kernels.hopper.device.backward.column_masks import clear_pairs
from gossamer.kernels.hopper.device.backward.consume import ColumnConsumer
from gossamer.kernels.hopper.device.backward.fields import STEP, Kind, Step
from gossamer.kernels.hopper.device.backward.kernel import Block, Tiles
from gossamer.kernels.hopper.device.backward.produce import ColumnWork, Sender
from gossamer.kernels.hopper.device.backward.warpgroup import Factors, shift
from gossamer.kernels.hopper.device.column_items import ColumnItem, Segment
from gossamer.kernels.hopper.device.common import NUMBERS, ROWS, WARPGROUP, Opaque, RingPair, Thread, computing_thread
from gossamer.kernels.hopper.device.gather.configurations import GatherConfig
from gossamer.kernels.hopper.device.gather.masks import WORD, WORDS
from gossamer.kernels.hopper.device.gather.rows import COPIES, THREADS, RowCopies, WordCopies, copy, role_of
from gossamer.kernels.hopper.device.gather.serve import AHEAD, CopiedRing, Server, items_to_gather
from gossamer.kernels.hopper.device.row_items import ITEM
from gossamer.kernels.hopper.device.shell import Shell, array, barriers, items_of, ring_of, tile_memory, tiles, words
from gossamer.kernels.hopper.device.tiles import TileLoader, Tma, tile_layout, tile_loader, tma


class Arguments(NamedTuple):
    """Parameters of the kernel, in order."""

    k: Tma
    v: Tma
    dk: Tma
    dv: Tma
    q: cute.Tensor
    dout: cute.Tensor
    terms: cute.Tensor
    items: cute.Tensor
    segments: cute.Tensor
    indices: cute.Tensor
    words: cute.Tensor
    part_dk: cute.Tensor
    part_dv: cute.Tensor
    lengths: cute.Tensor
    tile_counter: cute.Tensor
    factors: Factors
    count: Int32


@dataclass(frozen=True, eq=False)
class GatherBlock(Block):
    """What the roles of a block share; its steps have a kind, and nothing else that describes them."""

    ahead: Any = None  # ring of descriptions of items for the warps that gather
    words: Any = None  # (64, 2, stages): a step's mask
    q_at: Any = None
    do_at: Any = None

    @property
    def rings(self) -> Any:
        return (self.k, self.v), (self.ahead,), (RingPair(self.q, self.dout),)


@dataclass(frozen=True, eq=False)
class KeyTiles(Opaque):
    """What loads K and V of an item, by TMA."""

    k: TileLoader
    v: TileLoader

    @cute.jit
    def load(self, turn, item):
        """Fill the stage of K, which is empty, and then that of V."""
        batch, group, tile = item[ColumnItem.BATCH, 0], item[ColumnItem.GROUP, 0], item[ColumnItem.TILE, 0]
        self.k.fill(0, self.k.ring.full, tile, group, batch)
        self.v.load(turn, tile, group, batch)


@dataclass(frozen=True, eq=False)
class QueryGatherer(Opaque):
    """Two warps that fill the rings of Q and dO for item after item, with Q the words and lse of a step, with dO delta.

    A step that says that an item is over follows its last one.
    """

    block: GatherBlock
    thread: Any
    queries: RowCopies
    gradients: RowCopies
    words: WordCopies

    @cute.jit
    def run(self):
        """Item after item."""
        a, block, ahead, queries, gradients = (
            self.block.arguments, self.block, self.block.ahead, self.queries, self.gradients
        )  # fmt: skip
        item, indices, segments, thread = ahead.item, a.indices, a.segments, self.thread
        rows, upcoming = cute.make_rmem_tensor((COPIES + 1,), Int32), cute.make_rmem_tensor((COPIES + 1,), Int32)
        upcoming.fill(-1)
        turn, n, m = Int32(0), Int32(0), Int32(0)  # items, stages of Q, stages of dO so far
        ahead.wait_full(0, 0)
        running = item[ColumnItem.VALID, 0]
        while running != 0:
            place = ahead.place(turn)[0]
            batch, group = item[ColumnItem.BATCH, place], item[ColumnItem.GROUP, place]
            segment, count = item[ColumnItem.SEGMENT_START, place], item[ColumnItem.SEGMENT_COUNT, place]
            ahead.forget(place)
            for s in cutlass.range(segment, segment + count, unroll=1):
                head = group * block.ratio + segments[s, Segment.HEAD]
                first, steps = segments[s, Segment.BITS_START], segments[s, Segment.BITS_COUNT]
                q_start, do_start = queries.start(batch, head), gradients.start(batch, head)
                lse = a.terms[0, batch, head, None].iterator.toint()
                delta = a.terms[1, batch, head, None].iterator.toint()
                if steps > 0:
                    queries.listed(indices, first * ROWS, upcoming)
                    upcoming[COPIES] = indices[first * ROWS + thread]
                for i in cutlass.range(steps, unroll=1):
                    for j in cutlass.range_constexpr(COPIES + 1):
                        rows[j] = upcoming[j]
                    at = (first + i) * ROWS
                    if i + 1 < steps:
                        queries.listed(indices, at + ROWS, upcoming)
                        upcoming[COPIES] = indices[at + ROWS + thread]
                    stage = block.q.wait_empty_at(n)
                    self.describe(stage, Kind.BITS)
                    queries.fill(q_start, rows, stage)
                    self.words.fill(first + i, stage)
                    self.copy_term(block.lse, lse, rows[COPIES], stage)
                    cute.arch.cp_async_mbarrier_arrive_noinc(block.q.full + stage)
                    n += 1
                    stage = block.dout.wait_empty_at(m)
                    gradients.fill(do_start, rows, stage)
                    self.copy_term(block.delta, delta, rows[COPIES], stage)
                    cute.arch.cp_async_mbarrier_arrive_noinc(block.dout.full + stage)
                    m += 1
            stage = block.q.wait_empty_at(n)
            self.describe(stage, Kind.END)
            cute.arch.mbarrier_arrive(block.q.full + stage)
            n += 1
            turn += 1
            place, phase = ahead.place(turn)
            ahead.wait_full(place, phase)
            running = item[ColumnItem.VALID, place]

    @cute.jit
    def describe(self, stage, kind: cutlass.Constexpr):
        """Describe a stage of Q."""
        if self.thread == 0:
            self.block.steps[Step.KIND, stage] = Int32(kind)
            cute.arch.mbarrier_arrive(self.block.q.full + stage)

    @cute.jit
    def copy_term(self, shared, start, row, stage):
        """Copy the term of this thread's row of a stage."""
        copy(shared.iterator.toint() + 4 * (stage * ROWS + self.thread), start, row, Int32(4), False, 4)


class GatheredColumnMasks(Opaque):
    """The mask source of dK and dV over gathered rows: words that come with the queries of each step."""

    def __init__(self, config: GatherConfig, thread: Thread, block: GatherBlock) -> None:
        self.config, self.thread, self.block = config, thread, block
        self.words = cute.make_rmem_tensor((instructions.ROWS, ROWS // WORD), Int32)
        self.words.fill(0)

    @cute.jit
    def load(self, stage):
        """Load what masks the step in a stage of Q; returns its kind."""
        kind = cute.arch.make_warp_uniform(self.block.steps[Step.KIND, stage])
        if kind != Kind.END:
            for r in cutlass.range_constexpr(instructions.ROWS):
                for w in cutlass.range_constexpr(ROWS // WORD):
                    self.words[r, w] = shift(self.block.words[self.thread.row + 8 * r, w, stage], self.thread)
                if const_expr(self.config.lengths):
                    key = self.block.item[ColumnItem.TILE] * ROWS + self.thread.row + 8 * r
                    if key >= self.block.attended:
                        for w in cutlass.range_constexpr(ROWS // WORD):
                            self.words[r, w] = Int32(0)
        return kind

    @cute.jit
    def clear(self, packed, stage):
        """16-bit elements of a step that it does not keep become zero."""
        clear_pairs(packed, self.words)


class GatherColumns(Shell):
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
        dk: cute.Tensor,  # (B, G, K, D)
        dv: cute.Tensor,  # (B, G, K, E)
        work: cute.Tensor,  # (n, ITEM) int32
        segments: cute.Tensor,  # (m, SEGMENT) int32
        indices: cute.Tensor,  # (rows,) int32
        bits: cute.Tensor,  # (rows / 32, 64) int32
        part_dk: cute.Tensor,  # (slots, 64, D) float32
        part_dv: cute.Tensor,  # (slots, 64, E) float32
        lengths: cute.Tensor,  # (B,) int32; not read without `lengths` in the configuration
        tile_counter: cute.Tensor,  # (1,) int32: items taken; zero before and after
        before: Float32,  # factor of a score before the soft cap
        exponent: Float32,  # factor of a score in exp2
        factor: Float32,  # factor of dK
        items: Int32,
        blocks: Int32,
        stream: Any,
    ) -> None:
        size = self.config.size
        arguments = Arguments(
            tma(k, ROWS, size), tma(v, ROWS, size), tma(dk, ROWS, size, store=True), tma(dv, ROWS, size, store=True),
            q, dout, terms, work, segments, indices, bits, part_dk, part_dv, lengths, tile_counter,
            Factors(before, exponent, factor), items,
        )  # fmt: skip
        self.launch(arguments, blocks, stream)

    def layouts(self) -> Tiles:
        """Of the tiles in shared memory."""
        c = self.config
        one, all_stages = [tile_layout(NUMBERS[c.dtype], ROWS, c.size, stages) for stages in (1, c.stages)]
        return Tiles(one, one, all_stages, all_stages)

    def memory(self) -> dict[str, Any]:
        c = self.config
        held = {name: tile_memory(NUMBERS[c.dtype], layout) for name, layout in self.layouts()._asdict().items()}
        terms = array(Float32, ROWS * c.stages, 128)
        return {
            **barriers(q=c.stages, do=c.stages, ahead=AHEAD, k=1, v=1),
            "item": array(Int32, ITEM), "ahead": array(Int32, ITEM * AHEAD), "steps": array(Int32, STEP * c.stages),
            "lse": terms, "delta": terms, "words": array(Int32, c.stages * WORDS, 128), **held,
        }  # fmt: skip

    def block(self, arguments: Arguments, memory: Any) -> GatherBlock:
        c, a, stages = self.config, arguments, self.config.stages
        held = Tiles(*[tiles(getattr(memory, name), x) for name, x in self.layouts()._asdict().items()])
        k = items_of(memory, "k", 1, 1)
        return GatherBlock(
            config=c, arguments=a, tiles=held, dk=held.k, dv=held.v, item=k.item[None, 0],
            steps=words(memory.steps, STEP, stages), lse=words(memory.lse, ROWS, stages),
            delta=words(memory.delta, ROWS, stages), k=k, v=ring_of(memory, "v", 1, 1, 1),
            q=CopiedRing.of(memory, "q", stages, THREADS + 1),  # and the step's description
            dout=CopiedRing.of(memory, "do", stages), queries=cute.size(a.q, mode=[2]),
            keys=cute.size(a.k.tensor, mode=[0]),
            ahead=items_to_gather(memory), words=words(memory.words, ROWS, 2, stages),
            q_at=memory.q.data_ptr(), do_at=memory.dout.data_ptr(),
        )  # fmt: skip

    def prepared(self, block: GatherBlock) -> GatherBlock:
        a = block.arguments
        return replace(block, ratio=cute.size(a.q, mode=[1]) // cute.size(a.k.tensor, mode=[2]))

    @cute.jit
    def serve(self, block, warp):
        """One warp takes items, one sends results, two gather."""
        c, a = self.config, block.arguments
        role = role_of(warp, c.blocks)
        if role == 0:
            work = ColumnWork(a.items, a.tile_counter, a.count, a.lengths, block.keys, c)
            own = KeyTiles(
                tile_loader(block.k, a.k, block.tiles.k, ROWS, c.size),
                tile_loader(block.v, a.v, block.tiles.v, ROWS, c.size),
            )
            Server(work, block.ahead, block.k, own, ColumnItem.VALID).run()
        elif role == 1:
            Sender(c, block, 0).send(1, False)
        else:
            thread = cute.arch.thread_idx()[0] % THREADS
            queries = RowCopies(a.q, block.q, block.q_at, c.size, thread)
            gradients = RowCopies(a.dout, block.dout, block.do_at, c.size, thread)
            QueryGatherer(block, thread, queries, gradients, WordCopies(a.words, block.words, thread)).run()

    @cute.jit
    def compute(self, block):
        ColumnConsumer(self.config, block, GatheredColumnMasks(self.config, computing_thread(), block)).consume()
