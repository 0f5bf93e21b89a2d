"""`gossamer bench`: named cases, their numbers checked in the same run, beside other implementations."""

from __future__ import annotations

from collections.abc import Iterator
from dataclasses import asdict
from pathlib import Path
from time import perf_counter
from typing import TYPE_CHECKING, Annotated

import typer

from gossamer.cli.options import integer, number

if TYPE_CHECKING:
    from gossamer.bench.against import Source
    from gossamer.bench.peer import Peer
    from gossamer.bench.rows import Row
    from gossamer.bench.run import Session
    from gossamer.bench.workload import Workload

# Columns of the table where the output is not a terminal.
WIDTH = 150
RESULTS = Path("benchmarks") / "results"
PARTICLES = "particles"  # a tag of its own: what it measures are no cases of attention


def run(
    names: Annotated[list[str] | None, typer.Argument(help="Cases by name.", show_default=False)] = None,
    tag: Annotated[list[str] | None, typer.Option("--tag", help="Cases by tag, such as foundation.")] = None,
    peers: Annotated[bool, typer.Option("--peers", help="Also run the other implementations.")] = False,
    peer: Annotated[list[str] | None, typer.Option("--peer", help="Only this one of them. Repeatable.")] = None,
    implementation: Annotated[str | None, typer.Option(help="Of gossamer; the one it chooses by default.")] = None,
    dtype: Annotated[
        list[str] | None, typer.Option(help="float16, bfloat16, float32 or float64; the usual one. Repeatable.")
    ] = None,
    device: Annotated[str | None, typer.Option(help="cpu or cuda; a GPU when there is one.")] = None,
    budget: Annotated[
        float,
        typer.Option(parser=number(0.01, 60), metavar="SECONDS", help="Of timed calls for each row, 0.01 to 60."),
    ] = 0.5,
    prepare: Annotated[
        int,
        typer.Option(
            parser=integer(0, 1024),
            metavar="N",
            help="Cases that compile at the same time, each in a process; 0: in this one.",
        ),
    ] = 0,
    limit: Annotated[
        float,
        typer.Option(
            parser=number(1, 1_000_000),
            metavar="SECONDS",
            help="With --prepare: after which a case that does not end is given up.",
        ),
    ] = 600,
    against: Annotated[
        str | None,
        typer.Option(
            metavar="COMMIT", help="Another version in the same rounds: a commit, or a folder or archive of its files."
        ),
    ] = None,
    repeat: Annotated[
        int, typer.Option(parser=integer(1, 100), metavar="N", help="Runs of all cases, one after the other.")
    ] = 1,
    commit: Annotated[
        str | None, typer.Option(help="What the rows name as the state of the code; that of the checkout by default.")
    ] = None,
    out: Annotated[
        Path | None,
        typer.Option(help="File to add rows to; benchmarks/results/DEVICE.jsonl.gz by default, none with --against."),
    ] = None,
    chart: Annotated[Path | None, typer.Option(help="PNG to draw the rows of this run to; needs matplotlib.")] = None,
    list_cases: Annotated[bool, typer.Option("--list", help="List the cases for the device and stop.")] = False,
) -> None:
    """Measure cases; a row whose numbers are wrong is reported as failed, without a time."""
    from contextlib import ExitStack

    from rich.console import Console
    from rich.progress import Progress

    from gossamer.cli.errors import Failed, Refused, check_file, check_picture, need, reason, shorten

    torch = need("torch", "gossamer bench")
    chosen = device or ("cuda" if torch.cuda.is_available() else "cpu")
    if chosen not in ("cpu", "cuda"):
        raise Refused(f"--device must be cpu or cuda, got {shorten(repr(chosen))}")
    if chosen == "cuda" and not torch.cuda.is_available():
        raise Refused("--device cuda needs an NVIDIA GPU that torch can use; there is none here")
    from gossamer.bench.against import source_of
    from gossamer.bench.charts import chart as draw
    from gossamer.bench.compare import Pair, comparison, pairs, verdict
    from gossamer.bench.peers import PEERS
    from gossamer.bench.results import read_records
    from gossamer.bench.rows import append_rows, fill_ratios, refusals, table
    from gossamer.bench.run import Session
    from gossamer.cli.info import versions
    from gossamer.plan.table import NAMES
    from gossamer.testing.cases import EVERY
    from gossamer.testing.sweeps import SWEEPS

    if implementation is not None and implementation not in NAMES:
        raise Refused(f"--implementation must be one of {', '.join(NAMES)}, got {shorten(repr(implementation))}")
    for named in dtype or []:
        if named not in EVERY:
            raise Refused(f"--dtype must be one of {', '.join(EVERY)}, got {shorten(repr(named))}")
    others = [peer_entry for peer_entry in PEERS if peers or peer_entry.name in (peer or [])]
    unknown = set(peer or []) - {peer_entry.name for peer_entry in PEERS}
    if unknown:
        raise Refused(f"--peer must be one of {', '.join(p.name for p in PEERS)}, got {shorten(repr(min(unknown)))}")
    console = Console()
    if not console.is_terminal:
        console.width = max(console.width, WIDTH)
    if PARTICLES in (tag or []):
        given = {"a case": names, "another --tag": set(tag or []) - {PARTICLES}, "--peer": others, "--dtype": dtype,
                 "--implementation": implementation, "--prepare": prepare, "--against": against,
                 "--chart": chart}  # fmt: skip
        refused = [name for name, value in given.items() if value]
        if refused:
            raise Refused(f"--tag {PARTICLES} takes no {' and no '.join(refused)}: it measures sums over neighbours")
        session = Session(torch.device(chosen), versions(), budget_s=budget)
        session.commit = commit or session.commit
        _particles(session, out or RESULTS / f"{_file_name(torch, chosen)}_{PARTICLES}.jsonl.gz", repeat, list_cases)
        return
    works = _choose(names or [], tag or [], chosen, dtype or [], everything=list_cases)
    if list_cases:
        for work in works:
            console.print(f"{work.name}: {', '.join(sorted(work.tags))}", highlight=False)
        return
    sweeps = {tag for work in works for tag in work.tags & SWEEPS}
    whole = len(sweeps) == 1 and all(work.tags & SWEEPS for work in works)
    if sweeps and against is not None:
        raise Refused(f"--against takes cases, not those of a sweep, got --tag {min(sweeps)}")
    kept = out is not None or against is None
    sweep = f"_{sweeps.pop()}" if whole else ""
    target = out or RESULTS / f"{_file_name(torch, chosen)}{sweep}.jsonl.gz"
    if chart is not None:
        check_picture("--chart", chart, "gossamer bench --chart")
    if kept:
        option = "--out" if out else "--out (by default)"
        check_file(option, target)
        try:
            if target.is_file():
                read_records(target)
        except (OSError, ValueError) as error:
            raise Refused(f"{option} {shorten(repr(str(target)))} does not hold rows to add to: {error}") from None
    session = Session(torch.device(chosen), versions(), implementation, budget, processes=against is None)
    session.commit = commit or session.commit
    rows: list[Row] = []
    lost: list[str] = []
    added, start = 0, perf_counter()
    source: Source | None = None
    compared: list[Pair] = []
    with ExitStack() as stack:
        if against is not None:
            try:
                source = stack.enter_context(source_of(against))
            except ValueError as error:
                raise Refused(f"--against: {error}") from None
        progress = stack.enter_context(Progress(*Progress.get_default_columns(), console=console, transient=True))
        bar = progress.add_task("", total=len(works) * repeat)
        session.progress = lambda text: progress.update(bar, description=text)
        if not console.is_terminal:
            session.progress = lambda text: print(f"{perf_counter() - start:6.1f} s  {text}", flush=True)
        for work, peer_entry in _measured(session, works * repeat, others, prepare, limit, source):
            if isinstance(peer_entry, str):
                lost.append(f"{work.name}: {peer_entry}")
            else:
                fill_ratios(peer_entry)
                rows += peer_entry
                compared += [] if source is None else pairs(peer_entry, source.name)
                try:
                    if kept:
                        append_rows(peer_entry, target)  # case by case: an interrupted run keeps what it has
                except OSError as error:
                    lost.append(f"the rows of {work.name} could not be added to {target}: {reason(error)}")
                    break
                added += len(peer_entry)
            progress.advance(bar)
    if source is None or others:
        console.print(table(rows))
        for line in refusals(rows):
            console.print(line, style="dim", markup=False)
    if source is not None:
        console.print(comparison(compared, source.name))
        for line in verdict(compared, {work.name: work.tags.intersection(tag or work.tags) for work in works}):
            console.print(line, markup=False, highlight=False, soft_wrap=True)
    rates = {row.dtype: row.matmul_tflops for row in rows if row.matmul_tflops}
    console.print(
        f"{session.name}; matrix product "
        + ", ".join(f"{rate:,.3g} TFLOP/s in {dtype}" for dtype, rate in rates.items())
    )
    if kept:
        console.print(f"added {added} rows to {target}", markup=False, soft_wrap=True)
    if chart is not None and not any(row.p50_ms for row in rows):
        lost.append(f"no row has a time: {chart} is not drawn")
    elif chart is not None:
        try:
            draw([asdict(row) for row in rows], chart)
        except OSError as error:
            raise Failed(f"--chart {str(chart)!r} could not be written: {reason(error)}") from None
        console.print(f"drawn to {chart}", markup=False, soft_wrap=True)
    failed = [row for row in rows if row.status == "failed" and not row.peer]
    for row in failed:
        typer.echo(f"gossamer bench: {row.case}, {row.direction}, {row.implementation} failed: {row.reason}", err=True)
    for line in lost:
        typer.echo(f"gossamer bench: {line}", err=True)
    if failed or lost:
        raise typer.Exit(1)


