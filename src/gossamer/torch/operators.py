"""The operators `gossamer::forward` and `gossamer::backward`: opaque to a compiler, with fakes and a gradient.

The gradient is an own autograd function on the Autograd key, which costs a third of what `register_autograd` costs a
call; where nothing could want to see an operator, `attention` goes through none at all: see `plain`. What is attended
enters either as tensors (a layout or a mask: data, which may change from call to call) or as the handle of a pattern,
whose layout is looked up in here, by the sizes of the call.
"""

from __future__ import annotations

from collections.abc import Callable
from functools import partial
from typing import Any, NoReturn

import torch
from torch import _C, Tensor
from torch.autograd import forward_ad

from gossamer.kernels.rows import compute_dtype
from gossamer.patterns.handles import token_of
from gossamer.plan.plan import Plan
from gossamer.plan.problem import Unsupported
from gossamer.torch import parts
from gossamer.torch.plan import check_rows, placed, plan_for, terms_of
from gossamer.torch.validate import Arguments, validate

_OPTIONS = (
    "Tensor[] layout, int[] geometry, SymInt pattern, SymInt? q_offset, Tensor? q_offset_tensor, Tensor? key_lengths, "
    "Tensor? sink_logits, Tensor? alibi_slopes, float? scale, float? softcap, str? implementation, "
    "bool deterministic, bool backward"
)

library = torch.library.Library("gossamer", "DEF")
library.define(f"forward(Tensor q, Tensor k, Tensor v, {_OPTIONS}) -> (Tensor out, Tensor lse)")
library.define(
    f"backward(Tensor? dout, Tensor? dlse, Tensor q, Tensor k, Tensor v, Tensor out, Tensor lse, {_OPTIONS})"
    " -> (Tensor dq, Tensor dk, Tensor dv, Tensor dsink_logits)"
)


def compute(plan: Plan, a: Arguments, layout: list[Tensor], geometry: list[int], pattern: int) -> tuple[Tensor, Tensor]:
    """(out, lse) of a call whose plan is known."""
    terms = terms_of(a)
    check_rows(plan.problem, terms, pattern)
    split = parts.split_for(plan, terms, pattern)
    if split is not None:
        return parts.forward(split, plan, a, terms, pattern)
    implementation, where = placed(plan, a, terms, pattern, layout, geometry)
    out, lse = implementation.forward(plan.problem, a.q, a.k, a.v, where, terms)
    return out.contiguous(), lse  # as the fake says; rows of an odd size may come padded


def compute_gradients(
    plan: Plan,
    dout: Tensor | None,
    dlse: Tensor | None,
    a: Arguments,
    out: Tensor,
    lse: Tensor,
    layout: list[Tensor],
    geometry: list[int],
    pattern: int,
) -> tuple[Tensor, Tensor, Tensor, Tensor | None]:
    """(dq, dk, dv, dsink_logits or None); `plan` is that of the backward."""
    terms = terms_of(a)
    dout = torch.zeros_like(out) if dout is None else dout
    split = parts.split_for(plan, terms, pattern)
    if split is not None:
        return parts.backward(split, plan, a, terms, pattern, dout, dlse, out, lse)
    implementation, where = placed(plan, a, terms, pattern, layout, geometry)
    return implementation.backward(plan.problem, dout, dlse, a.q, a.k, a.v, out, lse, where, terms)


def _forward(
    q: Tensor, k: Tensor, v: Tensor, layout: list[Tensor], geometry: list[int], pattern: int, *options: Any
) -> tuple[Tensor, Tensor]:
    a = Arguments(q, k, v, *options)
    return compute(plan_for(a, geometry), a, layout, geometry, pattern)


def _backward(
    dout: Tensor | None,
    dlse: Tensor | None,
    q: Tensor,
    k: Tensor,
    v: Tensor,
    out: Tensor,
    lse: Tensor,
    layout: list[Tensor],
    geometry: list[int],
    pattern: int,
    *options: Any,
) -> tuple[Tensor, Tensor, Tensor, Tensor]:
    a = Arguments(q, k, v, *options)
    plan = plan_for(a, geometry).gradient
    dq, dk, dv, dsink = compute_gradients(plan, dout, dlse, a, out, lse, layout, geometry, pattern)
    return dq, dk, dv, q.new_empty(0) if dsink is None else dsink


