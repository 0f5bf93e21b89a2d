"""Memory that bound launches use: of a call, of a stream, and of the launch itself."""

from __future__ import annotations

import math
from collections.abc import Callable, Iterable, Iterator
from functools import cache, partial
from threading import Thread
from typing import Any, NamedTuple, TypeVar

import torch
from torch import Tensor

from gossamer.kernels.launch import View

Value = TypeVar("Value")

# Past the dispatcher, as functions of torch's compiler allocate and make views: half of the time. No mode sees them.
_guards: Any = torch._C._dynamo.guards
# part_at(x, shape, strides, start): of a tensor's memory, from `start` elements behind its begin; autograd sees none.
part_at: Callable[[Tensor, tuple[int, ...], tuple[int, ...], int], Tensor] = _guards._reinterpret_tensor

MOST_WAITING_BYTES = 2**24  # of the memory of a call that waits for the next one
MOST_WAITING = 4  # pieces that wait, each for a stream
MOST_USERS = 64  # whose views of one are kept
# Slots of arrays for calls in captured graphs: how many, and elements from one to the next (128 bytes of int32).
CAPTURED, APART = 4096, 32

_in_graphs: dict[int, Any] = {}


def hold_for_graphs(value: Any) -> None:
    """Keep for good what a captured graph reads: it is replayed long after the call, which may be forgotten."""
    _in_graphs[id(value)] = value


Stream = tuple[int | None, int]  # a device's index, and the address of one of its streams


def outlasting(device: torch.device, make: Callable[[], Value]) -> Value:
    """What `make` gives, whose memory outlasts the call: never of a pool of memory that belongs to CUDA graphs.

    While torch.compile warms up and records its graphs (mode="reduce-overhead"), what a thread allocates comes from
    their pool, and what is still held at the end of the call is an error. Another thread allocates as ever. While a
    stream is captured otherwise nothing can be done elsewhere, and the graph that is captured is whose the memory is.
    """
    if device.type != "cuda" or torch.cuda.is_current_stream_capturing():
        with torch.inference_mode(False):  # made in that mode, it could not be used in training later
            return make()
    asking = torch.cuda.current_stream(device)
    found: list[Value] = []
    failed: list[BaseException] = []

    def run() -> None:
        try:
            with torch.cuda.device(device):
                here = torch.cuda.current_stream(device)
                here.wait_stream(asking)
                found.append(make())
                asking.wait_stream(here)
        except BaseException as error:
            failed.append(error)

    thread = Thread(target=run, name="gossamer")
    thread.start()
    thread.join()
    for error in failed:
        raise error
    (value,) = found
    return value


def allocator(device: torch.device) -> Callable[[tuple[int, ...], tuple[int, ...], torch.dtype], Tensor]:
    """What allocates on a device, the current one of its type: a function of shape, strides and type."""
    found: Callable[..., Tensor] = _guards._empty_strided_cuda if device.type == "cuda" else _guards._empty_strided_cpu
    return found


@cache
def lasting(device: torch.device, dtype: torch.dtype, shape: tuple[int, ...], fill: float) -> Tensor:
    """An array that launches only read; equal ones are one."""
    return outlasting(device, lambda: torch.full(shape, fill, dtype=dtype, device=device))


class _GraphArrays(NamedTuple):
    """Arrays of one kind for the calls of captured graphs, filled once, outside of any graph."""

    memory: Tensor  # (CAPTURED, APART)
    places: Iterator[int]


_of_streams: dict[tuple[torch.dtype, tuple[int, ...], float, Stream], Tensor] = {}
_of_graphs: dict[tuple[torch.dtype, float, int | None], _GraphArrays] = {}


def stream_array(dtype: torch.dtype, shape: tuple[int, ...], fill: float, device: torch.device) -> Callable[[], Tensor]:
    """What gives the array of the current stream; its kernels follow one another, and leave it filled as it was."""
    assert math.prod(shape) <= APART, shape
    return partial(_stream_array, dtype, shape, fill, device)


