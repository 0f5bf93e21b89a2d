"""dQ = scale * dS k, by the rows of a layout: one program computes R query rows over their list of key tiles."""

# ruff: noqa: SIM102  (an `if` on a constexpr is resolved while compiling, one on data is not: they stay apart)

from __future__ import annotations

import triton
import triton.language as tl

from gossamer.kernels.softmax import cleared, end_of_keys, head_slope, probability, score_gradient
from gossamer.kernels.triton.block.lists import MODES, decode, list_entry, list_range, next_entry, step_mask
from gossamer.kernels.triton.mask_modes import FULL, INTERVAL, row_bounds
from gossamer.kernels.triton.row_access import copy_index, load_rows, store_rows, stream_rows


@triton.jit(do_not_specialize=["n_items", "n_slots", "n_tiles", "Q", "K", "q_offset"])
def dq_kernel(
    q,  # (B, H, Q, D)
    k,  # (B, G, K, D); k and v are descriptors with TMA
    v,  # (B, G, K, E)
    dout,  # (B, H, Q, E)
    row_terms,  # (2, B, H, padded Q): lse in base 2, delta
    dq,  # (B, H, Q, D)
    lengths,  # (B,)
    slopes,  # (H,) or (B, H)
    part,  # (copies, slots, TILE_ROWS, D)
    items,
    full_starts, full_counts, full_indices,
    interval_starts, interval_counts, interval_indices,
    bits_starts, bits_counts, bits_indices,
    lo, hi, pool_index, pool,
    stride_qb, stride_qh, stride_qn, stride_kb, stride_kh, stride_kn, stride_vb, stride_vh, stride_vn,
    stride_gb, stride_gh, stride_gn, stride_dqb, stride_dqh, stride_dqn,
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
    """dQ of R query rows, or a partial sum of it when the row is split; CLEAR as in the forward."""
    SUB: tl.constexpr = TILE_ROWS // R
    MEMBERS: tl.constexpr = GROUP if H_FROM_GRID else 1
    STEPS: tl.constexpr = TILE_COLUMNS // C
    i_b, i_h, tile_row, sub, begin, end, slot = decode(
        items, n_items, n_tiles, G, lead_heads, SUB, MEMBERS, B_FROM_GRID, H_FROM_GRID, HAS_ITEMS
    )
    b64 = i_b.to(tl.int64)
    h64 = i_h.to(tl.int64)
    i_g = i_h // GROUP
    row_start = tile_row * TILE_ROWS + sub * R
    if SUB > 1:
        if row_start >= Q:
            return
    i_list = i_b * list_b + i_h * list_h
    i_row = i_list * n_tiles + tile_row
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
    slope = head_slope(slopes, i_b, i_h, H, ALIBI)
    key_end = end_of_keys(lengths, i_b, K, LENGTHS)
    o_position = o_r + q_offset

    lists = (
        (full_starts, full_counts, full_indices, HAS_FULL, FULL_CONTIGUOUS),
        (interval_starts, interval_counts, interval_indices, HAS_INTERVAL, INTERVAL_CONTIGUOUS),
        (bits_starts, bits_counts, bits_indices, HAS_BITS, BITS_CONTIGUOUS),
    )
    o_c = tl.arange(0, C)
    before = begin * 0
    b_lo = o_r
    b_hi = o_r
    for mode in tl.static_range(MODES):
        starts, counts, indices, has, contiguous = lists[mode]
        if has:
            start, first, last, before = list_range(starts, counts, i_row, begin, end, before)
            if mode == INTERVAL:
                b_lo, b_hi = row_bounds(lo, hi, i_list, Q, o_r)
            tile, entry = list_entry(indices, pool_index, start, first, last, mode)
            origin = (tile - first) * TILE_COLUMNS
            for step in range(first * STEPS, last * STEPS):
                column = origin + step * C if contiguous else tile * TILE_COLUMNS + (step % STEPS) * C
                m_keep = step_mask(
                    pool, entry, sub, step % STEPS, column, b_lo, b_hi, key_end, mode, LENGTHS, R, C, TILE_ROWS,
                    TILE_COLUMNS,
                )  # fmt: skip
                b_k = stream_rows(
                    k, i_b, i_g, column, key_end, stride_kn, C, D, BLOCK_D, (mode != FULL) or LENGTHS, TMA
                )
                if (CLEAR and (mode != FULL)) or (LENGTHS and TMA):
                    b_k = cleared(b_k, m_keep)
                b_v = stream_rows(v, i_b, i_g, column, K, stride_vn, C, E, BLOCK_E, mode != FULL, TMA)
                b_s = tl.dot(b_q, tl.trans(b_k), input_precision=PRECISION)
                b_dp = tl.dot(b_dout, tl.trans(b_v), input_precision=PRECISION)
                distance = column + o_c[None, :] - o_position[:, None]
                b_p, b_t = probability(
                    b_s, b_lse[:, None], scale, cap, slope, distance, m_keep, False, FOLD, SOFTCAP, ALIBI
                )
                b_ds = score_gradient(b_p, b_dp, b_delta[:, None], b_t, SOFTCAP)
                if (mode != FULL) or LENGTHS:
                    b_ds = tl.where(m_keep, b_ds, 0.0)  # not P: dP of a pair that is not kept may be NaN
                b_dq = tl.dot(b_ds.to(b_k.dtype), b_k, b_dq, input_precision=PRECISION)
                ahead = (step + 1) // STEPS
                tile, entry = next_entry(tile, entry, indices, pool_index, start, ahead, last, mode, contiguous)

    b_dq *= plain_scale
    if HAS_SLOTS:
        if slot >= 0:
            i_part = copy_index(i_b, i_h, H, B_FROM_GRID, H_FROM_GRID).to(tl.int64) * n_slots + slot
            store_rows(part + i_part * (TILE_ROWS * D), b_dq, sub * R, TILE_ROWS, D, R, D, BLOCK_D)
            return
    store_rows(dq + b64 * stride_dqb + h64 * stride_dqh, b_dq, row_start, Q, stride_dqn, R, D, BLOCK_D)