def _forward_fake(q: Tensor, k: Tensor, v: Tensor, *rest: Any) -> tuple[Tensor, Tensor]:
    validate(Arguments(q, k, v, *rest[3:]))
    shape = q.shape[:3]
    return q.new_empty((*shape, v.shape[3])), q.new_empty(shape, dtype=compute_dtype(q.dtype))


def _backward_fake(
    dout: Tensor | None, dlse: Tensor | None, q: Tensor, k: Tensor, v: Tensor, out: Tensor, lse: Tensor, *rest: Any
) -> tuple[Tensor, Tensor, Tensor, Tensor]:
    sink = Arguments(q, k, v, *rest[3:]).sink_logits
    dsink = q.new_empty(0) if sink is None else sink.new_empty(sink.shape)
    return q.new_empty(q.shape), k.new_empty(k.shape), v.new_empty(v.shape), dsink


_forward_op = torch.ops.gossamer.forward.default
backward_op = torch.ops.gossamer.backward.default
_PLAIN = frozenset({Tensor, torch.nn.Parameter})
# Looked up once: these are asked for in every call.
_wrapped, _interpreter = _C._functorch.is_functorch_wrapped_tensor, _C._functorch.peek_interpreter_stack
_dispatch_modes, _function_modes = _C._len_torch_dispatch_stack, _C._len_torch_function_stack
_traced, _autocast_enabled, _profiled = (
    _C._get_tracing_state,
    _C._is_any_autocast_enabled,
    torch.autograd._profiler_enabled,
)


def plain(*tensors: Tensor | None) -> bool:
    """Whether these are plain tensors, computed eagerly, and no mode, transform, tracer or profiler is active.

    Crossing the dispatcher costs more than all else that a repeated call does on the host.
    """
    for x in tensors:  # a negative view's memory is not what it stands for; the dispatcher resolves it
        if x is not None and (type(x) not in _PLAIN or x.is_meta or x.is_nested or x.is_neg() or _wrapped(x)):
            return False
    return not (
        _dispatch_modes()
        or _function_modes()
        or _interpreter() is not None
        or _traced() is not None
        or _autocast_enabled()
        or _profiled()
        or forward_ad._current_level >= 0
    )


def _gradients(ctx: Any, dout: Tensor | None, dlse: Tensor | None) -> tuple[Tensor | None, ...]:
    """What `_Attention.backward` returns."""
    q, k, v, out, lse, sink_logits, key_lengths, alibi_slopes, q_offset_tensor, *layout = ctx.saved_tensors
    plan, geometry, pattern, q_offset, rest = ctx.static
    a = Arguments(q, k, v, q_offset, q_offset_tensor, key_lengths, sink_logits, alibi_slopes, *rest)
    if plain(dout, dlse, q, k, v):
        plan = plan or plan_for(a, geometry)
        dq, dk, dv, dsink = compute_gradients(plan.gradient, dout, dlse, a, out, lse, layout, geometry, pattern)
    else:
        dq, dk, dv, dsink = backward_op(dout, dlse, q, k, v, out, lse, layout, geometry, pattern, *a[3:])
    return dq, dk, dv, None if sink_logits is None else dsink, None


class Gradients(torch.autograd.Function):
    """The gradients where a graph of them is asked for; it leads to the inputs, so that its use raises, not gives 0."""

    @staticmethod
    def forward(ctx: Any, compute: Any, dout: Tensor | None, dlse: Tensor | None, *inputs: Tensor | None) -> Any:
        return compute(dout, dlse)

    @staticmethod
    def backward(ctx: Any, *gradients: Tensor | None) -> NoReturn:
        raise Unsupported("attention can be differentiated once: its gradients have no gradient (double backward)")


class _Attention(torch.autograd.Function):
    """Saves what the backward operator reads; lse is differentiable, double backward is not."""

    @staticmethod
    def forward(
        ctx: Any, q: Tensor, k: Tensor, v: Tensor, sink_logits: Tensor | None, call: tuple[Any, ...]
    ) -> tuple[Tensor, Tensor]:
        eager, a, layout, geometry, pattern = call
        plan = None
        if eager:
            plan = plan_for(a, geometry)
            out, lse = compute(plan, a, layout, geometry, pattern)
        else:
            with _C._AutoDispatchBelowAutograd():
                out, lse = _forward_op(q, k, v, layout, geometry, pattern, *a[3:])
        ctx.save_for_backward(q, k, v, out, lse, sink_logits, a.key_lengths, a.alibi_slopes, a.q_offset_tensor, *layout)
        ctx.static = plan, geometry, pattern, a.q_offset, a[8:]
        # The handle must live until the backward. A compiled graph that takes it as a number leaves that to its caller.
        ctx.token = token_of(pattern) if isinstance(pattern, int) and pattern >= 0 else None
        ctx.set_materialize_grads(False)
        return out, lse

    @staticmethod
    def backward(ctx: Any, dout: Tensor | None, dlse: Tensor | None) -> Any:
        if not torch.is_grad_enabled():
            return _gradients(ctx, dout, dlse)
        q, k, v, _, _, sink_logits, *_ = ctx.saved_tensors  # create_graph
        return Gradients.apply(partial(_gradients, ctx), dout, dlse, q, k, v, sink_logits)


