"""From a problem and a gather layout to kernel arguments."""

from __future__ import annotations

from collections.abc import Mapping
from functools import partial
from typing import Any

from gossamer.kernels.contract import Scoring
from gossamer.kernels.launch import EDGE, Builder, Kernel, Operand, Prepared
from gossamer.kernels.triton import directions
from gossamer.kernels.triton.arguments import arrays, named
from gossamer.kernels.triton.config import GRADIENTS, WALKS, Direction
from gossamer.kernels.triton.gather.config import GroupConfig, RowConfig
from gossamer.kernels.triton.gather.parameters import RowForm, TileForm
from gossamer.kernels.triton.gather.row_kernels import rows_dkdv_kernel, rows_dq_kernel, rows_forward_kernel
from gossamer.kernels.triton.gather.schedule_gather import schedule_of
from gossamer.kernels.triton.gather.tile_kernels import tiles_dkdv_kernel, tiles_dq_kernel, tiles_forward_kernel
from gossamer.layouts.gather import GatherLayout
from gossamer.plan.problem import Problem

# Query rows of the row terms are padded to this: the largest group of rows.
PADDED_ROWS = 64
# Rows alone need no tiles.
ROW_KERNELS = {"forward": rows_forward_kernel, "dq": rows_dq_kernel, "dkdv": rows_dkdv_kernel}
TILE_KERNELS = {"forward": tiles_forward_kernel, "dq": tiles_dq_kernel, "dkdv": tiles_dkdv_kernel}

Config = RowConfig | GroupConfig


def forward(
    problem: Problem, layout: GatherLayout, scoring: Scoring, operands: Mapping[str, Operand], *,
    config: Config | None = None, limit: int | None = None,
) -> Prepared:  # fmt: skip
    """out and lse. `config` and `limit` (units of a work item) replace the shipped configuration."""
    return directions.forward(problem, scoring, operands, partial(_walk, problem, layout, config, limit))


def backward(
    problem: Problem, layout: GatherLayout, scoring: Scoring, operands: Mapping[str, Operand], *,
    config: Config | None = None, limit: int | None = None, walks: tuple[Direction, ...] = WALKS,
) -> Prepared:  # fmt: skip
    """The gradients; `config` and `limit` as in `forward`, `walks` as in `directions.backward`."""
    add = partial(_walk, problem, layout, config, limit)
    return directions.backward(problem, scoring, operands, add, padded_rows(problem.Q), walks)


def padded_rows(Q: int) -> int:
    """Queries padded to whole groups, of any size that a layout has."""
    return -(-Q // PADDED_ROWS) * PADDED_ROWS


def _walk(
    p: Problem, layout: GatherLayout, config: Config | None, limit: int | None,
    b: Builder, direction: Direction, values: Mapping[str, Any],
) -> None:  # fmt: skip
    """Add the kernels of a direction."""
    plan = schedule_of(p, layout, direction, config, limit)
    walk = layout.columns if direction == "dkdv" else layout.rows
    kernels, form = (ROW_KERNELS, RowForm) if walk.block_rows == 1 else (TILE_KERNELS, TileForm)
    values = {**values, "lists": named(b, direction, plan.lists), **plan.constants}
    values["SINK"] &= direction == "forward"
    streamed = ("q", "dout") if direction == "dkdv" else ("k", "v")
    values["STREAMED"] = tuple(values[f"at_{name}"].n for name in streamed)
    results = {name: values[name] for name in GRADIENTS.get(direction, ())}
    summed = direction == "dkdv" and plan.constants["heads"] != p.G
    if summed:
        shapes = {name: (p.B, plan.constants["heads"], *b[result].shape[2:]) for name, result in results.items()}
        own = {name: b.array(f"{name}_of_heads", "float32", shape) for name, shape in shapes.items()}
        values |= arrays(b, **own)
    plan.split_rows.step(b, direction, kernels[direction], plan.grid, values, form, plan.options)
    if summed:
        for name, result in results.items():
            b.step(Kernel(EDGE, "sums_of_groups"), own[name], result)
