"""Which programs run for a gather layout: the items of a walk, longest first, and what launches have in common."""

from __future__ import annotations

from dataclasses import dataclass
from functools import partial
from typing import Any

import numpy as np

from gossamer.kernels.arrays import Array, namespace, placed, words, zeros
from gossamer.kernels.launch import BYTES
from gossamer.kernels.triton.config import Direction
from gossamer.kernels.triton.gather.config import GroupConfig, RowConfig, group_config, piece, row_config
from gossamer.kernels.triton.gather.parameters import RowLists, TileLists
from gossamer.kernels.triton.split_rows import SplitRows
from gossamer.layouts.gather import GatherLayout, GatherWalk, item_limit
from gossamer.layouts.gather_items import gather_items
from gossamer.layouts.items import BEGIN, COUNT, END, FIRST, ITEM, LEAD, MERGE, PART, SLOT, TILE
from gossamer.memo import Memos
from gossamer.plan.problem import Problem

# Programs in the second and in the third dimension of a grid.
MOST_OF_A_DIMENSION = 65535


@dataclass(frozen=True)
class Work:
    """The items of a walk, where it is: (n, ITEM) int32, longest first, with the fields of `layouts.items`.

    begin and end count columns from the start of `indices`, in units of the walk's width.
    """

    items: Array
    merges: Array  # (m, MERGE) int32
    slots: int
    known: bool = False  # to the host

    def longest(self, each: int) -> Array:
        """(groups,) int32: units of the longest of each `each` items; negative where one is a part of a cut list.

        Of a layout of the host by way of that: what is copied from there is complete for every stream.
        """
        device = None if isinstance(self.items, np.ndarray) else self.items.device
        if not self.known and device is not None and device.type == "cuda":
            from gossamer.kernels.triton.gather.device_items import longest_of

            return longest_of(self.items, each)
        items, groups = self.items.cpu() if self.known and device else self.items, -(-len(self.items) // each)
        length, slot = zeros((groups * each,), items), zeros((groups * each,), items) - 1
        length[: len(items)] = items[:, END] - items[:, BEGIN]
        slot[: len(items)] = items[:, SLOT]
        xp = namespace(items)
        longest, slots = (xp.amax(x.reshape(groups, each), 1) for x in (length, slot))
        return placed(xp.where(slots < 0, longest, -longest), device)


_work: Memos[Work] = Memos()  # of walks


def work_of(p: Problem, layout: GatherLayout, transposed: bool, heads: int, copies: int, limit: int | None) -> Work:
    """The items of one direction, made once; nothing of a layout that was made on a device is read back.

    Args:
        heads: of the items, where lists are not shared by all of them.
    """
    walk = layout.columns if transposed else layout.rows
    _, Hl = walk.lead
    times = 1 if Hl == 1 else heads // Hl
    # Of padded lists the room counts.
    steps = int(walk.indices.shape[0]) // walk.width * times
    if limit is None:
        groups = len(walk.counts.reshape(-1)) * times
        limit = item_limit(groups, copies, steps, walk.width, p.processors)
    most = limit

    def make() -> Work:
        host = layout if layout.device is None else layout.host
        if host is not None:
            return _make_work((host.columns if transposed else host.rows).for_heads(heads), most, layout.device)
        assert layout.apart, "lists that share entries may hold more than there is room for"
        lists = walk.for_heads(heads)
        if layout.device.type != "cuda":
            return _work_by_capacity(lists, most, steps)
        from gossamer.kernels.triton.gather.device_items import device_items

        return Work(*device_items(lists, most, steps // most))

    return _work.of(walk).get_or_make((most, heads), make)


def _work_by_capacity(walk: GatherWalk, limit: int, steps: int) -> Work:
    """The items of lists whose lengths only the device knows, of so many steps at most together.

    A list of more than `limit` steps is cut in as few equal parts as are no longer, so that all lists together have
    steps / limit parts more than there are lists. Items behind the last one compute nothing, into a slot of no row.
    """
    torch = namespace(walk.counts)
    lengths = -(-walk.counts.reshape(-1).long() // walk.width)
    first = walk.starts.reshape(-1).long() // walk.width
    rows, more = len(lengths), steps // limit
    pieces = (-(-lengths // limit)).clamp(min=1)
    ends = pieces.cumsum(0)
    at = torch.arange(rows + more, device=lengths.device)
    of = torch.searchsorted(ends, at, right=True)
    some, of = of < rows, of.clamp(max=rows - 1)
    parts, piece = pieces[of], at - (ends - pieces)[of]
    begin, end = (x * lengths[of] // parts * some for x in (piece, piece + 1))
    if not more:
        slot, slots = torch.full_like(at, -1), 0
    else:
        cut, slots = pieces > 1, 2 * more + 1
        behind = (pieces * cut).cumsum(0)
        slot = torch.where(cut[of], (behind - pieces)[of] + piece, -1)
        slot = torch.where(some, slot, slots - 1)
    length = end - begin
    # Lengths that differ little stay in the order of rows, whose columns are likely to be near each other.
    near = -(-length // 4)
    near = torch.where(near <= 16, near, 16 + near.clamp(min=1).log2().ceil().long())
    lead, tile = of // walk.tiles * some, of % walk.tiles * some
    fields = {LEAD: lead, TILE: tile, BEGIN: first[of] + begin, END: first[of] + end, SLOT: slot, PART: begin > 0}
    items = torch.stack([fields[field] for field in range(ITEM)], 1).int()
    items = items[torch.sort(near, descending=True, stable=True).indices]
    if not more:
        return Work(items, items.new_zeros((0, MERGE)), 0)
    # Of the cut rows in order; behind the last one, tiles that there are not, for which nothing is done.
    of = torch.searchsorted(cut.long().cumsum(0), torch.arange(1, more + 1, device=lengths.device))
    some, of = of < rows, of.clamp(max=rows - 1)
    tile = torch.where(some, of % walk.tiles, walk.tiles)
    fields = {LEAD: of // walk.tiles, TILE: tile, FIRST: (behind - pieces)[of], COUNT: pieces[of] * some}
    return Work(items, torch.stack([fields[field] for field in range(MERGE)], 1).int(), slots)


def _make_work(walk: GatherWalk, limit: int, device: Any) -> Work:
    made = gather_items(walk, limit)
    items, merges = (placed(words(x), device) for x in (made.items, made.merges))
    return Work(items, merges, made.slots, known=True)


@dataclass(frozen=True)
class Schedule:
    """Which programs run for one walk. The walk is not held: it would never be forgotten."""

    grid: tuple[int, ...]  # of all copies of the walk
    split_rows: SplitRows
    lists: RowLists | TileLists  # of arrays of the layout
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
    members = p.H // p.G if transposed and Hl in (1, p.G) else 1
    heads = p.H // members
    over_heads, over_batch = heads if Hl == 1 else 1, p.B if Bl == 1 else 1
    copies = over_heads * over_batch
    work = work_of(p, layout, transposed, heads, copies, limit)
    programs, bits = int(work.items.shape[0]), 8 * BYTES[p.dtype]
    constants: dict[str, Any] = {"n_items": programs, "heads": heads, "MEMBERS": members}
    if walk.block_rows == 1:
        rows = config if isinstance(config, RowConfig) else row_config(direction, bits, p.D, p.E)
        lists: RowLists | TileLists = RowLists(work.items, work.longest(rows.items), words(walk.indices))
        programs = -(-programs // rows.items)
        constants |= {"RP": rows.items, "C": rows.columns, "SD": piece(p.D, bits), "SE": piece(p.E, bits)}
        options = {"num_warps": rows.warps, "num_stages": 1}
        if rows.registers is not None:
            options["maxnreg"] = rows.registers
    else:
        groups = config if isinstance(config, GroupConfig) else group_config(direction, bits, p.D, p.E, walk.block_rows)
        lists = TileLists(work.items, words(walk.indices), words(walk.bits))
        constants |= {"R": walk.block_rows, "C": walk.width, "PRECISION": groups.precision}
        options = {"num_warps": groups.warps, "num_stages": groups.stages}
    flat = walk.block_rows > 1 or max(over_heads, over_batch) > MOST_OF_A_DIMENSION
    constants |= {"n_programs": programs, "FLAT": flat}
    grid = (programs * copies,) if flat else (programs, over_heads, over_batch)
    lead_heads = 1 if Hl == 1 else heads
    split_rows = SplitRows(work.merges, work.slots, copies, walk.block_rows, lead_heads, Bl == 1, Hl == 1)
    return Schedule(grid, split_rows, lists, constants, options)
