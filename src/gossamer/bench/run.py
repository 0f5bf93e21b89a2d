"""One case through gossamer and its peers: compile, then check and take memory, then time in turns."""

from __future__ import annotations

import contextlib
import datetime
import gc
import json
import math
import subprocess
import sys
from collections.abc import Callable, Iterable, Sequence
from dataclasses import dataclass, field
from typing import Literal

import torch
from torch import Tensor

import gossamer
from gossamer.bench.check import Sample, compare, draw_samples
from gossamer.bench.measure import Call, Timing, device_name, matmul_rate, peak_bytes, reset_peak, time_in_turns
from gossamer.bench.peer import Peer, Prepared, Refusal, backward_call, first_line, needs_module
from gossamer.bench.rows import Row, commit
from gossamer.bench.workload import Workload, chosen, make_inputs
from gossamer.testing.inputs import Inputs

Direction = Literal["forward", "backward"]
DIRECTIONS: tuple[Direction, ...] = ("forward", "backward")
Progress = Callable[[str], None]
OURS = "gossamer"
ROOM = 0.9  # of the free memory of a device, that calls timed in turns may take together


@dataclass
class Session:
    """The facts that all rows of a run share; matrix-product rates are measured once a type."""

    device: torch.device
    versions: dict[str, str]
    implementation: str | None = None  # of gossamer; None: the one it chooses
    budget_s: float = 0.5  # of timed calls for each row
    processes: bool = True  # on a CPU, one for the memory of each row
    progress: Progress = lambda text: None
    name: str = ""
    commit: str = field(default_factory=commit)
    rates: dict[torch.dtype, float] = field(default_factory=dict)

    def __post_init__(self) -> None:
        self.name = device_name(self.device)

    def rate(self, dtype: torch.dtype) -> float:
        """TFLOP/s of a dense matrix product of that type."""
        if dtype not in self.rates:
            self.rates[dtype] = matmul_rate(dtype, self.device)
        return self.rates[dtype]


@dataclass
class Entry:
    """An implementation on a case: its rows, and what they are measured with."""

    peer: Peer
    rows: dict[Direction, Row]
    samples: list[Sample]
    prepared: Prepared | None = None
    kept: int = 0  # bytes on the device that its masks and layouts hold
    takes: dict[Direction, int] = field(default_factory=dict)  # bytes of a call, results and workspace

    def refuse(self, error: Exception, *directions: Direction) -> None:
        """Nothing an implementation does ends the run: it is refused or failed, with the reason."""
        reason = str(error) if isinstance(error, Refusal | gossamer.Unsupported) else first_line(error)
        for direction in directions or DIRECTIONS:
            self.rows[direction].fail("refused" if self.rows[direction].peer else "failed", reason)


@dataclass
class Ready:
    """A case whose kernels are compiled."""

    work: Workload
    inputs: Inputs
    entries: list[Entry]


def run_case(session: Session, work: Workload, peers: Sequence[Peer] = ()) -> list[Row]:
    """The rows of a case: gossamer's and each peer's, in every direction."""
    return measure_case(session, prepare_case(session, work, peers))


def prepare_case(session: Session, work: Workload, peers: Sequence[Peer] = ()) -> Ready:
    """Everything that may run while other cases do the same: inputs, exact numbers, compilation."""
    inputs = make_inputs(work, session.device)
    session.progress(f"{work.name}: exact numbers")
    samples = draw_samples(inputs)
    entries = []
    for peer in (ours(session.implementation), *peers):
        rows = {way: make_row(session, work, peer.name, way, peer.name != OURS) for way in DIRECTIONS}
        entries.append(Entry(peer, rows, samples))
    ready = Ready(work, inputs, entries)
    for entry in entries if session.device.type == "cuda" else ():
        if entry.peer.imports:
            with contextlib.suppress(Refusal):  # which is told when the peer prepares
                needs_module(entry.peer.imports)
        if entry.peer.compiles:
            _compile(session, ready, entry)
    return ready


