"""Two files of costs for one device: what each chooses for some cases, and how long that takes, in turns.

    python benchmarks/measure_costs.py --write /tmp/costs
    python benchmarks/compare_costs.py /tmp/costs/h200.json power_strided_131072 breakeven_csr_1024_0.1

The first file is the committed one. `tests/support/choices.py --write` shows which cases another file moves, without
the device. A line for each case and direction: what each file chooses, and microseconds of the device (medians of
rounds).
"""

from __future__ import annotations

import argparse
import statistics
from collections.abc import Callable, Iterator, Sequence
from contextlib import contextmanager
from pathlib import Path
from unittest import mock

import torch

import gossamer
from gossamer.bench.check import Inputs
from gossamer.bench.latency import capture_stream, graph_ms
from gossamer.bench.measure import time_call
from gossamer.bench.run import DIRECTIONS, Direction, ours, repeatable
from gossamer.bench.workload import find, make_inputs
from gossamer.memo import forget_all
from gossamer.plan import costs
from gossamer.plan.plan import choose, plan_of

ROUNDS = 3


@contextmanager
def using(files: dict[str, costs.File]) -> Iterator[None]:
    """Plans are made by these files, and nothing that other files led to is known."""
    with mock.patch.object(costs, "files", lambda: files):
        forget()
        yield
    forget()


def forget() -> None:
    """Forget what costs led to."""
    costs._costs_of.cache_clear()
    forget_all()


def way(inputs: Inputs, direction: str) -> str:
    """The implementation and the layout that a call takes, or its parts."""
    backward, q_offset = direction == "backward", inputs.terms.q_offset
    q = inputs.q.detach().requires_grad_(backward)
    problem = gossamer.explain(q, inputs.k, inputs.v, inputs.pattern, **inputs.options()).problem
    plan = plan_of(problem, backward=backward)
    partition = plan.partition(inputs.pattern.handle, q_offset)
    return str(choose(plan, inputs.pattern, q_offset)) if partition is None else f"{len(partition.parts)} parts"


def milliseconds(call: Callable[[], object], device: str) -> float:
    """Of a call, on the device alone where that is a GPU."""
    return graph_ms(call) if device == "cuda" else time_call(call, torch.device(device), budget_s=0.2).p50


def calls(inputs: Inputs, directions: Sequence[Direction]) -> dict[str, Callable[[], object]]:
    """A call of each direction: the forward of one with gradients is run once, here."""
    prepared = ours(None).prepare(inputs, 0.0)
    return {direction: repeatable(prepared, inputs, direction) for direction in directions}


def main(arguments: Sequence[str] | None = None) -> None:
    parser = argparse.ArgumentParser(description=__doc__, formatter_class=argparse.RawDescriptionHelpFormatter)
    parser.add_argument("file", type=Path, help="costs that stand for the committed ones of the same name")
    parser.add_argument("cases", nargs="+")
    parser.add_argument("--direction", choices=DIRECTIONS, action="append", help="both by default")
    parser.add_argument("--device", choices=("cuda", "cpu"), default="cuda")
    a = parser.parse_args(arguments)
    committed = costs.files()
    if a.file.stem not in committed:
        raise SystemExit(f"no file of costs is called {a.file.stem!r}: {', '.join(committed)}")
    other = {**committed, a.file.stem: costs.read(a.file.read_text())}
    directions = a.direction or DIRECTIONS
    for name in a.cases:
        inputs = make_inputs(find(name, a.device), torch.device(a.device))
        times: dict[tuple[str, str], list[float]] = {}
        ways: dict[tuple[str, str], str] = {}
        for _ in range(ROUNDS):
            for label, files in (("committed", committed), ("given", other)):
                with using(files):
                    with torch.cuda.stream(capture_stream() if a.device == "cuda" else None):
                        made = calls(inputs, directions)
                    for direction, call in made.items():
                        ways[direction, label] = way(inputs, direction)
                        us = 1000 * milliseconds(call, a.device)
                        times.setdefault((direction, label), []).append(us)
        for direction in directions:
            cells = [
                f"{label}: {ways[direction, label]} {statistics.median(times[direction, label]):.1f}"
                for label in ("committed", "given")
            ]
            print(f"{name:32s} {direction:8s} {'   '.join(cells)}", flush=True)


if __name__ == "__main__":
    main()
