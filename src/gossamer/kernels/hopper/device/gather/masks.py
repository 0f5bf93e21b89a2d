"""What masks the steps of gathered columns: words of 32 columns of a row, which come with the keys of a step."""

from __future__ import annotations

from typing import Any

import cutlass
import cutlass.cute as cute
from cutlass import Boolean, Int32, const_expr

from gossamer.cute import instructions
from gossamer.cute.common import ROWS, Opaque, Thread, ring
from gossamer.cute.row_items import RowItem
from gossamer.kernels.hopper.device.forward.masks import one, packed_mask
from gossamer.kernels.hopper.device.gather.block import GatherForwardBlock

WORD = 32  # columns of a mask word
WORDS = 2 * ROWS  # of a step of 64 queries


class GatheredWords(Opaque):
    """The words of a step in shared memory: each query, twice 32 columns, in twice as many slots as K has stages.

    A step's words are read before its products, and K is given back after them: so a slot is free when it is filled.
    """

    def __init__(self, shared: Any, slots: int, thread: Thread, config: Any) -> None:
        """`shared`: (queries, 2, slots)."""
        self.shared, self.slots, self.thread, self.has_lengths = shared, slots, thread, config.lengths
        self.heads, self.queries = config.heads, config.queries
        self.length = cute.make_rmem_tensor((1,), Int32)  # columns that count, of all lists, less this thread's first
        self.length.fill(0)

    @cute.jit
    def begin(self, item, stage):
        """An item begins. Lists ascend: what is below the length comes first."""
        if const_expr(self.has_lengths):
            self.length[0] = item[RowItem.FIRST_COLUMN, stage] - self.thread.quad

    @cute.jit
    def read(self, words, n, step):
        """The packed mask of the n-th step, which is `step` of all lists, shifted to this thread's columns."""
        slot = ring(n, self.slots)[0]
        for w in cutlass.range_constexpr(ROWS // WORD):
            for r in cutlass.range_constexpr(instructions.ROWS):
                word = self.word(self.thread.row + 8 * r, w, slot)
                words[r, w] = instructions.shifted(word, self.thread.quad)
            if const_expr(self.has_lengths):
                instructions.keep_below(words, w, self.length[0] - step * ROWS)

    @cute.jit
    def word(self, row, w: cutlass.Constexpr, slot):
        """A word of a row, which is that of its query; none for rows that a tile does not fill."""
        query = row // self.heads
        if const_expr(self.heads * self.queries < ROWS):
            query = query if query < self.queries else Int32(self.queries - 1)
        word = self.shared[query, w, slot]
        if const_expr(self.heads * self.queries < ROWS):
            word = word if row < self.heads * self.queries else Int32(0)
        return word


class GatheredMask(GatheredWords):
    """The mask source of gathered columns: every step has words, which are fetched in order, each once."""

    # Who has fetched a step's words has waited for its K, and with that for V of the step before: a thread that gathers
    # arrives when all that it has copied so far is complete.
    with_keys = with_values = True

    def __init__(self, block: GatherForwardBlock, thread: Thread) -> None:
        self.item, self.k = block.items.item, block.k
        self.fetched = one()  # steps whose words were fetched
        self.fetched.fill(0)
        self.words = packed_mask(ROWS)  # of an item's first step
        super().__init__(block.s_words, block.config.slots, thread, block.config)

    def count(self, stage: Any) -> Any:
        """How many steps an item has."""
        return self.item[RowItem.BITS_COUNT, stage]

    @cute.jit
    def prepare(self, stage):
        """Fetch what masks the first step of an item."""
        self.words.fill(0)
        self.begin(self.item, stage)
        if self.count(stage) > 0:
            self.fetch("bits", self.words, self.item[RowItem.BITS_START, stage], Int32(0))

    def keep_first(self, scores: Any) -> None:
        """Mask the scores of an item's first step."""
        instructions.keep(scores, self.words)

    @cute.jit
    def second(self, words, stage):
        """The packed mask of an item's second step; returns whether it has any."""
        self.fetch("bits", words, self.item[RowItem.BITS_START, stage], Int32(1))
        return Boolean(True)

    @cute.jit
    def fetch(self, mode: cutlass.Constexpr, words, start, i):
        """Wait for K of step `i` of the list that begins at step `start`, and read its packed mask."""
        n = self.fetched[0]
        self.k.wait_full_at(n)
        self.read(words, n, start + i)
        self.fetched[0] = n + 1

    @cute.jit
    def walk(self, consumer, stage, buffer, kv, started):
        """All steps of an item but the first; returns the number of steps so far."""
        start, count = self.item[RowItem.BITS_START, stage], self.item[RowItem.BITS_COUNT, stage]
        kv, done = consumer.open(stage, buffer, kv, started, count)
        for i in cutlass.range(done, count, unroll=1):
            consumer.step("bits", buffer, kv, start, i)
            kv += 1
        return kv
