"""Both directions of a gather layout with groups of one row as data, by kernels without matrix products."""

from __future__ import annotations

from collections.abc import Mapping, Sequence
from typing import Any, NamedTuple

import numpy as np

from gossamer.cute.merges import MERGE, PartMerge
from gossamer.kernels.arrays import Array, placed, zeros
from gossamer.kernels.contract import Scoring
from gossamer.kernels.hopper.device.rows.configurations import SIZES, RowsConfig
from gossamer.kernels.hopper.launch.arguments import (
    factors,
    gathered,
    kernel,
    lengths,
    operand,
    parts,
    result,
    sinks,
    unread,
)
from gossamer.kernels.hopper.launch.backward import done, gradients, row_terms
from gossamer.kernels.launch import EDGE, Builder, Kernel, Operand, Prepared
from gossamer.layouts.gather import GatherLayout, item_limit
from gossamer.layouts.gather_items import GatherItems, gather_items
from gossamer.layouts.items import COUNT, FIRST, LEAD, TILE
from gossamer.memo import Memos
from gossamer.plan.problem import Problem


class _Items(NamedTuple):
    """Where kernels read them."""

    items: Array  # (n, ITEM) int32
    merges: Array  # (m, MERGE) int32, of all copies of the items
    slots: int  # of one copy


_items: Memos[_Items] = Memos()  # of walks


class Rows(NamedTuple):
    """The work of one kernel, named in a launch."""

    arrays: list[str]  # items and indices
    merges: str
    slots: int  # of all copies of the items
    numbers: tuple[int, ...]  # the last arguments of the kernels


def forward(
    problem: Problem, layout: GatherLayout, scoring: Scoring, operands: Mapping[str, Operand]
) -> Prepared:  # fmt: skip
    """out and lse."""
    p, b = problem, Builder(operands)
    q, k, v = (gathered(b, name) for name in ("q", "k", "v"))
    out, lse = result(b, "out", p.dtype, (p.B, p.H, p.Q, p.E)), b.result("lse", "float32", (p.B, p.H, p.Q))
    end, sink, has_sinks = lengths(b, p.K), sinks(b), int("sink_logits" in b)
    config = rows_config("forward", p, scoring, end is not None)
    s = _schedule(b, p, layout, "rows", p.H)
    part_out, part_lse = parts(b, "part_out", s.slots, 1, config.size), parts(b, "part_lse", s.slots, 1)
    b.step(
        kernel("rows", config), q, k, v, out, lse, *s.arrays, sink, part_out, part_lse,
        end or unread(b, "no_lengths", "int32", 1), *factors(scoring), has_sinks, *s.numbers,
    )  # fmt: skip
    if s.slots:
        b.step(kernel("merge", p.dtype, config.size, 1), out, lse, part_out, part_lse, s.merges, sink, has_sinks)
    return b.done("out", "lse")


def backward(
    problem: Problem, layout: GatherLayout, scoring: Scoring, operands: Mapping[str, Operand]
) -> Prepared:  # fmt: skip
    """dq, dk and dv, and dsink_logits where there are sinks."""
    p, b = problem, Builder(operands)
    dq, dk, dv = gradients(b, p)
    out = operand(b, "out")
    q, k, v, dout = (gathered(b, name) for name in ("q", "k", "v", "dout"))
    end = lengths(b, p.K)
    size = rows_config("query", p, scoring).size
    terms, _ = row_terms(b, p, out, dout, size, size)
    inputs, unknown = (q, k, v, dout, terms), end or unread(b, "no_lengths", "int32", 1)
    by_rows = rows_config("query", p, scoring, end is not None)
    run(b, p, scoring, by_rows, _schedule(b, p, layout, "rows", p.H), inputs, unknown, {dq: scoring.scale})
    # Query heads that have lists of their own have shares of dK and dV.
    _, Hl = layout.columns.lead
    heads = p.G if Hl in (1, p.G) else p.H
    made = [dk, dv]
    if heads != p.G:
        made = [b.array(f"{x}_shares", "float32", (p.B, heads, *b[x].shape[2:])) for x in (dk, dv)]
    by_columns = rows_config("columns", p, scoring, end is not None, heads != p.G)
    s = _schedule(b, p, layout, "columns", heads)
    run(b, p, scoring, by_columns, s, inputs, unknown, dict(zip(made, (scoring.scale, 1.0), strict=True)))
    if heads != p.G:
        for shares, whole in zip(made, (dk, dv), strict=True):
            b.step(Kernel(EDGE, "sums_of_groups"), shares, whole)
    return done(b, terms)


