"""An explicit list of pairs in compressed sparse rows."""

from __future__ import annotations

from dataclasses import dataclass
from functools import lru_cache
from typing import Any

import numpy as np

from gossamer.checks import array, digest, integer, show
from gossamer.patterns.base import Pairs, Pattern, above
from gossamer.patterns.block import Counted, TileCounts
from gossamer.patterns.grid import WORD, Grid, Sizes, distinct, ranges
from gossamer.patterns.pairs import pair_chunks
from gossamer.patterns.tiles import count_pairs

# A layout of them could not be addressed.
MOST_PAIRS = 2**31 - 1


@dataclass(frozen=True, eq=False, init=False, repr=False)
class CSR(Counted):
    """Query row r sees the keys indices[indptr[r] : indptr[r + 1]], rows counted from 0 whatever `q_offset` is.

    Args:
        indptr: integer (Q + 1,), starting at 0, non-decreasing.
        indices: integer (nnz,) in [0, num_keys), strictly increasing within a row. `CSR.from_scipy`,
            `CSR.from_torch` and `CSR.from_edge_index` sort and merge.
        num_keys: K.

    Examples:
        >>> gs.CSR(indptr=[0, 2, 2, 3], indices=[0, 2, 1], num_keys=3).materialize(3, 3).astype(int)
        array([[1, 0, 1],
               [0, 0, 0],
               [0, 1, 0]])
    """

    indptr: np.ndarray
    indices: np.ndarray
    num_keys: int

    def __init__(self, indptr: Any, indices: Any, num_keys: int) -> None:
        num_keys = integer("num_keys", num_keys, minimum=0)
        indptr = array("indptr", indptr, ndim=(1,), kind="integer")
        indices = array("indices", indices, ndim=(1,), kind="integer")
        if not len(indptr) or indptr[0] != 0 or (indptr[1:] < indptr[:-1]).any():
            raise ValueError(
                f"indptr must start at 0 and never decrease, with one entry more than query rows; got {show(indptr)}"
            )
        if int(indptr[-1]) != len(indices):
            raise ValueError(f"indptr must end at len(indices)={len(indices)}, got {int(indptr[-1])}")
        outside = (indices < 0) | (indices >= num_keys)
        if outside.any():
            raise ValueError(f"indices must be in [0, {num_keys}), got {int(indices[outside][0])}")
        rising = np.diff(indices) > 0
        starts = indptr[1:-1]
        rising[starts[(starts > 0) & (starts < len(indices))] - 1] = True  # a new row may begin anywhere
        if not rising.all():
            at = int(np.nonzero(~rising)[0][0]) + 1
            row = int(np.searchsorted(indptr, at, side="right")) - 1
            raise ValueError(
                f"indices must increase strictly within a row; row {row} has {int(indices[at - 1])} before "
                f"{int(indices[at])}. CSR.from_scipy, CSR.from_torch and CSR.from_edge_index sort and merge"
            )
        object.__setattr__(self, "indptr", indptr)
        object.__setattr__(self, "indices", indices)
        object.__setattr__(self, "num_keys", num_keys)
        object.__setattr__(self, "_digest", (digest(indptr), digest(indices)))

    @classmethod
    def from_scipy(cls, matrix: Any) -> CSR:
        """From any scipy sparse matrix (Q, K): stored entries count, values are ignored, duplicates are merged.

        Examples:
            >>> import scipy.sparse
            >>> gs.CSR.from_scipy(scipy.sparse.csr_array([[1, 0], [1, 1]])).indices
            array([0, 0, 1])
        """
        if not hasattr(matrix, "tocoo") or len(getattr(matrix, "shape", ())) != 2:
            raise ValueError(
                f"matrix must be a two-dimensional scipy sparse matrix, got {show(matrix)}{_instead(matrix)}"
            )
        entries = matrix.tocoo()
        return cls._from_pairs(entries.row, entries.col, *matrix.shape)

    @classmethod
    def from_torch(cls, tensor: Any) -> CSR:
        """From a torch sparse CSR or COO tensor (Q, K): stored entries count, values are ignored, duplicates merge.

        Examples:
            >>> gs.CSR.from_torch(torch.eye(4).to_sparse()).indices
            array([0, 1, 2, 3])
        """
        layout = str(getattr(tensor, "layout", None))
        if layout not in ("torch.sparse_csr", "torch.sparse_coo") or tensor.dim() != 2:
            raise ValueError(
                f"tensor must be a two-dimensional torch sparse CSR or COO tensor, got {show(tensor)}{_instead(tensor)}"
            )
        Q, K = tensor.shape
        if layout == "torch.sparse_csr":
            indptr = tensor.crow_indices().cpu().numpy()
            rows = np.repeat(np.arange(Q), np.diff(indptr))
            return cls._from_pairs(rows, tensor.col_indices().cpu().numpy(), Q, K)
        rows, columns = tensor._indices().cpu().numpy()
        return cls._from_pairs(rows, columns, Q, K)

    @classmethod
    def from_edge_index(cls, edge_index: Any, num_nodes: int | tuple[int, int]) -> CSR:
        """From the edges of a graph, as PyTorch Geometric has them: each node attends to the sources of its edges.

        An edge that is listed several times counts once. `edge_index.flip(0)` is the graph with its edges turned.

        Args:
            edge_index: integer (2, edges), in any order: the source of each edge, then its target.
            num_nodes: nodes, those without an edge too; (sources, targets) where these are of two kinds: K keys are
                sources, Q query rows are targets.

        Examples:
            >>> gs.CSR.from_edge_index([[0, 1, 2], [1, 2, 0]], num_nodes=3).materialize(3, 3).astype(int)
            array([[0, 0, 1],
                   [1, 0, 0],
                   [0, 1, 0]])
        """
        edges = array("edge_index", edge_index, ndim=(2,), kind="integer")
        if edges.shape[0] != 2:
            raise ValueError(f"edge_index must have shape (2, edges), got {edges.shape}")
        both = num_nodes if isinstance(num_nodes, (tuple, list)) else (num_nodes, num_nodes)
        if len(both) != 2:
            raise ValueError(f"num_nodes must be one number or (sources, targets), got {show(num_nodes)}")
        K, Q = (integer("num_nodes", n, minimum=1) for n in both)
        for name, given, size in (("sources", edges[0], K), ("targets", edges[1], Q)):
            if len(given) and (int(given.min()) < 0 or int(given.max()) >= size):
                raise ValueError(
                    f"edge_index must hold {name} in [0, {size}), as num_nodes says; got [{given.min()}, {given.max()}]"
                )
        return cls._from_pairs(edges[1], edges[0], Q, K)

    @classmethod
    def from_pattern(cls, pattern: Pattern, Q: int, K: int, q_offset: int | None = None) -> CSR:
        """The pairs that any pattern keeps for Q query rows and K keys, as a list; it takes 8 bytes for each.

        Args:
            pattern: one that all batch elements and query heads share.
            q_offset: position of query row 0, K - Q by default.

        Examples:
            >>> gs.CSR.from_pattern(gs.Causal() & ~gs.Local(2), 4, 4).indices
            array([0, 1, 0, 1])
        """
        return _listed("pattern", pattern, Q, K, q_offset, MOST_PAIRS)

    def reordered(self) -> CSR:
        """The same pairs, computed in reverse Cuthill-McKee order, which brings neighbours near each other.

        Worth it where a graph has neighbourhoods but its numbering does not follow them: rows that are near each other
        then gather the same keys. `attention` copies q, k and v in that order and its results back, and refuses
        `key_lengths` and `alibi_slopes`, which speak of positions. Inside torch.compile the given order is kept.

        Joined with another pattern by & or | it is a CSR pattern of the pairs of both, in the same order; positions are
        those of the given order, as without it. What cannot be joined so is refused.

        Raises:
            ValueError: the matrix is not square, or scipy is not installed.

        Examples:
            >>> ring = [4, 9, 2, 7, 0, 5, 8, 1, 6, 3]  # neighbours on a ring, numbered at random
            >>> graph = gs.CSR.from_edge_index([ring, ring[1:] + ring[:1]], num_nodes=10)
            >>> ordered = graph.reordered()
            >>> bool((ordered.materialize(10, 10) == graph.materialize(10, 10)).all())
            True
        """
        if len(self.indptr) - 1 != self.num_keys:
            raise ValueError(f"reordered() needs as many rows as keys, got {len(self.indptr) - 1} and {self.num_keys}")
        return above.reordered(self)

    @classmethod
    def _from_pairs(cls, rows: np.ndarray, columns: np.ndarray, Q: int, K: int) -> CSR:
        rows, columns = rows.astype(np.int64), columns.astype(np.int64)
        for name, given, size in (("row", rows, Q), ("column", columns, K)):
            if len(given) and (int(given.min()) < 0 or int(given.max()) >= size):
                raise ValueError(f"{name} indices must be in [0, {size}), got [{given.min()}, {given.max()}]")
        keys = distinct(rows * K + columns)
        rows, columns = np.divmod(keys, K)
        indptr = np.concatenate([[0], np.cumsum(np.bincount(rows, minlength=Q))])
        return CSR(indptr, columns, K)

    def __repr__(self) -> str:
        return f"CSR({len(self.indptr) - 1}x{self.num_keys}, {len(self.indices)} pairs)"

    def _key(self) -> tuple[Any, ...]:
        return self.num_keys, self.__dict__["_digest"]

    @property
    def reads_positions(self) -> bool:
        return False

    def _check(self, Q: int, K: int) -> None:
        if (len(self.indptr) - 1, self.num_keys) != (Q, K):
            raise ValueError(f"CSR has {len(self.indptr) - 1} rows and num_keys={self.num_keys}, needs Q={Q} and K={K}")

    def _pairs(self) -> np.ndarray:
        """Sorted row * num_keys + column."""
        rows = np.repeat(np.arange(len(self.indptr) - 1), np.diff(self.indptr))
        return rows * self.num_keys + self.indices

    def _keep(self, i: np.ndarray, j: np.ndarray, sizes: Sizes) -> np.ndarray:
        pairs = self._pairs()
        row = i - sizes.q_offset
        exists = (row >= 0) & (row < len(self.indptr) - 1) & (j >= 0) & (j < self.num_keys)
        if not len(pairs):
            return np.zeros_like(exists)
        wanted = row * self.num_keys + j
        return (pairs[np.minimum(np.searchsorted(pairs, wanted), len(pairs) - 1)] == wanted) & exists

    def _count_tiles(self, grid: Grid) -> TileCounts:
        keys, _, starts = _remembered_order(self, grid)
        return TileCounts(keys, np.diff(starts))

    def tile_ids(self, grid: Grid, ti: np.ndarray, tj: np.ndarray) -> np.ndarray:
        at, listed = _listed_tiles(self, grid, ti, tj)
        ids = np.full(len(ti), -1, dtype=np.int64)
        ids[listed] = _remembered_ids(self, grid)[at[listed]]
        return ids

    def tile_masks(self, grid: Grid, ti: np.ndarray, tj: np.ndarray) -> np.ndarray:
        _, places, starts = _remembered_order(self, grid)
        width = grid.block_kv // WORD
        packed = np.zeros(len(ti) * grid.block_q * width, dtype=np.uint32)
        at, listed = _listed_tiles(self, grid, ti, tj)
        which, entries = ranges(starts[at[listed]], starts[at[listed] + 1])
        row, column = np.divmod(places[entries].astype(np.int64), grid.block_kv)
        word = (np.flatnonzero(listed)[which] * grid.block_q + row) * width + column // WORD
        # Each pair is stored once, so adding bits is setting them.
        np.add.at(packed, word, np.uint32(1) << (column % WORD).astype(np.uint32))
        return packed.reshape(len(ti), grid.block_q, width)

    def listed_pairs(self, sizes: Sizes, start: int, stop: int) -> Pairs:
        rows, at = ranges(self.indptr[start:stop], self.indptr[start + 1 : stop + 1])
        return rows + start, self.indices[at]

    def pairs_kept(self, sizes: Sizes) -> int:
        return len(self.indices)


