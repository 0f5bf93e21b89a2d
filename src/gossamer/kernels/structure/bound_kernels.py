"""The kernels that find the first key of each row, and the one behind its last, where those are one interval."""

from __future__ import annotations

from collections import namedtuple

import triton
import triton.language as tl

from gossamer.kernels.reaches import Reaching, narrowed, reached
from gossamer.kernels.search import at_most

# Of no number are kernels compiled: offsets and reaches change from call to call.
# The numbers of `bounds_kernel` beside those of `Reaching`.
# position: of the first row, where there are no offsets
# most: of the magnitude of an offset
# line_step: 1 where each lead has ids of its own, of `lines`; likewise the other steps, of vectors
BoundNumbers = namedtuple(
    "BoundNumbers",
    "Q K T lines length n steps chunks position most line_step used_step offset_step start_step key_length_step",
)
# What `bounds_kernel` is compiled for.
# OF_IDS: whether runs, edges of documents or of sequences say the keys beside positions
BoundForm = namedtuple(
    "BoundForm",
    "OF_IDS OF_DOCUMENTS OF_SEQUENCES HAS_USED HAS_OFFSETS HAS_STARTS HAS_LENGTHS HAS_BLOCK CHUNK SUMS",
)


@triton.jit
def _lesser(x, y):
    return tl.minimum(x, y)


@triton.jit
def _greater(x, y):
    return tl.maximum(x, y)


@triton.jit(do_not_specialize=["lines", "length", "chunks", "stride_b", "stride_n"])
def runs_kernel(ids, runs, changes, lines, length, chunks, stride_b, stride_n, CHUNK: tl.constexpr):
    """Where runs of equal ids begin and end, as far as one chunk of a line of ids tells.

    Args:
        runs: (2, lines, length): of each position the last one up to it that begins a run, or -1, and the first one
            behind it, or `length`.
        changes: (2, lines, chunks): the last one that begins a run of each chunk, or -1, and the first, or `length`.
    """
    line, c = tl.program_id(0) // chunks, tl.program_id(0) % chunks
    p = c * CHUNK + tl.arange(0, CHUNK)
    there, after = p < length, p < length - 1
    x = ids + line.to(tl.int64) * stride_b + p.to(tl.int64) * stride_n
    own = tl.load(x, mask=there, other=0)
    begins = there & ((p == 0) | (own != tl.load(x - stride_n, mask=there & (p > 0), other=0)))
    ends = after & (own != tl.load(x + stride_n, mask=after, other=0))
    of_all, at = lines.to(tl.int64), line.to(tl.int64)
    starts, nexts = tl.where(begins, p, -1), tl.where(ends, p + 1, length)
    to = runs + at * length + p
    tl.store(to, tl.associative_scan(starts, 0, _greater), mask=there)
    tl.store(to + of_all * length, tl.associative_scan(nexts, 0, _lesser, reverse=True), mask=there)
    to = changes + at * chunks + c
    tl.store(to, tl.max(starts, 0))
    tl.store(to + of_all * chunks, tl.min(tl.where(begins, p, length), 0))


@triton.jit
def _sort(given, stride, edges, n, most, EDGES: tl.constexpr):
    """`torch.structure.base.sorted_edges`."""
    greatest = tl.zeros((), dtype=tl.int32)
    for n0 in range(0, n, EDGES):
        at = n0 + tl.arange(0, EDGES)
        x = narrowed(tl.load(given + at.to(tl.int64) * stride, mask=at < n, other=0), 0, most)
        x = tl.maximum(tl.associative_scan(x, 0, _greater), greatest)
        tl.store(edges + at, x, mask=at < n)
        greatest = tl.max(x, 0)


@triton.jit(do_not_specialize=["n", "stride_q", "stride_k", "most_q", "most_k"])
def edges_kernel(given_q, given_k, edges, n, stride_q, stride_k, most_q, most_k, EDGES: tl.constexpr):
    """One or two vectors of n edges as they count, (1 or 2, n): in [0, most], none less than one before it."""
    if tl.program_id(0) == 0:
        _sort(given_q, stride_q, edges, n, most_q, EDGES)
    else:
        _sort(given_k, stride_k, edges + n, n, most_k, EDGES)


