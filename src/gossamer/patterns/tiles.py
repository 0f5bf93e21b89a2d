"""The tiles in which a pattern keeps a pair, of what kind they are and what they hold; pairs counted by them."""

from __future__ import annotations

from collections.abc import Iterator
from typing import NamedTuple

import numpy as np

from gossamer.patterns.base import Intervals, Pattern, above
from gossamer.patterns.compose import And, Or
from gossamer.patterns.grid import (
    ELEMENTS_AT_ONCE,
    EMPTY,
    FULL,
    WORD,
    Grid,
    Sizes,
    combine_ids,
    distinct,
    one_of_each,
    ranges,
)

# Tile pairs looked at together: bounds the scratch memory, with ELEMENTS_AT_ONCE for what is in the tiles.
TILES_AT_ONCE = 2**21

KIND_FULL, KIND_INTERVAL, KIND_BITS = 0, 1, 2


class KeptTiles(NamedTuple):
    """Non-empty tiles of some tile rows, in row-major order."""

    ti: np.ndarray  # (n,) tile rows
    tj: np.ndarray  # (n,) tile columns
    kind: np.ndarray  # (n,) KIND_*
    entry: np.ndarray  # (n,) index into packed for bits tiles, -1 for others
    packed: np.ndarray  # (P, block_q, block_kv // 32) uint32


def count_pairs(pattern: Pattern, sizes: Sizes) -> int:
    """The number of kept pairs, summed over the pattern's batch elements and heads."""
    grid = Grid(*sizes, 128, 128)
    parts, which = pattern.distinct()
    total = 0
    for part, times in zip(parts, np.bincount(which.reshape(-1)).tolist(), strict=True):
        exact = part.lower(sizes).pairs_kept(sizes)
        total += times * (_count(part.lower(sizes), grid) if exact is None else exact)
    return total


def _count(pattern: Pattern, grid: Grid) -> int:
    part = _interval_part(pattern, grid.sizes)
    interval = None if part is None else part.intervals(grid.sizes)
    return sum(_pairs_in(tiles, interval, grid) for tiles in _chunks(pattern, part, grid))


def _pairs_in(tiles: KeptTiles, interval: Intervals | None, grid: Grid) -> int:
    """The number of pairs that the tiles keep."""
    full = tiles.kind == KIND_FULL
    total = int(grid.area(tiles.ti[full], tiles.tj[full]).sum())
    if interval is not None:
        edge = tiles.kind == KIND_INTERVAL
        total += int(interval_overlap(interval, grid, tiles.ti[edge], tiles.tj[edge]).sum())
    per_entry = np.bitwise_count(tiles.packed).sum(axis=(1, 2), dtype=np.int64)
    return total + int(per_entry[tiles.entry[tiles.kind == KIND_BITS]].sum())


def count_tiles(pattern: Pattern, grid: Grid, start: int, stop: int) -> tuple[int, int, int, np.ndarray]:
    """(kept pairs, pairs of listed tiles, of bits tiles, tiles of each row) of tile rows [start, stop) of one head."""
    part = _interval_part(pattern, grid.sizes)
    interval = None if part is None else part.intervals(grid.sizes)
    if interval is not None and part is pattern:
        tiles = _interval_chunk(interval, grid, start, stop)
    else:
        tiles = _mixed_chunk(pattern, part, interval, grid, start, stop)
    area = grid.area(tiles.ti, tiles.tj)
    tiles_of_rows = np.bincount(tiles.ti - start, minlength=stop - start)
    return _pairs_in(tiles, interval, grid), int(area.sum()), int(area[tiles.kind == KIND_BITS].sum()), tiles_of_rows


def kept_tiles(pattern: Pattern, grid: Grid) -> tuple[KeptTiles, Intervals | None]:
    """The tiles of a pattern shared by heads, and the row intervals that its interval tiles refer to."""
    pattern = pattern.lower(grid.sizes)
    part = _interval_part(pattern, grid.sizes)
    parts = list(_chunks(pattern, part, grid))
    packed = np.concatenate([p.packed for p in parts])
    base = np.cumsum([0, *(len(p.packed) for p in parts)])
    entry = np.concatenate([np.where(p.entry >= 0, p.entry + at, -1) for p, at in zip(parts, base, strict=False)])
    if len(parts) > 1:
        packed, same = unique_tiles(packed)
        entry = np.where(entry >= 0, same[entry], -1) if len(same) else entry
    ti, tj, kind = (np.concatenate([p[column] for p in parts]) for column in range(3))
    return KeptTiles(ti, tj, kind, entry, packed), None if part is None else part.intervals(grid.sizes)


