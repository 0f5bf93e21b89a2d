"""What `lax` walks on a CPU: tiles, or columns that it gathers, by counted work as in torch."""

from __future__ import annotations

from functools import cached_property
from typing import NamedTuple

import numpy as np

from gossamer.patterns import CSR, Pattern
from gossamer.patterns.reordered import ReorderedCSR
from gossamer.plan.capability import GatherChoice
from gossamer.plan.choice import Machine, costs
from gossamer.plan.costs import BITS, GatherCosts, TileCosts
from gossamer.plan.problem import Problem

TILE = 64  # measured on two cores, as for torch
HEAD = 64  # the size for which the numbers below were measured


class Measured(NamedTuple):
    """Seconds of a forward and its gradients on two cores: see `docs/lab/2026-11-29-jax-masks.md`."""

    pair: float  # that is executed
    column: float = 0.0  # that is gathered
    row: float = 0.0


TILES = Measured(pair=1.3e-8)
GATHERS = {1: Measured(0.0, column=1.5e-7, row=3e-7), 64: Measured(1.5e-8, column=1.5e-7, row=3e-7)}  # by rows together


class PlacedCSR(CSR):
    """A CSR pattern that knows an order in which rows with like keys come together; it is computed in it at will."""

    order: np.ndarray  # (N,) int64: which row comes at each place

    def __init__(self, indptr: np.ndarray, indices: np.ndarray, order: np.ndarray) -> None:
        super().__init__(indptr, indices, len(order))
        object.__setattr__(self, "order", order)

    @cached_property
    def inner(self) -> CSR:
        """The pattern in that order."""
        return ReorderedCSR(self, self.order).inner


def gathered_rows(pattern: Pattern, problem: Problem, q_offset: int) -> int:
    """How many rows gather together, over the columns that any of them keeps; 0 where tiles take less.

    What takes the least for a forward with its gradients. Rows gather together in the order of a pattern that has one,
    tiles are those of the given order. Elsewhere than on a CPU it is always tiles.
    """
    if problem.device != "cpu":
        return 0
    p, wide = problem, max(problem.D, problem.E) / HEAD
    inner = pattern.inner if isinstance(pattern, (PlacedCSR, ReorderedCSR)) else pattern
    tile = TileCosts(TILE, TILE, TILES.pair * wide)
    gathers = tuple(
        GatherCosts(GatherChoice(rows, frozenset(BITS)), one.pair * wide, one.column * wide, one.row * wide, 0.0)
        for rows, one in GATHERS.items()
    )
    seconds = costs(inner, p.Q, p.K, tiles=(tile,), gathers=gathers, q_offset=q_offset, machine=Machine())
    if inner is not pattern:
        _, *gathered = seconds
        seconds = (*costs(pattern, p.Q, p.K, tiles=(tile,), q_offset=q_offset, machine=Machine()), *gathered)
    return (0, *GATHERS)[seconds.index(min(seconds))]
