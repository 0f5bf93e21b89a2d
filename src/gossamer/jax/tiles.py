"""The tiles of a layout as arrays of JAX: of each row those that it visits, rows of a like number together.

Made from a layout of numpy arrays, once. All shapes follow from the pattern, none from batch or heads, so that the same
lists serve every shard of a call.

The columns that a gather layout lists for a group of rows are tiles of one column. Their lists are cut into pieces of
one length, whose results are joined, so that all pieces are alike; arrays are filled up to a capacity, and a changed
list of the same capacity needs no new program.
"""

from __future__ import annotations

from itertools import pairwise
from typing import Any, NamedTuple

import numpy as np

from gossamer.layouts.block import BlockLayout
from gossamer.layouts.gather import GatherLayout, GatherWalk
from gossamer.layouts.kept import keeps_all
from gossamer.layouts.walk import Walk
from gossamer.patterns.grid import WORD, ranges

FULL, INTERVAL, NOTHING = -1, -2, -3  # what masks a tile; an entry of the pool is its number
PIECE = 1024  # columns of a long row that are computed at a time
WASTE = 0.2  # of the work, for fewer groups
WIDTHS = {1: 16, 64: 256}  # columns of a piece, by the rows that gather together: measured on two cores
Array = Any  # numpy.ndarray or jax.Array


class TileLists(NamedTuple):
    """One direction of a layout, as data. L = Bl * Hl lists, each of T rows of tiles.

    Of gathered columns starts and counts are those of pieces, groups one array with the row of each piece, ascending,
    and places (1,) their number, without those that fill up.
    """

    starts: Array  # (L * T,) int32: where the tiles of a row begin
    counts: Array  # (L * T,) int32
    columns: Array  # (n,) int32: tile columns
    masks: Array  # (n,) int32: FULL, INTERVAL or an entry of the pool; (0,) of gathered columns
    lo: Array  # (L, T * block_rows) int32: row r of an interval tile keeps columns [lo[r], hi[r]); (0, 0) without any
    hi: Array
    pool: Array  # (P, block_rows, block_columns // 32) uint32; of gathered columns (n, block_rows // 32), bits of rows
    groups: tuple[Array, ...]  # rows (n,) int32 with a like number of tiles
    places: Array  # (L * T,) int32: where a row is in all groups, one after the other; those of no tile come last
    order: Array = np.zeros(0, np.int32)  # (rows,) int32: the row that comes at each place; (0,): as they are
    back: Array = np.zeros(0, np.int32)  # where each row went


