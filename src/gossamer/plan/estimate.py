"""The size of a layout, counted on some of its rows: for choosing one without building any.

Windows of rows are spread evenly over the sequence; a short sequence is counted whole.
"""

from __future__ import annotations

from typing import NamedTuple

import numpy as np

from gossamer.layouts.gather import WIDTHS
from gossamer.patterns.base import Pattern
from gossamer.patterns.grid import Grid, Sizes, distinct
from gossamer.patterns.pairs import pairs_by_tiles
from gossamer.patterns.tiles import count_tiles

# Rows of a window: a multiple of the tiles in use.
WINDOW_ROWS = 384
WINDOWS = 12


class TileWork(NamedTuple):
    """The work of all heads and batch elements that have lists of their own."""

    useful: float  # pairs kept
    executed: float  # existing pairs of the tiles that would be listed
    bits: float  # of them, in tiles with a bit a pair
    tiles: float  # listed
    longest: int  # tiles of a row
    rows: int  # of tiles


class GatherWork(NamedTuple):
    """The work of all heads and batch elements that have lists of their own."""

    columns: float  # listed, over all groups of rows
    executed: float  # pairs of the gathered tiles, padding included
    rows: float
    steps: float  # each gathers as many columns as are gathered at a time
    longest: int  # steps of a group
    groups: int


class Sample:
    """The windows of a pattern, and what has been found in them so far."""

    def __init__(self, pattern: Pattern, sizes: Sizes) -> None:
        self.sizes = sizes
        every = -(-sizes.Q // WINDOW_ROWS)
        chosen = range(every) if every <= WINDOWS else (np.arange(WINDOWS) * every + every // 2) // WINDOWS
        self.windows = [(int(w) * WINDOW_ROWS, min((int(w) + 1) * WINDOW_ROWS, sizes.Q)) for w in chosen]
        self.scale = sizes.Q / sum(stop - start for start, stop in self.windows)
        self.parts: dict[Pattern, int] = {}  # how many heads and batch elements have this pattern
        distinct, which = pattern.distinct()
        for part, times in zip(distinct, np.bincount(which.reshape(-1)).tolist(), strict=True):
            lower = part.lower(sizes)
            self.parts[lower] = self.parts.get(lower, 0) + times
        self._pairs: dict[Pattern, list[tuple[np.ndarray, np.ndarray]]] = {}

    def _listed(self, part: Pattern) -> list[tuple[np.ndarray, np.ndarray]] | None:
        """The pairs of each window where the pattern lists them itself."""
        if part.intervals(self.sizes) is not None:
            return None
        if part not in self._pairs:
            listed = []
            for window in self.windows:
                pairs = part.listed_pairs(self.sizes, *window)
                if pairs is None:
                    return None
                listed.append(pairs)
            self._pairs[part] = listed
        return self._pairs[part]

    def tiles(self, block_q: int, block_kv: int) -> TileWork:
        """The work of a block layout with these tiles."""
        grid = Grid(*self.sizes, block_q, block_kv)
        total, longest = np.zeros(4), 0
        for part, times in self.parts.items():
            listed = self._listed(part)
            if listed is None:
                for start, stop in self.windows:
                    *pairs, tiles_of_rows = count_tiles(part, grid, start // block_q, -(-stop // block_q))
                    total += times * np.array([*pairs, tiles_of_rows.sum()])
                    longest = max(longest, int(tiles_of_rows.max(initial=0)))
                continue
            for rows, keys in listed:
                tile = np.sort(rows // block_q * grid.nk + keys // block_kv)
                first = np.flatnonzero(np.diff(tile, prepend=-1))
                kept = np.diff(first, append=len(tile))
                ti, tj = np.divmod(tile[first], grid.nk)
                area = grid.area(ti, tj)
                total += times * np.array([len(rows), area.sum(), area[kept < area].sum(), len(first)])
                longest = max(longest, int(np.bincount(ti - ti.min(initial=grid.nq)).max(initial=0)))
        useful, executed, bits, tiles = (float(x) for x in total * self.scale)
        return TileWork(useful, executed, bits, tiles, longest, grid.nq * sum(self.parts.values()))

    def gathers(self, block_q: int) -> GatherWork:
        """The work of a gather layout with groups of `block_q` rows."""
        width, (Q, K, _) = WIDTHS[block_q], self.sizes
        columns = steps = longest = 0
        for part, times in self.parts.items():
            listed = self._listed(part)
            if listed is None:
                listed = self._pairs[part] = [pairs_by_tiles(part, self.sizes, *window) for window in self.windows]
            for rows, keys in listed:
                group = rows if block_q == 1 else distinct(rows // block_q * K + keys) // K
                counts = np.bincount(group - group.min(initial=Q))
                columns += times * int(counts.sum())
                taken = -(-counts // width)
                steps += times * int(taken.sum())
                longest = max(longest, int(taken.max(initial=0)))
        copies = sum(self.parts.values())
        executed = steps * width * block_q
        return GatherWork(
            columns * self.scale, executed * self.scale, Q * copies, steps * self.scale, longest,
            -(-Q // block_q) * copies,
        )  # fmt: skip
