"""Find the fastest configurations of the Hopper kernels on a GPU, and keep them as data.

    python benchmarks/tune.py                                   # every kernel and head size: under 10 minutes
    python benchmarks/tune.py --kernels backward --sizes 128 --write
    python benchmarks/tune.py --kernels forward --fields hold   # what a change of the kernel may have moved

Every candidate is compiled (in parallel processes, into the cache on disk), its numbers are checked against float64 on
sampled rows and keys, and all are timed in turns in each case of its tile, since a chip slows as it gets hot. A row
holds the median of each round; rows go to --out. With --write, a candidate that is right and whose times are at most
0.99 of the shipped one's (geometric mean over the cases of the tile) takes its place in
src/gossamer/kernels/hopper/tuned.json.
"""

from __future__ import annotations

import argparse
import dataclasses
import itertools
import json
import math
import multiprocessing
import os
import statistics
import time
from collections.abc import Callable
from concurrent.futures import ProcessPoolExecutor
from functools import partial
from pathlib import Path
from typing import Any, NamedTuple

import torch
from bound import bound

from gossamer.bench.check import compare, draw_samples
from gossamer.bench.measure import time_call
from gossamer.bench.results import append_records
from gossamer.kernels.contract import Scoring, Terms
from gossamer.kernels.hopper import IMPLEMENTATION, compiled
from gossamer.kernels.hopper import choice as choosers
from gossamer.kernels.hopper.device.configurations import Hold
from gossamer.kernels.hopper.launch.backward import backward as launch_backward
from gossamer.kernels.hopper.launch.forward import forward as launch_forward
from gossamer.patterns import BigBird, Pattern, SlidingWindow
from gossamer.plan.problem import Problem
from gossamer.testing.cases import bigbird_matrix
from gossamer.testing.inputs import Inputs

GAIN = 0.99
ROUNDS = 3
# Name -> the pattern, and the layout's tile where it is not the first choice of its head sizes.
CASES: dict[str, tuple[Callable[[int], Pattern], tuple[int, int] | None]] = {
    "window 4096": (lambda N: SlidingWindow(4096), None),
    "window 512": (lambda N: SlidingWindow(512), None),
    "128-blocks": (lambda N: bigbird_matrix(N, 128), None),
    "64-blocks": (lambda N: bigbird_matrix(N, 64), (64, 64)),
    "BigBird(64)": (lambda N: BigBird(64), (64, 64)),
}
# The fields of each kernel's configuration that are tried, and their values; what a configuration refuses is left out.
FIELDS: dict[str, dict[str, tuple[Any, ...]]] = {
    "forward": {"step": (64, 128), "stages": (2, 3), "q_stages": (1, 2), "hold": tuple(Hold)},
    "backward": {"q_stages": (2, 3), "do_stages": (1, 2, 3)},
    "wide": {"q_stages": (2, 3), "do_stages": (1, 2, 3)},
    "query_gradient": {"step": (32, 64, 128), "k_stages": (2, 3), "v_stages": (1, 2)},
}
# The function that chooses the configuration, and the argument of a launch that replaces it.
CHOOSERS = {
    "forward": ("forward_config", "config"),
    "backward": ("backward_config", "config"),
    "wide": ("wide_config", "config"),
    "query_gradient": ("query_config", "query"),
}


class Group(NamedTuple):
    """What has one configuration: a kernel, head sizes and a tile of layouts; and the cases it is timed in."""

    kernel: str
    D: int
    E: int
    tile: tuple[int, int]
    cases: tuple[str, ...]

    def shipped(self) -> Any:
        """The configuration that a call takes today."""
        with_dq = {"backward": (self.tile != (64, 64),)}.get(self.kernel, ())
        call = choosers.TileCall("bfloat16", self.D, self.E, *self.tile, "fold")
        return getattr(choosers, CHOOSERS[self.kernel][0])(call, *with_dq)


