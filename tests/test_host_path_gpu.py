"""What a call does besides its kernels on a GPU: nothing that waits, few allocations, and all of it fits in a graph."""

from __future__ import annotations

from collections.abc import Callable, Iterator
from contextlib import contextmanager

import pytest
import torch
from torch import Tensor

import gossamer as gs
from gossamer.kernels.table import available, load

pytestmark = [pytest.mark.gpu, pytest.mark.skipif(not torch.cuda.is_available(), reason="needs an NVIDIA GPU")]
PATTERN = gs.SlidingWindow(300)
B, H, G, N, D = 2, 4, 2, 1500, 64


def needs(name: str, *, gradients: bool = False) -> None:
    if available(name):
        pytest.skip("; ".join(available(name)))
    implementation = load(name)
    assert not isinstance(implementation, str)
    if gradients and not implementation.capability.backward:
        pytest.skip(f"{name} has no backward")


def inputs(gradient: bool = True, storage: str = "BHND") -> list[Tensor]:
    found = []
    for heads in (H, G, G):
        shape = (B, heads, N, D) if storage == "BHND" else (B, N, heads, D)
        x = torch.randn(shape, device="cuda", dtype=torch.bfloat16)
        x = x if storage == "BHND" else x.transpose(1, 2)
        found.append(x.detach().requires_grad_(gradient))
    return found


def gradients(x: list[Tensor], dout: Tensor, pattern: gs.Pattern = PATTERN, **options: object) -> tuple[Tensor, ...]:
    out = gs.attention(*x, pattern, **options)  # type: ignore[arg-type]
    assert isinstance(out, Tensor)
    found = torch.autograd.grad(out, x, dout)
    # Detached: a result that holds its autograd graph ties the leaves to the stream on which it was made.
    return (out.detach(), *found)


@contextmanager
def warmed(run: Callable[[], object]) -> Iterator[None]:
    """Twice on a stream of its own, as torch asks for before a capture."""
    side = torch.cuda.Stream()
    side.wait_stream(torch.cuda.current_stream())
    with torch.cuda.stream(side):
        for _ in range(2):
            run()
    torch.cuda.current_stream().wait_stream(side)
    yield


@pytest.mark.parametrize("deterministic", [False, True])
@pytest.mark.parametrize("name", ["hopper", "triton"])
def test_forward_and_backward_in_a_graph(name: str, deterministic: bool) -> None:
    needs(name, gradients=True)
    x, dout = inputs(), torch.randn(B, H, N, D, device="cuda", dtype=torch.bfloat16)
    options = {"implementation": name, "deterministic": deterministic}
    graph = torch.cuda.CUDAGraph()
    with warmed(lambda: gradients(x, dout, **options)), torch.cuda.graph(graph):
        held = gradients(x, dout, **options)
    for _ in range(3):  # new values, the same memory
        fresh = inputs(gradient=False)
        with torch.no_grad():
            for a, b in zip(x, fresh, strict=True):
                a.copy_(b)
            dout.normal_()
        for y in held:
            y.fill_(float("nan"))
        graph.replay()
        want = gradients(x, dout, **options)
        exact = deterministic or name == "triton"
        for at, (a, b) in enumerate(zip(held, want, strict=True)):
            if exact or at != 1:
                assert torch.equal(a, b)
            else:  # dQ is a sum whose order is not fixed
                assert (a - b).abs().max() <= 2**-6 * b.abs().max()


def test_two_streams_at_once() -> None:
    """Each stream has its own counter of work items."""
    needs("hopper")
    x = inputs(gradient=False)
    want = gs.attention(*x, PATTERN, implementation="hopper")
    streams = [torch.cuda.Stream() for _ in range(3)]
    torch.cuda.synchronize()
    found = []
    for _ in range(20):
        for stream in streams:
            with torch.cuda.stream(stream):
                found.append(gs.attention(*x, PATTERN, implementation="hopper"))
    torch.cuda.synchronize()
    assert all(torch.equal(y, want) for y in found)


