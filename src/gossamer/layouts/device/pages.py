"""The layout of queries over the tiles of keys that their own sequence lists, of keys whose places a table says."""

from __future__ import annotations

from collections.abc import Sequence
from typing import NamedTuple

from gossamer.layouts.base import Array
from gossamer.layouts.block import BlockLayout
from gossamer.layouts.device.arrays import Arrays
from gossamer.layouts.device.progressions import Progression
from gossamer.layouts.device.walks import FIRST, check_capacity, check_sizes, every_nth
from gossamer.layouts.walk import TileList, Walk, tile_edge
from gossamer.patterns.grid import WORD


class KeyTiles(NamedTuple):
    """M tiles of keys of each of R sequences, those of one in the order of their positions."""

    begin: Array  # (R, M) int32: the position of the first key in its sequence
    number: Array  # (R, M) int32: which tile of all keys it is
    listed: Array  # (R, M) whether it is there


def page_layout(
    union: Sequence[Progression], position: Array, sequence: Array, there: Array, tiles: KeyTiles, K: int, *,
    block_q: int, block_kv: int, room: int, xp: Arrays,
) -> BlockLayout:  # fmt: skip
    """The layout of T tiles of queries, each of one sequence, whose positions and bounds are those in it; rows alone.

    Lists are in the order of positions, whatever tiles are numbered: a sequence's sums do not depend on where its keys
    lie. Values are not checked: they are on the device.

    Args:
        union: for each query, lo and hi (T, block_q) int32 of each progression, nowhere decreasing along a tile.
        position: (T, block_q) int32, likewise; steps are counted from it.
        sequence: (T,) int32, of each tile of queries, in [0, R).
        there: (T,) whether the tile has queries.
        K: the number of keys of all tiles, which are whole.
        room: the most tiles of a list that are not full: see `most_mixed`.
        xp: the array framework's operations.

    Raises:
        ValueError: block edges are wrong, or there may be more words of bits than int32 addresses.
    """
    block_q, block_kv = tile_edge("block_q", block_q), tile_edge("block_kv", block_kv)
    T, words, (_, M) = position.shape[0], block_kv // WORD, tiles.begin.shape
    check_tiles(T, M, room, K, block_q, block_kv)
    at = (sequence[:, None] * M + xp.arange(M, sequence)).reshape(-1)
    begin, number, listed = (xp.take(x.reshape(-1), at).reshape(T, M) for x in tiles)
    listed = listed & there[:, None]
    end = begin + block_kv
    first, last = position[..., FIRST, None], position[..., block_q - 1, None]
    full = some = xp.full((T, M), 0, begin) > 0
    for one in union:
        meets = (begin < one.hi[..., block_q - 1, None]) & (end > one.lo[..., FIRST, None])
        if one.step > 1:
            meets = meets & ((last - begin) % one.step < last - first + block_kv)
        else:
            full = full | ((begin >= one.lo[..., block_q - 1, None]) & (end <= one.hi[..., FIRST, None]))
        some = some | meets
    full = full & listed
    mixed = some & ~full & listed
    of_full, of_mixed = _places(full, M, xp), _places(mixed, room, xp)
    column = xp.take(begin.reshape(-1), of_mixed.reshape(-1)).reshape(T, room, 1, 1) + xp.arange(words, begin) * WORD
    bits = None
    for one in union:
        lo, hi = (x.reshape(T, 1, block_q, 1) for x in (one.lo, one.hi))
        kept = xp.bits_below(hi - column) & ~xp.bits_below(lo - column)
        if one.step > 1:
            kept = kept & every_nth(one.step, (position.reshape(T, 1, block_q, 1) - column) % one.step, xp)
        bits = kept if bits is None else bits | kept
    assert bits is not None

    def listing(kept: Array, places: Array, most: int) -> Listed:
        return Listed(xp.total(kept), xp.take(number.reshape(-1), places.reshape(-1)), most)

    lists = listing(full, of_full, M), listing(mixed, of_mixed, room)
    pool = bits.reshape(T * room, block_q, words)
    return listed_layout(*lists, pool, K, block_q=block_q, block_kv=block_kv, xp=xp)


def check_tiles(T: int, M: int, room: int, K: int, block_q: int, block_kv: int) -> None:
    """Raise ValueError for more than int32 addresses: T lists of M tiles of K keys, and of bits of `room` tiles."""
    check_sizes(Q=T * block_q, K=K)
    check_capacity(max(T * M, T * room * block_q * (block_kv // WORD)))


class Listed(NamedTuple):
    """Lists of tiles of keys, one for each of T tiles of queries."""

    counts: Array  # (T,) int32
    indices: Array  # (T * room,) int32
    room: int  # of each


def listed_layout(
    full: Listed, mixed: Listed, pool: Array, K: int, *, block_q: int, block_kv: int, xp: Arrays
) -> BlockLayout:
    """The layout of T tiles of queries over K keys; rows alone.

    Args:
        mixed: tiles that are not full, whose bits are the entries of the pool (T * room, block_q, block_kv / 32).
    """
    (T,) = full.counts.shape
    none, edge = xp.full((0,), 0, pool), xp.full((1, 1, 0), 0, pool)
    tile, nothing = xp.arange(T, pool), xp.full((1, 1, T), 0, pool)

    def apart(lists: Listed) -> TileList:
        return TileList((tile * lists.room).reshape(1, 1, T), lists.counts.reshape(1, 1, T), lists.indices)

    walk = Walk(
        T * block_q, K, block_q, block_kv, full=apart(full), interval=TileList(nothing, nothing, none),
        bits=apart(mixed), lo=edge, hi=edge, pool_index=xp.arange(T * mixed.room, pool), pool=pool,
    )  # fmt: skip
    return BlockLayout(walk)


def _places(kept: Array, most: int, xp: Arrays) -> Array:
    """Where the first `most` entries that are kept of each row (T, M) lie among all, (T, most); the rest anywhere."""
    T, M = kept.shape
    order = xp.sort(xp.fill(xp.broadcast_to(xp.arange(M, kept), (T, M)), ~kept, M))[..., :most]
    return xp.fill(order, order == M, 0) + (xp.arange(T, kept) * M)[:, None]


def most_mixed(longest: Sequence[int | None], positions: int, tiles: int, block_kv: int) -> int:
    """The most tiles that are not full, of so many, of queries that span `positions`.

    Args:
        longest: for each progression of the union, -1 where its bounds move by as much as positions do: only the tiles
            at its two ends are then not full. Else the length of its longest interval, None where any may be; all
            tiles that it reaches may be mixed then, at most two of those intervals and the positions.
    """
    found = 0
    for length in longest:
        if length is None:
            return tiles
        found += 2 * (positions // block_kv + 2) if length < 0 else (2 * length + positions) // block_kv + 2
    return max(1, min(tiles, found))
