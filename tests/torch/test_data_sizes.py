"""Sizes that only the data know, `x[mask]`, in compiled functions: patterns, with gradients, and of no rows at all."""

from __future__ import annotations

import pytest
import torch
from torch import Tensor

import gossamer as gs

PATTERNS = {"dense": None, "causal": gs.Causal(), "window": gs.SlidingWindow(9, 3), "dilated": gs.Dilated(9, 0, 4)}


@pytest.mark.parametrize("name", PATTERNS)
@torch._dynamo.config.patch(capture_dynamic_output_shape_ops=True)
def test_compiled(name: str) -> None:
    pattern = PATTERNS[name]

    def call(x: Tensor, chosen: Tensor) -> tuple[Tensor, Tensor]:
        kept = x[chosen].transpose(0, 1)[None]
        return gs.attention(kept, kept, kept, pattern, return_lse=True)

    torch._dynamo.reset()
    run = torch.compile(call, fullgraph=True, backend="aot_eager")
    x = torch.randn(100, 4, 16, dtype=torch.float64, requires_grad=True)
    for share in (0.5, 0.95, 0.0, 1.0):
        chosen = torch.rand(100) < share
        results = []
        for function in (run, call):
            out, lse = function(x, chosen)
            results.append([out, lse, *torch.autograd.grad(out.square().sum() + lse.sum(), x)])
        for a, b in zip(*results, strict=True):
            torch.testing.assert_close(a, b)


@pytest.mark.parametrize("strict", [False, True])
@torch._dynamo.config.patch(capture_dynamic_output_shape_ops=True)
def test_exported(strict: bool) -> None:
    class Module(torch.nn.Module):
        def forward(self, x: Tensor, chosen: Tensor) -> Tensor:
            kept = x[chosen].transpose(0, 1)[None]
            return gs.attention(kept, kept, kept, gs.Causal())

    x, module = torch.randn(100, 4, 16), Module()
    exported = torch.export.export(module, (x, torch.rand(100) < 0.5), strict=strict).module()
    for share in (0.3, 0.9):
        chosen = torch.rand(100) < share
        torch.testing.assert_close(exported(x, chosen), module(x, chosen))
