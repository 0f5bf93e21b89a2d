"""Tiles of the rows that have no list: which rows these are, the keys that they may see, weights of tiles of scores."""

from __future__ import annotations

import triton
import triton.language as tl

from gossamer.entmax.triton.formulas import FAR, powers
from gossamer.entmax.triton.rows import bounds, load_tile, visible

LOG2E = tl.constexpr(1.4426950408889634)
NOWHERE = tl.constexpr(1e30)  # the normaliser of a row that is not there: none of its scores has a weight
FAST = tl.constexpr(-2.0)  # a number for all heads, known when a kernel is run, by powers of 2


@triton.jit
def list_rows(list_counts, unlisted, numbers, STEP: tl.constexpr):
    """List the rows of a head that have no list: one of the first `heads` programs of a kernel whose others do more.

    Args:
        list_counts: (B, H, Q) int32: -1 of a row without a list.
        unlisted: `parameters.Unlisted`, to write.
        numbers: `parameters.GatherNumbers`.
    """
    n_zeros, heads, Q = numbers.n_zeros, numbers.heads, numbers.Q
    head = tl.program_id(0).to(tl.int64)
    for first in range(tl.program_id(0) * STEP, n_zeros, heads * STEP):
        at = first + tl.arange(0, STEP)
        tl.store(unlisted.zeros + at, tl.zeros([STEP], tl.int32), mask=at < n_zeros)
    listed = 0
    pairs = 0
    for first in range(0, Q, STEP):
        row = first + tl.arange(0, STEP)
        count = tl.load(list_counts + head * Q + row, mask=row < Q, other=0)
        some = (count < 0).to(tl.int32)
        number = tl.sum(some, 0)
        if number > 0:
            tl.store(unlisted.row_list + head * Q + listed + tl.cumsum(some, 0) - 1, row, mask=some > 0)
        listed += number
        pairs += tl.sum(tl.maximum(count, 0), 0)
    tl.store(unlisted.row_counts + head, listed)
    tl.store(unlisted.pair_counts + head, pairs)


@triton.jit
def rows_at(row_list, row_counts, head, tile, Q, R: tl.constexpr):
    """(rows [R], which of them are there) of a tile of a head; `head` is a 64-bit number."""
    place = tile * R + tl.arange(0, R)
    inside = place < tl.load(row_counts + head)
    return tl.load(row_list + head * Q + place, mask=inside, other=0), inside


@triton.jit
def positions_of(rows, inside, b64, h64, head_rows, strides, POSITIONS: tl.constexpr):
    """(the positions of rows [R], where those of the keys of their head begin); without `POSITIONS` as rows count."""
    at = rows
    k_positions = head_rows.k_positions
    if POSITIONS:
        at_q, at_k = strides.at_q_positions, strides.at_k_positions
        q_positions = head_rows.q_positions + b64 * at_q.b + h64 * at_q.h + rows.to(tl.int64) * at_q.n
        at = tl.load(q_positions, mask=inside, other=-1)
        k_positions = head_rows.k_positions + b64 * at_k.b + h64 * at_k.h
    return at, k_positions


@triton.jit
def common_range(first, last, inside, K, STEP: tl.constexpr):
    """(begin, middle, middle_end, end): the tiles of keys that any row may see, and those that every row sees whole."""
    some = inside & (first < last)
    begin = tl.min(tl.where(some, first, K), 0) // STEP
    end = (tl.max(tl.where(some, last, 0), 0) + STEP - 1) // STEP
    begin = tl.minimum(begin, end)
    middle = (tl.max(tl.where(inside, first, 0), 0) + STEP - 1) // STEP
    middle_end = tl.min(tl.where(inside, last, K), 0) // STEP
    middle = tl.maximum(tl.minimum(middle, end), begin)
    return begin, middle, tl.maximum(middle_end, middle), end


@triton.jit
def visible_tiles(rows, inside, b64, h64, head_rows, strides, numbers, FORM: tl.constexpr):
    """(what `seen_by` reads of rows [R], begin, middle, middle_end, end): see `common_range`.

    By positions no tile is known to be seen whole.
    """
    K = numbers.K
    first, last = bounds(rows, inside, head_rows.lo, head_rows.hi, numbers.offset, K, FORM.BOUNDS)
    at, k_positions = positions_of(rows, inside, b64, h64, head_rows, strides, FORM.POSITIONS)
    begin, middle, middle_end, end = common_range(first, last, inside, K, FORM.STEP)
    if FORM.POSITIONS:
        middle, middle_end = begin, begin
    return (first, last, at, k_positions, strides.at_k_positions.n, K), begin, middle, middle_end, end


