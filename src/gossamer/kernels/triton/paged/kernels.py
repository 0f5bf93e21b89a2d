"""The kernels of few queries of each sequence over pages: which keys they see, where these lie, and the attention.

Rows of a tile are the tokens of one sequence, and of a token the heads that share keys, so that a key is read once for
all of them. A key that no row sees is not read, and neither is the entry of the table that would name its page.
"""

from __future__ import annotations

from typing import NamedTuple

import triton
import triton.language as tl

from gossamer.kernels.arrays import Array
from gossamer.kernels.reaches import Reaching, narrowed
from gossamer.kernels.relaunch import Strides
from gossamer.kernels.scores import FLOOR, score
from gossamer.kernels.sequences import interval, tile_of
from gossamer.kernels.softmax import add_scores, finish_rows, start_rows


class Sequences(NamedTuple):
    """What says which tokens and keys a sequence has, of any integer type."""

    edges: Array  # (sequences + 1,) of the tokens
    used: Array  # (sequences,), or (sequences, G)
    table: Array  # (sequences, n), or (sequences, G, n)


class PagedResults(NamedTuple):
    """What is written. Parts of a token and a key head follow one another, and in a part the heads that share it."""

    out: Array  # (T, H, E)
    lse: Array  # (T, H)
    part_acc: Array  # (T, G, parts, heads, E)
    part_ml: Array  # (2, T, G, parts, heads)


class PagedStrides(NamedTuple):
    """Strides: b of a token or page, h of a key head, n of the heads that share it, or of a slot."""

    at_q: Strides
    at_k: Strides
    at_v: Strides
    at_out: Strides
    at_lse: Strides


class PagedNumbers(NamedTuple):
    """Numbers of which Triton compiles for no value."""

    sequences: int
    T: int
    G: int
    heads: int  # that share keys
    pages: int
    slots: int  # of a sequence
    edge_step: int
    used_step: int
    used_head: int  # 0 where all heads have one table
    table_row: int
    table_head: int
    table_step: int
    parts: int  # that there are of a tile of rows
    of_most: int  # parts that the keys are cut into,
    least: int  # of at least so many keys
    scale: float
    cap: float


class PagedForm(NamedTuple):
    """What the kernel is compiled for."""

    D: int
    E: int
    BLOCK_D: int
    BLOCK_E: int
    R: int  # rows of a program
    W: int  # slices of the keys, one of each warp, which wait for one another at the end alone
    C: int  # keys of a slice that are read in one step
    PAGE: int  # slots
    EDGES: int  # that are looked at at a time
    HAS_PARTS: bool
    HAS_OTHER: bool  # whether the rule is a union of two
    HAS_STEPS: bool
    HAS_BLOCK: bool
    OTHER_HAS_BLOCK: bool
    FOLD: bool
    SOFTCAP: bool
    SINK: bool
    PRECISION: str


class MergeForm(NamedTuple):
    """What the kernel that merges parts is compiled for."""

    E: int
    BLOCK_E: int
    PARTS: int  # at a time


@triton.jit
def place_of(x, lo, behind, gap, TWO: tl.constexpr):
    """The key that is number x of two runs, of which the second begins `gap` keys behind the first."""
    j = x + lo
    if TWO:
        j += tl.where(x >= behind, gap, 0)
    return j


@triton.jit
def load_at(base, o_row, m_row, SIZE: tl.constexpr, BLOCK_SIZE: tl.constexpr):
    """Rows that begin at offsets [R] as [R, BLOCK_SIZE]; zero where masked."""
    o_d = tl.arange(0, BLOCK_SIZE)
    mask = m_row[:, None] if SIZE == BLOCK_SIZE else m_row[:, None] & (o_d < SIZE)[None, :]
    return tl.load(base + (o_row[:, None] + o_d[None, :]), mask=mask, other=0.0)


@triton.jit
def load_slices(base, o_row, m_row, SIZE: tl.constexpr, BLOCK_SIZE: tl.constexpr):
    """Rows that begin at offsets [W, C] as [W, C, BLOCK_SIZE]; zero where masked."""
    o_d = tl.arange(0, BLOCK_SIZE)[None, None, :]
    mask = m_row[:, :, None] if SIZE == BLOCK_SIZE else m_row[:, :, None] & (o_d < SIZE)
    return tl.load(base + (o_row[:, :, None] + o_d), mask=mask, other=0.0)


