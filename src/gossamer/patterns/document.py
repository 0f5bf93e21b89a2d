"""Packed documents: pairs of the same document."""

from __future__ import annotations

from dataclasses import dataclass
from functools import lru_cache
from typing import Any, NamedTuple

import numpy as np

from gossamer.checks import array, digest
from gossamer.patterns.base import Intervals, Pattern, Tiles
from gossamer.patterns.grid import EMPTY, FULL, MIXED, Grid, Sizes, ranges


@dataclass(frozen=True, eq=False, init=False, repr=False)
class Document(Pattern):
    """Pairs whose positions carry the same document id: ids[i] == ids[j]. Positions without an id see nothing.

    `Document(ids) & Causal()` is packed causal attention. Ids that form one run each (packed documents) make
    interval tiles; an id that returns later is legal and makes bits tiles.

    Args:
        ids: integer (K,), or (B, K) for documents that differ by batch element. Where `q_offset` is given there may be
            more than K: those of queries behind the keys of a cache.

    Examples:
        >>> (gs.Document([0, 0, 1, 1, 1]) & gs.Causal()).materialize(5, 5).astype(int)
        array([[1, 0, 0, 0, 0],
               [1, 1, 0, 0, 0],
               [0, 0, 1, 0, 0],
               [0, 0, 1, 1, 0],
               [0, 0, 1, 1, 1]])
    """

    ids: np.ndarray

    def __init__(self, ids: Any) -> None:
        ids = array("ids", ids, ndim=(1, 2), kind="integer")
        if ids.size == 0:
            raise ValueError(f"ids must hold at least one position, got shape {ids.shape}")
        object.__setattr__(self, "ids", ids)
        object.__setattr__(self, "_digest", digest(ids))

    @classmethod
    def from_cu_seqlens(cls, cu_seqlens: Any) -> Document:
        """Documents [cu_seqlens[n], cu_seqlens[n + 1]) of one packed sequence, as variable-length kernels give them.

        Args:
            cu_seqlens: integer (documents + 1,), starting at 0, non-decreasing; the last entry is K.

        Examples:
            >>> gs.Document.from_cu_seqlens([0, 2, 5]) == gs.Document([0, 0, 1, 1, 1])
            True
        """
        edges = array("cu_seqlens", cu_seqlens, ndim=(1,), kind="integer")
        if len(edges) < 2 or edges[0] != 0 or (np.diff(edges) < 0).any() or not 0 < int(edges[-1]) < 2**31:
            raise ValueError(
                f"cu_seqlens must start at 0, never decrease and end at K in [1, 2**31), got {edges[:8].tolist()}"
                + ("..." if len(edges) > 8 else "")
            )
        return cls(np.repeat(np.arange(len(edges) - 1), np.diff(edges)))

    def __repr__(self) -> str:
        shape = "x".join(str(n) for n in self.ids.shape)
        return f"Document({shape} positions, {len(np.unique(self.ids))} ids)"

    def _key(self) -> tuple[Any, ...]:
        return self.__dict__["_digest"]

    @property
    def lead(self) -> tuple[int, int]:
        return (1 if self.ids.ndim == 1 else self.ids.shape[0]), 1

    def at(self, b: int, h: int) -> Pattern:
        return self if self.ids.ndim == 1 else Document(self.ids[b])

    _has_positions = True

    def _check_positions(self, K: int, placed: bool) -> None:
        positions = self.ids.shape[-1]
        if positions < K or (positions > K and not placed):
            more = ", or more where q_offset says which of them the queries are at"
            raise ValueError(f"ids of Document must have K={K} positions{more}; got {positions}")

    def _keep(self, i: np.ndarray, j: np.ndarray, sizes: Sizes) -> np.ndarray:
        last = len(self.ids) - 1
        exists = (i >= 0) & (i <= last) & (j >= 0) & (j <= last)
        return (self.ids[np.clip(i, 0, last)] == self.ids[np.clip(j, 0, last)]) & exists

    def _intervals(self, sizes: Sizes) -> Intervals | None:
        starts = np.concatenate([[0], np.nonzero(np.diff(self.ids))[0] + 1, [len(self.ids)]])
        if len(np.unique(self.ids)) != len(starts) - 1:
            return None
        run, last = np.repeat(np.arange(len(starts) - 1), np.diff(starts)), len(self.ids) - 1
        i = np.arange(sizes.Q) + sizes.q_offset
        at, starts = run[np.clip(i, 0, last)], np.minimum(starts, sizes.K)
        lo = np.where(i < 0, 0, np.where(i <= last, starts[at], sizes.K))
        hi = np.where(i < 0, 0, np.where(i <= last, starts[at + 1], sizes.K))
        return lo, hi

    def tile_bound(self, grid: Grid) -> int:
        if self.intervals(grid.sizes) is not None:
            return super().tile_bound(grid)
        return len(_remembered_tiles(self, grid).ti)

    def tile_candidates(self, grid: Grid, start: int, stop: int) -> Tiles:
        if self.intervals(grid.sizes) is not None:
            return super().tile_candidates(grid, start, stop)
        tiles = _remembered_tiles(self, grid)
        first, last = np.searchsorted(tiles.ti, [start, stop])
        return tiles.ti[first:last], tiles.tj[first:last]

    def tile_classes(self, grid: Grid, ti: np.ndarray, tj: np.ndarray) -> np.ndarray:
        if self.intervals(grid.sizes) is not None:
            return super().tile_classes(grid, ti, tj)
        tiles = _remembered_tiles(self, grid)
        q_min, q_max = tiles.q_min[ti], tiles.q_max[ti]
        k_min, k_max = tiles.k_min[tj], tiles.k_max[tj]
        full = (q_min == q_max) & (k_min == k_max) & (q_min == k_min) & tiles.q_inside[ti]
        empty = (q_max < k_min) | (k_max < q_min)
        return np.where(full, FULL, np.where(empty, EMPTY, MIXED)).astype(np.int8)


