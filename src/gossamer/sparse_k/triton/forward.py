"""The forward of SparseK attention: a tile of queries over its window, and over the list of keys that live in it."""

from __future__ import annotations

import triton
import triton.language as tl

from gossamer.sparse_k.triton.steps import LN2, gated_scores, gates, live_keys, of_keys, rows, store_rows


@triton.jit
def _update(s, v, u, tau, acc, top, total, factor, FOLD: tl.constexpr, GATED: tl.constexpr, PRECISION: tl.constexpr):
    """One step of the softmax. Scores are in base 2, or with FOLD before `factor`; gates multiply values with GATED."""
    new_top = tl.maximum(top, tl.max(s, 1))
    # A row of which nothing was attended yet has no largest score.
    reference = tl.where(new_top == float("-inf"), 0.0, new_top)
    if FOLD:
        reference *= factor
        p = tl.exp2(s * factor - reference[:, None])
        correction = tl.exp2(top * factor - reference)
    else:
        p = tl.exp2(s - reference[:, None])
        correction = tl.exp2(top - reference)
    total = total * correction + tl.sum(p, 1)
    if GATED:
        p = p * gates(u[None, :], tau[:, None])
    acc = tl.dot(p.to(v.dtype), v, acc * correction[:, None], input_precision=PRECISION)
    return acc, new_top, total


