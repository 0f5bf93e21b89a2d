"""Which programs run for a gather layout: the items of a walk, longest first, and what launches have in common."""

from __future__ import annotations

from dataclasses import dataclass
from functools import partial
from typing import Any

import numpy as np
import torch
from torch import Tensor

from gossamer.kernels.launch import BYTES
from gossamer.kernels.triton.config import Direction
from gossamer.kernels.triton.gather.config import GroupConfig, RowConfig, group_config, piece, row_config
from gossamer.kernels.triton.split_rows import SplitRows
from gossamer.layouts.gather import GatherLayout, GatherWalk, item_limit
from gossamer.layouts.items import BEGIN, COUNT, END, ITEM, LEAD, PART, SLOT, TILE
from gossamer.layouts.work_list import fill, merges_of, split_rows
from gossamer.memo import Memos
from gossamer.plan.problem import Problem


@dataclass(frozen=True)
class Work:
    """The items of a walk, on its device: (n, ITEM) int32, longest first, with the fields of `layouts.items`.

    begin and end count columns from the start of `indices`, in units of the walk's width.
    """

    items: Tensor
    merges: Tensor  # (m, MERGE) int32
    slots: int

    def longest(self, each: int) -> Tensor:
        """(groups,) int32: units of the longest of each `each` items; negative where one is a part of a cut list.

        By way of the host: what is copied from there is complete for every stream.
        """
        items, groups = self.items.cpu(), -(-len(self.items) // each)
        length, slot = items.new_zeros(groups * each), items.new_full((groups * each,), -1)
        length[: len(items)] = items[:, END] - items[:, BEGIN]
        slot[: len(items)] = items[:, SLOT]
        longest = length.view(groups, each).amax(1)
        return torch.where(slot.view(groups, each).amax(1) < 0, longest, -longest).to(self.items.device)


_work: Memos[Work] = Memos()  # of walks


def work_of(p: Problem, layout: GatherLayout, transposed: bool, copies: int, limit: int | None) -> Work:
    """The items of one direction, made once; a layout that was made on a device is read back for it."""
    walk = layout.columns if transposed else layout.rows
    known = _work.of(walk)
    if limit is None:
        groups, steps = len(walk.counts.reshape(-1)), int(walk.indices.shape[0]) // walk.width
        limit = item_limit(groups, copies, steps, walk.width, p.processors)
    most = limit

    def make() -> Work:
        source = (layout.host.columns if transposed else layout.host.rows) if layout.host is not None else walk
        return _make_work(source.on_host(), most, walk.indices.device)

    return known.get_or_make(most, make)


def _make_work(walk: GatherWalk, limit: int, device: torch.device) -> Work:
    lengths = -(-walk.counts.astype(np.int64) // walk.width).reshape(-1)
    of, begin, end, slot, pieces = split_rows(lengths, limit)
    start = walk.starts.astype(np.int64).reshape(-1)[of] // walk.width
    length = end - begin
    # Lengths that differ little stay in the order of rows, whose columns are likely to be near each other.
    steps = -(-length // 4)
    near = np.where(steps <= 16, steps, 16 + np.ceil(np.log2(np.maximum(steps, 1))))
    lead, tile = np.divmod(of, walk.tiles)
    fields = {LEAD: lead, TILE: tile, BEGIN: start + begin, END: start + end, SLOT: slot, PART: begin > 0}
    items = fill(len(of), ITEM, fields)[np.lexsort((begin, of, -near))]
    merges = merges_of(pieces, walk.tiles)

    def move(array: np.ndarray) -> Tensor:
        return torch.from_numpy(np.ascontiguousarray(array)).to(device)

    return Work(move(items), move(merges), int(merges[:, COUNT].sum()))


@dataclass(frozen=True)
class Schedule:
    """Which programs run for one walk. The walk is not held: it would never be forgotten."""

    programs: int  # of one copy of the walk
    split_rows: SplitRows
    arrays: dict[str, Any]  # of the layout, by the kernels' names
    constants: dict[str, Any]
    options: dict[str, Any]  # of the launch


_schedules: Memos[Schedule] = Memos()  # of walks


def schedule_of(
    p: Problem, layout: GatherLayout, direction: Direction, config: RowConfig | GroupConfig | None, limit: int | None
) -> Schedule:
    """The programs of one kernel, worked out once for a walk and a kind of problem."""
    known = _schedules.of(layout.columns if direction == "dkdv" else layout.rows)
    key = direction, p.B, p.H, p.G, p.D, p.E, p.dtype, p.processors, config, limit
    # The first that is made is kept: a launch may hold its arrays.
    return known.get_or_make(key, partial(_make_schedule, p, layout, direction, config, limit))


def _make_schedule(
    p: Problem, layout: GatherLayout, direction: Direction, config: RowConfig | GroupConfig | None, limit: int | None
) -> Schedule:
    """Which items, how many copies of them, and with which sizes."""
    transposed = direction == "dkdv"
    walk = layout.columns if transposed else layout.rows
    Bl, Hl = walk.lead
    # Heads that share a key head but not their lists get gradients of their own, which are summed afterwards.
    members = p.H // p.G if transposed and Hl == 1 else 1
    heads = p.H // members
    copies = (p.B if Bl == 1 else 1) * (heads if Hl == 1 else 1)
    work = work_of(p, layout, transposed, copies, limit)
    programs, bits = int(work.items.shape[0]), 8 * BYTES[p.dtype]
    arrays: dict[str, Any] = {"items": work.items, "indices": walk.indices}
    constants: dict[str, Any] = {"n_items": programs, "heads": heads, "MEMBERS": members}
    if walk.block_rows == 1:
        rows = config if isinstance(config, RowConfig) else row_config(direction, bits, p.D, p.E)
        arrays["longest"] = work.longest(rows.items)
        programs = -(-programs // rows.items)
        constants |= {
            "RP": rows.items, "C": rows.columns, "SD": piece(p.D, bits), "SE": piece(p.E, bits), "n_groups": programs,
        }  # fmt: skip
        options = {"num_warps": rows.warps, "num_stages": 1}
        if rows.registers is not None:
            options["maxnreg"] = rows.registers
    else:
        groups = config if isinstance(config, GroupConfig) else group_config(direction, bits, p.D, p.E, walk.block_rows)
        arrays["bits"] = walk.bits
        constants |= {"R": walk.block_rows, "C": walk.width, "PRECISION": groups.precision}
        options = {"num_warps": groups.warps, "num_stages": groups.stages}
    split_rows = SplitRows(work.merges, work.slots, copies, walk.block_rows, Hl, Bl == 1, Hl == 1)
    return Schedule(programs, split_rows, arrays, constants, options)
