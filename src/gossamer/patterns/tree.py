"""A tree of draft tokens, as speculative decoding verifies it."""

from __future__ import annotations

from dataclasses import dataclass
from typing import Any

import numpy as np

from gossamer.checks import array, digest, show
from gossamer.patterns.base import Pairs, Pattern, Tiles
from gossamer.patterns.grid import EMPTY, MIXED, Grid, Sizes, ranges
from gossamer.patterns.window import FirstKeys


@dataclass(frozen=True, eq=False, init=False, repr=False)
class Tree(Pattern):
    """Query row t is node t of a tree and sees itself, its ancestors, and the prompt: the keys before the tree's.

    Node t is the key at its own position, t + `q_offset`: by default the prompt is the first K - Q keys. In a cache of
    fixed size `q_offset` is the length of the prompt, and the keys behind the tree are seen by none.

    Args:
        parents: integer (Q,), parents[t] in [-1, t): the node that t follows, or -1 for a root. There may be several.

    Examples:
        >>> gs.Tree([-1, 0, 0]).materialize(3, 4).astype(int)  # a prompt of one key, and two guesses after node 0
        array([[1, 1, 0, 0],
               [1, 1, 1, 0],
               [1, 1, 0, 1]])
    """

    parents: np.ndarray

    def __init__(self, parents: Any) -> None:
        parents = array("parents", parents, ndim=(1,), kind="integer")
        if not len(parents):
            raise ValueError(f"parents must have at least one node, got {show(parents)}")
        wrong = np.flatnonzero((parents < -1) | (parents >= np.arange(len(parents))))
        if len(wrong):
            t = int(wrong[0])
            raise ValueError(f"parents[t] must be in [-1, t), got parents[{t}] = {int(parents[t])}")
        object.__setattr__(self, "parents", parents)
        object.__setattr__(self, "_digest", digest(parents))

    def __repr__(self) -> str:
        return f"Tree({len(self.parents)} nodes)"

    def _key(self) -> tuple[Any, ...]:
        return self.__dict__["_digest"]

    def _check(self, Q: int, K: int) -> None:
        if len(self.parents) != Q or K < Q:
            raise ValueError(
                f"Tree has {len(self.parents)} nodes, needs Q={Q} of them and at least as many keys, K={K}"
            )

    def lower(self, sizes: Sizes) -> Pattern:
        nodes, prompt = _Nodes(self), min(sizes.q_offset, sizes.K)
        return FirstKeys(prompt, causal=False) | nodes if prompt > 0 else nodes

    def _keep(self, i: np.ndarray, j: np.ndarray, sizes: Sizes) -> np.ndarray:
        return self.lower(sizes)._keep(i, j, sizes)


@dataclass(frozen=True, eq=False)
class _Nodes(Pattern):
    """The nodes of a tree alone: row t is key t + q_offset."""

    tree: Tree

    def _spans(self) -> tuple[np.ndarray, np.ndarray]:
        """(place in a depth-first walk, end of the subtree there) of each node."""
        known = self.__dict__.get("_walk")
        if known is None:
            parents = self.tree.parents.tolist()
            size = [1] * len(parents)
            for t in range(len(parents) - 1, -1, -1):
                if parents[t] >= 0:
                    size[parents[t]] += size[t]
            first, free, roots = [0] * len(parents), [0] * len(parents), 0
            for t, parent in enumerate(parents):
                if parent < 0:
                    first[t], roots = roots, roots + size[t]
                else:
                    first[t], free[parent] = free[parent], free[parent] + size[t]
                free[t] = first[t] + 1
            known = np.array(first), np.array(first) + np.array(size)
            object.__setattr__(self, "_walk", known)
        return known

    def _keep(self, i: np.ndarray, j: np.ndarray, sizes: Sizes) -> np.ndarray:
        first, end = self._spans()
        row, node = i - sizes.q_offset, j - sizes.q_offset
        exists = (row >= 0) & (row < len(first)) & (node >= 0) & (node < len(first))
        row, node = np.clip(row, 0, len(first) - 1), np.clip(node, 0, len(first) - 1)
        return exists & (first[node] <= first[row]) & (first[row] < end[node])

    def listed_pairs(self, sizes: Sizes, start: int, stop: int) -> Pairs:
        rows = at = np.arange(start, stop)
        pairs = []
        while len(rows):
            key = at + sizes.q_offset
            exists = (key >= 0) & (key < sizes.K)
            pairs.append(rows[exists] * sizes.K + key[exists])
            at = self.tree.parents[at]
            rows, at = rows[at >= 0], at[at >= 0]
        rows, keys = np.divmod(np.sort(np.concatenate(pairs)), sizes.K)
        return rows, keys

    def tile_bound(self, grid: Grid) -> int:
        return len(self.tile_candidates(grid, 0, grid.nq)[0])

    def tile_candidates(self, grid: Grid, start: int, stop: int) -> Tiles:
        _, last = grid.row_bounds(np.arange(start, stop))
        first = np.full(stop - start, min(max(grid.q_offset, 0), grid.K) // grid.block_kv)
        end = -(-np.clip(grid.q_offset + last, 0, grid.K) // grid.block_kv)
        which, tj = ranges(first, np.maximum(first, end))
        return which + start, tj

    def tile_classes(self, grid: Grid, ti: np.ndarray, tj: np.ndarray) -> np.ndarray:
        first, last = grid.key_bounds(tj)
        _, row = grid.row_bounds(ti)
        return np.where((last > grid.q_offset) & (first < grid.q_offset + row), MIXED, EMPTY).astype(np.int8)
