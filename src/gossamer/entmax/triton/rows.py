"""The rows of a program, the keys that they may see, and tiles of their scores."""

from __future__ import annotations

import triton
import triton.language as tl

from gossamer.entmax.triton.formulas import FAR

EVERY, CAUSAL, INTERVALS = tl.constexpr(0), tl.constexpr(1), tl.constexpr(2)


@triton.jit
def load_tile(base, rows, inside, stride, SIZE: tl.constexpr, BLOCK: tl.constexpr):
    """Rows of a matrix as [R, BLOCK]; zero where `inside` [R] says so and past SIZE columns."""
    o = tl.arange(0, BLOCK)
    mask = inside[:, None] & (o < SIZE)[None, :]
    return tl.load(base + rows.to(tl.int64)[:, None] * stride + o[None, :], mask=mask, other=0.0)


@triton.jit
def bounds(rows, inside, lo, hi, offset, K, BOUNDS: tl.constexpr):
    """The keys [first, last) that each row may see by its number; none for rows that do not exist."""
    if BOUNDS == INTERVALS:
        first = tl.load(lo + rows, mask=inside, other=0)
        last = tl.load(hi + rows, mask=inside, other=0)
    else:
        first = tl.zeros_like(rows)
        last = first + K
        if BOUNDS == CAUSAL:
            last = tl.minimum(tl.maximum(rows + offset + 1, 0), K)
        last = tl.where(inside, last, 0)
    return first, last


@triton.jit
def key_range(first, last, inside, K, STEP: tl.constexpr):
    """(first, number) of the tiles of STEP keys that any row may see."""
    some = inside & (first < last)
    begin = tl.min(tl.where(some, first, K), 0) // STEP
    end = tl.max(tl.where(some, last, 0), 0)
    return begin, tl.maximum((end + STEP - 1) // STEP - begin, 0)


@triton.jit
def visible(j, first, last, at, k_positions, stride_kp, K, POSITIONS: tl.constexpr):
    """[R, STEP]: which rows see which of the keys j [STEP]; `at` [R] are the positions of the rows."""
    seen = (j[None, :] >= first[:, None]) & (j[None, :] < last[:, None])
    if POSITIONS:
        of_k = tl.load(k_positions + j.to(tl.int64) * stride_kp, mask=j < K, other=0)
        seen = seen & (of_k[None, :] <= at[:, None])
    return seen


@triton.jit
def tile_scores(
    b_q, k_base, j, seen, stride_kn, scale, K, D: tl.constexpr, BLOCK_D: tl.constexpr, PRECISION: tl.constexpr
):
    """Scores [R, STEP] of the keys j; -inf where a row does not see one. -0 becomes 0: they are equal."""
    b_k = load_tile(k_base, j, j < K, stride_kn, D, BLOCK_D)
    s = tl.dot(b_q, tl.trans(b_k), input_precision=PRECISION) * scale + 0.0
    return tl.where(seen, s, -float("inf"))


@triton.jit
def key_tile(
    tile, scores_of, STEP: tl.constexpr, D: tl.constexpr, BLOCK_D: tl.constexpr, POSITIONS: tl.constexpr,
    PRECISION: tl.constexpr,
):  # fmt: skip
    """(j [STEP], s [R, STEP]): the keys of a tile, and the scores of some rows.

    Args:
        scores_of: b_q, k_base, stride_kn, first, last, at, k_positions, stride_kp, scale and K, as above.
    """
    b_q, k_base, stride_kn, first, last, at, k_positions, stride_kp, scale, K = scores_of
    j = tile * STEP + tl.arange(0, STEP)
    seen = visible(j, first, last, at, k_positions, stride_kp, K, POSITIONS)
    return j, tile_scores(b_q, k_base, j, seen, stride_kn, scale, K, D, BLOCK_D, PRECISION)


@triton.jit
def relative(s, lam):
    """s - lam [R, C], finite where s is -inf."""
    return tl.where(s == -float("inf"), FAR, s - tl.where(lam == -float("inf"), 0.0, lam)[:, None])
