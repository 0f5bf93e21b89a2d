"""Results of several attentions over the same rows as one: weighted by their denominators, exactly differentiable."""

from __future__ import annotations

from collections.abc import Sequence
from typing import Any

import torch
from torch import Tensor

from gossamer.kernels.row_formulas import compute_dtype
from gossamer.patterns import LongNet, Pattern
from gossamer.patterns.compose import Or
from gossamer.patterns.reordered import ReorderedCSR
from gossamer.torch.arguments import describe


class _Combine(torch.autograd.Function):
    """Keeps the outputs as they came, not their weighted copies in float32."""

    @staticmethod
    def forward(ctx: Any, *given: Tensor) -> tuple[Tensor, Tensor]:
        out, lse = combined(given[: len(given) // 2], given[len(given) // 2 :])
        ctx.save_for_backward(out, lse, *given)
        ctx.set_materialize_grads(False)
        return out, lse

    @staticmethod
    @torch.autograd.function.once_differentiable
    def backward(ctx: Any, dout: Tensor | None, dlse: Tensor | None) -> tuple[Tensor, ...]:
        out, lse, *given = ctx.saved_tensors
        outs, lses = given[: len(given) // 2], given[len(given) // 2 :]
        dout = torch.zeros_like(out) if dout is None else dout
        # Weights sum to one: a part's share of the denominator moves out towards its own result.
        joint = (dout * out.to(lse.dtype)).sum(-1)
        douts, dlses = [], []
        for w, x, y in zip(_weights(lses, lse), outs, lses, strict=True):
            pull = (dout * x.to(lse.dtype)).sum(-1) - joint
            douts.append((w * dout).to(x.dtype))
            dlses.append((w.squeeze(-1) * (pull if dlse is None else pull + dlse)).to(y.dtype))
        return *douts, *dlses


def combined(outs: Sequence[Tensor], lses: Sequence[Tensor]) -> tuple[Tensor, Tensor]:
    """(out, lse) as `merge` gives them, without a gradient."""
    (first, *_), (lse, *others) = outs, lses
    dtype = compute_dtype(first.dtype)
    lse = lse.to(dtype)
    for x in others:
        lse = torch.logaddexp(lse, x.to(dtype))
    out = torch.zeros_like(first, dtype=dtype)
    for w, x in zip(_weights(lses, lse), outs, strict=True):
        out.addcmul_(w, x.to(dtype))
    return out.to(first.dtype), lse


def _weights(lses: Sequence[Tensor], lse: Tensor) -> list[Tensor]:
    """The share of each part in the denominators (..., N, 1); 0 in a row that keeps nothing."""
    return [torch.exp(x.to(lse.dtype) - lse).masked_fill(x == -torch.inf, 0.0).unsqueeze(-1) for x in lses]


def merge(outs: Sequence[Tensor], lses: Sequence[Tensor]) -> tuple[Tensor, Tensor]:
    """(out, lse) of the softmax over all keys of several results; a key counts once for each result that has it.

    Args:
        outs: (..., N, E), each an `out` of `attention` over the same rows.
        lses: (..., N), the `lse` of each.

    Raises:
        ValueError: no lists of tensors, not as many of each, none at all, or shapes, types or devices that differ.

    Examples:
        >>> q, k, v = (torch.randn(2, 30, 8) for _ in range(3))
        >>> parts = [gs.attention(q, k[:, s], v[:, s], return_lse=True) for s in (slice(0, 10), slice(10, 30))]
        >>> out, lse = gs.merge(*zip(*parts))
        >>> torch.allclose(out, gs.attention(q, k, v), atol=1e-6)
        True
    """
    outs, lses = _floats("outs", outs), _floats("lses", lses)
    if not outs or len(outs) != len(lses):
        raise ValueError(f"outs and lses must be as many, at least one of each; got {len(outs)} and {len(lses)}")
    for x, y in zip(outs, lses, strict=True):
        apart = x.device != outs[0].device or y.device != x.device
        if x.shape != outs[0].shape or y.shape != x.shape[:-1] or apart:
            raise ValueError(
                f"outs must be of one shape (..., N, E), lses of shape (..., N), all on one device; "
                f"got {describe(x)} and {describe(y)} beside {describe(outs[0])}"
            )
    return _Combine.apply(*outs, *lses)


def _floats(name: str, given: Any) -> list[Tensor]:
    """`given` as a list of tensors of floating point."""
    try:
        tensors = list(given)
    except TypeError:
        raise ValueError(f"{name} must be a list of tensors; got {describe(given)}") from None
    for x in tensors:
        if not isinstance(x, Tensor) or x.is_nested or not x.is_floating_point():
            raise ValueError(f"{name} must be a list of tensors of floating point; it holds {describe(x)}")
    return tensors


def branches_of(pattern: Any) -> tuple[Pattern, ...]:
    """What `merge="lse"` attends to one by one: the terms of a union, the branches of a LongNet mixture.

    Raises:
        ValueError: the pattern is neither.
    """
    if isinstance(pattern, LongNet):
        return pattern.branches()
    if isinstance(pattern, ReorderedCSR) and pattern.terms:
        return pattern.terms
    if isinstance(pattern, Or):
        return tuple(
            term for side in (pattern.left, pattern.right)
            for term in (branches_of(side) if isinstance(side, Or) else (side,))
        )  # fmt: skip
    raise ValueError(f'pattern must be a union a | b or a LongNet with merge="lse"; got {describe(pattern)}')
