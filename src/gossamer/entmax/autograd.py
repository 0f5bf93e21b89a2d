"""The operator with its gradient: what the forward saves, and the named refusal of a second derivative."""

from __future__ import annotations

from functools import partial
from typing import Any, NamedTuple, NoReturn

import torch
from torch import Tensor

from gossamer.entmax.arguments import operands_of
from gossamer.entmax.backward import EntmaxGradients, list_gradients, normaliser_gradients
from gossamer.entmax.forward import forward
from gossamer.entmax.lists import PairLists, RowLists
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


class ForwardResults(NamedTuple):
    """The results of a forward, and the lists of supports that its backward reads; None where it reads normalisers."""

    results: Results
    lists: PairLists | RowLists | None


def results(
    q: Tensor, k: Tensor, v: Tensor, alpha: Tensor, number: float | None, options: Options, listed: bool,
    with_aux: bool = True,
) -> ForwardResults:  # fmt: skip
    """The forward, and the lists of supports if they are wanted and small enough.

    Args:
        with_aux: whether more than out is wanted; kernels leave it out otherwise.
    """
    B, H, Q, _ = q.shape
    kernels = by_kernels(q, k, v, number, options)
    if 0 in q.shape or 0 in k.shape:
        return empty_results(q, v)
    if kernels:
        return kernel_results(q, k, v, alpha, number, options, listed, with_aux)
    with uncast(q.device):
        computed = forward(operands_of(q, k, v, alpha, options), MEAN_LISTED * B * H * Q if listed else 0)
    rows = (x.view(B, H, Q) for x in (computed.normaliser, computed.support, computed.certified))
    # No view to autograd: what a custom function gives as a view cannot be written to in place.
    out = torch.ops.aten._unsafe_view(computed.out, (B, H, Q, v.shape[3]))
    return ForwardResults(Results(out.to(q.dtype), *rows), computed.lists)


def empty_results(q: Tensor, v: Tensor) -> ForwardResults:
    """The results where there is no pair of a query and a key: rows that see nothing, and no lists."""
    (B, H, Q, _), wide = q.shape, compute_dtype(q.dtype)
    normaliser = torch.full((B, H, Q), torch.inf, dtype=wide, device=q.device)
    support = torch.zeros((B, H, Q), dtype=torch.int32, device=q.device)
    return ForwardResults(Results(q.new_zeros((B, H, Q, v.shape[3])), normaliser, support, support == 0), None)


def kernel_results(
    q: Tensor, k: Tensor, v: Tensor, alpha: Tensor, number: float | None, options: Options, listed: bool, with_aux: bool
) -> ForwardResults:  # fmt: skip
    """The results by the kernels."""
    from gossamer.entmax.launch.forward import forward

    with uncast(q.device), torch.no_grad():
        call = kernel_call(q, k, v, alpha, number, options)
        computed = forward(call, keep_lists=listed, with_stats=with_aux)
    lam, support, certified = computed.stats
    return ForwardResults(Results(computed.out, lam, support, certified), computed.lists if listed else None)


def kernel_gradients(
    q: Tensor, k: Tensor, v: Tensor, alpha: Tensor, number: float | None, options: Options,
    lists: RowLists | None, normaliser: Tensor, wants_alpha: bool, dout: Tensor,
) -> EntmaxGradients:  # fmt: skip
    """The gradients by the kernels; where no lists are saved, these are made again."""
    from gossamer.entmax.launch.backward import backward
    from gossamer.entmax.launch.forward import again

    with uncast(q.device), torch.no_grad():
        call = kernel_call(q, k, v, alpha, number, options)
        computed = backward(
            call, again(call) if lists is None else lists, normaliser, readable(dout.to(q.dtype)), wants_alpha
        )
    return computed._replace(dalpha=None if computed.dalpha is None else computed.dalpha.to(alpha.dtype))


def gradients(
    q: Tensor, k: Tensor, v: Tensor, alpha: Tensor, number: float | None, options: Options,
    saved: PairLists | RowLists | None, normaliser: Tensor | None, wants_alpha: bool, dout: Tensor,
) -> EntmaxGradients:  # fmt: skip
    """The gradients, from lists of supports or from the normalisers (B, H, Q): one of both is given."""
    if 0 in q.shape or 0 in k.shape:
        return EntmaxGradients(*(torch.zeros(x.shape, dtype=x.dtype, device=x.device) for x in (q, k, v, alpha)))
    if not isinstance(saved, PairLists) and (saved is not None or by_kernels(q, k, v, number, options)):
        assert normaliser is not None
        return kernel_gradients(q, k, v, alpha, number, options, saved, normaliser, wants_alpha, dout)
    with uncast(q.device):
        o = operands_of(q, k, v, alpha, options)
        dout = dout.to(o.q.dtype).reshape(-1, dout.shape[3])
        if isinstance(saved, PairLists):
            dq, dk, dv, dalpha = list_gradients(o, saved, dout, wants_alpha)
        else:
            assert normaliser is not None
            dq, dk, dv, dalpha = normaliser_gradients(o, normaliser.reshape(-1), dout, wants_alpha)
    scale = q.shape[3] ** -0.5 if options.scale is None else float(options.scale)
    return EntmaxGradients(
        (dq * scale).view(q.shape).to(q.dtype), dk.view(k.shape).to(k.dtype), dv.view(v.shape).to(v.dtype),
        None if dalpha is None else dalpha.to(alpha.dtype),
    )  # fmt: skip


class EntmaxAttention(torch.autograd.Function):
    """Saves q, k, v, alpha, and the supports or the normalisers; double backward is refused."""

    @staticmethod
    def forward(
        ctx: Any, q: Tensor, k: Tensor, v: Tensor, alpha: Tensor, number: float | None, options: Options,
        listed: bool, with_aux: bool,
    ) -> tuple[Tensor, ...]:  # fmt: skip
        row_results, lists = results(q, k, v, alpha, number, options, listed, with_aux)
        saved_lists = () if lists is None else tuple(lists)
        # Lists of torch hold every row; of kernels, a row without one is computed by its normaliser.
        normaliser = None if isinstance(lists, PairLists) else row_results.normaliser
        # Saved with the others, what says which keys a row may see must not be written to before the backward.
        ctx.save_for_backward(q, k, v, alpha, normaliser, *options.tensors, *saved_lists)
        ctx.options, ctx.number, ctx.kind = options.over(None, None), number, type(lists)
        ctx.mark_non_differentiable(row_results.normaliser, row_results.support, row_results.certified)
        ctx.set_materialize_grads(False)
        return tuple(row_results)

    @staticmethod
    def backward(ctx: Any, dout: Tensor | None, *constant: None) -> tuple[Tensor | None, ...]:
        if dout is None:
            return (None,) * 8
        q, k, v, alpha, normaliser, *rest = ctx.saved_tensors
        lists: PairLists | RowLists | None = None
        if ctx.kind is not type(None):
            *rest, first, second, third = rest
            lists = ctx.kind(first, second, third)
        compute = partial(
            gradients, q, k, v, alpha, ctx.number, ctx.options.over(*rest), lists, normaliser, ctx.needs_input_grad[3]
        )
        if torch.is_grad_enabled():  # create_graph
            return (*_Gradients.apply(compute, dout, q, k, v, alpha), None, None, None, None)
        return (*compute(dout), None, None, None, None)


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
