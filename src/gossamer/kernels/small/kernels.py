"""Forward and backward of small problems: every pair is computed, one bit a pair says whether it counts.

There are no lists to follow, so nothing waits for them: a program knows its rows from its number, and the loads of
keys, values and bits depend on nothing else. The backward is one launch: some programs make dQ, the others dK and dV.

Names: `i_` an index, `o_` offsets, `m_` a mask, `b_` a block of values. Scores are in base 2. A pointer that a call
does not need is None.
"""

from __future__ import annotations

import triton
import triton.language as tl

from gossamer.kernels.scores import score
from gossamer.kernels.small.parameters import (
    BackwardNumbers,
    BackwardTerms,
    ForwardNumbers,
    ForwardTerms,
    Heads,
    InputStrides,
    Results,
    Rows,
)
from gossamer.kernels.softmax import (
    add_scores,
    cleared,
    delta_of_rows,
    empty_rows,
    end_of_keys,
    finish_rows,
    head_slope,
    probability,
    score_gradient,
    start_rows,
)


@triton.jit
def load_rows(base, stride, o_r, limit, SIZE: tl.constexpr, BLOCK: tl.constexpr):
    """Rows o_r of a matrix as [rows, BLOCK]; zero past `limit` rows and SIZE columns."""
    o_d = tl.arange(0, BLOCK)
    mask = (o_r < limit)[:, None] & (o_d < SIZE)[None, :]
    return tl.load(base + o_r[:, None] * stride + o_d[None, :], mask=mask, other=0.0)


@triton.jit
def store_rows(base, block, o_r, limit, SIZE: tl.constexpr, BLOCK: tl.constexpr):
    """The rows of `block` that exist, contiguous, in the type of `base`."""
    o_d = tl.arange(0, BLOCK)
    mask = (o_r < limit)[:, None] & (o_d < SIZE)[None, :]
    tl.store(base + o_r[:, None] * SIZE + o_d[None, :], block.to(base.dtype.element_ty), mask=mask)


