"""Prepared launches, bound to the tensors of one call, past all that plans a call."""

from __future__ import annotations

from collections.abc import Callable, Mapping
from functools import partial

from torch import Tensor

from gossamer.kernels.launch import Builder, Operand, Prepared, operand_of
from gossamer.kernels.triton.row_terms import row_terms
from gossamer.plan.problem import Problem
from gossamer.torch.bind import bind


def bound(
    prepare: Callable[[Mapping[str, Operand]], Prepared], given: Mapping[str, Tensor]
) -> Callable[[], tuple[Tensor, ...]]:
    """What computes the results of a launch, which `prepare` describes for the tensors that it is given."""
    launch = prepare({name: operand_of(x) for name, x in given.items()})
    run = bind(launch, next(iter(given.values())).device, tuple(given))
    return partial(run, *given.values())


def rows_of(problem: Problem, padded_Q: int, given: Mapping[str, Tensor]) -> Callable[[], tuple[Tensor, ...]]:
    """What computes the row terms of dout, out and lse."""

    def prepare(operands: Mapping[str, Operand]) -> Prepared:
        b = Builder(operands)
        return b.done(row_terms(b, problem, "dout", padded_Q))

    return bound(prepare, given)