def rows_config(
    direction: str, p: Problem, scoring: Scoring, has_lengths: bool = False, shares: bool = False
) -> RowsConfig:
    """The configuration of a kernel for a call."""
    size = next(size for size in SIZES if size >= max(p.D, p.E))
    score = "plain" if scoring.softcap is None else "softcap"
    return RowsConfig(direction, p.dtype, size, p.D == p.E == size, score, has_lengths, shares)


def run(
    b: Builder, p: Problem, scoring: Scoring, config: RowsConfig, s: Rows, inputs: Sequence[str], end: str,
    results: Mapping[str, float],
) -> None:  # fmt: skip
    """Run a kernel of the backward, and add the parts of what it cuts. `results`: to the factor of their sums."""
    found = {name: parts(b, f"part_{name}", s.slots, 1, config.size) for name in results}
    b.step(
        kernel("rows", config), *inputs, *results, *s.arrays, *found.values(), end, *factors(scoring), scoring.scale,
        *s.numbers,
    )  # fmt: skip
    if s.slots:
        dtype = "float32" if config.shares else p.dtype
        for name, factor in results.items():
            b.step(kernel("sum_parts", dtype, config.size, 1), name, found[name], s.merges, factor)


def _schedule(b: Builder, p: Problem, layout: GatherLayout, name: str, heads: int) -> Rows:
    """The items of the rows or the columns of a layout, for so many heads; made once."""
    walk, source = getattr(layout, name), getattr(layout.host or layout, name)
    assert source.device is None, "lists that only a device knows have items that are made there"
    Bl, Hl = walk.lead
    of_batch, of_heads = (p.B if Bl == 1 else 1), (heads if Hl == 1 else 1)
    copies, times, lead_heads = of_batch * of_heads, 1 if Hl == 1 else heads // Hl, 1 if Hl == 1 else heads
    limit = item_limit(source.counts.size * times, copies, len(source.indices) * times, walk.width, p.processors)

    def make() -> _Items:
        made = gather_items(source.for_heads(heads), limit)
        merges = merges_of_copies(made, lead_heads, of_heads, copies)
        return _Items(placed(made.items, walk.device), placed(merges, walk.device), made.slots)

    made = _items.of(walk).get_or_make((limit, heads, copies), make)
    indices = walk.indices if len(walk.indices) else zeros((1,), walk.indices)  # a kernel argument needs an address
    names = b.layout(**{f"{name}_items": made.items, f"{name}_indices": indices})
    (merges,) = b.layout(**{f"{name}_merges": made.merges})
    return Rows(names, merges, made.slots * copies, (lead_heads, of_heads, made.slots, copies))


def merges_of_copies(made: GatherItems, lead_heads: int, copy_heads: int, copies: int) -> np.ndarray[Any, Any]:
    """The merges (m, MERGE) of all copies of the items, as the kernels that merge read them."""
    every = np.zeros((copies, len(made.merges), MERGE), np.int32)
    copy, lead = np.arange(copies)[:, None], made.merges[:, LEAD]
    every[..., PartMerge.BATCH] = lead // lead_heads + copy // copy_heads
    every[..., PartMerge.HEAD] = lead % lead_heads + copy % copy_heads
    every[..., PartMerge.TILE] = made.merges[:, TILE]
    every[..., PartMerge.SLOT] = made.merges[:, FIRST] + copy * made.slots
    every[..., PartMerge.COUNT] = made.merges[:, COUNT]
    return every.reshape(-1, MERGE)
