"""Rows of an item that are particles: a warp gathers them into shared memory, and results are scattered from there.

A list names them: the particle of each row, -1 where there is none, and -2 less the particle where its list is cut, so
that its results are not numbers.
"""

from __future__ import annotations

from dataclasses import dataclass
from typing import Any

import cutlass
import cutlass.cute as cute
from cutlass import Boolean, Float32, Int32, Int64

from gossamer.cute import instructions
from gossamer.cute.common import FAR, ROWS, ring
from gossamer.cute.row_items import ITEM
from gossamer.cute.shell import ring_of, words
from gossamer.cute.work import ItemRing
from gossamer.kernels.hopper.device.gather.rows import LINE, PIECE, PIECES, Gatherer, RowCopies, copy

LANES = 32
ARRIVALS = LANES + 1  # that make an item's stage full: the copies of each lane, and its description


def particle_of(word: Any) -> Any:
    """The particle that a word names, -1 for none."""
    return cutlass.max(word, -2 - word)


@cute.jit
def unless_cut(word, value):
    """A number, or none where a word says that the particle's list is cut."""
    return Float32(float("nan")) if word < -1 else value


@dataclass(frozen=True, eq=False)
class ParticleItems(ItemRing):
    """Descriptions of items whose rows a warp copies: a fence lets products see what it has written."""

    @classmethod
    def of(cls, memory: Any, name: str, stages: int, readers: int) -> ParticleItems:
        return ring_of(memory, name, stages, ARRIVALS, readers, cls, words(memory.item, ITEM, stages))

    def wait_full(self, stage: Any, phase: Any) -> None:
        super().wait_full(stage, phase)
        cute.arch.fence_view_async_shared()

    @cute.jit
    def described(self, stage):
        """The description and the words of an item's rows are there."""
        cute.arch.sync_warp()
        if cute.arch.lane_idx() == 0:
            cute.arch.mbarrier_arrive(self.full + stage)

    @cute.jit
    def end(self, stage):
        """Publish a description that says that there are no more items: nothing is copied."""
        self.described(stage)
        cute.arch.mbarrier_arrive(self.full + stage)


@cute.jit
def name_rows(particles, names, tile, stage):
    """Write the words of an item's rows to shared memory, by a warp."""
    lane = cute.arch.lane_idx()
    for i in cutlass.range_constexpr(ROWS // LANES):
        names[lane + LANES * i, stage] = particles[tile * ROWS + lane + LANES * i]
    cute.arch.sync_warp()


class ParticleRows(RowCopies):
    """The part of an item's rows that a thread copies, from a tensor to shared memory or back: few at a time."""

    def __init__(self, tensor: Any, ring: Any, shared: Any, names: Any, size: int, thread: Any, threads: int) -> None:
        """`shared`: (64, size, stages); `names`: (64, stages) int32."""
        super().__init__(tensor, ring, shared.iterator, size, thread, threads)
        self.names, self.span = names, max(PIECES, self.at_once)

    @cute.jit
    def load(self, head, stage):
        """Copy rows of a head into a stage, asynchronously."""
        self.move(head, stage, copy)

    @cute.jit
    def store(self, head, stage):
        """Copy rows from a stage to those of a head."""
        self.move(head, stage, put)

    @cute.jit
    def move(self, head, stage, one: cutlass.Constexpr):
        start, first = self.start(Int32(0), head), stage * (self.rows * LINE * self.lines)
        for part in cutlass.range(self.rows // self.span, unroll=1):
            for i, place in enumerate(self.to):
                row = particle_of(self.names[self.row + i * self.at_once + part * self.span, stage])
                here = place + first + part * (self.span * LINE)
                for line in cutlass.range_constexpr(self.lines):
                    within = cutlass.const_expr((i * self.at_once + line * self.rows) * LINE)
                    one(here, start, row, self.stride, self.past[line], PIECE, within, line * LINE)


def put(
    from_: Int32, start: Int64, row: Int32, stride: Int32, past: Boolean | bool, size: int, place: int = 0,
    line: int = 0,
) -> None:  # fmt: skip
    """Copy 16 bytes from shared memory to a row, the other way than `gather.rows.copy`; nothing for a negative row."""
    assert size == PIECE
    code = (
        "{ .reg .pred p; .reg .b64 a; .reg .b32 x, y, z, w; setp.ge.and.s32 p, $2, 0, !$4; "
        f"mad.wide.s32 a, $2, $3, $1; @p ld.shared.v4.b32 {{x, y, z, w}}, [$0 + {place}]; "
        f"@p st.global.v4.b32 [a + {line}], {{x, y, z, w}}; }}"
    )
    instructions.assembly(None, code, Int32(from_), Int64(start), Int32(row), Int32(stride), Boolean(past))


@cute.jit
def place_or_far(word):
    """The particle that a word names, or one past all for none."""
    particle = particle_of(word)
    return particle if particle >= 0 else Int32(FAR)


class FencingGatherer(Gatherer):
    """Two warps that give a step to who computes when its rows are there and products see them.

    They look for that when the keys of the step after it are asked for. In rings of two stages K must be given back in
    the step that reads it.
    """

    @cute.jit
    def gather(self, batch, group, at, steps, kv):
        """Gather K and V of an item."""
        keys, values, indices, columns, upcoming = self.keys, self.values, self.indices, self.columns, self.upcoming
        k_start, v_start = keys.start(batch, group), values.start(batch, group)
        if steps > 0:
            keys.listed(indices, at * ROWS, upcoming)
        for i in cutlass.range(steps, unroll=1):
            for j in cutlass.range_constexpr(cute.size(columns)):
                columns[j] = upcoming[j]
            if i + 1 < steps:
                keys.listed(indices, (at + i + 1) * ROWS, upcoming)
            stage = keys.ring.wait_empty_at(kv)
            keys.fill(k_start, columns, stage)
            self.words.fill(at + i, ring(kv, self.words.slots)[0])
            cute.arch.cp_async_commit_group()
            if i > 0:
                cute.arch.cp_async_wait_group(1)
                self.give(kv - 1)
            values.ring.wait_empty_at(kv)
            values.fill(v_start, columns, stage)
            cute.arch.cp_async_commit_group()
            kv += 1
        if steps > 0:
            cute.arch.cp_async_wait_group(0)
            self.give(kv - 1)
        return kv

    @cute.jit
    def give(self, n):
        """K and V of the n-th step are there."""
        cute.arch.fence_view_async_shared()
        stage = self.keys.ring.place(n)[0]
        cute.arch.mbarrier_arrive(self.keys.ring.full + stage)
        cute.arch.mbarrier_arrive(self.values.ring.full + stage)
