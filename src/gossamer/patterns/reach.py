"""Reach: which keys a row sees by its position alone, as numbers, so that its bounds are made where positions are.

The bounds are array operations that numpy, torch and jax share (`clip`, `%`, arithmetic), on int32: a position that is
known on a device alone gives bounds there, and nothing is read back.
"""

from __future__ import annotations

from typing import Any, NamedTuple

MOST = 2**31 - 1  # of int32


class Bounds(NamedTuple):
    """A row keeps the keys [lo, hi); none where hi is not above lo."""

    lo: Any
    hi: Any


class Reach(NamedTuple):
    """A query at position i sees i - left <= j <= i + right, in its own block of each size in `blocks`.

    None is unbounded. An intersection of reaches is one.
    """

    left: int | None = None
    right: int | None = None
    blocks: tuple[int, ...] = ()

    def __str__(self) -> str:
        left = "" if self.left is None else f"i - {self.left} <= " if self.left else "i <= "
        right = "" if self.right is None else f" <= i + {self.right}" if self.right else " <= i"
        near = [f"{left}j{right}"] if left or right else []
        return " and ".join([*near, *(f"i // {block} == j // {block}" for block in self.blocks)]) or "every key"

    def both(self, other: Reach) -> Reach:
        """What both see."""
        return Reach(
            _least(self.left, other.left), _least(self.right, other.right), tuple(sorted({*self.blocks, *other.blocks}))
        )

    def bounds(self, i: Any, K: int) -> Bounds:
        """The keys of [0, K) that queries at positions i see, for each of them.

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
        lo = i * 0 if self.left is None or self.left == MOST else _moved(i, -self.left, K)
        hi = i * 0 + K if self.right is None or self.right == MOST else _moved(i, self.right + 1, K)
        for block in self.blocks:
            # Positions before all blocks, and behind the last key's, see nothing wherever they are.
            inside = i.clip(-1, min(-(-K // block) * block, MOST))
            first = inside - inside % block
            lo, hi = _larger(lo, first.clip(0, K)), _smaller(hi, _moved(first, block, K))
        return Bounds(lo, hi)


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
