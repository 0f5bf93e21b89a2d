"""Every family of kernels under the tools of compute-sanitizer, side by side on one GPU, and what they say.

python benchmarks/check_memory.py                           # memcheck and synccheck
python benchmarks/check_memory.py --tool racecheck --keep F # and what each process printed, in the folder F
python benchmarks/check_memory.py --tool memcheck --api no  # without errors of calls to CUDA: accesses alone
python benchmarks/check_memory.py --tool none               # the calls as they are; without a GPU a list of them
python benchmarks/check_memory.py --family small            # the calls of one family, in this process

`memory_calls.py` has the calls. They run once without a tool, so that the tools find kernels that are compiled. Every
tensor is an allocation of its own, so that an access past its end is seen. The table has a line for each family and
tool: how many of the calls ended, reports of kernels, and errors of calls to CUDA, by which libraries ask what there
is. Below it each report stands once: what it says, of which kernel, at which places of its code, and how often. What
racecheck says of barriers at which one lane arrives is looked up in docs/lab/2026-11-23-racecheck.md. The exit code is
1 where a kernel was reported, or a process failed or was stopped.
"""

from __future__ import annotations

import argparse
import os
import re
import shutil
import signal
import subprocess
import sys
import tempfile
import time
from collections import Counter
from collections.abc import Iterator, Sequence
from pathlib import Path
from typing import NamedTuple

import memory_calls
import torch
from memory_calls import FAMILIES

TOOLS = ("none", "memcheck", "synccheck", "racecheck", "initcheck")
MARK = "========="
PLACE = re.compile(r"(?:(Write|Read|Atomic) access )?\bat (?:0x[0-9a-f]+ in )?(.+?)\+(0x[0-9a-f]+)")
CALL = re.compile(r"Program hit (\w+) \(error (\d+)\).* on CUDA API call to (\w+)")
SPACE = re.compile(r"__(global|shared|local|constant)__")
TROUBLE = re.compile(r"Internal Sanitizer|Target application|terminate|Maximum number|[Nn]ot supported|[Uu]nable to")
UNSEEN = re.compile(r"^COMPUTE-SANITIZER|SUMMARY|were not printed|^Host Frame|^Saved host")


class Report(NamedTuple):
    """What a tool says once."""

    kind: str  # kernel, call (of CUDA), or tool: it could not do its work
    text: str  # its first line
    space: str  # of addresses: global, shared, local
    kernel: str
    places: tuple[str, ...]  # of the code of the kernel

    def line(self) -> str:
        """As it is printed."""
        where = f" in {self.kernel}: {', '.join(self.places)}" if self.kernel else ""
        return f"{self.kind}: {self.text}{where}"


class Ended(NamedTuple):
    """A process that has ended."""

    family: str
    tool: str
    seconds: float
    code: int | None  # None: it was stopped
    printed: str


def reports(printed: str) -> Iterator[Report]:
    """What a tool printed, a report at a time."""
    for block in _blocks(printed):
        first = block[0]
        call = CALL.search(first)
        if call:
            error, number, name = call.groups()
            yield Report("call", f"{name} gave {error} ({number})", "", "", ())
        elif TROUBLE.search(first):
            yield Report("tool", first, "", "", ())
        elif not UNSEEN.search(first):
            places = [found.groups() for line in block if not UNSEEN.search(line) for found in PLACE.finditer(line)]
            space = SPACE.search(" ".join(block))
            text = re.sub(r"0x[0-9a-f]+|\([\d, ]+\)", "..", PLACE.sub(r"\1", first).removesuffix(" :"))
            yield Report(
                "kernel", " ".join(text.split()), space.group(1) if space else "",
                shortened(places[0][1]) if places else "",
                tuple(" ".join(part for part in (access, at) if part) for access, _, at in places),
            )  # fmt: skip


def _blocks(printed: str) -> Iterator[list[str]]:
    """The lines of each report, without its mark."""
    lines: list[str] = []
    for line in [*printed.splitlines(), MARK]:
        if not line.startswith(MARK):
            continue
        text = line.removeprefix(MARK)
        # A report begins one place behind the mark; its other lines stand further right.
        if (not text.strip() or not text.startswith("    ")) and lines:
            yield lines
            lines = []
        if text.strip():
            lines.append(text.strip())


def shortened(kernel: str) -> str:
    """The name of a kernel without what it is compiled for."""
    name = re.split(r"[<(]", kernel)[0].split("::")[-1].removeprefix("void ")
    return name if len(name) <= 70 else f"{name[:50]}..{name[-18:]}"


def sanitizer() -> str:
    """The path of compute-sanitizer: on the path, or beside nvcc."""
    found = shutil.which("compute-sanitizer")
    nvcc = shutil.which("nvcc")
    roots = [Path(one) for one in (os.environ.get("CUDA_HOME"), os.environ.get("CUDA_PATH")) if one]
    roots += [Path(nvcc).resolve().parents[1]] if nvcc else []
    roots += sorted(Path("/usr/local").glob("cuda*"), reverse=True)
    for root in roots:
        for path in (root / "bin" / "compute-sanitizer", root / "compute-sanitizer" / "compute-sanitizer"):
            if found is None and path.is_file():
                found = str(path)
    if found is None:
        raise FileNotFoundError(
            "compute-sanitizer is neither on the path nor beside nvcc: it comes with the CUDA toolkit"
        )
    return found


