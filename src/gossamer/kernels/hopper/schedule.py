"""The work of one launch: item descriptions and lists that the kernel reads, made once for a layout and kept.

An item is 16 words: batch and head of its list (0 where broadcast), tile row, slot (-1: not split), then for each of
full, interval and bits the first entry and the count, the list's row in lo and hi, the copy (the kernel fills it in)
and 1. Nothing is read back from a device: a layout that was made there gets its items there, longest first, unsplit.
"""

from __future__ import annotations

from dataclasses import dataclass
from threading import Lock
from typing import Any
from weakref import WeakKeyDictionary

import numpy as np
import torch
from torch import Tensor

from gossamer.layouts.block import BlockLayout, Walk
from gossamer.layouts.schedule import row_lengths, split_limit, work_items

ITEM = 16
MERGE = 8
KINDS = ("full", "interval", "bits")
START = 3  # what an item costs beside its tiles, in tiles
PART = 0.25  # what merging a part costs, in tiles
FEWEST = 4  # tiles of a part of one of few rows


@dataclass(frozen=True)
class Lists:
    """A walk's arrays as the kernel reads them."""

    lists: Tensor  # (2, n) int32: tile column; pool entry
    lo: Tensor  # (Bl * Hl, Q) int32
    hi: Tensor
    pool: Tensor  # (P * block_q, block_kv / 32) int32
    listed: int  # tiles in all lists; -1 when only the device knows
    longest: int


@dataclass(frozen=True)
class Work:
    """The items of a launch."""

    items: Tensor  # (n, ITEM) int32
    merges: Tensor  # (m, MERGE) int32: batch, head, tile row, first slot, slots
    slots: int


_lists: WeakKeyDictionary[Walk, Lists] = WeakKeyDictionary()
_work: WeakKeyDictionary[Walk, dict[int, Work]] = WeakKeyDictionary()
_lock = Lock()


def lists(layout: BlockLayout, transposed: bool = False) -> Lists:
    """The lists of a layout of torch tensors: of its rows, or of its columns."""
    walk = layout.columns if transposed else layout.rows
    found = _lists.get(walk)
    if found is None:
        known = walk
        if layout.host is not None:  # what is copied from there is complete for every stream
            known = layout.host.columns if transposed else layout.host.rows
        some = [torch.as_tensor(getattr(known, kind).indices) for kind in KINDS]
        entries = torch.zeros((2, max(1, sum(len(x) for x in some))), dtype=torch.int32, device=some[0].device)
        listed = torch.cat(some)
        entries[0, : len(listed)] = listed
        entries[1, len(some[0]) + len(some[1]) : len(listed)] = torch.as_tensor(known.pool_index)
        counted, longest = -1, 0
        if layout.host is not None:
            lengths = row_lengths(known)
            counted, longest = int(lengths.sum()), int(lengths.max(initial=0))
        lo, hi = _rows(walk.lo, walk.rows), _rows(walk.hi, walk.rows)
        found = Lists(entries.to(walk.lo.device), lo, hi, _rows(walk.pool, walk.block_columns // 32), counted, longest)
        with _lock:
            found = _lists.setdefault(walk, found)
    return found


def work(layout: BlockLayout, copies: int, processors: int, split: int | None = None) -> Work:
    """The items of a layout that `copies` heads share. `split` replaces the automatic limit of tiles in an item."""
    known = lists(layout)
    limit = 0
    if known.listed >= 0:
        Bl, Hl = layout.lead
        rows = Bl * Hl * layout.rows.tiles * copies
        if split is None and 0 < rows <= processors:
            split = whole_rounds(rows, known.longest, processors)
        limit = split_limit(known.listed, known.longest, copies, processors, split)
    kept = _work.get(layout.rows)
    found = kept.get(limit) if kept is not None else None
    if found is None:
        found = _host_work(layout, limit) if limit else _device_work(layout.rows)
        with _lock:
            found = _work.setdefault(layout.rows, {}).setdefault(limit, found)
    return found


def sharing(heads: int, batch: int, walk: Walk) -> tuple[int, int]:
    """How many heads, and how many heads of all batch elements, share a list of a walk."""
    Bl, Hl = walk.lead
    shared = heads if Hl == 1 else 1
    return shared, shared * (batch if Bl == 1 else 1)


def whole_rounds(rows: int, longest: int, processors: int) -> int:
    """The most tiles in an item, for no more rows than processors: whole rounds of items, and few parts to merge."""

    def time(parts: int) -> float:
        return -(-rows * parts // processors) * (-(-longest // parts) + START) + PART * parts

    return -(-longest // min(range(1, max(1, longest // FEWEST) + 1), key=time))


def _rows(x: Tensor, width: int) -> Tensor:
    """The tensor as rows of `width`, one row where it is empty: a kernel argument needs an address."""
    return x.reshape(-1, width) if x.numel() else x.new_zeros((1, max(1, width)))


def _host_work(layout: BlockLayout, limit: int) -> Work:
    host = layout.host
    assert host is not None
    walk = host.rows
    made = work_items(walk, limit)
    device = layout.rows.lo.device
    heads = walk.lead[1]
    lead, tile, begin, end, slot = (made.items[:, i].astype(np.int64) for i in range(5))
    columns: list[Any] = [lead // heads, lead % heads, tile, slot]
    base = before = np.int64(0)
    for kind in KINDS:
        tiles = getattr(walk, kind)
        counts = tiles.counts.reshape(-1, walk.tiles)[lead, tile]
        starts = tiles.starts.reshape(-1, walk.tiles)[lead, tile]
        from_, to = np.clip(begin - before, 0, counts), np.clip(end - before, 0, counts)
        columns += [base + starts + from_, to - from_]
        before, base = before + counts, base + len(tiles.indices)
    items = np.zeros((len(lead), ITEM), dtype=np.int32)
    items[:, : len(columns)] = np.stack(columns, axis=1)
    items[:, 10] = lead
    items[:, 12] = 1
    merges = np.zeros((max(1, len(made.merges)), MERGE), dtype=np.int32)
    if len(made.merges):
        which = made.merges[:, 0]
        merges[:, :5] = np.stack([which // heads, which % heads, *made.merges[:, 1:].T], axis=1)
    return Work(torch.from_numpy(items).to(device), torch.from_numpy(merges).to(device), made.slots)


def _device_work(walk: Walk) -> Work:
    counts = [getattr(walk, kind).counts.reshape(-1).long() for kind in KINDS]
    starts = [getattr(walk, kind).starts.reshape(-1).long() for kind in KINDS]
    n, device = counts[0].shape[0], counts[0].device
    items = torch.zeros((n, ITEM), dtype=torch.int64, device=device)
    row = torch.arange(n, device=device)
    lead = row // walk.tiles
    items[:, 0], items[:, 1], items[:, 2], items[:, 3] = lead // walk.lead[1], lead % walk.lead[1], row % walk.tiles, -1
    base = 0
    for i, kind in enumerate(KINDS):
        items[:, 4 + 2 * i], items[:, 5 + 2 * i] = starts[i] + base, counts[i]
        base += len(getattr(walk, kind).indices)
    items[:, 10], items[:, 12] = lead, 1
    order = torch.argsort(sum(counts), descending=True, stable=True)
    return Work(items[order].int(), torch.zeros((1, MERGE), dtype=torch.int32, device=device), 0)
