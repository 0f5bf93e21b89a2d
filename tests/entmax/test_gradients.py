"""Gradients of `entmax_attention`, d alpha among them, against differences, and what has no derivative."""

from __future__ import annotations

from collections.abc import Callable
from typing import Any

import numpy as np
import pytest
import torch
from torch import Tensor
from torch.autograd import forward_ad

import gossamer as gs
from gossamer.entmax import backward, calls
from gossamer.entmax.thresholds import alpha_terms
from gossamer.testing.tolerance import error
from tests.entmax.test_attention import inputs, randn
from tests.support import entmax_oracle as oracle

# torch's own, in dual_level
pytestmark = pytest.mark.filterwarnings("ignore:.*torch.jit.script.*:DeprecationWarning")


@pytest.mark.parametrize("save", ["lists", "tau"])
@pytest.mark.parametrize("top_k", [None, 3])
@pytest.mark.parametrize("alpha", [1.02, 1.25, 1.5, 1.75, 1.98])
def test_differences(alpha: float, top_k: int | None, save: Any) -> None:
    q, k, v = (x.requires_grad_() for x in inputs(B=1, H=2, G=1, Q=5, K=7, D=3, E=2))
    alphas = torch.tensor([alpha, min(alpha + 0.1, 1.98)], dtype=torch.float64, requires_grad=True)

    def call(*x: Tensor) -> Tensor:
        return gs.entmax_attention(*x[:3], alpha=x[3], top_k=top_k, causal=True, save=save)

    assert torch.autograd.gradcheck(call, (q, k, v, alphas))


@pytest.mark.parametrize("save", ["lists", "tau"])
@pytest.mark.parametrize("alpha", [1.0, 2.0])
def test_differences_at_the_ends(alpha: float, save: Any) -> None:
    """Of q, k and v both ways; of alpha from inside, by values of the oracle."""
    q, k, v = (x.requires_grad_() for x in inputs(B=1, H=2, G=1, Q=5, K=7, D=3, E=2))
    assert torch.autograd.gradcheck(lambda *x: gs.entmax_attention(*x, alpha=alpha, save=save), (q, k, v))
    alphas = torch.full((2,), alpha, dtype=torch.float64, requires_grad=True)
    w = randn(1, 2, 5, 2, seed=9)
    (found,) = torch.autograd.grad((gs.entmax_attention(q, k, v, alpha=alphas, save=save) * w).sum(), alphas)
    step = 1e-4 if alpha == 1 else -1e-4

    def loss(distance: float) -> np.ndarray:
        out = oracle.attention(q, k, v, alpha=alpha + distance).out
        return (out * w.numpy()).sum((0, 2, 3))

    sided = (-3 * loss(0) + 4 * loss(step) - loss(2 * step)) / (2 * step)
    np.testing.assert_allclose(found.numpy(), sided, atol=2e-6)


@pytest.mark.parametrize("pattern", [None, gs.Causal(), gs.PerHead([gs.SlidingWindow(20), gs.Dilated(9, 9, 3)] * 2)])
@pytest.mark.parametrize("alpha", [1.0, 1.3, 1.5, 2.0])
def test_both_ways_to_save(alpha: float, pattern: Any) -> None:
    """Over several chunks and groups of heads; both in the same bits when computed again."""
    q, k, v = (x.requires_grad_() for x in inputs(B=2, H=4, G=2, Q=150, K=160, size=2.0))
    alphas = torch.full((4,), alpha, dtype=torch.float64, requires_grad=True)
    results = []
    for save in ("lists", "tau", "lists", "tau"):
        out = gs.entmax_attention(q, k, v, pattern, alpha=alphas, save=save)
        results.append([out, *torch.autograd.grad(out.square().sum(), (q, k, v, alphas))])
    lists, tau, *again = results
    for one, other in zip(lists, tau, strict=True):
        torch.testing.assert_close(one, other, rtol=1e-9, atol=1e-11)
    for one, other in zip(again, (lists, tau), strict=True):
        assert all(torch.equal(x, y) for x, y in zip(one, other, strict=True))


@pytest.mark.parametrize("alpha", [1.0, 1.1, 1.5, 2.0])
def test_scores_of_minus_infinity(alpha: float, monkeypatch: pytest.MonkeyPatch) -> None:
    """Their keys are as keys that are not seen, and rows of no others as rows that see nothing."""
    q, k, v = inputs(B=1, H=1, G=1, Q=12, K=300, D=2)
    q, k = q.abs(), -k.abs()
    q[0, 0, 5], k[0, 0, 1::3, 1] = torch.inf, -torch.inf
    hidden = torch.ones(12, 300, dtype=torch.bool)
    hidden[:, 1::3] = hidden[5] = False
    results = []
    for x, mask in (((q.nan_to_num(0, 0, 0), k.nan_to_num(0, 0, 0), v), hidden), ((q, k, v), None)):
        for save, most in (("lists", 256), ("tau", 256), ("lists", 1)):
            monkeypatch.setattr(calls, "MEAN_LISTED", most)
            leaves = [y.clone().requires_grad_() for y in x]
            alphas = torch.full((1,), alpha, dtype=torch.float64, requires_grad=True)
            out = gs.entmax_attention(*leaves, mask, alpha=alphas, save=save)  # type: ignore[call-overload]
            results.append([out, *torch.autograd.grad(out.square().sum(), (*leaves, alphas))])
    expected, *others = results
    for found in others:
        for one, same in zip(found, expected, strict=True):
            assert one.isfinite().all()
            torch.testing.assert_close(one, same, rtol=1e-9, atol=1e-11)


