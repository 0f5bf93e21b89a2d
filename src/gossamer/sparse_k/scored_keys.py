"""Scores that a layer gives its keys, and keys that bring them along: for caches that know keys and values alone."""

from __future__ import annotations

import torch
import torch.nn.functional as F
from torch import Tensor

from gossamer.kernels.row_formulas import compute_dtype
from gossamer.torch.transforms import uncast

CHANNELS = 8  # behind a key: 16 bytes of 16-bit types, so that rows stay aligned
SPAN = 1024  # positions over which a slope of 1 raises scores by 1


def scores_of_tokens(x: Tensor, weight: Tensor, slope: Tensor, positions: Tensor) -> Tensor:
    """The scores (..., G) of tokens x (..., dim) at positions (...): weight x + slope t / 1024, float32 at least."""
    with uncast(x.device):
        wide = compute_dtype(x.dtype)
        return F.linear(x.to(wide), weight.to(wide)) + slope.to(wide) * (positions[..., None].to(wide) / SPAN)


def with_scores(k: Tensor, u: Tensor) -> Tensor:
    """(..., n, D + 8): keys k (..., n, D), and behind each its score u (..., n), float32, to the last bit.

    A key of 16 bits holds its score in two channels, as bits: as numbers these may be anything, NaN as well.
    """
    bits = u.detach().to(compute_dtype(k.dtype))[..., None].contiguous().view(k.dtype)
    return torch.cat([k, bits, k.new_zeros(*k.shape[:-1], CHANNELS - bits.shape[-1])], -1)


def bits_of(scored: Tensor) -> Tensor:
    """(..., n, 1 or 2): a view of what holds the scores behind keys (..., n, D + 8)."""
    D = scored.shape[-1] - CHANNELS
    return scored[..., D : D + compute_dtype(scored.dtype).itemsize // scored.dtype.itemsize]


def scores_of(bits: Tensor) -> Tensor:
    """(..., n): the scores that bits hold."""
    return bits.contiguous().view(compute_dtype(bits.dtype))[..., 0]
