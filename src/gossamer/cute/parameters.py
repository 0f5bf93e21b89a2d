"""The roles of the arrays among a kernel's arguments: read, written or added to, and their strides.

In the order of the call. Nothing here imports the compiler: an edge that passes flat memory and numbers in the place of
arrays of any strides (`cute.flat`) reads it where there is none.
"""

from __future__ import annotations

from typing import Literal, NamedTuple

Role = Literal["read", "made", "kept"]


class Parameter(NamedTuple):
    """An array among the arguments of a kernel."""

    name: str
    rank: int  # of one with any strides; 0: contiguous, as it is
    role: Role  # read; made: written, whatever it held; kept: it is written in part, or added to


def parameters_of(text: str) -> tuple[Parameter, ...]:
    """The arrays that a text names: "/n" behind those of n dimensions and any strides, "!" behind what is made, "+"
    behind what is kept.
    """
    return tuple(_parameter(word) for word in text.split())


def _parameter(word: str) -> Parameter:
    role: Role = "made" if word.endswith("!") else "kept" if word.endswith("+") else "read"
    name, _, rank = word.rstrip("!+").partition("/")
    return Parameter(name, int(rank or 0), role)
