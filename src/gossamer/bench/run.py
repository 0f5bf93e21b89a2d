"""One case through gossamer and its peers: check first, then time, then memory."""

from __future__ import annotations

import datetime
import gc
import json
import subprocess
import sys
from collections.abc import Callable, Iterable
from dataclasses import dataclass, field
from typing import Literal

import torch
from torch import Tensor

import gossamer
from gossamer.bench.check import Inputs, Sample, compare, draw_samples
from gossamer.bench.measure import device_name, matmul_rate, peak_bytes, reset_peak, time_call
from gossamer.bench.peer import Peer, Prepared, Refusal, backward_call, first_line
from gossamer.bench.peers import PEERS
from gossamer.bench.rows import Row, commit
from gossamer.bench.workload import Workload, chosen, make_inputs

Direction = Literal["forward", "backward"]
DIRECTIONS: tuple[Direction, ...] = ("forward", "backward")
Progress = Callable[[str], None]
OURS = "gossamer"


@dataclass
class Session:
    """What all rows of a run share; matrix-product rates are measured once a type."""

    device: torch.device
    versions: dict[str, str]
    implementation: str | None = None  # of gossamer; None: the one it chooses
    budget_s: float = 0.5  # of timed calls for each row
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


def run_case(session: Session, work: Workload, peers: bool) -> list[Row]:
    """All rows of a case: gossamer's, then each peer's, in every direction of the case."""
    inputs = make_inputs(work, session.device)
    session.progress(f"{work.name}: exact numbers")
    samples = draw_samples(inputs)
    rows = _measure(session, work, inputs, samples, ours(session.implementation))
    for peer in PEERS if peers else ():
        _release()
        rows += _measure(session, work, inputs, samples, peer)
    return sorted(rows, key=lambda row: row.direction != "forward")


def ours(implementation: str | None) -> Peer:
    """gossamer itself in the form of a peer."""
    return Peer(OURS, lambda given, matmul_tflops: Prepared(lambda q, k, v: attend(given, q, k, v, implementation)))


def attend(inputs: Inputs, q: Tensor, k: Tensor, v: Tensor, implementation: str | None) -> Tensor:
    """`gossamer.attention` with the terms of the inputs."""
    t = inputs.terms
    return gossamer.attention(
        q, k, v, inputs.pattern, scale=t.scale, q_offset=t.q_offset, key_lengths=t.key_lengths, softcap=t.softcap,
        sink_logits=t.sink_logits, alibi_slopes=t.alibi_slopes, implementation=implementation,
    )  # fmt: skip


def _measure(session: Session, work: Workload, inputs: Inputs, samples: list[Sample], peer: Peer) -> list[Row]:
    """The rows of one implementation. Nothing it does ends the run: it is refused or failed, with the reason."""
    name, is_peer = peer.name, peer.name != OURS
    rows = [make_row(session, work, name, direction, is_peer) for direction in DIRECTIONS]
    base = reset_peak(session.device)  # before masks and layouts are made: they count
    try:
        session.progress(f"{work.name}: {name}")
        if not is_peer:
            for row, taken in zip(rows, chosen(inputs, session.implementation), strict=True):
                row.implementation = f"{name} {taken}"
        prepared = peer.prepare(inputs, session.rate(inputs.q.dtype))
        if prepared.note:
            for row in rows:
                row.implementation = f"{name} ({prepared.note})"
        if prepared.computes is not None:
            known = Inputs(prepared.computes, inputs.q, inputs.k, inputs.v, inputs.terms, inputs.dout)
            samples = draw_samples(known, heads=1, keys=0)
    except (Refusal, gossamer.Unsupported) as refusal:
        for row in rows:
            row.fail("refused" if is_peer else "failed", str(refusal))
        return rows
    for row in rows:
        session.progress(f"{work.name}: {name}, {row.direction}")
        try:
            _fill(session, row, inputs, samples, prepared, base)
        except Exception as error:  # of the peer's code or ours: the other rows still count
            row.fail("refused" if is_peer else "failed", first_line(error))
        _release()
    if session.device.type == "cpu":
        _own_process(session, work, rows, peer)
    return rows


def _fill(session: Session, row: Row, inputs: Inputs, samples: list[Sample], prepared: Prepared, base: int) -> None:
    """Checks one direction, then measures its memory, then times it."""

    def start() -> Callable[[], tuple[Tensor, ...]]:
        if row.direction == "backward":
            return backward_call(prepared, inputs)  # runs the forward, whose graph the call keeps
        return forward_call(prepared, inputs)

    names = ("out",) if row.direction == "forward" else ("dq", "dk", "dv")
    found = dict(zip(names, start()(), strict=True))
    row.check, wrong = compare(samples, found, group=inputs.q.shape[1] // inputs.k.shape[1])
    if wrong:
        row.fail("failed", "; ".join(wrong))
        return
    assert inputs.dout is not None
    dout = inputs.dout if row.direction == "backward" else inputs.dout[:0]
    made = tensor_bytes([*found.values(), dout])  # the output is as large as its gradient
    del found
    if session.device.type == "cuda":
        _release()
        reset_peak(session.device)
        start()()
        row.set_memory(
            peak_bytes(session.device) - base - made, made + tensor_bytes([inputs.q, inputs.k, inputs.v, dout])
        )
    row.set_timing(time_call(start(), session.device, budget_s=session.budget_s), session.rate(inputs.q.dtype))


def forward_call(prepared: Prepared, inputs: Inputs) -> Callable[[], tuple[Tensor, ...]]:
    """The forward alone, without a graph, as a call that can be repeated."""

    def call() -> tuple[Tensor, ...]:
        with torch.no_grad():
            return (prepared.attend(inputs.q, inputs.k, inputs.v),)

    return call


def tensor_bytes(tensors: Iterable[Tensor]) -> int:
    """What the tensors hold."""
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
        command = [sys.executable, "-m", "gossamer.bench.memory", work.name, peer.name, row.direction]
        if session.implementation and not row.peer:
            command.append(session.implementation)
        done = subprocess.run(command, capture_output=True, text=True, stdin=subprocess.DEVNULL, check=False)
        if done.returncode:
            last = (done.stderr.strip().splitlines() or ["no message"])[-1]
            row.fail("failed", f"the process that measures memory ended with {done.returncode}: {last}")
            continue
        told = json.loads(done.stdout)
        row.set_memory(told["beyond"], told["counted"], told["rss"])
