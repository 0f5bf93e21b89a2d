"""Walking a list of tiles: the part that a program takes, the tile of each step, the pairs that a step keeps.

A step takes C columns of a tile, so a tile has TILE_COLUMNS // C steps. A list that is a run of consecutive tiles
(CONTIGUOUS) gives the columns of a step without being read.
"""

from __future__ import annotations

import triton
import triton.language as tl

# The lists of a walk, by what is known of their tiles.
FULL = tl.constexpr(0)
INTERVAL = tl.constexpr(1)
BITS = tl.constexpr(2)
MODES = tl.constexpr(3)


@triton.jit
def list_range(starts, counts, row, begin, end, before):
    """The part of a row's list inside [begin, end) of the row's lists in a row: (list start, first, last, next before).

    `before` is the number of tiles in the lists before this one.
    """
    start = tl.load(starts + row)
    count = tl.load(counts + row)
    first = tl.minimum(tl.maximum(begin - before, 0), count)
    last = tl.minimum(tl.maximum(end - before, 0), count)
    return start, first, last, before + count


@triton.jit
def list_entry(indices, pool_index, start, at, last, MODE: tl.constexpr):
    """(tile, entry of the pool) at a place of a list, 0 from `last` on; the second is a bits list's alone."""
    tile = tl.load(indices + start + at, mask=at < last, other=0)
    entry = tile
    if MODE == BITS:
        entry = tl.load(pool_index + start + at, mask=at < last, other=0)
    return tile, entry


@triton.jit
def next_entry(
    tile, entry, indices, pool_index, start, at, last, MODE: tl.constexpr, CONTIGUOUS: tl.constexpr
):  # fmt: skip
    """`list_entry` a step ahead, so that the loads of a step do not wait for it; what no step reads stays as it is."""
    if not CONTIGUOUS:
        tile = tl.load(indices + start + at, mask=at < last, other=0)
    if MODE == BITS:
        entry = tl.load(pool_index + start + at, mask=at < last, other=0)
    return tile, entry


@triton.jit
def row_bounds(lo, hi, i_list, rows, o_r):
    """[lo, hi) of the rows o_r of an interval list; empty past the last row."""
    at = i_list.to(tl.int64) * rows + o_r
    b_lo = tl.load(lo + at, mask=o_r < rows, other=0)
    return b_lo, tl.maximum(tl.load(hi + at, mask=o_r < rows, other=0), b_lo)


@triton.jit
def step_mask(
    pool, entry, sub, part, column, b_lo, b_hi, MODE: tl.constexpr, R: tl.constexpr, C: tl.constexpr,
    TILE_ROWS: tl.constexpr, TILE_COLUMNS: tl.constexpr,
):  # fmt: skip
    """[R, C] of what a step keeps of a tile, from row sub * R and column part * C on; of no meaning in a full list."""
    WORDS: tl.constexpr = TILE_COLUMNS // 32
    o_c = tl.arange(0, C)
    m_keep = o_c
    if MODE == BITS:
        words = pool + entry.to(tl.int64) * (TILE_ROWS * WORDS) + sub * (R * WORDS) + part * (C // 32)
        m_keep = bits_mask(words, o_c, WORDS, R, C)
    if MODE == INTERVAL:
        m_keep = interval_mask(b_lo, b_hi, column, o_c)
    return m_keep


@triton.jit
def bits_mask(words, o_c, WORDS: tl.constexpr, R: tl.constexpr, C: tl.constexpr):
    """[R, C] bits of a bits tile; `words` points at the first word of row 0, a row has WORDS words.

    Each thread holds whole words of its rows and tests its own bits; the word of a column is known at compile time.
    """
    o_r = tl.arange(0, R)
    row = words + o_r * WORDS
    word = tl.load(row)[:, None]
    for i_w in tl.static_range(1, C // 32):
        word = tl.where((o_c // 32)[None, :] == i_w, tl.load(row + i_w)[:, None], word)
    return (word & (1 << (o_c % 32))[None, :]) != 0


@triton.jit
def interval_mask(b_lo, b_hi, column, o_c):
    """[R, C] of column + o_c in [lo, hi), with one comparison: below lo the difference wraps to a large number."""
    distance = (column - b_lo)[:, None] + o_c[None, :]
    return distance.to(tl.uint32, bitcast=True) < (b_hi - b_lo)[:, None].to(tl.uint32, bitcast=True)
