"""`gossamer show`: a picture of a pattern and a table of its tiles and of the work they cost."""

from __future__ import annotations

from pathlib import Path
from typing import TYPE_CHECKING, Annotated, Any

import typer

if TYPE_CHECKING:
    import numpy as np
    from rich.table import Table

    from gossamer import Pattern
    from gossamer.layouts import BlockLayout

DENSE_LIMIT = 512  # up to this many rows and keys each pair is drawn
PIXELS = 512  # of a tile picture, at most, a side
MOST_PANELS = 4
COLOURS = {"full": "#1b6ca8", "interval": "#4fb286", "bits": "#e08e45"}


def run(
    pattern: Annotated[str, typer.Argument(help='A pattern as in Python: "SlidingWindow(256) | BigBird(64)".')],
    q: Annotated[int, typer.Option("--q", min=1, max=2**24, help="Query rows.")],
    out: Annotated[Path | None, typer.Option("--out", help="The picture to write, FILE.png; none by default.")] = None,
    k: Annotated[
        int | None, typer.Option("--k", min=1, max=2**24, help="Keys; as many as query rows by default.")
    ] = None,
    block_q: Annotated[int, typer.Option("--block-q", min=1, max=1024, help="Query rows of a tile.")] = 128,
    block_kv: Annotated[int, typer.Option("--block-kv", min=1, max=1024, help="Keys of a tile.")] = 128,
) -> None:
    """Count a pattern's tiles, its density and the work it costs; with --out, draw it."""
    from rich.console import Console

    from gossamer.cli.errors import Refused, need
    from gossamer.cli.expression import parse_pattern

    parsed = parse_pattern(pattern)
    keys = q if k is None else k
    if out is not None:
        need("matplotlib", "gossamer show --out")
        if out.suffix.lower() != ".png":
            raise Refused(f"--out must name a .png file, got {str(out)!r}")
    try:
        layout = parsed.layout(q, keys, block_q=block_q, block_kv=block_kv)
    except ValueError as error:
        raise Refused(f"{pattern!r} with --q {q} --k {keys}: {error}") from None
    console = Console()
    console.print(summary(parsed, layout, pattern))
    if out is not None:
        draw(parsed, layout, out, pattern)
        console.print(f"wrote {out}")


def summary(pattern: Pattern, layout: BlockLayout, title: str) -> Table:
    """The layout's tiles by kind, density and executed work, and what else than these tiles may be executed."""
    from rich.markup import escape
    from rich.table import Table

    stats = layout.stats
    Bl, Hl = layout.lead
    each = "" if (Bl, Hl) == (1, 1) else " (each, on average)"
    counts = {"full": stats.full_tiles, "interval": stats.interval_tiles, "bits": stats.bits_tiles}
    visited = sum(counts.values())
    table = Table("quantity", "value", title=escape(title), show_header=False)
    table.add_row("size", f"{layout.Q:,} query rows x {layout.K:,} keys")
    table.add_row("tile", f"{layout.block_q} x {layout.block_kv}")
    if each:
        table.add_row("layouts", f"{Bl} batch elements x {Hl} heads")
    for kind in COLOURS:
        table.add_row(f"[{COLOURS[kind]}]{kind} tiles{each}", f"{counts[kind]:,.0f}")
    share = visited / stats.all_tiles
    table.add_row(f"tiles visited{each}", f"{visited:,.0f} of {stats.all_tiles:,} ({share:.3%})")
    table.add_row("distinct bits tiles", f"{stats.pool_tiles:,}")
    table.add_row("longest / mean row of tiles", f"{stats.balance:.2f}")
    table.add_row(f"pairs kept{each}", f"{stats.useful_pairs:,.0f}")
    table.add_row("density", f"{stats.density:.4%}")
    table.add_row(f"pairs executed{each}", f"{stats.executed_pairs:,.0f}")
    table.add_row("executed / kept", f"{stats.overhead:.2f}")
    for name, value in others(pattern, layout):
        table.add_row(name, value)
    table.add_row("layout", f"{stats.bytes / 2**20:,.2f} MiB")
    return table


def others(pattern: Pattern, layout: BlockLayout) -> list[tuple[str, str]]:
    """Of tiles that are mostly empty: the plain patterns inside residue classes, or executed over kept when gathered.

    A plan takes the first on any device and the second on a GPU, where they take less time.
    """
    from gossamer.layouts.choice import WORTH_A_LOOK
    from gossamer.layouts.estimate import Sample
    from gossamer.layouts.gather import WIDTHS
    from gossamer.patterns import LongNet
    from gossamer.patterns.grid import Sizes
    from gossamer.patterns.pieces import branch_pieces, pieces
    from gossamer.patterns.validate import show

    stats, sizes = layout.stats, Sizes(layout.Q, layout.K, layout.K - layout.Q)
    if stats.overhead <= WORTH_A_LOOK or not stats.useful_pairs:
        return []
    found = branch_pieces(pattern) if isinstance(pattern, LongNet) else None
    if found is None:
        heads = dict.fromkeys(pattern.at(b, h) for b in range(pattern.lead[0]) for h in range(pattern.lead[1]))
        found = tuple(dict.fromkeys(piece for one in heads for piece in pieces(one, sizes)))
    if any(piece.dilation > 1 for piece in found):
        return [(f"or in {p.dilation} classes" if p.dilation > 1 else "or beside", show(p.pattern)) for p in found]
    sample = Sample(pattern, sizes)
    if sample.intervals:
        return []
    useful = stats.useful_pairs * layout.lead[0] * layout.lead[1]
    over = [f"{sample.gathers(rows).executed / useful:.2f}" for rows in WIDTHS]
    return [(f"or gathered for {', '.join(map(str, WIDTHS))} rows", ", ".join(over))]


