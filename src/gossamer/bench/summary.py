"""Markdown tables of benchmark rows read back from .jsonl files: the break-even, the ladder, and any cases."""

from __future__ import annotations

from collections.abc import Iterable, Sequence
from itertools import product
from pathlib import Path

from gossamer.bench.results import RENAMED, Record, read_records

KINDS = ("window", "bigbird", "dilated", "csr", "tree")
# The dense attention that a kind is held against: of the same causality.
DENSE_OF = dict.fromkeys(("window", "dilated", "tree"), "SDPA causal") | dict.fromkeys(("bigbird", "csr"), "SDPA dense")


# A rival of the table of ratios: what the names of its implementations begin with.
RIVALS = ("plain window", "FA4", "FlexAttention", "cuDNN", "SDPA dense", "torch.sparse", "PyG")


def read(path: Path) -> list[Record]:
    """The last row of every case, type, implementation (without its note) and direction.

    A peer that was refused keeps the row of a run before: memory may have been another's that day. What gossamer took
    is called as it is now.
    """
    last_rows: dict[tuple[str, str, str, str], Record] = {}
    for row in read_records(path):
        name, _, taken = row["implementation"].partition(" ")
        if name == "gossamer" and taken in RENAMED:
            row["implementation"] = f"{name} {RENAMED[taken]}"
        key = row["case"], row["dtype"], name_of(row), row["direction"]
        if row["status"] != "refused" or key not in last_rows:
            last_rows[key] = row
    return list(last_rows.values())


def name_of(row: Record) -> str:
    """The implementation without its note; ours without the kernel that was chosen."""
    return row["implementation"].partition(" (")[0] if row["peer"] else "gossamer"


def number(x: float) -> str:
    """Three digits, and all of those before the point."""
    return f"{x:.3g}" if x < 999.5 else f"{x:.0f}"


def point(row: Record) -> tuple[str, int, float]:
    """(kind, positions, nominal density) of a break-even row."""
    _, kind, N, density = row["case"].split("_")
    return kind, int(N), float(density)


def series(
    rows: Iterable[Record], measured: str, name: str, kind: str | None = None, density: float | None = None
) -> dict[int, float]:
    """A number of one implementation by positions, ascending; of any pattern, the newest, where no kind is given."""
    points = {}
    for row in sorted(rows, key=lambda row: row["time"]):
        own_kind, N, own_density = point(row)
        same = kind in (None, own_kind) and density in (None, own_density)
        if same and name_of(row) == name and row[measured] is not None:
            points[N] = row[measured]
    return dict(sorted(points.items()))


def breakeven_table(rows: Sequence[Record]) -> str:
    """From which size on each pattern is faster than each rival, and by how much at the largest size of both."""
    lines = ["| pattern | density | dense SDPA | materialised | torch.sparse | at the largest size |", "|---" * 6 + "|"]
    for kind in KINDS:
        for density in sorted({d for k, _, d in map(point, rows) if k == kind}, reverse=True):
            mine = series(rows, "device_ms", "gossamer", kind, density)
            rivals = {
                DENSE_OF[kind]: series(rows, "device_ms", DENSE_OF[kind]),
                "materialised": series(rows, "device_ms", "materialised"),
                "torch.sparse": series(rows, "device_ms", "torch.sparse", kind, density),
            }
            cells = [overtakes(mine, rival) for rival in rivals.values()]
            dense = rivals[DENSE_OF[kind]]
            common = sorted(set(mine) & set(dense))
            last = f"{dense[common[-1]] / mine[common[-1]]:.3g} x {DENSE_OF[kind]} at {common[-1]:,}" if common else "-"
            lines.append(f"| {kind} | {100 * density:g} % | {' | '.join(cells)} | {last} |")
    return "\n".join(lines) + "\n"


def overtakes(mine: dict[int, float], rival: dict[int, float]) -> str:
    """The smallest size from which on `mine` takes no longer than `rival` at every size that both have."""
    common = sorted(set(mine) & set(rival))
    if not common:
        return "-"
    slower = [N for N in common if mine[N] > rival[N]]
    if not slower:
        return f"always (from {common[0]:,})"
    later = [N for N in common if slower[-1] < N]
    return f"from {later[0]:,}" if later else f"not up to {common[-1]:,}"


