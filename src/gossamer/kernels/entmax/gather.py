"""What is computed of rows by their lists alone: out, and dQ with the gradient of each score.

Rows are gathered in pieces of S numbers, as in `triton/gather/row_kernels.py`; a program has RP rows.
"""

from __future__ import annotations

import triton
import triton.language as tl

from gossamer.kernels.entmax.columns import store_sums, weighted
from gossamer.kernels.entmax.formulas import alpha_term, slope
from gossamer.kernels.entmax.rows import load_tile
from gossamer.kernels.triton.gather.pieces import added, load_columns, store_pieces, zeros


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
    found: tl.tuple = ()
    for c in tl.static_range(N):
        found += (tl.load(pointers + c, mask=c < left, other=start),)
    return found


@triton.jit
def weights_of(pointers, left, N: tl.constexpr):
    """The next N weights of each list; 0 past the end."""
    found: tl.tuple = ()
    for c in tl.static_range(N):
        found += (tl.load(pointers + c, mask=c < left, other=0.0),)
    return found


@triton.jit(do_not_specialize=["first_row", "n_rows", "Q"])
def gather_out_kernel(
    v,  # (B, G, K, E)
    out,  # (B, H, Q, E), contiguous
    list_keys,  # (rows, L) int32
    list_weights,  # (rows, L) float32
    list_counts,  # (B, H, Q) int32
    stride_vb, stride_vh, stride_vn: tl.constexpr, first_row, n_rows, H, Q,
    L: tl.constexpr, E: tl.constexpr, SE: tl.constexpr, RP: tl.constexpr, N: tl.constexpr, GROUP: tl.constexpr,
):  # fmt: skip
    """out = sum p v of RP rows that have lists."""
    own = tl.program_id(0) * RP + tl.arange(0, RP)
    m_row = own < n_rows
    number = first_row + own
    b64, _, g64, _ = place_of(number, H, Q, GROUP)
    o_e = tl.arange(0, SE)[None, :]
    v_base = v + (b64 * stride_vb + g64 * stride_vh)[:, None] + o_e
    left = tl.load(list_counts + number, mask=m_row, other=-1)
    m_row = left >= 0
    acc = zeros(RP, E, SE)
    key_at = list_keys + own.to(tl.int64) * L
    weight_at = list_weights + own.to(tl.int64) * L
    some = left > 0
    start = tl.load(key_at, mask=some, other=0)
    for _step in range(0, tl.max(left, 0), N):
        j = keys_of(key_at, left, start, N)
        p = weights_of(weight_at, left, N)
        b_v = load_columns(v_base, j, stride_vn, E, SE, N)
        for c in tl.static_range(N):
            acc = added(acc, p[c], b_v[c], E, SE)
        key_at += N
        weight_at += N
        left -= N
    store_pieces(out + o_e, number.to(tl.int64) * E, m_row, where(some, acc, E, SE), E, SE, True)


@triton.jit
def pair_of(start, begins, ends, number, L: tl.constexpr, CHUNK: tl.constexpr):
    """The next CHUNK pairs of rows whose lists, put together, begin and end there.

    Returns:
        own [ROWS, CHUNK]: which row has which; name [CHUNK]: their places in the lists.
    """
    place = start + tl.arange(0, CHUNK)
    own = (place[None, :] >= begins[:, None]) & (place[None, :] < ends[:, None])
    name = tl.sum(tl.where(own, (number * L - begins)[:, None], 0), 0) + place
    return own, name


