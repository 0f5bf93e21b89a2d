"""The items of a launch of a gather kernel, in the words of those of block layouts. Made once for a walk and kept.

A layout that was made on a device is read back for them.
"""

from __future__ import annotations

from typing import Any

import numpy as np
import torch

from gossamer.kernels.hopper.device.column_items import SEGMENT, ColumnItem, Segment
from gossamer.kernels.hopper.device.row_items import ITEM, RowItem
from gossamer.kernels.hopper.schedule.columns import ColumnWork, items_of
from gossamer.kernels.hopper.schedule.rows import Work, fill, for_every_head, item_limit, merges_of
from gossamer.layouts.gather import GatherLayout, GatherWalk
from gossamer.layouts.work_list import split_rows as cut
from gossamer.memo import Memos

NEAR = 4  # lengths that differ by fewer steps stay in the order of rows, whose columns are likely to be near each other

_rows: Memos[Work] = Memos()  # of walks
_columns: Memos[ColumnWork] = Memos()


def row_work(layout: GatherLayout, copies: int, heads: int, blocks: int, split: int | None = None) -> Work:
    """The items of a layout's rows; arguments as for `hopper.schedule.rows.work`."""
    key = (copies, heads, blocks, split)
    kept = _rows.of(layout.rows)
    found = kept.get(key)
    if found is None:
        walk = layout.host.rows if layout.host is not None else layout.rows.on_host()
        found = kept.put(key, _row_work(walk, layout.rows.indices.device, *key))
    return found


def column_work(
    layout: GatherLayout, copies: int, heads: int, ratio: int, blocks: int, split: int | None = None
) -> ColumnWork:
    """The items of a layout's columns; arguments as for `hopper.schedule.columns.column_work`."""
    key = (copies, heads, ratio, blocks, split)
    kept = _columns.of(layout.columns)
    found = kept.get(key)
    if found is None:
        walk = layout.host.columns if layout.host is not None else layout.columns.on_host()
        found = kept.put(key, _column_work(walk, layout.columns.indices.device, *key))
    return found


def _steps(walk: GatherWalk) -> np.ndarray:
    """Steps of each list (Bl, Hl, T)."""
    return -(-walk.counts.astype(np.int64) // walk.width)


def _row_work(walk: GatherWalk, device: torch.device, copies: int, heads: int, blocks: int, split: int | None) -> Work:
    (Bl, Hl), width = walk.lead, walk.width
    lengths, counts, starts = (x.astype(np.int64).reshape(-1) for x in (_steps(walk), walk.counts, walk.starts))
    row, begin, end, slot, pieces = cut(lengths, item_limit(lengths, Bl * Hl, copies, blocks, split))
    lead, tile = np.divmod(row, walk.tiles)
    word = RowItem
    words: dict[int, Any] = {word.BATCH: lead // Hl, word.HEAD: lead % Hl, word.TILE: tile, word.SLOT: slot}
    words |= {word.BITS_START: starts[row] // width + begin, word.BITS_COUNT: end - begin}
    words |= {word.FIRST_COLUMN: starts[row] + np.minimum(counts[row], end * width), word.LEAD: lead, word.VALID: 1}
    items = fill(np.zeros((len(row), ITEM), dtype=np.int32), words)
    return _ordered(items, end - begin, pieces, (Bl, Hl, walk.tiles), copies, heads, blocks, device)


def _column_work(
    walk: GatherWalk, device: torch.device, copies: int, heads: int, ratio: int, blocks: int, split: int | None
) -> ColumnWork:
    (Bl, Hl), tiles = walk.lead, walk.tiles
    groups = Hl // ratio if Hl > 1 else 1
    # Of each group of keys of a key head: the lengths of the lists of its query heads, one after the other.
    lengths = _steps(walk).reshape(Bl, groups, -1, tiles).swapaxes(2, 3).reshape(Bl * groups * tiles, -1)
    lengths = np.broadcast_to(lengths, (len(lengths), ratio))
    totals = lengths.sum(1)
    row, begin, end, slot, pieces = cut(totals, item_limit(totals, Bl * groups, copies, blocks, split))
    before = (np.cumsum(lengths, 1) - lengths)[row]
    from_, to = (np.clip(x[:, None] - before, 0, lengths[row]) for x in (begin, end))
    item, head = np.nonzero(to > from_)
    batch, group, tile = np.unravel_index(row, (Bl, groups, tiles))
    lead = batch[item] * Hl + (group[item] * ratio + head if Hl > 1 else 0)
    starts = walk.starts.reshape(-1, tiles)[lead, tile[item]].astype(np.int64) // walk.width
    first, last = from_[item, head], to[item, head]
    segments = np.zeros((max(1, len(item)), SEGMENT), dtype=np.int32)
    words: dict[int, Any] = {Segment.HEAD: head, Segment.LEAD: lead}
    words |= {Segment.BITS_START: starts + first, Segment.BITS_COUNT: last - first}
    fill(segments[: len(item)], words)
    words = {ColumnItem.BATCH: batch, ColumnItem.GROUP: group, ColumnItem.TILE: tile, ColumnItem.SLOT: slot}
    items = items_of(words, np.bincount(item, minlength=len(row)))
    work = _ordered(items, end - begin, pieces, (Bl, groups, tiles), copies, heads, blocks, device)
    return ColumnWork(work.items, torch.from_numpy(segments).to(device), work.merges, work.slots)


def _ordered(
    items: np.ndarray, lengths: np.ndarray, pieces: np.ndarray, shape: tuple[int, int, int], copies: int, heads: int,
    blocks: int, device: torch.device,
) -> Work:  # fmt: skip
    """Items of every head. `shape`: batch elements, heads and groups of rows of `pieces`."""
    merges, slots = merges_of(pieces, shape)
    batch_elements, of_one, _ = shape
    word = RowItem  # items of columns have these words at the same places
    order = np.lexsort((*(items[:, i] for i in (word.SLOT, word.TILE, word.HEAD, word.BATCH)), -lengths // NEAR))
    every, merged = for_every_head(
        torch.from_numpy(items[order]), torch.from_numpy(lengths[order]), torch.from_numpy(merges), slots,
        batch_elements * of_one, copies, heads, blocks,
    )  # fmt: skip
    return Work(every.to(device), merged.to(device), slots * copies)
