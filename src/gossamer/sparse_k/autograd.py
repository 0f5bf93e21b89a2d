"""The operators of `sparsek_attention`: opaque to a compiler, of fixed shapes, with a gradient."""

from __future__ import annotations

from typing import Any

import torch
from torch import Tensor

from gossamer.kernels.row_formulas import compute_dtype
from gossamer.plan.problem import Unsupported
from gossamer.sparse_k.launch import implementations as launch
from gossamer.sparse_k.launch.problem import Operands, Options
from gossamer.torch.operators import library
from gossamer.torch.transforms import uncast

_OPERANDS = "Tensor q, Tensor k, Tensor v, Tensor u, Tensor tau, Tensor last, Tensor last_gated, Tensor? hidden"
_OPTIONS = (
    "int window, str? gate, bool causal, float scale, bool straight, int live, bool certain, int offset, "
    "str? implementation"
)

library.define(f"sparse_k_forward({_OPERANDS}, {_OPTIONS}) -> (Tensor out, Tensor lse)")
library.define(
    f"sparse_k_backward(Tensor dout, Tensor? dlse, Tensor out, Tensor lse, {_OPERANDS}, {_OPTIONS})"
    " -> (Tensor dq, Tensor dk, Tensor dv, Tensor du, Tensor dtau)"
)


def _forward(*given: Any) -> tuple[Tensor, Tensor]:
    x, o, name = _call(given)
    if 0 in x.q.shape:
        return empty(x)
    with uncast(x.q.device), torch.cuda.device_of(x.q):
        return launch.implementation(name, x, o).forward(x, o)


def _backward(
    dout: Tensor, dlse: Tensor | None, out: Tensor, lse: Tensor, *given: Any
) -> tuple[Tensor, Tensor, Tensor, Tensor, Tensor]:
    x, o, name = _call(given)
    if 0 in x.q.shape:
        q, k, v, u, tau = (torch.zeros_like(t) for t in x[:5])
        return q, k, v, u, tau
    with uncast(x.q.device), torch.cuda.device_of(x.q):
        g = launch.implementation(name, x, o).backward(dout, dlse, out, lse, x, o)
    return g.q, g.k, g.v, g.u, g.tau


def _call(given: tuple[Any, ...]) -> tuple[Operands, Options, str | None]:
    """The operands, the options and the implementation of an operator's arguments."""
    tensors = len(Operands._fields)
    return Operands(*given[:tensors]), Options(*given[tensors:-1]), given[-1]


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
    tensors = len(Operands._fields)
    ctx.save_for_backward(*inputs[:tensors], *output)
    ctx.more = inputs[tensors:]
    ctx.set_materialize_grads(False)


def _differentiate(ctx: Any, dout: Tensor | None, dlse: Tensor | None) -> tuple[Any, ...]:
    if torch.is_grad_enabled():
        raise Unsupported("sparsek_attention has no second derivative; backward() and autograd.grad work")
    *operands, out, lse = ctx.saved_tensors
    dout = torch.zeros_like(out) if dout is None else dout
    gradients = torch.ops.gossamer.sparse_k_backward.default(dout, dlse, out, lse, *operands, *ctx.more)
    return *gradients, None, None, None, *(None for _ in ctx.more)


library.impl("sparse_k_forward", _forward, "CompositeExplicitAutograd")
library.impl("sparse_k_backward", _backward, "CompositeExplicitAutograd")
torch.library.register_fake("gossamer::sparse_k_forward", _forward_fake, lib=library)
torch.library.register_fake("gossamer::sparse_k_backward", _backward_fake, lib=library)
torch.library.register_autograd("gossamer::sparse_k_forward", _differentiate, setup_context=_setup, lib=library)

sparse_k_forward = torch.ops.gossamer.sparse_k_forward.default
