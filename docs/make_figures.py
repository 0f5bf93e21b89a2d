"""Draws docs/figures: patterns.png, the patterns of the README; patterns/, one for each pattern of docs/patterns.md,
each pair coloured by the kind of its tile; and the charts of docs/results.md, from the rows in benchmarks/results.
"""

from __future__ import annotations

from pathlib import Path

import matplotlib

matplotlib.use("Agg")
import matplotlib.pyplot as plt
import numpy as np
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


def patterns() -> None:
    figure, axes = plt.subplots(2, 6, figsize=(13.2, 5.1), layout="constrained")
    for axis, (title, pattern) in zip(axes.flat, PATTERNS.items(), strict=True):
        layout = pattern.layout(SIZE, SIZE, block_q=TILE, block_kv=TILE)
        axis.imshow(pair_picture(pattern, layout, 0, 0), interpolation="nearest")
        axis.set_title(title, fontsize=8.5, family="monospace")
        axis.set(xticks=[], yticks=[])
    legend = [plt.Rectangle((0, 0), 1, 1, color=COLOURS[kind]) for kind in KINDS]
    names = ["full tile: no mask", "interval tile: [lo, hi) a row", "bits tile: one bit a pair"]
    figure.legend(legend, names, loc="outside lower center", ncols=3, frameon=False, fontsize=9)
    OUT.parent.mkdir(parents=True, exist_ok=True)
    figure.savefig(OUT, dpi=100)
    shrink(OUT)


def shrink(path: Path) -> None:
    """Write a picture again in as many colours as its lines and labels need: a fourth of the bytes."""
    with Image.open(path) as picture:
        few = picture.convert("RGB").quantize(64, dither=Image.Dither.NONE)
    few.save(path, optimize=True)


def each() -> None:
    """A picture of one pixel for a pair, in the colours of the legend of docs/figures/patterns.png."""
    folder = FIGURES / "patterns"
    folder.mkdir(parents=True, exist_ok=True)
    for name, pattern in EACH.items():
        layout = pattern.layout(SIZE, SIZE, block_q=TILE, block_kv=TILE)
        picture = np.asarray(pair_picture(pattern, layout, 0, 0))
        plt.imsave(folder / f"{name}.png", picture, pil_kwargs={"optimize": True})


def charts() -> None:
    """The sweeps that have rows."""
    from gossamer.bench.charts import chart
    from gossamer.bench.summary import read

    for sweep in ("breakeven", "ladder"):
        rows = RESULTS / f"nvidia_h200_{sweep}.jsonl"
        if rows.exists():
            chart(read(rows), FIGURES / f"{sweep}.png")
            shrink(FIGURES / f"{sweep}.png")


patterns()
each()
charts()
