"""What has no derivative raises and never gives zero: forward mode, torch.func, a second backward."""

from __future__ import annotations

from collections.abc import Callable
from typing import Any

import pytest
import torch
from torch import Tensor
from torch.autograd import forward_ad

import gossamer as gs

P = gs.SlidingWindow(5)
pytestmark = pytest.mark.filterwarnings("ignore:.*torch.jit.script.*:DeprecationWarning")  # torch's own, in dual_level


def inputs(grad: bool = False) -> list[Tensor]:
    torch.manual_seed(0)
    return [torch.randn(1, heads, 24, 8).requires_grad_(grad) for heads in (2, 1, 1)]


def first_gradient(q: Tensor, k: Tensor, v: Tensor, **options: Any) -> Tensor:
    out = gs.attention(q, k, v, P, **options)
    return torch.autograd.grad(out.square().sum(), q, create_graph=True)[0]


@pytest.mark.parametrize("grad", [False, True])
@pytest.mark.parametrize("which", range(3))
def test_forward_mode(which: int, grad: bool) -> None:
    given = inputs(grad)
    with forward_ad.dual_level():
        given[which] = forward_ad.make_dual(given[which], torch.ones_like(given[which]))
        with pytest.raises(gs.Unsupported, match="no forward-mode derivative"):
            gs.attention(*given, P)


def test_forward_mode_of_something_else() -> None:
    q, k, v = inputs()
    expected = gs.attention(q, k, v, P)
    with forward_ad.dual_level():
        x = forward_ad.make_dual(torch.ones(()), torch.tensor(2.0))
        tangent = forward_ad.unpack_dual(x * gs.attention(q, k, v, P)).tangent
    torch.testing.assert_close(tangent, 2 * expected, rtol=0, atol=0)


TRANSFORMS: dict[str, tuple[Callable[..., Any], str]] = {
    "jvp": (lambda f, x: torch.func.jvp(f, (x,), (x,)), "no forward-mode derivative"),
    "jacfwd": (lambda f, x: torch.func.jacfwd(f)(x), "no forward-mode derivative|cannot be mapped"),
    "grad": (lambda f, x: torch.func.grad(lambda y: f(y).sum())(x), "no derivative inside torch.func"),
    "vmap": (lambda f, x: torch.func.vmap(f)(x), "batch elements"),
    "hessian": (lambda f, x: torch.autograd.functional.hessian(lambda y: f(y).sum(), x), "double backward"),
}  # fmt: skip


@pytest.mark.parametrize("name", TRANSFORMS)
def test_transforms(name: str) -> None:
    transform, message = TRANSFORMS[name]
    with pytest.raises(gs.Unsupported, match=message):
        transform(lambda x: gs.attention(x, x, x, P), inputs()[0])


def test_transforms_of_something_else() -> None:
    q, k, v = inputs()
    expected = gs.attention(q, k, v, P)
    x = torch.ones(3)
    found = torch.func.vmap(lambda a: a * gs.attention(q, k, v, P))(x)
    torch.testing.assert_close(found, expected.expand_as(found), rtol=0, atol=0)
    found = torch.func.grad(lambda a: (a * gs.attention(q, k, v, P)).sum())(torch.tensor(1.0))
    torch.testing.assert_close(found, expected.sum(), rtol=1e-5, atol=1e-5)


@pytest.mark.parametrize("mode", ["eager", "operators"])
def test_the_second_derivative(mode: str) -> None:
    with torch.autocast("cpu", enabled=mode == "operators", dtype=torch.bfloat16):  # autocast takes the operators
        q, k, v = inputs(grad=True)
        grad = first_gradient(q, k, v)
        with pytest.raises(gs.Unsupported, match="double backward"):
            grad.sum().backward(retain_graph=True)
        with pytest.raises(gs.Unsupported, match="double backward"):
            torch.autograd.grad(grad.sum(), v, allow_unused=True)  # None would be a second derivative of zero


def test_the_graph_of_gradients_changes_nothing() -> None:
    q, k, v = inputs(grad=True)
    s = torch.zeros(2, requires_grad=True)
    grads = []
    for create in (False, True):
        out, lse = gs.attention(q, k, v, P, sink_logits=s, return_lse=True)
        grads.append(torch.autograd.grad(out.square().sum() + lse.sum(), (q, k, v, s), create_graph=create))
    for found, expected in zip(*grads, strict=True):
        torch.testing.assert_close(found, expected, rtol=0, atol=0)
