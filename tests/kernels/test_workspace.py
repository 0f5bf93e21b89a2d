"""Memory that the kernels of a call leave one another, and that the next call on the stream gets."""

from __future__ import annotations

import ctypes
import itertools
import math
import random
from collections.abc import Iterator
from threading import Thread
from typing import Any, NamedTuple

import pytest
import torch
from torch import Tensor

import gossamer as gs
from gossamer.kernels.launch import (
    ALIGNMENT,
    BYTES,
    EDGE,
    Array,
    Builder,
    Kernel,
    Launch,
    Operand,
    Prepared,
    View,
    compact,
    dtype_of,
)
from gossamer.plan.table import available
from gossamer.torch import bind, memory
from gossamer.torch.functions import FUNCTIONS
from gossamer.torch.memory import Workspace

CPU = torch.device("cpu")
FILLS = None, None, 0.0, 0.0, 1.0
DTYPES = "float32", "int32", "bfloat16", "uint8", "int64", "float64", "bool"


def of(*shapes: tuple[int, ...]) -> Workspace:
    """A workspace of float32 arrays, at multiples of 256 bytes."""
    views, at = [], 0
    for shape in shapes:
        views.append(View("", "float32", shape, compact(shape), at))
        at += -(-math.prod(shape) // 64) * 64
    return Workspace(CPU, 4 * at, views)


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
    room, whole, tensors = workspace.take()
    if room is not None:
        workspace.leave(room)
    assert not tensors or whole.data_ptr() == tensors[0].data_ptr()
    return tuple(x.data_ptr() for x in tensors)


def test_the_next_call_gets_the_same_memory(stream: list[int]) -> None:
    large, small = of(*SHAPES), of((2, 64))
    room, _, tensors = large.take()
    assert room is not None and [tuple(x.shape) for x in tensors] == list(SHAPES)
    assert all(x.is_contiguous() and x.dtype == torch.float32 for x in tensors)
    first, last = tensors
    assert first.data_ptr() + 4 * first.numel() <= last.data_ptr()
    assert (last.data_ptr() - first.data_ptr()) % 256 == 0
    large.leave(room)
    assert used(large) == used(large) == (first.data_ptr(), last.data_ptr())
    assert used(small) == (first.data_ptr(),)


def test_what_is_in_use_is_given_to_nobody(stream: list[int]) -> None:
    workspace = of(*SHAPES)
    room, _, (first, _) = workspace.take()
    assert room is not None
    assert used(workspace)[0] != first.data_ptr()  # another thread's
    stream[0] = 7
    other, other_memory, _ = workspace.take()
    assert other is not None and other_memory.data_ptr() != first.data_ptr()
    workspace.leave(room)
    workspace.leave(other)
    assert used(workspace)[0] == other_memory.data_ptr()
    stream[0] = -1  # a graph is captured
    found = [workspace.take() for _ in range(2)]
    assert all(x[0] is None for x in found) and found[0][1].data_ptr() != found[1][1].data_ptr()


def test_little_is_kept(stream: list[int]) -> None:
    workspace = of(*SHAPES)
    for number in range(3 * memory.MOST_WAITING):
        stream[0] = number
        used(workspace)
    assert len(memory._waiting) == memory.MOST_WAITING
    for slots in range(1, 3 * memory.MOST_USERS):
        stream[0] = 0
        used(of((slots, 4)))
    assert len(memory._waiting[None, 0].views) <= memory.MOST_USERS


@pytest.mark.parametrize("first", [True, False], ids=["made", "viewed"])
def test_memory_of_inference_mode_serves_training(stream: list[int], first: bool) -> None:
    workspace, array = of(*SHAPES), memory.stream_array(torch.int32, (3, 5), 0.0, CPU)
    if not first:
        used(of((100, 64)))
    with torch.inference_mode():
        used(workspace)
        array()
    room, _, tensors = workspace.take()
    for x in (*tensors, array()):
        x.zero_()  # refused for a tensor of that mode
    assert room is not None


def random_launch(rng: random.Random) -> tuple[Prepared, list[str]]:
    """Steps that look at arrays of a call and at views of them, of which one is a result; the names, in order."""
    b, names, given = Builder({"x": Operand("float32", (2,), (1,))}), [], []
    for at in range(rng.randint(1, 8)):
        shape = tuple(rng.choice((0, 1, 3, 17, 64)) for _ in range(rng.randint(1, 3)))
        names.append(b.array(f"a{at}", rng.choice(DTYPES), shape, rng.choice(FILLS)))
        if shape[0] > 2 and rng.random() < 0.5:  # all rows but the first, and of these again
            rows, strides = shape[1:], compact(shape)
            names.append(b.view(f"a{at} rows", f"a{at}", (shape[0] - 1, *rows), strides, strides[0]))
            names.append(b.view(f"a{at} others", f"a{at} rows", (shape[0] - 2, *rows), strides, strides[0]))
        if rng.random() < 0.5:  # every other byte
            n = BYTES[b[f"a{at}"].dtype] * math.prod(shape) // 2
            names.append(b.view(f"a{at} bytes", f"a{at}", (n,), (2,), 0, "uint8"))
    names.append(b.array("result", "int32", (5,), rng.choice(FILLS)))
    rng.shuffle(names)
    while names:
        n = rng.randint(1, 4)
        given += names[:n]
        b.step(Kernel(EDGE, "see", (), rng.choice(("arrays", "addresses"))), *names[:n])
        names = names[n:]
    return b.done("result"), given


class Place(NamedTuple):
    """Where an array of a launch must be, told by itself or a view of it."""

    array: Array
    name: str
    offset: int  # in bytes, of the view
    looks: Array | View


def place_of(launch: Launch, name: str) -> Place:
    looks: Any = launch.views.get(name, launch.arrays.get(name))
    offset = 0
    while isinstance(view := launch.views.get(name), View):
        offset, name = offset + view.offset * BYTES[view.dtype], view.of
    return Place(launch.arrays[name], name, offset, looks)


@pytest.mark.parametrize("captured", [False, True])
@pytest.mark.parametrize("most", [memory.MOST_WAITING_BYTES, 2**14], ids=["small", "some are large"])
def test_arrays_of_random_launches(
    most: int, captured: bool, stream: list[int], monkeypatch: pytest.MonkeyPatch
) -> None:  # fmt: skip
    """They are apart, aligned, and filled in each call, whether kernels take tensors or addresses; results are new."""
    seen: list[tuple[int, Tensor]] = []
    names: list[str] = []
    launch = random_launch(random.Random(0))[0].launch

    def see(*given: Tensor | int) -> None:
        for x in given:
            place = place_of(launch, names[len(seen)])
            if isinstance(x, int):
                raw = bytearray(ctypes.string_at(x - place.offset, nbytes(place.array)) or b"-")
                seen.append((x, torch.frombuffer(raw, dtype=torch.uint8)))
            else:
                assert x.shape == place.looks.shape and dtype_of(x) == place.looks.dtype
                assert x.stride() == (compact(x.shape) if isinstance(place.looks, Array) else place.looks.strides)
                seen.append((x.data_ptr(), x.clone()))

    monkeypatch.setitem(FUNCTIONS, "see", lambda: see)
    monkeypatch.setattr(bind, "MOST_WAITING_BYTES", most)
    stream[0] = -captured
    counts = [0, 0]
    for seed in range(100):
        prepared, names = random_launch(random.Random(seed))
        launch = prepared.launch
        writer = bind._Writer(prepared, CPU)
        writer.shares = True
        run = writer.function(("x",))
        shared = {x for x in launch.arrays if x in writer.views}
        assert "result" not in shared and sum(nbytes(launch.arrays[x]) for x in shared) <= most
        for _ in range(2):
            seen.clear()
            (result,) = run(torch.zeros(2))
            begins: dict[str, int] = {}
            for name, (address, found) in zip(names, seen, strict=True):
                array, base, offset, looks = place_of(launch, name)
                counts[base in shared] += 1
                if not nbytes(looks):
                    continue  # torch has no address of it
                begin = begins.setdefault(base, address - offset)
                assert begin == address - offset and begin % ALIGNMENT == 0
                if array.fill is not None:
                    want = torch.full(array.shape, array.fill, dtype=getattr(torch, array.dtype))
                    if found.dtype == want.dtype and found.shape == looks.shape:
                        assert (found == want.flatten()[0]).all()
                    elif not isinstance(looks, View):
                        assert torch.equal(found, want.view(-1).view(torch.uint8))
            assert result.data_ptr() == begins["result"]
            ends = sorted((begins[x], begins[x] + nbytes(launch.arrays[x])) for x in (*shared, "result") if x in begins)
            assert all(end <= begin for (_, end), (begin, _) in itertools.pairwise(ends))
            for waiting in memory._waiting.values():
                waiting.memory.fill_(0x55555555)  # as kernels leave it
    assert min(counts) > 100


def nbytes(x: Array | View) -> int:
    return BYTES[x.dtype] * math.prod(x.shape)


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
