"""`make gpu-test`: every test that needs a GPU, from torch and from JAX, in one sitting, with one summary.

python scripts/gpu_test.py                    # as many processes as cores
python scripts/gpu_test.py --keep FOLDER      # the lines of each test, and the output of pytest
python scripts/gpu_test.py --thorough         # more types and sizes of what the tests show: before a release
python scripts/gpu_test.py --write            # and the order of tests by the seconds they took, kernels uncompiled

The shipped Hopper kernels are compiled first; then torch and JAX run side by side, on one GPU. Kernels are kept in
$GOSSAMER_CACHE_DIR and $TRITON_CACHE_DIR, so a second run compiles nothing. The exit code is 1 where a test
failed or did not run.
"""

from __future__ import annotations

import argparse
import json
import os
import signal
import subprocess
import sys
import tempfile
import time
from collections import Counter, defaultdict
from pathlib import Path
from statistics import fmean
from typing import Any, NamedTuple

ROOT = Path(__file__).parents[1]
SECONDS = ROOT / "tests" / "support" / "data" / "gpu_seconds.json"  # by which tests/support/gpu_report.py orders tests


class Suite(NamedTuple):
    """Tests that run by one pytest."""

    processes: int
    folders: list[str]
    options: list[str]
    environment: dict[str, str]

    @classmethod
    def of(cls, processes: int, folder: str, thorough: bool, *options: str, **environment: str) -> Suite:
        """The tests of a folder that need a GPU."""
        marked = "-m", "gpu" if thorough else "gpu and not thorough"
        return cls(processes, [folder], [*marked, *options], environment)

    def collect(self) -> list[str]:
        """The command that prints the tests."""
        return [*PYTEST, "--collect-only", *self.folders, *self.options]

    def run(self, files: list[str]) -> list[str]:
        """The command that runs those of some files."""
        spread = "-n", str(self.processes), "--dist", "loadgroup", "--no-loadscope-reorder"
        return [*PYTEST, *spread, "-p", "tests.support.gpu_report", "--tb=short", *files, *self.options]


PYTEST = [sys.executable, "-m", "pytest", "-q", "-p", "no:cacheprovider"]


def suites(processes: int, thorough: bool) -> dict[str, Suite]:
    """The suites: JAX, which has few tests, gets a quarter of the processes."""
    of_jax = max(1, processes // 4)
    jax = {"JAX_PLATFORMS": "cuda,cpu", "XLA_PYTHON_CLIENT_PREALLOCATE": "false"}
    elsewhere = "--ignore", "tests/jax", "--ignore", "tests/cosmos"
    return {
        "torch": Suite.of(processes - of_jax, "tests", thorough, *elsewhere),
        "jax": Suite.of(of_jax, "tests/jax", thorough, "--confcutdir", "tests/jax", **jax),
    }


def files_of(collected: str) -> list[str]:
    """The files of the tests that pytest printed."""
    return sorted({line.partition("::")[0] for line in collected.splitlines() if "::" in line})


def tests_of(folder: Path) -> list[dict[str, Any]]:
    """What the processes of a suite wrote, a line a test."""
    return [json.loads(line) for path in folder.glob("tests-*.jsonl") for line in path.read_text().splitlines()]


def write_seconds(tests: list[dict[str, Any]]) -> None:
    """Write how long a test of each function took."""
    took: dict[str, list[float]] = defaultdict(list)
    for test in tests:
        took[test["id"].partition("[")[0]].append(test["seconds"])
    means = {name: round(fmean(seconds), 1) for name, seconds in sorted(took.items())}
    SECONDS.write_text(json.dumps(means, indent=1) + "\n")


def summary(name: str, tests: list[dict[str, Any]], code: int | None) -> list[str]:
    """The lines that are printed of a suite."""
    outcomes = Counter(test["outcome"] for test in tests)
    seconds = sum(test["seconds"] for test in tests)
    lines = [f"{name}: {dict(outcomes)}, exit code {code}, {seconds:.0f} s of tests"]
    for kind in ("cute", "triton"):
        number, took = (sum(test[kind][i] for test in tests) for i in (0, 1))
        lines.append(f"  {number:.0f} {kind} kernels compiled, {took:.0f} s")
    lines += [
        f"  skipped {n}: {reason}" for reason, n in Counter(t["reason"] for t in tests if t["reason"]).most_common()
    ]
    for test in tests:
        if test["outcome"] == "failed":
            lines += [f"  FAILED {test['id']}", *(f"    {line}" for line in test["error"].splitlines()[-25:])]
    return lines


def main() -> int:
    parser = argparse.ArgumentParser(description=__doc__, formatter_class=argparse.RawDescriptionHelpFormatter)
    parser.add_argument("--workers", type=int, default=len(os.sched_getaffinity(0)) + 2, help="processes")
    parser.add_argument("--limit", type=float, default=1800.0, help="seconds after which what still runs is stopped")
    parser.add_argument("--keep", type=Path, help="a folder for what the processes wrote")
    parser.add_argument("--thorough", action="store_true", help="also the tests that are marked so")
    parser.add_argument("--write", action="store_true", help="write the seconds by which tests are ordered")
    given = parser.parse_args()
    start = time.monotonic()
    with tempfile.TemporaryDirectory() as temporary:
        folder = given.keep or Path(temporary)
        every = suites(given.workers, given.thorough)
        # Most files have no test for a GPU: while kernels compile, one process finds those that every process reads.
        collecting = {
            name: subprocess.Popen(
                suite.collect(), cwd=ROOT, env=os.environ | suite.environment, stdout=subprocess.PIPE, text=True
            )
            for name, suite in every.items()
        }
        compile_first = "from gossamer.cli import main; main()", "compile", "--jobs", str(given.workers)
        subprocess.run([sys.executable, "-c", *compile_first], cwd=ROOT, check=True)
        running = {}
        for name, suite in every.items():
            collected, _ = collecting[name].communicate()
            (folder / name).mkdir(parents=True, exist_ok=True)
            environment = os.environ | suite.environment
            environment |= {"GPU_REPORT": str(folder / name), "OMP_NUM_THREADS": "1"}
            log = (folder / f"{name}.log").open("w")
            running[name] = subprocess.Popen(
                suite.run(files_of(collected) or suite.folders),  # of which pytest says what is wrong
                cwd=ROOT,
                env=environment,
                stdout=log,
                stderr=subprocess.STDOUT,
                start_new_session=True,
            )
        codes: dict[str, int | None] = dict.fromkeys(running)
        took = dict.fromkeys(running, given.limit)
        for name, process in running.items():
            try:
                codes[name] = process.wait(max(0.0, given.limit - (time.monotonic() - start)))
                took[name] = time.monotonic() - start
            except subprocess.TimeoutExpired:
                os.killpg(process.pid, signal.SIGKILL)
        for name in running:
            print(*summary(name, tests_of(folder / name), codes[name]), sep="\n")
            print(f"  {took[name]:.0f} s")
            if codes[name]:
                print((folder / f"{name}.log").read_text()[-1500:])
        if given.write:
            write_seconds([test for name in running for test in tests_of(folder / name)])
    print(f"{time.monotonic() - start:.0f} s in all")
    return int(any(code != 0 for code in codes.values()))


if __name__ == "__main__":
    sys.exit(main())
