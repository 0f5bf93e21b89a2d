"""Charts of benchmark rows as PNG: a sweep as curves or steps, anything else as bars. Needs matplotlib."""

from __future__ import annotations

from collections.abc import Sequence
from pathlib import Path
from typing import Any

from gossamer.bench.results import Record
from gossamer.bench.summary import DENSE_OF, KINDS, ladder_points, point, series
from gossamer.testing.sweeps import DENSITIES

COLOURS = ("#1b6ca8", "#2a9d5c", "#e08a1e", "#b23a48")
RUNGS = {
    "materialised": "#999999", "fused": "#d9a441", "gossamer dense": "#1b6ca8", "gossamer local": "#2a9d5c",
    "gossamer causal": "#b23a48",
}  # fmt: skip


def chart(rows: Sequence[Record], path: Path, dpi: int = 110) -> None:
    """Draws the rows (as dictionaries, of one sweep or of any cases) to a PNG file."""
    import matplotlib

    matplotlib.use("Agg")
    timed = [row for row in rows if row["p50_ms"] is not None]
    if not timed:
        raise ValueError("no row has a time: there is nothing to draw")
    sweeps = {row["case"].partition("_")[0] for row in timed}
    draw = {"breakeven": _breakeven, "ladder": _ladder}.get(sweeps.pop() if len(sweeps) == 1 else "", _bars)
    figure = draw(timed)
    path.parent.mkdir(parents=True, exist_ok=True)
    figure.savefig(path, dpi=dpi, pil_kwargs={"optimize": True})


def _breakeven(rows: list[Record]) -> Any:
    """Device time above, time of the host below, over the number of positions; a column for each kind of pattern."""
    from matplotlib import pyplot as plt

    curves = [kind for kind in KINDS if kind != "tree"]  # which is one size
    figure, axes = plt.subplots(2, len(curves), figsize=(13, 6.2), layout="constrained", sharey="row")
    for column, kind in enumerate(curves):
        for row, (measured, unit) in enumerate((("device_ms", "device time"), ("call_ms", "host time of a call"))):
            axis = axes[row, column]
            found = {d for k, _, d in map(point, rows) if k == kind}
            for density, colour in zip(DENSITIES, COLOURS, strict=True):
                if density not in found:
                    continue
                mine = series(rows, measured, "gossamer", kind, density)
                axis.plot(*_xy(mine), color=colour, marker="o", ms=3, label=f"gossamer, {100 * density:g} %")
                if kind == "csr":
                    axis.plot(*_xy(series(rows, measured, "torch.sparse", kind, density)), color=colour, ls=":")
            axis.plot(*_xy(series(rows, measured, DENSE_OF[kind])), color="black", lw=1.6, label=DENSE_OF[kind])
            axis.plot(*_xy(series(rows, measured, "materialised")), color="grey", ls="--", lw=1.2, label="materialised")
            axis.set(xscale="log", yscale="log", xlabel="positions", title=kind if row == 0 else "")
            axis.grid(alpha=0.3)
            if column == 0:
                axis.set_ylabel(f"{unit}, ms")
            if row == 0:
                axis.legend(fontsize=7, frameon=False)
    axes[0, -1].plot([], [], color="grey", ls=":", label="torch.sparse, same graph")
    axes[0, -1].legend(fontsize=7, frameon=False)
    return figure


def _xy(points: dict[int, float]) -> tuple[list[int], list[float]]:
    return list(points), list(points.values())


def _ladder(rows: list[Record]) -> Any:
    """Times of each rung, for each length and width."""
    from matplotlib import pyplot as plt

    points = ladder_points(rows)
    figure, axis = plt.subplots(figsize=(13, 5), layout="constrained")
    for place, name in enumerate(RUNGS):
        at_size = [(at, at_size[name]["device_ms"]) for at, at_size in enumerate(points.values()) if name in at_size]
        axis.bar(
            [at + 0.16 * (place - 2) for at, _ in at_size],
            [ms for _, ms in at_size],
            0.15,
            label=name,
            color=RUNGS[name],
        )
    titles = [f"{N}\n{H} x {D}" for N, H, D in points]
    axis.set(yscale="log", ylabel="device time, ms", xlabel="positions, heads x head size")
    axis.set_xticks(range(len(titles)), titles, fontsize=8)
    axis.legend(frameon=False, ncols=len(RUNGS), fontsize=8)
    axis.grid(axis="y", alpha=0.3)
    return figure


def _bars(rows: list[Record]) -> Any:
    """A group of bars for each case, type and direction, the shortest time first."""
    from matplotlib import pyplot as plt

    groups: dict[str, list[Record]] = {}
    several = len({row["dtype"] for row in rows}) > 1
    for row in rows:
        title = ", ".join((row["case"], *([row["dtype"]] if several else []), row["direction"]))
        groups.setdefault(title, []).append(row)
    lines = len(groups) + len(rows)
    figure, axes = plt.subplots(
        len(groups), 1, figsize=(9, 0.24 * lines + 0.55 * len(groups)), layout="constrained", squeeze=False
    )
    for axis, (title, group) in zip(axes[:, 0], groups.items(), strict=True):
        mine = sorted(group, key=lambda r: -r["p50_ms"])
        names = [row["implementation"] for row in mine]
        bars = axis.barh(names, [row["p50_ms"] for row in mine],
                         color=["#b9c4cc" if row["peer"] else COLOURS[0] for row in mine])  # fmt: skip
        axis.bar_label(bars, fmt="%.3g ms", padding=3, fontsize=8)
        axis.set_title(title, fontsize=9, loc="left")
        axis.tick_params(labelsize=8)
        axis.margins(x=0.12)
    return figure
