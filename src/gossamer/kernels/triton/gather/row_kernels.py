"""Kernels for rows with a few scattered columns each: no tiles, no tensor cores, a few threads for a row.

A program takes RP items (a row of the walk and a range of its columns) and, in each step, gathers C columns of each.
A gathered row is read in pieces of S numbers, 16 bytes a thread; a block [RP, S] is one piece of one column of every
item. Columns and pieces are unrolled, as tuples of blocks: sums over columns stay inside a thread whichever layout the
compiler takes. What bounds these kernels is the traffic of the gathered rows, as long as a pair takes few instructions
and the loads of a step are issued before the first of them is used: registers are granted for that (`RowConfig`).

A column past the end of a list is read as one of that list and left out by its score: no load of a row is masked, and
none reads what the row does not keep. Of a list of nothing the results are chosen to be 0. Lengths within a program are
alike; the longest is known beforehand, so that all threads agree on the number of steps.
"""

from __future__ import annotations

import triton
import triton.language as tl

from gossamer.kernels.scores import score
from gossamer.kernels.softmax import end_of_keys, finish_rows, head_slope, probability, score_gradient, start_rows
from gossamer.kernels.triton.gather.parameters import BackwardNumbers, ForwardNumbers, RowLists
from gossamer.kernels.triton.gather.pieces import (
    added,
    below,
    decode_rows,
    dot,
    first_listed,
    load_columns,
    load_pieces,
    next_listed,
    of_row,
    scaled,
    store_pieces,
    where_some,
    zeros,
)
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
from gossamer.kernels.triton.row_access import slot_of


@triton.jit
def walk(
    load: tl.constexpr, add: tl.constexpr, sums, given, left, pointers, columns, n_steps, FORM: tl.constexpr,
    STAYS: tl.constexpr,
):  # fmt: skip
    """Sums over lists of gathered columns: `sums` as `add` leaves them after the longest list.

    Args:
        load: (given, columns, first, FORM) -> what a step reads of C vectors [RP] of columns.
        add: (sums, given, loaded, columns, left, FORM) -> sums, of one step.
        left, pointers, columns: how many columns each list has, where they are, and the `first_listed` of them.
        STAYS: past the end of a list the columns of the step before are read again, in place of the first: that takes
            no instruction where columns serve to load rows of a matrix alone. Columns that load vectors, too, would
            themselves be loaded twice (Triton 3.6).
    """
    first = columns[0]
    for _step in range(0, tl.abs(n_steps), FORM.C):
        # The next columns are loaded a step ahead, so that the loads of their rows do not wait for them; and before the
        # rows of this step, or else the compiler (of CUDA 12.8) may leave one of them to the end of the step.
        pointers += FORM.C
        after = next_listed(pointers, left - FORM.C, columns if STAYS else (first,) * FORM.C, FORM.C)
        loaded = load(given, columns, first, FORM)
        sums = add(sums, given, loaded, columns, left, FORM)
        columns = after
        left -= FORM.C
    return sums


@triton.jit
def load_keys(given, j, first, FORM: tl.constexpr):
    """Rows of k and v of keys j; of the first key for those past the length."""
    k, v, key_end = given[:3]
    j_read = below(j, first, key_end, FORM.C) if FORM.LENGTHS else j
    b_k = load_columns(k, j_read, FORM.STREAMED[0], FORM.D, FORM.SD, FORM.C)
    b_v = load_columns(v, j_read, FORM.STREAMED[1], FORM.E, FORM.SE, FORM.C)
    return b_k, b_v


@triton.jit
def keeps_key(j, c: tl.constexpr, left, key_end, FORM: tl.constexpr):
    """Whether each row has the c-th column of a step, [RP]."""
    m_j = c < left
    if FORM.LENGTHS:
        m_j = m_j & (j[c] < key_end)
    return m_j


