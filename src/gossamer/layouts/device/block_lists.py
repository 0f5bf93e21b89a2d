"""The layout of lists of key blocks, one for each block of queries, and perhaps of an interval of keys for each query.

The lists are data: unsorted, with repeated and missing entries.
"""

from __future__ import annotations

import math
from typing import NamedTuple

from gossamer.layouts.base import Array
from gossamer.layouts.block import BlockLayout
from gossamer.layouts.device.arrays import Arrays
from gossamer.layouts.device.walks import (
    FIRST,
    Bounds,
    all_kept,
    ascending,
    check_bounds,
    check_capacity,
    check_lists,
    check_sizes,
    fill_tiles,
    not_listed,
    transposed,
    without_bits,
)
from gossamer.layouts.walk import TileList, Walk, tile_edge


def block_list_layout(
    indices: Array, counts: Array | None, lo: Array | None, hi: Array | None, Q: int, K: int, *, block: int, xp: Arrays,
    transpose: bool = True,
) -> BlockLayout:  # fmt: skip
    """The layout in which a query keeps the keys of the blocks that its block lists.

    With `lo` and `hi` only those keys j of them with lo[r] <= j < hi[r]. Values are not checked: they are on the
    device. Tiles in which nothing is kept are not listed. `lo` and `hi` may be arrays of the layout, and are not to be
    written to as long as it is used.

    Args:
        indices: (Bl, Hl, T, n) int32 or int64, T = ceil(Q / block): numbers of key blocks in any order. Those that are
            repeated count once, and those outside [0, ceil(K / block)), as -1 is, not at all.
        counts: (Bl, Hl, T), how many of each list are read, from its first; None for all.
        lo, hi: (bl, hl, Q) int32, bl 1 or Bl, hl 1 or Hl, as those of `interval_layout`; both None for all keys.
        Q, K: the numbers of queries and keys.
        block: edge of a tile in both directions, a multiple of 32.
        xp: the array framework's operations.
        transpose: with the transpose, which gradients need.

    Raises:
        ValueError: shapes or the block edge are wrong, or there may be more tiles than int32 addresses.
    """
    block = tile_edge("block", block)
    _check(indices, counts, lo, hi, Q, K, block)
    Bl, Hl, T, n = indices.shape
    if not n:  # a list with room for one tile that is not there: no step below is made for none
        indices = xp.full((Bl, Hl, T, 1), -1, indices)
    bounds = None if lo is None or hi is None else Bounds(xp.int32(lo), xp.int32(hi))
    row_bounds = _bounds_of(bounds, (Bl, Hl, Q), K, block, xp, indices)
    column_bounds = None
    if transpose:
        turned = None if bounds is None else transposed(bounds, K, xp)
        column_bounds = _bounds_of(turned, (Bl, Hl, K), Q, block, xp, indices)
    made = _fused(indices, counts, bounds, Q, K, block, row_bounds, column_bounds, transpose, xp)
    if made is None:
        tiles = _tiles(Q, K, block, bounds, xp)
        codes = _codes(indices, counts, tiles, bounds, xp)
        rows, columns = (
            _rows(codes, tiles, row_bounds, xp),
            _columns(codes, tiles, column_bounds, xp) if transpose else None,
        )
    else:
        rows, columns = made
    walk = _walk(rows, Q, K, block, row_bounds, xp)
    return BlockLayout(walk, _transpose=[] if columns is None else [_walk(columns, K, Q, block, column_bounds, xp)])


class _Listed(NamedTuple):
    """The lists of one direction, by kind: the full tiles, and those of an interval where there may be any."""

    starts: list[Array]  # (Bl, Hl, T) each
    counts: list[Array]
    indices: Array
    nothing: Array | None = None  # zeros of their shape


class _Both(NamedTuple):
    rows: _Listed
    columns: _Listed | None