def groups(kernels: list[str], sizes: list[tuple[int, int]], cases: list[str]) -> list[Group]:
    """The groups of which there is a kernel."""
    found = []
    for kernel, (D, E) in itertools.product(kernels, sizes):
        if not {"backward": max(D, E) <= choosers.WIDE, "wide": max(D, E) > choosers.WIDE}.get(kernel, True):
            continue
        problem = Problem(1, 1, 1, 4096, 4096, D, E, "bfloat16", "cuda", 90, backward=True)
        by_tile: dict[tuple[int, int], list[str]] = {}
        for name in cases:
            by_tile.setdefault(CASES[name][1] or IMPLEMENTATION.tile(problem), []).append(name)
        for tile, names in by_tile.items():
            group = Group(kernel, D, E, tile, tuple(names))
            if group.shipped().D == D:  # else it is padded to a size of which there is a group
                found.append(group)
    return found


def candidates(kernel: str, first: Any, names: list[str] | None = None) -> list[Any]:
    """The shipped configuration, then every other that is valid; with `names`, unlike it in these fields alone."""
    found = [first]
    fields = {name: values for name, values in FIELDS[kernel].items() if names is None or name in names}
    for values in itertools.product(*fields.values()):
        try:
            other = dataclasses.replace(first, **dict(zip(fields, values, strict=True)))
        except ValueError:
            continue
        if other not in found:
            found.append(other)
    return found


def make(task: tuple[str, Any]) -> str:
    """Compile one configuration in a process of its own; why it cannot be had, or nothing."""
    kernel, choice = task
    try:
        getattr(compiled, kernel)(choice)
    except Exception as error:  # a configuration that the compiler refuses is a result
        return f"{type(error).__name__}: {str(error)[:100]}"
    return ""


def problem(group: Group, pattern: Pattern, H: int, N: int) -> tuple[Inputs, Problem, Any]:
    D, E = group.D, group.E
    processors = torch.cuda.get_device_properties("cuda").multi_processor_count
    g = torch.Generator("cuda").manual_seed(0)
    q, k, v, dout = (torch.randn(1, H, N, n, device="cuda", generator=g).bfloat16() for n in (D, D, E, E))
    p = Problem(1, H, H, N, N, D, E, "bfloat16", "cuda", 90, processors, backward=True)
    layout = pattern.layout(N, N, block_q=group.tile[0], block_kv=group.tile[1]).to("cuda")
    return Inputs(pattern, q, k, v, Terms(scale=D**-0.5, q_offset=0), dout), p, layout


def caller(
    kernel: str, x: Inputs, p: Problem, layout: Any, choice: Any = None
) -> Callable[[], dict[str, torch.Tensor]]:
    """What is timed and checked: a whole forward or backward, its results by name.

    Args:
        choice: replaces the configuration of the kernel.
    """
    scoring, inputs = Scoring(x.terms.scale, x.terms.q_offset, x.terms.softcap), {"q": x.q, "k": x.k, "v": x.v}
    own = {CHOOSERS[kernel][1]: choice} | ({"most_kept": 0} if kernel == "query_gradient" else {})
    first = bound(partial(launch_forward, p, layout, scoring, **(own if kernel == "forward" else {})), inputs)
    if kernel == "forward":
        return lambda: {"out": first()[0]}
    out, lse = first()
    p = dataclasses.replace(p, deterministic=kernel == "query_gradient")  # else dQ is a sum, where there is a choice
    given = {"dout": x.dout, **inputs, "out": out, "lse": lse}
    run = bound(partial(launch_backward, p, layout, scoring, **own), given)
    return lambda: dict(zip(("dq", "dk", "dv"), run(), strict=True))


def measure(group: Group, choices: list[Any], N: int, budget: float) -> list[dict[str, Any]]:
    """Rows of every case and candidate, the shipped one first."""
    rows = []
    for name in group.cases:
        x, p, layout = problem(group, CASES[name][0](N), 16 if group.D <= 64 else 8, N)
        samples = draw_samples(x, heads=1, rows=32, keys=4)
        runs = [caller(group.kernel, x, p, layout, choice) for choice in choices]
        found: list[dict[str, Any]] = []
        for choice, run in zip(choices, runs, strict=True):
            torch.use_deterministic_algorithms(True, warn_only=True)  # and new memory is filled with NaN
            worst, wrong = compare(samples, run(), 1)
            torch.use_deterministic_algorithms(False)
            fields = {"config": dataclasses.asdict(choice), "error": worst, "wrong": wrong, "rounds": []}
            found.append({"kernel": group.kernel, "D": group.D, "E": group.E, "case": name} | fields)
        for _ in range(ROUNDS):
            for row, run in zip(found, runs, strict=True):
                row["rounds"].append(time_call(run, torch.device("cuda"), budget_s=budget / ROUNDS).p50)
        for row, choice in zip(found, choices, strict=True):
            row["ms"] = statistics.median(row["rounds"])
            fields = " ".join(f"{n}={getattr(choice, n)}" for n in FIELDS[group.kernel])
            head = f"{group.kernel} {group.D},{group.E} {name:12s} {fields:44s}"
            print(f"{head} {row['ms']:8.3f} ms {'WRONG' if row['wrong'] else ''}", flush=True)
        rows += found
    return rows


