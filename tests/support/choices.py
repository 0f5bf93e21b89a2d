"""What the plan chooses for every case and benchmark row, without the device: see tests/support/data/choices.txt.

python tests/support/choices.py --write  # after a change of the estimates: the file's difference is what they change
"""

from __future__ import annotations

import json
import sys
from collections.abc import Iterator
from contextlib import ExitStack, contextmanager
from dataclasses import replace
from functools import cache
from pathlib import Path
from unittest import mock

from gossamer.bench.results import read_records
from gossamer.patterns import Pattern
from gossamer.plan.partition import Part
from gossamer.plan.plan import choose, plan_of
from gossamer.plan.problem import Problem
from gossamer.plan.table import NAMES, load
from gossamer.testing.cases import CASES, Case
from gossamer.testing.sweeps import BREAKEVEN, LADDER, MOST_EDGES, SWEEPS

FILE = Path(__file__).parent / "data" / "choices.txt"
RESULTS = Path(__file__).parents[2] / "benchmarks" / "results"
PROCESSORS, SM = 132, 90  # of an H200
# Pairs of the graphs of sweeps: those of the largest take seconds to be drawn and counted.
GRAPHS = {c.name: round(float(c.name.split("_")[-1]) * c.Q * c.K) for c in BREAKEVEN if "_csr_" in c.name}


@contextmanager
def everywhere() -> Iterator[None]:
    """Every implementation runs here, on a device that is not there."""
    with ExitStack() as stack:
        for name in NAMES:
            stack.enter_context(mock.patch.object(type(load(name)), "unavailable", lambda self: []))
        yield


def problem_of(case: Case, dtype: str, backward: bool) -> Problem:
    """The static facts of a case."""
    terms = [name for name in ("key_lengths", "sink_logits", "alibi_slopes") if getattr(case, name)]
    terms += ["softcap"] if case.softcap is not None else []
    terms += ["alibi_distance"] if case.alibi_distance == "absolute" else []
    terms += ["q_offset"] if case.q_offset not in (None, case.K - case.Q) else []
    cuda = "cuda" in case.devices
    return Problem(
        case.B, case.H, case.G, case.Q, case.K, case.D, case.E, dtype, "cuda" if cuda else "cpu",
        sm=SM if cuda else None, processors=PROCESSORS if cuda else 1,
        score_terms=frozenset(terms), backward=backward, softcap=case.softcap,
    )  # fmt: skip


def chosen(case: Case, dtype: str, pattern: Pattern, backward: bool) -> str | list[str]:
    """How a case is computed: one way, or its parts, each with its own."""
    problem = problem_of(case, dtype, backward)
    q_offset = case.K - case.Q if case.q_offset is None else case.q_offset
    partition = plan_of(problem, backward=backward).partition(pattern.handle, q_offset)
    if partition is None:
        return way(problem, pattern, q_offset)
    return [f"{part} by {of_part(part, problem, q_offset)}" for part in partition.parts]


def way(problem: Problem, pattern: Pattern, q_offset: int) -> str:
    """The implementation and the layout that a call takes."""
    plan = plan_of(problem, backward=problem.backward)
    return str(choose(plan, pattern, q_offset))


def of_part(part: Part, problem: Problem, q_offset: int) -> str:
    """The way of a part whose classes are the batch elements of one call."""
    heads, run = part.heads, part.run
    assert problem.B == 1
    inner = replace(problem, B=run.classes, H=heads.number, G=heads.key_number, Q=run.Q, K=run.K)
    return way(inner, part.pattern, q_offset if part.dilation == 1 else run.q_offset)


@cache
def measured() -> frozenset[tuple[str, str]]:
    """(case, dtype) of every committed row of ours."""
    found = set()
    for name in ("cpu", "nvidia_h200", "nvidia_h200_breakeven", "nvidia_h200_ladder"):
        rows = read_records(RESULTS / f"{name}.jsonl.gz")
        found |= {(row["case"], row["dtype"]) for row in rows if not row["peer"]}
    return frozenset(found)


def every() -> Iterator[tuple[Case, str]]:
    """Each case in each of its types, and in those of its rows."""
    for case in (*CASES, *BREAKEVEN, *LADDER):
        for dtype in dict.fromkeys((*case.dtypes, *sorted(t for name, t in measured() if name == case.name))):
            yield case, dtype


def choices(most_edges: int = MOST_EDGES) -> dict[str, dict[str, str | list[str]]]:
    """By case and type: of both directions, in sweeps of the forward alone, as their rows.

    Args:
        most_edges: sweeps' graphs that keep more pairs are left out.
    """
    found: dict[str, dict[str, str | list[str]]] = {}
    last, pattern = None, None
    with everywhere():
        for case, dtype in every():
            if case.name in GRAPHS and GRAPHS[case.name] > most_edges:
                continue
            if case is not last:
                last, pattern = case, case.pattern()
            assert pattern is not None
            directions = ("forward",) if case.tags & SWEEPS else ("forward", "backward")
            found[f"{case.name} {dtype}"] = {d: chosen(case, dtype, pattern, d == "backward") for d in directions}
    return found


Choice = dict[str, str | list[str]]


def text(found: dict[str, Choice]) -> str:
    """The file: a line for each choice, with the cases that take it, each before its types."""
    lines: dict[str, dict[str, list[str]]] = {}
    for key, value in found.items():
        name, dtype = key.split()
        lines.setdefault(json.dumps(value), {}).setdefault(name, []).append(dtype)
    return "".join(
        f"{value}: {', '.join(' '.join([name, *types]) for name, types in cases.items())}\n"
        for value, cases in lines.items()
    )


def held() -> dict[str, Choice]:
    """What the file says, by case and type."""
    found: dict[str, Choice] = {}
    for line in FILE.read_text().splitlines():
        value, _, cases = line.rpartition("}: ")
        for name, *types in map(str.split, cases.split(", ")):
            found |= {f"{name} {dtype}": json.loads(value + "}") for dtype in types}
    return found


if __name__ == "__main__":
    if sys.argv[1:] != ["--write"]:
        sys.exit(__doc__)
    FILE.parent.mkdir(exist_ok=True)
    FILE.write_text(text(choices()))
