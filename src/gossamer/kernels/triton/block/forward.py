"""The forward kernel: one program computes R query rows over their list of key tiles, C keys at a time."""

# ruff: noqa: SIM102  (an `if` on a constexpr is resolved while compiling, one on data is not: they stay apart)

from __future__ import annotations

import triton
import triton.language as tl

from gossamer.kernels.scores import score
from gossamer.kernels.softmax import add_scores, cleared, end_of_keys, head_slope, start_rows
from gossamer.kernels.triton.block.lists import MODES, decode, list_entry, list_range, next_entry, step_mask
from gossamer.kernels.triton.mask_modes import FULL, INTERVAL, row_bounds
from gossamer.kernels.triton.row_access import copy_index, load_rows, store_row_results, store_rows, stream_rows


@triton.jit(do_not_specialize=["n_items", "n_slots", "n_tiles", "Q", "K", "q_offset"])
def forward_kernel(
    q,  # (B, H, Q, D)
    k,  # (B, G, K, D); k and v are descriptors with TMA
    v,  # (B, G, K, E)
    out,  # (B, H, Q, E)
    lse,  # (B, H, Q)
    lengths,  # (B,)
    sinks,  # (H,)
    slopes,  # (H,) or (B, H)
    part_acc,  # (copies, slots, TILE_ROWS, E)
    part_ml,  # (copies, slots, 2, TILE_ROWS)
    items,
    full_starts, full_counts, full_indices,
    interval_starts, interval_counts, interval_indices,
    bits_starts, bits_counts, bits_indices,
    lo, hi, pool_index, pool,
    stride_qb, stride_qh, stride_qn, stride_kb, stride_kh, stride_kn, stride_vb, stride_vh, stride_vn,
    stride_ob, stride_oh, stride_on, stride_lb, stride_lh, stride_ln,
    n_items, n_slots, n_tiles, H, G, Q, K, q_offset, scale, cap, list_b, list_h, lead_heads,
    D: tl.constexpr, E: tl.constexpr, BLOCK_D: tl.constexpr, BLOCK_E: tl.constexpr, R: tl.constexpr, C: tl.constexpr,
    TILE_ROWS: tl.constexpr, TILE_COLUMNS: tl.constexpr, GROUP: tl.constexpr,
    B_FROM_GRID: tl.constexpr, H_FROM_GRID: tl.constexpr, HAS_ITEMS: tl.constexpr, HAS_SLOTS: tl.constexpr,
    HAS_FULL: tl.constexpr, HAS_INTERVAL: tl.constexpr, HAS_BITS: tl.constexpr, FULL_CONTIGUOUS: tl.constexpr,
    INTERVAL_CONTIGUOUS: tl.constexpr, BITS_CONTIGUOUS: tl.constexpr,
    FOLD: tl.constexpr, SOFTCAP: tl.constexpr, ALIBI: tl.constexpr, SINK: tl.constexpr, LENGTHS: tl.constexpr,
    PRECISION: tl.constexpr, TMA: tl.constexpr, CLEAR: tl.constexpr,
):  # fmt: skip
    """out and lse of R query rows, or their partial sums when the row is split.

    `list_b` and `list_h` are the strides, in lists, of a batch element and a head (0 where they share). CLEAR: there
    may be keys below the end that no query keeps, whose values may be NaN.
    """
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
    if not TMA:
        k += b64 * stride_kb + i_g.to(tl.int64) * stride_kh
        v += b64 * stride_vb + i_g.to(tl.int64) * stride_vh
    b_acc = tl.zeros([R, BLOCK_E], tl.float32)
    b_l, b_m = start_rows(sinks, i_h, begin == 0, R, SINK)
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
                b_k = stream_rows(k, i_b, i_g, column, K, stride_kn, C, D, BLOCK_D, mode != FULL, TMA)
                b_s = tl.dot(b_q, tl.trans(b_k), input_precision=PRECISION)
                if not FOLD:
                    distance = column + o_c[None, :] - o_position[:, None]
                    b_s, _ = score(b_s, scale, cap, slope, distance, SOFTCAP, ALIBI)
                if (mode != FULL) or LENGTHS:
                    b_s = tl.where(m_keep, b_s, float("-inf"))
                b_p, b_shrink, b_l, b_m = add_scores(b_s, b_l, b_m, scale, FOLD)
                b_acc = b_acc * b_shrink[:, None]
                b_v = stream_rows(
                    v, i_b, i_g, column, key_end, stride_vn, C, E, BLOCK_E, (mode != FULL) or LENGTHS, TMA
                )
                if (CLEAR and (mode != FULL)) or (LENGTHS and TMA):
                    b_v = cleared(b_v, m_keep)
                b_acc = tl.dot(b_p.to(b_v.dtype), b_v, b_acc, input_precision=PRECISION)
                ahead = (step + 1) // STEPS
                tile, entry = next_entry(tile, entry, indices, pool_index, start, ahead, last, mode, contiguous)

    if HAS_SLOTS:
        if slot >= 0:
            i_part = copy_index(i_b, i_h, H, B_FROM_GRID, H_FROM_GRID).to(tl.int64) * n_slots + slot
            o_ml = part_ml + i_part * (2 * TILE_ROWS) + sub * R + tl.arange(0, R)
            tl.store(o_ml, b_m)
            tl.store(o_ml + TILE_ROWS, b_l)
            part_acc += i_part * (TILE_ROWS * E)
            store_rows(part_acc, b_acc, sub * R, TILE_ROWS, E, R, E, BLOCK_E)
            return
    store_row_results(
        out, lse, b_acc, b_l, b_m, b64, h64, Q, row_start, stride_ob, stride_oh, stride_on,
        stride_lb, stride_lh, stride_ln, R, E, BLOCK_E,
    )  # fmt: skip
