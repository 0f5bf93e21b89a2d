"""Thresholds of SparseK: the exact root of sum_j clip(u_j - tau, 0, 1) = k, of a whole row and of each of its prefixes.

With relu, clip(u - tau, 0, 1) = relu(u - tau) - relu(u - 1 - tau): each key has a breakpoint at u of sign +1 and one at
u - 1 of sign -1, and

    f(tau) = sum of sign * (p - tau) over the breakpoints p > tau = S - C * tau,

where C counts the interior keys (0 < u - tau < 1) and S is the sum of their u and of a 1 for each key over them. f
falls piecewise linearly: the root lies just below the first breakpoint x with f(x) <= k, and is (S - k) / C there.

**All prefixes.** Every step looks for its breakpoint by bisection, all steps at once. Thresholds never fall, nor do
the places that are tried. So a breakpoint lies over the places of the steps from that of its key until one that a count
of places tells, and one cumulative sum over the steps has f of all prefixes. log2(2 N) rounds give every step. So do
log2(N) rounds the key that is the k-th largest at each.

**Sums are exact.** u is written in steps of 2^-bits as integers, which are added modulo 2^64. Every sum that is used in
the end is of magnitude at most N * 2^bits < 2^63, so that whatever wrapped on the way there has no effect: neither the
range of u nor the order of a sum changes a bit. float64 has a second integer for the rest of u.
"""

from __future__ import annotations

from collections.abc import Callable
from typing import NamedTuple

import torch
from torch import Tensor

LARGEST = 2.0**900  # the largest magnitude that is scaled

# Sums are tensors (2, R, n), of float64 scores (3, R, n), of int64 modulo 2^64: C, S in steps of 2^-bits, and the rest
# of S in steps of 2^-2bits. k is taken off S.


class Row(NamedTuple):
    """The breakpoints of rows in ascending order, from which thresholds are made."""

    place: Tensor  # (R, 2 * N): of u - 1 and of u of each key in turn; 0 of a key that is not there
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
    row = _row(u, k)
    root = _root_of_prefixes(row)
    # Rounding alone could let one fall.
    return torch.where(root.flat, -torch.inf, root.near + root.step).cummax(1).values


def last_largest(u: Tensor, k: int) -> Tensor:
    """The last step at which each key is among the k largest so far, (R, N); one before its own if it never is."""
    N = u.shape[1]
    there = u > -torch.inf
    order = torch.where(there, u, -torch.inf).sort(descending=True, stable=True).indices
    step = torch.arange(N, device=u.device)
    place = torch.empty_like(order).scatter_(1, order, (N - 1 - step).expand_as(order))
    keys = _points(place, there.long()[None], N)
    kth = _first(lambda place: keys.sums_over(place)[0] < k, order, N)
    last = keys.steps(kth - 1) - 1  # no key is worse than the k-th largest of those steps
    return torch.maximum(torch.where(there, last, -1), step - 1)


class Points(NamedTuple):
    """Points that come one after the other, in steps, at places of an order."""

    place: Tensor  # (R, n), each of [0, n) once, or any where nothing is added
    step: Tensor  # (R, n), ascending
    adds: Tensor  # (m, R, n)
    come: Tensor  # (m, R, N): the sums of `adds` over all points so far

    def steps(self, place: Tensor) -> Tensor:
        """(R, n): how many of the steps, whose places (R, N) do not fall, have one under each point."""
        counts = place.new_zeros(place.shape[0], self.place.shape[1] + 1)
        counts.scatter_add_(1, place + 1, torch.ones_like(place))
        return counts.cumsum(1).gather(1, self.place)

    def sums_over(self, place: Tensor) -> Tensor:
        """(m, R, N): the sums over the points so far that lie over places of the steps, (R, N), which do not fall."""
        gone = self.adds.new_zeros(*self.adds.shape[:2], place.shape[1] + 1)
        end = torch.maximum(self.steps(place), self.step)
        gone.scatter_add_(2, end.expand_as(self.adds), self.adds)
        return self.come - gone[..., :-1].cumsum(-1)


def _points(place: Tensor, adds: Tensor, N: int) -> Points:
    """As many points a step, in N steps."""
    a_step = place.shape[1] // N
    step = torch.arange(N, device=place.device).repeat_interleave(a_step).expand_as(place)
    return Points(place, step, adds, adds.unflatten(-1, (N, a_step)).sum(-1).cumsum(-1))


def _first(reached: Callable[[Tensor], Tensor], like: Tensor, n: int) -> Tensor:
    """The first place of [0, n) that each step has reached, of shape (R, N) and type like `like`; the last one has."""
    place = torch.zeros_like(like)
    for bit in reversed(range((n - 1).bit_length())):
        middle = (place + ((1 << bit) - 1)).clamp_(max=n - 1)
        place.add_(~reached(middle), alpha=1 << bit)
    return place


def _root_of_prefixes(row: Row) -> Root:
    """The threshold of each prefix."""
    n = row.place.shape[1]
    points = _points(row.place, _at(row.adds, row.place), n // 2)
    _minus_k(points.come, row)

    def reached(place: Tensor) -> Tensor:  # at a breakpoint itself it adds nothing
        return _excess(row, points.sums_over(place), _at(row.whole, place)) <= 0

    where = _first(reached, row.key[:, : n // 2], n)
    step = torch.arange(n // 2, device=where.device)
    own = torch.where(row.key.gather(1, where) <= step, _at(row.adds, where), 0)
    return _root(row, points.sums_over(where).add_(own), where)


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
        return torch.empty_like(x).scatter_(1, order, x).where(there, 0)

    key, sign = by_place(order, order), by_place(-sign, sign)
    point_values = _at(whole, key)
    point_values[0] -= torch.where(sign > 0, 0, 1 << bits)
    sign = sign * there.gather(1, key)
    adds = sign * torch.cat([torch.ones_like(sign)[None], point_values])
    return Row(
        torch.stack([by_key(place_of_lower), by_key(place_of_upper)], -1).flatten(1),
        by_place(u - 1, u), point_values, key, adds, bits, min(k, N),
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


def _at(x: Tensor, index: Tensor) -> Tensor:
    """Entries (m, R, n) of (m, R, ...)."""
    return x.gather(2, index.expand(len(x), -1, -1))


def _wrapped(x: Tensor) -> Tensor:
    """Whole numbers of float64 as int64, modulo 2^64."""
    x = torch.fmod(x, 2.0**64)
    x = torch.where(x >= 2.0**63, x - 2.0**64, x)
    return torch.where(x < -(2.0**63), x + 2.0**64, x).long()
