"""What a call is estimated to take, by each way that it could be computed, and what would make it faster.

Estimates are of the device's work alone. They are counted as the plan counts them, and turned into seconds by rates of
one H200: right to a third or so, and there are none for other devices and types.
"""

from __future__ import annotations

from collections.abc import Sequence
from dataclasses import replace
from math import isfinite

from gossamer.patterns import CSR, Dense, Pattern
from gossamer.plan.choice import costs, machine_of
from gossamer.plan.plan import Plan, refusals
from gossamer.plan.problem import Problem
from gossamer.plan.table import NAMES, load

# Pairs of full tiles at rate 1 in a second, by the larger head size: forward, backward.
PAIRS = {64: (2.2e12, 7.2e11), 128: (1.45e12, 5.0e11), 256: (5.8e11, 2.2e11)}
MEASURED_SM = 90
SHORT = ("bfloat16", "float16")
MANY = 3.0  # executed pairs for each kept one, from which on it is said
WORTH = 0.8  # of the time of a call: what takes less is named


def pairs_per_second(p: Problem) -> float | None:
    """The rate in which estimates are turned into seconds; None where it was not measured."""
    bucket = next((size for size in PAIRS if max(p.D, p.E) <= size), None)
    if p.sm != MEASURED_SM or p.dtype not in SHORT or bucket is None:
        return None
    return PAIRS[bucket][p.backward]


def ways(plan: Plan, pattern: Pattern, q_offset: int) -> tuple[tuple[str, float], ...]:
    """What each layout that a plan could take was counted to take, in pairs of all heads; the least first.

    Empty where the first implementation walks no layout. Those that were not counted, since others are surely less,
    are left out.
    """
    p = plan.problem
    if plan.implementations[0].layout != "block":
        return ()
    machine = machine_of(p, pattern)
    found = costs(pattern, p.Q, p.K, tiles=plan.tiles, gathers=plan.gathers, q_offset=q_offset, machine=machine)
    names = [f"{i.name} {block_q} x {block_kv}" for i, (block_q, block_kv, _) in plan.options]
    names += [f"{i.name} gather {choice.block_q}" for i, choice in plan.gather_options]
    taken = zip(names, found, strict=False)  # the costs may stop early; infinite ones were not measured to win
    return tuple(sorted(((n, c * machine.copies) for n, c in taken if isfinite(c)), key=lambda way: way[1]))


def all_pairs(plan: Plan) -> float | None:
    """Seconds of a call that keeps every pair."""
    rate, counts = pairs_per_second(plan.problem), ways(plan, Dense(), 0)
    return counts[0][1] / rate if counts and rate is not None else None


def advice(
    plan: Plan,
    pattern: Pattern | None,
    q_offset: int,
    fill: float,
    planned_again: Sequence[str],
    reordered: bool = False,
) -> tuple[str, ...]:
    """What would make a call faster.

    Args:
        pattern: None where tensors say what is attended.
        fill: executed pairs for each kept one.
        planned_again: why repetitions of the call are planned again.
        reordered: the pattern is that of a graph in an order of its own.
    """
    found: list[str] = []
    if plan.implementations[0].layout == "block":
        found += _others(plan, pattern, q_offset) if pattern is not None else []
        if fill > MANY:
            one = f"{fill:.1f} pairs are executed for each that is kept"
            if isinstance(pattern, CSR) and not reordered:
                one += "; CSR.reordered() brings rows with the same keys together"
            found.append(one)
    if planned_again:
        found.append(f"repetitions are planned again on the host: {', '.join(planned_again)}")
    return tuple(found)


def _others(plan: Plan, pattern: Pattern, q_offset: int) -> list[str]:
    """Calls like this one, without a score term or in 16 bits, that would take less."""
    p, taken = plan.problem, ways(plan, pattern, q_offset)
    rate, found = pairs_per_second(p), []
    changed = {f"without {term}": replace(p, score_terms=p.score_terms - {term}) for term in sorted(p.score_terms)}
    if p.dtype in ("float32", "float64"):
        changed["in bfloat16"] = replace(p, dtype="bfloat16")
    for change, problem in changed.items():
        able = [load(name) for name in NAMES if not refusals(name, problem)]
        other = Plan(problem, tuple(i for i in able if not isinstance(i, str)), ())
        counts = ways(other, pattern, q_offset)
        other_rate = pairs_per_second(problem)
        if not counts or other_rate is None or (rate is not None and counts[0][0] == taken[0][0]):
            continue
        seconds = counts[0][1] / other_rate
        if rate is None or seconds < WORTH * taken[0][1] / rate:
            found.append(f"{change} it would take about {shown(seconds)}, by {counts[0][0]}")
    return found


def shown(seconds: float) -> str:
    """A time with its unit."""
    return f"{1e3 * seconds:.3g} ms" if seconds >= 1e-4 else f"{1e6 * seconds:.3g} us"
