"""Composition: &, |, ~ and a pattern for each head."""

from __future__ import annotations

import math
from collections.abc import Iterable
from dataclasses import dataclass
from typing import Any, ClassVar

import numpy as np

from gossamer.checks import show
from gossamer.patterns.base import Intervals, Pairs, Pattern, Tiles, above
from gossamer.patterns.grid import FULL, MIXED, Grid, Sizes, combine_ids, distinct
from gossamer.patterns.reach import Rule


@dataclass(frozen=True, eq=False, repr=False)
class _Binary(Pattern):
    left: Pattern
    right: Pattern

    _symbol = "?"

    def __post_init__(self) -> None:
        for mine, other in zip(self.left.lead, self.right.lead, strict=True):
            if mine != other and 1 not in (mine, other):
                raise ValueError(
                    f"patterns describe different batch elements or heads: {show(self.left)} has (B, H) = "
                    f"{self.left.lead}, {show(self.right)} has {self.right.lead}"
                )

    def __repr__(self) -> str:
        return f"({self.left!r} {self._symbol} {self.right!r})"

    @property
    def lead(self) -> tuple[int, int]:
        (b0, h0), (b1, h1) = self.left.lead, self.right.lead
        return max(b0, b1), max(h0, h1)

    @property
    def _period(self) -> tuple[int, int]:
        periods = zip(self.lead, self.left._period, self.right._period, strict=True)
        every_b, every_h = (min(lead, math.lcm(one, other)) for lead, one, other in periods)
        return every_b, every_h

    def at(self, b: int, h: int) -> Pattern:
        left, right = (p.at(min(b, p.lead[0] - 1), min(h, p.lead[1] - 1)) for p in (self.left, self.right))
        return self if left is self.left and right is self.right else type(self)(left, right)

    @property
    def reads_positions(self) -> bool:
        return self.left.reads_positions or self.right.reads_positions

    def lower(self, sizes: Sizes) -> Pattern:
        return type(self)(self.left.lower(sizes), self.right.lower(sizes))

    def _check(self, Q: int, K: int) -> None:
        self.left._check(Q, K)
        self.right._check(Q, K)

    _has_positions = True

    def _check_positions(self, K: int, placed: bool) -> None:
        self.left._check_positions(K, placed)
        self.right._check_positions(K, placed)

    def tile_ids(self, grid: Grid, ti: np.ndarray, tj: np.ndarray) -> np.ndarray:
        ids = []
        for part in (self.left, self.right):
            classes = part.tile_classes(grid, ti, tj)  # what is not mixed is alike everywhere
            ids += [classes, np.where(classes == MIXED, part.tile_ids(grid, ti, tj), 0)]
        return combine_ids(*ids)


class And(_Binary):
    """Pairs that both patterns keep."""

    _symbol = "&"

    def device_rule(self) -> Rule | None:
        left, right = self.left.device_rule(), self.right.device_rule()
        return None if left is None or right is None else left.both(right)

    def _keep(self, i: np.ndarray, j: np.ndarray, sizes: Sizes) -> np.ndarray:
        return self.left._keep(i, j, sizes) & self.right._keep(i, j, sizes)

    def _intervals(self, sizes: Sizes) -> Intervals | None:
        left, right = self.left.intervals(sizes), self.right.intervals(sizes)
        if left is None or right is None:
            return None
        return np.maximum(left[0], right[0]), np.minimum(left[1], right[1])

    def listed_pairs(self, sizes: Sizes, start: int, stop: int) -> Pairs | None:
        for one, other in ((self.left, self.right), (self.right, self.left)):
            listed = one.listed_pairs(sizes, start, stop)
            if listed is not None:
                rows, keys = listed
                kept = np.broadcast_to(other._keep(rows + sizes.q_offset, keys, sizes), rows.shape)
                return rows[kept], keys[kept]
        return None

    def tile_bound(self, grid: Grid) -> int:
        return min(self.left.tile_bound(grid), self.right.tile_bound(grid))

    def tile_candidates(self, grid: Grid, start: int, stop: int) -> Tiles:
        fewer = self.left if self.left.tile_bound(grid) <= self.right.tile_bound(grid) else self.right
        return fewer.tile_candidates(grid, start, stop)

    def tile_classes(self, grid: Grid, ti: np.ndarray, tj: np.ndarray) -> np.ndarray:
        return np.minimum(self.left.tile_classes(grid, ti, tj), self.right.tile_classes(grid, ti, tj))

    def tile_masks(self, grid: Grid, ti: np.ndarray, tj: np.ndarray) -> np.ndarray:
        return self.left.shared_tile_masks(grid, ti, tj) & self.right.shared_tile_masks(grid, ti, tj)


