"""What masks the steps of gathered columns: words of 32 columns of a row, which come with the keys of a step."""

from __future__ import annotations

from dataclasses import dataclass
from typing import Any

import cutlass
import cutlass.cute as cute
from cutlass import Boolean, Int32, const_expr

from gossamer.kernels.hopper.device import instructions
from gossamer.kernels.hopper.device.common import ROWS, Opaque, Ring, Thread, ring
from gossamer.kernels.hopper.device.row_items import RowItem

WORD = 32  # columns of a mask word
WORDS = 2 * ROWS  # of a step


@dataclass(frozen=True, eq=False)
class GatheredWords(Opaque):
    """The words of a step in shared memory: 64 rows, twice 32 columns, in twice as many slots as K has stages.

    A step's words are read before its products, and K is given back after them: so a slot is free when it is filled.
    """

    shared: cute.Tensor  # (64, 2, slots)
    slots: int
    thread: Thread
    has_lengths: bool
    length: Any  # columns that count, of all lists, less this thread's first

    @classmethod
    def of(cls, shared: Any, slots: int, thread: Thread, has_lengths: bool) -> GatheredWords:
        return cls(shared, slots, thread, has_lengths, cute.make_rmem_tensor((1,), Int32))

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
                word = cutlass.Uint32(self.shared[self.thread.row + 8 * r, w, slot])
                words[r, w] = Int32(word >> cutlass.Uint32(self.thread.quad))
            if const_expr(self.has_lengths):
                within = instructions.below(self.length[0] - step * ROWS - w * WORD)
                for r in cutlass.range_constexpr(instructions.ROWS):
                    words[r, w] = words[r, w] & within


@dataclass(frozen=True, eq=False)
class GatheredMask(Opaque):
    """The mask source of gathered columns: every step has words, which are fetched in order, each once."""

    item: cute.Tensor
    k: Ring
    fetched: Any  # steps whose words were fetched
    shared: GatheredWords
    words: Any  # of an item's first step

    with_keys = True  # who has fetched a step's words has waited for its K

    @classmethod
    def of(
        cls, item: Any, k: Ring, fetched: Any, shared: Any, slots: int, thread: Thread, has_lengths: bool
    ) -> GatheredMask:
        words = cute.make_rmem_tensor((instructions.ROWS, ROWS // WORD), Int32)
        return cls(item, k, fetched, GatheredWords.of(shared, slots, thread, has_lengths), words)

    def reset(self) -> None:
        """No item has begun."""
        self.shared.length.fill(0)

    @cute.jit
    def count(self, stage):
        """How many steps an item has."""
        return self.item[RowItem.BITS_COUNT, stage]

    @cute.jit
    def prepare(self, stage):
        """Fetch what masks the first step of an item."""
        self.words.fill(0)
        self.shared.begin(self.item, stage)
        if self.count(stage) > 0:
            self.fetch("bits", self.words, self.item[RowItem.BITS_START, stage], Int32(0))

    def masks_first(self) -> Any:
        """Whether anything masks an item's first step."""
        return True

    def first(self) -> Any:
        """The packed mask of an item's first step."""
        return self.words

    @cute.jit
    def second(self, words, stage):
        """The packed mask of an item's second step; returns whether it has any."""
        self.fetch("bits", words, self.item[RowItem.BITS_START, stage], Int32(1))
        return Boolean(True)

    @cute.jit
    def fetch(self, mode: cutlass.Constexpr, words, start, i):
        """Wait for K of step `i` of the list that begins at step `start`, and read its packed mask."""
        n = self.fetched[0]
        self.k.wait_full(*self.k.place(n))
        self.shared.read(words, n, start + i)
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
