"""The configuration of a kernel of sums. No compiler is imported."""

from __future__ import annotations

from collections.abc import Callable
from dataclasses import dataclass, field
from typing import Any

CLUSTER = 8  # consecutive particles that share a box at the lowest level
FAN = 32  # boxes of a level in one of the next: a warp compares that many at once
# Of a multiprocessor at least, which bounds the registers of a thread: measured on an H200, of one channel.
BLOCKS = {"sum": 5, "sum_slopes": 7, "force": 7, "force_slopes": 5, "count": 6}
ALONE = {"force_slopes": 6}  # likewise, without gradients to masses
QUERIES = 8  # of a warp; a Gaussian of one channel has registers for 16, which share their candidates
LEAST = 2.0**-126  # the least normal number of float32: squares of distances under it are 0
FAR = 1e18  # where the particles are that fill up the last box: outside of every radius
OPEN = 3e38  # the size of an axis that is not periodic


NUMBERS = 11  # of a law, the last of them the unit of a function of a user


@dataclass(frozen=True)
class Own:
    """A function of r^2 that a user wrote, known by what it is computed from.

    Args:
        digest: `functions.digest` of it.
        numbers: how many it takes, at most 10.
        function: see `functions.result`.
    """

    digest: str
    numbers: int
    function: Callable[..., Any] = field(compare=False, repr=False)


@dataclass(frozen=True)
class RadialConfig:
    """The kernel of a term.

    Args:
        term: "sum", "sum_slopes", "force", "force_slopes" or "count".
        channels: of "sum" and "sum_slopes".
        periodic: along any axis.
        softened: of a force, whether its softening is over 0.
        queries: of a warp, 8 or 16.
        values: of "sum_slopes" and "force_slopes", whether the gradients to values or masses are asked for too.
        own: the function of a user in the place of the Gaussian or of gravity.
    """

    term: str
    channels: int = 1
    periodic: bool = True
    softened: bool = False
    queries: int = QUERIES
    values: bool = True
    own: Own | None = None

    @property
    def payload(self) -> int:
        """The numbers of a particle beside its position."""
        of = {"sum": self.channels, "sum_slopes": 2 * self.channels, "force": 1, "force_slopes": 4, "count": 0}
        return of[self.term]

    @property
    def outputs(self) -> int:
        more = {"sum_slopes": self.channels, "force_slopes": 1}.get(self.term, 0) if self.values else 0
        return more + {"sum": self.channels, "count": 1}.get(self.term, 3)

    @property
    def width(self) -> int:
        """Columns of the array of particles: position and payload, in whole units of 16 bytes."""
        return 4 if self.payload <= 1 else 8

    @property
    def blocks(self) -> int:
        if self.channels > 1 or self.own:
            return 4
        return BLOCKS[self.term] if self.values else ALONE.get(self.term, BLOCKS[self.term])
