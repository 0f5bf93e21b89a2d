"""The work of one launch: item descriptions and lists that the kernel reads, made once for a layout and kept.

The words of an item are those of `hopper.device.row_items`. Heads that share a list have items of their own. Nothing of
a block layout is read back from a device: one that was made there gets its items there. A gather layout is.
"""

from __future__ import annotations

from collections.abc import Mapping
from heapq import heapreplace
from typing import Any, NamedTuple

import numpy as np
import torch
from torch import Tensor

from gossamer.kernels.hopper.device.merges import MERGE, PartMerge
from gossamer.kernels.hopper.device.row_items import ITEM, LISTS, RowItem
from gossamer.layouts.block import BlockLayout
from gossamer.layouts.gather import GatherLayout, GatherWalk
from gossamer.layouts.walk import Walk
from gossamer.layouts.work_list import FEWEST_TILES, most_listed, row_lengths
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
NEAR = 4  # steps: gathered rows whose lengths differ by fewer stay in order, since their columns are likely to be near
CUT_ROWS = 0.06  # of a list, for each block, at most: rows that are cut because one takes longer than a head


class Lists(NamedTuple):
    """A walk's arrays as the kernel reads them."""

    lists: Tensor  # (2, n) int32: tile column; pool entry
    lo: Tensor  # (Bl * Hl, Q) int32
    hi: Tensor
    pool: Tensor  # (P * block_q, block_kv / 32) int32


class Work(NamedTuple):
    """The items of a launch."""

    items: Tensor  # (n, ITEM) int32: `device.row_items`, or `device.column_items`
    merges: Tensor  # (m, MERGE) int32: `device.merges`
    slots: int
    segments: Tensor | None = None  # (m, SEGMENT) int32, of items of columns


class Ranges(NamedTuple):
    """The rows of lists, or what long ones are cut into, in the order in which blocks are to draw them."""

    shape: tuple[int, int, int]  # batch elements, heads and tiles of all rows
    row: Tensor  # counted over them
    begin: Tensor
    end: Tensor
    slot: Tensor  # of the parts, -1 where a row is not cut
    merges: Tensor  # (m, MERGE) int32
    slots: int
    known: bool = True  # to the host


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
        masked, n = len(full) + len(interval), len(full) + len(interval) + len(bits)
        parts = [full, interval, bits, full.new_zeros(masked), torch.as_tensor(known.pool_index)]
        entries = torch.cat(parts).view(2, n) if n else full.new_zeros((2, 1))
        if blocks and layout.host is not None:
            entries[:, :n] = entries[:, torch.from_numpy(_there_and_back(known, blocks))]
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


def work(layout: BlockLayout | GatherLayout, copies: int, heads: int, blocks: int, split: int | None = None) -> Work:
    """The items of a layout's rows. `split` replaces the automatic limit of an item, in tiles or steps.

    Args:
        copies: how many heads, of all batch elements, share a list; heads: of one batch element.
        blocks: draw items at the same time.
    """

    def made() -> Work:
        walk = readable(layout, (layout.host or layout).rows)
        counted, (Bl, Hl), tiles = listed(walk), walk.lead, walk.tiles
        few = isinstance(walk, Walk) and walk.rows * FEW <= walk.block_rows
        lengths, most = counted.lengths, most_listed(walk) if isinstance(walk, Walk) else None
        ranges = cut_rows(walk, lengths, (Bl, Hl, tiles), copies, blocks, split, few, most)
        words: dict[int, Tensor] = {RowItem.VALID: torch.ones_like(ranges.row)}
        if Bl * Hl > 1:
            words[RowItem.LEAD] = ranges.row // tiles
        words |= list_words(counted, LISTS, ranges.row, ranges)
        if isinstance(walk, GatherWalk):
            starts, counts = (torch.as_tensor(x).reshape(-1)[ranges.row] for x in (walk.starts, walk.counts))
            words[RowItem.FIRST_COLUMN] = starts + counts.minimum(ranges.end * walk.width)
        return for_every_head(words, ranges, copies, heads, blocks, layout.rows.device)

    return _work.of(layout.rows).get_or_make((copies, heads, blocks, split), made)


def sharing(heads: int, batch: int, walk: Walk | GatherWalk) -> tuple[int, int]:
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


def readable(layout: BlockLayout | GatherLayout, walk: Any) -> Any:
    """A walk of numpy arrays, or of tensors where only the device knows it: that of a gather layout is read back."""
    return walk.on_host() if isinstance(layout, GatherLayout) else walk


