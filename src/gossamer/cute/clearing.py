"""Tiles of which some rows become zero in shared memory, before those who multiply them learn that they are there.

A probability of zero times NaN is NaN: rows that nothing may come of are not to be multiplied. Such tiles are few. The
copy engine arrives at a barrier of the warp that loads, in the place of that of the stage; the warp waits there, clears
the rows, and then arrives at that of the stage itself. Who reads the tile knows nothing of it.
"""

from __future__ import annotations

from typing import Any

import cutlass
import cutlass.cute as cute
from cutlass import Int32, Int64, const_expr

from gossamer.cute.common import FAR, Opaque, within_keys
from gossamer.cute.configurations import Clears

WARP = 32
VECTOR = 8  # numbers of 16 bits in 16 bytes


class Landing(Opaque):
    """The memory in which the tiles of one warp land that it clears rows of. `barrier`: in shared memory."""

    stages = 1

    def __init__(self, barrier: Any) -> None:
        self.barrier = barrier
        self.tiles = cute.make_rmem_tensor((1,), Int32)  # so far
        self.tiles.fill(0)

    def init(self, stage: Any) -> None:
        """Set up the barrier."""
        cute.arch.mbarrier_init(self.barrier, 1)

    @cute.jit
    def target(self, full, dirty):
        """The barrier at which the copy engine arrives: that of a stage, or of a tile that is `dirty` its own."""
        address = self.barrier.toint() if dirty else full.toint()
        return cute.make_ptr(Int64, address, cute.AddressSpace.smem, assumed_align=8)

    @cute.jit
    def clear(self, full, tile, rows):
        """Wait for a dirty tile, clear rows of it, and arrive at the barrier of its stage.

        Args:
            tile: (rows, columns) in shared memory.
            rows: a bit for each of this lane's, which are as far apart as a warp has lanes.
        """
        cute.arch.mbarrier_wait(self.barrier, self.tiles[0] & 1)
        self.tiles[0] = self.tiles[0] + 1
        zeros = cute.make_rmem_tensor((VECTOR,), tile.element_type)
        zeros.fill(0.0)
        # Loops, since a warp that loads has few registers.
        for i in cutlass.range(cute.size(tile, mode=[0]) // WARP, unroll=1):
            if ((rows >> i) & 1) != 0:
                row = tile[cute.arch.lane_idx() + WARP * i, None]
                for column in cutlass.range(cute.size(tile, mode=[1]) // VECTOR, unroll=1):
                    cute.autovec_copy(zeros, cute.local_tile(row, (VECTOR,), (column,)))
        cute.arch.fence_view_async_shared()
        cute.arch.sync_warp()
        with cute.arch.elect_one():
            cute.arch.mbarrier_arrive(full)


def landing_of(memory: Any, clears: bool) -> Landing | None:
    """The landing of a kernel which `clears`, at its barrier `landed`."""
    return Landing(memory.landed_full.data_ptr()) if clears else None


@cute.jit
def outside(first, end, rows: cutlass.Constexpr):
    """A bit for each of this lane's rows, of so many, that is not in [first, end)."""
    bits = Int32(0)
    for i in cutlass.range_constexpr(rows // WARP):
        row = cute.arch.lane_idx() + WARP * i
        if row < first or row >= end:
            bits = bits | (1 << i)
    return bits


@cute.jit
def unset(pool, lead, first, keys, tile: cutlass.Constexpr, rows: cutlass.Constexpr):
    """A bit for each of this lane's keys, of so many from `first` on, that nothing attends, in tiles of `tile` keys.

    The pool ends with a row of words for each tile of keys of each lead, the first tile's last.
    """
    place = cute.size(pool, mode=[0]) - 1 - (lead * cute.ceil_div(keys, tile) + first // tile)
    bits = Int32(0)
    for i in cutlass.range_constexpr(rows // WARP):
        word = pool[place, first % tile // WARP + i]
        if ((word >> cute.arch.lane_idx()) & 1) == 0:
            bits = bits | (1 << i)
    return bits


class KeptKeys(Opaque):
    """The keys of an item of rows that are attended at all: those below the length of its batch element, and those of
    its intervals, or which the pool tells. Intervals ascend: keys before the first row's, and behind the last row's,
    nothing attends.
    """

    def __init__(self, arguments: Any, config: Any, keys: Any, rows: Any = None) -> None:
        """`keys`, `rows`: how many a head has."""
        self.arguments, self.config, self.keys, self.rows = arguments, config, keys, rows
        self.has_intervals = config.clears == Clears.INTERVALS and not config.lengths
        self.bounds = cute.make_rmem_tensor((2,), Int32)  # the first key, or the lead; the one behind the last
        self.bounds[0], self.bounds[1] = Int32(0), Int32(FAR)

    @cute.jit
    def begin(self, batch, lead=None, intervals=None):
        """An item begins, with so many tiles of intervals. Where keys end nothing is to be cleared: that is zero."""
        a = self.arguments
        if const_expr(self.config.lengths):
            length = within_keys(a.lengths[batch])
            self.bounds[1] = length if length < self.keys else Int32(FAR)
        if const_expr(self.config.clears == Clears.KEYS):
            self.bounds[0] = lead
        if const_expr(self.has_intervals):
            self.bounds[0], self.bounds[1] = Int32(0), Int32(FAR)
            if intervals > 0:
                end = a.hi[lead, self.rows - 1]
                self.bounds[0], self.bounds[1] = a.lo[lead, 0], end if end < self.keys else Int32(FAR)

    @cute.jit
    def missing(self, first, by_interval, rows: cutlass.Constexpr):
        """A bit for each of this lane's keys, of so many from `first` on, that nothing attends, as `Landing.clear` has.

        by_interval: whether they are of a tile of intervals. None where the configuration clears no keys.
        """
        bits = None
        if const_expr(looks_for_keys(self.config)):
            bits = Int32(0)
            if const_expr(self.config.lengths):
                bits = outside(Int32(0), self.bounds[1] - first, rows)
            if const_expr(self.config.clears == Clears.KEYS):
                tile = const_expr(self.config.block_kv)
                bits = bits | unset(self.arguments.pool, self.bounds[0], first, self.keys, tile, rows)
            if const_expr(self.has_intervals):  # noqa: SIM102
                if by_interval:
                    bits = outside(self.bounds[0] - first, self.bounds[1] - first, rows)
        return bits


def looks_for_keys(config: Any) -> bool:
    """Whether a kernel of rows clears any keys."""
    return config.lengths or config.clears >= Clears.INTERVALS
