"""Writes the generated tables of README.md, docs/patterns.md and docs/results.md between their markers, or prints them.

    python docs/make_tables.py [--write | --check]

`--check` names the tables that are not what the rows say. A table stands between `<!-- table: NAME -->` and
`<!-- end of NAME -->`. Those of results come from the rows in benchmarks/results; those of patterns are counted here.
"""

from __future__ import annotations

import math
import sys
from collections.abc import Callable
from pathlib import Path

import numpy as np

import gossamer as gs
from gossamer.bench.results import read_records
from gossamer.bench.summary import (
    breakeven_table,
    case_table,
    ladder_table,
    number,
    ratio_table,
    read,
)
from gossamer.patterns.grid import Sizes
from gossamer.plan.estimate import Sample
from gossamer.testing.cases import BENCH

DOCS = Path(__file__).parent
RESULTS = DOCS.parent / "benchmarks" / "results"
N = 131072
TILES = ((128, 128), (64, 64))


def _documents() -> gs.Pattern:
    lengths = np.random.default_rng(0).integers(500, 1500, 200)
    return gs.Document(np.repeat(np.arange(200), lengths)[:N]) & gs.Causal()


def _graph() -> gs.Pattern:
    keys = np.sort(np.random.default_rng(0).integers(0, N, (N, 64)), axis=1)
    fresh = np.concatenate((np.ones((N, 1), dtype=bool), keys[:, 1:] > keys[:, :-1]), axis=1)
    return gs.CSR(np.concatenate(([0], np.cumsum(fresh.sum(1)))), keys[fresh], N)


COUNTED: dict[str, Callable[[], gs.Pattern]] = {
    "`Dense()`": gs.Dense,
    "`Causal()`": gs.Causal,
    "`SlidingWindow(4096)`": lambda: gs.SlidingWindow(4096),
    "`SlidingWindow(256, sinks=4)`": lambda: gs.SlidingWindow(256, sinks=4),
    "`Local(512)`": lambda: gs.Local(512),
    "`BlockMask(mask, 128)`, 5 % of the blocks": lambda: gs.BlockMask(
        np.random.default_rng(0).random((1024, 1024)) < 0.05, 128
    ),
    "`BigBird(64)`": lambda: gs.BigBird(64),
    "`Longformer(512, 16 tokens)`": lambda: gs.Longformer(512, tuple(range(16))),
    "`Dilated(255, 0, 16)`": lambda: gs.Dilated(255, 0, 16),
    "`LongNet((2048, 8192, 32768), (1, 4, 16))`, one head": lambda: gs.LongNet(
        (2048, 8192, 32768), (1, 4, 16), heads=1
    ),
    "`Strided(128, 128)`": lambda: gs.Strided(128, 128),
    "`PowerStrided(2, 16)`": lambda: gs.PowerStrided(2, 16),
    "`Document(ids) & Causal()`, 500 to 1500 each": _documents,
    "`Neighborhood((32, 64, 64), (1, 6, 6))`": lambda: gs.Neighborhood((32, 64, 64), (1, 6, 6)),
    "`CSR`, 64 random keys a row": _graph,
}


def pattern_costs() -> str:
    """Density, tiles and executed pairs of each pattern at 131,072 positions."""
    lines = [
        "| pattern | density | keys a row | tiles of 128: full, interval, bits | executed per useful pair: 128 | 64 |",
        "|---" * 6 + "|",
    ]
    for name, make in COUNTED.items():
        pattern = make()
        density = pattern.density(N, N)
        cells, over = "-", []
        for block_q, block_kv in TILES:
            if isinstance(pattern, gs.CSR):  # nearly every tile has bits of its own, gigabytes: counted on some rows
                work = Sample(pattern, Sizes(N, N, 0)).tiles(block_q, block_kv)
                over.append(f"{work.executed / work.useful:.0f}")
                continue
            stats = pattern.layout(N, N, block_q=block_q, block_kv=block_kv).stats
            over.append(f"{stats.overhead:.3g}")
            if block_q == TILES[0][0]:
                cells = f"{stats.full_tiles:,.0f}, {stats.interval_tiles:,.0f}, {stats.bits_tiles:,.0f}"
        lines.append(f"| {name} | {100 * density:.3g} % | {density * N:,.0f} | {cells} | {' | '.join(over)} |")
    return "\n".join(lines) + "\n"


def _rows(name: str) -> list[dict]:
    path = RESULTS / name
    return read(path) if path.exists() else []


def cases(device: str) -> str:
    """The rows of the cases that have any, in the order in which cases are defined."""
    rows = _rows(f"{device}.jsonl.gz")
    known = {row["case"] for row in rows}
    names = [case.name for case in BENCH if case.name in known]
    return case_table(rows, names) if names else f"No rows in benchmarks/results/{device}.jsonl.gz.\n"


def ratios() -> str:
    """The rivals of every case on an H200."""
    return ratio_table(read_records(RESULTS / "nvidia_h200.jsonl.gz"), [case.name for case in BENCH])


