"""A plugin of pytest for `make gpu-test`: the seconds of each test, and the kernels that it compiled.

Each process appends one line of JSON a test to its own file in the folder $GPU_REPORT, which `scripts/gpu_test.py`
reads. Processes are dealt runs of tests of a file (`--dist loadgroup`), in which those of equal parameters follow one
another: neighbours share kernels, which a process compiles once. The longest runs are dealt first, so that none is left
at the end, when other processes idle.
"""

from __future__ import annotations

import json
import logging
import os
from collections.abc import Iterator
from itertools import groupby
from pathlib import Path
from typing import Any

import pytest

# Seconds of a test of each function, kernels uncompiled: what `scripts/gpu_test.py --write` wrote.
SECONDS = Path(__file__).parent / "data" / "gpu_seconds.json"
NEW = 10.0  # of one that is not among them
RUN = 40.0  # seconds at most of tests that are dealt together
COMPILED = "compiled %s %s in %.1f s"  # what the stores of kernels log


class Compiled:
    """Kernels that were compiled since the last `take`: how many, and the seconds that took."""

    def __init__(self) -> None:
        self.number, self.seconds = 0, 0.0

    def add(self, seconds: float) -> None:
        self.number, self.seconds = self.number + 1, self.seconds + seconds

    def take(self) -> tuple[int, float]:
        """(number, seconds), and nothing is left."""
        taken = self.number, round(self.seconds, 2)
        self.number, self.seconds = 0, 0.0
        return taken


class FromLog(logging.Handler):
    """Adds up what the stores of CuTe kernels say that they compiled."""

    def __init__(self, compiled: Compiled) -> None:
        super().__init__(logging.INFO)
        self.compiled = compiled

    def emit(self, record: logging.LogRecord) -> None:
        if record.msg == COMPILED and isinstance(record.args, tuple):
            self.compiled.add(float(str(record.args[-1])))


class Report:
    """Writes the lines."""

    def __init__(self, folder: Path) -> None:
        self.lines = (folder / f"tests-{os.getpid()}.jsonl").open("a")
        self.cute, self.triton = Compiled(), Compiled()
        logger = logging.getLogger("gossamer")
        logger.addHandler(FromLog(self.cute))
        logger.setLevel(logging.INFO)
        try:
            from triton import knobs
        except ImportError:
            return
        knobs.compilation.listener = self.compiled_by_triton

    def compiled_by_triton(self, *, times: Any, cache_hit: bool, **_: Any) -> None:
        if not cache_hit:
            self.triton.add(times.total * 1e-6)

    @pytest.hookimpl(wrapper=True)
    def pytest_runtest_makereport(self, item: pytest.Item, call: pytest.CallInfo[None]) -> Iterator[None]:
        report: pytest.TestReport = yield
        if call.when == "call" or report.outcome != "passed":
            reason = report.longrepr[2] if report.skipped and isinstance(report.longrepr, tuple) else None
            name = item.nodeid.rpartition("@")[0] or item.nodeid  # without the group that xdist appends
            line = {"id": name, "outcome": report.outcome, "when": call.when, "seconds": round(call.duration, 3)}
            line |= {"reason": reason, "cute": self.cute.take(), "triton": self.triton.take()}
            line["ended"] = round(call.stop, 1)  # by which the idle time of processes is told
            line["error"] = report.longreprtext[-3000:] if report.failed else ""
            self.lines.write(json.dumps(line) + "\n")
            self.lines.flush()
        return report


@pytest.hookimpl(tryfirst=True)  # before xdist reads the groups
def pytest_collection_modifyitems(items: list[pytest.Item]) -> None:
    known = json.loads(SECONDS.read_text())
    places: dict[tuple[str, str], int] = {}
    for at, item in enumerate(items):
        places.setdefault(_parameters(item), at)
    items.sort(key=lambda item: places[_parameters(item)])
    runs: list[tuple[float, list[pytest.Item]]] = []
    last = ""
    for (file, _), same in groupby((x for x in items if x.get_closest_marker("gpu")), _parameters):
        tests = list(same)
        seconds = sum(known.get(item.nodeid.partition("[")[0], NEW) for item in tests)
        if file == last and runs[-1][0] + seconds <= RUN:
            runs[-1] = runs[-1][0] + seconds, runs[-1][1] + tests
        else:
            runs.append((seconds, tests))
        last = file
    runs.sort(key=lambda run: -run[0])
    for at, (_, tests) in enumerate(runs):
        for item in tests:
            item.add_marker(pytest.mark.xdist_group(str(at)))
    items[:] = [item for _, tests in runs for item in tests]


def _parameters(item: pytest.Item) -> tuple[str, str]:
    """(file, the parameters in the name of a test, or its name)."""
    file, _, name = item.nodeid.partition("::")
    return file, name.partition("[")[2] or name


def pytest_configure(config: pytest.Config) -> None:
    folder = os.environ.get("GPU_REPORT")
    if folder and (hasattr(config, "workerinput") or not config.getoption("numprocesses", None)):
        config.pluginmanager.register(Report(Path(folder)))
