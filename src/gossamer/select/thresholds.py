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
from torch import Tensor

LARGEST = 2.0**900  # in magnitude, of what is scaled


class Sums(NamedTuple):
    """C and S of some keys, as integers modulo 2^64."""

    inside: Tensor
    high: Tensor  # of S in steps of 2^-bits
    low: Tensor | None  # the rest, in steps of 2^-2bits

    def plus(self, other: Sums) -> Sums:
        return Sums(
            self.inside + other.inside,
            self.high + other.high,
            None if self.low is None else self.low + _given(other.low),
        )

    def minus(self, other: Sums) -> Sums:
        return Sums(
            self.inside - other.inside,
            self.high - other.high,
            None if self.low is None else self.low - _given(other.low),
        )

    def at(self, index: Tensor) -> Sums:
        """Entries of the last dimension."""
        return Sums(
            self.inside.gather(-1, index),
            self.high.gather(-1, index),
            None if self.low is None else self.low.gather(-1, index),
        )


class Keys(NamedTuple):
    """The keys of each row, (R, N)."""

    high: Tensor  # u in steps of 2^-bits
    low: Tensor | None
    first: Tensor  # the position of u - 1 among the breakpoints; -1 of a key that is not there
    last: Tensor  # that of u


class Breakpoints(NamedTuple):
    """Those of each row, ascending, (R, 2 * N)."""

    value: Tensor  # float64
    key: Tensor
    sign: Tensor  # 0 of a key that is not there
    high: Tensor
    low: Tensor | None


class Root(NamedTuple):
    """A threshold near + step."""

    near: Tensor  # a breakpoint
    step: Tensor  # not positive
    flat: Tensor  # f is at most k all the way down: the threshold is the least that it may be


class Whole(NamedTuple):
    """The threshold of all keys."""

    where: Tensor  # the first breakpoint that is not below it
    root: Root


class Row(NamedTuple):
    """All that thresholds are made from."""

    keys: Keys
    points: Breakpoints
    bits: int
    k: int


def threshold(u: Tensor, k: int, two: bool) -> Root:
    """The least tau with sum_j clip(u_j - tau, 0, 1) <= k.

    Args:
        u: (R, N) float64; a key of -inf or NaN is not there.
        k: at least 1.
        two: whether u has more digits than float32.

    Returns:
        Of shape (R, 1); flat, of a threshold -inf, where there are no more than k keys.
    """
    return _whole(_row(u, k, two)).root


def causal_thresholds(u: Tensor, k: int, two: bool) -> Tensor:
    """`threshold` of u[:, : t + 1] for each t: (R, N) float64, non-decreasing along N.

    O(N log N) operations, and memory of some 30 arrays of N.
    """
    R, N = u.shape
    row = _row(u, k, two)
    points = row.points
    end, root = _whole(row)
    last = torch.where(root.flat, -torch.inf, root.near + root.step)
    length = 1 << (N - 1).bit_length()
    keys = _padded(row.keys, length)

    # Of each node: where its breakpoints end, the threshold of its last step, and the sums of its earlier keys there.
    ends, taus = end, last
    zeros = torch.zeros_like(end)
    base = Sums(zeros, zeros, zeros if two else None)
    node = torch.zeros_like(points.key)  # of each breakpoint; those that are never passed stay in the last one
    nodes = 1
    while length > 1:
        half = length // 2
        before = torch.cat([torch.full_like(taus[:, :1], -torch.inf), taus[:, :-1]], 1)
        left = _left(keys, nodes, half)
        upper = base.plus(_beyond(left, ends, row.bits))
        passed = _running(points, points.key < node * length + half)
        middle = upper.plus(passed.at(ends))
        node = 2 * node + _reached(row, middle.at(node).minus(passed))
        splits = torch.arange(1, 2 * nodes, 2, device=u.device).expand(R, nodes).contiguous()
        where = torch.searchsorted(node, splits)
        there = middle.minus(passed.at(where))
        found = _root(row, there, where)
        tau = torch.where(found.flat, before, found.near + found.step)
        tau = torch.minimum(torch.maximum(tau, before), taus)  # both differ by rounding alone
        if half > 1:
            base = _between(there.minus(_beyond(left, where, row.bits)), upper)
            ends = _turns(where, ends)
        taus = _turns(tau, taus)
        nodes, length = 2 * nodes, half
    return taus[:, :N].contiguous()


