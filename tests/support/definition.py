"""Attention by its definition in float64, of any kept pairs, and tensors to call it with."""

from __future__ import annotations

import math

import numpy as np
import torch
from torch import Tensor


def tensors(*shapes: tuple[int, ...], seed: int = 0) -> list[Tensor]:
    g = torch.Generator().manual_seed(seed)
    return [torch.randn(shape, generator=g, dtype=torch.float64).requires_grad_() for shape in shapes]


def dense(
    q: Tensor, k: Tensor, v: Tensor, mask: np.ndarray | Tensor, sinks: Tensor | None = None,
    softcap: float | None = None, scale: float | None = None, slopes: Tensor | None = None,
    position: np.ndarray | None = None,
) -> tuple[Tensor, Tensor]:  # fmt: skip
    """(out, lse) of (B, H, Q, D) by the definition; `mask` broadcasts to (B, H, Q, K)."""
    times, kept = q.shape[1] // k.shape[1], torch.as_tensor(mask)
    k, v = k.repeat_interleave(times, 1), v.repeat_interleave(times, 1)
    s = q @ k.mT * (q.shape[3] ** -0.5 if scale is None else scale)
    s = s if softcap is None else softcap * torch.tanh(s / softcap)
    if slopes is not None:
        assert position is not None
        distance = torch.arange(k.shape[2])[None] - torch.from_numpy(position)[:, None]
        s = s + slopes[:, None, None] * distance
    s = s.masked_fill(~kept, -math.inf)
    if sinks is not None:
        s = torch.cat([s, sinks[None, :, None, None].expand(*s.shape[:3], 1)], -1)
    most = s.amax(-1, keepdim=True).detach()
    p = (s - most.masked_fill(most == -math.inf, 0)).exp()
    total = p.sum(-1, keepdim=True)
    empty = total == 0
    lse = (most.squeeze(-1) + total.masked_fill(empty, 1).log().squeeze(-1)).masked_fill(empty.squeeze(-1), -math.inf)
    return p[..., : k.shape[2]] / total.masked_fill(empty, 1) @ v, lse
