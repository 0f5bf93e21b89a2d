"""The implementations of SparseK attention, and the choice of one for a call."""

from __future__ import annotations

from collections.abc import Callable
from typing import NamedTuple

from torch import Tensor

from gossamer.kernels.packages import has_triton
from gossamer.sparse_k import chunks
from gossamer.sparse_k.launch.problem import Memory, Operands, Options, SparseKGradients


class Implementation(NamedTuple):
    """Both directions of one."""

    name: str
    forward: Callable[[Operands, Options], tuple[Tensor, Tensor]]
    backward: Callable[[Tensor, Tensor | None, Tensor, Tensor, Operands, Options], SparseKGradients]
    memory: Callable[[Operands, Options], Memory]
    reasons: Callable[[Operands, Options], list[str]]  # why it does not compute a call
    description: str


def implementations() -> list[Implementation]:
    """The implementations that this machine has, the fastest first."""
    torch_description = f"operations of torch, up to {chunks.QUERIES} queries at a time"
    by_torch = [
        Implementation("chunks", chunks.forward, chunks.backward, chunks.memory, lambda x, o: [], torch_description)
    ]
    if not has_triton():
        return by_torch
    from gossamer.sparse_k.launch import hopper as hopper_calls
    from gossamer.sparse_k.launch import triton as triton_calls

    c = triton_calls
    triton_description = (
        "kernels over lists of live keys for each tile of queries, and for chunks of queries in dK and dV"
    )
    hopper_description = "as triton, the forward by a kernel of compute capability 9.0"
    by_hopper = Implementation(
        "hopper", hopper_calls.forward, c.backward, c.memory, hopper_calls.reasons, hopper_description
    )
    return [
        by_hopper,
        Implementation("triton", c.forward, c.backward, c.memory, c.reasons, triton_description),
        *by_torch,
    ]


def implementation(name: str | None, x: Operands, o: Options) -> Implementation:
    """The implementation of a call: the named one, or the first that can compute it."""
    return next(one for one in implementations() if one.name == name or (name is None and not one.reasons(x, o)))
