"""The backward that keeps dS: dK and dV of some heads, then dQ of these from their dS, by one product.

Heads follow one another, as many at a time as the memory allows, which all of them use in turn.
"""

from __future__ import annotations

from collections.abc import Sequence
from dataclasses import replace
from typing import NamedTuple

from gossamer.kernels.contract import Scoring
from gossamer.kernels.hopper.choice import SMALL, WIDE, kept_config
from gossamer.kernels.hopper.device.configurations import BackwardConfig, WideConfig
from gossamer.kernels.hopper.launch.arguments import factors, kernel, parts, tile_counter
from gossamer.kernels.hopper.schedule.kept import kept_columns, kept_lists, kept_rows, pairs
from gossamer.kernels.hopper.schedule.lists import lists
from gossamer.kernels.hopper.schedule.rows import sharing
from gossamer.kernels.launch import BYTES, Builder
from gossamer.layouts.block import BlockLayout
from gossamer.plan.problem import Problem

TILE = 64
PAIR = TILE * TILE
FREE = 2**28  # bytes that a call may take for dS, however small its tensors are
# Of pairs of tiles of 64 x 64: as many at a time fill the GPU; fewer are not worth the launches of each time.
ENOUGH, LEAST, LEAST_WIDE = 3 * 2**15, 2**16, 2**15


class Kept(NamedTuple):
    """What a backward keeps of dS."""

    heads: int  # key heads at a time, of all batch elements
    pairs: int  # of tiles of 64 x 64, in the memory for them

    @property
    def bytes(self) -> int:
        return 2 * PAIR * self.pairs


def summed(p: Problem, layout: BlockLayout) -> bool:
    """Whether the column kernel adds dQ in memory: of tiles of 64 x 64 that takes longer than a second kernel."""
    return max(p.D, p.E) <= WIDE and not p.deterministic and layout.rows.block_columns > TILE


def kept(p: Problem, layout: BlockLayout, most: int | None = None) -> Kept | None:
    """What a call keeps of dS; None where it keeps none.

    Args:
        most: bytes that it takes, as far as heads have them; None: so many heads at a time as have enough, in no more
            memory than all tensors of the call have, gradients among them, or `FREE`; none if that is not worth it.
    """
    known = None if summed(p, layout) else pairs(layout)
    if not known or max(p.D, p.E) <= SMALL:
        return None
    ratio, heads, enough, least = p.H // p.G, p.B * p.G, ENOUGH, LEAST if max(p.D, p.E) <= WIDE else LEAST_WIDE
    found = known * (layout.rows.block_rows // TILE) * (layout.rows.block_columns // TILE)
    if most is None:
        most = max(FREE, 2 * BYTES[p.dtype] * p.B * (p.H * p.Q + p.G * p.K) * (p.D + p.E))
    else:
        enough, least = ratio * heads * found, 1
    fits = most // (2 * PAIR * found)
    if layout.rows.lead != (1, 1):
        copies, _ = sharing(p.H, p.B, layout.rows)
        return Kept(heads, copies * found) if copies <= fits else None
    at_once = min(heads, fits // ratio, -(-enough // (ratio * found)))
    if not at_once:
        return None
    at_once = -(-heads // -(-heads // at_once))  # equal shares
    how = Kept(at_once, at_once * ratio * found)
    return how if at_once == heads or how.pairs >= least else None


def gradients(
    b: Builder, p: Problem, layout: BlockLayout, scoring: Scoring, how: Kept, config: BackwardConfig | WideConfig,
    inputs: Sequence[str], end: str | None, results: Sequence[str], split: int | None = None,
) -> None:  # fmt: skip
    """Write dq, dk and dv. `inputs`: q, k, v, dout, row terms, unread sums; `end`: key lengths."""
    walk, ratio = layout.rows, p.H // p.G
    columns: BackwardConfig | WideConfig
    if isinstance(config, WideConfig):
        columns = replace(config, keeps=True)
        by_columns = kernel("wide", columns)
    else:
        columns = replace(config, keeps=True, edges=False)
        by_columns = kernel("backward", columns)
    rows = kept_config(p.dtype, p.D, walk.block_rows, walk.block_columns, end is not None)
    by_rows = kernel("kept", rows)
    most, most_rows = columns.blocks * p.processors, rows.blocks * p.processors
    turning = 0 if end else most_rows
    of_columns = kept_columns(layout, how.heads, p.B, p.G, ratio, most, split)
    of_rows = kept_rows(layout, how.heads * ratio, p.B, p.H, most_rows, split)
    known = b.layout(**{f"columns_{name}": x for name, x in kept_lists(layout, turning)._asdict().items()})
    (known_rows,) = b.layout(rows_lists=lists(layout, blocks=turning).lists)
    ds = b.array("ds", p.dtype, (how.pairs, PAIR))
    (_, k, *_), (dq, dk, dv) = inputs, results
    part_dk = parts(b, "part_dk", of_columns.slots, walk.block_columns, columns.D)
    part_dv = parts(b, "part_dv", of_columns.slots, walk.block_columns, columns.E)
    part_dq = parts(b, "part_dq", of_rows.slots, walk.block_rows, rows.D)
    for n, (column, row) in enumerate(zip(of_columns.works, of_rows.works, strict=True)):
        items, row_items = column.items.shape[0], row.items.shape[0]
        work = b.layout(**{f"columns_items_{n}": column.items, f"columns_segments_{n}": column.segments})
        b.step(
            by_columns, *inputs, ds, dk, dv, *work, *known, part_dk, part_dv, end, tile_counter(b),
            *factors(scoring, True), scoring.scale, items, min(most, items * walk.block_columns // columns.block_kv),
        )  # fmt: skip
        (work_rows,) = b.layout(**{f"rows_items_{n}": row.items})
        b.step(
            by_rows, ds, k, dq, work_rows, known_rows, part_dq, end, tile_counter(b), scoring.scale, row_items,
            min(most_rows, row_items),
        )  # fmt: skip
    merges, row_merges = b.layout(columns_merges=of_columns.merges, rows_merges=of_rows.merges)
    if of_columns.slots:
        for result, part, size, factor in ((dk, part_dk, columns.D, scoring.scale), (dv, part_dv, columns.E, 1.0)):
            b.step(kernel("sum_parts", p.dtype, size, walk.block_columns), result, part, merges, factor)
    if of_rows.slots:
        b.step(kernel("sum_parts", p.dtype, rows.D, walk.block_rows), dq, part_dq, row_merges, scoring.scale)
