"""Both directions of a call over tiles or over gathered columns, which differ in the kernels of a walk alone."""

from __future__ import annotations

from collections.abc import Callable, Mapping
from typing import Any

from gossamer.kernels.contract import Scoring
from gossamer.kernels.launch import EDGE, Builder, Kernel, Operand, Prepared
from gossamer.kernels.triton.arguments import arrays, operand, row_results, terms, vector
from gossamer.kernels.triton.config import GRADIENTS, WALKS, Direction
from gossamer.kernels.triton.row_terms import row_terms
from gossamer.plan.problem import Problem

# Adds the kernels of a direction, whose arguments are among the given ones.
Walk = Callable[[Builder, Direction, dict[str, Any]], None]


def forward(p: Problem, scoring: Scoring, operands: Mapping[str, Operand], walk: Walk) -> Prepared:
    """out and lse."""
    b = Builder(operands)
    values = arrays(b, **{name: operand(b, name) for name in ("q", "k", "v")}) | row_results(b, p)
    walk(b, "forward", values | terms(b, p, scoring, "lse") | {"sinks": vector(b, "sink_logits", "lse")})
    return b.done("out", "lse")


def backward(
    p: Problem, scoring: Scoring, operands: Mapping[str, Operand], walk: Walk, padded_Q: int,
    walks: tuple[Direction, ...] = WALKS,
) -> Prepared:  # fmt: skip
    """dq, dk and dv, and dsink_logits where there are sinks.

    Args:
        padded_Q: rows of the row terms, which are made first unless the caller has them.
        walks: some of the gradients alone, for measurements.
    """
    b = Builder(operands)
    given = {name: operand(b, name) for name in ("q", "k", "v", "dout")}
    rows = "row_terms" if "row_terms" in b else row_terms(b, p, given["dout"], padded_Q)
    results = [name for direction in walks for name in GRADIENTS[direction]]
    given |= {name: b.result(name, p.dtype, b[name.removeprefix("d")].shape) for name in results}
    values = arrays(b, **given) | terms(b, p, scoring, rows)
    values |= {"row_terms": rows, "padded_Q": padded_Q, "delta_offset": b[rows].strides[0]}
    for direction in walks:
        walk(b, direction, values)
    if "sink_logits" in operands:
        kernel = Kernel(EDGE, "sink_gradient_of_rows")
        b.function(kernel, rows, "lse", "sink_logits", returns={"dsink_logits": None})
        results.append("dsink_logits")
    return b.done(*results)
