"""The work of a backward that keeps dS of pairs of tiles: where each lies, and the items of some heads at a time.

A pair lies where the lists of the rows have it, so that those of a row follow one another.
"""

from __future__ import annotations

from collections.abc import Callable
from typing import NamedTuple

import numpy as np

from gossamer.cute.column_items import ColumnItem
from gossamer.cute.row_items import RowItem
from gossamer.kernels.arrays import Array, placed
from gossamer.kernels.hopper.schedule.columns import column_work
from gossamer.kernels.hopper.schedule.lists import Lists, lists, table_of, there_and_back
from gossamer.kernels.hopper.schedule.rows import Work, sharing, work
from gossamer.kernels.hopper.schedule.words import entries
from gossamer.layouts.block import BlockLayout
from gossamer.layouts.walk import Walk
from gossamer.memo import Memos


class Turns(NamedTuple):
    """The work of a kernel that takes some heads at a time."""

    works: tuple[Work, ...]  # items and segments of each time
    merges: Array  # of all
    slots: int


_pairs: Memos[int | None] = Memos()  # of walks
_lists: Memos[Lists] = Memos()
_turns: Memos[Turns] = Memos()


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


def kept_lists(layout: BlockLayout, blocks: int) -> Lists:
    """The lists of a layout's columns, with the place of each pair in those of its rows (`lists` with `blocks`)."""

    def made() -> Lists:
        host = layout.host or layout
        column, *more = table_of(host.columns)
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


def kept_columns(layout: BlockLayout, heads: int, B: int, G: int, ratio: int, blocks: int, split: int | None) -> Turns:
    """The items of `heads` key heads at a time, of all batch elements; the rest as for `column_work`."""
    host, places = layout.host or layout, (ColumnItem.PLACE, ColumnItem.NEXT_PLACE)

    def made() -> Turns:
        def make(n: int, of_one: int) -> Work:
            return column_work(host, n, of_one, ratio, blocks, split)

        return _in_turn(layout, heads, B, G, ratio, places, make)

    return _turns.of(layout.columns).get_or_make((heads, B, G, ratio, blocks, split), made)


def kept_rows(layout: BlockLayout, heads: int, B: int, H: int, blocks: int, split: int | None) -> Turns:
    """The items of `heads` query heads at a time, of all batch elements; the rest as for `work`."""
    host, places = layout.host or layout, (RowItem.PLACE, RowItem.SCRATCH)

    def made() -> Turns:
        def make(n: int, of_one: int) -> Work:
            return work(host, n, of_one, blocks, split)

        return _in_turn(layout, heads, B, H, 1, places, make)

    return _turns.of(layout.rows).get_or_make((heads, B, H, blocks, split), made)


def _in_turn(
    layout: BlockLayout, at_once: int, B: int, heads: int, ratio: int, places: tuple[int, int],
    make: Callable[[int, int], Work],
) -> Turns:  # fmt: skip
    """Work of so many heads at a time, each with the place where its pairs begin.

    Args:
        heads: of a batch element; ratio: query heads of each.
        places: the words for the place, and for how far on that of the next query head is.
        make: the work of so many heads of all batch elements, and of one, that share a list; of numpy arrays.
    """
    of_batch, of_head = (n == 1 for n in layout.rows.lead)
    size, device = entries((layout.host or layout).rows).number, layout.rows.device
    place, following = places
    works, merges, slots = [], [], 0
    for first in range(0, B * heads, at_once):
        n = min(at_once, B * heads - first)
        found = make(n, n) if of_batch and of_head else make(*sharing(heads, B, layout.rows))
        items, of_parts = found.items.copy(), found.merges.copy()
        copy = items[:, RowItem.HEAD] * ratio if of_head else items[:, RowItem.BATCH] if of_batch else 0
        items[:, place], items[:, following] = copy * size, size * of_head
        if of_batch and of_head:
            for words in (items, of_parts):
                head = first + words[:, RowItem.HEAD]
                words[:, RowItem.BATCH], words[:, RowItem.HEAD] = head // heads, head % heads
        items[items[:, RowItem.SLOT] >= 0, RowItem.SLOT] += slots
        of_parts[:, RowItem.SLOT] += slots
        slots += found.slots
        merges += [of_parts] * (found.slots > 0)
        segments = None if found.segments is None else placed(found.segments, device)
        works.append(found._replace(items=placed(items, device), segments=segments))
    every = np.concatenate(merges or [of_parts])
    return Turns(tuple(works), placed(every, device), slots)
