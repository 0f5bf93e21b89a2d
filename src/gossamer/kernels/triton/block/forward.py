"""The forward kernel: one program computes R query rows over their list of key tiles, C keys at a time."""

# ruff: noqa: SIM102  (an `if` on a constexpr is resolved while compiling, one on data is not: they stay apart)

from __future__ import annotations

import triton
import triton.language as tl

from gossamer.kernels.scores import score
from gossamer.kernels.softmax import add_scores, cleared, end_of_keys, head_slope, start_rows
from gossamer.kernels.triton.block.lists import decode, walk
from gossamer.kernels.triton.block.parameters import Heads, Lists, Numbers
from gossamer.kernels.triton.groups import ForwardResults, ForwardStrides, ForwardTerms
from gossamer.kernels.triton.mask_modes import FULL
from gossamer.kernels.triton.row_access import load_rows, slot_of, store_part_rows, store_row_results, stream_rows


@triton.jit(do_not_specialize=["numbers"])
def forward_kernel(
    q,  # (B, H, Q, D)
    k,  # (B, G, K, D); k and v are descriptors with TMA
    v,  # (B, G, K, E)
    results: ForwardResults,
    terms: ForwardTerms,
    lists: Lists,
    strides: ForwardStrides,
    numbers: Numbers,
    heads: Heads,
    FORM: tl.constexpr,
):
    """out and lse of R query rows, or their partial sums when the row is split."""
    R: tl.constexpr = FORM.R
    TILE_ROWS: tl.constexpr = FORM.TILE_ROWS
    MEMBERS: tl.constexpr = FORM.GROUP if FORM.H_FROM_GRID else 1
    part = decode(lists.items, numbers, heads.G, heads.lead_heads, MEMBERS, FORM)
    b64 = part.b.to(tl.int64)
    h64 = part.h.to(tl.int64)
    i_g = part.h // FORM.GROUP
    row_start = part.tile_row * TILE_ROWS + part.sub * R
    if TILE_ROWS > R:
        if row_start >= numbers.Q:
            return
    i_list = part.b * heads.list_b + part.h * heads.list_h
    i_row = i_list * numbers.n_tiles + part.tile_row
    o_r = row_start + tl.arange(0, R)

    q_head = q + b64 * strides.at_q.b + h64 * strides.at_q.h
    b_q = load_rows(q_head, row_start, numbers.Q, strides.at_q.n, R, FORM.D, FORM.BLOCK_D, True)
    if not FORM.TMA:
        k += b64 * strides.at_k.b + i_g.to(tl.int64) * strides.at_k.h
        v += b64 * strides.at_v.b + i_g.to(tl.int64) * strides.at_v.h
    b_acc = tl.zeros([R, FORM.BLOCK_E], tl.float32)
    b_l, b_m = start_rows(terms.sinks, part.h, part.begin == 0, R, FORM.SINK)
    slope = head_slope(terms.slopes, part.b, part.h, heads.H, FORM.ALIBI)
    key_end = end_of_keys(terms.lengths, part.b, numbers.K, FORM.LENGTHS)
    o_position = o_r + numbers.q_offset
    o_c = tl.arange(0, FORM.C)
    given = (b_q, k, v, part.b, i_g, strides.at_k.n, strides.at_v.n, slope, key_end, o_position, o_c, numbers)
    b_acc, b_l, b_m = walk(
        add_keys, (b_acc, b_l, b_m), given, lists, i_list, i_row, part, numbers.Q, o_r, key_end,
        FORM.LENGTHS, FORM,
    )  # fmt: skip

    if FORM.HAS_SLOTS:
        if part.slot >= 0:
            i_part = slot_of(part.b, part.h, heads.H, numbers.n_slots, part.slot, FORM)
            o_ml = results.part_ml + i_part * (2 * TILE_ROWS) + part.sub * R + tl.arange(0, R)
            tl.store(o_ml, b_m)
            tl.store(o_ml + TILE_ROWS, b_l)
            store_part_rows(results.part_acc, i_part, b_acc, part.sub * R, TILE_ROWS, R, FORM.E, FORM.BLOCK_E)
            return
    store_row_results(results, strides, b_acc, b_l, b_m, b64, h64, numbers.Q, row_start, R, FORM.E, FORM.BLOCK_E)


@triton.jit
def add_keys(sums, given, column, m_keep, MODE: tl.constexpr, FORM: tl.constexpr):
    """(acc, l, m) after C keys from `column` on."""
    b_acc, b_l, b_m = sums
    b_q, k, v, i_b, i_g, stride_k, stride_v, slope, key_end, o_position, o_c, numbers = given
    SOME: tl.constexpr = (MODE != FULL) or FORM.LENGTHS
    b_k = stream_rows(k, i_b, i_g, column, numbers.K, stride_k, FORM.C, FORM.D, FORM.BLOCK_D, MODE != FULL, FORM.TMA)
    b_s = tl.dot(b_q, tl.trans(b_k), input_precision=FORM.PRECISION)
    if not FORM.FOLD:
        distance = column + o_c[None, :] - o_position[:, None]
        b_s, _ = score(b_s, numbers.scale, numbers.cap, slope, distance, FORM.SOFTCAP, FORM.ALIBI)
    if SOME:
        b_s = tl.where(m_keep, b_s, float("-inf"))
    b_p, b_shrink, b_l, b_m = add_scores(b_s, b_l, b_m, numbers.scale, FORM.FOLD)
    b_acc = b_acc * b_shrink[:, None]
    b_v = stream_rows(v, i_b, i_g, column, key_end, stride_v, FORM.C, FORM.E, FORM.BLOCK_E, SOME, FORM.TMA)
    if (FORM.CLEAR and (MODE != FULL)) or (FORM.LENGTHS and FORM.TMA):
        b_v = cleared(b_v, m_keep)
    b_acc = tl.dot(b_p.to(b_v.dtype), b_v, b_acc, input_precision=FORM.PRECISION)
    return b_acc, b_l, b_m
