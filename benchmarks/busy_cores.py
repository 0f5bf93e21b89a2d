"""How calls on a CPU slow down where other processes keep its cores busy.

    python benchmarks/busy_cores.py                       # as many busy processes as cores
    python benchmarks/busy_cores.py window_256_cpu --threads 1 2 4 --busy 2

For each number of threads a process of its own (OMP_NUM_THREADS is read once) times the forward and the backward of
each case, and of SDPA where it computes the case, first alone and then beside the busy processes. A line for each:
medians in milliseconds, and their ratio. A torch operator ends when its last thread has: calls of many small ones
suffer most, whoever makes them.
"""

from __future__ import annotations

import argparse
import json
import os
import subprocess
import sys
from collections.abc import Sequence

import torch

from gossamer.bench.measure import time_call
from gossamer.bench.peer import Refusal
from gossamer.bench.peers import PEERS
from gossamer.bench.run import DIRECTIONS, ours, repeatable
from gossamer.bench.workload import find, make_inputs

CASES = ("window_256_cpu", "causal_2048_cpu", "window_63_cpu", "bigbird_64_cpu", "graph_200k_cpu", "one_query_cpu")
SPIN = [sys.executable, "-c", "while True: pass"]
TFLOPS = 0.1  # of a matrix product: peers refuse what would take them minutes
SECONDS, MOST = 1.0, 2000  # of the calls of a row, and how many at most


def measure(names: Sequence[str]) -> None:
    """Print the median milliseconds of each direction of each case, as JSON."""
    found = {}
    for name in names:
        inputs = make_inputs(find(name, "cpu"), torch.device("cpu"))
        for peer in (ours(None), *(p for p in PEERS if p.name == "SDPA dense")):
            try:
                prepared = peer.prepare(inputs, TFLOPS)
            except Refusal:
                continue
            for direction in DIRECTIONS:
                call = repeatable(prepared, inputs, direction)
                taken = time_call(call, torch.device("cpu"), budget_s=SECONDS, most=MOST).p50
                found[f"{name} {direction}, {peer.name}"] = taken
    print(json.dumps(found))


def in_a_process(names: Sequence[str], threads: int) -> dict[str, float]:
    """`measure` with so many threads."""
    environment = os.environ | {"OMP_NUM_THREADS": str(threads)}
    done = subprocess.run(
        [sys.executable, __file__, *names, "--measure"], env=environment, capture_output=True, text=True, check=True
    )
    return dict(json.loads(done.stdout))


def main() -> None:
    parser = argparse.ArgumentParser(description=__doc__, formatter_class=argparse.RawDescriptionHelpFormatter)
    parser.add_argument("cases", nargs="*", default=CASES)
    parser.add_argument("--threads", type=int, nargs="+", default=(1, 2, 4))
    parser.add_argument("--busy", type=int, default=len(os.sched_getaffinity(0)), help="processes beside")
    parser.add_argument("--measure", action="store_true", help=argparse.SUPPRESS)
    a = parser.parse_args()
    if a.measure:
        return measure(a.cases)
    for threads in a.threads:
        idle = in_a_process(a.cases, threads)
        spinning = [subprocess.Popen(SPIN) for _ in range(a.busy)]
        try:
            busy = in_a_process(a.cases, threads)
        finally:
            for process in spinning:
                process.kill()
        for name, alone in idle.items():
            print(
                f"{threads} threads  {name:45s} {alone:10.3f} {busy[name]:10.3f} {busy[name] / alone:6.2f}", flush=True
            )
    return None


if __name__ == "__main__":
    main()
