"""The matrix products to make: the tiles of a layout, grouped into batches of equal shape.

A batch is a set of query tiles with the same number of key tiles. Where each of them visits consecutive key tiles,
and the first of these moves by a constant from one query tile to the next (windows, causal, local blocks), the keys
are a strided view: nothing is copied. Other query tiles, of any batch element and head, are batched by length and
their keys are gathered; lists a little shorter than the longest of their batch are padded with masked tiles.
A list too long for the scratch is cut into pieces, which are merged by running maximum and sum.
"""

from __future__ import annotations

import math
from collections.abc import Iterator
from dataclasses import dataclass
from typing import NamedTuple

import numpy as np
import torch
from torch import Tensor

from gossamer.kernels.blocked.attended import Readable
from gossamer.kernels.blocked.tile_masks import Masks, make_masks
from gossamer.layouts.block import BlockLayout
from gossamer.plan.problem import Problem

SCRATCH_BYTES = {"cpu": 4 << 20, "cuda": 64 << 20}  # of the scores of one batch: the level-2 cache; few launches
VIEW_BYTES = 128 << 10  # below this, copying keys into a larger batch costs less than a batch of its own
SLACK = 8  # a list may be padded by one tile in this many


@dataclass(frozen=True)
class Piece:
    """The key tiles of one step of a batch."""

    tiles: int
    first: int = 0  # of a view: the first key tile of the first query tile
    step: int = 0  # of a view: how far it moves from one query tile to the next
    index: Tensor | None = None  # of a gather: (n, tiles) int64, flat over (B, G, key tiles)
    masks: tuple[tuple[int, int, Tensor], ...] = ()  # (slot, end slot, mask ids (n or 1, slots))


@dataclass(frozen=True)
class Batch:
    """Query tiles that are computed together."""

    n: int
    heads: tuple[tuple[int, int], ...]  # of a view: the (batch element, head) pairs it is made for, one by one
    first: int  # of a view: the first query tile
    index: Tensor | None  # of a gather: (n,) int64, flat over (B, H, query tiles)
    pieces: tuple[Piece, ...]


@dataclass(frozen=True)
class BatchPlan:
    """Every batch of a layout, for one set of shapes."""

    batches: tuple[Batch, ...]
    masks: Masks
    query_tiles: int
    key_tiles: int
    readable: Readable


@dataclass(frozen=True)
class TileLists:
    """The tiles of each layout row, partial ones marked by their mask, as one compressed list."""

    ptr: np.ndarray  # (rows + 1,)
    column: np.ndarray
    mask: np.ndarray  # mask id, or -1 for a full tile


class _Listed(NamedTuple):
    """The tiles of one kind that a layout lists."""

    row: np.ndarray  # counted over (Bl, Hl, T)
    column: np.ndarray
    place: np.ndarray  # in the list


class _Row(NamedTuple):
    """A row whose keys are gathered, for one head."""

    length: int  # of its list
    row: int  # counted over (Bl, Hl, T)
    query_head: int
    key_head: int


