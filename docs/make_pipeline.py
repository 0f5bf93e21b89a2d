"""Draws docs/figures/hopper_pipeline.svg: the roles of the Hopper forward kernel where one item follows another."""

from __future__ import annotations

import re
from pathlib import Path

import matplotlib

matplotlib.use("Agg")
import matplotlib.pyplot as plt

OUT = Path(__file__).parent / "figures" / "hopper_pipeline.svg"
THIS, NEXT, DARK = "#9ecae1", "#fdae6b", "#333333"
SOFT = {THIS: "#deebf7", NEXT: "#fee6ce"}
LANES = ("warp 0: TMA loads", "tensor cores", "warpgroup 0: rows 0-63", "warpgroup 1: rows 64-127", "warps 1-3: store")
# The last steps of an item and the first of the next: the step whose S is computed, and that of its P V.
STEPS = [("8", "7"), ("9", "8"), ("0'", "9"), ("1'", "0'"), ("2'", "1'")]


def colour(step: str) -> str:
    return NEXT if step.endswith("'") else THIS


def main() -> None:
    plt.rcParams["svg.fonttype"] = "none"  # text stays text
    plt.rcParams["svg.hashsalt"] = "gossamer"  # the same file every time
    figure, axis = plt.subplots(figsize=(12, 3.6), layout="constrained")

    def box(lane: int, start: float, width: float, text: str, fill: str, size: float = 8.0) -> None:
        axis.broken_barh([(start, width)], (-lane - 0.4, 0.8), facecolor=fill, edgecolor="white", linewidth=1.2)
        axis.text(start + width / 2, -lane, text, ha="center", va="center", fontsize=size, color=DARK)

    for n, (score, value) in enumerate(STEPS):
        for group in (0, 1):
            start = 2 * n + group
            for part, step in ((0, score), (1, value)):  # both products are issued together
                name = f"S{score}" if part == 0 else f"P V{value}"
                box(1, start + part / 2, 0.5, name, colour(step))
                if name == "S1'":  # meanwhile the accumulator of the finished item is normalised and handed over
                    box(2 + group, start, 0.5, "O", THIS)
                    box(4, start + 0.55, 0.9, f"O of group {group}", THIS, 7.0)
                else:
                    box(2 + group, start + part / 2, 0.5, name, colour(step), 7.0)
            box(2 + group, start + 1, 1.0, f"softmax {score}", SOFT[colour(score)])
    box(4, 0.1, 1.9, "bounds of the next rows", NEXT)
    loads = ["K9", "V8", "Q'", "K0'", "V9", "K1'", "V0'", "K2'", "V1'", "K3'", "V2'"]  # the next K before the last V
    for n, name in enumerate(loads):
        box(0, 0.92 * n - 0.1, 0.88, name, colour(name))
    axis.set_yticks([-lane for lane in range(len(LANES))], LANES, fontsize=9)
    axis.set_xlim(-0.2, 11.1)
    axis.set_xlabel("time: one unit is the two products of a warpgroup's step", fontsize=9)
    axis.set_xticks([])
    axis.tick_params(left=False)
    axis.spines[:].set_visible(False)
    legend = [plt.Rectangle((0, 0), 1, 1, color=fill) for fill in (THIS, NEXT)]
    figure.legend(
        legend, ["one work item", "the next one"], loc="outside upper right", ncols=2, frameon=False, fontsize=9
    )
    OUT.parent.mkdir(parents=True, exist_ok=True)
    figure.savefig(OUT, metadata={"Date": None})
    lines = (line.strip() for line in OUT.read_text().splitlines())
    # A hundredth of a point is seen by nobody.
    OUT.write_text("\n".join(re.sub(r"(\.\d\d)\d+", r"\1", line) for line in lines) + "\n")


main()
