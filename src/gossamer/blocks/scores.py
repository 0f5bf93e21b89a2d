"""Scores of blocks of keys: of mean queries and keys, and bounds that no score in the block exceeds."""

from __future__ import annotations

from collections.abc import Callable, Iterator
from typing import NamedTuple

import torch
from torch import Tensor

MOST = 2**23  # bounds that are held at once


class Extremes(NamedTuple):
    """The extremes of the keys of each block, (B, G, C, D)."""

    least: Tensor
    most: Tensor


class RowBounds(NamedTuple):
    """The bounds of rows [first, end)."""

    first: int
    end: int
    bounds: Tensor  # (B, G, H // G, end - first, C)


def per_block(x: Tensor, block: int, reduce: Callable[[Tensor], Tensor]) -> Tensor:
    """(..., N, D) as (..., ceil(N / block), D); `reduce` takes (..., blocks, block, D) to (..., blocks, D)."""
    full = x.shape[-2] // block * block
    parts = [x[..., full:, :].unsqueeze(-3)] if full < x.shape[-2] else []
    if full:
        parts.insert(0, x[..., :full, :].unflatten(-2, (-1, block)))
    return torch.cat([reduce(part) for part in parts], -2)


def means(x: Tensor, block: int, wide: torch.dtype) -> Tensor:
    """The mean of each block, over the positions that it has."""
    return per_block(x, block, lambda part: part.mean(-2, dtype=wide))


def extremes(k: Tensor, block: int) -> Extremes:
    """The least and the largest value of each dimension in each block of keys."""
    return Extremes(per_block(k, block, lambda part: part.amin(-2)), per_block(k, block, lambda part: part.amax(-2)))


def mean_scores(q: Tensor, k: Tensor, block: int, scale: float, group: bool) -> Tensor:
    """scale * mean(q) . mean(k) of each pair of blocks: (B, heads, T, C), heads G of groups, else H."""
    wide, G = _wide(q), k.shape[1]
    queries = means(q, block, wide).unflatten(1, (G, -1))
    if group:
        queries = queries.mean(2, keepdim=True)
    return (scale * (queries @ means(k, block, wide).unsqueeze(2).mT)).flatten(1, 2)


def bound_scores(q: Tensor, k: Tensor, block: int, scale: float, group: bool) -> Tensor:
    """The largest bound of the rows of each block of queries: (B, heads, T, C)."""
    block_bounds = []
    for rows in row_bounds(q, k, block, scale, _wide(q)):
        bounds = rows.bounds.amax(2, keepdim=True) if group else rows.bounds
        block_bounds.append(per_block(bounds, block, lambda part: part.amax(-2)))
    return torch.cat(block_bounds, 3).flatten(1, 2)


def row_bounds(q: Tensor, k: Tensor, block: int, scale: float, wide: torch.dtype) -> Iterator[RowBounds]:
    """Bounds of scores: sum_d max(q_d m_d, q_d M_d) * scale for each row and block of keys with the extremes m and M.

    No score of a key of the block is larger. As relu(q) . M - relu(-q) . m it is two products. Rows come in whole
    blocks of queries, so many that at most MOST bounds are held, or those of one block of every head.
    """
    (B, H, Q, _), G = q.shape, k.shape[1]
    least, most = (x.to(wide).unsqueeze(2).mT for x in extremes(k, block))
    if scale < 0:
        least, most = most, least
    step = block * max(1, MOST // (B * H * block * least.shape[-1]))
    for first in range(0, Q, step):
        end = min(first + step, Q)
        rows = q[:, :, first:end].to(wide).unflatten(1, (G, -1))
        yield RowBounds(first, end, scale * (rows.clamp(min=0) @ most - (-rows).clamp(min=0) @ least))


def _wide(q: Tensor) -> torch.dtype:
    return torch.float64 if q.dtype == torch.float64 else torch.float32
