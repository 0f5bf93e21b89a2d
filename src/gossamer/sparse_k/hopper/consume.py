"""The computing warpgroups of SparseK attention. They add to those of other forwards masks by windows and by lists,
and gates, which multiply the weights of values."""

from __future__ import annotations

from typing import Any

import cutlass
import cutlass.cute as cute
from cutlass import Boolean, Float32, Int32, Int64, const_expr

from gossamer.cute import instructions
from gossamer.cute.common import ROWS, Opaque, Thread, ring
from gossamer.cute.instructions import assembly
from gossamer.cute.row_items import RowItem
from gossamer.kernels.hopper.device.forward.consume import Consumer, Half
from gossamer.kernels.hopper.device.forward.masks import one, packed_mask, two
from gossamer.kernels.hopper.device.forward.results import Epilogue
from gossamer.kernels.hopper.device.forward.softmax import Softmax
from gossamer.sparse_k.hopper.block import SparseKBlock
from gossamer.sparse_k.hopper.configurations import TILE
from gossamer.sparse_k.hopper.items import SparseKItem


class SparseKSoftmax(Softmax):
    """A softmax whose P is multiplied by gates clip(u - tau, 0, 1), and whose sum is not."""

    def __init__(self, block: SparseKBlock, thread: Thread, mma: Any) -> None:
        Softmax.__init__(self, block, thread, mma)
        self.tau = two(Float32)  # the thresholds of this thread's rows
        self.slot = one()  # the slot of a step's terms; negative where it has no gates
        u, _, _ = block.s_terms
        self.u = u.iterator.toint() + 4 * thread.quad

    @cute.jit
    def first_step(self, scores):
        """Begin a row; a threshold of NaN makes its sum NaN."""
        for r in cutlass.range_constexpr(instructions.ROWS):
            self.row_sum[r] = Float32(0.0) if self.tau[r] == self.tau[r] else Float32(float("nan"))
        return Softmax.first_step(self, scores)

    @cute.jit
    def convert(self, powers, half: cutlass.Constexpr = None):
        """Convert P to 16 bits, times the gates of a step that has any."""
        if const_expr(not self.block.config.gates):
            Softmax.convert(self, powers, half)
        else:
            if self.slot[0] >= 0:
                packed = cute.recast_tensor(self.p, Int32)
                if const_expr(half is not None):
                    packed.fill(0)
                u = self.u + self.slot[0] * (4 * TILE)
                for j in cutlass.range_constexpr(cute.size(powers) // 4):
                    pair = assembly(Int64, f"ld.shared.b64 $0, [$1 + {32 * j}];", Int32(u))
                    for r in cutlass.range_constexpr(instructions.ROWS):
                        i = const_expr(4 * j + 2 * r)
                        packed[i // 2] = pair_times_gates(
                            powers[i], powers[i + 1], pair, self.tau[r], self.p.element_type
                        )
            else:
                Softmax.convert(self, powers, half)


def pair_times_gates(a: Any, b: Any, u: Any, tau: Any, dtype: type) -> Any:
    """Two numbers times their gates, in one register of two of 16 bits; `u` holds two scores."""
    name = "bf16x2" if dtype is cutlass.BFloat16 else "f16x2"
    code = (
        "{ .reg .f32 x, y; mov.b64 {x, y}, $3; sub.sat.f32 x, x, $4; sub.sat.f32 y, y, $4; "
        f"mul.f32 x, x, $1; mul.f32 y, y, $2; cvt.rn.{name}.f32 $0, y, x; }}"
    )
    return assembly(Int32, code, Float32(a), Float32(b), Int64(u), Float32(tau), effects=False)


class SparseKMask(Opaque):
    """The mask source: a tile's own keys, those of its window before it, and those of its list."""

    with_keys = with_values = True  # as of gathered columns

    def __init__(self, block: SparseKBlock, thread: Thread, softmax: SparseKSoftmax) -> None:
        self.block, self.arguments, self.config, self.thread = block, block.arguments, block.config, thread
        self.item, self.k, self.softmax = block.items.item, block.k, softmax
        self.rows = cute.size(block.arguments.tau, mode=[1])
        self.fetched = one()
        self.fetched.fill(0)

    def count(self, stage: Any) -> Any:
        """The number of steps of an item: one for its own keys; the words behind the last item have none."""
        item = self.item
        before, whole, rest = (item[word, stage] for word in (SparseKItem.WINDOW, SparseKItem.WHOLE, SparseKItem.REST))
        return item[RowItem.VALID, stage] + before + whole + rest

    @cute.jit
    def arrive(self, gates: cutlass.Constexpr):
        """Wait for K of the next step, and with it for V of the one before, and take its terms if it has gates."""
        n = self.fetched[0]
        self.k.wait_full_at(n)
        self.softmax.slot[0] = ring(n, self.config.slots)[0] if const_expr(gates) else Int32(-1)
        self.fetched[0] = n + 1

    @cute.jit
    def prepare(self, stage):
        """Begin an item: read its thresholds, and wait for its first keys."""
        for r in cutlass.range_constexpr(instructions.ROWS):
            row = self.row(stage, r)
            row = row if row < self.rows else self.rows - 1
            self.softmax.tau[r] = self.arguments.tau[self.item[SparseKItem.UNIT, stage], row]
        self.arrive(False)

    def row(self, stage: Any, r: int) -> Any:
        """A query of this thread."""
        return self.item[RowItem.TILE, stage] * TILE + self.thread.row + 8 * r

    @cute.jit
    def keep_first(self, scores):
        """Mask the scores of a tile's own keys."""
        words = packed_mask(self.config.step)
        self.bounds(words, self.thread.row, Int32(0))
        instructions.keep(scores, words)

    @cute.jit
    def bounds(self, words, row, first):
        """The packed mask of the keys from `first` on, by the windows of the rows `row` and eight behind."""
        lo, hi = two(), two()
        for r in cutlass.range_constexpr(instructions.ROWS):
            hi[r] = row + 8 * r + 1 - self.thread.quad
            lo[r] = hi[r] - 1 - self.arguments.window
        instructions.interval_words(words, lo, hi, first)

    @cute.jit
    def interval(self, words, stage, first):
        """The packed mask of the keys from `first` on by windows."""
        self.bounds(words, self.row(stage, 0), first)

    @cute.jit
    def second(self, words, stage):
        """The packed mask of an item's second step."""
        item = self.item
        words.fill(-1)
        self.arrive(True)
        if item[SparseKItem.WINDOW, stage] > 0:
            self.softmax.slot[0] = Int32(-1)
            self.interval(words, stage, item[SparseKItem.FIRST, stage])
        else:
            if item[SparseKItem.WHOLE, stage] == 0:
                self.kept(words, self.row(stage, 0))
        return Boolean(True)

    @cute.jit
    def fetch(self, mode: cutlass.Constexpr, words, start, i):
        """Wait for K of a step, and make its packed mask where some keys of its list do not live through the tile."""
        self.arrive(mode in ("live", "bits"))
        if const_expr(mode == "bits"):
            self.kept(words, start)

    @cute.jit
    def kept(self, words, row):
        """Make the packed mask of a list's step, for the row `row` and the one eight behind."""
        _, keys, lasts = self.block.s_terms
        words.fill(0)
        for j in cutlass.range_constexpr(4 * cute.size(words, mode=[1])):
            for c in cutlass.range_constexpr(2):
                place = 8 * j + self.thread.quad + c
                key, last = keys[place, self.softmax.slot[0]], lasts[place, self.softmax.slot[0]]
                after = key + self.arguments.window
                bit = const_expr(1 << (8 * (j % 4) + c))
                for r in cutlass.range_constexpr(instructions.ROWS):
                    keeps = row + 8 * r > after and row + 8 * r <= last
                    words[r, j // 4] = words[r, j // 4] | (Int32(bit) if keeps else Int32(0))

    @cute.jit
    def walk(self, consumer, stage, buffer, kv, started):
        """Walk all steps of an item but the first; returns the number of steps so far."""
        item, me = self.item, self.thread.warpgroup
        window, edges = 1 + item[SparseKItem.WINDOW, stage], 1 + item[SparseKItem.EDGES, stage]
        whole = window + item[SparseKItem.WHOLE, stage]
        count = whole + item[SparseKItem.REST, stage]
        first, row = item[SparseKItem.FIRST, stage], self.row(stage, 0)
        # The first key that any row of this warpgroup keeps.
        lowest = item[RowItem.TILE, stage] * TILE + me * ROWS - self.arguments.window
        kv, done = consumer.open(stage, buffer, kv, started, count)
        for i in cutlass.range(done, edges, unroll=1):
            column = first + (i - 1) * TILE
            if lowest >= column + TILE // 2:
                consumer.step("interval", buffer, kv, column, i, int(Half.RIGHT))
            else:
                consumer.step("interval", buffer, kv, column, i)
            kv += 1
        for i in cutlass.range(done if done > edges else edges, window, unroll=1):
            consumer.step("full", buffer, kv, first, i)
            kv += 1
        for i in cutlass.range(done if done > window else window, whole, unroll=1):
            consumer.step("live", buffer, kv, first, i)
            kv += 1
        for i in cutlass.range(done if done > whole else whole, count, unroll=1):
            if item[SparseKItem.LISTED, stage] - (i - window) * TILE <= TILE // 2:
                consumer.step("bits", buffer, kv, row, i, int(Half.LEFT))
            else:
                consumer.step("bits", buffer, kv, row, i)
            kv += 1
        return kv


class WholeRows(Epilogue):
    """The epilogue of rows that are not split and have no sinks."""

    def factors(self, stage: Any) -> Any:
        factor, lse, none = two(Float32), two(Float32), two(Float32)
        none.fill(-Float32.inf)
        instructions.finish(self.softmax.old_reference, self.softmax.old_sum, factor, lse, none)
        return factor, lse

    def write_part(self, stage: Any, factor: Any, lse: Any) -> None:
        """Do nothing: no row is split."""


class SparseKConsumer(Consumer):
    """A warpgroup with 64 query rows of each item."""

    def __init__(self, block: Any, thread: Thread, source: Any) -> None:
        super().__init__(block, thread, source, SparseKSoftmax, WholeRows)

    def source(self, kind: Any, block: Any, thread: Thread) -> Any:
        """The mask source, which also says which steps have gates."""
        return kind(block, thread, self.softmax)
