"""The kernel that makes the list of a block of queries from its scores."""

from __future__ import annotations

from collections import namedtuple

import triton
import triton.language as tl

LEAST: tl.constexpr = tl.constexpr(-(2**31))
MOST: tl.constexpr = tl.constexpr(2**31 - 1)


# Numbers of whose values the kernel is compiled for none.
# t0: the block of queries of the first row
ChoiceNumbers = namedtuple("ChoiceNumbers", "Q K T C t0 rows local first")
# What the kernel is compiled for.
# PART: whether `top_p` may leave some out
# CP: powers of two that hold C, and n or more
ChoiceForm = namedtuple("ChoiceForm", "CAUSAL PART BLOCK CP NP")


@triton.jit
def _number(some):
    return tl.sum(some.to(tl.int32), 0)


@triton.jit
def _ordered(x):
    """Bits of float32 as integers in ascending order of the numbers, and back."""
    return tl.where(x < 0, x ^ MOST, x)


@triton.jit
def _threshold(key, others, wanted, room):
    """(a threshold, how many of the other keys reach it): at least `wanted`, and at most `room` unless many tie."""
    low = tl.min(tl.where(others, key, MOST), 0)
    behind = tl.max(tl.where(others, key, LEAST), 0) + 1
    reached = _number(others)
    by_scores = True
    while (reached > room) & (low + 1 < behind):
        # Halfway between the scores, which is near soon; every other time between their bits, which always ends.
        middle = (low >> 1) + (behind >> 1) + (low & behind & 1)
        lowest = _ordered(low).to(tl.float32, bitcast=True)
        highest = _ordered(behind - 1).to(tl.float32, bitcast=True)
        near = _ordered((0.5 * lowest + 0.5 * highest + 0.0).to(tl.int32, bitcast=True))
        middle = tl.where(by_scores & (near > low) & (near < behind), near, middle)
        by_scores = by_scores == 0
        number = _number(others & (key >= middle))
        enough = number >= wanted
        reached = tl.where(enough, number, reached)
        low = tl.where(enough, middle, low)
        behind = tl.where(enough, behind, middle)
    return low, reached


@triton.jit(do_not_specialize=["numbers"])
def choose_kernel(
    scores,  # (B * heads, rows, C)
    keys,  # (B * heads, rows, NP) int64, a workspace
    indices,  # (B * heads, T, n) int32
    covered,  # (B * heads, T) float32
    numbers: ChoiceNumbers,
    n,
    top_p,
    FORM: tl.constexpr,
):
    """One list: the blocks that are always kept, then those of the highest scores, equal ones by ascending position.

    A block is one integer: its score, as bits in ascending order, and its place. A threshold is searched that the n
    first reach, and at most NP in all; these are written to `keys` in any order, and sorted.
    """
    BLOCK: tl.constexpr = FORM.BLOCK
    NP: tl.constexpr = FORM.NP
    Q, K, T, C, t0, rows, local, first = numbers
    at = tl.program_id(0).to(tl.int64)
    t = t0 + (at % rows).to(tl.int32)
    end = tl.minimum(t * BLOCK + BLOCK, Q) - 1 + (K - Q)
    c = tl.arange(0, FORM.CP)
    visible = c < C
    if FORM.CAUSAL:
        visible &= c * BLOCK <= end
    low_block = tl.maximum(t * BLOCK + (K - Q), 0) // BLOCK
    high_block = tl.maximum(end, 0) // BLOCK
    reach = local
    if FORM.CAUSAL:
        reach = tl.minimum(local, 1)
    near = (c > low_block - local) & (c < tl.where(end >= 0, high_block + reach, 0))
    always = visible & (near | (c < first))
    score = tl.load(scores + at * C + c, mask=visible, other=float("-inf"))
    # + 0.0: both zeros are one number.
    bits = (tl.where(score != score, float("inf"), score) + 0.0).to(tl.int32, bitcast=True)
    key = _ordered(bits)
    kept = tl.minimum(_number(visible), n)
    sure = _number(always)
    others = visible & (always == 0)
    room = NP - sure
    threshold, number_taken = _threshold(key, others, kept - sure, room)
    taken = others & (key >= threshold)
    if number_taken > room:
        # More are equal than there is room for: take the first of them.
        over, equal = others & (key > threshold), others & (key == threshold)
        taken = over | (equal & (tl.cumsum(equal.to(tl.int32), 0) <= room - _number(over)))
        number_taken = room
    taken |= always
    packed = (tl.where(always, MOST, key).to(tl.int64) << 32) + (C - 1 - c)
    tl.store(keys + at * NP + tl.cumsum(taken.to(tl.int32), 0) - 1, packed, mask=taken)
    tl.debug_barrier()  # before reading the writes of other threads

    j = tl.arange(0, NP)
    listed = tl.load(keys + at * NP + j, mask=j < sure + number_taken, other=-(2**63))
    listed = tl.sort(listed, descending=True)
    used = j < kept
    index = C - 1 - (listed & 0xFFFFFFFF).to(tl.int32)
    most = tl.max(score, 0)
    most = tl.where(tl.abs(most) == float("inf"), 0.0, most)
    total = tl.sum(tl.where(visible, tl.exp(score - most), 0.0), 0)
    total = tl.where(total == 0, float("-inf"), tl.log(tl.where(total == 0, 1.0, total)) + most)
    share = tl.where(used, tl.exp(tl.load(scores + at * C + index, mask=used, other=0.0) - total), 0.0)
    if FORM.PART:
        used &= (tl.cumsum(share, 0) - share < top_p) | (j < sure)
    mass = tl.sum(tl.where(used, share, 0.0), 0)
    to = at // rows * T + t
    tl.store(indices + to * n + j, tl.where(used, index, -1), mask=j < n)
    tl.store(covered + to, tl.where(mass > 1, 1.0, mass))
