"""The lists of a gather layout as torch's sparse operators read them: heads side by side, in parts of bounded size.

A part is some heads, or some rows of one head, whose edges are computed by one call of each operator. The queries of
its heads are one table of rows and their keys another, and lists index these. Parts whose lists are equal share them.
"""

from __future__ import annotations

from collections.abc import Iterator
from dataclasses import dataclass
from functools import cached_property
from typing import NamedTuple

import torch
from torch import Tensor

from gossamer.layouts.gather import GatherLayout
from gossamer.plan.problem import Problem

HEADS_TOGETHER = 1 << 18  # edges and positions of the heads of a part, which are one only where it has more
ROWS_TOGETHER = 1 << 21  # edges of a part of one head's rows: its scratch is some 30 bytes for each
KEYS_OF_A_PART = 4  # edges for each key, at least: a part adds to the gradients of all keys
LONGEST_SUM = 256  # edges that are added in sequence: the error of float32 sums grows with their length


class Sums(NamedTuple):
    """The sums over edges: edges in runs that lie one after the other, and the runs of each row."""

    ends: Tensor  # (runs + 1,) int32: where each run begins, and the end of the last
    first: Tensor | None  # (rows,) int64: the first run of each row; None: each row is one run
    others: Tensor | None  # int64: the runs that are not the first of their row
    row: Tensor | None  # int64: their rows

    def whole(self, run_sums: Tensor) -> Tensor:
        """The sums of rows (rows, ...) from those of runs (runs, ...)."""
        if self.first is None or self.others is None or self.row is None:
            return run_sums
        return run_sums.index_select(0, self.first).index_add_(0, self.row, run_sums.index_select(0, self.others))


class Transposed(NamedTuple):
    """The rows that keep each key."""

    rows: Tensor  # (edges,) int32
    edges: Tensor  # (edges,) int32: where they stand among the lists of rows
    sums: Sums


@dataclass(frozen=True, eq=False)
class EdgeLists:
    """The keys that each row of a part keeps; indices count in its tables of rows and of keys."""

    starts: Tensor  # (rows + 1,) int32: compressed sparse rows
    keys: Tensor  # (edges,) int32
    rows: Tensor  # (edges,) int32
    table: int  # keys
    edges: Tensor  # (heads,) int64: of each head
    sums: Sums

    @cached_property
    def transposed(self) -> Transposed:
        """For the gradients of keys and values: found at the first backward, and kept."""
        _, order = torch.sort(self.keys, stable=True)
        starts = _starts(torch.bincount(self.keys, minlength=self.table))
        return Transposed(self.rows.index_select(0, order), order.to(torch.int32), _sums(starts))

    def of_heads(self, x: Tensor) -> Tensor:
        """Values of heads (heads,) for each edge."""
        return x if len(x) == 1 else x.repeat_interleave(self.edges, output_size=len(self.keys))


@dataclass(frozen=True)
class GatherPart:
    """Some heads, counted over batch elements, or some rows of one."""

    first: int
    heads: int
    begin: int  # of the rows of each head
    end: int
    again: bool  # whether a part before it has the same keys
    lists: EdgeLists


def plan_parts(layout: GatherLayout, problem: Problem) -> tuple[GatherPart, ...]:
    """The parts of a layout of rows of one query, for one set of shapes."""
    assert layout.block_q == 1, layout.block_q
    p, (bl, hl), walk = problem, layout.lead, layout.rows
    counts = walk.counts.to(torch.int64)
    edges = counts.sum(-1)
    heads = _together(p, int(edges.max()) + p.Q + p.K)
    ranges = [(0, p.Q)] if heads > 1 else list(_ranges(counts, max(ROWS_TOGETHER, KEYS_OF_A_PART * p.K)))
    made: dict[tuple[tuple[tuple[int, int], ...], int], EdgeLists] = {}
    parts = []
    for first in range(0, p.B * p.H, heads):
        leads = tuple((n // p.H % bl, n % p.H * hl // p.H) for n in range(first, first + heads))
        for begin, end in ranges:
            key = leads, begin
            if key not in made:
                made[key] = _lists(layout, p, leads, begin, end)
            again = begin > 0 or first % (p.H // p.G) > 0
            parts.append(GatherPart(first, heads, begin, end, again, made[key]))
    return tuple(parts)


def _together(p: Problem, size: int) -> int:
    """Heads of a part: whole groups that share a key head, or several parts of one group."""
    every, group = p.B * p.H, p.H // p.G
    for heads in range(min(every, max(1, HEADS_TOGETHER // size)), 1, -1):
        if every % heads == 0 and (heads % group == 0 or group % heads == 0):
            return heads
    return 1


def _ranges(counts: Tensor, most: int) -> Iterator[tuple[int, int]]:
    """Ranges of rows in which no head has more than `most` edges, unless it is one row."""
    ends = counts.cumsum(-1).amax((0, 1))
    begin, rows = 0, len(ends)
    while begin < rows:
        before = int(ends[begin - 1]) if begin else 0
        end = max(begin + 1, int(torch.searchsorted(ends, before + most, right=True)))
        yield begin, end
        begin = end


def _lists(layout: GatherLayout, p: Problem, leads: tuple[tuple[int, int], ...], begin: int, end: int) -> EdgeLists:
    walk, group = layout.rows, p.H // p.G
    n, keys, counts, edges = end - begin, [], [], []
    for at, (b, h) in enumerate(leads):
        lengths = walk.counts[b, h, begin:end]
        listed = walk.indices[_places(walk.starts[b, h, begin:end], lengths)]
        size = len(listed)
        keys.append(listed + at // group * p.K if at >= group else listed)
        counts.append(lengths)
        edges.append(size)
    each = torch.cat(counts).to(torch.int64)
    rows = torch.repeat_interleave(torch.arange(n * len(leads), dtype=torch.int32, device="cpu"), each)
    starts = _starts(each)
    table = (1 + (len(leads) - 1) // group) * p.K
    joined = keys[0] if len(keys) == 1 else torch.cat(keys)
    return EdgeLists(starts, joined, rows, table, torch.tensor(edges, device="cpu"), _sums(starts))


def _places(starts: Tensor, counts: Tensor) -> Tensor:
    """Where the entries of lists (n,) are, which may have room between them."""
    size = int(counts.sum())
    before = counts.cumsum(0) - counts
    return torch.arange(size, device=starts.device) + (starts - before).repeat_interleave(counts, output_size=size)


def _starts(counts: Tensor) -> Tensor:
    """(n + 1,) int32 of the lengths (n,) of lists that lie one after the other."""
    return torch.cat([counts.new_zeros(1), counts.cumsum(0)]).to(torch.int32)


def _sums(starts: Tensor) -> Sums:
    counts = starts.diff().to(torch.int64)
    if int(counts.max()) <= LONGEST_SUM:
        return Sums(starts, None, None, None)
    runs = (counts + (LONGEST_SUM - 1)).div(LONGEST_SUM, rounding_mode="floor").clamp_(min=1)
    row = torch.repeat_interleave(torch.arange(len(runs), device=runs.device), runs)
    first = runs.cumsum(0) - runs
    nth = torch.arange(len(row), device=row.device) - first[row]
    ends = torch.cat([(starts[row] + nth * LONGEST_SUM).to(torch.int32), starts[-1:]])
    others = nth.nonzero().squeeze(1)
    return Sums(ends, first, others, row[others])
