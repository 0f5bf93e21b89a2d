"""The command: both trainings one after the other, what they reached, and the report."""

from __future__ import annotations

from functools import partial
from pathlib import Path
from typing import TYPE_CHECKING, Annotated, Any

import typer

from gossamer.cli.options import integer, number

if TYPE_CHECKING:
    from rich.progress import Progress, TaskID
    from rich.table import Table

    from gossamer.cli.demo.runner import Run
    from gossamer.cli.demo.settings import Settings

COUNT = integer(1, 2**31 - 1)


def run(
    steps: Annotated[
        int | None, typer.Option(parser=COUNT, metavar="N", help="Training steps; 500 on a CPU, 300 on a GPU.")
    ] = None,
    context: Annotated[
        int | None, typer.Option(parser=COUNT, metavar="N", help="Bytes of a window; 512 on a CPU, 32768 on a GPU.")
    ] = None,
    width: Annotated[
        int | None, typer.Option(parser=COUNT, metavar="N", help="Features; 128 on a CPU, 512 on a GPU.")
    ] = None,
    layers: Annotated[
        int | None, typer.Option(parser=COUNT, metavar="N", help="Layers; 2 on a CPU, 4 on a GPU.")
    ] = None,
    heads: Annotated[
        int | None,
        typer.Option(parser=COUNT, metavar="N", help="Attention heads, an even number; 4 on a CPU, 8 on a GPU."),
    ] = None,
    batch: Annotated[
        int | None, typer.Option(parser=COUNT, metavar="N", help="Windows of a step; 4 on a CPU, 1 on a GPU.")
    ] = None,
    lr: Annotated[
        float | None,
        typer.Option(parser=number(0, 1), metavar="RATE", help="Peak learning rate; 0.003 on a CPU, 0.002 on a GPU."),
    ] = None,
    seed: Annotated[
        int, typer.Option(parser=integer(0, 2**63 - 1), metavar="N", help="Seed of the weights and of the batches.")
    ] = 0,
    device: Annotated[str | None, typer.Option(help="cpu or cuda; a GPU when there is one.")] = None,
    out: Annotated[Path, typer.Option(help="Folder of report.png and report.json.")] = Path("demo"),
) -> None:
    """Train a small language model on real text with sparse and with dense attention, and compare them.

    The text is the source of the Python standard library. Half the heads of the sparse model see the last 64 bytes,
    half see every eighth of the last 248; the dense model calls torch's scaled_dot_product_attention.
    """
    from rich.console import Console

    from gossamer.cli.demo.report import REPORT, write_report
    from gossamer.cli.demo.runner import run as run_process
    from gossamer.cli.demo.settings import settings
    from gossamer.cli.errors import Failed, Refused, check_file, need, reason, shorten

    torch = need("torch", "gossamer demo")
    need("matplotlib", "gossamer demo")
    given: dict[str, Any] = {
        "steps": steps, "context": context, "width": width, "layers": layers, "heads": heads, "batch": batch,
        "lr": lr, "seed": seed,
    }  # fmt: skip
    chosen = device or ("cuda" if torch.cuda.is_available() else "cpu")
    if chosen not in ("cpu", "cuda"):
        raise Refused(f"--device must be cpu or cuda, got {shorten(repr(chosen))}")
    if chosen == "cuda" and not torch.cuda.is_available():
        raise Refused("--device cuda needs an NVIDIA GPU that torch can use; there is none here")
    try:
        wanted = {kind: settings(kind, chosen, **given) for kind in ("dense", "sparse")}
    except ValueError as error:
        raise Refused(str(error)) from None
    for name in REPORT:
        check_file("--out", out / name)

    console = Console()
    console.print(_headline(wanted["sparse"]))
    runs: dict[str, Run] = {}
    with _progress(console) as progress:
        tasks = {kind: progress.add_task(kind, total=s.steps, note="waiting", rate="") for kind, s in wanted.items()}
        for kind, s in wanted.items():
            runs[kind] = run_process(s, partial(_advance, progress, tasks[kind]))
            progress.update(tasks[kind], note=_note(runs[kind]))
    failed = [kind for kind, run in runs.items() if run.error]
    if not failed:
        console.print(comparison(runs["dense"], runs["sparse"]))
        console.print(_check_line(runs["sparse"]))
    for kind in failed:
        typer.echo(f"gossamer demo: the {kind} model failed: {runs[kind].error}", err=True)
    try:
        paths = write_report(runs, out)
    except OSError as error:
        raise Failed(f"the report could not be written to {str(out)!r}: {reason(error)}") from None
    for path in paths:
        console.print(f"wrote {path}", markup=False, highlight=False, soft_wrap=True)
    if failed or runs["sparse"].check["wrong"]:
        raise typer.Exit(1)


