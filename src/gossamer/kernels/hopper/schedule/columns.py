"""The work of the column kernel: items of key heads and their segments, in the words of `hopper.device.column_items`.

Made once for a layout and kept. A layout that was made on a device gets its items there, unsplit.
"""

from __future__ import annotations

from typing import Any, NamedTuple

import numpy as np
import torch
from torch import Tensor

from gossamer.kernels.hopper.device.column_items import LISTS, SEGMENT, ColumnItem, Segment
from gossamer.kernels.hopper.device.merges import MERGE
from gossamer.kernels.hopper.device.row_items import ITEM
from gossamer.kernels.hopper.schedule.rows import fill, for_every_head, item_limit, merges_of
from gossamer.layouts.block import BlockLayout
from gossamer.layouts.walk import Walk
from gossamer.layouts.work_list import row_lengths
from gossamer.layouts.work_list import split_rows as cut
from gossamer.memo import Memos


class ColumnWork(NamedTuple):
    """The items of a launch."""

    items: Tensor  # (n, ITEM) int32
    segments: Tensor  # (m, SEGMENT) int32
    merges: Tensor  # (m, MERGE) int32: `device.merges`, of key heads and key tiles
    slots: int


_work: Memos[ColumnWork] = Memos()  # of walks


def column_work(
    layout: BlockLayout, copies: int, heads: int, ratio: int, blocks: int, split: int | None = None
) -> ColumnWork:
    """The items of a layout's columns.

    Args:
        copies: how many key heads, of all batch elements, share a list; heads: of one batch element.
        ratio: query heads of a key head.
        blocks: draw items at the same time.
        split: replaces the automatic limit of tiles in an item.
    """
    key = (copies, heads, ratio, blocks, split)
    kept = _work.of(layout.columns)
    found = kept.get(key)
    if found is None:
        if layout.host is None:
            found = _device_work(layout.columns, copies, heads, ratio, blocks)
        else:
            found = _host_work(layout.host.columns, layout.columns.lo.device, copies, heads, ratio, blocks, split)
        found = kept.put(key, found)
    return found


def items_of(words: dict[int, Any], number: np.ndarray) -> np.ndarray:
    """Items (n, ITEM) of `number` segments each, which follow one another."""
    items = np.zeros((len(number), ITEM), dtype=np.int32)
    counted = {ColumnItem.SEGMENT_START: np.cumsum(number) - number, ColumnItem.SEGMENT_COUNT: number}
    return fill(items, words | counted | {ColumnItem.VALID: 1})


def _host_work(
    walk: Walk, device: torch.device, copies: int, heads: int, ratio: int, blocks: int, split: int | None
) -> ColumnWork:
    (Bl, Hl), tiles = walk.lead, walk.tiles
    per_head = Hl > 1
    groups = Hl // ratio if per_head else 1
    # Of each key tile of a key head: the lengths of the lists of its query heads, one after the other.
    lengths = row_lengths(walk).reshape(Bl, groups, -1, tiles).swapaxes(2, 3).reshape(Bl * groups * tiles, -1)
    lengths = np.broadcast_to(lengths, (len(lengths), ratio))
    totals = lengths.sum(1)
    limit = item_limit(totals, Bl * groups, copies, blocks, split)
    row, begin, end, slot, pieces = cut(totals, limit)
    before = (np.cumsum(lengths, 1) - lengths)[row]
    from_ = np.clip(begin[:, None] - before, 0, lengths[row])
    to = np.clip(end[:, None] - before, 0, lengths[row])
    item, head = np.nonzero(to > from_)
    from_, to = from_[item, head], to[item, head]
    batch, group, tile = np.unravel_index(row, (Bl, groups, tiles))
    lead = batch[item] * Hl + (group[item] * ratio + head if per_head else 0)
    words: dict[int, Any] = {Segment.HEAD: head, Segment.LEAD: lead}
    base = passed = np.int64(0)
    for kind, listed in walk.lists.items():
        counts = listed.counts.reshape(-1, tiles)[lead, tile[item]].astype(np.int64)
        starts = listed.starts.reshape(-1, tiles)[lead, tile[item]].astype(np.int64)
        first, last = np.clip(from_ - passed, 0, counts), np.clip(to - passed, 0, counts)
        entry, count = LISTS[kind]
        words[entry], words[count] = base + starts + first, last - first
        passed, base = passed + counts, base + len(listed.indices)
    segments = np.zeros((max(1, len(item)), SEGMENT), dtype=np.int32)
    fill(segments[: len(item)], words)
    words = {ColumnItem.BATCH: batch, ColumnItem.GROUP: group, ColumnItem.TILE: tile, ColumnItem.SLOT: slot}
    items = items_of(words, np.bincount(item, minlength=len(row)))
    merges, slots = merges_of(pieces, (Bl, groups, tiles))
    every, merged = for_every_head(
        torch.from_numpy(items), torch.from_numpy(end - begin), torch.from_numpy(merges), slots, Bl * groups, copies,
        heads, blocks,
    )  # fmt: skip
    return ColumnWork(every.to(device), torch.from_numpy(segments).to(device), merged.to(device), slots * copies)


def _device_work(walk: Walk, copies: int, heads: int, ratio: int, blocks: int) -> ColumnWork:
    (Bl, Hl), tiles, device = walk.lead, walk.tiles, walk.lo.device
    per_head = Hl > 1
    groups = Hl // ratio if per_head else 1
    n = Bl * groups * tiles
    row = torch.arange(n, device=device)
    batch, group, tile = row // (groups * tiles), row // tiles % groups, row % tiles
    head = torch.arange(ratio, device=device).repeat(n)
    lead = batch.repeat_interleave(ratio) * Hl
    if per_head:
        lead += group.repeat_interleave(ratio) * ratio + head
    at = lead * tiles + tile.repeat_interleave(ratio)
    words: dict[int, Any] = {Segment.HEAD: head, Segment.LEAD: lead}
    total, base = torch.zeros(n, dtype=torch.int64, device=device), 0
    for kind, listed in walk.lists.items():
        counts = listed.counts.reshape(-1)[at]
        entry, count = LISTS[kind]
        words[entry], words[count] = listed.starts.reshape(-1)[at] + base, counts
        total += counts.reshape(n, ratio).sum(1)
        base += len(listed.indices)
    segments = torch.zeros((max(1, n * ratio), SEGMENT), dtype=torch.int32, device=device)
    fill(segments[: n * ratio], words)
    words = {ColumnItem.BATCH: batch, ColumnItem.GROUP: group, ColumnItem.TILE: tile, ColumnItem.SLOT: -1}
    words |= {ColumnItem.SEGMENT_START: row * ratio, ColumnItem.SEGMENT_COUNT: ratio, ColumnItem.VALID: 1}
    items = fill(torch.zeros((n, ITEM), dtype=torch.int32, device=device), words)
    lengths, order = torch.sort(total, descending=True, stable=True)
    merges = torch.zeros((1, MERGE), dtype=torch.int32, device=device)
    every, _ = for_every_head(items[order], lengths, merges, 0, Bl * groups, copies, heads, blocks)
    return ColumnWork(every, segments, merges, 0)
