"""Thresholds of SparseK: the exact root of sum_j clip(u_j - tau, 0, 1) = k, of a whole row and of each of its prefixes.

With relu, clip(u - tau, 0, 1) = relu(u - tau) - relu(u - 1 - tau): each key has a breakpoint at u of sign +1 and one at
u - 1 of sign -1, and

    f(tau) = sum of sign * (p - tau) over the breakpoints p > tau = S - C * tau,

where C counts the interior keys (0 < u - tau < 1) and S is the sum of their u and of a 1 for each key over them. f
falls piecewise linearly: the root lies just below the first breakpoint x with f(x) <= k, and is (S - k) / C there.

**All prefixes.** Every step looks for its breakpoint at once, by halves of all places: whether it is in the upper half
follows from the sums over the keys of the prefix that are. Breakpoints are in the order in which keys come, so that
those of a prefix are its first ones, and a half of each node has prefixes again once all of the lower halves have been
moved before all of the upper ones (a wavelet matrix: Claude, Navarro, Ordonez, Inf. Syst. 47, 2015). log2(2 N) levels
give every step. So do log2(N) levels the step at which a key has k better ones: the k-th smallest of their steps.

**Sums are exact.** u is written in steps of 2^-bits as integers, which are added modulo 2^64. Every sum that is used in
the end is of magnitude at most N * 2^bits < 2^63, so that whatever wrapped on the way there has no effect: neither the
range of u nor the order of a sum changes a bit. float64 has a second integer for the rest of u.
"""

from __future__ import annotations

from typing import Any, NamedTuple

import torch
import torch.nn.functional as F
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
    R, N = u.shape
    there = u > -torch.inf
    order = torch.where(there, u, -torch.inf).sort(descending=True, stable=True).indices
    rank = torch.arange(N, device=u.device)
    # The k-th smallest of the steps of the keys before each in this order.
    steps, ends = order, F.pad(rank, (N, 0)).expand(R, -1)
    kth, left = torch.zeros_like(order), torch.full_like(order, k - 1)
    for bit in reversed(range((N - 1).bit_length())):
        halves = _halves(steps, ends, bit)
        lower = halves.lower[:, N:] - halves.lower[:, :N]
        upper = lower <= left
        left = torch.where(upper, left - lower, left)
        kth.add_(upper, alpha=1 << bit)
        ends = halves.ends(ends, upper)
        steps = halves.moved(steps)
    last = torch.where(rank < k, N, kth).sub_(1)
    last = torch.empty_like(last).scatter_(1, order, last)
    return torch.maximum(torch.where(there, last, -1), rank - 1)


class Halves(NamedTuple):
    """Nodes of numbers in two halves each, by a bit."""

    upper: Tensor  # (R, n) bool: of each number
    lower_before: Tensor  # (R, n + 1): how many numbers before each are of a lower half, and in all
    lower: Tensor  # (R, m): how many are before each of the ends

    def ends(self, ends: Tensor, upper: Tensor) -> Tensor:
        """Where ranges lie in the half that they take; `upper` (R, m // 2), for the begins and the ends of ranges."""
        return torch.where(torch.cat([upper, upper], 1), ends - self.lower + self.lower_before[:, -1:], self.lower)

    def moved(self, *x: Tensor) -> Any:
        """Tensors (..., R, n) with all lower halves first."""
        before = self.lower_before[:, :-1]
        place = torch.arange(before.shape[1], device=before.device)
        to = torch.where(self.upper, place - before + self.lower_before[:, -1:], before)
        moved = tuple(torch.empty_like(t).scatter_(-1, to.expand_as(t), t) for t in x)
        return moved if len(x) > 1 else moved[0]


def _halves(numbers: Tensor, ends: Tensor, bit: int) -> Halves:
    upper = (numbers & (1 << bit)) != 0
    lower_before = F.pad((~upper).cumsum(1), (1, 0))
    return Halves(upper, lower_before, lower_before.gather(1, ends))


def _root_of_prefixes(row: Row) -> Root:
    """The threshold of each prefix."""
    place, adds = row.place, _at(row.adds, row.place)
    R, n = place.shape
    step = torch.arange(n // 2, device=place.device)
    ends = F.pad(2 * step + 2, (n // 2, 0)).expand(R, -1)
    where = torch.zeros_like(row.key[:, : n // 2])  # the first breakpoint that it can be, of which bits are missing
    beyond = _minus_k(torch.zeros_like(row.adds[..., : n // 2]), row)  # the sums over those past them
    for bit in reversed(range((n - 1).bit_length())):
        halves = _halves(place, ends, bit)
        before = _at(F.pad((adds * halves.upper).cumsum(-1), (1, 0)), ends)
        sums = before[..., n // 2 :].sub_(before[..., : n // 2]).add_(beyond)
        middle = where + (1 << bit)
        # At a breakpoint itself it adds nothing.
        reached = _excess(row, sums, _at(row.whole, (middle - 1).clamp_(max=n - 1))) <= 0
        beyond = torch.where(reached, sums, beyond)
        where = torch.where(reached, where, middle)
        if bit:
            ends = halves.ends(ends, ~reached)
            place, adds = halves.moved(place, adds)
    own = torch.where(row.key.gather(1, where) <= step, _at(row.adds, where), 0)
    return _root(row, beyond + own, where)


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
    return Row(
        torch.stack([by_key(place_of_lower), by_key(place_of_upper)], -1).flatten(1),
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


def _at(x: Tensor, index: Tensor) -> Tensor:
    """Entries (m, R, n) of (m, R, ...)."""
    return x.gather(2, index.expand(len(x), -1, -1))


def _with_ones(x: Tensor) -> Tensor:
    return torch.cat([torch.ones_like(x[:1]), x])


def _wrapped(x: Tensor) -> Tensor:
    """Whole numbers of float64 as int64, modulo 2^64."""
    x = torch.fmod(x, 2.0**64)
    x = torch.where(x >= 2.0**63, x - 2.0**64, x)
    return torch.where(x < -(2.0**63), x + 2.0**64, x).long()