def rung(row: Record) -> str:
    """The step of the ladder that a row is."""
    return name_of(row) if row["peer"] else f"gossamer {row['case'].split('_')[1]}"


def ladder_points(rows: Iterable[Record]) -> dict[tuple[int, int, int], dict[str, Record]]:
    """(positions, heads, head size) -> rung -> row. Materialised scores count once, of the dense case."""
    points: dict[tuple[int, int, int], dict[str, Record]] = {}
    for row in rows:
        shape = row["shape"]
        if row["device_ms"] is None or (row["peer"] and "_dense_" not in row["case"]):
            continue
        points.setdefault((shape["Q"], shape["H"], shape["D"]), {})[rung(row)] = row
    return dict(sorted(points.items(), key=lambda item: (item[0][0], item[0][1] * item[0][2], item[0][1])))


def ladder_table(rows: Sequence[Record]) -> str:
    """Time, relative error and speed-up over materialised scores, of every rung."""
    names = ("materialised", "fused", "gossamer dense", "gossamer local", "gossamer causal")
    lines = ["| positions | heads x size | " + " | ".join(names) + " |", "|---" * (len(names) + 2) + "|"]
    for (N, H, D), at_size in ladder_points(rows).items():
        base = at_size.get("materialised")
        cells = []
        for name in names:
            row = at_size.get(name)
            if row is None:
                cells.append("-")
                continue
            text = f"{row['device_ms']:.3g} ms, {row['relative_error']:.0e}"
            if base is not None and row is not base:
                text += f", {base['device_ms'] / row['device_ms']:.1f} x"
            cells.append(text)
        lines.append(f"| {N} | {H} x {D} | " + " | ".join(cells) + " |")
    return "\n".join(lines) + "\n"


def case_table(rows: Sequence[Record], cases: Sequence[str]) -> str:
    """Median milliseconds on some cases, the fastest first; ours in bold with the kernel and its useful TFLOP/s."""
    lines = ["| case | direction | milliseconds |", "|---" * 3 + "|"]
    for case in cases:
        case_rows = [row for row in rows if row["case"] == case and row["p50_ms"] is not None]
        types = sorted({row["dtype"] for row in case_rows})
        for dtype, direction in product(types, ("forward", "backward")):
            mine = [row for row in case_rows if (row["dtype"], row["direction"]) == (dtype, direction)]
            title = f"`{case}`" + (f", {dtype}" if len(types) > 1 else "")
            cells = []
            for row in sorted(mine, key=lambda r: r["p50_ms"]):
                name, ms = row["implementation"], number(row["p50_ms"])
                cells.append(
                    f"{name} {ms}" if row["peer"] else f"**{name} {ms}** ({number(row['useful_tflops'])} TFLOP/s)"
                )
            if cells:
                lines.append(f"| {title} | {direction} | {', '.join(cells)} |")
    return "\n".join(lines) + "\n"


def ratio_table(rows: Sequence[Record], cases: Sequence[str]) -> str:
    """Each rival's time over ours, forward and backward, of the last run in turns that had both, from `read_records`.

    Of a rival with several backends the fastest counts. Above 1 ours is faster.
    """
    last: dict[tuple[str, str, str, str], float] = {}
    for row in rows:
        for rival in RIVALS if row.get("turns") else ():
            rival_ratios = [ratio for name, ratio in row["ratios"].items() if name.startswith(rival)]
            if rival_ratios:
                last[row["case"], row["dtype"], row["direction"], rival] = min(rival_ratios)
    lines = ["| case | type | " + " | ".join(RIVALS) + " |", "|---" * (len(RIVALS) + 2) + "|"]
    for case, dtype in product(cases, ("bfloat16", "float32")):
        cells = []
        for rival in RIVALS:
            pair = [last.get((case, dtype, way, rival)) for way in ("forward", "backward")]
            cells.append("" if pair == [None, None] else ", ".join("-" if x is None else number(x) for x in pair))
        if any(cells):
            lines.append(f"| `{case}` | {dtype} | " + " | ".join(cells) + " |")
    return "\n".join(lines) + "\n"
