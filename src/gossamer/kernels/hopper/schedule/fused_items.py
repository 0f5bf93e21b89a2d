"""Many items of full tiles on a GPU by kernels: those of `rows.work` and `columns.column_work`, in the same order."""

from __future__ import annotations

from typing import Any, NamedTuple

import torch
from torch import Tensor

from gossamer.kernels.hopper.device.column_items import SEGMENT
from gossamer.kernels.hopper.device.merges import MERGE
from gossamer.kernels.hopper.device.row_items import ITEM
from gossamer.kernels.hopper.schedule.cuts import SLACK
from gossamer.kernels.hopper.schedule.item_kernels import (
    DOUBLINGS,
    MIDDLE,
    SIZES,
    length_kernel,
    many_kernel,
    size_kernel,
)
from gossamer.layouts.walk import Walk
from gossamer.layouts.work_list import most_listed

MOST_BINS = 2048  # lengths that are counted at a time
FEW_BINS = 128  # and those of which the sizes are
LENGTHS = 1024  # items whose lengths are counted at a time
LISTS = 8
OWN, OTHERS = 64, 128  # items of a program, and those that they are compared with at a time


class Made(NamedTuple):
    """Items as `rows.Work` has them."""

    items: Tensor
    merges: Tensor
    slots: int
    segments: Tensor | None


def fused_items(
    walk: Walk, shape: tuple[int, int, int], copies: int, heads: int, blocks: int, ratio: int = 0
) -> Made:  # fmt: skip
    """The items of all heads in the order in which blocks draw them, of more than `cuts.ROUNDS` for each block.

    Args:
        walk: of full tiles alone.
        shape: batch elements, heads and tiles of all rows.
        copies, heads, blocks: see `rows.work`.
        ratio: of items of columns, the query heads of a key head; 0 for items of rows.
    """
    (batches, groups, tiles), (_, Hl) = shape, walk.lead
    starts, counts = walk.full.starts.contiguous(), walk.full.counts.contiguous()
    lists, times = batches * groups, max(1, ratio)
    # The lists of the heads of a group of rows: their own, or one that all share.
    lead_b, lead_g, lead_j = (Hl, times, 1) if Hl > 1 else (1, 0, 0)
    n, bins = lists * tiles, times * most_listed(walk) + 1
    new: dict[str, Any] = {"dtype": torch.int32, "device": counts.device}
    items, merges = torch.empty((n * copies, ITEM), **new), torch.zeros((1, MERGE), **new)
    segments = torch.empty((n * times, SEGMENT), **new) if ratio else None
    lengths, histograms = torch.empty(n, **new), torch.empty((lists, bins), **new)
    sizes, middle = torch.empty((lists, SIZES), **new), torch.empty(2, **new)
    at_once = min(MOST_BINS, max(FEW_BINS, 1 << (bins - 1).bit_length()))
    where = tiles, times, groups, lead_b, lead_g, lead_j
    of_sizes = {"SIZES": SIZES, "MIDDLE": MIDDLE, "DOUBLINGS": DOUBLINGS, "LISTS": LISTS}
    length_kernel[(lists, -(-bins // at_once))](
        counts, lengths, histograms, *where, bins, ITEMS=LENGTHS, BINS=at_once, num_warps=4
    )
    size_kernel[(lists,)](
        histograms, sizes, middle, lists, bins, n, blocks, SLACK, **of_sizes, BINS=at_once, FEW_BINS=FEW_BINS,
        num_warps=8,
    )  # fmt: skip
    chunks = -(-tiles // OWN)
    many_kernel[(lists * copies * chunks,)](
        items, items if segments is None else segments, starts, counts, lengths, sizes, middle, *where, lists, copies,
        heads, groups * heads, chunks, **of_sizes, OWN=OWN, OTHERS=OTHERS, COLUMNS=ratio > 0, ITEM=ITEM,
        SEGMENT=SEGMENT, num_warps=4,
    )  # fmt: skip
    return Made(items, merges, 0, segments)
