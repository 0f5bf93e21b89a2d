"""Draws docs/figures/hopper_pipeline.svg: the roles of the Hopper forward kernel where one item follows another."""

from __future__ import annotations

from pathlib import Path

OUT = Path(__file__).parent / "figures" / "hopper_pipeline.svg"
THIS, NEXT = "this", "next"
LANES = ("warp 0: TMA loads", "tensor cores", "warpgroup 0: rows 0-63", "warpgroup 1: rows 64-127", "warps 1-3: store")
# The last steps of an item and the first of the next: the step whose S is computed, and that of its P V.
STEPS = [("8", "7"), ("9", "8"), ("0'", "9"), ("1'", "0'"), ("2'", "1'")]
UNIT, LANE, LEFT, TOP, TALL = 72, 38, 185, 30, 30  # pixels: one unit of time, a lane, the margins, a box
WIDTH, HEIGHT = LEFT + 11 * UNIT + 10, TOP + len(LANES) * LANE + 24
STYLE = """text{font:12px sans-serif;fill:#333;text-anchor:middle}.s{font-size:10px}.l{text-anchor:end}
rect{stroke:#fff}.this{fill:#9ecae1}.next{fill:#fdae6b}.this-soft{fill:#deebf7}.next-soft{fill:#fee6ce}"""


def item(step: str) -> str:
    return NEXT if step.endswith("'") else THIS


def main() -> None:
    parts: list[str] = []

    def text(x: float, y: float, words: str, style: str = "") -> None:
        given = f' class="{style}"' if style else ""
        parts.append(f'<text x="{x:g}" y="{y:g}"{given}>{words}</text>')

    def box(lane: int, start: float, width: float, words: str, style: str, size: str = "") -> None:
        x, y = LEFT + start * UNIT, TOP + lane * LANE
        parts.append(f'<rect class="{style}" x="{x:.4g}" y="{y}" width="{width * UNIT:.4g}" height="{TALL}"/>')
        text(round(x + width * UNIT / 2, 1), y + 19, words, size)

    for lane, words in enumerate(LANES):
        text(LEFT - 8, TOP + lane * LANE + 19, words, "l")
    for n, (score, value) in enumerate(STEPS):
        for group in (0, 1):
            start = 2 * n + group
            for part, step in ((0, score), (1, value)):  # both products are issued together
                name = f"S{score}" if part == 0 else f"P V{value}"
                box(1, start + part / 2, 0.5, name, item(step), "s")
                if name == "S1'":  # meanwhile the accumulator of the finished item is normalised and handed over
                    box(2 + group, start, 0.5, "O", THIS, "s")
                    box(4, start + 0.55, 0.9, f"O of group {group}", THIS, "s")
                else:
                    box(2 + group, start + part / 2, 0.5, name, item(step), "s")
            box(2 + group, start + 1, 1.0, f"softmax {score}", f"{item(score)}-soft", "s")
    box(4, 0.1, 1.9, "bounds of the next rows", NEXT, "s")
    loads = ["K9", "V8", "Q'", "K0'", "V9", "K1'", "V0'", "K2'", "V1'", "K3'", "V2'"]  # the next K before the last V
    for n, name in enumerate(loads):
        box(0, 0.92 * n, 0.88, name, item(name))
    for n, (style, words) in enumerate(((THIS, "one work item"), (NEXT, "the next one"))):
        x = WIDTH - 250 + 130 * n
        parts.append(f'<rect class="{style}" x="{x}" y="6" width="14" height="14"/>')
        text(x + 62, 18, words)
    text(LEFT + 5.5 * UNIT, HEIGHT - 8, "time: one unit is the two products of a warpgroup's step")
    head = f'<svg xmlns="http://www.w3.org/2000/svg" viewBox="0 0 {WIDTH} {HEIGHT}"><style>{STYLE}</style>'
    back = f'<path fill="#fff" d="M0 0H{WIDTH}V{HEIGHT}H0z"/>'
    OUT.parent.mkdir(parents=True, exist_ok=True)
    OUT.write_text("\n".join([head, back, *parts, "</svg>"]) + "\n")


main()
