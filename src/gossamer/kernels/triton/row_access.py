"""Which batch element and head a program works on, and how it reads and writes rows of a tensor.

Names: `i_` an index, `o_` offsets, `m_` a mask, `b_` a block of values. A kernel's resident rows are R of the walk's
rows; it streams C columns at a time. Scores are in base 2: natural scores times log2(e).
"""

from __future__ import annotations

import triton
import triton.language as tl

from gossamer.kernels.softmax import finish_rows
from gossamer.layouts import items

# The fields of an item and of a merge, for kernels.
ITEM, MERGE = tl.constexpr(items.ITEM), tl.constexpr(items.MERGE)
LEAD, TILE, BEGIN = tl.constexpr(items.LEAD), tl.constexpr(items.TILE), tl.constexpr(items.BEGIN)
END, SLOT, PART = tl.constexpr(items.END), tl.constexpr(items.SLOT), tl.constexpr(items.PART)
FIRST, COUNT = tl.constexpr(items.FIRST), tl.constexpr(items.COUNT)


@triton.jit
def batch_and_head(lead, copy, heads, lead_heads, B_FROM_GRID: tl.constexpr, H_FROM_GRID: tl.constexpr):
    """(b, h) of a copy of an item: from its list, and from the copy where batch elements or heads share it."""
    b = lead // lead_heads
    h = lead % lead_heads
    if H_FROM_GRID:
        h = copy % heads
        copy = copy // heads
    if B_FROM_GRID:
        b = copy
    return b, h


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
def slot_of(b, h, heads, n_slots, slot, FORM: tl.constexpr):
    """The slot of a part among those of all copies."""
    return copy_index(b, h, heads, FORM.B_FROM_GRID, FORM.H_FROM_GRID).to(tl.int64) * n_slots + slot


@triton.jit
def load_rows(
    base, start, limit, stride,
    R: tl.constexpr, SIZE: tl.constexpr, BLOCK_SIZE: tl.constexpr, CHECK: tl.constexpr,
):  # fmt: skip
    """Rows [start, start + R) of a matrix as [R, BLOCK_SIZE]; zero past `limit` rows and SIZE columns."""
    o_r = tl.arange(0, R)
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
    source, i_b, i_h, start, limit, stride,
    R: tl.constexpr, SIZE: tl.constexpr, BLOCK_SIZE: tl.constexpr, CHECK: tl.constexpr,
    TMA: tl.constexpr,
):  # fmt: skip
    """`load_rows` of a streamed operand: from a pointer to its head, or from a descriptor of the whole tensor.

    The descriptor fills with zeros what lies past the tensor, in rows and in columns.
    """
    if TMA:
        block = source.load([i_b, i_h, start, 0]).reshape([R, BLOCK_SIZE])
    else:
        block = load_rows(source, start, limit, stride, R, SIZE, BLOCK_SIZE, CHECK)
    return block


@triton.jit
def store_rows(base, block, start, limit, stride, R: tl.constexpr, SIZE: tl.constexpr, BLOCK_SIZE: tl.constexpr):
    """The rows of `block` that exist, in the type of `base`."""
    o_r = tl.arange(0, R)
    o_d = tl.arange(0, BLOCK_SIZE)
    pointers = base + start.to(tl.int64) * stride + (o_r[:, None] * stride + o_d[None, :])
    mask = (start + o_r < limit)[:, None] & (o_d < SIZE)[None, :]
    tl.store(pointers, block.to(base.dtype.element_ty), mask=mask)


@triton.jit
def store_part_rows(
    parts, slot, block, start, TILE_ROWS: tl.constexpr, R: tl.constexpr, SIZE: tl.constexpr, BLOCK_SIZE: tl.constexpr
):
    """Rows [start, start + R) of a slot of `parts` (slots, TILE_ROWS, SIZE)."""
    store_rows(parts + slot * (TILE_ROWS * SIZE), block, start, TILE_ROWS, SIZE, R, SIZE, BLOCK_SIZE)


@triton.jit
def store_row_results(
    results, strides, b_acc, b_l, b_m, b64, h64, Q, row_start, R: tl.constexpr, E: tl.constexpr, BLOCK_E: tl.constexpr
):
    """out = acc / l and lse = m + log l; a row that kept nothing gives 0 and -inf."""
    b_l, b_lse = finish_rows(b_l, b_m)
    o_r = row_start + tl.arange(0, R)
    lse = results.lse + (b64 * strides.at_lse.b + h64 * strides.at_lse.h)
    tl.store(lse + o_r.to(tl.int64) * strides.at_lse.n, b_lse, mask=o_r < Q)
    out = results.out + b64 * strides.at_out.b + h64 * strides.at_out.h
    store_rows(out, b_acc / b_l[:, None], row_start, Q, strides.at_out.n, R, E, BLOCK_E)
