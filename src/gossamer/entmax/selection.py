"""The scores of a row that may be in its support, or are its k largest.

A lower bound comes from the largest score of each of a few groups of keys: scores under it
are dropped before anything is computed of them.
"""

from __future__ import annotations

from typing import NamedTuple

import torch
from torch import Tensor

from gossamer.entmax.thresholds import cut, lower_bound

GROUPS = 64  # of keys, for the bound of a support
BOUND_STEPS = 3
# Rows that keep a larger share of their scores are computed whole.
SPARSE = 0.25


class Picked(NamedTuple):
    """Some scores of each row, in the order of its keys or, of the k largest, from the largest down."""

    s: Tensor  # (m, c); -inf stands for no score
    columns: Tensor | None  # (m, c) int64, any number beside -inf; None for all keys in order
    after: Tensor | None = None  # (m,) the largest score that `largest` left out; -inf where it left out none
    under: Tensor | None = None  # (m,) a lower bound of the normaliser


def supports(s: Tensor, a: Tensor, same: float | None) -> Picked:
    """The scores (m, n) that may have a weight in alpha-entmax; no other has one.

    Args:
        a: (m,), alpha - 1 of each row, in the dtype of s.
        same: alpha - 1 of all rows, where they share it.
    """
    n = s.shape[1]
    if n < 4 * GROUPS or same == 0.0:
        return Picked(s, None)
    under = lower_bound(group_maxima(s, GROUPS), a, BOUND_STEPS, same)
    bound = cut(under, a)
    # 1 / a is rounded as well.
    return above(s, bound - 16 * torch.finfo(s.dtype).eps * bound.abs())._replace(under=under)


def largest(s: Tensor, k: int) -> Picked:
    """The k largest of the scores (m, n), ties to the lowest key, from the largest down."""
    n = s.shape[1]
    picked = Picked(s, None)
    groups = max(GROUPS, 4 * (k + 1))
    if n >= 4 * groups:
        maxima = group_maxima(s, groups)
        bound = torch.topk(maxima, k + 1, dim=1).values[:, k]  # at least k + 1 scores reach it, one of each group
        picked = above(s, torch.nextafter(bound, torch.full_like(bound, -torch.inf)))
    # NaN sorts first; the sum of the row shows it.
    values, order = torch.sort(picked.s, dim=1, descending=True, stable=True)
    columns = order[:, :k] if picked.columns is None else torch.gather(picked.columns, 1, order[:, :k])
    after = values[:, k] if values.shape[1] > k else s.new_full((len(s),), -torch.inf)
    return Picked(values[:, :k], columns, after)


def group_maxima(s: Tensor, groups: int) -> Tensor:
    """(m, groups): the largest score of keys g, g + groups, g + 2 groups, ... of each row (m, n)."""
    m, n = s.shape
    each = n // groups
    maxima = s[:, : each * groups].reshape(m, each, groups).amax(1)
    rest = n - each * groups
    if rest:
        torch.maximum(maxima[:, :rest], s[:, each * groups :], out=maxima[:, :rest])
    return maxima


def above(s: Tensor, bound: Tensor) -> Picked:
    """The scores (m, n) over their row's bound, in order; all of them where these are not few."""
    m, n = s.shape
    bound = torch.where(bound < torch.inf, bound, -torch.inf)  # a bound of NaN drops nothing
    where = torch.logical_not(s <= bound[:, None]).view(-1).nonzero().squeeze(1)
    if len(where) > SPARSE * m * n:
        return Picked(s, None)
    row = where // n
    counts = torch.bincount(row, minlength=m)
    c = max(1, int(counts.max()))
    if c > 2 * SPARSE * n:
        return Picked(s, None)
    place = torch.arange(len(where), device=s.device) - (counts.cumsum(0) - counts)[row] + row * c
    values, columns = s.new_full((m * c,), -torch.inf), where.new_zeros(m * c)
    values[place], columns[place] = s.view(-1)[where], where - row * n
    return Picked(values.view(m, c), columns.view(m, c))
