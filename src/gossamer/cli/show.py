"""`gossamer show`: a picture of a pattern and a table of its tiles and of the work they cost."""

from __future__ import annotations

import ast
from pathlib import Path
from typing import TYPE_CHECKING, Annotated, Any

import typer

from gossamer.cli.options import integer

if TYPE_CHECKING:
    import numpy as np
    from matplotlib.figure import Figure
    from rich.table import Table

    from gossamer import Pattern
    from gossamer.layouts import BlockLayout

DENSE_LIMIT = 512  # up to this many rows and keys each pair is drawn
PIXELS = 512  # of a tile picture, at most, a side
PANEL = 4.6, 5.0  # inches of a picture, with its labels and the legend
DPI = 160  # which leaves an axis more than PIXELS dots, so that every pixel is seen
STEPS = 1, 2, 2.5, 5, 10  # between labels, times a power of ten
TITLE_POINTS, TITLE_LINES = 9, 4
MOST_PANELS = 4
COLOURS = {"full": "#1b6ca8", "interval": "#4fb286", "bits": "#e08e45"}


def run(
    pattern: Annotated[str, typer.Argument(help='A pattern as in Python: "SlidingWindow(256) | BigBird(64)".')],
    q: Annotated[int, typer.Option("--q", parser=integer(1, 2**24), metavar="N", help="Query rows.")],
    out: Annotated[Path | None, typer.Option("--out", help="The picture to write, FILE.png; none by default.")] = None,
    k: Annotated[
        int | None,
        typer.Option("--k", parser=integer(1, 2**24), metavar="N", help="Keys; as many as query rows by default."),
    ] = None,
    block_q: Annotated[
        int, typer.Option("--block-q", parser=integer(1, 1024), metavar="N", help="Query rows of a tile.")
    ] = 128,
    block_kv: Annotated[
        int, typer.Option("--block-kv", parser=integer(1, 1024), metavar="N", help="Keys of a tile.")
    ] = 128,
) -> None:
    """Count a pattern's tiles, its density and the work it costs; with --out, draw it."""
    from rich.console import Console

    from gossamer.cli.errors import Failed, Refused, check_picture, reason, shorten
    from gossamer.cli.expression import parse_pattern

    parsed = parse_pattern(pattern)
    keys = q if k is None else k
    if out is not None:
        check_picture("--out", out, "gossamer show --out")
    title = ast.unparse(ast.parse(" ".join(pattern.split()), mode="eval"))  # spaced, so that it breaks into lines
    asked = f"{shorten(repr(pattern))} with --q {q} --k {keys}"
    try:
        layout = parsed.layout(q, keys, block_q=block_q, block_kv=block_kv)
    except ValueError as error:
        raise Refused(f"{asked}: {error}") from None
    except MemoryError:
        raise Refused(f"{asked} has more tiles than fit into memory; a larger tile makes fewer") from None
    console = Console()
    console.print(summary(parsed, layout, shorten(title)))
    if out is None:
        return
    try:
        picture(parsed, layout, title).savefig(out)
    except OSError as error:
        raise Failed(f"--out {str(out)!r} could not be written: {reason(error)}") from None
    console.print(f"wrote {out}", markup=False, highlight=False, soft_wrap=True)


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
    small = stats.bytes < 2**20
    table.add_row("layout", f"{stats.bytes / 2**10:,.1f} KiB" if small else f"{stats.bytes / 2**20:,.2f} MiB")
    return table