class Or(_Binary):
    """Pairs that either pattern keeps."""

    _symbol = "|"

    def device_rule(self) -> Rule | None:
        left, right = self.left.device_rule(), self.right.device_rule()
        return None if left is None or right is None else left.either(right)

    def _keep(self, i: np.ndarray, j: np.ndarray, sizes: Sizes) -> np.ndarray:
        return self.left._keep(i, j, sizes) | self.right._keep(i, j, sizes)

    def listed_pairs(self, sizes: Sizes, start: int, stop: int) -> Pairs | None:
        left = self.left.listed_pairs(sizes, start, stop)
        right = None if left is None else self.right.listed_pairs(sizes, start, stop)
        if left is None or right is None:
            return None
        pairs = [rows * sizes.K + keys for rows, keys in (left, right)]
        rows, keys = np.divmod(distinct(np.concatenate(pairs)), sizes.K)
        return rows, keys

    def tile_bound(self, grid: Grid) -> int:
        return min(grid.nq * grid.nk, self.left.tile_bound(grid) + self.right.tile_bound(grid))

    def tile_candidates(self, grid: Grid, start: int, stop: int) -> Tiles:
        left = self.left.tile_candidates(grid, start, stop)
        right = self.right.tile_candidates(grid, start, stop)
        return np.concatenate([left[0], right[0]]), np.concatenate([left[1], right[1]])

    def tile_classes(self, grid: Grid, ti: np.ndarray, tj: np.ndarray) -> np.ndarray:
        return np.maximum(self.left.tile_classes(grid, ti, tj), self.right.tile_classes(grid, ti, tj))

    def tile_masks(self, grid: Grid, ti: np.ndarray, tj: np.ndarray) -> np.ndarray:
        return self.left.shared_tile_masks(grid, ti, tj) | self.right.shared_tile_masks(grid, ti, tj)


@dataclass(frozen=True, eq=False, repr=False)
class Not(Pattern):
    """Pairs that the pattern does not keep."""

    pattern: Pattern

    def __repr__(self) -> str:
        return f"~{self.pattern!r}"

    @property
    def lead(self) -> tuple[int, int]:
        return self.pattern.lead

    @property
    def _period(self) -> tuple[int, int]:
        return self.pattern._period

    def at(self, b: int, h: int) -> Pattern:
        inner = self.pattern.at(b, h)
        return self if inner is self.pattern else Not(inner)

    @property
    def reads_positions(self) -> bool:
        return self.pattern.reads_positions

    def lower(self, sizes: Sizes) -> Pattern:
        return Not(self.pattern.lower(sizes))

    def _check(self, Q: int, K: int) -> None:
        self.pattern._check(Q, K)

    _has_positions = True

    def _check_positions(self, K: int, placed: bool) -> None:
        self.pattern._check_positions(K, placed)

    def _keep(self, i: np.ndarray, j: np.ndarray, sizes: Sizes) -> np.ndarray:
        return ~self.pattern._keep(i, j, sizes)

    def tile_classes(self, grid: Grid, ti: np.ndarray, tj: np.ndarray) -> np.ndarray:
        return FULL - self.pattern.tile_classes(grid, ti, tj)

    def tile_ids(self, grid: Grid, ti: np.ndarray, tj: np.ndarray) -> np.ndarray:
        return self.pattern.tile_ids(grid, ti, tj)

    def tile_masks(self, grid: Grid, ti: np.ndarray, tj: np.ndarray) -> np.ndarray:
        return ~self.pattern.tile_masks(grid, ti, tj)


