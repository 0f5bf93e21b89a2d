"""The backward that keeps dS: dK and dV of some heads, then dQ of these from their dS, by one product.

Heads follow one another, as many at a time as the memory allows, which all of them use in turn.
"""

from __future__ import annotations

from collections.abc import Sequence
from dataclasses import replace
from typing import NamedTuple

from gossamer.kernels.contract import Scoring
from gossamer.kernels.hopper.choice import WIDE, kept_config
from gossamer.kernels.hopper.device.configurations import BackwardConfig, WideConfig
from gossamer.kernels.hopper.launch.arguments import factors, kernel, parts, tile_counter
from gossamer.kernels.hopper.schedule.kept import copies, kept_columns, kept_lists, kept_rows, pairs
from gossamer.kernels.hopper.schedule.lists import lists
from gossamer.kernels.hopper.schedule.rows import Work
from gossamer.kernels.launch import BYTES, Builder
from gossamer.layouts.block import BlockLayout
from gossamer.plan.problem import Problem

TILE = 64
PAIR = TILE * TILE
FREE = 2**28  # bytes that a call may take for dS, however small its inputs are


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
        most: bytes, in the place of as many as its inputs have, or of `FREE`.
    """
    known = None if summed(p, layout) else pairs(layout)
    if not known:
        return None
    found = known * (layout.rows.block_rows // TILE) * (layout.rows.block_columns // TILE)
    if most is None:
        most = max(FREE, BYTES[p.dtype] * p.B * (2 * p.H * p.Q + p.G * p.K) * (p.D + p.E))
    fits = most // (2 * PAIR * found)
    if layout.rows.lead != (1, 1):
        n = copies(layout, p.B, p.H)
        return Kept(p.B * p.G, n * found) if n <= fits else None
    ratio, heads = p.H // p.G, p.B * p.G
    if fits < ratio:
        return None
    times = -(-heads // (fits // ratio))
    at_once = -(-heads // times)
    return Kept(at_once, at_once * ratio * found)


def gradients(
    b: Builder, p: Problem, layout: BlockLayout, scoring: Scoring, how: Kept, config: BackwardConfig | WideConfig,
    inputs: Sequence[str], end: str | None, results: Sequence[str], split: int | None = None,
) -> None:  # fmt: skip
    """Write dq, dk and dv. `inputs`: q, k, v, dout, row terms, unread sums; `end`: key lengths."""
    walk = layout.rows
    wide = isinstance(config, WideConfig)
    columns = replace(config, keeps=True) if wide else replace(config, keeps=True, edges=False)
    rows = kept_config(p.dtype, p.D, walk.block_rows, walk.block_columns, end is not None)
    by_columns, by_rows = kernel("wide" if wide else "backward", columns), kernel("kept", rows)
    most, most_rows = columns.blocks * p.processors, rows.blocks * p.processors
    turning = 0 if end else most_rows
    ds = b.array("ds", p.dtype, (how.pairs, PAIR))
    of_columns = b.layout(**{f"columns_{name}": x for name, x in kept_lists(layout, turning)._asdict().items()})
    (of_rows,) = b.layout(rows_lists=lists(layout, blocks=turning).lists)
    (_, k, *_), (dq, dk, dv), ratio = inputs, results, p.H // p.G
    work: list[tuple[Work, Work]] = []
    for first in range(0, p.B * p.G, how.heads):
        heads = min(how.heads, p.B * p.G - first)
        work.append((
            kept_columns(layout, first, heads, p.B, p.G, ratio, most, split),
            kept_rows(layout, ratio * first, ratio * heads, p.B, p.H, most_rows, split),
        ))  # fmt: skip
    slots, row_slots = (max(one.slots for one in each) for each in zip(*work, strict=True))
    part_dk, part_dv = (
        parts(b, f"part_{x}", slots, walk.block_columns, size) for x, size in (("dk", columns.D), ("dv", columns.E))
    )
    part_dq = parts(b, "part_dq", row_slots, walk.block_rows, rows.D)
    for n, (column, row) in enumerate(work):
        named = b.layout(**{f"columns_items_{n}": column.items, f"columns_segments_{n}": column.segments})
        blocks = min(most, column.items.shape[0] * walk.block_columns // columns.block_kv)
        b.step(
            by_columns, *inputs, ds, dk, dv, *named, *of_columns, part_dk, part_dv, end, tile_counter(b),
            *factors(scoring, True), scoring.scale, column.items.shape[0], blocks,
        )  # fmt: skip
        (named_rows,) = b.layout(**{f"rows_items_{n}": row.items})
        b.step(
            by_rows, ds, k, dq, named_rows, of_rows, part_dq, end, tile_counter(b), scoring.scale, row.items.shape[0],
            min(most_rows, row.items.shape[0]),
        )  # fmt: skip
        if column.slots:
            (merges,) = b.layout(**{f"columns_merges_{n}": column.merges})
            for result, part, size, factor in ((dk, part_dk, columns.D, scoring.scale), (dv, part_dv, columns.E, 1.0)):
                b.step(kernel("sum_parts", p.dtype, size, walk.block_columns), result, part, merges, factor)
        if row.slots:
            (merges,) = b.layout(**{f"rows_merges_{n}": row.merges})
            b.step(kernel("sum_parts", p.dtype, rows.D, walk.block_rows), dq, part_dq, merges, scoring.scale)
