"""From a problem and a gather layout to kernel arguments."""

from __future__ import annotations

from collections.abc import Mapping
from functools import partial
from typing import Any

from gossamer.kernels.contract import Scoring
from gossamer.kernels.launch import EDGE, Builder, Kernel, Operand, Prepared
from gossamer.kernels.triton import directions
from gossamer.kernels.triton.arguments import arrays, listed
from gossamer.kernels.triton.config import GRADIENTS, WALKS, Direction
from gossamer.kernels.triton.gather import rows, tiles
from gossamer.kernels.triton.gather.config import GroupConfig, RowConfig
from gossamer.kernels.triton.gather.schedule import schedule_of
from gossamer.layouts.gather import GatherLayout
from gossamer.plan.problem import Problem

# Query rows of the row terms are padded to this: the largest group of rows.
PADDED_ROWS = 64
# Rows alone need no tiles.
ROWS = {"forward": rows.rows_forward_kernel, "dq": rows.rows_dq_kernel, "dkdv": rows.rows_dkdv_kernel}
TILES = {"forward": tiles.tiles_forward_kernel, "dq": tiles.tiles_dq_kernel, "dkdv": tiles.tiles_dkdv_kernel}

Config = RowConfig | GroupConfig


def forward(
    problem: Problem, layout: GatherLayout, scoring: Scoring, operands: Mapping[str, Operand], *,
    config: Config | None = None, split: int | None = None,
) -> Prepared:  # fmt: skip
    """out and lse. `config` and `split` (units of an item) replace the shipped configuration."""
    return directions.forward(problem, scoring, operands, partial(_walk, problem, layout, config, split))


def backward(
    problem: Problem, layout: GatherLayout, scoring: Scoring, operands: Mapping[str, Operand], *,
    config: Config | None = None, split: int | None = None, walks: tuple[Direction, ...] = WALKS,
) -> Prepared:  # fmt: skip
    """The gradients; `config` and `split` as in `forward`, `walks` as in `directions.backward`."""
    add = partial(_walk, problem, layout, config, split)
    return directions.backward(problem, scoring, operands, add, padded_rows(problem.Q), walks)


def padded_rows(Q: int) -> int:
    """Queries padded to whole groups, of any size that a layout has."""
    return -(-Q // PADDED_ROWS) * PADDED_ROWS


def _walk(
    p: Problem, layout: GatherLayout, config: Config | None, split: int | None,
    b: Builder, direction: Direction, values: Mapping[str, Any],
) -> None:  # fmt: skip
    """Add the kernels of a direction."""
    plan = schedule_of(p, layout, direction, config, split)
    function = (ROWS if layout.block_q == 1 else TILES)[direction]
    values = {**values, **listed(b, direction, plan.arrays), **plan.constants}
    results = {name: values[name] for name in GRADIENTS.get(direction, ())}
    summed = direction == "dkdv" and plan.constants["heads"] != p.G
    if summed:
        shapes = {name: (p.B, plan.constants["heads"], *b[result].shape[2:]) for name, result in results.items()}
        own = {name: b.array(f"{name}_of_heads", "float32", shape) for name, shape in shapes.items()}
        values |= arrays(b, **own)
    plan.cut.step(b, direction, function, plan.programs, values, plan.options)
    if summed:
        for name, result in results.items():
            b.step(Kernel(EDGE, "sums_of_groups"), own[name], result)
