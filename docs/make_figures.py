"""Draws docs/figures, in WebP: patterns, those of the README; patterns/, one for each pattern of docs/patterns.md, each
pair coloured by the kind of its tile, and the key of the colours; and the charts of docs/results.md, from the rows in
benchmarks/results.
"""

from __future__ import annotations

from pathlib import Path

import matplotlib

matplotlib.use("Agg")
import matplotlib.pyplot as plt
import numpy as np
from matplotlib.figure import Figure
from PIL import Image

import gossamer as gs
from gossamer.cli.show import COLOURS, pair_picture
from gossamer.layouts.walk import KINDS

SIZE, TILE = 256, 32
FIGURES = Path(__file__).parent / "figures"
RESULTS = Path(__file__).parent.parent / "benchmarks" / "results"
OUT = FIGURES / "patterns.png"
documents = gs.Document(np.repeat(np.arange(4), (40, 96, 24, 96)))

PATTERNS = {
    "SlidingWindow(64)": gs.SlidingWindow(64),
    "SlidingWindow(40, 40)": gs.SlidingWindow(40, 40),
    "SlidingWindow(48, sinks=8)": gs.SlidingWindow(48, sinks=8),
    "Local(32) & Causal()": gs.Local(32) & gs.Causal(),
    "BigBird(16)": gs.BigBird(16),
    "Longformer(32, (0, 128))": gs.Longformer(32, (0, 128)),
    "Dilated(15, 0, 8)": gs.Dilated(15, 0, 8),
    "Strided(32, 16)": gs.Strided(32, 16),
    "PowerStrided(2, 4)": gs.PowerStrided(2, 4),
    "Document(ids) & Causal()": documents & gs.Causal(),
    "Document | Dilated, causal": (documents | gs.Dilated(15, 0, 16)) & gs.Causal(),
    "Causal() & ~SlidingWindow(64)": gs.Causal() & ~gs.SlidingWindow(64),
}


rng = np.random.default_rng(0)
edges = rng.random((SIZE, SIZE)) < 0.02

# One picture for each section of docs/patterns.md.
EACH = {
    "dense": gs.Dense(),
    "causal": gs.Causal(),
    "sliding_window": gs.SlidingWindow(48, sinks=8),
    "local": gs.Local(64),
    "block_mask": gs.BlockMask(rng.random((8, 8)) < 0.3, 32),
    "bigbird": gs.BigBird(16),
    "longformer": gs.Longformer(32, (0, 128)),
    "dilated": gs.Dilated(15, 0, 8),
    "longnet": gs.LongNet((32, 128), (1, 4), heads=4).at(0, 1),
    "strided": gs.Strided(32, 16),
    "power_strided": gs.PowerStrided(2, 4),
    "document": documents & gs.Causal(),
    "csr": gs.CSR(np.concatenate(([0], np.cumsum(edges.sum(1)))), np.nonzero(edges)[1], SIZE),
    "tree": gs.Tree(np.where(np.arange(SIZE) < 3, -1, (np.arange(SIZE) - 3) // 3)),
    "neighborhood": gs.Neighborhood((4, 8, 8), (1, 2, 2)),
    "neighborhood_shift": gs.Neighborhood((4, 8, 8), (1, 2, 2), border="shift"),
    "predicate": gs.Predicate(lambda i, j: (i & j) == 0),
    "composed": (documents | gs.Dilated(15, 0, 16)) & gs.Causal(),
}


def picture(pattern: gs.Pattern) -> np.ndarray:
    """A pixel for each pair."""
    layout = pattern.layout(SIZE, SIZE, block_q=TILE, block_kv=TILE)
    return np.asarray(pair_picture(pattern, layout, 0, 0))


def key(figure: Figure, place: str) -> None:
    """What the colours mean."""
    colours = [plt.Rectangle((0, 0), 1, 1, color=COLOURS[kind]) for kind in KINDS]
    names = ["full tile: no mask", "interval tile: [lo, hi) a row", "bits tile: one bit a pair"]
    figure.legend(colours, names, loc=place, ncols=3, frameon=False, fontsize=9)


def patterns() -> None:
    figure, axes = plt.subplots(2, 6, figsize=(13.2, 5.3), layout="constrained")
    for axis, (title, pattern) in zip(axes.flat, PATTERNS.items(), strict=True):
        axis.imshow(picture(pattern), interpolation="nearest")
        axis.set_title(title, fontsize=8.5, family="monospace")
        axis.set(xticks=[], yticks=[])
    for axis in axes[:, 0]:
        axis.set_ylabel("query \u2192", fontsize=9)  # time runs down, as in a printed matrix
        axis.yaxis.label.set_rotation(270)
        axis.yaxis.labelpad = 12
    for axis in axes[-1]:
        axis.set_xlabel("key \u2192", fontsize=9)
    key(figure, "outside lower center")
    OUT.parent.mkdir(parents=True, exist_ok=True)
    figure.savefig(OUT, dpi=100)
    shrink(OUT)


def shrink(path: Path) -> None:
    """Write a PNG as WebP, without loss in as many colours as lines and labels need: an eighth of the bytes."""
    with Image.open(path) as found:
        few = found.convert("RGB").quantize(20, Image.Quantize.MAXCOVERAGE, kmeans=2, dither=Image.Dither.NONE)
    few.convert("RGB").save(path.with_suffix(".webp"), lossless=True, quality=100, method=6)
    path.unlink()


def each() -> None:
    """A picture of one pixel for a pair, with its axes."""
    folder = FIGURES / "patterns"
    folder.mkdir(parents=True, exist_ok=True)
    left, below, width, height = 34, 34, SIZE + 44, SIZE + 42  # pixels
    for name, pattern in EACH.items():
        figure = plt.figure(figsize=(width / 100, height / 100))
        axis = figure.add_axes((left / width, below / height, SIZE / width, SIZE / height))
        axis.imshow(picture(pattern), interpolation="nearest")
        ends = [0, SIZE - 1]
        axis.set_xticks(ends, map(str, ends), fontsize=7)
        axis.set_yticks(ends, map(str, ends), fontsize=7)
        axis.set_xlabel("key j", fontsize=8, labelpad=-6)
        axis.set_ylabel("query i", fontsize=8, labelpad=-12)
        figure.savefig(folder / f"{name}.png", dpi=100)
        plt.close(figure)
        shrink(folder / f"{name}.png")
    figure = plt.figure(figsize=(6.2, 0.32))
    key(figure, "center")
    figure.savefig(folder / "key.png", dpi=100)
    shrink(folder / "key.png")


def charts() -> None:
    """The sweeps that have rows."""
    from gossamer.bench.charts import chart
    from gossamer.bench.summary import read

    for sweep in ("breakeven", "ladder"):
        rows = RESULTS / f"nvidia_h200_{sweep}.jsonl.gz"
        if rows.exists():
            chart(read(rows), FIGURES / f"{sweep}.png", dpi=80)
            shrink(FIGURES / f"{sweep}.png")


patterns()
each()
charts()
