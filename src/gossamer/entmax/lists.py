"""The supports of all rows as lists of (key, weight), in rows behind one another: 8 bytes a pair in float32."""

from __future__ import annotations

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


class Collector:
    """Gathers the pairs of chunks of rows, in any order of rows, up to a number of them."""

    def __init__(self, rows: int, most_pairs: int) -> None:
        self.rows, self.left = rows, most_pairs
        self.parts: list[tuple[Tensor, Tensor, Tensor, Tensor]] = []
        self.given_up = most_pairs == 0

    def takes(self, pairs: int) -> bool:
        """Whether so many more pairs fit; where they do not, all lists are dropped."""
        self.left -= pairs
        if self.left < 0:
            self.given_up, self.parts = True, []
        return not self.given_up

    def add(self, rows: Tensor, counts: Tensor, keys: Tensor, column: Tensor, weights: Tensor) -> None:
        """The pairs of some rows, one row behind the other.

        Args:
            rows: (m,) which rows.
            counts: (m,) how many pairs each has.
            keys: the chunk's keys; `column` says which of them a pair has.
        """
        self.parts.append((rows, counts, keys[column].to(torch.int32), weights))

    def lists(self) -> PairLists | None:
        """The lists of all pairs, rows in order; None where there were too many."""
        if self.given_up or not self.parts:
            return None
        rows, counts, keys, weights = (torch.cat(part) for part in zip(*self.parts, strict=True))
        self.parts = []
        row_counts = counts.new_zeros(self.rows + 1)
        row_counts[rows + 1] = counts
        starts = row_counts.cumsum(0)
        # Where each pair goes: the start of its row, and its place in it.
        place = (starts[rows] - (counts.cumsum(0) - counts)).repeat_interleave(counts)
        place += torch.arange(len(place), device=place.device)
        ordered_keys, ordered_weights = torch.empty_like(keys), torch.empty_like(weights)
        ordered_keys[place], ordered_weights[place] = keys, weights
        return PairLists(starts, ordered_keys, ordered_weights)
