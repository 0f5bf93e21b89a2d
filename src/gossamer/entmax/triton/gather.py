"""Kernels over the lists of rows alone: out, and dQ with the gradient of each score.

Their first programs list the rows that have no list, one a head (`tiles.list_rows`): so that takes no launch.

Rows are gathered in pieces of S numbers, as in `triton/gather/row_kernels.py`; a program has RP rows.
"""

from __future__ import annotations

import triton
import triton.language as tl

from gossamer.entmax.triton.formulas import alpha_term, slope
from gossamer.entmax.triton.parameters import (
    GatherNumbers,
    QueryNumbers,
    QueryResults,
    QueryStrides,
    SupportLists,
    Unlisted,
)
from gossamer.entmax.triton.tiles import list_rows
from gossamer.kernels.triton.gather.pieces import added, dot, load_columns, load_pieces, scaled, store_pieces, zeros


@triton.jit
def place_of(number, H, Q, GROUP: tl.constexpr):
    """(b, h, g, row), 64-bit, of rows that are counted over (B, H, Q)."""
    head, row = number // Q, number % Q
    return (head // H).to(tl.int64), (head % H).to(tl.int64), (head % H // GROUP).to(tl.int64), row.to(tl.int64)


@triton.jit
def where(some, x, SIZE: tl.constexpr, S: tl.constexpr):
    """Rows in pieces, 0 where `some` [RP] is not."""
    blocks: tl.tuple = ()
    for p in tl.static_range((SIZE + S - 1) // S):
        blocks += (tl.where(some[:, None], x[p], 0.0),)
    return blocks


@triton.jit
def keys_of(pointers, left, start, N: tl.constexpr):
    """The next N keys of each list; its first key past the end, whose rows may hold what is no number."""
    keys: tl.tuple = ()
    for c in tl.static_range(N):
        keys += (tl.load(pointers + c, mask=c < left, other=start),)
    return keys


@triton.jit
def weights_of(pointers, left, N: tl.constexpr):
    """The next N weights of each list; 0 past the end."""
    weights: tl.tuple = ()
    for c in tl.static_range(N):
        weights += (tl.load(pointers + c, mask=c < left, other=0.0),)
    return weights


@triton.jit(do_not_specialize=["numbers"])
def gather_out_kernel(
    v,  # (B, G, K, E)
    out,  # (B, H, Q, E), contiguous
    lists: SupportLists,
    unlisted: Unlisted,
    stride_b, stride_h,  # of v
    H,
    numbers: GatherNumbers,
    FORM: tl.constexpr,
):  # fmt: skip
    """out = sum p v of RP rows that have lists."""
    program = tl.program_id(0) - numbers.heads
    if program < 0:
        list_rows(lists.counts, unlisted, numbers, FORM.STEP)
    else:
        gather_out(program, v, out, lists, stride_b, stride_h, H, numbers, FORM)


@triton.jit
def gather_out(program, v, out, lists, stride_b, stride_h, H, numbers, FORM: tl.constexpr):
    """`gather_out_kernel` of the RP rows of a program."""
    E: tl.constexpr = FORM.E
    SE: tl.constexpr = FORM.SE
    RP: tl.constexpr = FORM.RP
    N: tl.constexpr = FORM.N
    own = program * RP + tl.arange(0, RP)
    m_row = own < numbers.n_rows
    number = numbers.first_row + own
    b64, _, g64, _ = place_of(number, H, numbers.Q, FORM.GROUP)
    o_e = tl.arange(0, SE)[None, :]
    v_base = v + (b64 * stride_b + g64 * stride_h)[:, None] + o_e
    left = tl.load(lists.counts + number, mask=m_row, other=-1)
    m_row = left >= 0
    acc = zeros(RP, E, SE)
    key_at = lists.keys + own.to(tl.int64) * FORM.L
    weight_at = lists.weights + own.to(tl.int64) * FORM.L
    some = left > 0
    start = tl.load(key_at, mask=some, other=0)
    for _step in range(0, tl.max(left, 0), N):
        j = keys_of(key_at, left, start, N)
        p = weights_of(weight_at, left, N)
        b_v = load_columns(v_base, j, FORM.STREAMED, E, SE, N)
        for c in tl.static_range(N):
            acc = added(acc, p[c], b_v[c], E, SE)
        key_at += N
        weight_at += N
        left -= N
    store_pieces(out + o_e, number.to(tl.int64) * E, m_row, where(some, acc, E, SE), E, SE, True)


@triton.jit(do_not_specialize=["numbers"])
def gather_dq_kernel(
    k,  # (B, G, K, D)
    v,  # (B, G, K, E)
    dout,  # (B, H, Q, E)
    steepness,  # (H,) float32
    results: QueryResults,
    lists: SupportLists,
    unlisted: Unlisted,
    strides: QueryStrides,
    H,
    numbers: QueryNumbers,
    FORM: tl.constexpr,
):
    """dQ of RP rows that have lists, and dS = u (dP - delta) of their pairs: delta = sum u dP / sum u."""
    program = tl.program_id(0) - numbers.heads
    if program < 0:
        list_rows(lists.counts, unlisted, numbers, FORM.STEP)
    else:
        gather_dq(program, k, v, dout, steepness, results, lists, strides, H, numbers, FORM)


@triton.jit
def gather_dq(program, k, v, dout, steepness, results, lists, strides, H, numbers, FORM: tl.constexpr):
    """`gather_dq_kernel` of the RP rows of a program.

    One sweep: sum u dP k and sum u k are kept apart until delta is known.
    """
    D: tl.constexpr = FORM.D
    SD: tl.constexpr = FORM.SD
    RP: tl.constexpr = FORM.RP
    N: tl.constexpr = FORM.N
    VECTOR: tl.constexpr = FORM.VECTOR
    A: tl.constexpr = FORM.A
    number = program * RP + tl.arange(0, RP)
    m_row = number < numbers.n_rows
    number = tl.where(m_row, number, 0)
    b64, h64, g64, row = place_of(number, H, numbers.Q, FORM.GROUP)
    o_d = tl.arange(0, SD)[None, :]
    o_e = tl.arange(0, FORM.SE)[None, :]
    k_base = k + (b64 * strides.k_b + g64 * strides.k_h)[:, None] + o_d
    v_base = v + (b64 * strides.v_b + g64 * strides.v_h)[:, None] + o_e
    dout_base = dout + (b64 * strides.at_dout.b + h64 * strides.at_dout.h)[:, None] + o_e
    b_dout = load_pieces(dout_base, row * strides.at_dout.n, FORM.E, FORM.SE, True)
    a = tl.load(steepness + h64)
    count = tl.load(lists.counts + number, mask=m_row, other=-1)
    m_row = count >= 0
    with_dp = zeros(RP, D, SD)
    without = zeros(RP, D, SD)
    sum_dp = tl.zeros([RP], tl.float32)
    sum_u = tl.zeros([RP], tl.float32)
    o_list = number.to(tl.int64) * FORM.L
    left = count
    key_at, weight_at, gradient_at = lists.keys + o_list, lists.weights + o_list, results.gradients + 2 * o_list + 1
    most = tl.max(count, 0)
    some = count > 0
    start = tl.load(key_at, mask=some, other=0)
    for _step in range(0, most, N):
        j = keys_of(key_at, left, start, N)
        p = weights_of(weight_at, left, N)
        b_v = load_columns(v_base, j, FORM.STREAMED[1], FORM.E, FORM.SE, N)
        b_k = load_columns(k_base, j, FORM.STREAMED[0], D, SD, N)
        for c in tl.static_range(N):
            dp = dot(b_v[c], b_dout, FORM.E, FORM.SE)
            u = slope(p[c], a, A)
            tl.store(gradient_at + 2 * c, dp, mask=c < left)
            sum_u += u
            sum_dp += u * dp
            with_dp = added(with_dp, u * dp, b_k[c], D, SD)
            without = added(without, u, b_k[c], D, SD)
        key_at += N
        weight_at += N
        gradient_at += 2 * N
        left -= N
    delta = sum_dp / tl.where(sum_u == 0.0, 1.0, sum_u)
    both = where(some, added(with_dp, -delta, without, D, SD), D, SD)
    both = scaled(both, tl.zeros([RP], tl.float32) + numbers.scale, D, SD)
    store_pieces(results.dq + o_d, number.to(tl.int64) * D, m_row, both, D, SD, True)
    tl.debug_barrier()
    o = tl.arange(0, VECTOR)
    of_alpha = tl.zeros([RP], tl.float32)
    for first in range(0, most, VECTOR):
        at = o_list[:, None] + (first + o)[None, :]
        there = (first + o)[None, :] < count[:, None]
        p = tl.load(lists.weights + at, mask=there, other=0.0)
        rest = tl.load(results.gradients + 2 * at + 1, mask=there, other=0.0) - delta[:, None]
        tl.store(results.gradients + 2 * at, p, mask=there)
        tl.store(results.gradients + 2 * at + 1, slope(p, a[:, None], A) * rest, mask=there)
        if FORM.WITH_ALPHA:
            of_alpha += tl.sum(tl.where(there, alpha_term(p, a[:, None]) * rest, 0.0), 1)
    if FORM.WITH_ALPHA:
        tl.store(results.row_alpha + number, of_alpha, mask=m_row)
