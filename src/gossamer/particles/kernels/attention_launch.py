"""Attention over the lists of groups of particles, and its gradients, as data.

Lists are arguments of the call, as q, k and v are, so that one launch serves all that move. A group is 64 particles
that follow one another, queries and keys alike; all arrays are by particles, which lists name. Pairs are symmetric: in
the backward a group's list is that of its rows and that of its columns.
"""

from __future__ import annotations

from collections.abc import Mapping, Sequence

from gossamer.kernels.contract import Scoring
from gossamer.kernels.hopper.choice import gather_config
from gossamer.kernels.hopper.device.gather.configurations import ROWS, GatherConfig
from gossamer.kernels.hopper.launch.arguments import (
    Schedule,
    factors,
    gathered,
    operand,
    parts,
    result,
    score_of,
    tile_counter,
    unread,
)  # fmt: skip
from gossamer.kernels.hopper.launch.backward import gradients, row_terms
from gossamer.kernels.hopper.launch.gather import forward_by
from gossamer.kernels.launch import Builder, Direction, Kernel, Operand, Prepared
from gossamer.particles.kernels import compiled
from gossamer.particles.kernels.attention.numbers import POINT
from gossamer.plan.problem import Problem

_PAIRS = ("keys", "bits")
# Lists as `gather.block` has them, whose columns are particles, the rows' particles, and where both are.
GROUPS = (*_PAIRS, "particles", "theirs", "mine", "far")


def lists(direction: Direction, dtype: str) -> tuple[str, ...]:
    """The arrays of lists of a call: `GROUPS`, and items as `cute.row_items` and `column_items` have them."""
    if dtype == "float32":
        return "items", *_PAIRS
    return ("items", *GROUPS) if direction == "forward" else ("items", "column_items", "segments", *GROUPS)


def forward(
    p: Problem, scoring: Scoring, operands: Mapping[str, Operand], factor: float | None, sizes: Sequence[float],
    config: GatherConfig | None = None,
) -> Prepared:  # fmt: skip
    """out and lse. Operands are q, k, v, perhaps results, and those of `lists`. Of float32 q is by places on the curve,
    and so are results.

    Args:
        factor: of r^2 beside q.k; None: no distances.
        sizes: of the box.
        config: replaces the configuration for these head sizes.
    """
    b = Builder(operands)
    if p.dtype == "float32":
        config = gather_config("forward", p.dtype, p.D, p.E, score_of(scoring))
        return forward_by(config, b, p, scoring, Schedule(["items", *_PAIRS], "", *_work(b, p, config), ROWS))
    config = config or _config("forward", p, scoring, factor)
    q, k, v = (gathered(b, name) for name in ("q", "k", "v"))
    out, lse = result(b, "out", p.dtype, b["out"].shape), b.result("lse", "float32", b["lse"].shape)
    _, exponent = factors(scoring)
    sinks = unread(b, "no_sinks", "float32", 1)
    given = parts(b, "part_out", 0, ROWS, config.size), parts(b, "part_lse", 0, ROWS), _no_lengths(b), tile_counter(b)
    items, _, blocks = _work(b, p, config)
    b.step(
        _kernel(config), q, k, v, out, lse, "items", *GROUPS, sinks, *given, factor or 0.0, exponent, items, 0,
        blocks, *sizes,
    )  # fmt: skip
    return b.done("out", "lse")


def backward(
    p: Problem, scoring: Scoring, operands: Mapping[str, Operand], factor: float | None, sizes: Sequence[float]
) -> Prepared:
    """dq, dk and dv, then of rows and of columns the sums (H, N, 4) of dS times steps, which are to be added up.

    Operands are q, k, v, out, lse, dout, dlse, perhaps results, and those of `lists`. Arguments as of `forward`.
    """
    b = Builder(operands)
    dq, dk, dv = gradients(b, p)
    q, k, v, dout = (gathered(b, name) for name in ("q", "k", "v", "dout"))
    columns, rows = (_config(direction, p, scoring, factor) for direction in ("columns", "query"))
    terms, _ = row_terms(b, p, operand(b, "out"), dout, rows.size, rows.size)
    _, exponent = factors(scoring, True)
    shape = (p.H, p.Q, POINT) if factor is not None else (1, 1, POINT)
    numbers = factor or 0.0, exponent, scoring.scale
    pulls = [b.result(f"pull_{name}", "float32", shape) for name in ("rows", "columns")]
    work = {"items": ([dq], ["dq"], rows), "column_items": ([dk, dv], ["dk", "dv"], columns)}
    n, _, _ = _work(b, p, rows)
    for pull, (items, (made, names, config)) in zip(pulls, work.items(), strict=True):
        listed = (items, *["segments"] * (len(made) > 1), *GROUPS)
        given = [parts(b, f"part_{name}", 0, ROWS, config.size) for name in names]
        b.step(
            _kernel(config), q, k, v, dout, terms, *made, pull, *listed, *given, _no_lengths(b),
            tile_counter(b), *numbers, n, min(config.blocks * p.processors, n), *sizes,
        )  # fmt: skip
    return b.done("dq", "dk", "dv", *pulls)


def _config(direction: str, p: Problem, scoring: Scoring, factor: float | None) -> GatherConfig:
    score = score_of(scoring, direction != "forward")
    return gather_config(direction, p.dtype, p.D, p.E, score, particles=True, gaussian=factor is not None)


def _kernel(config: GatherConfig) -> Kernel:
    return Kernel(compiled.MODULE, compiled.attention.name, (config,), "exchanged")


def _no_lengths(b: Builder) -> str:
    return "no_lengths" if "no_lengths" in b else unread(b, "no_lengths", "int32", 1)


def _work(b: Builder, p: Problem, config: GatherConfig) -> tuple[int, int, int]:
    """How many items there are, slots, and blocks. No list is cut: those of groups are of like lengths."""
    n, *_ = b["items"].shape
    return n, 0, min(config.blocks * p.processors, n)
