"""Kernels for heads wider than 256: scores and their gradients are formed tile by tile over D, and kept for a while.

No program can hold a row of the output. One kernel makes the scores of the listed tiles of some tile rows, as a matrix
product does; others multiply those tiles by slices of v, k, q or dout. What is kept is some tiles, never a matrix.

Names as in `rows`. `tiles` is a table (n, 4) of the listed tiles: tile row, tile column, kind, entry of the pool.
"""

from __future__ import annotations

import triton
import triton.language as tl

from gossamer.kernels.scores import LOG2E, score
from gossamer.kernels.softmax import (
    add_scores,
    cleared,
    end_of_keys,
    finish_rows,
    head_slope,
    score_gradient,
    start_rows,
)
from gossamer.kernels.triton.mask_modes import BITS, INTERVAL, bits_mask, interval_mask, row_bounds


@triton.jit
def slice_rows(base, stride, o_r, limit, first, SIZE: tl.constexpr, BLOCK: tl.constexpr):
    """Rows o_r and columns [first, first + BLOCK) of a matrix; zero past `limit` rows and SIZE columns."""
    o_d = first + tl.arange(0, BLOCK)
    mask = (o_r < limit)[:, None] & (o_d < SIZE)[None, :]
    return tl.load(base + o_r.to(tl.int64)[:, None] * stride + o_d[None, :], mask=mask, other=0.0)


