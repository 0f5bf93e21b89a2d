"""The items of lists of whose lengths a GPU alone knows, in a few launches: what `schedule_gather` defines."""

from __future__ import annotations

from typing import NamedTuple

import torch
from torch import Tensor

from gossamer.kernels.launch_now import launch
from gossamer.kernels.triton.gather.item_kernels import (
    ItemForm,
    ItemNumbers,
    items_kernel,
    longest_kernel,
    parts_kernel,
    place_kernel,
)
from gossamer.layouts.gather import GatherWalk
from gossamer.layouts.items import ITEM, MERGE

CLASSES = 64  # of lengths: 17 of up to 64 steps, and one for each power of two above
LISTS = 1024  # of a program
ITEMS = 128  # likewise, each of which it compares with all classes
PROGRAMS = 32  # whose numbers of items are added at a time


class DeviceItems(NamedTuple):
    """What `gather_items` makes on a host, with room for more."""

    items: Tensor  # (n, ITEM) int32
    merges: Tensor  # (m, MERGE) int32
    slots: int


def device_items(walk: GatherWalk, limit: int, more: int) -> DeviceItems:
    """The items of a walk, of at most `limit` steps each.

    Args:
        more: parts that all lists together may have beyond one each.
    """
    counts, starts = walk.counts.reshape(-1), walk.starts.reshape(-1)
    rows, new = len(counts), {"dtype": torch.int32, "device": counts.device}
    n, slots = rows + more, 2 * more + 1 if more else 0
    programs = -(-n // ITEMS)
    classes, of_classes = torch.empty(n, **new), torch.empty((programs, CLASSES), **new)
    items, ordered = (torch.empty((n, ITEM), **new) for _ in range(2))
    merges = torch.empty((more, MERGE), **new)
    sums = classes  # a pointer that is not read still needs an array
    if more:
        parts = torch.empty(3 * rows, **new)
        launch(parts_kernel, (-(-rows // LISTS),), counts, parts, rows, walk.width, limit, BLOCK=LISTS, num_warps=4)
        sums = parts.cumsum(0, dtype=torch.int32)
    launch(
        items_kernel, (programs - (-more // ITEMS),), starts, counts, sums, items, classes, of_classes, merges,
        ItemNumbers(rows, walk.tiles, walk.width, more, slots, rows.bit_length(), n, programs),
        FORM=ItemForm(more > 0, ITEM, MERGE, CLASSES, ITEMS), num_warps=4,
    )  # fmt: skip
    launch(
        place_kernel, (programs,), items, classes, of_classes, ordered, n, programs, ITEM=ITEM, CLASSES=CLASSES,
        BLOCK=ITEMS, PROGRAMS=PROGRAMS, num_warps=4,
    )  # fmt: skip
    return DeviceItems(ordered, merges, slots)


def longest_of(items: Tensor, each: int) -> Tensor:
    """(groups,) int32: what `Work.longest` says of items on a GPU."""
    groups = -(-len(items) // each)
    longest = items.new_empty(groups)
    launch(
        longest_kernel, (-(-groups // LISTS),), items, longest, len(items), groups, each, ITEM=ITEM, BLOCK=LISTS,
        num_warps=4,
    )  # fmt: skip
    return longest
