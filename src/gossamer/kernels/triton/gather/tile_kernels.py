"""Kernels for rows that share scattered columns: R rows of a walk, and the columns that any of them keeps.

The columns are gathered C at a time into a dense tile for the tensor cores; one bit a pair says what is kept.
"""

# ruff: noqa: SIM102  (an `if` on a constexpr is resolved while compiling, one on data is not: they stay apart)

from __future__ import annotations

import triton
import triton.language as tl

from gossamer.kernels.scores import score
from gossamer.kernels.softmax import (
    add_scores,
    cleared,
    end_of_keys,
    head_slope,
    probability,
    score_gradient,
    start_rows,
)
from gossamer.kernels.triton.mask_modes import bits_mask
from gossamer.kernels.triton.row_access import (
    BEGIN,
    END,
    ITEM,
    LEAD,
    PART,
    SLOT,
    TILE,
    batch_and_head,
    copy_index,
    load_rows,
    store_row_results,
    store_rows,
)


@triton.jit
def decode_tile(
    items, n_items, key_heads, lead_heads, MEMBERS: tl.constexpr, B_FROM_GRID: tl.constexpr, H_FROM_GRID: tl.constexpr
):  # fmt: skip
    """What this program computes: (b, h, tile row, begin, end, slot, part), in the order of `block.lists.decode`."""
    pid = tl.program_id(0)
    member = pid % MEMBERS
    pid = pid // MEMBERS
    item = items + (pid % n_items) * ITEM
    copy = pid // n_items
    lead = tl.load(item + LEAD)
    tile = tl.load(item + TILE)
    begin = tl.load(item + BEGIN)
    end = tl.load(item + END)
    slot = tl.load(item + SLOT)
    part = tl.load(item + PART)
    b, h = batch_and_head(lead, copy, key_heads, lead_heads, B_FROM_GRID, H_FROM_GRID)
    return b, h * MEMBERS + member, tile, begin, end, slot, part


@triton.jit
def listed(indices, chunk, end, C: tl.constexpr):
    """The columns of a chunk, [C]; -1 past the last chunk."""
    o_c = chunk * C + tl.arange(0, C)
    return tl.load(indices + o_c, mask=o_c < end * C, other=-1)


@triton.jit
def gathered(source, j, stride, C: tl.constexpr, SIZE: tl.constexpr, BLOCK: tl.constexpr):
    """Rows j of a matrix, [C, BLOCK]; zero where j is -1."""
    o_d = tl.arange(0, BLOCK)
    mask = (j >= 0)[:, None] if SIZE == BLOCK else (j >= 0)[:, None] & (o_d < SIZE)[None, :]
    return tl.load(source + (j.to(tl.int64) * stride)[:, None] + o_d[None, :], mask=mask, other=0.0)