# What torch warms up with, it keeps alive while it captures on another stream.
@pytest.mark.filterwarnings("ignore:The AccumulateGrad node's stream does not match:UserWarning")
@pytest.mark.parametrize("name", ["hopper", "triton"])
def test_graphed_callables(name: str) -> None:
    needs(name, gradients=True)

    class Block(torch.nn.Module):
        def __init__(self) -> None:
            super().__init__()
            self.project = torch.nn.Linear(H * D, 3 * H * D, device="cuda", dtype=torch.bfloat16)

        def forward(self, x: Tensor) -> Tensor:
            q, k, v = self.project(x).unflatten(-1, (3, H, D)).permute(2, 0, 3, 1, 4)
            out = gs.attention(q, k, v, PATTERN, implementation=name, deterministic=True)
            assert isinstance(out, Tensor)
            return out.transpose(1, 2).flatten(2)

    torch.manual_seed(0)
    plain, graphed = Block(), Block()
    graphed.load_state_dict(plain.state_dict())
    sample = torch.randn(B, N, H * D, device="cuda", dtype=torch.bfloat16, requires_grad=True)
    graphed = torch.cuda.make_graphed_callables(graphed, (sample,))
    for _ in range(2):
        x = torch.randn_like(sample, requires_grad=True)
        results = []
        for block in (plain, graphed):
            block.zero_grad(set_to_none=True)
            (dx,) = torch.autograd.grad(block(x).square().sum(), x, retain_graph=True)
            results.append(dx)
        assert torch.equal(*results)


@pytest.mark.filterwarnings("ignore:Synchronization debug mode is a prototype:UserWarning")
@pytest.mark.parametrize("name", ["hopper", "triton"])
def test_a_repeated_call_waits_for_nothing(name: str) -> None:
    needs(name, gradients=True)
    x, dout = inputs(), torch.randn(B, H, N, D, device="cuda", dtype=torch.bfloat16)
    for deterministic in (False, True):
        gradients(x, dout, implementation=name, deterministic=deterministic)
    torch.cuda.set_sync_debug_mode("error")
    try:
        for deterministic in (False, True):
            gradients(x, dout, implementation=name, deterministic=deterministic)
    finally:
        torch.cuda.set_sync_debug_mode("default")


def allocations(run: Callable[[], object]) -> list[int]:
    """Sizes of the allocations of a call, in the allocator's units of 512 bytes."""
    run()
    torch.cuda.synchronize()
    torch.cuda.memory._record_memory_history(max_entries=1000, stacks="python", context=None, clear_history=True)
    try:
        kept = run()
        trace = torch.cuda.memory._snapshot()["device_traces"][torch.cuda.current_device()]
    finally:
        torch.cuda.memory._record_memory_history(enabled=None)
    del kept
    return [-(-event["size"] // 512) for event in trace if event["action"] == "alloc"]


def units(*sizes: int) -> list[int]:
    return sorted(-(-size // 512) for size in sizes)


@pytest.mark.parametrize("storage", ["BHND", "BNHD"])
def test_hopper_allocates_what_it_returns_and_little_more(storage: str) -> None:
    needs("hopper")
    x = inputs(storage=storage)
    rows, queries = 4 * B * H * N, 2 * B * H * N * D
    with torch.no_grad():
        assert sorted(allocations(lambda: gs.attention(*x, PATTERN, implementation="hopper"))) == units(queries, rows)


@pytest.mark.parametrize("storage", ["BHND", "BNHD"])
def test_the_hopper_backward_allocates_row_terms_and_sums_of_dq(storage: str) -> None:
    needs("hopper", gradients=True)
    x, dout = inputs(storage=storage), torch.randn(B, H, N, D, device="cuda", dtype=torch.bfloat16)
    rows, queries, keys = 4 * B * H * N, 2 * B * H * N * D, 2 * B * G * N * D
    padded = -(-N // 128) * 128
    terms, sums = 2 * 4 * B * H * padded, 4 * B * H * padded * D
    results = (queries, rows, queries, keys, keys)
    # A narrow window takes tiles of 64, whose dQ needs no sums.
    for pattern, deterministic, more in (
        (PATTERN, False, ()), (PATTERN, True, ()), (gs.Causal(), True, ()), (gs.Causal(), False, (sums,)),
    ):  # fmt: skip
        found = allocations(
            lambda pattern=pattern, deterministic=deterministic: gradients(
                x, dout, pattern, implementation="hopper", deterministic=deterministic
            )
        )
        assert sorted(found) == units(*results, terms, *more), (pattern, deterministic)