def winner(rows: list[dict[str, Any]]) -> tuple[dict[str, Any], float]:
    """The configuration of least time, and its time over the shipped one's: geometric means over the cases."""
    times: dict[str, list[float]] = {}
    for row in rows:
        key = json.dumps(row["config"])
        times.setdefault(key, []).append(math.inf if row["wrong"] else math.log(row["ms"]))
    means = {key: sum(t) / len(t) for key, t in times.items()}
    first = json.dumps(rows[0]["config"])
    best = min(means, key=means.__getitem__)
    return json.loads(best), math.exp(means[best] - means[first])


def keep(group: Group, first: Any, fields: dict[str, Any]) -> None:
    """Write the fields of a winner where the configuration is looked up."""
    found = json.loads(choosers.TUNED.read_text())
    found.setdefault(group.kernel, {})[choosers.tuned_key(first.D, first.E, *group.tile)] = fields
    choosers.TUNED.write_text(json.dumps(found, indent=1, sort_keys=True) + "\n")


def main() -> None:
    parser = argparse.ArgumentParser(description=__doc__, formatter_class=argparse.RawDescriptionHelpFormatter)
    parser.add_argument("--kernels", nargs="*", choices=list(FIELDS), default=list(FIELDS))
    parser.add_argument("--sizes", nargs="*", default=["64", "96", "128", "192", "256", "192,128"])
    parser.add_argument("--fields", nargs="*", help="fields of the configurations that are tried: all")
    parser.add_argument("--cases", nargs="*", choices=list(CASES), default=list(CASES))
    parser.add_argument("-N", "--length", type=int, default=65536)
    parser.add_argument("--budget", type=float, default=0.1, help="seconds of timed calls for each row")
    parser.add_argument("--jobs", type=int, default=len(os.sched_getaffinity(0)))
    parser.add_argument("--out", type=Path, default=Path("results/tune_hopper.jsonl"))
    parser.add_argument("--write", action="store_true", help="put the winners into tuned.json")
    a = parser.parse_args()
    start = time.perf_counter()
    sizes = [(int(D), int(E or D)) for D, _, E in (text.partition(",") for text in a.sizes)]
    wanted = {group: candidates(group.kernel, group.shipped(), a.fields) for group in groups(a.kernels, sizes, a.cases)}
    tasks = [(group.kernel, choice) for group, choices in wanted.items() for choice in choices]
    with ProcessPoolExecutor(a.jobs, mp_context=multiprocessing.get_context("spawn")) as pool:
        refused = {repr(task): why for task, why in zip(tasks, pool.map(make, tasks), strict=True) if why}
    for task, why in refused.items():
        print("not compiled:", task, why)
    print(f"{len(tasks)} configurations compiled in {time.perf_counter() - start:.0f} s", flush=True)
    facts = {"device": torch.cuda.get_device_name(), "torch": torch.__version__, "N": a.length}
    for group, choices in wanted.items():
        able = [choice for choice in choices if repr((group.kernel, choice)) not in refused]
        rows = measure(group, able, a.length, a.budget)
        append_records([row | facts for row in rows], a.out, facts)
        best, ratio = winner(rows)
        where = f"{group.kernel} {group.D},{group.E}, tiles {group.tile[0]}x{group.tile[1]}"
        print(f"{where}: best {ratio:.3f} of the shipped time, {best}", flush=True)
        if a.write and ratio <= GAIN:
            keep(group, able[0], {name: best[name] for name in FIELDS[group.kernel]})
    print(f"{time.perf_counter() - start:.0f} s")


if __name__ == "__main__":
    main()
