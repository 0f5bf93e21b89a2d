"""Random calls without end, everything that a user can pass, each compared with a float64 oracle.

python benchmarks/soak.py --minutes 10 --workers 2           # of `attention`, on a CPU
python benchmarks/soak.py --calls 3000 --workers 12 --device cuda
python benchmarks/soak.py --family entmax --calls 1000       # of another family; "all" takes them in turns
python benchmarks/soak.py --one 12345 --device cuda          # repeats one call: what each failure prints

Each family of calls is a module of its own, which draws them, runs them and knows what is right. That of `attention` is
`soak_attention.py`: `soak_patterns.py` and `soak_calls.py` draw calls, `soak_arguments.py` makes their arguments, and
`soak_oracle.py` says what is right. The script ends with counts; its exit code is 1 if any call was wrong. Several
processes share one GPU. A process that crashes, or takes longer than a minute (three on a GPU) for a call, is replaced,
and the call is a failure. A seed is the same call on every machine.
"""

from __future__ import annotations

import argparse
import importlib
import multiprocessing
import sys
import time
from collections.abc import Callable
from multiprocessing.connection import Connection, wait
from typing import Any

import soak_run
import torch
from soak_outcomes import Counts, Drawn, Outcome, begun

# Families of calls, each a module of `draw` and `run`.
FAMILIES = {
    "attention": "soak_attention",
    "particles": "soak_particles",
    "neighbors": "soak_neighbors",
    "entmax": "soak_entmax",
    "topk": "soak_topk",
    "sparsek": "soak_sparsek",
    "blocks": "soak_blocks",
    "lists": "soak_lists",
    "packed": "soak_packed",
    "pages": "soak_pages",
    "repeated": "soak_repeated",
}
LIMIT = {"cpu": 60.0, "cuda": 180.0}  # seconds of a call; the first of a process may compile kernels
BEGINNING = 600.0  # seconds in which a process has imported everything
SHOWN = 30.0  # seconds between lines of progress


def family_of(name: str, seed: int) -> str:
    """The family of a seed: the one that is named, or of "all" each in its turn."""
    return list(FAMILIES)[seed % len(FAMILIES)] if name == "all" else name


def one_call(name: str, seed: int, device: str) -> Outcome:
    """Draw a call of a family and compute it."""
    family = importlib.import_module(FAMILIES[family_of(name, seed)])
    found: Outcome = family.run(family.draw(seed, device))
    return found


def broken(found: Outcome) -> bool:
    """Whether nothing can be computed any more in the process of an outcome."""
    return found.wrong is not None and "CUDA error" in found.wrong


def work(pipe: Connection, family: str, device: str) -> None:
    """A process: seeds come in, outcomes go out."""
    torch.set_num_threads(1)
    with soak_run.prepared():
        pipe.send(None)
        while (seed := pipe.recv()) is not None:
            try:
                found = one_call(family, seed, device)
            except Exception as error:  # of the drawing or the oracle: the tool itself is wrong, which must be seen
                drawn, wrong = family_of(family, seed), f"while drawn: {type(error).__name__}: {error}"
                found = Outcome(seed, "none", "none", None, wrong, "", drawn)
            pipe.send(found)
            if broken(found):
                return


Target = Callable[[Connection, str, str], None]  # what a process runs, given the pipe, the family and the device


class Worker:
    """A process and the call that it is at."""

    def __init__(self, family: str, device: str, target: Target) -> None:
        context: Any = multiprocessing.get_context("spawn")
        self.family, self.device, (self.pipe, other) = family, device, context.Pipe()
        self.process = context.Process(target=target, args=(other, family, device), daemon=True)
        self.process.start()
        other.close()
        self.seed: int | None = None
        self.since = time.monotonic()

    def give(self, seed: int) -> None:
        """Send it a seed; a process that has just ended is found when its outcome is waited for."""
        self.seed, self.since = seed, time.monotonic()
        try:
            self.pipe.send(seed)
        except OSError:
            return

    def take(self) -> Outcome | None:
        """Its outcome; None for the message that it has begun. EOFError when it has ended."""
        return self.pipe.recv()

    def failed(self, why: str) -> Outcome:
        """Stop it; the outcome of the call that it was at."""
        self.process.kill()
        self.process.join()
        if self.seed is None:
            raise RuntimeError(f"a process {why}, before its first call")
        name = family_of(self.family, self.seed)
        call: Drawn = importlib.import_module(FAMILIES[name]).draw(self.seed, self.device)
        return begun(name, call)._replace(wrong=why)


