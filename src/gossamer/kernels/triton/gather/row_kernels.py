"""Kernels for rows with a few scattered columns each: no tiles, no tensor cores, a few threads for a row.

A program takes RP items (a row of the walk and a range of its columns) and, in each step, gathers C columns of each.
A gathered row is read in pieces of S numbers, 16 bytes a thread; a block [RP, S] is one piece of one column of every
item. Columns and pieces are unrolled, as tuples of blocks: sums over columns stay inside a thread whichever layout the
compiler takes. What bounds these kernels is the traffic of the gathered rows, as long as a pair takes few instructions
and the loads of a step are issued before the first of them is used: registers are granted for that (`RowConfig`).

A column past the end of a list is read as the first of that list and left out by its score: no load of a row is masked,
and none reads what the row does not keep. Of a list of nothing the results are chosen to be 0. Lengths within a program
are alike; the longest is known beforehand, so that all threads agree on the number of steps.
"""

from __future__ import annotations

import triton
import triton.language as tl

from gossamer.kernels.scores import score
from gossamer.kernels.softmax import end_of_keys, finish_rows, head_slope, probability, score_gradient, start_rows
from gossamer.kernels.triton.gather.pieces import (
    added,
    below,
    decode_rows,
    dot,
    first_listed,
    listed,
    load_columns,
    load_pieces,
    of_row,
    scaled,
    store_pieces,
    where_some,
    zeros,
)
from gossamer.kernels.triton.row_access import copy_index


