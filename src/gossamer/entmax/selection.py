"""Which scores of a row matter: those that may be in its support, or its k largest, of all that it sees.

A lower bound comes from the largest score of each of a few groups of keys, which is a part of the row; what lies under
it is dropped before anything is computed of it.
"""

from __future__ import annotations

from typing import NamedTuple

import torch
from torch import Tensor

from gossamer.entmax.thresholds import cut, lower_bound

GROUPS = 64  # of keys, for the bound of a support
BOUND_STEPS = 3
# A row of which more than this share is left is computed whole.
SPARSE = 0.25


class Picked(NamedTuple):
    """Some scores of each row, in the order of its keys or, of the k largest, from the largest down."""

    s: Tensor  # (m, c); -inf is none
    columns: Tensor | None  # (m, c) int64, any number where there is none; None for all, in order
    after: Tensor | None = None  # (m,) the largest score that `largest` left out; -inf where it left out none
    under: Tensor | None = None  # (m,) a number under the normaliser


def supports(s: Tensor, a: Tensor, same: float | None) -> Picked:
    """Scores (m, n) of which the rest surely has no weight in alpha-entmax.

    Args:
        a: (m,), alpha - 1 of each row, in the dtype of s.
        same: that of all rows, where they have one.
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
        bound = torch.topk(maxima, k + 1, dim=1).values[:, k]  # k + 1 scores, of different groups, are not under it
        picked = above(s, torch.nextafter(bound, torch.full_like(bound, -torch.inf)))
    # Of NaN, which sorts first, the row is told by its sum.
    values, order = torch.sort(picked.s, dim=1, descending=True, stable=True)
    columns = order[:, :k] if picked.columns is None else torch.gather(picked.columns, 1, order[:, :k])
    after = values[:, k] if values.shape[1] > k else s.new_full((len(s),), -torch.inf)
    return Picked(values[:, :k], columns, after)


def group_maxima(s: Tensor, groups: int) -> Tensor:
    """(m, groups): the largest score of keys g, g + groups, g + 2 groups, ... of each row (m, n)."""
    m, n = s.shape
    each = n // groups
    found = s[:, : each * groups].reshape(m, each, groups).amax(1)
    rest = n - each * groups
    if rest:
        torch.maximum(found[:, :rest], s[:, each * groups :], out=found[:, :rest])
    return found


def above(s: Tensor, bound: Tensor) -> Picked:
    """The scores (m, n) over their row's bound, in order; all of them where these are not few."""
    m, n = s.shape
    bound = torch.where(bound < torch.inf, bound, -torch.inf)  # NaN: what it came from is kept
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
