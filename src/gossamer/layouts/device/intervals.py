"""The layout of one interval of keys for each query, both bounds non-decreasing: full and interval tiles."""

from __future__ import annotations

from gossamer.layouts.base import Array
from gossamer.layouts.block import BlockLayout
from gossamer.layouts.device.arrays import Arrays
from gossamer.layouts.device.walks import (
    FIRST,
    Bounds,
    all_kept,
    check_blocks,
    check_capacity,
    in_tiles,
    transposed,
    without_bits,
)
from gossamer.layouts.walk import TileList, Walk


def interval_layout(lo: Array, hi: Array, K: int, *, block_q: int, block_kv: int, xp: Arrays) -> BlockLayout:
    """The layout in which query r keeps the keys [lo[r], hi[r]), and its transpose.

    Values are not checked: they are on the device. Tiles in which nothing is kept are not listed.

    Args:
        lo, hi: (Bl, Hl, Q) int32, 0 <= lo <= hi <= K; neither decreases along queries, lo == hi where nothing is kept.
        K: the number of keys.
        block_q, block_kv: edges of a tile, multiples of 32.
        xp: the array framework's operations.

    Raises:
        ValueError: shapes or block edges are wrong, or there may be more tiles than int32 addresses.
    """
    check_blocks(block_q=block_q, block_kv=block_kv)
    shape = tuple(lo.shape)
    if len(shape) != 3 or tuple(hi.shape) != shape or not all(shape):
        raise ValueError(f"lo and hi must be of one shape (Bl, Hl, Q), not empty; got {shape} and {tuple(hi.shape)}")
    if K < 1:
        raise ValueError(f"K must be at least 1, got {K}")
    *_, Q = shape
    bounds = Bounds(xp.int32(lo), xp.int32(hi))
    rows = _walk(bounds, Q, K, block_q, block_kv, xp)
    columns = _walk(transposed(bounds, K, xp), K, Q, block_kv, block_q, xp)
    return BlockLayout(rows, _transpose=[columns])


def _walk(bounds: Bounds, rows: int, columns: int, block_rows: int, block_columns: int, xp: Arrays) -> Walk:
    """One direction.

    The full tiles of a tile of rows follow one another: their list is a part of all tile columns, which is the same
    array for all. What else a tile of rows visits, ascending, is cut into runs: what is left of its full tiles, and
    then for each row the tiles that no row before it visits, and that are not full.

    A list has room for 2 (T + C) interval tiles, which is never exceeded. With floor and ceil in units of tile columns,
    a tile row visits no tile outside [floor(lo of its first row), ceil(hi of its last)), and full ones are [ceil(lo of
    its last), floor(hi of its first)). So there are at most ceil(lo of its last) - floor(lo of its first) interval
    tiles on the left and ceil(hi of its last) - floor(hi of its first) on the right, and also no more than both where
    none is full. As a ceiling is at most its floor + 1, and bounds do not decrease from tile row to tile row, the sum
    of either over all tile rows is at most floor(columns) + T <= C + T.
    """
    *lead, _ = bounds.lo.shape
    tiles = Bounds(*(in_tiles(x, block_rows, xp) for x in bounds))
    first, behind = all_kept(tiles, block_columns)
    number = xp.at_least(behind - first, 0)
    begin = tiles.lo // block_columns
    # The tiles that rows keep something in end here; those of an empty row nowhere.
    end = xp.where(tiles.hi > tiles.lo, (tiles.hi + (block_columns - 1)) // block_columns, 0)
    T, C, heads = -(-rows // block_rows), -(-columns // block_columns), 1
    for n in lead:
        heads *= n
    room = heads * 2 * (T + C)
    check_capacity(max(room, heads * T * (block_rows + 1)))
    # The run on the left: nothing where no tile is full.
    left = begin[..., FIRST]
    ends = xp.where(number > 0, first, left)
    visited = xp.concatenate([(ends + number)[..., None], end])
    visited = xp.cummax(visited)[..., :block_rows]
    new = xp.at_least(end - xp.maximum(begin, visited), 0)
    new = xp.concatenate([(ends - left)[..., None], new])
    stop = xp.concatenate([ends[..., None], end])
    # Runs of all heads, one behind the other, and of each place the run that it is in.
    summed = xp.cumsum(new.reshape(-1))
    counts = xp.total(new)
    starts = summed.reshape(*lead, T, block_rows + 1)[..., block_rows] - counts
    shift = stop.reshape(-1) - summed
    place = xp.arange(room, summed)
    run = xp.searchsorted(summed[: heads * T * (block_rows + 1) - 1], place, right=True)
    indices = place + xp.take(shift, run)
    return without_bits(
        rows, columns, block_rows, block_columns,
        TileList(first, number, xp.arange(C, summed)), TileList(starts, counts, indices), bounds, xp,
    )  # fmt: skip