class Counted(NamedTuple):
    """What the rows of all lists hold, in tiles; of gathered columns, in steps."""

    starts: Tensor  # (kinds, Bl * Hl * T): the first of each kind, counted over all lists
    counts: Tensor

    @property
    def lengths(self) -> Tensor:
        """Of each row, (Bl * Hl * T,)."""
        return self.counts.sum(0, dtype=self.counts.dtype)


def listed(walk: Walk | GatherWalk) -> Counted:
    """Starts and counts of the kinds that kernels know, in their order."""

    def of(x: Any) -> Tensor:
        found = torch.as_tensor(x).reshape(-1)
        return found.long() if walk.device is None else found

    if isinstance(walk, GatherWalk):
        starts, counts = of(walk.starts) // walk.width, -(-of(walk.counts) // walk.width)
        none = torch.zeros_like(starts)
        return Counted(torch.stack((none, none, starts)), torch.stack((none, none, counts)))
    starts_of, base = [], 0
    for tiles in walk.lists.values():
        starts_of.append(of(tiles.starts) + base if base else of(tiles.starts))
        base += len(tiles.indices)
    return Counted(torch.stack(starts_of), torch.stack([of(tiles.counts) for tiles in walk.lists.values()]))


def within(x: Tensor, before: Tensor, count: Tensor) -> Tensor:
    """What of the first `x` of a row lies in a list of `count` behind `before` others."""
    return (x - before).clamp(min=0).minimum(count)


def list_words(
    counted: Counted, places: Mapping[str, tuple[int, int]], row: Tensor, ranges: Ranges | None
) -> dict[int, Tensor]:
    """The words that say what ranges of rows list: of each kind the first entry, and how many.

    Args:
        row: (n,), counted over all lists; ranges: of them, None for whole rows.
    """
    if ranges is None or not ranges.slots:
        starts, counts = torch.stack(counted)[:, :, row]
    else:
        before = counted.counts.cumsum(0) - counted.counts
        starts, counts, before = torch.stack((*counted, before))[:, :, row]
        begin = within(ranges.begin, before, counts)
        starts, counts = starts + begin, within(ranges.end, before, counts) - begin
    words: dict[int, Tensor] = {}
    for (first, number), start, count in zip(places.values(), starts, counts, strict=True):
        words |= {first: start, number: count}
    return words