@triton.jit
def gated_forward(
    q_ptr, k_ptr, v_ptr, u_ptr, tau_ptr, last_ptr, list_ptr, counts_ptr, out_ptr, lse_ptr,
    stride_qb, stride_qh, stride_qn, stride_kb, stride_kh, stride_kn, stride_vb, stride_vh, stride_vn,
    H, G, U, N, window, tiles, capacity, factor, FORM: tl.constexpr,
):  # fmt: skip
    """Query tile program 0, the last first, of batch element and head program 1.

    Args:
        q_ptr, k_ptr, v_ptr: (B, H, N, D), (B, G, N, D), (B, G, N, E), contiguous in the last dimension.
        u_ptr, tau_ptr, last_ptr: (B, U, N), contiguous.
        list_ptr, counts_ptr: of `live_lists` for BLOCK_M queries.
        out_ptr, lse_ptr: (B, H, N, E) and (B, H, N), contiguous.
        factor: of a product of q and k in a score of base 2; over 0 with FOLD.
    """
    tile, head = tiles - 1 - tl.program_id(0), tl.program_id(1)
    b, h = (head // H).to(tl.int64), (head % H).to(tl.int64)
    g, unit = h // (H // G), b * U + h // (H // U)
    q_ptr += b * stride_qb + h * stride_qh
    k_ptr += b * stride_kb + g * stride_kh
    v_ptr += b * stride_vb + g * stride_vh
    u_ptr += unit * N
    last_ptr += unit * N
    start = tile * FORM.BLOCK_M
    row = start + tl.arange(0, FORM.BLOCK_M)
    inside = row < N
    q = rows(q_ptr, row, stride_qn, inside, FORM.D, FORM.SIZE_D, False)
    tau = tl.load(tau_ptr + unit * N + row, mask=inside, other=0.0)
    top = tl.full((FORM.BLOCK_M,), float("-inf"), tl.float32)
    total = tl.zeros((FORM.BLOCK_M,), tl.float32)
    acc = tl.zeros((FORM.BLOCK_M, FORM.SIZE_E), tl.float32)

    # The keys of the tile itself. This loop is known to run: behind one that may not, ptxas would run the products of
    # all loops one by one, since their sums begin as numbers that no product has made.
    for n in range(start, start + FORM.BLOCK_M, FORM.BLOCK_N):
        acc, top, total = _window_step(
            q, k_ptr, v_ptr, n, row, window, stride_kn, stride_vn, N, factor, acc, top, total, True, FORM,
        )  # fmt: skip

    # Keys that live through the tile: every pair is kept.
    at = unit * tiles + tile
    through, listed = tl.load(counts_ptr + at * 2), tl.load(counts_ptr + at * 2 + 1)
    list_ptr += at * capacity
    over = listed > capacity
    whole = tl.where(over, 0, through // FORM.BLOCK_N * FORM.BLOCK_N)
    end = tl.where(over, tl.maximum(tl.minimum(start + FORM.BLOCK_M, N) - window - 1, 0), listed)
    for n in range(0, whole, FORM.BLOCK_N):
        acc, top, total = _live_step(
            q, k_ptr, v_ptr, u_ptr, last_ptr, list_ptr, n, end, over, capacity, row, tau, window, stride_kn, stride_vn,
            factor, acc, top, total, True, FORM,
        )  # fmt: skip
    # The others, some pairs of which are kept.
    for n in range(whole, end, FORM.BLOCK_N):
        acc, top, total = _live_step(
            q, k_ptr, v_ptr, u_ptr, last_ptr, list_ptr, n, end, over, capacity, row, tau, window, stride_kn, stride_vn,
            factor, acc, top, total, False, FORM,
        )  # fmt: skip

    # The window before the tile: ungated; past its edge every pair of a block is attended.
    first = tl.maximum(start - window, 0) // FORM.BLOCK_N * FORM.BLOCK_N
    inner = tl.maximum(tl.cdiv(tl.maximum(start + FORM.BLOCK_M - 1 - window, 0), FORM.BLOCK_N) * FORM.BLOCK_N, first)
    inner = tl.minimum(inner, start)
    for n in range(first, inner, FORM.BLOCK_N):
        acc, top, total = _window_step(
            q, k_ptr, v_ptr, n, row, window, stride_kn, stride_vn, N, factor, acc, top, total, True, FORM,
        )  # fmt: skip
    for n in range(inner, start, FORM.BLOCK_N):
        acc, top, total = _window_step(
            q, k_ptr, v_ptr, n, row, window, stride_kn, stride_vn, N, factor, acc, top, total, False, FORM,
        )  # fmt: skip

    if FORM.FOLD:
        top = top * factor
    # A threshold that is not a number shows.
    total = tl.where(tau == tau, total, float("nan"))
    store_rows(out_ptr + head.to(tl.int64) * N * FORM.E, row, FORM.E, inside, FORM.E, acc / total[:, None], FORM.SIZE_E)
    tl.store(lse_ptr + head.to(tl.int64) * N + row, (top + tl.log2(total)) * LN2, mask=inside)


@triton.jit
def _window_step(
    q, k_ptr, v_ptr, n, row, window, stride_kn, stride_vn, N, factor, acc, top, total,
    EDGE: tl.constexpr, FORM: tl.constexpr,
):  # fmt: skip
    """The keys n, ..., n + BLOCK_N - 1; EDGE: not every pair is one of the window."""
    key = n + tl.arange(0, FORM.BLOCK_N)
    k = rows(k_ptr, key, stride_kn, key < N, FORM.D, FORM.SIZE_D, not EDGE)
    v = rows(v_ptr, key, stride_vn, key < N, FORM.E, FORM.SIZE_E, not EDGE)
    s = tl.dot(q, k.T, input_precision=FORM.PRECISION)
    if not FORM.FOLD:
        s = s * factor
    if EDGE:
        distance = row[:, None] - key[None, :]
        s = tl.where((distance >= 0) & (distance <= window), s, float("-inf"))
    return _update(s, v, top, top, acc, top, total, factor, FORM.FOLD, False, FORM.PRECISION)


@triton.jit
def _live_step(
    q, k_ptr, v_ptr, u_ptr, last_ptr, list_ptr, n, end, over, capacity, row, tau, window, stride_kn, stride_vn,
    factor, acc, top, total, WHOLE: tl.constexpr, FORM: tl.constexpr,
):  # fmt: skip
    """The entries n, ..., n + BLOCK_N - 1 of a list; WHOLE: every pair is kept."""
    key, there = live_keys(list_ptr, n + tl.arange(0, FORM.BLOCK_N), end, over, capacity, WHOLE)
    k = rows(k_ptr, key, stride_kn, there, FORM.D, FORM.SIZE_D, WHOLE)
    v = rows(v_ptr, key, stride_vn, there, FORM.E, FORM.SIZE_E, WHOLE)
    u = of_keys(u_ptr, key, there, 0.0, WHOLE)
    s = tl.dot(q, k.T, input_precision=FORM.PRECISION)
    if not FORM.FOLD:
        s = gated_scores(s, gates(u[None, :], tau[:, None]), factor, FORM.GATE)
    if not WHOLE:
        last = of_keys(last_ptr, key, there, -1, False)
        kept = (row[:, None] > (key + window)[None, :]) & (row[:, None] <= last[None, :])
        s = tl.where(kept, s, float("-inf"))
    gated: tl.constexpr = FORM.GATE == "v" or FORM.GATE == "kv"
    return _update(s, v, u, tau, acc, top, total, factor, FORM.FOLD, gated, FORM.PRECISION)
