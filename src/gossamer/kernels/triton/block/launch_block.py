"""From a problem and a layout of tiles to kernel arguments."""

from __future__ import annotations

from collections.abc import Mapping
from functools import partial
from typing import Any

from gossamer.kernels.contract import Scoring
from gossamer.kernels.launch import ALIGNMENT, BYTES, Builder, Operand, Prepared
from gossamer.kernels.relaunch import padded
from gossamer.kernels.triton import directions
from gossamer.kernels.triton.arguments import named
from gossamer.kernels.triton.block.config import TileConfig, config
from gossamer.kernels.triton.block.forward import forward_kernel
from gossamer.kernels.triton.block.key_gradients import dkdv_kernel
from gossamer.kernels.triton.block.parameters import Form
from gossamer.kernels.triton.block.query_gradient import dq_kernel
from gossamer.kernels.triton.block.schedule_block import schedule_of
from gossamer.kernels.triton.config import WALKS, Direction
from gossamer.layouts.block import BlockLayout
from gossamer.plan.problem import Problem

KERNELS = {"forward": forward_kernel, "dq": dq_kernel, "dkdv": dkdv_kernel}
STREAMED = {"forward": ("k", "v"), "dq": ("k", "v"), "dkdv": ("q", "dout")}


def describable(x: Operand) -> bool:
    """Whether a tensor descriptor can be made: contiguous rows, and 16-byte alignment of the base and every stride."""
    *outer, last = x.strides
    return x.aligned and last == 1 and all(s > 0 and s * BYTES[x.dtype] % ALIGNMENT == 0 for s in outer)


def forward(
    problem: Problem, layout: BlockLayout, scoring: Scoring, operands: Mapping[str, Operand], *,
    tiles: TileConfig | None = None, limit: int | None = None,
) -> Prepared:  # fmt: skip
    """out and lse. `tiles` and `limit` (of tiles in a work item) replace the shipped ones."""
    return directions.forward(problem, scoring, operands, partial(_walk, problem, layout, tiles, limit))


def backward(
    problem: Problem, layout: BlockLayout, scoring: Scoring, operands: Mapping[str, Operand], *,
    tiles: TileConfig | None = None, limit: int | None = None, walks: tuple[Direction, ...] = WALKS,
) -> Prepared:  # fmt: skip
    """The gradients; `tiles` and `limit` as in `forward`, `walks` as in `directions.backward`."""
    add = partial(_walk, problem, layout, tiles, limit)
    return directions.backward(problem, scoring, operands, add, layout.rows.tiles * layout.block_q, walks)


def _walk(
    p: Problem, layout: BlockLayout, tiles: TileConfig | None, limit: int | None,
    b: Builder, direction: Direction, values: Mapping[str, Any],
) -> None:  # fmt: skip
    """Add the kernels of a direction."""
    plan = schedule_of(p, layout, direction == "dkdv", limit)
    walk = layout.columns if direction == "dkdv" else layout.rows
    tile = walk.block_rows, walk.block_columns
    chosen = tiles or config(direction, 8 * BYTES[p.dtype], p.D, p.E, p.sm or 80, tile)
    chosen = chosen.fit(*tile)
    streamed = {name: values[name] for name in STREAMED[direction]}
    tma = chosen.tma and all(describable(b[name]) for name in streamed.values())
    if tma:
        for name, array in streamed.items():
            block = 1, 1, chosen.columns, padded(b[array].shape[-1])
            streamed[name] = b.descriptor(f"{direction}_{name}", array, block)
    own = {"TMA": tma, "R": chosen.rows, "C": chosen.columns, "PRECISION": chosen.precision}
    grid = (walk.block_rows // chosen.rows * plan.size * plan.split_rows.copies,)
    values = {**values, **streamed, "lists": named(b, direction, plan.lists), **plan.constants, **own}
    values["CLEAR"] |= direction == "dkdv" and values["LENGTHS"]  # they may leave queries nothing
    values["SINK"] &= direction == "forward"
    options = {"num_warps": chosen.warps, "num_stages": chosen.stages}
    plan.split_rows.step(b, direction, KERNELS[direction], grid, values, Form, options)
