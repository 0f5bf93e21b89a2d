"""Rows that keep one interval of keys each, as blocks of the score matrix: few, and alike where the pattern is.

A window is blocks of some rows, each with the keys that its rows keep: their first key moves by as much as their first
row, so that all of them share one mask and are views of the same memory. Dense and causal runs of rows are blocks of
their own, and need no mask.
"""

from __future__ import annotations

from collections.abc import Iterator
from dataclasses import dataclass, replace
from typing import NamedTuple

import numpy as np

from gossamer.layouts.block import BlockLayout
from gossamer.layouts.walk import Walk

# Rows of a block of a window, by the keys that a row keeps: (fewer than, rows). The least time on a CPU with AVX-512,
# D 64, windows of 16 to 1024 keys: more rows compute more masked pairs, fewer write the gradients of keys more often.
ROWS_OF_FORWARD = ((1 << 62, 32),)
ROWS_OF_BACKWARD = ((24, 32), (192, 64), (1 << 62, 128))
# A masked block of as many pairs costs less than a dense and a causal one, whose results are combined.
MASKED_PAIRS = 1 << 17
# Pairs of one head that take as long as the host of one more call does (about 30 us, D 64).
PAIRS_OF_CALL = 1 << 14
PAIRS_OF_BLOCK = 1 << 9  # likewise, of what the operator does for each block and head


@dataclass(frozen=True)
class IntervalBlocks:
    """`n` blocks that are alike: block x has `rows` rows from `row + x * step`, and `keys` keys from `key + x * move`.

    A row r of a block keeps its first keys up to r where it is causal, those in [lo[r], hi[r]) where these are given,
    else all.
    """

    row: int
    rows: int
    key: int
    keys: int
    n: int = 1
    step: int = 0
    move: int = 0
    causal: bool = False
    bounds: tuple[np.ndarray, np.ndarray] | None = None
    again: bool = False  # earlier blocks have these rows too: their results are combined

    @property
    def pairs(self) -> int:
        """The number of computed pairs, masked ones included."""
        return self.n * self.rows * self.keys // (1 + self.causal)


class Intervals(NamedTuple):
    """Rows [0, Q) of one head keep keys [lo, hi)."""

    lo: np.ndarray
    hi: np.ndarray


def intervals_of(layout: BlockLayout) -> list[Intervals] | None:
    """The interval of each row, for each of (Bl, Hl) in order; None where any row keeps keys that are not consecutive.

    Rows that keep nothing have lo = hi = 0.
    """
    walk = (layout.rows if layout.host is None else layout.host.rows).on_host()
    bl, hl = walk.lead
    count, first, end = _whole_tiles(walk)
    for tiles in (_interval_tiles(walk), _bits_tiles(walk)):
        if len(tiles.row):
            np.add.at(count, tiles.row, tiles.kept)
            some = tiles.kept > 0
            np.minimum.at(first, tiles.row, np.where(some, tiles.first, walk.columns))
            np.maximum.at(end, tiles.row, np.where(some, tiles.end, 0))
    first = np.where(count > 0, first, 0)
    if not (count == end - first).all():
        return None
    lo, hi = (x.reshape(bl * hl, -1)[:, : walk.rows] for x in (first, end))
    return [Intervals(*both) for both in zip(lo, hi, strict=True)]


class _Tiles(NamedTuple):
    """The keys that rows of partial tiles keep: arrays (tiles, block_rows), and the tile row of each."""

    row: np.ndarray
    kept: np.ndarray
    first: np.ndarray
    end: np.ndarray


def _whole_tiles(walk: Walk) -> tuple[np.ndarray, np.ndarray, np.ndarray]:
    """(count, first key, end) of each row, (tile rows, block_rows), in the full tiles alone."""
    tiles = int(np.prod(walk.lead)) * walk.tiles
    counts = np.asarray(walk.full.counts).reshape(-1).astype(np.int64)
    first, end = np.full(tiles, walk.columns), np.zeros(tiles, np.int64)
    some = counts > 0
    if some.any():
        _, place = walk.full.listed()
        column, begin = walk.full.indices[place], np.cumsum(counts)[some] - counts[some]
        # Lists over pages are in the order of a table.
        first[some] = np.minimum.reduceat(column, begin) * walk.block_columns
        end[some] = (np.maximum.reduceat(column, begin) + 1) * walk.block_columns
    each = (np.repeat(x[:, None], walk.block_rows, 1) for x in (counts * walk.block_columns, first, end))
    count, first, end = each
    return count, first, end


