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
from gossamer.kernels.triton.wide.parameters import (
    GradientLists,
    GradientNumbers,
    GradientStrides,
    Leads,
    OutputLists,
    OutputNumbers,
    OutputStrides,
    ProductLists,
    ProductNumbers,
    ProductRows,
    ProductStrides,
    ProductTerms,
)


@triton.jit
def slice_rows(base, stride, o_r, limit, first, SIZE: tl.constexpr, BLOCK: tl.constexpr):
    """Rows o_r and columns [first, first + BLOCK) of a matrix; zero past `limit` rows and SIZE columns."""
    o_d = first + tl.arange(0, BLOCK)
    mask = (o_r < limit)[:, None] & (o_d < SIZE)[None, :]
    return tl.load(base + o_r.to(tl.int64)[:, None] * stride + o_d[None, :], mask=mask, other=0.0)


@triton.jit(do_not_specialize=["numbers"])
def products_kernel(
    q,  # (B, H, Q, D)
    k,  # (B, G, K, D)
    v,  # (B, G, K, E)
    rows: ProductRows,
    first,  # (B * H, slots, TILE_ROWS, TILE_COLUMNS): scores in base 2, or P
    second,  # the same for dS
    lists: ProductLists,
    terms: ProductTerms,
    strides: ProductStrides,
    numbers: ProductNumbers,
    leads: Leads,
    FORM: tl.constexpr,
):
    """R x C pairs of one listed tile: their scores, or P and dS."""
    slot = tl.program_id(0) % numbers.slots
    i_b = tl.program_id(0) // numbers.slots // leads.H
    i_h = tl.program_id(0) // numbers.slots % leads.H
    lead = i_b * leads.lead_b + i_h * leads.lead_h
    if slot >= tl.load(lists.counts + lead):
        return
    at = lists.tiles + (tl.load(lists.begins + lead) + slot) * 4
    row = tl.load(at)
    column = tl.load(at + 1)
    kind = tl.load(at + 2)
    entry = tl.load(at + 3)
    sub_r = tl.program_id(1) % (FORM.TILE_ROWS // FORM.R) * FORM.R
    sub_c = tl.program_id(1) // (FORM.TILE_ROWS // FORM.R) * FORM.C
    o_c = tl.arange(0, FORM.C)
    o_r = row * FORM.TILE_ROWS + sub_r + tl.arange(0, FORM.R)
    key = column * FORM.TILE_COLUMNS + sub_c
    b64 = i_b.to(tl.int64)
    h64 = i_h.to(tl.int64)
    i_bh = b64 * leads.H + h64
    q += b64 * strides.at_q.b + h64 * strides.at_q.h
    k += b64 * strides.at_k.b + h64 // FORM.GROUP * strides.at_k.h
    b_s = tl.zeros([FORM.R, FORM.C], tl.float32)
    for at_d in range(0, FORM.D, FORM.STEP):
        b_q = slice_rows(q, strides.at_q.n, o_r, numbers.Q, at_d, FORM.D, FORM.STEP)
        b_k = slice_rows(k, strides.at_k.n, key + o_c, numbers.K, at_d, FORM.D, FORM.STEP)
        b_s = tl.dot(b_q, tl.trans(b_k), b_s, input_precision=FORM.PRECISION)
    end = end_of_keys(terms.lengths, i_b, numbers.K, terms.lengths is not None)
    m_keep = (key + o_c < end)[None, :] & (o_r < numbers.Q)[:, None]
    if kind == INTERVAL:
        b_lo, b_hi = row_bounds(lists.lo, lists.hi, lead, numbers.Q, o_r)
        m_keep = m_keep & interval_mask(b_lo, b_hi, key, o_c)
    if kind == BITS:
        WORDS: tl.constexpr = FORM.TILE_COLUMNS // 32
        masks = lists.pool + entry.to(tl.int64) * (FORM.TILE_ROWS * WORDS) + sub_r * WORDS + sub_c // 32
        m_keep = m_keep & bits_mask(masks + tl.arange(0, FORM.R) * WORDS, o_c, 1, FORM.C)
    slope = head_slope(terms.slopes, i_b, i_h, leads.H, FORM.ALIBI)
    distance = (key + o_c)[None, :] - (o_r + numbers.q_offset)[:, None]
    b_s, b_t = score(b_s, numbers.scale, numbers.cap, slope, distance, FORM.SOFTCAP, FORM.ALIBI)
    place = (i_bh * numbers.slots + slot) * (FORM.TILE_ROWS * FORM.TILE_COLUMNS)
    place += (sub_r + tl.arange(0, FORM.R))[:, None] * FORM.TILE_COLUMNS + (sub_c + o_c)[None, :]
    if FORM.BACKWARD:
        v += b64 * strides.at_v.b + h64 // FORM.GROUP * strides.at_v.h
        b_dp = tl.zeros([FORM.R, FORM.C], tl.float32)
        for at_e in range(0, FORM.E, FORM.STEP):
            b_dout = slice_rows(rows.dout + i_bh * numbers.Q * FORM.E, FORM.E, o_r, numbers.Q, at_e, FORM.E, FORM.STEP)
            b_v = slice_rows(v, strides.at_v.n, key + o_c, numbers.K, at_e, FORM.E, FORM.STEP)
            b_dp = tl.dot(b_dout, tl.trans(b_v), b_dp, input_precision=FORM.PRECISION)
        b_lse = tl.load(rows.lse + i_bh * numbers.Q + o_r, mask=o_r < numbers.Q, other=float("inf")) * LOG2E
        b_delta = tl.load(rows.delta + i_bh * numbers.Q + o_r, mask=o_r < numbers.Q, other=0.0)
        b_p = tl.where(m_keep, tl.exp2(b_s - b_lse[:, None]), 0.0)
        # dP of a pair that is not kept may be NaN.
        b_ds = tl.where(m_keep, score_gradient(b_p, b_dp, b_delta[:, None], b_t, FORM.SOFTCAP), 0.0)
        tl.store(first + place, b_p.to(first.dtype.element_ty))
        tl.store(second + place, b_ds.to(second.dtype.element_ty))
    else:
        tl.store(first + place, tl.where(m_keep, b_s, float("-inf")))


@triton.jit(do_not_specialize=["numbers"])
def output_kernel(
    scores,  # (B * H, slots, TILE_ROWS, TILE_COLUMNS) in base 2
    v,  # (B, G, K, E)
    out,  # (B, H, Q, E)
    lse,  # (B, H, Q)
    sinks,  # (H,) or None
    lists: OutputLists,
    strides: OutputStrides,
    numbers: OutputNumbers,
    n_rows,
    leads: Leads,
    FORM: tl.constexpr,
):
    """BLOCK columns of the output of R rows, from their scores; the first slice also writes lse."""
    SUB: tl.constexpr = FORM.TILE_ROWS // FORM.R
    STEPS: tl.constexpr = FORM.TILE_COLUMNS // FORM.C
    here = tl.program_id(0) // SUB % n_rows
    sub = tl.program_id(0) % SUB * FORM.R
    i_bh = tl.program_id(0) // SUB // n_rows
    i_b = i_bh // leads.H
    i_h = i_bh % leads.H
    at_e = tl.program_id(1) * FORM.BLOCK
    lead = i_b * leads.lead_b + i_h * leads.lead_h
    o_r = (numbers.first_row + here) * FORM.TILE_ROWS + sub + tl.arange(0, FORM.R)
    o_c = tl.arange(0, FORM.C)
    b64 = i_b.to(tl.int64)
    h64 = i_h.to(tl.int64)
    v += b64 * strides.at_v.b + h64 // FORM.GROUP * strides.at_v.h
    b_acc = tl.zeros([FORM.R, FORM.BLOCK], tl.float32)
    b_l, b_m = start_rows(sinks, i_h, True, FORM.R, sinks is not None)
    begin = tl.load(lists.begins + lead)
    start = tl.load(lists.row_starts + lead * (n_rows + 1) + here)
    stop = tl.load(lists.row_starts + lead * (n_rows + 1) + here + 1)
    scores += (b64 * leads.H + h64) * numbers.slots * (FORM.TILE_ROWS * FORM.TILE_COLUMNS) + (
        sub + tl.arange(0, FORM.R)
    )[:, None] * FORM.TILE_COLUMNS
    for step in range(start * STEPS, stop * STEPS):
        slot = step // STEPS
        part = step % STEPS * FORM.C
        key = tl.load(lists.tiles + (begin + slot) * 4 + 1) * FORM.TILE_COLUMNS + part
        b_s = tl.load(scores + slot.to(tl.int64) * (FORM.TILE_ROWS * FORM.TILE_COLUMNS) + (part + o_c)[None, :])
        b_p, b_shrink, b_l, b_m = add_scores(b_s, b_l, b_m)
        b_v = slice_rows(v, strides.at_v.n, key + o_c, numbers.K, at_e, FORM.E, FORM.BLOCK)
        if FORM.CLEAR:
            b_v = cleared(b_v, b_s != float("-inf"))
        b_acc = tl.dot(b_p.to(b_v.dtype), b_v, b_acc * b_shrink[:, None], input_precision=FORM.PRECISION)
    b_l, b_lse = finish_rows(b_l, b_m)
    if at_e == 0:
        tl.store(
            lse + b64 * strides.at_lse.b + h64 * strides.at_lse.h + o_r.to(tl.int64) * strides.at_lse.n,
            b_lse,
            mask=o_r < numbers.Q,
        )
    o_e = at_e + tl.arange(0, FORM.BLOCK)
    out += b64 * strides.at_out.b + h64 * strides.at_out.h
    mask = (o_r < numbers.Q)[:, None] & (o_e < FORM.E)[None, :]
    b_out = (b_acc / b_l[:, None]).to(out.dtype.element_ty)
    tl.store(out + o_r.to(tl.int64)[:, None] * strides.at_out.n + o_e[None, :], b_out, mask=mask)


@triton.jit(do_not_specialize=["numbers"])
def gradient_kernel(
    weights,  # (B * H, slots, TILE_ROWS, TILE_COLUMNS): P or dS
    x,  # (B, heads of x, columns, SIZE): k for dQ; dout for dV, q for dK
    result,  # (B, heads of the result, rows, SIZE); added to where ADD
    lists: GradientLists,
    strides: GradientStrides,
    numbers: GradientNumbers,
    n_rows,
    leads: Leads,
    FORM: tl.constexpr,
):
    """BLOCK columns of a gradient of R rows: weights of its tiles by slices of x."""
    RESIDENT: tl.constexpr = FORM.TILE_COLUMNS if FORM.TRANSPOSED else FORM.TILE_ROWS
    STREAMED: tl.constexpr = FORM.TILE_ROWS if FORM.TRANSPOSED else FORM.TILE_COLUMNS
    AXIS: tl.constexpr = 0 if FORM.TRANSPOSED else 1
    STEPS: tl.constexpr = STREAMED // FORM.C
    SUB: tl.constexpr = RESIDENT // FORM.R
    here = tl.program_id(0) // SUB % n_rows
    sub = tl.program_id(0) % SUB * FORM.R
    i_bh = tl.program_id(0) // SUB // n_rows
    i_b = i_bh // (leads.H // FORM.MEMBERS)
    head = i_bh % (leads.H // FORM.MEMBERS)
    at_d = tl.program_id(1) * FORM.BLOCK
    o_row = sub + tl.arange(0, FORM.R)
    o_r = (numbers.first_row + here) * RESIDENT + o_row
    o_c = tl.arange(0, FORM.C)
    b64 = i_b.to(tl.int64)
    b_acc = tl.zeros([FORM.R, FORM.BLOCK], tl.float32)
    for member in range(FORM.MEMBERS):
        i_h = head * FORM.MEMBERS + member
        h64 = i_h.to(tl.int64)
        lead = i_b * leads.lead_b + i_h * leads.lead_h
        begin = tl.load(lists.begins + lead)
        order_begin = tl.load(lists.order_begins + lead)
        start = tl.load(lists.starts + lead * (n_rows + 1) + here)
        stop = tl.load(lists.starts + lead * (n_rows + 1) + here + 1)
        own = weights + (b64 * leads.H + h64) * numbers.slots * (FORM.TILE_ROWS * FORM.TILE_COLUMNS)
        own_x = x + b64 * strides.at_x.b + h64 // FORM.X_GROUP * strides.at_x.h
        for step in range(start * STEPS, stop * STEPS):
            slot = tl.load(lists.order + order_begin + step // STEPS)
            part = step % STEPS * FORM.C
            other = tl.load(lists.tiles + (begin + slot) * 4 + AXIS) * STREAMED + part
            tile = own + slot.to(tl.int64) * (FORM.TILE_ROWS * FORM.TILE_COLUMNS)
            if FORM.TRANSPOSED:
                b_w = tl.load(tile + (part + o_c)[None, :] * FORM.TILE_COLUMNS + o_row[:, None])
            else:
                b_w = tl.load(tile + o_row[:, None] * FORM.TILE_COLUMNS + (part + o_c)[None, :])
            b_x = slice_rows(own_x, strides.at_x.n, other + o_c, numbers.columns, at_d, FORM.SIZE, FORM.BLOCK)
            if FORM.CLEAR:
                b_x = cleared(b_x, b_w != 0.0)
            b_acc = tl.dot(b_w, b_x, b_acc, input_precision=FORM.PRECISION)
    o_d = at_d + tl.arange(0, FORM.BLOCK)
    mask = (o_r < numbers.rows)[:, None] & (o_d < FORM.SIZE)[None, :]
    place = result + b64 * strides.at_result.b + head.to(tl.int64) * strides.at_result.h
    place += o_r.to(tl.int64)[:, None] * strides.at_result.n + o_d[None, :]
    b_acc *= numbers.factor
    if FORM.ADD:
        b_acc += tl.load(place, mask=mask, other=0.0).to(tl.float32)
    tl.store(place, b_acc.to(result.dtype.element_ty), mask=mask)
