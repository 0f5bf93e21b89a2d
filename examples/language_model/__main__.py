"""Trains a small language model on real text with sparse and with dense attention, and compares them.

    python -m examples.language_model --steps 500 --out demo      # from the root of the repository

The text is the source of the Python standard library. Half the heads of the sparse model see the last 64 bytes, half
see every eighth of the last 248; the dense model calls torch's scaled_dot_product_attention.
"""

from __future__ import annotations

import argparse
import sys
from collections.abc import Sequence
from functools import partial
from pathlib import Path

import torch
from rich.console import Console
from rich.markup import escape
from rich.progress import BarColumn, MofNCompleteColumn, Progress, TaskID, TextColumn, TimeElapsedColumn
from rich.table import Table

from examples.language_model.report import write_report
from examples.language_model.runner import Run, train_in_process
from examples.language_model.settings import CPU_DEFAULTS, GPU_DEFAULTS, HELP, Settings, settings


def main(arguments: Sequence[str] | None = None) -> int:
    """Both trainings one after the other, what they reached, and the report. Returns the exit status."""
    parser = argparse.ArgumentParser(
        "python -m examples.language_model", description=__doc__, formatter_class=argparse.RawDescriptionHelpFormatter
    )
    for name, text in HELP.items():
        here, there = CPU_DEFAULTS[name], GPU_DEFAULTS[name]
        parser.add_argument(f"--{name}", type=type(here), help=f"{text}; {here} on a CPU, {there} on a GPU")
    parser.add_argument("--device", choices=("cpu", "cuda"), help="a GPU when there is one")
    parser.add_argument("--out", type=Path, default=Path("demo"), help="folder of report.png and report.json")
    given = vars(parser.parse_args(arguments))
    device = given.pop("device") or ("cuda" if torch.cuda.is_available() else "cpu")
    out = given.pop("out")
    if device == "cuda" and not torch.cuda.is_available():
        parser.error("--device cuda needs an NVIDIA GPU that torch can use; there is none here")
    try:
        wanted = {kind: settings(kind, device, **given) for kind in ("dense", "sparse")}
        out.mkdir(parents=True, exist_ok=True)
    except (ValueError, OSError) as error:
        parser.error(str(error))

    console = Console()
    console.print(_headline(wanted["sparse"]))
    runs: dict[str, Run] = {}
    with _progress(console) as progress:
        tasks = {kind: progress.add_task(kind, total=s.steps, note="waiting", rate="") for kind, s in wanted.items()}
        for kind, s in wanted.items():
            runs[kind] = train_in_process(s, partial(_advance, progress, tasks[kind]))
            progress.update(tasks[kind], note=_note(runs[kind]))
    failed = [kind for kind, run in runs.items() if run.error]
    if not failed:
        console.print(comparison(runs["dense"], runs["sparse"]))
        console.print(_check_line(runs["sparse"]))
    for kind in failed:
        print(f"the {kind} model failed: {runs[kind].error}", file=sys.stderr)
    for path in write_report(runs, out):
        console.print(f"wrote {path}", markup=False, highlight=False, soft_wrap=True)
    return 1 if failed or runs["sparse"].check["wrong"] else 0


def _headline(s: Settings) -> str:
    return (
        f"{s.layers} layers, width {s.width}, {s.heads} heads, context {s.context:,}, batch {s.batch}, {s.steps} steps "
        f"on {s.device}; text: the Python standard library's source"
    )


def _progress(console: Console) -> Progress:
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
    check = sparse.check
    if check["wrong"]:
        return "[red]sparse outputs differ from the oracle:[/red] " + escape("; ".join(check["wrong"]))
    return (
        f"sparse outputs of the trained weights agree with the float64 oracle: {check['rows']:,} rows in "
        f"{check['layers']} layers, largest error {check['error_over_limit']:.2f} of the limit"
    )


if __name__ == "__main__":
    sys.exit(main())
