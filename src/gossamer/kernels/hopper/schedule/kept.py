"""The work of a backward that keeps dS of pairs of tiles: where each lies, and the items of some heads at a time.

A pair lies where the lists of the rows have it, so that those of a row follow one another.
"""

from __future__ import annotations

import numpy as np

from gossamer.kernels.hopper.device.column_items import ColumnItem
from gossamer.kernels.hopper.device.row_items import RowItem
from gossamer.kernels.hopper.schedule.arrays import Array, placed
from gossamer.kernels.hopper.schedule.columns import column_work
from gossamer.kernels.hopper.schedule.lists import Lists, lists, table_of, there_and_back
from gossamer.kernels.hopper.schedule.rows import Work, sharing, work
from gossamer.kernels.hopper.schedule.words import entries
from gossamer.layouts.block import BlockLayout
from gossamer.layouts.walk import Walk
from gossamer.memo import Memos

_pairs: Memos[int | None] = Memos()  # of walks
_lists: Memos[Lists] = Memos()
_work: Memos[Work] = Memos()


def pairs(layout: BlockLayout) -> int | None:
    """The places that the pairs of tiles of all lists take.

    None where only a device knows them, and where several lists are the same entries.
    """

    host = layout.host or layout
    if host.rows.device is not None:
        return None

    def made() -> int | None:
        for walk in (host.rows, host.columns):
            _, places = _keyed(walk, (1, 1), False)
            if np.bincount(places, minlength=1).max() > 1:
                return None
        return entries(host.rows).number

    return _pairs.of(host.rows).get_or_make((), made)


def copies(layout: BlockLayout, B: int, heads: int) -> int:
    """How many times a call has the pairs of a layout."""
    return sharing(heads, B, layout.rows)[0]


def kept_lists(layout: BlockLayout, blocks: int) -> Lists:
    """The lists of a layout's columns, with the place of each pair in those of its rows (`lists` with `blocks`)."""

    def made() -> Lists:
        host = layout.host or layout
        table = table_of(host.columns)
        column, *more = table
        every = np.stack([column, *more, *[np.zeros_like(column)] * (1 - len(more)), _places(host, blocks)])
        return lists(layout, True)._replace(lists=placed(every, layout.columns.device))

    return _lists.of(layout.columns).get_or_make(blocks, made)


def _places(host: BlockLayout, blocks: int) -> Array:
    """Of each entry of the columns of a layout of numpy arrays, the place of its pair among those of the rows."""
    tiles = host.rows.tiles, host.columns.tiles
    row_keys, row_places = _keyed(host.rows, tiles, False)
    column_keys, column_places = _keyed(host.columns, tiles, True)
    by_row, by_column = np.argsort(row_keys), np.argsort(column_keys)
    assert np.array_equal(row_keys[by_row], column_keys[by_column]), "rows and columns list the same pairs of tiles"
    found = row_places[by_row]
    if blocks:
        order = there_and_back(host.rows, blocks)
        place = np.empty_like(order)
        place[order] = np.arange(len(order))
        found = place[found]
    places = np.zeros(max(1, entries(host.columns).number), np.int32)
    places[column_places[by_column]] = found
    return places


def _keyed(walk: Walk, tiles: tuple[int, int], transposed: bool) -> tuple[Array, Array]:
    """Of each listed pair a number, which is the same in both directions, and its place in the lists."""
    rows, columns = tiles
    keys, places = [], []
    for kind, base in zip(walk.lists.values(), entries(walk).bases, strict=True):
        row, at = kind.listed()
        lead, one, other = row // walk.tiles, row % walk.tiles, kind.indices[at].astype(np.int64)
        if transposed:
            one, other = other, one
        keys.append((lead * rows + one) * columns + other)
        places.append(base + at)
    return np.concatenate(keys), np.concatenate(places)


def kept_columns(
    layout: BlockLayout, first: int, heads: int, B: int, G: int, ratio: int, blocks: int, split: int | None
) -> Work:
    """The items of `heads` key heads from `first` on, counted over all batch elements."""

    def made() -> Work:
        host, shared = layout.host or layout, _shared(layout)
        several = (heads, heads) if all(shared) else sharing(G, B, layout.columns)
        found = column_work(host, *several, ratio, blocks, split)
        return _moved(found, layout, first, G, ratio, ColumnItem.PLACE, ColumnItem.NEXT_PLACE)

    return _work.of(layout.columns).get_or_make((first, heads, B, G, ratio, blocks, split), made)


def kept_rows(
    layout: BlockLayout, first: int, heads: int, B: int, H: int, blocks: int, split: int | None
) -> Work:
    """The items of `heads` query heads from `first` on, counted over all batch elements."""

    def made() -> Work:
        host, shared = layout.host or layout, _shared(layout)
        several = (heads, heads) if all(shared) else sharing(H, B, layout.rows)
        return _moved(work(host, *several, blocks, split), layout, first, H, 1, RowItem.PLACE)

    return _work.of(layout.rows).get_or_make((first, heads, B, H, blocks, split), made)


def _shared(layout: BlockLayout) -> tuple[bool, bool]:
    """Whether all batch elements, and all heads, have the same lists."""
    Bl, Hl = layout.rows.lead
    return Bl == 1, Hl == 1


def _moved(
    found: Work, layout: BlockLayout, first: int, heads: int, ratio: int, place: int, following: int | None = None
) -> Work:
    """Items and merges of heads from `first` on, of `heads` of a batch element; where their pairs begin."""
    of_batch, of_head = _shared(layout)
    size = entries((layout.host or layout).rows).number
    items, merges = found.items.copy(), found.merges.copy()
    if of_head:
        items[:, place] = items[:, RowItem.HEAD] * (ratio * size)
    elif of_batch:
        items[:, place] = items[:, RowItem.BATCH] * size
    if of_batch and of_head:
        for words in (items, merges):
            head = first + words[:, RowItem.HEAD]
            words[:, RowItem.BATCH], words[:, RowItem.HEAD] = head // heads, head % heads
    if following is not None:
        items[:, following] = size * of_head
    device = layout.rows.device
    segments = None if found.segments is None else placed(found.segments, device)
    return Work(placed(items, device), placed(merges, device), found.slots, segments)
