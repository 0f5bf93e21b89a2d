"""Two versions of gossamer on the same rows: the time of a call now over that before, and what follows."""

from __future__ import annotations

import math
from collections.abc import Iterable, Sequence
from dataclasses import dataclass
from typing import TYPE_CHECKING

from gossamer.bench.rows import Row

if TYPE_CHECKING:
    from rich.table import Table

ROW_LIMIT, TAG_LIMIT = 1.02, 1.005  # of the time now over that before: of a row in every run, and of a tag's mean


@dataclass(frozen=True)
class Pair:
    """The rows of both versions of a case in one direction, of one run."""

    now: Row
    before: Row

    @property
    def key(self) -> tuple[str, str, str]:
        return self.now.case, self.now.dtype, self.now.direction

    @property
    def name(self) -> str:
        return f"{self.now.case} {self.now.direction} {self.now.dtype}"

    @property
    def why_not(self) -> str:
        """The reason for which the two cannot be compared; empty where they can."""
        for row in (self.now, self.before):
            if row.status != "ok":
                return f"{row.implementation} {row.status}: {row.reason}"
        if min(self.now.turns or 1, self.before.turns or 1) < 2:
            return "not timed in turns, since both together do not fit into memory"
        return ""

    @property
    def ratio(self) -> float:
        """The median time of a call now over that before: above 1 it is slower."""
        assert self.now.p50_ms is not None and self.before.p50_ms is not None
        return self.now.p50_ms / self.before.p50_ms


def pairs(rows: Iterable[Row], before: str) -> list[Pair]:
    """The pairs of rows of one run of a case; `before` names the other version's."""
    rows = list(rows)
    return [
        Pair(now, old)
        for now in rows
        for old in rows
        if not now.peer and old.peer and old.implementation.startswith(before) and now.direction == old.direction
    ]


def by_row(pairs: Iterable[Pair]) -> list[list[Pair]]:
    """The comparable runs of each row."""
    runs: dict[tuple[str, str, str], list[Pair]] = {}
    for pair in pairs:
        if not pair.why_not:
            runs.setdefault(pair.key, []).append(pair)
    return list(runs.values())


def mean(ratios: Sequence[float]) -> float:
    """The geometric mean."""
    return math.exp(sum(map(math.log, ratios)) / len(ratios))


def comparison(pairs: Iterable[Pair], before: str) -> Table:
    """One line for each row: medians of both versions over all runs, and the ratio of each run."""
    from rich.table import Table

    shown = Table(title=f"gossamer and {before}", caption="above 1: slower now")
    shown.add_column("row", overflow="fold")
    shown.add_column("implementation", overflow="fold")
    for column in ("ms now", "ms before", "now over before"):
        shown.add_column(column, justify="right", overflow="fold")
    for runs in by_row(pairs):
        now, old = runs[0].now.implementation.split()[-1], runs[0].before.implementation.split()[-1]
        shown.add_row(
            runs[0].name,
            now if now == old else f"[red]{now}, {old} before",
            *(f"{mean([getattr(pair, which).p50_ms for pair in runs]):.4g}" for which in ("now", "before")),
            "  ".join(f"{pair.ratio:.4f}" for pair in runs),
        )
    return shown


def verdict(pairs: Sequence[Pair], tags: dict[str, frozenset[str]]) -> list[str]:
    """The geometric mean of each tag, the slowest row, and what was not compared; `tags` are those of each case."""
    rows = by_row(pairs)
    lines = []
    for tag in sorted({tag for runs in rows for tag in tags[runs[0].now.case]}):
        listed = [pair.ratio for runs in rows if tag in tags[runs[0].now.case] for pair in runs]
        within = "within" if mean(listed) <= TAG_LIMIT else "SLOWER than"
        lines.append(f"{tag}: {mean(listed):.4f}, the geometric mean of {len(listed)} ratios, {within} {TAG_LIMIT}")
    if rows:
        # A row counts as slow by the run in which it was least so: the others may have been disturbed.
        slowest = max(rows, key=lambda runs: min(pair.ratio for pair in runs))
        shown = ", ".join(f"{pair.ratio:.4f}" for pair in slowest)
        lines.append(f"slowest row: {slowest[0].name} ({shown})")
        slow = [runs for runs in rows if min(pair.ratio for pair in runs) > ROW_LIMIT]
        runs = max(map(len, rows))
        lines.append(
            f"{len(slow)} of {len(rows)} rows above {ROW_LIMIT} in {'the run' if runs == 1 else f'all {runs} runs'}"
            + "".join(f"; SLOWER: {each[0].name} ({', '.join(f'{p.ratio:.4f}' for p in each)})" for each in slow)
        )
    lines += [f"not compared: {pair.name}: {pair.why_not}" for pair in pairs if pair.why_not]
    return lines