# The table of the README: a case, its name there, and peers that are made for such work.
HEADLINE = {
    "window_4096_causal": ("`SlidingWindow(4096)`, 131,072 tokens", ("FA4",)),
    "causal_32768": ("`Causal()`, 32,768 tokens", ("FA4",)),
    "bigbird_matrix_64": ("blocks of 64, 2.9 % dense", ("cuDNN block sparse",)),
    "bigbird_64": ("`BigBird(64)`", ("cuDNN block sparse",)),
    "dilated_8_1024": ("`Dilated(1023, 0, 8)`", ()),
    "graph_power_law": ("power-law graph, 1.17 M edges", ("torch.sparse", "PyG")),
}


def headline() -> str:
    """Forward and backward in milliseconds: ours, FlexAttention, the fastest made for it, dense; the least bold."""
    lines = ["| case | gossamer | FlexAttention | made for it | fastest dense |", "|---" * 5 + "|"]
    rows = [row for row in _rows("nvidia_h200.jsonl.gz") if row["dtype"] == "bfloat16" and row["p50_ms"] is not None]
    for case, (title, special) in HEADLINE.items():
        names = (("gossamer",), ("FlexAttention",), special, ("SDPA dense",))
        columns: list[list[tuple[float, str]]] = [[] for _ in names]
        for direction in ("forward", "backward"):
            of_case = [row for row in rows if (row["case"], row["direction"]) == (case, direction)]
            for column, starts in zip(columns, names, strict=True):
                found = [(row["p50_ms"], s) for row in of_case for s in starts if row["implementation"].startswith(s)]
                column.append(min(found, default=(math.inf, "")))
        least = [min(column[way][0] for column in columns) for way in range(2)]
        cells = []
        for column in columns:
            texts, before = [], ""
            for (ms, name), best in zip(column, least, strict=True):
                text = "-" if ms == math.inf else f"**{number(ms)}**" if ms == best else number(ms)
                own = name if name in special and name != before else ""
                before = name
                texts.append(f"{own} {text}".strip())
            cells.append("-" if texts == ["-", "-"] else ", ".join(texts))
        lines.append(f"| {title} | {' | '.join(cells)} |")
    return "\n".join(lines) + "\n"


def breakeven() -> str:
    rows = _rows("nvidia_h200_breakeven.jsonl.gz")
    if not rows:
        return "No rows in benchmarks/results/nvidia_h200_breakeven.jsonl.gz.\n"
    return f"![Break-even](figures/breakeven.webp)\n\n{breakeven_table(rows)}"


def ladder() -> str:
    rows = _rows("nvidia_h200_ladder.jsonl.gz")
    if not rows:
        return "No rows in benchmarks/results/nvidia_h200_ladder.jsonl.gz.\n"
    return f"![Ladder](figures/ladder.webp)\n\n{ladder_table(rows)}"


def _models(row: str) -> list[dict]:
    return [found for found in read_records(RESULTS / "transformers_h200.jsonl") if found["row"] == row]


def model_errors() -> str:
    lines = ["| model | input | gossamer | eager |", "|---|---|---|---|"]
    for row in _models("accuracy"):
        errors = row["errors"]
        lines.append(f"| {row['family']} | {row['form']} | {errors['gossamer']:.4f} | {errors['eager']:.4f} |")
    return "\n".join(lines) + "\n"


def model_step() -> str:
    lines = ["| attention | ms | peak GiB |", "|---|---|---|"]
    for row in _models("train"):
        measured = f"{row['p50_ms']:,.0f} | {row['peak_gib']:.1f}" if row["status"] == "ok" else f"{row['status']} | "
        lines.append(f"| `{row['implementation']}` | {measured} |")
    return "\n".join(lines) + "\n"


TABLES: dict[str, tuple[str, Callable[[], str]]] = {
    "measured": ("../README.md", headline),
    "pattern costs": ("patterns.md", pattern_costs),
    "ratios": ("results.md", ratios),
    "cases on an H200": ("results.md", lambda: cases("nvidia_h200")),
    "cases on a CPU": ("results.md", lambda: cases("cpu")),
    "break-even": ("results.md", breakeven),
    "ladder": ("results.md", ladder),
    "errors of models": ("results.md", model_errors),
    "step of a model": ("results.md", model_step),
}


def main() -> None:
    stale = []
    for name, (file, make) in TABLES.items():
        if sys.argv[1:] == ["--check"] and make is pattern_costs:  # counted, not measured
            continue
        table, path = make(), DOCS / file
        if not sys.argv[1:]:
            print(f"{name}\n\n{table}")
            continue
        text = path.read_text()
        begin, end = f"<!-- table: {name} -->\n", f"<!-- end of {name} -->"
        if begin not in text or end not in text:
            raise ValueError(f"{path} has no place for the table {name!r}: the lines {begin!r} and {end!r} mark it")
        head, _, rest = text.partition(begin)
        written = head + begin + table + end + rest.partition(end)[2]
        if sys.argv[1:] == ["--write"]:
            path.write_text(written)
        elif written != text:
            stale.append(f"{name} in {path.name}")
    if stale:
        sys.exit(f"not what the rows say: {', '.join(stale)}; run python docs/make_tables.py --write")


main()