def _particles(session: Session, target: Path, repeat: int, list_cases: bool) -> None:
    """Sums over neighbours: `gossamer.bench.particles`."""
    from rich.console import Console

    from gossamer.bench import particles
    from gossamer.cli.errors import check_file

    console = Console(width=WIDTH)
    if list_cases:
        for N in particles.SIZES[session.device.type]:
            for kind in particles.KINDS:
                console.print(f"{N} {kind}: order and boxes, {', '.join(particles.LIMITS)}", highlight=False)
        return
    check_file("--out", target)
    start, rows = perf_counter(), []
    session.progress = lambda text: print(f"{perf_counter() - start:6.1f} s  {text}", flush=True)
    for _ in range(repeat):
        for particle_row in particles.run(session, target):
            rows += particle_row
    console.print(particles.table(rows))
    console.print(f"{session.name}; added {len(rows)} rows to {target}", markup=False, soft_wrap=True)
    failed = [row for row in rows if row.status == "failed"]
    for row in failed:
        typer.echo(f"gossamer bench: {row.particles} {row.kind}, {row.case} failed: {row.reason}", err=True)
    if failed:
        raise typer.Exit(1)


def _measured(
    session: Session, works: list[Workload], peers: list[Peer], prepare: int, limit: float, source: Source | None
) -> Iterator[tuple[Workload, list[Row] | str]]:
    """The rows of each case, or why its process ended without."""
    from gossamer.bench.against import Version, against
    from gossamer.bench.processes import run_cases, warm
    from gossamer.bench.run import run_case
    from gossamer.bench.sweep import Sweep, run_point
    from gossamer.testing.sweeps import SWEEPS

    cases = [work for work in works if not work.tags & SWEEPS]
    points = [work for work in works if work.tags & SWEEPS]
    if prepare:
        yield from run_cases(session, cases, [peer.name for peer in peers], prepare, limit, source)
    elif source is not None:
        version = Version(source)
        for work in cases:
            yield work, run_case(session, work, [against(version, work.case, session.implementation), *peers])
    else:
        yield from ((work, run_case(session, work, peers)) for work in cases)
    if prepare and points and session.device.type == "cuda":
        warm(session, points, prepare)
    sweep = Sweep(session)
    yield from ((work, run_point(sweep, work)) for work in points)


