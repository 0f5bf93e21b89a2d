"""The lists of a walk as kernels read them, made once and kept."""

from __future__ import annotations

from typing import NamedTuple

import numpy as np
import torch
from torch import Tensor

from gossamer.kernels.hopper.schedule.words import Entries, entries
from gossamer.kernels.launch import ALIGNMENT
from gossamer.layouts.block import BlockLayout
from gossamer.layouts.walk import Walk
from gossamer.layouts.work_list import row_lengths
from gossamer.memo import Memos


class Lists(NamedTuple):
    """A walk's arrays as the kernel reads them."""

    lists: Tensor  # (2, n) int32: tile column; pool entry of a tile of bits. (1, n) where there are none
    lo: Tensor  # (Bl * Hl, Q) int32
    hi: Tensor
    pool: Tensor  # (P * block_q, block_kv / 32) int32


_lists: Memos[Lists] = Memos()  # of walks


def lists(layout: BlockLayout, transposed: bool = False, blocks: int = 0, repeat: int = 1) -> Lists:
    """The lists of a layout of torch tensors: of its rows, or of its columns.

    With `blocks` that draw items at the same time, every other round of rows is listed backwards: it begins with the
    keys that are in the level-2 cache since the round before. Else, and where only the device knows the lists, tile
    columns ascend in each list. With `repeat` the rows of a tile are those of so many heads, one head after the other.
    """
    walk = layout.columns if transposed else layout.rows
    if layout.host is None:
        blocks = 0  # the same for all
    kept = _lists.of(walk)
    found = kept.get((blocks, repeat))
    if found is not None:
        return found
    if repeat > 1:
        found = _repeated(lists(layout, transposed, blocks), walk, repeat)
        if walk.lo.device.type == "cuda" and layout.host is not None:  # kept for every stream: others would not wait
            torch.cuda.current_stream(walk.lo.device).synchronize()
    else:
        known = walk
        if layout.host is not None:  # what is copied from there is complete for every stream
            known = layout.host.columns if transposed else layout.host.rows
        kinds, pool_index = entries(known), torch.as_tensor(known.pool_index)
        table = _table(kinds, pool_index)
        if blocks and layout.host is not None:
            n = kinds.number
            table[:, :n] = table[:, torch.from_numpy(_there_and_back(known, blocks))]
        lo, hi = _rows(walk.lo, walk.rows), _rows(walk.hi, walk.rows)
        found = Lists(table.to(walk.lo.device), lo, hi, _rows(walk.pool, walk.block_columns // 32))
    return kept.put((blocks, repeat), found)


def _table(kinds: Entries, pool_index: Tensor) -> Tensor:
    """The entries of a walk, and what goes with those of bits; in place where they are one array on a device."""
    arrays = [x for x in map(torch.as_tensor, kinds.arrays) if len(x)]
    if len(arrays) == 1 and not len(pool_index):
        (column,) = arrays
        if column.is_cuda and column.is_contiguous() and column.data_ptr() % ALIGNMENT == 0:
            return column[None]
    n, (*_, bits) = kinds.number, kinds.bases
    # What goes with a tile of another kind is not read.
    new = pool_index.new_empty if pool_index.is_cuda and n else pool_index.new_zeros
    table = new((1 + (len(pool_index) > 0), max(1, n)))
    column, *entries_of_bits = table
    if arrays:
        torch.cat(arrays, out=column[:n])
    for entry in entries_of_bits:
        entry[bits:] = pool_index
    return table


def _repeated(known: Lists, walk: Walk, repeat: int) -> Lists:
    """The lists of a walk of one tile of rows, which hold its rows several times."""
    lo, hi, pool = known.lo, known.hi, known.pool
    if walk.lo.numel():
        lo, hi = lo.repeat(1, repeat), hi.repeat(1, repeat)
    if walk.pool.numel():
        pool = pool.clone()
        rows = pool.view(-1, walk.block_rows, pool.shape[1])
        rows[:, : repeat * walk.rows] = rows[:, : walk.rows].repeat(1, repeat, 1)
    return known._replace(lo=lo, hi=hi, pool=pool)


def _there_and_back(walk: Walk, blocks: int) -> np.ndarray:
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


def _rows(x: Tensor, width: int) -> Tensor:
    """The tensor as rows of `width`, one row where it is empty, which is not read: an argument needs an address."""
    return x.reshape(-1, width) if x.numel() else x.new_empty((1, max(1, width)))
