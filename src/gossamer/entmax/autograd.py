"""The operator with its gradient: what the forward saves, and the named refusal of a second derivative."""

from __future__ import annotations

from functools import partial
from typing import Any, NamedTuple, NoReturn

import torch
from torch import Tensor

from gossamer.entmax.arguments import operands_of
from gossamer.entmax.backward import of_lists, of_normalisers
from gossamer.entmax.forward import forward
from gossamer.entmax.lists import Lists, RowLists
from gossamer.entmax.options import Options
from gossamer.entmax.ways import by_kernels, kernel_call, readable
from gossamer.kernels.row_formulas import compute_dtype
from gossamer.plan.problem import Unsupported
from gossamer.torch.transforms import uncast

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


class Found(NamedTuple):
    """What a forward gives, and what a backward reads of each row: lists of supports, or its normaliser."""

    results: Results
    lists: Lists | RowLists | None


def results(
    q: Tensor, k: Tensor, v: Tensor, alpha: Tensor, number: float | None, options: Options, listed: bool,
    told: bool = True,
) -> Found:  # fmt: skip
    """The forward, and the lists of supports if they are wanted and small enough.

    Args:
        told: whether more than out is wanted; kernels do not make it otherwise.
    """
    B, H, Q, _ = q.shape
    kernels = by_kernels(q, k, v, number, options)
    if 0 in q.shape or 0 in k.shape:
        return of_nothing(q, v)
    if kernels:
        return of_kernels(q, k, v, alpha, number, options, listed, told)
    with uncast(q.device):
        found = forward(operands_of(q, k, v, alpha, options), MEAN_LISTED * B * H * Q if listed else 0)
    rows = (x.view(B, H, Q) for x in (found.normaliser, found.support, found.certified))
    # No view to autograd: what a custom function gives as a view cannot be written to in place.
    out = torch.ops.aten._unsafe_view(found.out, (B, H, Q, v.shape[3]))
    return Found(Results(out.to(q.dtype), *rows), found.lists)


def of_nothing(q: Tensor, v: Tensor) -> Found:
    """`results` where there is no pair of a query and a key: rows that see nothing, of which backwards read nothing."""
    (B, H, Q, _), wide = q.shape, compute_dtype(q.dtype)
    normaliser = torch.full((B, H, Q), torch.inf, dtype=wide, device=q.device)
    support = torch.zeros((B, H, Q), dtype=torch.int32, device=q.device)
    return Found(Results(q.new_zeros((B, H, Q, v.shape[3])), normaliser, support, support == 0), None)


def of_kernels(
    q: Tensor, k: Tensor, v: Tensor, alpha: Tensor, number: float | None, options: Options, listed: bool, told: bool
) -> Found:  # fmt: skip
    """`results` by the kernels."""
    from gossamer.entmax.launch.forward import forward

    with uncast(q.device), torch.no_grad():
        call = kernel_call(q, k, v, alpha, number, options)
        found = forward(call, keep_lists=listed, told=told)
    lam, support, certified = found.stats
    return Found(Results(found.out, lam, support, certified), RowLists(*found.lists) if listed else None)


def gradients_of_kernels(
    q: Tensor, k: Tensor, v: Tensor, alpha: Tensor, number: float | None, options: Options,
    lists: RowLists | None, normaliser: Tensor, wants_alpha: bool, dout: Tensor,
) -> GradientsOf:  # fmt: skip
    """The backward by the kernels; without lists these are made again."""
    from gossamer.entmax.launch.backward import backward
    from gossamer.entmax.launch.calls import Listed
    from gossamer.entmax.launch.forward import again

    with uncast(q.device), torch.no_grad():
        call = kernel_call(q, k, v, alpha, number, options)
        of_rows = again(call) if lists is None else Listed(*lists)
        found = backward(call, of_rows, normaliser, readable(dout.to(q.dtype)), wants_alpha)
    of_alpha = None if found.alpha is None else found.alpha.to(alpha.dtype)
    return GradientsOf(found.q, found.k, found.v, of_alpha)


