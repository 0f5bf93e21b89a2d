"""Neighbourhoods in a grid: images, videos, volumes."""

from __future__ import annotations

import math
from collections.abc import Iterable
from dataclasses import dataclass
from typing import Any

import numpy as np

from gossamer.patterns.base import OFFSETS_LISTED, Pairs, Pattern, Tiles
from gossamer.patterns.grid import Grid, Sizes, combine_ids, distinct, ranges
from gossamer.patterns.validate import integer, show


@dataclass(frozen=True, eq=False, init=False)
class Neighborhood(Pattern):
    """Positions are the points of a grid, the last axis running fastest; a query sees the keys near it on every axis.

    At point p it sees the points p' with p[a] - before[a] <= p'[a] <= p[a] + after[a] on each axis a: a box around it,
    cut at the edges of the grid (NATTEN, arXiv:2204.07143, moves it inside there). Positions outside the grid see
    nothing.

    Args:
        shape: points on each axis, such as (frames, rows, columns).
        reach: for each axis how far a query sees: a number for both sides, or (before, after). ((3, 0), 6, 6) is
            causal in time.
    """

    shape: tuple[int, ...]
    reach: tuple[tuple[int, int], ...]

    def __init__(self, shape: Iterable[int], reach: Iterable[Any]) -> None:
        try:
            sizes, sides = tuple(shape), tuple(reach)
        except TypeError:
            raise ValueError(
                f"shape and reach must be lists with a value for each axis, got {show(shape)} and {show(reach)}"
            ) from None
        if not sizes or len(sizes) != len(sides):
            raise ValueError(
                f"shape and reach must have a value for each axis, at least one; got {show(shape)} and {show(reach)}"
            )
        both = [side if isinstance(side, (tuple, list)) else (side, side) for side in sides]
        if any(len(side) != 2 for side in both):
            raise ValueError(f"reach must hold a number or (before, after) for each axis, got {show(reach)}")
        object.__setattr__(self, "shape", tuple(integer("shape", n, minimum=1) for n in sizes))
        object.__setattr__(
            self, "reach", tuple((integer("reach", b, minimum=0), integer("reach", a, minimum=0)) for b, a in both)
        )
        integer("the number of points in shape", self.points, minimum=1)

    @property
    def points(self) -> int:
        """Of the whole grid."""
        return math.prod(self.shape)

    def _check(self, Q: int, K: int) -> None:
        if self.points != K:
            raise ValueError(f"shape of Neighborhood, {show(self.shape)}, has {self.points} points, needs K={K}")

    def _inside(self, position: np.ndarray) -> np.ndarray:
        return (position >= 0) & (position < self.points)

    def _keep(self, i: np.ndarray, j: np.ndarray, sizes: Sizes) -> np.ndarray:
        kept = self._inside(i) & self._inside(j)
        for n, (before, after) in zip(reversed(self.shape), reversed(self.reach), strict=True):
            distance = i % n - j % n
            kept &= (distance <= before) & (distance >= -after)
            i, j = i // n, j // n
        return kept

    def _shifts(self, axes: int) -> tuple[np.ndarray, np.ndarray]:
        """Every step to a neighbour along the first axes: as (n, axes), ascending, and as distances of positions."""
        sides = zip(self.shape[:axes], self.reach[:axes], strict=True)
        along = [np.arange(-min(before, n - 1), min(after, n - 1) + 1) for n, (before, after) in sides]
        steps = np.stack(np.meshgrid(*along, indexing="ij"), axis=-1).reshape(-1, axes)
        strides = np.array([math.prod(self.shape[a + 1 :]) for a in range(axes)], dtype=np.int64)
        return steps, steps @ strides

    def tile_bound(self, grid: Grid) -> int:
        bands = len(self._shifts(len(self.shape) - 1)[1]) if len(self.shape) > 1 else 1
        width = (grid.block_q + sum(self.reach[-1])) // grid.block_kv + 2
        return grid.nq * min(grid.nk, bands * width)

    def tile_candidates(self, grid: Grid, start: int, stop: int) -> Tiles:
        # Of each step along the other axes: the run of keys that the last axis may reach.
        (before, after), rows = self.reach[-1], grid.row_bounds(np.arange(start, stop))
        bands = self._shifts(len(self.shape) - 1)[1] if len(self.shape) > 1 else np.zeros(1, dtype=np.int64)
        first = rows[0][:, None] + grid.q_offset + bands - before
        last = rows[1][:, None] + grid.q_offset + bands + after
        first = np.clip(first, 0, grid.K) // grid.block_kv
        last = -(-np.clip(last, 0, grid.K) // grid.block_kv)
        which, tj = ranges(first.ravel(), np.maximum(first, last).ravel())
        ti, tj = np.divmod(distinct(which // len(bands) * grid.nk + tj), grid.nk)
        return ti + start, tj

    def tile_ids(self, grid: Grid, ti: np.ndarray, tj: np.ndarray) -> np.ndarray:
        # A step along the first axis changes nothing inside the grid.
        plane = math.prod(self.shape[1:])
        i0, j0 = grid.q_offset + ti * grid.block_q, tj * grid.block_kv
        whole = self._inside(i0) & self._inside(i0 + grid.block_q - 1)
        return combine_ids(i0 // plane - j0 // plane, i0 % plane, j0 % plane, np.where(whole, 0, 1 + ti))

    def listed_pairs(self, sizes: Sizes, start: int, stop: int) -> Pairs | None:
        steps, distances = self._shifts(len(self.shape))
        if len(distances) > OFFSETS_LISTED:
            return None
        i = np.arange(start, stop) + sizes.q_offset
        exists = self._inside(i)
        kept = np.repeat(exists[:, None], len(steps), axis=1)
        for axis, at in enumerate(np.unravel_index(np.where(exists, i, 0), self.shape)):
            there = at[:, None] + steps[:, axis]
            kept &= (there >= 0) & (there < self.shape[axis])
        row, step = np.nonzero(kept)
        return row + start, i[row] + distances[step]

    def pairs_kept(self, sizes: Sizes) -> int | None:
        if sizes.q_offset or self.points != sizes.Q:
            return None
        total = 1
        for n, (before, after) in zip(self.shape, self.reach, strict=True):
            at = np.arange(n)
            total *= int((np.minimum(at + after, n - 1) - np.maximum(at - before, 0) + 1).sum())
        return total
