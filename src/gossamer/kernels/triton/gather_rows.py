"""Kernels for rows with a few scattered columns each: no tiles, no tensor cores, one warp for a few rows.

A program takes RP items (a row of the walk and a range of its columns) and, in each step, gathers C columns of each:
blocks are [RP, C, size], laid over one warp so that a gathered row is read in whole 16-byte pieces. What bounds these
kernels is the traffic of the gathered rows; the arithmetic rides along. Lengths within a program are alike.
"""

from __future__ import annotations

import triton
import triton.language as tl

from gossamer.kernels.scores import FLOOR, LN2, LOG2E, score
from gossamer.kernels.triton.tiles import copy_index


@triton.jit
def decode_rows(
    items,
    n_items,
    n_groups,
    heads,
    lead_heads,
    RP: tl.constexpr,
    B_FROM_GRID: tl.constexpr,
    H_FROM_GRID: tl.constexpr,
):
    """What this program computes: (b, h, row, begin, end, slot, part, exists) of its RP items.

    b and h are scalars where they come from the grid. One head is finished before the next one starts: its keys and
    values stay in L2.
    """
    pid = tl.program_id(0)
    o_i = (pid % n_groups) * RP + tl.arange(0, RP)
    copy = pid // n_groups
    m_i = o_i < n_items
    item = items + o_i * 6
    lead = tl.load(item, mask=m_i, other=0)
    row = tl.load(item + 1, mask=m_i, other=0)
    begin = tl.load(item + 2, mask=m_i, other=0)
    end = tl.load(item + 3, mask=m_i, other=0)
    slot = tl.load(item + 4, mask=m_i, other=-1)
    part = tl.load(item + 5, mask=m_i, other=0)
    b = lead // lead_heads
    h = lead % lead_heads
    if H_FROM_GRID:
        h = copy % heads
        copy = copy // heads
    if B_FROM_GRID:
        b = copy
    return b, h, row, begin, end, slot, part, m_i


@triton.jit
def load_own(
    source, o_head, row, m_row, stride, SIZE: tl.constexpr, BLOCK: tl.constexpr, SHARED: tl.constexpr
):  # fmt: skip
    """The rows of the items, [RP, BLOCK] float32; `o_head` is the offset of the head, a scalar when SHARED."""
    o_d = tl.arange(0, BLOCK)
    base = source + o_head if SHARED else source + o_head[:, None]
    mask = m_row[:, None] if SIZE == BLOCK else m_row[:, None] & (o_d < SIZE)[None, :]
    return tl.load(base + (row.to(tl.int64) * stride)[:, None] + o_d[None, :], mask=mask, other=0.0).to(tl.float32)


@triton.jit
def store_own(
    target, o_head, row, m_row, stride, block, SIZE: tl.constexpr, BLOCK: tl.constexpr, SHARED: tl.constexpr
):  # fmt: skip
    """Write [RP, BLOCK] to the rows of the items."""
    o_d = tl.arange(0, BLOCK)
    base = target + o_head if SHARED else target + o_head[:, None]
    mask = m_row[:, None] & (o_d < SIZE)[None, :]
    pointers = base + (row.to(tl.int64) * stride)[:, None] + o_d[None, :]
    tl.store(pointers, block.to(target.dtype.element_ty), mask=mask)


@triton.jit
def gather(
    source, o_head, j, m_j, stride, SIZE: tl.constexpr, BLOCK: tl.constexpr, SHARED: tl.constexpr
):  # fmt: skip
    """Rows j of each item, [RP, C, BLOCK] float32; zero where m_j is false."""
    o_d = tl.arange(0, BLOCK)
    base = source + o_head if SHARED else source + o_head[:, None, None]
    mask = m_j[:, :, None] if SIZE == BLOCK else m_j[:, :, None] & (o_d < SIZE)[None, None, :]
    pointers = base + (j.to(tl.int64) * stride)[:, :, None] + o_d[None, None, :]
    return tl.load(pointers, mask=mask, other=0.0).to(tl.float32)