class _DocumentTiles(NamedTuple):
    """Tiles that share an id, by tile row, and the least and greatest id of each tile's rows and keys."""

    ti: np.ndarray
    tj: np.ndarray
    q_min: np.ndarray
    q_max: np.ndarray
    q_inside: np.ndarray  # all rows of the tile have a position that has an id
    k_min: np.ndarray
    k_max: np.ndarray


@lru_cache(maxsize=4)
def _remembered_tiles(pattern: Document, grid: Grid) -> _DocumentTiles:
    _, ids = np.unique(pattern.ids, return_inverse=True)
    i = np.arange(grid.Q) + grid.q_offset
    inside = (i >= 0) & (i < len(ids))
    edges_q = np.arange(grid.nq) * grid.block_q
    edges_k = np.arange(grid.nk) * grid.block_kv
    at = ids[np.clip(i, 0, len(ids) - 1)]
    # Each (tile, id) once, then a join of the two sides on the id.
    n, ids = int(ids.max()) + 1, ids[: grid.K]
    q_tile, q_id = np.divmod(np.unique((np.arange(grid.Q) // grid.block_q * n + at)[inside]), n)
    k_id, k_tile = np.divmod(np.unique(ids * grid.nk + np.arange(grid.K) // grid.block_kv), grid.nk)
    which, entries = ranges(np.searchsorted(k_id, q_id), np.searchsorted(k_id, q_id, side="right"))
    ti, tj = np.divmod(np.unique(q_tile[which] * grid.nk + k_tile[entries]), grid.nk)
    return _DocumentTiles(
        ti, tj,
        np.minimum.reduceat(at, edges_q), np.maximum.reduceat(at, edges_q), np.logical_and.reduceat(inside, edges_q),
        np.minimum.reduceat(ids, edges_k), np.maximum.reduceat(ids, edges_k),
    )  # fmt: skip
