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
from gossamer.kernels.triton.gather.parameters import BackwardNumbers, ForwardNumbers, Shares, TileLists
from gossamer.kernels.triton.groups import (
    BackwardTerms,
    ForwardResults,
    ForwardStrides,
    ForwardTerms,
    KeyResults,
    KeyStrides,
    QueryResults,
    QueryStrides,
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
    load_rows,
    slot_of,
    store_part_rows,
    store_row_results,
    store_rows,
)


@triton.jit
def decode_tile(lists, numbers, key_heads, lead_heads, MEMBERS: tl.constexpr, FORM: tl.constexpr):
    """What this program computes: (b, h, tile row, begin, end, slot, part), in the order of `block.lists.decode`."""
    pid = tl.program_id(0)
    member = pid % MEMBERS
    pid = pid // MEMBERS
    item = lists.items + (pid % numbers.n_items) * ITEM
    copy = pid // numbers.n_items
    lead = tl.load(item + LEAD)
    tile = tl.load(item + TILE)
    begin = tl.load(item + BEGIN)
    end = tl.load(item + END)
    slot = tl.load(item + SLOT)
    part = tl.load(item + PART)
    b, h = batch_and_head(lead, copy, key_heads, lead_heads, FORM.B_FROM_GRID, FORM.H_FROM_GRID)
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
def walk(load: tl.constexpr, add: tl.constexpr, sums, given, lists, begin, end, FORM: tl.constexpr):
    """Sums over the chunks [begin, end) of gathered columns: `sums` as `add` leaves them after the last.

    Args:
        load: (given, j, keep, FORM) -> what a step reads of the columns j [C], and the pairs [R, C] that it keeps.
        add: (sums, given, loaded, keep, FORM) -> sums, of one step.
    """
    R: tl.constexpr = FORM.R
    C: tl.constexpr = FORM.C
    j = listed(lists.indices, begin, end, C)
    for chunk in range(begin, end):
        # The words of a chunk are [C // 32, R].
        words = lists.bits + (tl.full([R], 0, tl.int64) + chunk) * (C // 32 * R) + tl.arange(0, R)
        loaded, m_keep = load(given, j, bits_mask(words, tl.arange(0, C), R, C), FORM)
        # The next columns are loaded a step ahead, so that the loads of their rows do not wait for them.
        j = listed(lists.indices, chunk + 1, end, C)
        sums = add(sums, given, loaded, m_keep, FORM)
    return sums


@triton.jit
def load_keys(given, j, m_keep, FORM: tl.constexpr):
    """(k, v, distances) of keys j, of which those past the length are not kept."""
    k, v, stride_k, stride_v, key_end, position = given[:6]
    if FORM.LENGTHS:
        m_keep = m_keep & (j < key_end)[None, :]
        j = tl.where(j < key_end, j, -1)
    b_k = gathered(k, j, stride_k, FORM.C, FORM.D, FORM.BLOCK_D)
    b_v = gathered(v, j, stride_v, FORM.C, FORM.E, FORM.BLOCK_E)
    return (b_k, b_v, j[None, :] - position[:, None]), m_keep


@triton.jit(do_not_specialize=["numbers"])
def tiles_forward_kernel(
    q,  # (B, H, Q, D)
    k,  # (B, G, K, D)
    v,  # (B, G, K, E)
    terms: ForwardTerms,
    results: ForwardResults,
    lists: TileLists,
    strides: ForwardStrides,
    numbers: ForwardNumbers,
    shares: Shares,
    FORM: tl.constexpr,
):
    """out and lse of R query rows, or their partial sums when the tile row is split."""
    R: tl.constexpr = FORM.R
    MEMBERS: tl.constexpr = FORM.GROUP if FORM.H_FROM_GRID else 1
    i_b, i_h, tile, begin, end, slot, part = decode_tile(lists, numbers, shares.G, shares.lead_heads, MEMBERS, FORM)
    b64 = i_b.to(tl.int64)
    h64 = i_h.to(tl.int64)
    g64 = (i_h // FORM.GROUP).to(tl.int64)
    row_start = tile * R
    o_r = tl.arange(0, R)
    q_head = q + b64 * strides.at_q.b + h64 * strides.at_q.h
    b_q = load_rows(q_head, row_start, numbers.Q, strides.at_q.n, R, FORM.D, FORM.BLOCK_D, True)
    k += b64 * strides.at_k.b + g64 * strides.at_k.h
    v += b64 * strides.at_v.b + g64 * strides.at_v.h
    b_acc = tl.zeros([R, FORM.BLOCK_E], tl.float32)
    b_l, b_m = start_rows(terms.sinks, i_h, part == 0, R, FORM.SINK)
    slope = head_slope(terms.slopes, i_b, i_h, shares.H, FORM.ALIBI)
    key_end = end_of_keys(terms.lengths, i_b, numbers.K, FORM.LENGTHS)
    position = row_start + o_r + numbers.q_offset
    given = (k, v, strides.at_k.n, strides.at_v.n, key_end, position, b_q, slope, numbers)
    b_acc, b_l, b_m = walk(load_keys, add_keys, (b_acc, b_l, b_m), given, lists, begin, end, FORM)

    if FORM.HAS_SLOTS:
        if slot >= 0:
            i_part = slot_of(i_b, i_h, shares.H, numbers.n_slots, slot, FORM)
            o_ml = results.part_ml + i_part * (2 * R) + o_r
            tl.store(o_ml, b_m)
            tl.store(o_ml + R, b_l)
            store_part_rows(results.part_acc, i_part, b_acc, row_start * 0, R, R, FORM.E, FORM.BLOCK_E)
            return
    store_row_results(results, strides, b_acc, b_l, b_m, b64, h64, numbers.Q, row_start, R, FORM.E, FORM.BLOCK_E)


@triton.jit
def add_keys(sums, given, loaded, m_keep, FORM: tl.constexpr):
    """(acc, l, m) after a chunk of keys."""
    b_acc, b_l, b_m = sums
    b_q, slope, numbers = given[6:]
    b_k, b_v, distance = loaded
    b_s = tl.dot(b_q, tl.trans(b_k), input_precision=FORM.PRECISION)
    b_s, _ = score(b_s, numbers.scale, numbers.cap, slope, distance, FORM.SOFTCAP, FORM.ALIBI)
    b_s = tl.where(m_keep, b_s, float("-inf"))
    b_p, b_shrink, b_l, b_m = add_scores(b_s, b_l, b_m)
    b_acc = tl.dot(b_p.to(b_v.dtype), b_v, b_acc * b_shrink[:, None], input_precision=FORM.PRECISION)
    return b_acc, b_l, b_m


@triton.jit(do_not_specialize=["numbers"])
def tiles_dq_kernel(
    q,  # (B, H, Q, D)
    k,  # (B, G, K, D)
    v,  # (B, G, K, E)
    dout,  # (B, H, Q, E)
    terms: BackwardTerms,
    results: QueryResults,
    lists: TileLists,
    strides: QueryStrides,
    numbers: BackwardNumbers,
    shares: Shares,
    FORM: tl.constexpr,
):
    """dQ of R query rows, or a partial sum of it when the tile row is split."""
    R: tl.constexpr = FORM.R
    D: tl.constexpr = FORM.D
    MEMBERS: tl.constexpr = FORM.GROUP if FORM.H_FROM_GRID else 1
    i_b, i_h, tile, begin, end, slot, _ = decode_tile(lists, numbers, shares.G, shares.lead_heads, MEMBERS, FORM)
    b64 = i_b.to(tl.int64)
    h64 = i_h.to(tl.int64)
    g64 = (i_h // FORM.GROUP).to(tl.int64)
    row_start = tile * R
    o_r = tl.arange(0, R)
    q_head = q + b64 * strides.at_q.b + h64 * strides.at_q.h
    b_q = load_rows(q_head, row_start, numbers.Q, strides.at_q.n, R, D, FORM.BLOCK_D, True)
    dout_head = dout + b64 * strides.at_dout.b + h64 * strides.at_dout.h
    b_dout = load_rows(dout_head, row_start, numbers.Q, strides.at_dout.n, R, FORM.E, FORM.BLOCK_E, True)
    o_rows = terms.row_terms + (b64 * shares.H + h64) * numbers.padded_Q + row_start + o_r
    b_lse = tl.load(o_rows)[:, None]
    b_delta = tl.load(o_rows + numbers.delta_offset)[:, None]
    k += b64 * strides.at_k.b + g64 * strides.at_k.h
    v += b64 * strides.at_v.b + g64 * strides.at_v.h
    b_dq = tl.zeros([R, FORM.BLOCK_D], tl.float32)
    slope = head_slope(terms.slopes, i_b, i_h, shares.H, FORM.ALIBI)
    key_end = end_of_keys(terms.lengths, i_b, numbers.K, FORM.LENGTHS)
    position = row_start + o_r + numbers.q_offset
    given = (k, v, strides.at_k.n, strides.at_v.n, key_end, position, b_q, b_dout, b_lse, b_delta, slope, numbers)
    b_dq = walk(load_keys, add_keys_to_dq, b_dq, given, lists, begin, end, FORM)

    b_dq *= numbers.plain_scale
    if FORM.HAS_SLOTS:
        if slot >= 0:
            i_part = slot_of(i_b, i_h, shares.H, numbers.n_slots, slot, FORM)
            store_part_rows(results.part, i_part, b_dq, row_start * 0, R, R, D, FORM.BLOCK_D)
            return
    dq_head = results.dq + b64 * strides.at_dq.b + h64 * strides.at_dq.h
    store_rows(dq_head, b_dq, row_start, numbers.Q, strides.at_dq.n, R, D, FORM.BLOCK_D)


@triton.jit
def add_keys_to_dq(b_dq, given, loaded, m_keep, FORM: tl.constexpr):
    """The sum of dS k after a chunk of keys."""
    b_q, b_dout, b_lse, b_delta, slope, numbers = given[6:]
    b_k, b_v, distance = loaded
    b_s = tl.dot(b_q, tl.trans(b_k), input_precision=FORM.PRECISION)
    b_dp = tl.dot(b_dout, tl.trans(b_v), input_precision=FORM.PRECISION)
    b_p, b_t = probability(
        b_s, b_lse, numbers.scale, numbers.cap, slope, distance, m_keep, False, False, FORM.SOFTCAP, FORM.ALIBI
    )
    # Not P: dP of a pair that is not kept may be NaN.
    b_ds = tl.where(m_keep, score_gradient(b_p, b_dp, b_delta, b_t, FORM.SOFTCAP), 0.0)
    return tl.dot(b_ds.to(b_k.dtype), b_k, b_dq, input_precision=FORM.PRECISION)


@triton.jit(do_not_specialize=["numbers"])
def tiles_dkdv_kernel(
    q,  # (B, H, Q, D)
    k,  # (B, G, K, D)
    v,  # (B, G, K, E)
    dout,  # (B, H, Q, E)
    terms: BackwardTerms,
    results: KeyResults,  # of heads = H / MEMBERS
    lists: TileLists,
    strides: KeyStrides,
    numbers: BackwardNumbers,
    heads, lead_heads,
    FORM: tl.constexpr,
):  # fmt: skip
    """dK and dV of R key rows, or partial sums when the tile row is split; scores are [keys, queries].

    MEMBERS query heads of a key head are summed here: all GROUP of them where they share their lists, else one.
    """
    R: tl.constexpr = FORM.R
    D: tl.constexpr = FORM.D
    E: tl.constexpr = FORM.E
    i_b, i_h, tile, begin, end, slot, _ = decode_tile(lists, numbers, heads, lead_heads, 1, FORM)
    b64 = i_b.to(tl.int64)
    h64 = i_h.to(tl.int64)
    g64 = (i_h // (FORM.GROUP // FORM.MEMBERS)).to(tl.int64)
    row_start = tile * R
    o_r = row_start + tl.arange(0, R)
    k_head = k + b64 * strides.at_k.b + g64 * strides.at_k.h
    b_k = load_rows(k_head, row_start, numbers.K, strides.at_k.n, R, D, FORM.BLOCK_D, True)
    v_head = v + b64 * strides.at_v.b + g64 * strides.at_v.h
    b_v = load_rows(v_head, row_start, numbers.K, strides.at_v.n, R, E, FORM.BLOCK_E, True)
    b_dk = tl.zeros([R, FORM.BLOCK_D], tl.float32)
    b_dv = tl.zeros([R, FORM.BLOCK_E], tl.float32)
    key_end = end_of_keys(terms.lengths, i_b, numbers.K, FORM.LENGTHS)
    if FORM.LENGTHS:
        # Keys past the length have no gradient: nothing is visited when all rows lie there.
        end = tl.where(row_start < key_end, end, begin)

    for member in range(FORM.MEMBERS):
        i_q = i_h * FORM.MEMBERS + member
        q64 = i_q.to(tl.int64)
        q_head = q + b64 * strides.at_q.b + q64 * strides.at_q.h
        dout_head = dout + b64 * strides.at_dout.b + q64 * strides.at_dout.h
        lse_head = terms.row_terms + (b64 * (heads * FORM.MEMBERS) + q64) * numbers.padded_Q
        slope = head_slope(terms.slopes, i_b, i_q, heads * FORM.MEMBERS, FORM.ALIBI)
        given = (
            q_head, dout_head, strides.at_q.n, strides.at_dout.n, lse_head, key_end, o_r, b_k, b_v, slope, numbers,
        )  # fmt: skip
        b_dk, b_dv = walk(load_queries, add_queries, (b_dk, b_dv), given, lists, begin, end, FORM)

    b_dk *= numbers.plain_scale
    if FORM.LENGTHS:
        m_length = (o_r < key_end)[:, None]
        b_dk = tl.where(m_length, b_dk, 0.0)
        b_dv = tl.where(m_length, b_dv, 0.0)
    if FORM.HAS_SLOTS:
        if slot >= 0:
            i_part = slot_of(i_b, i_h, heads, numbers.n_slots, slot, FORM)
            store_part_rows(results.part_dk, i_part, b_dk, row_start * 0, R, R, D, FORM.BLOCK_D)
            store_part_rows(results.part_dv, i_part, b_dv, row_start * 0, R, R, E, FORM.BLOCK_E)
            return
    dk_head = results.dk + b64 * strides.at_dk.b + h64 * strides.at_dk.h
    store_rows(dk_head, b_dk, row_start, numbers.K, strides.at_dk.n, R, D, FORM.BLOCK_D)
    dv_head = results.dv + b64 * strides.at_dv.b + h64 * strides.at_dv.h
    store_rows(dv_head, b_dv, row_start, numbers.K, strides.at_dv.n, R, E, FORM.BLOCK_E)


@triton.jit
def load_queries(given, i, m_keep, FORM: tl.constexpr):
    """(q, dout, lse, delta, distances) of queries i; 0 for those that keep no key below the length."""
    q, dout, stride_q, stride_dout, lse, key_end, o_r, _, _, _, numbers = given
    b_lse = tl.load(lse + i, mask=i >= 0, other=float("inf"))
    b_delta = tl.load(lse + numbers.delta_offset + i, mask=i >= 0, other=0.0)
    b_q = gathered(q, i, stride_q, FORM.C, FORM.D, FORM.BLOCK_D)
    b_dout = gathered(dout, i, stride_dout, FORM.C, FORM.E, FORM.BLOCK_E)
    if FORM.LENGTHS:
        m_read = m_keep & (o_r < key_end)[:, None]
        b_q = cleared(b_q, m_read)
        b_dout = cleared(b_dout, m_read)
    return (b_q, b_dout, b_lse, b_delta, o_r[:, None] - (i + numbers.q_offset)[None, :]), m_keep


@triton.jit
def add_queries(sums, given, loaded, m_keep, FORM: tl.constexpr):
    """The sums of dS^T q and P^T dout after a chunk of queries."""
    b_dk, b_dv = sums
    b_k, b_v, slope, numbers = given[7:]
    b_q, b_dout, b_lse, b_delta, distance = loaded
    b_s = tl.dot(b_k, tl.trans(b_q), input_precision=FORM.PRECISION)
    b_dp = tl.dot(b_v, tl.trans(b_dout), input_precision=FORM.PRECISION)
    b_p, b_t = probability(
        b_s, b_lse[None, :], numbers.scale, numbers.cap, slope, distance, m_keep, True, False, FORM.SOFTCAP, FORM.ALIBI
    )
    b_dv = tl.dot(b_p.to(b_dout.dtype), b_dout, b_dv, input_precision=FORM.PRECISION)
    # dP of a key that no query keeps may be NaN.
    b_ds = tl.where(m_keep, score_gradient(b_p, b_dp, b_delta[None, :], b_t, FORM.SOFTCAP), 0.0)
    b_dk = tl.dot(b_ds.to(b_q.dtype), b_q, b_dk, input_precision=FORM.PRECISION)
    return b_dk, b_dv
