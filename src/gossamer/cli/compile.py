"""`gossamer compile`: the Hopper kernels made in advance, on any machine with the compiler, with or without a GPU."""

from __future__ import annotations

import importlib
import os
from typing import TYPE_CHECKING, Annotated

import typer

from gossamer.cli.options import integer

if TYPE_CHECKING:
    from gossamer.cute.shipped import Shipped
    from gossamer.cute.store import Kernel

OPERATIONS = ("kernels", "sparse_k")  # whose kernels are made in advance


def run(
    head_dim: Annotated[
        list[str] | None, typer.Option("--head-dim", help="Only these: 128, or 192,128 for D and E. Repeatable.")
    ] = None,
    dtype: Annotated[list[str] | None, typer.Option(help="Only bfloat16 or float16.")] = None,
    arch: Annotated[str, typer.Option(help="What to compile for.")] = "sm_90a",
    jobs: Annotated[
        int | None, typer.Option(parser=integer(1, 1024), metavar="N", help="Processes; one for each core by default.")
    ] = None,
    list_kernels: Annotated[bool, typer.Option("--list", help="List the kernels and stop.")] = False,
    jax: Annotated[bool, typer.Option("--jax", help="In the form in which JAX calls them, not torch.")] = False,
) -> None:
    """Compile the Hopper kernels into the cache; what is there already is left alone."""
    from concurrent.futures import ProcessPoolExecutor
    from functools import partial
    from multiprocessing import get_context
    from time import perf_counter

    from rich.console import Console
    from rich.progress import track

    from gossamer.cli.errors import Refused, check_file, shorten
    from gossamer.cute.store import ARCHITECTURE, DIRECTORY, directory
    from gossamer.kernels.hopper import missing_packages

    if arch != ARCHITECTURE:
        raise Refused(f"--arch must be {ARCHITECTURE}, for which the kernels are written, got {shorten(repr(arch))}")
    missing = missing_packages()
    if missing:
        raise Refused(f"gossamer compile {'; '.join(missing)}")
    console = Console()
    chosen = [kernel for kernel in _choose(head_dim or [], dtype or []) if not jax or kernel.kernel.arrays]
    paths = [(kernel, _compiled(kernel, jax).path(*kernel.arguments)) for kernel in chosen]
    if list_kernels:
        for kernel, path in paths:
            console.print(
                f"{'ready' if path.exists() else 'absent':7}{kernel.kind} {kernel.arguments}",
                highlight=False, soft_wrap=True,
            )  # fmt: skip
        return
    absent = [(kernel, path) for kernel, path in paths if not path.exists()]
    todo = [kernel for kernel, _ in absent]
    for _, path in absent[:1]:
        check_file(f"the cache of kernels ({DIRECTORY} names another folder):", path)
    start = perf_counter()
    processes = min(jobs or len(os.sched_getaffinity(0)), len(todo))
    if todo:
        with ProcessPoolExecutor(processes, mp_context=get_context("spawn")) as pool:
            for _ in track(
                pool.map(partial(_make, jax=jax), todo), "compiling", total=len(todo), console=console, transient=True
            ):
                pass
    lost = [path for _, path in paths if not path.exists()]
    if lost:
        typer.echo(f"gossamer compile: {len(lost)} kernels could not be kept in {directory()}", err=True)
        raise typer.Exit(1)
    size = sum(path.stat().st_size for _, path in paths)
    console.print(
        f"{len(todo)} kernels compiled in {perf_counter() - start:.0f} s by {processes} processes, "
        f"{len(paths) - len(todo)} were ready; {size / 2**20:.1f} MiB in {directory()}",
        highlight=False, soft_wrap=True,
    )  # fmt: skip


def shipped() -> list[Shipped]:
    """The kernels of all operations that are made in advance."""
    modules = (importlib.import_module(f"gossamer.{operation}.hopper.shipped") for operation in OPERATIONS)
    return [kernel for module in modules for kernel in module.shipped()]


def _choose(head_dims: list[str], dtypes: list[str]) -> list[Shipped]:
    from gossamer.cli.errors import Refused, shorten
    from gossamer.kernels.hopper.shipped import DTYPES, SIZES

    known = {f"{D}" if D == E else f"{D},{E}": (D, E) for D, E in SIZES}
    for option, given, accepted in (("--head-dim", head_dims, list(known)), ("--dtype", dtypes, list(DTYPES))):
        unknown = [text for text in given if text not in accepted]
        if unknown:
            raise Refused(f"{option} must be one of {' | '.join(accepted)}, got {shorten(repr(unknown[0]))}")
    sizes = {known[text] for text in head_dims or known}
    return [kernel for kernel in shipped() if kernel.dtype in (dtypes or DTYPES) and sizes & kernel.sizes]


def _compiled(kernel: Shipped, jax: bool) -> Kernel:
    """The kernel as torch calls it, or JAX."""
    kind = kernel.kernel
    if jax and kind.arrays is not None:
        return kind.flat(tuple(parameter.role for parameter in kind.arrays(*kernel.arguments)))
    return kind


def _make(kernel: Shipped, jax: bool) -> None:
    """In a process of its own."""
    _compiled(kernel, jax).object(*kernel.arguments)