def plan_batches(layout: BlockLayout, problem: Problem) -> BatchPlan:
    """The batches of `layout` for `problem`; reads the layout's lists on the CPU."""
    walk = layout.rows
    lists, masks = _read(layout)
    T, key_tiles = walk.tiles, -(-walk.columns // walk.block_columns)
    bl, hl = walk.lead
    n = np.diff(lists.ptr)
    itemsize = 8 if problem.dtype == "float64" else 4
    head_bytes = (problem.D + problem.E) * itemsize
    tile_bytes = max(walk.block_rows * itemsize, head_bytes) * walk.block_columns
    limit = max(1, SCRATCH_BYTES.get(problem.device, SCRATCH_BYTES["cuda"]) // tile_bytes)  # tiles in a batch

    lead = [(b, h) for b in range(bl) for h in range(hl)]
    heads = {
        i: tuple(
            (b, h) for b in (range(problem.B) if bl == 1 else [bi]) for h in (range(problem.H) if hl == 1 else [hi])
        )
        for i, (bi, hi) in enumerate(lead)
    }
    start = np.zeros(len(n), np.int64)
    start[n > 0] = lists.column[lists.ptr[:-1][n > 0]]
    end = np.zeros(len(n), np.int64)
    end[n > 0] = lists.column[lists.ptr[1:][n > 0] - 1]
    run = (n > 0) & (end - start + 1 == n)

    batches: list[Batch] = []
    gathered = np.zeros(len(n), bool)
    for a, z, step in _segments(run, n, start, T):
        if (z - a) * n[a] * walk.block_columns * head_bytes < VIEW_BYTES:
            gathered[a:z] = True
            continue
        batches.extend(_views(lists, masks, a, z, step, limit, T, heads[a // T]))
    gathered |= (n > 0) & ~run
    batches.extend(_gathers(lists, masks, np.flatnonzero(gathered), limit, T, key_tiles, heads, problem))
    device, readable = walk.lo.device, Readable(layout, problem)
    if device.type == "cuda":
        torch.cuda.current_stream(device).synchronize()  # the masks were made there, and calls on any stream read them
    return BatchPlan(tuple(_to(b, device) for b in batches), masks, T, key_tiles, readable)


def _read(layout: BlockLayout) -> tuple[TileLists, Masks]:
    walk = (layout.rows if layout.host is None else layout.host.rows).on_host()
    rows, bk, bq, T = walk.rows, walk.block_columns, walk.block_rows, walk.tiles
    count = math.prod(walk.lead) * T
    parts = {}
    for kind, tiles in walk.lists.items():
        row, place = tiles.listed()
        parts[kind] = _Listed(row, tiles.indices[place].astype(np.int64), place)
    row, column, _ = parts["interval"]
    if len(row):
        lo, hi = (np.zeros((count // T, T * bq), np.int32) for _ in range(2))  # of rows that do not exist: empty
        lo[:, :rows], hi[:, :rows] = walk.lo.reshape(-1, rows), walk.hi.reshape(-1, rows)
        bounds = np.stack([x.reshape(-1, bq)[row] for x in (lo, hi)], axis=1) - (column * bk)[:, None, None]
        bounds = bounds.clip(0, bk)
    else:
        bounds = np.zeros((0, 2, bq), np.int32)
    masks, interval_mask = make_masks(bounds, layout.rows.pool, bq, bk)
    bits_mask = walk.pool_index[parts["bits"].place] + len(masks.bounds)
    row = np.concatenate([part.row for part in parts.values()])
    column = np.concatenate([part.column for part in parts.values()])
    mask = np.concatenate([np.full(len(parts["full"].row), -1), interval_mask, bits_mask])
    order = np.argsort(row * (1 + int(column.max(initial=0))) + column, kind="stable")
    ptr = np.concatenate([[0], np.cumsum(np.bincount(row, minlength=count))])
    return TileLists(ptr, column[order], mask[order].astype(np.int64)), masks


def _segments(run: np.ndarray, n: np.ndarray, start: np.ndarray, T: int) -> Iterator[tuple[int, int, int]]:
    """(first row, end row, step) of maximal sets of rows whose lists are alike up to a constant shift."""
    row = np.arange(len(n) - 1)
    joined = run[:-1] & run[1:] & (n[:-1] == n[1:]) & (row // T == (row + 1) // T) & (np.diff(start) >= 0)
    step = np.diff(start)
    # Another step than that of the pair before; what it says of the first pair, no search looks at.
    breaks = np.append(np.flatnonzero(~joined | (np.diff(step, prepend=0) != 0)), len(n) - 1)
    a = 0
    while a < len(n):
        z = a + 1
        if z < len(n) and joined[a]:
            z = int(breaks[np.searchsorted(breaks, a, side="right")]) + 1
        if run[a]:
            yield a, z, int(step[a]) if z > a + 1 else 0
        a = z


def _views(
    lists: TileLists, masks: Masks, a: int, z: int, step: int, limit: int, T: int, heads: tuple[tuple[int, int], ...]
) -> Iterator[Batch]:
    n = int(lists.ptr[a + 1] - lists.ptr[a])
    size = max(1, limit // n)
    column = lists.column[lists.ptr[a] : lists.ptr[z]].reshape(z - a, n)
    mask = lists.mask[lists.ptr[a] : lists.ptr[z]].reshape(z - a, n)
    for r in range(0, z - a, size):
        here = slice(r, min(r + size, z - a))
        pieces = tuple(
            Piece(min(limit, n - s), int(column[r, s]), step, None, _masked(mask[here, s : s + limit], masks.all))
            for s in range(0, n, limit)
        )
        yield Batch(here.stop - r, heads, (a + r) % T, None, pieces)


def _gathers(
    lists: TileLists,
    masks: Masks,
    rows: np.ndarray,
    limit: int,
    T: int,
    key_tiles: int,
    heads: dict[int, tuple[tuple[int, int], ...]],
    problem: Problem,
) -> Iterator[Batch]:
    group = problem.H // problem.G
    n = np.diff(lists.ptr)
    items = [
        _Row(int(n[row]), row, b * problem.H + h, b * problem.G + h // group)
        for row in rows[np.argsort(n[rows], kind="stable")].tolist()
        for b, h in heads[row // T]
    ]
    at = 0
    while at < len(items):
        shortest = items[at].length
        longest = shortest + shortest // SLACK
        end = at
        while end < len(items):
            width = items[end].length
            if width > longest or (end - at + 1) * width > max(limit, shortest):
                break
            end += 1
        batch = items[at:end]
        width = batch[-1].length
        column = np.zeros((len(batch), width), np.int64)
        mask = np.full((len(batch), width), masks.none)
        previous = -1
        for i, (length, row, _, key_head) in enumerate(batch):
            if row != previous:
                here = slice(lists.ptr[row], lists.ptr[row + 1])
                order = np.argsort(lists.mask[here] < 0, kind="stable")  # partial tiles first
                columns, masked, previous = lists.column[here][order], lists.mask[here][order], row
            column[i, :length] = columns + key_head * key_tiles
            mask[i, :length] = masked
        index = np.array([query_head * T + row % T for _, row, query_head, _ in batch])
        pieces = tuple(
            Piece(
                min(limit, width - s),
                index=torch.from_numpy(np.ascontiguousarray(column[:, s : s + limit])),
                masks=_masked(mask[:, s : s + limit], masks.all),
            )
            for s in range(0, width, limit)
        )
        yield Batch(len(batch), (), 0, torch.from_numpy(index), pieces)
        at = end


def _masked(mask: np.ndarray, everything: int) -> tuple[tuple[int, int, Tensor], ...]:
    """The runs of slots in which any row has a partial tile, with the mask of each row there."""
    partial = np.concatenate([[False], (mask >= 0).any(0), [False]])
    edges = np.flatnonzero(partial[1:] != partial[:-1])
    masked = []
    for s, z in edges.reshape(-1, 2).tolist():
        ids: np.ndarray = np.where(mask[:, s:z] < 0, everything, mask[:, s:z])
        ids = ids[:1] if (ids == ids[:1]).all() else ids
        masked.append((s, z, torch.from_numpy(np.ascontiguousarray(ids))))
    return tuple(masked)


def _to(batch: Batch, device: torch.device) -> Batch:
    if device.type == "cpu":
        return batch

    def move(piece: Piece) -> Piece:
        index = None if piece.index is None else piece.index.to(device)
        masks = tuple((s, z, ids.to(device)) for s, z, ids in piece.masks)
        return Piece(piece.tiles, piece.first, piece.step, index, masks)

    index = None if batch.index is None else batch.index.to(device)
    return Batch(batch.n, batch.heads, batch.first, index, tuple(move(p) for p in batch.pieces))
