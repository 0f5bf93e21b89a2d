"""alpha-entmax attention from its definition, in float64 and row by row: what `entmax_attention` is compared with."""

from __future__ import annotations

from typing import NamedTuple

import numpy as np
import torch
from torch import Tensor


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
    q: Tensor, k: Tensor, v: Tensor, mask: np.ndarray | Tensor | None = None, *, alpha: float | Tensor = 1.5,
    top_k: int | None = None, scale: float | None = None,
) -> Oracle:  # fmt: skip
    """Over q (B, H, Q, D), k (B, G, K, D), v (B, G, K, E); the mask broadcasts to (B, H, Q, K)."""
    (B, H, Q, D), (_, G, K, _), E = q.shape, k.shape, v.shape[3]
    q64, k64, v64 = (x.detach().double().cpu().numpy() for x in (q, k, v))
    alphas = np.broadcast_to(np.asarray(torch.as_tensor(alpha, dtype=torch.float64).detach()), (H,))
    mask = np.broadcast_to(np.ones((1, 1), bool) if mask is None else np.asarray(mask), (B, H, Q, K))
    scale = D**-0.5 if scale is None else scale
    found = Oracle(
        np.zeros((B, H, Q, E)), np.zeros((B, H, Q, K)), np.full((B, H, Q), np.inf), np.ones((B, H, Q), bool),
        np.zeros((B, H, Q, K), bool),
    )  # fmt: skip
    for b, h, r in np.ndindex(B, H, Q):
        (seen,) = np.nonzero(mask[b, h, r])
        if not len(seen):
            continue
        g, a = h // (H // G), float(alphas[h])
        s = scale * (k64[b, g, seen] @ q64[b, h, r])
        among = np.arange(len(seen)) if top_k is None else largest(s, top_k)
        keys = seen[among]
        found.kept[b, h, r, keys] = True
        found.p[b, h, r, keys] = entmax(s[among], a)
        found.out[b, h, r] = found.p[b, h, r] @ v64[b, g]
        found.tau[b, h, r] = -1 if a == 1 else threshold(s[among], a)
        rest = np.delete(s, among)
        found.certified[b, h, r] = not len(rest) or (a > 1 and (a - 1) * rest.max() <= found.tau[b, h, r])
    return found


def plain(q: Tensor, k: Tensor, v: Tensor, mask: Tensor, alpha: float) -> Tensor:
    """The same in the precision of q, as one would write it: by sorting for 1.5 and 2, else by 50 halvings."""
    H, G = q.shape[1], k.shape[1]
    k, v = (x.repeat_interleave(H // G, 1) for x in (k, v))
    x = (alpha - 1) * ((q @ k.mT) * q.shape[3] ** -0.5).masked_fill(~mask, -1e30)
    x = x - x.amax(-1, keepdim=True)
    n = torch.arange(1, x.shape[-1] + 1, dtype=x.dtype)
    ordered = x.sort(-1, descending=True).values
    if alpha == 1.5:  # Peters et al., 2019, algorithm 2
        ordered = ordered.clamp(min=-10)  # as far as it matters; squares of -1e30 are none
        mean, squares = ordered.cumsum(-1) / n, (ordered**2).cumsum(-1) / n
        tau = mean - ((1 - n * (squares - mean**2)) / n).clamp(min=0).sqrt()
        tau = tau.gather(-1, (tau <= ordered).sum(-1, keepdim=True) - 1)
    elif alpha == 2:  # Martins and Astudillo, 2016, algorithm 1
        sums = ordered.clamp(min=-10).cumsum(-1) - 1
        size = (n * ordered > sums).sum(-1, keepdim=True)
        tau = sums.gather(-1, size - 1) / size
    else:
        tau, width = x.amax(-1, keepdim=True) - 1, 1.0
        for _ in range(50):
            width /= 2
            over = ((x - tau - width).clamp(min=0) ** (1 / (alpha - 1))).sum(-1, keepdim=True) >= 1
            tau = torch.where(over, tau + width, tau)
        # One step of Newton, by which autograd differentiates tau.
        tau, p = tau.detach(), (x - tau.detach()).clamp(min=0) ** (1 / (alpha - 1))
        tau = tau + (p.sum(-1, keepdim=True) - 1) * (alpha - 1) / (p.detach() ** (2 - alpha)).sum(-1, keepdim=True)
    p = (x - tau).clamp(min=0) ** (1 / (alpha - 1))
    return (p / p.sum(-1, keepdim=True)) @ v
