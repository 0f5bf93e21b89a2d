"""What each layout of a pattern takes, and which takes the least: by counted work and measured rates, none is built."""

from __future__ import annotations

from math import inf
from typing import Literal, NamedTuple

from gossamer.layouts.gather import WIDTHS, item_limit
from gossamer.memo import Memo
from gossamer.patterns.base import Pattern
from gossamer.plan.capability import Candidate, GatherChoice, TileChoice
from gossamer.plan.estimate import Sample
from gossamer.plan.plan import Plan
from gossamer.plan.problem import Problem

# A tile that executes no more than this for each useful pair is not compared with others.
WORTH_A_LOOK = 1.25
# Nor are gather layouts where the best tile takes no more than this, in pairs at rate 1, for each useful pair: the
# cheapest of them takes as much when 64 rows keep the same keys.
WORTH_A_GATHER = 3.0
# What a query row costs with tiles, in the same unit: fetching and storing it, beginning and ending its loop.
TILE_ROW = 400.0
# What a pair of a bits tile costs above one of a full tile.
BITS_PAIR = 0.28
# Of one processor, in the same unit: beginning and ending a launch, a second launch that joins the parts of long rows
# with them, and a tile beside its pairs, while it follows another. Measured on an H200 at 512 to 4096 positions, D 128.
START, JOIN, TILE_STEP, STEP_PAIR = 5e4, 4.5e4, 4500.0, 0.7

_costs: Memo[tuple[float, ...]] = Memo()


class Machine(NamedTuple):
    """How often the lists of a pattern are computed, by heads and batch elements that share them, and by how many."""

    copies: int = 1
    processors: int = 0  # that work at the same time; 0: the longest row is not looked at

    def time(self, total: float, chain: float, cut: bool) -> float:
        """Of all rows, or of the longest one alone where that takes more.

        Args:
            total: of all rows; chain: of the longest, in pairs of one processor, of which the device computes
                `processors` in the time of one.
            cut: whether a second launch joins parts of rows.
        """
        one = self.processors / self.copies
        return max(total, one * (START + chain)) + one * JOIN * cut

    def limit(self, longest: int, tiles: float, rows: int) -> int:
        """The most steps of an item: long rows are cut in two, and only where rows are many.

        Args:
            longest: steps of the longest row; tiles: of all `rows` of the lists.
        """
        every, work = rows * self.copies, self.processors
        if every <= work // 2:  # a few steps are not cut
            return max(4, -(-longest * every // work))
        if every <= 2 * work or longest <= 2 * max(16.0, tiles / rows):
            return longest
        return -(-longest // 2)


# One whose processors are not known.
ANY_MACHINE = Machine()


def costs(
    pattern: Pattern,
    Q: int,
    K: int,
    *,
    tiles: tuple[TileChoice, ...],
    gathers: tuple[GatherChoice, ...] = (),
    q_offset: int,
    machine: Machine = ANY_MACHINE,
) -> tuple[float, ...]:
    """What each option takes, in pairs of a full tile at rate 1, counted on windows of rows without building a layout.

    Small problems take as long as their longest row; see `Machine`. Those that need no look are left out at the end:
    all after the first tile where that executes at most 1.25 pairs for each useful one, and the gather layouts where
    none can be the cheapest or each row keeps one interval.

    Args:
        tiles: of block layouts, the preferred one first.
        gathers: gather layouts.
    """
    key = (pattern, Q, K, q_offset, tiles, gathers, machine)
    known = _costs.get(key)
    if known is None:
        known = _costs.put(key, tuple(_count(pattern, Q, K, tiles, gathers, q_offset, machine)))
    return known


def _count(
    pattern: Pattern,
    Q: int,
    K: int,
    tiles: tuple[TileChoice, ...],
    gathers: tuple[GatherChoice, ...],
    q_offset: int,
    machine: Machine,
) -> list[float]:
    sample, found, useful = Sample(pattern, pattern._sizes(Q, K, q_offset)), [], 0.0
    for block_q, block_kv, rate in tiles:
        work = sample.tiles(block_q, block_kv)
        total = (work.executed + BITS_PAIR * work.bits) / rate + TILE_ROW * Q * pattern.lead[0] * pattern.lead[1]
        limit = machine.limit(work.longest, work.tiles, work.rows)
        step = (
            (TILE_STEP + STEP_PAIR * block_q * block_kv) * (1 + BITS_PAIR * work.bits / max(1.0, work.executed)) / rate
        )
        found.append(machine.time(total, min(work.longest, limit) * step, work.longest > limit))
        useful = work.useful
        if len(found) == 1 and work.executed <= WORTH_A_LOOK * useful:
            return found
    if min(found) > WORTH_A_GATHER * useful and not sample.intervals:
        for choice in gathers:
            counts = sample.gathers(choice.block_q)
            total = choice.column * counts.columns + choice.pair * counts.executed + choice.row * counts.rows
            if choice.part:
                width = WIDTHS[choice.block_q]
                limit = item_limit(
                    counts.groups, machine.copies, counts.steps, width, machine.processors, choice.part
                )  # fmt: skip
            else:
                limit = machine.limit(counts.longest, counts.steps, counts.groups)
            total += START * machine.processors / machine.copies
            cost = machine.time(total, min(counts.longest, limit) * choice.step, counts.longest > limit)
            found.append(cost if useful >= choice.reuse * counts.columns else inf)
    return found


def cheapest(
    pattern: Pattern,
    Q: int,
    K: int,
    *,
    tiles: tuple[TileChoice, ...],
    gathers: tuple[GatherChoice, ...] = (),
    q_offset: int,
    machine: Machine = ANY_MACHINE,
) -> int:
    """Which option takes the least, by `costs`: an index into the tiles, and after them the gather layouts."""
    if len(tiles) == 1 and not gathers:
        return 0
    found = costs(pattern, Q, K, tiles=tiles, gathers=gathers, q_offset=q_offset, machine=machine)
    return found.index(min(found))


class Chosen(NamedTuple):
    """Which implementation computes a call, and what it reads."""

    implementation: Candidate
    form: Literal["dense", "words", "block", "gather"]
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
    machine = machine_of(p, pattern)
    at = cheapest(pattern, p.Q, p.K, tiles=plan.tiles, gathers=plan.gathers, q_offset=q_offset, machine=machine)
    if at < len(plan.tiles):
        walker, tile = plan.options[at]
        return Chosen(walker, "block", tile.block_q, tile.block_kv)
    gatherer, choice = plan.gather_options[at - len(plan.tiles)]
    return Chosen(gatherer, "gather", choice.block_q)


def machine_of(problem: Problem, pattern: Pattern) -> Machine:
    """How often the lists of a pattern are computed in a call, and by how many processors; 0 on a CPU."""
    b, h = pattern.lead
    return Machine(
        (problem.B if b == 1 else 1) * (problem.H if h == 1 else 1),
        problem.processors if problem.device == "cuda" else 0,
    )
