"""Thresholds of SparseK: the exact root of sum_j clip(u_j - tau, 0, 1) = k, of a whole row and of each of its prefixes.

With relu, clip(u - tau, 0, 1) = relu(u - tau) - relu(u - 1 - tau): each key has a breakpoint at u of sign +1 and one at
u - 1 of sign -1, and

    f(tau) = sum of sign * (p - tau) over the breakpoints p > tau = S - C * tau,

where C counts the interior keys (0 < u - tau < 1) and S is the sum of their u and of a 1 for each key over them. f
falls piecewise linearly: the root lies just below the first breakpoint x with f(x) <= k, and is (S - k) / C there.

**All prefixes.** The threshold of a prefix never falls as the prefix grows, so in ascending order of value the
breakpoints are in the order of the steps at which the threshold passes them. A node is a range (a, b] of steps, of
which the thresholds of a and b are known; it owns the breakpoints between these, which are a contiguous range. The
threshold of its middle divides the range in two: one pass over all breakpoints divides every node of a level, and
log2(N) levels give every step. Of the keys up to a whose breakpoints are past its range a node has one pair (C, S).

**Sums are exact.** u is written in steps of 2^-bits as integers, which are added modulo 2^64. Every sum that is used in
the end is of magnitude at most N * 2^bits < 2^63, so that whatever wrapped on the way there has no effect: neither the
range of u nor the order of a sum changes a bit. float64 has a second integer for the rest of u.
"""

from __future__ import annotations

from typing import NamedTuple

import torch
import torch.nn.functional as F
from torch import Tensor

LARGEST = 2.0**900  # the largest magnitude that is scaled

# Sums are tensors (2, R, n), of float64 scores (3, R, n), of int64 modulo 2^64: C, S in steps of 2^-bits, and the rest
# of S in steps of 2^-2bits. k is taken off S.


class RowKeys(NamedTuple):
    """The keys of each row."""

    adds: Tensor  # (2 or 3, R, N): 1 and u, which an interior key adds to sums
    first: Tensor  # (R, N): the place of u - 1 among the breakpoints; -1 of a key that is not there
    last: Tensor  # the place of u


class Row(NamedTuple):
    """The keys of rows, and their breakpoints in ascending order, from which thresholds are made."""

    keys: RowKeys
    value: Tensor  # (R, 2 * N) float64
    whole: Tensor  # (1 or 2, R, 2 * N): the same as integers
    key: Tensor  # (R, 2 * N)
    adds: Tensor  # (2 or 3, R, 2 * N): the sign and sign * value; 0 of a key that is not there
    bits: int
    k: int


class Root(NamedTuple):
    """A threshold near + step, (R, n)."""

    where: Tensor  # the place of the first breakpoint that is not below it
    near: Tensor  # its value, or 0
    step: Tensor
    flat: Tensor  # f is at most k all the way down: the threshold is the least that it may be


def threshold(u: Tensor, k: int) -> Root:
    """The least tau with sum_j clip(u_j - tau, 0, 1) <= k.

    Args:
        u: (R, N) float32 or float64; a key of -inf or NaN is not there.
        k: at least 1.

    Returns:
        Of shape (R, 1), float64; flat, of a threshold -inf, where there are no more than k keys.
    """
    return _root_of_row(_row(u, k))


def causal_thresholds(u: Tensor, k: int) -> Tensor:
    """`threshold` of u[:, : t + 1] for each t: (R, N) float64, non-decreasing along N.

    O(N log N) operations, and memory of some 60 numbers a key.
    """
    R, N = u.shape
    row = _row(u, k)
    root = _root_of_row(row)
    length = 1 << (N - 1).bit_length()
    more = (0, length - N)
    keys = RowKeys(
        F.pad(row.keys.adds, more), F.pad(row.keys.first, more, value=-1), F.pad(row.keys.last, more, value=-1)
    )

    # Of each node: where its breakpoints end, the threshold of its last step, and the sums of its earlier keys there.
    ends = root.where
    taus = torch.where(root.flat, -torch.inf, root.near + root.step)
    base = _minus_k(torch.zeros_like(row.adds[..., :1]), row)
    node = torch.zeros_like(row.key)  # of each breakpoint; those that are never passed stay in the last one
    nodes = 1
    while length > 1:
        half = length // 2
        before = torch.cat([torch.full_like(taus[:, :1], -torch.inf), taus[:, :-1]], 1)
        left = _left(keys, nodes, half)
        upper = base + _beyond(left, ends, row.bits)
        passed = _before(torch.where(row.key < node * length + half, row.adds, 0))
        middle = upper + _at(passed, ends)
        reached = _excess(row, _at(middle, node).sub_(passed), row.whole) <= 0
        node = node.mul_(2).add_(reached)
        splits = torch.arange(1, 2 * nodes, 2, device=u.device).expand(R, nodes).contiguous()
        where = torch.searchsorted(node, splits)
        there = middle - _at(passed, where)
        middle_root = _root(row, there, where)
        tau = torch.where(middle_root.flat, before, middle_root.near + middle_root.step)
        tau = torch.minimum(torch.maximum(tau, before), taus)  # both differ by rounding alone
        if half > 1:
            base = _in_turns(there - _beyond(left, where, row.bits), upper)
            ends = _in_turns(where, ends)
        taus = _in_turns(tau, taus)
        nodes, length = 2 * nodes, half
    return taus[:, :N].contiguous()