def _compile(session: Session, ready: Ready, entry: Entry) -> None:
    """Makes the first calls, in which kernels are compiled and lists are made."""
    _release()
    base = torch.cuda.memory_allocated()
    _prepare(session, ready, entry, math.inf)
    for direction in DIRECTIONS:
        if entry.prepared is None:
            return
        session.progress(f"{ready.work.name}: {entry.peer.name}, {direction}, compilation")
        try:
            repeatable(entry.prepared, ready.inputs, direction)()
        except torch.OutOfMemoryError:
            pass  # beside other cases: it is called again on its own
        except Exception as error:
            entry.refuse(error, direction)
        _release()
    entry.kept = torch.cuda.memory_allocated() - base


def _prepare(session: Session, ready: Ready, entry: Entry, matmul_tflops: float) -> None:
    """Fills `prepared`, or the reason why there is none."""
    inputs, name = ready.inputs, entry.peer.name
    session.progress(f"{ready.work.name}: {name}")
    try:
        if entry.peer.chosen is not None:
            for row, taken in zip(entry.rows.values(), entry.peer.chosen(inputs), strict=True):
                row.implementation = f"{name} {taken}"
        prepared = entry.peer.prepare(inputs, matmul_tflops)
        if prepared.note:
            for row in entry.rows.values():
                row.implementation = f"{name} ({prepared.note})"
        if prepared.computes is not None:
            known = inputs._replace(pattern=prepared.computes)
            entry.samples = draw_samples(known, heads=1, keys=0)
        entry.prepared = prepared
    except Exception as error:  # of the peer's code or ours: the other rows still count
        entry.refuse(error)


def measure_case(session: Session, ready: Ready) -> list[Row]:
    """Checks every implementation and takes its memory, then times all of them in turns."""
    rate = session.rate(ready.inputs.q.dtype)
    for entry in ready.entries:
        _release()
        if entry.prepared is None and all(row.status == "ok" for row in entry.rows.values()):
            base = _in_use(session.device)
            _prepare(session, ready, entry, rate)
            entry.kept = _in_use(session.device) - base
        for direction in DIRECTIONS:
            if entry.prepared is not None and entry.rows[direction].status == "ok":
                _check(session, ready, entry, direction)
    for direction in DIRECTIONS:
        able = [entry for entry in ready.entries if entry.rows[direction].status == "ok"]
        for group in _fitting(able, direction, session.device):
            _time(session, ready, group, direction)
    if session.device.type == "cpu" and session.processes:
        for entry in ready.entries:
            _own_process(session, ready.work, list(entry.rows.values()), entry.peer)
    return [entry.rows[direction] for direction in DIRECTIONS for entry in ready.entries]


