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


CHUNKS = Implementation("chunks", chunks.forward, chunks.backward)


def implementation(name: str | None, x: Operands, o: Options) -> Implementation:
    """That which computes a call: the one of a name, or the first that can."""
    return CHUNKS
