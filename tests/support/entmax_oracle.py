"""alpha-entmax attention from its definition, in float64 and row by row: what `entmax_attention` is compared with."""

from __future__ import annotations

import numpy as np
import torch
from torch import Tensor

from tests.support import entmax_definition as definition
from tests.support.entmax_definition import Oracle, entmax, largest, threshold

__all__ = ["Oracle", "attention", "entmax", "largest", "plain", "threshold"]


def attention(
    q: Tensor, k: Tensor, v: Tensor, mask: np.ndarray | Tensor | None = None, *, alpha: float | Tensor = 1.5,
    top_k: int | None = None, scale: float | None = None,
) -> Oracle:  # fmt: skip
    """Over q (B, H, Q, D), k (B, G, K, D), v (B, G, K, E); the mask broadcasts to (B, H, Q, K)."""
    H, D = q.shape[1], q.shape[3]
    x = (x.detach().double().cpu().numpy() for x in (q, k, v))
    alphas = np.broadcast_to(np.asarray(torch.as_tensor(alpha, dtype=torch.float64).detach()), (H,))
    mask = None if mask is None else np.asarray(mask)
    return definition.attention(*x, mask, alphas, top_k, D**-0.5 if scale is None else scale)


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
