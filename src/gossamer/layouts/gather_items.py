"""Work items of gathered lists: which range of which list is computed together, the longest first."""

from __future__ import annotations

from typing import NamedTuple

import numpy as np

from gossamer.layouts.gather import GatherWalk
from gossamer.layouts.items import BEGIN, COUNT, END, ITEM, LEAD, PART, SLOT, TILE
from gossamer.layouts.work_list import fill, merges_of, split_rows


class GatherItems(NamedTuple):
    """The items of a walk; begin and end count from the start of `indices`, in units of the walk's width."""

    items: np.ndarray  # (n, ITEM) int32, with the fields of `layouts.items`
    merges: np.ndarray  # (m, MERGE) int32

    @property
    def slots(self) -> int:
        """The number of partial results."""
        return int(self.merges[:, COUNT].sum())


def gather_items(walk: GatherWalk, limit: int) -> GatherItems:
    """Split the lists of a numpy walk into ranges of at most `limit` units; empty lists get one empty item each."""
    lengths = -(-walk.counts.astype(np.int64) // walk.width).reshape(-1)
    of, begin, end, slot, pieces = split_rows(lengths, limit)
    start = walk.starts.astype(np.int64).reshape(-1)[of] // walk.width
    length = end - begin
    # Lengths that differ little stay in the order of rows, whose columns are likely to be near each other.
    steps = -(-length // 4)
    near = np.where(steps <= 16, steps, 16 + np.ceil(np.log2(np.maximum(steps, 1))))
    lead, tile = np.divmod(of, walk.tiles)
    fields = {LEAD: lead, TILE: tile, BEGIN: start + begin, END: start + end, SLOT: slot, PART: begin > 0}
    return GatherItems(fill(len(of), ITEM, fields)[np.lexsort((begin, of, -near))], merges_of(pieces, walk.tiles))