@triton.jit(do_not_specialize=["Q"])
def gather_dq_kernel(
    k,  # (B, G, K, D)
    v,  # (B, G, K, E)
    dout,  # (B, H, Q, E)
    steepness,  # (H,) float32
    dq,  # (B, H, Q, D), contiguous
    gradients,  # (rows, L, 2) float32, to write: p and dS of each listed pair
    row_alpha,  # (B, H, Q) float32, to write: the gradient of alpha of each row
    list_keys,  # (rows, L) int32
    list_weights,  # (rows, L) float32
    list_counts,  # (B, H, Q) int32
    stride_kb, stride_kh, stride_kn, stride_vb, stride_vh, stride_vn, stride_gb, stride_gh, stride_gn, H, Q, scale,
    L: tl.constexpr, D: tl.constexpr, E: tl.constexpr, BLOCK_D: tl.constexpr, BLOCK_E: tl.constexpr,
    ROWS: tl.constexpr, CHUNK: tl.constexpr, STAGES: tl.constexpr, GROUP: tl.constexpr, A: tl.constexpr,
    WITH_ALPHA: tl.constexpr, SPLIT: tl.constexpr, PRECISION: tl.constexpr,
):  # fmt: skip
    """dQ of ROWS rows of a head that have lists, and dS = u (dP - delta) of their pairs: delta = sum u dP / sum u.

    Their pairs are taken CHUNK at a time, whatever rows they are of, first with their values, then with their keys.
    """
    blocks = (Q + ROWS - 1) // ROWS
    head = tl.program_id(0) // blocks
    row = tl.program_id(0) % blocks * ROWS + tl.arange(0, ROWS)
    b64, h64, g64 = (head // H).to(tl.int64), (head % H).to(tl.int64), (head % H // GROUP).to(tl.int64)
    k_base = k + b64 * stride_kb + g64 * stride_kh
    v_base = v + b64 * stride_vb + g64 * stride_vh
    b_dout = load_tile(dout + b64 * stride_gb + h64 * stride_gh, row, row < Q, stride_gn, E, BLOCK_E)
    a = tl.load(steepness + h64)
    number = head * Q + row
    count = tl.load(list_counts + number, mask=row < Q, other=-1)
    size = tl.maximum(count, 0)
    ends = tl.cumsum(size, 0)
    begins = ends - size
    total = tl.sum(size, 0)
    sum_dp = tl.zeros([ROWS, CHUNK], tl.float32)
    sum_u = tl.zeros([ROWS, CHUNK], tl.float32)
    o_d = tl.arange(0, BLOCK_D)[None, :]
    o_e = tl.arange(0, BLOCK_E)[None, :]
    for start in tl.range(0, total, CHUNK, num_stages=STAGES):
        own, name = pair_of(start, begins, ends, number, L, CHUNK)
        there = start + tl.arange(0, CHUNK) < total
        j = tl.load(list_keys + name, mask=there, other=0)
        p = tl.load(list_weights + name, mask=there, other=0.0)
        at = v_base + j.to(tl.int64)[:, None] * stride_vn + o_e
        b_v = tl.load(at, mask=there[:, None] & (o_e < E), other=0.0)
        x = tl.where(own, tl.dot(b_dout, tl.trans(b_v), input_precision=PRECISION), 0.0)
        u = slope(p, a, A)[None, :]
        tl.store(gradients + 2 * name.to(tl.int64) + 1, tl.sum(x, 0), mask=there)
        sum_u += tl.where(own, u, 0.0)
        sum_dp += tl.where(own, u * x, 0.0)
    of_row = tl.sum(sum_u, 1)
    delta = tl.sum(sum_dp, 1) / tl.where(of_row == 0.0, 1.0, of_row)
    tl.debug_barrier()
    b_dq = tl.zeros([ROWS, BLOCK_D], tl.float32)
    of_alpha = tl.zeros([ROWS, CHUNK], tl.float32)
    for start in tl.range(0, total, CHUNK, num_stages=STAGES):
        own, name = pair_of(start, begins, ends, number, L, CHUNK)
        there = start + tl.arange(0, CHUNK) < total
        j = tl.load(list_keys + name, mask=there, other=0)
        p = tl.load(list_weights + name, mask=there, other=0.0)
        dp = tl.load(gradients + 2 * name.to(tl.int64) + 1, mask=there, other=0.0)
        at = k_base + j.to(tl.int64)[:, None] * stride_kn + o_d
        b_k = tl.load(at, mask=there[:, None] & (o_d < D), other=0.0)
        rest = dp - tl.sum(tl.where(own, delta[:, None], 0.0), 0)
        ds = slope(p, a, A) * rest
        tl.store(gradients + 2 * name.to(tl.int64), p, mask=there)
        tl.store(gradients + 2 * name.to(tl.int64) + 1, ds, mask=there)
        b_dq = weighted(b_dq, own, ds, b_k, SPLIT, PRECISION)
        if WITH_ALPHA:
            of_alpha += tl.where(own, (alpha_term(p, a) * rest)[None, :], 0.0)
    store_sums(dq, b_dq * scale, number, count >= 0, D, BLOCK_D)
    if WITH_ALPHA:
        tl.store(row_alpha + number, tl.sum(of_alpha, 1), mask=count >= 0)