def test_nan_reaches_the_rows_that_see_it() -> None:
    q, k, v = inputs(B=1, H=1, G=1, Q=20, K=20)
    k[0, 0, 13] = torch.nan
    results = []
    for save in ("lists", "tau"):
        leaves = [y.clone().requires_grad_() for y in (q, k, v)]
        out = gs.entmax_attention(*leaves, causal=True, save=save)  # type: ignore[call-overload]
        results.append([out, *torch.autograd.grad(out.sum(), leaves)])
    lists, tau = results
    torch.testing.assert_close(tau, lists, rtol=1e-9, atol=1e-11, equal_nan=True)
    for rows in lists[:2]:
        assert rows[0, 0, :13].isfinite().all() and rows[0, 0, 13:].isnan().all()


def test_large_supports_are_saved_as_thresholds(monkeypatch: pytest.MonkeyPatch) -> None:
    q, k, v = (x.requires_grad_() for x in inputs(Q=60, K=60))
    called: list[str] = []
    for name in ("list_gradients", "normaliser_gradients"):
        monkeypatch.setattr(calls, name, lambda *x, name=name: (called.append(name), getattr(backward, name)(*x))[1])
    expected = torch.autograd.grad(gs.entmax_attention(q, k, v, alpha=1.1).square().sum(), q)
    _, aux = gs.entmax_attention(q, k, v, alpha=1.1, return_aux=True)
    assert (aux.support == 60).all()
    for most, way in ((60, "list_gradients"), (59, "normaliser_gradients")):
        monkeypatch.setattr(calls, "MEAN_LISTED", most)
        found = torch.autograd.grad(gs.entmax_attention(q, k, v, alpha=1.1).square().sum(), q)
        torch.testing.assert_close(found, expected, rtol=1e-9, atol=1e-11)
        assert called[-1] == way


def test_lists_take_eight_bytes_a_pair() -> None:
    q, k, v = (x.float().requires_grad_() for x in inputs(H=2, Q=200, K=200, size=3.0))
    saved: list[Tensor] = []
    with torch.autograd.graph.saved_tensors_hooks(lambda x: (saved.append(x), x)[1], lambda x: x):
        _, aux = gs.entmax_attention(q, k, v, causal=True, return_aux=True)
        size = sum(x.nbytes for x in saved) - sum(x.nbytes for x in (q, k, v))
        assert size == 8 * int(aux.support.sum()) + 8 * (2 * 200 + 1)  # where each row begins
        saved.clear()
        gs.entmax_attention(q, k, v, causal=True, save="tau")
        assert sum(x.nbytes for x in saved) - sum(x.nbytes for x in (q, k, v)) == 4 * 2 * 200


@pytest.mark.parametrize("dtype", [torch.float16, torch.bfloat16, torch.float32])
@pytest.mark.parametrize("alpha", [1.05, 1.5, 2.0])
def test_precision(alpha: float, dtype: torch.dtype) -> None:
    """At most twice the error of the plain computation in float32 under autograd, and the rounding of the result."""
    mask = torch.ones(64, 64, dtype=torch.bool).tril()
    w = randn(1, 2, 64, 5, seed=9)
    q, k, v = (x.to(dtype) for x in inputs(H=2, Q=64, K=64, D=16, size=2.0))

    def gradients(call: Callable[..., Tensor], dtype: torch.dtype) -> tuple[Tensor, ...]:
        x = [x.to(dtype).requires_grad_() for x in (q, k, v)]
        return torch.autograd.grad((call(*x) * w.to(dtype)).sum(), x)

    exact = gradients(lambda *x: oracle.plain(*x, mask, alpha), torch.float64)
    low = gradients(lambda *x: oracle.plain(*x, mask, alpha), torch.float32)
    for save in ("lists", "tau"):
        found = gradients(lambda *x, save=save: gs.entmax_attention(*x, alpha=alpha, causal=True, save=save), dtype)
        for name, mine, theirs, right in zip("qkv", found, low, exact, strict=True):
            rounding = torch.finfo(dtype).eps / 2 * right.abs().max().item()
            if dtype != torch.float32:  # dout and out are rounded too
                rounding *= 8
            assert error(mine, right) <= 2 * error(theirs, right) + 2 * rounding, (name, save)


def test_alpha_in_other_types_and_shapes() -> None:
    q, k, v = (x.float() for x in inputs(H=2))
    wide = torch.tensor(1.5, dtype=torch.float64, requires_grad=True)
    (expected,) = torch.autograd.grad(gs.entmax_attention(q, k, v, alpha=wide).square().sum(), wide)
    half = torch.tensor([1.5, 1.5], dtype=torch.bfloat16, requires_grad=True)
    (found,) = torch.autograd.grad(gs.entmax_attention(q, k, v, alpha=half).square().sum(), half)
    assert expected.shape == () and found.dtype == torch.bfloat16
    torch.testing.assert_close(found.double().sum(), expected, rtol=0.02, atol=1e-3)


