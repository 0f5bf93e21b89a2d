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


@triton.jit(do_not_specialize=["Q", "K", "q_offset"])
def forward_kernel(
    q,  # (B, H, Q, D)
    k,  # (B, G, K, D)
    v,  # (B, G, K, E)
    out,  # (B, H, Q, E)
    lse,  # (B, H, Q)
    packed_mask,  # (Bl, Hl, Q, 4 ceil(K / 128)), or None: every pair
    lengths,  # (B,) or None
    sinks,  # (H,) or None
    slopes,  # (H,) or (B, H), or None
    stride_qb, stride_qh, stride_qn, stride_kb, stride_kh, stride_kn, stride_vb, stride_vh, stride_vn,
    mask_b,  # distance of two batch elements' and of two heads' masks, 0 where they share
    mask_h, Q, K, q_offset, scale, cap, H,
    GROUP: tl.constexpr, D: tl.constexpr, E: tl.constexpr, BLOCK_D: tl.constexpr, BLOCK_E: tl.constexpr,
    R: tl.constexpr, C: tl.constexpr,
    SOFTCAP: tl.constexpr, ALIBI: tl.constexpr, PRECISION: tl.constexpr,
    ONE_ROW: tl.constexpr,  # the grid is one row of programs
):  # fmt: skip
    """out and lse of R query rows of one head, C keys at a time."""
    i_r = tl.program_id(0)
    i_h = tl.program_id(1)
    i_b = tl.program_id(2)
    if ONE_ROW:
        n_r = (Q + R - 1) // R
        i_h = i_r // n_r % H
        i_b = i_r // n_r // H
        i_r = i_r % n_r
    b64 = i_b.to(tl.int64)
    h64 = i_h.to(tl.int64)
    i_bh = b64 * H + h64
    o_r = i_r * R + tl.arange(0, R)
    o_c = tl.arange(0, C)
    k += b64 * stride_kb + h64 // GROUP * stride_kh
    v += b64 * stride_vb + h64 // GROUP * stride_vh
    if packed_mask is not None:
        packed_mask += b64 * mask_b + h64 * mask_h
    end = end_of_keys(lengths, i_b, K, lengths is not None)
    slope = head_slope(slopes, i_b, i_h, H, ALIBI)
    b_q = load_rows(q + b64 * stride_qb + h64 * stride_qh, stride_qn, o_r, Q, D, BLOCK_D)
    b_acc = tl.zeros([R, BLOCK_E], tl.float32)
    b_l, b_m = start_rows(sinks, i_h, True, R, sinks is not None)
    for start in range(0, K, C):
        m_keep = keeps(packed_mask, o_r, start, Q, K, end, C, False)
        b_k = load_rows(k, stride_kn, start + o_c, K, D, BLOCK_D)
        b_s = tl.dot(b_q, tl.trans(b_k), input_precision=PRECISION)
        distance = (start + o_c)[None, :] - (o_r + q_offset)[:, None]
        b_s, _ = score(b_s, scale, cap, slope, distance, SOFTCAP, ALIBI)
        b_s = tl.where(m_keep, b_s, float("-inf"))
        b_p, b_shrink, b_l, b_m = add_scores(b_s, b_l, b_m)
        b_v = load_rows(v, stride_vn, start + o_c, end, E, BLOCK_E)
        if packed_mask is not None:
            b_v = cleared(b_v, m_keep)
        b_acc = tl.dot(b_p.to(b_v.dtype), b_v, b_acc * b_shrink[:, None], input_precision=PRECISION)
    b_l, b_lse = finish_rows(b_l, b_m)
    tl.store(lse + i_bh * Q + o_r, b_lse, mask=o_r < Q)
    store_rows(out + i_bh * Q * E, b_acc / b_l[:, None], o_r, Q, E, BLOCK_E)


@triton.jit
def row_terms(lse, dlse, b_dout, b_out, i_bh, o_r, Q):
    """(lse in base 2, delta = rowsum(dout * out) - dlse) of rows o_r; a row that is not there counts as empty."""
    b_lse = tl.load(lse + i_bh * Q + o_r, mask=o_r < Q, other=float("-inf"))
    b_delta = delta_of_rows(b_dout, b_out)
    if dlse is not None:
        b_delta -= tl.load(dlse + i_bh * Q + o_r, mask=o_r < Q, other=0.0)
    return empty_rows(b_lse, b_delta)


