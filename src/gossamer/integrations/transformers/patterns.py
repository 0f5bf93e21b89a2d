"""Patterns that the masks of transformers need beside those of `gossamer.patterns`, in key coordinates."""

from __future__ import annotations

from dataclasses import dataclass
from typing import Any

import numpy as np

from gossamer.checks import array, digest
from gossamer.patterns import Causal, Dense, Dilated, Pattern, SlidingWindow
from gossamer.patterns.base import Intervals
from gossamer.patterns.compose import And, Not, Or
from gossamer.patterns.grid import EMPTY, FULL, MIXED, Grid, Sizes


class _OfArray(Pattern):
    """A pattern that an array tells, whose leading axis is the batch element."""

    values: np.ndarray

    def _set(self, values: np.ndarray) -> None:
        object.__setattr__(self, "values", values)
        object.__setattr__(self, "_digest", digest(values))

    def _key(self) -> tuple[Any, ...]:
        return self.__dict__["_digest"]

    def __repr__(self) -> str:
        return f"{type(self).__name__}({'x'.join(str(n) for n in self.values.shape)})"

    @property
    def lead(self) -> tuple[int, int]:
        return len(self.values), 1

    def at(self, b: int, h: int) -> Pattern:
        return self if len(self.values) == 1 else type(self)(self.values[b : b + 1])  # type: ignore[call-arg]


@dataclass(frozen=True, eq=False, init=False, repr=False)
class Keys(_OfArray):
    """The keys that a mask has, for every query: padding with holes.

    Args:
        values: boolean (B, K), or (1, K) for all batch elements.
    """

    values: np.ndarray

    def __init__(self, values: Any) -> None:
        self._set(array("values", values, ndim=(2,), kind="boolean"))

    def _check(self, Q: int, K: int) -> None:
        if self.values.shape[1] != K:
            raise ValueError(f"values of Keys must have K={K} keys, got {self.values.shape[1]}")

    def _keep(self, i: np.ndarray, j: np.ndarray, sizes: Sizes) -> np.ndarray:
        kept = self.values[0][np.clip(j, 0, sizes.K - 1)]
        return np.broadcast_to(kept, np.broadcast_shapes(i.shape, j.shape))

    def tile_classes(self, grid: Grid, ti: np.ndarray, tj: np.ndarray) -> np.ndarray:
        before = np.concatenate([[0], np.cumsum(self.values[0])])
        c0, c1 = grid.key_bounds(tj)
        kept = before[c1] - before[c0]
        return np.where(kept == 0, EMPTY, np.where(kept == c1 - c0, FULL, MIXED)).astype(np.int8)

    def tile_ids(self, grid: Grid, ti: np.ndarray, tj: np.ndarray) -> np.ndarray:
        return tj


@dataclass(frozen=True, eq=False, init=False, repr=False)
class Blocks(_OfArray):
    """Pairs of the same block, where an id below 0 belongs to none: the tokens of an image, which see one another.

    Args:
        values: integer (B, K), or (1, K) for all batch elements.
    """

    values: np.ndarray

    def __init__(self, values: Any) -> None:
        self._set(array("values", values, ndim=(2,), kind="integer"))

    def _check(self, Q: int, K: int) -> None:
        if self.values.shape[1] != K:
            raise ValueError(f"values of Blocks must have K={K} positions, got {self.values.shape[1]}")

    def _keep(self, i: np.ndarray, j: np.ndarray, sizes: Sizes) -> np.ndarray:
        last = sizes.K - 1
        query, key = (np.where((x >= 0) & (x <= last), self.values[0][np.clip(x, 0, last)], -1) for x in (i, j))
        return (query == key) & (query >= 0)

    def _intervals(self, sizes: Sizes) -> Intervals | None:
        ids = self.values[0]
        first = np.concatenate([[0], np.nonzero(np.diff(ids))[0] + 1])
        end = np.concatenate([first[1:], [len(ids)]])
        present = ids[first] >= 0
        if len(np.unique(ids[first][present])) != present.sum():
            return None
        run = np.repeat(np.arange(len(first)), end - first)
        i = np.arange(sizes.Q) + sizes.q_offset
        at = run[np.clip(i, 0, sizes.K - 1)]
        inside = present[at] & (i >= 0) & (i < sizes.K)
        alone = np.clip(i, 0, sizes.K)
        return np.where(inside, first[at], alone), np.where(inside, end[at], alone)


