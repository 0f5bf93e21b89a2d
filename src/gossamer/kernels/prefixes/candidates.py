"""Which keys matter within a node: kernels. A node is a range of steps, of which the states before and after it are known."""

from __future__ import annotations

import triton
import triton.language as tl

from gossamer.kernels.prefixes.numbers import NONE, after, before


@triton.jit
def list_survivors(
    key_ptr, score_ptr, tau_ptr, list_ptr, counts_ptr, N, step, chunks, BLOCK: tl.constexpr
):
    """Add to the list of its row the keys of chunk program 0 that the chunk's own threshold leaves.

    Args:
        tau_ptr: (rows, chunks + 1) float32: of each chunk of `step` keys alone, from 1 on.
        list_ptr, counts_ptr: (rows, N) and (rows,) int32, the second zero before. The order of a list has no meaning.
    """
    chunk, row = tl.program_id(0), tl.program_id(1).to(tl.int64)
    under = before(tl.load(tau_ptr + row * (chunks + 1) + chunk + 1))
    end = tl.minimum(chunk * step + step, N)
    for n in range(chunk * step, end, BLOCK):
        j = n + tl.arange(0, BLOCK)
        there = j < end
        present = tl.load(key_ptr + row * N + j, mask=there, other=NONE) > NONE
        taken = present & (tl.load(score_ptr + row * N + j, mask=there, other=0.0) > under)
        ones = taken.to(tl.int32)
        first = tl.atomic_add(counts_ptr + row, tl.sum(ones, 0), sem="relaxed")
        tl.store(list_ptr + row * N + first + tl.cumsum(ones, 0) - 1, j, mask=taken)


@triton.jit
def list_candidates(
    key_ptr, score_ptr, steps_ptr, parent_list_ptr, parent_counts_ptr, parent_sums_ptr, theta_ptr, tau_ptr, list_ptr,
    counts_ptr, sums_ptr, N, step, nodes, parent_step, parents, parent_room, room, BLOCK: tl.constexpr,
):  # fmt: skip
    """The candidates of node program 0 of row program 1: earlier keys between its states, then those that come.

    Args:
        parent_list_ptr, parent_counts_ptr, parent_sums_ptr: the same of nodes of `parent_step` steps.
        theta_ptr, tau_ptr: (rows, nodes + 1), of `solve_states`.
        list_ptr: (rows, nodes, room) int32.
        counts_ptr: (rows, nodes) int32; a list that is longer than the room is not read, but all keys instead.
        sums_ptr: (rows, nodes, 4) int64: of the other earlier keys how many are among the k largest, how many inside
            all the way, their steps, and how many count 1 all the way.
    """
    node, row = tl.program_id(0), tl.program_id(1).to(tl.int64)
    start = node * step
    known = row * (nodes + 1) + node
    theta_a, theta_b = tl.load(theta_ptr + known), tl.load(theta_ptr + known + 1)
    tau_a, tau_b = tl.load(tau_ptr + known), tl.load(tau_ptr + known + 1)
    found = 0
    if (theta_a != theta_b) | (tau_a != tau_b):
        # A float32 further, the exact thresholds lie between these.
        tau_a, tau_b = before(tau_a), after(tau_b)
        under, over_b = tau_a.to(tl.float64), tau_b.to(tl.float64)
        key_ptr += row * N
        score_ptr += row * N
        steps_ptr += row * N
        out_ptr = list_ptr + (row * nodes + node) * room
        of_parent = row * parents + start // parent_step
        listed = tl.load(parent_counts_ptr + of_parent)
        over = listed > parent_room
        taken = over == 0
        end = tl.where(over, start, listed)
        listed = tl.where(over, 0, listed)
        entries = parent_list_ptr + of_parent * parent_room
        top = tl.zeros((BLOCK,), tl.int32)
        inside = tl.zeros((BLOCK,), tl.int32)
        total = tl.zeros((BLOCK,), tl.int64)
        whole = tl.zeros((BLOCK,), tl.int32)
        for n in range(0, end, BLOCK):
            at = n + tl.arange(0, BLOCK)
            there = at < end
            j = tl.where(at < listed, tl.load(entries + at, mask=at < listed, other=0), at)
            there = there & (j < start)
            key = tl.load(key_ptr + j, mask=there, other=NONE)
            score = tl.load(score_ptr + j, mask=there, other=float("-inf"))
            there = key > NONE
            above = key > theta_b
            one_less = score.to(tl.float64) - 1
            is_one = one_less >= over_b
            is_inside = (score >= tau_b) & (one_less <= under)
            moves = (score > tau_a) & (is_one == 0) & (is_inside == 0)
            lists = there & (moves | ((key >= theta_a) & (above == 0)))
            rest = there & (lists == 0)
            top += (rest & above).to(tl.int32)
            inside += (rest & is_inside).to(tl.int32)
            whole += (rest & is_one).to(tl.int32)
            total += tl.load(steps_ptr + j, mask=rest & is_inside, other=0)
            ones = lists.to(tl.int32)
            place = found + tl.cumsum(ones, 0) - 1
            tl.store(out_ptr + place, j, mask=lists & (place < room))
            found += tl.sum(ones, 0)
        end = tl.minimum(start + step, N)
        for n in range(start, end, BLOCK):
            j = n + tl.arange(0, BLOCK)
            there = j < end
            key = tl.load(key_ptr + j, mask=there, other=NONE)
            score = tl.load(score_ptr + j, mask=there, other=float("-inf"))
            lists = (key > NONE) & ((key > theta_a) | (score > tau_a))
            ones = lists.to(tl.int32)
            place = found + tl.cumsum(ones, 0) - 1
            tl.store(out_ptr + place, j, mask=lists & (place < room))
            found += tl.sum(ones, 0)
        parent_sums = parent_sums_ptr + of_parent * 4
        sums = sums_ptr + (row * nodes + node) * 4
        tl.store(sums, tl.sum(top, 0).to(tl.int64) + tl.load(parent_sums, mask=taken, other=0))
        tl.store(sums + 1, tl.sum(inside, 0).to(tl.int64) + tl.load(parent_sums + 1, mask=taken, other=0))
        tl.store(sums + 2, tl.sum(total, 0) + tl.load(parent_sums + 2, mask=taken, other=0))
        tl.store(sums + 3, tl.sum(whole, 0).to(tl.int64) + tl.load(parent_sums + 3, mask=taken, other=0))
    tl.store(counts_ptr + row * nodes + node, found)
