"""The exact normaliser and weights of rows from their candidates, and the lists of (key, weight) of their supports."""

from __future__ import annotations

import triton
import triton.language as tl

from gossamer.entmax.triton.formulas import cut, longest, middle, newton, ordered, powers
from gossamer.entmax.triton.parameters import Candidates, RowStats, SupportLists
from gossamer.entmax.triton.rows import relative

MOST_STEPS = tl.constexpr(60)
EPS = tl.constexpr(1.2e-7)
LAST = tl.constexpr(0x7FFFFFFF)


@triton.jit
def largest(s, j, there, keep):
    """The mask of the scores s [R, C] of keys j that are among the `keep` largest, ties to the lowest key."""
    # Without -inf, which is no key.
    order = tl.where(there, ordered(s), -LAST)
    low = tl.min(tl.where(there, order, LAST), 1)
    high = tl.max(order, 1)
    few = tl.sum(there.to(tl.int32), 1) <= keep
    low = tl.where(few, -LAST, low)
    high = tl.where(few, -LAST, high)
    while tl.max((low < high).to(tl.int32), 0) > 0:
        between = middle(low, high)
        enough = tl.sum((order >= between[:, None]).to(tl.int32), 1) >= keep
        low = tl.where(enough, between, low)
        high = tl.where(enough, high, tl.maximum(between - 1, low))
    over = there & (order > low[:, None])
    equal = there & (order == low[:, None])
    wanted = keep - tl.sum(over.to(tl.int32), 1)
    kept = over | equal
    if tl.max(tl.where(few, 0, tl.sum(equal.to(tl.int32), 1) - wanted), 0) > 0:
        # The key up to which as many are equal as are wanted.
        first = tl.zeros_like(low)
        end = tl.max(tl.where(equal, j, 0), 1)
        while tl.max((first < end).to(tl.int32), 0) > 0:
            between = first + (end - first) // 2
            enough = tl.sum((equal & (j <= between[:, None])).to(tl.int32), 1) >= wanted
            end = tl.where(enough, between, end)
            first = tl.where(enough, first, tl.minimum(between + 1, end))
        kept = over | (equal & (j <= end[:, None]))
    return tl.where(few[:, None], there, kept)


@triton.jit
def normalise(s, a, A: tl.constexpr):
    """(p [R, C], lam [R]) of scores, -inf where there is none; rows without any give 0 and inf."""
    top = tl.max(s, 1)
    t = relative(s, top)
    number = tl.maximum(tl.sum((s != -float("inf")).to(tl.float32), 1), 1.0)
    low = tl.zeros_like(top)
    high = longest(a, number) * (1.0 + 4.0 * EPS)
    x = low
    step = 0
    running = 1
    while running > 0:
        p, u = powers(t - x[:, None], a[:, None], A)
        F = tl.sum(p, 1)
        low = tl.where(F >= 1.0, x, low)
        high = tl.where(F < 1.0, x, high)
        move = newton(F, tl.sum(u, 1), a, A)
        new = tl.minimum(tl.maximum(x + move, low), high)
        going = (tl.abs(move) > 64.0 * EPS * (1.0 + x)) & (high > low)  # NaN ends the search
        if step % 4 == 3:
            new = tl.where(going, 0.5 * (low + high), new)
        x = tl.where(move == move, new, x)
        step += 1
        running = tl.where(step < MOST_STEPS, tl.max(going.to(tl.int32), 0), 0)
    p, _ = powers(t - x[:, None], a[:, None], A)
    # A score of NaN, or of inf, makes all weights of its row NaN.
    total = tl.sum(p, 1)
    p = p / tl.where(total == 0.0, 1.0, total)[:, None]
    p = tl.where(top[:, None] == -float("inf"), tl.where(s != s, s, 0.0), p)
    lam = tl.where(top == -float("inf"), float("inf"), top + x) + (total - total)
    return p, lam


@triton.jit
def finish_rows(
    candidates, stats, lists, n, place, number, o_list, a, m_row, keep, C: tl.constexpr, FORM: tl.constexpr
):
    """`finish_kernel` over the first C candidates of each row."""
    o = tl.arange(0, C)
    there = o[None, :] < n[:, None]
    s = tl.load(candidates.scores + place[:, None] + o[None, :], mask=there, other=-float("inf"))
    j = tl.load(candidates.keys + place[:, None] + o[None, :], mask=there, other=0)
    kept = there
    if FORM.TOP:
        kept = largest(s, j, there, keep)
    if FORM.KEYS:
        weighed = kept
    else:
        p, normaliser = normalise(tl.where(kept, s, -float("inf")), a, FORM.A)
        weighed = kept & (p != 0.0)
    size = tl.sum(weighed.to(tl.int32), 1)
    listed = m_row & (n >= 0) & (size <= FORM.L)
    to = o_list[:, None] + tl.cumsum(weighed.to(tl.int32), 1) - 1
    tl.store(lists.keys + to, j, mask=weighed & listed[:, None])
    tl.store(lists.counts + number, tl.where(listed, size, -1), mask=m_row)
    if not FORM.KEYS:
        tl.store(lists.weights + to, p, mask=weighed & listed[:, None])
    if FORM.TOLD:
        tl.store(stats.lam + number, normaliser, mask=listed)
        tl.store(stats.support + number, size, mask=listed)
        sure = n >= 0
        if FORM.TOP:
            after = tl.max(tl.where(there & ~kept, s, -float("inf")), 1)
            sure = (after == -float("inf")) | (after <= cut(normaliser, a))
        tl.store(stats.certified + number, sure, mask=listed)


@triton.jit(do_not_specialize=["first_block", "Q", "n_rows", "keep"])
def finish_kernel(
    candidates: Candidates,  # whose counts are -1 of an overflow row
    steepness,  # (H,) float32: alpha - 1
    stats: RowStats,  # to write
    lists: SupportLists,  # to write
    first_block, n_rows, H, Q, keep, first_listed, FORM: tl.constexpr,
):  # fmt: skip
    """Everything of RP rows but out; `n_rows` are in the buffers, `first_listed` is the row of the first list."""
    R: tl.constexpr = FORM.R
    RP: tl.constexpr = FORM.RP
    own = tl.program_id(0) * RP + tl.arange(0, RP)
    blocks = (Q + R - 1) // R
    block = first_block + own // R
    row = (blocks - 1 - block % blocks) * R + own % R
    head = block // blocks
    m_row = (own < n_rows) & (row < Q)
    number = head.to(tl.int64) * Q + row
    n = tl.load(candidates.counts + own, mask=m_row, other=0)
    a = tl.load(steepness + head % H, mask=m_row, other=0.5)
    place = own.to(tl.int64) * FORM.C
    o_list = (number - first_listed) * FORM.L
    if tl.max(n, 0) <= FORM.SHORT:
        finish_rows(candidates, stats, lists, n, place, number, o_list, a, m_row, keep, FORM.SHORT, FORM)
    else:
        finish_rows(candidates, stats, lists, n, place, number, o_list, a, m_row, keep, FORM.C, FORM)
