"""Sizes, tile grids and packed masks: the numpy vocabulary in which a pattern describes its tiles."""

from __future__ import annotations

from typing import NamedTuple

import numpy as np

# Classes of a tile, by the pairs in it that exist. Ordered so that & is minimum, | maximum and ~ is FULL - x.
EMPTY, MIXED, FULL = 0, 1, 2

WORD = 32

# Elements of mixed tiles evaluated together.
ELEMENTS_AT_ONCE = 2**22


class Sizes(NamedTuple):
    """Q query rows and K keys; row r has position r + q_offset."""

    Q: int
    K: int
    q_offset: int


class Grid(NamedTuple):
    """`Sizes` cut into tiles of block_q rows by block_kv keys."""

    Q: int
    K: int
    q_offset: int
    block_q: int
    block_kv: int

    @property
    def sizes(self) -> Sizes:
        return Sizes(self.Q, self.K, self.q_offset)

    @property
    def nq(self) -> int:
        return -(-self.Q // self.block_q)

    @property
    def nk(self) -> int:
        return -(-self.K // self.block_kv)

    def row_bounds(self, ti: np.ndarray) -> tuple[np.ndarray, np.ndarray]:
        """First row and one past the last existing row of tile rows `ti`."""
        first = ti * self.block_q
        return first, np.minimum(first + self.block_q, self.Q)

    def key_bounds(self, tj: np.ndarray) -> tuple[np.ndarray, np.ndarray]:
        """First key and one past the last existing key of tile columns `tj`."""
        first = tj * self.block_kv
        return first, np.minimum(first + self.block_kv, self.K)

    def area(self, ti: np.ndarray, tj: np.ndarray) -> np.ndarray:
        """The number of pairs that exist in each tile."""
        r0, r1 = self.row_bounds(ti)
        c0, c1 = self.key_bounds(tj)
        return (r1 - r0) * (c1 - c0)

    def shift(self, ti: np.ndarray, tj: np.ndarray) -> np.ndarray:
        """i - j of the first pair of each tile."""
        return self.q_offset + ti * self.block_q - tj * self.block_kv

    def pairs(self, ti: np.ndarray, tj: np.ndarray) -> tuple[np.ndarray, np.ndarray]:
        """Positions of all pairs of each tile, existing or not: i (T, block_q, 1) and j (T, 1, block_kv)."""
        i = self.q_offset + ti[:, None] * self.block_q + np.arange(self.block_q)
        j = tj[:, None] * self.block_kv + np.arange(self.block_kv)
        return i[:, :, None], j[:, None, :]

    def existing(self, ti: np.ndarray, tj: np.ndarray) -> np.ndarray:
        """Packed masks (T, block_q, block_kv // 32) of the pairs that exist."""
        r0, r1 = self.row_bounds(ti)
        rows = np.arange(self.block_q) < (r1 - r0)[:, None]
        c0, c1 = self.key_bounds(tj)
        packed = ones_below((c1 - c0)[:, None] - WORD * np.arange(self.block_kv // WORD))
        return np.where(rows[:, :, None], packed[:, None, :], np.uint32(0))

    def ragged(self, ti: np.ndarray, tj: np.ndarray) -> np.ndarray:
        """0 for a whole tile, else 1 to 3 by which edge it crosses."""
        return ((ti + 1) * self.block_q > self.Q) * 2 + ((tj + 1) * self.block_kv > self.K)


def all_tiles(grid: Grid, start: int, stop: int) -> tuple[np.ndarray, np.ndarray]:
    """Every tile of tile rows [start, stop), in row order."""
    ti = np.repeat(np.arange(start, stop), grid.nk)
    return ti, np.tile(np.arange(grid.nk), stop - start)


def ranges(first: np.ndarray, last: np.ndarray) -> tuple[np.ndarray, np.ndarray]:
    """Concatenated ranges [first, last): (which range, value) of each element; empty where last <= first."""
    counts = np.maximum(last - first, 0)
    which = np.repeat(np.arange(len(first)), counts)
    starts = np.cumsum(counts) - counts
    return which, np.arange(len(which)) - starts[which] + first[which]


def distinct(values: np.ndarray) -> np.ndarray:
    """The distinct values, ascending. By sorting: `numpy.unique` may hash, many times slower for millions of them."""
    if (values[1:] > values[:-1]).all():
        return values
    ordered = np.sort(values)
    new = np.ones(len(ordered), dtype=bool)
    new[1:] = ordered[1:] != ordered[:-1]
    return ordered[new]


def ones_below(n: np.ndarray) -> np.ndarray:
    """uint32 words whose bits [0, n) are set; n is clipped to [0, 32]."""
    n = np.clip(n, 0, WORD).astype(np.uint64)
    return ((np.uint64(1) << n) - np.uint64(1)).astype(np.uint32)


def pack_bits(tiles: np.ndarray) -> np.ndarray:
    """(..., R, C) bool -> (..., R, C // 32) uint32; bit c of word w is column 32 w + c."""
    packed = np.packbits(tiles, axis=-1, bitorder="little")
    return np.ascontiguousarray(packed).view("<u4").astype(np.uint32, copy=False)


def unpack_bits(packed: np.ndarray) -> np.ndarray:
    """(..., R, W) uint32 -> (..., R, 32 W) bool."""
    as_bytes = np.ascontiguousarray(packed.astype("<u4", copy=False)).view(np.uint8)
    return np.unpackbits(as_bytes, axis=-1, bitorder="little").astype(bool)


def interval_masks(lo: np.ndarray, hi: np.ndarray, grid: Grid, ti: np.ndarray, tj: np.ndarray) -> np.ndarray:
    """Packed masks (T, block_q, block_kv // 32) of the pairs lo[row] <= key < hi[row]."""
    rows = ti[:, None] * grid.block_q + np.arange(grid.block_q)
    inside = rows < grid.Q
    rows = np.minimum(rows, grid.Q - 1)
    first = (tj * grid.block_kv)[:, None]
    columns = WORD * np.arange(grid.block_kv // WORD)
    below_hi = ones_below(np.where(inside, hi[rows] - first, 0)[:, :, None] - columns)
    below_lo = ones_below(np.where(inside, lo[rows] - first, 0)[:, :, None] - columns)
    return below_hi & ~below_lo


def combine_ids(*ids: np.ndarray) -> np.ndarray:
    """One id per element such that equal ids mean equal tuples of the given ids. Exact, no hashing."""
    combined, size = np.zeros(len(ids[0]), dtype=np.int64), 1  # in [0, size)
    for more in ids if len(ids[0]) else ():
        more = more.astype(np.int64)
        least, span = int(more.min()), int(more.max()) - int(more.min()) + 1
        if size * span >= 2**62:  # numbered anew, which sorts them
            numbers, combined = np.unique(combined, return_inverse=True)
            size = len(numbers)
        if size * span >= 2**62:
            numbers, more = np.unique(more, return_inverse=True)
            least, span = 0, len(numbers)
        combined, size = combined * span + (more - least), size * span
    return combined


def one_of_each(ids: np.ndarray) -> tuple[np.ndarray, np.ndarray]:
    """An element of each distinct id, by ascending id, and of every element the place of its id among them."""
    least, span = int(ids.min(initial=0)), int(ids.max(initial=0)) - int(ids.min(initial=0)) + 1
    if span > 4 * len(ids) + 2**16:
        _, one, which = np.unique(ids, return_index=True, return_inverse=True)
        return one, which
    one = np.full(span, -1, dtype=np.int64)  # without sorting, which takes longer
    one[ids - least] = np.arange(len(ids))
    there = one >= 0
    return one[there], (np.cumsum(there) - 1)[ids - least]