@dataclass(frozen=True, eq=False, init=False)
class _Each(Pattern):
    """A pattern for each query head or each batch element."""

    patterns: tuple[Pattern, ...]
    _axis: ClassVar[int]  # of `lead`, along which each has its own
    _one: ClassVar[str]  # what that axis counts, and
    _shared: ClassVar[str]  # the other one, for messages

    def __init__(self, patterns: Iterable[Pattern]) -> None:
        own, other = self._axis, 1 - self._axis
        wanted = f"patterns must be a non-empty list of patterns, one for each {self._one}"
        try:
            given: tuple[Any, ...] = tuple(patterns)
        except TypeError:
            raise ValueError(f"{wanted}, got {show(patterns)}") from None
        if not given or not all(isinstance(p, Pattern) for p in given):
            raise ValueError(f"{wanted}, got {show(patterns)}")
        for p in given:
            if p._ordered:
                raise ValueError(
                    f"patterns must not hold {show(p)}: its order is for all heads and batch elements. Give the CSR "
                    f"pattern itself, which is computed in the given order"
                )
        if any(p.lead[own] != 1 for p in given) or len({p.lead[other] for p in given} - {1}) > 1:
            raise ValueError(
                f"{wanted}; none may differ by {self._one} itself, and all are for the same {self._shared}; "
                f"got (B, H) = {', '.join(str(p.lead) for p in given[:8])}{', ...' * (len(given) > 8)}"
            )
        object.__setattr__(self, "patterns", given)

    @property
    def lead(self) -> tuple[int, int]:
        many, shared = len(self.patterns), max(p.lead[1 - self._axis] for p in self.patterns)
        return (shared, many) if self._axis else (many, shared)

    @property
    def _period(self) -> tuple[int, int]:
        shared = math.lcm(*(p._period[1 - self._axis] for p in self.patterns))
        many, shared = len(self.patterns), min(self.lead[1 - self._axis], shared)
        return (shared, many) if self._axis else (many, shared)

    def at(self, b: int, h: int) -> Pattern:
        pattern = self.patterns[h if self._axis else b]
        return pattern.at(min(b, pattern.lead[0] - 1), min(h, pattern.lead[1] - 1))

    @property
    def reads_positions(self) -> bool:
        return any(pattern.reads_positions for pattern in self.patterns)

    def lower(self, sizes: Sizes) -> Pattern:
        raise AssertionError("lowered one by one, through `at`")

    def _keep(self, i: np.ndarray, j: np.ndarray, sizes: Sizes) -> np.ndarray:
        raise AssertionError("evaluated one by one, through `at`")

    def _check(self, Q: int, K: int) -> None:
        for pattern in self.patterns:
            pattern._check(Q, K)

    _has_positions = True

    def _check_positions(self, K: int, placed: bool) -> None:
        for pattern in self.patterns:
            pattern._check_positions(K, placed)


@dataclass(frozen=True, eq=False, init=False)
class PerHead(_Each):
    """A pattern for each query head, in order.

    Args:
        patterns: one pattern per query head; each may differ by batch element but not by head.

    Examples:
        >>> pattern = gs.PerHead([gs.SlidingWindow(1)] * 6 + [gs.Causal()] * 2)
        >>> pattern.materialize(4, 4).shape
        (1, 8, 4, 4)
    """

    _axis, _one, _shared = 1, "query head", "batch"


@dataclass(frozen=True, eq=False, init=False)
class PerBatch(_Each):
    """A pattern for each batch element, in order.

    Args:
        patterns: one pattern per batch element; each may differ by head but not by batch element.

    Examples:
        >>> gs.PerBatch([gs.Dense(), gs.Causal()]).density(4, 4)
        0.8125
    """

    _axis, _one, _shared = 0, "batch element", "heads"


above.conjunction, above.union, above.complement = And, Or, Not