def _interval_tiles(walk: Walk) -> _Tiles:
    row, place = walk.interval.listed()
    if not len(row):
        return _Tiles(row, row, row, row)
    lo, hi = (np.zeros((int(np.prod(walk.lead)), walk.tiles * walk.block_rows), np.int64) for _ in range(2))
    for x, given in ((lo, walk.lo), (hi, walk.hi)):  # one for all heads where they share it
        x[:, : walk.rows] = np.broadcast_to(given, (*walk.lead, walk.rows)).reshape(-1, walk.rows)
    start = (walk.interval.indices[place].astype(np.int64) * walk.block_columns)[:, None]
    first = np.maximum(lo.reshape(-1, walk.block_rows)[row], start)
    end = np.minimum(hi.reshape(-1, walk.block_rows)[row], start + walk.block_columns)
    return _Tiles(row, np.maximum(end - first, 0), first, end)


def _bits_tiles(walk: Walk) -> _Tiles:
    row, place = walk.bits.listed()
    if not len(row):
        return _Tiles(row, row, row, row)
    used, entry = np.unique(walk.pool_index[place], return_inverse=True)
    count, first, end = [], [], []
    for at in range(0, len(used), 64):  # bits take 8 times the memory as bytes
        words = np.ascontiguousarray(walk.pool[used[at : at + 64]]).view(np.uint8)
        kept = np.unpackbits(words, axis=-1, bitorder="little")
        count.append(kept.sum(-1, dtype=np.int64))
        first.append(kept.argmax(-1))
        end.append(walk.block_columns - np.flip(kept, -1).argmax(-1))
    start = (walk.bits.indices[place].astype(np.int64) * walk.block_columns)[:, None]
    kept, begin, stop = (np.concatenate(x)[entry] for x in (count, first, end))
    return _Tiles(row, kept, begin + start, stop + start)


def blocks_of(intervals: Intervals, backward: bool, heads: int) -> list[IntervalBlocks] | None:
    """Blocks that hold every kept pair once; None where there would be too many of them for what they compute.

    Args:
        heads: that they are computed for, over all batch elements: for few small ones, one masked block is.
    """
    lo, hi = intervals
    alike: list[IntervalBlocks] = []
    longest = 1 + len(lo) // 16
    for run in _runs(lo, hi):
        for blocks in _blocks_of_run(run, ROWS_OF_BACKWARD if backward else ROWS_OF_FORWARD):
            joined = _joined(alike[-1], blocks) if alike else None
            if joined is not None:
                alike[-1] = joined
            else:
                alike.append(blocks)
        if len(alike) > longest:
            alike = []
            break
    some = hi > lo
    if len(alike) != 1 and some.any():
        first, end = int(lo[some].min()), int(hi.max())
        computed = sum(x.pairs for x in alike) if alike else 0
        if heads * (len(lo) * (end - first) - computed) <= (max(len(alike), 2) - 1) * PAIRS_OF_CALL:
            bounds = (lo - first).clip(0), (hi - first).clip(0)
            return [IntervalBlocks(0, len(lo), first, end - first, bounds=bounds)]
    return alike if alike or not some.any() else None


class _Run(NamedTuple):
    """Rows [row, row + rows) keep [lo, hi) in the first; both bounds move by 0 or 1 from a row to the next."""

    row: int
    rows: int
    lo: int
    hi: int
    lo_step: int
    hi_step: int


