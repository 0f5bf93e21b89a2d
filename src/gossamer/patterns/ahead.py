"""Whether a pattern keeps keys after their query, at positions j > i."""

from __future__ import annotations

from functools import lru_cache

import numpy as np

from gossamer.patterns.base import Pattern
from gossamer.patterns.compose import And, Not, Or
from gossamer.patterns.dense import Causal
from gossamer.patterns.grid import Sizes
from gossamer.patterns.pairs import pair_chunks

_AHEAD = Not(Causal())


@lru_cache(maxsize=16)
def keeps_ahead(pattern: Pattern, sizes: Sizes) -> bool:
    """Whether any row of any head keeps a key after its position.

    Examples:
        >>> from gossamer.patterns.ahead import keeps_ahead
        >>> from gossamer.patterns.grid import Sizes
        >>> [keeps_ahead(p, Sizes(9, 9, 0)) for p in (gs.Causal(), gs.SlidingWindow(3, 1))]
        [False, True]
    """
    return any(_keeps_ahead(one.lower(sizes), sizes) for one in pattern.distinct()[0])


def _keeps_ahead(pattern: Pattern, sizes: Sizes) -> bool:
    """The same of a pattern that heads share."""
    interval = pattern.intervals(sizes)
    if interval is not None:
        lo, hi = interval
        return bool(((hi > lo) & (hi - 1 > np.arange(sizes.Q) + sizes.q_offset)).any())
    if isinstance(pattern, Or):
        return _keeps_ahead(pattern.left, sizes) or _keeps_ahead(pattern.right, sizes)
    # Neither of two patterns needs to be looked into where the other one keeps no such key.
    if isinstance(pattern, And) and not (_keeps_ahead(pattern.left, sizes) and _keeps_ahead(pattern.right, sizes)):
        return False
    return any(len(keys) for _, _, _, keys in pair_chunks(And(pattern, _AHEAD), sizes))
