"""Calls of a kind that was computed before: nothing is checked, planned or looked up again but the kind.

A kind is what `kind_of` tells apart: shapes, strides, types, devices, the pattern and the options. One is kept once a
call of it has succeeded, so all that was checked then holds for the next; whatever has no kind goes the whole way.
"""

from __future__ import annotations

from collections.abc import Callable
from functools import partial
from typing import Any, NamedTuple

import torch
from torch import _C, Tensor
from torch.cuda import is_current_stream_capturing

from gossamer.kernels.contract import Binding
from gossamer.kernels.rows import compute_dtype
from gossamer.layouts.kept import KEPT_BYTES, LEAST_KEPT, MOST_KEPT, Kept
from gossamer.patterns import Pattern
from gossamer.patterns.handles import token_of
from gossamer.plan.plan import Plan
from gossamer.torch.bound_parts import bound_parts, bound_parts_backward
from gossamer.torch.operators import Gradients, backward_op, compute, compute_gradients, differentiable, plain
from gossamer.torch.parts import split_for
from gossamer.torch.plan import held, hold_for_graphs, placed, plan_for, terms_of
from gossamer.torch.validate import Arguments, fewer, four_dimensional

_SIMPLE = frozenset({type(None), bool, int, float, str})

_calls: Kept[Call | Fewer] = Kept(LEAST_KEPT, MOST_KEPT, KEPT_BYTES)


def kind_of(
    q: Any, k: Any, v: Any, pattern: Any, deterministic: bool, options: tuple[Any, ...] = (),
    tensors: tuple[Any, ...] = (),
) -> tuple[Any, ...] | None:  # fmt: skip
    """What tells kinds of calls apart; None for a call that has no kind.

    Args:
        options: numbers, names and None; a call with others, tensors for example, has no kind.
        tensors: key_lengths, sink_logits and alibi_slopes, of which some may be None; or nothing.
    """
    if not isinstance(pattern, Pattern) or q is None or k is None or v is None or not plain(q, k, v):
        return None
    if not q.layout is k.layout is v.layout is torch.strided:
        return None
    for option in options:
        if type(option) not in _SIMPLE:
            return None
    sinks: Any = None
    more: tuple[Any, ...] = ()
    if tensors:
        told = _vectors(tensors, compute_dtype(q.dtype))
        if told is None:
            return None
        sinks, more = tensors[1], (told,)
    return (
        pattern.handle, q.shape, k.shape, v.shape, q.stride(), k.stride(), v.stride(), q.dtype, k.dtype, v.dtype,
        q.device, k.device, v.device, differentiable(q, k, v, sinks), _aligned(q, k, v), deterministic, *options,
        *map(type, options), *more,
    )  # fmt: skip


def _aligned(q: Tensor, k: Tensor, v: Tensor) -> bool:
    """Whether tensors begin at multiples of 16 bytes, for which kernels are compiled."""
    return not (q.data_ptr() | k.data_ptr() | v.data_ptr()) % 16


def _vectors(tensors: tuple[Any, ...], wide: torch.dtype) -> tuple[Any, ...] | None:
    """What tells lengths, sinks and slopes apart; None unless all are plain, contiguous and at multiples of 16.

    Sinks and slopes of another type than `wide` are no kind: `attention` converts them, and looks again.
    """
    found: list[Any] = []
    for x in tensors:
        if x is None:
            found.append(None)
            continue
        if not isinstance(x, Tensor) or not plain(x) or x.layout != torch.strided:
            return None
        if x.is_floating_point() and x.dtype is not wide:
            return None
        if not x.is_contiguous() or x.data_ptr() % 16:
            return None
        found.append((x.shape, x.dtype, x.device, x.requires_grad))
    return tuple(found)


def known(kind: tuple[Any, ...] | None) -> Call | Fewer | None:
    """What a call of this kind does, if there was one."""
    return _calls.get(kind) if kind is not None else None


