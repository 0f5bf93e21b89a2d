"""Estimates of the time that each way to compute a call takes, and advice that would make it faster.

Estimates are of the device's work alone, as the plan counts them: right to a third or so on a device that was measured,
and for types that were; of others nothing is said but how they compare.
"""

from __future__ import annotations

from collections.abc import Sequence
from dataclasses import replace
from math import isfinite
from operator import attrgetter
from typing import NamedTuple

import numpy as np

from gossamer.patterns import CSR, Causal, Dense, Pattern
from gossamer.patterns.base import above
from gossamer.plan.choice import costs, machine_of
from gossamer.plan.costs import costs_of
from gossamer.plan.estimate import Sample
from gossamer.plan.plan import Plan, refusals
from gossamer.plan.table import NAMES, load

MANY = 3.0  # executed pairs for each kept one, from which on it is said
WORTH = 0.8  # of the time of a call: what takes less is named
TILE_BY_TILE = "fused attention computes it on a CPU, in 0.25 to 0.75 of the time"


class Way(NamedTuple):
    """A layout that a plan could take, by one of its implementations."""

    name: str
    seconds: float


def ways(plan: Plan, pattern: Pattern, q_offset: int) -> tuple[Way, ...]:
    """The seconds that each layout was counted to take, of those that a plan could take; the least first.

    Empty where the first implementation walks no layout. Those that were not counted, since others are surely less,
    are left out.
    """
    p = plan.problem
    if plan.implementations[0].layout != "block":
        return ()
    machine = machine_of(p, pattern)
    seconds = costs(pattern, p.Q, p.K, tiles=plan.tiles, gathers=plan.gathers, q_offset=q_offset, machine=machine)
    names = [f"{i.name} {tile.block_q} x {tile.block_kv}" for i, tile in plan.options]
    names += [f"{i.name} gather {gather.choice.block_q}" for i, gather in plan.gather_options]
    taken = map(Way, names, seconds)  # the costs may stop early; infinite ones were not measured to win
    return tuple(sorted((way for way in taken if isfinite(way.seconds)), key=attrgetter("seconds")))


def all_pairs(plan: Plan, causal: bool = False, q_offset: int = 0) -> float | None:
    """Seconds of a call that keeps every pair, or every one of a causal call."""
    return least(plan, ways(plan, Causal() if causal else Dense(), q_offset))


def executed_by_dense(plan: Plan, causal: bool, q_offset: int) -> float:
    """The pairs of one head that a call executes which keeps every pair, or every one of a causal call."""
    p = plan.problem
    if not causal or plan.implementations[0].layout != "block":
        return float(p.Q * p.K)
    return Sample(Causal(), Causal()._sizes(p.Q, p.K, q_offset)).tiles(*plan.implementations[0].tile(p)).executed


def is_causal(pattern: Pattern, Q: int, K: int, q_offset: int) -> bool:
    """Whether no query keeps a key behind its own position, where some could."""
    sizes = pattern._sizes(Q, K, q_offset)
    if q_offset >= K - 1:  # no key is behind any query
        return False
    parts, _ = pattern.distinct()
    intervals = [part.intervals(sizes) for part in parts]
    if all(found is not None for found in intervals):
        last = np.arange(Q) + q_offset
        return all(bool(((hi <= lo) | (hi - 1 <= last)).all()) for lo, hi in filter(None, intervals))
    return above.count_pairs(pattern & ~Causal(), sizes) == 0


def least(plan: Plan, counts: tuple[Way, ...]) -> float | None:
    """Seconds of the least of the `ways` of a plan; None where none was counted or measured."""
    return counts[0].seconds if counts and costs_of(plan.problem).measured else None


def of_dense(plan: Plan, seconds: float | None, causal: bool, q_offset: int) -> float | None:
    """The counted work of a call over that of one which keeps every pair, or every one of a causal call.

    Costs of another device of the kind tell it as well, since only how they compare counts.
    """
    dense = ways(plan, Causal() if causal else Dense(), q_offset)
    return None if seconds is None or not dense else seconds / dense[0].seconds


def advice(
    plan: Plan,
    pattern: Pattern | None,
    q_offset: int,
    fill: float,
    planned_again: Sequence[str],
    reordered: bool = False,
) -> tuple[str, ...]:
    """Lines that say how a call would be faster.

    Args:
        pattern: None where tensors say what is attended.
        fill: executed pairs for each kept one.
        planned_again: why repetitions of the call are looked at again.
        reordered: the pattern is that of a graph in an order of its own.
    """
    lines: list[str] = []
    first = plan.implementations[0]
    if plan.problem.device == "cpu":
        lines += [
            f"without {term} {TILE_BY_TILE}" for term in sorted(plan.problem.score_terms & first.capability.slower)
        ]
    if first.layout == "block":
        lines += _others(plan, pattern, q_offset) if pattern is not None else []
        if fill > MANY:
            one = f"{fill:.1f} pairs are executed for each that is kept"
            if isinstance(pattern, CSR) and not reordered:
                one += "; CSR.reordered() brings rows with the same keys together"
            lines.append(one)
    if planned_again:
        lines.append(f"repetitions are looked at again on the host: {', '.join(planned_again)}")
    return tuple(lines)


def _others(plan: Plan, pattern: Pattern, q_offset: int) -> list[str]:
    """Calls like this one, without a score term or in 16 bits, that would take less."""
    p, taken, lines = plan.problem, ways(plan, pattern, q_offset), []
    now = least(plan, taken)
    changed = {f"without {term}": replace(p, score_terms=p.score_terms - {term}) for term in sorted(p.score_terms)}
    if p.dtype in ("float32", "float64"):
        changed["in bfloat16"] = replace(p, dtype="bfloat16")
    for change, problem in changed.items():
        able = [load(name) for name in NAMES if not refusals(name, problem)]
        other = Plan(problem, tuple(i for i in able if not isinstance(i, str)), ())
        counts = ways(other, pattern, q_offset)
        seconds = least(other, counts)
        if seconds is None or (now is not None and counts[0].name == taken[0].name):
            continue
        if now is None or seconds < WORTH * now:
            lines.append(f"{change} it would take about {shown(seconds)}, by {counts[0].name}")
    return lines


def shown(seconds: float) -> str:
    """A time with its unit."""
    return f"{1e3 * seconds:.3g} ms" if seconds >= 1e-4 else f"{1e6 * seconds:.3g} us"
