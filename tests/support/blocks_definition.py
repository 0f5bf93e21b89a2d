"""Key blocks by their scores, by loops over rows and blocks, in numpy: what every edge is compared with."""

from __future__ import annotations

import math
from typing import NamedTuple

import numpy as np


class Wanted(NamedTuple):
    """Of one block of queries and head."""

    order: list[int]  # as the blocks are taken
    always: int  # so many of them in any case
    score: dict[int, float]  # of the visible blocks


def ranges(N: int, block: int) -> list[range]:
    return [range(at, min(at + block, N)) for at in range(0, N, block)]


def oracle(
    q: np.ndarray, k: np.ndarray, rows: range, *, causal: bool, block: int, score: str, local: int, first: int,
    scale: float, Q: int,
) -> Wanted:  # fmt: skip
    """By the definition. q (heads, Q, D) of the heads that share the list, k (K, D)."""
    K = len(k)
    position = [i + K - Q for i in rows]
    visible, always = {}, []
    for c, keys in enumerate(ranges(K, block)):
        if causal and all(keys[0] > p for p in position):
            continue
        pairs = q[:, rows], k[keys]
        if score == "mean":
            visible[c] = scale * float(pairs[0].mean((0, 1)) @ pairs[1].mean(0))
        else:
            least, most = pairs[1].min(0), pairs[1].max(0)
            visible[c] = max(
                float(np.maximum(scale * x * least, scale * x * most).sum()) for head in pairs[0] for x in head
            )
        near = {p // block for p in position if p >= 0}
        reached = any(0 <= (x - c if causal else abs(x - c)) < local or x == c for x in near) if local else False
        if c < first or (reached and position[-1] >= 0):
            always.append(c)
    others = sorted((c for c in visible if c not in always), key=lambda c: (-visible[c], c))
    return Wanted(always + others, len(always), visible)


def softmax(score: dict[int, float]) -> dict[int, float]:
    most = max(score.values(), default=0)
    total = sum(math.exp(x - most) for x in score.values())
    return {c: math.exp(x - most) / total for c, x in score.items()}
