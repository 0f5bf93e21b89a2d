"""Rows of any support by tiles of R of them: passes over their scores, which are computed again in each.

A normaliser starts from what a sample of the keys estimates, and is found by steps on the logarithm of the sum of the
weights, within an interval; where the sum of the second derivatives costs little, by Halley's method. Few rows take
more than three such passes. The last pass gives out and one more step.
"""

from __future__ import annotations

import triton
import triton.language as tl

from gossamer.entmax.triton.finish import EPS, MOST_STEPS
from gossamer.entmax.triton.formulas import longest
from gossamer.entmax.triton.parameters import ForwardStrides, HeadRows, TileNumbers, TileResults
from gossamer.entmax.triton.rows import load_tile
from gossamer.entmax.triton.tiles import (
    edge_tile,
    line,
    load_rows,
    products,
    rows_at,
    score_of,
    seen_by,
    visible_tiles,
    weigh,
)

SAMPLE_STEPS = tl.constexpr(6)


@triton.jit
def second(p, u, A: tl.constexpr):
    """The second derivative of weights by lam, where Halley's method is taken; else anything."""
    if A == 0.5:
        found = tl.where(u > 0.0, 0.5, 0.0)
    elif A == 0.25:
        found = 0.75 * p / tl.maximum(tl.sqrt(p), 1e-30)
    else:
        found = u
    return found


@triton.jit
def advance(x, F, U, W, low, high, A: tl.constexpr):
    """x by a step towards where F is 1, or half of the interval if that leaves it."""
    log = tl.log(F)
    move = log
    if A == 0.5 or A == 0.25:
        # F^b is nearly straight.
        b = tl.minimum(tl.maximum(1.0 - F * W / (U * U), -0.9), 0.9)
        move = tl.where(tl.abs(b * log) < 1e-3, log, (1.0 - tl.exp(-b * log)) / b)
    new = x + move * F / U
    return tl.where((new >= low) & (new <= high), new, 0.5 * (low + high))


@triton.jit
def sums_of(j, scores_of, given, c, d, a, MASKED: tl.constexpr, FORM: tl.constexpr):
    """[R] of the keys j: the sums of weights and of their first two derivatives, and the largest score, on the line."""
    A: tl.constexpr = FORM.A
    b_q, k_base, stride_kn, K = scores_of
    x = products(b_q, k_base, j, stride_kn, K, FORM.D, FORM.BLOCK_D, MASKED, FORM.PRECISION)
    z, p, u = weigh(x, c, d[:, None], a, A)
    w = second(p, u, A)
    if MASKED:
        seen = seen_by(j, given, MASKED, FORM.POSITIONS)
        z = tl.where(seen, z, -float("inf"))
        p = tl.where(seen, p, 0.0)
        u = tl.where(seen, u, 0.0)
        w = tl.where(seen, w, 0.0)
    W = tl.sum(w, 1) if A == 0.5 or A == 0.25 else tl.zeros_like(d)
    return tl.sum(p, 1), tl.sum(u, 1), W, tl.max(z, 1)


@triton.jit
def add_keys(j, sums, scores_of, of_values, given, c, d, a, MASKED: tl.constexpr, FORM: tl.constexpr):
    """What the keys j add to the sums of weights and of their derivatives, to the sizes of supports, and to out."""
    F, U, size, acc = sums
    b_q, k_base, stride_kn, K = scores_of
    v_base, stride_vn = of_values
    x = products(b_q, k_base, j, stride_kn, K, FORM.D, FORM.BLOCK_D, MASKED, FORM.PRECISION)
    _, p, u = weigh(x, c, d[:, None], a, FORM.A)
    if MASKED:
        seen = seen_by(j, given, MASKED, FORM.POSITIONS)
        p = tl.where(seen, p, 0.0)
        u = tl.where(seen, u, 0.0)
    if FORM.TOLD:
        size += tl.sum((p != 0.0).to(tl.int32), 1)
    if FORM.OUT:
        b_v = load_rows(v_base, j, K, stride_vn, FORM.E, FORM.BLOCK_E, MASKED)
        acc = tl.dot(p.to(b_v.dtype), b_v, acc, input_precision=FORM.PRECISION)
    return F + tl.sum(p, 1), U + tl.sum(u, 1), size, acc


