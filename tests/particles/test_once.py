"""Gradients of particles have none: a loss that uses one raises, beside other terms too."""

from __future__ import annotations

from typing import Any

import pytest
import torch
from torch import Tensor

from gossamer import particles as gp
from gossamer.plan.problem import Unsupported

N = 20


ON_GPU = [pytest.mark.gpu, pytest.mark.skipif(not torch.cuda.is_available(), reason="needs an NVIDIA GPU")]
# Of attention, kernels compute 16 bits.
DEVICES = [("cpu", torch.float64), *(pytest.param("cuda", x, marks=ON_GPU) for x in (torch.float32, torch.bfloat16))]


def attend(x: Tensor, u: Tensor, kernel: Any) -> Tensor:
    g = torch.Generator().manual_seed(3)
    q, k, v = (torch.randn(N, 2, 16, generator=g, dtype=torch.float64).to(u) for _ in range(3))
    neighbors, values = gp.Neighbors.allocate(x, 0.3, 1.0), v * u[:, None, :1]
    if kernel == "gaussian":
        return gp.neighbor_attention(None, None, values, neighbors, kernel=kernel, bandwidth=0.1)
    width = None if kernel == "dot" else 0.1
    return gp.neighbor_attention(q * u[:, None, :1], k, values, neighbors, kernel=kernel, bandwidth=width)


KERNELS = "dot", "gaussian", "dot+gaussian"
OF = {
    "sum": lambda x, u: gp.radial_sum(gp.Cells.build(x, 0.3, 1.0), u, gp.Gaussian(0.1)),
    "force": lambda x, u: gp.radial_force(gp.Cells.build(x, 0.3, 1.0), u[:, 0], gp.ShortRangeGravity(0.05, 0.001)),
    **{kernel: lambda x, u, kernel=kernel: attend(x, u, kernel) for kernel in KERNELS},
}


@pytest.mark.parametrize(("device", "dtype"), DEVICES, ids=str)
@pytest.mark.parametrize("square", [False, True])
@pytest.mark.parametrize("name", OF)
def test_a_second_derivative_raises(name: str, square: bool, device: str, dtype: torch.dtype) -> None:
    g = torch.Generator().manual_seed(1)
    wide = torch.promote_types(dtype, torch.float32)
    x, u = (torch.rand(N, 3, generator=g, dtype=torch.float64).to(device) for _ in range(2))
    x, u = x.to(wide).requires_grad_(), u.to(dtype if name in KERNELS else wide).requires_grad_()
    found = OF[name](x, u)
    loss = (found**2 if square else found).sum()
    given = (u,) if name == "dot" else (x, u)  # `dot` knows no distances
    gradients = torch.autograd.grad(loss, given, create_graph=True)
    plain = torch.autograd.grad(loss, given, retain_graph=True)
    if device == "cpu":  # kernels add in any order
        assert all(torch.equal(a, b) for a, b in zip(gradients, plain, strict=True))
    for gradient in gradients:
        for to in given:
            with pytest.raises(Unsupported, match=r"first derivatives alone|differentiated once"):
                torch.autograd.grad(loss + gradient.square().sum(), to, retain_graph=True)
