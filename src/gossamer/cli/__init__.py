"""The command line: one file per command; what a command needs is imported when it runs."""

from __future__ import annotations

import typer

from gossamer.cli import bench, compile, cosmos, info, show
from gossamer.cli.errors import Commands

app = typer.Typer(
    name="gossamer",
    cls=Commands,
    no_args_is_help=True,
    add_completion=False,
    pretty_exceptions_enable=False,
    help="Exact attention over only the (query, key) pairs that a pattern keeps.",
)
app.command("info")(info.run)
app.command("show")(show.run)
app.command("bench")(bench.run)
app.command("compile")(compile.run)
app.command("cosmos")(cosmos.run)


def main() -> None:
    """The entry point of `gossamer`."""
    app()


__all__ = ["app", "main"]