def _listed(name: str, pattern: Any, Q: int, K: int, q_offset: int | None, most: int) -> CSR:
    """The pairs of a pattern, or a ValueError where they are more than `most` or differ by batch element or head."""
    if not isinstance(pattern, Pattern) or pattern.lead != (1, 1):
        raise ValueError(f"{name} must be one that all batch elements and query heads share, got {show(pattern)}")
    sizes = pattern._sizes(Q, K, q_offset)
    pattern.check(sizes.Q, sizes.K, placed=q_offset is not None)
    part = pattern.at(0, 0).lower(sizes)

    def check(pairs: int) -> None:
        if pairs > most:
            raise ValueError(f"{name} must keep at most {most} pairs to be listed; {show(pattern)} keeps more")

    total = part.pairs_kept(sizes)
    if total is None and part.listed_pairs(sizes, 0, 1) is None:
        total = count_pairs(part, sizes)  # looked into by tiles, some of which may hold more than can be listed
    check(total or 0)
    counts, columns, listed_count = [], [], 0
    for start, stop, rows, keys in pair_chunks(part, sizes):
        counts.append(np.bincount(rows - start, minlength=stop - start))
        columns.append(keys)
        listed_count += len(keys)
        check(listed_count)
    indptr = np.concatenate([[0], np.cumsum(np.concatenate(counts))])
    return CSR(indptr, np.concatenate(columns), sizes.K)


