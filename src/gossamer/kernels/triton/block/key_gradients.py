"""dV = P^T dout and dK = scale * dS^T q, by the columns of a layout: a program has R key rows, and walks queries."""

# ruff: noqa: SIM102  (an `if` on a constexpr is resolved while compiling, one on data is not: they stay apart)

from __future__ import annotations

import triton
import triton.language as tl

from gossamer.kernels.softmax import cleared, end_of_keys, head_slope, probability, score_gradient
from gossamer.kernels.triton.block.lists import MODES, decode, list_entry, list_range, next_entry, step_mask
from gossamer.kernels.triton.mask_modes import FULL, INTERVAL, row_bounds
from gossamer.kernels.triton.row_access import copy_index, load_rows, store_rows, stream_rows


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
    slopes,  # (H,) or (B, H)
    part_dk,  # (copies, slots, TILE_ROWS, D)
    part_dv,  # (copies, slots, TILE_ROWS, E)
    items,
    full_starts, full_counts, full_indices,
    interval_starts, interval_counts, interval_indices,
    bits_starts, bits_counts, bits_indices,
    lo, hi, pool_index, pool,
    stride_qb, stride_qh, stride_qn, stride_kb, stride_kh, stride_kn, stride_vb, stride_vh, stride_vn,
    stride_gb, stride_gh, stride_gn, stride_dkb, stride_dkh, stride_dkn, stride_dvb, stride_dvh, stride_dvn,
    n_items, n_slots, n_tiles, H, G, Q, K, q_offset, scale, cap, plain_scale, padded_Q, delta_offset, list_b, list_h,
    lead_heads,
    D: tl.constexpr, E: tl.constexpr, BLOCK_D: tl.constexpr, BLOCK_E: tl.constexpr, R: tl.constexpr, C: tl.constexpr,
    TILE_ROWS: tl.constexpr, TILE_COLUMNS: tl.constexpr, GROUP: tl.constexpr,
    B_FROM_GRID: tl.constexpr, H_FROM_GRID: tl.constexpr, HAS_ITEMS: tl.constexpr, HAS_SLOTS: tl.constexpr,
    HAS_FULL: tl.constexpr, HAS_INTERVAL: tl.constexpr, HAS_BITS: tl.constexpr, FULL_CONTIGUOUS: tl.constexpr,
    INTERVAL_CONTIGUOUS: tl.constexpr, BITS_CONTIGUOUS: tl.constexpr,
    FOLD: tl.constexpr, SOFTCAP: tl.constexpr, ALIBI: tl.constexpr, LENGTHS: tl.constexpr, PRECISION: tl.constexpr,
    TMA: tl.constexpr, CLEAR: tl.constexpr,
):  # fmt: skip
    """dK and dV of R key rows, summed over the query heads of the key head, or partial sums when the row is split.

    The walk is the transpose of the layout: its rows are keys, its columns queries. CLEAR: there may be queries that
    keep nothing, or keys that no query keeps, which may be NaN, as their rows of dout may.
    """
    SUB: tl.constexpr = TILE_ROWS // R
    STEPS: tl.constexpr = TILE_COLUMNS // C
    i_b, i_g, tile_row, sub, begin, end, slot = decode(
        items, n_items, n_tiles, G, lead_heads, SUB, 1, B_FROM_GRID, H_FROM_GRID, HAS_ITEMS
    )
    b64 = i_b.to(tl.int64)
    g64 = i_g.to(tl.int64)
    row_start = tile_row * TILE_ROWS + sub * R
    if SUB > 1:
        if row_start >= K:
            return
    o_r = row_start + tl.arange(0, R)

    b_k = load_rows(k + b64 * stride_kb + g64 * stride_kh, row_start, K, stride_kn, R, D, BLOCK_D, True)
    b_v = load_rows(v + b64 * stride_vb + g64 * stride_vh, row_start, K, stride_vn, R, E, BLOCK_E, True)
    o_c = tl.arange(0, C)
    b_dk = tl.zeros([R, BLOCK_D], tl.float32)
    b_dv = tl.zeros([R, BLOCK_E], tl.float32)
    if LENGTHS:
        # Keys past the length have no gradient: no tile is visited when the whole program lies there.
        key_end = end_of_keys(lengths, i_b, K, LENGTHS)
        end = tl.where(row_start < key_end, end, begin)

    lists = (
        (full_starts, full_counts, full_indices, HAS_FULL, FULL_CONTIGUOUS),
        (interval_starts, interval_counts, interval_indices, HAS_INTERVAL, INTERVAL_CONTIGUOUS),
        (bits_starts, bits_counts, bits_indices, HAS_BITS, BITS_CONTIGUOUS),
    )
    for member in range(GROUP):
        i_h = i_g * GROUP + member
        h64 = i_h.to(tl.int64)
        i_list = i_b * list_b + i_h * list_h
        i_row = i_list * n_tiles + tile_row
        q_head = q
        dout_head = dout
        if not TMA:
            q_head = q + b64 * stride_qb + h64 * stride_qh
            dout_head = dout + b64 * stride_gb + h64 * stride_gh
        lse_head = row_terms + (b64 * H + h64) * padded_Q
        delta_head = lse_head + delta_offset
        slope = head_slope(slopes, i_b, i_h, H, ALIBI)
        before = begin * 0
        b_lo = o_r
        b_hi = o_r
        for mode in tl.static_range(MODES):
            starts, counts, indices, has, contiguous = lists[mode]
            if has:
                start, first, last, before = list_range(starts, counts, i_row, begin, end, before)
                if mode == INTERVAL:
                    b_lo, b_hi = row_bounds(lo, hi, i_list, K, o_r)
                tile, entry = list_entry(indices, pool_index, start, first, last, mode)
                origin = (tile - first) * TILE_COLUMNS
                for step in range(first * STEPS, last * STEPS):
                    column = origin + step * C if contiguous else tile * TILE_COLUMNS + (step % STEPS) * C
                    m_keep = step_mask(
                        pool, entry, sub, step % STEPS, column, b_lo, b_hi, 0, mode, False, R, C, TILE_ROWS,
                        TILE_COLUMNS,
                    )  # fmt: skip
                    o_q = column + o_c
                    # No mask: these rows are padded to whole tiles, and the loads stay wide.
                    b_lse = tl.load(lse_head + o_q)
                    b_delta = tl.load(delta_head + o_q)
                    m_read = m_keep
                    if LENGTHS and (mode != FULL):
                        m_read = m_keep & (o_r < key_end)[:, None]
                    b_q = stream_rows(q_head, i_b, i_h, column, Q, stride_qn, C, D, BLOCK_D, mode != FULL, TMA)
                    if CLEAR and (mode != FULL):
                        b_q = cleared(b_q, m_read)
                    b_s = tl.dot(b_k, tl.trans(b_q), input_precision=PRECISION)
                    b_dout = stream_rows(dout_head, i_b, i_h, column, Q, stride_gn, C, E, BLOCK_E, mode != FULL, TMA)
                    if CLEAR and (mode != FULL):
                        b_dout = cleared(b_dout, m_read)
                    b_dp = tl.dot(b_v, tl.trans(b_dout), input_precision=PRECISION)
                    distance = o_r[:, None] - (o_q + q_offset)[None, :]
                    b_p, b_t = probability(
                        b_s, b_lse[None, :], scale, cap, slope, distance, m_keep, mode != FULL, FOLD, SOFTCAP, ALIBI
                    )
                    b_dv = tl.dot(b_p.to(b_dout.dtype), b_dout, b_dv, input_precision=PRECISION)
                    b_ds = score_gradient(b_p, b_dp, b_delta[None, :], b_t, SOFTCAP)
                    if CLEAR and (mode != FULL):
                        b_ds = tl.where(m_keep, b_ds, 0.0)  # dP of a key that no query keeps may be NaN
                    b_dk = tl.dot(b_ds.to(b_q.dtype), b_q, b_dk, input_precision=PRECISION)
                    ahead = (step + 1) // STEPS
                    tile, entry = next_entry(tile, entry, indices, pool_index, start, ahead, last, mode, contiguous)

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