@triton.jit(do_not_specialize=["Q", "K", "offset"])
def tile_ranges_kernel(
    row_list, row_counts,  # of `list_rows`
    lo, hi,  # (Q,) int32
    ranges,  # (B H, tiles, 4) int32, to write
    tiles, Q, K, offset, R: tl.constexpr, BOUNDS: tl.constexpr,
):  # fmt: skip
    """Write for each tile of rows the keys [0, 1) that any row may see, and those [2, 3) that every row does."""
    head = tl.program_id(1).to(tl.int64)
    tile = tl.program_id(0)
    if tile * R >= tl.load(row_counts + head):
        return
    rows, inside = rows_at(row_list, row_counts, head, tile, Q, R)
    first, last = bounds(rows, inside, lo, hi, offset, K, BOUNDS)
    some = inside & (first < last)
    to = ranges + (head * tiles + tile) * 4
    tl.store(to, tl.min(tl.where(some, first, K), 0))
    tl.store(to + 1, tl.max(tl.where(some, last, 0), 0))
    tl.store(to + 2, tl.max(tl.where(inside, first, 0), 0))
    tl.store(to + 3, tl.min(tl.where(inside, last, K), 0))


@triton.jit
def line(lam, a, scale, A: tl.constexpr):
    """(c, d): of a product x a weight is a power of c x + d, which is 1 + a (scale x - lam), or its logarithm."""
    if A == 0.0:
        c = scale * LOG2E
        d = lam * -LOG2E
    elif A == -1.0:
        c = scale
        d = -lam
    else:
        c = a * scale
        d = 1.0 - a * lam
    return c, d


@triton.jit
def score_of(z, lam, a, A: tl.constexpr):
    """The score of a number on that line."""
    if A == 0.0:
        s = lam + z * (1.0 / LOG2E)
    elif A == -1.0:
        s = lam + z
    else:
        s = lam + (z - 1.0) / a
    return s


@triton.jit
def weigh(x, c, d, a, A: tl.constexpr):
    """(z, p, u) of products x: their numbers on the line, the weights, and u = p^(2 - alpha); d is as long as rows."""
    z = x * c + d
    if A == 0.0:
        p = tl.exp2(z)
        u = p
    elif A == -1.0:
        p, u = powers(tl.maximum(z, FAR, propagate_nan=tl.PropagateNan.ALL), a, A)
    else:
        w = tl.maximum(z, 0.0, propagate_nan=tl.PropagateNan.ALL)
        if A == 0.5:
            u = w
            p = w * w
        elif A == 0.25:
            square = w * w
            u = square * w
            p = square * square
        elif A == 1.0:
            p = w
            u = tl.where(w > 0.0, 1.0, w)
        else:
            u = tl.exp2((1.0 / a - 1.0) * tl.log2(w))
            p = u * w
    return z, p, u


@triton.jit
def products(b_q, k_base, j, stride_kn, K, D: tl.constexpr, BLOCK_D: tl.constexpr, MASKED: tl.constexpr,
             PRECISION: tl.constexpr):  # fmt: skip
    """b_q [R, BLOCK_D] with the keys j [C]: [R, C]. `MASKED`: some keys may not be there."""
    b_k = load_rows(k_base, j, K, stride_kn, D, BLOCK_D, MASKED)
    return tl.dot(b_q, tl.trans(b_k), input_precision=PRECISION)


@triton.jit
def load_rows(base, j, K, stride, SIZE: tl.constexpr, BLOCK: tl.constexpr, MASKED: tl.constexpr):
    """Rows j of a matrix, as `load_tile`; without conditions where all are there."""
    if MASKED or SIZE != BLOCK:
        b = load_tile(base, j, j < K, stride, SIZE, BLOCK)
    else:
        b = tl.load(base + j.to(tl.int64)[:, None] * stride + tl.arange(0, BLOCK)[None, :])
    return b


@triton.jit
def seen_by(j, given, MASKED: tl.constexpr, POSITIONS: tl.constexpr):
    """The keys that rows see, as a mask; `given` are first, last, at, k_positions, stride_kp and K, as of `visible`."""
    first, last, at, k_positions, stride_kp, K = given
    seen = j[None, :] >= 0
    if MASKED:
        seen = visible(j, first, last, at, k_positions, stride_kp, K, POSITIONS)
    return seen


@triton.jit
def edge_tile(i, begin, middle, middle_end):
    """The i-th of the tiles of keys that not every row sees whole: those before the middle, and those behind it."""
    return tl.where(begin + i < middle, begin + i, middle_end + i - (middle - begin))
