"""The tiles of a call over pages: queries of one sequence each, and the tiles of keys that a sequence lists."""

from __future__ import annotations

import math
from collections.abc import Sequence
from typing import NamedTuple

import torch
from torch import Tensor

from gossamer.layouts import BlockLayout
from gossamer.layouts.device import KeyTiles, Progression, most_mixed, page_layout
from gossamer.patterns.reach import Reach
from gossamer.torch import device_arrays
from gossamer.torch.structure.base import narrow
from gossamer.torch.structure.inputs import Tile


class Sequences(NamedTuple):
    """R sequences, aligned at the end."""

    cu: Tensor  # (R + 1,) int32, ascending: the tokens of each
    used: Tensor  # (R,) int32: its keys
    reaches: tuple[Reach, ...]  # those of `Rule.seeing`
    slots: int  # of each, more than any has keys

    @property
    def lengths(self) -> Tensor:
        """Tokens of each, (R,)."""
        return self.cu.diff()

    def seen(self) -> Tensor:
        """Which slots some query of a sequence may see, (R, slots): for each reach a run, whatever its step."""
        first, last = self.used - self.lengths, self.used - 1
        slot = numbers(self.slots, first)
        found = torch.zeros((len(first), self.slots), dtype=torch.bool, device=first.device)
        for reach in self.reaches:
            lo, hi = reach.bounds(first, self.slots).lo, reach.bounds(last, self.slots).hi
            found |= (slot >= lo[:, None]) & (slot < hi[:, None])
        return found & (slot < self.used[:, None]) & (self.lengths > 0)[:, None]


class QueryTiles(NamedTuple):
    """Tiles of queries of one sequence each: rows are its tokens, and of a token the heads of a group."""

    sequence: Tensor  # (tiles,) int32
    there: Tensor  # (tiles,) whether it has queries; the last one never has
    token: Tensor  # (tiles, block_q) int32: of each row; rows behind the last token of a sequence repeat it
    head: Tensor  # (tiles, block_q) int32: of a group
    position: Tensor  # (tiles, block_q) int32, nowhere decreasing
    place: Tensor  # (T * ratio,) int32: the row of each token and head of a group


def numbers(n: int, like: Tensor) -> Tensor:
    """0 to n - 1, int32."""
    return torch.arange(n, dtype=torch.int32, device=like.device)


