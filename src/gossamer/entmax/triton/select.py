"""The contenders of each row: two passes over its scores, of which the first bounds what the second keeps.

Of every group of keys a row's largest score is held: group c are the keys c, c + STEP, ... of its tiles. These are a
part of the row, so that no weight in the row is under the cut of their own normaliser, and no score that is under the
`keep`-th largest of them is among the `keep` largest. The second pass keeps what is not under the bound. A row with
more contenders than fit is given up. Places are drawn by atomic additions, so that `order_contenders_kernel` follows.
"""

from __future__ import annotations

import triton
import triton.language as tl

from gossamer.entmax.triton.formulas import LOWEST, MARGIN, cut, middle, newton, ordered, powers, unordered
from gossamer.entmax.triton.parameters import Candidates, ScoreStrides, SelectNumbers, VisibleKeys
from gossamer.entmax.triton.rows import bounds, key_range, key_tile, load_tile, relative

STEPS = tl.constexpr(4)  # of Newton's method for a bound


@triton.jit
def bound_of(s, a, keep, A: tl.constexpr, TOP: tl.constexpr, WEIGHED: tl.constexpr):
    """The bound of rows by some of their scores s [R, C], -inf where there is none."""
    top = tl.max(s, 1)
    bound = tl.zeros_like(top) + LOWEST
    if WEIGHED:
        t = relative(s, top)
        x = tl.zeros_like(top)
        for _ in range(STEPS):
            p, u = powers(t - x[:, None], a[:, None], A)
            x += newton(tl.sum(p, 1), tl.sum(u, 1), a, A)
        found = cut(top + x, a)
        found -= MARGIN * (tl.abs(top) + x + tl.abs(found))
        bound = tl.where(found > bound, found, bound)  # of NaN: not
    if TOP:
        order = tl.where(s == -float("inf"), ordered(bound)[:, None], ordered(s))
        low = ordered(bound)
        high = tl.maximum(tl.max(order, 1), low)
        few = tl.sum((s > -float("inf")).to(tl.int32), 1) < keep
        high = tl.where(few, low, high)
        while tl.max((low < high).to(tl.int32), 0) > 0:
            between = middle(low, high)
            enough = tl.sum((order >= between[:, None]).to(tl.int32), 1) >= keep
            low = tl.where(enough, between, low)
            high = tl.where(enough, high, tl.maximum(between - 1, low))
        bound = unordered(low)
    return bound


@triton.jit
def drawn(counters, mask, PTX: tl.constexpr):
    """Add 1 to each counter where `mask` says so; what it was before.

    The compiler cannot lay out an atomic addition behind a product (an assertion of Triton 3.9): it is written as PTX.
    """
    if PTX:
        code: tl.constexpr = (
            "{ .reg .pred p; setp.ne.b32 p, $2, 0; mov.b32 $0, 0; @p atom.relaxed.gpu.global.add.u32 $0, [$1], 1; }"
        )
        before = tl.inline_asm_elementwise(
            code, "=r,l,r", [counters.to(tl.int64), mask.to(tl.int32)], dtype=tl.int32, is_pure=False, pack=1
        )
    else:
        before = tl.atomic_add(counters, 1, mask=mask, sem="relaxed")
    return before


