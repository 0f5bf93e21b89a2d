"""Walking the lists of tiles: the part that a program takes, the tile of each step, the pairs that a step keeps.

A step takes C columns of a tile, so a tile has TILE_COLUMNS // C steps. A list that is a run of consecutive tiles
(CONTIGUOUS) gives the columns of a step without being read.
"""

from __future__ import annotations

from typing import Any, NamedTuple

import triton
import triton.language as tl

from gossamer.kernels.triton.mask_modes import BITS, FULL, INTERVAL, bits_mask, interval_mask, row_bounds
from gossamer.kernels.triton.row_access import BEGIN, END, ITEM, LEAD, SLOT, TILE, batch_and_head

MODES = tl.constexpr(3)  # full, interval, bits
# The end of a range that is not cut.
ALL = tl.constexpr(1 << 30)


class Part(NamedTuple):
    """What a program computes: R rows of a tile row, over [begin, end) of the tiles that it lists."""

    b: Any
    h: Any
    tile_row: Any
    sub: Any  # which R rows
    begin: Any
    end: Any
    slot: Any  # of a row whose list is split; else negative


@triton.jit
def decode(items, numbers, key_heads, lead_heads, MEMBERS: tl.constexpr, FORM: tl.constexpr):
    """The `Part` of this program.

    The grid is one-dimensional. Parts of a tile row are next to each other, then the query heads of one key head,
    because they read the same keys at about the same time; then the items, so that neighbouring rows of one head
    share what is in L2; different key heads come last, since they share nothing.
    """
    SUB: tl.constexpr = FORM.TILE_ROWS // FORM.R
    pid = tl.program_id(0)
    sub = pid % SUB
    pid = pid // SUB
    member = pid % MEMBERS
    pid = pid // MEMBERS
    at = pid % numbers.n_items
    copy = pid // numbers.n_items
    if FORM.HAS_ITEMS:
        item = items + at * ITEM
        lead = tl.load(item + LEAD)
        tile = tl.load(item + TILE)
        begin = tl.load(item + BEGIN)
        end = tl.load(item + END)
        slot = tl.load(item + SLOT)
    else:
        lead = at // numbers.n_tiles
        tile = at % numbers.n_tiles
        begin = at * 0
        end = begin + ALL
        slot = begin - 1
    b, h = batch_and_head(lead, copy, key_heads, lead_heads, FORM.B_FROM_GRID, FORM.H_FROM_GRID)
    return Part(b, h * MEMBERS + member, tile, sub, begin, end, slot)


@triton.jit
def walk(
    add: tl.constexpr, sums, given, lists, i_list, i_row, part, rows, o_r, key_end, LENGTHS: tl.constexpr,
    FORM: tl.constexpr,
):  # fmt: skip
    """Sums over the steps of a part: `sums` as `add` leaves them after the last.

    Args:
        add: (sums, given, column, keep, MODE, FORM) -> sums, of one step.
        i_list, i_row: which lists the part reads, and its row of them.
        rows, o_r: how many rows have an interval, and those of the part.
        key_end: columns from here on are not kept, with LENGTHS.
    """
    STEPS: tl.constexpr = FORM.TILE_COLUMNS // FORM.C
    before = part.begin * 0
    b_lo = o_r
    b_hi = o_r
    for mode in tl.static_range(MODES):
        if FORM.HAS[mode]:
            start, first, last, before = list_range(lists.tiles[mode], i_row, part, before)
            if mode == INTERVAL:
                b_lo, b_hi = row_bounds(lists.lo, lists.hi, i_list, rows, o_r)
            indices = lists.tiles[mode].indices
            tile, entry = list_entry(indices, lists.pool_index, start, first, last, mode)
            origin = (tile - first) * FORM.TILE_COLUMNS
            for step in range(first * STEPS, last * STEPS):
                if FORM.CONTIGUOUS[mode]:
                    column = origin + step * FORM.C
                else:
                    column = tile * FORM.TILE_COLUMNS + (step % STEPS) * FORM.C
                m_keep = step_mask(
                    lists.pool, entry, part.sub, step % STEPS, column, b_lo, b_hi, key_end, mode, LENGTHS, FORM
                )
                sums = add(sums, given, column, m_keep, mode, FORM)
                ahead = (step + 1) // STEPS
                tile, entry = next_entry(
                    tile, entry, indices, lists.pool_index, start, ahead, last, mode, FORM.CONTIGUOUS[mode]
                )
    return sums


@triton.jit
def list_range(tiles, row, part, before):
    """The tiles of a row's list inside [begin, end) of all its lists in order: (list start, first, last, next before).

    `before` is the number of tiles in the lists before this one.
    """
    start = tl.load(tiles.starts + row)
    count = tl.load(tiles.counts + row)
    first = tl.minimum(tl.maximum(part.begin - before, 0), count)
    last = tl.minimum(tl.maximum(part.end - before, 0), count)
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
    pool, entry, sub, step, column, b_lo, b_hi, end, MODE: tl.constexpr, LENGTHS: tl.constexpr, FORM: tl.constexpr
):
    """[R, C] of what a step keeps of a tile, from row sub * R and column step * C on, below `end` with LENGTHS.

    Of no meaning in a full list without.
    """
    WORDS: tl.constexpr = FORM.TILE_COLUMNS // 32
    o_c = tl.arange(0, FORM.C)
    m_keep = o_c
    if MODE == BITS:
        masks = pool + entry.to(tl.int64) * (FORM.TILE_ROWS * WORDS) + sub * (FORM.R * WORDS) + step * (FORM.C // 32)
        m_keep = bits_mask(masks + tl.arange(0, FORM.R) * WORDS, o_c, 1, FORM.C)
    if MODE == INTERVAL:
        m_keep = interval_mask(b_lo, b_hi, column, o_c)
    if LENGTHS:
        m_length = (column + o_c < end)[None, :]
        m_keep = m_length if MODE == FULL else m_keep & m_length
    return m_keep
