"""Random calls from JAX under random stacks of transformations, each compared with a float64 oracle. No torch.

python benchmarks/soak_jax.py --calls 500 --workers 2                # on a CPU, as four devices
python benchmarks/soak_jax.py --calls 300 --workers 12 --device cuda
python benchmarks/soak_jax.py --one 12345                            # repeats one call: what each failure prints

`soak_jax_calls.py` draws attention (patterns, masks, Plans, blocks, score terms), sums and forces over particles, and
neighbour attention, each under jit, vmap, scan, remat, shard_map and gradients in any order; `soak_jax_oracle.py` says
what is right. Four seeds in a row are one program with four draws of numbers, since compiling is what takes long. The
script ends with counts; its exit code is 1 if any call was wrong. On a CPU programs are compiled without optimisation.
"""

from __future__ import annotations

import argparse
import importlib
import multiprocessing
import os
import sys
import time
from collections import Counter
from concurrent.futures import ProcessPoolExecutor
from typing import Any

from soak_outcomes import Counts, Outcome

FLAGS = "--xla_force_host_platform_device_count=4 --xla_cpu_multi_thread_eigen=false "
FLAGS += "--xla_backend_optimization_level=0 --xla_llvm_disable_expensive_passes=true"
SHARED = 4  # seeds of a program, as in `soak_jax_calls.py`, which is imported where the environment is set
FEWEST = 5  # calls of a transformation for it to be listed


def of_program(first: int, last: int, device: str) -> list[Outcome]:
    """The outcomes of the seeds of one program, in a process whose environment says where JAX computes."""
    prepare(device)
    found: list[Outcome] = list(importlib.import_module("soak_jax_calls").calls(first, last))
    return found


def prepare(device: str) -> None:
    """Say where JAX computes, before it is imported."""
    os.environ["JAX_PLATFORMS"] = device
    os.environ["XLA_PYTHON_CLIENT_PREALLOCATE"] = "false"
    if device == "cpu":
        os.environ.setdefault("XLA_FLAGS", FLAGS)


def ranges(first: int, last: int) -> list[tuple[int, int]]:
    """Seeds by programs."""
    starts = [first, *range(first + SHARED - first % SHARED, last, SHARED)]
    return list(zip(starts, [*starts[1:], last], strict=True))


def main(given: list[str] | None = None) -> int:
    """The exit code."""
    parser = argparse.ArgumentParser(description=__doc__, formatter_class=argparse.RawDescriptionHelpFormatter)
    parser.add_argument("--calls", type=int, default=100, help="how many calls")
    parser.add_argument("--seed", type=int, default=0, help="the first seed")
    parser.add_argument("--workers", type=int, default=0, help="processes; 0 computes in this one")
    parser.add_argument("--device", choices=["cpu", "cuda"], default="cpu")
    parser.add_argument("--one", type=int, help="compute the call of one seed, and say what came of it")
    parser.add_argument("--minutes", type=float, default=float("inf"), help="begin no program after so many")
    a = parser.parse_args(given)
    first, last = (a.seed, a.seed + a.calls) if a.one is None else (a.one, a.one + 1)
    counts, transformations, begin = Counts(), Counter[str](), time.monotonic()

    def add(found: list[Outcome]) -> None:
        for one in found:
            counts.add(one._replace(implementation="under " + one.implementation.split(" of ")[0]))
            transformations.update(set(one.implementation.split(" of ")))
            if one.wrong:
                command = f"python benchmarks/soak_jax.py --one {one.seed} --device {a.device}"
                print(f"WRONG {command}\n    {one.wrong}\n    {one.description}", flush=True)
            elif a.one is not None:
                print(f"right\n    {one.description}")

    todo: list[tuple[int, int]] = ranges(first, last)
    if not a.workers:
        for part in todo:
            if time.monotonic() - begin < 60 * a.minutes:
                add(of_program(*part, a.device))
    else:
        context: Any = multiprocessing.get_context("spawn")
        prepare(a.device)
        with ProcessPoolExecutor(a.workers, mp_context=context) as pool:
            running = []
            for found in pool.map(within, [(part, a.device, begin + 60 * a.minutes) for part in todo]):
                running.append(len(found))
                add(found)
    spent = time.monotonic() - begin
    print(counts.text())
    print("by transformation:")
    for name, n in transformations.most_common():
        print(f"  {name:24} {n:7} calls")
    print(f"{counts.calls / max(spent, 1e-9):.2f} calls a second, seeds from {first}")
    return 1 if counts.wrong or not counts.calls else 0


def within(given: tuple[tuple[int, int], str, float]) -> list[Outcome]:
    """Of a program that begins in time; a process of its own has its own clock's zero, that of the machine."""
    part, device, end = given
    return of_program(*part, device) if time.monotonic() < end else []


if __name__ == "__main__":
    sys.exit(main())
