"""What a call does besides its kernels on a GPU: nothing that waits, few allocations, and all of it fits in a graph."""

from __future__ import annotations

from collections import Counter
from collections.abc import Callable, Iterator
from contextlib import contextmanager

import pytest
import torch
from torch import Tensor

import gossamer as gs
from gossamer.memo import forget_all
from gossamer.plan.table import available, load
from gossamer.testing.graphs import proximity_graph
from gossamer.testing.sweeps import graph
from gossamer.torch import calls, memory
from tests.support.host_reads import nothing_waits

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


def inputs(gradient: bool = True, storage: str = "BHND", n: int = N) -> list[Tensor]:
    found = []
    for heads in (H, G, G):
        shape = (B, heads, n, D) if storage == "BHND" else (B, n, heads, D)
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


@pytest.mark.filterwarnings("ignore")  # of torch's compiler
def test_handles_in_a_compiled_function() -> None:
    """Other documents in every step, whose handles are numbers of 62 bits: two compilations at most."""
    import torch._dynamo.testing

    torch._dynamo.reset()
    counter = torch._dynamo.testing.CompileCounterWithBackend("aot_eager")
    compiled = torch.compile(
        lambda q, k, v, handle: gs.attention(q, k, v, handle, deterministic=True), fullgraph=True, backend=counter
    )
    x, dout = inputs(), torch.randn(B, H, N, D, device="cuda", dtype=torch.bfloat16)
    for cut in range(100, 1100, 100):
        pattern = gs.Document.from_cu_seqlens([0, cut, N]) & gs.Causal()
        out = compiled(*x, pattern.handle)
        found = (out, *torch.autograd.grad(out, x, dout))
        for a, b in zip(found, gradients(x, dout, pattern, deterministic=True), strict=True):
            assert torch.equal(a, b)
    assert counter.frame_count <= 2


@pytest.mark.parametrize("n", [100, 700])
def test_a_mask_on_two_streams(n: int) -> None:
    """What one stream makes of a mask, and is late with, the other does not read."""
    x, mask = inputs(gradient=False, n=n), torch.rand(n, n, device="cuda") < 0.2
    want = gs.attention(*x, mask.clone())
    first, second = torch.cuda.Stream(), torch.cuda.Stream()
    torch.cuda.synchronize()
    found = []
    for stream, cycles in ((first, 2 * 10**8), (second, 0)):
        with torch.cuda.stream(stream):
            torch.cuda._sleep(cycles)  # a tenth of a second
            found.append(gs.attention(*x, mask))
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


@pytest.mark.parametrize("name", ["hopper", "triton"])
def test_a_repeated_call_waits_for_nothing(name: str) -> None:
    needs(name, gradients=True)
    x, dout = inputs(), torch.randn(B, H, N, D, device="cuda", dtype=torch.bfloat16)
    for deterministic in (False, True):
        gradients(x, dout, implementation=name, deterministic=deterministic)
    with nothing_waits():
        for deterministic in (False, True):
            gradients(x, dout, implementation=name, deterministic=deterministic)


