"""A scale that is a tensor: a learned temperature, which the host does not read.

Launches take numbers. So q is multiplied by what the tensor is over a power of two near D ** -0.5, which is the number
of the launch: q keeps its magnitude, and its gradient that of any other call.
"""

from __future__ import annotations

import math
from typing import Any

import torch
from torch import Tensor

from gossamer.kernels.row_formulas import compute_dtype
from gossamer.torch.arguments import describe
from gossamer.torch.key import plain


def with_number(q: Any, scale: Tensor) -> tuple[Any, float | None]:
    """q and a number that together mean what q and a tensor as the scale mean.

    One on the CPU that asks for no gradient is read, which waits for nothing. Else q is multiplied, in the type that
    scores are computed in, and rounded once to its own type.

    Args:
        q: anything; what is no tensor of queries is left to the checks of the call.
        scale: () of any float type.

    Raises:
        ValueError: scale is another tensor, or on another device.
    """
    if scale.is_nested or scale.ndim or not scale.is_floating_point() or scale.layout != torch.strided:
        raise ValueError(
            f"scale must be a number, a tensor of floating point of shape () or None; got {describe(scale)}"
        )
    eager = not torch.compiler.is_compiling()
    if eager and scale.device.type == "cpu" and not scale.requires_grad and plain(scale):
        return q, float(scale)
    if not isinstance(q, Tensor) or q.is_nested or not q.is_floating_point() or q.layout != torch.strided or not q.ndim:
        return q, None
    if scale.device != q.device:
        raise ValueError(
            f"scale must be a tensor on q's device, {q.device}, or one on the CPU without a gradient, which is read; "
            f"got {describe(scale)}"
        )
    wide, base = compute_dtype(q.dtype), 2.0 ** -round(math.log2(max(1, q.shape[-1])) / 2)
    factor = scale.to(wide) / base
    if not (eager and plain(q, scale)):
        return (q.to(wide) * factor).to(q.dtype), base
    return _Multiplied.apply(q, factor), base


class _Multiplied(torch.autograd.Function):
    """q times a number: autograd by itself would keep q of 16 bits in float32, and add up NaN times a gradient of 0."""

    @staticmethod
    def forward(ctx: Any, q: Tensor, factor: Tensor) -> Tensor:
        ctx.save_for_backward(q, factor)
        # Of one dimension the factor is not rounded to q's type first.
        return torch.mul(q, factor.reshape(1), out=torch.empty_like(q))

    @staticmethod
    def backward(ctx: Any, gradient: Tensor) -> tuple[Tensor | None, Tensor | None]:
        q, factor = ctx.saved_tensors
        of_q, of_factor = ctx.needs_input_grad
        wide = gradient.to(factor.dtype)
        # A query that keeps nothing may be NaN, and has a gradient of 0.
        share = (wide * q).masked_fill_(wide == 0, 0.0).sum() if of_factor else None
        return (wide * factor).to(q.dtype) if of_q else None, share