# -- interval tiles ---------------------------------------------------------------------------------------------


def _interval_part(pattern: Pattern, sizes: Sizes) -> Pattern | None:
    """The first part of a pattern that is exactly one interval per row: interval tiles refer to its intervals."""
    if pattern.intervals(sizes) is not None:
        return pattern
    if isinstance(pattern, (And, Or)):
        left = _interval_part(pattern.left, sizes)
        return left if left is not None else _interval_part(pattern.right, sizes)
    return None


def _reduces(pattern: Pattern, part: Pattern, grid: Grid, ti: np.ndarray, tj: np.ndarray) -> np.ndarray:
    """Tiles in which the pattern keeps exactly what its `part` keeps."""
    if pattern is part:
        return np.ones(len(ti), dtype=bool)
    if not isinstance(pattern, (And, Or)):
        return np.zeros(len(ti), dtype=bool)
    neutral = FULL if isinstance(pattern, And) else EMPTY
    reduced = np.zeros(len(ti), dtype=bool)
    for one, other in ((pattern.left, pattern.right), (pattern.right, pattern.left)):
        inner = _reduces(one, part, grid, ti, tj)
        if inner.any():
            reduced |= inner & (other.tile_classes(grid, ti, tj) == neutral)
    return reduced


def interval_overlap(interval: Intervals, grid: Grid, ti: np.ndarray, tj: np.ndarray) -> np.ndarray:
    """The number of pairs of each tile in the row intervals."""
    lo, hi = interval
    overlap = np.zeros(len(ti), dtype=np.int64)
    step = max(1, ELEMENTS_AT_ONCE // grid.block_q)
    for at in range(0, len(ti), step):
        part = slice(at, at + step)
        rows = ti[part, None] * grid.block_q + np.arange(grid.block_q)
        inside = rows < grid.Q
        rows = np.minimum(rows, grid.Q - 1)
        c0, c1 = grid.key_bounds(tj[part, None])
        width = np.minimum(hi[rows], c1) - np.maximum(lo[rows], c0)
        overlap[part] = (np.maximum(width, 0) * inside).sum(axis=1)
    return overlap


# -- tiles, some tile rows at a time -------------------------------------------------------------------------------


def _chunks(pattern: Pattern, part: Pattern | None, grid: Grid) -> Iterator[KeptTiles]:
    interval = None if part is None else part.intervals(grid.sizes)
    if interval is not None and part is pattern:
        rows = max(1, TILES_AT_ONCE // grid.nk)
        for start in range(0, grid.nq, rows):
            yield _interval_chunk(interval, grid, start, min(start + rows, grid.nq))
        return
    rows = max(1, TILES_AT_ONCE * grid.nq // max(1, pattern.tile_bound(grid)))
    for start in range(0, grid.nq, rows):
        yield _mixed_chunk(pattern, part, interval, grid, start, min(start + rows, grid.nq))


def _interval_chunk(interval: Intervals, grid: Grid, start: int, stop: int) -> KeptTiles:
    """A pattern that is one interval per row: its lists are ranges, nothing is looked up."""
    lo, hi = interval
    none = np.zeros((0, grid.block_q, grid.block_kv // WORD), dtype=np.uint32)
    t = np.arange(start, stop)
    r0, r1 = grid.row_bounds(t)
    first, last = lo[r0] // grid.block_kv, -(-hi[r1 - 1] // grid.block_kv)
    which, tj = ranges(first, last)
    # hi never exceeds K, so a tile past K is never full.
    full = (tj * grid.block_kv >= lo[r1 - 1][which]) & ((tj + 1) * grid.block_kv <= hi[r0][which])
    listed = full.copy()
    edge = np.nonzero(~full)[0]
    listed[edge] = interval_overlap(interval, grid, t[which[edge]], tj[edge]) > 0
    kind = np.where(full, KIND_FULL, KIND_INTERVAL)[listed]
    return KeptTiles(t[which[listed]], tj[listed], kind, np.full(len(kind), -1), none)


def _mixed_chunk(
    pattern: Pattern, part: Pattern | None, interval: Intervals | None, grid: Grid, start: int, stop: int
) -> KeptTiles:
    ti, tj = pattern.tile_candidates(grid, start, stop)
    ti, tj = np.divmod(distinct(ti.astype(np.int64) * grid.nk + tj), grid.nk)
    classes = pattern.tile_classes(grid, ti, tj)
    ti, tj, classes = (a[classes != EMPTY] for a in (ti, tj, classes))
    fits = (tj + 1) * grid.block_kv <= grid.K
    kind = np.where((classes == FULL) & fits, KIND_FULL, KIND_BITS)
    if part is not None and interval is not None:
        open_tiles = np.nonzero(kind == KIND_BITS)[0]
        same = _reduces(pattern, part, grid, ti[open_tiles], tj[open_tiles])
        kept = interval_overlap(interval, grid, ti[open_tiles[same]], tj[open_tiles[same]]) > 0
        kind[open_tiles[same]] = np.where(kept, KIND_INTERVAL, -1)
    bits = np.nonzero(kind == KIND_BITS)[0]
    entry = np.full(len(ti), -1, dtype=np.int64)
    packed, entry[bits] = _packed_masks(pattern, grid, ti[bits], tj[bits], classes[bits])
    # The classes may call a tile mixed that is empty or full: the bits decide.
    kept = np.bitwise_count(packed).sum(axis=(1, 2), dtype=np.int64)
    kind[bits[kept[entry[bits]] == 0]] = -1
    whole = bits[(kept[entry[bits]] == grid.area(ti[bits], tj[bits])) & fits[bits]]
    kind[whole], entry[whole] = KIND_FULL, -1
    listed = kind >= 0
    ti, tj, kind, entry = (a[listed] for a in (ti, tj, kind, entry))
    has_bits = entry >= 0
    used = np.bincount(entry[has_bits], minlength=len(packed)) > 0
    entry[has_bits] = (np.cumsum(used) - 1)[entry[has_bits]]
    return KeptTiles(ti, tj, kind, entry, packed[used])


def _packed_masks(
    pattern: Pattern, grid: Grid, ti: np.ndarray, tj: np.ndarray, classes: np.ndarray
) -> tuple[np.ndarray, np.ndarray]:
    """Distinct packed masks of the given tiles, and which of them each tile has."""
    width = grid.block_kv // WORD
    if not len(ti):
        return np.zeros((0, grid.block_q, width), dtype=np.uint32), np.zeros(0, dtype=np.int64)
    ids = combine_ids(pattern.tile_ids(grid, ti, tj), grid.ragged(ti, tj), classes)
    one, which = one_of_each(ids)
    ti, tj = ti[one], tj[one]
    packed = np.empty((len(ti), grid.block_q, width), dtype=np.uint32)
    step = max(1, ELEMENTS_AT_ONCE // (grid.block_q * width))
    for at in range(0, len(ti), step):
        chunk = slice(at, at + step)
        packed[chunk] = pattern.tile_masks(grid, ti[chunk], tj[chunk]) & grid.existing(ti[chunk], tj[chunk])
    packed, same = unique_tiles(packed)
    return packed, same[which]


def unique_tiles(packed: np.ndarray) -> tuple[np.ndarray, np.ndarray]:
    """Distinct packed tiles (T, R, W), and which of them each tile is. Sorts 64-bit sums, then compares all bits."""
    if not len(packed):
        return packed, np.zeros(0, dtype=np.int64)
    flat = packed.reshape(len(packed), -1)
    weights = np.random.default_rng(0).integers(1, 2**63, size=flat.shape[1], dtype=np.uint64) | np.uint64(1)
    sums = np.zeros(len(flat), dtype=np.uint64)
    step = max(1, ELEMENTS_AT_ONCE // flat.shape[1])
    for at in range(0, len(flat), step):
        sums[at : at + step] = (flat[at : at + step].astype(np.uint64) * weights).sum(axis=1, dtype=np.uint64)
    _, first, inverse = np.unique(sums, return_index=True, return_inverse=True)
    for at in range(0, len(flat), step):
        if (flat[first[inverse[at : at + step]]] != flat[at : at + step]).any():  # two tiles with the same sum
            _, first, inverse = np.unique(flat, axis=0, return_index=True, return_inverse=True)
            break
    return packed[first], inverse.reshape(-1)


above.count_pairs = count_pairs