@triton.jit(do_not_specialize=["Q", "K", "q_offset"])
def backward_kernel(
    q, k, v,
    dout,  # (B, H, Q, E)
    out,  # (B, H, Q, E)
    lse,  # (B, H, Q)
    dlse,  # (B, H, Q) or None
    dq,  # (B, H, Q, D)
    dk,  # (B, G, K, D)
    dv,  # (B, G, K, E)
    packed_mask, lengths, slopes,
    stride_qb, stride_qh, stride_qn, stride_kb, stride_kh, stride_kn, stride_vb, stride_vh, stride_vn,
    mask_b, mask_h, Q, K, q_offset, scale, cap, plain_scale, H,
    GROUP: tl.constexpr, D: tl.constexpr, E: tl.constexpr, BLOCK_D: tl.constexpr, BLOCK_E: tl.constexpr,
    R: tl.constexpr, C: tl.constexpr,
    SOFTCAP: tl.constexpr, ALIBI: tl.constexpr, PRECISION: tl.constexpr,
    ONE_ROW: tl.constexpr,  # the grid is one row of programs
):  # fmt: skip
    """dk and dv of C keys by the first programs of a batch element, dq of R queries by the rest."""
    n_k = (K + C - 1) // C
    key_programs = n_k * (H // GROUP)
    pid = tl.program_id(0)
    i_b = tl.program_id(1)
    if ONE_ROW:
        programs = key_programs + (Q + R - 1) // R * H
        i_b = pid // programs
        pid = pid % programs
    b64 = i_b.to(tl.int64)
    end = end_of_keys(lengths, i_b, K, lengths is not None)
    q += b64 * stride_qb
    k += b64 * stride_kb
    v += b64 * stride_vb
    o_c = tl.arange(0, C)
    o_row = tl.arange(0, R)
    if pid < key_programs:
        i_g = pid // n_k
        g64 = i_g.to(tl.int64)
        start = pid % n_k * C
        b_k = load_rows(k + g64 * stride_kh, stride_kn, start + o_c, K, D, BLOCK_D)
        b_v = load_rows(v + g64 * stride_vh, stride_vn, start + o_c, K, E, BLOCK_E)
        b_dk = tl.zeros([C, BLOCK_D], tl.float32)
        b_dv = tl.zeros([C, BLOCK_E], tl.float32)
        for member in range(GROUP):
            i_h = i_g * GROUP + member
            h64 = i_h.to(tl.int64)
            i_bh = b64 * H + h64
            slope = head_slope(slopes, i_b, i_h, H, ALIBI)
            own = packed_mask
            if packed_mask is not None:
                own += b64 * mask_b + h64 * mask_h
            for first in range(0, Q, R):
                o_r = first + o_row
                m_keep = keeps(own, o_r, start, Q, K, end, C, True)
                b_q = load_rows(q + h64 * stride_qh, stride_qn, o_r, Q, D, BLOCK_D)
                b_dout = load_rows(dout + i_bh * Q * E, E, o_r, Q, E, BLOCK_E)
                if packed_mask is not None or lengths is not None:
                    b_q = cleared(b_q, m_keep)
                    b_dout = cleared(b_dout, m_keep)
                b_out = load_rows(out + i_bh * Q * E, E, o_r, Q, E, BLOCK_E)
                b_lse, b_delta = row_terms(lse, dlse, b_dout, b_out, i_bh, o_r, Q)
                b_s = tl.dot(b_k, tl.trans(b_q), input_precision=PRECISION)
                b_dp = tl.dot(b_v, tl.trans(b_dout), input_precision=PRECISION)
                distance = (start + o_c)[:, None] - (o_r + q_offset)[None, :]
                b_p, b_t = probability(
                    b_s, b_lse[None, :], scale, cap, slope, distance, m_keep, True, False, SOFTCAP, ALIBI
                )
                b_ds = score_gradient(b_p, b_dp, b_delta[None, :], b_t, SOFTCAP)
                if packed_mask is not None or lengths is not None:
                    b_ds = tl.where(m_keep, b_ds, 0.0)  # dP of a key that no query keeps may be NaN
                b_dv = tl.dot(b_p.to(b_dout.dtype), b_dout, b_dv, input_precision=PRECISION)
                b_dk = tl.dot(b_ds.to(b_q.dtype), b_q, b_dk, input_precision=PRECISION)
        i_bg = b64 * (H // GROUP) + g64
        store_rows(dk + i_bg * K * D, b_dk * plain_scale, start + o_c, K, D, BLOCK_D)
        store_rows(dv + i_bg * K * E, b_dv, start + o_c, K, E, BLOCK_E)
    else:
        n_q = (Q + R - 1) // R
        i_h = (pid - key_programs) // n_q
        h64 = i_h.to(tl.int64)
        i_bh = b64 * H + h64
        o_r = (pid - key_programs) % n_q * R + o_row
        slope = head_slope(slopes, i_b, i_h, H, ALIBI)
        if packed_mask is not None:
            packed_mask += b64 * mask_b + h64 * mask_h
        b_q = load_rows(q + h64 * stride_qh, stride_qn, o_r, Q, D, BLOCK_D)
        b_dout = load_rows(dout + i_bh * Q * E, E, o_r, Q, E, BLOCK_E)
        b_out = load_rows(out + i_bh * Q * E, E, o_r, Q, E, BLOCK_E)
        b_lse, b_delta = row_terms(lse, dlse, b_dout, b_out, i_bh, o_r, Q)
        b_dq = tl.zeros([R, BLOCK_D], tl.float32)
        for start in range(0, K, C):
            m_keep = keeps(packed_mask, o_r, start, Q, K, end, C, False)
            b_k = load_rows(k + h64 // GROUP * stride_kh, stride_kn, start + o_c, end, D, BLOCK_D)
            if packed_mask is not None:
                b_k = cleared(b_k, m_keep)
            b_v = load_rows(v + h64 // GROUP * stride_vh, stride_vn, start + o_c, K, E, BLOCK_E)
            b_s = tl.dot(b_q, tl.trans(b_k), input_precision=PRECISION)
            b_dp = tl.dot(b_dout, tl.trans(b_v), input_precision=PRECISION)
            distance = (start + o_c)[None, :] - (o_r + q_offset)[:, None]
            b_p, b_t = probability(
                b_s, b_lse[:, None], scale, cap, slope, distance, m_keep, False, False, SOFTCAP, ALIBI
            )
            # Not P: dP of a pair that is not kept may be NaN.
            b_ds = tl.where(m_keep, score_gradient(b_p, b_dp, b_delta[:, None], b_t, SOFTCAP), 0.0)
            b_dq = tl.dot(b_ds.to(b_k.dtype), b_k, b_dq, input_precision=PRECISION)
        store_rows(dq + i_bh * Q * D, b_dq * plain_scale, o_r, Q, D, BLOCK_D)