def _stream_array(dtype: torch.dtype, shape: tuple[int, ...], fill: float, device: torch.device) -> Tensor:
    """The array of the current stream, or one of its own for a call in a graph.

    Replays of a graph may run beside the stream that it was captured on. An array that the graph must fill itself
    costs as much as a small kernel: only where all are given away, or no call has run before.
    """
    if torch.cuda.is_current_stream_capturing():
        arrays = _of_graphs.get((dtype, fill, device.index))
        at = None if arrays is None else next(arrays.places, None)
        if arrays is None or at is None:
            return torch.full(shape, fill, dtype=dtype, device=device)
        return arrays.memory[at, : math.prod(shape)].view(shape)
    key = dtype, shape, fill, (device.index, torch._C._cuda_getCurrentRawStream(device.index))
    found = _of_streams.get(key)
    if found is None:
        found = _of_streams[key] = outlasting(device, lambda: torch.full(shape, fill, dtype=dtype, device=device))
        if (dtype, fill, device.index) not in _of_graphs:
            memory = outlasting(device, lambda: torch.full((CAPTURED, APART), fill, dtype=dtype, device=device))
            if device.type == "cuda":  # tests run this on a CPU
                torch.cuda.current_stream(device).synchronize()  # a graph may be replayed on any stream
            _of_graphs[dtype, fill, device.index] = _GraphArrays(memory, iter(range(CAPTURED)))
    return found


class Waiting(NamedTuple):
    """Memory that waits: its stream, the memory as int32, and the views of it that its users asked for."""

    stream: Stream
    memory: Tensor
    views: dict[Workspace, tuple[Tensor, ...]]


_waiting: dict[Stream, Waiting] = {}


class Workspace:
    """Memory for what the kernels of a call leave one another: `size` bytes, uninitialised, and `views` of them.

    It waits for the next call on the stream, whose kernels come after. No call gets what another one has taken and not
    left; that of a graph, which may be replayed on any stream, is allocated.
    """

    def __init__(self, device: torch.device, size: int, views: Iterable[View]) -> None:
        self.device, self.views = device, tuple(views)
        self.numbers = 1 << max(-(-size // 4) - 1, 63).bit_length()

    def take(self) -> tuple[Waiting | None, Tensor, tuple[Tensor, ...]]:
        """(what `leave` wants, or None; the memory; the views)."""
        if torch.cuda.is_current_stream_capturing():
            memory = self._memory()
            return None, memory, self._views(memory)
        stream = self.device.index, torch._C._cuda_getCurrentRawStream(self.device.index)
        kept = _waiting.pop(stream, None)
        views = None if kept is None else kept.views.get(self)
        if kept is not None and views is not None:
            return kept, kept.memory, views
        if kept is None or kept.memory.numel() < self.numbers:
            kept = Waiting(stream, outlasting(self.device, self._memory), {})
            if kept.memory.is_cuda:  # it was allocated on the stream of another thread, and may be freed at any time
                kept.memory.record_stream(torch.cuda.current_stream(self.device))
        with torch.inference_mode(False):  # what waits is written by later calls, of any mode
            if len(kept.views) >= MOST_USERS:
                kept.views.clear()
            views = kept.views[self] = self._views(kept.memory)
        return kept, kept.memory, views

    def _memory(self) -> Tensor:
        return torch.empty(self.numbers, dtype=torch.int32, device=self.device)

    def _views(self, memory: Tensor) -> tuple[Tensor, ...]:
        return tuple(
            memory.view(getattr(torch, view.dtype)).as_strided(view.shape, view.strides, view.offset)
            for view in self.views
        )

    @staticmethod
    def leave(kept: Waiting) -> None:
        """The kernels that use the memory have been launched."""
        if len(_waiting) < MOST_WAITING or kept.stream in _waiting:
            _waiting[kept.stream] = kept
