"""Draws docs/figures/patterns.png: the patterns of the README, each pair coloured by the kind of its tile."""

from __future__ import annotations

from pathlib import Path

import matplotlib

matplotlib.use("Agg")
import matplotlib.pyplot as plt
import numpy as np

import gossamer as gs
from gossamer.cli.show import COLOURS, KINDS, pair_picture

SIZE, TILE = 256, 32
OUT = Path(__file__).parent / "figures" / "patterns.png"
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


def main() -> None:
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
    figure.savefig(OUT, dpi=100, pil_kwargs={"optimize": True})


main()