@triton.jit
def store_at(base, block, o_row, m_row, SIZE: tl.constexpr, BLOCK_SIZE: tl.constexpr):
    """Rows that begin at offsets [R], of [R, BLOCK_SIZE], in the type of `base`."""
    o_d = tl.arange(0, BLOCK_SIZE)
    mask = m_row[:, None] & (o_d < SIZE)[None, :]
    tl.store(base + (o_row[:, None] + o_d[None, :]), block.to(base.dtype.element_ty), mask=mask)


@triton.jit(do_not_specialize=["numbers", "reach", "other", "steps"])
def paged_kernel(
    q,  # (T, H, D)
    k,  # (pages, PAGE, G, D)
    v,  # (pages, PAGE, G, E)
    results: PagedResults,
    told: Sequences,
    sinks,  # (H,)
    strides: PagedStrides,
    numbers: PagedNumbers,
    reach: Reaching,
    other: Reaching,
    steps,  # of both
    FORM: tl.constexpr,
):
    """out and lse of a tile: tokens of a sequence and the heads that share keys; or its sums over one part of them."""
    R: tl.constexpr = FORM.R
    C: tl.constexpr = FORM.C
    W: tl.constexpr = FORM.W
    PAGE: tl.constexpr = FORM.PAGE
    TWO: tl.constexpr = FORM.HAS_OTHER
    # Keys of a unit are in one page: [W, 1] units of [W, C] keys, or keys one by one.
    UNIT: tl.constexpr = C if PAGE % C == 0 else 1
    o_u = tl.arange(0, W)[:, None] * C + tl.arange(0, C // UNIT)[None, :]
    o_in = tl.arange(0, W)[:, None] * 0 + tl.arange(0, UNIT)[None, :]
    o_in64 = o_in.to(tl.int64)
    pid = tl.program_id(0)
    i_g = pid % numbers.G
    i_part = pid // numbers.G % numbers.parts
    i_seq, first, last, row_start = tile_of(told.edges, pid // numbers.G // numbers.parts, numbers, R, FORM.EDGES)
    heads = numbers.heads
    rows = (last - first) * heads
    if row_start >= rows:
        return
    g64 = i_g.to(tl.int64)
    inside = tl.minimum(i_seq, numbers.sequences - 1).to(tl.int64)
    keys = narrowed(tl.load(told.used + inside * numbers.used_step + g64 * numbers.used_head), 0, numbers.slots)
    keys = tl.where(i_seq < numbers.sequences, keys, 0)
    table = told.table + inside * numbers.table_row + g64 * numbers.table_head
    k += g64 * strides.at_k.h
    v += g64 * strides.at_v.h
    o_r = row_start + tl.arange(0, R)
    m_r = o_r < rows
    o_r = tl.minimum(o_r, rows - 1)
    o_t = first + o_r // heads
    o_h = o_r % heads
    t64 = o_t.to(tl.int64)
    h64 = o_h.to(tl.int64)
    b_i = keys - last + o_t
    i_first = keys - last + first + row_start // heads
    i_last = keys - last + first + tl.minimum(row_start + R - 1, rows - 1) // heads
    b_lo, b_hi = interval(b_i, keys, numbers, reach, FORM.HAS_BLOCK)
    lo = interval(i_first, keys, numbers, reach, FORM.HAS_BLOCK)[0]
    hi = interval(i_last, keys, numbers, reach, FORM.HAS_BLOCK)[1]
    b_lo2 = b_lo
    b_hi2 = b_hi
    lo2 = hi
    hi2 = hi
    if TWO:
        b_lo2, b_hi2 = interval(b_i, keys, numbers, other, FORM.OTHER_HAS_BLOCK)
        lo2 = interval(i_first, keys, numbers, other, FORM.OTHER_HAS_BLOCK)[0]
        hi2 = interval(i_last, keys, numbers, other, FORM.OTHER_HAS_BLOCK)[1]
        swap = lo2 < lo
        lo, lo2 = tl.where(swap, lo2, lo), tl.where(swap, lo, lo2)
        hi, hi2 = tl.where(swap, hi2, hi), tl.where(swap, hi, hi2)
    # Two runs of units of keys: those of the interval that begins first, and what of the other is behind them.
    begin = lo // UNIT * UNIT
    behind = tl.where(hi > lo, tl.cdiv(hi - begin, UNIT) * UNIT, 0)
    begin2 = tl.maximum(lo2 // UNIT * UNIT, begin + behind)
    gap = begin2 - begin - behind
    number = behind + tl.where(hi2 > lo2, tl.maximum(hi2 - begin2, 0), 0)
    chunk = tl.maximum(tl.cdiv(tl.cdiv(number, numbers.of_most), W * C) * (W * C), numbers.least)
    start = tl.minimum(i_part * chunk, number)
    stop = tl.minimum(start + chunk, number)

    o_q = t64 * strides.at_q.b + g64 * strides.at_q.h + h64 * strides.at_q.n
    b_q = load_at(q, o_q, m_r, FORM.D, FORM.BLOCK_D)
    b_q = tl.broadcast_to(b_q[None, :, :], [W, R, FORM.BLOCK_D])
    b_acc = tl.zeros([W, R, FORM.BLOCK_E], tl.float32)
    b_l = tl.zeros([W, R], tl.float32)
    b_m = tl.full([W, R], FLOOR, tl.float32)
    # The number of a page is read a step before its keys.
    o_x = start + o_u
    b_j = place_of(o_x, begin, behind, gap, TWO)
    b_page = tl.load(table + (b_j // PAGE).to(tl.int64) * numbers.table_step, mask=o_x < stop, other=-1)
    for x in range(start, stop, W * C):
        b_at = b_j + o_in
        m_c = (b_page >= 0) & (b_page < numbers.pages) & (b_at >= lo) & (b_at < hi)
        if TWO:
            m_c = m_c | ((b_page >= 0) & (b_page < numbers.pages) & (b_at >= lo2) & (b_at < hi2))
        page64 = b_page.to(tl.int64)
        slot64 = (b_j % PAGE).to(tl.int64)
        o_k = page64 * strides.at_k.b + slot64 * strides.at_k.n + o_in64 * strides.at_k.n
        o_v = page64 * strides.at_v.b + slot64 * strides.at_v.n + o_in64 * strides.at_v.n
        o_x = x + W * C + o_u
        b_j = place_of(o_x, begin, behind, gap, TWO)
        b_page = tl.load(table + (b_j // PAGE).to(tl.int64) * numbers.table_step, mask=o_x < stop, other=-1)
        b_at = b_at[:, None, :]
        b_k = load_slices(k, o_k, m_c, FORM.D, FORM.BLOCK_D)
        b_s = tl.dot(b_q, tl.permute(b_k, (0, 2, 1)), input_precision=FORM.PRECISION)
        if not FORM.FOLD:
            b_s, _ = score(b_s, numbers.scale, numbers.cap, 0.0, 0, FORM.SOFTCAP, 0)
        m_keep = (b_at >= b_lo[None, :, None]) & (b_at < b_hi[None, :, None])
        if FORM.HAS_STEPS:
            m_keep = m_keep & ((b_i[None, :, None] - b_at) % steps[0] == 0)
        if TWO:
            m_more = (b_at >= b_lo2[None, :, None]) & (b_at < b_hi2[None, :, None])
            if FORM.HAS_STEPS:
                m_more = m_more & ((b_i[None, :, None] - b_at) % steps[1] == 0)
            m_keep = m_keep | m_more
        b_s = tl.where(m_keep & m_c[:, None, :], b_s, float("-inf"))
        b_p, b_shrink, b_l, b_m = add_scores(b_s, b_l, b_m, numbers.scale, FORM.FOLD)
        b_v = load_slices(v, o_v, m_c, FORM.E, FORM.BLOCK_E)
        b_acc = tl.dot(b_p.to(b_v.dtype), b_v, b_acc * b_shrink[:, :, None], input_precision=FORM.PRECISION)

    b_one, b_most = start_rows(sinks, i_g * heads + o_h, i_part == 0, R, FORM.SINK)
    b_new = tl.maximum(b_most, tl.max(b_m, 0))
    b_weight = tl.exp2(b_m - b_new[None, :])
    b_l = b_one * tl.exp2(b_most - b_new) + tl.sum(b_l * b_weight, 0)
    b_acc = tl.sum(b_acc * b_weight[:, :, None], 0)
    b_m = b_new
    if FORM.HAS_PARTS:
        slot = ((t64 * numbers.G + i_g) * numbers.parts + i_part) * heads + o_h
        of_all = tl.cast(numbers.T, tl.int64) * numbers.G * numbers.parts * heads
        tl.store(results.part_ml + slot, b_m, mask=m_r)
        tl.store(results.part_ml + of_all + slot, b_l, mask=m_r)
        store_at(results.part_acc, b_acc, slot * FORM.E, m_r & (b_l > 0.0), FORM.E, FORM.BLOCK_E)
    else:
        b_one, b_lse = finish_rows(b_l, b_m)
        o_lse = t64 * strides.at_lse.b + g64 * strides.at_lse.h + h64 * strides.at_lse.n
        tl.store(results.lse + o_lse, b_lse, mask=m_r)
        o_out = t64 * strides.at_out.b + g64 * strides.at_out.h + h64 * strides.at_out.n
        store_at(results.out, b_acc / b_one[:, None], o_out, m_r, FORM.E, FORM.BLOCK_E)


@triton.jit(do_not_specialize=["numbers"])
def merge_pages_kernel(results: PagedResults, strides: PagedStrides, numbers: PagedNumbers, FORM: tl.constexpr):
    """out and lse of one token and head, from the parts of its keys; those that hold no key are not read."""
    pid = tl.program_id(0)
    i_h = pid % numbers.heads
    i_g = pid // numbers.heads % numbers.G
    t64 = (pid // numbers.heads // numbers.G).to(tl.int64)
    g64 = i_g.to(tl.int64)
    h64 = i_h.to(tl.int64)
    of_all = tl.cast(numbers.T, tl.int64) * numbers.G * numbers.parts * numbers.heads
    base = (t64 * numbers.G + g64) * numbers.parts * numbers.heads + h64
    o_one = tl.arange(0, 1)
    b_acc = tl.zeros([FORM.BLOCK_E], tl.float32)
    b_l = tl.zeros([1], tl.float32)
    b_m = tl.full([1], FLOOR, tl.float32)
    for i_part in range(0, numbers.parts, FORM.PARTS):
        o_p = i_part + tl.arange(0, FORM.PARTS)
        slot = base + o_p.to(tl.int64) * numbers.heads
        b_sum = tl.load(results.part_ml + of_all + slot, mask=o_p < numbers.parts, other=0.0)
        m_p = b_sum > 0.0
        b_most = tl.load(results.part_ml + slot, mask=m_p, other=FLOOR)
        b_block = load_at(results.part_acc, slot * FORM.E, m_p, FORM.E, FORM.BLOCK_E)
        b_new = tl.maximum(b_m, tl.max(b_most, 0))
        b_shrink = tl.exp2(b_m - b_new)
        b_weight = tl.where(m_p, tl.exp2(b_most - b_new), 0.0)
        b_l = b_l * b_shrink + tl.sum(b_sum * b_weight, 0)
        b_acc = b_acc * b_shrink + tl.sum(b_block * b_weight[:, None], 0)
        b_m = b_new
    b_one, b_lse = finish_rows(b_l, b_m)
    o_lse = t64 * strides.at_lse.b + g64 * strides.at_lse.h + h64 * strides.at_lse.n
    tl.store(results.lse + o_lse + o_one, b_lse)
    o_out = t64 * strides.at_out.b + g64 * strides.at_out.h + h64 * strides.at_out.n
    store_at(results.out, (b_acc / b_one)[None, :], o_out + o_one, o_one < 1, FORM.E, FORM.BLOCK_E)
