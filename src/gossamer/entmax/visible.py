"""The keys that rows may see by a pattern, a mask, a layout and positions, for some rows of a head at a time.

Nothing here is N x N: each source is asked for a block of query rows, and gives the keys that any
of these may see and a mask over them.
"""

from __future__ import annotations

from collections.abc import Sequence
from functools import reduce
from typing import NamedTuple, Protocol

import numpy as np
import torch
from torch import Tensor

from gossamer.layouts import GatherWalk, Walk
from gossamer.patterns import Pattern
from gossamer.patterns.base import Intervals
from gossamer.patterns.grid import EMPTY, FULL, Grid, Sizes, distinct, ranges, unpack_bits
from gossamer.plan.problem import Unsupported

BLOCK = 128  # query rows that are asked for together, and the edge of the tiles of patterns


class Seen(NamedTuple):
    """The keys that a block of rows may see."""

    keys: Tensor  # (n,) int64, ascending
    mask: Tensor | None  # (rows, n) bool: which row sees which; None for all


class Source(Protocol):
    """One of the conditions under which a row sees a key."""

    shared: bool  # by all batch elements and heads

    def seen(self, b: int, h: int, start: int, stop: int) -> Seen:
        """The keys for query rows [start, stop) of a head; `start` is a multiple of BLOCK."""


class VisibleKeys:
    """The keys that every source lets a row see."""

    def __init__(self, sources: Sequence[Source], Q: int, K: int, device: torch.device) -> None:
        self.sources, self.Q, self.device = sources, Q, device
        self.shared = all(source.shared for source in sources)
        self.block = BLOCK if sources else Q  # rows that see all keys need no blocks
        self._all = Seen(torch.arange(K, device=device), None)

    def seen(self, b: int, h: int, start: int, stop: int) -> Seen:
        """The keys for query rows [start, stop) of a head, on the device of the call."""
        if not self.sources:
            return self._all
        return reduce(both, [self._here(source.seen(b, h, start, stop)) for source in self.sources])

    def _here(self, seen: Seen) -> Seen:
        return Seen(seen.keys.to(self.device), None if seen.mask is None else seen.mask.to(self.device))


def both(one: Seen, other: Seen) -> Seen:
    """The keys that two sources both let rows see."""
    if len(other.keys) < len(one.keys):
        one, other = other, one
    common = torch.isin(one.keys, other.keys, assume_unique=True)
    keys = one.keys[common]
    mask = one.mask if one.mask is None or len(keys) == len(one.keys) else one.mask[:, common]
    if other.mask is None:
        return Seen(keys, mask)
    more = other.mask if len(keys) == len(other.keys) else other.mask[:, torch.searchsorted(other.keys, keys)]
    return Seen(keys, more if mask is None else mask & more)


class IntervalSource:
    """Row r sees keys [lo[r], hi[r]), both non-decreasing."""

    shared = True

    def __init__(self, intervals: Intervals) -> None:
        self.lo, self.hi = (torch.from_numpy(np.ascontiguousarray(x)) for x in intervals)

    def seen(self, b: int, h: int, start: int, stop: int) -> Seen:
        lo: Tensor = self.lo[start:stop]
        hi: Tensor = self.hi[start:stop]
        first, last = int(lo[0]), int(hi[-1])
        keys = torch.arange(first, max(first, last), device=lo.device)
        if int(lo[-1]) <= first and int(hi[0]) >= last:
            return Seen(keys, None)
        return Seen(keys, (keys >= lo[:, None]) & (keys < hi[:, None]))


