"""Gradients of particles in torch, which have no gradient: to ask for one raises, and does not give 0."""

from __future__ import annotations

from collections.abc import Callable
from functools import wraps
from typing import Any, NoReturn

import torch
from torch import Tensor

from gossamer.particles.edges import ONCE
from gossamer.plan.problem import Unsupported


def once(backward: Callable[..., Any]) -> Callable[..., Any]:
    """The backward of a Function that saves all inputs its gradients depend on.

    torch's own `once_differentiable` ends the graph of gradients there, so that a loss which has other terms loses a
    part of its gradient without an error.
    """

    @wraps(backward)
    def guarded(ctx: Any, *given: Any) -> Any:
        with torch.no_grad():
            gradients = backward(ctx, *given)
        if not torch.is_grad_enabled():  # no create_graph
            return gradients
        of = [x for x in (*ctx.saved_tensors, *given) if isinstance(x, Tensor)]
        return tuple(None if x is None else _Gradient.apply(x, *of) for x in gradients)

    return guarded


class _Gradient(torch.autograd.Function):
    """A gradient where a graph of it is asked for, which leads to what it depends on."""

    @staticmethod
    def forward(ctx: Any, gradient: Tensor, *of: Tensor) -> Tensor:
        return gradient.view_as(gradient)

    @staticmethod
    def backward(ctx: Any, *_: Any) -> NoReturn:
        raise Unsupported(ONCE)
