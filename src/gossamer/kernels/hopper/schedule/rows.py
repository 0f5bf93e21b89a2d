"""The work of one launch: item descriptions and lists that the kernel reads, made once for a layout and kept.

The words of an item are those of `hopper.device.row_items`. Heads that share a list have items of their own. Nothing is
read back from a device: a layout that was made there gets its items there, unsplit.
"""

from __future__ import annotations

from heapq import heapreplace
from typing import Any, NamedTuple

import numpy as np
import torch
from torch import Tensor

from gossamer.kernels.hopper.device.merges import MERGE, PartMerge
from gossamer.kernels.hopper.device.row_items import ITEM, LISTS, RowItem
from gossamer.layouts import items as given
from gossamer.layouts.block import BlockLayout
from gossamer.layouts.walk import Walk
from gossamer.layouts.work_list import FEWEST_TILES, row_lengths, work_items
from gossamer.layouts.work_list import split_rows as cut
from gossamer.memo import Memos

START = 3  # what an item costs beside its tiles, in tiles
PART = 0.25  # what merging a part costs, in tiles
LEAST_PART = 4  # tiles of a part of one of few rows
MERGE_CALL = 6  # what the second launch costs, in tiles: 10 us, where a tile of 128 x 128 takes 1.7
PARTS_A_TILE = 40  # parts that are written, read and merged in the time of a tile
FEW = 4  # where at most one row in so many of a tile exists, its parts cost as much less
FEW_CALL = 7  # MERGE_CALL there: 3.5 us, where a tile takes 0.5
ROUNDS = 8  # items for each block, up to which their order minds no cache and cutting all rows is considered
SLACK = 1.1  # of a head's share of a block's time: what an item may take where heads follow one another
CUT_ROWS = 0.06  # of a list, for each block, at most: rows that are cut because one takes longer than a head


class Lists(NamedTuple):
    """A walk's arrays as the kernel reads them."""

    lists: Tensor  # (2, n) int32: tile column; pool entry
    lo: Tensor  # (Bl * Hl, Q) int32
    hi: Tensor
    pool: Tensor  # (P * block_q, block_kv / 32) int32


class Work(NamedTuple):
    """The items of a launch."""

    items: Tensor  # (n, ITEM) int32: `device.row_items`
    merges: Tensor  # (m, MERGE) int32: `device.merges`
    slots: int


_lists: Memos[Lists] = Memos()  # of walks
_work: Memos[Work] = Memos()


