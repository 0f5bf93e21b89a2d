"""dK and dV over gathered rows: 64 keys, and the queries that keep any of them, of every query head of the key head.

Of the first warpgroup one warp takes items and loads K and V by TMA, one sends dK and dV, and two fill the rings of Q
and dO and copy the row terms; the second computes as that of the column kernel does for tiles of 64 x 64.
"""

from __future__ import annotations

from dataclasses import dataclass
from typing import Any

import cutlass
import cutlass.cute as cute
from cutlass import Float32, Int32, const_expr

from gossamer.cute import instructions
from gossamer.cute.column_items import ColumnItem, Segment
from gossamer.cute.common import ROWS, WARPGROUP, Opaque, RingPair, computing_thread
from gossamer.cute.shell import words
from gossamer.cute.tiles import TileLoader, tile_loader, tma
from gossamer.kernels.hopper.device.backward.common import Kind, Step, shift
from gossamer.kernels.hopper.device.backward.consume import ColumnConsumer
from gossamer.kernels.hopper.device.backward.kernel import ColumnKernel
from gossamer.kernels.hopper.device.backward.masks import clear_pairs
from gossamer.kernels.hopper.device.backward.produce import ColumnWork
from gossamer.kernels.hopper.device.backward.send import Sender
from gossamer.kernels.hopper.device.forward.masks import one
from gossamer.kernels.hopper.device.gather.block import GatherColumnArguments, GatherColumnBlock
from gossamer.kernels.hopper.device.gather.configurations import GatherConfig
from gossamer.kernels.hopper.device.gather.masks import WORD, WORDS
from gossamer.kernels.hopper.device.gather.rows import COPIES, THREADS, RowCopies, WordCopies, copy, role_of
from gossamer.kernels.hopper.device.gather.serve import AHEAD, CopiedRing, Server, heads_of, items_to_gather


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


