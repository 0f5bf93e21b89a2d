"""Items of layouts on a GPU by kernels: those of `rows.work` and `columns.column_work`, in the same order."""

from __future__ import annotations

from typing import Any, NamedTuple

import torch
from torch import Tensor

from gossamer.cute.column_items import SEGMENT
from gossamer.cute.merges import MERGE
from gossamer.cute.row_items import ITEM
from gossamer.kernels.hopper.schedule.cuts import ROUNDS, SLACK
from gossamer.kernels.hopper.schedule.item_kernels import (
    HALVINGS,
    MIDDLE,
    SIZES,
    Cut,
    ItemForm,
    ItemNumbers,
    LengthForm,
    LengthNumbers,
    few_kernel,
    length_kernel,
    many_kernel,
)
from gossamer.kernels.hopper.schedule.words import entries
from gossamer.kernels.launch_now import launch
from gossamer.kernels.relaunch import filled, power
from gossamer.layouts.gather import GatherWalk
from gossamer.layouts.walk import Walk
from gossamer.layouts.work_list import most_listed

FEW_BINS, MOST_BINS = 128, 2048  # lengths that are counted at a time
LENGTHS = 1024  # items whose lengths are counted at a time
FEW_LISTS, MOST_LISTS = 8, 32  # that are read at a time
OWN, OTHERS = 64, 128  # items of a program, and those that they are compared with at a time


class Made(NamedTuple):
    """Items as `rows.Work` has them."""

    items: Tensor
    merges: Tensor
    slots: int
    segments: Tensor | None


class Kinds(NamedTuple):
    """The lists of a walk as the kernels take them, by kind."""

    starts: tuple[Tensor, ...]
    counts: tuple[Tensor, ...]
    bases: tuple[int, ...]
    some: tuple[bool, ...]  # whether there may be any
    width: int  # entries of a step
    most: int  # tiles or steps of a row

    @property
    def constants(self) -> dict[str, Any]:
        full, interval, bits = self.some
        return {"HAS_FULL": full, "HAS_INTERVAL": interval, "HAS_BITS": bits, "WIDTH": self.width}


def kinds_of(walk: Walk | GatherWalk) -> Kinds:
    if isinstance(walk, GatherWalk):
        starts, counts = walk.starts.contiguous(), walk.counts.contiguous()
        most = -(-min(walk.columns, len(walk.indices)) // walk.width)
        return Kinds((starts,) * 3, (counts,) * 3, (0,) * 3, (False, False, True), walk.width, most)
    lists = walk.lists.values()
    return Kinds(
        tuple(tiles.starts.contiguous() for tiles in lists), tuple(tiles.counts.contiguous() for tiles in lists),
        entries(walk).bases, tuple(len(tiles.indices) > 0 for tiles in lists), 1, most_listed(walk),
    )  # fmt: skip


def fused_items(
    walk: Walk | GatherWalk, shape: tuple[int, int, int], parts: int, copies: int, heads: int, blocks: int,
    ratio: int = 0,
) -> Made:  # fmt: skip
    """The items of all heads in the order in which blocks draw them.

    Args:
        shape: batch elements, heads and tiles of all rows; parts: of each row.
        copies, heads, blocks: see `rows.work`.
        ratio: of items of columns, the query heads of a key head; 0 for items of rows.
    """
    (batches, groups, tiles), (_, Hl), kinds = shape, walk.lead, kinds_of(walk)
    lists, times = batches * groups, max(1, ratio)
    # The lists of the heads of a group of rows: their own, or one that all share.
    lead_b, lead_g, lead_j = (Hl, times, 1) if Hl > 1 else (1, 0, 0)
    n = lists * tiles * parts
    new: dict[str, Any] = {"dtype": torch.int32, "device": walk.device}
    items = torch.empty((n * copies, ITEM), **new)
    segments = torch.empty((lists * tiles * times, SEGMENT), **new) if ratio else None
    slots = n if parts > 1 else 0
    merges = torch.empty((copies * lists * tiles if slots else 1, MERGE), **new)
    written = items, items if segments is None else segments, merges, *kinds.counts, *kinds.starts
    cut = Cut(parts, times)
    _, base_1, base_2 = kinds.bases
    values = {
        "T": tiles, "groups": groups, "lead_b": lead_b, "lead_g": lead_g, "lead_j": lead_j, "lists": lists, "bins": 0,
        "blocks": blocks, "copies": copies, "heads": heads, "of_batch": groups * heads, "chunks": 0, "base_1": base_1,
        "base_2": base_2, "n_items": n, "SIZES": SIZES, "MIDDLE": MIDDLE, "HALVINGS": HALVINGS, "LISTS": 0,
        "BY_COPY": n * copies <= blocks, "OWN": OWN, "OTHERS": OTHERS, **kinds.constants, "CUT": parts > 1,
        "COLUMNS": ratio > 0, "ITEM": ITEM, "SEGMENT": SEGMENT, "MERGE": MERGE,
    }  # fmt: skip
    if n * copies <= ROUNDS * blocks:
        numbers, form = filled(ItemNumbers, values), filled(ItemForm, values)
        launch(few_kernel, (-(-n * copies // OWN),), *written, numbers, cut, FORM=form, num_warps=4)
        return Made(items, merges, slots * copies, segments)
    bins = times * kinds.most + 1
    bins_at_once = power(bins, FEW_BINS, MOST_BINS)
    lengths, reached = torch.empty(n, **new), torch.empty((lists, bins), **new)
    totals = torch.empty((lists, 2), dtype=torch.int64, device=walk.device)
    chunks = -(-tiles * parts // OWN)
    values |= {
        "bins": bins, "chunks": chunks, "LISTS": power(lists, FEW_LISTS, MOST_LISTS),
        "ITEMS": power(tiles * parts, FEW_BINS, LENGTHS), "BINS": bins_at_once,
    }  # fmt: skip
    launch(
        length_kernel, (lists, -(-bins // bins_at_once)), *kinds.counts, lengths, reached, totals,
        filled(LengthNumbers, values), cut, FORM=filled(LengthForm, values), num_warps=8,
    )  # fmt: skip
    launch(
        many_kernel, (lists * copies * chunks,), *written, lengths, reached, totals,
        filled(ItemNumbers, values), cut, SLACK, FORM=filled(ItemForm, values), num_warps=4,
    )  # fmt: skip
    return Made(items, merges, slots * copies, segments)
