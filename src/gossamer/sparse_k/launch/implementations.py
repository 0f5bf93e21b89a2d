"""Which implementation computes a call of gated attention."""

from __future__ import annotations

from collections.abc import Callable
from typing import NamedTuple

from torch import Tensor

from gossamer.kernels.packages import has_triton
from gossamer.sparse_k import chunks
from gossamer.sparse_k.launch.problem import Gradients, Memory, Operands, Options


class Implementation(NamedTuple):
    """Both directions of one."""

    name: str
    forward: Callable[[Operands, Options], tuple[Tensor, Tensor]]
    backward: Callable[[Tensor, Tensor | None, Tensor, Tensor, Operands, Options], Gradients]
    memory: Callable[[Operands, Options], Memory]
    reasons: Callable[[Operands, Options], list[str]]  # why it does not compute a call
    description: str


def implementations() -> list[Implementation]:
    """All of this machine, the fastest first."""
    of_torch = f"operations of torch, {chunks.QUERIES} queries at a time"
    found = [Implementation("chunks", chunks.forward, chunks.backward, chunks.memory, lambda x, o: [], of_torch)]
    if not has_triton():
        return found
    from gossamer.sparse_k.launch import hopper as hopper_calls
    from gossamer.sparse_k.launch import triton as triton_calls

    c = triton_calls
    of_lists = "kernels over lists of live keys for each tile of queries, and for chunks of queries in dK and dV"
    of_forward = "as triton, the forward by a kernel of compute capability 9.0"
    by_hopper = Implementation("hopper", hopper_calls.forward, c.backward, c.memory, hopper_calls.reasons, of_forward)
    return [by_hopper, Implementation("triton", c.forward, c.backward, c.memory, c.reasons, of_lists), *found]


def implementation(name: str | None, x: Operands, o: Options) -> Implementation:
    """That which computes a call: the one of a name, or the first that can."""
    return next(one for one in implementations() if one.name == name or (name is None and not one.reasons(x, o)))
