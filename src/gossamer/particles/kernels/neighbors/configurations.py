"""The configuration of the kernel of lists. No compiler is imported."""

from __future__ import annotations

from dataclasses import dataclass

ROWS = 64  # queries that follow one another along the curve, which share a list: a group
STEP = 64  # lists are padded to a multiple of it
WORD = 32  # columns of a word of bits
POINT = 4  # numbers of a position: three parts and one more


@dataclass(frozen=True)
class ListsConfig:
    """The kernel of lists.

    Args:
        periodic: along any axis.
    """

    periodic: bool = True
