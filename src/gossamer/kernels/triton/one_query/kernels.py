"""The kernels of one query of each sequence: which keys it sees, by arithmetic alone, and the attention to them.

The heads that share keys are the rows of a tile. Keys that are not seen are not read.
"""

from __future__ import annotations

from typing import NamedTuple

import triton
import triton.language as tl

from gossamer.kernels.arrays import Array
from gossamer.kernels.scores import score
from gossamer.kernels.softmax import add_scores, end_of_keys, start_rows
from gossamer.kernels.triton.groups import ForwardResults, ForwardStrides
from gossamer.kernels.triton.row_access import load_rows, store_part_rows, store_row_results


class Ends(NamedTuple):
    """What says which keys are seen, beside the rule."""

    offsets: Array  # (B,), as `starts` and `lengths` of any integer type
    starts: Array  # (B,)
    lengths: Array  # (B,)


class Numbers(NamedTuple):
    """Numbers of which Triton compiles for no value."""

    G: int
    Q: int  # heads that share keys
    K: int
    position: int  # of every query, without OFFSETS
    most: int  # no position counts as more in magnitude
    left: int
    right: int
    first: int
    parts: int  # of a query
    chunk: int  # keys of a part
    scale: float
    cap: float


class Form(NamedTuple):
    """What the kernel is compiled for."""

    D: int
    E: int
    BLOCK_D: int
    BLOCK_E: int
    R: int  # rows of a program
    C: int  # keys read in one step
    TILE_ROWS: int
    HAS_SLOTS: bool
    OFFSETS: bool
    STARTS: bool
    LENGTHS: bool
    LEFT: bool  # whether the rule has a left end, a right end, first keys
    RIGHT: bool
    FIRST: bool
    FOLD: bool
    SOFTCAP: bool
    SINK: bool
    PRECISION: str


@triton.jit
def position_of(offsets, i_b, most):
    """The positions of queries, int64: no sum with a distance leaves that type."""
    at = tl.load(offsets + i_b).to(tl.int64)
    return tl.minimum(tl.maximum(at, -most), most)


@triton.jit
def key_at(position, K):
    """A position as the number of the keys before it, int32."""
    return tl.minimum(tl.maximum(position, 0), K).to(tl.int32)


@triton.jit
def seen(ends, i_b, numbers, FORM: tl.constexpr):
    """[lo, hi) of the keys that the query of a sequence sees: `Reach.bounds`, and what starts and lengths leave."""
    K = numbers.K
    at = i_b.to(tl.int64) * 0 + numbers.position
    if FORM.OFFSETS:
        at = position_of(ends.offsets, i_b, numbers.most)
    lo = i_b * 0
    hi = end_of_keys(ends.lengths, i_b, lo + K, FORM.LENGTHS)
    if FORM.STARTS:
        lo = key_at(tl.load(ends.starts + i_b).to(tl.int64), K)
    if FORM.LEFT:
        lo = tl.maximum(lo, key_at(at - numbers.left, K))
    if FORM.RIGHT:
        hi = tl.minimum(hi, key_at(at + 1 + numbers.right, K))
    if FORM.FIRST:
        hi = tl.minimum(hi, numbers.first)
    return lo, tl.maximum(hi, lo)


@triton.jit
def ends_kernel(
    offsets, lengths, ends, behind, most, B, K, LENGTHS: tl.constexpr, SIZE: tl.constexpr
):  # fmt: skip
    """ends (B,) int32: how many keys each query sees whose rule has no left end, `behind` of them from it on."""
    i_b = tl.program_id(0) * SIZE + tl.arange(0, SIZE)
    some = i_b < B
    i_b = tl.minimum(i_b, B - 1)
    b_end = key_at(position_of(offsets, i_b, most) + behind, K)
    tl.store(ends + i_b, tl.minimum(b_end, end_of_keys(lengths, i_b, K, LENGTHS)), mask=some)


@triton.jit(do_not_specialize=["numbers"])
def one_query_kernel(
    q,  # (B, G, Q, D): as `numbers` has it, and `strides`
    k,  # (B, G, K, D)
    v,  # (B, G, K, E)
    results: ForwardResults,
    ends: Ends,
    sinks,  # (G, Q)
    strides: ForwardStrides,
    numbers: Numbers,
    FORM: tl.constexpr,
):
    """out and lse of the heads that share keys, or their sums over one part of the keys that are seen."""
    R: tl.constexpr = FORM.R
    C: tl.constexpr = FORM.C
    TILE_ROWS: tl.constexpr = FORM.TILE_ROWS
    SUB: tl.constexpr = (TILE_ROWS + R - 1) // R
    pid = tl.program_id(0)
    row_start = pid % SUB * R
    i_part = pid // SUB % numbers.parts
    i_list = pid // SUB // numbers.parts
    b64 = (i_list // numbers.G).to(tl.int64)
    g64 = (i_list % numbers.G).to(tl.int64)
    o_r = row_start + tl.arange(0, R)

    lo, hi = seen(ends, i_list // numbers.G, numbers, FORM)
    begin = lo + tl.minimum(i_part * numbers.chunk, hi - lo)
    end = lo + tl.minimum((i_part + 1) * numbers.chunk, hi - lo)
    b_q = load_rows(
        q + b64 * strides.at_q.b + g64 * strides.at_q.h, row_start, numbers.Q, strides.at_q.n, R, FORM.D, FORM.BLOCK_D,
        True,
    )  # fmt: skip
    k += b64 * strides.at_k.b + g64 * strides.at_k.h
    v += b64 * strides.at_v.b + g64 * strides.at_v.h
    b_acc = tl.zeros([R, FORM.BLOCK_E], tl.float32)
    head = g64 * numbers.Q + tl.minimum(o_r, numbers.Q - 1)
    b_l, b_m = start_rows(sinks, head, i_part == 0, R, FORM.SINK)
    for i_step in range(tl.cdiv(end - begin, C)):
        column = begin + i_step * C
        b_k = load_rows(k, column, end, strides.at_k.n, C, FORM.D, FORM.BLOCK_D, True)
        b_s = tl.dot(b_q, tl.trans(b_k), input_precision=FORM.PRECISION)
        if not FORM.FOLD:
            b_s, _ = score(b_s, numbers.scale, numbers.cap, 0.0, 0, FORM.SOFTCAP, 0)
        b_s = tl.where((column + tl.arange(0, C) < end)[None, :], b_s, float("-inf"))
        b_p, b_shrink, b_l, b_m = add_scores(b_s, b_l, b_m, numbers.scale, FORM.FOLD)
        b_v = load_rows(v, column, end, strides.at_v.n, C, FORM.E, FORM.BLOCK_E, True)
        b_acc = tl.dot(b_p.to(b_v.dtype), b_v, b_acc * b_shrink[:, None], input_precision=FORM.PRECISION)

    if FORM.HAS_SLOTS:
        slot = i_list.to(tl.int64) * numbers.parts + i_part
        o_ml = results.part_ml + slot * (2 * TILE_ROWS) + o_r
        tl.store(o_ml, b_m, mask=o_r < TILE_ROWS)
        tl.store(o_ml + TILE_ROWS, b_l, mask=o_r < TILE_ROWS)
        store_part_rows(results.part_acc, slot, b_acc, row_start, TILE_ROWS, R, FORM.E, FORM.BLOCK_E)
    else:
        store_row_results(
            results, strides, b_acc, b_l, b_m, b64, g64, numbers.Q, row_start, R, FORM.E, FORM.BLOCK_E
        )  # fmt: skip
