"""Walking a list of tiles: the part that a program takes, the tile of each step, the pairs that a step keeps.

A step takes C columns of a tile, so a tile has TILE_COLUMNS // C steps. A list that is a run of consecutive tiles
(CONTIGUOUS) gives the columns of a step without being read.
"""

from __future__ import annotations

import triton
import triton.language as tl

from gossamer.kernels.triton.mask_modes import BITS, FULL, INTERVAL, bits_mask, interval_mask
from gossamer.kernels.triton.row_access import BEGIN, END, ITEM, LEAD, SLOT, TILE, batch_and_head

MODES = tl.constexpr(3)  # full, interval, bits
# The end of a range that is not cut.
ALL = tl.constexpr(1 << 30)


@triton.jit
def decode(
    items,
    n_items, n_tiles, key_heads, lead_heads,
    SUB: tl.constexpr, MEMBERS: tl.constexpr,
    B_FROM_GRID: tl.constexpr, H_FROM_GRID: tl.constexpr, HAS_ITEMS: tl.constexpr,
):  # fmt: skip
    """What this program computes: (b, h, tile row, part of the tile row, begin, end, slot).

    The grid is one-dimensional. Parts of a tile row are next to each other, then the query heads of one key head,
    because they read the same keys at about the same time; then the items, so that neighbouring rows of one head
    share what is in L2; different key heads come last, since they share nothing.
    """
    pid = tl.program_id(0)
    sub = pid % SUB
    pid = pid // SUB
    member = pid % MEMBERS
    pid = pid // MEMBERS
    at = pid % n_items
    copy = pid // n_items
    if HAS_ITEMS:
        item = items + at * ITEM
        lead = tl.load(item + LEAD)
        tile = tl.load(item + TILE)
        begin = tl.load(item + BEGIN)
        end = tl.load(item + END)
        slot = tl.load(item + SLOT)
    else:
        lead = at // n_tiles
        tile = at % n_tiles
        begin = at * 0
        end = begin + ALL
        slot = begin - 1
    b, h = batch_and_head(lead, copy, key_heads, lead_heads, B_FROM_GRID, H_FROM_GRID)
    return b, h * MEMBERS + member, tile, sub, begin, end, slot


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
def step_mask(
    pool, entry, sub, part, column, b_lo, b_hi, end, MODE: tl.constexpr, LENGTHS: tl.constexpr,
    R: tl.constexpr, C: tl.constexpr, TILE_ROWS: tl.constexpr, TILE_COLUMNS: tl.constexpr,
):  # fmt: skip
    """[R, C] of what a step keeps of a tile, from row sub * R and column part * C on, below `end` with LENGTHS.

    Of no meaning in a full list without.
    """
    WORDS: tl.constexpr = TILE_COLUMNS // 32
    o_c = tl.arange(0, C)
    m_keep = o_c
    if MODE == BITS:
        masks = pool + entry.to(tl.int64) * (TILE_ROWS * WORDS) + sub * (R * WORDS) + part * (C // 32)
        m_keep = bits_mask(masks + tl.arange(0, R) * WORDS, o_c, 1, C)
    if MODE == INTERVAL:
        m_keep = interval_mask(b_lo, b_hi, column, o_c)
    if LENGTHS:
        m_length = (column + o_c < end)[None, :]
        m_keep = m_length if MODE == FULL else m_keep & m_length
    return m_keep