@triton.jit(do_not_specialize=["numbers"])
def select_kernel(
    q,  # (B, H, Q, D)
    k,  # (B, G, K, D)
    steepness,  # (H,) float32: alpha - 1
    visible: VisibleKeys,
    candidates: Candidates,  # to write; counts, zero before, are of the contenders, of which the first C are kept
    strides: ScoreStrides,
    H,
    numbers: SelectNumbers,
    FORM: tl.constexpr,
):
    """The contenders of R rows; blocks count over (B, H, blocks of R rows), the last rows of a head first."""
    D: tl.constexpr = FORM.D
    BLOCK_D: tl.constexpr = FORM.BLOCK_D
    R: tl.constexpr = FORM.R
    STEP: tl.constexpr = FORM.STEP
    Q, K = numbers.Q, numbers.K
    own = tl.program_id(0).to(tl.int64)
    blocks = (Q + R - 1) // R
    block = numbers.first_block + tl.program_id(0)
    head, start = block // blocks, (blocks - 1 - block % blocks) * R
    b64, h64, g64 = (head // H).to(tl.int64), (head % H).to(tl.int64), (head % H // FORM.GROUP).to(tl.int64)
    rows = start + tl.arange(0, R)
    inside = rows < Q
    b_q = load_tile(q + b64 * strides.at_q.b + h64 * strides.at_q.h, rows, inside, strides.at_q.n, D, BLOCK_D)
    k_base = k + b64 * strides.at_k.b + g64 * strides.at_k.h
    a = tl.zeros([R], tl.float32) + tl.load(steepness + head % H)
    first, last = bounds(rows, inside, visible.lo, visible.hi, numbers.offset, K, FORM.BOUNDS)
    at = rows
    kp_base = visible.k_positions
    if FORM.POSITIONS:
        at = tl.load(
            visible.q_positions
            + b64 * strides.at_q_positions.b
            + h64 * strides.at_q_positions.h
            + rows.to(tl.int64) * strides.at_q_positions.n,
            mask=inside,
        )
        kp_base = visible.k_positions + b64 * strides.at_k_positions.b + h64 * strides.at_k_positions.h
    begin, tiles = key_range(first, last, inside, K, STEP)
    scores_of = (b_q, k_base, strides.at_k.n, first, last, at, kp_base, strides.at_k_positions.n, numbers.scale, K)
    largest = tl.zeros([R, STEP], tl.float32) - float("inf")
    for tile in range(begin, begin + tiles):
        j, s = key_tile(tile, scores_of, STEP, D, BLOCK_D, FORM.POSITIONS, FORM.PRECISION)
        largest = tl.maximum(largest, s)
    bound = bound_of(largest, a, numbers.keep, FORM.A, FORM.TOP, FORM.WEIGHED)
    place = own * R + tl.arange(0, R)
    for tile in range(begin, begin + tiles):
        j, s = key_tile(tile, scores_of, STEP, D, BLOCK_D, FORM.POSITIONS, FORM.PRECISION)
        kept = (s >= bound[:, None]) | (s != s)
        own_row = place[:, None] + tl.zeros([R, STEP], tl.int64)
        n = drawn(candidates.counts + own_row, kept, FORM.PTX)
        kept = kept & (n < FORM.C)
        to = own_row * FORM.C + n
        tl.store(candidates.scores + to, s, mask=kept)
        tl.store(candidates.keys + to, tl.broadcast_to(j[None, :], [R, STEP]), mask=kept)


@triton.jit(do_not_specialize=["n_rows"])
def order_contenders_kernel(
    scores,  # (rows, C) float32
    keys,  # (rows, C) int32
    counts,  # (rows,) int32; -1 is written for a row of which contenders were lost
    n_rows, C: tl.constexpr, RP: tl.constexpr,
):  # fmt: skip
    """The contenders of each row in the order of their keys."""
    own = tl.program_id(0) * RP + tl.arange(0, RP)
    n = tl.load(counts + own, mask=own < n_rows, other=0)
    tl.store(counts + own, tl.where(n > C, -1, n), mask=own < n_rows)
    n = tl.where(n > C, 0, n)
    o = tl.arange(0, C)
    place = own.to(tl.int64)[:, None] * C
    there = o[None, :] < n[:, None]
    s = tl.load(scores + place + o[None, :], mask=there, other=0.0)
    j = tl.load(keys + place + o[None, :], mask=there, other=0)
    before = tl.zeros([RP, C], tl.int32)
    for i in range(tl.max(n, 0)):
        other = tl.load(keys + own.to(tl.int64) * C + i, mask=i < n, other=0x7FFFFFFF)
        before += (other[:, None] < j).to(tl.int32)
    tl.debug_barrier()
    tl.store(scores + place + before, s, mask=there)
    tl.store(keys + place + before, j, mask=there)