@triton.jit
def gathered_bits(bits, chunk, R: tl.constexpr, C: tl.constexpr):
    """[R, C] of a chunk: its words are [C // 32, R]."""
    masks = bits + (tl.full([R], 0, tl.int64) + chunk) * (C // 32 * R) + tl.arange(0, R)
    return bits_mask(masks, tl.arange(0, C), R, C)


@triton.jit(do_not_specialize=["n_items", "n_slots", "Q", "K", "q_offset"])
def tiles_forward_kernel(
    q,  # (B, H, Q, D)
    k,  # (B, G, K, D)
    v,  # (B, G, K, E)
    out,  # (B, H, Q, E)
    lse,  # (B, H, Q)
    lengths,  # (B,)
    sinks,  # (H,)
    slopes,  # (H,) or (B, H)
    part_acc,  # (copies, slots, R, E)
    part_ml,  # (copies, slots, 2, R)
    items,
    indices, bits,
    stride_qb, stride_qh, stride_qn, stride_kb, stride_kh, stride_kn, stride_vb, stride_vh, stride_vn,
    stride_ob, stride_oh, stride_on, stride_lb, stride_lh, stride_ln,
    n_items, n_slots, H, G, Q, K, q_offset, scale, cap, lead_heads,
    D: tl.constexpr, E: tl.constexpr, BLOCK_D: tl.constexpr, BLOCK_E: tl.constexpr, R: tl.constexpr, C: tl.constexpr,
    GROUP: tl.constexpr,
    B_FROM_GRID: tl.constexpr, H_FROM_GRID: tl.constexpr, HAS_SLOTS: tl.constexpr,
    SOFTCAP: tl.constexpr, ALIBI: tl.constexpr, SINK: tl.constexpr, LENGTHS: tl.constexpr, PRECISION: tl.constexpr,
):  # fmt: skip
    """out and lse of R query rows, or their partial sums when the tile row is split."""
    MEMBERS: tl.constexpr = GROUP if H_FROM_GRID else 1
    i_b, i_h, tile, begin, end, slot, part = decode_tile(
        items, n_items, G, lead_heads, MEMBERS, B_FROM_GRID, H_FROM_GRID
    )
    b64 = i_b.to(tl.int64)
    h64 = i_h.to(tl.int64)
    g64 = (i_h // GROUP).to(tl.int64)
    row_start = tile * R
    o_r = tl.arange(0, R)
    b_q = load_rows(q + b64 * stride_qb + h64 * stride_qh, row_start, Q, stride_qn, R, D, BLOCK_D, True)
    k += b64 * stride_kb + g64 * stride_kh
    v += b64 * stride_vb + g64 * stride_vh
    b_acc = tl.zeros([R, BLOCK_E], tl.float32)
    b_l, b_m = start_rows(sinks, i_h, part == 0, R, SINK)
    slope = head_slope(slopes, i_b, i_h, H, ALIBI)
    key_end = end_of_keys(lengths, i_b, K, LENGTHS)
    position = row_start + o_r + q_offset

    j = listed(indices, begin, end, C)
    for chunk in range(begin, end):
        m_keep = gathered_bits(bits, chunk, R, C)
        if LENGTHS:
            m_keep = m_keep & (j < key_end)[None, :]
            j = tl.where(j < key_end, j, -1)
        b_k = gathered(k, j, stride_kn, C, D, BLOCK_D)
        b_v = gathered(v, j, stride_vn, C, E, BLOCK_E)
        distance = j[None, :] - position[:, None]
        # The next columns are loaded a step ahead, so that the loads of their rows do not wait for them.
        j = listed(indices, chunk + 1, end, C)
        b_s = tl.dot(b_q, tl.trans(b_k), input_precision=PRECISION)
        b_s, _ = score(b_s, scale, cap, slope, distance, SOFTCAP, ALIBI)
        b_s = tl.where(m_keep, b_s, float("-inf"))
        b_p, b_shrink, b_l, b_m = add_scores(b_s, b_l, b_m)
        b_acc = tl.dot(b_p.to(b_v.dtype), b_v, b_acc * b_shrink[:, None], input_precision=PRECISION)

    if HAS_SLOTS:
        if slot >= 0:
            i_part = copy_index(i_b, i_h, H, B_FROM_GRID, H_FROM_GRID).to(tl.int64) * n_slots + slot
            o_ml = part_ml + i_part * (2 * R) + o_r
            tl.store(o_ml, b_m)
            tl.store(o_ml + R, b_l)
            store_rows(part_acc + i_part * (R * E), b_acc, row_start * 0, R, E, R, E, BLOCK_E)
            return
    store_row_results(
        out, lse, b_acc, b_l, b_m, b64, h64, Q, row_start, stride_ob, stride_oh, stride_on,
        stride_lb, stride_lh, stride_ln, R, E, BLOCK_E,
    )  # fmt: skip


@triton.jit(do_not_specialize=["n_items", "n_slots", "Q", "K", "q_offset", "padded_Q", "delta_offset"])
def tiles_dq_kernel(
    q,  # (B, H, Q, D)
    k,  # (B, G, K, D)
    v,  # (B, G, K, E)
    dout,  # (B, H, Q, E)
    row_terms,  # (2, B, H, padded Q): lse in base 2, delta
    dq,  # (B, H, Q, D)
    lengths,  # (B,)
    slopes,  # (H,) or (B, H)
    part,  # (copies, slots, R, D)
    items,
    indices, bits,
    stride_qb, stride_qh, stride_qn, stride_kb, stride_kh, stride_kn, stride_vb, stride_vh, stride_vn,
    stride_gb, stride_gh, stride_gn, stride_dqb, stride_dqh, stride_dqn,
    n_items, n_slots, H, G, Q, K, q_offset, scale, cap, plain_scale, padded_Q, delta_offset, lead_heads,
    D: tl.constexpr, E: tl.constexpr, BLOCK_D: tl.constexpr, BLOCK_E: tl.constexpr, R: tl.constexpr, C: tl.constexpr,
    GROUP: tl.constexpr,
    B_FROM_GRID: tl.constexpr, H_FROM_GRID: tl.constexpr, HAS_SLOTS: tl.constexpr,
    SOFTCAP: tl.constexpr, ALIBI: tl.constexpr, LENGTHS: tl.constexpr, PRECISION: tl.constexpr,
):  # fmt: skip
    """dQ of R query rows, or a partial sum of it when the tile row is split."""
    MEMBERS: tl.constexpr = GROUP if H_FROM_GRID else 1
    i_b, i_h, tile, begin, end, slot, _ = decode_tile(items, n_items, G, lead_heads, MEMBERS, B_FROM_GRID, H_FROM_GRID)
    b64 = i_b.to(tl.int64)
    h64 = i_h.to(tl.int64)
    g64 = (i_h // GROUP).to(tl.int64)
    row_start = tile * R
    o_r = tl.arange(0, R)
    b_q = load_rows(q + b64 * stride_qb + h64 * stride_qh, row_start, Q, stride_qn, R, D, BLOCK_D, True)
    b_dout = load_rows(dout + b64 * stride_gb + h64 * stride_gh, row_start, Q, stride_gn, R, E, BLOCK_E, True)
    o_rows = row_terms + (b64 * H + h64) * padded_Q + row_start + o_r
    b_lse = tl.load(o_rows)[:, None]
    b_delta = tl.load(o_rows + delta_offset)[:, None]
    k += b64 * stride_kb + g64 * stride_kh
    v += b64 * stride_vb + g64 * stride_vh
    b_dq = tl.zeros([R, BLOCK_D], tl.float32)
    slope = head_slope(slopes, i_b, i_h, H, ALIBI)
    key_end = end_of_keys(lengths, i_b, K, LENGTHS)
    position = row_start + o_r + q_offset

    j = listed(indices, begin, end, C)
    for chunk in range(begin, end):
        m_keep = gathered_bits(bits, chunk, R, C)
        if LENGTHS:
            m_keep = m_keep & (j < key_end)[None, :]
            j = tl.where(j < key_end, j, -1)
        b_k = gathered(k, j, stride_kn, C, D, BLOCK_D)
        b_v = gathered(v, j, stride_vn, C, E, BLOCK_E)
        distance = j[None, :] - position[:, None]
        j = listed(indices, chunk + 1, end, C)
        b_s = tl.dot(b_q, tl.trans(b_k), input_precision=PRECISION)
        b_dp = tl.dot(b_dout, tl.trans(b_v), input_precision=PRECISION)
        b_p, b_t = probability(b_s, b_lse, scale, cap, slope, distance, m_keep, False, False, SOFTCAP, ALIBI)
        # Not P: dP of a pair that is not kept may be NaN.
        b_ds = tl.where(m_keep, score_gradient(b_p, b_dp, b_delta, b_t, SOFTCAP), 0.0)
        b_dq = tl.dot(b_ds.to(b_k.dtype), b_k, b_dq, input_precision=PRECISION)

    b_dq *= plain_scale
    if HAS_SLOTS:
        if slot >= 0:
            i_part = copy_index(i_b, i_h, H, B_FROM_GRID, H_FROM_GRID).to(tl.int64) * n_slots + slot
            store_rows(part + i_part * (R * D), b_dq, row_start * 0, R, D, R, D, BLOCK_D)
            return
    store_rows(dq + b64 * stride_dqb + h64 * stride_dqh, b_dq, row_start, Q, stride_dqn, R, D, BLOCK_D)


@triton.jit(do_not_specialize=["n_items", "n_slots", "Q", "K", "q_offset", "padded_Q", "delta_offset"])
def tiles_dkdv_kernel(
    q,  # (B, H, Q, D)
    k,  # (B, G, K, D)
    v,  # (B, G, K, E)
    dout,  # (B, H, Q, E)
    row_terms,  # (2, B, H, padded Q): lse in base 2, delta
    dk,  # (B, heads, K, D), heads = H / MEMBERS
    dv,  # (B, heads, K, E)
    lengths,  # (B,)
    slopes,  # (H,) or (B, H)
    part_dk,  # (copies, slots, R, D)
    part_dv,  # (copies, slots, R, E)
    items,
    indices, bits,
    stride_qb, stride_qh, stride_qn, stride_kb, stride_kh, stride_kn, stride_vb, stride_vh, stride_vn,
    stride_gb, stride_gh, stride_gn, stride_dkb, stride_dkh, stride_dkn, stride_dvb, stride_dvh, stride_dvn,
    n_items, n_slots, heads, K, q_offset, scale, cap, plain_scale, padded_Q, delta_offset, lead_heads,
    D: tl.constexpr, E: tl.constexpr, BLOCK_D: tl.constexpr, BLOCK_E: tl.constexpr, R: tl.constexpr, C: tl.constexpr,
    GROUP: tl.constexpr, MEMBERS: tl.constexpr,
    B_FROM_GRID: tl.constexpr, H_FROM_GRID: tl.constexpr, HAS_SLOTS: tl.constexpr,
    SOFTCAP: tl.constexpr, ALIBI: tl.constexpr, LENGTHS: tl.constexpr, PRECISION: tl.constexpr,
):  # fmt: skip
    """dK and dV of R key rows, or partial sums when the tile row is split; scores are [keys, queries].

    MEMBERS query heads of a key head are summed here: all GROUP of them where they share their lists, else one.
    """
    i_b, i_h, tile, begin, end, slot, _ = decode_tile(items, n_items, heads, lead_heads, 1, B_FROM_GRID, H_FROM_GRID)
    b64 = i_b.to(tl.int64)
    h64 = i_h.to(tl.int64)
    g64 = (i_h // (GROUP // MEMBERS)).to(tl.int64)
    row_start = tile * R
    o_r = row_start + tl.arange(0, R)
    b_k = load_rows(k + b64 * stride_kb + g64 * stride_kh, row_start, K, stride_kn, R, D, BLOCK_D, True)
    b_v = load_rows(v + b64 * stride_vb + g64 * stride_vh, row_start, K, stride_vn, R, E, BLOCK_E, True)
    b_dk = tl.zeros([R, BLOCK_D], tl.float32)
    b_dv = tl.zeros([R, BLOCK_E], tl.float32)
    key_end = end_of_keys(lengths, i_b, K, LENGTHS)
    if LENGTHS:
        # Keys past the length have no gradient: nothing is visited when all rows lie there.
        end = tl.where(row_start < key_end, end, begin)

    for member in range(MEMBERS):
        i_q = i_h * MEMBERS + member
        q64 = i_q.to(tl.int64)
        q_head = q + b64 * stride_qb + q64 * stride_qh
        dout_head = dout + b64 * stride_gb + q64 * stride_gh
        lse_head = row_terms + (b64 * (heads * MEMBERS) + q64) * padded_Q
        slope = head_slope(slopes, i_b, i_q, heads * MEMBERS, ALIBI)
        i = listed(indices, begin, end, C)
        for chunk in range(begin, end):
            m_keep = gathered_bits(bits, chunk, R, C)
            b_lse = tl.load(lse_head + i, mask=i >= 0, other=float("inf"))
            b_delta = tl.load(lse_head + delta_offset + i, mask=i >= 0, other=0.0)
            b_q = gathered(q_head, i, stride_qn, C, D, BLOCK_D)
            b_dout = gathered(dout_head, i, stride_gn, C, E, BLOCK_E)
            if LENGTHS:
                m_read = m_keep & (o_r < key_end)[:, None]
                b_q = cleared(b_q, m_read)
                b_dout = cleared(b_dout, m_read)
            distance = o_r[:, None] - (i + q_offset)[None, :]
            i = listed(indices, chunk + 1, end, C)
            b_s = tl.dot(b_k, tl.trans(b_q), input_precision=PRECISION)
            b_dp = tl.dot(b_v, tl.trans(b_dout), input_precision=PRECISION)
            b_p, b_t = probability(
                b_s, b_lse[None, :], scale, cap, slope, distance, m_keep, True, False, SOFTCAP, ALIBI
            )
            b_dv = tl.dot(b_p.to(b_dout.dtype), b_dout, b_dv, input_precision=PRECISION)
            # dP of a key that no query keeps may be NaN.
            b_ds = tl.where(m_keep, score_gradient(b_p, b_dp, b_delta[None, :], b_t, SOFTCAP), 0.0)
            b_dk = tl.dot(b_ds.to(b_q.dtype), b_q, b_dk, input_precision=PRECISION)

    b_dk *= plain_scale
    if LENGTHS:
        m_length = (o_r < key_end)[:, None]
        b_dk = tl.where(m_length, b_dk, 0.0)
        b_dv = tl.where(m_length, b_dv, 0.0)
    if HAS_SLOTS:
        if slot >= 0:
            i_part = copy_index(i_b, i_h, heads, B_FROM_GRID, H_FROM_GRID).to(tl.int64) * n_slots + slot
            store_rows(part_dk + i_part * (R * D), b_dk, row_start * 0, R, D, R, D, BLOCK_D)
            store_rows(part_dv + i_part * (R * E), b_dv, row_start * 0, R, E, R, E, BLOCK_E)
            return
    store_rows(dk + b64 * stride_dkb + h64 * stride_dkh, b_dk, row_start, K, stride_dkn, R, D, BLOCK_D)
    store_rows(dv + b64 * stride_dvb + h64 * stride_dvh, b_dv, row_start, K, stride_dvn, R, E, BLOCK_E)
