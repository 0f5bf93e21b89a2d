"""LongNet's mixture of segments and dilations (arXiv:2307.02486)."""

from __future__ import annotations

import math
from collections.abc import Iterable
from dataclasses import dataclass
from typing import Any

import numpy as np

from gossamer.checks import integer, show
from gossamer.patterns.base import Pattern, Tiles
from gossamer.patterns.compose import PerHead
from gossamer.patterns.dense import Causal
from gossamer.patterns.grid import Grid, Sizes, combine_ids
from gossamer.patterns.window import Local


@dataclass(frozen=True, eq=False)
class DilatedSegment(Pattern):
    """Positions are cut into segments, and every `dilation`-th position of a segment sees every other such one.

    i // segment == j // segment, and (i % segment) % dilation == (j % segment) % dilation == offset.

    Examples:
        >>> gs.DilatedSegment(4, dilation=2, offset=1).materialize(6, 6).astype(int)
        array([[0, 0, 0, 0, 0, 0],
               [0, 1, 0, 1, 0, 0],
               [0, 0, 0, 0, 0, 0],
               [0, 1, 0, 1, 0, 0],
               [0, 0, 0, 0, 0, 0],
               [0, 0, 0, 0, 0, 1]])
    """

    segment: int
    dilation: int = 1
    offset: int = 0

    def __post_init__(self) -> None:
        object.__setattr__(self, "segment", integer("segment", self.segment, minimum=1))
        object.__setattr__(self, "dilation", integer("dilation", self.dilation, minimum=1))
        object.__setattr__(self, "offset", integer("offset", self.offset, minimum=0))
        if self.offset >= self.dilation:
            raise ValueError(f"offset must be below dilation={self.dilation}, got {self.offset}")

    def _keep(self, i: np.ndarray, j: np.ndarray, sizes: Sizes) -> np.ndarray:
        w, r = self.segment, self.dilation
        return (i // w == j // w) & (i % w % r == self.offset) & (j % w % r == self.offset)

    def lower(self, sizes: Sizes) -> Pattern:
        return Local(self.segment) if self.dilation == 1 else self

    def tile_bound(self, grid: Grid) -> int:
        return Local(self.segment).tile_bound(grid)

    def tile_candidates(self, grid: Grid, start: int, stop: int) -> Tiles:
        return Local(self.segment).tile_candidates(grid, start, stop)

    def tile_ids(self, grid: Grid, ti: np.ndarray, tj: np.ndarray) -> np.ndarray:
        i0, j0 = grid.q_offset + ti * grid.block_q, tj * grid.block_kv
        return combine_ids(i0 // self.segment - j0 // self.segment, i0 % self.segment, j0 % self.segment)


@dataclass(frozen=True, eq=False, init=False)
class LongNet(Pattern):
    """Head h keeps the pairs of any branch, each a `DilatedSegment(segment, dilation, h % dilation)`, causal or not.

    One softmax runs over the union of the branches. LongNet itself attends in each branch alone and weighs the
    results by their denominators, so that a key counts once for each branch that keeps it: that is
    `attention(..., pattern, merge="lse")`, with the exact gradient (the published code takes none through the
    weights).

    Args:
        segments: lengths, one for each branch. The paper: 2048 to 32768, growing geometrically.
        dilations: one for each branch. The paper: 1, 2, 4, 6, 12.
        heads: query heads.
        causal: keep j <= i alone.

    Examples:
        >>> pattern = gs.LongNet([2, 4], [1, 2], heads=2)
        >>> pattern.materialize(4, 4).astype(int)[0, 1]  # of head 1
        array([[1, 0, 0, 0],
               [1, 1, 0, 0],
               [0, 0, 1, 0],
               [0, 1, 1, 1]])
    """

    segments: tuple[int, ...]
    dilations: tuple[int, ...]
    heads: int
    causal: bool

    def __init__(self, segments: Iterable[int], dilations: Iterable[int], *, heads: int, causal: bool = True) -> None:
        for name, given in (("segments", segments), ("dilations", dilations)):
            try:
                values = tuple(integer(name, x, minimum=1) for x in given)
            except TypeError:
                raise ValueError(f"{name} must be a list of positive integers, got {show(given)}") from None
            object.__setattr__(self, name, values)
        if not self.segments or len(self.segments) != len(self.dilations):
            raise ValueError(
                f"segments and dilations must be as many, at least one of each; got {show(self.segments)} and "
                f"{show(self.dilations)}"
            )
        object.__setattr__(self, "heads", integer("heads", heads, minimum=1))
        if not isinstance(causal, bool):
            raise ValueError(f"causal must be True or False, got {show(causal)}")
        object.__setattr__(self, "causal", causal)

    @property
    def lead(self) -> tuple[int, int]:
        return 1, self.heads

    @property
    def _period(self) -> tuple[int, int]:
        return 1, min(self.heads, math.lcm(*self.dilations))

    def branch(self, which: int, head: int) -> Pattern:
        """The pairs that one head keeps of one branch."""
        which, head = integer("which", which, minimum=0), integer("head", head, minimum=0)
        if which >= len(self.segments):
            raise ValueError(f"which must be one of {len(self.segments)} branches, got {which}")
        r = self.dilations[which]
        part = DilatedSegment(self.segments[which], r, head % r)
        return part & Causal() if self.causal else part

    def branches(self) -> tuple[Pattern, ...]:
        """The pattern of each branch, over all heads."""
        every = range(self.heads)
        return tuple(PerHead([self.branch(m, h) for h in every]) for m in range(len(self.segments)))

    def at(self, b: int, h: int) -> Pattern:
        union = self.branch(0, h)
        for m in range(1, len(self.segments)):
            union = union | self.branch(m, h)
        return union

    def lower(self, sizes: Sizes) -> Pattern:
        raise AssertionError("a per-head pattern is lowered head by head, through `at`")

    def _keep(self, i: np.ndarray, j: np.ndarray, sizes: Sizes) -> np.ndarray:
        raise AssertionError("a per-head pattern is evaluated head by head, through `at`")

    def _key(self) -> tuple[Any, ...]:
        return self.segments, self.dilations, self.heads, self.causal
