"""Runs of prepared launches, past all that plans a call: one direction of an implementation on given tensors."""

from __future__ import annotations

from collections.abc import Iterator, Mapping
from contextlib import ExitStack, contextmanager
from typing import Any
from unittest import mock

import torch
from torch import Tensor

from gossamer.kernels.contract import Scoring, Terms
from gossamer.kernels.launch import RESULTS, VECTORS, Direction, Prepared, operand_of
from gossamer.plan.problem import Problem


@contextmanager
def poisoned() -> Iterator[None]:
    """What allocates without writing gives NaN, or large integers."""

    def filled(make: Any) -> Any:
        def made(*arguments: Any, **options: Any) -> Tensor:
            x = make(*arguments, **options)
            if x.is_floating_point():
                return x.fill_(float("nan"))
            return x if x.dtype == torch.bool else x.fill_(torch.iinfo(x.dtype).max)

        return made

    every = {torch: ("empty", "empty_like", "empty_strided"), Tensor: ("new_empty",)}
    every[torch._C._dynamo.guards] = "_empty_strided_cpu", "_empty_strided_cuda"  # of bound launches
    with ExitStack() as patches:
        for where, names in every.items():
            for name in names:
                patches.enter_context(mock.patch.object(where, name, filled(getattr(where, name))))
        yield


def prepared(
    computes: Any, problem: Problem, layout: Any, direction: Direction, scoring: Scoring, given: Mapping[str, Tensor],
    **overrides: Any,
) -> Prepared:  # fmt: skip
    """A launch of an implementation, or of a module with a function `forward` and one `backward`."""
    operands = {name: operand_of(x) for name, x in given.items()}
    if hasattr(computes, "prepare"):
        return computes.prepare(problem, layout, direction, scoring, operands, **overrides)
    return getattr(computes, direction)(problem, layout, scoring, operands, **overrides)


def run(
    computes: Any, problem: Problem, layout: Any, direction: Direction, scoring: Scoring, given: Mapping[str, Tensor],
    **overrides: Any,
) -> tuple[Tensor, ...]:  # fmt: skip
    """The results of a launch, as `prepared` describes it; all memory that it makes is NaN first."""
    from gossamer.torch import memory
    from gossamer.torch.bind import bind

    launch = prepared(computes, problem, layout, direction, scoring, given, **overrides)
    device = next(iter(given.values())).device
    memory._waiting.clear()  # what waits there has been written
    with torch.no_grad(), poisoned():
        return bind(launch, device, tuple(given))(*given.values())


def _of(direction: Direction, terms: Terms, into: Any, **given: Tensor | None) -> tuple[Scoring, dict[str, Tensor]]:
    given |= {name: getattr(terms, name) for name in VECTORS} | dict(zip(RESULTS[direction], into or (), strict=False))
    there = {name: x for name, x in given.items() if x is not None}
    return Scoring(terms.scale, terms.q_offset, terms.softcap, terms.absolute), there


def forward(
    computes: Any, problem: Problem, layout: Any, terms: Terms, q: Tensor, k: Tensor, v: Tensor,
    into: tuple[Tensor, Tensor] | None = None, **overrides: Any,
) -> tuple[Tensor, ...]:  # fmt: skip
    """(out, lse), written to `into` if it is given."""
    return run(computes, problem, layout, "forward", *_of("forward", terms, into, q=q, k=k, v=v), **overrides)


def backward(
    computes: Any, problem: Problem, layout: Any, terms: Terms, dout: Tensor, dlse: Tensor | None, q: Tensor, k: Tensor,
    v: Tensor, out: Tensor, lse: Tensor, into: tuple[Tensor, Tensor, Tensor] | None = None, **overrides: Any,
) -> tuple[Tensor, ...]:  # fmt: skip
    """(dq, dk, dv), written to `into` if it is given, and dsink_logits where there are sinks."""
    scoring, given = _of("backward", terms, into, dout=dout, dlse=dlse, q=q, k=k, v=v, out=out, lse=lse)
    return run(computes, problem, layout, "backward", scoring, given, **overrides)
