"""The gradients of rows without a list, by tiles of them, from their normalisers: scores are computed again."""

from __future__ import annotations

import triton
import triton.language as tl

from gossamer.entmax.triton.formulas import alpha_term
from gossamer.entmax.triton.parameters import (
    BackwardStrides,
    ColumnTerms,
    HeadRows,
    TileKeyResults,
    TileNumbers,
    TileQueryResults,
    TileSizes,
)
from gossamer.entmax.triton.rows import bounds, load_tile
from gossamer.entmax.triton.tiles import (
    NOWHERE,
    edge_tile,
    line,
    load_rows,
    products,
    rows_at,
    seen_by,
    visible_tiles,
    weigh,
)


@triton.jit
def add_keys(j, sums, of_rows, bases, given, MASKED: tl.constexpr, FORM: tl.constexpr):
    """What the keys j add to sum u, delta and sums of w, w (dP - delta), u (dP - delta) k and u k of the keys so far.

    Where they move delta by m, m sum u k is taken from the sum before. So what is rounded to 16 bits, u (dP - delta),
    is dS but for the keys to come: of a key that has nearly all of the weight it is nearly 0.
    """
    sum_u, delta, alpha_u, alpha_dp, with_dp, without = sums
    b_q, b_dout, c, d, a = of_rows
    k_base, v_base, stride_kn, stride_vn = bases
    _first, _last, _at, _kp_base, _stride_kpn, K = given
    b_k = load_rows(k_base, j, K, stride_kn, FORM.D, FORM.BLOCK_D, MASKED)
    x = tl.dot(b_q, tl.trans(b_k), input_precision=FORM.PRECISION)
    dp = products(b_dout, v_base, j, stride_vn, K, FORM.E, FORM.BLOCK_E, MASKED, FORM.PRECISION) - delta[:, None]
    _, p, u = weigh(x, c, d[:, None], a, FORM.A)
    if MASKED:
        seen = seen_by(j, given, MASKED, FORM.POSITIONS)
        p = tl.where(seen, p, 0.0)
        u = tl.where(seen, u, 0.0)
    sum_u += tl.sum(u, 1)
    moved = tl.sum(u * dp, 1) / tl.where(sum_u == 0.0, 1.0, sum_u)
    dp -= moved[:, None]
    if FORM.WITH_ALPHA:
        w = alpha_term(p, a)
        alpha_dp += tl.sum(w * dp, 1) - moved * alpha_u
        alpha_u += tl.sum(w, 1)
    with_dp = tl.dot((u * dp).to(b_k.dtype), b_k, with_dp - moved[:, None] * without, input_precision=FORM.PRECISION)
    without = tl.dot(u.to(b_k.dtype), b_k, without, input_precision=FORM.PRECISION)
    return sum_u, delta + moved, alpha_u, alpha_dp, with_dp, without


