"""A small call on a CPU and its gradients."""

from __future__ import annotations

import torch
from torch import Tensor

import gossamer as gs


def inputs() -> list[Tensor]:
    g = torch.Generator().manual_seed(0)
    return [torch.randn(1, 2, 24, 8, generator=g, requires_grad=True) for _ in range(3)]


def gradients(x: list[Tensor]) -> tuple[Tensor, ...]:
    out = gs.attention(*x, gs.SlidingWindow(5))
    return (out, *torch.autograd.grad(out.square().sum(), x))
