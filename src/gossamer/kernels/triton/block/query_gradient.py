"""dQ = scale * dS k, by the rows of a layout: one program computes R query rows over their list of key tiles."""

# ruff: noqa: SIM102  (an `if` on a constexpr is resolved while compiling, one on data is not: they stay apart)

from __future__ import annotations

import triton
import triton.language as tl

from gossamer.kernels.softmax import cleared, end_of_keys, head_slope, probability, score_gradient
from gossamer.kernels.triton.block.lists import decode, walk
from gossamer.kernels.triton.block.parameters import BackwardHeads, Lists, Numbers
from gossamer.kernels.triton.groups import BackwardTerms, QueryResults, QueryStrides
from gossamer.kernels.triton.mask_modes import FULL
from gossamer.kernels.triton.row_access import load_rows, slot_of, store_part_rows, store_rows, stream_rows


@triton.jit(do_not_specialize=["numbers"])
def dq_kernel(
    q,  # (B, H, Q, D)
    k,  # (B, G, K, D); k and v are descriptors with TMA
    v,  # (B, G, K, E)
    dout,  # (B, H, Q, E)
    terms: BackwardTerms,
    results: QueryResults,
    lists: Lists,
    strides: QueryStrides,
    numbers: Numbers,
    heads: BackwardHeads,
    FORM: tl.constexpr,
):
    """dQ of R query rows, or a partial sum of it when the row is split."""
    R: tl.constexpr = FORM.R
    D: tl.constexpr = FORM.D
    TILE_ROWS: tl.constexpr = FORM.TILE_ROWS
    MEMBERS: tl.constexpr = FORM.GROUP if FORM.H_FROM_GRID else 1
    part = decode(lists.items, numbers, heads.G, heads.lead_heads, MEMBERS, FORM)
    b64 = part.b.to(tl.int64)
    h64 = part.h.to(tl.int64)
    i_g = part.h // FORM.GROUP
    row_start = part.tile_row * TILE_ROWS + part.sub * R
    if TILE_ROWS > R:
        if row_start >= numbers.Q:
            return
    i_list = part.b * heads.list_b + part.h * heads.list_h
    i_row = i_list * numbers.n_tiles + part.tile_row
    o_r = row_start + tl.arange(0, R)

    q_head = q + b64 * strides.at_q.b + h64 * strides.at_q.h
    b_q = load_rows(q_head, row_start, numbers.Q, strides.at_q.n, R, D, FORM.BLOCK_D, True)
    dout_head = dout + b64 * strides.at_dout.b + h64 * strides.at_dout.h
    b_dout = load_rows(dout_head, row_start, numbers.Q, strides.at_dout.n, R, FORM.E, FORM.BLOCK_E, True)
    o_rows = terms.row_terms + (b64 * heads.H + h64) * heads.padded_Q + o_r
    b_lse = tl.load(o_rows)
    b_delta = tl.load(o_rows + heads.delta_offset)
    if not FORM.TMA:
        k += b64 * strides.at_k.b + i_g.to(tl.int64) * strides.at_k.h
        v += b64 * strides.at_v.b + i_g.to(tl.int64) * strides.at_v.h
    b_dq = tl.zeros([R, FORM.BLOCK_D], tl.float32)
    slope = head_slope(terms.slopes, part.b, part.h, heads.H, FORM.ALIBI)
    key_end = end_of_keys(terms.lengths, part.b, numbers.K, FORM.LENGTHS)
    o_position = o_r + numbers.q_offset
    o_c = tl.arange(0, FORM.C)
    given = (
        b_q, b_dout, b_lse, b_delta, k, v, part.b, i_g, strides.at_k.n, strides.at_v.n, slope, key_end, o_position,
        o_c, numbers,
    )  # fmt: skip
    b_dq = walk(add_keys, b_dq, given, lists, i_list, i_row, part, numbers.Q, o_r, key_end, FORM.LENGTHS, FORM)

    b_dq *= numbers.plain_scale
    if FORM.HAS_SLOTS:
        if part.slot >= 0:
            i_part = slot_of(part.b, part.h, heads.H, numbers.n_slots, part.slot, FORM)
            store_part_rows(results.part, i_part, b_dq, part.sub * R, TILE_ROWS, R, D, FORM.BLOCK_D)
            return
    dq_head = results.dq + b64 * strides.at_dq.b + h64 * strides.at_dq.h
    store_rows(dq_head, b_dq, row_start, numbers.Q, strides.at_dq.n, R, D, FORM.BLOCK_D)


@triton.jit
def add_keys(b_dq, given, column, m_keep, MODE: tl.constexpr, FORM: tl.constexpr):
    """The sum of dS k after C keys from `column` on."""
    (
        b_q, b_dout, b_lse, b_delta, k, v, i_b, i_g, stride_k, stride_v, slope, key_end, o_position, o_c,
        numbers,
    ) = given  # fmt: skip
    SOME: tl.constexpr = (MODE != FULL) or FORM.LENGTHS
    b_k = stream_rows(k, i_b, i_g, column, key_end, stride_k, FORM.C, FORM.D, FORM.BLOCK_D, SOME, FORM.TMA)
    if (FORM.CLEAR and (MODE != FULL)) or (FORM.LENGTHS and FORM.TMA):
        b_k = cleared(b_k, m_keep)
    b_v = stream_rows(v, i_b, i_g, column, numbers.K, stride_v, FORM.C, FORM.E, FORM.BLOCK_E, MODE != FULL, FORM.TMA)
    b_s = tl.dot(b_q, tl.trans(b_k), input_precision=FORM.PRECISION)
    b_dp = tl.dot(b_dout, tl.trans(b_v), input_precision=FORM.PRECISION)
    distance = column + o_c[None, :] - o_position[:, None]
    b_p, b_t = probability(
        b_s, b_lse[:, None], numbers.scale, numbers.cap, slope, distance, m_keep, False, FORM.FOLD, FORM.SOFTCAP,
        FORM.ALIBI,
    )  # fmt: skip
    b_ds = score_gradient(b_p, b_dp, b_delta[:, None], b_t, FORM.SOFTCAP)
    if SOME:
        b_ds = tl.where(m_keep, b_ds, 0.0)  # not P: dP of a pair that is not kept may be NaN
    return tl.dot(b_ds.to(b_k.dtype), b_k, b_dq, input_precision=FORM.PRECISION)
