"""Exact top-k over many rows, the certificate of it, the mission's call of `SplashAttention`, and every derivative."""

from __future__ import annotations

from typing import Any

import pytest
import torch
from torch import Tensor

import gossamer as gs
from tests.entmax.test_attention import inputs, randn
from tests.support import entmax_oracle as oracle

DTYPES = [torch.float16, torch.bfloat16, torch.float32, torch.float64]


def by_stable_sort(s: Tensor, seen: Tensor, k: int) -> Tensor:
    """The keys of the k largest scores s (..., K) among those that are seen, ascending, then -1; never one of -inf."""
    K = s.shape[-1]
    there = seen & (s > -torch.inf)
    # Keys that are not there come behind those of -inf, of which none is taken.
    order = s.masked_fill(~there, -torch.inf).sort(dim=-1, descending=True, stable=True).indices[..., :k]
    found = torch.where(there.expand(s.shape).gather(-1, order), order, K).sort(-1).values
    found = torch.where(found == K, -1, found)
    return torch.nn.functional.pad(found, (0, max(0, k - K)), value=-1)


@pytest.mark.parametrize("dtype", DTYPES)
@pytest.mark.parametrize("span", [1, 3, 20])
def test_ten_thousand_rows_against_a_stable_sort(span: int, dtype: torch.dtype) -> None:
    """Small integers, whose scores are exact in every type: ties, empty rows, and k over the number of keys."""
    g = torch.Generator().manual_seed(span)
    B, H, G, Q, K = 1, 8, 2, 1250, 150
    q, k = (torch.randint(-span, span + 1, (B, n, N, 4), generator=g).to(dtype) for n, N in ((H, Q), (G, K)))
    density = torch.tensor([0.0, 0.02, 0.3, 1.0])[torch.randint(4, (B, H, Q, 1), generator=g)]
    seen = torch.rand(B, H, Q, K, generator=g) < density
    s = q.double() @ k.double().repeat_interleave(H // G, 1).mT
    for n in (1, 2, 8, 33, 150, 200):
        found = gs.topk_keys(q, k, seen, k_keep=n, scale=1.0)
        assert torch.equal(found, by_stable_sort(s, seen, n).int()), n
    assert (found == -1).all(-1).sum() > 2000  # rows that see nothing


@pytest.mark.parametrize("dtype", DTYPES)
def test_ten_thousand_rows_with_infinities(dtype: torch.dtype) -> None:
    """Scores of +inf come first, in the order of keys; those of -inf are no candidates."""
    g = torch.Generator().manual_seed(0)
    q = torch.randint(1, 3, (1, 4, 2500, 1), generator=g).to(dtype)
    k = torch.randint(-3, 4, (1, 4, 90, 1), generator=g).to(dtype)
    k[torch.rand(k.shape, generator=g) < 0.05] = torch.inf
    k[torch.rand(k.shape, generator=g) < 0.1] = -torch.inf
    seen = (
        torch.rand(1, 4, 2500, 90, generator=g)
        < torch.tensor([0.05, 0.5, 1.0])[torch.randint(3, (1, 4, 2500, 1), generator=g)]
    )
    for n in (1, 4, 20, 90):
        expected = by_stable_sort(q.double() @ k.double().mT, seen, n)
        assert torch.equal(gs.topk_keys(q, k, seen, k_keep=n, scale=1.0), expected.int()), n


@pytest.mark.parametrize("dtype", [torch.float32, torch.float64])
@pytest.mark.parametrize("alpha", [1.0, 1.05, 1.25, 1.5, 1.75, 2.0])
def test_certified_if_and_only_if(alpha: float, dtype: torch.dtype) -> None:
    """Where a call without top_k has no more than k weights, over rows that see many keys, few and none."""
    q, k, v = (x.to(dtype) for x in inputs(B=2, H=4, G=2, Q=150, K=150, size=3.0))
    g = torch.Generator().manual_seed(0)
    seen = torch.rand(2, 4, 150, 150, generator=g) < torch.rand(2, 4, 150, 1, generator=g) ** 3
    full, of_all = gs.entmax_attention(q, k, v, seen, alpha=alpha, return_aux=True)
    shares = []
    for n in (1, 2, 3, 5, 9, 20, 150):
        out, aux = gs.entmax_attention(q, k, v, seen, alpha=alpha, top_k=n, return_aux=True)
        assert torch.equal(aux.certified, of_all.support <= n), n
        assert torch.equal(aux.support, of_all.support.clamp(max=n))
        same = torch.isclose(out, full, rtol=0, atol=1e-12 if dtype == torch.float64 else 1e-5).all(-1)
        assert same[aux.certified].all()
        shares.append(aux.certified.double().mean().item())
    assert shares[0] < 0.65 and shares[-1] == 1 and shares == sorted(shares)


def test_the_call_of_the_mission() -> None:
    """All rows of all heads, and all gradients, against the definition in float64."""
    Q, K, V, dout = (randn(2, 8, 512, 64, seed=n, dtype=torch.float32) for n in range(4))
    index = torch.arange(512).expand(2, 8, 512)
    module = gs.nn.SplashAttention(head_dim=64, alpha=1.5, k_keep=8, sm_scale=0.125)

    def exact(q: Tensor, k: Tensor, v: Tensor) -> Tensor:
        s = (0.125 * q @ k.mT).detach()
        seen = torch.ones(512, 512, dtype=torch.bool).tril()
        kept = by_stable_sort(s, seen, 8)
        mask = torch.zeros(2, 8, 512, 513, dtype=torch.bool).scatter(3, kept.where(kept >= 0, 512), True)
        return oracle.plain(q, k, v, mask[..., :512], 1.5)

    found, expected = [], []
    for call, dtype, results in (
        (lambda *x: module(*x, index, index), torch.float32, found),
        (exact, torch.float64, expected),
    ):
        x = [t.to(dtype).requires_grad_() for t in (Q, K, V)]
        out = call(*x)
        results += [out.detach(), *torch.autograd.grad(out, x, dout.to(dtype))]
    for mine, right in zip(found, expected, strict=True):
        assert mine.dtype == torch.float32
        torch.testing.assert_close(mine.double(), right, rtol=1e-5, atol=2e-5)


FORMS: dict[str, dict[str, Any]] = {
    "pattern": {"pattern": gs.SlidingWindow(3, 1)},
    "heads": {"pattern": gs.PerHead([gs.Causal(), gs.Dilated(4, 0, 2)])},
    "mask with an empty row": {"pattern": torch.ones(6, 8, dtype=torch.bool).tril(2) & (torch.arange(6) != 2)[:, None]},
    "documents": {"pattern": gs.DocumentIds(torch.tensor([[0] * 4 + [1] * 4]))},
    "lists": {"pattern": gs.Indices(torch.tensor([[[0, 5, -1], [7, 1, 2]] * 3]))},
    "layout": {"pattern": gs.Causal().layout(6, 8, block_q=64, block_kv=64)},
    "positions": {
        "q_positions": torch.tensor([5, 0, 3, 9, 2, 2]),
        "k_positions": torch.tensor([4, 4, 0, 1, 9, 2, 3, 7]),
    },
    "causal, scaled": {"causal": True, "scale": -0.9},
    "alpha 1": {"alpha": 1.0},
    "alpha 2": {"alpha": 2.0},
    "thresholds are saved": {"save": "tau", "causal": True},
    "all keys": {"top_k": 8},
}


@pytest.mark.parametrize("top_k", [None, 3])
@pytest.mark.parametrize("name", FORMS)
def test_every_derivative(name: str, top_k: int | None) -> None:
    """By differences in float64, over every way to say what a row may see."""
    given = {"top_k": top_k} | FORMS[name]
    q, k, v = (x.requires_grad_() for x in inputs(B=1, H=2, G=1, Q=6, K=8, D=3, E=2))
    x = [q, k, v]
    if "alpha" not in given:
        x.append(torch.tensor([1.3, 1.6], dtype=torch.float64, requires_grad=True))

    def call(q: Tensor, k: Tensor, v: Tensor, *alpha: Tensor) -> Tensor:
        return gs.entmax_attention(q, k, v, **(dict(zip(["alpha"], alpha, strict=False)) | given))

    assert torch.autograd.gradcheck(call, x)


@pytest.mark.parametrize("k_keep", [None, 2])
def test_every_derivative_of_the_module(k_keep: int | None) -> None:
    alpha = torch.nn.Parameter(torch.tensor([1.4, 1.7], dtype=torch.float64))
    module = gs.nn.SplashAttention(3, alpha=alpha, k_keep=k_keep, sm_scale=0.8)
    x = [x.requires_grad_() for x in inputs(B=1, H=2, G=2, Q=5, K=6, D=3, E=2)]

    def call(q: Tensor, k: Tensor, v: Tensor, alpha: Tensor) -> Tensor:
        return torch.func.functional_call(module, {"alpha": alpha}, (q, k, v, torch.arange(1, 6)))

    assert torch.autograd.gradcheck(call, (*x, alpha))
