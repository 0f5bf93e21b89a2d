"""The checks of `topk_blocks` that every framework makes, in the same words."""

from __future__ import annotations

import math
from collections.abc import Callable
from typing import Any, NamedTuple

from gossamer.plan.arguments import BLOCKS


class Numbers(NamedTuple):
    """The options of a choice of C key blocks."""

    block_size: int
    n: int  # places of a list
    local: int  # at most C
    first: int


def checked(
    Q: int, K: int, causal: Any, block_size: Any, topk: Any, top_p: Any, score: Any, local: Any, first: Any, per: Any,
    whole: Callable[[Any], Any], describe: Callable[[Any], str],
) -> Numbers:  # fmt: skip
    """The options of `topk_blocks` of Q queries and K keys.

    Args:
        whole: reads a whole number, None for what is none.

    Raises:
        ValueError: one is wrong, or `topk` leaves no room for the blocks that are always kept.
    """
    block, kept, near, begin = _each(causal, block_size, topk, top_p, score, local, first, per, whole, describe)
    C = -(-K // block)
    straddles = (K - Q) % block != 0
    always = min(C, begin + (near + straddles + (0 if causal else near - 1) if near else 0))
    if kept is not None and kept < always:
        raise ValueError(
            f"topk must be at least the {always} blocks that are always kept (first={begin}, local={near}"
            f"{', whose positions lie in two key blocks' if straddles and near else ''}); got {describe(kept)}"
        )
    return Numbers(block, C if kept is None else min(kept, C), min(near, C), min(begin, C))


def _each(
    causal: Any, block_size: Any, topk: Any, top_p: Any, score: Any, local: Any, first: Any, per: Any,
    whole: Callable[[Any], Any], describe: Callable[[Any], str],
) -> tuple[int, int | None, int, int]:  # fmt: skip
    """block_size, topk, local and first as integers."""
    if not isinstance(causal, bool):
        raise ValueError(f"causal must be True or False; got {describe(causal)}")
    block = whole(block_size)
    if block not in BLOCKS:
        raise ValueError(f"block_size must be 64 or 128; got {describe(block_size)}")
    if topk is None and top_p is None:
        raise ValueError("topk or top_p must be given: how many key blocks are kept, or what part of their softmax")
    kept = whole(topk)
    if topk is not None and (kept is None or kept < 1):
        raise ValueError(f"topk must be an integer of at least 1, or None; got {describe(topk)}")
    number = isinstance(top_p, (int, float)) and not isinstance(top_p, bool) and math.isfinite(top_p)
    if top_p is not None and not (number and 0 < top_p <= 1):
        raise ValueError(f"top_p must be a number in (0, 1], or None; got {describe(top_p)}")
    for name, x, names in (("score", score, ("mean", "bound")), ("per", per, ("head", "group"))):
        if not isinstance(x, str) or x not in names:
            raise ValueError(f'{name} must be "{names[0]}" or "{names[1]}"; got {describe(x)}')
    always = whole(local), whole(first)
    for name, given, n in (("local", local, always[0]), ("first", first, always[1])):
        if n is None or n < 0:
            raise ValueError(f"{name} must be an integer of at least 0; got {describe(given)}")
    return block, kept, *always
