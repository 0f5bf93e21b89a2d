"""The kernels that pool blocks of queries and keys, and those that score pairs of blocks."""

from __future__ import annotations

from collections import namedtuple

import triton
import triton.language as tl

from gossamer.kernels.extremes import larger, smaller

# The strides of queries or keys.
TensorStrides = namedtuple("TensorStrides", "b h n d")
# Numbers of `mean_kernel` of whose values it is compiled for none; so the others.
MeanNumbers = namedtuple("MeanNumbers", "Q K T C heads")
ScoreNumbers = namedtuple("ScoreNumbers", "Q K T C t0 t1 heads")
BoundNumbers = namedtuple("BoundNumbers", "Q K C t0 t1 heads G run")
# What `mean_kernel` is compiled for; so the others.
MeanForm = namedtuple("MeanForm", "TIMES BLOCK D DP")
ScoreForm = namedtuple("ScoreForm", "CAUSAL BLOCK D DP PART ROWS COLUMNS PRECISION")
# WHOLE: the extremes stay in shared memory; else they come by PART dimensions
BoundForm = namedtuple("BoundForm", "TIMES CAUSAL WHOLE BLOCK D DP PART COLUMNS")


@triton.jit
def _rows(
    x, at, N, stride_n, stride_d, first, repeat: tl.constexpr, ROWS: tl.constexpr, D: tl.constexpr, DP: tl.constexpr
):
    """Rows of a block, (ROWS, DP); behind the last one zeros, or that one again."""
    row, d = first + tl.arange(0, ROWS), tl.arange(0, DP)
    there = d[None, :] < D
    if repeat:
        row = tl.minimum(row, N - 1)
    else:
        there &= (row < N)[:, None]
    return tl.load(x + at + row.to(tl.int64)[:, None] * stride_n + d[None, :] * stride_d, mask=there, other=0.0)


