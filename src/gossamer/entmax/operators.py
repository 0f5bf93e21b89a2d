"""The operators that a compiled function sees: opaque, of fixed shapes, with a gradient that streams the scores again.

A mask or a layout enters as tensors and a pattern as its handle, as for `attention`.
"""

from __future__ import annotations

from typing import Any

import torch
from torch import Tensor

from gossamer.entmax.arguments import Given, check
from gossamer.entmax.calls import EntmaxCall
from gossamer.entmax.options import Options
from gossamer.entmax.topk import TopkCall
from gossamer.kernels.row_formulas import compute_dtype
from gossamer.torch.arguments import Arguments
from gossamer.torch.operators import library
from gossamer.torch.request import Request, ResolvedPattern

_OPTIONS = (
    "Tensor[] layout, SymInt[] geometry, SymInt pattern, Tensor? q_positions, Tensor? k_positions, "
    "int? top_k, bool causal, float? scale, str? implementation"
)

_REST = f"Tensor alpha, {_OPTIONS}"

library.define(
    f"entmax_forward(Tensor q, Tensor k, Tensor v, {_REST})"
    " -> (Tensor out, Tensor normaliser, Tensor support, Tensor certified)"
)
library.define(
    f"entmax_backward(Tensor dout, Tensor normaliser, Tensor q, Tensor k, Tensor v, {_REST})"
    " -> (Tensor dq, Tensor dk, Tensor dv, Tensor dalpha)"
)
library.define(f"topk_keys(Tensor q, Tensor k, {_OPTIONS}) -> Tensor")


def rest_of(call: Given) -> tuple[Any, ...]:
    """The arguments of an operator behind q, k and v."""
    t, *more = call.options
    return call.alpha, list(t.data), list(t.geometry), t.handle, *more


def _options(layout: list[Tensor], geometry: list[int], pattern: int, *more: Any) -> Options:
    return Options(ResolvedPattern(pattern, tuple(layout), tuple(geometry)), *more)


def _check(call: Given) -> None:
    q, k, v, _, options, *_ = call
    arguments = Arguments(
        q, k, v, None, None, None, None, None, options.scale, None, None, deterministic=False, backward=False
    )
    check(Request(arguments, options.attended), call)


def _topk(q: Tensor, k: Tensor, *rest: Any) -> Tensor:
    options = _options(*rest)
    call = Given(q, k, k, q.new_ones(q.shape[1]), options, 4, 1.0)
    _check(call)
    return TopkCall(call, None)(q, k, *options.tensors)


def _topk_fake(
    q: Tensor, k: Tensor, layout: Any, geometry: Any, pattern: Any, q_positions: Any, k_positions: Any, top_k: int,
    *rest: Any,
) -> Tensor:  # fmt: skip
    return q.new_empty((*q.shape[:3], top_k), dtype=torch.int32)


def _forward(q: Tensor, k: Tensor, v: Tensor, alpha: Tensor, *rest: Any) -> tuple[Tensor, ...]:
    options = _options(*rest)
    call = Given(q, k, v, alpha, options, 4)
    _check(call)
    out, told = EntmaxCall(call, None, False, True).forward(q, k, v, alpha, *options.tensors).results
    assert told is not None
    return out, *told


def _backward(
    dout: Tensor, normaliser: Tensor, q: Tensor, k: Tensor, v: Tensor, alpha: Tensor, *rest: Any
) -> tuple[Tensor | None, ...]:
    options = _options(*rest)
    call = EntmaxCall(Given(q, k, v, alpha, options, 4), None, False, True)
    return tuple(call.gradients(q, k, v, alpha, options.tensors, None, normaliser, True, dout))


def _forward_fake(q: Tensor, k: Tensor, v: Tensor, alpha: Tensor, *rest: Any) -> tuple[Tensor, ...]:
    rows = q.shape[:3]
    return (
        q.new_empty((*rows, v.shape[3])), q.new_empty(rows, dtype=compute_dtype(q.dtype)),
        q.new_empty(rows, dtype=torch.int32), q.new_empty(rows, dtype=torch.bool),
    )  # fmt: skip


def _backward_fake(
    dout: Tensor, normaliser: Tensor, q: Tensor, k: Tensor, v: Tensor, alpha: Tensor, *rest: Any
) -> tuple[Tensor, ...]:
    return tuple(x.new_empty(x.shape) for x in (q, k, v, alpha))


def _setup(ctx: Any, inputs: tuple[Any, ...], output: tuple[Tensor, ...]) -> None:
    q, k, v, alpha, layout, geometry, pattern, q_positions, k_positions, *more = inputs
    _, normaliser, *_ = output
    ctx.save_for_backward(normaliser, q, k, v, alpha, q_positions, k_positions, *layout)
    ctx.rest = geometry, pattern, more


def _differentiate(ctx: Any, dout: Tensor | None, *constant: Tensor | None) -> tuple[Any, ...]:
    normaliser, q, k, v, alpha, q_positions, k_positions, *layout = ctx.saved_tensors
    geometry, pattern, more = ctx.rest
    if dout is None:
        dout = q.new_zeros((*q.shape[:3], v.shape[3]))
    backward = torch.ops.gossamer.entmax_backward.default
    gradients = backward(dout, normaliser, q, k, v, alpha, layout, geometry, pattern, q_positions, k_positions, *more)
    # torch takes an empty list for one of tensors, whose gradient is a list.
    return *gradients, [None] * len(layout), None if geometry else [], None, None, None, *(None for _ in more)


library.impl("entmax_forward", _forward, "CompositeExplicitAutograd")
library.impl("entmax_backward", _backward, "CompositeExplicitAutograd")
library.impl("topk_keys", _topk, "CompositeExplicitAutograd")
torch.library.register_fake("gossamer::entmax_forward", _forward_fake, lib=library)
torch.library.register_fake("gossamer::entmax_backward", _backward_fake, lib=library)
torch.library.register_fake("gossamer::topk_keys", _topk_fake, lib=library)
torch.library.register_autograd("gossamer::entmax_forward", _differentiate, setup_context=_setup, lib=library)

entmax_forward = torch.ops.gossamer.entmax_forward.default
topk_op = torch.ops.gossamer.topk_keys.default
