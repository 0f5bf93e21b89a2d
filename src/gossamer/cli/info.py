"""`gossamer info`: the machine, the versions, and which implementations can run here or why not."""

from __future__ import annotations

import platform
from importlib import metadata
from typing import TYPE_CHECKING, Annotated

import typer

if TYPE_CHECKING:
    from rich.table import Table

PACKAGES = ("numpy", "torch", "triton", "matplotlib", "scipy")


def run(
    support_table: Annotated[
        bool, typer.Option("--support-table", help="Print what each implementation supports, as Markdown.")
    ] = False,
) -> None:
    """Show the device, the versions and the implementations that can run here, or why not."""
    from rich.console import Console

    if support_table:
        from gossamer.cli.errors import need

        need("torch", "gossamer info --support-table")
        from gossamer.cli.support import support_table as build

        typer.echo(build(), nl=False)
        return
    console = Console()
    console.print(_machine())
    console.print(_implementations())


def versions() -> dict[str, str]:
    """Installed version of gossamer, Python and each package that it uses; "not installed" otherwise."""
    from gossamer import __version__

    numbers = {"gossamer": __version__, "python": platform.python_version()}
    for package in PACKAGES:
        try:
            numbers[package] = metadata.version(package)
        except metadata.PackageNotFoundError:
            numbers[package] = "not installed"
    return numbers


def devices() -> list[str]:
    """The processors torch can use here, in words."""
    import os

    lines = [f"cpu: {platform.machine()}, {len(os.sched_getaffinity(0))} cores"]
    try:
        import torch
    except ImportError as error:
        return [*lines, f"cuda: unknown, torch cannot be imported ({error})"]
    if not torch.cuda.is_available():
        return [*lines, "cuda: no device"]
    for index in range(torch.cuda.device_count()):
        card = torch.cuda.get_device_properties(index)
        lines.append(f"cuda:{index}: {card.name}, sm_{card.major}{card.minor}, {card.total_memory / 2**30:.0f} GiB")
    return lines


def _machine() -> Table:
    from rich.table import Table

    table = Table("what", "here", title="gossamer", show_header=False)
    for device in devices():
        name, _, words = device.partition(": ")
        table.add_row(name, words)
    table.add_section()
    for package, version in versions().items():
        table.add_row(package, version)
    return table


def _implementations() -> Table:
    from rich.markup import escape
    from rich.table import Table

    table = Table("implementation", title="implementations, in order of choice")
    table.add_column("here", overflow="fold", ratio=2)
    for column in ("devices", "types", "head sizes"):
        table.add_column(column)
    try:
        import torch  # noqa: F401
    except ImportError as error:
        table.add_row(
            "none", escape(f"torch is needed ({error}); in a checkout of gossamer: pip install '.[torch]'"), "", "", ""
        )
        return table
    from gossamer.cli.support import head_sizes
    from gossamer.plan.table import NAMES, available, load

    for name in NAMES:
        implementation = load(name)
        limits = None if isinstance(implementation, str) else implementation.capability
        reasons = available(name)
        table.add_row(
            name,
            "[red]no: " + escape("; ".join(reasons)) if reasons else "[green]available",
            ", ".join(sorted(limits.devices)) if limits else "",
            ", ".join(sorted(limits.dtypes)) if limits else "",
            head_sizes(limits) if limits else "",
        )
    return table