def query_tiles(of: Sequences, T: int, ratio: int, block_q: int) -> QueryTiles:
    """The tiles of T tokens, with room for any lengths of the sequences.

    Args:
        ratio: query heads of a key head.
    """
    cu, lengths, (R,) = of.cu, of.lengths, of.used.shape
    tiles = (lengths * ratio + (block_q - 1)) // block_q
    ends = tiles.cumsum(0, dtype=torch.int32)
    edges = torch.cat([tiles.new_zeros(1), ends])
    most = -(-T * ratio // block_q) + R  # one more than there are: all but one sequence may end within a tile
    tile = numbers(most, cu)
    sequence = torch.searchsorted(ends, tile, right=True, out_int32=True).clamp(max=R - 1)
    row = ((tile - edges[sequence]) * block_q)[:, None] + numbers(block_q, cu)
    row = torch.minimum(row, (lengths[sequence] * ratio - 1)[:, None]).clamp(min=0)
    step = row // ratio
    at = numbers(T, cu)
    owner = torch.searchsorted(cu[1:], at, right=True, out_int32=True).clamp(max=R - 1)
    first = edges[owner] * block_q + (at - cu[owner]) * ratio
    first = first.masked_fill((at < cu[0]) | (at >= cu[R]), (most - 1) * block_q)  # tokens of no sequence
    return QueryTiles(
        sequence, tile < edges[R], (cu[sequence][:, None] + step).clamp(max=T - 1), row % ratio,
        (of.used - lengths)[sequence][:, None] + step, (first[:, None] + numbers(ratio, cu)).view(-1),
    )  # fmt: skip


class Layouts(NamedTuple):
    """From tiles of keys to the layout of queries over them."""

    sequences: Sequences
    queries: QueryTiles
    tile: Tile
    ratio: int

    def over(self, keys: KeyTiles, K: int) -> BlockLayout:
        """The layout over K keys, of which those are tiles."""
        of, queries, (block_q, block_kv) = self.sequences, self.queries, self.tile
        used = of.used[queries.sequence][:, None]
        union = [_bounds(reach, queries.position, used, of.slots) for reach in of.reaches]
        return page_layout(
            union, queries.position, queries.sequence, queries.there, keys, K, block_q=block_q, block_kv=block_kv,
            room=room_for_bits(of.reaches, self.tile, self.ratio, keys.begin.shape[1]), xp=device_arrays,
        )  # fmt: skip


def room_for_bits(reaches: Sequence[Reach], tile: Tile, ratio: int, tiles: int) -> int:
    """The most tiles that are not full of a list, of so many."""
    block_q, block_kv = tile
    # Bounds move with the position, but for blocks, at whose edges they jump.
    longest = [reach.longest if reach.step > 1 or reach.blocks else -1 for reach in reaches]
    return most_mixed(longest, (block_q - 1) // ratio + 1, tiles, block_kv)


def _bounds(reach: Reach, position: Tensor, used: Tensor, slots: int) -> Progression:
    """The keys of a reach that are there."""
    lo, hi = reach.bounds(position, slots)
    lo = torch.minimum(lo, used)
    return Progression(lo, torch.maximum(lo, torch.minimum(hi, used)), reach.step)


class Copied(NamedTuple):
    """Pages that are copied behind one another before they are attended to."""

    pages: Tensor  # (n,) int32; 0 in the place of one that no query sees
    unseen: Tensor  # (n * page_size,) whether no query sees the slot: it may hold anything, and becomes 0


class Part(NamedTuple):
    """A call: tiles of queries over tiles of keys."""

    layout: BlockLayout
    copied: Copied | None  # None: the pool is read where it is


class Made(NamedTuple):
    """Tiles of queries, and the calls over tiles of keys."""

    token: Tensor  # of each row, as in `QueryTiles`
    head: Tensor
    place: Tensor
    parts: tuple[Part, ...]


def listed_tiles(
    of: Sequences, seen: Tensor, table: Tensor, tile: Tile, facts: tuple[int, ...], between: int | None, exact: bool
) -> Made:
    """What is made of sequences.

    Args:
        seen: (R, n, page_size), slots that their queries see.
        table: (R, n) integers.
        facts: (T, H, G, pages, page_size).
        between, exact: as for `Table.parts`.
    """
    (T, H, G, P, size), (R, n), (block_q, _) = facts, table.shape, tile
    number = narrow(table, -1, P)
    there = (number >= 0) & (number < P)
    listed = Table(number.masked_fill(~there, 0), (seen & there[..., None]).view(R, n * size), size)
    queries = query_tiles(of, T, H // G, block_q)
    parts = listed.parts(Layouts(of, queries, tile, H // G), P, between, exact)
    return Made(queries.token.view(-1), queries.head.view(-1), queries.place, tuple(parts))


class Table(NamedTuple):
    """The pages of sequences, and what of them is seen."""

    pages: Tensor  # (R, n) int32, numbers of pages that exist
    seen: Tensor  # (R, n * size): slots that queries see
    size: int  # slots of a page

    def parts(self, layouts: Layouts, P: int, between: int | None, exact: bool) -> list[Part]:
        """The calls over a pool of P pages.

        Args:
            between: rows of the pool from one page to the next, where it is read where it is; None: pages are copied.
            exact: whether the host may read how many are copied; else there is room for all that may be.
        """
        (R, n), (_, block_kv), reaches = self.pages.shape, layouts.tile, layouts.sequences.reaches
        unit, most = units_of_copies(n, self.size, block_kv, between, reaches)
        if between is None:
            part = self._copied(layouts, numbers(most, self.pages).expand(R, -1), None, unit, exact)
            return [] if part is None else [part]
        seen, column = self.seen.view(R, n, self.size), numbers(n, self.pages)
        whole = seen.all(-1)
        keys = key_tiles(column.expand(R, n), self.pages * (between // block_kv), whole, self.size, block_kv)
        found = [Part(layouts.over(keys, rows_of_pool(P, self.size, between)), None)]
        order = column.masked_fill(~(seen.any(-1) & ~whole), n).sort(-1).values[:, :most]
        part = self._copied(layouts, order.clamp(max=n - 1), order < n, unit, exact)
        return found if part is None else [*found, part]

    def _copied(
        self, layouts: Layouts, units: Tensor, listed: Tensor | None, unit: int, exact: bool
    ) -> Part | None:  # fmt: skip
        """The call over copies of units of pages (R, M); None where nothing is copied.

        Args:
            listed: which of them, all seen; None for all that are seen.
            unit: slots of one.
        """
        (R, M), size, of_unit = units.shape, self.size, unit // self.size
        more, at = -self.pages.shape[1] % of_unit, units.long()[..., None]
        pages = torch.nn.functional.pad(self.pages, (0, more)).view(R, -1, of_unit).gather(1, at.expand(R, M, of_unit))
        seen = torch.nn.functional.pad(self.seen, (0, more * size)).view(R, -1, unit).gather(1, at.expand(R, M, unit))
        if listed is None:
            listed = seen.any(-1)
        else:
            seen = seen & listed[..., None]
        pages = pages.masked_fill(~seen.view(R, M, of_unit, size).any(-1), 0).view(R * M, of_unit)
        unseen, number = ~seen.view(R * M, unit), numbers(R * M, units).view(R, M)
        if exact:
            kept = listed.view(-1).nonzero().squeeze(1)
            if not len(kept):
                return None
            number = (listed.view(-1).cumsum(0, dtype=torch.int32) - 1).clamp(min=0).view(R, M)
            pages, unseen = pages[kept], unseen[kept]
        _, block_kv = layouts.tile
        keys = key_tiles(units, number * (unit // block_kv), listed, unit, block_kv)
        return Part(layouts.over(keys, unseen.numel()), Copied(pages.reshape(-1), unseen.reshape(-1)))


class Units(NamedTuple):
    """What is copied together: whole pages that are whole tiles."""

    slots: int
    most: int  # of a sequence


def units_of_copies(n: int, size: int, block_kv: int, between: int | None, reaches: Sequence[Reach]) -> Units:
    """The units of n pages of a sequence: those of all, or, where the pool is read in place, pages seen in part."""
    if between is None:
        slots = math.lcm(size, block_kv)
        return Units(slots, -(-n * size // slots))
    return Units(size, min(n, 2 * len(reaches)))  # those at the ends of what a reach sees alone


def rows_of_pool(P: int, size: int, between: int) -> int:
    """Rows of a pool as one sequence of keys."""
    return (P - 1) * between + size


def key_tiles(units: Tensor, first: Tensor, listed: Tensor, unit: int, block_kv: int) -> KeyTiles:
    """The tiles of units of keys (R, M): of each its place in the sequence, and the number of its first tile."""
    (R, M), tile = units.shape, numbers(unit // block_kv, units)
    each = R, M * len(tile)
    begin = ((units * unit)[..., None] + tile * block_kv).view(each)
    return KeyTiles(
        begin, (first[..., None] + tile).view(each), listed[..., None].expand(R, M, len(tile)).reshape(each)
    )
