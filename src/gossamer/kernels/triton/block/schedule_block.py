"""Which programs run for a walk, and what they need to know of it: which lists exist, which are ranges, work items.

Computed once for each walk and kept as long as the walk lives. Nothing is read back from a device: what only the
values could tell is known for layouts that were built on the host, and assumed not to hold for the others. Of numpy's
arrays numpy's are made, of torch's tensors tensors where they are.
"""

from __future__ import annotations

from dataclasses import dataclass
from functools import partial
from threading import Lock
from typing import Any
from weakref import WeakKeyDictionary

from gossamer.kernels.arrays import Array, namespace, placed, words
from gossamer.kernels.triton.block import parameters
from gossamer.kernels.triton.block.parameters import Lists
from gossamer.kernels.triton.split_rows import SplitRows
from gossamer.layouts.block import BlockLayout
from gossamer.layouts.items import BEGIN, COUNT, END, FIRST, ITEM, LEAD, MERGE, SLOT
from gossamer.layouts.kept import keeps_all
from gossamer.layouts.walk import TileList, Walk
from gossamer.layouts.work_list import FEWEST_IN_FLOAT32, FEWEST_TILES, item_limit, most_listed, row_lengths, work_items
from gossamer.memo import LEAST, Memo
from gossamer.plan.problem import Problem


@dataclass(frozen=True)
class Items:
    """Work items of a walk on the device of the layout: see `gossamer.layouts.work_list.WorkItems`."""

    items: Array  # (n, ITEM) int32
    merges: Array  # (m, MERGE) int32
    slots: int


@dataclass(frozen=True)
class WalkFacts:
    """What is known of a walk without reading its values from a device."""

    arrays: tuple[Array, ...]  # as `Walk.arrays`, contiguous
    has: tuple[bool, ...]  # by KINDS: a list has any entry
    contiguous: tuple[bool, ...]  # by KINDS: every row's list is a range of tiles
    listed: int | None  # tiles in all lists; None when it would have to be read from a device
    longest: int  # tiles of the longest row
    unkept: bool  # whether a kernel may stream rows that no pair has: keys, or queries, or keys that it walks them for
    items: Memo[Items]  # by the limit of tiles in an item
    schedules: Memo[Schedule]  # by batch size, heads, processors, the limit of tiles in an item and the fewest


_facts: WeakKeyDictionary[Walk, WalkFacts] = WeakKeyDictionary()
_lock = Lock()


def host_walk(layout: BlockLayout, transposed: bool) -> Walk | None:
    """The numpy walk that a layout was copied from, or is; None where a device made it."""
    host = layout if layout.device is None else layout.host
    return None if host is None else host.columns if transposed else host.rows


def is_range(tiles: TileList) -> bool:
    """Whether each row's list of a numpy walk is consecutive: indices ascend, so the ends tell."""
    counts = tiles.counts.reshape(-1)
    some = counts > 0
    first = tiles.starts.reshape(-1)[some]
    last = first + counts[some] - 1
    return bool((tiles.indices[last] - tiles.indices[first] == counts[some] - 1).all())


def facts(layout: BlockLayout, transposed: bool) -> WalkFacts:
    """The facts of one direction of a layout."""
    walk = layout.columns if transposed else layout.rows
    found = _facts.get(walk)
    if found is not None:
        return found
    host = host_walk(layout, transposed)
    has = tuple(int(tiles.indices.shape[0]) > 0 for tiles in walk.lists.values())
    contiguous: tuple[bool, ...] = (False, False, False)
    listed, longest, unkept = None, 0, True
    if host is not None:
        rows, keys = keeps_all(layout)
        unkept = not (keys and (rows or not transposed))
        contiguous = tuple(is_range(tiles) for tiles in host.lists.values())
        lengths = row_lengths(host)
        listed, longest = int(lengths.sum()), int(lengths.max(initial=0))
    arrays = tuple(map(words, walk.arrays()))
    found = WalkFacts(arrays, has, contiguous, listed, longest, unkept, Memo(LEAST), Memo(LEAST))
    with _lock:
        return _facts.setdefault(walk, found)


def items(
    layout: BlockLayout, transposed: bool, copies: int, processors: int, limit: int | None = None,
    fewest: int = FEWEST_TILES,
) -> Items | None:  # fmt: skip
    """Longest-first work items, with rows split that would keep one processor busy for too long.

    None for most layouts that were made on a device: their programs then take one tile row each. `limit` replaces the
    automatic one of tiles in an item, which has at least the `fewest`.
    """
    known, host = facts(layout, transposed), host_walk(layout, transposed)
    if known.listed is None or host is None:
        return None if transposed else _by_capacity(layout.rows, copies, processors, limit, fewest)
    most = item_limit(known.listed, known.longest, copies, processors, limit, fewest)

    def make() -> Items:
        made = work_items(host, most)
        listed, merges = (placed(words(x), layout.device) for x in (made.items, made.merges))
        return Items(listed, merges, made.slots)

    return known.items.get_or_make(most, make)


