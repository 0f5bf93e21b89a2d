"""The layout of a union of progressions of keys for each query: of intervals, and of every n-th key of an interval.

A tile that is not full is kept as bits, which are written by arithmetic on words of 32 pairs: nothing larger than what
is kept is ever held.
"""

from __future__ import annotations

from collections.abc import Sequence
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
    every_nth,
    fill_tiles,
    transposed,
)
from gossamer.layouts.walk import TileList, Walk, tile_edge
from gossamer.patterns.grid import WORD


class Progression(NamedTuple):
    """Query r keeps the keys j in [lo[r], hi[r]) with (r + shift - j) % step == 0."""

    lo: Array  # (Bl, Hl, Q) int32, as those of `interval_layout`
    hi: Array
    step: int = 1


def progression_layout(
    union: Sequence[Progression], shift: Array, K: int, *, block_q: int, block_kv: int, reach: int, xp: Arrays,
    transpose: bool = True,
) -> BlockLayout:  # fmt: skip
    """The layout in which a query keeps the keys of all its progressions.

    Values are not checked: they are on the device. The memory of the bits follows from `reach`: see `_room`.

    Args:
        union: one progression or more, whose bounds are of one shape and nowhere decrease along queries.
        shift: (Bl, Hl) int32, the position of the first query, by which steps are counted.
        K: the number of keys.
        block_q, block_kv: edges of a tile, multiples of 32.
        reach: of a progression with a step no query has a longer interval, and no key is in those of more queries;
            max(Q, K) where nothing is known.
        xp: the array framework's operations.
        transpose: with the transpose, which gradients need.

    Raises:
        ValueError: shapes or block edges are wrong, or there may be more words of bits than int32 addresses.
    """
    block_q, block_kv = tile_edge("block_q", block_q), tile_edge("block_kv", block_kv)
    shape = tuple(union[0].lo.shape)
    for one in union:
        if len(shape) != 3 or tuple(one.lo.shape) != shape or tuple(one.hi.shape) != shape or not all(shape):
            raise ValueError(
                f"lo and hi must be of one shape (Bl, Hl, Q), not empty; got {tuple(one.lo.shape)} and "
                f"{tuple(one.hi.shape)}"
            )
    Bl, Hl, Q = shape
    if tuple(shift.shape) != (Bl, Hl):
        raise ValueError(f"shift must be of shape (Bl, Hl) = {(Bl, Hl)}; got {tuple(shift.shape)}")
    check_sizes(Q=Q, K=K)
    shift = xp.int32(shift)
    union = [one._replace(lo=xp.int32(one.lo), hi=xp.int32(one.hi)) for one in union]
    rows = _walk(union, shift, Q, K, block_q, block_kv, reach, xp)
    if not transpose:
        return BlockLayout(rows)
    turned = [Progression(*transposed(Bounds(one.lo, one.hi), K, xp), one.step) for one in union]
    columns = _walk(turned, -shift, K, Q, block_kv, block_q, reach, xp)
    return BlockLayout(rows, _transpose=[columns])


