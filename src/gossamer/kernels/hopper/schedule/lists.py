"""The lists of a walk as kernels read them, made once and kept."""

from __future__ import annotations

from typing import NamedTuple

import numpy as np

from gossamer.kernels.arrays import Array, copied, namespace, placed, zeros
from gossamer.kernels.hopper.schedule.attended import with_attended
from gossamer.kernels.hopper.schedule.words import entries
from gossamer.kernels.launch import ALIGNMENT
from gossamer.layouts.block import BlockLayout
from gossamer.layouts.walk import Walk
from gossamer.layouts.work_list import row_lengths
from gossamer.memo import Memos


class Lists(NamedTuple):
    """A walk's arrays as the kernel reads them."""

    lists: Array  # (2, n) int32: tile column; pool entry of a tile of bits. (1, n) where there are none
    lo: Array  # (Bl * Hl, Q) int32
    hi: Array
    pool: Array  # (P * block_q, block_kv / 32) int32


_lists: Memos[Lists] = Memos()  # of walks


def lists(layout: BlockLayout, transposed: bool = False, blocks: int = 0, repeat: int = 1) -> Lists:
    """The lists of a layout where its arrays are: of its rows, or of its columns.

    With `blocks` that draw items at the same time, every other round of rows is listed backwards: it begins with the
    keys that are in the level-2 cache since the round before. Else, and where only the device knows the lists, tile
    columns ascend in each list. With `repeat` the rows of a tile are those of so many heads, one head after the other.
    """
    walk = layout.columns if transposed else layout.rows
    if layout.host is None and walk.device is not None:
        blocks = 0  # the same for all
    kept = _lists.of(walk)
    found = kept.get((blocks, repeat))
    if found is not None:
        return found
    if repeat > 1:
        found = _repeated(_plain(layout, transposed, blocks), walk, repeat)
        if layout.host is not None and walk.device.type == "cuda":  # kept for every stream: others would not wait
            namespace(walk.lo).cuda.current_stream(walk.device).synchronize()
    else:
        found = _plain(layout, transposed, blocks)
    found = found._replace(pool=with_attended(layout, found.pool, walk.block_columns // 32))
    return kept.put((blocks, repeat), found)


def _plain(layout: BlockLayout, transposed: bool, blocks: int) -> Lists:
    """The lists of a layout's rows or columns."""
    walk = known = layout.columns if transposed else layout.rows
    if layout.host is not None:  # what is copied from there is complete for every stream
        known = layout.host.columns if transposed else layout.host.rows
    table = table_of(known)
    if blocks:
        table[:, : entries(known).number] = table[:, there_and_back(known, blocks)]
    lo, hi = _rows(walk.lo, walk.rows), _rows(walk.hi, walk.rows)
    return Lists(placed(table, walk.device), lo, hi, _rows(walk.pool, walk.block_columns // 32))


def table_of(walk: Walk) -> Array:
    """The entries of a walk, and what goes with those of bits; in place where they are one array on a device."""
    kinds, pool_index = entries(walk), walk.pool_index
    arrays = [x for x in kinds.arrays if len(x)]
    n, (*_, bits), rows = kinds.number, kinds.bases, 1 + (len(pool_index) > 0)
    if walk.device is None:
        table = np.zeros((rows, max(1, n)), np.int32)
    else:
        if len(arrays) == 1 and not len(pool_index):
            (column,) = arrays
            if column.is_cuda and column.is_contiguous() and column.data_ptr() % ALIGNMENT == 0:
                return column[None]
        # What goes with a tile of another kind is not read.
        new = pool_index.new_empty if pool_index.is_cuda and n else pool_index.new_zeros
        table = new((rows, max(1, n)))
    column, *entries_of_bits = table
    if arrays and walk.device is None:
        np.concatenate(arrays, out=column[:n])
    elif arrays:
        namespace(column).cat(arrays, out=column[:n])
    for entry in entries_of_bits:
        entry[bits:] = pool_index
    return table


def _repeated(known: Lists, walk: Walk, repeat: int) -> Lists:
    """The lists of a walk of one tile of rows, which hold its rows several times."""
    lo, hi, pool = known.lo, known.hi, known.pool
    if 0 not in walk.lo.shape:
        lo, hi = (namespace(x).tile(x, (1, repeat)) for x in (lo, hi))
    if 0 not in walk.pool.shape:
        pool = copied(pool)
        rows = pool.reshape(-1, walk.block_rows, pool.shape[1])
        rows[:, : repeat * walk.rows] = namespace(rows).tile(rows[:, : walk.rows], (1, repeat, 1))
    return known._replace(lo=lo, hi=hi, pool=pool)


def there_and_back(walk: Walk, blocks: int) -> np.ndarray:
    """The places of a numpy walk's entries, the full and bits tiles of every other `blocks` rows of a head reversed."""
    lengths = row_lengths(walk).reshape(-1, walk.tiles)
    rank = np.argsort(np.argsort(-lengths, axis=1, kind="stable"), axis=1)
    rows = np.flatnonzero(rank // blocks % 2)
    base, places = 0, []
    for kind, tiles in walk.lists.items():
        place = np.arange(base, base + len(tiles.indices))
        if kind != "interval":  # the first of which the kernel takes for the leftmost
            counts, starts = tiles.counts.reshape(-1)[rows].astype(np.int64), tiles.starts.reshape(-1)[rows]
            step = np.arange(counts.sum()) - np.repeat(np.cumsum(counts) - counts, counts)
            first = np.repeat(starts.astype(np.int64), counts)
            place[first + step] = base + first + np.repeat(counts, counts) - 1 - step
        places.append(place)
        base += len(tiles.indices)
    return np.concatenate(places)


def _rows(x: Array, width: int) -> Array:
    """The array as rows of `width`, one row where it is empty, which is not read: an argument needs an address."""
    if isinstance(x, np.ndarray):
        return x.reshape(-1, width).view(np.int32) if x.size else zeros((1, max(1, width)), x)
    return x.reshape(-1, width) if x.numel() else x.new_empty((1, max(1, width)))