@triton.jit
def fold(x, LANES: tl.constexpr):
    """[RP, C, size] -> [RP, LANES, size]: the part of a sum over C that stays inside a thread."""
    if x.shape[1] == LANES:
        return x
    return tl.sum(tl.reshape(x, [x.shape[0], x.shape[1] // LANES, LANES, x.shape[2]]), 1)


@triton.jit
def of_row(x, FROM_GRID: tl.constexpr):
    """A scalar, or a vector over items as [RP, 1]."""
    return x if FROM_GRID else x[:, None]


@triton.jit(do_not_specialize=["n_items", "n_groups", "n_slots", "Q", "K", "q_offset"])
def rows_forward_kernel(
    q,  # (B, H, Q, D)
    k,  # (B, G, K, D)
    v,  # (B, G, K, E)
    out,  # (B, H, Q, E)
    lse,  # (B, H, Q)
    lengths,  # (B,)
    sinks,  # (H,)
    slopes,  # (H,)
    part_acc,  # (copies, slots, E)
    part_ml,  # (copies, slots, 2)
    items,
    indices,
    stride_qb,
    stride_qh,
    stride_qn,
    stride_kb,
    stride_kh,
    stride_kn,
    stride_vb,
    stride_vh,
    stride_vn,
    stride_ob,
    stride_oh,
    stride_on,
    stride_lb,
    stride_lh,
    stride_ln,
    n_items,
    n_groups,
    n_slots,
    H,
    Q,
    K,
    q_offset,
    scale,
    cap,
    lead_heads,
    D: tl.constexpr,
    E: tl.constexpr,
    BLOCK_D: tl.constexpr,
    BLOCK_E: tl.constexpr,
    RP: tl.constexpr,
    C: tl.constexpr,
    LANES: tl.constexpr,
    GROUP: tl.constexpr,
    B_FROM_GRID: tl.constexpr,
    H_FROM_GRID: tl.constexpr,
    HAS_SLOTS: tl.constexpr,
    SOFTCAP: tl.constexpr,
    ALIBI: tl.constexpr,
    SINK: tl.constexpr,
    LENGTHS: tl.constexpr,
):
    """out and lse of RP query rows, or their partial sums where a row is split."""
    SHARED: tl.constexpr = B_FROM_GRID and H_FROM_GRID
    i_b, i_h, row, begin, end, slot, part, m_row = decode_rows(
        items, n_items, n_groups, H, lead_heads, RP, B_FROM_GRID, H_FROM_GRID
    )
    b64 = i_b.to(tl.int64)
    h64 = i_h.to(tl.int64)
    g64 = (i_h // GROUP).to(tl.int64)
    o_k = b64 * stride_kb + g64 * stride_kh
    o_v = b64 * stride_vb + g64 * stride_vh
    o_c = tl.arange(0, C)
    b_q = load_own(q, b64 * stride_qb + h64 * stride_qh, row, m_row, stride_qn, D, BLOCK_D, SHARED)
    b_acc = tl.zeros([RP, LANES, BLOCK_E], tl.float32)
    b_l = tl.zeros([RP], tl.float32)
    b_m = tl.full([RP], FLOOR, tl.float32)
    if SINK:
        # The sink joins once: in the first part of a split row.
        b_sink = b_l + tl.load(sinks + i_h).to(tl.float32) * LOG2E
        b_m = tl.maximum(b_m, b_sink)
        b_l = tl.where((b_sink > FLOOR) & (part == 0), b_l + 1.0, b_l)
    slope = 0.0
    if ALIBI:
        slope = of_row(tl.load(slopes + i_h).to(tl.float32) * LOG2E, H_FROM_GRID)
    key_end = K
    if LENGTHS:
        key_end = tl.minimum(tl.load(lengths + i_b), K).to(tl.int32)
        key_end = of_row(key_end, B_FROM_GRID)
    position = row + q_offset

    o_j = begin[:, None] + o_c[None, :]
    j = tl.load(indices + o_j, mask=o_j < end[:, None], other=0)
    for _step in range(tl.cdiv(tl.max(end - begin, 0), C)):
        m_j = o_j < end[:, None]
        if LENGTHS:
            m_j = m_j & (j < key_end)
        b_k = gather(k, o_k, j, m_j, stride_kn, D, BLOCK_D, SHARED)
        b_v = gather(v, o_v, j, m_j, stride_vn, E, BLOCK_E, SHARED)
        distance = j - position[:, None]
        # The next columns are loaded a step ahead, so that the loads of their rows do not wait for them.
        o_j += C
        j = tl.load(indices + o_j, mask=o_j < end[:, None], other=0)
        b_s, _ = score(tl.sum(b_q[:, None, :] * b_k, 2), scale, cap, slope, distance, SOFTCAP, ALIBI)
        b_s = tl.where(m_j, b_s, float("-inf"))
        b_new = tl.maximum(b_m, tl.max(b_s, 1))
        b_p = tl.exp2(b_s - b_new[:, None])
        b_shrink = tl.exp2(b_m - b_new)
        b_l = b_l * b_shrink + tl.sum(b_p, 1)
        b_acc = b_acc * b_shrink[:, None, None] + fold(b_p[:, :, None] * b_v, LANES)
        b_m = b_new

    b_sum = tl.sum(b_acc, 1)
    m_whole = m_row
    if HAS_SLOTS:
        m_split = slot >= 0
        m_whole = m_row & (slot < 0)
        i_part = copy_index(i_b, i_h, H, B_FROM_GRID, H_FROM_GRID).to(tl.int64) * n_slots + slot
        tl.store(part_ml + i_part * 2, b_m, mask=m_split)
        tl.store(part_ml + i_part * 2 + 1, b_l, mask=m_split)
        o_e = tl.arange(0, BLOCK_E)
        m_part = m_split[:, None] & (o_e < E)[None, :]
        tl.store(part_acc + (i_part * E)[:, None] + o_e[None, :], b_sum, mask=m_part)
    m_empty = b_l == 0.0
    b_l = tl.where(m_empty, 1.0, b_l)
    b_lse = tl.where(m_empty, float("-inf"), (b_m + tl.log2(b_l)) * LN2)
    tl.store(lse + b64 * stride_lb + h64 * stride_lh + row.to(tl.int64) * stride_ln, b_lse, mask=m_whole)
    o_out = b64 * stride_ob + h64 * stride_oh
    store_own(out, o_out, row, m_whole, stride_on, b_sum / b_l[:, None], E, BLOCK_E, SHARED)


@triton.jit(do_not_specialize=["n_items", "n_groups", "n_slots", "K", "q_offset", "padded_Q", "delta_offset"])
def rows_dq_kernel(
    q,  # (B, H, Q, D)
    k,  # (B, G, K, D)
    v,  # (B, G, K, E)
    dout,  # (B, H, Q, E)
    row_terms,  # (2, B, H, padded Q): lse in base 2, delta
    dq,  # (B, H, Q, D)
    lengths,  # (B,)
    slopes,  # (H,)
    part,  # (copies, slots, D)
    items,
    indices,
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
    n_groups,
    n_slots,
    H,
    K,
    q_offset,
    scale,
    cap,
    plain_scale,
    padded_Q,
    delta_offset,
    lead_heads,
    D: tl.constexpr,
    E: tl.constexpr,
    BLOCK_D: tl.constexpr,
    BLOCK_E: tl.constexpr,
    RP: tl.constexpr,
    C: tl.constexpr,
    LANES: tl.constexpr,
    GROUP: tl.constexpr,
    B_FROM_GRID: tl.constexpr,
    H_FROM_GRID: tl.constexpr,
    HAS_SLOTS: tl.constexpr,
    SOFTCAP: tl.constexpr,
    ALIBI: tl.constexpr,
    LENGTHS: tl.constexpr,
):
    """dQ of RP query rows, or a partial sum of it where a row is split."""
    SHARED: tl.constexpr = B_FROM_GRID and H_FROM_GRID
    i_b, i_h, row, begin, end, slot, _part, m_row = decode_rows(
        items, n_items, n_groups, H, lead_heads, RP, B_FROM_GRID, H_FROM_GRID
    )
    b64 = i_b.to(tl.int64)
    h64 = i_h.to(tl.int64)
    g64 = (i_h // GROUP).to(tl.int64)
    o_k = b64 * stride_kb + g64 * stride_kh
    o_v = b64 * stride_vb + g64 * stride_vh
    o_c = tl.arange(0, C)
    b_q = load_own(q, b64 * stride_qb + h64 * stride_qh, row, m_row, stride_qn, D, BLOCK_D, SHARED)
    b_dout = load_own(dout, b64 * stride_gb + h64 * stride_gh, row, m_row, stride_gn, E, BLOCK_E, SHARED)
    o_row = (b64 * H + h64) * padded_Q + row
    b_lse = tl.load(row_terms + o_row)[:, None]
    b_delta = tl.load(row_terms + delta_offset + o_row)[:, None]
    b_dq = tl.zeros([RP, LANES, BLOCK_D], tl.float32)
    slope = 0.0
    if ALIBI:
        slope = of_row(tl.load(slopes + i_h).to(tl.float32) * LOG2E, H_FROM_GRID)
    key_end = K
    if LENGTHS:
        key_end = tl.minimum(tl.load(lengths + i_b), K).to(tl.int32)
        key_end = of_row(key_end, B_FROM_GRID)
    position = row + q_offset

    o_j = begin[:, None] + o_c[None, :]
    j = tl.load(indices + o_j, mask=o_j < end[:, None], other=0)
    for _step in range(tl.cdiv(tl.max(end - begin, 0), C)):
        m_j = o_j < end[:, None]
        if LENGTHS:
            m_j = m_j & (j < key_end)
        b_k = gather(k, o_k, j, m_j, stride_kn, D, BLOCK_D, SHARED)
        b_v = gather(v, o_v, j, m_j, stride_vn, E, BLOCK_E, SHARED)
        distance = j - position[:, None]
        o_j += C
        j = tl.load(indices + o_j, mask=o_j < end[:, None], other=0)
        b_s, b_t = score(tl.sum(b_q[:, None, :] * b_k, 2), scale, cap, slope, distance, SOFTCAP, ALIBI)
        b_p = tl.where(m_j, tl.exp2(b_s - b_lse), 0.0)
        b_ds = b_p * (tl.sum(b_dout[:, None, :] * b_v, 2) - b_delta)
        if SOFTCAP:
            b_ds *= 1.0 - b_t * b_t
        b_dq += fold(b_ds[:, :, None] * b_k, LANES)

    b_sum = tl.sum(b_dq, 1) * plain_scale
    m_whole = m_row
    if HAS_SLOTS:
        m_whole = m_row & (slot < 0)
        i_part = copy_index(i_b, i_h, H, B_FROM_GRID, H_FROM_GRID).to(tl.int64) * n_slots + slot
        o_d = tl.arange(0, BLOCK_D)
        m_part = (slot >= 0)[:, None] & (o_d < D)[None, :]
        tl.store(part + (i_part * D)[:, None] + o_d[None, :], b_sum, mask=m_part)
    store_own(dq, b64 * stride_dqb + h64 * stride_dqh, row, m_whole, stride_dqn, b_sum, D, BLOCK_D, SHARED)


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
    slopes,  # (H,)
    part_dk,  # (copies, slots, D)
    part_dv,  # (copies, slots, E)
    items,
    indices,
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
    n_groups,
    n_slots,
    heads,
    K,
    q_offset,
    scale,
    cap,
    plain_scale,
    padded_Q,
    delta_offset,
    lead_heads,
    D: tl.constexpr,
    E: tl.constexpr,
    BLOCK_D: tl.constexpr,
    BLOCK_E: tl.constexpr,
    RP: tl.constexpr,
    C: tl.constexpr,
    LANES: tl.constexpr,
    GROUP: tl.constexpr,
    MEMBERS: tl.constexpr,
    B_FROM_GRID: tl.constexpr,
    H_FROM_GRID: tl.constexpr,
    HAS_SLOTS: tl.constexpr,
    SOFTCAP: tl.constexpr,
    ALIBI: tl.constexpr,
    LENGTHS: tl.constexpr,
):
    """dK and dV of RP key rows, or partial sums of them where a row is split.

    MEMBERS query heads of a key head are summed here: all GROUP of them where they share their lists, else one.
    """
    SHARED: tl.constexpr = B_FROM_GRID and H_FROM_GRID
    i_b, i_h, row, begin, end, slot, _part, m_row = decode_rows(
        items, n_items, n_groups, heads, lead_heads, RP, B_FROM_GRID, H_FROM_GRID
    )
    b64 = i_b.to(tl.int64)
    h64 = i_h.to(tl.int64)
    g64 = (i_h // (GROUP // MEMBERS)).to(tl.int64)
    o_c = tl.arange(0, C)
    b_k = load_own(k, b64 * stride_kb + g64 * stride_kh, row, m_row, stride_kn, D, BLOCK_D, SHARED)
    b_v = load_own(v, b64 * stride_vb + g64 * stride_vh, row, m_row, stride_vn, E, BLOCK_E, SHARED)
    b_dk = tl.zeros([RP, LANES, BLOCK_D], tl.float32)
    b_dv = tl.zeros([RP, LANES, BLOCK_E], tl.float32)
    last = end
    if LENGTHS:
        # Keys past the length have no gradient: nothing is visited for them.
        last = tl.where(row < tl.minimum(tl.load(lengths + i_b), K), end, begin)

    for member in range(MEMBERS):
        i_q = i_h * MEMBERS + member
        q64 = i_q.to(tl.int64)
        o_q = b64 * stride_qb + q64 * stride_qh
        o_dout = b64 * stride_gb + q64 * stride_gh
        o_terms = (b64 * (heads * MEMBERS) + q64) * padded_Q
        o_terms = of_row(o_terms, SHARED)
        slope = 0.0
        if ALIBI:
            slope = of_row(tl.load(slopes + i_q).to(tl.float32) * LOG2E, H_FROM_GRID)
        o_i = begin[:, None] + o_c[None, :]
        i = tl.load(indices + o_i, mask=o_i < last[:, None], other=0)
        for _step in range(tl.cdiv(tl.max(last - begin, 0), C)):
            m_i = o_i < last[:, None]
            b_q = gather(q, o_q, i, m_i, stride_qn, D, BLOCK_D, SHARED)
            b_dout = gather(dout, o_dout, i, m_i, stride_gn, E, BLOCK_E, SHARED)
            b_lse = tl.load(row_terms + o_terms + i)
            b_delta = tl.load(row_terms + delta_offset + o_terms + i)
            distance = row[:, None] - (i + q_offset)
            o_i += C
            i = tl.load(indices + o_i, mask=o_i < last[:, None], other=0)
            b_s, b_t = score(tl.sum(b_k[:, None, :] * b_q, 2), scale, cap, slope, distance, SOFTCAP, ALIBI)
            b_p = tl.where(m_i, tl.exp2(b_s - b_lse), 0.0)
            b_ds = b_p * (tl.sum(b_v[:, None, :] * b_dout, 2) - b_delta)
            if SOFTCAP:
                b_ds *= 1.0 - b_t * b_t
            b_dv += fold(b_p[:, :, None] * b_dout, LANES)
            b_dk += fold(b_ds[:, :, None] * b_q, LANES)

    b_sum_k = tl.sum(b_dk, 1) * plain_scale
    b_sum_v = tl.sum(b_dv, 1)
    m_whole = m_row
    if HAS_SLOTS:
        m_whole = m_row & (slot < 0)
        i_part = copy_index(i_b, i_h, heads, B_FROM_GRID, H_FROM_GRID).to(tl.int64) * n_slots + slot
        o_d = tl.arange(0, BLOCK_D)
        o_e = tl.arange(0, BLOCK_E)
        m_split = (slot >= 0)[:, None]
        tl.store(part_dk + (i_part * D)[:, None] + o_d[None, :], b_sum_k, mask=m_split & (o_d < D)[None, :])
        tl.store(part_dv + (i_part * E)[:, None] + o_e[None, :], b_sum_v, mask=m_split & (o_e < E)[None, :])
    store_own(dk, b64 * stride_dkb + h64 * stride_dkh, row, m_whole, stride_dkn, b_sum_k, D, BLOCK_D, SHARED)
    store_own(dv, b64 * stride_dvb + h64 * stride_dvh, row, m_whole, stride_dvn, b_sum_v, E, BLOCK_E, SHARED)
