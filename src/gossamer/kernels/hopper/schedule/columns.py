"""The work of the column kernels: items of key heads and their segments, in the words of `cute.column_items`.

Made once for a layout and kept, cut as the rows of `hopper.schedule.rows` are.
"""

from __future__ import annotations

from typing import Any

import numpy as np

from gossamer.cute.column_items import LISTS, SEGMENT, ColumnItem, Segment
from gossamer.kernels.arrays import Array, namespace, places
from gossamer.kernels.hopper.schedule.cuts import cut_rows
from gossamer.kernels.hopper.schedule.rows import Work, for_every_head, has_kernels
from gossamer.kernels.hopper.schedule.words import filled, list_words, listed, within
from gossamer.layouts.block import BlockLayout
from gossamer.layouts.gather import GatherLayout
from gossamer.memo import Memos

_work: Memos[Work] = Memos()  # of walks


def column_work(
    layout: BlockLayout | GatherLayout, copies: int, heads: int, ratio: int, blocks: int, split: int | None = None
) -> Work:
    """The items of a layout's columns.

    Args:
        copies: how many key heads, of all batch elements, share a list; heads: of one batch element.
        ratio: query heads of a key head.
        blocks: draw items at the same time.
        split: replaces the automatic limit of an item, in tiles or steps.
    """

    def made() -> Work:
        walk = (layout.host or layout).columns
        (Bl, Hl), tiles = walk.lead, walk.tiles
        groups = Hl // ratio if Hl > 1 else 1
        if has_kernels(walk):
            from gossamer.kernels.hopper.schedule.fused_items import fused_items

            return Work(*fused_items(walk, (Bl, groups, tiles), 1, copies, heads, blocks, ratio))
        counted = listed(walk)
        # Of each key tile of a key head: the lengths of the lists of its query heads, one after the other.
        xp, rows = namespace(counted.starts), Bl * groups * tiles
        lengths = xp.swapaxes(counted.lengths.reshape(Bl, groups, -1, tiles), 2, 3).reshape(rows, -1)
        lengths = xp.broadcast_to(lengths, (rows, ratio))
        ranges = cut_rows(walk, lengths.sum(1, dtype=lengths.dtype), (Bl, groups, tiles), copies, blocks, split)
        cut: tuple[Array, ...] = ()
        if ranges.known:  # segments without entries are left out; on a device, which tells no number of them, kept
            lengths = lengths[ranges.row]
            before = lengths.cumsum(1) - lengths
            begin, end = (within(x[:, None], before, lengths) for x in (ranges.begin, ranges.end))
            some = end > begin
            at = np.flatnonzero(some)
            number = some.sum(1)
            cut = begin.flatten()[at], end.flatten()[at]
        else:
            at = places(len(ranges.row) * ratio, ranges.row)
            number = xp.full_like(ranges.row, ratio)
        row, head = ranges.row[at // ratio], at % ratio
        lead = row // (groups * tiles) * Hl + (row // tiles % groups * ratio + head if Hl > 1 else 0)
        words: dict[int, Any] = {Segment.HEAD: head, Segment.LEAD: lead}
        words |= list_words(counted, LISTS, lead * tiles + row % tiles, *cut)
        segments = filled(words, SEGMENT)
        words = {ColumnItem.SEGMENT_START: number.cumsum(0) - number, ColumnItem.SEGMENT_COUNT: number}
        words[ColumnItem.VALID] = xp.ones_like(number)
        return for_every_head(words, ranges, copies, heads, blocks, layout.columns.device, segments)

    return _work.of(layout.columns).get_or_make((copies, heads, ratio, blocks, split), made)