def _check(session: Session, ready: Ready, entry: Entry, direction: Direction) -> None:
    """Checks one direction, and measures the memory of that call."""
    inputs, row, cuda = ready.inputs, entry.rows[direction], session.device.type == "cuda"
    session.progress(f"{ready.work.name}: {entry.peer.name}, {direction}")
    assert inputs.dout is not None and entry.prepared is not None
    try:
        base = reset_peak(session.device) if cuda else 0
        names = ("out",) if direction == "forward" else ("dq", "dk", "dv")
        results = dict(zip(names, repeatable(entry.prepared, inputs, direction)(), strict=True))
        entry.takes[direction] = peak_bytes(session.device) - base if cuda else 0
        row.check, wrong = compare(entry.samples, results, group=inputs.q.shape[1] // inputs.k.shape[1])
        if wrong:
            row.fail("failed", "; ".join(wrong))
        elif cuda:
            dout = inputs.dout if direction == "backward" else inputs.dout[:0]
            made = tensor_bytes([*results.values(), dout])  # the output is as large as its gradient
            given = tensor_bytes([inputs.q, inputs.k, inputs.v, dout])
            row.set_memory(entry.kept + entry.takes[direction] - made, made + given)
    except Exception as error:
        entry.refuse(error, direction)
    _release()


def _fitting(able: list[Entry], direction: Direction, device: torch.device) -> list[list[Entry]]:
    """The implementations that fit into memory together, and each of the others on its own."""
    if not able:
        return []
    _release()
    free = ROOM * torch.cuda.mem_get_info(device)[0] if device.type == "cuda" else math.inf
    together: list[Entry] = []
    alone: list[list[Entry]] = []
    for entry in sorted(able, key=lambda entry: entry.takes[direction]):
        free -= entry.takes[direction]
        if free >= 0:
            together.append(entry)
        else:
            alone.append([entry])
    return [together, *alone] if together else alone


def _time(session: Session, ready: Ready, group: list[Entry], direction: Direction) -> None:
    """Times some implementations in turns."""
    session.progress(f"{ready.work.name}: {direction}, times")
    calls: dict[str, Call] = {}
    for entry in group:
        assert entry.prepared is not None
        try:
            calls[entry.peer.name] = repeatable(entry.prepared, ready.inputs, direction)
        except Exception as error:
            entry.refuse(error, direction)
    timings = time_in_turns(calls, session.device, budget_s=session.budget_s)
    timed = sum(isinstance(timing, Timing) for timing in timings.values())  # one that broke off took no part
    for entry in group:
        timing = timings.get(entry.peer.name)
        if isinstance(timing, Exception):
            entry.refuse(timing, direction)
        elif timing is not None:
            entry.rows[direction].set_timing(timing, session.rate(ready.inputs.q.dtype))
            entry.rows[direction].turns = timed
    del calls
    _release()


def repeatable(prepared: Prepared, inputs: Inputs, direction: Direction) -> Callable[[], tuple[Tensor, ...]]:
    """A call that can be repeated; that of a backward runs the forward here and keeps its graph."""
    return backward_call(prepared, inputs) if direction == "backward" else forward_call(prepared, inputs)


def _in_use(device: torch.device) -> int:
    return torch.cuda.memory_allocated() if device.type == "cuda" else 0


def ours(implementation: str | None) -> Peer:
    """gossamer itself in the form of a peer."""
    return Peer(
        OURS,
        lambda given, matmul_tflops: Prepared(lambda q, k, v: attend(given, q, k, v, implementation)),
        compiles=True,
        chosen=lambda given: chosen(given, implementation),
    )


def attend(
    inputs: Inputs, q: Tensor, k: Tensor, v: Tensor, implementation: str | None,
    attention: Callable[..., Tensor] | None = None,
) -> Tensor:  # fmt: skip
    """`gossamer.attention`, or that of another version, with the terms of the inputs."""
    attention = attention or gossamer.attention
    return attention(q, k, v, inputs.pattern, implementation=implementation, **inputs.options())


def forward_call(prepared: Prepared, inputs: Inputs) -> Callable[[], tuple[Tensor, ...]]:
    """The forward alone, without a graph, as a call that can be repeated."""

    def call() -> tuple[Tensor, ...]:
        with torch.no_grad():
            return (prepared.attend(inputs.q, inputs.k, inputs.v),)

    return call


def tensor_bytes(tensors: Iterable[Tensor]) -> int:
    """The bytes of tensors."""
    return sum(x.numel() * x.element_size() for x in tensors)


def _release() -> None:
    gc.collect()
    if torch.cuda.is_available():
        torch.cuda.empty_cache()


def make_row(session: Session, work: Workload, name: str, direction: Direction, peer: bool) -> Row:
    """A row without numbers."""
    return Row(
        work.name, name, direction, peer, shape=work.shape, dtype=work.dtype, pairs=work.pairs, density=work.density,
        pattern=repr(work.pattern), device=session.name, versions=session.versions, commit=session.commit,
        time=datetime.datetime.now(datetime.UTC).isoformat(timespec="seconds"),
    )  # fmt: skip


def _own_process(session: Session, work: Workload, rows: list[Row], peer: Peer) -> None:
    """Resident memory of a call, in a process that does nothing else."""
    for row in rows:
        if row.status != "ok":
            continue
        session.progress(f"{work.name}: {row.implementation}, {row.direction}, memory")
        command = [sys.executable, "-m", "gossamer.bench.memory", work.name, work.dtype, peer.name, row.direction]
        if session.implementation and not row.peer:
            command.append(session.implementation)
        done = subprocess.run(command, capture_output=True, text=True, stdin=subprocess.DEVNULL, check=False)
        if done.returncode:
            last = (done.stderr.strip().splitlines() or ["no message"])[-1]
            row.fail("failed", f"the process that measures memory ended with {done.returncode}: {last}")
            continue
        measured = json.loads(done.stdout)
        row.set_memory(measured["beyond"], measured["counted"], measured["rss"])