@triton.jit(do_not_specialize=["first_head", "numbers"])
def tiled_kernel(
    q,  # (B, H, Q, D)
    k,  # (B, G, K, D)
    v,  # (B, G, K, E)
    steepness,  # (H,) float32: alpha - 1
    head_rows: HeadRows,
    results: TileResults,
    strides: ForwardStrides,
    first_head,
    H,
    numbers: TileNumbers,
    FORM: tl.constexpr,
):
    """Everything of a tile of rows; the logarithm of a sum of weights is at most NEAR from 0 before its last step."""
    R: tl.constexpr = FORM.R
    STEP: tl.constexpr = FORM.STEP
    SAMPLE: tl.constexpr = FORM.SAMPLE
    A: tl.constexpr = FORM.A
    POSITIONS: tl.constexpr = FORM.POSITIONS
    Q, K, scale = numbers.Q, numbers.K, numbers.scale
    head = first_head + tl.program_id(0)
    head64 = head.to(tl.int64)
    tile = (tl.load(head_rows.counts + head) + R - 1) // R - 1 - tl.program_id(1)  # those that see most are first
    if tile < 0:
        return
    b64, h64, g64 = (head // H).to(tl.int64), (head % H).to(tl.int64), (head % H // FORM.GROUP).to(tl.int64)
    rows, inside = rows_at(head_rows.listed, head_rows.counts, head64, tile, Q, R)
    number = head64 * Q + rows
    b_q = load_tile(q + b64 * strides.at_q.b + h64 * strides.at_q.h, rows, inside, strides.at_q.n, FORM.D, FORM.BLOCK_D)
    k_base = k + b64 * strides.at_k.b + g64 * strides.at_k.h
    v_base = v + b64 * strides.at_v.b + g64 * strides.at_v.h
    a = tl.load(steepness + head % H)
    given, begin, middle, middle_end, end = visible_tiles(rows, inside, b64, h64, head_rows, strides, numbers, FORM)
    edges = middle - begin + end - middle_end
    scores_of = (b_q, k_base, strides.at_k.n, K)

    # An estimate from keys at equal distances.
    first, last = given[:2]
    span = tl.maximum(end - begin, 1).to(tl.int64) * STEP
    some = begin * STEP + (tl.arange(0, SAMPLE) * span // SAMPLE).to(tl.int32)
    x = products(b_q, k_base, some, strides.at_k.n, K, FORM.D, FORM.BLOCK_D, True, FORM.PRECISION)
    in_sight = seen_by(some, given, True, POSITIONS)
    top = tl.max(tl.where(in_sight, x * scale, -float("inf")), 1)
    in_sample = tl.sum(in_sight.to(tl.float32), 1)
    number_seen = tl.maximum(last - first, 1).to(tl.float32)
    each = number_seen / tl.maximum(in_sample, 1.0)
    most = longest(a, number_seen) * (1.0 + 4.0 * EPS)
    lam_row = tl.where(in_sample > 0.0, top, 0.0)
    low = lam_row
    high = lam_row + most
    for _step in range(SAMPLE_STEPS):
        c0, d0 = line(lam_row, a, scale, A)
        _, p, u = weigh(x, c0, d0[:, None], a, A)
        w = second(p, u, A)
        F = each * tl.sum(tl.where(in_sight, p, 0.0), 1)
        U = each * tl.sum(tl.where(in_sight, u, 0.0), 1)
        W = each * tl.sum(tl.where(in_sight, w, 0.0), 1)
        low = tl.where(F >= 1.0, lam_row, low)
        high = tl.where(F < 1.0, lam_row, high)
        lam_row = advance(lam_row, F, U, W, low, high, A)

    low = tl.zeros([R], tl.float32) - float("inf")
    high = tl.zeros([R], tl.float32) + float("inf")
    step = 0
    running = 1
    while running > 0:
        c, d = line(lam_row, a, scale, A)
        F = tl.zeros([R], tl.float32)
        U = tl.zeros([R], tl.float32)
        W = tl.zeros([R], tl.float32)
        z = tl.zeros([R], tl.float32) - float("inf")
        for i in range(edges):
            j = edge_tile(i, begin, middle, middle_end) * STEP + tl.arange(0, STEP)
            f, s, t, m = sums_of(j, scores_of, given, c, d, a, True, FORM)
            F, U, W, z = F + f, U + s, W + t, tl.maximum(z, m)
        for n in range(middle, middle_end):
            j = n * STEP + tl.arange(0, STEP)
            f, s, t, m = sums_of(j, scores_of, given, c, d, a, False, FORM)
            F, U, W, z = F + f, U + s, W + t, tl.maximum(z, m)
        top = score_of(z, lam_row, a, A)
        slack = 1e-5 * (1.0 + tl.abs(top))
        low = tl.maximum(low, top - slack)
        high = tl.minimum(high, top + most + slack)
        low = tl.where(F >= 1.0, tl.maximum(low, lam_row), low)
        high = tl.where(F < 1.0, tl.minimum(high, lam_row), high)
        new = advance(lam_row, F, U, W, low, high, A)
        going = (tl.abs(tl.log(F)) > FORM.NEAR) & (high > low) & inside
        new = tl.where(top == -float("inf"), 0.0, new)
        lam_row = tl.where((F == F) & (new == new), new, lam_row)  # of NaN nothing is found
        step += 1
        running = tl.where(step < MOST_STEPS, tl.max(going.to(tl.int32), 0), 0)

    c, d = line(lam_row, a, scale, A)
    F = tl.zeros([R], tl.float32)
    U = tl.zeros([R], tl.float32)
    size = tl.zeros([R], tl.int32)
    acc = tl.zeros([R, FORM.BLOCK_E], tl.float32)
    sums = (F, U, size, acc)
    of_values = (v_base, strides.at_v.n)
    for i in range(edges):
        j = edge_tile(i, begin, middle, middle_end) * STEP + tl.arange(0, STEP)
        sums = add_keys(j, sums, scores_of, of_values, given, c, d, a, True, FORM)
    for n in range(middle, middle_end):
        j = n * STEP + tl.arange(0, STEP)
        sums = add_keys(j, sums, scores_of, of_values, given, c, d, a, False, FORM)
    F, U, size, acc = sums

    if FORM.OUT:
        o_e = tl.arange(0, FORM.BLOCK_E)
        result = (acc / tl.where(F == 0.0, 1.0, F)[:, None]).to(v.dtype.element_ty)
        tl.store(
            results.out + number[:, None] * FORM.E + o_e[None, :],
            result,
            mask=inside[:, None] & (o_e < FORM.E)[None, :],
        )
    if FORM.TOLD:
        log = tl.log(F)
        lam_row += tl.where(tl.abs(log) < 0.1, log * F / U, F - F)
        tl.store(results.lam + number, tl.where(F == 0.0, float("inf"), lam_row), mask=inside)
        tl.store(results.support + number, size, mask=inside)
        tl.store(results.certified + number, inside, mask=inside)
