"""Tensors without elements, in what the data choose: nothing is kept, and gradients are 0."""

from __future__ import annotations

import math
from typing import Any

import pytest
import torch
from torch import Tensor

import gossamer as gs

SIZES = [
    (1, 2, 1, 0, 5),
    (1, 2, 1, 5, 0),
    (0, 2, 1, 5, 5),
    (1, 2, 2, 0, 0),
    (1, 0, 0, 5, 5),
    (1, 0, 1, 3, 3),
]  # B H G Q K


def given(B: int, H: int, G: int, Q: int, K: int) -> list[Tensor]:
    shapes = (B, H, Q, 4), (B, G, K, 4), (B, G, K, 3)
    return [torch.randn(shape, requires_grad=True) for shape in shapes]


@pytest.mark.parametrize("sizes", SIZES)
@pytest.mark.parametrize("save", ["lists", "tau"])
def test_entmax(sizes: tuple[int, ...], save: Any) -> None:
    B, H, _, Q, K = sizes
    x = given(*sizes)
    alpha = torch.full((H,), 1.5, requires_grad=True)
    for more in (
        {}, {"causal": True, "top_k": 3}, {"pattern": gs.SlidingWindow(2), "return_aux": True}, {"alpha": alpha},
        {"pattern": torch.ones(Q, K, dtype=torch.bool), "k_positions": torch.arange(K)},
    ):  # fmt: skip
        found = gs.entmax_attention(*x, save=save, **more)
        out, aux = found if isinstance(found, tuple) else (found, None)
        assert out.shape == (B, H, Q, 3) and (out == 0).all()
        if aux is not None:
            assert aux.tau.shape == (B, H, Q) and (aux.tau == math.inf).all()
            assert (aux.support == 0).all() and aux.certified.all()
        leaves = [*x, alpha] if "alpha" in more else x
        for leaf, g in zip(leaves, torch.autograd.grad(out, leaves, torch.ones_like(out)), strict=True):
            assert g.shape == leaf.shape and (g == 0).all()
    q, k, v = x
    keys = gs.topk_keys(q, k, gs.SlidingWindow(2), k_keep=3)
    assert keys.shape == (B, H, Q, 3) and (keys == -1).all() and keys.dtype == torch.int32
    with pytest.raises(ValueError, match="k must have the head size"):
        gs.entmax_attention(q, torch.cat([k, k], -1), v)


@pytest.mark.parametrize("sizes", SIZES)
@pytest.mark.parametrize("per", ["head", "group"])
def test_chosen_blocks(sizes: tuple[int, ...], per: Any) -> None:
    B, H, G, Q, K = sizes
    q, k, v = given(*sizes)
    for options in ({"topk": 3}, {"top_p": 0.5, "score": "bound"}):
        chosen = gs.topk_blocks(q, k, causal=True, per=per, **options)
        n = min(3, -(-K // 64))
        assert chosen.indices.shape == (B, G if per == "group" else H, -(-Q // 64), n)
        assert (chosen.indices == -1).all() and (chosen.covered == 0).all()
        out, lse = gs.attention(q, k, v, chosen, return_lse=True)
        assert out.shape == (B, H, Q, 3) and (out == 0).all() and (lse == -math.inf).all()
        if "score" in options:
            assert (chosen.kept_mass(lse) == 1).all()


@pytest.mark.parametrize("shape", [(0,), (2, 0), (0, 3), (2, 0, 3)])
def test_sparsek(shape: tuple[int, ...]) -> None:
    u = torch.randn(shape, requires_grad=True)
    m, tau = gs.sparsek(u, 2)
    assert m.shape == shape and tau.shape == shape[:-1] and (tau == -math.inf).all()
    steps, last = gs.sparsek_causal(u, 2)
    assert steps.shape == last.shape == gs.last_topk(u, 2).shape == shape
    assert last.dtype == gs.last_topk(u, 2).dtype == torch.int32
    for x in (m, steps):
        assert torch.autograd.grad(x.sum(), u)[0].shape == shape
    turned = gs.sparsek(u, 2, dim=0)
    assert turned.m.shape == shape and turned.tau.shape == shape[1:]


@pytest.mark.parametrize("sizes", [(0, 2, 1, 5), (1, 2, 1, 0), (1, 0, 0, 5), (0, 0, 0, 0)])
@pytest.mark.parametrize(
    "options", [{}, {"keep": "support", "gate": "logit"}, {"causal": False, "straight_through": True}]
)
def test_sparsek_attention(sizes: tuple[int, ...], options: dict[str, Any]) -> None:
    B, H, G, N = sizes
    x = given(B, H, G, N, N)
    for U in {G, H}:
        u = torch.randn(B, U, N, requires_grad=True)
        out, lse = gs.sparsek_attention(*x, u, k_keep=2, window=1, return_lse=True, **options)
        assert out.shape == (B, H, N, 3) and lse.shape == (B, H, N)
        gradients = torch.autograd.grad([out, lse], [*x, u], [torch.ones_like(out), torch.ones_like(lse)])
        assert all(g.shape == t.shape for g, t in zip(gradients, [*x, u], strict=True))
        assert "chunks" in str(gs.explain_sparsek(*x, u, k_keep=2, window=1, **options))