def _choose(names: list[str], tags: list[str], device: str, dtypes: list[str], everything: bool) -> list[Workload]:
    from gossamer.bench.workload import workloads
    from gossamer.cli.errors import Refused, shorten
    from gossamer.testing.sweeps import SWEEPS

    works = [work for dtype in dtypes for work in workloads(device, dtype)] if dtypes else workloads(device)
    known = {work.name: work for work in works}
    where = f"{device} in {', '.join(dtypes)}" if dtypes else device
    if everything and not (names or tags):
        return works
    named = [name for name, work in known.items() if not work.tags & SWEEPS]  # a sweep is asked for by its tag
    every_tag = sorted({tag for work in works for tag in work.tags} | {PARTICLES})
    if not (names or tags):
        raise Refused(f"name a case or a --tag; cases for {where}: {', '.join(named)}; tags: {', '.join(every_tag)}")
    unknown = [name for name in names if name not in known] + [tag for tag in tags if tag not in every_tag]
    if unknown:
        raise Refused(
            f"no case or tag {shorten(', '.join(map(repr, unknown)))} for {where}; "
            f"cases: {', '.join(named)}; tags: {', '.join(every_tag)}"
        )
    return [work for work in works if work.name in names or work.tags.intersection(tags)]


def _file_name(torch: object, device: str) -> str:
    import re

    name = "cpu" if device == "cpu" else torch.cuda.get_device_name()  # type: ignore[attr-defined]
    return re.sub(r"[^a-z0-9]+", "_", name.lower()).strip("_")