@triton.jit(do_not_specialize=["Q", "K", "q_offset", "slots"])
def products_kernel(
    q,  # (B, H, Q, D)
    k,  # (B, G, K, D)
    v,  # (B, G, K, E)
    dout,  # (B, H, Q, E), read by the backward
    lse,  # (B, H, Q) natural, +inf for an empty row, read by the backward
    delta,  # (B, H, Q), read by the backward
    first,  # (B * H, slots, TILE_ROWS, TILE_COLUMNS): scores in base 2, or P
    second,  # the same for dS
    tiles,  # (n, 4)
    begins,  # (leads,) of the first tile of each lead's list
    counts,  # (leads,) of its tiles
    lo,  # (leads, Q)
    hi,  # (leads, Q)
    pool,
    lengths,  # (B,) or None
    slopes,  # (H,) or (B, H), or None
    stride_qb, stride_qh, stride_qn, stride_kb, stride_kh, stride_kn, stride_vb, stride_vh, stride_vn,
    H, Q, K, q_offset, slots,
    lead_b,  # leads between two batch elements, and between two heads; 0 where they share
    lead_h,
    scale, cap,
    GROUP: tl.constexpr, D: tl.constexpr, E: tl.constexpr, R: tl.constexpr, C: tl.constexpr, STEP: tl.constexpr,
    TILE_ROWS: tl.constexpr, TILE_COLUMNS: tl.constexpr,
    SOFTCAP: tl.constexpr, ALIBI: tl.constexpr, BACKWARD: tl.constexpr, PRECISION: tl.constexpr,
):  # fmt: skip
    """R x C pairs of one listed tile: their scores, or P and dS."""
    slot = tl.program_id(0) % slots
    i_b = tl.program_id(0) // slots // H
    i_h = tl.program_id(0) // slots % H
    lead = i_b * lead_b + i_h * lead_h
    if slot >= tl.load(counts + lead):
        return
    at = tiles + (tl.load(begins + lead) + slot) * 4
    row = tl.load(at)
    column = tl.load(at + 1)
    kind = tl.load(at + 2)
    entry = tl.load(at + 3)
    sub_r = tl.program_id(1) % (TILE_ROWS // R) * R
    sub_c = tl.program_id(1) // (TILE_ROWS // R) * C
    o_c = tl.arange(0, C)
    o_r = row * TILE_ROWS + sub_r + tl.arange(0, R)
    key = column * TILE_COLUMNS + sub_c
    b64 = i_b.to(tl.int64)
    h64 = i_h.to(tl.int64)
    i_bh = b64 * H + h64
    q += b64 * stride_qb + h64 * stride_qh
    k += b64 * stride_kb + h64 // GROUP * stride_kh
    b_s = tl.zeros([R, C], tl.float32)
    for at_d in range(0, D, STEP):
        b_q = slice_rows(q, stride_qn, o_r, Q, at_d, D, STEP)
        b_k = slice_rows(k, stride_kn, key + o_c, K, at_d, D, STEP)
        b_s = tl.dot(b_q, tl.trans(b_k), b_s, input_precision=PRECISION)
    end = end_of_keys(lengths, i_b, K, lengths is not None)
    m_keep = (key + o_c < end)[None, :] & (o_r < Q)[:, None]
    if kind == INTERVAL:
        b_lo, b_hi = row_bounds(lo, hi, lead, Q, o_r)
        m_keep = m_keep & interval_mask(b_lo, b_hi, key, o_c)
    if kind == BITS:
        WORDS: tl.constexpr = TILE_COLUMNS // 32
        masks = pool + entry.to(tl.int64) * (TILE_ROWS * WORDS) + sub_r * WORDS + sub_c // 32
        m_keep = m_keep & bits_mask(masks + tl.arange(0, R) * WORDS, o_c, 1, C)
    slope = head_slope(slopes, i_b, i_h, H, ALIBI)
    distance = (key + o_c)[None, :] - (o_r + q_offset)[:, None]
    b_s, b_t = score(b_s, scale, cap, slope, distance, SOFTCAP, ALIBI)
    place = (i_bh * slots + slot) * (TILE_ROWS * TILE_COLUMNS)
    place += (sub_r + tl.arange(0, R))[:, None] * TILE_COLUMNS + (sub_c + o_c)[None, :]
    if BACKWARD:
        v += b64 * stride_vb + h64 // GROUP * stride_vh
        b_dp = tl.zeros([R, C], tl.float32)
        for at_e in range(0, E, STEP):
            b_dout = slice_rows(dout + i_bh * Q * E, E, o_r, Q, at_e, E, STEP)
            b_v = slice_rows(v, stride_vn, key + o_c, K, at_e, E, STEP)
            b_dp = tl.dot(b_dout, tl.trans(b_v), b_dp, input_precision=PRECISION)
        b_lse = tl.load(lse + i_bh * Q + o_r, mask=o_r < Q, other=float("inf")) * LOG2E
        b_delta = tl.load(delta + i_bh * Q + o_r, mask=o_r < Q, other=0.0)
        b_p = tl.where(m_keep, tl.exp2(b_s - b_lse[:, None]), 0.0)
        # dP of a pair that is not kept may be NaN.
        b_ds = tl.where(m_keep, score_gradient(b_p, b_dp, b_delta[:, None], b_t, SOFTCAP), 0.0)
        tl.store(first + place, b_p.to(first.dtype.element_ty))
        tl.store(second + place, b_ds.to(second.dtype.element_ty))
    else:
        tl.store(first + place, tl.where(m_keep, b_s, float("-inf")))


@triton.jit(do_not_specialize=["Q", "K", "slots", "first_row"])
def output_kernel(
    scores,  # (B * H, slots, TILE_ROWS, TILE_COLUMNS) in base 2
    v,  # (B, G, K, E)
    out,  # (B, H, Q, E)
    lse,  # (B, H, Q)
    sinks,  # (H,) or None
    tiles, begins,
    row_starts,  # (leads, tile rows here + 1) within the list
    stride_vb, stride_vh, stride_vn, stride_ob, stride_oh, stride_on, stride_lb, stride_lh, stride_ln,
    H, Q, K, slots, first_row, n_rows, lead_b, lead_h,
    GROUP: tl.constexpr, E: tl.constexpr, R: tl.constexpr, C: tl.constexpr, BLOCK: tl.constexpr,
    TILE_ROWS: tl.constexpr, TILE_COLUMNS: tl.constexpr,
    CLEAR: tl.constexpr,  # there may be keys that no query keeps, whose values may be NaN
    PRECISION: tl.constexpr,
):  # fmt: skip
    """BLOCK columns of the output of R rows, from their scores; the first slice also writes lse."""
    SUB: tl.constexpr = TILE_ROWS // R
    STEPS: tl.constexpr = TILE_COLUMNS // C
    here = tl.program_id(0) // SUB % n_rows
    sub = tl.program_id(0) % SUB * R
    i_bh = tl.program_id(0) // SUB // n_rows
    i_b = i_bh // H
    i_h = i_bh % H
    at_e = tl.program_id(1) * BLOCK
    lead = i_b * lead_b + i_h * lead_h
    o_r = (first_row + here) * TILE_ROWS + sub + tl.arange(0, R)
    o_c = tl.arange(0, C)
    b64 = i_b.to(tl.int64)
    h64 = i_h.to(tl.int64)
    v += b64 * stride_vb + h64 // GROUP * stride_vh
    b_acc = tl.zeros([R, BLOCK], tl.float32)
    b_l, b_m = start_rows(sinks, i_h, True, R, sinks is not None)
    begin = tl.load(begins + lead)
    start = tl.load(row_starts + lead * (n_rows + 1) + here)
    stop = tl.load(row_starts + lead * (n_rows + 1) + here + 1)
    scores += (b64 * H + h64) * slots * (TILE_ROWS * TILE_COLUMNS) + (sub + tl.arange(0, R))[:, None] * TILE_COLUMNS
    for step in range(start * STEPS, stop * STEPS):
        slot = step // STEPS
        part = step % STEPS * C
        key = tl.load(tiles + (begin + slot) * 4 + 1) * TILE_COLUMNS + part
        b_s = tl.load(scores + slot.to(tl.int64) * (TILE_ROWS * TILE_COLUMNS) + (part + o_c)[None, :])
        b_p, b_shrink, b_l, b_m = add_scores(b_s, b_l, b_m)
        b_v = slice_rows(v, stride_vn, key + o_c, K, at_e, E, BLOCK)
        if CLEAR:
            b_v = cleared(b_v, b_s != float("-inf"))
        b_acc = tl.dot(b_p.to(b_v.dtype), b_v, b_acc * b_shrink[:, None], input_precision=PRECISION)
    b_l, b_lse = finish_rows(b_l, b_m)
    if at_e == 0:
        tl.store(lse + b64 * stride_lb + h64 * stride_lh + o_r.to(tl.int64) * stride_ln, b_lse, mask=o_r < Q)
    o_e = at_e + tl.arange(0, BLOCK)
    out += b64 * stride_ob + h64 * stride_oh
    mask = (o_r < Q)[:, None] & (o_e < E)[None, :]
    b_out = (b_acc / b_l[:, None]).to(out.dtype.element_ty)
    tl.store(out + o_r.to(tl.int64)[:, None] * stride_on + o_e[None, :], b_out, mask=mask)


@triton.jit(do_not_specialize=["rows", "columns", "slots", "first_row"])
def gradient_kernel(
    weights,  # (B * H, slots, TILE_ROWS, TILE_COLUMNS): P or dS
    x,  # (B, heads of x, columns, SIZE): k for dQ; dout for dV, q for dK
    result,  # (B, heads of the result, rows, SIZE); added to where ADD
    tiles, begins,
    order,  # slots by tile row of the result, of each lead
    order_begins,  # (leads,)
    starts,  # (leads, n_rows + 1) within the order
    stride_xb, stride_xh, stride_xn, stride_rb, stride_rh, stride_rn,
    H, rows, columns, slots, first_row, n_rows, lead_b, lead_h, factor,
    MEMBERS: tl.constexpr,  # query heads of a program: 1 for dQ, the group for dK and dV
    X_GROUP: tl.constexpr,  # query heads of a head of x
    SIZE: tl.constexpr, R: tl.constexpr, C: tl.constexpr, BLOCK: tl.constexpr, TILE_ROWS: tl.constexpr,
    TILE_COLUMNS: tl.constexpr,
    TRANSPOSED: tl.constexpr,  # the result's rows are the tiles' columns
    CLEAR: tl.constexpr,  # there may be rows of x that no pair has
    ADD: tl.constexpr, PRECISION: tl.constexpr,
):  # fmt: skip
    """BLOCK columns of a gradient of R rows: weights of its tiles by slices of x."""
    RESIDENT: tl.constexpr = TILE_COLUMNS if TRANSPOSED else TILE_ROWS
    STREAMED: tl.constexpr = TILE_ROWS if TRANSPOSED else TILE_COLUMNS
    AXIS: tl.constexpr = 0 if TRANSPOSED else 1
    STEPS: tl.constexpr = STREAMED // C
    SUB: tl.constexpr = RESIDENT // R
    here = tl.program_id(0) // SUB % n_rows
    sub = tl.program_id(0) % SUB * R
    i_bh = tl.program_id(0) // SUB // n_rows
    i_b = i_bh // (H // MEMBERS)
    head = i_bh % (H // MEMBERS)
    at_d = tl.program_id(1) * BLOCK
    o_row = sub + tl.arange(0, R)
    o_r = (first_row + here) * RESIDENT + o_row
    o_c = tl.arange(0, C)
    b64 = i_b.to(tl.int64)
    b_acc = tl.zeros([R, BLOCK], tl.float32)
    for member in range(MEMBERS):
        i_h = head * MEMBERS + member
        h64 = i_h.to(tl.int64)
        lead = i_b * lead_b + i_h * lead_h
        begin = tl.load(begins + lead)
        order_begin = tl.load(order_begins + lead)
        start = tl.load(starts + lead * (n_rows + 1) + here)
        stop = tl.load(starts + lead * (n_rows + 1) + here + 1)
        own = weights + (b64 * H + h64) * slots * (TILE_ROWS * TILE_COLUMNS)
        own_x = x + b64 * stride_xb + h64 // X_GROUP * stride_xh
        for step in range(start * STEPS, stop * STEPS):
            slot = tl.load(order + order_begin + step // STEPS)
            part = step % STEPS * C
            other = tl.load(tiles + (begin + slot) * 4 + AXIS) * STREAMED + part
            tile = own + slot.to(tl.int64) * (TILE_ROWS * TILE_COLUMNS)
            if TRANSPOSED:
                b_w = tl.load(tile + (part + o_c)[None, :] * TILE_COLUMNS + o_row[:, None])
            else:
                b_w = tl.load(tile + o_row[:, None] * TILE_COLUMNS + (part + o_c)[None, :])
            b_x = slice_rows(own_x, stride_xn, other + o_c, columns, at_d, SIZE, BLOCK)
            if CLEAR:
                b_x = cleared(b_x, b_w != 0.0)
            b_acc = tl.dot(b_w, b_x, b_acc, input_precision=PRECISION)
    o_d = at_d + tl.arange(0, BLOCK)
    mask = (o_r < rows)[:, None] & (o_d < SIZE)[None, :]
    place = result + b64 * stride_rb + head.to(tl.int64) * stride_rh
    place += o_r.to(tl.int64)[:, None] * stride_rn + o_d[None, :]
    b_acc *= factor
    if ADD:
        b_acc += tl.load(place, mask=mask, other=0.0).to(tl.float32)
    tl.store(place, b_acc.to(result.dtype.element_ty), mask=mask)
