"""The tiles of a call over pages: queries of one sequence each, and the tiles of keys that a sequence lists."""

from __future__ import annotations

import math
from typing import NamedTuple

import torch
from torch import Tensor

from gossamer.layouts import BlockLayout
from gossamer.layouts.device import KeyTiles, Progression, most_mixed, page_layout
from gossamer.patterns.reach import Reach
from gossamer.torch import device_arrays
from gossamer.torch.structure.inputs import Tile


class Sequences(NamedTuple):
    """R sequences, aligned at the end."""

    cu: Tensor  # (R + 1,) int32, ascending: the tokens of each
    used: Tensor  # (R,) int32: its keys
    reaches: tuple[Reach, ...]
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
            if reach.longest != 0:  # else no query sees a key, wherever the ends are
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
        # Bounds move with the position, but for blocks, at whose edges they jump.
        longest = [reach.longest if reach.step > 1 or reach.blocks else -1 for reach in of.reaches]
        room = most_mixed(longest, (block_q - 1) // self.ratio + 1, keys.begin.shape[1], block_kv)
        return page_layout(
            union, queries.position, queries.sequence, queries.there, keys, K, block_q=block_q, block_kv=block_kv,
            room=room, xp=device_arrays,
        )  # fmt: skip


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
        R, n = self.pages.shape
        _, block_kv = layouts.tile
        if between is None:
            unit = math.lcm(self.size, block_kv)
            units = numbers(-(-n * self.size // unit), self.pages).expand(R, -1)
            part = self._copied(layouts, units, None, unit, exact)
            return [] if part is None else [part]
        # Of the pages that a sequence sees those at the ends of runs alone may be seen in part.
        seen, column = self.seen.view(R, n, self.size), numbers(n, self.pages)
        whole = seen.all(-1)
        keys = key_tiles(column.expand(R, n), self.pages * (between // block_kv), whole, self.size, block_kv)
        found = [Part(layouts.over(keys, rows_of_pool(P, self.size, between)), None)]
        order = column.masked_fill(~(seen.any(-1) & ~whole), n).sort(-1).values
        order = order[:, : 2 * len(layouts.sequences.reaches)]
        part = self._copied(layouts, order.clamp(max=n - 1), order < n, self.size, exact)
        return found if part is None else [*found, part]

    def _copied(
        self, layouts: Layouts, units: Tensor, listed: Tensor | None, unit: int, exact: bool
    ) -> Part | None:  # fmt: skip
        """The call over copies of units of pages (R, M); None where nothing is copied.

        Args:
            listed: which of them; None for all that are seen.
            unit: slots of one.
        """
        (R, M), size, of_unit = units.shape, self.size, unit // self.size
        more, at = -self.pages.shape[1] % of_unit, units.long()[..., None]
        pages = torch.nn.functional.pad(self.pages, (0, more)).view(R, -1, of_unit).gather(1, at.expand(R, M, of_unit))
        seen = torch.nn.functional.pad(self.seen, (0, more * size)).view(R, -1, unit).gather(1, at.expand(R, M, unit))
        some = seen.any(-1)
        listed = some if listed is None else listed & some
        pages = pages.masked_fill(~seen.view(R, M, of_unit, size).any(-1), 0).view(R * M, of_unit)
        unseen, number = ~(seen & listed[..., None]).view(R * M, unit), numbers(R * M, units).view(R, M)
        if exact:
            kept = listed.view(-1).nonzero().squeeze(1)
            if not len(kept):
                return None
            number = (listed.view(-1).cumsum(0, dtype=torch.int32) - 1).clamp(min=0).view(R, M)
            pages, unseen = pages[kept], unseen[kept]
        _, block_kv = layouts.tile
        keys = key_tiles(units, number * (unit // block_kv), listed, unit, block_kv)
        return Part(layouts.over(keys, unseen.numel()), Copied(pages.reshape(-1), unseen.reshape(-1)))


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
