"""The parts that the roles of a kernel share: groups of values, rings, drawing an item, named barriers."""

from __future__ import annotations

from dataclasses import dataclass
from enum import IntEnum
from typing import Any, NamedTuple

import cutlass
import cutlass.cute as cute
from cutlass import Int32

WARPGROUP = 128
ROWS = 64  # query rows of a warpgroup
FAR = 1 << 30
MOST_KEYS = 2**31 - 2**16  # of a call; a tile more is still an int32
NUMBERS = {"bfloat16": cutlass.BFloat16, "float16": cutlass.Float16, "float32": cutlass.Float32}


class Barrier(IntEnum):
    """The first named barrier of each purpose: those of warpgroups follow one another."""

    WARPGROUP_TURN = 1  # a warpgroup may issue its products
    Q_READ = 4  # every warp of a warpgroup has read its Q
    OUTPUT = 7  # a warpgroup's output is in shared memory
    BOUNDS = 10  # the bounds of an item's rows are in shared memory


@cute.jit
def place_of(config, head, tile, row):
    """(head, query) of a row of a tile; the query is far past the last one where the tile has no such row.

    `head`: that of the item, which may stand for several heads, whose rows a tile holds together.
    """
    query = tile * config.block_q + row
    if cutlass.const_expr(config.heads > 1):
        query = tile * config.queries + row // config.heads
        head = head * config.heads + row % config.heads
        if cutlass.const_expr(config.heads * config.queries < ROWS):
            query = query if row < config.heads * config.queries else Int32(FAR)
    return head, query


class Opaque:
    """A group of values, or a part of a kernel with the values that it works on.

    The tracer threads what a branch may change through it, and would do so with every value of a group whose method is
    called there, or one of whose tensors is written to. To the tracer an opaque group has no values: they are fixed
    when the group is made, and what changes is in tensors.
    """

    def __extract_mlir_values__(self) -> list[Any]:
        return []

    def __new_from_mlir_values__(self, values: list[Any]) -> Any:
        return self


class Block(Opaque):
    """The memory and values that the roles of a block share. A kernel declares their names in a class of its own.

    Of what goes through a ring `x` is the ring, `s_x` its stages in shared memory, `arguments.x` a parameter.
    """

    config: Any
    arguments: Any
    rings: tuple[tuple[Any, ...], ...]  # those that stand together are set up together

    def __init__(self, **values: Any) -> None:
        for name, value in values.items():
            setattr(self, name, value)

    def __setattr__(self, name: str, value: Any) -> None:
        if not any(name in vars(kind).get("__annotations__", {}) for kind in type(self).__mro__):
            raise AttributeError(f"{type(self).__name__} declares no {name}")
        super().__setattr__(name, value)


class Thread(NamedTuple):
    """A thread of a computing warpgroup, and what it holds of a fragment: see instructions.py."""

    warpgroup: Any
    thread: Any  # of the warpgroup
    lane: Any
    quad: Any  # its first column of each eight
    row: Any  # its first row of an item; the second is eight below


def computing_thread(warpgroup: Any = None) -> Thread:
    """This thread; `warpgroup` where it is known, since there is one."""
    thread, _, _ = cute.arch.thread_idx()
    if warpgroup is None:
        warpgroup = cute.arch.make_warp_uniform(thread // WARPGROUP) - 1
    thread, lane = thread % WARPGROUP, cute.arch.lane_idx()
    return Thread(warpgroup, thread, lane, 2 * (lane % 4), warpgroup * ROWS + thread // 32 * 16 + lane // 4)


def ring(count: Int32, stages: int) -> tuple[Any, Any]:
    """(stage, phase) of the `count`-th use of a ring."""
    if stages & (stages - 1) == 0:
        return count & (stages - 1), (count >> (stages.bit_length() - 1)) & 1
    return count % stages, (count // stages) & 1


@dataclass(frozen=True, eq=False)
class Ring(Opaque):
    """Stages that are filled and emptied in turn, with two barriers each: the stage is full, and it is empty again."""

    full: Any  # the barriers of full stages
    empty: Any
    stages: int
    fillers: int  # arrivals that make a stage full
    readers: int  # arrivals that make it empty

    def place(self, n: Int32) -> tuple[Any, Any]:
        """(stage, phase) of the n-th use."""
        return ring(n, self.stages)

    @cute.jit
    def init(self, stage):
        """Set up the barriers of a stage."""
        cute.arch.mbarrier_init(self.full + stage, self.fillers)
        cute.arch.mbarrier_init(self.empty + stage, self.readers)

    def wait_full(self, stage: Any, phase: Any) -> None:
        """Wait until a stage is filled."""
        cute.arch.mbarrier_wait(self.full + stage, phase)

    def wait_empty(self, stage: Any, phase: Any) -> None:
        """Wait until a stage may be filled."""
        cute.arch.mbarrier_wait(self.empty + stage, phase ^ 1)

    @cute.jit
    def release(self, stage):
        """This warp has read a stage."""
        empty = self.empty + stage
        if cute.arch.lane_idx() == 0:
            cute.arch.mbarrier_arrive(empty)

    def wait_full_at(self, n: Int32) -> Any:
        """Wait until the n-th use is filled; returns its stage."""
        stage, phase = self.place(n)
        self.wait_full(stage, phase)
        return stage

    def wait_empty_at(self, n: Int32) -> Any:
        """Wait until there is room for the n-th use; returns its stage."""
        stage, phase = self.place(n)
        self.wait_empty(stage, phase)
        return stage

    def release_at(self, n: Int32) -> None:
        """This warp has read the n-th use."""
        self.release(self.place(n)[0])


@dataclass(frozen=True, eq=False)
class RingPair(Opaque):
    """Rings of as many stages, of which the barriers of full stages are set up before those of empty ones."""

    one: Ring
    other: Ring

    @property
    def stages(self) -> int:
        return self.one.stages

    @cute.jit
    def init(self, stage):
        """Set up the barriers of a stage."""
        for ring in (self.one, self.other):
            cute.arch.mbarrier_init(ring.full + stage, ring.fillers)
        for ring in (self.one, self.other):
            cute.arch.mbarrier_init(ring.empty + stage, ring.readers)


@cute.jit
def within_keys(length):
    """A key length of any int32, clamped so that sums with the sizes of tiles do not wrap."""
    length = length if length > 0 else Int32(0)
    return length if length < MOST_KEYS else Int32(MOST_KEYS)