def _runs(lo: np.ndarray, hi: np.ndarray) -> Iterator[_Run]:
    """The longest runs of rows, from the first on; rows that keep nothing are in none."""
    some, lo_step, hi_step = hi > lo, np.diff(lo), np.diff(hi)
    code = np.where((lo_step >> 1 == 0) & (hi_step >> 1 == 0), 2 * lo_step + hi_step, -1)
    code[~(some[1:] & some[:-1])] = -1  # how both bounds move from a row to the next; -1: not as in one run
    ends = np.append(np.flatnonzero(np.diff(code)), len(code) - 1)  # the last of equal ones
    at = 0
    while at < len(lo):
        end, move = at + 1, 0
        if at < len(code) and code[at] >= 0:
            end, move = int(ends[np.searchsorted(ends, at)]) + 2, int(code[at])
        if some[at]:
            yield _Run(at, end - at, int(lo[at]), int(hi[at]), move // 2, move % 2)
        at = end


def _blocks_of_run(run: _Run, rows_of: tuple[tuple[int, int], ...]) -> Iterator[IntervalBlocks]:
    row, rows, lo, hi, lo_step, hi_step = run
    width = hi - lo
    last = hi + (rows - 1) * hi_step  # end of the last row
    if (lo_step, hi_step) == (0, 0):
        yield IntervalBlocks(row, rows, lo, width)
        return
    if (lo_step, hi_step) == (0, 1) and width == 1:
        yield IntervalBlocks(row, rows, lo, rows, causal=True)
        return
    if rows * (last - lo) <= MASKED_PAIRS and (lo_step, hi_step) != (1, 1):
        yield _masked(run, 0, rows)
        return
    if (lo_step, hi_step) == (0, 1):
        yield IntervalBlocks(row, rows, lo, width - 1)
        yield IntervalBlocks(row, rows, lo + width - 1, rows, causal=True, again=True)
        return
    each = min(rows, next(n for fewer, n in rows_of if width < fewer))
    if (lo_step, hi_step) == (1, 1):
        n = rows // each
        if n > 1:
            yield replace(_masked(run, 0, each), n=n, step=each, move=each)
        for r in range(n * each if n > 1 else 0, rows, each):
            yield _masked(run, r, min(each, rows - r))
        return
    # Keys leave from row to row, and none come: what the first rows of many keep, in blocks that grow shorter.
    each = max(each, rows // 16)
    for r in range(0, rows, each):
        yield _masked(run, r, min(each, rows - r))


def _masked(run: _Run, r: int, rows: int) -> IntervalBlocks:
    """Rows [r, r + rows) of a run as one block."""
    moved = np.arange(rows)
    first, width = run.lo + r * run.lo_step, run.hi - run.lo + r * (run.hi_step - run.lo_step)
    keys = width + (rows - 1) * run.hi_step
    return IntervalBlocks(run.row + r, rows, first, keys, bounds=(moved * run.lo_step, width + moved * run.hi_step))


def _joined(a: IntervalBlocks, b: IntervalBlocks) -> IntervalBlocks | None:
    """Both as one, where b is one more block that is like those of a."""
    alike = (a.rows, a.keys, a.causal, a.again) == (b.rows, b.keys, b.causal, b.again) and b.n == 1 and not b.again
    if not alike or (a.bounds is None) != (b.bounds is None):
        return None
    if a.bounds is not None and any((x != y).any() for x, y in zip(a.bounds, b.bounds or (), strict=True)):
        return None
    step, move = b.row - a.row - (a.n - 1) * a.step, b.key - a.key - (a.n - 1) * a.move
    if move < 0 or (a.n > 1 and (step, move) != (a.step, a.move)):
        return None
    return replace(a, n=a.n + 1, step=step, move=move)


def clipped(blocks: IntervalBlocks, length: int) -> Iterator[IntervalBlocks]:
    """The blocks cut to the first `length` keys."""
    whole = blocks.n
    if blocks.move:
        whole = min(whole, max(0, (length - blocks.key - blocks.keys) // blocks.move + 1))
    elif blocks.key + blocks.keys > length:
        whole = 0
    if whole:
        yield replace(blocks, n=whole)
    for x in range(whole, blocks.n):
        key = blocks.key + x * blocks.move
        keys = min(blocks.keys, length - key)
        if keys > 0:
            yield replace(blocks, row=blocks.row + x * blocks.step, key=key, keys=keys, n=1, step=0, move=0)