@triton.jit(do_not_specialize=["numbers"])
def rows_forward_kernel(
    q,  # (B, H, Q, D)
    k,  # (B, G, K, D)
    v,  # (B, G, K, E)
    terms: ForwardTerms,
    results: ForwardResults,
    lists: RowLists,
    strides: ForwardStrides,
    numbers: ForwardNumbers,
    H, lead_heads,
    FORM: tl.constexpr,
):  # fmt: skip
    """out and lse of RP query rows, or their partial sums where a row is split."""
    SHARED: tl.constexpr = FORM.B_FROM_GRID and FORM.H_FROM_GRID
    E: tl.constexpr = FORM.E
    SE: tl.constexpr = FORM.SE
    i_b, i_h, row, begin, end, slot, part, m_row, n_steps = decode_rows(lists, numbers, H, lead_heads, FORM)
    b64 = i_b.to(tl.int64)
    h64 = i_h.to(tl.int64)
    g64 = (i_h // FORM.GROUP).to(tl.int64)
    o_d = tl.arange(0, FORM.SD)[None, :]
    o_e = tl.arange(0, SE)[None, :]
    k_base = k + of_row(b64 * strides.at_k.b + g64 * strides.at_k.h, SHARED) + o_d
    v_base = v + of_row(b64 * strides.at_v.b + g64 * strides.at_v.h, SHARED) + o_e
    q_base = q + of_row(b64 * strides.at_q.b + h64 * strides.at_q.h, SHARED) + o_d
    b_q = load_pieces(q_base, row.to(tl.int64) * strides.at_q.n, FORM.D, FORM.SD, True)
    b_acc = zeros(FORM.RP, E, SE)
    b_l, b_m = start_rows(terms.sinks, i_h, part == 0, FORM.RP, FORM.SINK)
    slope = head_slope(terms.slopes, i_b, i_h, H, FORM.ALIBI)
    key_end = end_of_keys(terms.lengths, i_b, numbers.K, FORM.LENGTHS)
    position = row + numbers.q_offset
    left = end - begin
    pointers = lists.indices + begin
    j = first_listed(pointers, left, FORM.C)
    given = (k_base, v_base, key_end, b_q, slope, position, numbers)
    b_acc, b_l, b_m = walk(
        load_keys, add_keys, (b_acc, b_l, b_m), given, left, pointers, j, n_steps, FORM, not FORM.LENGTHS
    )

    # A list of nothing added no weight; but the sink did.
    m_some = (left > 0) & (j[0] < key_end) if FORM.SINK else b_l != 0
    b_acc = where_some(m_some, b_acc, E, SE)
    m_whole = m_row
    if FORM.HAS_SLOTS:
        m_whole = m_row & (slot < 0)
        if n_steps < 0:
            m_split = slot >= 0
            i_part = slot_of(i_b, i_h, H, numbers.n_slots, slot, FORM)
            tl.store(results.part_ml + i_part * 2, b_m, mask=m_split)
            tl.store(results.part_ml + i_part * 2 + 1, b_l, mask=m_split)
            store_pieces(results.part_acc + o_e, i_part * E, m_split, b_acc, E, SE)
    b_l, b_lse = finish_rows(b_l, b_m)
    lse_head = results.lse + b64 * strides.at_lse.b + h64 * strides.at_lse.h
    tl.store(lse_head + row.to(tl.int64) * strides.at_lse.n, b_lse, mask=m_whole)
    o_base = results.out + of_row(b64 * strides.at_out.b + h64 * strides.at_out.h, SHARED) + o_e
    store_pieces(o_base, row.to(tl.int64) * strides.at_out.n, m_whole, scaled(b_acc, 1.0 / b_l, E, SE), E, SE, True)


@triton.jit
def add_keys(sums, given, loaded, j, left, FORM: tl.constexpr):
    """(acc, l, m) after C keys of each row."""
    b_acc, b_l, b_m = sums
    _, _, key_end, b_q, slope, position, numbers = given
    b_k, b_v = loaded
    b_new = b_m
    scores: tl.tuple = ()
    for c in tl.static_range(FORM.C):
        m_j = keeps_key(j, c, left, key_end, FORM)
        b_s = dot(b_k[c], b_q, FORM.D, FORM.SD)
        b_s, _ = score(b_s, numbers.scale, numbers.cap, slope, j[c] - position, FORM.SOFTCAP, FORM.ALIBI)
        b_s = tl.where(m_j, b_s, float("-inf"))
        b_new = tl.maximum(b_new, b_s)
        scores += (b_s,)
    b_shrink = tl.exp2(b_m - b_new)
    b_l = b_l * b_shrink
    b_acc = scaled(b_acc, b_shrink, FORM.E, FORM.SE)
    for c in tl.static_range(FORM.C):
        b_p = tl.exp2(scores[c] - b_new)
        b_l += b_p
        b_acc = added(b_acc, b_p, b_v[c], FORM.E, FORM.SE)
    return b_acc, b_l, b_new


@triton.jit(do_not_specialize=["numbers"])
def rows_dq_kernel(
    q,  # (B, H, Q, D)
    k,  # (B, G, K, D)
    v,  # (B, G, K, E)
    dout,  # (B, H, Q, E)
    terms: BackwardTerms,
    results: QueryResults,
    lists: RowLists,
    strides: QueryStrides,
    numbers: BackwardNumbers,
    H, lead_heads,
    FORM: tl.constexpr,
):  # fmt: skip
    """dQ of RP query rows, or a partial sum of it where a row is split."""
    SHARED: tl.constexpr = FORM.B_FROM_GRID and FORM.H_FROM_GRID
    D: tl.constexpr = FORM.D
    SD: tl.constexpr = FORM.SD
    i_b, i_h, row, begin, end, slot, _part, m_row, n_steps = decode_rows(lists, numbers, H, lead_heads, FORM)
    b64 = i_b.to(tl.int64)
    h64 = i_h.to(tl.int64)
    g64 = (i_h // FORM.GROUP).to(tl.int64)
    o_d = tl.arange(0, SD)[None, :]
    o_e = tl.arange(0, FORM.SE)[None, :]
    k_base = k + of_row(b64 * strides.at_k.b + g64 * strides.at_k.h, SHARED) + o_d
    v_base = v + of_row(b64 * strides.at_v.b + g64 * strides.at_v.h, SHARED) + o_e
    q_base = q + of_row(b64 * strides.at_q.b + h64 * strides.at_q.h, SHARED) + o_d
    dout_base = dout + of_row(b64 * strides.at_dout.b + h64 * strides.at_dout.h, SHARED) + o_e
    b_q = load_pieces(q_base, row.to(tl.int64) * strides.at_q.n, D, SD, True)
    b_dout = load_pieces(dout_base, row.to(tl.int64) * strides.at_dout.n, FORM.E, FORM.SE, True)
    o_row = (b64 * H + h64) * numbers.padded_Q + row
    b_lse = tl.load(terms.row_terms + o_row)
    b_delta = tl.load(terms.row_terms + numbers.delta_offset + o_row)
    b_dq = zeros(FORM.RP, D, SD)
    slope = head_slope(terms.slopes, i_b, i_h, H, FORM.ALIBI)
    key_end = end_of_keys(terms.lengths, i_b, numbers.K, FORM.LENGTHS)
    position = row + numbers.q_offset
    left = end - begin
    pointers = lists.indices + begin
    j = first_listed(pointers, left, FORM.C)
    m_some = (left > 0) & (j[0] < key_end)
    given = (k_base, v_base, key_end, b_q, b_dout, b_lse, b_delta, slope, position, numbers)
    b_dq = walk(load_keys, add_keys_to_dq, b_dq, given, left, pointers, j, n_steps, FORM, not FORM.LENGTHS)

    b_dq = where_some(m_some, b_dq, D, SD)
    b_dq = scaled(b_dq, tl.full([FORM.RP], 1.0, tl.float32) * numbers.plain_scale, D, SD)
    m_whole = m_row
    if FORM.HAS_SLOTS:
        m_whole = m_row & (slot < 0)
        if n_steps < 0:
            i_part = slot_of(i_b, i_h, H, numbers.n_slots, slot, FORM)
            store_pieces(results.part + o_d, i_part * D, slot >= 0, b_dq, D, SD)
    dq_base = results.dq + of_row(b64 * strides.at_dq.b + h64 * strides.at_dq.h, SHARED) + o_d
    store_pieces(dq_base, row.to(tl.int64) * strides.at_dq.n, m_whole, b_dq, D, SD, True)


@triton.jit
def add_keys_to_dq(b_dq, given, loaded, j, left, FORM: tl.constexpr):
    """The sum of dS k after C keys of each row."""
    _, _, key_end, b_q, b_dout, b_lse, b_delta, slope, position, numbers = given
    b_k, b_v = loaded
    for c in tl.static_range(FORM.C):
        m_j = keeps_key(j, c, left, key_end, FORM)
        b_s = dot(b_k[c], b_q, FORM.D, FORM.SD)
        distance = j[c] - position
        b_p, b_t = probability(
            b_s, b_lse, numbers.scale, numbers.cap, slope, distance, m_j, True, False, FORM.SOFTCAP, FORM.ALIBI
        )
        b_ds = score_gradient(b_p, dot(b_v[c], b_dout, FORM.E, FORM.SE), b_delta, b_t, FORM.SOFTCAP)
        b_dq = added(b_dq, b_ds, b_k[c], FORM.D, FORM.SD)
    return b_dq


@triton.jit(do_not_specialize=["numbers"])
def rows_dkdv_kernel(
    q,  # (B, H, Q, D)
    k,  # (B, G, K, D)
    v,  # (B, G, K, E)
    dout,  # (B, H, Q, E)
    terms: BackwardTerms,
    results: KeyResults,  # of heads = H / MEMBERS
    lists: RowLists,
    strides: KeyStrides,
    numbers: BackwardNumbers,
    heads, lead_heads,
    FORM: tl.constexpr,
):  # fmt: skip
    """dK and dV of RP key rows, or partial sums of them where a row is split.

    MEMBERS query heads of a key head are summed here: all GROUP of them where they share their lists, else one.
    """
    SHARED: tl.constexpr = FORM.B_FROM_GRID and FORM.H_FROM_GRID
    D: tl.constexpr = FORM.D
    E: tl.constexpr = FORM.E
    SD: tl.constexpr = FORM.SD
    SE: tl.constexpr = FORM.SE
    i_b, i_h, row, begin, end, slot, _part, m_row, n_steps = decode_rows(lists, numbers, heads, lead_heads, FORM)
    b64 = i_b.to(tl.int64)
    h64 = i_h.to(tl.int64)
    g64 = (i_h // (FORM.GROUP // FORM.MEMBERS)).to(tl.int64)
    o_d = tl.arange(0, SD)[None, :]
    o_e = tl.arange(0, SE)[None, :]
    k_base = k + of_row(b64 * strides.at_k.b + g64 * strides.at_k.h, SHARED) + o_d
    v_base = v + of_row(b64 * strides.at_v.b + g64 * strides.at_v.h, SHARED) + o_e
    b_k = load_pieces(k_base, row.to(tl.int64) * strides.at_k.n, D, SD)
    b_v = load_pieces(v_base, row.to(tl.int64) * strides.at_v.n, E, SE)
    b_dk = zeros(FORM.RP, D, SD)
    b_dv = zeros(FORM.RP, E, SE)
    count = end - begin
    if FORM.LENGTHS:
        # Keys past the length have no gradient.
        count = tl.where(row < end_of_keys(terms.lengths, i_b, numbers.K, FORM.LENGTHS), count, 0)

    for member in range(FORM.MEMBERS):
        i_q = i_h * FORM.MEMBERS + member
        q64 = i_q.to(tl.int64)
        q_base = q + of_row(b64 * strides.at_q.b + q64 * strides.at_q.h, SHARED) + o_d
        dout_base = dout + of_row(b64 * strides.at_dout.b + q64 * strides.at_dout.h, SHARED) + o_e
        lse_head = terms.row_terms + (b64 * (heads * FORM.MEMBERS) + q64) * numbers.padded_Q
        slope = head_slope(terms.slopes, i_b, i_q, heads * FORM.MEMBERS, FORM.ALIBI)
        pointers = lists.indices + begin
        i = first_listed(pointers, count, FORM.C)
        given = (q_base, dout_base, b_k, b_v, lse_head, slope, row, numbers)
        b_dk, b_dv = walk(load_queries, add_queries, (b_dk, b_dv), given, count, pointers, i, n_steps, FORM, False)

    b_dk = where_some(count > 0, b_dk, D, SD)
    b_dv = where_some(count > 0, b_dv, E, SE)
    b_dk = scaled(b_dk, tl.full([FORM.RP], 1.0, tl.float32) * numbers.plain_scale, D, SD)
    m_whole = m_row
    if FORM.HAS_SLOTS:
        m_whole = m_row & (slot < 0)
        if n_steps < 0:
            m_split = slot >= 0
            i_part = slot_of(i_b, i_h, heads, numbers.n_slots, slot, FORM)
            store_pieces(results.part_dk + o_d, i_part * D, m_split, b_dk, D, SD)
            store_pieces(results.part_dv + o_e, i_part * E, m_split, b_dv, E, SE)
    dk_base = results.dk + of_row(b64 * strides.at_dk.b + h64 * strides.at_dk.h, SHARED) + o_d
    dv_base = results.dv + of_row(b64 * strides.at_dv.b + h64 * strides.at_dv.h, SHARED) + o_e
    store_pieces(dk_base, row.to(tl.int64) * strides.at_dk.n, m_whole, b_dk, D, SD)
    store_pieces(dv_base, row.to(tl.int64) * strides.at_dv.n, m_whole, b_dv, E, SE)


@triton.jit
def load_queries(given, i, _first, FORM: tl.constexpr):
    """Rows of q and dout of queries i."""
    q, dout = given[:2]
    b_q = load_columns(q, i, FORM.STREAMED[0], FORM.D, FORM.SD, FORM.C)
    b_dout = load_columns(dout, i, FORM.STREAMED[1], FORM.E, FORM.SE, FORM.C)
    return b_q, b_dout


@triton.jit
def add_queries(sums, given, loaded, i, left, FORM: tl.constexpr):
    """The sums of dS^T q and P^T dout after C queries of each row."""
    b_dk, b_dv = sums
    _, _, b_k, b_v, lse, slope, row, numbers = given
    b_q, b_dout = loaded
    for c in tl.static_range(FORM.C):
        b_lse = tl.load(lse + i[c])
        b_delta = tl.load(lse + numbers.delta_offset + i[c])
        distance = row - (i[c] + numbers.q_offset)
        b_s = dot(b_q[c], b_k, FORM.D, FORM.SD)
        b_p, b_t = probability(
            b_s, b_lse, numbers.scale, numbers.cap, slope, distance, c < left, True, False, FORM.SOFTCAP, FORM.ALIBI
        )
        b_ds = score_gradient(b_p, dot(b_dout[c], b_v, FORM.E, FORM.SE), b_delta, b_t, FORM.SOFTCAP)
        b_dv = added(b_dv, b_p, b_dout[c], FORM.E, FORM.SE)
        b_dk = added(b_dk, b_ds, b_q[c], FORM.D, FORM.SD)
    return b_dk, b_dv