class PatternSource:
    """A pattern of any form: by lists of pairs where it has them, else by the tiles that may hold a kept pair."""

    def __init__(self, pattern: Pattern, sizes: Sizes) -> None:
        parts, self.which = pattern.distinct()
        self.parts = [part.lower(sizes) for part in parts]
        self.sizes, self.shared = sizes, len(parts) == 1
        self.intervals = [None if (x := part.intervals(sizes)) is None else IntervalSource(x) for part in self.parts]
        self._asked, self._known = -1, dict[int, Seen]()  # of the last block of rows, what each part lets it see

    def seen(self, b: int, h: int, start: int, stop: int) -> Seen:
        which = int(self.which[min(b, len(self.which) - 1), min(h, self.which.shape[1] - 1)])
        intervals = self.intervals[which]
        if intervals is not None:
            return intervals.seen(b, h, start, stop)
        if self._asked != start:
            self._asked, self._known = start, {}
        if which not in self._known:
            self._known[which] = self._seen(self.parts[which], start, stop)
        return self._known[which]

    def _seen(self, part: Pattern, start: int, stop: int) -> Seen:
        listed = part.listed_pairs(self.sizes, start, stop)
        if listed is not None:
            rows, keys = listed
            there = distinct(np.sort(keys))
            mask = np.zeros((stop - start, len(there)), dtype=bool)
            mask[rows - start, np.searchsorted(there, keys)] = True
            return Seen(torch.from_numpy(there), torch.from_numpy(mask))
        grid = Grid(*self.sizes, BLOCK, BLOCK)
        t = start // BLOCK
        _, tj = part.tile_candidates(grid, t, t + 1)
        tj = distinct(np.sort(tj.astype(np.int64)))
        ti = np.full_like(tj, t)
        classes = part.tile_classes(grid, ti, tj)
        ti, tj, classes = (x[classes != EMPTY] for x in (ti, tj, classes))
        packed = grid.existing(ti, tj)
        (mixed,) = np.nonzero(classes != FULL)
        if len(mixed):
            packed[mixed] &= part.shared_tile_masks(grid, ti[mixed], tj[mixed])
        return seen_in_tiles(tj, unpack_bits(packed), stop - start, self.sizes.K)


def seen_in_tiles(columns: np.ndarray, tiles: np.ndarray, rows: int, K: int) -> Seen:
    """The keys that rows see by the masks (T, rows or more, width) of the tiles in ascending `columns`."""
    width = tiles.shape[2]
    keys = (columns[:, None] * width + np.arange(width)).reshape(-1)
    mask = tiles[:, :rows].transpose(1, 0, 2).reshape(rows, -1)
    there = (keys < K) & mask.any(0)
    return Seen(torch.from_numpy(keys[there]), torch.from_numpy(mask[:, there]))


