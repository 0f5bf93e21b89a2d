"""The two costs of a small call: its work on the device, by replaying a CUDA graph, and its time on the host."""

from __future__ import annotations

import statistics
import time
from collections.abc import Callable
from typing import TypeVar

import torch

GRAPH_MS = 2.0  # of work in a graph
LONG_MS = 20.0  # of a call whose launch no longer matters: no graph is made
MOST_IN_A_GRAPH = 20
HOST_CALLS = 50

Results = TypeVar("Results")

_streams: list[torch.cuda.Stream] = []


def graph_ms(call: Callable[[], object], *, replays: int = 5) -> float:
    """Milliseconds of one call among several in a replayed CUDA graph: no launch, no host; the median of `replays`.

    Raises:
        RuntimeError: the call cannot be captured.
    """
    stream = capture_stream()
    with torch.cuda.stream(stream):
        call()
        once = _events(call)
        if once > LONG_MS:
            return once
        count = int(min(MOST_IN_A_GRAPH, max(1, GRAPH_MS / max(once, 1e-3))))
    torch.cuda.synchronize()
    graph = torch.cuda.CUDAGraph()
    with torch.cuda.graph(graph, stream=stream):
        for _ in range(count):
            call()
    graph.replay()
    return statistics.median(_events(graph.replay) / count for _ in range(replays))


def captured(run: Callable[[], Results]) -> tuple[torch.cuda.CUDAGraph, Results]:
    """A graph of `run`, after two calls on a stream of its own, and what it writes."""
    side, graph = torch.cuda.Stream(), torch.cuda.CUDAGraph()
    side.wait_stream(torch.cuda.current_stream())
    with torch.cuda.stream(side):
        for _ in range(2):
            run()
    torch.cuda.current_stream().wait_stream(side)
    with torch.cuda.graph(graph):
        held = run()
    return graph, held


def capture_stream() -> torch.cuda.Stream:
    """The stream of the graphs: a backward is captured on the stream of its forward."""
    if not _streams:
        _streams.append(torch.cuda.Stream())
    return _streams[0]


def _events(call: Callable[[], object]) -> float:
    start, end = (torch.cuda.Event(enable_timing=True) for _ in range(2))
    start.record()
    call()
    end.record()
    end.synchronize()
    return start.elapsed_time(end)


def call_ms(call: Callable[[], object]) -> float:
    """Milliseconds that the host needs for a call, the device's work not waited for: the median of five rounds."""
    times = []
    for _ in range(6):
        torch.cuda.synchronize()
        start = time.perf_counter()
        for _ in range(HOST_CALLS):
            call()
        times.append(1000 * (time.perf_counter() - start) / HOST_CALLS)
    torch.cuda.synchronize()
    return statistics.median(times[1:])
