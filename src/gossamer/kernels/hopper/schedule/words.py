"""The words of items and of merges: where rows are, and what ranges of them list."""

from __future__ import annotations

from collections.abc import Mapping
from typing import Any, NamedTuple

import numpy as np

from gossamer.cute.row_items import RowItem
from gossamer.kernels.arrays import Array, int32, namespace, zeros
from gossamer.layouts.gather import GatherWalk
from gossamer.layouts.walk import Walk


class Ranges(NamedTuple):
    """The rows of lists, or what long ones are cut into, in the order in which blocks are to draw them."""

    shape: tuple[int, int, int]  # batch elements, heads and tiles of all rows
    row: Array  # counted over them
    begin: Array
    end: Array
    slot: Array  # of the parts, -1 where a row is not cut
    merges: Array  # (m, MERGE) int32
    slots: int
    known: bool = True  # to the host


class Counted(NamedTuple):
    """What the rows of all lists hold, in tiles; of gathered columns, in steps."""

    starts: Array  # (kinds, Bl * Hl * T): the first of each kind, counted over all lists
    counts: Array

    @property
    def lengths(self) -> Array:
        """Of each row, (Bl * Hl * T,)."""
        return self.counts.sum(0, dtype=self.counts.dtype)


class Entries(NamedTuple):
    """The entries of all kinds behind one another, those that two kinds share once."""

    arrays: list[Any]
    bases: tuple[int, ...]  # where those of each kind begin

    @property
    def number(self) -> int:
        return sum(len(x) for x in self.arrays)


def entries(walk: Walk) -> Entries:
    """The entries of a walk as kernels read them."""
    arrays: list[Any] = []
    bases = []
    for tiles in walk.lists.values():
        known = 0
        for x in arrays:
            if x is tiles.indices:
                break
            known += len(x)
        else:
            arrays.append(tiles.indices)
        bases.append(known)
    return Entries(arrays, tuple(bases))


def listed(walk: Walk | GatherWalk) -> Counted:
    """Starts and counts of the kinds that kernels know, in their order."""

    def of(x: Any) -> Array:
        return x.reshape(-1).astype(np.int64) if walk.device is None else x.reshape(-1)

    if isinstance(walk, GatherWalk):
        starts, counts = of(walk.starts) // walk.width, -(-of(walk.counts) // walk.width)
        xp = namespace(starts)
        none = xp.zeros_like(starts)
        return Counted(xp.stack((none, none, starts)), xp.stack((none, none, counts)))
    starts_of = []
    for tiles, base in zip(walk.lists.values(), entries(walk).bases, strict=True):
        starts_of.append(of(tiles.starts) + base if base else of(tiles.starts))
    xp = namespace(starts_of[-1])
    return Counted(xp.stack(starts_of), xp.stack([of(tiles.counts) for tiles in walk.lists.values()]))


def within(x: Array, before: Array, count: Array) -> Array:
    """What of the first `x` of a row lies in a list of `count` behind `before` others."""
    return namespace(x).minimum((x - before).clip(min=0), count)


def list_words(
    counted: Counted, places: Mapping[str, tuple[int, int]], row: Array, begin: Array | None = None,
    end: Array | None = None,
) -> dict[int, Array]:  # fmt: skip
    """The words that say what ranges of rows list: of each kind the first entry, and how many.

    Args:
        row: (n,), counted over all lists; begin, end: of the range of each, None for whole rows.
    """
    xp = namespace(row)
    if begin is None or end is None:
        starts, counts = xp.stack(counted)[:, :, row]
    else:
        before = counted.counts.cumsum(0) - counted.counts
        starts, counts, before = xp.stack((*counted, before))[:, :, row]
        skipped = within(begin, before, counts)
        starts, counts = starts + skipped, within(end, before, counts) - skipped
    words: dict[int, Array] = {}
    for (first, number), start, count in zip(places.values(), starts, counts, strict=True):
        words |= {first: start, number: count}
    return words


def place_words(row: Array, shape: tuple[int, int, int], slot: Array) -> dict[int, Array]:
    """The words of items, and of merges, that say where rows are, but for those that are 0 everywhere.

    Args:
        shape: batch elements, heads, tiles.
    """
    batches, heads, tiles = shape
    words: dict[int, Array] = {RowItem.SLOT: slot}
    if batches * heads > 1:
        lead = row // tiles if tiles > 1 else row
        words[RowItem.BATCH] = lead // heads if heads > 1 else lead
        words |= {RowItem.HEAD: lead % heads} if heads > 1 else {}
    if tiles > 1:
        words[RowItem.TILE] = row % tiles if batches * heads > 1 else row
    return words


def filled(words: Mapping[int, Array], width: int) -> Array:
    """Rows (n, width) int32 with some words written, the others 0; one row of zeros where n is 0."""
    known = next(iter(words.values()))
    if not len(known):
        return zeros((1, width), known)
    xp = namespace(known)
    nothing = xp.zeros_like(known)
    return int32(xp.stack([words.get(word, nothing) for word in range(width)], 1))