def _room(steps: Sequence[int], rows: int, columns: int, block_rows: int, block_columns: int, reach: int) -> int:
    """The most tiles with bits of one list of a walk.

    A tile is not full in any progression that keeps something in it. One without a step has at most 2 (T + C) of those,
    as `intervals._lists` shows. One with a step has all from lo of the first row of a tile to hi of its last: as that
    is at most lo of the next tile and the reach, these ranges together are no longer than all columns and T reaches.
    """
    T, C = -(-rows // block_rows), -(-columns // block_columns)
    stepped = (columns + T * min(reach, columns)) // block_columns + 2 * T
    return min(T * C, sum(2 * (T + C) if step == 1 else stepped for step in steps))


def _walk(
    union: Sequence[Progression], shift: Array, rows: int, columns: int, block_rows: int, block_columns: int,
    reach: int, xp: Arrays,
) -> Walk:  # fmt: skip
    """One direction."""
    Bl, Hl, _ = union[0].lo.shape
    T, C, words = -(-rows // block_rows), -(-columns // block_columns), block_columns // WORD
    room = _room([one.step for one in union], rows, columns, block_rows, block_columns, reach)
    check_capacity(max(Bl * Hl * room * block_rows * words, Bl * Hl * T * C))
    first = xp.arange(C, shift) * block_columns  # column of a tile
    full = some = xp.full((Bl, Hl, T, C), 0, shift) > 0
    tiles = []
    for one in union:
        whole = Bounds(*(x.reshape(Bl, Hl, T, block_rows) for x in fill_tiles(Bounds(one.lo, one.hi), block_rows, xp)))
        tiles.append(whole)
        lo, hi = whole.lo[..., FIRST], whole.hi[..., block_rows - 1]
        there = (first < hi[..., None]) & (first + block_columns > lo[..., None])
        if one.step > 1:
            there = there & _meets(one.step, shift, T, C, block_rows, block_columns, xp)
        else:
            kept = all_kept(whole, block_columns)
            column = xp.arange(C, shift)
            every = (column >= kept.first[..., None]) & (column < kept.behind[..., None])
            full = full | every
        some = some | there
    mixed = some & ~full
    listed = xp.cumsum(mixed.reshape(Bl, Hl, T * C))
    # The tile that each place of the pool is of; those behind the last are tile 0, and listed nowhere.
    place = xp.broadcast_to(xp.arange(room, shift) + 1, (Bl, Hl, room))
    tile = xp.searchsorted(listed, place)
    tile = xp.fill(tile, tile >= T * C, 0)
    pool = _bits(union, tiles, tile, shift, rows, C, block_rows, words, xp)
    counts = xp.total(mixed)
    base = (xp.arange(Bl * Hl, shift) * room).reshape(Bl, Hl, 1)
    bits = TileList(xp.cumsum(counts) - counts + base, counts, (tile % C).reshape(-1))
    none = xp.full((0,), 0, shift)
    nothing = xp.full((Bl, Hl, T), 0, shift)
    edge = xp.full((1, 1, 0), 0, shift)
    return Walk(
        rows, columns, block_rows, block_columns, full=_ascending(full, xp), interval=TileList(nothing, nothing, none),
        bits=bits, lo=edge, hi=edge, pool_index=xp.arange(Bl * Hl * room, shift),
        pool=pool.reshape(Bl * Hl * room, block_rows, words),
    )  # fmt: skip


def _meets(step: int, shift: Array, T: int, C: int, block_rows: int, block_columns: int, xp: Arrays) -> Array:
    """Whether a row of a tile and one of its columns are a multiple of the step apart, (Bl, Hl, T, C)."""
    row = shift[..., None] + xp.arange(T, shift) * block_rows
    most = row[..., None] + (block_rows - 1) - xp.arange(C, shift) * block_columns
    return most % step < block_rows + block_columns - 1


def _ascending(listed: Array, xp: Arrays) -> TileList:
    """The columns that are listed of each row of tiles (Bl, Hl, T, C), with room for all of them."""
    Bl, Hl, T, C = listed.shape
    order = xp.sort(xp.fill(xp.broadcast_to(xp.arange(C, listed), (Bl, Hl, T, C)), ~listed, C))
    starts = (xp.arange(Bl * Hl * T, listed) * C).reshape(Bl, Hl, T)
    return TileList(starts, xp.total(listed), xp.fill(order, order == C, 0).reshape(-1))


def _bits(
    union: Sequence[Progression], tiles: Sequence[Bounds], tile: Array, shift: Array, rows: int, C: int,
    block_rows: int, words: int, xp: Arrays,
) -> Array:  # fmt: skip
    """The words (Bl, Hl, P, block_rows, words) of tiles (Bl, Hl, P)."""
    Bl, Hl, P = tile.shape
    row = (tile // C)[..., None] * block_rows + xp.arange(block_rows, tile)  # (Bl, Hl, P, block_rows)
    column = (tile % C)[..., None] * (words * WORD) + xp.arange(words, tile) * WORD  # (Bl, Hl, P, words)
    at = row.reshape(Bl, Hl, P * block_rows)
    bits = None
    for one, whole in zip(union, tiles, strict=True):
        lo, hi = (xp.take(x.reshape(Bl, Hl, -1), at).reshape(Bl, Hl, P, block_rows, 1) for x in whole)
        kept = xp.bits_below(hi - column[..., None, :]) & ~xp.bits_below(lo - column[..., None, :])
        if one.step > 1:
            apart = row[..., None] + shift[..., None, None, None] - column[..., None, :]
            kept = kept & every_nth(one.step, apart % one.step, xp)
        bits = kept if bits is None else bits | kept
    return bits if xp.divides(block_rows, rows) else xp.fill(bits, row[..., None] >= rows, 0)
