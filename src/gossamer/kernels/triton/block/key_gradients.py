"""dV = P^T dout and dK = scale * dS^T q, by the columns of a layout: a program has R key rows, and walks queries."""

# ruff: noqa: SIM102  (an `if` on a constexpr is resolved while compiling, one on data is not: they stay apart)

from __future__ import annotations

import triton
import triton.language as tl

from gossamer.kernels.softmax import cleared, end_of_keys, head_slope, probability, score_gradient
from gossamer.kernels.triton.block.lists import Part, decode, walk
from gossamer.kernels.triton.block.parameters import BackwardHeads, Lists, Numbers
from gossamer.kernels.triton.groups import BackwardTerms, KeyResults, KeyStrides
from gossamer.kernels.triton.mask_modes import FULL
from gossamer.kernels.triton.row_access import load_rows, slot_of, store_part_rows, store_rows, stream_rows


@triton.jit(do_not_specialize=["numbers"])
def dkdv_kernel(
    q,  # (B, H, Q, D); q and dout are descriptors with TMA
    k,  # (B, G, K, D)
    v,  # (B, G, K, E)
    dout,  # (B, H, Q, E)
    terms: BackwardTerms,
    results: KeyResults,
    lists: Lists,
    strides: KeyStrides,
    numbers: Numbers,
    heads: BackwardHeads,
    FORM: tl.constexpr,
):
    """dK and dV of R key rows, summed over the query heads of the key head, or partial sums when the row is split.

    The walk is the transpose of the layout: its rows are keys, its columns queries.
    """
    R: tl.constexpr = FORM.R
    D: tl.constexpr = FORM.D
    E: tl.constexpr = FORM.E
    TILE_ROWS: tl.constexpr = FORM.TILE_ROWS
    part = decode(lists.items, numbers, heads.G, heads.lead_heads, 1, FORM)
    b64 = part.b.to(tl.int64)
    g64 = part.h.to(tl.int64)
    row_start = part.tile_row * TILE_ROWS + part.sub * R
    if TILE_ROWS > R:
        if row_start >= numbers.K:
            return
    o_r = row_start + tl.arange(0, R)

    k_head = k + b64 * strides.at_k.b + g64 * strides.at_k.h
    b_k = load_rows(k_head, row_start, numbers.K, strides.at_k.n, R, D, FORM.BLOCK_D, True)
    v_head = v + b64 * strides.at_v.b + g64 * strides.at_v.h
    b_v = load_rows(v_head, row_start, numbers.K, strides.at_v.n, R, E, FORM.BLOCK_E, True)
    o_c = tl.arange(0, FORM.C)
    b_dk = tl.zeros([R, FORM.BLOCK_D], tl.float32)
    b_dv = tl.zeros([R, FORM.BLOCK_E], tl.float32)
    key_end = end_of_keys(terms.lengths, part.b, numbers.K, FORM.LENGTHS)
    if FORM.LENGTHS:
        # Keys past the length have no gradient: no tile is visited when the whole program lies there.
        end = tl.where(row_start < key_end, part.end, part.begin)
        part = Part(part.b, part.h, part.tile_row, part.sub, part.begin, end, part.slot)

    for member in range(FORM.GROUP):
        i_h = part.h * FORM.GROUP + member
        h64 = i_h.to(tl.int64)
        i_list = part.b * heads.list_b + i_h * heads.list_h
        i_row = i_list * numbers.n_tiles + part.tile_row
        q_head = q
        dout_head = dout
        if not FORM.TMA:
            q_head = q + b64 * strides.at_q.b + h64 * strides.at_q.h
            dout_head = dout + b64 * strides.at_dout.b + h64 * strides.at_dout.h
        lse_head = terms.row_terms + (b64 * heads.H + h64) * heads.padded_Q
        delta_head = lse_head + heads.delta_offset
        slope = head_slope(terms.slopes, part.b, i_h, heads.H, FORM.ALIBI)
        given = (
            b_k, b_v, q_head, dout_head, lse_head, delta_head, part.b, i_h, strides.at_q.n, strides.at_dout.n, slope,
            key_end, o_r, o_c, numbers,
        )  # fmt: skip
        b_dk, b_dv = walk(add_queries, (b_dk, b_dv), given, lists, i_list, i_row, part, numbers.K, o_r, 0, False, FORM)

    b_dk *= numbers.plain_scale
    if FORM.LENGTHS:
        # Masked here once instead of in every step: what a row past the length summed up is dropped.
        m_length = (o_r < key_end)[:, None]
        b_dk = tl.where(m_length, b_dk, 0.0)
        b_dv = tl.where(m_length, b_dv, 0.0)
    if FORM.HAS_SLOTS:
        if part.slot >= 0:
            i_part = slot_of(part.b, part.h, heads.G, numbers.n_slots, part.slot, FORM)
            store_part_rows(results.part_dk, i_part, b_dk, part.sub * R, TILE_ROWS, R, D, FORM.BLOCK_D)
            store_part_rows(results.part_dv, i_part, b_dv, part.sub * R, TILE_ROWS, R, E, FORM.BLOCK_E)
            return
    dk_head = results.dk + b64 * strides.at_dk.b + g64 * strides.at_dk.h
    store_rows(dk_head, b_dk, row_start, numbers.K, strides.at_dk.n, R, D, FORM.BLOCK_D)
    dv_head = results.dv + b64 * strides.at_dv.b + g64 * strides.at_dv.h
    store_rows(dv_head, b_dv, row_start, numbers.K, strides.at_dv.n, R, E, FORM.BLOCK_E)


