"""The candidates of each row: scores are computed once, and those that may matter go to a buffer of the row.

A row keeps a bound that only rises, under which no score can be in its support (or among its k largest): that of any
part of its keys is one. A sixteenth of the key tiles comes first, spread over all. When a buffer is full the bound is
found again from what is in it, and what lies under it leaves. A row with more candidates than fit is given up.
"""

from __future__ import annotations

import triton
import triton.language as tl

from gossamer.kernels.entmax.formulas import LOWEST, MARGIN, cut, middle, newton, ordered, powers, unordered
from gossamer.kernels.entmax.rows import bounds, key_range, load_tile, relative, sampled_first, tile_scores, visible

SAMPLE = tl.constexpr(16)
STEPS = tl.constexpr(4)  # of Newton's method for a bound
HALVINGS = tl.constexpr(24)  # of the interval that holds the k-th largest


@triton.jit
def bound_of(s, bound, count, a, keep, A: tl.constexpr, TOP: tl.constexpr, WEIGHED: tl.constexpr):
    """The bound of rows by `count` of their scores s [R, C], the others of which are -inf; at least `bound`."""
    top = tl.max(s, 1)
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
        order = ordered(s)
        low, high = ordered(bound), ordered(top)
        # Of a row with `keep` scores from `low` on, the middle becomes `low` where as many lie from it on.
        for _ in range(HALVINGS):
            between = middle(low, high)
            enough = tl.sum((order >= between[:, None]).to(tl.int32), 1) >= keep
            low = tl.where(enough, between, low)
            high = tl.where(enough, high, tl.maximum(between - 1, low))
        bound = tl.where((count >= keep) & (low > ordered(bound)), unordered(low), bound)
    return bound


@triton.jit
def compact(s_base, j_base, n, bound, a, keep, C: tl.constexpr, A: tl.constexpr, TOP: tl.constexpr,
            WEIGHED: tl.constexpr):  # fmt: skip
    """Find the bounds of rows again from their buffers, and take out what lies under them: (bound, n)."""
    tl.debug_barrier()
    o = tl.arange(0, C)
    there = o[None, :] < n[:, None]
    s = tl.load(s_base[:, None] + o[None, :], mask=there, other=-float("inf"))
    j = tl.load(j_base[:, None] + o[None, :], mask=there, other=0)
    bound = bound_of(s, bound, n, a, keep, A, TOP, WEIGHED)
    kept = there & ((s >= bound[:, None]) | (s != s))
    place = tl.cumsum(kept.to(tl.int32), 1) - 1
    tl.debug_barrier()
    tl.store(s_base[:, None] + place, s, mask=kept)
    tl.store(j_base[:, None] + place, j, mask=kept)
    tl.debug_barrier()
    return bound, tl.sum(kept.to(tl.int32), 1)


@triton.jit(do_not_specialize=["first_block", "Q", "K", "offset", "keep"])
def select_kernel(
    q,  # (B, H, Q, D)
    k,  # (B, G, K, D)
    steepness,  # (H,) float32: alpha - 1
    lo,  # (Q,) int32
    hi,  # (Q,) int32
    q_positions,  # (B, H, Q)
    k_positions,  # (B, H, K)
    scores,  # (blocks, R, C) float32, to write
    keys,  # (blocks, R, C) int32, to write
    counts,  # (blocks, R) int32, to write: -1 of a row that was given up
    stride_qb, stride_qh, stride_qn, stride_kb, stride_kh, stride_kn,
    stride_qpb, stride_qph, stride_qpn, stride_kpb, stride_kph, stride_kpn,
    first_block, H, Q, K, offset, keep, scale,
    D: tl.constexpr, BLOCK_D: tl.constexpr, GROUP: tl.constexpr, R: tl.constexpr, STEP: tl.constexpr, C: tl.constexpr,
    A: tl.constexpr, TOP: tl.constexpr, WEIGHED: tl.constexpr, BOUNDS: tl.constexpr, POSITIONS: tl.constexpr,
    PRECISION: tl.constexpr,
):  # fmt: skip
    """The candidates of R rows; blocks count over (B, H, blocks of R rows), the last rows of a head first."""
    own = tl.program_id(0).to(tl.int64)
    blocks = (Q + R - 1) // R
    block = first_block + tl.program_id(0)
    head, start = block // blocks, (blocks - 1 - block % blocks) * R
    b64, h64, g64 = (head // H).to(tl.int64), (head % H).to(tl.int64), (head % H // GROUP).to(tl.int64)
    rows = start + tl.arange(0, R)
    inside = rows < Q
    b_q = load_tile(q + b64 * stride_qb + h64 * stride_qh, rows, inside, stride_qn, D, BLOCK_D)
    k_base = k + b64 * stride_kb + g64 * stride_kh
    a = tl.zeros([R], tl.float32) + tl.load(steepness + head % H)
    first, last = bounds(rows, inside, lo, hi, offset, K, BOUNDS)
    at = rows
    kp_base = k_positions
    if POSITIONS:
        at = tl.load(q_positions + b64 * stride_qpb + h64 * stride_qph + rows.to(tl.int64) * stride_qpn, mask=inside)
        kp_base = k_positions + b64 * stride_kpb + h64 * stride_kph
    s_base = scores + (own * R + tl.arange(0, R)) * C
    j_base = keys + (own * R + tl.arange(0, R)) * C
    n = tl.zeros([R], tl.int32)
    bound = tl.zeros([R], tl.float32) + LOWEST
    given_up = n != 0
    begin, tiles = key_range(first, last, inside, K, STEP)
    for step in range(tiles):
        j = (begin + sampled_first(step, tiles, SAMPLE)) * STEP + tl.arange(0, STEP)
        seen = visible(j, first, last, at, kp_base, stride_kpn, K, POSITIONS)
        s = tile_scores(b_q, k_base, j, seen, stride_kn, scale, K, D, BLOCK_D, PRECISION)
        kept = ((s >= bound[:, None]) | (s != s)) & ~given_up[:, None]
        more = tl.sum(kept.to(tl.int32), 1)
        if tl.max(more, 0) > 0:
            if WEIGHED:
                # The largest score alone bounds a row, and costs little: lam is at least that.
                found = cut(tl.max(s, 1), a)
                found -= 2.0 * MARGIN * tl.abs(found)
                bound = tl.where(found > bound, found, bound)
                kept = kept & ((s >= bound[:, None]) | (s != s))
                more = tl.sum(kept.to(tl.int32), 1)
            if tl.max(n + more, 0) > C:
                # Those of this tile count as well: of a first tile there is nothing else.
                if tl.max(more, 0) * 2 > C:
                    bound = bound_of(s, bound, more, a, keep, A, TOP, WEIGHED)
                bound, n = compact(s_base, j_base, n, bound, a, keep, C, A, TOP, WEIGHED)
                kept = kept & ((s >= bound[:, None]) | (s != s))
                more = tl.sum(kept.to(tl.int32), 1)
                given_up = given_up | (n + more > C)
                kept = kept & ~given_up[:, None]
                more = tl.where(given_up, 0, more)
            place = n[:, None] + tl.cumsum(kept.to(tl.int32), 1) - 1
            tl.store(s_base[:, None] + place, s, mask=kept)
            tl.store(j_base[:, None] + place, tl.broadcast_to(j[None, :], [R, STEP]), mask=kept)
            n += more
    tl.store(counts + own * R + tl.arange(0, R), tl.where(given_up, -1, n))