@dataclass(frozen=True, eq=False, init=False, repr=False)
class Evaluated(_OfArray):
    """Pairs of a matrix, which a mask function was asked for: row r of a batch element is query row r.

    Args:
        values: boolean (B, Q, K), or (1, Q, K) for all batch elements.
    """

    values: np.ndarray

    def __init__(self, values: Any) -> None:
        self._set(array("values", values, ndim=(3,), kind="boolean"))

    def _check(self, Q: int, K: int) -> None:
        if self.values.shape[1:] != (Q, K):
            raise ValueError(f"values of Evaluated must have (Q, K) = {(Q, K)}, got {self.values.shape[1:]}")

    def _keep(self, i: np.ndarray, j: np.ndarray, sizes: Sizes) -> np.ndarray:
        row = i - sizes.q_offset
        kept = self.values[0][np.clip(row, 0, sizes.Q - 1), np.clip(j, 0, sizes.K - 1)]
        return kept & (row >= 0) & (row < sizes.Q)


@dataclass(frozen=True, eq=False)
class Shifted(Pattern):
    """A pattern of positions over the keys that begin at position `by`: key 0 here is key `by` there."""

    pattern: Pattern
    by: int

    @property
    def lead(self) -> tuple[int, int]:
        return self.pattern.lead

    def at(self, b: int, h: int) -> Pattern:
        inner = self.pattern.at(b, h)
        return self if inner is self.pattern else Shifted(inner, self.by)

    def _there(self, sizes: Sizes) -> Sizes:
        return Sizes(sizes.Q, sizes.K + self.by, sizes.q_offset + self.by)

    def _check(self, Q: int, K: int) -> None:
        self.pattern._check(Q, K + self.by)

    def _keep(self, i: np.ndarray, j: np.ndarray, sizes: Sizes) -> np.ndarray:
        return self.pattern._keep(i + self.by, j + self.by, self._there(sizes))

    def _intervals(self, sizes: Sizes) -> Intervals | None:
        intervals = self.pattern.intervals(self._there(sizes))
        return (
            None
            if intervals is None
            else (np.clip(intervals[0] - self.by, 0, None), np.clip(intervals[1] - self.by, 0, None))
        )


def of_distances(pattern: Pattern) -> bool:
    """Whether a pattern depends on i - j alone, so that it is the same wherever the keys begin."""
    match pattern:
        case Dense() | Causal() | Dilated():
            return True
        case SlidingWindow(sinks=sinks):
            return sinks == 0
        case And(left=left, right=right) | Or(left=left, right=right):
            return of_distances(left) and of_distances(right)
        case Not(pattern=inner):
            return of_distances(inner)
    return False


Span = tuple[int | None, int | None]  # keys before and after a query; None is unbounded


def span_of(pattern: Pattern) -> Span | None:
    """A pattern that is one window around each query, as (left, right)."""
    match pattern:
        case Dense():
            return None, None
        case Causal():
            return None, 0
        case SlidingWindow(left=left, right=right, sinks=0):
            return left, right
    return None


def window(left: int | None, right: int | None) -> Pattern:
    """The pattern of a span, by the simplest name that it has, so that equal masks are equal patterns."""
    if left is None:
        return Dense() if right is None else Causal() if right == 0 else SlidingWindow(None, right)
    return SlidingWindow(left, right)


def both(one: Pattern, other: Pattern) -> Pattern:
    """`one & other`, of two windows the window that they share."""
    a, b = span_of(one), span_of(other)
    if a is not None and b is not None:
        return window(*(min((x for x in pair if x is not None), default=None) for pair in zip(a, b, strict=True)))
    if a == (None, None):
        return other
    return one if b == (None, None) else one & other


def either(one: Pattern, other: Pattern) -> Pattern:
    """`one | other`, of two windows of which one holds the other the larger."""
    a, b = span_of(one), span_of(other)
    if a is not None and _holds(a, b):
        return one
    return other if b is not None and _holds(b, a) else one | other


def _holds(outer: Span, inner: Span | None) -> bool:
    if inner is None:
        return outer == (None, None)
    pairs = zip(outer, inner, strict=True)
    return all(far is None or (near is not None and near <= far) for far, near in pairs)
