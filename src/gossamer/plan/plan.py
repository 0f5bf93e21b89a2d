"""The implementations that compute a problem, why the others do not, and which of them computes a pattern."""

from __future__ import annotations

from dataclasses import dataclass, replace
from functools import cached_property
from typing import Literal, NamedTuple

from gossamer.memo import Memo
from gossamer.patterns.base import Pattern
from gossamer.patterns.grid import Sizes
from gossamer.patterns.handles import token_of
from gossamer.plan.capability import Candidate, gathers_alone, reasons
from gossamer.plan.choice import cheapest, machine_of
from gossamer.plan.costs import GatherCosts, TileCosts, costs_of
from gossamer.plan.partition import Partition, partition_of
from gossamer.plan.problem import Problem, Unsupported
from gossamer.plan.table import NAMES, load


@dataclass(frozen=True)
class Plan:
    """The problem, and the implementations that compute it in the order of the table."""

    problem: Problem
    implementations: tuple[Candidate, ...]
    refused: tuple[str, ...]  # the others
    later: Plan | None = None  # of the backward, where that is another

    @property
    def gradient(self) -> Plan:
        """The plan of the backward."""
        return self.later or self

    @cached_property
    def offers(self) -> list[tuple[Candidate, tuple[int, int]]]:
        """Every tile that an implementation offers; preferred ones first.

        One that nobody measured is taken where it comes first in the table, not for what it might cost.
        """
        p, walkers = self.problem, [i for i in self.implementations if i.layout == "block"]
        able = walkers[:1] + [i for i in walkers[1:] if costs_of(p).has(i.name)]
        return [(i, i.tile(p)) for i in able] + [(i, tile) for i in able for tile in i.tile_choices(p)]

    @cached_property
    def options(self) -> list[tuple[Candidate, TileCosts]]:
        """The tiles of `offers`, with what they cost."""
        costs = costs_of(self.problem)
        return [(i, costs.tile(i.name, *tile)) for i, tile in self.offers]

    @cached_property
    def tiles(self) -> tuple[TileCosts, ...]:
        """The tiles of `options`."""
        return tuple(tile for _, tile in self.options)

    @cached_property
    def gatherers(self) -> list[Candidate]:
        """The implementations that are refused, but for gather layouts."""
        refused = [i for i in map(load, self.refused) if not isinstance(i, str)]
        return [i for i in refused if gathers_alone(self.problem, i.capability) and not i.unavailable()]

    @cached_property
    def gather_options(self) -> list[tuple[Candidate, GatherCosts]]:
        """Every gather layout that an implementation reads."""
        p, costs = self.problem, costs_of(self.problem)
        able = [i for i in (*self.implementations, *self.gatherers) if i.layout == "block"]
        return [(i, costs.gather(i.name, c)) for i in able for c in i.capability.gathers if c.reads(p)]

    @cached_property
    def gathers(self) -> tuple[GatherCosts, ...]:
        """The gather layouts of `gather_options`."""
        return tuple(gather for _, gather in self.gather_options)

    @cached_property
    def _partitions(self) -> Memo[tuple[Partition | None]]:
        return Memo()

    def partition(self, handle: int, q_offset: int) -> Partition | None:
        """The parts of a call with the pattern of a handle, or None where it is computed as one; remembered."""
        pattern = token_of(handle).pattern
        if pattern.keeps_intervals(Sizes(self.problem.Q, self.problem.K, q_offset)):  # nothing in it is dilated
            return None

        def make() -> tuple[Partition | None]:
            tiles = self.tiles if self.implementations[0].layout == "block" else ()
            return (partition_of(pattern, self.problem, q_offset, tiles, self.gathers),)

        (partition,) = self._partitions.get_or_make((handle, q_offset), make)
        return partition


class Chosen(NamedTuple):
    """The choice for a call: an implementation, and the form and tile of the layout that it reads."""

    implementation: Candidate
    form: Literal["dense", "packed_mask", "block", "gather"]
    block_q: int = 0  # of a block layout or a gather layout
    block_kv: int = 0  # of a block layout

    def __str__(self) -> str:
        sizes = {"block": f"{self.block_q} x {self.block_kv}", "gather": f"gather {self.block_q}"}
        return f"{self.implementation.name} {sizes.get(self.form, self.form)}"


def choose(plan: Plan, pattern: Pattern, q_offset: int) -> Chosen:
    """The implementation that computes a call, and the layout that it reads.

    It is the first of the plan where that reads no block layout, or where one tile is offered and each row keeps one
    interval. Else it is the one whose tile or gather layout is estimated to take the least time.
    """
    p, first = plan.problem, plan.implementations[0]
    if first.layout != "block":
        return Chosen(first, first.layout)
    (walker, tile), *others = plan.offers
    if not others and pattern.keeps_intervals(Sizes(p.Q, p.K, q_offset)):  # no gather layout takes less
        block_q, block_kv = tile
        return Chosen(walker, "block", block_q, block_kv)
    machine = machine_of(p, pattern)
    at = cheapest(pattern, p.Q, p.K, tiles=plan.tiles, gathers=plan.gathers, q_offset=q_offset, machine=machine)
    if at < len(plan.tiles):
        walker, costs = plan.options[at]
        return Chosen(walker, "block", costs.block_q, costs.block_kv)
    gatherer, gather = plan.gather_options[at - len(plan.tiles)]
    return Chosen(gatherer, "gather", gather.choice.block_q)


_plans: Memo[Plan] = Memo()


def plan_of(problem: Problem, implementation: str | None = None, backward: bool = False) -> Plan:
    """The plan of a problem's forward, with that of its backward where it has one.

    It has the implementations in the table that support the problem, or the one named. One that is chosen, not named,
    may compute the forward alone: the backward reads out and lse, whoever made them.

    Args:
        backward: the plan is that of the backward alone.

    Raises:
        Unsupported: nothing, or not the one named, computes the problem; the message has every reason.
    """
    key = problem, implementation, backward
    return _plans.get_or_make(key, lambda: _make_plan(*key))


def _make_plan(problem: Problem, implementation: str | None, backward: bool) -> Plan:
    later = None
    if problem.backward and not backward and implementation is None:
        later = plan_of(problem, backward=True)  # raises before anything is computed
        problem = replace(problem, backward=False)
    refused: list[str] = []
    able: list[Candidate] = []
    for name in NAMES if implementation is None else [implementation]:
        loaded = load(name)
        if able and not isinstance(loaded, str) and loaded.layout != "block":
            continue  # it would come first or not at all: choices are among tiles
        if isinstance(loaded, str) or reasons(problem, loaded.capability) or loaded.unavailable():
            refused.append(name)
        else:
            able.append(loaded)
    if not able:
        raise Unsupported(_refusal(implementation, problem, refused))
    return Plan(problem, tuple(able), tuple(refused), later)


def _refusal(named: str | None, problem: Problem, refused: list[str]) -> str:
    text = "; ".join(f"{name}: {', '.join(refusals(name, problem))}" for name in refused)
    if named is None:
        return f"no implementation computes this problem: {text}"
    others = [name for name in NAMES if name != named and not refusals(name, problem)]
    return f"implementation={named!r} cannot compute this problem: {text}; available: {', '.join(others) or 'none'}"


def refusals(name: str, problem: Problem) -> list[str]:
    """The reasons for which an implementation does not compute a problem; empty when it does."""
    implementation = load(name)
    if isinstance(implementation, str):
        return [implementation]
    return implementation.unavailable() + reasons(problem, implementation.capability)
