"""The demo's report: report.json with every number, report.png with the curves and the patterns."""

from __future__ import annotations

import json
from dataclasses import asdict
from pathlib import Path
from typing import Any

from examples.language_model.model import demo_pattern
from examples.language_model.runner import Run
from gossamer.cli.info import devices, versions

COLOURS = {"dense": "#8a8a8a", "sparse": "#1b6ca8"}
REPORT = "report.json", "report.png"
SHOWN_ROWS = 384  # of the patterns' pictures


def write_report(runs: dict[str, Run], folder: Path) -> list[Path]:
    """Writes what there is, also of a run that failed; returns the paths."""
    report = {
        "versions": versions(),
        "devices": devices(),
        "models": {kind: asdict(run) for kind, run in runs.items()},
    }
    paths = [folder / name for name in REPORT]
    paths[0].write_text(json.dumps(report, indent=1) + "\n")
    _draw(runs, paths[1])
    return paths


def _draw(runs: dict[str, Run], path: Path) -> None:
    import matplotlib

    matplotlib.use("Agg")
    import matplotlib.pyplot as plt

    figure, axes = plt.subplot_mosaic(
        [["loss", "loss", "window", "dilated"], ["time", "time", "memory", "memory"]],
        figsize=(11, 7.5), layout="constrained",
    )  # fmt: skip
    _losses(axes["loss"], runs)
    settings = runs["sparse"].settings
    _patterns(axes["window"], axes["dilated"], min(SHOWN_ROWS, settings.context))
    _lengths(axes["time"], runs, "ms", "time of attention, forward and backward (ms)", 1)
    _lengths(axes["memory"], runs, "peak_bytes", "peak memory of attention (MiB)", 2**20)
    where = f"{settings.layers} layers, width {settings.width}, context {settings.context:,}, on {settings.device}"
    figure.suptitle(f"A byte-level language model on the Python standard library's source: {where}", fontsize=11)
    figure.savefig(path, dpi=110)
    plt.close(figure)


def _losses(axis: Any, runs: dict[str, Run]) -> None:
    for kind, run in runs.items():
        steps = [step["step"] for step in run.steps]
        axis.plot(steps, [step["bits_per_byte"] for step in run.steps], color=COLOURS[kind], alpha=0.25, lw=0.7)
        bits = f": {run.result['bits_per_byte']:.3f}" if run.result else ": failed"
        steps = [at["step"] for at in run.validation]
        bits_per_byte = [at["bits_per_byte"] for at in run.validation]
        axis.plot(steps, bits_per_byte, "o-", ms=3.5, color=COLOURS[kind], label=kind + bits)
    axis.set(xlabel="step", ylabel="bits per byte", title="training (thin) and validation")
    axis.legend(frameon=False)
    axis.grid(alpha=0.3)


def _patterns(window: Any, dilated: Any, rows: int) -> None:
    kept = demo_pattern(2).materialize(rows, rows)[0]
    for axis, picture, title in zip(
        (window, dilated), kept, ("half the heads: window", "half: dilation 8"), strict=True
    ):
        axis.imshow(picture, cmap="Blues", interpolation="nearest", vmin=0, vmax=1.3)
        axis.set(xlabel="key", ylabel="query", title=title)


def _lengths(axis: Any, runs: dict[str, Run], key: str, title: str, unit: float) -> None:
    for kind, run in runs.items():
        lengths = [row["length"] for row in run.lengths]
        axis.plot(lengths, [row[key] / unit for row in run.lengths], "o-", ms=4, color=COLOURS[kind], label=kind)
    axis.set_xscale("log", base=2)
    axis.set_yscale("log")
    axis.set(xlabel="length (tokens)", title=title)
    axis.legend(frameon=False)
    axis.grid(alpha=0.3, which="both")
