"""The state after some steps: the k-th largest order key and the threshold of the keys so far, exactly: kernels.

Both never fall. So a node, a range of steps of which the states before and after it are known, needs of the earlier
keys only those between these two states, its candidates; of the others it has sums. States inside a node are found from
its candidates, each for itself: which halves the work of a search over steps, or makes it a hundredth of that.

The k-th largest key is found by bisection. The threshold x has f(x) = sum clip(u - x, 0, 1) = k and lies within 1 below
the k-th largest score, if it does not lie at a score under that (f is k between). In whole steps of 1 / one the last x
with f(x) > k is found by Newton's method, with secants where it goes too far; f is linear from there to the next step.
"""

from __future__ import annotations

import triton
import triton.language as tl

from gossamer.kernels.prefixes.numbers import MOST, NONE, after, before, largest_under, on_grid, score_of, steps_of


@triton.jit
def _source(list_ptr, at, end, listed):
    """The keys of some entries: those of a list, or, where none is listed, all in turn."""
    return tl.where(at < listed, tl.load(list_ptr + at, mask=at < listed, other=0), at), at < end


@triton.jit
def _largest(
    key_ptr, list_ptr, begin, end, listed, length, base, k, low, high, ROWS: tl.constexpr, BLOCK: tl.constexpr
):
    """(ROWS,) int64: the k-th largest key of those before each length, NONE if there are fewer; from low to high."""
    while tl.max((low < high).to(tl.int32), 0) > 0:
        trial = (low | high) - ((low ^ high) >> 1)
        trial = tl.where(low == NONE, NONE + 1, trial)
        count = tl.zeros((BLOCK, ROWS), tl.int32)
        least = tl.full((BLOCK, ROWS), MOST, tl.int64)
        for n in range(begin, end, BLOCK):
            j, there = _source(list_ptr, n + tl.arange(0, BLOCK), end, listed)
            key = tl.load(key_ptr + j, mask=there, other=NONE)
            keeps = (key[:, None] >= trial[None, :]) & (j[:, None] < length[None, :])
            count += keeps.to(tl.int32)
            least = tl.minimum(least, tl.where(keeps, key[:, None], MOST))
        found = tl.sum(count, 0) + base
        smallest = tl.min(least, 0)
        searches = low < high
        high = tl.where(searches & (found <= k), tl.where(found == k, smallest, trial - 1), high)
        low = tl.where(searches & (found >= k), smallest, low)
    return low


