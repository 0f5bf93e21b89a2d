"""The k largest scores of rows with more contenders than a buffer holds: passes over all of them, for groups of R rows.

Their keys and weights become lists, as those of other rows.
"""

from __future__ import annotations

import triton
import triton.language as tl

from gossamer.entmax.triton.finish import EPS, LAST, MOST_STEPS
from gossamer.entmax.triton.formulas import cut, longest, middle, newton, ordered, powers
from gossamer.entmax.triton.parameters import HeadRows, LargeNumbers, LargeResults, ScoreStrides
from gossamer.entmax.triton.rows import bounds, key_range, key_tile, load_tile, relative

SAMPLE = tl.constexpr(16)  # the first steps of Newton's method read every so many of the tiles
SAMPLED_STEPS = tl.constexpr(4)


@triton.jit(do_not_specialize=["Q"])
def list_groups_kernel(
    list_counts,  # (B, H, Q) int32: -1 of a row without a list
    group_list,  # (B H, groups) int32, to write: the groups with such a row, ascending
    group_counts,  # (B H,) int32, to write
    Q, R: tl.constexpr, STEP: tl.constexpr,
):  # fmt: skip
    """The groups of R rows of a head among which are rows without a list."""
    head = tl.program_id(0).to(tl.int64)
    groups = (Q + R - 1) // R
    found = 0
    for first in range(0, groups, STEP):
        group = first + tl.arange(0, STEP)
        row = group[:, None] * R + tl.arange(0, R)[None, :]
        count = tl.load(list_counts + head * Q + row, mask=row < Q, other=0)
        some = tl.max((count < 0).to(tl.int32), 1)
        place = found + tl.cumsum(some, 0) - 1
        tl.store(group_list + head * groups + place, group, mask=some > 0)
        found += tl.sum(some, 0)
    tl.store(group_counts + head, found)


@triton.jit
def among(s, j, low, tie, few):
    """Which of the scores s [R, STEP] of keys j are seen and among the k largest."""
    order = ordered(s)
    largest = (order > low[:, None]) | ((order == low[:, None]) & (j[None, :] <= tie[:, None]))
    return (s != -float("inf")) & (few[:, None] | largest)


