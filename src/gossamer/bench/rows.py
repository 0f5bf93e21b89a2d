"""A benchmark row: what is measured, and how it is shown in a table."""

from __future__ import annotations

import subprocess
from dataclasses import asdict, dataclass, field
from pathlib import Path
from typing import TYPE_CHECKING, Literal

from gossamer.bench.results import append_records
from gossamer.bench.summary import number

if TYPE_CHECKING:
    from rich.table import Table

    from gossamer.bench.measure import Timing

RUN = ("device", "versions", "commit")  # fields that all rows of a run share
BACKWARD_WORK = 2.5  # the backward's matrix products over the forward's


@dataclass
class Row:
    """One implementation on one case in one direction. A row whose check failed has no times.

    `check` is the largest error of a sampled row over its limit: at most 1.
    """

    case: str
    implementation: str
    direction: Literal["forward", "backward"]
    peer: bool
    status: Literal["ok", "failed", "refused"] = "ok"
    reason: str = ""
    check: float | None = None
    p20_ms: float | None = None
    p50_ms: float | None = None
    p80_ms: float | None = None
    repeats: int | None = None
    turns: int | None = None  # implementations timed in alternating rounds, this one among them; None: one by one
    device_ms: float | None = None  # of one call of a replayed CUDA graph, in sweeps
    call_ms: float | None = None  # of the host, in sweeps of small problems
    relative_error: float | None = None  # of the sampled rows together, in sweeps
    useful_tflops: float | None = None
    matmul_tflops: float | None = None  # dense rate measured in the same run
    share_of_matmul: float | None = None
    peak_bytes: int | None = None  # beyond inputs, outputs and gradients
    peak_percent: float | None = None  # of inputs, outputs and gradients
    peak_rss_bytes: int | None = None  # on a CPU: of a process of its own, everything included
    ratios: dict[str, float] = field(default_factory=dict)  # peer: its p50 over this row's
    shape: dict[str, int] = field(default_factory=dict)
    dtype: str = ""
    pairs: int = 0  # kept, over all batch elements and heads
    density: float = 0.0
    pattern: str = ""
    device: str = ""
    versions: dict[str, str] = field(default_factory=dict)
    commit: str = ""
    time: str = ""

    def set_timing(self, timing: Timing, matmul_tflops: float) -> None:
        """Fills in the times and what follows from them."""
        self.p20_ms, self.p50_ms, self.p80_ms = timing.p20, timing.p50, timing.p80
        self.repeats = timing.repeats
        flop: float = 2 * (self.shape["D"] + self.shape["E"]) * self.pairs
        flop *= BACKWARD_WORK if self.direction == "backward" else 1
        self.useful_tflops = flop / (timing.p50 * 1e9)
        self.matmul_tflops = matmul_tflops
        self.share_of_matmul = self.useful_tflops / matmul_tflops

    def set_memory(self, beyond: int, counted: int, rss: int | None = None) -> None:
        """Peak bytes beyond inputs, outputs and gradients, and the bytes of those."""
        self.peak_bytes = max(0, beyond)
        self.peak_percent = 100 * self.peak_bytes / counted
        self.peak_rss_bytes = rss

    def fail(self, status: Literal["failed", "refused"], reason: str) -> None:
        """Marks the row and drops its times."""
        self.status, self.reason = status, reason
        self.p20_ms = self.p50_ms = self.p80_ms = self.useful_tflops = self.share_of_matmul = None
        self.repeats = self.turns = self.device_ms = self.call_ms = None


def commit() -> str:
    """The commit of the checkout that the package runs from, "+" when its files differ; "unknown" outside one."""
    here = Path(__file__).parent
    try:
        done = subprocess.run(
            ["git", "describe", "--always", "--abbrev=12", "--exclude=*", "--dirty=+"],
            cwd=here, capture_output=True, text=True, timeout=10, check=False,
        )  # fmt: skip
    except (OSError, subprocess.TimeoutExpired):
        return "unknown"
    return done.stdout.strip() or "unknown"