# `Function.apply` without its search for functorch's tensors, of which `plain` has found none.
_apply_plain = super(torch.autograd.Function, _Attention).apply


def differentiable(q: Tensor, k: Tensor, v: Tensor, sink_logits: Tensor | None) -> bool:
    """Whether a call needs a gradient."""
    return torch.is_grad_enabled() and (
        q.requires_grad or k.requires_grad or v.requires_grad or (sink_logits is not None and sink_logits.requires_grad)
    )


def eager(a: Arguments, layout: list[Tensor], geometry: list[int], pattern: int) -> tuple[Tensor, Tensor]:
    """(out, lse) of a `plain` call, past the dispatcher; with the gradient where `a.backward` asks for it."""
    if a.backward:
        return _apply_plain(a.q, a.k, a.v, a.sink_logits, (True, a, layout, geometry, pattern))
    with _C._AutoDispatchBelowAutograd():
        return compute(plan_for(a, geometry), a, layout, geometry, pattern)


def _forward_autograd(
    q: Tensor, k: Tensor, v: Tensor, layout: list[Tensor], geometry: list[int], pattern: int, *options: Any
) -> tuple[Tensor, Tensor]:
    """The operator on the Autograd key: with the gradient where one is needed."""
    a = Arguments(q, k, v, *options)
    if a.alibi_slopes is not None and a.alibi_slopes.requires_grad:  # inside torch.func the operator sees a plain one
        raise Unsupported("alibi_slopes must be a constant; no gradient is computed for it")
    if forward_ad._current_level >= 0:
        for x in (q, k, v, a.sink_logits, a.alibi_slopes):
            if x is not None and forward_ad.unpack_dual(x).tangent is not None:
                raise Unsupported("attention has no forward-mode derivative (jvp); backward() and autograd.grad work")
    if differentiable(q, k, v, a.sink_logits):
        if _C._are_functorch_transforms_active():
            raise Unsupported("attention has no derivative inside torch.func; backward() and autograd.grad work")
        call = False, a._replace(backward=True), layout, geometry, pattern
        return _Attention.apply(q, k, v, a.sink_logits, call)
    with _C._AutoDispatchBelowAutograd():
        return _forward_op(q, k, v, layout, geometry, pattern, *options)


def _batched(*args: Any) -> NoReturn:
    raise Unsupported("attention cannot be mapped by torch.func.vmap; give it the mapped dimension as batch elements")


def _autocast(device: str, key: _C.DispatchKey) -> Callable[..., tuple[Tensor, Tensor]]:
    """Under autocast q, k and v take its dtype, as for scaled_dot_product_attention; float64 stays."""
    keys = _C.DispatchKeySet(key)

    def cast_and_call(q: Tensor, k: Tensor, v: Tensor, *rest: Any) -> tuple[Tensor, Tensor]:
        dtype = torch.get_autocast_dtype(device)
        with _C._ExcludeDispatchKeyGuard(keys):
            q, k, v = (x.to(dtype) if x.is_floating_point() and x.dtype != torch.float64 else x for x in (q, k, v))
            return _forward_op(q, k, v, *rest)

    return cast_and_call


library.impl("forward", _forward, "CompositeExplicitAutograd")
library.impl("backward", _backward, "CompositeExplicitAutograd")
library.impl("forward", _forward_autograd, "Autograd")
library.impl("forward", _batched, "FuncTorchBatched")
library.impl("backward", _batched, "FuncTorchBatched")
library.impl("forward", _autocast("cpu", _C.DispatchKey.AutocastCPU), "AutocastCPU")
library.impl("forward", _autocast("cuda", _C.DispatchKey.AutocastCUDA), "AutocastCUDA")
torch.library.register_fake("gossamer::forward", _forward_fake, lib=library)
torch.library.register_fake("gossamer::backward", _backward_fake, lib=library)