@triton.jit
def keeps(packed_mask, o_r, start, Q, K, end, C: tl.constexpr, TRANSPOSED: tl.constexpr):
    """[rows, C] of whether query o_r keeps key start + c; [C, rows] when transposed.

    A row has whole groups of four words, so a step of up to 128 keys stays in it.
    """
    o_c = tl.arange(0, C)
    m_keys = (start + o_c) < end
    m_keep = m_keys[:, None] & (o_r < Q)[None, :] if TRANSPOSED else m_keys[None, :] & (o_r < Q)[:, None]
    if packed_mask is not None:
        at = packed_mask + o_r * ((K + 127) // 128 * 4) + start // 32
        word = tl.zeros_like(o_r)
        word = word[None, :] if TRANSPOSED else word[:, None]
        for i_w in tl.static_range(0, C // 32):
            b_w = tl.load(at + i_w, mask=o_r < Q, other=0)
            if TRANSPOSED:
                word = tl.where((o_c // 32 == i_w)[:, None], b_w[None, :], word)
            else:
                word = tl.where((o_c // 32 == i_w)[None, :], b_w[:, None], word)
        bit = 1 << (o_c % 32)
        m_keep = m_keep & ((word & (bit[:, None] if TRANSPOSED else bit[None, :])) != 0)
    return m_keep


@triton.jit(do_not_specialize=["numbers"])
def forward_kernel(
    q,  # (B, H, Q, D)
    k,  # (B, G, K, D)
    v,  # (B, G, K, E)
    out,  # (B, H, Q, E)
    lse,  # (B, H, Q)
    packed_mask,  # (Bl, Hl, Q, 4 ceil(K / 128)), or None: every pair
    terms: ForwardTerms,
    strides: InputStrides,
    numbers: ForwardNumbers,
    heads: Heads,
    FORM: tl.constexpr,
):
    """out and lse of R query rows of one head, C keys at a time."""
    i_r = tl.program_id(0)
    i_h = tl.program_id(1)
    i_b = tl.program_id(2)
    if FORM.ONE_ROW:
        n_r = (numbers.Q + FORM.R - 1) // FORM.R
        i_h = i_r // n_r % heads.H
        i_b = i_r // n_r // heads.H
        i_r = i_r % n_r
    b64 = i_b.to(tl.int64)
    h64 = i_h.to(tl.int64)
    i_bh = b64 * heads.H + h64
    o_r = i_r * FORM.R + tl.arange(0, FORM.R)
    o_c = tl.arange(0, FORM.C)
    k += b64 * strides.at_k.b + h64 // FORM.GROUP * strides.at_k.h
    v += b64 * strides.at_v.b + h64 // FORM.GROUP * strides.at_v.h
    if packed_mask is not None:
        packed_mask += b64 * heads.mask_b + h64 * heads.mask_h
    end = end_of_keys(terms.lengths, i_b, numbers.K, terms.lengths is not None)
    slope = head_slope(terms.slopes, i_b, i_h, heads.H, FORM.ALIBI)
    b_q = load_rows(
        q + b64 * strides.at_q.b + h64 * strides.at_q.h, strides.at_q.n, o_r, numbers.Q, FORM.D, FORM.BLOCK_D
    )
    b_acc = tl.zeros([FORM.R, FORM.BLOCK_E], tl.float32)
    b_l, b_m = start_rows(terms.sinks, i_h, True, FORM.R, terms.sinks is not None)
    for start in range(0, numbers.K, FORM.C):
        m_keep = keeps(packed_mask, o_r, start, numbers.Q, numbers.K, end, FORM.C, False)
        b_k = load_rows(k, strides.at_k.n, start + o_c, numbers.K, FORM.D, FORM.BLOCK_D)
        b_s = tl.dot(b_q, tl.trans(b_k), input_precision=FORM.PRECISION)
        distance = (start + o_c)[None, :] - (o_r + numbers.q_offset)[:, None]
        b_s, _ = score(b_s, numbers.scale, numbers.cap, slope, distance, FORM.SOFTCAP, FORM.ALIBI)
        b_s = tl.where(m_keep, b_s, float("-inf"))
        b_p, b_shrink, b_l, b_m = add_scores(b_s, b_l, b_m)
        b_v = load_rows(v, strides.at_v.n, start + o_c, end, FORM.E, FORM.BLOCK_E)
        if packed_mask is not None:
            b_v = cleared(b_v, m_keep)
        b_acc = tl.dot(b_p.to(b_v.dtype), b_v, b_acc * b_shrink[:, None], input_precision=FORM.PRECISION)
    b_l, b_lse = finish_rows(b_l, b_m)
    tl.store(lse + i_bh * numbers.Q + o_r, b_lse, mask=o_r < numbers.Q)
    store_rows(out + i_bh * numbers.Q * FORM.E, b_acc / b_l[:, None], o_r, numbers.Q, FORM.E, FORM.BLOCK_E)


@triton.jit
def row_terms(lse, dlse, b_dout, b_out, i_bh, o_r, Q):
    """(lse in base 2, delta = rowsum(dout * out) - dlse) of rows o_r; a row that is not there counts as empty."""
    b_lse = tl.load(lse + i_bh * Q + o_r, mask=o_r < Q, other=float("-inf"))
    b_delta = delta_of_rows(b_dout, b_out)
    if dlse is not None:
        b_delta -= tl.load(dlse + i_bh * Q + o_r, mask=o_r < Q, other=0.0)
    return empty_rows(b_lse, b_delta)


@triton.jit(do_not_specialize=["numbers"])
def backward_kernel(
    q,
    k,
    v,
    rows: Rows,
    results: Results,
    packed_mask,
    terms: BackwardTerms,
    strides: InputStrides,
    numbers: BackwardNumbers,
    heads: Heads,
    FORM: tl.constexpr,
):
    """dk and dv of C keys by the first programs of a batch element, dq of R queries by the rest."""
    n_k = (numbers.K + FORM.C - 1) // FORM.C
    key_programs = n_k * (heads.H // FORM.GROUP)
    pid = tl.program_id(0)
    i_b = tl.program_id(1)
    if FORM.ONE_ROW:
        programs = key_programs + (numbers.Q + FORM.R - 1) // FORM.R * heads.H
        i_b = pid // programs
        pid = pid % programs
    b64 = i_b.to(tl.int64)
    end = end_of_keys(terms.lengths, i_b, numbers.K, terms.lengths is not None)
    q += b64 * strides.at_q.b
    k += b64 * strides.at_k.b
    v += b64 * strides.at_v.b
    o_c = tl.arange(0, FORM.C)
    o_row = tl.arange(0, FORM.R)
    if pid < key_programs:
        i_g = pid // n_k
        g64 = i_g.to(tl.int64)
        start = pid % n_k * FORM.C
        b_k = load_rows(k + g64 * strides.at_k.h, strides.at_k.n, start + o_c, numbers.K, FORM.D, FORM.BLOCK_D)
        b_v = load_rows(v + g64 * strides.at_v.h, strides.at_v.n, start + o_c, numbers.K, FORM.E, FORM.BLOCK_E)
        b_dk = tl.zeros([FORM.C, FORM.BLOCK_D], tl.float32)
        b_dv = tl.zeros([FORM.C, FORM.BLOCK_E], tl.float32)
        for member in range(FORM.GROUP):
            i_h = i_g * FORM.GROUP + member
            h64 = i_h.to(tl.int64)
            i_bh = b64 * heads.H + h64
            slope = head_slope(terms.slopes, i_b, i_h, heads.H, FORM.ALIBI)
            own = packed_mask
            if packed_mask is not None:
                own += b64 * heads.mask_b + h64 * heads.mask_h
            for first in range(0, numbers.Q, FORM.R):
                o_r = first + o_row
                m_keep = keeps(own, o_r, start, numbers.Q, numbers.K, end, FORM.C, True)
                b_q = load_rows(q + h64 * strides.at_q.h, strides.at_q.n, o_r, numbers.Q, FORM.D, FORM.BLOCK_D)
                b_dout = load_rows(rows.dout + i_bh * numbers.Q * FORM.E, FORM.E, o_r, numbers.Q, FORM.E, FORM.BLOCK_E)
                if packed_mask is not None or terms.lengths is not None:
                    b_q = cleared(b_q, m_keep)
                    b_dout = cleared(b_dout, m_keep)
                b_out = load_rows(rows.out + i_bh * numbers.Q * FORM.E, FORM.E, o_r, numbers.Q, FORM.E, FORM.BLOCK_E)
                b_lse, b_delta = row_terms(rows.lse, rows.dlse, b_dout, b_out, i_bh, o_r, numbers.Q)
                b_s = tl.dot(b_k, tl.trans(b_q), input_precision=FORM.PRECISION)
                b_dp = tl.dot(b_v, tl.trans(b_dout), input_precision=FORM.PRECISION)
                distance = (start + o_c)[:, None] - (o_r + numbers.q_offset)[None, :]
                b_p, b_t = probability(
                    b_s,
                    b_lse[None, :],
                    numbers.scale,
                    numbers.cap,
                    slope,
                    distance,
                    m_keep,
                    True,
                    False,
                    FORM.SOFTCAP,
                    FORM.ALIBI,
                )
                b_ds = score_gradient(b_p, b_dp, b_delta[None, :], b_t, FORM.SOFTCAP)
                if packed_mask is not None or terms.lengths is not None:
                    b_ds = tl.where(m_keep, b_ds, 0.0)  # dP of a key that no query keeps may be NaN
                b_dv = tl.dot(b_p.to(b_dout.dtype), b_dout, b_dv, input_precision=FORM.PRECISION)
                b_dk = tl.dot(b_ds.to(b_q.dtype), b_q, b_dk, input_precision=FORM.PRECISION)
        i_bg = b64 * (heads.H // FORM.GROUP) + g64
        store_rows(
            results.dk + i_bg * numbers.K * FORM.D,
            b_dk * numbers.plain_scale,
            start + o_c,
            numbers.K,
            FORM.D,
            FORM.BLOCK_D,
        )
        store_rows(results.dv + i_bg * numbers.K * FORM.E, b_dv, start + o_c, numbers.K, FORM.E, FORM.BLOCK_E)
    else:
        n_q = (numbers.Q + FORM.R - 1) // FORM.R
        i_h = (pid - key_programs) // n_q
        h64 = i_h.to(tl.int64)
        i_bh = b64 * heads.H + h64
        o_r = (pid - key_programs) % n_q * FORM.R + o_row
        slope = head_slope(terms.slopes, i_b, i_h, heads.H, FORM.ALIBI)
        if packed_mask is not None:
            packed_mask += b64 * heads.mask_b + h64 * heads.mask_h
        b_q = load_rows(q + h64 * strides.at_q.h, strides.at_q.n, o_r, numbers.Q, FORM.D, FORM.BLOCK_D)
        b_dout = load_rows(rows.dout + i_bh * numbers.Q * FORM.E, FORM.E, o_r, numbers.Q, FORM.E, FORM.BLOCK_E)
        b_out = load_rows(rows.out + i_bh * numbers.Q * FORM.E, FORM.E, o_r, numbers.Q, FORM.E, FORM.BLOCK_E)
        b_lse, b_delta = row_terms(rows.lse, rows.dlse, b_dout, b_out, i_bh, o_r, numbers.Q)
        b_dq = tl.zeros([FORM.R, FORM.BLOCK_D], tl.float32)
        for start in range(0, numbers.K, FORM.C):
            m_keep = keeps(packed_mask, o_r, start, numbers.Q, numbers.K, end, FORM.C, False)
            b_k = load_rows(
                k + h64 // FORM.GROUP * strides.at_k.h, strides.at_k.n, start + o_c, end, FORM.D, FORM.BLOCK_D
            )
            if packed_mask is not None:
                b_k = cleared(b_k, m_keep)
            b_v = load_rows(
                v + h64 // FORM.GROUP * strides.at_v.h, strides.at_v.n, start + o_c, numbers.K, FORM.E, FORM.BLOCK_E
            )
            b_s = tl.dot(b_q, tl.trans(b_k), input_precision=FORM.PRECISION)
            b_dp = tl.dot(b_dout, tl.trans(b_v), input_precision=FORM.PRECISION)
            distance = (start + o_c)[None, :] - (o_r + numbers.q_offset)[:, None]
            b_p, b_t = probability(
                b_s,
                b_lse[:, None],
                numbers.scale,
                numbers.cap,
                slope,
                distance,
                m_keep,
                False,
                False,
                FORM.SOFTCAP,
                FORM.ALIBI,
            )
            # Not P: dP of a pair that is not kept may be NaN.
            b_ds = tl.where(m_keep, score_gradient(b_p, b_dp, b_delta[:, None], b_t, FORM.SOFTCAP), 0.0)
            b_dq = tl.dot(b_ds.to(b_k.dtype), b_k, b_dq, input_precision=FORM.PRECISION)
        store_rows(
            results.dq + i_bh * numbers.Q * FORM.D, b_dq * numbers.plain_scale, o_r, numbers.Q, FORM.D, FORM.BLOCK_D
        )
