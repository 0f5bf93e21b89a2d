"""Preparation in parallel: cases compile in processes of their own at the same time, and are timed one by one."""

from __future__ import annotations

import contextlib
import os
import time
from collections.abc import Iterator, Sequence
from concurrent.futures import ProcessPoolExecutor
from concurrent.futures.process import BrokenProcessPool
from multiprocessing import get_context
from multiprocessing.connection import Connection, wait
from typing import TYPE_CHECKING, Any

if TYPE_CHECKING:
    from gossamer.bench.against import Source
    from gossamer.bench.rows import Row
    from gossamer.bench.run import Session
    from gossamer.bench.workload import Workload

CONTEXT = get_context("spawn")
LONGEST = 8192  # positions of a sweep's cases that are called in advance: longer ones take the same kernels


class Child:
    """The process of a case. It prepares, says so, waits to be told, and measures.

    Peers are named, since what calls them cannot be sent.
    """

    def __init__(self, session: Session, work: Workload, peers: Sequence[str], source: Source | None) -> None:
        self.work = work
        self.pipe, theirs = CONTEXT.Pipe()
        names = ("implementation", "budget_s", "commit", "processes")
        options = {name: getattr(session, name) for name in names}
        self.process = CONTEXT.Process(
            target=_serve,
            args=(theirs, str(session.device), session.versions, options, work.name, work.dtype, list(peers), source),
        )
        self.process.start()
        theirs.close()  # so that its end is seen here


def run_cases(
    session: Session, works: Sequence[Workload], peers: Sequence[str], processes: int, limit_s: float,
    source: Source | None = None,
) -> Iterator[tuple[Workload, list[Row] | str]]:  # fmt: skip
    """The rows of each case, or why there are none.

    `processes` cases prepare at once, then each is measured alone. `limit_s`: after so many seconds of preparation, or
    of measuring one case, a case is given up. `source` is another version, loaded beside this one in each process.
    """
    for at in range(0, len(works), processes):
        wave: list[Child] = []
        try:
            for work in works[at : at + processes]:
                wave.append(Child(session, work, peers, source))
            prepared = _answers(session, wave, "ready", limit_s)
            # Those that go on compiling would disturb what is measured.
            lost = {child: _end(child, limit_s) for child in wave if child not in prepared}
            for child in wave:
                if child not in lost:
                    with contextlib.suppress(ConnectionError):  # it ended while it waited
                        child.pipe.send("measure")
                    answer = _answers(session, [child], "rows", limit_s).get(child)
                    why = _end(child, limit_s)  # what it holds on the device is free for the next
                    yield child.work, why if answer is None else answer
                else:
                    yield child.work, lost[child]
        finally:
            for child in wave:
                _end(child, limit_s)


def _answers(session: Session, children: Sequence[Child], wanted: str, limit_s: float) -> dict[Child, Any]:
    """The answer of each child; those that have ended, or do not answer in time, are missing."""
    answers: dict[Child, Any] = {}
    waiting = {child.pipe: child for child in children}
    deadline = time.monotonic() + limit_s
    while waiting:
        ready = wait(list(waiting), timeout=max(0.0, deadline - time.monotonic()))
        if not ready:
            break
        for pipe in ready:
            assert isinstance(pipe, Connection)
            try:
                kind, result = pipe.recv()
            except (EOFError, ConnectionResetError):
                waiting.pop(pipe).process.join()
                continue
            if kind == wanted:
                answers[waiting.pop(pipe)] = result
            else:
                session.progress(result)
    return answers


def _end(child: Child, limit_s: float) -> str:
    """Ends a process, and says why there would be no answer from it."""
    code = child.process.exitcode
    child.process.kill()
    child.process.join()
    return f"not done after {limit_s:.0f} s" if code is None else f"its process ended with {code}"


def _serve(
    pipe: Connection, device: str, versions: dict[str, str], options: dict[str, Any], name: str, dtype: str,
    peers: list[str], source: Source | None,
) -> None:  # fmt: skip
    """One case, in a process of its own."""
    os.environ.setdefault("TORCHINDUCTOR_COMPILE_THREADS", "1")  # every process would start one for each core
    import torch

    from gossamer.bench.peers import PEERS
    from gossamer.bench.run import Session, measure_case, prepare_case
    from gossamer.bench.workload import Workload
    from gossamer.testing.cases import case

    session = Session(torch.device(device), versions, **options)
    session.progress = lambda text: pipe.send(("progress", text))
    work = Workload(case(name), dtype)
    others = [peer for peer in PEERS if peer.name in peers]
    if source is not None:
        from gossamer.bench.against import Version, against

        others.insert(0, against(Version(source), work.case, session.implementation))
    ready = prepare_case(session, work, others)
    session.progress(f"{name}: prepared")
    pipe.send(("ready", True))
    pipe.recv()
    pipe.send(("rows", measure_case(session, ready)))


def warm(session: Session, works: Sequence[Workload], processes: int) -> None:
    """Calls the shorter cases of a sweep once, so that their kernels lie in the caches.

    What is not compiled then, since a process ended, is compiled when its case is measured.
    """
    names = [work.name for work in works if work.case.Q <= LONGEST]
    try:
        with ProcessPoolExecutor(processes, mp_context=CONTEXT) as pool:
            list(pool.map(_call_each, [names[part::processes] for part in range(processes)]))
    except BrokenProcessPool:
        session.progress("a process that compiles in advance ended: cases compile one by one")


def _call_each(names: list[str]) -> None:
    import torch

    import gossamer
    from gossamer.bench.workload import make_inputs, workloads

    known = {work.name: work for work in workloads("cuda")}
    for name in names:
        with contextlib.suppress(Exception):  # the row of the case will say so
            inputs = make_inputs(known[name], torch.device("cuda"))
            gossamer.attention(inputs.q, inputs.k, inputs.v, inputs.pattern)
            torch.cuda.synchronize()