@triton.jit(do_not_specialize=["n_items", "n_groups", "n_slots", "Q", "K", "q_offset"])
def rows_forward_kernel(
    q,  # (B, H, Q, D)
    k,  # (B, G, K, D)
    v,  # (B, G, K, E)
    out,  # (B, H, Q, E)
    lse,  # (B, H, Q)
    lengths,  # (B,)
    sinks,  # (H,)
    slopes,  # (H,) or (B, H)
    part_acc,  # (copies, slots, E)
    part_ml,  # (copies, slots, 2)
    items, longest, indices,
    stride_qb, stride_qh, stride_qn, stride_kb, stride_kh, stride_kn: tl.constexpr, stride_vb, stride_vh,
    stride_vn: tl.constexpr, stride_ob, stride_oh, stride_on, stride_lb, stride_lh, stride_ln,
    n_items, n_groups, n_slots, H, Q, K, q_offset, scale, cap, lead_heads,
    D: tl.constexpr, E: tl.constexpr, SD: tl.constexpr, SE: tl.constexpr, RP: tl.constexpr, C: tl.constexpr,
    GROUP: tl.constexpr, B_FROM_GRID: tl.constexpr, H_FROM_GRID: tl.constexpr, HAS_SLOTS: tl.constexpr,
    SOFTCAP: tl.constexpr, ALIBI: tl.constexpr, SINK: tl.constexpr, LENGTHS: tl.constexpr,
):  # fmt: skip
    """out and lse of RP query rows, or their partial sums where a row is split."""
    SHARED: tl.constexpr = B_FROM_GRID and H_FROM_GRID
    i_b, i_h, row, begin, end, slot, part, m_row, n_steps = decode_rows(
        items, longest, n_items, n_groups, H, lead_heads, RP, B_FROM_GRID, H_FROM_GRID
    )
    b64 = i_b.to(tl.int64)
    h64 = i_h.to(tl.int64)
    g64 = (i_h // GROUP).to(tl.int64)
    o_d = tl.arange(0, SD)[None, :]
    o_e = tl.arange(0, SE)[None, :]
    k_base = k + of_row(b64 * stride_kb + g64 * stride_kh, SHARED) + o_d
    v_base = v + of_row(b64 * stride_vb + g64 * stride_vh, SHARED) + o_e
    q_base = q + of_row(b64 * stride_qb + h64 * stride_qh, SHARED) + o_d
    b_q = load_pieces(q_base, row.to(tl.int64) * stride_qn, D, SD, True)
    b_acc = zeros(RP, E, SE)
    b_l, b_m = start_rows(sinks, i_h, part == 0, RP, SINK)
    slope = head_slope(slopes, i_b, i_h, H, ALIBI)
    key_end = end_of_keys(lengths, i_b, K, LENGTHS)
    position = row + q_offset
    left = end - begin
    pointers = indices + begin
    first = first_listed(pointers, left)
    m_some = (left > 0) & (first < key_end)

    j = listed(pointers, left, first, C)
    for _step in range(0, tl.abs(n_steps), C):
        j_read = below(j, first, key_end, C) if LENGTHS else j
        b_k = load_columns(k_base, j_read, stride_kn, D, SD, C)
        b_v = load_columns(v_base, j_read, stride_vn, E, SE, C)
        # The next columns are loaded a step ahead, so that the loads of their rows do not wait for them.
        pointers += C
        after = listed(pointers, left - C, first, C)
        b_new = b_m
        scores: tl.tuple = ()
        for c in tl.static_range(C):
            m_j = c < left
            if LENGTHS:
                m_j = m_j & (j[c] < key_end)
            b_s, _ = score(dot(b_k[c], b_q, D, SD), scale, cap, slope, j[c] - position, SOFTCAP, ALIBI)
            b_s = tl.where(m_j, b_s, float("-inf"))
            b_new = tl.maximum(b_new, b_s)
            scores += (b_s,)
        b_shrink = tl.exp2(b_m - b_new)
        b_m = b_new
        b_l = b_l * b_shrink
        b_acc = scaled(b_acc, b_shrink, E, SE)
        for c in tl.static_range(C):
            b_p = tl.exp2(scores[c] - b_new)
            b_l += b_p
            b_acc = added(b_acc, b_p, b_v[c], E, SE)
        j = after
        left -= C

    b_acc = where_some(m_some, b_acc, E, SE)
    m_whole = m_row
    if HAS_SLOTS:
        m_whole = m_row & (slot < 0)
        if n_steps < 0:
            m_split = slot >= 0
            i_part = copy_index(i_b, i_h, H, B_FROM_GRID, H_FROM_GRID).to(tl.int64) * n_slots + slot
            tl.store(part_ml + i_part * 2, b_m, mask=m_split)
            tl.store(part_ml + i_part * 2 + 1, b_l, mask=m_split)
            store_pieces(part_acc + o_e, i_part * E, m_split, b_acc, E, SE)
    b_l, b_lse = finish_rows(b_l, b_m)
    tl.store(lse + b64 * stride_lb + h64 * stride_lh + row.to(tl.int64) * stride_ln, b_lse, mask=m_whole)
    o_base = out + of_row(b64 * stride_ob + h64 * stride_oh, SHARED) + o_e
    store_pieces(o_base, row.to(tl.int64) * stride_on, m_whole, scaled(b_acc, 1.0 / b_l, E, SE), E, SE, True)


@triton.jit(do_not_specialize=["n_items", "n_groups", "n_slots", "K", "q_offset", "padded_Q", "delta_offset"])
def rows_dq_kernel(
    q,  # (B, H, Q, D)
    k,  # (B, G, K, D)
    v,  # (B, G, K, E)
    dout,  # (B, H, Q, E)
    row_terms,  # (2, B, H, padded Q): lse in base 2, delta
    dq,  # (B, H, Q, D)
    lengths,  # (B,)
    slopes,  # (H,) or (B, H)
    part,  # (copies, slots, D)
    items, longest, indices,
    stride_qb, stride_qh, stride_qn, stride_kb, stride_kh, stride_kn: tl.constexpr, stride_vb, stride_vh,
    stride_vn: tl.constexpr, stride_gb, stride_gh, stride_gn, stride_dqb, stride_dqh, stride_dqn,
    n_items, n_groups, n_slots, H, K, q_offset, scale, cap, plain_scale, padded_Q, delta_offset, lead_heads,
    D: tl.constexpr, E: tl.constexpr, SD: tl.constexpr, SE: tl.constexpr, RP: tl.constexpr, C: tl.constexpr,
    GROUP: tl.constexpr, B_FROM_GRID: tl.constexpr, H_FROM_GRID: tl.constexpr, HAS_SLOTS: tl.constexpr,
    SOFTCAP: tl.constexpr, ALIBI: tl.constexpr, LENGTHS: tl.constexpr,
):  # fmt: skip
    """dQ of RP query rows, or a partial sum of it where a row is split."""
    SHARED: tl.constexpr = B_FROM_GRID and H_FROM_GRID
    i_b, i_h, row, begin, end, slot, _part, m_row, n_steps = decode_rows(
        items, longest, n_items, n_groups, H, lead_heads, RP, B_FROM_GRID, H_FROM_GRID
    )
    b64 = i_b.to(tl.int64)
    h64 = i_h.to(tl.int64)
    g64 = (i_h // GROUP).to(tl.int64)
    o_d = tl.arange(0, SD)[None, :]
    o_e = tl.arange(0, SE)[None, :]
    k_base = k + of_row(b64 * stride_kb + g64 * stride_kh, SHARED) + o_d
    v_base = v + of_row(b64 * stride_vb + g64 * stride_vh, SHARED) + o_e
    q_base = q + of_row(b64 * stride_qb + h64 * stride_qh, SHARED) + o_d
    dout_base = dout + of_row(b64 * stride_gb + h64 * stride_gh, SHARED) + o_e
    b_q = load_pieces(q_base, row.to(tl.int64) * stride_qn, D, SD, True)
    b_dout = load_pieces(dout_base, row.to(tl.int64) * stride_gn, E, SE, True)
    o_row = (b64 * H + h64) * padded_Q + row
    b_lse = tl.load(row_terms + o_row)
    b_delta = tl.load(row_terms + delta_offset + o_row)
    b_dq = zeros(RP, D, SD)
    slope = head_slope(slopes, i_b, i_h, H, ALIBI)
    key_end = end_of_keys(lengths, i_b, K, LENGTHS)
    position = row + q_offset
    left = end - begin
    pointers = indices + begin
    first = first_listed(pointers, left)
    m_some = (left > 0) & (first < key_end)

    j = listed(pointers, left, first, C)
    for _step in range(0, tl.abs(n_steps), C):
        j_read = below(j, first, key_end, C) if LENGTHS else j
        b_k = load_columns(k_base, j_read, stride_kn, D, SD, C)
        b_v = load_columns(v_base, j_read, stride_vn, E, SE, C)
        pointers += C
        after = listed(pointers, left - C, first, C)
        for c in tl.static_range(C):
            m_j = c < left
            if LENGTHS:
                m_j = m_j & (j[c] < key_end)
            b_s = dot(b_k[c], b_q, D, SD)
            distance = j[c] - position
            b_p, b_t = probability(b_s, b_lse, scale, cap, slope, distance, m_j, True, False, SOFTCAP, ALIBI)
            b_ds = score_gradient(b_p, dot(b_v[c], b_dout, E, SE), b_delta, b_t, SOFTCAP)
            b_dq = added(b_dq, b_ds, b_k[c], D, SD)
        j = after
        left -= C

    b_dq = where_some(m_some, b_dq, D, SD)
    b_dq = scaled(b_dq, tl.full([RP], 1.0, tl.float32) * plain_scale, D, SD)
    m_whole = m_row
    if HAS_SLOTS:
        m_whole = m_row & (slot < 0)
        if n_steps < 0:
            i_part = copy_index(i_b, i_h, H, B_FROM_GRID, H_FROM_GRID).to(tl.int64) * n_slots + slot
            store_pieces(part + o_d, i_part * D, slot >= 0, b_dq, D, SD)
    dq_base = dq + of_row(b64 * stride_dqb + h64 * stride_dqh, SHARED) + o_d
    store_pieces(dq_base, row.to(tl.int64) * stride_dqn, m_whole, b_dq, D, SD, True)


@triton.jit(do_not_specialize=["n_items", "n_groups", "n_slots", "K", "q_offset", "padded_Q", "delta_offset"])
def rows_dkdv_kernel(
    q,  # (B, H, Q, D)
    k,  # (B, G, K, D)
    v,  # (B, G, K, E)
    dout,  # (B, H, Q, E)
    row_terms,  # (2, B, H, padded Q): lse in base 2, delta
    dk,  # (B, heads, K, D), heads = H / MEMBERS
    dv,  # (B, heads, K, E)
    lengths,  # (B,)
    slopes,  # (H,) or (B, H)
    part_dk,  # (copies, slots, D)
    part_dv,  # (copies, slots, E)
    items, longest, indices,
    stride_qb, stride_qh, stride_qn: tl.constexpr, stride_kb, stride_kh, stride_kn, stride_vb, stride_vh, stride_vn,
    stride_gb, stride_gh, stride_gn: tl.constexpr, stride_dkb, stride_dkh, stride_dkn, stride_dvb, stride_dvh,
    stride_dvn,
    n_items, n_groups, n_slots, heads, K, q_offset, scale, cap, plain_scale, padded_Q, delta_offset, lead_heads,
    D: tl.constexpr, E: tl.constexpr, SD: tl.constexpr, SE: tl.constexpr, RP: tl.constexpr, C: tl.constexpr,
    GROUP: tl.constexpr, MEMBERS: tl.constexpr, B_FROM_GRID: tl.constexpr, H_FROM_GRID: tl.constexpr,
    HAS_SLOTS: tl.constexpr, SOFTCAP: tl.constexpr, ALIBI: tl.constexpr, LENGTHS: tl.constexpr,
):  # fmt: skip
    """dK and dV of RP key rows, or partial sums of them where a row is split.

    MEMBERS query heads of a key head are summed here: all GROUP of them where they share their lists, else one.
    """
    SHARED: tl.constexpr = B_FROM_GRID and H_FROM_GRID
    i_b, i_h, row, begin, end, slot, _part, m_row, n_steps = decode_rows(
        items, longest, n_items, n_groups, heads, lead_heads, RP, B_FROM_GRID, H_FROM_GRID
    )
    b64 = i_b.to(tl.int64)
    h64 = i_h.to(tl.int64)
    g64 = (i_h // (GROUP // MEMBERS)).to(tl.int64)
    o_d = tl.arange(0, SD)[None, :]
    o_e = tl.arange(0, SE)[None, :]
    k_base = k + of_row(b64 * stride_kb + g64 * stride_kh, SHARED) + o_d
    v_base = v + of_row(b64 * stride_vb + g64 * stride_vh, SHARED) + o_e
    b_k = load_pieces(k_base, row.to(tl.int64) * stride_kn, D, SD)
    b_v = load_pieces(v_base, row.to(tl.int64) * stride_vn, E, SE)
    b_dk = zeros(RP, D, SD)
    b_dv = zeros(RP, E, SE)
    count = end - begin
    if LENGTHS:
        # Keys past the length have no gradient.
        count = tl.where(row < end_of_keys(lengths, i_b, K, LENGTHS), count, 0)

    for member in range(MEMBERS):
        i_q = i_h * MEMBERS + member
        q64 = i_q.to(tl.int64)
        q_base = q + of_row(b64 * stride_qb + q64 * stride_qh, SHARED) + o_d
        dout_base = dout + of_row(b64 * stride_gb + q64 * stride_gh, SHARED) + o_e
        terms = row_terms + (b64 * (heads * MEMBERS) + q64) * padded_Q
        slope = head_slope(slopes, i_b, i_q, heads * MEMBERS, ALIBI)
        left = count
        pointers = indices + begin
        first = first_listed(pointers, left)
        i = listed(pointers, left, first, C)
        for _step in range(0, tl.abs(n_steps), C):
            b_q = load_columns(q_base, i, stride_qn, D, SD, C)
            b_dout = load_columns(dout_base, i, stride_gn, E, SE, C)
            pointers += C
            after = listed(pointers, left - C, first, C)
            for c in tl.static_range(C):
                b_lse = tl.load(terms + i[c])
                b_delta = tl.load(terms + delta_offset + i[c])
                distance = row - (i[c] + q_offset)
                b_s = dot(b_q[c], b_k, D, SD)
                b_p, b_t = probability(b_s, b_lse, scale, cap, slope, distance, c < left, True, False, SOFTCAP, ALIBI)
                b_ds = score_gradient(b_p, dot(b_dout[c], b_v, E, SE), b_delta, b_t, SOFTCAP)
                b_dv = added(b_dv, b_p, b_dout[c], E, SE)
                b_dk = added(b_dk, b_ds, b_q[c], D, SD)
            i = after
            left -= C

    b_dk = where_some(count > 0, b_dk, D, SD)
    b_dv = where_some(count > 0, b_dv, E, SE)
    b_dk = scaled(b_dk, tl.full([RP], 1.0, tl.float32) * plain_scale, D, SD)
    m_whole = m_row
    if HAS_SLOTS:
        m_whole = m_row & (slot < 0)
        if n_steps < 0:
            m_split = slot >= 0
            i_part = copy_index(i_b, i_h, heads, B_FROM_GRID, H_FROM_GRID).to(tl.int64) * n_slots + slot
            store_pieces(part_dk + o_d, i_part * D, m_split, b_dk, D, SD)
            store_pieces(part_dv + o_e, i_part * E, m_split, b_dv, E, SE)
    dk_base = dk + of_row(b64 * stride_dkb + h64 * stride_dkh, SHARED) + o_d
    dv_base = dv + of_row(b64 * stride_dvb + h64 * stride_dvh, SHARED) + o_e
    store_pieces(dk_base, row.to(tl.int64) * stride_dkn, m_whole, b_dk, D, SD)
    store_pieces(dv_base, row.to(tl.int64) * stride_dvn, m_whole, b_dv, E, SE)
