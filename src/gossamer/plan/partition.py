"""The calls that compute a call: one, or several over strided views of its tensors, whichever counts less work.

A piece of a pattern that is plain inside residue classes is a part of its own: all its classes in one call, as batch
elements of a view. So are heads whose patterns differ in that. Nothing is computed and no layout is built here.
"""

from __future__ import annotations

from dataclasses import dataclass, replace
from functools import lru_cache
from typing import Any, NamedTuple

from gossamer.memo import LEAST, Memo
from gossamer.patterns import LongNet, Pattern, PerHead, SlidingWindow
from gossamer.patterns.grid import Grid, Sizes
from gossamer.patterns.pieces import Piece, branch_pieces, pieces
from gossamer.plan.costs import GatherCosts, TileCosts, costs_of
from gossamer.plan.problem import Problem
from gossamer.plan.residue import Run, runs

Tiles = tuple[TileCosts, ...]
Gathers = tuple[GatherCosts, ...]


class Heads(NamedTuple):
    """The query heads start, start + step, ... of a part, and the key heads that they use."""

    start: int
    number: int
    step: int
    key_start: int
    key_number: int
    key_step: int


@dataclass(frozen=True)
class Part:
    """One call over views: the heads `heads`, inside the classes `run` modulo `dilation`.

    The classes are batch elements of the view. Where `diagonal`, each has query heads of its own, those of `heads`
    shifted by n for the class first + n, and where `key_diagonal` key heads.
    """

    pattern: Pattern
    heads: Heads
    dilation: int
    run: Run
    cost: float  # seconds of the forward, estimated
    diagonal: bool = False
    key_diagonal: bool = False
    combines: int = 0  # how many earlier parts compute its rows as well: results are combined by log-sum-exp
    adds: bool = False  # its keys, and so their gradients

    def __str__(self) -> str:
        text, count = repr(self.pattern), self.run.classes
        if self.dilation > 1:
            plain = "plain windows, " if isinstance(self.pattern, SlidingWindow) else ""
            sizes = f"{self.run.Q:,} queries and {self.run.K:,} keys each"
            text = f"{count} views of {plain}{text}, by steps of {self.dilation} positions, {sizes}"
        h = self.heads
        heads = range(h.start, h.start + h.number * h.step, h.step)
        own = f", {len(heads) * count} heads in a class each" if self.diagonal else f", heads {_shown(heads)}"
        return text + own + ", merged" * bool(self.combines)


@dataclass(frozen=True)
class Partition:
    """The parts of a call, in the order of their launch, and what was compared."""

    parts: tuple[Part, ...]
    cost: float
    whole: float  # estimated seconds of one call
    rows_left: bool  # some rows belong to no part
    keys_left: bool

    @property
    def depth(self) -> int:
        """The most parts that meet in a row."""
        return 1 + max(part.combines for part in self.parts)

    @property
    def key_depth(self) -> int:
        """The most parts that may meet in a key; 3 stands for more."""
        adds = sum(part.adds for part in self.parts)
        return 1 if not adds else max(self.depth, 2 if all(part.combines for part in self.parts if part.adds) else 3)


_partitions: Memo[tuple[Partition | None]] = Memo()


def partition_of(
    pattern: Pattern, problem: Problem, q_offset: int, tiles: Tiles, gathers: Gathers = ()
) -> Partition | None:
    """The parts of a call, or None where one call takes less (or where nothing in the pattern is dilated).

    Args:
        tiles: what the implementations that may compute it offer.
        gathers: the gather layouts that they offer.
    """

    def make() -> tuple[Partition | None]:
        batch_elements, _ = pattern.lead
        if not tiles or batch_elements != 1 or problem.tile is not None:
            return (None,)
        pattern.check(problem.Q, problem.K, problem.H, problem.B, placed=True)
        return (_partition(pattern, problem, q_offset, tiles, gathers),)

    (partition,) = _partitions.get_or_make((pattern.handle, problem, q_offset, tiles, gathers), make)
    return partition


