"""The layout of one interval of keys for each query, both bounds non-decreasing: full and interval tiles."""

from __future__ import annotations

from typing import NamedTuple

from gossamer.layouts.base import Array
from gossamer.layouts.block import BlockLayout
from gossamer.layouts.device.arrays import Arrays
from gossamer.layouts.device.walks import (
    FIRST,
    Bounds,
    all_kept,
    check_capacity,
    check_sizes,
    fill_tiles,
    transposed,
    without_bits,
)
from gossamer.layouts.walk import TileList, Walk, tile_edge


def interval_layout(
    lo: Array, hi: Array, K: int, *, block_q: int, block_kv: int, xp: Arrays, transpose: bool = True
) -> BlockLayout:
    """The layout in which query r keeps the keys [lo[r], hi[r]).

    Values are not checked: they are on the device. Tiles in which nothing is kept are not listed. `lo` and `hi` are
    arrays of the layout, and not to be written to as long as it is used.

    Args:
        lo, hi: (Bl, Hl, Q) int32, 0 <= lo <= hi <= K; neither decreases along queries, lo == hi where nothing is kept.
        K: the number of keys.
        block_q, block_kv: edges of a tile, multiples of 32.
        xp: the array framework's operations.
        transpose: with the transpose, which gradients need.

    Raises:
        ValueError: shapes or block edges are wrong, or there may be more tiles than int32 addresses.
    """
    block_q, block_kv = tile_edge("block_q", block_q), tile_edge("block_kv", block_kv)
    shape = tuple(lo.shape)
    if len(shape) != 3 or tuple(hi.shape) != shape or not all(shape):
        raise ValueError(f"lo and hi must be of one shape (Bl, Hl, Q), not empty; got {shape} and {tuple(hi.shape)}")
    *_, Q = shape
    check_sizes(Q=Q, K=K)
    rows = Bounds(xp.int32(lo), xp.int32(hi))
    T, C = -(-Q // block_q), -(-K // block_kv)
    kernels = xp.fused(lo)
    if kernels is not None:
        Bl, Hl, _ = shape
        check_capacity(Bl * Hl * 4 * (T + C) + max(T, C))
        made = kernels.interval_lists(*rows, K, block_q, block_kv, transpose)
        walk = _told(made.of_rows, made.indices, rows, Q, K, block_q, block_kv, xp)
        if not transpose:
            return BlockLayout(walk)
        columns = Bounds(made.column_lo, made.column_hi)
        return BlockLayout(
            walk, _transpose=[_told(made.of_columns, made.indices, columns, K, Q, block_kv, block_q, xp)]
        )
    row_tiles, every = fill_tiles(rows, block_q, xp), xp.arange(max(T, C), lo)
    if not transpose:
        row_lists = _lists(row_tiles, block_q, block_kv, 2 * (T + C), xp)
        return BlockLayout(_walk(row_lists, rows, Q, K, block_q, block_kv, every, xp))
    columns = transposed(rows, K, xp)
    column_tiles = fill_tiles(columns, block_kv, xp)
    if block_q == block_kv:  # both directions in half as many steps
        both = Bounds(xp.concatenate([row_tiles.lo, column_tiles.lo]), xp.concatenate([row_tiles.hi, column_tiles.hi]))
        both_lists = _lists(both, block_q, block_kv, 4 * (T + C), xp)
        row_lists, column_lists = both_lists.part(0, T), both_lists.part(T, T + C)
    else:
        row_lists = _lists(row_tiles, block_q, block_kv, 2 * (T + C), xp)
        column_lists = _lists(column_tiles, block_kv, block_q, 2 * (T + C), xp)
    return BlockLayout(
        _walk(row_lists, rows, Q, K, block_q, block_kv, every, xp),
        _transpose=[_walk(column_lists, columns, K, Q, block_kv, block_q, every, xp)],
    )


def empty_layout(Q: int, K: int, like: Array, *, block_q: int, block_kv: int, xp: Arrays) -> BlockLayout:
    """The layout that keeps nothing, of any sizes, 0 too; `like` is an array on its device."""

    def walk(rows: int, columns: int, block_rows: int, block_columns: int) -> Walk:
        nothing = xp.full((1, 1, -(-rows // block_rows)), 0, like)
        none = TileList(nothing, nothing, xp.full((0,), 0, like))
        return without_bits(rows, columns, block_rows, block_columns, none, None, None, xp, nothing)

    return BlockLayout(walk(Q, K, block_q, block_kv), _transpose=[walk(K, Q, block_kv, block_q)])


class _Lists(NamedTuple):
    """The full tiles of tiles of rows, which follow one another, and their interval tiles in `indices`."""

    first: Array  # full tile, (Bl, Hl, T) int32
    number: Array  # of full tiles, likewise
    starts: Array
    counts: Array
    indices: Array  # of all tiles of rows

    def part(self, begin: int, end: int) -> _Lists:
        """The lists of some tiles of rows."""
        first, number, starts, counts = (x[..., begin:end] for x in (self.first, self.number, self.starts, self.counts))
        return _Lists(first, number, starts, counts, self.indices)


def _told(
    tiles: Array, indices: Array, bounds: Bounds, rows: int, columns: int, block_rows: int, block_columns: int,
    xp: Arrays,
) -> Walk:  # fmt: skip
    """One direction, of what kernels say of its tiles, (5, Bl, Hl, T): see `arrays.IntervalLists`."""
    first, number, starts, counts, nothing = tiles
    full, interval = TileList(first, number, indices), TileList(starts, counts, indices)
    return without_bits(rows, columns, block_rows, block_columns, full, interval, bounds, xp, nothing)


def _lists(rows: Bounds, block_rows: int, block_columns: int, room: int, xp: Arrays) -> _Lists:
    """The lists of whole tiles of rows (Bl, Hl, T * block_rows), with room for so many interval tiles of each head.

    What a tile of rows visits beside its full tiles, ascending, is cut into runs: what is left of those, and then for
    each row the tiles that no row before it visits, and that are not full.

    In each direction 2 (T + C) interval tiles are never exceeded. With floor and ceil in units of tile columns, a tile
    row visits no tile outside [floor(lo of its first row), ceil(hi of its last)), and its full ones are [ceil(lo of its
    last), floor(hi of its first)). So it has at most ceil(lo of its last) - floor(lo of its first) interval tiles on
    the left and ceil(hi of its last) - floor(hi of its first) on the right, and no more than both where none is full.
    As a ceiling is at most its floor + 1, and bounds do not decrease from tile row to tile row, the sum of either over
    all tile rows is at most floor(columns) + T <= C + T.
    """
    Bl, Hl, n = rows.lo.shape
    T = n // block_rows
    runs = Bl * Hl * T * (block_rows + 1)
    check_capacity(max(Bl * Hl * room, runs))
    tiles = Bounds(*(x.reshape(Bl, Hl, T, block_rows) for x in rows))
    first, behind = all_kept(tiles, block_columns)
    number = xp.at_least(behind - first, 0)
    begin = tiles.lo // block_columns
    # The tiles that rows keep something in end here; those of an empty row nowhere.
    end = xp.fill((tiles.hi + (block_columns - 1)) // block_columns, tiles.hi <= tiles.lo, 0)
    left = begin[..., FIRST]
    ends = xp.where(number > 0, first, left)  # of the run on the left, which is empty where no tile is full
    visited = xp.cummax(xp.concatenate([(ends + number)[..., None], end]))
    new = xp.at_least(end - xp.maximum(begin, visited[..., :block_rows]), 0)
    new = xp.concatenate([(ends - left)[..., None], new])
    stop = xp.concatenate([ends[..., None], end])
    # Runs of all heads, one behind the other, and of each place the run that it is in.
    summed = xp.cumsum(new.reshape(runs))
    counts = xp.total(new)
    starts = summed.reshape(Bl, Hl, T, block_rows + 1)[..., block_rows] - counts
    place = xp.arange(Bl * Hl * room, summed)
    run = xp.searchsorted(summed[: runs - 1], place, right=True)
    return _Lists(first, number, starts, counts, place + xp.take(stop.reshape(runs) - summed, run))


def _walk(
    lists: _Lists, bounds: Bounds, rows: int, columns: int, block_rows: int, block_columns: int, every: Array,
    xp: Arrays,
) -> Walk:  # fmt: skip
    """One direction. `every`: all tile columns, a part of which each list of full tiles is."""
    full = TileList(lists.first, lists.number, every)
    interval = TileList(lists.starts, lists.counts, lists.indices)
    return without_bits(rows, columns, block_rows, block_columns, full, interval, bounds, xp)
