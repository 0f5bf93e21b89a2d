"""Calls of a kind that was computed before: nothing is checked, planned or looked up again but the kind.

A kind is what `kind_of` tells apart: shapes, strides, types, devices, the pattern and the options. One is kept once a
call of it has succeeded, so all that was checked then holds for the next; whatever has no kind goes the whole way.
"""

from __future__ import annotations

import threading
from collections import OrderedDict
from collections.abc import Callable
from functools import partial
from typing import Any

import torch
from torch import _C, Tensor

from gossamer.kernels.contract import Binding
from gossamer.patterns import Pattern
from gossamer.torch.operators import Gradients, backward_op, compute, compute_gradients, differentiable, plain
from gossamer.torch.parts import split_for
from gossamer.torch.plan import Plan, placed, plan_for, terms_of
from gossamer.torch.validate import Arguments

KEPT_CALLS = 64
_SIMPLE = frozenset({type(None), bool, int, float, str})

_calls: OrderedDict[tuple[Any, ...], Call] = OrderedDict()
_lock = threading.Lock()


def kind_of(
    q: Any, k: Any, v: Any, pattern: Any, deterministic: bool, options: tuple[Any, ...] = ()
) -> tuple[Any, ...] | None:
    """What tells kinds of calls apart; None for a call that has no kind.

    Args:
        options: numbers, names and None; a call with others, tensors for example, has no kind.
    """
    if not isinstance(pattern, Pattern) or q is None or k is None or v is None or not plain(q, k, v):
        return None
    if not q.layout is k.layout is v.layout is torch.strided:
        return None
    for option in options:
        if type(option) not in _SIMPLE:
            return None
    return (
        pattern.handle, q.shape, k.shape, v.shape, q.stride(), k.stride(), v.stride(), q.dtype, k.dtype, v.dtype,
        q.device, k.device, v.device, differentiable(q, k, v, None), _aligned(q, k, v), deterministic, *options,
        *map(type, options),
    )  # fmt: skip


def _aligned(q: Tensor, k: Tensor, v: Tensor) -> bool:
    """Whether tensors begin at multiples of 16 bytes, for which kernels are compiled."""
    return not (q.data_ptr() | k.data_ptr() | v.data_ptr()) % 16


def known(kind: tuple[Any, ...] | None) -> Call | None:
    """What a call of this kind does, if there was one."""
    return _calls.get(kind) if kind is not None else None


def remember(kind: tuple[Any, ...], a: Arguments, pattern: int) -> None:
    """Keep what calls of a kind do; one of them, with the arguments `a`, has succeeded."""
    call = Call(plan_for(a, []), a, pattern)
    with _lock:
        _calls[kind] = call
        while len(_calls) > KEPT_CALLS:
            _calls.popitem(last=False)


def forget() -> None:
    """Forget every call."""
    with _lock:
        _calls.clear()


class Call:
    """What every call of a kind does: bound functions where the implementations have them, else the general ones."""

    __slots__ = ("_backward", "_bindable", "_forward", "differentiable", "pattern", "plan", "rest")

    def __init__(self, plan: Plan, a: Arguments, pattern: int) -> None:
        self.plan, self.rest, self.pattern, self.differentiable = plan, a[3:], pattern, a.backward
        self._backward: Callable[..., tuple[Tensor, Tensor, Tensor]] | None = None
        self._forward = _bound(plan, a, pattern, lambda i, where, terms: i.bound_forward(
            plan.problem, a.q, a.k, a.v, where, terms
        ))  # fmt: skip
        self._bindable = a.backward

    def __call__(self, q: Tensor, k: Tensor, v: Tensor, pattern: Any) -> tuple[Tensor, Tensor]:
        """(out, lse); with the gradient where calls of the kind have one. `pattern` is that of the kind."""
        if self.differentiable:
            return _apply(q, k, v, (self, pattern))
        if self._forward is not None:
            return self._forward(q, k, v)
        with _C._AutoDispatchBelowAutograd():
            return self.forward(q, k, v)

    def forward(self, q: Tensor, k: Tensor, v: Tensor) -> tuple[Tensor, Tensor]:
        """(out, lse), without a gradient."""
        if self._forward is not None:
            return self._forward(q, k, v)
        return compute(self.plan, Arguments(q, k, v, *self.rest), [], [], self.pattern)

    def gradients(self, saved: tuple[Tensor, ...], dout: Tensor | None, dlse: Tensor | None) -> tuple[Tensor, ...]:
        """(dq, dk, dv). `saved` are q, k, v, out and lse."""
        q, k, v, out, lse = saved
        if not plain(dout, dlse, q, k, v):
            found = backward_op(dout, dlse, q, k, v, out, lse, [], [], self.pattern, *self.rest)
            return found[:3]
        if self._backward is not None and dout is not None:
            return self._backward(dout, dlse, q, k, v, out, lse)
        a, plan = Arguments(q, k, v, *self.rest), self.plan.gradient
        found = compute_gradients(plan, dout, dlse, a, out, lse, [], [], self.pattern)
        if self._bindable and dout is not None:  # the first time: what it needed has been compiled
            self._bindable = False
            self._backward = _bound(plan, a, self.pattern, lambda i, where, terms: i.bound_backward(
                plan.problem, dout, q, k, v, out, lse, where, terms
            ))  # fmt: skip
        return found[:3]


def _bound(plan: Plan, a: Arguments, pattern: int, bind: Callable[[Binding, Any, Any], Any]) -> Any:
    """What `bind` makes of the implementation of a call, its layout and its terms; None where it has no such thing."""
    terms = terms_of(a)
    if not _aligned(a.q, a.k, a.v) or split_for(plan, terms, pattern) is not None:
        return None
    implementation, where = placed(plan, a, terms, pattern, [], [])
    try:
        return bind(implementation, where, terms) if isinstance(implementation, Binding) else None
    except torch.OutOfMemoryError:  # it may take as much as the results; the call itself has succeeded
        return None


class _Known(torch.autograd.Function):
    """The gradient of a known call. lse is differentiable, double backward is not."""

    @staticmethod
    def forward(ctx, q, k, v, what):
        out, lse = what[0].forward(q, k, v)
        ctx.save_for_backward(q, k, v, out, lse)
        ctx.what = what  # the pattern too: its handle must live until the backward
        ctx.set_materialize_grads(False)
        return out, lse

    @staticmethod
    def backward(ctx, dout, dlse):
        saved = ctx.saved_tensors
        compute = ctx.what[0].gradients
        if torch.is_grad_enabled():  # create_graph
            return (*Gradients.apply(partial(compute, saved), dout, dlse, *saved[:3]), None)
        return (*compute(saved, dout, dlse), None)


# `Function.apply` without its search for functorch's tensors, of which `plain` has found none.
_apply = super(torch.autograd.Function, _Known).apply