def others(pattern: Pattern, layout: BlockLayout) -> list[tuple[str, str]]:
    """Lines about mostly empty tiles: the plain patterns inside residue classes, or executed over kept when gathered.

    A plan takes the first on any device and the second on a GPU, where they take less time.
    """
    from gossamer.checks import show
    from gossamer.layouts.gather import WIDTHS
    from gossamer.patterns import LongNet
    from gossamer.patterns.grid import Sizes
    from gossamer.patterns.pieces import branch_pieces, pieces
    from gossamer.plan.choice import WORTH_A_LOOK
    from gossamer.plan.estimate import Sample

    stats, sizes = layout.stats, Sizes(layout.Q, layout.K, layout.K - layout.Q)
    if stats.overhead <= WORTH_A_LOOK or not stats.useful_pairs:
        return []
    split = branch_pieces(pattern) if isinstance(pattern, LongNet) else None
    if split is None:
        heads = dict.fromkeys(pattern.at(b, h) for b in range(pattern.lead[0]) for h in range(pattern.lead[1]))
        split = tuple(dict.fromkeys(piece for one in heads for piece in pieces(one, sizes)))
    if any(piece.dilation > 1 for piece in split):
        return [(f"or in {p.dilation} classes" if p.dilation > 1 else "or beside", show(p.pattern)) for p in split]
    if pattern.keeps_intervals(sizes):
        return []
    sample = Sample(pattern, sizes)
    useful = stats.useful_pairs * layout.lead[0] * layout.lead[1]
    over = [f"{sample.gathers(rows).executed / useful:.2f}" for rows in WIDTHS]
    return [(f"or gathered for {', '.join(map(str, WIDTHS))} rows", ", ".join(over))]


def picture(pattern: Pattern, layout: BlockLayout, title: str) -> Figure:
    """The picture: each pair coloured by the kind of its tile when small, tiles (binned) when large."""
    from matplotlib.figure import Figure
    from matplotlib.patches import Patch
    from matplotlib.ticker import MaxNLocator

    panels = _panels(layout.lead)
    width = PANEL[0] * len(panels)
    every = layout.lead[0] * layout.lead[1]
    lines = _lines(title, width) + ([f"({len(panels)} of {every} layouts)"] if every > len(panels) else [])
    height = PANEL[1] + (len(lines) - 1) * 1.3 * TITLE_POINTS / 72
    figure = Figure(figsize=(width, height), dpi=DPI, layout="constrained")
    for axis, (b, h) in zip(figure.subplots(1, len(panels), squeeze=False)[0], panels, strict=True):
        if max(layout.Q, layout.K) <= DENSE_LIMIT:
            image, (rows, columns) = pair_picture(pattern, layout, b, h), (1, 1)
        else:
            image, (rows, columns) = tile_picture(layout, b, h), bin_size(layout)
        # A tile keeps its size where the sizes end within it: the axes show what there is of it.
        extent = (0, image.shape[1] * columns, image.shape[0] * rows, 0)
        # Over the frame, half of which would hide the first and the last row and column.
        axis.imshow(image, extent=extent, interpolation="nearest", aspect="auto", zorder=3)
        axis.set(xlim=(0, layout.K), ylim=(layout.Q, 0), xlabel="key", ylabel="query row")
        axis.xaxis.set_major_locator(MaxNLocator(5, integer=True, steps=STEPS))
        axis.yaxis.set_major_locator(MaxNLocator(9, integer=True, steps=STEPS))
        if len(panels) > 1:
            axis.set_title(f"batch element {b}, head {h}" if layout.lead[0] > 1 else f"head {h}", fontsize=9)
    legend = [Patch(color=COLOURS[kind]) for kind in COLOURS]
    figure.legend(legend, [f"{kind} tile" for kind in COLOURS], loc="outside lower center", ncols=3, frameon=False)
    figure.suptitle("\n".join(lines), fontsize=TITLE_POINTS, family="monospace")
    return figure


def _lines(title: str, width: float) -> list[str]:
    """The title in lines that are as long as a figure of so many inches is wide; a very long one is cut."""
    import textwrap

    # A character of the monospaced font takes 0.602 of its size; half an inch is left beside them.
    characters = int((width - 0.5) * 72 / (0.602 * TITLE_POINTS))
    return textwrap.wrap(title, characters, max_lines=TITLE_LINES, placeholder=" ...", break_on_hyphens=False)