def append_rows(rows: list[Row], path: Path) -> None:
    """Adds the rows of a case to a file of results."""
    if rows:
        append_records([asdict(row) for row in rows], path, RUN)


def fill_ratios(rows: list[Row]) -> None:
    """Gives each of our rows the time of every peer on the same case and direction over its own."""
    for own in rows:
        if own.peer or own.p50_ms is None:
            continue
        for other in rows:
            if other.peer and other.p50_ms and (other.case, other.direction) == (own.case, own.direction):
                own.ratios[other.implementation] = other.p50_ms / own.p50_ms


def table(rows: list[Row]) -> Table:
    """The rows of a run; beside each peer, how many times as fast gossamer is on the same case."""
    from rich.table import Table

    caption = "gossamer is 2x as fast where a call of this row takes twice the time of gossamer's on the same case"
    shown = Table(title="benchmarks", caption=caption)
    shown.add_column("case", overflow="fold")
    shown.add_column("implementation", overflow="fold")
    for column in ("ms (p20 - p80)", "TFLOP/s", "of matmul", "peak", "check", "gossamer is"):
        shown.add_column(column, justify="right", overflow="fold")
    last = None
    several = len({row.dtype for row in rows}) > 1
    for row in rows:
        if row.status == "refused":
            continue
        group = (row.case, row.dtype, row.direction)
        if last not in (None, group):
            shown.add_section()
        title = f"{row.case}\n{row.dtype + ', ' if several else ''}{row.direction}"
        shown.add_row(title if group != last else "", *_cells(row, rows))
        last = group
    return shown


def refusals(rows: list[Row]) -> list[str]:
    """Each peer that did not take part, with its reason and the cases, in lines."""
    cases: dict[tuple[str, str], list[str]] = {}
    for row in rows:
        if row.status == "refused":
            named = cases.setdefault((row.implementation, row.reason), [])
            named += [] if row.case in named else [row.case]
    return [f"{name} left out: {reason} ({', '.join(named)})" for (name, reason), named in cases.items()]


def _cells(row: Row, rows: list[Row]) -> list[str]:
    from rich.markup import escape

    name = row.implementation if row.peer else f"[bold]{row.implementation}"
    check = "" if row.check is None else f"{row.check:.2f}"
    if row.p50_ms is None or row.useful_tflops is None or row.share_of_matmul is None:
        return [f"{name}\n[red]{escape(f'{row.status}: {row.reason}')}", "", "", "", "", check, ""]
    ratios = [
        own.ratios[row.implementation]
        for own in rows
        if row.peer
        and (own.case, own.dtype, own.direction) == (row.case, row.dtype, row.direction)
        and row.implementation in own.ratios
    ]
    return [
        name,
        f"{row.p50_ms:.3g} ({row.p20_ms:.3g} - {row.p80_ms:.3g})",
        f"{row.useful_tflops:.3g}",
        f"{row.share_of_matmul:.0%}",
        _memory(row),
        check,
        " ".join(_as_fast(ratio) for ratio in ratios),
    ]


def _as_fast(ratio: float) -> str:
    """A peer's time over gossamer's, in words that say who is faster."""
    text = number(ratio)
    return f"{text}x as fast" + (" (slower)" if float(text) < 1 else "")


def _memory(row: Row) -> str:
    if row.peak_percent is None or row.peak_bytes is None:
        return ""
    few = row.peak_bytes < 10 * 2**20
    peak = f"{row.peak_bytes / 2**10:,.0f} KiB" if few else f"{row.peak_bytes / 2**20:,.0f} MiB"
    text = f"+{peak} ({number(row.peak_percent)} %)"
    return text if row.peak_rss_bytes is None else f"{text}, RSS {row.peak_rss_bytes / 2**30:.2f} GiB"
