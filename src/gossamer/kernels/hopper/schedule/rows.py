"""The work of one launch: item descriptions that the kernel reads, made once for a layout and kept.

The words of an item are those of `cute.row_items`. Heads that share a list have items of their own. Nothing is
read back from a device: a layout that was made there gets its items there.
"""

from __future__ import annotations

from typing import Any, NamedTuple

from gossamer.cute.row_items import ITEM, LISTS, RowItem
from gossamer.kernels.arrays import Array, ascending, int32, int64, namespace, placed, places, ratio
from gossamer.kernels.hopper.schedule.cuts import FEW, ROUNDS, SLACK, cut_rows, parts_by_capacity
from gossamer.kernels.hopper.schedule.words import Ranges, filled, list_words, listed, place_words
from gossamer.kernels.packages import has_triton
from gossamer.layouts.block import BlockLayout
from gossamer.layouts.gather import GatherLayout, GatherWalk
from gossamer.layouts.walk import Walk
from gossamer.layouts.work_list import most_listed
from gossamer.memo import Memos


class Work(NamedTuple):
    """The items of a launch."""

    items: Array  # (n, ITEM) int32: `cute.row_items`, or `cute.column_items`
    merges: Array  # (m, MERGE) int32: `cute.merges`
    slots: int
    segments: Array | None = None  # (m, SEGMENT) int32, of items of columns


_work: Memos[Work] = Memos()


def work(layout: BlockLayout | GatherLayout, copies: int, heads: int, blocks: int, split: int | None = None) -> Work:
    """The items of a layout's rows. `split` replaces the automatic limit of an item, in tiles or steps.

    Args:
        copies: how many heads, of all batch elements, share a list; heads: of one batch element.
        blocks: draw items at the same time.
    """

    def made() -> Work:
        walk = (layout.host or layout).rows
        (Bl, Hl), tiles = walk.lead, walk.tiles
        few = isinstance(walk, Walk) and walk.rows * FEW <= walk.block_rows
        most = most_listed(walk) if isinstance(walk, Walk) else None
        if has_kernels(walk):
            from gossamer.kernels.hopper.schedule.fused_items import fused_items

            parts = parts_by_capacity((Bl, Hl, tiles), copies, blocks, split, few, most)
            return Work(*fused_items(walk, (Bl, Hl, tiles), parts, copies, heads, blocks))
        counted = listed(walk)
        lengths = counted.lengths
        ranges = cut_rows(walk, lengths, (Bl, Hl, tiles), copies, blocks, split, few, most)
        xp = namespace(ranges.row)
        words: dict[int, Array] = {RowItem.VALID: xp.ones_like(ranges.row)}
        if Bl * Hl > 1:
            words[RowItem.LEAD] = ranges.row // tiles
        cut = (ranges.begin, ranges.end) if ranges.slots else ()
        words |= list_words(counted, LISTS, ranges.row, *cut)
        if isinstance(walk, GatherWalk):
            starts, counts = (x.reshape(-1)[ranges.row] for x in (walk.starts, walk.counts))
            words[RowItem.FIRST_COLUMN] = starts + xp.minimum(counts, ranges.end * walk.width)
        return for_every_head(words, ranges, copies, heads, blocks, layout.rows.device)

    return _work.of(layout.rows).get_or_make((copies, heads, blocks, split), made)


def has_kernels(walk: Walk | GatherWalk) -> bool:
    """Whether the items of a walk are made by kernels: where only a GPU knows what it lists."""
    return walk.device is not None and walk.device.type == "cuda" and has_triton()


def sharing(heads: int, batch: int, walk: Walk | GatherWalk) -> tuple[int, int]:
    """How many heads of all batch elements share a list of a walk, and how many of one batch element."""
    Bl, Hl = walk.lead
    shared = heads if Hl == 1 else 1
    return shared * (batch if Bl == 1 else 1), shared


def for_every_head(
    words: dict[int, Array], ranges: Ranges, copies: int, heads: int, blocks: int, device: Any,
    segments: Array | None = None,
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
    lengths: Array = ranges.end - ranges.begin
    xp = namespace(lengths)
    n, (batches, of_one, _) = len(lengths), ranges.shape
    items = filled(place_words(ranges.row, ranges.shape, ranges.slot) | words, ITEM)
    if ranges.known or n * copies > blocks:
        size = int64(lengths)
        if n * copies > ROUNDS * blocks:
            share = ratio(lengths, lengths[n // 2 : n // 2 + 1].clip(min=1))
            size = int32(xp.log2(share.clip(min=2**-20)))
            fits = int64(lengths[:1]) * (batches * of_one * blocks) <= SLACK * lengths.sum()
            size = xp.where(fits, size.clip(max=0), size)
        # Heads of all batch elements in order, of each size: 32 bits hold it where there are few sizes.
        every_head, of_batch = batches * of_one * copies, of_one * heads
        of_row = items[:n, RowItem.BATCH] * of_batch + items[:n, RowItem.HEAD] - size * every_head
        copy = places(copies, items)
        copy = copy if size.dtype == copy.dtype else int32(copy)
        of_copy = copy // heads * of_batch + copy % heads if copies > heads else copy
        order = ascending((of_row + of_copy[:, None]).flatten())
    else:  # blocks draw all of them at the same time
        order = places(n * copies, items)
    every = _copied(items[order % n], order // n, copies, ranges.slots, heads) if copies > 1 else items[order]
    merges = ranges.merges
    if ranges.slots and copies > 1:
        copy = places(copies * len(merges), merges) // len(merges)
        merges = _copied(xp.tile(merges, (copies, 1)), copy, copies, ranges.slots, heads)
    segments = None if segments is None else placed(segments, device)
    return Work(placed(every, device), placed(merges, device), ranges.slots * copies, segments)


def _copied(rows: Array, copy: Array, copies: int, slots: int, heads: int) -> Array:
    """Items or merges, which have these words alike, with the batch element, the head and the slots of their copies."""
    if copies > heads:
        rows[:, RowItem.BATCH] += copy // heads
    rows[:, RowItem.HEAD] += copy % heads if copies > heads else copy
    if slots:
        rows[:, RowItem.SLOT] += namespace(rows).where(rows[:, RowItem.SLOT] < 0, 0, copy * slots)
    return rows
