"""The backward kernels: delta, dQ by the rows of the layout, dK and dV by its columns; no atomics anywhere.

P is recomputed from lse. With dS = P * (dP - delta) and delta = rowsum(dout * out) - dlse:
dV = P^T dout, dK = scale * dS^T q, dQ = scale * dS k.
"""

# ruff: noqa: SIM102  (an `if` on a constexpr is resolved while compiling, one on data is not: they stay apart)

from __future__ import annotations

import triton
import triton.language as tl

from gossamer.kernels.scores import LOG2E, score
from gossamer.kernels.triton.forward import decode_merge
from gossamer.kernels.triton.tiles import (
    BITS,
    FULL,
    INTERVAL,
    bits_mask,
    copy_index,
    decode,
    interval_mask,
    list_range,
    load_rows,
    store_rows,
    stream_rows,
)


@triton.jit(do_not_specialize=["Q"])
def row_terms_kernel(
    dout,  # (B, H, Q, E)
    out,  # (B, H, Q, E)
    lse,  # (B, H, Q)
    dlse,  # (B, H, Q)
    row_terms,  # (2, B, H, padded Q): lse in base 2, delta
    stride_gb,
    stride_gh,
    stride_gn,
    stride_ob,
    stride_oh,
    stride_on,
    stride_lb,
    stride_lh,
    stride_ln,
    stride_mb,
    stride_mh,
    stride_mn,
    B,
    H,
    Q,
    padded_Q,
    E: tl.constexpr,
    BLOCK_E: tl.constexpr,
    R: tl.constexpr,
    DLSE: tl.constexpr,
):
    """lse in base 2, and delta = rowsum(dout * out) - dlse.

    Rows that keep nothing, and rows past the last, get lse = +inf: all their probabilities are then exactly 0.
    """
    tiles = padded_Q // R
    i_bh = tl.program_id(0) // tiles
    row_start = tl.program_id(0) % tiles * R
    b64 = (i_bh // H).to(tl.int64)
    h64 = (i_bh % H).to(tl.int64)
    b_dout = load_rows(dout + b64 * stride_gb + h64 * stride_gh, row_start, Q, stride_gn, R, E, BLOCK_E, True)
    b_out = load_rows(out + b64 * stride_ob + h64 * stride_oh, row_start, Q, stride_on, R, E, BLOCK_E, True)
    b_delta = tl.sum(b_dout.to(tl.float32) * b_out.to(tl.float32), 1)
    o_r = row_start + tl.arange(0, R)
    o64 = o_r.to(tl.int64)
    if DLSE:
        dlse += b64 * stride_mb + h64 * stride_mh
        b_delta -= tl.load(dlse + o64 * stride_mn, mask=o_r < Q, other=0.0)
    lse += b64 * stride_lb + h64 * stride_lh
    b_lse = tl.load(lse + o64 * stride_ln, mask=o_r < Q, other=float("-inf"))
    m_empty = b_lse == float("-inf")
    row_terms += i_bh.to(tl.int64) * padded_Q + o_r
    tl.store(row_terms, tl.where(m_empty, float("inf"), b_lse * LOG2E))
    tl.store(row_terms + padded_Q.to(tl.int64) * B * H, tl.where(m_empty, 0.0, b_delta))


@triton.jit
def probability(
    b_s,
    b_lse,
    scale,
    cap,
    slope,
    distance,
    m_keep,
    MASKED: tl.constexpr,
    FOLD: tl.constexpr,
    SOFTCAP: tl.constexpr,
    ALIBI: tl.constexpr,
):
    """P = exp2(score - lse) and the tanh of the softcap; `b_lse` has the shape that broadcasts to the scores."""
    b_t = b_s
    if FOLD:
        b_p = tl.exp2(b_s * scale - b_lse)
    else:
        b_s, b_t = score(b_s, scale, cap, slope, distance, SOFTCAP, ALIBI)
        b_p = tl.exp2(b_s - b_lse)
    if MASKED:
        b_p = tl.where(m_keep, b_p, 0.0)
    return b_p, b_t


@triton.jit
def dq_loop(
    b_dq,  # [R, D]
    b_q,
    b_dout,
    b_lse,
    b_delta,
    k,
    v,
    i_b,
    i_g,
    stride_kn,
    stride_vn,
    K,
    key_end,
    start,
    first,
    last,
    indices,
    pool_index,
    pool,
    sub,
    b_lo,
    b_hi,
    o_position,
    scale,
    cap,
    slope,
    D: tl.constexpr,
    E: tl.constexpr,
    BLOCK_D: tl.constexpr,
    BLOCK_E: tl.constexpr,
    R: tl.constexpr,
    C: tl.constexpr,
    TILE_ROWS: tl.constexpr,
    TILE_COLUMNS: tl.constexpr,
    MODE: tl.constexpr,
    CONTIGUOUS: tl.constexpr,
    FOLD: tl.constexpr,
    SOFTCAP: tl.constexpr,
    ALIBI: tl.constexpr,
    LENGTHS: tl.constexpr,
    PRECISION: tl.constexpr,
    TMA: tl.constexpr,
):
    """dS k over tiles [first, last) of one list of a tile row."""
    STEPS: tl.constexpr = TILE_COLUMNS // C
    WORDS: tl.constexpr = TILE_COLUMNS // 32
    MASKED: tl.constexpr = (MODE != FULL) or LENGTHS
    o_c = tl.arange(0, C)
    tile = tl.load(indices + start + first, mask=first < last, other=0)
    origin = (tile - first) * TILE_COLUMNS
    entry = tile
    if MODE == BITS:
        entry = tl.load(pool_index + start + first, mask=first < last, other=0)
    for step in range(first * STEPS, last * STEPS):
        column = origin + step * C if CONTIGUOUS else tile * TILE_COLUMNS + (step % STEPS) * C
        m_keep = o_c
        if MODE == BITS:
            words = pool + entry.to(tl.int64) * (TILE_ROWS * WORDS) + sub * (R * WORDS) + (step % STEPS) * (C // 32)
            m_keep = bits_mask(words, o_c, WORDS, R, C)
        if MODE == INTERVAL:
            m_keep = interval_mask(b_lo, b_hi, column, o_c)
        if LENGTHS:
            m_length = (column + o_c < key_end)[None, :]
            m_keep = m_length if MODE == FULL else m_keep & m_length
        b_k = stream_rows(k, i_b, i_g, column, K, stride_kn, C, D, BLOCK_D, MODE != FULL, TMA)
        b_v = stream_rows(v, i_b, i_g, column, K, stride_vn, C, E, BLOCK_E, MODE != FULL, TMA)
        b_s = tl.dot(b_q, tl.trans(b_k), input_precision=PRECISION)
        b_dp = tl.dot(b_dout, tl.trans(b_v), input_precision=PRECISION)
        distance = column + o_c[None, :] - o_position[:, None]
        b_p, b_t = probability(b_s, b_lse[:, None], scale, cap, slope, distance, m_keep, MASKED, FOLD, SOFTCAP, ALIBI)
        b_ds = b_p * (b_dp - b_delta[:, None])
        if SOFTCAP:
            b_ds *= 1.0 - b_t * b_t
        b_dq = tl.dot(b_ds.to(b_k.dtype), b_k, b_dq, input_precision=PRECISION)
        if (not CONTIGUOUS) or (MODE == BITS):
            ahead = (step + 1) // STEPS
            if not CONTIGUOUS:
                tile = tl.load(indices + start + ahead, mask=ahead < last, other=0)
            if MODE == BITS:
                entry = tl.load(pool_index + start + ahead, mask=ahead < last, other=0)
    return b_dq


@triton.jit(do_not_specialize=["n_items", "n_slots", "n_tiles", "Q", "K", "q_offset"])
def dq_kernel(
    q,  # (B, H, Q, D)
    k,  # (B, G, K, D); k and v are descriptors with TMA
    v,  # (B, G, K, E)
    dout,  # (B, H, Q, E)
    row_terms,  # (2, B, H, padded Q): lse in base 2, delta
    dq,  # (B, H, Q, D)
    lengths,  # (B,)
    slopes,  # (H,)
    part,  # (copies, slots, TILE_ROWS, D)
    items,
    full_starts,
    full_counts,
    full_indices,
    interval_starts,
    interval_counts,
    interval_indices,
    bits_starts,
    bits_counts,
    bits_indices,
    lo,
    hi,
    pool_index,
    pool,
    stride_qb,
    stride_qh,
    stride_qn,
    stride_kb,
    stride_kh,
    stride_kn,
    stride_vb,
    stride_vh,
    stride_vn,
    stride_gb,
    stride_gh,
    stride_gn,
    stride_dqb,
    stride_dqh,
    stride_dqn,
    n_items,
    n_slots,
    n_tiles,
    H,
    G,
    Q,
    K,
    q_offset,
    scale,
    cap,
    plain_scale,
    padded_Q,
    delta_offset,
    list_b,
    list_h,
    lead_heads,
    D: tl.constexpr,
    E: tl.constexpr,
    BLOCK_D: tl.constexpr,
    BLOCK_E: tl.constexpr,
    R: tl.constexpr,
    C: tl.constexpr,
    TILE_ROWS: tl.constexpr,
    TILE_COLUMNS: tl.constexpr,
    GROUP: tl.constexpr,
    B_FROM_GRID: tl.constexpr,
    H_FROM_GRID: tl.constexpr,
    HAS_ITEMS: tl.constexpr,
    HAS_SLOTS: tl.constexpr,
    HAS_FULL: tl.constexpr,
    HAS_INTERVAL: tl.constexpr,
    HAS_BITS: tl.constexpr,
    FULL_CONTIGUOUS: tl.constexpr,
    INTERVAL_CONTIGUOUS: tl.constexpr,
    BITS_CONTIGUOUS: tl.constexpr,
    FOLD: tl.constexpr,
    SOFTCAP: tl.constexpr,
    ALIBI: tl.constexpr,
    LENGTHS: tl.constexpr,
    PRECISION: tl.constexpr,
    TMA: tl.constexpr,
):
    """dQ of R query rows, or a partial sum of it when the row is split."""
    SUB: tl.constexpr = TILE_ROWS // R
    MEMBERS: tl.constexpr = GROUP if H_FROM_GRID else 1
    i_b, i_h, tile, sub, begin, end, slot = decode(
        items, n_items, n_tiles, G, lead_heads, SUB, MEMBERS, B_FROM_GRID, H_FROM_GRID, HAS_ITEMS
    )
    b64 = i_b.to(tl.int64)
    h64 = i_h.to(tl.int64)
    i_g = i_h // GROUP
    row_start = tile * TILE_ROWS + sub * R
    if SUB > 1:
        if row_start >= Q:
            return
    i_list = i_b * list_b + i_h * list_h
    i_row = i_list * n_tiles + tile
    o_r = row_start + tl.arange(0, R)

    b_q = load_rows(q + b64 * stride_qb + h64 * stride_qh, row_start, Q, stride_qn, R, D, BLOCK_D, True)
    b_dout = load_rows(dout + b64 * stride_gb + h64 * stride_gh, row_start, Q, stride_gn, R, E, BLOCK_E, True)
    o_rows = row_terms + (b64 * H + h64) * padded_Q + o_r
    b_lse = tl.load(o_rows)
    b_delta = tl.load(o_rows + delta_offset)
    if not TMA:
        k += b64 * stride_kb + i_g.to(tl.int64) * stride_kh
        v += b64 * stride_vb + i_g.to(tl.int64) * stride_vh
    b_dq = tl.zeros([R, BLOCK_D], tl.float32)
    slope = 0.0
    if ALIBI:
        slope = tl.load(slopes + i_h).to(tl.float32) * LOG2E
    key_end = K
    if LENGTHS:
        key_end = tl.minimum(tl.load(lengths + i_b), K).to(tl.int32)
    o_position = o_r + q_offset

    before = begin * 0
    if HAS_FULL:
        start, first, last, before = list_range(full_starts, full_counts, i_row, begin, end, before)
        b_dq = dq_loop(
            b_dq, b_q, b_dout, b_lse, b_delta, k, v, i_b, i_g, stride_kn, stride_vn, K, key_end, start, first, last,
            full_indices, pool_index, pool, sub, o_r, o_r, o_position, scale, cap, slope,
            D, E, BLOCK_D, BLOCK_E, R, C, TILE_ROWS, TILE_COLUMNS, FULL, FULL_CONTIGUOUS,
            FOLD, SOFTCAP, ALIBI, LENGTHS, PRECISION, TMA,
        )  # fmt: skip
    if HAS_INTERVAL:
        start, first, last, before = list_range(interval_starts, interval_counts, i_row, begin, end, before)
        o_bounds = i_list.to(tl.int64) * Q + o_r
        b_lo = tl.load(lo + o_bounds, mask=o_r < Q, other=0)
        b_hi = tl.maximum(tl.load(hi + o_bounds, mask=o_r < Q, other=0), b_lo)
        b_dq = dq_loop(
            b_dq, b_q, b_dout, b_lse, b_delta, k, v, i_b, i_g, stride_kn, stride_vn, K, key_end, start, first, last,
            interval_indices, pool_index, pool, sub, b_lo, b_hi, o_position, scale, cap, slope,
            D, E, BLOCK_D, BLOCK_E, R, C, TILE_ROWS, TILE_COLUMNS, INTERVAL, INTERVAL_CONTIGUOUS,
            FOLD, SOFTCAP, ALIBI, LENGTHS, PRECISION, TMA,
        )  # fmt: skip
    if HAS_BITS:
        start, first, last, before = list_range(bits_starts, bits_counts, i_row, begin, end, before)
        b_dq = dq_loop(
            b_dq, b_q, b_dout, b_lse, b_delta, k, v, i_b, i_g, stride_kn, stride_vn, K, key_end, start, first, last,
            bits_indices, pool_index, pool, sub, o_r, o_r, o_position, scale, cap, slope,
            D, E, BLOCK_D, BLOCK_E, R, C, TILE_ROWS, TILE_COLUMNS, BITS, BITS_CONTIGUOUS,
            FOLD, SOFTCAP, ALIBI, LENGTHS, PRECISION, TMA,
        )  # fmt: skip

    b_dq *= plain_scale
    if HAS_SLOTS:
        if slot >= 0:
            i_part = copy_index(i_b, i_h, H, B_FROM_GRID, H_FROM_GRID).to(tl.int64) * n_slots + slot
            store_rows(part + i_part * (TILE_ROWS * D), b_dq, sub * R, TILE_ROWS, D, R, D, BLOCK_D)
            return
    store_rows(dq + b64 * stride_dqb + h64 * stride_dqh, b_dq, row_start, Q, stride_dqn, R, D, BLOCK_D)


@triton.jit
def dkdv_loop(
    b_dk,  # [R, D]
    b_dv,  # [R, E]
    b_k,
    b_v,
    q,
    dout,
    i_b,
    i_h,
    row_lse,
    row_delta,
    stride_qn,
    stride_gn,
    Q,
    start,
    first,
    last,
    indices,
    pool_index,
    pool,
    sub,
    b_lo,
    b_hi,
    o_r,
    q_offset,
    scale,
    cap,
    slope,
    D: tl.constexpr,
    E: tl.constexpr,
    BLOCK_D: tl.constexpr,
    BLOCK_E: tl.constexpr,
    R: tl.constexpr,
    C: tl.constexpr,
    TILE_ROWS: tl.constexpr,
    TILE_COLUMNS: tl.constexpr,
    MODE: tl.constexpr,
    CONTIGUOUS: tl.constexpr,
    FOLD: tl.constexpr,
    SOFTCAP: tl.constexpr,
    ALIBI: tl.constexpr,
    PRECISION: tl.constexpr,
    TMA: tl.constexpr,
):
    """dS^T q and P^T dout over tiles [first, last) of one list of a tile row; scores are [keys, queries]."""
    STEPS: tl.constexpr = TILE_COLUMNS // C
    WORDS: tl.constexpr = TILE_COLUMNS // 32
    o_c = tl.arange(0, C)
    tile = tl.load(indices + start + first, mask=first < last, other=0)
    origin = (tile - first) * TILE_COLUMNS
    entry = tile
    if MODE == BITS:
        entry = tl.load(pool_index + start + first, mask=first < last, other=0)
    for step in range(first * STEPS, last * STEPS):
        column = origin + step * C if CONTIGUOUS else tile * TILE_COLUMNS + (step % STEPS) * C
        m_keep = o_c
        if MODE == BITS:
            words = pool + entry.to(tl.int64) * (TILE_ROWS * WORDS) + sub * (R * WORDS) + (step % STEPS) * (C // 32)
            m_keep = bits_mask(words, o_c, WORDS, R, C)
        if MODE == INTERVAL:
            m_keep = interval_mask(b_lo, b_hi, column, o_c)
        o_q = column + o_c
        # No mask: these rows are padded to whole tiles, and the loads stay wide.
        b_lse = tl.load(row_lse + o_q)
        b_delta = tl.load(row_delta + o_q)
        b_q = stream_rows(q, i_b, i_h, column, Q, stride_qn, C, D, BLOCK_D, MODE != FULL, TMA)
        b_s = tl.dot(b_k, tl.trans(b_q), input_precision=PRECISION)
        b_dout = stream_rows(dout, i_b, i_h, column, Q, stride_gn, C, E, BLOCK_E, MODE != FULL, TMA)
        b_dp = tl.dot(b_v, tl.trans(b_dout), input_precision=PRECISION)
        distance = o_r[:, None] - (o_q + q_offset)[None, :]
        b_p, b_t = probability(
            b_s, b_lse[None, :], scale, cap, slope, distance, m_keep, MODE != FULL, FOLD, SOFTCAP, ALIBI
        )
        b_dv = tl.dot(b_p.to(b_dout.dtype), b_dout, b_dv, input_precision=PRECISION)
        b_ds = b_p * (b_dp - b_delta[None, :])
        if SOFTCAP:
            b_ds *= 1.0 - b_t * b_t
        b_dk = tl.dot(b_ds.to(b_q.dtype), b_q, b_dk, input_precision=PRECISION)
        if (not CONTIGUOUS) or (MODE == BITS):
            ahead = (step + 1) // STEPS
            if not CONTIGUOUS:
                tile = tl.load(indices + start + ahead, mask=ahead < last, other=0)
            if MODE == BITS:
                entry = tl.load(pool_index + start + ahead, mask=ahead < last, other=0)
    return b_dk, b_dv


@triton.jit(do_not_specialize=["n_items", "n_slots", "n_tiles", "Q", "K", "q_offset"])
def dkdv_kernel(
    q,  # (B, H, Q, D); q and dout are descriptors with TMA
    k,  # (B, G, K, D)
    v,  # (B, G, K, E)
    dout,  # (B, H, Q, E)
    row_terms,  # (2, B, H, padded Q): lse in base 2, delta
    dk,  # (B, G, K, D)
    dv,  # (B, G, K, E)
    lengths,  # (B,)
    slopes,  # (H,)
    part_dk,  # (copies, slots, TILE_ROWS, D)
    part_dv,  # (copies, slots, TILE_ROWS, E)
    items,
    full_starts,
    full_counts,
    full_indices,
    interval_starts,
    interval_counts,
    interval_indices,
    bits_starts,
    bits_counts,
    bits_indices,
    lo,
    hi,
    pool_index,
    pool,
    stride_qb,
    stride_qh,
    stride_qn,
    stride_kb,
    stride_kh,
    stride_kn,
    stride_vb,
    stride_vh,
    stride_vn,
    stride_gb,
    stride_gh,
    stride_gn,
    stride_dkb,
    stride_dkh,
    stride_dkn,
    stride_dvb,
    stride_dvh,
    stride_dvn,
    n_items,
    n_slots,
    n_tiles,
    H,
    G,
    Q,
    K,
    q_offset,
    scale,
    cap,
    plain_scale,
    padded_Q,
    delta_offset,
    list_b,
    list_h,
    lead_heads,
    D: tl.constexpr,
    E: tl.constexpr,
    BLOCK_D: tl.constexpr,
    BLOCK_E: tl.constexpr,
    R: tl.constexpr,
    C: tl.constexpr,
    TILE_ROWS: tl.constexpr,
    TILE_COLUMNS: tl.constexpr,
    GROUP: tl.constexpr,
    B_FROM_GRID: tl.constexpr,
    H_FROM_GRID: tl.constexpr,
    HAS_ITEMS: tl.constexpr,
    HAS_SLOTS: tl.constexpr,
    HAS_FULL: tl.constexpr,
    HAS_INTERVAL: tl.constexpr,
    HAS_BITS: tl.constexpr,
    FULL_CONTIGUOUS: tl.constexpr,
    INTERVAL_CONTIGUOUS: tl.constexpr,
    BITS_CONTIGUOUS: tl.constexpr,
    FOLD: tl.constexpr,
    SOFTCAP: tl.constexpr,
    ALIBI: tl.constexpr,
    LENGTHS: tl.constexpr,
    PRECISION: tl.constexpr,
    TMA: tl.constexpr,
):
    """dK and dV of R key rows, summed over the query heads of the key head, or partial sums when the row is split.

    The walk is the transpose of the layout: its rows are keys, its columns queries.
    """
    SUB: tl.constexpr = TILE_ROWS // R
    i_b, i_g, tile, sub, begin, end, slot = decode(
        items, n_items, n_tiles, G, lead_heads, SUB, 1, B_FROM_GRID, H_FROM_GRID, HAS_ITEMS
    )
    b64 = i_b.to(tl.int64)
    g64 = i_g.to(tl.int64)
    row_start = tile * TILE_ROWS + sub * R
    if SUB > 1:
        if row_start >= K:
            return
    o_r = row_start + tl.arange(0, R)

    b_k = load_rows(k + b64 * stride_kb + g64 * stride_kh, row_start, K, stride_kn, R, D, BLOCK_D, True)
    b_v = load_rows(v + b64 * stride_vb + g64 * stride_vh, row_start, K, stride_vn, R, E, BLOCK_E, True)
    b_dk = tl.zeros([R, BLOCK_D], tl.float32)
    b_dv = tl.zeros([R, BLOCK_E], tl.float32)
    if LENGTHS:
        # Keys past the length have no gradient: no tile is visited when the whole program lies there.
        key_end = tl.minimum(tl.load(lengths + i_b), K).to(tl.int32)
        end = tl.where(row_start < key_end, end, begin)

    for member in range(GROUP):
        i_h = i_g * GROUP + member
        h64 = i_h.to(tl.int64)
        i_list = i_b * list_b + i_h * list_h
        i_row = i_list * n_tiles + tile
        q_head = q
        dout_head = dout
        if not TMA:
            q_head = q + b64 * stride_qb + h64 * stride_qh
            dout_head = dout + b64 * stride_gb + h64 * stride_gh
        lse_head = row_terms + (b64 * H + h64) * padded_Q
        delta_head = lse_head + delta_offset
        slope = 0.0
        if ALIBI:
            slope = tl.load(slopes + i_h).to(tl.float32) * LOG2E
        before = begin * 0
        if HAS_FULL:
            start, first, last, before = list_range(full_starts, full_counts, i_row, begin, end, before)
            b_dk, b_dv = dkdv_loop(
                b_dk, b_dv, b_k, b_v, q_head, dout_head, i_b, i_h, lse_head, delta_head, stride_qn, stride_gn, Q,
                start, first, last, full_indices, pool_index, pool, sub, o_r, o_r, o_r, q_offset, scale, cap, slope,
                D, E, BLOCK_D, BLOCK_E, R, C, TILE_ROWS, TILE_COLUMNS, FULL, FULL_CONTIGUOUS,
                FOLD, SOFTCAP, ALIBI, PRECISION, TMA,
            )  # fmt: skip
        if HAS_INTERVAL:
            start, first, last, before = list_range(interval_starts, interval_counts, i_row, begin, end, before)
            o_bounds = i_list.to(tl.int64) * K + o_r
            b_lo = tl.load(lo + o_bounds, mask=o_r < K, other=0)
            b_hi = tl.maximum(tl.load(hi + o_bounds, mask=o_r < K, other=0), b_lo)
            b_dk, b_dv = dkdv_loop(
                b_dk, b_dv, b_k, b_v, q_head, dout_head, i_b, i_h, lse_head, delta_head, stride_qn, stride_gn, Q,
                start, first, last, interval_indices, pool_index, pool, sub, b_lo, b_hi, o_r, q_offset,
                scale, cap, slope,
                D, E, BLOCK_D, BLOCK_E, R, C, TILE_ROWS, TILE_COLUMNS, INTERVAL, INTERVAL_CONTIGUOUS,
                FOLD, SOFTCAP, ALIBI, PRECISION, TMA,
            )  # fmt: skip
        if HAS_BITS:
            start, first, last, before = list_range(bits_starts, bits_counts, i_row, begin, end, before)
            b_dk, b_dv = dkdv_loop(
                b_dk, b_dv, b_k, b_v, q_head, dout_head, i_b, i_h, lse_head, delta_head, stride_qn, stride_gn, Q,
                start, first, last, bits_indices, pool_index, pool, sub, o_r, o_r, o_r, q_offset, scale, cap, slope,
                D, E, BLOCK_D, BLOCK_E, R, C, TILE_ROWS, TILE_COLUMNS, BITS, BITS_CONTIGUOUS,
                FOLD, SOFTCAP, ALIBI, PRECISION, TMA,
            )  # fmt: skip

    b_dk *= plain_scale
    if LENGTHS:
        # Masked here once instead of in every step: what a row past the length summed up is dropped.
        m_length = (o_r < key_end)[:, None]
        b_dk = tl.where(m_length, b_dk, 0.0)
        b_dv = tl.where(m_length, b_dv, 0.0)
    if HAS_SLOTS:
        if slot >= 0:
            i_part = copy_index(i_b, i_g, G, B_FROM_GRID, H_FROM_GRID).to(tl.int64) * n_slots + slot
            store_rows(part_dk + i_part * (TILE_ROWS * D), b_dk, sub * R, TILE_ROWS, D, R, D, BLOCK_D)
            store_rows(part_dv + i_part * (TILE_ROWS * E), b_dv, sub * R, TILE_ROWS, E, R, E, BLOCK_E)
            return
    store_rows(dk + b64 * stride_dkb + g64 * stride_dkh, b_dk, row_start, K, stride_dkn, R, D, BLOCK_D)
    store_rows(dv + b64 * stride_dvb + g64 * stride_dvh, b_dv, row_start, K, stride_dvn, R, E, BLOCK_E)


@triton.jit(do_not_specialize=["n_merges", "n_slots", "rows"])
def sum_kernel(
    result,  # (B, heads, rows, SIZE)
    part,  # (copies, slots, TILE_ROWS, SIZE)
    merges,
    stride_b,
    stride_h,
    stride_n,
    n_merges,
    n_slots,
    heads,
    rows,
    lead_heads,
    SIZE: tl.constexpr,
    BLOCK_SIZE: tl.constexpr,
    R: tl.constexpr,
    TILE_ROWS: tl.constexpr,
    B_FROM_GRID: tl.constexpr,
    H_FROM_GRID: tl.constexpr,
):
    """Rows whose list was split: their partial sums added in slot order."""
    i_b, i_h, tile, sub, first, count = decode_merge(
        merges, n_merges, heads, lead_heads, TILE_ROWS // R, B_FROM_GRID, H_FROM_GRID
    )
    row_start = tile * TILE_ROWS + sub * R
    if row_start >= rows:
        return
    base = copy_index(i_b, i_h, heads, B_FROM_GRID, H_FROM_GRID).to(tl.int64) * n_slots + first
    b_sum = tl.zeros([R, BLOCK_SIZE], tl.float32)
    for i_part in range(count):
        part_rows = part + (base + i_part) * (TILE_ROWS * SIZE)
        b_sum += load_rows(part_rows, sub * R, TILE_ROWS, SIZE, R, SIZE, BLOCK_SIZE, True)
    result += i_b.to(tl.int64) * stride_b + i_h.to(tl.int64) * stride_h
    store_rows(result, b_sum, row_start, rows, stride_n, R, SIZE, BLOCK_SIZE)