def _instead(given: Any) -> str:
    """The hint for an error where a batch of matrices or a list of edges was given for a matrix."""
    shape = tuple(getattr(given, "shape", ()))
    if len(shape) == 3 and "sparse" in str(getattr(given, "layout", None)):
        return "; of a batch give PerBatch([CSR.from_torch(one) for one in tensor])"
    return "; CSR.from_edge_index takes (2, edges)" if len(shape) == 2 and shape[0] == 2 else ""


@lru_cache(maxsize=4)
def _remembered_order(pattern: CSR, grid: Grid) -> tuple[np.ndarray, np.ndarray, np.ndarray]:
    """Non-empty tiles ti * nk + tj ascending, the places row * block_kv + column in their tile of the pairs of each,
    ascending, and where each tile's places start.
    """
    area = grid.block_q * grid.block_kv
    ordered = np.repeat(np.arange(len(pattern.indptr) - 1), np.diff(pattern.indptr))
    tile_row, row = np.divmod(ordered, grid.block_q)
    tile_column, column = np.divmod(pattern.indices, grid.block_kv)
    ordered = (tile_row * grid.nk + tile_column) * area + row * grid.block_kv + column
    ordered.sort()
    tiles, places = np.divmod(ordered, area)
    first = np.flatnonzero(np.diff(tiles, prepend=-1))
    return tiles[first], places.astype(np.int32 if area < 2**31 else np.int64), np.append(first, len(tiles))