@triton.jit(do_not_specialize=["numbers"])
def large_kernel(
    q,  # (B, H, Q, D)
    k,  # (B, G, K, D)
    steepness,  # (H,) float32: alpha - 1
    head_groups: HeadRows,
    results: LargeResults,
    strides: ScoreStrides,
    first_head, H,
    numbers: LargeNumbers,
    FORM: tl.constexpr,
):  # fmt: skip
    """The lists of the rows of a group that have none, and what is known of these rows."""
    D: tl.constexpr = FORM.D
    BLOCK_D: tl.constexpr = FORM.BLOCK_D
    R: tl.constexpr = FORM.R
    STEP: tl.constexpr = FORM.STEP
    A: tl.constexpr = FORM.A
    KEYS: tl.constexpr = FORM.KEYS
    POSITIONS: tl.constexpr = FORM.POSITIONS
    PRECISION: tl.constexpr = FORM.PRECISION
    Q, K, keep = numbers.Q, numbers.K, numbers.keep
    head = first_head + tl.program_id(1)
    if tl.program_id(0) >= tl.load(head_groups.counts + head):
        return
    groups = (Q + R - 1) // R
    group = tl.load(head_groups.listed + head.to(tl.int64) * groups + tl.program_id(0))
    b64, h64, g64 = (head // H).to(tl.int64), (head % H).to(tl.int64), (head % H // FORM.GROUP).to(tl.int64)
    rows = group * R + tl.arange(0, R)
    number = head.to(tl.int64) * Q + rows
    inside = (tl.load(results.list_counts + number, mask=rows < Q, other=0) < 0) & (rows < Q)
    b_q = load_tile(q + b64 * strides.at_q.b + h64 * strides.at_q.h, rows, inside, strides.at_q.n, D, BLOCK_D)
    k_base = k + b64 * strides.at_k.b + g64 * strides.at_k.h
    a = tl.zeros([R], tl.float32) + tl.load(steepness + head % H)
    first, last = bounds(rows, inside, head_groups.lo, head_groups.hi, numbers.offset, K, FORM.BOUNDS)
    at = rows
    kp_base = head_groups.k_positions
    if POSITIONS:
        at = tl.load(
            head_groups.q_positions
            + b64 * strides.at_q_positions.b
            + h64 * strides.at_q_positions.h
            + rows.to(tl.int64) * strides.at_q_positions.n,
            mask=inside,
        )
        kp_base = head_groups.k_positions + b64 * strides.at_k_positions.b + h64 * strides.at_k_positions.h
    begin, tiles = key_range(first, last, inside, K, STEP)
    scores_of = (b_q, k_base, strides.at_k.n, first, last, at, kp_base, strides.at_k_positions.n, numbers.scale, K)
    o = tl.arange(0, STEP)

    top = tl.zeros([R], tl.float32) - float("inf")
    highest = tl.zeros([R], tl.int32) - LAST
    number_seen = tl.zeros([R], tl.int32)
    for tile in range(begin, begin + tiles):
        j, s = key_tile(tile, scores_of, STEP, D, BLOCK_D, POSITIONS, PRECISION)
        top = tl.maximum(top, tl.max(s, 1))
        there = s != -float("inf")
        number_seen += tl.sum(there.to(tl.int32), 1)
        highest = tl.maximum(highest, tl.max(tl.where(there, ordered(s), -LAST), 1))

    tie = tl.zeros([R], tl.int32) + LAST
    few = number_seen <= keep
    # The k-th largest: halve the interval of the integers that stand for numbers.
    low = tl.zeros([R], tl.int32) - LAST
    high = tl.where(few, -LAST, highest)
    equal_to = low
    while tl.max((low < high).to(tl.int32), 0) > 0:
        between = middle(low, high)
        found = tl.zeros([R], tl.int32)
        for tile in range(begin, begin + tiles):
            j, s = key_tile(tile, scores_of, STEP, D, BLOCK_D, POSITIONS, PRECISION)
            found += tl.sum(((ordered(s) >= between[:, None]) & (s != -float("inf"))).to(tl.int32), 1)
        enough = found >= keep
        low = tl.where(enough, between, low)
        high = tl.where(enough, high, tl.maximum(between - 1, low))
    over = tl.zeros([R], tl.int32)
    for tile in range(begin, begin + tiles):
        j, s = key_tile(tile, scores_of, STEP, D, BLOCK_D, POSITIONS, PRECISION)
        over += tl.sum(((ordered(s) > low[:, None]) & (s != -float("inf"))).to(tl.int32), 1)
    wanted = keep - over
    equal_to = tl.zeros([R], tl.int32)
    for tile in range(begin, begin + tiles):
        j, s = key_tile(tile, scores_of, STEP, D, BLOCK_D, POSITIONS, PRECISION)
        equal = (ordered(s) == low[:, None]) & (s != -float("inf"))
        so_far = equal_to[:, None] + tl.cumsum(equal.to(tl.int32), 1)
        here = tl.max(tl.where(equal & (so_far == wanted[:, None]), j[None, :], -1), 1)
        tie = tl.where(here >= 0, here, tie)
        equal_to += tl.sum(equal.to(tl.int32), 1)

    x = tl.zeros([R], tl.float32)
    if not KEYS:
        # As `finish.normalise`; the first steps are of a part of the keys, whose normaliser is not larger.
        bottom = x
        ceiling = longest(a, tl.maximum(tl.minimum(number_seen, keep), 1).to(tl.float32)) * (1.0 + 4.0 * EPS)
        step = tl.where(tiles < 2 * SAMPLE, SAMPLED_STEPS, 0)
        running = 1
        while running > 0:
            every = tl.where(step < SAMPLED_STEPS, SAMPLE, 1)
            F = tl.zeros([R], tl.float32)
            U = tl.zeros([R], tl.float32)
            for i in range((tiles + every - 1) // every):
                j, s = key_tile(begin + i * every, scores_of, STEP, D, BLOCK_D, POSITIONS, PRECISION)
                kept = among(s, j, low, tie, few)
                p, u = powers(relative(tl.where(kept, s, -float("inf")), top + x), a[:, None], A)
                F += tl.sum(p, 1)
                U += tl.sum(u, 1)
            move = newton(F, U, a, A)
            if step < SAMPLED_STEPS:
                x = tl.where(F > 1.0, tl.minimum(x + tl.maximum(move, 0.0), ceiling), x)
                bottom = tl.zeros([R], tl.float32)
            else:
                bottom = tl.where(F >= 1.0, x, bottom)
                ceiling = tl.where(F < 1.0, x, ceiling)
                new = tl.minimum(tl.maximum(x + move, bottom), ceiling)
                going = (tl.abs(move) > 64.0 * EPS * (1.0 + x)) & (ceiling > bottom)
                if step % 4 == 3 and step > 8:
                    new = tl.where(going, 0.5 * (bottom + ceiling), new)
                x = tl.where(move == move, new, x)
                running = tl.where(step < MOST_STEPS, tl.max((going & inside).to(tl.int32), 0), 0)
            step += 1

    total = tl.zeros([R], tl.float32)
    size = tl.zeros([R], tl.int32)
    count = tl.zeros([R], tl.int32)
    after = tl.zeros([R], tl.float32) - float("inf")
    o_list = (number - numbers.first_listed) * FORM.L
    for tile in range(begin, begin + tiles):
        j, s = key_tile(tile, scores_of, STEP, D, BLOCK_D, POSITIONS, PRECISION)
        kept = among(s, j, low, tie, few)
        to = o_list[:, None] + count[:, None] + tl.cumsum(kept.to(tl.int32), 1) - 1
        tl.store(results.list_keys + to, tl.broadcast_to(j[None, :], [R, STEP]), mask=kept)
        count += tl.sum(kept.to(tl.int32), 1)
        if not KEYS:
            p, _ = powers(relative(tl.where(kept, s, -float("inf")), top + x), a[:, None], A)
            total += tl.sum(p, 1)
            size += tl.sum((kept & (p != 0.0)).to(tl.int32), 1)
            tl.store(results.list_weights + to, p, mask=kept)
            after = tl.maximum(after, tl.max(tl.where(kept, -float("inf"), s), 1))

    tl.store(results.list_counts + number, count, mask=inside)
    if not KEYS:
        # A score of inf gives NaN, one of NaN as well.
        whole = tl.where(total == 0.0, 1.0, total)
        tl.debug_barrier()
        for begin_list in range(0, FORM.L, STEP):
            at_list = begin_list + o
            there = at_list[None, :] < count[:, None]
            p = tl.load(results.list_weights + o_list[:, None] + at_list[None, :], mask=there, other=0.0)
            tl.store(results.list_weights + o_list[:, None] + at_list[None, :], p / whole[:, None], mask=there)
        if FORM.TOLD:
            found = tl.where(number_seen == 0, float("inf"), top + x) + (total - total)
            tl.store(results.lam + number, found, mask=inside)
            tl.store(results.support + number, size, mask=inside)
            sure = (after == -float("inf")) | (after <= cut(found, a))
            tl.store(results.certified + number, sure, mask=inside)