@triton.jit
def _of_runs(i, runs, changes, line, lines, length, chunks, CHUNK: tl.constexpr, SUMS: tl.constexpr):
    """The run that each position is in, of positions that follow one another, no more than a chunk has.

    They are of one chunk or of two. What these do not tell the chunks before them and behind them do.
    """
    at, of_all = line.to(tl.int64), lines.to(tl.int64)
    p = tl.minimum(tl.maximum(i, 0), length - 1)
    own, c = p // CHUNK, tl.min(p, 0) // CHUNK
    lasts, firsts = changes + at * chunks, changes + (of_all + at) * chunks
    before, behind = tl.zeros((SUMS,), dtype=tl.int32) - 1, tl.zeros((SUMS,), dtype=tl.int32) + length
    for s0 in range(0, chunks, SUMS):
        s = s0 + tl.arange(0, SUMS)
        before = tl.maximum(before, tl.load(lasts + s, mask=s < c, other=-1))
        behind = tl.minimum(behind, tl.load(firsts + s, mask=(s > c + 1) & (s < chunks), other=length))
    start, end = tl.max(before, 0), tl.min(behind, 0)
    two = c + 1 < chunks
    start = tl.where(own > c, tl.maximum(start, tl.load(lasts + c)), start)
    end = tl.where(own > c, end, tl.minimum(end, tl.load(firsts + c + 1, mask=two, other=length)))
    lo = tl.maximum(tl.load(runs + at * length + p), start)
    hi = tl.minimum(tl.load(runs + (of_all + at) * length + p), end)
    here, outside = (i >= 0) & (i < length), tl.minimum(tl.maximum(i, 0), length)
    return tl.where(here, lo, outside), tl.where(here, hi, outside)


@triton.jit(do_not_specialize=["numbers", "reach"])
def bounds_kernel(
    lo, hi, edges, runs, changes, used, offsets, key_starts, key_lengths, numbers: BoundNumbers, reach: Reaching,
    FORM: tl.constexpr,
):  # fmt: skip
    """lo and hi (leads, Q) of the keys of each row: what operations of torch give in `torch.structure.inputs`.

    Args:
        edges: those of `edges_kernel`, n of each vector; used: keys of each sequence; runs, changes: of `runs_kernel`.
    """
    CHUNK: tl.constexpr = FORM.CHUNK
    Q, K, T, lines, length, n, steps, chunks, position, most = numbers[:10]
    lead, r0 = tl.program_id(0) // T, tl.program_id(0) % T * CHUNK
    r = r0 + tl.arange(0, CHUNK)
    b = lead.to(tl.int64)
    i = r + position
    if FORM.HAS_OFFSETS:
        i = r + narrowed(tl.load(offsets + b * numbers.offset_step), -most, most)
    if FORM.OF_SEQUENCES:
        begin, end = tl.load(edges), tl.load(edges + n - 1)
        inner = tl.minimum(tl.maximum(r, begin), end - 1)
        at = tl.minimum(tl.maximum(at_most(edges, n, steps, inner, r < Q) - 1, 0), n - 2)
        base = tl.load(edges + n + at)
        keys = tl.load(edges + n + at + 1) - base
        if FORM.HAS_USED:
            keys = tl.minimum(keys, narrowed(tl.load(used + at.to(tl.int64) * numbers.used_step), 0, K))
        i = inner - tl.load(edges + at + 1) + keys
    row_lo, row_hi = reached(i, K, reach, FORM.HAS_BLOCK)
    if FORM.OF_IDS:
        run_lo, run_hi = _of_runs(i, runs, changes, lead * numbers.line_step, lines, length, chunks, CHUNK, FORM.SUMS)
        row_lo, row_hi = tl.maximum(row_lo, tl.minimum(run_lo, K)), tl.minimum(row_hi, run_hi)
    if FORM.OF_DOCUMENTS:
        run = at_most(edges, n, steps, i, r < Q)
        run_lo, run_hi = tl.load(edges + tl.maximum(run - 1, 0)), tl.load(edges + tl.minimum(run, n - 1))
        row_lo, row_hi = tl.maximum(row_lo, tl.minimum(run_lo, K)), tl.minimum(row_hi, run_hi)
    if FORM.OF_SEQUENCES:
        # Rows of no sequence keep nothing, where the nearest row of one begins or ends.
        row_lo = tl.minimum(row_lo, keys) + base
        row_hi = tl.maximum(row_lo, tl.minimum(row_hi, keys) + base)
        row_lo, row_hi = tl.where(r >= end, row_hi, row_lo), tl.where(r < begin, row_lo, row_hi)
    row_hi = tl.maximum(row_lo, row_hi)
    if FORM.HAS_STARTS:
        start = narrowed(tl.load(key_starts + b * numbers.start_step), 0, K)
        row_lo, row_hi = tl.maximum(row_lo, start), tl.maximum(row_hi, start)
    if FORM.HAS_LENGTHS:
        behind = narrowed(tl.load(key_lengths + b * numbers.key_length_step), 0, K)
        row_lo, row_hi = tl.minimum(row_lo, behind), tl.minimum(row_hi, behind)
    tl.store(lo + b * Q + r, row_lo, mask=r < Q)
    tl.store(hi + b * Q + r, row_hi, mask=r < Q)
