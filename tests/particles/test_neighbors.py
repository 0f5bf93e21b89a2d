"""Lists of neighbours and attention over them from torch."""

from __future__ import annotations

import numpy as np
import pytest
import torch

import gossamer as gs
from gossamer import particles as gp
from tests.particles import oracle

ON_GPU = [pytest.mark.gpu, pytest.mark.skipif(not torch.cuda.is_available(), reason="needs an NVIDIA GPU")]
DEVICES = ["cpu", pytest.param("cuda", marks=ON_GPU)]


@pytest.mark.parametrize("device", DEVICES)
@pytest.mark.parametrize(
    ("N", "d", "radius", "kind"), [(1, 3, 0.2, "uniform"), (700, 3, 0.2, "clustered"), (90, 2, 0.5, "coincident")]
)
def test_lists_and_the_pattern_that_they_are(N: int, d: int, radius: float, kind: str, device: str) -> None:
    x = oracle.cloud(np.random.default_rng(), N, d, kind)
    neighbors = gp.Neighbors.allocate(torch.as_tensor(x, device=device), radius, 1.0)
    s = oracle.pairs(oracle.wrapped(x, (1.0,) * d).astype(np.float32), (1.0,) * d).s
    indices, unsure = neighbors.indices.cpu().numpy(), np.abs(s / radius**2 - 1) < 1e-6
    found = np.zeros((N, N + 1), dtype=int)
    np.add.at(found, (np.arange(N)[:, None], indices), 1)
    assert ((found[:, :N] == (s <= radius**2)) | unsure).all()
    assert (found[:, :N].sum(1) == neighbors.counts.cpu().numpy()).all() and not neighbors.overflow
    q, k, v = (torch.randn(N, 4, 16, device=device) for _ in range(3))
    out = gp.neighbor_attention(q, k, v, neighbors)
    given = (one.transpose(0, 1) for one in (q, k, v))
    same = gs.attention(*given, gs.Indices(neighbors.indices))
    torch.testing.assert_close(out, same.transpose(0, 1), rtol=2e-3, atol=2e-3)
    assert neighbors.update(neighbors.cells.x.flip(0)).counts.equal(neighbors.counts.flip(0))


@pytest.mark.parametrize("device", DEVICES)
@pytest.mark.parametrize("kernel", ["dot", "gaussian", "dot+gaussian"])
def test_attention_and_its_gradients(kernel: str, device: str) -> None:
    """In float64 against the definition and differences, on a CPU; float32 of each device against that."""
    products = {"scale": 0.6} if kernel != "gaussian" else {}
    gaussian = {"bandwidth": 0.2} if kernel != "dot" else {}
    D = 4 if device == "cpu" else 16
    x = torch.rand(20, 3, dtype=torch.float64)
    q, k, v = (torch.randn(20, 2, D, dtype=torch.float64) for _ in range(3))

    def attend(x: torch.Tensor, q: torch.Tensor, k: torch.Tensor, v: torch.Tensor) -> tuple[torch.Tensor, ...]:
        neighbors = gp.Neighbors.allocate(x, 0.3, (1.0, None, 1.0), 32)
        q, k = (q, k) if products else (None, None)
        return gp.neighbor_attention(q, k, v, neighbors, kernel=kernel, **products, **gaussian, return_residual=True)

    inputs = [one.requires_grad_() for one in (x, q, k, v)]
    out, lse = attend(*inputs)
    exact = oracle.pairs(x.detach().numpy(), (1.0, None, 1.0))
    wanted = oracle.attention(
        exact.s,
        0.3,
        *(one.detach().numpy() for one in (q, k, v)),
        0.6 if products else 0.0,
        0.2 if gaussian else np.inf,
    )
    np.testing.assert_allclose(out.detach(), wanted.out, atol=1e-6)
    np.testing.assert_allclose(lse.detach(), wanted.lse, atol=1e-6)
    used = [one for one, needed in zip(inputs, (gaussian, products, products, True), strict=True) if needed]
    weights = torch.randn_like(out), torch.randn_like(lse)
    right = torch.autograd.grad((out, lse), used, weights)
    if device == "cpu":
        assert torch.autograd.gradcheck(lambda *given: attend(*given), inputs, eps=1e-7, atol=1e-3, rtol=1e-3)
    low = [one.detach().to(device, torch.float32).requires_grad_() for one in inputs]
    found = attend(*low)
    used = [one for one, needed in zip(low, (gaussian, products, products, True), strict=True) if needed]
    got = torch.autograd.grad(found, used, [one.to(device, torch.float32) for one in weights])
    for a, b in zip([*found, *got], [out, lse, *right], strict=True):
        torch.testing.assert_close(a.cpu().double(), b, rtol=1e-3, atol=2e-3 * b.abs().max().item())


@pytest.mark.parametrize("device", DEVICES)
def test_lists_that_are_cut_give_no_numbers(device: str) -> None:
    x = torch.rand(300, 3, device=device)
    cut, full = gp.Neighbors.allocate(x, 0.3, 1.0, 32), gp.Neighbors.allocate(x, 0.3, 1.0)
    q, k, v = (torch.randn(300, 2, 16, device=device, requires_grad=True) for _ in range(3))
    out = gp.neighbor_attention(q, k, v, cut)
    over = full.counts > 32
    assert cut.overflow and 0 < over.sum() < 300
    assert out[over].isnan().all()
    torch.testing.assert_close(out[~over], gp.neighbor_attention(q, k, v, full)[~over], rtol=2e-3, atol=2e-3)
    got = torch.autograd.grad(out.sum(), (q, k, v))
    right = torch.autograd.grad(gp.neighbor_attention(q, k, v, full).sum(), (q, k, v))
    for a, b in zip(got, right, strict=True):
        assert a[over].isnan().any(-1).all()
        sure = ~a.isnan()
        torch.testing.assert_close(a[sure], b[sure], rtol=2e-3, atol=2e-3)
