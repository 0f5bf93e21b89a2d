"""`entmax_attention` beside the `entmax` package, both in float32: errors of values and of all gradients.

One pair at the edge of a support can make most of a gradient's error (dp/ds is infinite there where alpha > 1.5), so
that errors of single draws differ by factors of three either way. Medians of several are compared.
"""

from __future__ import annotations

from collections.abc import Callable
from functools import cache
from statistics import median

import entmax
import pytest
import torch
from torch import Tensor

import gossamer as gs
from gossamer.testing.tolerance import error
from tests.entmax.test_attention import randn
from tests.support import entmax_oracle as oracle

Results = dict[str, Tensor]
Errors = dict[str, float]
NAMES = ("out", "dq", "dk", "dv", "d alpha")
B, H, N, D = 1, 4, 128, 32
DRAWS = 5
SAVES = ("lists", "tau")
KernelCall = Callable[..., Tensor]
MASKS = {False: torch.ones(N, N, dtype=torch.bool), True: torch.ones(N, N, dtype=torch.bool).tril()}


@cache
def draw(seed: int, size: float) -> tuple[Tensor, ...]:
    """q, k, v, dout."""
    tile_sizes = (size, 1.0, 1.0, 1.0)
    return tuple(randn(B, H, N, D, seed=4 * seed + i, dtype=torch.float32, size=s) for i, s in enumerate(tile_sizes))


@cache
def exact_of(seed: int, size: float, alpha: float, causal: bool) -> Results:
    return exact(*draw(seed, size), alpha, causal)


def medians(
    calls: dict[str, KernelCall], alpha: float, size: float, causal: bool, device: str = "cpu"
) -> dict[str, Errors]:
    """The errors of each call, medians over the draws."""
    found: dict[str, dict[str, list[float]]] = {of: {} for of in calls}
    for seed in range(DRAWS):
        right = exact_of(seed, size, alpha, causal)
        for of, call in calls.items():
            for name, result in results(call, *(x.to(device) for x in draw(seed, size)), alpha, device).items():
                assert result.dtype == torch.float32
                found[of].setdefault(name, []).append(error(result.cpu(), right[name]))
    return {of: {name: median(errors) for name, errors in of_call.items()} for of, of_call in found.items()}


def exact(q: Tensor, k: Tensor, v: Tensor, dout: Tensor, alpha: float, causal: bool) -> Results:
    """In float64; d alpha by Proposition 1 of Correia, Niculae, Martins (2019) of the weights of the oracle."""
    x = [t.double().requires_grad_() for t in (q, k, v)]
    out = oracle.plain(*x, MASKS[causal], alpha)
    grads = torch.autograd.grad(out, x, dout.double())
    p = torch.from_numpy(oracle.attention(q, k, v, MASKS[causal], alpha=alpha).p)
    h = -torch.special.xlogy(p, p)
    u = torch.where(p > 0, p ** (2 - alpha), 0)
    u = u / u.sum(-1, keepdim=True)
    dp = (p - u) / (alpha - 1) ** 2 + (h - u * h.sum(-1, keepdim=True)) / (alpha - 1)
    d_alpha = ((dout.double() @ v.double().mT) * dp).sum((0, 2, 3))
    return dict(zip(NAMES, (out.detach(), *grads, d_alpha), strict=True))


def results(
    call: Callable[..., Tensor], q: Tensor, k: Tensor, v: Tensor, dout: Tensor, alpha: float, device: str = "cpu"
) -> Results:
    """Of a call in float32; without d alpha where it has none."""
    x = [t.clone().requires_grad_() for t in (q, k, v, torch.full((H,), alpha, device=device))]
    out = call(*x)
    grads = torch.autograd.grad(out, x, dout, allow_unused=True)
    found = zip(NAMES, (out.detach(), *grads), strict=True)
    return {name: result for name, result in found if result is not None}


def by_bisection(s: Tensor, alpha: Tensor) -> Tensor:
    return entmax.entmax_bisect(s, alpha[:, None, None])


# The second of 1.5 and of 2 finds its threshold exactly, by sorting; alpha is no argument of it.
FUNCTIONS = [(alpha, by_bisection) for alpha in (1.05, 1.25, 1.5, 1.75, 2.0)]
FUNCTIONS += [(1.5, lambda s, _: entmax.entmax15(s)), (2.0, lambda s, _: entmax.sparsemax(s))]


@pytest.mark.parametrize("causal", [False, True])
@pytest.mark.parametrize("size", [1.0, 8.0])
@pytest.mark.parametrize(("alpha", "function"), FUNCTIONS)
def test_at_most_twice_its_error(alpha: float, function: Callable[..., Tensor], size: float, causal: bool) -> None:
    def package(q: Tensor, k: Tensor, v: Tensor, alpha: Tensor) -> Tensor:
        s = (D**-0.5 * (q @ k.mT)).masked_fill(~MASKS[causal], -torch.inf)
        return function(s, alpha) @ v

    def ours(save: str) -> KernelCall:
        return lambda q, k, v, alpha: gs.entmax_attention(q, k, v, alpha=alpha, causal=causal, save=save)

    theirs, *mine = medians({"entmax": package} | {save: ours(save) for save in SAVES}, alpha, size, causal).values()
    for name, other in theirs.items():
        for save, one in zip(SAVES, mine, strict=True):
            assert one[name] <= 2 * other, (name, save)
