"""The operators of `sparsek_attention`: opaque to a compiler, of fixed shapes, with a gradient."""

from __future__ import annotations

from typing import Any

import torch
from torch import Tensor

from gossamer.kernels.row_formulas import compute_dtype
from gossamer.plan.problem import Unsupported
from gossamer.sparse_k.launch import implementations as launch
from gossamer.sparse_k.launch.problem import Gate, Operands, Options
from gossamer.torch.operators import library
from gossamer.torch.transforms import uncast

_OPERANDS = "Tensor q, Tensor k, Tensor v, Tensor u, Tensor tau, Tensor last, Tensor last_gated"
_OPTIONS = "int window, str? gate, bool causal, float scale, bool straight, int live, bool certain, str? implementation"

library.define(f"sparse_k_forward({_OPERANDS}, {_OPTIONS}) -> (Tensor out, Tensor lse)")
library.define(
    f"sparse_k_backward(Tensor dout, Tensor? dlse, Tensor out, Tensor lse, {_OPERANDS}, {_OPTIONS})"
    " -> (Tensor dq, Tensor dk, Tensor dv, Tensor du, Tensor dtau)"
)


def _forward(
    q: Tensor, k: Tensor, v: Tensor, u: Tensor, tau: Tensor, last: Tensor, last_gated: Tensor, window: int,
    gate: Gate | None, causal: bool, scale: float, straight: bool, live: int, certain: bool, implementation: str | None,
) -> tuple[Tensor, Tensor]:  # fmt: skip
    x, o = Operands(q, k, v, u, tau, last, last_gated), Options(window, gate, causal, scale, straight, live, certain)
    if 0 in q.shape:
        return empty(x)
    with uncast(q.device), torch.cuda.device_of(q):
        return launch.implementation(implementation, x, o).forward(x, o)


def _backward(
    dout: Tensor, dlse: Tensor | None, out: Tensor, lse: Tensor, q: Tensor, k: Tensor, v: Tensor, u: Tensor,
    tau: Tensor, last: Tensor, last_gated: Tensor, window: int, gate: Gate | None, causal: bool, scale: float,
    straight: bool, live: int, certain: bool, implementation: str | None,
) -> tuple[Tensor, Tensor, Tensor, Tensor, Tensor]:  # fmt: skip
    x, o = Operands(q, k, v, u, tau, last, last_gated), Options(window, gate, causal, scale, straight, live, certain)
    if 0 in q.shape:
        return q.new_zeros(q.shape), k.new_zeros(k.shape), v.new_zeros(v.shape), u.new_zeros(u.shape), tau * 0
    with uncast(q.device), torch.cuda.device_of(q):
        g = launch.implementation(implementation, x, o).backward(dout, dlse, out, lse, x, o)
    return g.q, g.k, g.v, g.u, g.tau


def empty(x: Operands) -> tuple[Tensor, Tensor]:
    """(out, lse) of tensors without elements: of the rows that there are each has a key, its own."""
    (*rows, _), E = x.q.shape, x.v.shape[3]
    return x.q.new_zeros((*rows, E)), x.q.new_zeros(rows, dtype=compute_dtype(x.q.dtype))


def _forward_fake(q: Tensor, k: Tensor, v: Tensor, u: Tensor, *rest: Any) -> tuple[Tensor, Tensor]:
    return q.new_empty((*q.shape[:3], v.shape[3])), q.new_empty(q.shape[:3], dtype=compute_dtype(q.dtype))


def _backward_fake(
    dout: Tensor, dlse: Tensor | None, out: Tensor, lse: Tensor, q: Tensor, k: Tensor, v: Tensor, u: Tensor,
    tau: Tensor, *rest: Any,
) -> tuple[Tensor, ...]:  # fmt: skip
    return tuple(x.new_empty(x.shape) for x in (q, k, v, u, tau))


def _setup(ctx: Any, inputs: tuple[Any, ...], output: tuple[Tensor, Tensor]) -> None:
    q, k, v, u, tau, last, last_gated, *more = inputs
    ctx.save_for_backward(q, k, v, u, tau, last, last_gated, *output)
    ctx.more = more
    ctx.set_materialize_grads(False)


def _differentiate(ctx: Any, dout: Tensor | None, dlse: Tensor | None) -> tuple[Any, ...]:
    if torch.is_grad_enabled():
        raise Unsupported("sparsek_attention has no second derivative; backward() and autograd.grad work")
    *operands, out, lse = ctx.saved_tensors
    dout = torch.zeros_like(out) if dout is None else dout
    gradients = torch.ops.gossamer.sparse_k_backward.default(dout, dlse, out, lse, *operands, *ctx.more)
    return *gradients, None, None, *(None for _ in ctx.more)


library.impl("sparse_k_forward", _forward, "CompositeExplicitAutograd")
library.impl("sparse_k_backward", _backward, "CompositeExplicitAutograd")
torch.library.register_fake("gossamer::sparse_k_forward", _forward_fake, lib=library)
torch.library.register_fake("gossamer::sparse_k_backward", _backward_fake, lib=library)
torch.library.register_autograd("gossamer::sparse_k_forward", _differentiate, setup_context=_setup, lib=library)

sparse_k_forward = torch.ops.gossamer.sparse_k_forward.default