def remember(kind: tuple[Any, ...], a: Arguments, pattern: int, dims: int) -> None:
    """Keep what calls of a kind do; one of them, with the arguments `a`, has succeeded. `dims` are those of its q."""
    call = Call(plan_for(a, []), a, pattern)
    _calls.put(kind, call if dims == 4 else Fewer(call, dims), call.bytes)


def keep(kind: tuple[Any, ...], call: Any) -> Any:
    """Keep a call that was bound elsewhere, and holds nothing of its own."""
    return _calls.put(kind, call)


def forget() -> None:
    """Forget every call."""
    _calls.clear()


class Call:
    """What every call of a kind does: bound functions where the implementations have them, else the general ones.

    `tensors` below are key_lengths, sink_logits and alibi_slopes, or nothing where calls of the kind have none.
    """

    __slots__ = (
        "_alive",
        "_backward",
        "_bindable",
        "_forward",
        "bytes",
        "differentiable",
        "options",
        "pattern",
        "plan",
    )

    def __init__(self, plan: Plan, a: Arguments, pattern: int) -> None:
        # A pattern that is made again for each call keeps its handle, and so its kind.
        self._alive = token_of(pattern)
        self.plan, self.pattern, self.differentiable = plan, pattern, a.backward
        self.options = a.q_offset, a[8:]
        self._backward: Callable[..., tuple[Tensor, ...]] | None = None
        self._forward, self.bytes = self._bound(plan, a, lambda i, where, terms: i.bound_forward(
            plan.problem, a.q, a.k, a.v, where, terms
        ), lambda split, terms: bound_parts(split, plan, a, terms, pattern))  # fmt: skip
        self._bindable = a.backward

    def __call__(self, q: Tensor, k: Tensor, v: Tensor, pattern: Any, *tensors: Tensor | None) -> tuple[Tensor, Tensor]:
        """(out, lse); with the gradient where calls of the kind have one. `pattern` is that of the kind."""
        if q.is_cuda and is_current_stream_capturing():
            hold_for_graphs(self)
        if self.differentiable:
            if tensors:
                return _apply_terms(q, k, v, *tensors, (self, pattern))
            return _apply(q, k, v, (self, pattern))
        if self._forward is not None:
            return self._forward(q, k, v, *tensors)
        with _C._AutoDispatchBelowAutograd():
            return self.forward(q, k, v, *tensors)

    def arguments(self, q: Tensor, k: Tensor, v: Tensor, tensors: tuple[Tensor | None, ...]) -> Arguments:
        """Those of a call of the kind."""
        offset, rest = self.options
        lengths, sinks, slopes = tensors or (None, None, None)
        return Arguments(q, k, v, offset, None, lengths, sinks, slopes, *rest)

    def forward(self, q: Tensor, k: Tensor, v: Tensor, *tensors: Tensor | None) -> tuple[Tensor, Tensor]:
        """(out, lse), without a gradient."""
        if self._forward is not None:
            return self._forward(q, k, v, *tensors)
        return compute(self.plan, self.arguments(q, k, v, tensors), [], [], self.pattern)

    def gradients(self, saved: tuple[Tensor, ...], dout: Tensor | None, dlse: Tensor | None) -> tuple[Any, ...]:
        """(dq, dk, dv, dsink_logits or None); the last one may be left out. `saved` are q, k, v, out, lse, tensors."""
        q, k, v, out, lse, *tensors = saved
        if not plain(dout, dlse, q, k, v, *tensors):
            a = self.arguments(q, k, v, tuple(tensors))
            return backward_op(dout, dlse, q, k, v, out, lse, [], [], self.pattern, *a[3:])
        if self._backward is not None and dout is not None:
            return self._backward(dout, dlse, q, k, v, out, lse, *tensors)
        a, plan = self.arguments(q, k, v, tuple(tensors)), self.plan.gradient
        found = compute_gradients(plan, dout, dlse, a, out, lse, [], [], self.pattern)
        if self._bindable and dout is not None:  # the first time: what it needed has been compiled
            self._bindable = False
            self._backward, _ = self._bound(plan, a, lambda i, where, terms: i.bound_backward(
                plan.problem, dout, q, k, v, out, lse, where, terms
            ), lambda split, terms: bound_parts_backward(
                split, plan, a, terms, self.pattern, dout, out, lse
            ))  # fmt: skip
        return found

    def _bound(
        self, plan: Plan, a: Arguments, bind: Callable[[Binding, Any, Any], Any],
        bind_parts: Callable[[Any, Any], tuple[Any, int]],
    ) -> tuple[Any, int]:  # fmt: skip
        """What `bind` makes of the implementation of a call, its layout and its terms, and the bytes of the layout.

        None of it where the implementation has no such thing, or has no memory for it.
        `bind_parts` makes it of a call that is computed in parts.
        """
        terms = terms_of(a)
        if not _aligned(a.q, a.k, a.v):
            return None, 0
        split = split_for(plan, terms, self.pattern)
        try:
            if split is not None:
                return bind_parts(split, terms)
            implementation, where = placed(plan, a, terms, self.pattern, [], [])
            return bind(implementation, where, terms) if isinstance(implementation, Binding) else None, held(where)
        except torch.OutOfMemoryError:  # it may take as much as the results; the call itself has succeeded
            return None, 0