def _row(u: Tensor, k: int, two: bool) -> Row:
    R, N = u.shape
    bits = 62 - N.bit_length()
    there = u > -torch.inf
    u = torch.where(there, u, -torch.inf)
    scaled = torch.where(there, u, 0).clamp(-LARGEST, LARGEST) * 2.0**bits
    whole = scaled.round()
    high = _wrapped(whole)
    low = ((scaled - whole) * 2.0**bits).round().long() if two else None

    # Of equal values u - 1 comes first: past it a key is interior.
    value, order = torch.cat([u - 1, u], 1).sort(stable=True)
    upper = order >= N
    key = order - N * upper
    sign = torch.where(upper, 1, -1) * there.gather(1, key)
    points = Breakpoints(
        value, key, sign, high.gather(1, key) - torch.where(upper, 0, 1 << bits),
        None if low is None else low.gather(1, key),
    )  # fmt: skip
    places = torch.arange(2 * N, device=u.device).expand(R, -1)
    first, last = torch.empty_like(order).scatter_(1, order, places).split(N, 1)
    return Row(Keys(high, low, first.where(there, -1), last.where(there, -1)), points, bits, min(k, N))


def _whole(row: Row) -> Whole:
    passed = _running(row.points, torch.ones_like(row.points.key, dtype=torch.bool))
    points = row.points
    # The sum of all signs is 0, and that of sign * p is 1 a key.
    count = (points.sign == 1).sum(1, keepdim=True)
    total = Sums(torch.zeros_like(count), count << row.bits, None if points.low is None else torch.zeros_like(count))
    beyond = Sums(total.inside - passed.inside, total.high - passed.high, None if passed.low is None else -passed.low)
    where = (~_reached(row, beyond)).sum(1, keepdim=True)
    return Whole(where, _root(row, beyond.at(where), where))


def _running(points: Breakpoints, counted: Tensor) -> Sums:
    """The sums over the counted breakpoints before each one."""
    sign = points.sign * counted

    def before(x: Tensor) -> Tensor:
        return x.cumsum(1) - x

    return Sums(before(sign), before(sign * points.high), None if points.low is None else before(sign * points.low))


def _excess(row: Row, sums: Sums, high: Tensor, low: Tensor | None) -> Tensor:
    """f - k at points, of the sums from there on: float64, in steps of 2^-bits."""
    excess = (sums.high - sums.inside * high - (row.k << row.bits)).double()
    return excess if low is None else excess + (_given(sums.low) - sums.inside * low).double() * 2.0**-row.bits


def _reached(row: Row, sums: Sums) -> Tensor:
    """Whether f <= k at each breakpoint, of the sums from it on."""
    return _excess(row, sums, row.points.high, row.points.low) <= 0


def _root(row: Row, sums: Sums, where: Tensor) -> Root:
    """The root, of which `where` is the first breakpoint that is not below it, and the sums from there on."""
    points = row.points
    low = None if points.low is None else points.low.gather(1, where)
    excess = _excess(row, sums, points.high.gather(1, where), low)
    step = excess * 2.0**-row.bits / sums.inside.clamp(min=1)
    # Where nothing is interior f does not change below.
    return Root(points.value.gather(1, where), step, sums.inside <= 0)


def _padded(keys: Keys, length: int) -> Keys:
    more = length - keys.high.shape[1]

    def pad(x: Tensor, value: int) -> Tensor:
        return torch.nn.functional.pad(x, (0, more), value=value)

    return Keys(
        pad(keys.high, 0), None if keys.low is None else pad(keys.low, 0), pad(keys.first, -1), pad(keys.last, -1)
    )


def _left(keys: Keys, nodes: int, half: int) -> Keys:
    """The keys of the left half of each node: (R, nodes, half)."""

    def left(x: Tensor) -> Tensor:
        return x.unflatten(1, (nodes, 2, half))[:, :, 0]

    return Keys(left(keys.high), None if keys.low is None else left(keys.low), left(keys.first), left(keys.last))


def _beyond(keys: Keys, place: Tensor, bits: int) -> Sums:
    """The sums over the keys of each node of their breakpoints from `place` (R, nodes) on."""
    place = place[..., None]
    over = keys.first >= place
    interior = (keys.last >= place) & ~over
    return Sums(
        interior.sum(-1),
        (keys.high * interior).sum(-1) + (over.sum(-1) << bits),
        None if keys.low is None else (keys.low * interior).sum(-1),
    )


def _between(left: Sums, right: Sums) -> Sums:
    return Sums(
        _turns(left.inside, right.inside),
        _turns(left.high, right.high),
        None if left.low is None else _turns(left.low, _given(right.low)),
    )


def _turns(left: Tensor, right: Tensor) -> Tensor:
    """(R, n) and (R, n) in turns."""
    return torch.stack([left, right], -1).flatten(1)


def _wrapped(x: Tensor) -> Tensor:
    """Whole numbers of float64 as int64, modulo 2^64."""
    x = torch.fmod(x, 2.0**64)
    x = torch.where(x >= 2.0**63, x - 2.0**64, x)
    return torch.where(x < -(2.0**63), x + 2.0**64, x).long()


def _given(x: Tensor | None) -> Tensor:
    assert x is not None
    return x