def _partition(pattern: Pattern, p: Problem, q_offset: int, tiles: Tiles, gathers: Gathers) -> Partition | None:
    sizes = Sizes(p.Q, p.K, q_offset)
    cost = Costs(p, tiles, gathers)
    if isinstance(pattern, LongNet):
        split, group = branch_pieces(pattern), p.H // p.G
        if split is not None and all(r % group == 0 or group % r == 0 for _, r in split):
            return _cheaper(_diagonal_parts(split, p, sizes, cost), pattern, p, sizes, cost)
    _, own = pattern.lead
    by_head = [pattern.at(0, h) for h in range(p.H)] if own > 1 else [pattern.at(0, 0)] * p.H
    chosen: dict[Pattern, tuple[Piece, ...]] = {}
    for one in dict.fromkeys(by_head):
        chosen[one] = (Piece(one),)
        given = pieces(one, sizes)
        if given != chosen[one] and _classes_cost(given, p.B, sizes, cost) < cost.call(one, p.B, sizes):
            chosen[one] = given
    if all(sum(piece.dilation for piece in given) == 1 for given in chosen.values()):  # one, that is not dilated
        return None
    groups: dict[Any, list[int]] = {}
    for h, one in enumerate(by_head):
        plain = chosen[one] == (Piece(one),)
        groups.setdefault(None if plain else one, []).append(h)
    parts = []
    owned: set[int] = set()
    for group, members in groups.items():
        for heads in head_runs(members, p.H // p.G):
            keys = range(heads.key_start, heads.key_start + heads.key_number * heads.key_step, heads.key_step)
            shared = not owned.isdisjoint(keys)
            owned.update(keys)
            mine = [by_head[heads.start + n * heads.step] for n in range(heads.number)]
            if group is None:
                together = mine[0] if len(set(mine)) == 1 else PerHead(mine)
                split = (Piece(together),)
            else:
                split = chosen[group]
            parts += _parts(split, heads, p, sizes, cost, shared)
    return _cheaper(parts, pattern, p, sizes, cost)


def _parts(split: tuple[Piece, ...], heads: Heads, p: Problem, sizes: Sizes, cost: Costs, shared: bool) -> list[Part]:
    """The parts of some heads that have the same pieces."""
    made = []
    for at, piece in enumerate(split):
        for run in _classes(piece.dilation, sizes):
            seconds = cost.call(piece.pattern, p.B * run.classes * heads.number, run_sizes(run), per_head=False)
            made.append(Part(piece.pattern, heads, piece.dilation, run, seconds, combines=at, adds=at > 0 or shared))
    return made


def _diagonal_parts(split: tuple[Piece, ...], p: Problem, sizes: Sizes, cost: Costs) -> list[Part]:
    """Head h computes the pieces in class h % dilation: of the first `dilation` heads each has its own, and so on.

    The classes of a part are as many as have one stride: with grouped queries, those whose heads share key heads.
    """
    made, group = [], p.H // p.G
    for at, piece in enumerate(split):
        r, rounds = piece.dilation, p.H // piece.dilation
        width = r if group == 1 else min(r, group)
        # Class n belongs to the heads n, n + r, ...: `rounds` of them, and one more of the last that are fewer than r.
        blocks = [(n, rounds) for n in range(0, r, width) if rounds]
        blocks += [(n, 0) for n in range(0, p.H % r, width)]
        for block, count in blocks:
            stop = min(block + width, r if count else p.H % r)
            for run in _classes(r, sizes):
                a, z = max(block, run.first), min(stop, run.first + run.classes)
                if a >= z:
                    continue
                mine, head, number = (
                    run.select(a - run.first, z - run.first),
                    a if count else rounds * r + a,
                    max(1, count),
                )
                keys, step = (p.G, 1) if r < group else (number, max(1, r // group))
                heads = Heads(head, number, r, head // group, keys, step)
                seconds = cost.call(piece.pattern, p.B * mine.classes * number, run_sizes(mine), per_head=False)
                made.append(
                    Part(
                        piece.pattern, heads, r, mine, seconds, diagonal=r > 1, key_diagonal=r > 1 and group == 1,
                        combines=at, adds=at > 0,
                    )
                )  # fmt: skip
    return made


def _cheaper(parts: list[Part], pattern: Pattern, p: Problem, sizes: Sizes, cost: Costs) -> Partition | None:
    """The parts, longest first, if they take less than one call; it computes what keeps nothing in any class."""
    later = [part for part in parts if part.combines]
    combined = sum(cost.combine(p.B * part.heads.number * part.run.classes * part.run.Q) for part in later)
    seconds = sum(part.cost for part in parts) + combined + cost.device.of_device("views")
    whole = cost.call(pattern, p.B, sizes)
    if not parts or seconds >= whole:
        return None
    rows = sum(part.heads.number * part.run.classes * part.run.Q for part in parts if not part.combines)
    keys = sum(part.heads.key_number * part.run.classes * part.run.K for part in parts if not part.adds)
    order = sorted(parts, key=lambda part: (part.combines, part.adds, -part.cost))
    return Partition(tuple(order), seconds, whole, rows < p.H * p.Q, keys < p.G * p.K)


class Costs:
    """Seconds of the forward, from counts of tiles."""

    def __init__(self, problem: Problem, tiles: Tiles, gathers: Gathers) -> None:
        self.problem, self.tiles, self.gathers, self.device = problem, tiles, gathers, costs_of(problem)
        self.one = self.device.of_device("call")

    def call(self, pattern: Pattern, copies: int, sizes: Sizes, per_head: bool = True) -> float:
        """One call. `copies` are batch elements, and heads of a shared pattern too where not `per_head`."""
        _, heads = pattern.lead
        seconds = sum(_seconds(pattern.at(0, h), sizes, self.tiles, self.gathers) for h in range(heads))
        if heads == 1 and per_head:
            copies *= self.problem.H
        elif heads > 1 and not per_head:
            copies //= heads
        return self.one + copies * seconds

    def combine(self, rows: int) -> float:
        """Three passes over float32 rows."""
        return 12.0 * rows * self.problem.E / self.device.of_device("bytes")


@lru_cache(LEAST)
def _seconds(pattern: Pattern, sizes: Sizes, tiles: Tiles, gathers: Gathers) -> float:
    """The seconds of the tiles that a pattern of one head may visit, or of gathering its keys row by row."""
    lower, seconds = pattern.lower(sizes), []
    for t in tiles:
        seconds.append(t.pair * t.block_q * t.block_kv * lower.tile_bound(Grid(*sizes, t.block_q, t.block_kv)))
    one_row = [cost for cost in gathers if cost.choice.block_q == 1]
    kept = lower.pairs_kept(sizes) if one_row else None
    if kept is not None:
        seconds += [cost.column * kept + cost.row * sizes.Q for cost in one_row]
    return min(seconds)


def _classes_cost(split: tuple[Piece, ...], B: int, sizes: Sizes, cost: Costs) -> float:
    """The cost of the pieces of a pattern that every head shares."""
    seconds = 0.0
    for at, piece in enumerate(split):
        for run in _classes(piece.dilation, sizes):
            seconds += cost.call(piece.pattern, B * run.classes, run_sizes(run))
            if at:
                seconds += cost.combine(B * cost.problem.H * run.classes * run.Q)
    return seconds


def _classes(dilation: int, sizes: Sizes) -> list[Run]:
    """The classes that have queries and keys."""
    if dilation == 1:
        return [Run(0, 1, 0, *sizes)]
    return [run for run in runs(*sizes, dilation) if run.Q and run.K]


def _shown(heads: range) -> str:
    return f"{heads[0]}" if len(heads) == 1 else f"{heads[0]} to {heads[-1]}" + f" by {heads.step}" * (heads.step > 1)


def run_sizes(run: Run) -> Sizes:
    """The sizes of one class of a run."""
    return Sizes(run.Q, run.K, run.q_offset)


def head_runs(members: list[int], group: int) -> list[Heads]:
    """Query heads, ascending, as few views: arithmetic progressions, of whole groups of a key head or within one."""
    if group == 1:
        return [Heads(start, count, step, start, count, step) for start, count, step in progressions(members)]
    own = set(members)
    whole = [g for g in {h // group for h in members} if all(g * group + n in own for n in range(group))]
    runs = []
    # Heads of neighbouring groups are one view: groups of a larger step are not.
    for start, count, step in progressions(sorted(whole)):
        if step == 1:
            runs.append(Heads(start * group, count * group, 1, start, count, 1))
        else:
            runs += [Heads(g * group, group, 1, g, 1, 1) for g in range(start, start + count * step, step)]
    rest: dict[int, list[int]] = {}
    for h in members:
        if h // group not in whole:
            rest.setdefault(h // group, []).append(h)
    for g, mine in rest.items():
        runs += [Heads(start, count, step, g, 1, 1) for start, count, step in progressions(mine)]
    return runs


def progressions(numbers: list[int]) -> list[tuple[int, int, int]]:
    """Ascending numbers as (start, count, step), each as long as it goes."""
    runs: list[tuple[int, int, int]] = []
    at = 0
    while at < len(numbers):
        step = numbers[at + 1] - numbers[at] if at + 1 < len(numbers) else 1
        count = 1
        while at + count < len(numbers) and numbers[at + count] == numbers[at] + count * step:
            count += 1
        runs.append((numbers[at], count, step))
        at += count
    return runs


def problem_of_fold(problem: Problem) -> Problem:
    """The problem with its batch elements seen as heads."""
    return replace(problem, B=1, H=problem.B * problem.H, G=problem.B * problem.G)