@triton.jit
def _thresholds(
    key_ptr, score_ptr, steps_ptr, list_ptr, begin, end, listed, length, base_inside, base_sum, base_over, k, largest, tau_a, tau_b,
    one, ROWS: tl.constexpr, BLOCK: tl.constexpr,
):  # fmt: skip
    """(ROWS,) float32 from tau_a to tau_b, of the keys before each length, of which the k-th largest is known."""
    unit = 1.0 / one.to(tl.float64)
    most = one.to(tl.float64)
    none = largest == NONE
    top = on_grid(tl.where(none, 0.0, score_of(tl.where(none, 0, largest))), one)
    top_steps = steps_of(top, one)
    # x is given in steps over top - 1. Just under tau_a f is over k, and just over tau_b it is not.
    under, over_b = before(tau_a).to(tl.float64), after(tau_b).to(tl.float64)
    low = tl.where(under > top - 1, tl.floor((tl.where(under > top - 1, under - top, -1.0) + 1) * most) - 2, 0.0)
    high = tl.where(over_b < top, tl.floor((tl.where(over_b < top, over_b - top, 0.0) + 1) * most) + 3, most)
    low = tl.minimum(tl.maximum(low, 0.0), most - 1.0).to(tl.int64)
    high = tl.maximum(tl.minimum(tl.maximum(high, 0.0), most).to(tl.int64), low + 1)
    trial = low
    excess_low = tl.zeros((ROWS,), tl.int64)
    excess_high = tl.zeros((ROWS,), tl.int64)
    tau = tl.full((ROWS,), float("-inf"), tl.float32)
    runs = none == 0
    flat = runs & (none != 0)
    turn = 0
    while tl.max(runs.to(tl.int32), 0) > 0:
        x_over_top = (trial - one).to(tl.float64) * unit
        at_x = largest_under(top, x_over_top)
        at_one = largest_under(top, trial.to(tl.float64) * unit)
        inside = tl.zeros((BLOCK, ROWS), tl.int32)
        whole = tl.zeros((BLOCK, ROWS), tl.int32)
        total = tl.zeros((BLOCK, ROWS), tl.int64)
        for n in range(begin, end, BLOCK):
            j, there = _source(list_ptr, n + tl.arange(0, BLOCK), end, listed)
            score = tl.load(score_ptr + j, mask=there, other=float("-inf"))
            steps = tl.load(steps_ptr + j, mask=there, other=0)
            counts = (score[:, None] > at_x[None, :]) & (j[:, None] < length[None, :])
            is_one = counts & (score[:, None] > at_one[None, :])
            is_inside = counts & (score[:, None] <= at_one[None, :])
            whole += is_one.to(tl.int32)
            inside += is_inside.to(tl.int32)
            total += tl.where(is_inside, steps[:, None], 0)
        C = (tl.sum(inside, 0) + base_inside).to(tl.int64)
        excess = tl.sum(total, 0) + base_sum - C * (top_steps - one + trial)
        excess += (tl.sum(whole, 0) + base_over - k).to(tl.int64) * one

        above = excess > 0
        ends = runs & above & (excess <= C)
        x = top + x_over_top + excess.to(tl.float64) / tl.maximum(C, 1).to(tl.float64) * unit
        tau = tl.where(ends, x.to(tl.float32), tau)
        # With k or fewer already at the first x there is no root over it.
        flat = flat | (runs & (above == 0) & (trial == low))
        runs = runs & (ends == 0) & (flat == 0)
        excess_low = tl.where(above, excess, excess_low)
        excess_high = tl.where(above, excess_high, excess)
        low = tl.where(runs & above, trial, low)
        high = tl.where(runs & (above == 0), trial, high)
        jump = tl.ceil(excess.to(tl.float64) / tl.maximum(C, 1).to(tl.float64))
        newton = trial - 1 + tl.minimum(tl.maximum(jump, 1.0), 2 * most).to(tl.int64)
        share = excess_low.to(tl.float64) / tl.maximum((excess_low - excess_high).to(tl.float64), 1.0)
        secant = low + tl.minimum((high - low).to(tl.float64) * share, most).to(tl.int64)
        secant = tl.where(turn % 3 == 2, low + (high - low) // 2, secant)
        trial = tl.where(above & (C > 0) & (newton < high), newton, secant)
        trial = tl.maximum(tl.minimum(trial, high - 1), low + 1)
        turn += 1
    if tl.max(flat.to(tl.int32), 0) > 0:
        at_x = largest_under(top, -1.0)
        below = tl.full((BLOCK, ROWS), NONE, tl.int64)
        for n in range(begin, end, BLOCK):
            j, there = _source(list_ptr, n + tl.arange(0, BLOCK), end, listed)
            score = tl.load(score_ptr + j, mask=there, other=float("-inf"))
            key = tl.load(key_ptr + j, mask=there, other=NONE)
            counts = (score[:, None] <= at_x[None, :]) & (j[:, None] < length[None, :])
            below = tl.maximum(below, tl.where(counts, key[:, None], NONE))
        next_one = tl.max(below, 0)
        score = tl.where(next_one == NONE, float("-inf"), score_of(next_one)).to(tl.float32)
        tau = tl.where(flat, tl.maximum(score, tau_a), tau)
    return tau


@triton.jit
def solve_states(
    key_ptr, score_ptr, steps_ptr, list_ptr, counts_ptr, sums_ptr, parent_theta_ptr, parent_tau_ptr, theta_ptr, tau_ptr,
    N, k, step, states, parent_step, parents, room, one, ROWS: tl.constexpr, BLOCK: tl.constexpr,
    LOCAL: tl.constexpr, EVERY: tl.constexpr,
):  # fmt: skip
    """The states after step, 2 * step, ... steps, at most N: ROWS of these in a program, of one parent node.

    Args:
        list_ptr, counts_ptr, sums_ptr: the candidates of nodes of `parent_step` steps, of `list_candidates`.
        parent_theta_ptr, parent_tau_ptr: (rows, parents + 1): the states before each node and after the last.
        theta_ptr, tau_ptr: (rows, states + 1) int64 and float32, likewise; with EVERY, of single steps, (rows, states).
        LOCAL: count the keys of the last `step` steps alone, for which ROWS is 1.
    """
    row = tl.program_id(1).to(tl.int64)
    one = tl.full((), one, tl.int64)
    first = tl.program_id(0) * ROWS
    state = first + 1 + tl.arange(0, ROWS)
    length = tl.minimum(state * step, N)
    parent = first * step // parent_step
    known = row * (parents + 1) + parent
    theta_a, theta_b = tl.load(parent_theta_ptr + known), tl.load(parent_theta_ptr + known + 1)
    tau_a, tau_b = tl.load(parent_tau_ptr + known), tl.load(parent_tau_ptr + known + 1)
    theta = tl.zeros((ROWS,), tl.int64) + theta_a
    tau = tl.zeros((ROWS,), tl.float32) + tau_a
    if (theta_a != theta_b) | (tau_a != tau_b):
        node = row * parents + parent
        listed = tl.load(counts_ptr + node)
        over = listed > room
        begin = 0
        if LOCAL:
            over = listed >= 0
            begin = first * step
        end = tl.where(over, tl.minimum((first + ROWS) * step, N), listed)
        listed = tl.where(over, 0, listed)
        sums = sums_ptr + node * 4
        taken = over == 0
        base = tl.load(sums, mask=taken, other=0).to(tl.int32)
        base_inside = tl.load(sums + 1, mask=taken, other=0).to(tl.int32)
        base_sum = tl.load(sums + 2, mask=taken, other=0)
        base_over = tl.load(sums + 3, mask=taken, other=0).to(tl.int32)
        keys, scores, all_steps, entries = (
            key_ptr + row * N, score_ptr + row * N, steps_ptr + row * N, list_ptr + node * room,
        )  # fmt: skip
        high = tl.zeros((ROWS,), tl.int64) + theta_b
        theta = _largest(keys, entries, begin, end, listed, length, base, k, theta, high, ROWS, BLOCK)
        if tau_a != tau_b:
            tau = _thresholds(
                keys, scores, all_steps, entries, begin, end, listed, length, base_inside, base_sum, base_over, k,
                theta, tau_a, tau_b, one, ROWS, BLOCK,
            )  # fmt: skip
    valid = state <= states
    at = row * (states + 1) + state
    if EVERY:
        at = row * states + state - 1
    elif first == 0:
        tl.store(theta_ptr + row * (states + 1), NONE)
        tl.store(tau_ptr + row * (states + 1), float("-inf"))
    tl.store(theta_ptr + at, theta, mask=valid)
    tl.store(tau_ptr + at, tau, mask=valid)


@triton.jit
def find_last(key_ptr, theta_ptr, last_ptr, N, BLOCK: tl.constexpr):
    """The last step at which each key is among the k largest so far, (rows, N) int32; one before its own if never.

    Args:
        theta_ptr: (rows, N) int64: the k-th largest key of each step.
    """
    row = tl.program_id(1).to(tl.int64)
    j = tl.program_id(0) * BLOCK + tl.arange(0, BLOCK)
    there = j < N
    key = tl.load(key_ptr + row * N + j, mask=there, other=NONE)
    theta = tl.load(theta_ptr + row * N + j, mask=there, other=MOST)
    kept = there & (key > NONE) & (key >= theta)
    # The first step of which the k-th largest is over the key.
    low = j + kept.to(tl.int32)
    high = tl.where(kept, N, low)
    while tl.max(high - low, 0) > 0:
        search = low < high
        middle = (low + high) // 2
        under = tl.load(theta_ptr + row * N + middle, mask=search, other=MOST) <= key
        low = tl.where(search & under, middle + 1, low)
        high = tl.where(search & (under == 0), middle, high)
    tl.store(last_ptr + row * N + j, low - 1, mask=there)