def _row(u: Tensor, k: int) -> Row:
    N = u.shape[1]
    bits = 62 - N.bit_length()
    there = u > -torch.inf
    scaled = torch.where(there, u, 0).double().clamp(-LARGEST, LARGEST) * 2.0**bits
    steps = (scaled + 0.5).floor()  # halves upwards, as kernels round them
    numbers = [_wrapped(steps)]
    if u.dtype == torch.float64:
        numbers.append(((scaled - steps) * 2.0**bits).round().long())
        u = torch.where(there, u, -torch.inf)
    else:  # in whole steps, so that scores of one integer are one number
        u = torch.where(there, torch.where(u == torch.inf, torch.inf, steps * 2.0**-bits), -torch.inf)
    whole = torch.stack(numbers)

    u, order = u.contiguous().sort(stable=True)
    place_of_lower, place_of_upper = _merged(u)
    places, sign = torch.cat([place_of_lower, place_of_upper], 1), torch.ones_like(order)

    def by_place(lower: Tensor, upper: Tensor) -> Tensor:
        both = torch.cat([lower, upper], 1)
        return torch.empty_like(both).scatter_(1, places, both)

    def by_key(x: Tensor) -> Tensor:
        return torch.empty_like(x).scatter_(1, order, x).where(there, -1)

    key, sign = by_place(order, order), by_place(-sign, sign)
    point_values = _at(whole, key)
    point_values[0] -= torch.where(sign > 0, 0, 1 << bits)
    sign = sign * there.gather(1, key)
    return Row(
        RowKeys(_with_ones(whole), by_key(place_of_lower), by_key(place_of_upper)),
        by_place(u - 1, u), point_values, key, sign * _with_ones(point_values), bits, min(k, N),
    )  # fmt: skip


def _merged(u: Tensor) -> tuple[Tensor, Tensor]:
    """The places of u - 1 and of u among both, of u (R, N) ascending; of equal ones u - 1 comes first.

    u - 1 is compared without rounding: scores under one unit in the last place of 1 are the same once 1 is taken off,
    and sums over points in another order than that of their integers are not monotone.
    """
    lower = u - 1
    taken = lower - u  # what was taken off, and what rounding left of it
    rest = (u - (lower - taken)) - (1 + taken)
    over = torch.where(rest > 0, torch.nextafter(lower, lower.new_full((), torch.inf)), lower)
    before = torch.searchsorted(u.contiguous(), over.contiguous())  # how many u are under each u - 1
    place = torch.arange(u.shape[1], device=u.device).expand_as(before).contiguous()
    return place + before, place + torch.searchsorted(before.contiguous(), place, right=True)


def _root_of_row(row: Row) -> Root:
    """The threshold of all keys."""
    total = _minus_k(row.adds.sum(-1, keepdim=True), row)
    passed = _before(row.adds)
    where = (_excess(row, total - passed, row.whole) > 0).sum(1, keepdim=True)
    return _root(row, total - _at(passed, where), where)


def _minus_k(sums: Tensor, row: Row) -> Tensor:
    """Sums of which f - k is made."""
    sums[1] -= row.k << row.bits
    return sums


def _before(adds: Tensor) -> Tensor:
    """At each breakpoint the sum over those before it."""
    return adds.cumsum(-1).sub_(adds)


def _excess(row: Row, sums: Tensor, at: Tensor) -> Tensor:
    """f - k at points, given as integers, of the sums from there on: int64 or float64, in steps of 2^-bits."""
    excess = sums[1] - sums[0] * at[0]
    if len(at) == 1:
        return excess
    rest = sums[2] - sums[0] * at[1]
    carried = rest >> row.bits  # so that rounding changes no sign
    return (excess + carried).double() + (rest - (carried << row.bits)).double() * 2.0**-row.bits


def _root(row: Row, sums: Tensor, where: Tensor) -> Root:
    """The root, of which `where` is the first breakpoint that is not below it, and the sums from there on."""
    C, near = sums[0].clamp(min=1), row.value.gather(1, where)
    step = _excess(row, sums, _at(row.whole, where)).double() * 2.0**-row.bits / C
    if len(row.whole) == 1:
        # Under 1 the sums hold the root without a wrap, and it has the same bits whichever breakpoint is near it.
        small = (near + step).abs() < 1
        near, step = torch.where(small, 0.0, near), torch.where(small, sums[1].double() * 2.0**-row.bits / C, step)
    # Where nothing is interior f does not change below.
    return Root(where, near, step, sums[0] <= 0)


def _left(keys: RowKeys, nodes: int, half: int) -> RowKeys:
    """The keys of the left half of each node: (..., R, nodes, half)."""
    return RowKeys(*(x.unflatten(-1, (nodes, 2, half))[..., 0, :] for x in keys))


def _beyond(keys: RowKeys, place: Tensor, bits: int) -> Tensor:
    """The sums over the keys of each node of their breakpoints from `place` (R, nodes) on."""
    place = place[..., None]
    over = keys.first >= place
    interior = (keys.last >= place) & ~over
    sums = torch.where(interior, keys.adds, 0).sum(-1)
    sums[1] += over.sum(-1) << bits
    return sums


def _at(x: Tensor, index: Tensor) -> Tensor:
    """Entries (m, R, n) of (m, R, ...)."""
    return x.gather(2, index.expand(len(x), -1, -1))


def _with_ones(x: Tensor) -> Tensor:
    return torch.cat([torch.ones_like(x[:1]), x])


def _in_turns(left: Tensor, right: Tensor) -> Tensor:
    """(..., n) and (..., n) as (..., 2 * n)."""
    return torch.stack([left, right], -1).flatten(-2)


def _wrapped(x: Tensor) -> Tensor:
    """Whole numbers of float64 as int64, modulo 2^64."""
    x = torch.fmod(x, 2.0**64)
    x = torch.where(x >= 2.0**63, x - 2.0**64, x)
    return torch.where(x < -(2.0**63), x + 2.0**64, x).long()