def report(found: Outcome, device: str) -> None:
    """Print a failure as a command that repeats it."""
    command = f"python benchmarks/soak.py --family {found.family} --one {found.seed} --device {device}"
    print(f"WRONG {command}\n    {found.wrong}\n    {found.description}", flush=True)


def soak(
    family: str, device: str, workers: int, first: int, calls: float, seconds: float, target: Target = work
) -> Counts:
    """Compute calls of ascending seeds, by so many processes, until there were so many, or until the time is over."""
    counts, begin, shown, seed = Counts(), time.monotonic(), time.monotonic(), first
    running = [Worker(family, device, target) for _ in range(workers)]
    while running:
        ready = wait([worker.pipe for worker in running], timeout=1.0)
        for worker in list(running):
            found = None
            if worker.pipe in ready:
                try:
                    found = worker.take()
                except EOFError:
                    worker.process.join()
                    found = worker.failed(f"crashed: exit code {worker.process.exitcode}")
            elif time.monotonic() - worker.since > (BEGINNING if worker.seed is None else LIMIT[device]):
                found = worker.failed(f"took longer than {LIMIT[device]:.0f} s")
            else:
                continue
            if found is not None:
                counts.add(found)
                if found.wrong:
                    report(found, device)
                if broken(found):
                    worker.process.join()
            more = seed - first < calls and time.monotonic() - begin < seconds
            if more and not worker.process.is_alive():
                running[running.index(worker)] = Worker(family, device, target)
                continue
            if more:
                worker.give(seed)
                seed += 1
                continue
            running.remove(worker)
            if worker.process.is_alive():
                worker.pipe.send(None)
                worker.process.join()
        if time.monotonic() - shown > SHOWN:
            shown, spent = time.monotonic(), time.monotonic() - begin
            print(f"{counts.calls} calls, {counts.wrong} wrong, {counts.calls / spent:.1f} a second", file=sys.stderr)
    print(f"{counts.calls / (time.monotonic() - begin):.1f} calls a second, seeds from {first}")
    return counts


def main(given: list[str] | None = None) -> int:
    """The exit code."""
    parser = argparse.ArgumentParser(description=__doc__, formatter_class=argparse.RawDescriptionHelpFormatter)
    parser.add_argument("--family", choices=[*FAMILIES, "all"], default="attention", help="of calls")
    parser.add_argument("--minutes", type=float, help="how long; without end where neither this nor --calls is given")
    parser.add_argument("--calls", type=int, help="how many calls")
    parser.add_argument("--workers", type=int, default=1, help="processes; 0 computes in this one")
    parser.add_argument("--device", choices=sorted(LIMIT), default="cpu")
    parser.add_argument("--seed", type=int, default=0, help="the first seed")
    parser.add_argument("--one", type=int, help="compute the call of one seed, and say what came of it")
    a = parser.parse_args(given)
    if a.one is None and a.workers:
        seconds = float("inf") if a.minutes is None else 60 * a.minutes
        counts = soak(a.family, a.device, a.workers, a.seed, float("inf") if a.calls is None else a.calls, seconds)
    else:
        counts, end = Counts(), float("inf") if a.minutes is None else time.monotonic() + 60 * a.minutes
        seed, last = (a.one, a.one + 1) if a.one is not None else (a.seed, a.seed + (a.calls or sys.maxsize))
        with soak_run.prepared():
            while seed < last and time.monotonic() < end:
                found = one_call(a.family, seed, a.device)
                counts.add(found)
                if found.wrong:
                    report(found, a.device)
                elif a.one is not None:
                    shown = f"refused: {found.refused}" if found.refused else "right"
                    print(f"{shown}, by {found.implementation}\n    {found.description}")
                seed += 1
    print(counts.text())
    return 1 if counts.wrong else 0


if __name__ == "__main__":
    sys.exit(main())
