"""Find the fastest configurations of the Hopper kernels on a GPU, and keep them as data.

    python benchmarks/tune.py                                   # every kernel and head size: under 10 minutes
    python benchmarks/tune.py --kernels backward --sizes 128 --write

Every candidate is compiled (in parallel processes, into the cache on disk), its numbers are checked against float64 on
sampled rows and keys, and it is timed in each case, the shipped one first and last. Rows go to --out. With --write, a
candidate that is right and whose times are at most 0.99 of the shipped one's (geometric mean over the cases) takes its
place in src/gossamer/kernels/hopper/tuned.json.
"""

from __future__ import annotations

import argparse
import dataclasses
import itertools
import json
import math
import multiprocessing
import os
import time
from collections.abc import Callable, Iterator
from concurrent.futures import ProcessPoolExecutor
from contextlib import contextmanager
from pathlib import Path
from typing import Any

import torch

from gossamer.bench.check import Inputs, compare, draw_samples
from gossamer.bench.measure import time_call
from gossamer.kernels.contract import Problem, Terms
from gossamer.kernels.hopper import IMPLEMENTATION, config
from gossamer.kernels.hopper import compile as compiled
from gossamer.patterns import Pattern, SlidingWindow
from gossamer.testing.cases import bigbird_matrix

GAIN = 0.99
CASES: dict[str, Callable[[int], Pattern]] = {
    "window 4096": lambda N: SlidingWindow(4096),
    "window 512": lambda N: SlidingWindow(512),
    "128-blocks": lambda N: bigbird_matrix(N, 128),
}
# The fields of each kernel's configuration that are tried, and their values; what a configuration refuses is left out.
FIELDS: dict[str, dict[str, tuple[Any, ...]]] = {
    "forward": {"step": (64, 128), "stages": (2, 3), "q_stages": (1, 2), "hold": (0, 1, 2)},
    "backward": {"q_stages": (2, 3), "do_stages": (1, 2, 3), "reduce": ("bulk", "direct")},
    "wide": {"step": (64, 128), "q_stages": (1, 2, 3), "do_stages": (1, 2, 3)},
    "query_gradient": {"step": (32, 64, 128), "k_stages": (1, 2), "v_stages": (1, 2)},
}
# The function that chooses the configuration, and the name of the module that calls it.
CHOOSERS = {
    "forward": ("forward_config", "launch"),
    "backward": ("backward_config", "launch_backward"),
    "wide": ("wide_config", "launch_backward"),
    "query_gradient": ("query_config", "launch_backward"),
}


def tile(D: int, E: int) -> tuple[int, int]:
    """The tile of the layouts that are walked."""
    return IMPLEMENTATION.tile(Problem(1, 1, 1, 4096, 4096, D, E, "bfloat16", "cuda", 90, backward=True))


def serves(kernel: str, size: tuple[int, int]) -> bool:
    """Whether a kernel is used for head sizes (D, E)."""
    return {"backward": max(size) <= config.WIDE, "wide": max(size) > config.WIDE}.get(kernel, True)


def shipped(kernel: str, D: int, E: int) -> Any:
    """The configuration that a call of these head sizes takes today."""
    more = {"backward": (True,)}.get(kernel, ())
    return getattr(config, CHOOSERS[kernel][0])("bfloat16", D, E, *tile(D, E), "fold", *more)


def candidates(kernel: str, first: Any) -> list[Any]:
    """The shipped configuration, then every other that is valid."""
    found = [first]
    fields = FIELDS[kernel]
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


@contextmanager
def chosen(kernel: str, choice: Any) -> Iterator[None]:
    """Calls take this configuration."""
    import importlib

    name, module = CHOOSERS[kernel]
    owner = importlib.import_module(f"gossamer.kernels.hopper.{module}")
    before = getattr(owner, name)
    setattr(owner, name, lambda *key: choice)
    owner._prepared.clear()  # what calls have in common holds the configuration
    try:
        yield
    finally:
        setattr(owner, name, before)
        owner._prepared.clear()


def problem(pattern: Pattern, H: int, N: int, D: int, E: int) -> tuple[Inputs, Problem, Any]:
    g = torch.Generator("cuda").manual_seed(0)
    q, k, v, dout = (torch.randn(1, H, N, n, device="cuda", generator=g).bfloat16() for n in (D, D, E, E))
    p = Problem(1, H, H, N, N, D, E, "bfloat16", "cuda", 90, backward=True)
    block_q, block_kv = tile(D, E)
    layout = pattern.layout(N, N, block_q=block_q, block_kv=block_kv).to("cuda")
    return Inputs(pattern, q, k, v, Terms(scale=D**-0.5, q_offset=0), dout), p, layout


