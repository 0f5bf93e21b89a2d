"""Patterns that depend on the distance i - j alone: dilated windows, strided and power-strided attention."""

from __future__ import annotations

from dataclasses import dataclass

import numpy as np

from gossamer.checks import integer
from gossamer.patterns.base import Offsets
from gossamer.patterns.grid import Sizes
from gossamer.patterns.reach import Reach, Rule, rule


@dataclass(frozen=True, eq=False)
class Dilated(Offsets):
    """A query at position i sees the keys j = i - m * dilation for -right <= m <= left.

    Args:
        left: keys before the query; right: keys after it (0 is causal).
        dilation: distance between neighbouring keys.

    Examples:
        >>> gs.Dilated(1, 1, dilation=2).materialize(5, 5).astype(int)
        array([[1, 0, 1, 0, 0],
               [0, 1, 0, 1, 0],
               [1, 0, 1, 0, 1],
               [0, 1, 0, 1, 0],
               [0, 0, 1, 0, 1]])
    """

    left: int
    right: int
    dilation: int

    def __post_init__(self) -> None:
        object.__setattr__(self, "left", integer("left", self.left, minimum=0))
        object.__setattr__(self, "right", integer("right", self.right, minimum=0))
        object.__setattr__(self, "dilation", integer("dilation", self.dilation, minimum=1))

    def device_rule(self) -> Rule:
        return rule(Reach(self.left * self.dilation, self.right * self.dilation, step=self.dilation))

    def _offset_range(self, sizes: Sizes) -> tuple[int, int]:
        return -self.right * self.dilation, self.left * self.dilation

    def _keep_offset(self, offset: np.ndarray) -> np.ndarray:
        first, last = -self.right * self.dilation, self.left * self.dilation
        return (offset % self.dilation == 0) & (offset >= first) & (offset <= last)


@dataclass(frozen=True, eq=False)
class Strided(Offsets):
    """Causal: the keys with 0 <= i - j <= local, and those with (i - j) % stride == 0 (arXiv:1904.10509).

    The union of the paper's two heads of the strided kind.

    Examples:
        >>> gs.Strided(stride=3, local=1).materialize(6, 6).astype(int)
        array([[1, 0, 0, 0, 0, 0],
               [1, 1, 0, 0, 0, 0],
               [0, 1, 1, 0, 0, 0],
               [1, 0, 1, 1, 0, 0],
               [0, 1, 0, 1, 1, 0],
               [0, 0, 1, 0, 1, 1]])
    """

    stride: int
    local: int

    def __post_init__(self) -> None:
        object.__setattr__(self, "stride", integer("stride", self.stride, minimum=1))
        object.__setattr__(self, "local", integer("local", self.local, minimum=0))

    def device_rule(self) -> Rule:
        return rule(Reach(self.local, 0), Reach(right=0, step=self.stride))

    def _offset_range(self, sizes: Sizes) -> tuple[int, int]:
        return 0, sizes.q_offset + sizes.Q

    def _keep_offset(self, offset: np.ndarray) -> np.ndarray:
        return (offset >= 0) & ((offset <= self.local) | (offset % self.stride == 0))


@dataclass(frozen=True, eq=False)
class PowerStrided(Offsets):
    """Causal: the keys with 0 <= i - j <= local, and those with i - j = base ** m, m >= 0 (arXiv:1907.00235).

    Examples:
        >>> gs.PowerStrided(base=2, local=0).materialize(6, 6).astype(int)
        array([[1, 0, 0, 0, 0, 0],
               [1, 1, 0, 0, 0, 0],
               [1, 1, 1, 0, 0, 0],
               [0, 1, 1, 1, 0, 0],
               [1, 0, 1, 1, 1, 0],
               [0, 1, 0, 1, 1, 1]])
    """

    base: int = 2
    local: int = 0

    def __post_init__(self) -> None:
        object.__setattr__(self, "base", integer("base", self.base, minimum=2))
        object.__setattr__(self, "local", integer("local", self.local, minimum=0))

    def _offset_range(self, sizes: Sizes) -> tuple[int, int]:
        return 0, sizes.q_offset + sizes.Q

    def _keep_offset(self, offset: np.ndarray) -> np.ndarray:
        powers = [1]
        while powers[-1] <= int(offset.max(initial=0)):
            powers.append(powers[-1] * self.base)
        return ((offset >= 0) & (offset <= self.local)) | np.isin(offset, powers)