def _headline(s: Settings) -> str:
    return (
        f"{s.layers} layers, width {s.width}, {s.heads} heads, context {s.context:,}, batch {s.batch}, {s.steps} steps "
        f"on {s.device}; text: the Python standard library's source"
    )


def _progress(console: Any) -> Progress:
    from rich.progress import BarColumn, MofNCompleteColumn, Progress, TextColumn, TimeElapsedColumn

    return Progress(
        TextColumn("{task.description:>6}"), BarColumn(), MofNCompleteColumn(), TextColumn("{task.fields[note]:<26}"),
        TextColumn("{task.fields[rate]:>16}"), TimeElapsedColumn(), console=console,
    )  # fmt: skip


def _advance(progress: Progress, task: TaskID, run: Run) -> None:
    if not run.steps:
        return
    recent = run.steps[-20:]
    loss = sum(step["bits_per_byte"] for step in recent) / len(recent)
    rate = sorted(step["tokens_per_s"] for step in recent)[len(recent) // 2]
    done = len(run.steps) == run.settings.steps
    note = "checking and timing" if done else f"loss {loss:.3f} bits per byte"
    progress.update(task, completed=len(run.steps), note=note, rate=f"{rate:,.0f} tokens/s")


def _note(run: Run) -> str:
    return "failed" if run.error else f"validation {run.result['bits_per_byte']:.3f} bits/byte"


def comparison(dense: Run, sparse: Run) -> Table:
    """Both models' results side by side."""
    from rich.table import Table

    rows = (
        ("validation bits per byte", "bits_per_byte", lambda x: f"{x:.4f}"),
        ("tokens per second", "tokens_per_s", lambda x: f"{x:,.0f}"),
        ("training time", "train_s", lambda x: f"{x:.1f} s"),
        ("peak memory", "peak_bytes", lambda x: f"{x / 2**20:,.0f} MiB"),
        ("of it, during training", "peak_training_bytes", lambda x: f"{x / 2**20:,.0f} MiB"),
    )
    table = Table("", "dense (torch SDPA)", "sparse (gossamer)", "sparse / dense")
    for title, key, form in rows:
        a, b = dense.result[key], sparse.result[key]
        table.add_row(title, form(a), form(b), f"{b / a:.3f}" if a else "")
    if dense.lengths and sparse.lengths:
        a, b = dense.lengths[-1], sparse.lengths[-1]
        table.add_section()
        at = f"at {a['length']:,} tokens"
        table.add_row(f"attention time {at}", f"{a['ms']:.1f} ms", f"{b['ms']:.1f} ms", f"{b['ms'] / a['ms']:.3f}")
    return table


def _check_line(sparse: Run) -> str:
    from rich.markup import escape

    check = sparse.check
    if check["wrong"]:
        return "[red]sparse outputs differ from the oracle:[/red] " + escape("; ".join(check["wrong"]))
    return (
        f"sparse outputs of the trained weights agree with the float64 oracle: {check['rows']:,} rows in "
        f"{check['layers']} layers, largest error {check['error_over_limit']:.2f} of the limit"
    )