def _fused(
    indices: Array, counts: Array | None, bounds: Bounds | None, Q: int, K: int, block: int, row_bounds: Bounds | None,
    column_bounds: Bounds | None, transpose: bool, xp: Arrays,
) -> _Both | None:  # fmt: skip
    """The lists by kernels of the framework; None where it has none."""
    kernels = xp.fused(indices)
    if kernels is None:
        return None
    lo, hi = (None, None) if bounds is None else bounds
    row_kinds, column_kinds = (1 if x is None else 2 for x in (row_bounds, column_bounds))
    made = kernels.block_lists(indices, counts, lo, hi, Q, K, block, row_kinds, column_kinds, transpose)
    rows = _with_zeros(made.row_starts, made.row_counts, made.row_indices)
    columns = _with_zeros(made.column_starts, made.column_counts, made.column_indices) if transpose else None
    return _Both(rows, columns)


def _with_zeros(starts: Array, counts: Array, indices: Array) -> _Listed:
    *kind_counts, nothing = counts
    return _Listed(list(starts), kind_counts, indices, nothing)


def _walk(listed: _Listed, rows: int, columns: int, block: int, bounds: Bounds | None, xp: Arrays) -> Walk:
    full, *others = (
        TileList(start, count, listed.indices) for start, count in zip(listed.starts, listed.counts, strict=True)
    )
    interval = None
    for one in others:
        interval = one
    return without_bits(rows, columns, block, block, full, interval, bounds, xp, listed.nothing)


