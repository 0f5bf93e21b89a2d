"""The supports of all rows as lists of (key, weight), in rows behind one another: 8 bytes a pair in float32."""

from __future__ import annotations

from collections.abc import Sequence
from typing import NamedTuple

import torch
from torch import Tensor


class PairLists(NamedTuple):
    """Row r has the pairs [starts[r], starts[r + 1])."""

    starts: Tensor  # (rows + 1,) int64, rows counted over (B, H, Q)
    keys: Tensor  # (pairs,) int32
    weights: Tensor  # (pairs,) in the type that the call is computed in


class RowLists(NamedTuple):
    """The supports of rows as kernels write them: L places for each row, of which the first `counts` are used."""

    keys: Tensor  # (rows, L) int32
    weights: Tensor  # (rows, L) float32
    counts: Tensor  # (B, H, Q) int32; -1 where a row has no list, since its support is larger


class PairsOfRows(NamedTuple):
    """The pairs of some rows, one row behind the other."""

    rows: Tensor  # (m,) which rows
    counts: Tensor  # (m,) how many pairs each has
    keys: Tensor  # (pairs,) int32
    weights: Tensor  # (pairs,)


def in_order(parts: Sequence[PairsOfRows], n: int) -> PairLists:
    """The lists of n rows from the pairs of all that have some, in any order of rows."""
    rows, counts, keys, weights = (torch.cat(part) for part in zip(*parts, strict=True))
    row_counts = counts.new_zeros(n + 1)
    row_counts[rows + 1] = counts
    starts = row_counts.cumsum(0)
    # Where each pair goes: the start of its row, and its place in it.
    place = (starts[rows] - (counts.cumsum(0) - counts)).repeat_interleave(counts)
    place += torch.arange(len(place), device=place.device)
    ordered_keys, ordered_weights = torch.empty_like(keys), torch.empty_like(weights)
    ordered_keys[place], ordered_weights[place] = keys, weights
    return PairLists(starts, ordered_keys, ordered_weights)