class QueryGatherer(Opaque):
    """Two warps that fill the rings of Q and dO for item after item, with Q the words and lse of a step, with dO delta.

    A step that says that an item is over follows its last one.
    """

    def __init__(self, block: GatherColumnBlock, thread: Any, copied_words: WordCopies) -> None:
        a, size = block.arguments, block.config.size
        self.block, self.thread, self.words = block, thread, copied_words
        self.queries = RowCopies(a.q, block.q, block.s_q.iterator, size, self.thread)
        self.gradients = RowCopies(a.dout, block.dout, block.s_dout.iterator, size, self.thread)

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
                    rows.store(upcoming.load())
                    if const_expr(self.block.config.lengths):
                        self.leave_out(rows, batch, head)
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
    def leave_out(self, rows, batch, head):
        """Read no query whose keys are all past the length: its place becomes zero."""
        start = self.block.arguments.terms[0, batch, head, None].iterator
        for j in cutlass.range_constexpr(COPIES):
            # The term of the first row stands for that of one which the list does not fill.
            term = start + (rows[j] if rows[j] >= 0 else Int32(0))
            rows[j] = Int32(-1) if term.load() == Float32.inf else rows[j]

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

    def __init__(self, block: GatherColumnBlock) -> None:
        self.config, self.thread, self.block = block.config, computing_thread(), block
        self.words = cute.make_rmem_tensor((instructions.ROWS, ROWS // WORD), Int32)
        self.words.fill(0)
        self.some = one()  # of an item so far, a bit for each of this thread's keys that keeps anything
        self.some.fill(0)

    @cute.jit
    def load(self, stage):
        """Load what masks the step in a stage of Q; returns its kind."""
        kind = cute.arch.make_warp_uniform(self.block.steps[Step.KIND, stage])
        if kind != Kind.END:
            for r in cutlass.range_constexpr(instructions.ROWS):
                for w in cutlass.range_constexpr(ROWS // WORD):
                    self.words[r, w] = shift(self.block.s_words[self.thread.row + 8 * r, w, stage], self.thread)
                if const_expr(self.config.lengths):
                    key = self.block.item[ColumnItem.TILE] * ROWS + self.thread.row + 8 * r
                    if key >= self.block.attended:
                        self.words[r, None].fill(0)
                if (self.words[r, 0] | self.words[r, 1]) != 0:
                    self.some[0] = self.some[0] | (1 << r)
        return kind

    @cute.jit
    def clear(self, packed, stage):
        """16-bit elements of a step that it does not keep become zero."""
        clear_pairs(packed, self.words)


class GatherColumnConsumer(ColumnConsumer):
    """The computing warpgroup: dK of keys that nothing attends is zero, whatever K and V hold there."""

    @cute.jit
    def finish(self, n, m, begin, kind):
        """The end of an item."""
        some = self.masks.some[0]
        for offset in (1, 2):
            some = some | cute.arch.shuffle_sync_bfly(some, offset=offset)
        for i in instructions.places(self.acc_dk):
            self.acc_dk[i] = self.acc_dk[i] if (some & (1 << (i % 4 // 2))) != 0 else Float32(0.0)
        self.masks.some.fill(0)
        return ColumnConsumer.finish(self, n, m, begin, kind)


class TileKeys:
    """The row source of dK and dV: keys of items are tiles of k, v, dk and dv, which TMA loads and stores."""

    def memory(self, c: GatherConfig) -> dict[str, Any]:
        """The first members of shared memory, for what else keys have: nothing."""
        return {}

    def rings(self, block: GatherColumnBlock, memory: Any) -> tuple[Any, ...]:
        """The rings of items, which come with K, and of V, which the block has, as they are set up."""
        return block.k, block.v

    def shared(self, arguments: GatherColumnArguments, memory: Any, c: GatherConfig) -> Any:
        """What else roles share of keys: nothing."""

    def loader(self, block: GatherColumnBlock) -> Any:
        """What loads the keys of an item."""
        a, size = block.arguments, block.config.size
        return KeyTiles(
            tile_loader(block.k, a.k, block.s_k, ROWS, size), tile_loader(block.v, a.v, block.s_v, ROWS, size)
        )

    def store(self, block: GatherColumnBlock) -> None:
        """The warp that stores results."""
        Sender(block, 0).send(1, False)

    def words(self, block: GatherColumnBlock, thread: Any) -> WordCopies:
        """What copies the words of a step."""
        return WordCopies(block.arguments.bits, block.s_words, thread)

    def count(self, arguments: GatherColumnArguments) -> Any:
        """How many keys a head has."""
        return cute.size(arguments.k.tensor, mode=[0])

    def ratio(self, arguments: GatherColumnArguments) -> Any:
        """Query heads of a key head."""
        return heads_of(arguments.q) // heads_of(arguments.k)

    def consumer(self, block: GatherColumnBlock) -> ColumnConsumer:
        """The warpgroup that computes."""
        return GatherColumnConsumer(block, GatheredColumnMasks(block))


class GatherColumns(ColumnKernel):
    """The kernel of one configuration. `rows`: its row source, as `TileKeys` is one."""

    threads = 2 * WARPGROUP
    block_class = GatherColumnBlock
    readers = 1, 1, 4, 4
    ahead = AHEAD

    def __init__(self, config: GatherConfig, rows: Any = None) -> None:
        self.config, self.rows = config, rows or TileKeys()
        self.blocks, self.registers = config.blocks, config.registers
        self.stages = config.stages, config.stages
        self.exchanged = config.stages * WORDS

    @cute.jit
    def __call__(
        self,
        q: cute.Tensor, k: cute.Tensor, v: cute.Tensor, dout: cute.Tensor, terms: cute.Tensor, dk: cute.Tensor,
        dv: cute.Tensor, work: cute.Tensor, segments: cute.Tensor, indices: cute.Tensor, bits: cute.Tensor,
        part_dk: cute.Tensor, part_dv: cute.Tensor, lengths: cute.Tensor, tile_counter: cute.Tensor, before: Float32,
        exponent: Float32, factor: Float32, items: Int32, blocks: Int32, stream: Any,
    ) -> None:  # fmt: skip
        """As in `GatherColumnArguments`."""
        size = self.config.size
        arguments = GatherColumnArguments(
            k=tma(k, ROWS, size), v=tma(v, ROWS, size), dk=tma(dk, ROWS, size, store=True),
            dv=tma(dv, ROWS, size, store=True), source_result=None, q=q, dout=dout, terms=terms, work=work,
            segments=segments, indices=indices, bits=bits, source=None, part_dk=part_dk, part_dv=part_dv,
            lengths=lengths, tile_counter=tile_counter, before=before, exponent=exponent, factor=factor, items=items,
        )  # fmt: skip
        self.launch(arguments, blocks, stream)

    def memory(self) -> dict[str, Any]:
        return {**self.rows.memory(self.config), **super().memory()}

    def keys(self, arguments: GatherColumnArguments) -> Any:
        return self.rows.count(arguments)

    def block(self, arguments: GatherColumnArguments, memory: Any) -> GatherColumnBlock:
        """Its steps have a kind, and nothing else that describes them."""
        block: GatherColumnBlock = super().block(arguments, memory)
        stages = self.config.stages
        block.q = CopiedRing.of(memory, "q", stages, THREADS + 1)  # and the step's description
        block.dout = CopiedRing.of(memory, "do", stages)
        block.ahead = items_to_gather(memory)
        block.rings = self.rows.rings(block, memory), (block.ahead,), (RingPair(block.q, block.dout),)
        block.item, block.source = block.k.item[None, 0], self.rows.shared(arguments, memory, self.config)
        block.s_words = words(memory.exchanged, ROWS, 2, stages)
        return block

    def prepared(self, block: GatherColumnBlock) -> GatherColumnBlock:
        block.ratio = self.rows.ratio(block.arguments)
        return block

    @cute.jit
    def serve(self, block, warp):
        """One warp takes items and loads their keys, one stores results, two gather."""
        c, a = self.config, block.arguments
        role = role_of(warp, c.blocks)
        if role == 0:
            work = ColumnWork(a.work, a.tile_counter, a.items, a.lengths, block.keys, c)
            Server(work, block.ahead, block.k, self.rows.loader(block), ColumnItem.VALID).run()
        elif role == 1:
            self.rows.store(block)
        else:
            thread = cute.arch.thread_idx()[0] % THREADS
            QueryGatherer(block, thread, self.rows.words(block, thread)).run()

    @cute.jit
    def compute(self, block):
        self.rows.consumer(block).consume()
