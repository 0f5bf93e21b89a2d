"""Rules: which keys a row sees by its position alone, as numbers, so that its bounds are made where positions are.

The bounds are array operations that numpy, torch and jax share (`clip`, `%`, arithmetic), on int32: a position that is
known on a device alone gives bounds there, and nothing is read back.
"""

from __future__ import annotations

import math
from collections.abc import Iterable
from typing import Any, NamedTuple

MOST = 2**31 - 1  # of int32
MOST_REACHES = 16  # of a rule: each is computed for every tile


class Bounds(NamedTuple):
    """A row keeps the keys [lo, hi); none where hi is not above lo."""

    lo: Any
    hi: Any


class Reach(NamedTuple):
    """A query at position i sees i - left <= j <= i + right, in its own block of each size in `blocks`.

    None is unbounded. Of those keys it sees the first ones of all, j < first, and those with (i - j) % step == 0. An
    intersection of reaches is one.
    """

    left: int | None = None
    right: int | None = None
    blocks: tuple[int, ...] = ()
    first: int | None = None
    step: int = 1

    def __str__(self) -> str:
        left, right = ("" if n is None else _after(n) for n in (None if self.left is None else -self.left, self.right))
        left, right = f"{left} <= " if left else "", f" <= {right}" if right else ""
        terms = [f"{left}j{right}"] if left or right else []
        terms += [f"i // {block} == j // {block}" for block in self.blocks]
        terms += [] if self.first is None else [f"j < {self.first}"]
        terms += [] if self.step == 1 else [f"(i - j) % {self.step} == 0"]
        return " and ".join(terms) or "every key"

    @property
    def every(self) -> bool:
        """Whether it sees every key. Asked in compiled functions, where torch 2.11 finds Reach() equal to others."""
        return self.left is self.right is self.first is None and not self.blocks and self.step == 1

    @property
    def longest(self) -> int | None:
        """No interval of a row is longer; None where they are unbounded."""
        ends = [*self.blocks]
        if self.left is not None and self.right is not None:
            ends.append(max(0, self.left + self.right + 1))
        return min(ends) if ends else None  # in compiled functions, where torch 2.11 knows no default of `min`

    def both(self, other: Reach) -> Reach:
        """The keys that both see."""
        return Reach(
            _least(self.left, other.left), _least(self.right, other.right),
            tuple(sorted({*self.blocks, *other.blocks})), _least(self.first, other.first),
            min(math.lcm(self.step, other.step), MOST),
        )  # fmt: skip

    def within(self, other: Reach) -> bool:
        """Whether the other surely sees all that this one sees."""
        ends = ((self.left, other.left), (self.right, other.right), (self.first, other.first))
        narrower = all(most is None or (n is not None and n <= most) for n, most in ends)
        return narrower and set(other.blocks) <= set(self.blocks) and self.step % other.step == 0

    def bounds(self, i: Any, K: int) -> Bounds:
        """The interval of [0, K) that queries at positions i see keys of, for each of them: all of it, but for a step.

        Args:
            i: an array of int32, which may be negative and over K; up to 2**31 - 2**16 - K in magnitude, and rows more
                (`q_offset` in DESIGN.md), so that nothing below leaves int32.
            K: keys.

        Returns:
            lo and hi of i's shape and type, in [0, K]; both non-decreasing where i is.

        Examples:
            >>> from gossamer.patterns.reach import Reach
            >>> Reach(left=1, right=0).bounds(np.arange(-1, 4, dtype=np.int32), K=3)
            Bounds(lo=array([0, 0, 0, 1, 2], dtype=int32), hi=array([0, 1, 2, 3, 3], dtype=int32))
        """
        # A distance of 2**31 - 1, the most that a pattern takes, reaches over all positions that there are.
        lo = i * 0 if self.left is None or self.left >= MOST else _moved(i, -self.left, K)
        hi = i * 0 + K if self.right is None or self.right >= MOST else _moved(i, self.right + 1, K)
        for block in self.blocks:
            # Positions before all blocks, and behind the last key's, see nothing wherever they are.
            inside = i.clip(-1, min(-(-K // block) * block, MOST))
            first = inside - inside % block
            lo, hi = _larger(lo, first.clip(0, K)), _smaller(hi, _moved(first, block, K))
        if self.first is not None and self.first < K:
            lo, hi = lo.clip(0, self.first), hi.clip(0, self.first)
        return Bounds(lo, hi)


class Rule(NamedTuple):
    """The union of several reaches."""

    reaches: tuple[Reach, ...] = (Reach(),)

    def __str__(self) -> str:
        return " or ".join(map(str, self.reaches))

    @property
    def interval(self) -> Reach | None:
        """The reach whose interval is all that is seen; None where it takes more to say it."""
        only, *more = self.reaches
        return only if not more and only.step == 1 else None

    @property
    def seeing(self) -> tuple[Reach, ...]:
        """Its reaches; one that sees no key does so wherever its ends are, which may be those of several rows."""
        return tuple([Reach(first=0) if reach.longest == 0 else reach for reach in self.reaches])

    @property
    def every(self) -> bool:
        """Whether it sees every key: see `Reach.every`."""
        return len(self.reaches) == 1 and self.reaches[0].every

    @property
    def ahead(self) -> bool:
        """Whether a row may see keys after its position."""
        return any(reach.right is None or reach.right > 0 for reach in self.reaches)

    def both(self, other: Rule) -> Rule | None:
        """The keys that both see; None where that takes too many reaches."""
        if self.every or other.every:
            return other if self.every else self
        return _rule(one.both(two) for one in self.reaches for two in other.reaches)

    def either(self, other: Rule) -> Rule | None:
        """The keys that either sees; None where that takes too many reaches."""
        return _rule([*self.reaches, *other.reaches])


EVERY_KEY = Rule()


def rule(*reaches: Reach) -> Rule:
    """The rule of a few reaches; no two positions are a step over MOST apart, but for those that are the same."""
    return Rule(tuple([reach if reach.step <= MOST else reach._replace(step=MOST) for reach in reaches]))


def _rule(reaches: Iterable[Reach]) -> Rule | None:
    """Without what others see too; None where more are left than are computed."""
    kept_reaches: list[Reach] = []
    for reach in reaches:
        if not any(reach.within(other) for other in kept_reaches):
            kept_reaches = [other for other in kept_reaches if not other.within(reach)] + [reach]
    return Rule(tuple(kept_reaches)) if len(kept_reaches) <= MOST_REACHES else None


def _after(n: int) -> str:
    return f"i + {n}" if n > 0 else f"i - {-n}" if n else "i"


def _moved(i: Any, by: int, K: int) -> Any:
    """i + by, in [0, K]."""
    return i.clip(max(-by, -MOST), min(K - by, MOST)) + by


def _larger(x: Any, y: Any) -> Any:
    return x + (y - x).clip(0, None)


def _smaller(x: Any, y: Any) -> Any:
    return x - (x - y).clip(0, None)


def _least(one: int | None, other: int | None) -> int | None:
    if one is None or other is None:
        return other if one is None else one
    return min(one, other)