def draw(pattern: Pattern, layout: BlockLayout, out: Path, title: str) -> None:
    """Writes the picture: each pair coloured by the kind of its tile when small, tiles (binned) when large."""
    import matplotlib

    matplotlib.use("Agg")
    import matplotlib.pyplot as plt

    panels = _panels(layout.lead)
    figure, axes = plt.subplots(1, len(panels), figsize=(4.6 * len(panels), 5.0), squeeze=False, layout="constrained")
    for axis, (b, h) in zip(axes[0], panels, strict=True):
        small = max(layout.Q, layout.K) <= DENSE_LIMIT
        image = pair_picture(pattern, layout, b, h) if small else tile_picture(layout, b, h)
        axis.imshow(image, extent=(0, layout.K, layout.Q, 0), interpolation="nearest", aspect="auto")
        axis.set_xlabel("key")
        axis.set_ylabel("query row")
        if len(panels) > 1:
            axis.set_title(f"batch element {b}, head {h}" if layout.lead[0] > 1 else f"head {h}", fontsize=9)
    legend = [plt.Rectangle((0, 0), 1, 1, color=COLOURS[kind]) for kind in COLOURS]
    figure.legend(legend, [f"{kind} tile" for kind in COLOURS], loc="outside lower center", ncols=3, frameon=False)
    every = layout.lead[0] * layout.lead[1]
    more = f" ({len(panels)} of {every} layouts)" if every > len(panels) else ""
    figure.suptitle((title if len(title) < 70 else title[:67] + "...") + more, fontsize=10)
    out.parent.mkdir(parents=True, exist_ok=True)
    figure.savefig(out, dpi=120)
    plt.close(figure)


def _panels(lead: tuple[int, int]) -> list[tuple[int, int]]:
    """Which (batch element, head) to draw: at most four, spread over all of them."""
    import numpy as np

    every = lead[0] * lead[1]
    chosen = np.unique(np.linspace(0, every - 1, min(every, MOST_PANELS)).round().astype(int))
    return [(int(at) // lead[1], int(at) % lead[1]) for at in chosen]


def tile_counts(layout: BlockLayout, b: int, h: int, kind: str, bins: tuple[int, int]) -> np.ndarray:
    """How many listed tiles of a kind fall in each of bins (rows, columns) of the tile grid, never N x N."""
    import numpy as np

    rows = layout.rows
    tiles = rows.lists[kind]
    counts, starts = tiles.counts[b, h].astype(np.int64), tiles.starts[b, h].astype(np.int64)
    at = np.repeat(starts - np.concatenate(([0], np.cumsum(counts)[:-1])), counts) + np.arange(counts.sum())
    row = np.repeat(np.arange(rows.tiles), counts) * bins[0] // rows.tiles
    columns = -(-rows.columns // rows.block_columns)
    column = tiles.indices[at].astype(np.int64) * bins[1] // columns
    return np.bincount(row * bins[1] + column, minlength=bins[0] * bins[1]).reshape(bins)


def tile_picture(layout: BlockLayout, b: int, h: int) -> np.ndarray:
    """(rows, columns, 3) colours: a pixel is a bin of tiles, paler where fewer of its tiles are visited."""
    import numpy as np

    grid = (layout.rows.tiles, -(-layout.K // layout.block_kv))
    bins = (min(grid[0], PIXELS), min(grid[1], PIXELS))
    share = np.stack([tile_counts(layout, b, h, kind, bins) for kind in COLOURS]).astype(float)
    visited = share.sum(0)
    mixed = np.einsum("krc,kx->rcx", share, _palette()) / np.maximum(visited, 1)[..., None]
    # A bin with a single visited tile still shows: from 35 % of the colour up.
    per_bin = (grid[0] / bins[0]) * (grid[1] / bins[1])
    strength = np.where(visited > 0, 0.35 + 0.65 * np.minimum(visited / per_bin, 1), 0.0)[..., None]
    return 1 - strength * (1 - mixed)


def pair_picture(pattern: Pattern, layout: BlockLayout, b: int, h: int) -> np.ndarray:
    """(Q, K, 3) colours of each kept pair by the kind of its tile; the tiles visited are shaded behind them."""
    import numpy as np

    kept = pattern.materialize(layout.Q, layout.K)
    kept = kept if kept.ndim == 2 else kept[b, h]
    bins = (layout.rows.tiles, -(-layout.K // layout.block_kv))
    image = np.ones((layout.Q, layout.K, 3))
    for kind, colour in zip(COLOURS, _palette(), strict=True):
        listed = tile_counts(layout, b, h, kind, bins) > 0
        inside = listed.repeat(layout.block_q, 0).repeat(layout.block_kv, 1)[: layout.Q, : layout.K]
        image[inside] = 1 - 0.18 * (1 - colour)
        image[inside & kept] = colour
    return image


def _palette() -> Any:
    import numpy as np

    return np.array([[int(COLOURS[kind][at : at + 2], 16) / 255 for at in (1, 3, 5)] for kind in COLOURS])
