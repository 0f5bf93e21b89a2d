"""Dense and causal attention."""

from __future__ import annotations

from dataclasses import dataclass

import numpy as np

from gossamer.patterns.base import Intervals, Pattern
from gossamer.patterns.grid import Grid, Sizes
from gossamer.patterns.reach import Reach, Rule, rule


@dataclass(frozen=True, eq=False)
class Dense(Pattern):
    """Every query sees every key.

    Examples:
        >>> gs.Dense().materialize(2, 3).astype(int)
        array([[1, 1, 1],
               [1, 1, 1]])
    """

    def device_rule(self) -> Rule:
        return rule(Reach())

    def _keep(self, i: np.ndarray, j: np.ndarray, sizes: Sizes) -> np.ndarray:
        return np.ones(np.broadcast_shapes(i.shape, j.shape), dtype=bool)

    def _intervals(self, sizes: Sizes) -> Intervals:
        return np.zeros(sizes.Q, dtype=np.int64), np.full(sizes.Q, sizes.K, dtype=np.int64)

    def tile_ids(self, grid: Grid, ti: np.ndarray, tj: np.ndarray) -> np.ndarray:
        return np.zeros(len(ti), dtype=np.int64)


@dataclass(frozen=True, eq=False)
class Causal(Pattern):
    """A query at position i sees the keys j <= i.

    Examples:
        >>> gs.Causal().materialize(2, 4).astype(int)  # two queries behind a cache of two keys
        array([[1, 1, 1, 0],
               [1, 1, 1, 1]])
    """

    def device_rule(self) -> Rule:
        return rule(Reach(right=0))

    def _keep(self, i: np.ndarray, j: np.ndarray, sizes: Sizes) -> np.ndarray:
        return j <= i

    def _intervals(self, sizes: Sizes) -> Intervals:
        i = np.arange(sizes.Q) + sizes.q_offset
        return np.zeros(sizes.Q, dtype=np.int64), np.clip(i + 1, 0, sizes.K)

    def tile_ids(self, grid: Grid, ti: np.ndarray, tj: np.ndarray) -> np.ndarray:
        return grid.shift(ti, tj)
