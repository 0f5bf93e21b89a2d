"""Pieces that the forward and backward kernels share: program order, list ranges, masked loads, masks.

Names: `i_` an index, `o_` offsets, `m_` a mask, `b_` a block of values, `w_` a list of the walk. A kernel's resident
rows are R of the walk's rows; it streams C columns at a time. Scores are in base 2: natural scores times log2(e).
"""

from __future__ import annotations

import triton
import triton.language as tl

# Mask modes of a loop: one of the three lists of a walk.
FULL = tl.constexpr(0)
INTERVAL = tl.constexpr(1)
BITS = tl.constexpr(2)

# The end of a range that is not cut.
ALL = tl.constexpr(1 << 30)


@triton.jit
def decode(
    items,
    n_items,
    n_tiles,
    key_heads,
    lead_heads,
    SUB: tl.constexpr,
    MEMBERS: tl.constexpr,
    B_FROM_GRID: tl.constexpr,
    H_FROM_GRID: tl.constexpr,
    HAS_ITEMS: tl.constexpr,
):
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
        item = items + at * 6
        lead = tl.load(item)
        tile = tl.load(item + 1)
        begin = tl.load(item + 2)
        end = tl.load(item + 3)
        slot = tl.load(item + 4)
    else:
        lead = at // n_tiles
        tile = at % n_tiles
        begin = at * 0
        end = begin + ALL
        slot = begin - 1
    b = lead // lead_heads
    h = lead % lead_heads
    if H_FROM_GRID:
        h = (copy % key_heads) * MEMBERS + member
        copy = copy // key_heads
    if B_FROM_GRID:
        b = copy
    return b, h, tile, sub, begin, end, slot


@triton.jit
def copy_index(b, h, heads, B_FROM_GRID: tl.constexpr, H_FROM_GRID: tl.constexpr):
    """Which broadcast copy of the items this is: the slots of each copy are apart."""
    copy = h * 0
    if H_FROM_GRID:
        copy = h
        if B_FROM_GRID:
            copy = b * heads + h
    else:
        if B_FROM_GRID:
            copy = b
    return copy


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
def load_rows(
    base,
    start,
    limit,
    stride,
    ROWS: tl.constexpr,
    SIZE: tl.constexpr,
    BLOCK_SIZE: tl.constexpr,
    CHECK: tl.constexpr,
):
    """Rows [start, start + ROWS) of a matrix as [ROWS, BLOCK_SIZE]; zero past `limit` rows and SIZE columns."""
    o_r = tl.arange(0, ROWS)
    o_d = tl.arange(0, BLOCK_SIZE)
    # The step is added as one 64-bit scalar; offsets inside a tile fit 32 bits (checked by the launcher).
    pointers = base + start.to(tl.int64) * stride + (o_r[:, None] * stride + o_d[None, :])
    if CHECK:
        m_rows = (start + o_r < limit)[:, None]
        mask = m_rows if SIZE == BLOCK_SIZE else m_rows & (o_d < SIZE)[None, :]
        return tl.load(pointers, mask=mask, other=0.0)
    return tl.load(pointers) if SIZE == BLOCK_SIZE else tl.load(pointers, mask=(o_d < SIZE)[None, :], other=0.0)


@triton.jit
def stream_rows(
    source,
    i_b,
    i_h,
    start,
    limit,
    stride,
    ROWS: tl.constexpr,
    SIZE: tl.constexpr,
    BLOCK_SIZE: tl.constexpr,
    CHECK: tl.constexpr,
    TMA: tl.constexpr,
):
    """`load_rows` of a streamed operand: from a pointer to its head, or from a descriptor of the whole tensor.

    The descriptor fills with zeros what lies past the tensor, in rows and in columns.
    """
    if TMA:
        block = source.load([i_b, i_h, start, 0]).reshape([ROWS, BLOCK_SIZE])
    else:
        block = load_rows(source, start, limit, stride, ROWS, SIZE, BLOCK_SIZE, CHECK)
    return block


@triton.jit
def store_rows(base, block, start, limit, stride, ROWS: tl.constexpr, SIZE: tl.constexpr, BLOCK_SIZE: tl.constexpr):
    """The rows of `block` that exist, in the type of `base`."""
    o_r = tl.arange(0, ROWS)
    o_d = tl.arange(0, BLOCK_SIZE)
    pointers = base + start.to(tl.int64) * stride + (o_r[:, None] * stride + o_d[None, :])
    mask = (start + o_r < limit)[:, None] & (o_d < SIZE)[None, :]
    tl.store(pointers, block.to(base.dtype.element_ty), mask=mask)


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
