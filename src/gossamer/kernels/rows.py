"""Row-wise formulas of the backward that every torch implementation shares."""

from __future__ import annotations

from typing import TypeVar

import torch
from torch import Tensor

from gossamer.kernels.contract import Terms

Results = TypeVar("Results", bound=tuple[Tensor, ...])


def compute_dtype(dtype: torch.dtype) -> torch.dtype:
    """The dtype of the arithmetic and of lse: float64 for float64, float32 for everything else."""
    return torch.float64 if dtype == torch.float64 else torch.float32


def stored(into: Results, results: Results) -> Results:
    """`into`, with the results copied to where the caller wants them, in its dtypes and strides."""
    for place, result in zip(into, results, strict=True):
        place.copy_(result)
    return into


def row_terms(dout: Tensor, dlse: Tensor | None, out: Tensor, lse: Tensor, dtype: torch.dtype) -> tuple[Tensor, Tensor]:
    """(delta, lse), each (B, H, Q) in `dtype`: delta = rowsum(dout * out) - dlse; -inf becomes +inf in lse.

    With lse = +inf every probability of an empty row is exactly 0, and so are its gradients.
    """
    empty = lse == -torch.inf
    delta = (dout.to(dtype) * out.to(dtype)).sum(-1)
    if dlse is not None:
        delta = delta - dlse.to(dtype)
    return delta.masked_fill(empty, 0.0), lse.to(dtype).masked_fill(empty, torch.inf)


def sink_gradient(delta: Tensor, lse: Tensor, terms: Terms) -> Tensor | None:
    """The gradient (H,) of the sink logits: the sink is a key with value 0, so dS = P * (0 - delta)."""
    if terms.sink_logits is None:
        return None
    sink = terms.sink_logits.to(lse.dtype)[:, None]
    return (torch.exp(sink - lse) * -delta).sum((0, 2)).to(terms.sink_logits.dtype)


def sink_gradient_of(rows: Tensor, lse: Tensor, terms: Terms) -> Tensor | None:
    """`sink_gradient` from what a kernel wrote, (2, B, H, padded Q): delta is its second, lse (B, H, Q) as returned."""
    if terms.sink_logits is None:
        return None
    # A row is empty only under a sink of -inf; +inf makes its share of the sink 0.
    return sink_gradient(rows[1, :, :, : lse.shape[2]], lse.masked_fill(lse == -torch.inf, torch.inf), terms)
