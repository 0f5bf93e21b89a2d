"""Row-wise formulas of the backward that every torch implementation shares."""

from __future__ import annotations

import torch
from torch import Tensor


def compute_dtype(dtype: torch.dtype) -> torch.dtype:
    """The dtype of the arithmetic and of lse: float64 for float64, float32 for everything else."""
    return torch.float64 if dtype == torch.float64 else torch.float32


def row_terms(dout: Tensor, dlse: Tensor | None, out: Tensor, lse: Tensor, dtype: torch.dtype) -> tuple[Tensor, Tensor]:
    """(delta, lse), each (B, H, Q) in `dtype`: delta = rowsum(dout * out) - dlse; -inf becomes +inf in lse.

    With lse = +inf every probability of an empty row is exactly 0, and so are its gradients.
    """
    empty = lse == -torch.inf
    delta = (dout.to(dtype) * out.to(dtype)).sum(-1)
    if dlse is not None:
        delta = delta - dlse.to(dtype)
    return delta.masked_fill(empty, 0.0), lse.to(dtype).masked_fill(empty, torch.inf)


def sink_gradient(delta: Tensor, lse: Tensor, sinks: Tensor) -> Tensor:
    """The gradient (H,) of the sink logits: the sink is a key with value 0, so dS = P * (0 - delta)."""
    return (torch.exp(sinks.to(lse.dtype)[:, None] - lse) * -delta).sum((0, 2)).to(sinks.dtype)
