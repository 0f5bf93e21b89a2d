"""alpha-entmax attention from its definition, in float64 and row by row, in numpy: what every edge is compared with."""

from __future__ import annotations

from typing import NamedTuple

import numpy as np


def threshold(scores: np.ndarray, alpha: float) -> float:
    """tau of sum_j [(alpha - 1) s_j - tau]_+^(1 / (alpha - 1)) = 1, by bisection, for alpha > 1."""
    x = (alpha - 1) * scores
    low, high = x.max() - 1, x.max()
    for _ in range(56):
        tau = (low + high) / 2
        if (np.maximum(x - tau, 0) ** (1 / (alpha - 1))).sum() >= 1:
            low = tau
        else:
            high = tau
    return low


def entmax(scores: np.ndarray, alpha: float) -> np.ndarray:
    """The weights of one row."""
    if alpha == 1:
        p = np.exp(scores - scores.max())
    else:
        p = np.maximum((alpha - 1) * scores - threshold(scores, alpha), 0) ** (1 / (alpha - 1))
    return p / p.sum()


def largest(scores: np.ndarray, k: int) -> np.ndarray:
    """The k largest of one row, ascending; ties to the lowest."""
    return np.sort(np.argsort(-scores, kind="stable")[:k])


class Oracle(NamedTuple):
    """float64, or as named."""

    out: np.ndarray  # (B, H, Q, E)
    p: np.ndarray  # (B, H, Q, K)
    tau: np.ndarray  # (B, H, Q), inf in empty rows, -1 at alpha 1
    certified: np.ndarray  # (B, H, Q) bool
    kept: np.ndarray  # (B, H, Q, K) bool: which keys top_k keeps


def attention(
    q: np.ndarray, k: np.ndarray, v: np.ndarray, mask: np.ndarray | None, alphas: np.ndarray, top_k: int | None,
    scale: float,
) -> Oracle:  # fmt: skip
    """Over float64 q (B, H, Q, D), k (B, G, K, D), v (B, G, K, E); the mask broadcasts to (B, H, Q, K), alphas (H,)."""
    (B, H, Q, _), (_, G, K, _), E = q.shape, k.shape, v.shape[3]
    mask = np.broadcast_to(np.ones((1, 1), bool) if mask is None else mask, (B, H, Q, K))
    found = Oracle(
        np.zeros((B, H, Q, E)), np.zeros((B, H, Q, K)), np.full((B, H, Q), np.inf), np.ones((B, H, Q), bool),
        np.zeros((B, H, Q, K), bool),
    )  # fmt: skip
    for b, h, r in np.ndindex(B, H, Q):
        (seen,) = np.nonzero(mask[b, h, r])
        if not len(seen):
            continue
        g, a = h // (H // G), float(alphas[h])
        s = scale * (k[b, g, seen] @ q[b, h, r])
        among = np.arange(len(seen)) if top_k is None else largest(s, top_k)
        keys = seen[among]
        found.kept[b, h, r, keys] = True
        found.p[b, h, r, keys] = entmax(s[among], a)
        found.out[b, h, r] = found.p[b, h, r] @ v[b, g]
        found.tau[b, h, r] = -1 if a == 1 else threshold(s[among], a)
        rest = np.delete(s, among)
        found.certified[b, h, r] = not len(rest) or (a > 1 and (a - 1) * rest.max() <= found.tau[b, h, r])
    return found
