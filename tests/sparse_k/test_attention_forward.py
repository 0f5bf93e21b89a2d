"""`attention_forward`: which attention it is, its gradients and its errors."""

from __future__ import annotations

from typing import Any

import pytest
import torch
from torch import Tensor

import gossamer as gs


def randn(*shape: int, seed: int = 0) -> Tensor:
    return torch.randn(*shape, generator=torch.Generator().manual_seed(seed), dtype=torch.float64).requires_grad_()


def qkv(Q: int = 30, K: int = 30) -> tuple[Tensor, Tensor, Tensor]:
    return randn(2, 4, Q, 8, seed=1), randn(2, 2, K, 8, seed=2), randn(2, 2, K, 5, seed=3)


@pytest.mark.parametrize("Q", [30, 7, 1])
@pytest.mark.parametrize("causal", [False, True])
def test_without_scores_it_is_exact(Q: int, causal: bool) -> None:
    q, k, v = qkv(Q)
    out = gs.attention_forward(q, k, v, causal)
    mask = torch.ones(Q, 30, dtype=torch.bool).tril(30 - Q) if causal else torch.ones(Q, 30, dtype=torch.bool)
    s = (q @ k.repeat_interleave(2, 1).mT * 8**-0.5).masked_fill(~mask, -torch.inf)
    expected = s.softmax(-1) @ v.repeat_interleave(2, 1)
    torch.testing.assert_close(out, expected)
    w = randn(*out.shape, seed=4)
    found, wanted = (torch.autograd.grad((x * w).sum(), (q, k, v)) for x in (out, expected))
    torch.testing.assert_close(found, wanted)
    if causal:
        assert torch.equal(out, gs.attention_forward(q, k, v))
    for less in (q[0], k[0], v[0]), (q[0, 1], k[0, 0], v[0, 0]):
        shape = out.shape[4 - less[0].ndim :]
        at = (0,) * (4 - less[0].ndim) if less[0].ndim == 3 else (0, 1)
        torch.testing.assert_close(gs.attention_forward(*less, causal), out[at].view(shape))


@pytest.mark.parametrize("heads", [2, 4])
@pytest.mark.parametrize("causal", [False, True])
def test_with_scores_it_is_sparsek(causal: bool, heads: int) -> None:
    """Against the definition of each row: the largest scores, and gates of the values."""
    (q, k, v), u, kept = qkv(), randn(2, heads, 30, seed=5), 6
    out = gs.attention_forward(q, k, v, causal, k_keep=kept, scores=u)
    rows = []
    for t in range(30):
        seen = u[..., : t + 1] if causal else u
        m = gs.sparsek(seen, kept).m
        at = seen.detach().argsort(dim=-1, descending=True, stable=True)[..., :kept]
        gate = torch.zeros_like(m).scatter(-1, at, m.gather(-1, at)).repeat_interleave(4 // heads, 1)
        chosen = torch.zeros_like(seen, dtype=torch.bool).scatter(-1, at, True).repeat_interleave(4 // heads, 1)
        n = seen.shape[-1]
        s = (q[:, :, t, None] @ k[:, :, :n].repeat_interleave(2, 1).mT)[:, :, 0] * 8**-0.5
        own = torch.arange(n) == t  # the window, ungated
        p = s.masked_fill(~(chosen | own), -torch.inf).softmax(-1) * torch.where(own, 1, gate)
        rows.append((p[:, :, None] @ v[:, :, :n].repeat_interleave(2, 1))[:, :, 0])
    expected = torch.stack(rows, 2)
    torch.testing.assert_close(out, expected)
    w = randn(*out.shape, seed=4)
    found, wanted = (torch.autograd.grad((x * w).sum(), (q, k, v, u)) for x in (out, expected))
    torch.testing.assert_close(found, wanted)


@pytest.mark.parametrize("scored", [False, True])
def test_differences(scored: bool) -> None:
    x = (randn(1, 2, 6, 3, seed=1), randn(1, 1, 6, 3, seed=2), randn(1, 1, 6, 2, seed=3))
    if scored:
        x += (0.4 * randn(1, 1, 6, seed=4).detach(),)
        x[3].requires_grad_()

    def call(q: Tensor, k: Tensor, v: Tensor, u: Tensor | None = None) -> Tensor:
        return gs.attention_forward(q, k, v, k_keep=None if u is None else 2, scores=u)

    assert torch.autograd.gradcheck(call, x)


@pytest.mark.parametrize(
    ("given", "message"),
    [
        ({"k_keep": 3}, "scores must be given with k_keep: SparseK takes both; got k_keep=3"),
        ({"scores": torch.zeros(2, 2, 30)}, "k_keep must be given with scores"),
        ({"scores": torch.zeros(2, 3, 30), "k_keep": 2}, "u must be scores of keys"),
        ({"scores": torch.zeros(2, 2, 30), "k_keep": 0}, "k_keep must be an integer"),
        ({"causal": 1}, "causal must be True or False"),
    ],
)
def test_errors(given: dict[str, Any], message: str) -> None:
    with pytest.raises(ValueError, match=message):
        gs.attention_forward(*(x.detach() for x in qkv()), **given)
