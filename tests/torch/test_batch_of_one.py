"""k and v of a batch of 1 against q of B: the keys of one are those of all, and their gradients are sums."""

from __future__ import annotations

from collections.abc import Callable
from typing import Any

import pytest
import torch
from torch import Tensor

import gossamer as gs
from gossamer.plan.table import NAMES

CUDA = pytest.param("cuda", marks=[pytest.mark.gpu, pytest.mark.skipif(not torch.cuda.is_available(), reason="no GPU")])
B, H, G, Q, K, D = 3, 4, 2, 70, 90, 16
FORMS: dict[str, Callable[..., Any]] = {
    "dense": lambda *x, **o: gs.attention(*x, **o),
    "window": lambda *x, **o: gs.attention(*x, gs.SlidingWindow(20), **o),
    "dilated": lambda *x, **o: gs.attention(*x, gs.Dilated(20, 0, 4), **o),
    "scattered": lambda *x, **o: gs.attention(*x, gs.CSR.from_pattern(gs.Strided(7, 2), Q, K), **o),
    "lengths": lambda *x, **o: gs.attention(*x, gs.Causal(), key_lengths=[50, 0, 90], **o),
    "offsets": lambda *x, **o: gs.attention(
        *x, gs.Causal(), q_offset=torch.tensor([0, 20, 60], device=x[0].device), **o
    ),
    "terms": lambda *x, **o: gs.attention(*x, gs.Causal(), softcap=3.0, **o),
}


def inputs(batch: tuple[int, int], device: str, dtype: torch.dtype, rows: int = Q) -> list[Tensor]:
    torch.manual_seed(0)
    shapes = (B, H, rows, D), (batch[0], G, K, D), (batch[1], G, K, D)
    return [torch.randn(s, device=device).to(dtype).requires_grad_() for s in shapes]


def gradients(call: Callable[..., Any], x: list[Tensor]) -> list[Tensor]:
    """out, lse and the gradients of q, k and v."""
    out, lse = call(*x, return_lse=True)
    seen = torch.where(lse.isinf(), 0, lse)
    g = torch.Generator().manual_seed(1)
    dout = torch.randn(out.shape, generator=g, dtype=torch.float64).to(out)
    return [out, lse, *torch.autograd.grad([out, seen], x, [dout, torch.ones_like(seen)])]


@pytest.mark.parametrize("batch", [(1, 1), (1, B), (B, 1)])
@pytest.mark.parametrize("form", FORMS)
def test_float64(form: str, batch: tuple[int, int]) -> None:
    x = inputs(batch, "cpu", torch.float64)
    every = [y.detach().expand(B, -1, -1, -1).clone().requires_grad_() for y in x]
    found, wanted = gradients(FORMS[form], x), gradients(FORMS[form], every)
    for n, y in enumerate(x):
        if len(y) == 1:
            wanted[n + 2] = wanted[n + 2].sum(0, keepdim=True)
    for a, b in zip(found, wanted, strict=True):
        torch.testing.assert_close(a, b, atol=1e-12, rtol=1e-12)
    turned = [y.transpose(1, 2) for y in x]
    assert torch.equal(FORMS[form](*turned, layout="bshd").transpose(1, 2), found[0]) or form == "scattered"


@pytest.mark.parametrize("device", ["cpu", CUDA])
@pytest.mark.parametrize("dtype", [torch.bfloat16, torch.float16, torch.float32], ids=str)
@pytest.mark.parametrize("name", NAMES)
def test_every_implementation(name: str, dtype: torch.dtype, device: str) -> None:
    call = lambda *x, **o: gs.attention(*x, gs.Causal(), implementation=name, deterministic=True, **o)  # noqa: E731
    x = inputs((1, 1), device, dtype)
    try:
        found = gradients(call, x)
    except gs.Unsupported as error:
        pytest.skip(str(error).partition(";")[0])
    exact = gradients(
        lambda *x, **o: gs.attention(*x, gs.Causal(), implementation="reference", **o),
        [y.detach().double().requires_grad_() for y in x],
    )
    for label, a, b in zip(("out", "lse", "dq", "dk", "dv"), found, exact, strict=True):
        eps = torch.finfo(torch.float32 if label == "lse" else dtype).eps
        assert (a.double() - b).abs().max() <= 8 * max(eps, 1e-6) * b.abs().max(), label
    assert all(torch.equal(a, b) for a, b in zip(gradients(call, x), found, strict=True))


def test_one_query_repeated_calls_and_explain() -> None:
    q, k, v = inputs((1, 1), "cpu", torch.float32, rows=1)
    with torch.no_grad():
        for n in (80, 85, 85):
            found = gs.attention(q, k[:, :, :n], v[:, :, :n], gs.Causal())
            wanted = gs.attention(q, k[:, :, :n].repeat(B, 1, 1, 1), v[:, :, :n].repeat(B, 1, 1, 1), gs.Causal())
            torch.testing.assert_close(found, wanted)
    assert gs.explain(q, k, v, gs.Causal()).problem.B == B


@pytest.mark.filterwarnings("ignore")  # of torch's compiler
@pytest.mark.parametrize("dynamic", [False, True])
def test_compiled(dynamic: bool) -> None:
    torch._dynamo.reset()
    run = torch.compile(FORMS["window"], fullgraph=True, backend="aot_eager", dynamic=dynamic)
    x = inputs((1, 1), "cpu", torch.float64)
    for a, b in zip(gradients(run, x), gradients(FORMS["window"], x), strict=True):
        torch.testing.assert_close(a, b)


def test_other_batches_are_refused() -> None:
    q, k, v = inputs((2, 1), "cpu", torch.float32)
    with pytest.raises(ValueError, match=r"k must have B=3 batch elements, as q has, or 1; got shape \(2, 2, 90, 16\)"):
        gs.attention(q, k, v)
    with pytest.raises(ValueError, match="k must have B=1 batch elements"):
        gs.attention(q[:1], k, k)