def gradients(
    q: Tensor, k: Tensor, v: Tensor, alpha: Tensor, number: float | None, options: Options,
    saved: Lists | RowLists | None, normaliser: Tensor | None, wants_alpha: bool, dout: Tensor,
) -> GradientsOf:  # fmt: skip
    """The backward, from lists of supports, or from the normalisers (B, H, Q) alone; not without either."""
    if 0 in q.shape or 0 in k.shape:
        return GradientsOf(*(torch.zeros(x.shape, dtype=x.dtype, device=x.device) for x in (q, k, v, alpha)))
    if not isinstance(saved, Lists) and (saved is not None or by_kernels(q, k, v, number, options)):
        assert normaliser is not None
        return gradients_of_kernels(q, k, v, alpha, number, options, saved, normaliser, wants_alpha, dout)
    with uncast(q.device):
        o = operands_of(q, k, v, alpha, options)
        dout = dout.to(o.q.dtype).reshape(-1, dout.shape[3])
        if isinstance(saved, Lists):
            dq, dk, dv, dalpha = of_lists(o, saved, dout, wants_alpha)
        else:
            assert normaliser is not None
            dq, dk, dv, dalpha = of_normalisers(o, normaliser.reshape(-1), dout, wants_alpha)
    scale = q.shape[3] ** -0.5 if options.scale is None else float(options.scale)
    return GradientsOf(
        (dq * scale).view(q.shape).to(q.dtype), dk.view(k.shape).to(k.dtype), dv.view(v.shape).to(v.dtype),
        None if dalpha is None else dalpha.to(alpha.dtype),
    )  # fmt: skip


class EntmaxAttention(torch.autograd.Function):
    """Saves q, k, v, alpha, and the supports or the normalisers; double backward is refused."""

    @staticmethod
    def forward(
        ctx: Any, q: Tensor, k: Tensor, v: Tensor, alpha: Tensor, number: float | None, options: Options,
        listed: bool, told: bool,
    ) -> tuple[Tensor, ...]:  # fmt: skip
        found, lists = results(q, k, v, alpha, number, options, listed, told)
        of_rows = () if lists is None else tuple(lists)
        # Lists of torch hold every row; of kernels, a row without one is computed by its normaliser.
        normaliser = None if isinstance(lists, Lists) else found.normaliser
        # Saved with the others, what says which keys a row may see must not be written to before the backward.
        ctx.save_for_backward(q, k, v, alpha, normaliser, *options.tensors, *of_rows)
        ctx.options, ctx.number, ctx.kind = options.over(None, None), number, type(lists)
        ctx.mark_non_differentiable(found.normaliser, found.support, found.certified)
        ctx.set_materialize_grads(False)
        return tuple(found)

    @staticmethod
    def backward(ctx: Any, dout: Tensor | None, *constant: None) -> tuple[Tensor | None, ...]:
        if dout is None:
            return (None,) * 8
        q, k, v, alpha, normaliser, *rest = ctx.saved_tensors
        wanted: Wanted = Wanted(*ctx.needs_input_grad)
        lists: Lists | RowLists | None = None
        if ctx.kind is not type(None):
            *rest, first, second, third = rest
            lists = ctx.kind(first, second, third)
        compute = partial(
            gradients, q, k, v, alpha, ctx.number, ctx.options.over(*rest), lists, normaliser, wanted.alpha
        )
        if torch.is_grad_enabled():  # create_graph
            return (*_Gradients.apply(compute, dout, q, k, v, alpha), None, None, None, None)
        return (*compute(dout), None, None, None, None)


class Wanted(NamedTuple):
    """Which arguments of `EntmaxAttention` a gradient is wanted of."""

    q: bool
    k: bool
    v: bool
    alpha: bool
    number: bool
    options: bool
    listed: bool
    told: bool


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