def test_terms_of_alpha_near_1() -> None:
    """w is smooth through 1, and its series meets its formula."""
    p = torch.logspace(-30, 0, 61, dtype=torch.float64)
    at_1 = alpha_terms(p, torch.zeros(()))
    torch.testing.assert_close(at_1, -p * p.log() ** 2 / 2)
    torch.testing.assert_close(alpha_terms(p, torch.full((), 1e-9, dtype=torch.float64)), at_1, rtol=1e-6, atol=0)
    for a in (0.01, 0.1, 0.5, 1.0):
        log = p.log()
        t = torch.expm1(a * log) / a
        formula = p * (t * torch.exp(-a * log) / a - log / a)  # 1 + a t is exp(a log p)
        found = alpha_terms(p, torch.full((), a, dtype=torch.float64))
        torch.testing.assert_close(found, formula, rtol=1e-6, atol=1e-11)


def test_only_what_is_asked_for() -> None:
    q, k, v = inputs()
    alpha = torch.full((2,), 1.5, dtype=torch.float64)
    for name in ("q", "k", "v", "alpha"):
        x = {"q": q, "k": k, "v": v, "alpha": alpha}
        x[name] = x[name].clone().requires_grad_()
        (found,) = torch.autograd.grad(gs.entmax_attention(**x).square().sum(), x[name])
        assert found.any() and found.shape == x[name].shape
    out = gs.entmax_attention(q, k, v)
    assert not out.requires_grad


@pytest.mark.parametrize("form", ["mask", "positions"])
def test_what_rows_may_see_must_not_change_before_the_backward(form: str) -> None:
    q, k, v = (x.requires_grad_() for x in inputs())
    mask, positions = torch.ones(40, 40, dtype=torch.bool).tril(), torch.arange(40)
    given = {"pattern": mask} if form == "mask" else {"q_positions": positions}
    out = gs.entmax_attention(q, k, v, save="tau", **given)
    for x in given.values():
        x[0] = x[1]
    with pytest.raises(RuntimeError, match="modified by an inplace operation"):
        out.sum().backward()


@pytest.mark.parametrize("dtype", [torch.float64, torch.float16], ids=str)
@pytest.mark.parametrize("leading", [(), (1, 2)], ids=["of one head", "of a batch"])
def test_the_output_may_be_written_to(leading: tuple[int, ...], dtype: torch.dtype) -> None:
    q, k, v = (x[0, 0].expand(*leading, -1, -1).to(dtype).clone().requires_grad_() for x in inputs(G=2))
    wanted = torch.autograd.grad((2 * gs.entmax_attention(q, k, v) + 1).square().sum(), (q, k, v))
    out = gs.entmax_attention(q, k, v)
    out.mul_(2)
    out += 1
    found = torch.autograd.grad(out.square().sum(), (q, k, v))
    assert all(torch.equal(*pair) for pair in zip(found, wanted, strict=True))


def test_aux_is_constant() -> None:
    q, k, v = (x.requires_grad_() for x in inputs())
    _, aux = gs.entmax_attention(q, k, v, return_aux=True)
    assert not any(x.requires_grad for x in aux)


def test_the_second_derivative() -> None:
    q, k, v = (x.requires_grad_() for x in inputs())
    expected = torch.autograd.grad(gs.entmax_attention(q, k, v).square().sum(), q)
    (grad,) = torch.autograd.grad(gs.entmax_attention(q, k, v).square().sum(), q, create_graph=True)
    assert torch.equal(grad, *expected)
    with pytest.raises(gs.Unsupported, match="entmax_attention can be differentiated once"):
        torch.autograd.grad(grad.sum(), v)


TRANSFORMS: dict[str, Callable[..., Any]] = {
    "jvp": lambda f, x: torch.func.jvp(f, (x,), (x,)),
    "grad": lambda f, x: torch.func.grad(lambda y: f(y).sum())(x),
    "vmap": lambda f, x: torch.func.vmap(f)(x),
}


@pytest.mark.parametrize("name", TRANSFORMS)
def test_transforms(name: str) -> None:
    with pytest.raises(gs.Unsupported, match="entmax_attention has no"):
        TRANSFORMS[name](lambda x: gs.entmax_attention(x, x, x), randn(2, 2, 9, 4))


def test_forward_mode() -> None:
    q, k, v = inputs()
    with forward_ad.dual_level():
        dual = forward_ad.make_dual(k, torch.ones_like(k))
        with pytest.raises(gs.Unsupported, match="no forward-mode derivative"):
            gs.entmax_attention(q, dual, v)
        alpha = forward_ad.make_dual(torch.full((2,), 1.5), torch.ones(2))
        with pytest.raises(gs.Unsupported, match="no forward-mode derivative"):
            gs.entmax_attention(q, k, v, alpha=alpha)
