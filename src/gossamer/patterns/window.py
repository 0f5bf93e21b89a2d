"""Windows: sliding, local blocks, and Longformer's window with global tokens."""

from __future__ import annotations

from collections.abc import Iterable
from dataclasses import dataclass
from functools import lru_cache
from typing import Any

import numpy as np

from gossamer.checks import array, digest, integer, optional_integer, show
from gossamer.patterns.base import Intervals, Pattern, Tiles
from gossamer.patterns.dilated import Dilated
from gossamer.patterns.grid import EMPTY, FULL, MIXED, Grid, Sizes, all_tiles, combine_ids
from gossamer.patterns.reach import Reach, Rule, rule


@dataclass(frozen=True, eq=False)
class SlidingWindow(Pattern):
    """A query at position i sees the keys i - left <= j <= i + right, both ends included.

    `SlidingWindow.of_size(W)` counts as transformers and vLLM do: the W keys that end at the query, itself included.

    Args:
        left: keys before the query; None is unbounded. A negative one leaves out keys after it too: -1 begins with the
            key behind the query.
        right: keys after the query; None is unbounded, 0 is causal, and a negative one leaves out keys before the query
            and its own: `SlidingWindow(None, -1)` is strictly causal.
        sinks: the first `sinks` keys of the sequence, not of each packed document, are always visible (attention
            sinks, arXiv:2309.17453): when `right <= 0` to queries at and behind them, j <= i, and for any other
            `right` to every query, those before them too.

    Examples:
        >>> gs.SlidingWindow(1).materialize(4, 4).astype(int)
        array([[1, 0, 0, 0],
               [1, 1, 0, 0],
               [0, 1, 1, 0],
               [0, 0, 1, 1]])
        >>> gs.SlidingWindow(3) == gs.SlidingWindow.of_size(4)
        True
    """

    left: int | None
    right: int | None = 0
    sinks: int = 0

    def __post_init__(self) -> None:
        object.__setattr__(self, "left", optional_integer("left", self.left, minimum=1 - 2**31))
        object.__setattr__(self, "right", optional_integer("right", self.right, minimum=1 - 2**31))
        object.__setattr__(self, "sinks", integer("sinks", self.sinks, minimum=0))

    @classmethod
    def of_size(cls, size: int, *, sinks: int = 0) -> SlidingWindow:
        """The `size` keys that end at the query, itself included: `SlidingWindow(size - 1)`.

        This is `sliding_window=size` of transformers and vLLM. flash-attn's `window_size=(left, 0)` is
        `SlidingWindow(left)`, which sees `left + 1` keys.

        Raises:
            ValueError: size is under 1.

        Examples:
            >>> import gossamer as gs
            >>> gs.SlidingWindow.of_size(2).materialize(3, 3).astype(int)
            array([[1, 0, 0],
                   [1, 1, 0],
                   [0, 1, 1]])
        """
        return cls(integer("size", size, minimum=1) - 1, sinks=sinks)

    def device_rule(self) -> Rule:
        near = Reach(self.left, self.right)
        return rule(near, Reach(right=0 if self._causal else None, first=self.sinks)) if self.sinks else rule(near)

    @property
    def _causal(self) -> bool:
        return self.right is not None and self.right <= 0

    def _keep(self, i: np.ndarray, j: np.ndarray, sizes: Sizes) -> np.ndarray:
        kept = np.ones(np.broadcast_shapes(i.shape, j.shape), dtype=bool)
        if self.left is not None:
            kept &= j >= i - self.left
        if self.right is not None:
            kept &= j <= i + self.right
        if self.sinks:
            kept |= (j < self.sinks) & (j <= i) if self._causal else j < self.sinks
        return kept

    def lower(self, sizes: Sizes) -> Pattern:
        if not self.sinks:
            return self
        return SlidingWindow(self.left, self.right) | FirstKeys(self.sinks, causal=self._causal)

    def _intervals(self, sizes: Sizes) -> Intervals | None:
        if self.sinks:
            return None
        i = np.arange(sizes.Q) + sizes.q_offset
        lo = np.zeros(sizes.Q, dtype=np.int64) if self.left is None else np.clip(i - self.left, 0, sizes.K)
        hi = np.full(sizes.Q, sizes.K) if self.right is None else np.clip(i + self.right + 1, 0, sizes.K)
        return np.minimum(lo, hi), hi

    def tile_ids(self, grid: Grid, ti: np.ndarray, tj: np.ndarray) -> np.ndarray:
        return super().tile_ids(grid, ti, tj) if self.sinks else grid.shift(ti, tj)


