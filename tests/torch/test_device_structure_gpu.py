"""Structure made on a GPU: nothing is read back, and a captured graph reads its tensors again in every replay."""

from __future__ import annotations

from collections.abc import Callable
from typing import Any

import pytest
import torch
from torch import Tensor

import gossamer as gs
from tests.torch.test_graphs_gpu import captured

pytestmark = [pytest.mark.gpu, pytest.mark.skipif(not torch.cuda.is_available(), reason="needs an NVIDIA GPU")]

N, K, H, G = 300, 700, 4, 2


def offsets(q: Tensor, k: Tensor, v: Tensor, data: Tensor) -> Tensor:
    return gs.attention(q, k, v, gs.SlidingWindow(200), q_offset=data, key_starts=data // 9, key_lengths=data + 250)


def documents(q: Tensor, k: Tensor, v: Tensor, data: Tensor) -> Tensor:
    ids = torch.arange(K, device=data.device) // data[:, None].clamp(min=1)
    return gs.attention(q, k, v, gs.DocumentIds(ids) & gs.Causal())


def edges(q: Tensor, k: Tensor, v: Tensor, data: Tensor) -> Tensor:
    return gs.attention(
        q, k, v, gs.Causal() & gs.DocumentIds.from_cu_seqlens(data + 250 * torch.arange(2, device=data.device), K)
    )


def blocks(q: Tensor, k: Tensor, v: Tensor, data: Tensor) -> Tensor:
    step = torch.arange(2 * G * 3 * 4, device=data.device).view(2, G, 3, 4)
    chosen = (step * data[:1] // 7 + data.view(2, 1, 1, 1)) % 8 - 1
    return gs.attention(q, k, v, gs.BlockIndices(chosen, 128) & gs.Causal())


def sequences(q: Tensor, k: Tensor, v: Tensor, data: Tensor) -> Tensor:
    packed = [x[0].transpose(0, 1) for x in (q, k, v)]
    cu_q, cu_k = (torch.stack([data[0] * 0, data[0] // 3, data[0] // 3 + at]) for at in (40, 300))
    found = gs.varlen(*packed, cu_q, cu_k, pattern=gs.Causal(), seqused_k=data)
    assert isinstance(found, Tensor)
    return found.transpose(0, 1)[None]


FUNCTIONS = {f.__name__: f for f in (offsets, documents, edges, blocks, sequences)}
DATA = [[100, 400], [399, 401], [0, 77], [260, 300]]


def results(function: Callable[..., Tensor], x: list[Tensor], data: Tensor, dout: Tensor) -> tuple[Tensor, ...]:
    out = function(*x, data)
    return out, *torch.autograd.grad(out, x, dout[: len(out)])


def inputs(dtype: torch.dtype) -> tuple[list[Tensor], Tensor]:
    g = torch.Generator().manual_seed(0)
    x = [torch.randn(2, heads, n, 64, generator=g).to("cuda", dtype) for heads, n in ((H, N), (G, K), (G, K))]
    return [one.requires_grad_() for one in x], torch.randn(2, H, N, 64, generator=g).to("cuda", dtype)


def close(found: tuple[Tensor, ...], function: Callable[..., Tensor], x: list[Tensor], data: Any, dout: Tensor) -> None:
    """Against float64 on a CPU, which tests without a GPU compare with the definition."""
    exact = [one.detach().cpu().double().requires_grad_() for one in x]
    for one, right in zip(found, results(function, exact, torch.tensor(data), dout.cpu().double()), strict=True):
        torch.testing.assert_close(one.cpu().double(), right, atol=2e-2, rtol=2e-2)


@pytest.mark.parametrize("dtype", [torch.bfloat16, torch.float32])
@pytest.mark.parametrize("name", FUNCTIONS)
def test_nothing_is_read_back(name: str, dtype: torch.dtype) -> None:
    function, (x, dout) = FUNCTIONS[name], inputs(dtype)
    results(function, x, torch.tensor(DATA[0], device="cuda"), dout)  # compiles kernels
    for data in DATA:
        given = torch.tensor(data, device="cuda")
        torch.cuda.set_sync_debug_mode("error")
        try:
            found = results(function, x, given, dout)
        finally:
            torch.cuda.set_sync_debug_mode("default")
        close(found, function, x, data, dout)


@pytest.mark.parametrize("dtype", [torch.bfloat16, torch.float32])
@pytest.mark.parametrize("name", FUNCTIONS)
def test_a_captured_graph_follows_its_tensors(name: str, dtype: torch.dtype) -> None:
    function, (x, dout) = FUNCTIONS[name], inputs(dtype)
    given = torch.tensor(DATA[0], device="cuda")
    graph, held = captured(lambda: results(function, x, given, dout))
    for data in DATA:
        given.copy_(torch.tensor(data))
        graph.replay()
        torch.cuda.synchronize()
        close(held, function, x, data, dout)


@pytest.mark.parametrize("name", FUNCTIONS)
def test_compiled_once_for_all_data(name: str) -> None:
    torch._dynamo.reset()
    function, (x, dout) = FUNCTIONS[name], inputs(torch.bfloat16)
    compiled = torch.compile(function, fullgraph=True)
    for data in DATA:
        close(results(compiled, x, torch.tensor(data, device="cuda"), dout), function, x, data, dout)
