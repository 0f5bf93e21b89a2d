"""`gossamer cosmos`: a simulation of the cosmic web, with snapshots and pictures."""

from __future__ import annotations

from pathlib import Path
from typing import TYPE_CHECKING, Annotated, Any

import typer

from gossamer.cli.options import integer, number

if TYPE_CHECKING:
    from rich.table import Table

    from gossamer.cosmos.run import Run


def run(
    particles: Annotated[
        int, typer.Option(parser=integer(8, 1024), metavar="N", help="Along an axis: N^3 in all.")
    ] = 32,
    box: Annotated[
        float, typer.Option(parser=number(1, 1e5), metavar="MPC/H", help="Comoving size of the box in Mpc/h.")
    ] = 50.0,
    steps: Annotated[
        int, typer.Option(parser=integer(1, 10_000), metavar="N", help="Steps, equal in the scale factor.")
    ] = 64,
    out: Annotated[Path, typer.Option(help="The folder of the run; one that is there is gone on with.")] = Path(
        "cosmos"
    ),
    start: Annotated[
        float, typer.Option(parser=number(1e-3, 0.5), metavar="A", help="The scale factor to begin at.")
    ] = 0.02,
    end: Annotated[float, typer.Option(parser=number(2e-3, 1.5), metavar="A", help="And to end at; 1 is today.")] = 1.0,
    mesh: Annotated[
        int | None,
        typer.Option(
            parser=integer(14, 2048), metavar="N", help="Cells along an axis; twice the particles by default."
        ),
    ] = None,
    softening: Annotated[
        float | None,
        typer.Option(
            parser=number(1e-6, 1e6),
            metavar="KPC/H",
            help="Comoving softening in kpc/h; a 20th of the mean distance by default.",
        ),
    ] = None,
    seed: Annotated[int, typer.Option(parser=integer(0, 2**31 - 1), metavar="N", help="Of the white noise.")] = 4,
    snapshots: Annotated[
        int, typer.Option(parser=integer(1, 10_000), metavar="N", help="Snapshots, beside the first.")
    ] = 8,
    power: Annotated[
        Path | None,
        typer.Option(
            help="Linear power at a = 1: a text of two columns, k in h/Mpc and P in (Mpc/h)^3.", show_default=False
        ),
    ] = None,
) -> None:
    """Simulate the cosmic web by P3M, and draw it; an interrupted run goes on when the same command is given again."""
    from rich.console import Console
    from rich.progress import Progress

    from gossamer.cli.errors import Failed, Refused, check_file, need, shorten

    for module in ("jax", "h5py", "matplotlib", "PIL"):
        need(module, "gossamer cosmos")
    if end <= start:
        raise Refused(f"--end must be over --start, got --start {start} --end {end}")
    from gossamer.cosmos.box import Box
    from gossamer.cosmos.run import AnotherRun, Run, Settings

    try:
        space = Box(box, particles, mesh, softening)
        (cells, *_), soft = space.mesh, float(space.softening_kpc_h or 0)
        table = None if power is None else read_table(power)
        settings = Settings(box, particles, cells, soft, steps, start, end, seed, min(snapshots, steps), table)
        check_file("--out", out / "settings.json")
        work = Run(out, settings)
    except AnotherRun as error:
        raise Refused(f"--out {error}") from None
    except ValueError as error:
        raise Refused(str(error)) from None
    console = Console()
    tell = lambda text: console.print(text, markup=False, highlight=False, soft_wrap=True)  # noqa: E731
    with Progress(*Progress.get_default_columns(), console=console, transient=True) as progress:
        bar = progress.add_task("steps", total=steps)
        try:
            state = work.evolve(lambda step: progress.update(bar, completed=step), tell)
            progress.update(bar, description="pictures")
            report = work.report(state)
        except KeyboardInterrupt:
            raise Failed(f"interrupted; the same command goes on with {shorten(str(out))}") from None
        except ValueError as error:
            raise Refused(str(error)) from None
        except OSError as error:
            raise Failed(f"{error.strerror or error}; when there is room, the same command goes on") from None
    console.print(summary(work, report))
    tell(
        "wrote "
        + ", ".join(f"{out}/{name}" for name in ("web.png", "slice.png", "web.gif", "power.png", "report.json"))
    )


def read_table(path: Path) -> tuple[tuple[float, float], ...]:
    """The two columns of a text file.

    Raises:
        ValueError: it cannot be read as that.
    """
    import numpy as np

    from gossamer.cli.errors import shorten

    try:
        table = np.loadtxt(path, ndmin=2)
    except (OSError, ValueError) as error:
        raise ValueError(f"--power {shorten(repr(str(path)))} cannot be read: {shorten(str(error))}") from None
    rows, columns = table.shape
    if columns != 2 or not rows:
        raise ValueError(f"--power {shorten(repr(str(path)))} must have two columns, k and P; got {columns}")
    return tuple((float(k), float(P)) for k, P in table)


def summary(work: Run, report: dict[str, Any]) -> Table:
    """A summary of the run, and the time of a step."""
    from rich.table import Table

    timing, s = report["timing"], work.settings
    table = Table("quantity", "value", title="cosmic web", show_header=False)
    table.add_row("particles", f"{s.particles}^3 = {work.box.num_particles:,}, mesh {s.mesh}^3")
    table.add_row("box", f"{s.size_mpc_h:g} Mpc/h, softening {s.softening_kpc_h:.3g} kpc/h")
    table.add_row("steps", f"{s.steps}, from a = {s.start:g} to {s.end:g}")
    table.add_row("the mesh's part of a force", f"{timing['mesh_s'] * 1e3:,.1f} ms")
    table.add_row("pairs within the cut", f"{timing['sparse_s'] * 1e3:,.1f} ms")
    part = "" if timing["dense_rows"] == work.box.num_particles else f" (from {timing['dense_rows']:,} rows of it)"
    faster = timing["dense_s"] / timing["sparse_s"]
    table.add_row("all pairs", f"{timing['dense_s'] * 1e3:,.1f} ms{part}: {faster:,.1f} times as long")
    table.add_row("their numbers are apart by", f"{timing['difference']:.1e} of the force")
    table.add_row("web.gif", f"{report['gif_bytes'] / 1e6:.2f} MB")
    return table
