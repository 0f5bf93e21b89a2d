"""Which implementation computes a call of gated attention."""

from __future__ import annotations

from collections.abc import Callable
from typing import NamedTuple

from torch import Tensor

from gossamer.kernels.gated import chunks
from gossamer.kernels.gated.problem import Gradients, Operands, Options


class Implementation(NamedTuple):
    """Both directions of one."""

    name: str
    forward: Callable[[Operands, Options], tuple[Tensor, Tensor]]
    backward: Callable[[Tensor, Tensor | None, Tensor, Tensor, Operands, Options], Gradients]
    reasons: Callable[[Operands, Options], list[str]]  # why it does not compute a call


def implementations() -> list[Implementation]:
    """All of this machine, the fastest first."""
    found = [Implementation("chunks", chunks.forward, chunks.backward, lambda x, o: [])]
    try:
        from gossamer.kernels.gated import triton_calls
    except ModuleNotFoundError as error:
        if error.name != "triton":
            raise
        return found
    kernels = Implementation("triton", triton_calls.forward, triton_calls.backward, triton_calls.reasons)
    return [kernels, *found]


def implementation(name: str | None, x: Operands, o: Options) -> Implementation:
    """That which computes a call: the one of a name, or the first that can."""
    return next(one for one in implementations() if one.name == name or (name is None and not one.reasons(x, o)))