@dataclass(frozen=True, eq=False)
class FirstKeys(Pattern):
    """The first `count` keys, never in the future when `causal`."""

    count: int
    causal: bool

    def device_rule(self) -> Rule:
        return rule(Reach(right=0 if self.causal else None, first=self.count))

    def _keep(self, i: np.ndarray, j: np.ndarray, sizes: Sizes) -> np.ndarray:
        kept = (j < self.count) & np.ones_like(i, dtype=bool)
        return kept & (j <= i) if self.causal else kept

    def _intervals(self, sizes: Sizes) -> Intervals:
        count = min(self.count, sizes.K)
        i = np.arange(sizes.Q) + sizes.q_offset
        hi = np.clip(i + 1, 0, count) if self.causal else np.full(sizes.Q, count)
        return np.zeros(sizes.Q, dtype=np.int64), hi

    def tile_ids(self, grid: Grid, ti: np.ndarray, tj: np.ndarray) -> np.ndarray:
        # Rows far behind the diagonal see the same keys of a tile column.
        shift = np.minimum(grid.shift(ti, tj), grid.block_kv) if self.causal else np.zeros(len(ti), dtype=np.int64)
        return combine_ids(tj, shift)


@dataclass(frozen=True, eq=False)
class Local(Pattern):
    """Positions are cut into blocks, and a query sees the keys of its own block: i // block == j // block.

    `Local(block) & Causal()` is the causal variant.

    Examples:
        >>> gs.Local(2).materialize(4, 4).astype(int)
        array([[1, 1, 0, 0],
               [1, 1, 0, 0],
               [0, 0, 1, 1],
               [0, 0, 1, 1]])
    """

    block: int

    def __post_init__(self) -> None:
        object.__setattr__(self, "block", integer("block", self.block, minimum=1))

    def device_rule(self) -> Rule:
        return rule(Reach(blocks=(self.block,)))

    def _keep(self, i: np.ndarray, j: np.ndarray, sizes: Sizes) -> np.ndarray:
        return i // self.block == j // self.block

    def _intervals(self, sizes: Sizes) -> Intervals:
        first = (np.arange(sizes.Q) + sizes.q_offset) // self.block * self.block
        return np.clip(first, 0, sizes.K), np.clip(first + self.block, 0, sizes.K)

    def tile_ids(self, grid: Grid, ti: np.ndarray, tj: np.ndarray) -> np.ndarray:
        i0, j0 = grid.q_offset + ti * grid.block_q, tj * grid.block_kv
        return combine_ids(i0 // self.block - j0 // self.block, i0 % self.block, j0 % self.block)


@dataclass(frozen=True, eq=False, init=False, repr=False)
class Longformer(Pattern):
    """A symmetric window, dilated or not, and symmetric global tokens (arXiv:2004.05150).

    |i - j| <= (window // 2) * dilation with (i - j) % dilation == 0; a global position attends to all and is
    attended by all. Longformer's separate projections for global rows are the model's business.

    Args:
        window: keys in the window, the query itself not counted: window // 2 on each side.
        global_tokens: positions of the global tokens, each in [0, K).
        dilation: distance between neighbouring keys of the window.

    Examples:
        >>> gs.Longformer(2, [0]).materialize(5, 5).astype(int)
        array([[1, 1, 1, 1, 1],
               [1, 1, 1, 0, 0],
               [1, 1, 1, 1, 0],
               [1, 0, 1, 1, 1],
               [1, 0, 0, 1, 1]])
    """

    window: int
    global_tokens: tuple[int, ...]
    dilation: int

    def __init__(self, window: int, global_tokens: Iterable[int] = (), dilation: int = 1) -> None:
        object.__setattr__(self, "window", integer("window", window, minimum=0))
        tokens: Any = global_tokens
        if not isinstance(tokens, np.ndarray) and not hasattr(tokens, "detach"):
            try:
                tokens = list(tokens)
            except TypeError:
                raise ValueError(f"global_tokens must be a list of positions, got {show(global_tokens)}") from None
        tokens = np.unique(array("global_tokens", tokens, ndim=(1,), kind="integer"))
        if len(tokens) and int(tokens[0]) < 0:
            raise ValueError(f"global_tokens must be positions of at least 0, got {int(tokens[0])}")
        object.__setattr__(self, "global_tokens", tuple(tokens.tolist()))
        object.__setattr__(self, "dilation", integer("dilation", dilation, minimum=1))

    def __repr__(self) -> str:
        tokens = ""
        if self.global_tokens:
            listed = self.global_tokens
            tokens = f", global_tokens={list(listed)}" if len(listed) <= 8 else f", {len(listed)} global tokens"
        dilation = f", dilation={self.dilation}" if self.dilation != 1 else ""
        return f"Longformer({self.window}{tokens}{dilation})"

    def _check(self, Q: int, K: int) -> None:
        if self.global_tokens and self.global_tokens[-1] >= K:
            raise ValueError(f"global_tokens must be positions below K={K}, got {self.global_tokens[-1]}")

    def _keep(self, i: np.ndarray, j: np.ndarray, sizes: Sizes) -> np.ndarray:
        near = np.abs(i - j) <= self.window // 2 * self.dilation
        return (near & ((i - j) % self.dilation == 0)) | np.isin(i, self.global_tokens) | np.isin(j, self.global_tokens)

    @property
    def _near(self) -> Pattern:
        half = self.window // 2
        return SlidingWindow(half, half) if self.dilation == 1 else Dilated(half, half, self.dilation)

    def device_rule(self) -> Rule | None:
        return None if self.global_tokens else self._near.device_rule()

    def lower(self, sizes: Sizes) -> Pattern:
        if not self.global_tokens:
            return self._near
        return self._near | GlobalTokens(np.array(self.global_tokens, dtype=np.int64))


@dataclass(frozen=True, eq=False)
class GlobalTokens(Pattern):
    """Pairs whose query or key is one of the positions `tokens`, sorted."""

    tokens: np.ndarray

    def _key(self) -> tuple[Any, ...]:
        return digest(self.tokens)

    def _keep(self, i: np.ndarray, j: np.ndarray, sizes: Sizes) -> np.ndarray:
        return np.isin(i, self.tokens) | np.isin(j, self.tokens)

    def tile_bound(self, grid: Grid) -> int:
        rows, _, columns, _ = _remembered_tiles(self, grid)
        return int((rows > 0).sum()) * grid.nk + int((columns > 0).sum()) * grid.nq

    def tile_candidates(self, grid: Grid, start: int, stop: int) -> Tiles:
        rows, _, columns, _ = _remembered_tiles(self, grid)
        (global_rows,) = np.nonzero(rows[start:stop])
        (global_columns,) = np.nonzero(columns)
        ti, tj = all_tiles(grid, 0, len(global_rows))
        return (
            np.concatenate([global_rows[ti] + start, np.repeat(np.arange(start, stop), len(global_columns))]),
            np.concatenate([tj, np.tile(global_columns, stop - start)]),
        )

    def tile_classes(self, grid: Grid, ti: np.ndarray, tj: np.ndarray) -> np.ndarray:
        rows, _, columns, _ = _remembered_tiles(self, grid)
        r0, r1 = grid.row_bounds(ti)
        c0, c1 = grid.key_bounds(tj)
        full = (rows[ti] == r1 - r0) | (columns[tj] == c1 - c0)
        empty = (rows[ti] == 0) & (columns[tj] == 0)
        return np.where(full, FULL, np.where(empty, EMPTY, MIXED)).astype(np.int8)

    def tile_ids(self, grid: Grid, ti: np.ndarray, tj: np.ndarray) -> np.ndarray:
        _, row_ids, _, column_ids = _remembered_tiles(self, grid)
        return combine_ids(row_ids[ti], column_ids[tj])


@lru_cache(maxsize=8)
def _remembered_tiles(pattern: GlobalTokens, grid: Grid) -> tuple[np.ndarray, np.ndarray, np.ndarray, np.ndarray]:
    """The number of global positions of each tile row and tile column, and an id of these positions."""
    rows = pattern.tokens - grid.q_offset
    rows = rows[(rows >= 0) & (rows < grid.Q)]
    return (*_members(rows, grid.block_q, grid.nq), *_members(pattern.tokens, grid.block_kv, grid.nk))


def _members(positions: np.ndarray, block: int, blocks: int) -> tuple[np.ndarray, np.ndarray]:
    """For each block of positions: how many of the given (sorted) it holds, and an id of which (equal: the same)."""
    counts = np.bincount(positions // block, minlength=blocks)
    ids_of: dict[bytes, int] = {}
    inside = np.split(positions % block, np.cumsum(counts)[:-1])
    ids = [ids_of.setdefault(members.tobytes(), len(ids_of)) for members in inside]
    return counts, np.array(ids, dtype=np.int64)