def _panels(lead: tuple[int, int]) -> list[tuple[int, int]]:
    """The (batch element, head) panels to draw: at most four, spread over all of them."""
    import numpy as np

    every = lead[0] * lead[1]
    chosen = np.unique(np.linspace(0, every - 1, min(every, MOST_PANELS)).round().astype(int))
    return [(int(at) // lead[1], int(at) % lead[1]) for at in chosen]


def tile_counts(layout: BlockLayout, b: int, h: int, kind: str, each: tuple[int, int]) -> np.ndarray:
    """The number of listed tiles of a kind in each bin of `each` (rows, columns) tiles of the grid, never N x N."""
    import numpy as np

    rows = layout.rows
    tiles = rows.lists[kind]
    counts, starts = tiles.counts[b, h].astype(np.int64), tiles.starts[b, h].astype(np.int64)
    at = np.repeat(starts - np.concatenate(([0], np.cumsum(counts)[:-1])), counts) + np.arange(counts.sum())
    row = np.repeat(np.arange(rows.tiles), counts) // each[0]
    column = tiles.indices[at].astype(np.int64) // each[1]
    bins = tuple(-(-tiles // size) for tiles, size in zip(_grid(layout), each, strict=True))
    return np.bincount(row * bins[1] + column, minlength=bins[0] * bins[1]).reshape(bins)


def _grid(layout: BlockLayout) -> tuple[int, int]:
    """(rows, columns) of tiles."""
    return layout.rows.tiles, -(-layout.K // layout.block_kv)


def _each(layout: BlockLayout) -> tuple[int, int]:
    """(rows, columns) of tiles that a bin of a tile picture holds; those at the far edges may hold fewer."""
    return -(-_grid(layout)[0] // PIXELS), -(-_grid(layout)[1] // PIXELS)


def bin_size(layout: BlockLayout) -> tuple[int, int]:
    """Query rows and keys of a pixel of `tile_picture`."""
    return _each(layout)[0] * layout.block_q, _each(layout)[1] * layout.block_kv


def tile_picture(layout: BlockLayout, b: int, h: int) -> np.ndarray:
    """(rows, columns, 3) colours: a pixel is a bin of tiles, paler where fewer of its tiles are visited."""
    import numpy as np

    each = _each(layout)
    share = np.stack([tile_counts(layout, b, h, kind, each) for kind in COLOURS]).astype(float)
    visited = share.sum(0)
    mixed = np.einsum("krc,kx->rcx", share, _palette()) / np.maximum(visited, 1)[..., None]
    # A bin with a single visited tile still shows: from 35 % of the colour up.
    sizes = (np.diff([*range(0, tiles, size), tiles]) for tiles, size in zip(_grid(layout), each, strict=True))
    strength = np.where(visited > 0, 0.35 + 0.65 * visited / np.outer(*sizes), 0.0)[..., None]
    return 1 - strength * (1 - mixed)


def pair_picture(pattern: Pattern, layout: BlockLayout, b: int, h: int) -> np.ndarray:
    """(Q, K, 3) colours of each kept pair by the kind of its tile; the tiles visited are shaded behind them."""
    import numpy as np

    kept = pattern.materialize(layout.Q, layout.K)
    kept = kept if kept.ndim == 2 else kept[b, h]
    image = np.ones((layout.Q, layout.K, 3))
    for kind, colour in zip(COLOURS, _palette(), strict=True):
        listed = tile_counts(layout, b, h, kind, (1, 1)) > 0
        inside = listed.repeat(layout.block_q, 0).repeat(layout.block_kv, 1)[: layout.Q, : layout.K]
        image[inside] = 1 - 0.18 * (1 - colour)
        image[inside & kept] = colour
    return image


def _palette() -> Any:
    import numpy as np

    return np.array([[int(COLOURS[kind][at : at + 2], 16) / 255 for at in (1, 3, 5)] for kind in COLOURS])