class Extent(NamedTuple):
    """One direction of a layout, as configuration."""

    rows: int
    columns: int
    block_rows: int
    block_columns: int
    lead: tuple[int, int]  # (Bl, Hl)
    widths: tuple[int, ...]  # the most tiles of a row, of each group
    unkept: bool = True  # whether there may be rows or columns that are of no pair

    @property
    def tiles(self) -> int:
        """T, of one list."""
        return -(-self.rows // self.block_rows)

    @property
    def tile_columns(self) -> int:
        return -(-self.columns // self.block_columns)

    @property
    def gathers(self) -> bool:
        """Whether columns are gathered one by one."""
        return self.block_columns == 1

    @property
    def piece(self) -> int:
        """Tiles of a long row that are computed at a time."""
        return max(1, PIECE // self.block_columns)


class Walked(NamedTuple):
    """One direction of a layout."""

    extent: Extent
    lists: TileLists


def both_directions(layout: BlockLayout) -> tuple[Walked, Walked]:
    """The rows of a layout of numpy arrays, and its columns."""
    unkept = not all(keeps_all(layout))
    return walked(layout.rows, unkept), walked(layout.columns, unkept)


def walked(walk: Walk, unkept: bool) -> Walked:
    """A walk of numpy arrays as lists; `unkept` as an extent has it."""
    starts, counts, columns, masks = _merged(walk)
    Bl, Hl = walk.lead
    extent = Extent(walk.rows, walk.columns, walk.block_rows, walk.block_columns, (Bl, Hl), (), unkept)
    groups, widths = _groups(counts, extent.piece)
    # A row alone is that of one query behind keys that grow: it takes less to compute a third more than to compile.
    widths = tuple(capacity_of(most) if len(rows) == 1 else most for most, rows in zip(widths, groups, strict=True))
    extent = extent._replace(widths=widths)
    places = np.full(len(counts), sum(map(len, groups)), dtype=np.int32)
    listed = np.concatenate([*groups, np.zeros(0, np.int32)])
    places[listed] = np.arange(len(listed))
    lo = hi = np.zeros((0, 0), np.int32)
    if walk.lo.size:
        lo, hi = _padded(walk.lo, extent), _padded(walk.hi, extent)
    lists = TileLists(starts, counts, columns, masks, lo, hi, walk.pool, groups, places)
    return Walked(extent, lists)


def regrouped(walked: Walked) -> Walked:
    """A walk of numpy arrays in groups for who computes each row whole: long rows by their tiles, few groups in all.

    Neighbouring groups become one, which is compiled once, as long as all together take WASTE more.
    """
    extent, lists = walked
    groups: list[_Group] = []
    for rows, most in zip(lists.groups, extent.widths, strict=True):
        if most <= extent.piece or len(rows) == 1:
            groups.append(_Group(rows, most))
            continue
        counts = lists.counts[rows]  # longest first
        ends = np.searchsorted(-counts, [-(most >> by) for by in range(1, (most // extent.piece).bit_length())])
        groups += [_Group(part, int(lists.counts[part].max())) for part in np.split(rows, ends) if len(part)]
    left = WASTE * sum(group.work for group in groups)
    while len(groups) > 1:
        joined = [one.with_rows_of(two) for one, two in pairwise(groups)]
        added = [both.work - one.work - two.work for both, (one, two) in zip(joined, pairwise(groups), strict=True)]
        at = int(np.argmin(added))
        if added[at] > left:
            break
        left -= added[at]
        groups[at : at + 2] = [joined[at]]
    widths = tuple(group.width for group in groups)
    return Walked(extent._replace(widths=widths), lists._replace(groups=tuple(group.rows for group in groups)))


class _Group(NamedTuple):
    """Rows of tiles that are computed together."""

    rows: np.ndarray
    width: int  # tiles of the longest

    @property
    def work(self) -> int:
        return len(self.rows) * self.width

    def with_rows_of(self, other: _Group) -> _Group:
        return _Group(np.concatenate([self.rows, other.rows]), max(self.width, other.width))


def both_gathered(layout: GatherLayout, order: np.ndarray | None) -> tuple[Walked, Walked]:
    """The rows of a gather layout of numpy arrays, and its columns.

    Args:
        order: which row, and which column, comes at each place of the layout; None: as they are.
    """
    both = [_gathered(walk, order) for walk in (layout.rows, layout.columns)]
    unkept = not all(_keeps_all(walk) for walk in (layout.rows, layout.columns))
    rows, columns = (Walked(extent._replace(unkept=unkept), lists) for extent, lists in both)
    return rows, columns


def _keeps_all(walk: GatherWalk) -> bool:
    """Whether there is no row that is read and keeps nothing."""
    if not walk.has_bits:
        return True
    starts, counts = walk.starts.reshape(-1), walk.counts.reshape(-1)
    if not counts.all():
        return False
    group, words = ranges(starts // WORD, -(-(starts + counts) // WORD))
    some = np.logical_or.reduceat(walk.bits[words] != 0, np.flatnonzero(np.diff(group, prepend=-1)))
    return bool(some.reshape(*walk.counts.shape[:2], -1)[..., : walk.rows].all())


def _gathered(walk: GatherWalk, order: np.ndarray | None) -> Walked:
    """A gather walk of numpy arrays as lists; columns are not reordered, but named by their own numbers."""
    starts, counts = walk.starts.reshape(-1), walk.counts.reshape(-1).astype(np.int64)
    _, at = ranges(starts, starts + counts)  # without padding
    columns, width = walk.indices[at] if order is None else order[walk.indices[at]], WIDTHS[walk.block_rows]
    pool = np.zeros((0, 1), np.uint32)
    if walk.has_bits:
        bits = walk.bits.T[:, at // WORD] >> (at % WORD).astype(np.uint32) & 1  # (block_rows, n)
        packed = np.packbits(np.ascontiguousarray(bits.T.astype(np.uint8)), axis=1, bitorder="little")
        pool = _filled(packed.view(np.uint32), capacity_of(len(columns)))
    pieces = -(-counts // width)
    rows, first = ranges(np.zeros_like(pieces), pieces)
    starts = (np.cumsum(counts) - counts)[rows] + first * width
    counts = np.minimum(counts[rows] - first * width, width)
    n, most = len(rows), capacity_of(len(rows))
    # What fills up reads again what its row has read, and keeps none of it.
    each = [_filled(x, most, last) for x, last in ((starts, -1), (counts, None), (rows, -1))]
    empty, bounds = np.zeros(0, np.int32), np.zeros((0, 0), np.int32)
    lists = TileLists(
        each[0], each[1], _filled(columns, capacity_of(len(columns))), empty, bounds, bounds, pool,
        (each[2],) if n else (), np.asarray([n], np.int32),
        *((empty, empty) if order is None else (order.astype(np.int32), np.argsort(order).astype(np.int32))),
    )  # fmt: skip
    Bl, Hl = walk.lead
    return Walked(Extent(walk.rows, walk.columns, walk.block_rows, 1, (Bl, Hl), (width,) if n else ()), lists)


def capacity_of(n: int) -> int:
    """Room for n numbers: a power of two, or one and a half; 1 for none, since of an array something is always read."""
    power = 1 << max(n - 1, 0).bit_length()
    return power * 3 // 4 if power >= 4 and n <= power * 3 // 4 else power


def _filled(x: np.ndarray, n: int, last: int | None = None) -> np.ndarray:
    """Integers filled up to n: by the last one, or by zeros."""
    more = np.zeros((n - len(x), *x.shape[1:]), x.dtype)
    if last is not None and len(x):
        more[:] = x[last]
    found = np.concatenate([x, more])
    return found if x.dtype == np.uint32 else found.astype(np.int32)


def _merged(walk: Walk) -> tuple[np.ndarray, np.ndarray, np.ndarray, np.ndarray]:
    """(starts, counts, columns, masks): the three lists of each row as one, ascending."""
    every = []
    for kind, tiles in walk.lists.items():
        row, at = tiles.listed()
        mask = walk.pool_index[at] if kind == "bits" else np.full(len(at), FULL if kind == "full" else INTERVAL)
        every.append((row, tiles.indices[at], mask))
    row, column, mask = (np.concatenate(parts) for parts in zip(*every, strict=True))
    order = np.lexsort((column, row))
    Bl, Hl = walk.lead
    counts = np.bincount(row, minlength=Bl * Hl * walk.tiles)
    starts = np.cumsum(counts) - counts
    room = capacity_of(len(order))
    return (
        starts.astype(np.int32), counts.astype(np.int32), _filled(column[order].astype(np.int64), room),
        _filled(mask[order].astype(np.int64), room),
    )  # fmt: skip


def _groups(counts: np.ndarray, piece: int) -> tuple[tuple[np.ndarray, ...], tuple[int, ...]]:
    """Rows by their number of tiles: with the most of them, those of over half of it, and so on down.

    Rows of over a piece of tiles are one group, longest first: they are computed piece by piece, as many as each has.
    """
    found: list[np.ndarray] = []
    widths: list[int] = []
    left = np.flatnonzero(counts)
    order = np.argsort(-counts[left], kind="stable")
    left = left[order]
    while len(left):
        most = int(counts[left].max())
        chosen = counts[left] > (piece if most > piece else most // 2)
        rows = left[chosen] if most > piece else np.sort(left[chosen])
        found.append(rows.astype(np.int32))
        widths.append(most)
        left = left[~chosen]
    return tuple(found), tuple(widths)


def _padded(bound: np.ndarray, extent: Extent) -> np.ndarray:
    """Bounds of the rows of whole tiles, (L, T * block_rows)."""
    flat = np.ascontiguousarray(bound, dtype=np.int32).reshape(-1, extent.rows)
    return np.pad(flat, ((0, 0), (0, extent.tiles * extent.block_rows - extent.rows)))
