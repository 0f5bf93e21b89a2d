"""Neighbourhoods in a grid: images, videos, volumes."""

from __future__ import annotations

import math
from collections.abc import Iterable
from dataclasses import dataclass
from functools import lru_cache
from typing import Any

import numpy as np

from gossamer.checks import integer, show, whole
from gossamer.patterns.base import OFFSETS_LISTED, Pairs, Pattern, Tiles
from gossamer.patterns.grid import Grid, Sizes, combine_ids, distinct, ranges

BORDERS = ("cut", "shift")


@dataclass(frozen=True, eq=False, init=False)
class Neighborhood(Pattern):
    """Positions are the points of a grid, the last axis running fastest; a query sees the keys near it on every axis.

    At point p it sees the points p' with c[a] - before[a] <= p'[a] <= c[a] + after[a] on each axis a: a box around c,
    which is p itself, or the nearest point whose box lies inside the grid, by `border`. Positions outside the grid see
    nothing.

    Args:
        shape: points on each axis, such as (frames, rows, columns).
        reach: how far a query sees, its own point not counted: one number for every axis and side, or for each axis a
            number for both sides, or (before, after). It is no size of a window: NATTEN's `kernel_size` is
            2 * reach + 1, and an even one w is (w // 2, w // 2 - 1).
        border: "cut": boxes are cut at the edges of the grid. "shift": they are moved inside, so that every query has
            as many neighbours, as neighbourhood attention defines it (NATTEN, arXiv:2204.07143), whatever their reach
            to each side. Or one of both for each axis.
        causal: whether a query sees no later point of an axis; one bool, or one for each axis. The reach of such an
            axis is a number, or (before, 0); boxes are cut there at the edge, by either border, as NATTEN's
            `is_causal` does, whose `kernel_size` is then before + 1.

    Examples:
        >>> gs.Neighborhood((3, 3), 1).materialize(9, 9).astype(int)[4]  # the centre of a 3 x 3 image sees all
        array([1, 1, 1, 1, 1, 1, 1, 1, 1])
        >>> gs.Neighborhood((6,), 1, border="shift").materialize(6, 6).astype(int)  # NATTEN: kernel size 3
        array([[1, 1, 1, 0, 0, 0],
               [1, 1, 1, 0, 0, 0],
               [0, 1, 1, 1, 0, 0],
               [0, 0, 1, 1, 1, 0],
               [0, 0, 0, 1, 1, 1],
               [0, 0, 0, 1, 1, 1]])
        >>> gs.Neighborhood((8, 6, 6), (2, 1, 1), border="shift", causal=(True, False, False))  # in time alone
        Neighborhood(shape=(8, 6, 6), reach=((2, 0), (1, 1), (1, 1)), border=('cut', 'shift', 'shift'))
    """

    shape: tuple[int, ...]
    reach: tuple[tuple[int, int], ...]
    border: tuple[str, ...]  # of each axis; a causal one is one that reaches to no later point and is cut

    def __init__(
        self, shape: Iterable[int], reach: int | Iterable[Any], border: str | Iterable[str] = "cut",
        causal: bool | Iterable[bool] = False,
    ) -> None:  # fmt: skip
        one = whole(reach) is not None or np.isscalar(reach)
        try:
            sizes = tuple(shape)
            sides = (reach,) * len(sizes) if one else tuple(reach)  # type: ignore[arg-type]
        except TypeError:
            raise ValueError(
                f"shape must be a list with a number for each axis, and reach an integer or such a list; "
                f"got {show(shape)} and {show(reach)}"
            ) from None
        if not sizes or len(sizes) != len(sides):
            raise ValueError(
                f"shape and reach must have a value for each axis, at least one; got {show(shape)} and {show(reach)}"
            )
        object.__setattr__(self, "shape", tuple(integer("shape", n, minimum=1) for n in sizes))
        causes = self._causal(causal)
        both = [
            side if isinstance(side, (tuple, list)) else (side, 0 if cause else side)
            for side, cause in zip(sides, causes, strict=True)
        ]
        if any(len(side) != 2 for side in both):
            raise ValueError(f"reach must hold a number or (before, after) for each axis, got {show(reach)}")
        object.__setattr__(
            self, "reach", tuple((integer("reach", b, minimum=0), integer("reach", a, minimum=0)) for b, a in both)
        )
        for axis, ((_, after), cause) in enumerate(zip(self.reach, causes, strict=True)):
            if cause and after:
                raise ValueError(
                    f"reach must be a number or (before, 0) on an axis that is causal; axis {axis} is, and reaches "
                    f"{after} points after: {show(reach)}"
                )
        integer("the number of points in shape", self.points, minimum=1)
        object.__setattr__(self, "border", self._borders(border, causes))

    def _causal(self, causal: Any) -> tuple[bool, ...]:
        """Whether each axis is causal."""
        bools = (bool, np.bool_)
        one = isinstance(causal, bools)
        each = [causal] * len(self.shape) if one else list(causal) if isinstance(causal, (tuple, list)) else []
        if len(each) != len(self.shape) or not all(isinstance(x, bools) for x in each):
            raise ValueError(f"causal must be True or False, or one of them for each axis; got {show(causal)}")
        return tuple(map(bool, each))

    def _borders(self, border: Any, causes: tuple[bool, ...]) -> tuple[str, ...]:
        """The border of each axis."""
        one = isinstance(border, str)
        each = [border] * len(self.shape) if one else list(border) if isinstance(border, (tuple, list)) else []
        if len(each) != len(self.shape) or not all(isinstance(x, str) and x in BORDERS for x in each):
            raise ValueError(f'border must be "cut" or "shift", or one of them for each axis; got {show(border)}')
        each = ["cut" if cause else how for how, cause in zip(each, causes, strict=True)]
        for axis, (n, (before, after)) in enumerate(zip(self.shape, self.reach, strict=True)):
            if each[axis] == "shift" and before + after >= n:
                raise ValueError(
                    f'reach must be within shape where border is "shift": of axis {axis} it makes windows of '
                    f"{before + after + 1}, and shape has {n} points there"
                )
        return tuple(each)

    @property
    def points(self) -> int:
        """The number of points of the grid."""
        return math.prod(self.shape)

    def _check(self, Q: int, K: int) -> None:
        if self.points != K:
            raise ValueError(f"shape of Neighborhood, {show(self.shape)}, has {self.points} points, needs K={K}")

    def _inside(self, position: np.ndarray) -> np.ndarray:
        return (position >= 0) & (position < self.points)

    def _centre(self, axis: int, at: np.ndarray) -> np.ndarray:
        """Around which coordinate of an axis a query at coordinate `at` sees its keys."""
        if self.border[axis] == "cut":
            return at
        before, after = self.reach[axis]
        return np.clip(at, before, self.shape[axis] - 1 - after)

    def _keep(self, i: np.ndarray, j: np.ndarray, sizes: Sizes) -> np.ndarray:
        kept = self._inside(i) & self._inside(j)
        for axis in reversed(range(len(self.shape))):
            n, (before, after) = self.shape[axis], self.reach[axis]
            distance = self._centre(axis, i % n) - j % n
            kept &= (distance <= before) & (distance >= -after)
            i, j = i // n, j // n
        return kept

    def _shifts(self, axes: int) -> tuple[np.ndarray, np.ndarray]:
        """Every step from a centre along the first axes: as (n, axes), ascending, and as distances of positions."""
        sides = zip(self.shape[:axes], self.reach[:axes], strict=True)
        along = [np.arange(-min(before, n - 1), min(after, n - 1) + 1) for n, (before, after) in sides]
        steps = np.stack(np.meshgrid(*along, indexing="ij"), axis=-1).reshape(-1, axes)
        strides = np.array([math.prod(self.shape[a + 1 :]) for a in range(axes)], dtype=np.int64)
        return steps, steps @ strides

    def tile_bound(self, grid: Grid) -> int:
        bands = len(self._shifts(len(self.shape) - 1)[1]) if len(self.shape) > 1 else 1
        lowest, highest = _remembered_centres(self, grid)
        width = (highest - lowest + 1 + sum(self.reach[-1])) // grid.block_kv + 2
        return int(np.minimum(grid.nk, bands * width).sum())

    def tile_candidates(self, grid: Grid, start: int, stop: int) -> Tiles:
        # Of each step along the other axes: the run of keys that the last axis may reach.
        before, after = self.reach[-1]
        bands = self._shifts(len(self.shape) - 1)[1] if len(self.shape) > 1 else np.zeros(1, dtype=np.int64)
        lowest, highest = (x[start:stop, None] for x in _remembered_centres(self, grid))
        first = np.clip(lowest + bands - before, 0, grid.K) // grid.block_kv
        last = -(-np.clip(highest + 1 + bands + after, 0, grid.K) // grid.block_kv)
        which, tj = ranges(first.ravel(), np.maximum(first, last).ravel())
        ti, tj = np.divmod(distinct(which // len(bands) * grid.nk + tj), grid.nk)
        return ti + start, tj

    def tile_ids(self, grid: Grid, ti: np.ndarray, tj: np.ndarray) -> np.ndarray:
        # A step along the first axis changes nothing inside the grid, nor where boxes are moved on that axis.
        plane = math.prod(self.shape[1:])
        i0, j0 = grid.q_offset + ti * grid.block_q, tj * grid.block_kv
        first, last = i0 // plane, (i0 + grid.block_q - 1) // plane
        whole = (first == self._centre(0, first)) & (last == self._centre(0, last))
        whole &= (first >= 0) & (last < self.shape[0])
        return combine_ids(i0 // plane - j0 // plane, i0 % plane, j0 % plane, np.where(whole, 0, 1 + ti))

    def listed_pairs(self, sizes: Sizes, start: int, stop: int) -> Pairs | None:
        steps, distances = self._shifts(len(self.shape))
        if len(distances) > OFFSETS_LISTED:
            return None
        i = np.arange(start, stop) + sizes.q_offset
        exists = self._inside(i)
        kept = np.repeat(exists[:, None], len(steps), axis=1)
        for axis, at in enumerate(np.unravel_index(np.where(exists, i, 0), self.shape)):
            there = self._centre(axis, at)[:, None] + steps[:, axis]
            kept &= (there >= 0) & (there < self.shape[axis])
        row, step = np.nonzero(kept)
        return row + start, _centres(self, i)[row] + distances[step]

    def pairs_kept(self, sizes: Sizes) -> int | None:
        if sizes.q_offset or self.points != sizes.Q:
            return None
        total = 1
        for axis, (n, (before, after)) in enumerate(zip(self.shape, self.reach, strict=True)):
            at = self._centre(axis, np.arange(n))
            total *= int((np.minimum(at + after, n - 1) - np.maximum(at - before, 0) + 1).sum())
        return total


def _centres(pattern: Neighborhood, i: np.ndarray) -> np.ndarray:
    """The position around which a query at position i sees its keys; a query outside the grid sees none."""
    if "shift" not in pattern.border:
        return i
    inside = np.clip(i, 0, pattern.points - 1)
    along = [pattern._centre(axis, at) for axis, at in enumerate(np.unravel_index(inside, pattern.shape))]
    return np.ravel_multi_index(along, pattern.shape)


@lru_cache(maxsize=8)
def _remembered_centres(pattern: Neighborhood, grid: Grid) -> tuple[np.ndarray, np.ndarray]:
    """The lowest and the highest centre of the rows of each tile row."""
    if "shift" not in pattern.border:
        first, last = grid.row_bounds(np.arange(grid.nq))
        return first + grid.q_offset, last - 1 + grid.q_offset
    centres, edges = _centres(pattern, np.arange(grid.Q) + grid.q_offset), np.arange(grid.nq) * grid.block_q
    return np.minimum.reduceat(centres, edges), np.maximum.reduceat(centres, edges)