def lists(layout: BlockLayout, transposed: bool = False, blocks: int = 0, repeat: int = 1) -> Lists:
    """The lists of a layout of torch tensors: of its rows, or of its columns.

    With `blocks` that draw items at the same time, every other round of rows is listed backwards: it begins with the
    keys that are in the level-2 cache since the round before. Else, and where only the device knows the lists, tile
    columns ascend in each list. With `repeat` the rows of a tile are those of so many heads, one head after the other.
    """
    walk = layout.columns if transposed else layout.rows
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
        full, interval, bits = (torch.as_tensor(tiles.indices) for tiles in known.lists.values())
        listed, masked = torch.cat((full, interval, bits)), len(full) + len(interval)
        entries = torch.zeros((2, max(1, len(listed))), dtype=torch.int32, device=listed.device)
        columns, pool_entries = entries
        columns[: len(listed)] = listed
        pool_entries[masked : len(listed)] = torch.as_tensor(known.pool_index)
        if blocks and layout.host is not None:
            entries[:, : len(listed)] = entries[:, torch.from_numpy(_there_and_back(known, blocks))]
        lo, hi = _rows(walk.lo, walk.rows), _rows(walk.hi, walk.rows)
        found = Lists(entries.to(walk.lo.device), lo, hi, _rows(walk.pool, walk.block_columns // 32))
    return kept.put((blocks, repeat), found)


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


def work(layout: BlockLayout, copies: int, heads: int, blocks: int, split: int | None = None) -> Work:
    """The items of a layout. `split` replaces the automatic limit of tiles in an item.

    Args:
        copies: how many heads, of all batch elements, share a list; heads: of one batch element.
        blocks: draw items at the same time.
    """
    key = (copies, heads, blocks, split)
    kept = _work.of(layout.rows)
    found = kept.get(key)
    if found is None:
        if layout.host is None:
            found = _device_work(layout.rows, copies, heads, blocks)
        else:
            found = _host_work(layout.host.rows, layout.rows.lo.device, copies, heads, blocks, split)
        found = kept.put(key, found)
    return found


def sharing(heads: int, batch: int, walk: Walk) -> tuple[int, int]:
    """How many heads of all batch elements share a list of a walk, and how many of one batch element."""
    Bl, Hl = walk.lead
    shared = heads if Hl == 1 else 1
    return shared * (batch if Bl == 1 else 1), shared


def item_limit(
    lengths: np.ndarray, leads: int, copies: int, blocks: int, split: int | None = None, few: bool = False
) -> int:
    """The most tiles in an item, for the rows of `leads` lists that are computed `copies` times.

    Rows are cut where one takes longer than each block works. A few rows that take longer than a head does are cut as
    well: heads can follow one another then (see `for_every_head`). Where there are few rows, whole rounds of parts may
    take less, merging included. `few`: see `whole_rounds`.
    """
    longest = max(1, int(lengths.max(initial=0)))
    if split is not None:
        return min(split, longest)
    rows = len(lengths) * copies
    if rows <= blocks:
        return max(1, whole_rounds(rows, longest, blocks, few))
    head = int(lengths.sum()) / (leads * blocks)
    share = min(longest, max(FEWEST_TILES, int(head * leads * copies)))
    if rows > ROUNDS * blocks:
        longer = int((lengths > SLACK * head).sum()) / leads
        return min(share, max(FEWEST_TILES, int(SLACK * head))) if longer <= CUT_ROWS * blocks else share

    def time(limit: int) -> float:
        _, begin, end, slot, _ = cut(lengths, limit)
        parts = int((slot >= 0).sum()) * copies
        busy = [0] * blocks
        for length in np.repeat(end - begin + START, copies).tolist():
            heapreplace(busy, busy[0] + length)
        return max(busy) + (MERGE_CALL + parts / PARTS_A_TILE if parts else 0)

    return min(sorted({share, *(-(-longest // parts) for parts in range(1, 5))}, reverse=True), key=time)


def whole_rounds(rows: int, longest: int, blocks: int, few: bool = False) -> int:
    """The most tiles in an item, for no more rows than blocks: whole rounds of items, and few parts to merge.

    `few`: at most a quarter of each tile's rows exist, and no others are written and merged.
    """
    call, share = (FEW_CALL, 1 / FEW) if few else (MERGE_CALL, 1.0)

    def time(parts: int) -> float:
        merging = call + share * rows * parts / PARTS_A_TILE if parts > 1 else 0
        return -(-rows * parts // blocks) * (-(-longest // parts) + START) + share * PART * parts + merging

    return -(-longest // min(range(1, max(1, longest // int(share * LEAST_PART)) + 1), key=time))


def for_every_head(
    items: Tensor, lengths: Tensor, merges: Tensor, slots: int, leads: int, copies: int, heads: int, blocks: int
) -> tuple[Tensor, Tensor]:
    """Items and merges of every head, in the order in which blocks draw them, from those of lists that heads share.

    Long items first and short ones last, all blocks end together. But the items of a head should be drawn together,
    longest first: equally long ones walk its keys side by side, and read them from the level-2 cache. So, where blocks
    have many items, only items shorter than half of the median wait until the end; and items twice as long come first,
    if one takes longer than a head does.

    Args:
        items: (n, ITEM), longest first; lengths: (n,) their tiles.
        merges: (m, MERGE); slots: theirs in all.
        leads: lists; copies, heads, blocks: see `work`.
    """
    n, device = len(items), items.device
    place = torch.arange(n * copies, device=device)
    at, copy = place % n, place // n
    every = _copied(items[at], copy, slots, heads)
    size = lengths.long()
    if len(every) > ROUNDS * blocks:
        size = (lengths / lengths[n // 2].clamp(min=1)).clamp(min=2**-20).log2().long()  # towards zero
        fits = lengths[0] * leads * blocks <= SLACK * lengths.sum()
        size = torch.where(fits, size.clamp(max=0), size)
    order = torch.argsort(
        (every[:, RowItem.BATCH].long() << 20) + every[:, RowItem.HEAD] - (size[at] << 40), stable=True
    )
    if slots:
        merges = _copied(merges.repeat(copies, 1), torch.arange(copies).repeat_interleave(len(merges)), slots, heads)
    return every[order], merges


def _copied(rows: Tensor, copy: Tensor, slots: int, heads: int) -> Tensor:
    """Items or merges, which have these words alike, with the batch element, the head and the slots of their copies."""
    rows[:, RowItem.BATCH] += copy // heads
    rows[:, RowItem.HEAD] += copy % heads
    rows[:, RowItem.SLOT] += torch.where(rows[:, RowItem.SLOT] < 0, 0, copy * slots)
    return rows


def fill(rows: Any, words: dict[int, Any]) -> Any:
    """The rows of an array with some words written."""
    for word, value in words.items():
        rows[:, word] = value
    return rows


def merges_of(pieces: np.ndarray, shape: tuple[int, int, int]) -> tuple[np.ndarray, int]:
    """Merges (m, MERGE) of rows that are cut, and their slots. `shape`: batch elements, heads and tiles of `pieces`."""
    cuts = np.flatnonzero(pieces > 1)
    batch, head, tile = np.unravel_index(cuts, shape)
    count = pieces[cuts]
    words = {PartMerge.BATCH: batch, PartMerge.HEAD: head, PartMerge.TILE: tile}
    merges = np.zeros((max(1, len(cuts)), MERGE), dtype=np.int32)
    fill(merges[: len(cuts)], words | {PartMerge.SLOT: np.cumsum(count) - count, PartMerge.COUNT: count})
    return merges, int(count.sum())


def _rows(x: Tensor, width: int) -> Tensor:
    """The tensor as rows of `width`, one row where it is empty: a kernel argument needs an address."""
    return x.reshape(-1, width) if x.numel() else x.new_zeros((1, max(1, width)))


def _host_work(walk: Walk, device: torch.device, copies: int, heads: int, blocks: int, split: int | None) -> Work:
    (Bl, Hl), few = walk.lead, walk.rows * FEW <= walk.block_rows
    leads = Bl * Hl
    made = work_items(walk, item_limit(row_lengths(walk).reshape(-1), leads, copies, blocks, split, few))
    lead, tile, begin, end, slot = (
        made.items[:, word].astype(np.int64) for word in (given.LEAD, given.TILE, given.BEGIN, given.END, given.SLOT)
    )
    words: dict[int, Any] = {RowItem.BATCH: lead // Hl, RowItem.HEAD: lead % Hl, RowItem.TILE: tile, RowItem.SLOT: slot}
    base = before = np.int64(0)
    for kind, tiles in walk.lists.items():
        counts = tiles.counts.reshape(-1, walk.tiles)[lead, tile]
        starts = tiles.starts.reshape(-1, walk.tiles)[lead, tile]
        from_, to = np.clip(begin - before, 0, counts), np.clip(end - before, 0, counts)
        first, number = LISTS[kind]
        words[first], words[number] = base + starts + from_, to - from_
        before, base = before + counts, base + len(tiles.indices)
    items = fill(np.zeros((len(lead), ITEM), dtype=np.int32), words | {RowItem.LEAD: lead, RowItem.VALID: 1})
    merges = np.zeros((max(1, len(made.merges)), MERGE), dtype=np.int32)
    which, cut_tile, slot, count = (made.merges[:, word] for word in (given.LEAD, given.TILE, given.FIRST, given.COUNT))
    words = {PartMerge.BATCH: which // Hl, PartMerge.HEAD: which % Hl, PartMerge.TILE: cut_tile, PartMerge.SLOT: slot}
    fill(merges[: len(which)], words | {PartMerge.COUNT: count})
    every, merged = for_every_head(
        torch.from_numpy(items), torch.from_numpy(end - begin), torch.from_numpy(merges), made.slots, leads, copies,
        heads, blocks,
    )  # fmt: skip
    return Work(every.to(device), merged.to(device), made.slots * copies)


def _device_work(walk: Walk, copies: int, heads: int, blocks: int) -> Work:
    counts = [tiles.counts.reshape(-1).long() for tiles in walk.lists.values()]
    starts = [tiles.starts.reshape(-1).long() for tiles in walk.lists.values()]
    n, device = counts[0].shape[0], counts[0].device
    row = torch.arange(n, device=device)
    lead = row // walk.tiles
    Bl, Hl = walk.lead
    words: dict[int, Any] = {
        RowItem.BATCH: lead // Hl,
        RowItem.HEAD: lead % Hl,
        RowItem.TILE: row % walk.tiles,
        RowItem.SLOT: -1,
    }
    base = 0
    for i, (kind, tiles) in enumerate(walk.lists.items()):
        first, number = LISTS[kind]
        words[first], words[number] = starts[i] + base, counts[i]
        base += len(tiles.indices)
    items = torch.zeros((n, ITEM), dtype=torch.int64, device=device)
    fill(items, words | {RowItem.LEAD: lead, RowItem.VALID: 1})
    lengths, order = torch.sort(sum(counts), descending=True, stable=True)
    merges = torch.zeros((1, MERGE), dtype=torch.int32, device=device)
    every, _ = for_every_head(items[order].int(), lengths, merges, 0, Bl * Hl, copies, heads, blocks)
    return Work(every, merges, 0)