class LayoutSource:
    """The tiles of a BlockLayout."""

    def __init__(self, walk: Walk) -> None:
        self.walk, self.shared = walk.on_host(), walk.lead == (1, 1)

    def seen(self, b: int, h: int, start: int, stop: int) -> Seen:
        walk = self.walk
        Bl, Hl = walk.lead
        b, h = min(b, Bl - 1), min(h, Hl - 1)
        height, width = walk.block_rows, walk.block_columns
        tile_rows = []
        for t in range(start // height, -(-stop // height)):
            columns, tiles = self._tiles(b, h, t)
            first, last = max(start, t * height), min(stop, (t + 1) * height)
            tiles = tiles[:, first - t * height : last - t * height]
            tile_rows.append((columns, tiles, first - start, last - start))
        columns = distinct(np.sort(np.concatenate([columns for columns, *_ in tile_rows])))
        every = np.zeros((len(columns), stop - start, width), dtype=bool)
        for own, tiles, first, last in tile_rows:
            every[np.searchsorted(columns, own), first:last] = tiles
        return seen_in_tiles(columns, every, stop - start, walk.columns)

    def _tiles(self, b: int, h: int, t: int) -> tuple[np.ndarray, np.ndarray]:
        """The tile columns of a tile row, and the masks (T, block_rows, block_columns) of its tiles."""
        walk = self.walk
        height, width = walk.block_rows, walk.block_columns
        columns, tiles = [], []
        for kind, listed in walk.lists.items():
            first = int(listed.starts[b, h, t])
            place = slice(first, first + int(listed.counts[b, h, t]))
            tj = listed.indices[place].astype(np.int64)
            if kind == "full":
                masks = np.ones((len(tj), height, width), dtype=bool)
            elif kind == "bits":
                masks = unpack_bits(walk.pool[walk.pool_index[place]])
            elif len(tj):
                lo, hi = (x[b, h, t * height : (t + 1) * height, None] for x in (walk.lo, walk.hi))
                j = tj[:, None, None] * width + np.arange(width)
                masks = np.zeros((len(tj), height, width), dtype=bool)
                masks[:, : len(lo)] = (j >= lo) & (j < hi)
            else:
                masks = np.zeros((0, height, width), dtype=bool)
            columns.append(tj)
            tiles.append(masks)
        return np.concatenate(columns), np.concatenate(tiles)


class ListSource:
    """The keys that a GatherLayout lists, of groups of one row each."""

    def __init__(self, walk: GatherWalk, H: int) -> None:
        if walk.block_rows != 1:
            raise Unsupported(
                f"pattern must be a GatherLayout of single rows; it is one of groups of {walk.block_rows}"
            )
        self.walk, self.H, self.shared = walk.on_host(), H, walk.lead == (1, 1)

    def seen(self, b: int, h: int, start: int, stop: int) -> Seen:
        walk = self.walk
        Bl, Hl = walk.lead
        at = min(b, Bl - 1), h * Hl // self.H
        starts, counts = (x[at][start:stop].astype(np.int64) for x in (walk.starts, walk.counts))
        rows, place = ranges(starts, starts + counts)
        listed = walk.indices[place].astype(np.int64)
        keys = distinct(np.sort(listed))
        mask = np.zeros((stop - start, len(keys)), dtype=bool)
        mask[rows, np.searchsorted(keys, listed)] = True
        return Seen(torch.from_numpy(keys), torch.from_numpy(mask))


class MaskSource:
    """A boolean mask that broadcasts to (B, H, Q, K)."""

    def __init__(self, mask: Tensor, Q: int, K: int) -> None:
        mask = leading(mask, 4)
        self.mask = mask.expand(*mask.shape[:2], Q, K)
        self.shared = mask.shape[0] == mask.shape[1] == 1

    def seen(self, b: int, h: int, start: int, stop: int) -> Seen:
        B, H = self.mask.shape[:2]
        mask = self.mask[min(b, B - 1), min(h, H - 1), start:stop]
        keys = mask.any(0).nonzero().squeeze(1)
        return Seen(keys, mask if len(keys) == mask.shape[1] else mask[:, keys])


class PositionSource:
    """A key is seen where its position is at most that of the query; positions broadcast to (B, H, N)."""

    def __init__(self, q_positions: Tensor, k_positions: Tensor) -> None:
        self.q, self.k = (leading(x, 3).to(torch.int64) for x in (q_positions, k_positions))
        self.shared = all(x.shape[0] == x.shape[1] == 1 for x in (self.q, self.k))

    def seen(self, b: int, h: int, start: int, stop: int) -> Seen:
        q_positions, k_positions = (x[min(b, x.shape[0] - 1), min(h, x.shape[1] - 1)] for x in (self.q, self.k))
        q_positions = q_positions[start:stop]
        keys = (k_positions <= q_positions.max()).nonzero().squeeze(1)
        k_positions = k_positions[keys]
        if not len(keys) or bool(k_positions.max() <= q_positions.min()):
            return Seen(keys, None)
        return Seen(keys, k_positions <= q_positions[:, None])


def leading(x: Tensor, dims: int) -> Tensor:
    """x with so many dimensions, of which the first two are 1 where all entries are the same by their strides."""
    x = x.reshape((1,) * (dims - x.ndim) + x.shape)
    for d in (0, 1):
        if x.shape[d] > 1 and x.stride(d) == 0:
            x = x.narrow(d, 0, 1)
    return x
