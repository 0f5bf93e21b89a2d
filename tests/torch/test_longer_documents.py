"""Ids of documents of more positions than keys, where `q_offset` says at which of them the queries are."""

from __future__ import annotations

from typing import Any

import numpy as np
import pytest
import torch

import gossamer as gs
from tests.support.definition import dense, tensors

RUNS, RETURNING = [0] * 9 + [4] * 14 + [2] * 27, [0] * 9 + [4] * 14 + [0] * 17 + [4] * 10


def kept(ids: list[int], Q: int, K: int, q_offset: int, causal: bool) -> np.ndarray:
    """By the definition, (Q, K)."""
    found = np.zeros((Q, K), dtype=bool)
    for r in range(Q):
        i = r + q_offset
        for j in range(K):
            found[r, j] = 0 <= i < len(ids) and ids[i] == ids[j] and (j <= i or not causal)
    return found


@pytest.mark.parametrize("causal", [False, True])
@pytest.mark.parametrize(("Q", "K", "q_offset"), [(1, 30, 29), (12, 20, 16), (40, 33, 8), (30, 40, -3), (9, 21, 45)])
@pytest.mark.parametrize("name", ["runs", "returning", "device", "edges"])
def test_definition(name: str, Q: int, K: int, q_offset: int, causal: bool) -> None:
    ids = RETURNING if name == "returning" else RUNS
    pattern: Any = gs.Document(ids)
    if name == "device":
        pattern = gs.DocumentIds(torch.tensor(ids))
    if name == "edges":
        pattern = gs.DocumentIds.from_cu_seqlens([0, 9, 23, 50], 50)
    pattern = pattern & gs.Causal() if causal else pattern
    mask = kept(ids, Q, K, q_offset, causal)
    if isinstance(pattern, gs.Pattern):
        assert (pattern.materialize(Q, K, q_offset) == mask).all()
        assert (pattern.layout(Q, K, block_q=32, block_kv=32, q_offset=q_offset).expand() == mask).all()
        assert pattern.density(Q, K, q_offset) == pytest.approx(mask.mean())
    inputs = tensors((1, 2, Q, 4), (1, 1, K, 4), (1, 1, K, 4))
    found = gs.attention(*inputs, pattern, q_offset=q_offset, return_lse=True)
    wanted = dense(*inputs, mask[None, None])
    for a, b in zip(found, wanted, strict=True):
        torch.testing.assert_close(a, b, atol=1e-9, rtol=1e-9)
    results = (torch.autograd.grad(out.square().sum(), inputs, allow_unused=True) for out, _ in (found, wanted))
    for a, b in zip(*results, strict=True):
        torch.testing.assert_close(a, torch.zeros_like(a) if b is None else b, atol=1e-9, rtol=1e-9)


@pytest.mark.parametrize("on_device", [False, True])
def test_refusals(on_device: bool) -> None:
    pattern: Any = gs.DocumentIds(torch.tensor(RUNS)) if on_device else gs.Document(RUNS)
    x = [y.detach() for y in tensors((2, 4, 30, 8), (2, 4, 30, 8), (2, 4, 30, 8))]
    with pytest.raises(ValueError, match=r"must have K=30 positions, or more where q_offset says .* got 50"):
        gs.attention(*x, pattern)
    longer = [y.detach() for y in tensors((2, 4, 60, 8), (2, 4, 60, 8), (2, 4, 60, 8))]
    with pytest.raises(ValueError, match=r"must have K=60 positions, or more .* got 50"):
        gs.attention(*longer, pattern, q_offset=0)


def test_the_other_layout_is_no_cache() -> None:
    x = [y.detach() for y in tensors((2, 50, 4, 8), (2, 50, 4, 8), (2, 50, 4, 8))]  # (B, N, H, D), without saying so
    for pattern in (gs.Document(RUNS), gs.DocumentIds(torch.tensor(RUNS))):
        for options in ({}, {"q_offset": 0}):
            with pytest.raises(ValueError, match="sizes fit in the other layout"):
                gs.attention(*x, pattern, **options)
