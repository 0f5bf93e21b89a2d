"""Softmax and its gradient in Triton, for every kernel that is written in it: what a row starts from, adds and ends as.

Scores are in base 2. `b_l` is the sum of the weights of a row and `b_m` the largest score so far, both (R,).
"""

from __future__ import annotations

import triton
import triton.language as tl

from gossamer.kernels.scores import FLOOR, LN2, LOG2E, score


@triton.jit
def head_slope(slopes, i_b, i_h, H, ALIBI: tl.constexpr):
    """The ALiBi slope of a head, of each batch element where ALIBI is over 2, in base 2; 0 without."""
    slope = 0.0
    if ALIBI:
        at = i_h
        if ALIBI > 2:
            at = i_b * H + i_h
        slope = tl.load(slopes + at).to(tl.float32) * LOG2E
    return slope


@triton.jit
def end_of_keys(lengths, i_b, K, LENGTHS: tl.constexpr):
    """The end of the keys of a batch element, of a length of any integer type."""
    end = K
    if LENGTHS:
        end = tl.maximum(tl.minimum(tl.load(lengths + i_b), K), 0).to(tl.int32)
    return end


@triton.jit
def start_rows(sinks, i_h, adds_sink, R: tl.constexpr, SINK: tl.constexpr):
    """(b_l, b_m) before the first key. The sink counts once: one part of a split row alone adds it."""
    b_l = tl.zeros([R], tl.float32)
    b_m = tl.full([R], FLOOR, tl.float32)
    if SINK:
        sink = tl.load(sinks + i_h).to(tl.float32) * LOG2E
        b_m = tl.maximum(b_m, sink)
        b_l = tl.where(adds_sink, b_l + tl.where(sink > FLOOR, 1.0, 0.0), b_l)
    return b_l, b_m


@triton.jit
def add_scores(b_s, b_l, b_m, scale=1.0, FOLD: tl.constexpr = False):
    """Weights of the scores [R, C], or of slices [W, R, C], what was summed before times what, and the new (b_l, b_m).

    FOLD: they are products, and one multiply-add makes the exponent; the maximum commutes with a positive scale alone.
    """
    LAST: tl.constexpr = len(b_s.shape) - 1
    if FOLD:
        b_new = tl.maximum(b_m, tl.max(b_s, LAST) * scale)
        b_p = tl.exp2(b_s * scale - tl.expand_dims(b_new, LAST))
    else:
        b_new = tl.maximum(b_m, tl.max(b_s, LAST))
        b_p = tl.exp2(b_s - tl.expand_dims(b_new, LAST))
    b_shrink = tl.exp2(b_m - b_new)
    return b_p, b_shrink, b_l * b_shrink + tl.sum(b_p, LAST), b_new


@triton.jit
def finish_rows(b_l, b_m):
    """(what the sum of weighted values is divided by, lse); a row that kept nothing gives 1 and -inf."""
    m_empty = b_l == 0.0
    b_l = tl.where(m_empty, 1.0, b_l)
    return b_l, tl.where(m_empty, float("-inf"), (b_m + tl.log2(b_l)) * LN2)


@triton.jit
def empty_rows(b_lse, b_delta):
    """(lse in base 2, delta) for the backward; +inf and 0 for an empty row, whose probabilities are then exactly 0."""
    m_empty = b_lse == float("-inf")
    return tl.where(m_empty, float("inf"), b_lse * LOG2E), tl.where(m_empty, 0.0, b_delta)


@triton.jit
def probability(
    b_s, b_lse, scale, cap, slope, distance, m_keep,
    MASKED: tl.constexpr, FOLD: tl.constexpr, SOFTCAP: tl.constexpr, ALIBI: tl.constexpr,
):  # fmt: skip
    """P = exp2(score - lse) of products, and tanh(s / softcap); `b_lse` has the shape that broadcasts to the products.

    FOLD as in `add_scores`.
    """
    b_t = b_s
    if FOLD:
        b_p = tl.exp2(b_s * scale - b_lse)
    else:
        b_s, b_t = score(b_s, scale, cap, slope, distance, SOFTCAP, ALIBI)
        b_p = tl.exp2(b_s - b_lse)
    if MASKED:
        b_p = tl.where(m_keep, b_p, 0.0)
    return b_p, b_t


@triton.jit
def cleared(block, m_keep):
    """Streamed rows [C, SIZE], and 0 in those that no resident row keeps: what is there may be NaN.

    `m_keep` is [R, C], or [1, C] where all R rows keep the same.
    """
    m_some = tl.max(m_keep.to(tl.int32), 0) != 0
    return tl.where(m_some[:, None], block, 0.0)


@triton.jit
def delta_of_rows(b_dout, b_out):
    """rowsum(dout * out) [R]; a product with an `out` of 0, which an empty row has, is 0 whatever dout is."""
    b_out = b_out.to(tl.float32)
    return tl.sum(tl.where(b_out == 0.0, 0.0, b_dout.to(tl.float32) * b_out), 1)


@triton.jit
def score_gradient(b_p, b_dp, b_delta, b_t, SOFTCAP: tl.constexpr):
    """dS = P * (dP - delta), with respect to the scores before the soft cap."""
    b_ds = b_p * (b_dp - b_delta)
    if SOFTCAP:
        b_ds *= 1.0 - b_t * b_t
    return b_ds