def allocations(run: Callable[[], object]) -> list[int]:
    """Sizes of the allocations of a known call, in the allocator's units of 512 bytes."""
    for _ in range(2):  # the first one makes the workspace of its stream
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
def test_the_hopper_backward_allocates_gradients_and_large_workspaces(
    storage: str, monkeypatch: pytest.MonkeyPatch
) -> None:
    """Sums of dQ that make more than 16 MiB; what is smaller, row terms too, lies in memory that waits for a call."""
    needs("hopper", gradients=True)
    monkeypatch.setattr(memory, "_waiting", {})  # those of other tests' streams may be all that there are
    # A narrow window takes tiles of 64, whose dQ needs no sums; of 1500 causal positions columns are cut in parts.
    for pattern, n, deterministic, large in (
        (PATTERN, N, False, False), (PATTERN, N, True, False), (gs.Causal(), N, False, False),
        (gs.Causal(), 2 * N, True, False), (gs.Causal(), 2 * N, False, False), (gs.Causal(), 8 * N, False, True),
    ):  # fmt: skip
        x, dout = inputs(storage=storage, n=n), torch.randn(B, H, n, D, device="cuda", dtype=torch.bfloat16)
        rows, queries, keys, padded = 4 * B * H * n, 2 * B * H * n * D, 2 * B * G * n * D, -(-n // 128) * 128
        sums = 4 * B * H * padded * D
        found = allocations(
            lambda pattern=pattern, deterministic=deterministic, x=x, dout=dout: gradients(
                x, dout, pattern, implementation="hopper", deterministic=deterministic
            )
        )
        made = units(queries, rows, queries, keys, keys)
        if large:  # and parts of columns, where they are cut
            assert not Counter(units(sums) + made) - Counter(found), (pattern, n)
        else:
            assert sorted(found) == made, (pattern, n, deterministic)


SHORT = 40
GRAPH = graph(1500, 0.01)


def small(N: int, E: int, storage: str) -> list[Tensor]:
    """q, k, v and dout; "shifted" by two bytes, "BNHD" of another storage order."""
    found = []
    for heads, size in ((H, D), (G, D), (G, E), (H, E)):
        shape = (B, N, heads, size) if storage == "BNHD" else (B, heads, N, size)
        count = B * heads * N * size
        x = torch.randn(count + 1, device="cuda").bfloat16()
        x = (x[1:] if storage == "shifted" else x[:-1]).view(shape)
        found.append(x.transpose(1, 2) if storage == "BNHD" else x)
    return found


# Each size and alignment has kernels of its own.
@pytest.mark.parametrize(("E", "storage"), [(D, "BHND"), (D, "BNHD"), (D, "shifted"), (2 * D, "BHND")], ids=str)
@pytest.mark.parametrize(
    ("name", "N", "pattern"),
    [
        ("small", SHORT, gs.Causal()),
        ("small", SHORT, gs.Dense()),
        ("hopper", SHORT, gs.Causal()),
        ("hopper", 1500, gs.Causal()),
        ("hopper", 1500, PATTERN),
        ("hopper", 1500, gs.Longformer(64, global_tokens=[0, 1, 2])),
        ("hopper", 2048, proximity_graph((4, 4, 3), 2.5)),  # its keys are gathered
        ("triton", SHORT, gs.Causal()),
        ("triton", 1500, PATTERN),
        ("triton", 1500, gs.Longformer(64, global_tokens=[0, 1, 2])),  # long rows are cut
        ("triton", 1500, GRAPH),  # its keys are gathered
    ],
    ids=str,
)
def test_known_calls_compute_what_first_ones_do(name: str, N: int, pattern: gs.Pattern, E: int, storage: str) -> None:
    needs(name, gradients=True)

    def run(given: list[Tensor], dout: Tensor) -> list[tuple[Tensor, ...]]:
        leaves = [x.detach().requires_grad_() for x in given]
        options = {"implementation": name, "deterministic": True}
        both = gs.attention(*leaves, pattern, return_lse=True, **options)  # type: ignore[arg-type]
        dlse = torch.linspace(-1, 1, both[1].numel(), device="cuda").view(both[1].shape)
        with torch.no_grad():
            alone = gs.attention(*given, pattern, **options)  # type: ignore[arg-type]
        return [
            (alone, *both),  # type: ignore[list-item]
            gradients(leaves, dout, pattern, **options),
            torch.autograd.grad(both, leaves, (dout, dlse)),
        ]

    forget_all()
    first, other = small(N, E, storage), small(N, E, storage)
    run(first[:3], first[3])
    known = len(calls.known)
    assert known == 2  # with gradients and without
    # The same numbers where a call knows, and where none may.
    given = [(other[:3], other[3]), (other[:3], other[3][:, :, :1].expand_as(other[3]))]
    found = [run(*x) for x in given]
    assert len(calls.known) == known
    forget_all()
    want = [run(*x) for x in given]
    for these, those in zip(found, want, strict=True):
        for a, b in zip(these, those, strict=True):
            assert all(torch.equal(x, y) for x, y in zip(a, b, strict=True))
    # Tensors elsewhere in 16 bytes are of another kind.
    run(first[:3], first[3])
    run([x.clone(memory_format=torch.preserve_format) for x in first[:3]], first[3])
    assert len(calls.known) == (2 * known if storage == "shifted" else known)


@pytest.mark.parametrize("name", ["small", "hopper"])
def test_saved_tensors_may_come_back_with_other_strides(name: str) -> None:
    needs(name, gradients=True)
    q, k, v, dout = small(SHORT, D, "BNHD")
    leaves = [x.detach().requires_grad_() for x in (q, k, v)]
    want = [gradients(leaves, dout, gs.Causal(), implementation=name, deterministic=True) for _ in range(3)][-1]
    with torch.autograd.graph.saved_tensors_hooks(lambda x: x.contiguous(), lambda x: x):
        found = gradients(leaves, dout, gs.Causal(), implementation=name, deterministic=True)
    assert all(torch.equal(a, b) for a, b in zip(found, want, strict=True))


@pytest.mark.parametrize("name", ["small", "hopper"])
def test_few_queries_are_known_too(name: str) -> None:
    """Decoding: the heads of a group are rows of one tile, and long lists are cut and merged."""
    needs(name)
    q, k, v, _ = small(500 if name == "small" else 2000, D, "BHND")
    q = q[:, :, :1].contiguous()
    forget_all()
    found = [gs.attention(q, k, v, gs.Causal(), implementation=name, return_lse=True) for _ in range(3)]
    assert all(torch.equal(a, b) for pair in found[1:] for a, b in zip(pair, found[0], strict=True))
    want = torch.nn.functional.scaled_dot_product_attention(q.double(), k.double(), v.double(), enable_gqa=True)
    assert (found[-1][0].double() - want).abs().max() <= 2**-7 * want.abs().max()