def cut_rows(
    walk: Walk | GatherWalk, lengths: Tensor, shape: tuple[int, int, int], copies: int, blocks: int,
    split: int | None, few: bool = False, most: int | None = None,
) -> Ranges:  # fmt: skip
    """The rows of a walk, longest first; cut where that is worth it.

    Args:
        shape: see `Ranges`; copies, blocks, split, few: see `item_limit`.
        most: what a row may list where only the device knows its length: see `_cut_by_capacity`.
    """
    if walk.device is not None:
        return _cut_by_capacity(walk, lengths, shape, copies, blocks, split, few, most)
    known, (batches, heads, _) = lengths.numpy(), shape
    limit = item_limit(known, batches * heads, copies, blocks, split, few)
    row, begin, end, slot, pieces = [torch.from_numpy(x) for x in cut(known, limit)]
    order = np.lexsort((slot, row, (begin - end) // (NEAR if isinstance(walk, GatherWalk) else 1)))
    (cuts,) = (pieces > 1).nonzero(as_tuple=True)
    count = pieces[cuts]
    merges = filled(place_words(cuts, shape, count.cumsum(0) - count) | {PartMerge.COUNT: count}, MERGE)
    return Ranges(shape, row[order], begin[order], end[order], slot[order], merges, int(count.sum()))


def _cut_by_capacity(
    walk: Walk | GatherWalk, lengths: Tensor, shape: tuple[int, int, int], copies: int, blocks: int,
    split: int | None, few: bool, most: int | None,
) -> Ranges:  # fmt: skip
    """The rows of a walk of tensors: each in as many equal parts as a row would have that lists `most`.

    Nothing is read back: a short row has short parts, and empty ones. Only the rows of one tile are cut, as a step of
    decoding has them, which waits for its longest row; None, or more tiles: rows stay whole.
    """
    batches, heads, tiles = shape
    parts = 1
    if most and (tiles == 1 or split is not None):
        all_full: np.ndarray = np.full(len(lengths), most)
        parts = -(-most // item_limit(all_full, batches * heads, copies, blocks, split, few))
    at = torch.arange(len(lengths) * parts, device=lengths.device)
    row, part = at // parts, at % parts
    begin, end = part * lengths[row] // parts, (part + 1) * lengths[row] // parts
    _, order = torch.sort(end - begin, descending=True, stable=True)
    if parts == 1:
        merges = torch.zeros((1, MERGE), dtype=torch.int32, device=at.device)
        return Ranges(shape, row[order], begin[order], end[order], torch.full_like(row, -1), merges, 0, known=False)
    every = torch.arange(len(lengths), device=at.device)
    merges = filled(place_words(every, shape, every * parts) | {PartMerge.COUNT: torch.full_like(every, parts)}, MERGE)
    return Ranges(shape, row[order], begin[order], end[order], at[order], merges, len(at), known=False)


def place_words(row: Tensor, shape: tuple[int, int, int], slot: Tensor) -> dict[int, Tensor]:
    """The words of items, and of merges, that say where rows are, but for those that are 0 everywhere.

    Args:
        shape: batch elements, heads, tiles.
    """
    batches, heads, tiles = shape
    words: dict[int, Tensor] = {RowItem.SLOT: slot}
    if batches * heads > 1:
        lead = row // tiles if tiles > 1 else row
        words[RowItem.BATCH] = lead // heads if heads > 1 else lead
        words |= {RowItem.HEAD: lead % heads} if heads > 1 else {}
    if tiles > 1:
        words[RowItem.TILE] = row % tiles if batches * heads > 1 else row
    return words


def for_every_head(
    words: dict[int, Tensor], ranges: Ranges, copies: int, heads: int, blocks: int, device: Any,
    segments: Tensor | None = None,
) -> Work:  # fmt: skip
    """Items and merges of every head, in the order in which blocks draw them, from those of lists that heads share.

    Long items first and short ones last, all blocks end together. But the items of a head should be drawn together,
    longest first: equally long ones walk its keys side by side, and read them from the level-2 cache. So, where blocks
    have many items, only items shorter than half of the median wait until the end; and items twice as long come first,
    if one takes longer than a head does.

    Args:
        words: of the items of `ranges`, but for their places; segments: of items of columns.
        copies, heads, blocks: see `work`.
        device: where kernels read them.
    """
    lengths: Tensor = ranges.end - ranges.begin
    n, (batches, of_one, _) = len(lengths), ranges.shape
    items = filled(place_words(ranges.row, ranges.shape, ranges.slot) | words, ITEM)
    if ranges.known or n * copies > blocks:
        size = lengths.long()
        if n * copies > ROUNDS * blocks:
            size = (lengths / lengths[n // 2].clamp(min=1)).clamp(min=2**-20).log2().int()  # towards zero
            fits = lengths[0].long() * (batches * of_one * blocks) <= SLACK * lengths.sum()
            size = torch.where(fits, size.clamp(max=0), size)
        # Heads of all batch elements in order, of each size: 32 bits hold it where there are few sizes.
        every_head, of_batch = batches * of_one * copies, of_one * heads
        of_row = items[:n, RowItem.BATCH] * of_batch + items[:n, RowItem.HEAD] - size * every_head
        copy = torch.arange(copies, device=items.device, dtype=size.dtype)
        of_copy = copy // heads * of_batch + copy % heads if copies > heads else copy
        order = torch.argsort((of_row + of_copy[:, None]).flatten(), stable=True)
    else:  # blocks draw all of them at the same time
        order = torch.arange(n * copies, device=items.device)
    every = _copied(items[order % n], order // n, copies, ranges.slots, heads) if copies > 1 else items[order]
    merges = ranges.merges
    if ranges.slots and copies > 1:
        copy = torch.arange(copies * len(merges), device=merges.device) // len(merges)
        merges = _copied(merges.repeat(copies, 1), copy, copies, ranges.slots, heads)
    segments = None if segments is None else segments.to(device)
    return Work(every.to(device), merges.to(device), ranges.slots * copies, segments)


def _copied(rows: Tensor, copy: Tensor, copies: int, slots: int, heads: int) -> Tensor:
    """Items or merges, which have these words alike, with the batch element, the head and the slots of their copies."""
    if copies > heads:
        rows[:, RowItem.BATCH] += copy // heads
    rows[:, RowItem.HEAD] += copy % heads if copies > heads else copy
    if slots:
        rows[:, RowItem.SLOT] += torch.where(rows[:, RowItem.SLOT] < 0, 0, copy * slots)
    return rows


def filled(words: Mapping[int, Tensor], width: int) -> Tensor:
    """Rows (n, width) int32 with some words written, the others 0; one row of zeros where n is 0."""
    known = next(iter(words.values()))
    if not len(known):
        return torch.zeros((1, width), dtype=torch.int32, device=known.device)
    nothing = torch.zeros_like(known)
    return torch.stack([words.get(word, nothing) for word in range(width)], 1).int()


def _rows(x: Tensor, width: int) -> Tensor:
    """The tensor as rows of `width`, one row where it is empty: a kernel argument needs an address."""
    return x.reshape(-1, width) if x.numel() else x.new_zeros((1, max(1, width)))
