"""Which pairs of a tile are kept: in the three modes of a block layout, and by the bits of gathered columns."""

from __future__ import annotations

import triton
import triton.language as tl

# The modes, which are the lists of a walk.
FULL = tl.constexpr(0)
INTERVAL = tl.constexpr(1)
BITS = tl.constexpr(2)


@triton.jit
def row_bounds(lo, hi, i_list, rows, o_r):
    """[lo, hi) of the rows o_r of an interval list; empty past the last row."""
    at = i_list.to(tl.int64) * rows + o_r
    b_lo = tl.load(lo + at, mask=o_r < rows, other=0)
    return b_lo, tl.maximum(tl.load(hi + at, mask=o_r < rows, other=0), b_lo)


@triton.jit
def bits_mask(masks, o_c, STEP: tl.constexpr, C: tl.constexpr):
    """[R, C] bits of R rows; `masks` points at the first word of each, their next words are STEP further.

    Each thread holds whole words of its rows and tests its own bits; the word of a column is known at compile time.
    """
    word = tl.load(masks)[:, None]
    for i_w in tl.static_range(1, C // 32):
        word = tl.where((o_c // 32)[None, :] == i_w, tl.load(masks + i_w * STEP)[:, None], word)
    return (word & (1 << (o_c % 32))[None, :]) != 0


@triton.jit
def interval_mask(b_lo, b_hi, column, o_c):
    """[R, C] of column + o_c in [lo, hi), with one comparison: below lo the difference wraps to a large number."""
    distance = (column - b_lo)[:, None] + o_c[None, :]
    return distance.to(tl.uint32, bitcast=True) < (b_hi - b_lo)[:, None].to(tl.uint32, bitcast=True)