def command(family: str, tool: str, api: str, report: str) -> list[str]:
    """What runs a family."""
    own = [sys.executable, str(Path(__file__).resolve()), "--family", family]
    if tool == "none":
        return own
    options = {"memcheck": ["--report-api-errors", api], "racecheck": ["--racecheck-report", report]}
    return [
        sanitizer(), "--tool", tool, "--print-limit", "2000", "--target-processes", "application-only",
        *options.get(tool, []), *own,
    ]  # fmt: skip


def side_by_side(jobs: Sequence[tuple[str, str, list[str]]], workers: int, limit: float) -> Iterator[Ended]:
    """Run (family, tool, command), so many at a time; each is stopped after `limit` seconds."""
    environment = os.environ | {"PYTORCH_NO_CUDA_MEMORY_CACHING": "1", "OMP_NUM_THREADS": "1"}
    waiting, running = list(reversed(jobs)), []
    with tempfile.TemporaryDirectory() as folder:
        while waiting or running:
            while waiting and len(running) < workers:
                family, tool, argv = waiting.pop()
                log = Path(folder) / f"{len(waiting)}.log"
                with log.open("w") as out:
                    process = subprocess.Popen(
                        argv, stdout=out, stderr=subprocess.STDOUT, env=environment, start_new_session=True
                    )
                running.append((family, tool, process, log, time.monotonic()))
            time.sleep(0.1)
            for job in list(running):
                family, tool, process, log, start = job
                code, spent = process.poll(), time.monotonic() - start
                if code is None and spent < limit:
                    continue
                if code is None:
                    os.killpg(process.pid, signal.SIGKILL)
                    process.wait()
                running.remove(job)
                yield Ended(family, tool, spent, code, log.read_text(errors="replace"))


def table(ended: Sequence[Ended]) -> tuple[list[str], bool]:
    """The lines that are printed, and whether all is well."""
    lines = [f"{'family':24} {'tool':10} {'seconds':>7} {'ended':>8} {'kernels':>8} {'calls':>6}  first kernels"]
    every: Counter[tuple[str, Report]] = Counter()
    well = True
    for one in sorted(ended, key=lambda e: (TOOLS.index(e.tool), list(FAMILIES).index(e.family))):
        found = list(reports(one.printed))
        every.update((one.tool, report) for report in found)
        of = Counter(report.kind for report in found)
        names = list(dict.fromkeys(report.kernel for report in found if report.kind == "kernel"))
        done = f"{len(re.findall(rf'^{re.escape(one.family)}: ', one.printed, re.M))}/{len(FAMILIES[one.family].calls)}"
        how = "stopped" if one.code is None else done if one.code == 0 else f"{done} !{one.code}"
        lines.append(
            f"{one.family:24} {one.tool:10} {one.seconds:7.0f} {how:>8} {of['kernel']:8} {of['call']:6}  "
            + ", ".join(names[:3])
        )
        well = well and one.code == 0 and not of["kernel"] and not of["tool"]
        if one.code != 0:
            lines += [f"    | {line}" for line in one.printed.splitlines()[-6:]]
    lines += [f"{n:6} x {tool}: {report.line()}" for (tool, report), n in every.most_common()]
    return lines, well


def main(given: list[str] | None = None) -> int:
    """The exit code."""
    parser = argparse.ArgumentParser(description=__doc__, formatter_class=argparse.RawDescriptionHelpFormatter)
    parser.add_argument("families", nargs="*", choices=[*FAMILIES, []], help="all where none is named")
    parser.add_argument("--family", choices=list(FAMILIES), help="compute the calls of this one in this process")
    parser.add_argument("--tool", nargs="+", choices=TOOLS, default=["memcheck", "synccheck"])
    parser.add_argument("--workers", type=int, default=len(os.sched_getaffinity(0)), help="processes at a time")
    parser.add_argument("--limit", type=float, default=200.0, help="seconds after which a process is stopped")
    parser.add_argument("--api", choices=["explicit", "all", "no"], default="explicit", help="errors of calls to CUDA")
    parser.add_argument("--report", choices=["analysis", "hazard", "all"], default="analysis", help="of racecheck")
    parser.add_argument("--warm", action="store_true", help="kernels are compiled already")
    parser.add_argument("--keep", type=Path, help="a folder for what each process printed")
    a = parser.parse_args(given)
    names = a.families or list(FAMILIES)
    if a.family is not None:
        memory_calls.run(a.family)
        sys.stdout.flush()
        os._exit(0)  # the calls have ended; threads of the frameworks abort some processes as they are taken down
    if not torch.cuda.is_available():
        for name in names:
            print(f"{name} ({', '.join(FAMILIES[name].folders)})")
            print(*(f"    {call}" for call in FAMILIES[name].calls), sep="\n")
        print("not run: torch finds no CUDA device")
        return int(a.tool != ["none"])
    start, ended = time.monotonic(), []
    tools = [tool for tool in a.tool if tool != "none"]
    for some in (["none"] * (not a.warm or not tools), tools):
        jobs = [(name, tool, command(name, tool, a.api, a.report)) for tool in some for name in names]
        ended += list(side_by_side(jobs, a.workers, a.limit))
        print(f"{', '.join(some)}: {time.monotonic() - start:.0f} s", flush=True)
    lines, well = table(ended)
    print(*lines, sep="\n")
    if a.keep is not None:
        a.keep.mkdir(parents=True, exist_ok=True)
        for one in ended:
            (a.keep / f"{one.tool}-{one.family.replace(' ', '-')}.log").write_text(one.printed)
    return int(not well)


if __name__ == "__main__":
    sys.exit(main())