def _by_capacity(walk: Walk, copies: int, processors: int, limit: int | None, fewest: int) -> Items | None:
    """Items of the rows of one tile, as a step of decoding has them, whose lists only the device knows.

    Each has as many equal parts as the longest list that there may be: a short row has short parts, and empty ones.
    """
    Bl, Hl = walk.lead
    rows, most = Bl * Hl, most_listed(walk)
    parts = -(-most // item_limit(rows * most, most, copies, processors, limit, fewest)) if most else 1
    if walk.tiles > 1 or parts == 1:
        return None
    torch = namespace(walk.lo)
    lengths = torch.stack([tiles.counts.reshape(-1) for tiles in walk.lists.values()]).sum(0)
    at = torch.arange(rows * parts, device=lengths.device)
    row, part = at // parts, at % parts
    fields = {LEAD: row, BEGIN: part * lengths[row] // parts, END: (part + 1) * lengths[row] // parts, SLOT: at}
    merged = {LEAD: row[::parts], FIRST: at[::parts], COUNT: torch.full_like(row[::parts], parts)}
    items, merges = (
        torch.stack([words.get(field, torch.zeros_like(words[LEAD])) for field in range(width)], 1).int()
        for words, width in ((fields, ITEM), (merged, MERGE))
    )
    return Items(items, merges, rows * parts)


@dataclass(frozen=True)
class Schedule:
    """Which programs run for one walk: the grid order of `block.lists.decode`, the work items, and where lists are."""

    size: int  # items, or tile rows without them, of one broadcast copy
    split_rows: SplitRows
    lists: Lists  # of arrays of the layout
    constants: dict[str, Any]


def schedule_of(p: Problem, layout: BlockLayout, transposed: bool, limit: int | None) -> Schedule:
    """Of one direction of a layout, made once; `limit` of tiles in a work item replaces the automatic one.

    Programs run over H for the rows, and over G for the columns of a layout.
    """
    known = facts(layout, transposed)
    fewest = FEWEST_IN_FLOAT32 if p.dtype == "float32" else FEWEST_TILES
    key = (p.B, p.H, p.G, p.processors, limit, fewest)
    # The first that is made is kept: a launch may hold its arrays.
    return known.schedules.get_or_make(key, partial(_make_schedule, p, layout, transposed, limit, fewest))


def _make_schedule(p: Problem, layout: BlockLayout, transposed: bool, limit: int | None, fewest: int) -> Schedule:
    walk: Walk = layout.columns if transposed else layout.rows
    known = facts(layout, transposed)
    Bl, Hl = walk.lead
    # dK and dV of a per-head layout under grouped queries: the program loops over the heads of its group, whose
    # lists differ, so the key heads come from the grid and no item can describe the row.
    grouped_lists = transposed and Hl > 1 and p.H > p.G
    b_from_grid, h_from_grid = Bl == 1, Hl == 1 or grouped_lists
    copies = (p.B if b_from_grid else 1) * ((p.G if transposed else p.H) if h_from_grid else 1)
    work = None if grouped_lists else items(layout, transposed, copies, p.processors, limit, fewest)
    lead_heads = 1 if h_from_grid else Hl
    size = work.items.shape[0] if work is not None else (1 if b_from_grid else Bl) * lead_heads * walk.tiles
    *tiles, lo, hi, pool_index, pool = known.arrays
    # A pointer that no program reads still needs an array.
    listed, merges, slots = (lo, lo, 0) if work is None else (work.items, work.merges, work.slots)
    modes = tuple(parameters.TileList(*tiles[at : at + 3]) for at in range(0, len(tiles), 3))
    lists = Lists(listed, modes, lo, hi, pool_index, pool)
    constants = {
        "n_items": size, "n_tiles": walk.tiles, "list_b": Hl if Bl > 1 else 0, "list_h": 1 if Hl > 1 else 0,
        "TILE_COLUMNS": walk.block_columns, "HAS_ITEMS": work is not None,
        "CLEAR": known.unkept, "HAS": known.has, "CONTIGUOUS": known.contiguous,
    }  # fmt: skip
    split_rows = SplitRows(merges, slots, copies, walk.block_rows, lead_heads, b_from_grid, h_from_grid)
    return Schedule(size, split_rows, lists, constants)