@lru_cache(maxsize=4)
def _remembered_ids(pattern: CSR, grid: Grid) -> np.ndarray:
    """An id of the content of each non-empty tile. By the pairs alone: a random graph has a tile for nearly each."""
    _, places, starts = _remembered_order(pattern, grid)
    ids = places[starts[:-1]].astype(np.int64)  # of a tile with one pair: where it is
    many = np.flatnonzero(np.diff(starts) > 1)
    if not len(many):
        return ids
    # Of more pairs: one of the tiles whose numbers have the same sum, if it has the same pairs.
    area, counts = grid.block_q * grid.block_kv, np.diff(starts)[many]
    tile, at = ranges(starts[many], starts[many] + counts)
    first = np.cumsum(counts) - counts
    _, alike, number = np.unique(np.add.reduceat(_numbers(places[at]), first), return_index=True, return_inverse=True)
    other = alike[number]
    same = counts == counts[other]
    compared = same[tile]
    mine, beside = at[compared], (at - starts[many][tile] + starts[many][other][tile])[compared]
    same[tile[compared][places[mine] != places[beside]]] = False
    ids[many] = area + np.where(same, number, len(many) + np.arange(len(many)))
    return ids


def _numbers(places: np.ndarray) -> np.ndarray:
    """A number of 64 bits for each place, mixed (splitmix64) so that sums of several seldom agree."""
    x = places.astype(np.uint64) + np.uint64(0x9E3779B97F4A7C15)
    for shift, factor in ((30, 0xBF58476D1CE4E5B9), (27, 0x94D049BB133111EB)):
        x = (x ^ (x >> np.uint64(shift))) * np.uint64(factor)
    return x ^ (x >> np.uint64(31))


def _listed_tiles(pattern: CSR, grid: Grid, ti: np.ndarray, tj: np.ndarray) -> tuple[np.ndarray, np.ndarray]:
    """(place among the tiles that are not empty, whether it is one) of each tile."""
    keys, wanted = _remembered_order(pattern, grid)[0], ti * grid.nk + tj
    if not len(keys):
        return np.zeros(len(ti), dtype=np.int64), np.zeros(len(ti), dtype=bool)
    at = np.minimum(np.searchsorted(keys, wanted), len(keys) - 1)
    return at, keys[at] == wanted
