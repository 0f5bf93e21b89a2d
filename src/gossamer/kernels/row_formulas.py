"""Row-wise formulas of the backward that every torch implementation shares."""

from __future__ import annotations

from typing import NamedTuple

import torch
from torch import Tensor


class Attended(NamedTuple):
    """The rows that the kept pairs of a call read: the rest is cleared, where it would meet a 0. None: all are read."""

    rows: Tensor | None  # broadcasts to (B, H, Q, 1) bool: queries that keep anything
    keys: Tensor | None  # broadcasts to (B, G, K, 1) bool: keys that any query of the group keeps

    def of_rows(self, x: Tensor) -> Tensor:
        """`x` (B, H, Q, size), and 0 in queries that keep nothing."""
        return x if self.rows is None else torch.where(self.rows, x, 0.0)

    def of_keys(self, x: Tensor) -> Tensor:
        """`x` (B, G, K, size), and 0 in keys that no query keeps; of growing keys there may be fewer than K."""
        return x if self.keys is None else torch.where(self.keys[:, :, : x.shape[2]], x, 0.0)


def compute_dtype(dtype: torch.dtype) -> torch.dtype:
    """The dtype of the arithmetic and of lse: float64 for float64, float32 for everything else."""
    return torch.float64 if dtype == torch.float64 else torch.float32


def row_terms(
    dout: Tensor, dlse: Tensor | None, out: Tensor, lse: Tensor, dtype: torch.dtype, *, cleared: bool = True
) -> tuple[Tensor, Tensor]:
    """(delta, lse), each (B, H, Q) in `dtype`: delta = rowsum(dout * out) - dlse; -inf becomes +inf in lse.

    With lse = +inf every probability of an empty row is exactly 0, and so are its gradients.

    Args:
        cleared: whether dout is finite in empty rows. Under a sink those have another lse, and an `out` of 0.
    """
    empty = lse == -torch.inf
    products = dout.to(dtype) * out.to(dtype)
    delta = (products if cleared else products.masked_fill_(out == 0, 0.0)).sum(-1)
    if dlse is not None:
        delta = delta - dlse.to(dtype)
    return delta.masked_fill(empty, 0.0), lse.to(dtype).masked_fill(empty, torch.inf)


def sink_gradient(delta: Tensor, lse: Tensor, sinks: Tensor) -> Tensor:
    """The gradient (H,) of the sink logits: the sink is a key with value 0, so dS = P * (0 - delta)."""
    return (torch.exp(sinks.to(lse.dtype)[:, None] - lse) * -delta).sum((0, 2)).to(sinks.dtype)
