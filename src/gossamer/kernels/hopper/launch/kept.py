"""The backward of tiles of 64 x 64 that keeps dS: dK and dV of some heads, then dQ of these from the same dS.

Keys are heads one after the other, as many at a time as the memory allows, which all of them use in turn.
"""

from __future__ import annotations

from collections.abc import Sequence
from dataclasses import replace
from typing import NamedTuple

from gossamer.kernels.contract import Scoring
from gossamer.kernels.hopper.choice import kept_config
from gossamer.kernels.hopper.device.configurations import BackwardConfig
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
    """How much of dS a backward keeps."""

    heads: int  # key heads at a time, of all batch elements
    places: int  # of pairs of tiles

    @property
    def bytes(self) -> int:
        return 2 * PAIR * self.places


def kept(p: Problem, layout: BlockLayout, most: int | None = None) -> Kept | None:
    """What a call keeps of dS; None where it keeps none.

    Args:
        most: bytes, in the place of as many as its inputs have, or of `FREE`.
    """
    found = pairs(layout) if layout.rows.block_rows == layout.rows.block_columns == TILE else None
    if not found or max(p.D, p.E) > 128:
        return None
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
    b: Builder, p: Problem, layout: BlockLayout, scoring: Scoring, how: Kept, config: BackwardConfig,
    inputs: Sequence[str], end: str | None, results: Sequence[str], split: int | None = None,
) -> None:  # fmt: skip
    """Write dq, dk and dv. `inputs`: q, k, v, dout, row terms, unread sums; `end`: key lengths."""
    ratio, heads = p.H // p.G, p.B * p.G
    columns, rows = replace(config, keeps=True), kept_config(p.dtype, p.D, end is not None)
    most, most_rows = columns.blocks * p.processors, rows.blocks * p.processors
    turning = 0 if end else most_rows
    ds = b.array("ds", p.dtype, (how.places, PAIR))
    of_columns = b.layout(**{f"columns_{name}": x for name, x in kept_lists(layout, turning)._asdict().items()})
    (of_rows,) = b.layout(rows_lists=lists(layout, blocks=turning).lists)
    (_, k, *_), (dq, dk, dv) = inputs, results
    starts = range(0, heads, how.heads)
    by_columns = [
        kept_columns(layout, n, min(how.heads, heads - n), p.B, p.G, ratio, most, split) for n in starts
    ]  # fmt: skip
    by_rows = [
        kept_rows(layout, ratio * n, ratio * min(how.heads, heads - n), p.B, p.H, most_rows, split) for n in starts
    ]  # fmt: skip
    slots, row_slots = (max(work.slots for work in works) for works in (by_columns, by_rows))
    part_dk, part_dv = parts(b, "part_dk", slots, TILE, columns.D), parts(b, "part_dv", slots, TILE, columns.E)
    part_dq = parts(b, "part_dq", row_slots, TILE, rows.D)
    for n, (column, row) in enumerate(zip(by_columns, by_rows, strict=True)):
        items, segments = b.layout(**{f"columns_items_{n}": column.items, f"columns_segments_{n}": column.segments})
        b.step(
            kernel("backward", columns), *inputs, ds, dk, dv, items, segments, *of_columns, part_dk, part_dv, end,
            tile_counter(b), *factors(scoring, True), scoring.scale, *_grid(column, most),
        )  # fmt: skip
        (items,) = b.layout(**{f"rows_items_{n}": row.items})
        b.step(
            kernel("kept", rows), ds, k, dq, items, of_rows, part_dq, end, tile_counter(b), scoring.scale,
            *_grid(row, most_rows),
        )  # fmt: skip
        for work, which, sums in (
            (column, "columns", ((dk, part_dk, columns.D, scoring.scale), (dv, part_dv, columns.E, 1.0))),
            (row, "rows", ((dq, part_dq, rows.D, scoring.scale),)),
        ):
            if work.slots:
                (merges,) = b.layout(**{f"{which}_merges_{n}": work.merges})
                for result, part, size, factor in sums:
                    b.step(kernel("sum_parts", p.dtype, size, TILE), result, part, merges, factor)


def _grid(work: Work, most: int) -> tuple[int, int]:
    """The items of a launch, and its blocks."""
    items = work.items.shape[0]
    return items, min(most, items)