@triton.jit
def add_queries(sums, given, column, m_keep, MODE: tl.constexpr, FORM: tl.constexpr):
    """The sums of dS^T q and P^T dout after C queries from `column` on."""
    b_dk, b_dv = sums
    (
        b_k, b_v, q, dout, lse, delta, i_b, i_h, stride_q, stride_dout, slope, key_end, o_r, o_c,
        numbers,
    ) = given  # fmt: skip
    CHECK: tl.constexpr = MODE != FULL
    o_q = column + o_c
    # No mask: these rows are padded to whole tiles, and the loads stay wide.
    b_lse = tl.load(lse + o_q)
    b_delta = tl.load(delta + o_q)
    m_read = m_keep
    if FORM.LENGTHS and CHECK:
        m_read = m_keep & (o_r < key_end)[:, None]
    b_q = stream_rows(q, i_b, i_h, column, numbers.Q, stride_q, FORM.C, FORM.D, FORM.BLOCK_D, CHECK, FORM.TMA)
    if FORM.CLEAR and CHECK:
        b_q = cleared(b_q, m_read)
    b_s = tl.dot(b_k, tl.trans(b_q), input_precision=FORM.PRECISION)
    b_dout = stream_rows(dout, i_b, i_h, column, numbers.Q, stride_dout, FORM.C, FORM.E, FORM.BLOCK_E, CHECK, FORM.TMA)
    if FORM.CLEAR and CHECK:
        b_dout = cleared(b_dout, m_read)
    b_dp = tl.dot(b_v, tl.trans(b_dout), input_precision=FORM.PRECISION)
    distance = o_r[:, None] - (o_q + numbers.q_offset)[None, :]
    b_p, b_t = probability(
        b_s, b_lse[None, :], numbers.scale, numbers.cap, slope, distance, m_keep, CHECK, FORM.FOLD, FORM.SOFTCAP,
        FORM.ALIBI,
    )  # fmt: skip
    b_dv = tl.dot(b_p.to(b_dout.dtype), b_dout, b_dv, input_precision=FORM.PRECISION)
    b_ds = score_gradient(b_p, b_dp, b_delta[None, :], b_t, FORM.SOFTCAP)
    if FORM.CLEAR and CHECK:
        b_ds = tl.where(m_keep, b_ds, 0.0)  # dP of a key that no query keeps may be NaN
    b_dk = tl.dot(b_ds.to(b_q.dtype), b_q, b_dk, input_precision=FORM.PRECISION)
    return b_dk, b_dv
