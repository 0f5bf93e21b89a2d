"""Which programs run for a walk, and what they need to know of it: which lists exist, which are ranges, work items.

Computed once for each walk and kept as long as the walk lives. Nothing is read back from a device: what only the
values could tell is known for layouts that were built on the host, and assumed not to hold for the others.
"""

from __future__ import annotations

from dataclasses import dataclass, field
from threading import Lock
from typing import Any
from weakref import WeakKeyDictionary

import numpy as np
import torch
from torch import Tensor

from gossamer.kernels.devices import processors
from gossamer.kernels.relaunch import Known
from gossamer.kernels.triton.merge import CutRows
from gossamer.layouts.block import BlockLayout
from gossamer.layouts.schedule import row_lengths, split_limit, work_items
from gossamer.layouts.walk import KINDS, TileList, Walk


@dataclass(frozen=True)
class Items:
    """Work items of a walk on the device of the layout: see `gossamer.layouts.schedule.WorkItems`."""

    items: Tensor  # (n, 6) int32
    merges: Tensor  # (m, 4) int32
    slots: int


@dataclass(frozen=True)
class WalkFacts:
    """What is known of a walk without reading its values from a device."""

    arrays: tuple[Tensor, ...]  # as `Walk.arrays`, contiguous
    has: tuple[bool, ...]  # by KINDS: a list has any entry
    contiguous: tuple[bool, ...]  # by KINDS: every row's list is a range of tiles
    listed: int | None  # tiles in all lists; None when it would have to be read from a device
    longest: int  # tiles of the longest row
    items: dict[int, Items]  # by the limit of tiles in an item
    plans: dict[Any, Schedule]  # by batch size, heads and split


_facts: WeakKeyDictionary[Walk, WalkFacts] = WeakKeyDictionary()
_lock = Lock()


def host_walk(layout: BlockLayout, transposed: bool) -> Walk | None:
    """The numpy walk that a layout on a device was copied from, if there is one."""
    if layout.host is None:
        return None
    return layout.host.columns if transposed else layout.host.rows


def is_range(tiles: TileList) -> bool:
    """Whether each row's list of a numpy walk is consecutive: indices ascend, so the ends tell."""
    counts = tiles.counts.reshape(-1)
    some = counts > 0
    first = tiles.starts.reshape(-1)[some]
    last = first + counts[some] - 1
    return bool((tiles.indices[last] - tiles.indices[first] == counts[some] - 1).all())


def facts(layout: BlockLayout, transposed: bool) -> WalkFacts:
    """The facts of one direction of a layout of torch tensors."""
    walk = layout.columns if transposed else layout.rows
    found = _facts.get(walk)
    if found is not None:
        return found
    host = host_walk(layout, transposed)
    has = tuple(int(tiles.indices.shape[0]) > 0 for tiles in walk.lists.values())
    contiguous: tuple[bool, ...] = (False, False, False)
    listed, longest = None, 0
    if host is not None:
        contiguous = tuple(is_range(tiles) for tiles in host.lists.values())
        lengths = row_lengths(host)
        listed, longest = int(lengths.sum()), int(lengths.max(initial=0))
    arrays = tuple(a.contiguous() for a in walk.arrays())
    found = WalkFacts(arrays, has, contiguous, listed, longest, {}, {})
    with _lock:
        return _facts.setdefault(walk, found)


def items(
    layout: BlockLayout, transposed: bool, copies: int, processors: int, split: int | None = None
) -> Items | None:
    """Longest-first work items, with rows split that would keep one processor busy for too long.

    None for a layout that was made on a device: its programs then take one tile row each. `split` replaces the
    automatic limit of tiles in an item.
    """
    known = facts(layout, transposed)
    if known.listed is None:
        return None
    limit = split_limit(known.listed, known.longest, copies, processors, split)
    found = known.items.get(limit)
    if found is None:
        host = host_walk(layout, transposed)
        assert host is not None
        made = work_items(host, limit)
        cut, merges = (torch.from_numpy(np.ascontiguousarray(x)) for x in (made.items, made.merges))
        device = known.arrays[0].device
        found = known.items.setdefault(limit, Items(cut.to(device), merges.to(device), made.slots))
    return found


@dataclass(frozen=True)
class Schedule:
    """Which programs run for one walk: the grid order of `block.lists.decode`, the work items, and where lists are."""

    size: int  # items, or tile rows without them, of one broadcast copy
    cut: CutRows
    pointers: dict[str, Tensor]
    constants: dict[str, Any]
    list_b: int
    list_h: int
    known: Known = field(default_factory=dict)  # launches of before


def schedule_of(layout: BlockLayout, transposed: bool, B: int, heads: int, group: int, split: int | None) -> Schedule:
    """Of one direction of a layout, made once.

    Args:
        heads: that programs run over: H for the rows, G for the columns of a layout.
        split: caps the tiles of a work item instead of the automatic limit.
    """
    known = facts(layout, transposed)
    key = (B, heads, group, split)
    found = known.plans.get(key)
    if found is None:
        # The first is kept: a thread may have bound a call to its addresses.
        found = known.plans.setdefault(key, _make_schedule(layout, transposed, B, heads, group, split))
    return found


def _make_schedule(
    layout: BlockLayout, transposed: bool, B: int, heads: int, group: int, split: int | None
) -> Schedule:
    walk: Walk = layout.columns if transposed else layout.rows
    known = facts(layout, transposed)
    Bl, Hl = walk.lead
    # dK and dV of a per-head layout under grouped queries: the program loops over the heads of its group, whose
    # lists differ, so the key heads come from the grid and no item can describe the row.
    grouped_lists = transposed and Hl > 1 and group > 1
    b_from_grid, h_from_grid = Bl == 1, Hl == 1 or grouped_lists
    copies = (B if b_from_grid else 1) * (heads if h_from_grid else 1)
    work = None
    if not grouped_lists:
        work = items(layout, transposed, copies, processors(known.arrays[0].device), split)
    lead_heads = 1 if h_from_grid else Hl
    size = work.items.shape[0] if work is not None else (1 if b_from_grid else Bl) * lead_heads * walk.tiles
    names = ("starts", "counts", "indices")
    pointers = dict(zip([f"{kind}_{name}" for kind in KINDS for name in names], known.arrays[:9], strict=True))
    pointers |= dict(zip(("lo", "hi", "pool_index", "pool"), known.arrays[9:], strict=True))
    slots, unused = 0, known.arrays[0]  # an unused pointer still needs a tensor
    pointers["items"], merges = unused, unused
    if work is not None:
        pointers["items"], merges, slots = work.items, work.merges, work.slots
    constants = {
        "TILE_ROWS": walk.block_rows,
        "TILE_COLUMNS": walk.block_columns,
        "GROUP": group,
        "B_FROM_GRID": b_from_grid,
        "H_FROM_GRID": h_from_grid,
        "HAS_ITEMS": work is not None,
        "HAS_SLOTS": slots > 0,
    }
    for kind, has, contiguous in zip(KINDS, known.has, known.contiguous, strict=True):
        constants[f"HAS_{kind.upper()}"] = has
        constants[f"{kind.upper()}_CONTIGUOUS"] = contiguous
    cut = CutRows(merges, slots, copies, walk.block_rows, lead_heads, b_from_grid, h_from_grid)
    return Schedule(size, cut, pointers, constants, Hl if Bl > 1 else 0, 1 if Hl > 1 else 0)