class Fewer(NamedTuple):
    """A call whose q, k and v have two or three dimensions."""

    call: Call
    dims: int

    def __call__(self, q: Tensor, k: Tensor, v: Tensor, pattern: Any, *tensors: Tensor | None) -> tuple[Tensor, Tensor]:
        """(out, lse), with as many dimensions as q has."""
        return fewer(*self.call(*four_dimensional(q, k, v), pattern, *tensors), self.dims)


class _Known(torch.autograd.Function):
    """The gradient of a known call. lse is differentiable, double backward is not."""

    @staticmethod
    def forward(ctx: Any, q: Tensor, k: Tensor, v: Tensor, what: tuple[Call, Any]) -> tuple[Tensor, Tensor]:
        out, lse = what[0].forward(q, k, v)
        ctx.save_for_backward(q, k, v, out, lse)
        ctx.what = what  # the pattern too: its handle must live until the backward
        ctx.set_materialize_grads(False)
        return out, lse

    @staticmethod
    def backward(ctx: Any, dout: Tensor | None, dlse: Tensor | None) -> tuple[Tensor | None, ...]:
        saved = ctx.saved_tensors
        compute = ctx.what[0].gradients
        if torch.is_grad_enabled():  # create_graph
            return (*Gradients.apply(partial(compute, saved), dout, dlse, *saved[:3])[:3], None)
        return (*compute(saved, dout, dlse)[:3], None)


class _KnownTerms(torch.autograd.Function):
    """The same with key_lengths, sink_logits and alibi_slopes: each argument of a function costs, most need none."""

    @staticmethod
    def forward(
        ctx: Any, q: Tensor, k: Tensor, v: Tensor, key_lengths: Tensor | None, sink_logits: Tensor | None,
        alibi_slopes: Tensor | None, what: tuple[Call, Any],
    ) -> tuple[Tensor, Tensor]:  # fmt: skip
        tensors = key_lengths, sink_logits, alibi_slopes
        out, lse = what[0].forward(q, k, v, *tensors)
        ctx.save_for_backward(q, k, v, out, lse, *tensors)
        ctx.what = what
        ctx.set_materialize_grads(False)
        return out, lse

    @staticmethod
    def backward(ctx: Any, dout: Tensor | None, dlse: Tensor | None) -> tuple[Tensor | None, ...]:
        saved = ctx.saved_tensors
        compute, sinks = ctx.what[0].gradients, saved[6]
        if torch.is_grad_enabled():  # create_graph
            found = Gradients.apply(partial(compute, saved), dout, dlse, *saved[:3], sinks)
        else:
            found = compute(saved, dout, dlse)
        return (*found[:3], None, None if sinks is None else found[3], None, None)


# `Function.apply` without its search for functorch's tensors, of which `plain` has found none.
_apply = super(torch.autograd.Function, _Known).apply
_apply_terms = super(torch.autograd.Function, _KnownTerms).apply
