"""Calls in parts that are bound: the same numbers as those that are not, whatever the implementation of a part."""

from __future__ import annotations

import gc
from collections.abc import Callable
from typing import Any
from weakref import ref

import pytest
import torch
from torch import Tensor

import gossamer as gs
from gossamer.plan.table import available, load
from gossamer.torch import calls

CASES = {
    "one call": (gs.Dilated(9, 3, 5), 1, 4, 4, 160),
    "two runs": (gs.Dilated(30, 0, 7), 1, 4, 2, 163),
    "batches as heads": (gs.Dilated(12, 2, 4), 2, 4, 2, 200),
    "heads": (gs.PerHead([gs.SlidingWindow(9), gs.Dilated(9, 0, 8)] * 2), 1, 4, 4, 128),
}  # fmt: skip
JOINED = {"parts meet": (gs.Strided(16, 20), 1, 2, 2, 300)}


def draw(case: Any, device: str, dtype: torch.dtype, D: int) -> tuple[list[Tensor], Tensor, Tensor]:
    _, B, H, G, N = case
    x = [torch.randn(B, h, N, D, device=device).to(dtype).requires_grad_() for h in (H, G, G)]
    return x, torch.randn(B, H, N, D, device=device).to(dtype), torch.randn(B, H, N, device=device)


def gradients(case: Any, x: list[Tensor], dout: Tensor, dlse: Tensor | None, name: str) -> tuple[Tensor, ...]:
    out, lse = gs.attention(*x, case[0], return_lse=True, implementation=name, deterministic=True)
    if dlse is None:
        return (out.detach(), *torch.autograd.grad(out, x, dout))
    return (out.detach(), *torch.autograd.grad((out, lse), x, (dout, dlse)))


def compare(case: Any, name: str, device: str, dtype: torch.dtype, D: int, bound: bool) -> None:
    """Known calls beside first ones, of other inputs than those that they were bound with."""
    for _ in range(2):
        x, dout, dlse = draw(case, device, dtype, D)
        gradients(case, x, dout, dlse, name)
    seen = [ref(y) for y in (*x, dout, dlse)]
    del x, dout, dlse
    gc.collect()
    assert not any(y() is not None for y in seen)  # what is bound holds no tensor of the call
    (known,) = (entry[0] for entry in calls._calls._entries.values())
    assert (known._forward is not None, known._backward is not None) == (bound, bound)
    x, dout, dlse = draw(case, device, dtype, D)
    spread = torch.stack((dout, dout), -1)[..., 0]  # strides of its own
    for some in ((x, dout, dlse), (x, dout, None), (x, spread, dlse)):
        found = gradients(case, *some, name)
        kept, calls._calls._entries = calls._calls._entries, type(calls._calls._entries)()
        want = gradients(case, *some, name)
        calls._calls._entries = kept
        assert all(torch.equal(*y) for y in zip(found, want, strict=True))


@pytest.mark.parametrize("case", [*CASES, *JOINED])
def test_bound_parts(case: str, always: list[Any], monkeypatch: pytest.MonkeyPatch) -> None:
    """`blocked` as an implementation that binds."""
    blocked = load("blocked")
    assert not isinstance(blocked, str)
    kind, ran = type(blocked), []

    def bound_forward(self: Any, p: Any, q: Any, k: Any, v: Any, layout: Any, terms: Any, into: Any = None) -> Callable:
        def run(q: Tensor, k: Tensor, v: Tensor, *tensors: Any, into: Any = None) -> Any:
            ran.append("forward")
            return self.forward(p, q, k, v, layout, terms, into)

        return run

    def bound_backward(self: Any, p: Any, *bound: Any) -> Callable:
        layout, terms, _ = bound[6:]

        def run(
            dout: Any, dlse: Any, q: Any, k: Any, v: Any, out: Any, lse: Any, *tensors: Any, into: Any = None
        ) -> Any:
            ran.append("backward")
            return self.backward(p, dout, dlse, q, k, v, out, lse, layout, terms, into)[:3]

        return run

    monkeypatch.setattr(kind, "bound_forward", bound_forward, raising=False)
    monkeypatch.setattr(kind, "bound_backward", bound_backward, raising=False)
    compare((CASES | JOINED)[case], "blocked", "cpu", torch.float32, 16, case in CASES)
    assert always
    assert {"forward", "backward"} == set(ran) if case in CASES else not ran


@pytest.mark.gpu
@pytest.mark.skipif(not torch.cuda.is_available(), reason="needs an NVIDIA GPU")
@pytest.mark.parametrize("case", CASES)
def test_bound_parts_on_a_gpu(case: str, always: list[Any]) -> None:
    if available("hopper"):
        pytest.skip("; ".join(available("hopper")))
    compare(CASES[case], "hopper", "cuda", torch.bfloat16, 64, True)
    assert always
