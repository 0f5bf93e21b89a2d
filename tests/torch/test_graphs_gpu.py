"""What a captured CUDA graph reads later: kept lists, and masks as they are at the replay."""

from __future__ import annotations

import gc

import pytest
import torch
from torch import Tensor

import gossamer as gs
from gossamer.bench.latency import captured
from gossamer.memo import forget_all
from gossamer.plan.table import available

pytestmark = [pytest.mark.gpu, pytest.mark.skipif(not torch.cuda.is_available(), reason="needs an NVIDIA GPU")]


def inputs(N: int, dtype: torch.dtype) -> list[Tensor]:
    return [torch.randn(1, 4, N, 64, device="cuda", dtype=dtype, requires_grad=True) for _ in range(3)]


def occupied() -> list[Tensor]:
    """Memory that was free before, of zeros."""
    torch.cuda.synchronize()
    return [torch.zeros(2**k, dtype=torch.uint8, device="cuda") for k in range(9, 22) for _ in range(40)]


@pytest.mark.parametrize("form", ["pattern", "parts", "layout", "sparse", "reordered"])
# Each size with each type would compile the same code again.
@pytest.mark.parametrize(("N", "dtype"), [(200, torch.float32), (1500, torch.bfloat16), (200, torch.bfloat16)], ids=str)
def test_lists_that_were_forgotten(N: int, dtype: torch.dtype, form: str) -> None:
    if form == "reordered":
        pytest.importorskip("scipy")
    make = {
        "pattern": lambda: gs.SlidingWindow(N // 7) | gs.BigBird(16),
        "parts": lambda: gs.Dilated(N // 4, 0, 3) | gs.SlidingWindow(9),
        "layout": lambda: (gs.Causal() & ~gs.Local(50)).layout(N, N, block_q=128, block_kv=128).to("cuda"),
        "sparse": lambda: gs.CSR.from_edge_index(torch.randint(N, (2, 9 * N)), N),
        "reordered": lambda: gs.CSR.from_edge_index(torch.randint(N, (2, 9 * N)), N).reordered(),
    }[form]
    given = [make()]
    x, dout = inputs(N, dtype), torch.randn(1, 4, N, 64, device="cuda", dtype=dtype)

    def run() -> tuple[Tensor, ...]:
        out = gs.attention(*x, given[0], deterministic=True)
        assert isinstance(out, Tensor)
        return out.detach(), *torch.autograd.grad(out, x, dout)

    graph, held = captured(run)
    want = [y.clone() for y in run()]
    given.clear()
    forget_all()
    gc.collect()
    others = occupied()
    for y in held:
        y.fill_(float("nan"))
    graph.replay()
    torch.cuda.synchronize()
    assert all(torch.equal(a, b) for a, b in zip(held, want, strict=True))
    assert not any(x.any() for x in others)


@pytest.mark.parametrize("name", [None, "triton"])
@pytest.mark.parametrize("N", [60, 700])
def test_a_mask_that_is_written_to(N: int, name: str | None) -> None:
    if name and available(name):
        pytest.skip("; ".join(available(name)))
    x, mask = inputs(N, torch.bfloat16), torch.rand(N, N, device="cuda") < 0.1
    dout = torch.randn(1, 4, N, 64, device="cuda", dtype=torch.bfloat16)

    def run(mask: Tensor = mask) -> tuple[Tensor, ...]:
        out = gs.attention(*x, mask, implementation=name, deterministic=True)
        assert isinstance(out, Tensor)
        return out.detach(), *torch.autograd.grad(out, x, dout)

    graph, held = captured(run)
    for share in (0.5, 0.02):
        other = torch.rand(N, N, device="cuda") < share
        mask.copy_(other)
        graph.replay()
        for a, b in zip(held, run(other), strict=True):
            torch.testing.assert_close(a, b, rtol=0, atol=0)


WINDOW, CAUSAL, APART = gs.SlidingWindow(150), gs.Causal(), gs.Dilated(200, 0, 3) | gs.SlidingWindow(9)
GRAPHED = {
    "window": lambda x, lengths: gs.attention(*x, WINDOW),
    "parts": lambda x, lengths: gs.attention(*x, APART),
    "lengths": lambda x, lengths: gs.attention(*x, CAUSAL, key_lengths=lengths),
    "structure": lambda x, lengths: gs.attention(*x, WINDOW, q_offset=lengths - 700, key_lengths=lengths),
    "decoding": lambda x, lengths: gs.attention(x[0][:, :, -1:], *x[1:], CAUSAL),
}


@pytest.mark.filterwarnings("ignore")  # of torch's compiler itself
@pytest.mark.parametrize("name", GRAPHED)
def test_graphs_of_the_compiler(name: str) -> None:
    """A pool of memory that belongs to compiled graphs holds nothing of the library's when a call has ended."""
    torch._dynamo.reset()
    forget_all()
    run = torch.compile(GRAPHED[name], fullgraph=True, mode="reduce-overhead")
    for step in range(5):
        x, lengths = inputs(701, torch.bfloat16), torch.randint(1, 702, (1,), device="cuda")
        torch.compiler.cudagraph_mark_step_begin()
        found, want = run(x, lengths), GRAPHED[name](x, lengths)
        assert torch.equal(found, want), step
        dout = torch.randn_like(want)
        for a, b in zip(*(torch.autograd.grad(out, x, dout) for out in (found, want)), strict=True):
            assert torch.allclose(a, b, rtol=0.02, atol=0.02), step
