"""The gradients of rows without a list, from their normalisers: scores are computed again, tile by tile."""

from __future__ import annotations

import triton
import triton.language as tl

from gossamer.kernels.entmax.formulas import alpha_term, powers
from gossamer.kernels.entmax.rows import bounds, key_range, key_tile, load_tile, relative, tile_scores, visible


@triton.jit(do_not_specialize=["Q", "K", "offset"])
def large_dq_kernel(
    q,  # (B, H, Q, D)
    k,  # (B, G, K, D)
    v,  # (B, G, K, E)
    dout,  # (B, H, Q, E)
    steepness,  # (H,) float32
    lo, hi, q_positions, k_positions, group_list, group_counts, list_counts,  # as `large_kernel`
    lam,  # (B, H, Q) float32
    delta,  # (B, H, Q) float32, to write
    factor,  # (B, H, Q) float32, to write: 1 / sum p
    dq,  # (B, H, Q, D) contiguous, to write
    row_alpha,  # (B, H, Q) float32, to write
    stride_qb, stride_qh, stride_qn, stride_kb, stride_kh, stride_kn, stride_vb, stride_vh, stride_vn,
    stride_gb, stride_gh, stride_gn, stride_qpb, stride_qph, stride_qpn, stride_kpb, stride_kph, stride_kpn,
    H, Q, K, offset, scale,
    D: tl.constexpr, E: tl.constexpr, BLOCK_D: tl.constexpr, BLOCK_E: tl.constexpr, GROUP: tl.constexpr,
    R: tl.constexpr, STEP: tl.constexpr, A: tl.constexpr, BOUNDS: tl.constexpr, POSITIONS: tl.constexpr,
    PRECISION: tl.constexpr, WITH_ALPHA: tl.constexpr,
):  # fmt: skip
    """dQ of a group: one pass for delta = sum u dP / sum u, one for dQ."""
    head = tl.program_id(1)
    if tl.program_id(0) >= tl.load(group_counts + head):
        return
    groups = (Q + R - 1) // R
    group = tl.load(group_list + head.to(tl.int64) * groups + tl.program_id(0))
    b64, h64, g64 = (head // H).to(tl.int64), (head % H).to(tl.int64), (head % H // GROUP).to(tl.int64)
    rows = group * R + tl.arange(0, R)
    number = head.to(tl.int64) * Q + rows
    inside = (tl.load(list_counts + number, mask=rows < Q, other=0) < 0) & (rows < Q)
    b_q = load_tile(q + b64 * stride_qb + h64 * stride_qh, rows, inside, stride_qn, D, BLOCK_D)
    b_dout = load_tile(dout + b64 * stride_gb + h64 * stride_gh, rows, inside, stride_gn, E, BLOCK_E)
    k_base = k + b64 * stride_kb + g64 * stride_kh
    v_base = v + b64 * stride_vb + g64 * stride_vh
    a = tl.zeros([R], tl.float32) + tl.load(steepness + head % H)
    of_row = tl.load(lam + number, mask=inside, other=float("inf"))
    of_row = tl.where(of_row == float("inf"), 0.0, of_row)
    first, last = bounds(rows, inside, lo, hi, offset, K, BOUNDS)
    at = rows
    kp_base = k_positions
    if POSITIONS:
        at = tl.load(q_positions + b64 * stride_qpb + h64 * stride_qph + rows.to(tl.int64) * stride_qpn, mask=inside)
        kp_base = k_positions + b64 * stride_kpb + h64 * stride_kph
    begin, tiles = key_range(first, last, inside, K, STEP)
    scores_of = (b_q, k_base, stride_kn, first, last, at, kp_base, stride_kpn, scale, K)
    total = tl.zeros([R], tl.float32)
    sum_u = tl.zeros([R], tl.float32)
    sum_dp = tl.zeros([R], tl.float32)
    for tile in range(begin, begin + tiles):
        j, s = key_tile(tile, scores_of, STEP, D, BLOCK_D, POSITIONS, PRECISION)
        b_v = load_tile(v_base, j, j < K, stride_vn, E, BLOCK_E)
        dp = tl.dot(b_dout, tl.trans(b_v), input_precision=PRECISION)
        p, u = powers(relative(s, of_row), a[:, None], A)
        total += tl.sum(p, 1)
        sum_u += tl.sum(u, 1)
        sum_dp += tl.sum(u * dp, 1)
    whole = 1.0 / tl.where(total == 0.0, 1.0, total)
    b_delta = sum_dp / tl.where(sum_u == 0.0, 1.0, sum_u)
    # Weights are those of the forward, which sum to 1: p and with it u are scaled.
    of_u = tl.exp((1.0 - a) * tl.log(whole))
    acc = tl.zeros([R, BLOCK_D], tl.float32)
    of_alpha = tl.zeros([R], tl.float32)
    for tile in range(begin, begin + tiles):
        j, s = key_tile(tile, scores_of, STEP, D, BLOCK_D, POSITIONS, PRECISION)
        b_k = load_tile(k_base, j, j < K, stride_kn, D, BLOCK_D)
        b_v = load_tile(v_base, j, j < K, stride_vn, E, BLOCK_E)
        dp = tl.dot(b_dout, tl.trans(b_v), input_precision=PRECISION) - b_delta[:, None]
        p, u = powers(relative(s, of_row), a[:, None], A)
        if WITH_ALPHA:
            of_alpha += tl.sum(alpha_term(p * whole[:, None], a[:, None]) * dp, 1)
        ds = u * of_u[:, None] * dp
        acc = tl.dot(ds.to(b_k.dtype), b_k, acc, input_precision=PRECISION)
    tl.store(delta + number, b_delta, mask=inside)
    tl.store(factor + number, whole, mask=inside)
    if WITH_ALPHA:
        tl.store(row_alpha + number, of_alpha, mask=inside)
    o_d = tl.arange(0, BLOCK_D)
    to = dq + number[:, None] * D + o_d[None, :]
    tl.store(to, (acc * scale).to(dq.dtype.element_ty), mask=inside[:, None] & (o_d < D)[None, :])


@triton.jit(do_not_specialize=["Q", "K", "offset"])
def large_columns_kernel(
    q, k, v, dout, steepness, lo, hi, q_positions, k_positions, group_list, group_counts, list_counts, lam, delta,
    factor,  # as `large_dq_kernel`
    dk,  # (B, G, K, D) contiguous, to add to
    dv,  # (B, G, K, E) contiguous, to add to
    stride_qb, stride_qh, stride_qn, stride_kb, stride_kh, stride_kn, stride_vb, stride_vh, stride_vn,
    stride_gb, stride_gh, stride_gn, stride_qpb, stride_qph, stride_qpn, stride_kpb, stride_kph, stride_kpn,
    H, Q, K, offset, scale,
    D: tl.constexpr, E: tl.constexpr, BLOCK_D: tl.constexpr, BLOCK_E: tl.constexpr, GROUP: tl.constexpr,
    R: tl.constexpr, STEP: tl.constexpr, A: tl.constexpr, BOUNDS: tl.constexpr, POSITIONS: tl.constexpr,
    PRECISION: tl.constexpr, MEMBERS: tl.constexpr,
):  # fmt: skip
    """What the rows without a list add to dK and dV of STEP keys, added to what those with one gave."""
    G = H // GROUP
    own = tl.program_id(1)
    b, g = own // G, own % G
    b64, g64 = b.to(tl.int64), g.to(tl.int64)
    groups = (Q + R - 1) // R
    if (
        tl.sum(
            tl.load(group_counts + own * GROUP + tl.arange(0, MEMBERS), mask=tl.arange(0, MEMBERS) < GROUP, other=0), 0
        )
        == 0
    ):
        return
    j = tl.program_id(0) * STEP + tl.arange(0, STEP)
    k_base = k + b64 * stride_kb + g64 * stride_kh
    v_base = v + b64 * stride_vb + g64 * stride_vh
    b_v = load_tile(v_base, j, j < K, stride_vn, E, BLOCK_E)
    b_dk = tl.zeros([STEP, BLOCK_D], tl.float32)
    b_dv = tl.zeros([STEP, BLOCK_E], tl.float32)
    some = 0
    for member in range(GROUP):
        h = g * GROUP + member
        head = b * H + h
        h64 = h.to(tl.int64)
        kp_base = k_positions
        if POSITIONS:
            kp_base = k_positions + b64 * stride_kpb + h64 * stride_kph
        a = tl.zeros([R], tl.float32) + tl.load(steepness + h)
        for i in range(tl.load(group_counts + head)):
            group = tl.load(group_list + head.to(tl.int64) * groups + i)
            rows = group * R + tl.arange(0, R)
            number = head.to(tl.int64) * Q + rows
            inside = (tl.load(list_counts + number, mask=rows < Q, other=0) < 0) & (rows < Q)
            first, last = bounds(rows, inside, lo, hi, offset, K, BOUNDS)
            at = rows
            if POSITIONS:
                at = tl.load(q_positions + b64 * stride_qpb + h64 * stride_qph + rows.to(tl.int64) * stride_qpn,
                             mask=inside)  # fmt: skip
            seen = visible(j, first, last, at, kp_base, stride_kpn, K, POSITIONS)
            if tl.max(tl.max(seen.to(tl.int32), 1), 0) > 0:
                some = 1
                b_q = load_tile(q + b64 * stride_qb + h64 * stride_qh, rows, inside, stride_qn, D, BLOCK_D)
                b_dout = load_tile(dout + b64 * stride_gb + h64 * stride_gh, rows, inside, stride_gn, E, BLOCK_E)
                of_row = tl.load(lam + number, mask=inside, other=0.0)
                whole = tl.load(factor + number, mask=inside, other=1.0)
                b_delta = tl.load(delta + number, mask=inside, other=0.0)
                of_u = tl.exp((1.0 - a) * tl.log(whole))
                s = tile_scores(b_q, k_base, j, seen, stride_kn, scale, K, D, BLOCK_D, PRECISION)
                dp = tl.dot(b_dout, tl.trans(b_v), input_precision=PRECISION) - b_delta[:, None]
                p, u = powers(relative(s, tl.where(of_row == float("inf"), 0.0, of_row)), a[:, None], A)
                p = (p * whole[:, None]).to(b_dout.dtype)
                ds = (u * of_u[:, None] * dp).to(b_q.dtype)
                b_dv = tl.dot(tl.trans(p), b_dout, b_dv, input_precision=PRECISION)
                b_dk = tl.dot(tl.trans(ds), b_q, b_dk, input_precision=PRECISION)
    if some > 0:
        o_d = tl.arange(0, BLOCK_D)
        o_e = tl.arange(0, BLOCK_E)
        m_d = (j < K)[:, None] & (o_d < D)[None, :]
        m_e = (j < K)[:, None] & (o_e < E)[None, :]
        to_k = dk + ((own.to(tl.int64) * K + j)[:, None] * D + o_d[None, :])
        to_v = dv + ((own.to(tl.int64) * K + j)[:, None] * E + o_e[None, :])
        b_dk = b_dk * scale + tl.load(to_k, mask=m_d, other=0.0)
        b_dv = b_dv + tl.load(to_v, mask=m_e, other=0.0)
        tl.store(to_k, b_dk.to(dk.dtype.element_ty), mask=m_d)
        tl.store(to_v, b_dv.to(dv.dtype.element_ty), mask=m_e)