def caller(kernel: str, x: Inputs, p: Problem, layout: Any) -> Callable[[], dict[str, torch.Tensor]]:
    """What is timed and checked: a whole forward or backward, its results by name."""
    hopper: Any = IMPLEMENTATION
    if kernel == "forward":
        return lambda: {"out": hopper.forward(p, x.q, x.k, x.v, layout, x.terms)[0]}
    out, lse = hopper.forward(p, x.q, x.k, x.v, layout, x.terms)
    p = dataclasses.replace(p, deterministic=kernel == "query_gradient")  # else dQ is a sum, where there is a choice

    def backward() -> dict[str, torch.Tensor]:
        found = hopper.backward(p, x.dout, None, x.q, x.k, x.v, out, lse, layout, x.terms)
        return dict(zip(("dq", "dk", "dv"), found, strict=False))

    return backward


def measure(kernel: str, D: int, E: int, choices: list[Any], cases: list[str], N: int, budget: float) -> list[Any]:
    """Rows of every case and candidate; the shipped configuration is timed first and last."""
    rows = []
    for name in cases:
        x, p, layout = problem(CASES[name](N), 16 if D <= 64 else 8, N, D, E)
        samples = draw_samples(x, heads=1, rows=32, keys=4)
        run = caller(kernel, x, p, layout)
        for at, choice in enumerate([*choices, choices[0]]):
            row = {"kernel": kernel, "D": D, "E": E, "case": name, "config": dataclasses.asdict(choice)}
            with chosen(kernel, choice):
                torch.use_deterministic_algorithms(True, warn_only=True)  # and new memory is filled with NaN
                worst, wrong = compare(samples, run(), 1)
                torch.use_deterministic_algorithms(False)
                row |= {"error": worst, "wrong": wrong, "again": at == len(choices)}
                row["ms"] = time_call(run, torch.device("cuda"), budget_s=budget).p50
            rows.append(row)
            fields = " ".join(f"{n}={getattr(choice, n)}" for n in FIELDS[kernel])
            print(
                f"{kernel} {D},{E} {name:12s} {fields:44s} {row['ms']:8.3f} ms {'WRONG' if wrong else ''}", flush=True
            )
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


def keep(kernel: str, choice: Any, fields: dict[str, Any]) -> None:
    """Write the fields of a winner where the configuration is looked up."""
    found = json.loads(config.TUNED.read_text())
    found.setdefault(kernel, {})[config.tuned_key(choice.D, choice.E, *tile(choice.D, choice.E))] = fields
    config.TUNED.write_text(json.dumps(found, indent=1, sort_keys=True) + "\n")


def main() -> None:
    parser = argparse.ArgumentParser(description=__doc__, formatter_class=argparse.RawDescriptionHelpFormatter)
    parser.add_argument("--kernels", nargs="*", choices=list(FIELDS), default=list(FIELDS))
    parser.add_argument("--sizes", nargs="*", default=["64", "96", "128", "192", "256", "192,128"])
    parser.add_argument("--cases", nargs="*", choices=list(CASES), default=["window 4096", "128-blocks"])
    parser.add_argument("-N", "--length", type=int, default=65536)
    parser.add_argument("--budget", type=float, default=0.1, help="seconds of timed calls for each row")
    parser.add_argument("--jobs", type=int, default=len(os.sched_getaffinity(0)))
    parser.add_argument("--out", type=Path, default=Path("benchmarks/results/tune_hopper.jsonl"))
    parser.add_argument("--write", action="store_true", help="put the winners into tuned.json")
    a = parser.parse_args()
    start = time.perf_counter()
    sizes = [(int(D), int(E or D)) for D, _, E in (text.partition(",") for text in a.sizes)]
    wanted = {
        (kernel, size): candidates(kernel, shipped(kernel, *size))
        for kernel in a.kernels
        for size in sizes
        if serves(kernel, size)
    }
    tasks = [(kernel, choice) for (kernel, _), choices in wanted.items() for choice in choices]
    with ProcessPoolExecutor(a.jobs, mp_context=multiprocessing.get_context("spawn")) as pool:
        refused = {repr(task): why for task, why in zip(tasks, pool.map(make, tasks), strict=True) if why}
    for task, why in refused.items():
        print("not compiled:", task, why)
    print(f"{len(tasks)} configurations compiled in {time.perf_counter() - start:.0f} s", flush=True)
    facts = {"device": torch.cuda.get_device_name(), "torch": torch.__version__, "N": a.length}
    a.out.parent.mkdir(parents=True, exist_ok=True)
    for (kernel, (D, E)), choices in wanted.items():
        able = [choice for choice in choices if repr((kernel, choice)) not in refused]
        rows = measure(kernel, D, E, able, a.cases, a.length, a.budget)
        with a.out.open("a") as file:
            file.writelines(json.dumps(row | facts) + "\n" for row in rows)
        best, ratio = winner(rows)
        print(f"{kernel} {D},{E}: best {ratio:.3f} of the shipped time, {best}", flush=True)
        if a.write and ratio <= GAIN:
            keep(kernel, able[0], {name: best[name] for name in FIELDS[kernel]})
    print(f"{time.perf_counter() - start:.0f} s")


if __name__ == "__main__":
    main()
