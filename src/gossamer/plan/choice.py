"""The time of each layout of a pattern by counted work and measured costs, and the cheapest; no layout is built."""

from __future__ import annotations

from math import inf, prod
from typing import NamedTuple

from gossamer.layouts.gather import WIDTHS, item_limit
from gossamer.layouts.work_list import FEWEST_TILES
from gossamer.memo import Memo
from gossamer.patterns.base import Pattern
from gossamer.plan.costs import GatherCosts, TileCosts, costs_of
from gossamer.plan.estimate import Sample
from gossamer.plan.problem import Problem

# If the first tile executes no more pairs than this for each useful pair, nothing else is compared.
WORTH_A_LOOK = 1.25

_costs: Memo[tuple[float, ...]] = Memo()


class Machine(NamedTuple):
    """What an estimate needs beside the layout: how many heads and batch elements share the lists, and the device.

    Times are in seconds; see `plan.costs`.
    """

    copies: int = 1  # heads times batch elements that share the lists, each of which computes them
    processors: int = 0  # that work at the same time; 0: unknown, and the longest row is ignored
    start: float = 0.0  # to begin and end a launch
    combine: float = 0.0  # of a second launch, which combines the parts of split rows
    gathers_from: float = 0.0  # gather layouts are counted if the best tile takes more than this for each useful pair

    def time(self, total: float, chain: float, split: bool) -> float:
        """The time of all rows, or of the longest one alone where that takes more.

        Args:
            total: of all rows of one copy; chain: of the longest; split: whether parts of rows are combined.
        """
        every = self.copies * total
        return max(every, self.start + chain) + self.combine * split if self.processors else every

    def limit(self, longest: int, tiles: float, rows: int) -> int:
        """The most steps of a work item; a row with more is split.

        If rows are few (at most half as many as processors), rows are split so that every processor has work. If they
        are many, a row of over twice the mean is split in two. In between none is split.

        Args:
            longest: steps of the longest row.
            tiles: steps of all rows of the lists.
            rows: of the lists.
        """
        every, work = rows * self.copies, self.processors
        if every <= work // 2:  # a part has at least 4 steps
            return max(4, -(-longest * every // work))
        if every <= 2 * work or longest <= 2 * max(FEWEST_TILES, tiles / rows):
            return longest
        return -(-longest // 2)


# A machine whose processors are not known.
ANY_MACHINE = Machine()


def costs(
    pattern: Pattern, Q: int, K: int, *, tiles: tuple[TileCosts, ...], gathers: tuple[GatherCosts, ...] = (),
    q_offset: int, machine: Machine = ANY_MACHINE,
) -> tuple[float, ...]:  # fmt: skip
    """The estimated seconds of each option: of `tiles`, then of `gathers`. No layout is built.

    Work is counted on windows of rows. A small problem takes as long as its longest row; see `Machine`. The result is
    shorter where the rest cannot win: only the first tile if that executes at most 1.25 pairs for each useful one, and
    no gather layouts if none can be the cheapest or each row keeps one interval.

    Args:
        tiles: costs of block layouts, the preferred one first.
        gathers: costs of gather layouts.
    """
    key = (pattern, Q, K, q_offset, tiles, gathers, machine)
    return _costs.get_or_make(key, lambda: tuple(_count(pattern, Q, K, tiles, gathers, q_offset, machine)))


def _count(
    pattern: Pattern, Q: int, K: int, tiles: tuple[TileCosts, ...], gathers: tuple[GatherCosts, ...], q_offset: int,
    machine: Machine,
) -> list[float]:  # fmt: skip
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
    pattern: Pattern, Q: int, K: int, *, tiles: tuple[TileCosts, ...], gathers: tuple[GatherCosts, ...] = (),
    q_offset: int, machine: Machine = ANY_MACHINE,
) -> int:  # fmt: skip
    """The option that takes the least by `costs`: an index into the tiles, then the gather layouts."""
    if len(tiles) == 1 and (not gathers or pattern.keeps_intervals(pattern._sizes(Q, K, q_offset))):
        return 0
    seconds = costs(pattern, Q, K, tiles=tiles, gathers=gathers, q_offset=q_offset, machine=machine)
    return seconds.index(min(seconds))


def machine_of(problem: Problem, pattern: Pattern) -> Machine:
    """The `Machine` of a call. On a CPU `processors` is 0: the longest row is ignored."""
    (b, h), p = pattern.lead, problem
    copies = (p.B if b == 1 else 1) * (p.H if h == 1 else 1)
    costs = costs_of(p)
    if p.device != "cuda":
        return Machine(copies, gathers_from=costs.gathers_from)
    return Machine(copies, p.processors, costs.of_device("start"), costs.of_device("combine"), costs.gathers_from)
