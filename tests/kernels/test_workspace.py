"""Memory that the kernels of a call leave one another, and that the next call on the stream gets."""

from __future__ import annotations

from collections.abc import Iterator
from threading import Thread

import pytest
import torch
from torch import Tensor

import gossamer as gs
from gossamer.plan.table import available
from gossamer.torch import memory
from gossamer.torch.memory import Workspace

CPU = torch.device("cpu")
SHAPES = (3, 64, 32), (3, 64)


@pytest.fixture
def stream(monkeypatch: pytest.MonkeyPatch) -> Iterator[list[int]]:
    """A CPU that has streams; the number in the list is the current one."""
    current = [0]
    monkeypatch.setattr(torch.cuda, "is_current_stream_capturing", lambda: current[0] < 0)
    monkeypatch.setattr(torch._C, "_cuda_getCurrentRawStream", lambda index: current[0], raising=False)
    for name in ("_waiting", "_of_streams", "_of_graphs"):
        monkeypatch.setattr(memory, name, {})
    yield current


def used(workspace: Workspace) -> tuple[int, ...]:
    """Addresses of what a call gets, which it leaves."""
    room, tensors = workspace.take()
    if room is not None:
        workspace.leave(room)
    return tuple(x.data_ptr() for x in tensors)


def test_the_next_call_gets_the_same_memory(stream: list[int]) -> None:
    large, small = Workspace(CPU, *SHAPES), Workspace(CPU, (2, 64))
    room, tensors = large.take()
    assert room is not None and [tuple(x.shape) for x in tensors] == list(SHAPES)
    assert all(x.is_contiguous() and x.dtype == torch.float32 for x in tensors)
    first, last = tensors
    assert first.data_ptr() + 4 * first.numel() <= last.data_ptr()
    assert (last.data_ptr() - first.data_ptr()) % 256 == 0
    large.leave(room)
    assert used(large) == used(large) == (first.data_ptr(), last.data_ptr())
    assert used(small) == (first.data_ptr(),)


def test_what_is_in_use_is_given_to_nobody(stream: list[int]) -> None:
    workspace = Workspace(CPU, *SHAPES)
    room, (first, _) = workspace.take()
    assert room is not None
    assert used(workspace)[0] != first.data_ptr()  # another thread's
    stream[0] = 7
    other, (other_memory, _) = workspace.take()
    assert other is not None and other_memory.data_ptr() != first.data_ptr()
    workspace.leave(room)
    workspace.leave(other)
    assert used(workspace)[0] == other_memory.data_ptr()
    stream[0] = -1  # a graph is captured
    found = [workspace.take() for _ in range(2)]
    assert all(x[0] is None for x in found) and found[0][1][0].data_ptr() != found[1][1][0].data_ptr()


def test_little_is_kept(stream: list[int]) -> None:
    large = Workspace(CPU, (memory.MOST_WAITING_BYTES // 4 + 1,))
    assert not large.small
    workspace = Workspace(CPU, *SHAPES)
    for number in range(3 * memory.MOST_WAITING):
        stream[0] = number
        used(workspace)
    assert len(memory._waiting) == memory.MOST_WAITING
    for slots in range(1, 3 * memory.MOST_SHAPES):
        stream[0] = 0
        used(Workspace(CPU, (slots, 4)))
    assert len(memory._waiting[None, 0].views) <= memory.MOST_SHAPES


@pytest.mark.parametrize("first", [True, False], ids=["made", "viewed"])
def test_memory_of_inference_mode_serves_training(stream: list[int], first: bool) -> None:
    workspace, array = Workspace(CPU, *SHAPES), memory.stream_array(torch.int32, (3, 5), 0.0, CPU)
    if not first:
        used(Workspace(CPU, (100, 64)))
    with torch.inference_mode():
        used(workspace)
        array()
    room, tensors = workspace.take()
    for x in (*tensors, array()):
        x.zero_()  # refused for a tensor of that mode
    assert room is not None


@pytest.mark.gpu
@pytest.mark.skipif(not torch.cuda.is_available(), reason="needs an NVIDIA GPU")
@pytest.mark.parametrize("name", ["hopper", "triton"])
def test_cut_rows_of_streams_threads_and_graphs(name: str) -> None:
    """Calls whose rows are cut, at the same time: each must read the parts that it wrote."""
    if available(name):
        pytest.skip("; ".join(available(name)))
    pattern = gs.BigBird(64, random_blocks=1)
    kind = {"device": "cuda", "dtype": torch.bfloat16}
    inputs = [[torch.randn(1, 4, 4096, 64, **kind) for _ in range(3)] for _ in range(3)]

    def call(x: list[Tensor]) -> Tensor:
        out = gs.attention(*x, pattern, implementation=name)
        assert isinstance(out, Tensor)
        return out

    want = [call(x) for x in inputs]
    dense = gs.attention(*(x.float() for x in inputs[0]), pattern, implementation="reference")
    assert isinstance(dense, Tensor)
    assert (want[0].float() - dense).abs().max() <= 2**-7 * dense.abs().max()
    assert torch.equal(want[0], call(inputs[0]))  # bound now
    torch.cuda.synchronize()
    found: list[tuple[int, Tensor]] = []

    def repeated(at: int, stream: torch.cuda.Stream) -> None:
        with torch.cuda.stream(stream):
            for _ in range(20):
                found.append((at, call(inputs[at])))

    streams = [torch.cuda.Stream(), torch.cuda.Stream()]
    threads = [Thread(target=repeated, args=(at, streams[at % 2])) for at in range(3)]
    for thread in threads:
        thread.start()
    for thread in threads:
        thread.join()
    torch.cuda.synchronize()
    assert len(found) == 60 and all(torch.equal(out, want[at]) for at, out in found)

    graph = torch.cuda.CUDAGraph()
    with torch.cuda.graph(graph):
        held = [call(x) for x in inputs]
    for x in held:
        x.fill_(float("nan"))
    graph.replay()
    again = [call(x) for x in inputs]  # beside the graph
    torch.cuda.synchronize()
    assert all(torch.equal(a, b) and torch.equal(b, c) for a, b, c in zip(held, want, again, strict=True))
