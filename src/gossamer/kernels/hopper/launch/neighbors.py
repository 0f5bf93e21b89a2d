"""Attention over the lists of groups of particles, and its gradients, as data.

Lists are arguments of the call, as q, k and v are, so that one launch serves all that move. A group is 64 particles
that follow one another, queries and keys alike. The forward reads q by places along the curve, k and v by particles.
Pairs are symmetric: in the backward a group's list is that of its rows and that of its columns.
"""

from __future__ import annotations

from collections.abc import Mapping, Sequence

from gossamer.kernels.contract import Scoring
from gossamer.kernels.hopper.choice import gather_config
from gossamer.kernels.hopper.device.gather.configurations import ROWS, GatherConfig
from gossamer.kernels.hopper.launch.arguments import Schedule, gathered, kernel, operand, score_of, unread
from gossamer.kernels.hopper.launch.backward import done, gradients, row_terms, run
from gossamer.kernels.hopper.launch.gather import forward_by
from gossamer.kernels.launch import Builder, Direction, Operand, Prepared
from gossamer.plan.problem import Problem

SPACE = ("theirs", "mine", "far")  # where particles are, of a forward with a Gaussian: `gather.gaussian.Space`
# Items as `hopper.device.row_items` and `column_items` have them, and lists as `gather.block` does.
LISTS: dict[Direction, tuple[str, ...]] = {
    "forward": ("items", "keys", "bits"),
    "backward": ("items", "column_items", "segments", "columns", "bits"),
}


def forward(p: Problem, scoring: Scoring, operands: Mapping[str, Operand], distances: Sequence[float] = ()) -> Prepared:
    """out and lse. Operands are q, k, v, perhaps results, those of `LISTS`, and with distances those of `SPACE`.

    Args:
        distances: as `gather.forward_by` takes them.
    """
    b = Builder(operands)
    config = gather_config("forward", p.dtype, p.D, p.E, score_of(scoring), gaussian=bool(distances))
    lists = ("keys", "bits", *SPACE[: len(SPACE) * bool(distances)])
    return forward_by(config, b, p, scoring, _schedule(b, p, config, "items", *lists), distances)


def backward(p: Problem, scoring: Scoring, operands: Mapping[str, Operand]) -> Prepared:
    """dq, dk and dv. Operands are q, k, v, out, lse, dout, dlse, perhaps results, and those of `LISTS`."""
    b = Builder(operands)
    dq, dk, dv = gradients(b, p)
    out = operand(b, "out")
    q, k, v, dout = (gathered(b, name) for name in ("q", "k", "v", "dout"))
    given = p.dtype, p.D, p.E, score_of(scoring, True)
    by_columns, by_rows = gather_config("columns", *given), gather_config("query", *given)
    terms, _ = row_terms(b, p, out, dout, by_rows.size, by_rows.size)
    unknown = unread(b, "no_lengths", "int32", 1)
    size, lists = by_rows.size, ("columns", "bits")
    of_columns = _schedule(b, p, by_columns, "column_items", "segments", *lists)
    of_rows = _schedule(b, p, by_rows, "items", *lists)
    inputs = (q, k, v, dout, terms)
    sized = {dk: (size, scoring.scale), dv: (size, 1.0)}
    run(b, p, scoring, kernel("gather", by_columns), of_columns, inputs, unknown, sized)
    run(b, p, scoring, kernel("gather", by_rows), of_rows, inputs, unknown, {dq: (size, scoring.scale)})
    return done(b, terms)


def _schedule(b: Builder, p: Problem, config: GatherConfig, items: str, *lists: str) -> Schedule:
    """No list is cut: those of groups are of like lengths, and one is a small part of all work."""
    n, *_ = b[items].shape
    return Schedule([items, *lists], "", n, 0, min(config.blocks * p.processors, n), ROWS)
