"""The forward kernel: one program computes R query rows over their list of key tiles, C keys at a time."""

# ruff: noqa: SIM102  (an `if` on a constexpr is resolved while compiling, one on data is not: they stay apart)

from __future__ import annotations

import triton
import triton.language as tl

from gossamer.kernels.scores import FLOOR, LN2, LOG2E, score
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


@triton.jit
def forward_loop(
    b_acc,  # [R, E] sum of p v
    b_l,  # [R] sum of p
    b_m,  # [R] running maximum of the scores
    b_q,
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
    """Tiles [first, last) of one list of a tile row, TILE_COLUMNS // C steps each."""
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
        if MODE == BITS:
            words = pool + entry.to(tl.int64) * (TILE_ROWS * WORDS) + sub * (R * WORDS) + (step % STEPS) * (C // 32)
            m_keep = bits_mask(words, o_c, WORDS, R, C)
        if MODE == INTERVAL:
            m_keep = interval_mask(b_lo, b_hi, column, o_c)
        if LENGTHS:
            m_length = (column + o_c < key_end)[None, :]
            m_keep = m_length if MODE == FULL else m_keep & m_length
        b_k = stream_rows(k, i_b, i_g, column, K, stride_kn, C, D, BLOCK_D, MODE != FULL, TMA)
        b_s = tl.dot(b_q, tl.trans(b_k), input_precision=PRECISION)
        if FOLD:
            if (MODE != FULL) or LENGTHS:
                b_s = tl.where(m_keep, b_s, float("-inf"))
            b_new = tl.maximum(b_m, tl.max(b_s, 1) * scale)
            b_p = tl.exp2(b_s * scale - b_new[:, None])
        else:
            b_s, _ = score(b_s, scale, cap, slope, column + o_c[None, :] - o_position[:, None], SOFTCAP, ALIBI)
            if (MODE != FULL) or LENGTHS:
                b_s = tl.where(m_keep, b_s, float("-inf"))
            b_new = tl.maximum(b_m, tl.max(b_s, 1))
            b_p = tl.exp2(b_s - b_new[:, None])
        b_shrink = tl.exp2(b_m - b_new)
        b_l = b_l * b_shrink + tl.sum(b_p, 1)
        b_acc = b_acc * b_shrink[:, None]
        b_v = stream_rows(v, i_b, i_g, column, K, stride_vn, C, E, BLOCK_E, MODE != FULL, TMA)
        b_acc = tl.dot(b_p.to(b_v.dtype), b_v, b_acc, input_precision=PRECISION)
        b_m = b_new
        # The list entries of the next step are loaded a step ahead, so that the loads of keys do not wait for them.
        if (not CONTIGUOUS) or (MODE == BITS):
            ahead = (step + 1) // STEPS
            if not CONTIGUOUS:
                tile = tl.load(indices + start + ahead, mask=ahead < last, other=0)
            if MODE == BITS:
                entry = tl.load(pool_index + start + ahead, mask=ahead < last, other=0)
    return b_acc, b_l, b_m


@triton.jit(do_not_specialize=["n_items", "n_slots", "n_tiles", "Q", "K", "q_offset"])
def forward_kernel(
    q,  # (B, H, Q, D)
    k,  # (B, G, K, D); k and v are descriptors with TMA
    v,  # (B, G, K, E)
    out,  # (B, H, Q, E)
    lse,  # (B, H, Q)
    lengths,  # (B,)
    sinks,  # (H,)
    slopes,  # (H,)
    part_acc,  # (copies, slots, TILE_ROWS, E)
    part_ml,  # (copies, slots, 2, TILE_ROWS)
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
    stride_ob,
    stride_oh,
    stride_on,
    stride_lb,
    stride_lh,
    stride_ln,
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
    SINK: tl.constexpr,
    LENGTHS: tl.constexpr,
    PRECISION: tl.constexpr,
    TMA: tl.constexpr,
):
    """out and lse of R query rows, or their partial sums when the row is split.

    `list_b` and `list_h` are the strides, in lists, of a batch element and a head (0 where they share).
    """
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
    if not TMA:
        k += b64 * stride_kb + i_g.to(tl.int64) * stride_kh
        v += b64 * stride_vb + i_g.to(tl.int64) * stride_vh
    b_acc = tl.zeros([R, BLOCK_E], tl.float32)
    b_l = tl.zeros([R], tl.float32)
    b_m = tl.full([R], FLOOR, tl.float32)
    if SINK:
        # The sink joins once: in the first part of a split row.
        sink = tl.load(sinks + i_h).to(tl.float32) * LOG2E
        b_m = tl.maximum(b_m, sink)
        b_l = tl.where((sink > FLOOR) & (begin == 0), b_l + 1.0, b_l)
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
        b_acc, b_l, b_m = forward_loop(
            b_acc, b_l, b_m, b_q, k, v, i_b, i_g, stride_kn, stride_vn, K, key_end, start, first, last, full_indices,
            pool_index, pool, sub, o_r, o_r, o_position, scale, cap, slope,
            D, E, BLOCK_D, BLOCK_E, R, C, TILE_ROWS, TILE_COLUMNS, FULL, FULL_CONTIGUOUS,
            FOLD, SOFTCAP, ALIBI, LENGTHS, PRECISION, TMA,
        )  # fmt: skip
    if HAS_INTERVAL:
        start, first, last, before = list_range(interval_starts, interval_counts, i_row, begin, end, before)
        o_rows = i_list.to(tl.int64) * Q + o_r
        b_lo = tl.load(lo + o_rows, mask=o_r < Q, other=0)
        b_hi = tl.maximum(tl.load(hi + o_rows, mask=o_r < Q, other=0), b_lo)
        b_acc, b_l, b_m = forward_loop(
            b_acc, b_l, b_m, b_q, k, v, i_b, i_g, stride_kn, stride_vn, K, key_end, start, first, last,
            interval_indices, pool_index, pool, sub, b_lo, b_hi, o_position, scale, cap, slope,
            D, E, BLOCK_D, BLOCK_E, R, C, TILE_ROWS, TILE_COLUMNS, INTERVAL, INTERVAL_CONTIGUOUS,
            FOLD, SOFTCAP, ALIBI, LENGTHS, PRECISION, TMA,
        )  # fmt: skip
    if HAS_BITS:
        start, first, last, before = list_range(bits_starts, bits_counts, i_row, begin, end, before)
        b_acc, b_l, b_m = forward_loop(
            b_acc, b_l, b_m, b_q, k, v, i_b, i_g, stride_kn, stride_vn, K, key_end, start, first, last, bits_indices,
            pool_index, pool, sub, o_r, o_r, o_position, scale, cap, slope,
            D, E, BLOCK_D, BLOCK_E, R, C, TILE_ROWS, TILE_COLUMNS, BITS, BITS_CONTIGUOUS,
            FOLD, SOFTCAP, ALIBI, LENGTHS, PRECISION, TMA,
        )  # fmt: skip

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


@triton.jit
def store_row_results(
    out, lse, b_acc, b_l, b_m, b64, h64, Q, row_start, stride_ob, stride_oh, stride_on, stride_lb, stride_lh, stride_ln,
    R: tl.constexpr, E: tl.constexpr, BLOCK_E: tl.constexpr,
):  # fmt: skip
    """out = acc / l and lse = m + log l; a row that kept nothing gives 0 and -inf."""
    m_empty = b_l == 0.0
    b_l = tl.where(m_empty, 1.0, b_l)
    b_lse = tl.where(m_empty, float("-inf"), (b_m + tl.log2(b_l)) * LN2)
    o_r = row_start + tl.arange(0, R)
    lse += b64 * stride_lb + h64 * stride_lh
    tl.store(lse + o_r.to(tl.int64) * stride_ln, b_lse, mask=o_r < Q)
    store_rows(out + b64 * stride_ob + h64 * stride_oh, b_acc / b_l[:, None], row_start, Q, stride_on, R, E, BLOCK_E)


@triton.jit(do_not_specialize=["n_merges", "n_slots", "Q"])
def merge_kernel(
    out,  # (B, H, Q, E)
    lse,  # (B, H, Q)
    part_acc,  # (copies, slots, TILE_ROWS, E)
    part_ml,  # (copies, slots, 2, TILE_ROWS)
    merges,
    stride_ob,
    stride_oh,
    stride_on,
    stride_lb,
    stride_lh,
    stride_ln,
    n_merges,
    n_slots,
    H,
    Q,
    lead_heads,
    E: tl.constexpr,
    BLOCK_E: tl.constexpr,
    R: tl.constexpr,
    TILE_ROWS: tl.constexpr,
    B_FROM_GRID: tl.constexpr,
    H_FROM_GRID: tl.constexpr,
):
    """Rows whose list was split: their parts joined by log-sum-exp, in slot order."""
    i_b, i_h, tile, sub, first, count = decode_merge(
        merges, n_merges, H, lead_heads, TILE_ROWS // R, B_FROM_GRID, H_FROM_GRID
    )
    row_start = tile * TILE_ROWS + sub * R
    if row_start >= Q:
        return
    o_r = sub * R + tl.arange(0, R)
    base = copy_index(i_b, i_h, H, B_FROM_GRID, H_FROM_GRID).to(tl.int64) * n_slots + first
    b_acc = tl.zeros([R, BLOCK_E], tl.float32)
    b_l = tl.zeros([R], tl.float32)
    b_m = tl.full([R], FLOOR, tl.float32)
    for i_part in range(count):
        slot = base + i_part
        o_ml = part_ml + slot * (2 * TILE_ROWS) + o_r
        b_part = tl.load(o_ml)
        b_new = tl.maximum(b_m, b_part)
        b_shrink = tl.exp2(b_m - b_new)
        b_weight = tl.exp2(b_part - b_new)
        b_l = b_l * b_shrink + tl.load(o_ml + TILE_ROWS) * b_weight
        b_block = load_rows(part_acc + slot * (TILE_ROWS * E), sub * R, TILE_ROWS, E, R, E, BLOCK_E, True)
        b_acc = b_acc * b_shrink[:, None] + b_block * b_weight[:, None]
        b_m = b_new
    b64 = i_b.to(tl.int64)
    h64 = i_h.to(tl.int64)
    store_row_results(
        out, lse, b_acc, b_l, b_m, b64, h64, Q, row_start, stride_ob, stride_oh, stride_on,
        stride_lb, stride_lh, stride_ln, R, E, BLOCK_E,
    )  # fmt: skip


@triton.jit
def decode_merge(
    merges, n_merges, heads, lead_heads, SUB: tl.constexpr, B_FROM_GRID: tl.constexpr, H_FROM_GRID: tl.constexpr
):
    """What this program merges: (b, h, tile row, part of the tile row, first slot, number of slots)."""
    pid = tl.program_id(0)
    sub = pid % SUB
    pid = pid // SUB
    merge = merges + (pid % n_merges) * 4
    copy = pid // n_merges
    lead = tl.load(merge)
    tile = tl.load(merge + 1)
    first = tl.load(merge + 2)
    count = tl.load(merge + 3)
    b = lead // lead_heads
    h = lead % lead_heads
    if H_FROM_GRID:
        h = copy % heads
        copy = copy // heads
    if B_FROM_GRID:
        b = copy
    return b, h, tile, sub, first, count
