"""dQ and the gradient of tau: a tile of queries over its window and the list of keys that live in it."""

from __future__ import annotations

import triton
import triton.language as tl

from gossamer.sparse_k.triton.steps import (
    LOG2E,
    gated_scores,
    gates,
    live_keys,
    of_keys,
    rows,
    store_rows,
    through_gate,
)


@triton.jit
def row_sums(
    dout_ptr, out_ptr, dlse_ptr, delta_ptr, stride_b, stride_h, stride_n, H, N, E: tl.constexpr,
    HAS_DLSE: tl.constexpr, SIZE_E: tl.constexpr, BLOCK: tl.constexpr,
):  # fmt: skip
    """delta = rowsum(dO * out) - dlse, (B, H, N)."""
    head = tl.program_id(1).to(tl.int64)
    row = tl.program_id(0) * BLOCK + tl.arange(0, BLOCK)
    inside = row < N
    dout = rows(dout_ptr + head // H * stride_b + head % H * stride_h, row, stride_n, inside, E, SIZE_E, False)
    out = rows(out_ptr + head * N * E, row, E, inside, E, SIZE_E, False)
    delta = tl.sum(dout.to(tl.float32) * out.to(tl.float32), 1)
    if HAS_DLSE:
        delta -= tl.load(dlse_ptr + head * N + row, mask=inside, other=0.0)
    tl.store(delta_ptr + head * N + row, delta, mask=inside)


@triton.jit
def _window_step(
    q, dout, k_ptr, v_ptr, n, row, lse2, delta, window, stride_kn, stride_vn, N, factor, dq, EDGE: tl.constexpr,
    FORM: tl.constexpr,
):  # fmt: skip
    """As in the forward."""
    key = n + tl.arange(0, FORM.BLOCK_N)
    k = rows(k_ptr, key, stride_kn, key < N, FORM.D, FORM.SIZE_D, not EDGE)
    v = rows(v_ptr, key, stride_vn, key < N, FORM.E, FORM.SIZE_E, not EDGE)
    s = tl.dot(q, k.T, input_precision=FORM.PRECISION)
    p = tl.exp2(s * factor - lse2[:, None])
    if EDGE:
        distance = row[:, None] - key[None, :]
        p = tl.where((distance >= 0) & (distance <= window), p, 0.0)
    dp = tl.dot(dout, v.T, input_precision=FORM.PRECISION)
    ds = p * (dp - delta[:, None])
    return tl.dot(ds.to(k.dtype), k, dq, input_precision=FORM.PRECISION)


@triton.jit
def _live_step(
    q, dout, k_ptr, v_ptr, u_ptr, last_ptr, last_gated_ptr, list_ptr, n, end, over, capacity, row, tau, lse2, delta,
    window, stride_kn, stride_vn, factor, dq, dtau, WHOLE: tl.constexpr, FORM: tl.constexpr,
):  # fmt: skip
    """As in the forward; dtau with what comes through gates."""
    key, there = live_keys(list_ptr, n + tl.arange(0, FORM.BLOCK_N), end, over, capacity, WHOLE)
    k = rows(k_ptr, key, stride_kn, there, FORM.D, FORM.SIZE_D, WHOLE)
    v = rows(v_ptr, key, stride_vn, there, FORM.E, FORM.SIZE_E, WHOLE)
    m = gates(of_keys(u_ptr, key, there, 0.0, WHOLE)[None, :], tau[:, None])
    s = tl.dot(q, k.T, input_precision=FORM.PRECISION)
    p = tl.exp2(gated_scores(s, m, factor, FORM.GATE) - lse2[:, None])
    if not WHOLE:
        past = row[:, None] > (key + window)[None, :]
        kept = past & (row[:, None] <= of_keys(last_ptr, key, there, -1, False)[None, :])
        p = tl.where(kept, p, 0.0)
    dp = tl.dot(dout, v.T, input_precision=FORM.PRECISION)
    ds, dm = through_gate(s, p, dp, m, delta[:, None], lse2[:, None], factor, FORM.GATE, FORM.STRAIGHT)
    if FORM.GATE != "none" or FORM.STRAIGHT:
        counts = (m > 0) & (m < 1)
        if not WHOLE:
            gated = kept
            if FORM.STRAIGHT:
                gated = past & (row[:, None] <= of_keys(last_gated_ptr, key, there, -1, False)[None, :])
            counts = counts & gated
        dtau -= tl.sum(tl.where(counts, dm, 0.0), 1)
    return tl.dot(ds.to(k.dtype), k, dq, input_precision=FORM.PRECISION), dtau


@triton.jit
def gated_query_gradient(
    q_ptr, k_ptr, v_ptr, u_ptr, tau_ptr, last_ptr, last_gated_ptr, list_ptr, counts_ptr, dout_ptr, lse_ptr, delta_ptr,
    dq_ptr, dtau_ptr, stride_qb, stride_qh, stride_qn, stride_kb, stride_kh, stride_kn, stride_vb, stride_vh,
    stride_vn, stride_ob, stride_oh, stride_on, H, G, U, N, window, tiles, capacity, scale, FORM: tl.constexpr,
):  # fmt: skip
    """As `gated_forward`; dtau is of each query head, (B, H, N)."""
    tile, head = tiles - 1 - tl.program_id(0), tl.program_id(1)
    b, h = (head // H).to(tl.int64), (head % H).to(tl.int64)
    g, unit = h // (H // G), b * U + h // (H // U)
    of_head = head.to(tl.int64) * N
    q_ptr += b * stride_qb + h * stride_qh
    dout_ptr += b * stride_ob + h * stride_oh
    k_ptr += b * stride_kb + g * stride_kh
    v_ptr += b * stride_vb + g * stride_vh
    u_ptr += unit * N
    last_ptr += unit * N
    last_gated_ptr += unit * N
    factor = scale * LOG2E
    start = tile * FORM.BLOCK_M
    row = start + tl.arange(0, FORM.BLOCK_M)
    inside = row < N
    q = rows(q_ptr, row, stride_qn, inside, FORM.D, FORM.SIZE_D, False)
    dout = rows(dout_ptr, row, stride_on, inside, FORM.E, FORM.SIZE_E, False)
    tau = tl.load(tau_ptr + unit * N + row, mask=inside, other=0.0)
    lse2 = tl.load(lse_ptr + of_head + row, mask=inside, other=float("inf")) * LOG2E
    delta = tl.load(delta_ptr + of_head + row, mask=inside, other=0.0)
    dq = tl.zeros((FORM.BLOCK_M, FORM.SIZE_D), tl.float32)
    dtau = tl.zeros((FORM.BLOCK_M,), tl.float32)

    at = unit * tiles + tile
    through, listed = tl.load(counts_ptr + at * 2), tl.load(counts_ptr + at * 2 + 1)
    list_ptr += at * capacity
    over = listed > capacity
    # Pairs that count for the gate alone are masked.
    whole = tl.where(over | FORM.STRAIGHT, 0, through // FORM.BLOCK_N * FORM.BLOCK_N)
    end = tl.where(over, tl.maximum(tl.minimum(start + FORM.BLOCK_M, N) - window - 1, 0), listed)
    for n in range(0, whole, FORM.BLOCK_N):
        dq, dtau = _live_step(
            q, dout, k_ptr, v_ptr, u_ptr, last_ptr, last_gated_ptr, list_ptr, n, end, over, capacity, row, tau, lse2,
            delta, window, stride_kn, stride_vn, factor, dq, dtau, True, FORM,
        )  # fmt: skip
    for n in range(whole, end, FORM.BLOCK_N):
        dq, dtau = _live_step(
            q, dout, k_ptr, v_ptr, u_ptr, last_ptr, last_gated_ptr, list_ptr, n, end, over, capacity, row, tau, lse2,
            delta, window, stride_kn, stride_vn, factor, dq, dtau, False, FORM,
        )  # fmt: skip

    first = tl.maximum(start - window, 0) // FORM.BLOCK_N * FORM.BLOCK_N
    inner = tl.maximum(tl.cdiv(tl.maximum(start + FORM.BLOCK_M - 1 - window, 0), FORM.BLOCK_N) * FORM.BLOCK_N, first)
    inner = tl.minimum(inner, start)
    for n in range(first, inner, FORM.BLOCK_N):
        dq = _window_step(
            q, dout, k_ptr, v_ptr, n, row, lse2, delta, window, stride_kn, stride_vn, N, factor, dq, True, FORM,
        )  # fmt: skip
    for n in range(inner, start, FORM.BLOCK_N):
        dq = _window_step(
            q, dout, k_ptr, v_ptr, n, row, lse2, delta, window, stride_kn, stride_vn, N, factor, dq, False, FORM,
        )  # fmt: skip
    for n in range(start, tl.minimum(start + FORM.BLOCK_M, N), FORM.BLOCK_N):
        dq = _window_step(
            q, dout, k_ptr, v_ptr, n, row, lse2, delta, window, stride_kn, stride_vn, N, factor, dq, True, FORM,
        )  # fmt: skip
    store_rows(dq_ptr + of_head * FORM.D, row, FORM.D, inside, FORM.D, dq * scale, FORM.SIZE_D)
    tl.store(dtau_ptr + of_head + row, dtau, mask=inside)