def _check(
    indices: Array, counts: Array | None, lo: Array | None, hi: Array | None, Q: int, K: int, block: int
) -> None:
    """Raise ValueError for shapes that do not fit."""
    check_sizes(Q=Q, K=K)
    T, C = -(-Q // block), -(-K // block)
    Bl, Hl, listed = check_lists(indices, counts, T, "T", "ceil(Q / block) = ")
    check_bounds(lo, hi, Bl, Hl, Q)
    check_capacity(max(Bl * Hl * T * max(listed, 1), 2 * Bl * Hl * C + 1))


def _bounds_of(
    bounds: Bounds | None, shape: tuple[int, int, int], columns: int, block: int, xp: Arrays, like: Array
) -> Bounds | None:
    """The bounds of every head; None where none are given, and whole tiles fit."""
    if bounds is not None:
        return Bounds(xp.broadcast_to(bounds.lo, shape), xp.broadcast_to(bounds.hi, shape))
    if xp.divides(block, columns):
        return None
    return Bounds(xp.full(shape, 0, like), xp.full(shape, columns, like))


class _Span(NamedTuple):
    """Key blocks from `first` to before `behind`, of each block of queries (bl, hl, T, 1)."""

    first: Array
    behind: Array


class _Tiles(NamedTuple):
    """The kinds and places of tiles before their lists are read."""

    Q: int
    K: int
    block: int
    keeps_all: _Span | None  # of what exists in a tile nothing is missing; None: everywhere

    @property
    def T(self) -> int:
        return -(-self.Q // self.block)

    @property
    def C(self) -> int:
        return -(-self.K // self.block)

    def all_kept(self, column: Array) -> Array | None:
        """Whether a tile of a block of queries (bl, hl, T, n) keeps all that exists in it; None: it does."""
        if self.keeps_all is None:
            return None
        return (column >= self.keeps_all.first) & (column < self.keeps_all.behind)


def _tiles(Q: int, K: int, block: int, bounds: Bounds | None, xp: Arrays) -> _Tiles:
    if bounds is None:
        return _Tiles(Q, K, block, None)
    *lead, _ = bounds.lo.shape
    tiles = Bounds(*(x.reshape(*lead, -(-Q // block), block) for x in fill_tiles(bounds, block, xp)))
    first, behind = all_kept(tiles, block)
    if not xp.divides(block, K):  # the last block ends with the last key
        behind = xp.fill(behind, tiles.hi[..., FIRST] >= K, -(-K // block))
    return _Tiles(Q, K, block, _Span(first[..., None], behind[..., None]))


def _codes(indices: Array, counts: Array | None, tiles: _Tiles, bounds: Bounds | None, xp: Arrays) -> Array:
    """The lists (Bl, Hl, T, n), each ascending and without repetition.

    Key block c is c where it is a full tile and C + c where it is an interval tile; 2 C fills the rest.
    """
    C = tiles.C
    ignored = not_listed(indices, counts, C, xp)
    column = xp.int32(xp.fill(indices, ignored, 0))
    full, code = tiles.all_kept(column), column
    if not xp.divides(tiles.block, tiles.K):  # a tile that reaches past the last key is never full
        inside = column < tiles.K // tiles.block
        full = inside if full is None else full & inside
    if full is not None:
        code = xp.where(full, column, column + C)
    if bounds is not None:
        ignored = ignored | _none_kept(column, tiles, bounds, xp)
    return ascending(xp.fill(code, ignored, 2 * C), 2 * C, xp)


def _none_kept(column: Array, tiles: _Tiles, bounds: Bounds, xp: Arrays) -> Array:
    """Whether no query of its block keeps a key of each listed block.

    Of queries that keep anything those that reach a key block follow one another: from the first that ends behind its
    first key, to the last that begins before its end. Counted by how many before them keep anything.
    """
    Bl, Hl, T, n = column.shape
    *lead, _ = bounds.lo.shape
    C, block = tiles.C, tiles.block
    before = xp.concatenate([xp.full((*lead, 1), 0, bounds.lo), xp.cumsum(bounds.hi > bounds.lo)])
    begin, end = before[..., : tiles.Q : block], xp.extend(before, T * block + 1)[..., block::block]
    edge = xp.broadcast_to(xp.arange(C, column) * block, (*lead, C))
    from_ = xp.take(before, xp.searchsorted(bounds.hi, edge, right=True))
    to = xp.take(before, xp.searchsorted(bounds.lo, edge + block))
    lists = math.prod(lead)
    if lists > 1:  # the bounds of the head of each entry
        column = column + (xp.arange(lists, column) * C).reshape(*lead, 1, 1)
    at = column.reshape(-1)
    from_, to = (xp.take(x.reshape(-1), at).reshape(Bl, Hl, T, n) for x in (from_, to))
    return xp.minimum(to, end[..., None]) <= xp.maximum(from_, begin[..., None])


def _rows(codes: Array, tiles: _Tiles, bounds: Bounds | None, xp: Arrays) -> _Listed:
    """Every list has room for all of its entries; the interval tiles follow the full ones."""
    Bl, Hl, T, n = codes.shape
    starts, count = (xp.arange(Bl * Hl * T, codes) * n).reshape(Bl, Hl, T), xp.total(codes < tiles.C)
    indices = (codes % tiles.C).reshape(-1)
    if bounds is None:
        return _Listed([starts], [count], indices)
    return _Listed([starts, starts + count], [count, xp.total(codes < 2 * tiles.C) - count], indices)


def _columns(codes: Array, tiles: _Tiles, bounds: Bounds | None, xp: Arrays) -> _Listed:
    """The transpose: entries by head and key block, the full tiles of all heads before the interval tiles."""
    Bl, Hl, T, n = codes.shape
    C, block = tiles.C, tiles.block
    lists = Bl * Hl * C
    kinds = 1 if bounds is None else 2
    column = codes % C
    code = column + (xp.arange(Bl * Hl, codes) * C).reshape(Bl, Hl, 1, 1)
    if bounds is not None:
        full = tiles.all_kept(column)
        if not xp.divides(block, tiles.Q):  # a tile that reaches past the last query is never full here
            inside = (xp.arange(T, codes) < tiles.Q // block)[:, None]
            full = inside if full is None else full & inside
        if full is not None:
            code = xp.where(full, code, code + lists)
    ordered = xp.stable_sort(xp.fill(code, codes >= 2 * C, kinds * lists).reshape(-1))
    edges = xp.searchsorted(ordered.values, xp.arange(kinds * lists + 1, codes))
    shape = (kinds, Bl, Hl, C)
    starts, counts = edges[:-1].reshape(shape), (edges[1:] - edges[:-1]).reshape(shape)
    return _Listed(list(starts), list(counts), xp.int32(ordered.places // n % T))
