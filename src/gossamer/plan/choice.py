"""The time of each layout of a pattern by counted work and measured costs, and the cheapest; no layout is built."""

from __future__ import annotations

from math import inf, prod
from typing import Literal, NamedTuple

from gossamer.layouts.gather import WIDTHS, item_limit
from gossamer.layouts.work_list import FEWEST_TILES
from gossamer.memo import Memo
from gossamer.patterns.base import Pattern
from gossamer.patterns.grid import Sizes
from gossamer.plan.capability import Candidate
from gossamer.plan.costs import GatherCosts, TileCosts, costs_of
from gossamer.plan.estimate import Sample
from gossamer.plan.plan import Plan
from gossamer.plan.problem import Problem

# A tile that executes no more than this for each useful pair is not compared with others.
WORTH_A_LOOK = 1.25

_costs: Memo[tuple[float, ...]] = Memo()


class Machine(NamedTuple):
    """How often the lists of a pattern are computed, by heads and batch elements that share them, and by how many.

    Times are in seconds; see `plan.costs`.
    """

    copies: int = 1
    processors: int = 0  # that work at the same time; 0: the longest row is not looked at
    start: float = 0.0  # of a launch
    combine: float = 0.0  # of one that combines parts of rows
    gathers_from: float = 0.0  # of the best tile for each useful pair, from which on gather layouts are counted

    def time(self, total: float, chain: float, split: bool) -> float:
        """The time of all rows, or of the longest one alone where that takes more.

        Args:
            total: of all rows of one copy; chain: of the longest; split: whether parts of rows are combined.
        """
        every = self.copies * total
        return max(every, self.start + chain) + self.combine * split if self.processors else every

    def limit(self, longest: int, tiles: float, rows: int) -> int:
        """The most steps of an item: long rows are cut in two, and only where rows are many.

        Args:
            longest: steps of the longest row; tiles: of all `rows` of the lists.
        """
        every, work = rows * self.copies, self.processors
        if every <= work // 2:  # a few steps are not cut
            return max(4, -(-longest * every // work))
        if every <= 2 * work or longest <= 2 * max(FEWEST_TILES, tiles / rows):
            return longest
        return -(-longest // 2)


# One whose processors are not known.
ANY_MACHINE = Machine()


def costs(
    pattern: Pattern,
    Q: int,
    K: int,
    *,
    tiles: tuple[TileCosts, ...],
    gathers: tuple[GatherCosts, ...] = (),
    q_offset: int,
    machine: Machine = ANY_MACHINE,
) -> tuple[float, ...]:
    """The seconds that each option takes, counted on windows of rows without building a layout.

    Small problems take as long as their longest row; see `Machine`. Options that need no look are left out at the end:
    all after the first tile where that executes at most 1.25 pairs for each useful one, and the gather layouts where
    none can be the cheapest or each row keeps one interval.

    Args:
        tiles: of block layouts, the preferred one first.
        gathers: gather layouts.
    """
    key = (pattern, Q, K, q_offset, tiles, gathers, machine)
    return _costs.get_or_make(key, lambda: tuple(_count(pattern, Q, K, tiles, gathers, q_offset, machine)))


def _count(
    pattern: Pattern,
    Q: int,
    K: int,
    tiles: tuple[TileCosts, ...],
    gathers: tuple[GatherCosts, ...],
    q_offset: int,
    machine: Machine,
) -> list[float]:
    sizes, estimates, useful = pattern._sizes(Q, K, q_offset), [], 0.0
    sample = Sample(pattern, sizes)
    for tile in tiles:
        work = sample.tiles(tile.block_q, tile.block_kv)
        pairs, bits = tile.pair * work.executed, tile.bits * work.bits
        total = pairs + bits + tile.row * Q * prod(pattern.lead)
        limit = machine.limit(work.longest, work.tiles, work.rows)
        step = tile.step * (1 + bits / pairs) if pairs else tile.step
        estimates.append(machine.time(total, min(work.longest, limit) * step, work.longest > limit))
        useful = work.useful
        if len(estimates) == 1 and work.executed <= WORTH_A_LOOK * useful:
            return estimates
    if min(estimates) > machine.copies * machine.gathers_from * useful and not pattern.keeps_intervals(sizes):
        for cost in gathers:
            choice = cost.choice
            counts = sample.gathers(choice.block_q)
            total = cost.column * counts.columns + cost.pair * counts.executed + cost.row * counts.rows
            if choice.spread:
                width = WIDTHS[choice.block_q]
                limit = item_limit(counts.groups, machine.copies, counts.steps, width, machine.processors)
            else:
                limit = machine.limit(counts.longest, counts.steps, counts.groups)
            total += machine.start / machine.copies
            seconds = machine.time(total, min(counts.longest, limit) * cost.step, counts.longest > limit)
            estimates.append(seconds if useful >= choice.reuse * counts.columns else inf)
    return estimates


def cheapest(
    pattern: Pattern,
    Q: int,
    K: int,
    *,
    tiles: tuple[TileCosts, ...],
    gathers: tuple[GatherCosts, ...] = (),
    q_offset: int,
    machine: Machine = ANY_MACHINE,
) -> int:
    """The option that takes the least by `costs`: an index into the tiles, then the gather layouts."""
    if len(tiles) == 1 and (not gathers or pattern.keeps_intervals(pattern._sizes(Q, K, q_offset))):
        return 0
    seconds = costs(pattern, Q, K, tiles=tiles, gathers=gathers, q_offset=q_offset, machine=machine)
    return seconds.index(min(seconds))


class Chosen(NamedTuple):
    """The implementation that computes a call, and the layout that it reads."""

    implementation: Candidate
    form: Literal["dense", "packed_mask", "block", "gather"]
    block_q: int = 0  # of a block layout or a gather layout
    block_kv: int = 0  # of a block layout

    def __str__(self) -> str:
        sizes = {"block": f"{self.block_q} x {self.block_kv}", "gather": f"gather {self.block_q}"}
        return f"{self.implementation.name} {sizes.get(self.form, self.form)}"


def choose(plan: Plan, pattern: Pattern, q_offset: int) -> Chosen:
    """The first implementation of a plan; for a pattern that leaves most of its tiles empty, the one whose tile, or
    gather layout, takes the least time by counted work.
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


def machine_of(problem: Problem, pattern: Pattern) -> Machine:
    """How often the lists of a pattern are computed in a call, and by how many processors; 0 on a CPU."""
    (b, h), p = pattern.lead, problem
    copies = (p.B if b == 1 else 1) * (p.H if h == 1 else 1)
    costs = costs_of(p)
    if p.device != "cuda":
        return Machine(copies, gathers_from=costs.gathers_from)
    return Machine(copies, p.processors, costs.of_device("start"), costs.of_device("combine"), costs.gathers_from)
