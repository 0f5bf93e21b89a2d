"""The operator with its gradient: what the forward saves, and the named refusal of a second derivative."""

from __future__ import annotations

from functools import partial
from typing import Any, NamedTuple, NoReturn

import torch
from torch import Tensor

from gossamer.plan.problem import Unsupported
from gossamer.torch.entmax.arguments import Options, operands_of, uncast
from gossamer.torch.entmax.backward import of_lists, of_normalisers
from gossamer.torch.entmax.forward import forward
from gossamer.torch.entmax.lists import Lists

# Lists are saved up to so many keys a row in the mean; larger supports are saved as normalisers.
MEAN_LISTED = 256


class Results(NamedTuple):
    """out (B, H, Q, E) in q's dtype; the others (B, H, Q)."""

    out: Tensor
    normaliser: Tensor
    support: Tensor
    certified: Tensor


class GradientsOf(NamedTuple):
    """In the types of q, k, v and alpha."""

    q: Tensor
    k: Tensor
    v: Tensor
    alpha: Tensor | None


def results(
    q: Tensor, k: Tensor, v: Tensor, alpha: Tensor, options: Options, listed: bool
) -> tuple[Results, Lists | None]:
    """The forward, and the lists of supports if they are wanted and small enough."""
    B, H, Q, _ = q.shape
    with uncast(q.device):
        found = forward(operands_of(q, k, v, alpha, options), MEAN_LISTED * B * H * Q if listed else 0)
    rows = (x.view(B, H, Q) for x in (found.normaliser, found.support, found.certified))
    return Results(found.out.view(B, H, Q, -1).to(q.dtype), *rows), found.lists


def gradients(
    q: Tensor, k: Tensor, v: Tensor, alpha: Tensor, options: Options, saved: Lists | Tensor, wants_alpha: bool,
    dout: Tensor,
) -> GradientsOf:  # fmt: skip
    """The backward, from lists of supports or from the normalisers (B, H, Q)."""
    with uncast(q.device):
        o = operands_of(q, k, v, alpha, options)
        dout = dout.to(o.q.dtype).reshape(-1, dout.shape[3])
        if isinstance(saved, Lists):
            dq, dk, dv, dalpha = of_lists(o, saved, dout, wants_alpha)
        else:
            dq, dk, dv, dalpha = of_normalisers(o, saved.reshape(-1), dout, wants_alpha)
    scale = q.shape[3] ** -0.5 if options.scale is None else float(options.scale)
    return GradientsOf(
        (dq * scale).view(q.shape).to(q.dtype), dk.view(k.shape).to(k.dtype), dv.view(v.shape).to(v.dtype),
        None if dalpha is None else dalpha.to(alpha.dtype),
    )  # fmt: skip


class EntmaxAttention(torch.autograd.Function):
    """Saves q, k, v, alpha, and the supports or the normalisers; double backward is refused."""

    @staticmethod
    def forward(
        ctx: Any, q: Tensor, k: Tensor, v: Tensor, alpha: Tensor, options: Options, listed: bool
    ) -> tuple[Tensor, ...]:
        found, lists = results(q, k, v, alpha, options, listed)
        of_rows = (found.normaliser,) if lists is None else tuple(lists)
        # Saved with the others, what says which keys a row may see must not be written to before the backward.
        ctx.save_for_backward(q, k, v, alpha, *of_rows, *options.tensors)
        ctx.options, ctx.listed = options.over(None, None), lists is not None
        ctx.mark_non_differentiable(found.normaliser, found.support, found.certified)
        ctx.set_materialize_grads(False)
        return tuple(found)

    @staticmethod
    def backward(ctx: Any, dout: Tensor | None, *constant: None) -> tuple[Tensor | None, ...]:
        if dout is None:
            return (None,) * 6
        q, k, v, alpha, *rest = ctx.saved_tensors
        wanted: tuple[bool, ...] = ctx.needs_input_grad
        of_rows: Lists | Tensor
        if ctx.listed:
            starts, keys, weights, *tensors = rest
            of_rows = Lists(starts, keys, weights)
        else:
            of_rows, *tensors = rest
        compute = partial(gradients, q, k, v, alpha, ctx.options.over(*tensors), of_rows, wanted[3])
        if torch.is_grad_enabled():  # create_graph
            return (*_Gradients.apply(compute, dout, q, k, v, alpha), None, None)
        return (*compute(dout), None, None)


class _Gradients(torch.autograd.Function):
    """The gradients where a graph of them is asked for; it leads to the inputs, so that its use raises, not gives 0."""

    @staticmethod
    def forward(ctx: Any, compute: Any, dout: Tensor, *inputs: Tensor) -> tuple[Tensor | None, ...]:
        return tuple(compute(dout))

    @staticmethod
    def backward(ctx: Any, *gradients: Tensor | None) -> NoReturn:
        raise Unsupported(
            "entmax_attention can be differentiated once: its gradients have no gradient (double backward)"
        )
