"""Calls of `sparsek_attention` by their keys: all that is checked and chosen for a call is so once.

A repeated call that is plain and eager is one look-up and one autograd function, past torch's dispatcher.
"""

from __future__ import annotations

from typing import Any

import torch
from torch import Tensor

from gossamer.kernels.row_formulas import compute_dtype
from gossamer.memo import Memo
from gossamer.plan.problem import Unsupported
from gossamer.sparse_k.autograd import empty
from gossamer.sparse_k.launch.implementations import implementation
from gossamer.sparse_k.launch.problem import Operands, Options, SparseKGradients
from gossamer.sparse_k.selection import DIRECT, OPERATORS, Functions, SelectedKeys, Selection
from gossamer.torch.arguments import four_dimensional, unbatched
from gossamer.torch.key import SIMPLE, Key, facts, places, plain
from gossamer.torch.recording import Repeats

RECORDED = ("hopper", "triton")  # implementations whose calls are written down once: nothing but launches of kernels
MOST_BACKWARDS = 8  # kept for a call: one for each set of strides of saved tensors and gradients

known: Memo[Call] = Memo()


def key_of(tensors: tuple[Tensor, ...], options: tuple[Any, ...]) -> Key | None:
    """What tells calls apart, of tensors that are plain; None where options are no numbers of Python."""
    types = tuple(map(type, options))
    of_tensors = facts(*tensors)
    if of_tensors is None or None in of_tensors or not SIMPLE.issuperset(types):
        return None
    return *of_tensors, _differentiable(tensors), places(*tensors), *options, *types


def type_of_scores(q: Tensor, u: Tensor) -> torch.dtype:
    """The type that u - tau is computed in: the wider one of u's, whose digits count, and the call's."""
    return torch.promote_types(u.dtype, compute_dtype(q.dtype))


class Call:
    """Runs every call of one key; it keeps no tensor."""

    def __init__(self, how: Selection, options: Options, q: Tensor, k: Tensor, v: Tensor, u: Tensor, dims: int) -> None:
        """A call of tensors of four dimensions, which were given with `dims`."""
        self.how, self.options, self.dims = how, options, dims
        self.wide = type_of_scores(q, u)
        scores, steps = u.detach().to(self.wide), torch.empty(u.shape, dtype=torch.int32, device="meta")
        self.by = implementation(None, Operands(q, k, v, scores, scores, steps, steps), options)
        self.differentiable = _differentiable((q, k, v, u))
        self.records = self.by.name in RECORDED and 0 not in q.shape
        self.run = self.recorded_forward if self.records else self.forward
        self._forward, self._backwards = Repeats(), Memo[Repeats](MOST_BACKWARDS)

    def __call__(self, q: Tensor, k: Tensor, v: Tensor, u: Tensor) -> tuple[Tensor, Tensor]:
        """(out, lse), with as many dimensions as q has."""
        if self.dims != 4:
            q, k, v = four_dimensional(q, k, v)
            u = u.reshape((1,) * (3 - u.ndim) + u.shape)
        out, lse = _apply(self, q, k, v, u) if self.differentiable else self.run(q, k, v, u)[:2]
        return (out, lse) if self.dims == 4 else unbatched(out, lse, self.dims)

    def forward(self, q: Tensor, k: Tensor, v: Tensor, u: Tensor) -> tuple[Tensor, Tensor, SelectedKeys]:
        """out, lse and the keys that are kept, without a gradient."""
        with torch.cuda.device_of(q):
            kept = self.how.of(u, DIRECT)
            operands = self._operands(q, k, v, u, kept)
            out, lse = empty(operands) if 0 in q.shape else self.by.forward(operands, self.options)
        return out, lse, kept

    def recorded_forward(self, *x: Tensor) -> tuple[Tensor, Tensor, SelectedKeys]:
        """`forward` of q, k, v and u, which is written down once."""

        def make() -> tuple[Any, ...]:
            out, lse, kept = self.forward(*x)
            return out, lse, *kept

        out, lse, *kept = self._forward(make, x)
        return out, lse, SelectedKeys(*kept)

    def gradients(
        self, x: tuple[Tensor, ...], kept: SelectedKeys, out: Tensor, lse: Tensor, dout: Tensor, dlse: Tensor | None
    ) -> tuple[Tensor | None, ...]:
        """dq, dk, dv and du, of the tensors `x`: q, k, v and u."""
        q, k, v, u = x
        if 0 in q.shape or not plain(dout, dlse, *x):  # modes and tracers see it
            operator = torch.ops.gossamer.sparse_k_backward.default
            operands = self._operands(q, k, v, u, kept)
            g = SparseKGradients(*operator(dout, dlse, out, lse, *operands, *self.options, None))
            return g.q, g.k, g.v, self._of_scores(u, kept, g, OPERATORS)

        def make() -> tuple[Tensor, ...]:
            g = self.by.backward(dout, dlse, out, lse, self._operands(q, k, v, u, kept), self.options)
            return g.q, g.k, g.v, self._of_scores(u, kept, g, DIRECT)

        with torch.cuda.device_of(q):
            if not self.records:
                return make()
            given = [t for t in (dout, dlse, out, lse, *x, *kept) if t is not None]
            # Hooks on saved tensors may return them with other strides than in the forward.
            key = dlse is None, places(*given), *[t.stride() for t in given]
            return (self._backwards.get(key) or self._backwards.put(key, Repeats()))(make, given)

    def _of_scores(self, u: Tensor, kept: SelectedKeys, g: SparseKGradients, functions: Functions) -> Tensor:
        """du of gates, and of thresholds where these have a gradient."""
        du = g.u.to(u.dtype)
        if u.numel() and (self.options.gate is not None or self.options.straight):
            du = du + self.how.gradient(u, kept, g.tau.to(u.dtype), functions)
        return du

    def _operands(self, q: Tensor, k: Tensor, v: Tensor, u: Tensor, kept: SelectedKeys) -> Operands:
        return Operands(q, k, v, u.to(self.wide), kept.tau.to(self.wide), kept.last, kept.last_gated)


def _differentiable(tensors: tuple[Tensor, ...]) -> bool:
    """Whether a call needs a gradient."""
    return torch.is_grad_enabled() and any(x.requires_grad for x in tensors)


class _Attention(torch.autograd.Function):
    """The autograd function of a call."""

    @staticmethod
    def forward(ctx: Any, call: Call, *x: Tensor) -> tuple[Tensor, Tensor]:
        out, lse, kept = call.run(*x)
        ctx.save_for_backward(*x, out, lse, *kept)
        ctx.call = call
        ctx.set_materialize_grads(False)
        return out, lse

    @staticmethod
    def backward(ctx: Any, dout: Tensor | None, dlse: Tensor | None) -> tuple[Tensor | None, ...]:
        if torch.is_grad_enabled():
            raise Unsupported("sparsek_attention has no second derivative; backward() and autograd.grad work")
        q, k, v, u, out, lse, *kept = ctx.saved_tensors
        dout = torch.zeros_like(out) if dout is None else dout
        return None, *ctx.call.gradients((q, k, v, u), SelectedKeys(*kept), out, lse, dout, dlse)


# `Function.apply` without its search for functorch's tensors, of which `plain` has found none.
_apply = super(torch.autograd.Function, _Attention).apply