@triton.jit(do_not_specialize=["numbers"])
def tiled_dq_kernel(
    q,  # (B, H, Q, D)
    k,  # (B, G, K, D)
    v,  # (B, G, K, E)
    dout,  # (B, H, Q, E)
    steepness,  # (H,) float32
    head_rows: HeadRows,
    lam,  # (B, H, Q) float32
    results: TileQueryResults,
    strides: BackwardStrides,
    H,
    numbers: TileNumbers,
    FORM: tl.constexpr,
):
    """dQ, and delta = sum u dP / sum u, in one pass: see `add_keys`."""
    R: tl.constexpr = FORM.R
    STEP: tl.constexpr = FORM.STEP
    D: tl.constexpr = FORM.D
    BLOCK_D: tl.constexpr = FORM.BLOCK_D
    Q, scale = numbers.Q, numbers.scale
    head = tl.program_id(0)
    head64 = head.to(tl.int64)
    tile = (tl.load(head_rows.counts + head) + R - 1) // R - 1 - tl.program_id(1)
    if tile < 0:
        return
    b64, h64, g64 = (head // H).to(tl.int64), (head % H).to(tl.int64), (head % H // FORM.GROUP).to(tl.int64)
    rows, inside = rows_at(head_rows.listed, head_rows.counts, head64, tile, Q, R)
    number = head64 * Q + rows
    b_q = load_tile(q + b64 * strides.at_q.b + h64 * strides.at_q.h, rows, inside, strides.at_q.n, D, BLOCK_D)
    b_dout = load_tile(
        dout + b64 * strides.at_dout.b + h64 * strides.at_dout.h, rows, inside, strides.at_dout.n, FORM.E, FORM.BLOCK_E
    )
    k_base = k + b64 * strides.at_k.b + g64 * strides.at_k.h
    v_base = v + b64 * strides.at_v.b + g64 * strides.at_v.h
    a = tl.load(steepness + head % H)
    of_row = tl.load(lam + number, mask=inside, other=float("inf"))
    c, d = line(tl.where(of_row == float("inf"), NOWHERE, of_row), a, scale, FORM.A)
    given, begin, middle, middle_end, end = visible_tiles(rows, inside, b64, h64, head_rows, strides, numbers, FORM)
    edges = middle - begin + end - middle_end

    zero = tl.zeros([R], tl.float32)
    sums = (zero, zero, zero, zero, tl.zeros([R, BLOCK_D], tl.float32), tl.zeros([R, BLOCK_D], tl.float32))
    of_rows = (b_q, b_dout, c, d, a)
    bases = (k_base, v_base, strides.at_k.n, strides.at_v.n)
    for i in range(edges):
        j = edge_tile(i, begin, middle, middle_end) * STEP + tl.arange(0, STEP)
        sums = add_keys(j, sums, of_rows, bases, given, True, FORM)
    for n in range(middle, middle_end):
        j = n * STEP + tl.arange(0, STEP)
        sums = add_keys(j, sums, of_rows, bases, given, False, FORM)
    _sum_u, b_delta, _alpha_u, alpha_dp, with_dp, _without = sums
    tl.store(results.delta + number, b_delta, mask=inside)
    if FORM.WITH_ALPHA:
        tl.store(results.row_alpha + number, alpha_dp, mask=inside)
    o_d = tl.arange(0, BLOCK_D)
    b_dq = with_dp * scale
    to = results.dq + number[:, None] * D + o_d[None, :]
    tl.store(to, b_dq, mask=inside[:, None] & (o_d < D)[None, :])


@triton.jit
def add_rows(n, sums, b_k, b_v, j, of_head, bases, head_rows, terms, numbers, MASKED: tl.constexpr, FORM: tl.constexpr):
    """What the n-th tile of rows adds to dK and dV of the keys j [C]; scores are [C, R] here."""
    b_dk, b_dv = sums
    head64, steep = of_head
    Q, K = numbers.Q, numbers.K
    q_base, dout_base, qp_base, kp_base, stride_qn, stride_gn, stride_qpn, stride_kpn = bases
    rows, inside = rows_at(head_rows.listed, head_rows.counts, head64, n, Q, FORM.R)
    b_q = load_tile(q_base, rows, inside, stride_qn, FORM.D, FORM.BLOCK_D)
    b_dout = load_tile(dout_base, rows, inside, stride_gn, FORM.E, FORM.BLOCK_E)
    of_row = tl.load(terms.lam + head64 * Q + rows, mask=inside, other=float("inf"))
    of_row = tl.where(of_row == float("inf"), NOWHERE, of_row)
    b_delta = tl.load(terms.delta + head64 * Q + rows, mask=inside, other=0.0)
    x = tl.dot(b_k, tl.trans(b_q), input_precision=FORM.PRECISION)
    c, d = line(of_row, steep, numbers.scale, FORM.A)
    _, p, u = weigh(x, c, d[None, :], steep, FORM.A)
    if MASKED:
        first, last = bounds(rows, inside, head_rows.lo, head_rows.hi, numbers.offset, K, FORM.BOUNDS)
        at = rows
        if FORM.POSITIONS:
            at = tl.load(qp_base + rows.to(tl.int64) * stride_qpn, mask=inside, other=-1)
        seen = tl.trans(seen_by(j, (first, last, at, kp_base, stride_kpn, K), MASKED, FORM.POSITIONS))
        p = tl.where(seen, p, 0.0)
        u = tl.where(seen, u, 0.0)
    dp = tl.dot(b_v, tl.trans(b_dout), input_precision=FORM.PRECISION)
    ds = u * (dp - b_delta[None, :])
    b_dv = tl.dot(p.to(b_dout.dtype), b_dout, b_dv, input_precision=FORM.PRECISION)
    b_dk = tl.dot(ds.to(b_q.dtype), b_q, b_dk, input_precision=FORM.PRECISION)
    return b_dk, b_dv


@triton.jit(do_not_specialize=["numbers"])
def tiled_columns_kernel(
    q, k, v, dout, steepness,  # as above
    head_rows: HeadRows,
    terms: ColumnTerms,
    results: TileKeyResults,
    strides: BackwardStrides,
    sizes: TileSizes,
    numbers: TileNumbers,
    FORM: tl.constexpr,
):  # fmt: skip
    """What the rows without a list add to dK and dV of COLUMNS keys, in the order of the rows."""
    D: tl.constexpr = FORM.D
    E: tl.constexpr = FORM.E
    BLOCK_D: tl.constexpr = FORM.BLOCK_D
    BLOCK_E: tl.constexpr = FORM.BLOCK_E
    GROUP: tl.constexpr = FORM.GROUP
    R: tl.constexpr = FORM.R
    COLUMNS: tl.constexpr = FORM.COLUMNS
    MEMBERS: tl.constexpr = FORM.MEMBERS
    H, K = sizes.H, numbers.K
    own = tl.program_id(0)
    G = H // GROUP
    b, g = own // G, own % G
    b64, g64 = b.to(tl.int64), g.to(tl.int64)
    members = tl.arange(0, MEMBERS)
    if tl.sum(tl.load(head_rows.counts + b * H + g * GROUP + members, mask=members < GROUP, other=0), 0) == 0:
        return
    begin = tl.program_id(1) * COLUMNS
    j = begin + tl.arange(0, COLUMNS)
    b_k = load_tile(k + b64 * strides.at_k.b + g64 * strides.at_k.h, j, j < K, strides.at_k.n, D, BLOCK_D)
    b_v = load_tile(v + b64 * strides.at_v.b + g64 * strides.at_v.h, j, j < K, strides.at_v.n, E, BLOCK_E)
    b_dk = tl.zeros([COLUMNS, BLOCK_D], tl.float32)
    b_dv = tl.zeros([COLUMNS, BLOCK_E], tl.float32)
    for member in range(GROUP):
        h = g * GROUP + member
        h64 = h.to(tl.int64)
        head64 = (b * H + h).to(tl.int64)
        count = (tl.load(head_rows.counts + head64) + R - 1) // R
        # Tiles [start, whole) of rows see these keys in part, those of [whole, stop) each of them.
        start = count
        stop = 0
        whole = 0
        for base in range(0, count, FORM.SPAN):
            n = base + tl.arange(0, FORM.SPAN)
            at = terms.ranges + (head64 * sizes.tiles + n) * 4
            there = n < count
            overlap = there & (tl.load(at, mask=there, other=0) < begin + COLUMNS)
            overlap = overlap & (tl.load(at + 1, mask=there, other=0) > begin)
            part = (tl.load(at + 2, mask=there, other=0) > begin) | (
                tl.load(at + 3, mask=there, other=0) < begin + COLUMNS
            )
            start = tl.minimum(start, tl.min(tl.where(overlap, n, count), 0))
            stop = tl.maximum(stop, tl.max(tl.where(overlap, n + 1, 0), 0))
            whole = tl.maximum(whole, tl.max(tl.where(overlap & part, n + 1, 0), 0))
        whole = tl.maximum(whole, start)
        if FORM.POSITIONS:
            whole = tl.maximum(stop, start)
        of_head = (head64, tl.load(steepness + h))
        at_qp, at_kp = strides.at_q_positions, strides.at_k_positions
        bases = (
            q + b64 * strides.at_q.b + h64 * strides.at_q.h, dout + b64 * strides.at_dout.b + h64 * strides.at_dout.h,
            head_rows.q_positions + b64 * at_qp.b + h64 * at_qp.h,
            head_rows.k_positions + b64 * at_kp.b + h64 * at_kp.h,
            strides.at_q.n, strides.at_dout.n, at_qp.n, at_kp.n,
        )  # fmt: skip
        for n in range(start, whole):
            b_dk, b_dv = add_rows(n, (b_dk, b_dv), b_k, b_v, j, of_head, bases, head_rows, terms, numbers, True, FORM)
        for n in range(whole, stop):
            b_dk, b_dv = add_rows(n, (b_dk, b_dv), b_k, b_v, j, of_head, bases, head_rows, terms, numbers, False, FORM)
    o_d = tl.arange(0, BLOCK_D)
    o_e = tl.arange(0, BLOCK_E)
    m_d = (j < K)[:, None] & (o_d < D)[None, :]
    m_e = (j < K)[:, None] & (o_e < E)[None, :]
    to_k = results.dk + ((own.to(tl.int64) * K + j)[:, None] * D + o_d[None, :])
    to_v = results.dv + ((own.to(tl.int64) * K + j)[:, None] * E + o_e[None, :])
    b_dk = b_dk * numbers.scale + tl.load(to_k, mask=m_d, other=0.0)
    b_dv = b_dv + tl.load(to_v, mask=m_e, other=0.0)
    tl.store(to_k, b_dk, mask=m_d)
    tl.store(to_v, b_dv, mask=m_e)