@triton.jit(do_not_specialize=["numbers"])
def mean_kernel(
    q,  # (B, heads * TIMES, Q, D)
    k,  # (B, G, K, D)
    q_means,  # (B, heads, T, D) float32
    k_means,  # (B, G, C, D) float32
    at_q: TensorStrides,
    at_k: TensorStrides,
    numbers: MeanNumbers,
    G,
    of_queries,
    FORM: tl.constexpr,
):
    """The mean of a block of queries and of the heads of a group; from program `of_queries` on, of a block of keys."""
    TIMES: tl.constexpr = FORM.TIMES
    BLOCK: tl.constexpr = FORM.BLOCK
    D: tl.constexpr = FORM.D
    DP: tl.constexpr = FORM.DP
    Q, K, T, C, heads = numbers
    at, d = tl.program_id(0), tl.arange(0, DP)
    if at < of_queries:
        first, head = at % T * BLOCK, at // T
        number = tl.minimum(Q - first, BLOCK).to(tl.float32)
        total = tl.zeros((DP,), dtype=tl.float32)
        for i in range(TIMES):
            base = (head // heads).to(tl.int64) * at_q.b + (head % heads * TIMES + i).to(tl.int64) * at_q.h
            x = _rows(q, base, Q, at_q.n, at_q.d, first, False, BLOCK, D, DP)
            total += tl.sum(x.to(tl.float32), 0) / number
        tl.store(q_means + at.to(tl.int64) * D + d, total / TIMES, mask=d < D)
    else:
        at -= of_queries
        first, head = at % C * BLOCK, at // C
        number = tl.minimum(K - first, BLOCK).to(tl.float32)
        base = (head // G).to(tl.int64) * at_k.b + (head % G).to(tl.int64) * at_k.h
        x = _rows(k, base, K, at_k.n, at_k.d, first, False, BLOCK, D, DP)
        tl.store(k_means + at.to(tl.int64) * D + d, tl.sum(x.to(tl.float32), 0) / number, mask=d < D)


@triton.jit(do_not_specialize=["K", "C", "G"])
def extremes_kernel(
    k,  # (B, G, K, D)
    least, most,  # (B, G, C, D), of k's type
    at_k: TensorStrides, K, C, G, BLOCK: tl.constexpr, D: tl.constexpr, DP: tl.constexpr,
):  # fmt: skip
    """The least and the largest value of each dimension of a block of keys."""
    at, d = tl.program_id(0), tl.arange(0, DP)
    head = at // C
    base = (head // G).to(tl.int64) * at_k.b + (head % G).to(tl.int64) * at_k.h
    x = _rows(k, base, K, at_k.n, at_k.d, at % C * BLOCK, True, BLOCK, D, DP).to(tl.float32)
    low, high = tl.reduce(x, 0, smaller), tl.reduce(x, 0, larger)
    tl.store(least + at.to(tl.int64) * D + d, low.to(least.dtype.element_ty), mask=d < D)
    tl.store(most + at.to(tl.int64) * D + d, high.to(most.dtype.element_ty), mask=d < D)


@triton.jit
def _last_position(t, Q, K, BLOCK: tl.constexpr):
    """The position of the last query of a block."""
    return tl.minimum(t * BLOCK + BLOCK, Q) - 1 + (K - Q)


@triton.jit(do_not_specialize=["numbers"])
def mean_score_kernel(
    q_means,  # (B, heads, T, D)
    k_means,  # (B, G, C, D)
    scores,  # (B * heads, t1 - t0, C)
    numbers: ScoreNumbers,
    G,
    scale,
    FORM: tl.constexpr,
):
    """scale * q_mean . k_mean, of those blocks of queries from t0 to t1. Pairs that no query sees are left out."""
    BLOCK: tl.constexpr = FORM.BLOCK
    D: tl.constexpr = FORM.D
    PART: tl.constexpr = FORM.PART
    ROWS: tl.constexpr = FORM.ROWS
    COLUMNS: tl.constexpr = FORM.COLUMNS
    Q, K, T, C, t0, t1, heads = numbers
    tiles, c0 = tl.cdiv(t1 - t0, ROWS), tl.program_id(1) * COLUMNS
    head = tl.program_id(0) // tiles
    row = tl.program_id(0) % tiles * ROWS
    end = _last_position(tl.minimum(t0 + row + ROWS, t1) - 1, Q, K, BLOCK)
    if (not FORM.CAUSAL) or c0 * BLOCK <= end:
        t, c, d = t0 + row + tl.arange(0, ROWS), c0 + tl.arange(0, COLUMNS), tl.arange(0, PART)
        q_offset = (head.to(tl.int64) * T + t)[:, None] * D
        key_head = head // heads * G + head % heads // (heads // G)
        k_offset = (key_head.to(tl.int64) * C + c)[None, :] * D
        total = tl.zeros((ROWS, COLUMNS), dtype=tl.float32)
        for d0 in range(0, FORM.DP, PART):
            there = d0 + d < D
            x = tl.load(q_means + q_offset + (d0 + d)[None, :], mask=(t < t1)[:, None] & there[None, :], other=0.0)
            y = tl.load(k_means + k_offset + (d0 + d)[:, None], mask=(c < C)[None, :] & there[:, None], other=0.0)
            total = tl.dot(x, y, total, input_precision=FORM.PRECISION)
        to = (head.to(tl.int64) * (t1 - t0) + t - t0)[:, None] * C + c[None, :]
        tl.store(scores + to, scale * total, mask=(t < t1)[:, None] & (c < C)[None, :])


@triton.jit
def _bounds(x, high, low, s):
    """s + relu(x) . high + min(x, 0) . low; a NaN stays one."""
    zero = tl.zeros_like(x)
    s = tl.dot(tl.where(x < 0, zero, x), high, s, input_precision="ieee")
    return tl.dot(tl.where(x > 0, zero, x), low, s, input_precision="ieee")


@triton.jit
def _block_bound(q, base, extremes, first, Q, at_q, scale, FORM: tl.constexpr):
    """The largest bound of the queries of a block: (COLUMNS,)."""
    BLOCK: tl.constexpr = FORM.BLOCK
    D: tl.constexpr = FORM.D
    PART: tl.constexpr = FORM.PART
    least, most, high, low, k_offset, column = extremes
    s = tl.zeros((BLOCK, FORM.COLUMNS), dtype=tl.float32)
    if FORM.WHOLE:
        x = _rows(q, base, Q, at_q.n, at_q.d, first, True, BLOCK, D, FORM.DP)
        s = _bounds(x, high, low, s)
    else:
        row = tl.minimum(first + tl.arange(0, BLOCK), Q - 1).to(tl.int64)[:, None] * at_q.n
        for d0 in range(0, FORM.DP, PART):
            d = d0 + tl.arange(0, PART)
            x = tl.load(q + base + row + d[None, :] * at_q.d, mask=(d < D)[None, :], other=0.0)
            there = column & (d < D)[:, None]
            part = k_offset + d[:, None]
            some_high = tl.load(most + part, mask=there, other=0.0)
            some_low = tl.load(least + part, mask=there, other=0.0)
            s = _bounds(x, some_high, some_low, s)
    return tl.reduce(scale * s, 0, larger)


@triton.jit(do_not_specialize=["numbers"])
def bound_kernel(
    q,  # (B, heads * TIMES, Q, D)
    least, most,  # (B, G, C, D)
    scores,  # (B * heads, t1 - t0, C)
    at_q: TensorStrides,
    numbers: BoundNumbers,
    scale,
    FORM: tl.constexpr,
):  # fmt: skip
    """scale * (relu(q) . most + min(q, 0) . least), the largest of the queries of a block and of the heads of a group.

    A program has a few blocks of keys and `run` blocks of queries. Products of 16 bits are exact on tensor cores, and
    summed in float32.
    """
    TIMES: tl.constexpr = FORM.TIMES
    BLOCK: tl.constexpr = FORM.BLOCK
    D: tl.constexpr = FORM.D
    COLUMNS: tl.constexpr = FORM.COLUMNS
    Q, K, C, t0, t1, heads, G, run = numbers
    runs, c0 = tl.cdiv(t1 - t0, run), tl.program_id(1) * COLUMNS
    head = tl.program_id(0) // runs
    begin = t0 + tl.program_id(0) % runs * run
    behind = tl.minimum(begin + run, t1)
    if FORM.CAUSAL:
        begin = tl.maximum(begin, tl.maximum(c0 * BLOCK - (K - Q), 0) // BLOCK)
    if begin < behind:
        c = c0 + tl.arange(0, COLUMNS)
        key_head = head // heads * G + head % heads // (heads // G)
        k_offset, column = (key_head.to(tl.int64) * C + c)[None, :] * D, (c < C)[None, :]
        high, low = 0.0, 0.0
        if FORM.WHOLE:
            d = tl.arange(0, FORM.DP)[:, None]
            high = tl.load(most + k_offset + d, mask=column & (d < D), other=0.0)
            low = tl.load(least + k_offset + d, mask=column & (d < D), other=0.0)
        base = (head // heads).to(tl.int64) * at_q.b + (head % heads * TIMES).to(tl.int64) * at_q.h
        extremes = (least, most, high, low, k_offset, column)
        for t in range(begin, behind):
            largest_bound = _block_bound(q, base, extremes, t * BLOCK, Q, at_q, scale, FORM)
            for i in range(1, TIMES):
                other = _block_bound(q, base + i * at_q.h, extremes, t * BLOCK, Q, at_q, scale, FORM)
                largest_bound = larger(largest_bound, other)
            tl.store(scores + (head.to(tl.int64) * (t1 - t0) + t - t0) * C + c, largest_bound, mask=c < C)
