"""The operators `gossamer::forward` and `gossamer::backward`: opaque to a compiler, with fakes and a gradient.

The gradient is an own autograd function on the Autograd key, which costs a third of what `register_autograd` costs a
call; where nothing could want to see an operator, `attention` goes through none at all: see `key.plain`. What is
attended enters either as tensors (a layout or a mask: data, which may change from call to call) or as the handle of a
pattern. Both directions look up the same calls as `attention` does.
"""

from __future__ import annotations

from collections.abc import Callable, Sequence
from typing import Any, NamedTuple, NoReturn

import torch
from torch import _C, Tensor
from torch.autograd import forward_ad

from gossamer.kernels.row_formulas import compute_dtype
from gossamer.patterns.handles import token_of
from gossamer.plan.problem import Unsupported
from gossamer.torch.arguments import Arguments, options_of, validate
from gossamer.torch.calls import Attention, call_of, gradients_by_operator, read_q_offset, vectors_and_data
from gossamer.torch.key import differentiable
from gossamer.torch.request import Request, ResolvedPattern

_OPTIONS = (
    "Tensor[] layout, SymInt[] geometry, SymInt pattern, SymInt? q_offset, Tensor? q_offset_tensor, "
    "Tensor? key_lengths, Tensor? sink_logits, Tensor? alibi_slopes, float? scale, float? softcap, "
    "str? implementation, bool deterministic, bool backward, bool bshd, bool counted=False, bool made=False, "
    "str? alibi_distance=None"
)

library = torch.library.Library("gossamer", "DEF")
library.define(f"forward(Tensor q, Tensor k, Tensor v, {_OPTIONS}) -> (Tensor out, Tensor lse)")
library.define(
    f"backward(Tensor? dout, Tensor? dlse, Tensor q, Tensor k, Tensor v, Tensor out, Tensor lse, {_OPTIONS})"
    " -> (Tensor dq, Tensor dk, Tensor dv, Tensor dsink_logits)"
)


def _forward(
    q: Tensor, k: Tensor, v: Tensor, layout: list[Tensor], geometry: list[int], pattern: int, *options: Any
) -> tuple[Tensor, ...]:
    request = read_q_offset(
        Request(Arguments(q, k, v, *options), ResolvedPattern(pattern, tuple(layout), tuple(geometry)))
    )
    return call_of(request).forward(q, k, v, *request.more)


def _backward(
    dout: Tensor | None, dlse: Tensor | None, q: Tensor, k: Tensor, v: Tensor, out: Tensor, lse: Tensor,
    layout: list[Tensor], geometry: list[int], pattern: int, *options: Any,
) -> tuple[Tensor, ...]:  # fmt: skip
    request = read_q_offset(
        Request(Arguments(q, k, v, *options), ResolvedPattern(pattern, tuple(layout), tuple(geometry)))
    )
    dout = torch.zeros_like(out) if dout is None else dout
    dq, dk, dv, *dsink = call_of(request).backward(dout, dlse, q, k, v, out, lse, *request.more)
    return dq, dk, dv, *(dsink or (q.new_empty(0),))


def _forward_fake(
    q: Tensor, k: Tensor, v: Tensor, layout: list[Tensor], geometry: list[int], pattern: int, *options: Any
) -> tuple[Tensor, Tensor]:
    a = Arguments(q, k, v, *options)
    validate(a)
    shape = q.shape[:3]
    out = _new_result(q, (*shape, v.shape[3]), a.bshd)
    return out, q.new_empty(shape, dtype=compute_dtype(q.dtype))


def _backward_fake(
    dout: Tensor | None, dlse: Tensor | None, q: Tensor, k: Tensor, v: Tensor, out: Tensor, lse: Tensor,
    layout: list[Tensor], geometry: list[int], pattern: int, *options: Any,
) -> tuple[Tensor, Tensor, Tensor, Tensor]:  # fmt: skip
    a = Arguments(q, k, v, *options)
    sink = a.sink_logits
    dsink = q.new_empty(0) if sink is None else sink.new_empty(sink.shape)
    dq, dk, dv = (_new_result(x, x.shape, a.bshd) for x in (q, k, v))
    return dq, dk, dv, dsink


def _new_result(like: Tensor, shape: Sequence[int], bshd: bool) -> Tensor:
    """A fake result (B, heads, positions, size), which lies in that order or as (B, positions, heads, size)."""
    B, heads, N, size = shape
    return like.new_empty((B, N, heads, size)).transpose(1, 2) if bshd else like.new_empty(shape)


forward_op = torch.ops.gossamer.forward.default


class _OperatorCall(NamedTuple):
    """A call whose both directions are operators, for whoever looks at them."""

    arguments: Arguments
    attended: ResolvedPattern

    def forward(self, q: Tensor, k: Tensor, v: Tensor, *more: Tensor | None) -> tuple[Tensor, ...]:
        """(out, lse)."""
        a, t = self
        with _C._AutoDispatchBelowAutograd():
            return forward_op(q, k, v, list(t.data), list(t.geometry), t.handle, *options_of(a))

    def gradients(self, saved: tuple[Tensor, ...], dout: Tensor | None, dlse: Tensor | None) -> tuple[Any, ...]:
        """(dq, dk, dv), and dsink_logits where there are sinks."""
        q, k, v, out, lse, *more = saved
        vectors, (q_offset, *data) = vectors_and_data(more)
        a = self.arguments._replace(q=q, k=k, v=v, q_offset_tensor=q_offset, **vectors._asdict())
        dout = torch.zeros_like(out) if dout is None else dout
        return gradients_by_operator(a, self.attended._replace(data=tuple(data)), dout, dlse, out, lse)


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
        # The handle must live until the backward. A compiled graph that takes it as a number leaves that to its caller.
        alive = token_of(pattern) if isinstance(pattern, int) and pattern >= 0 else None
        call = _OperatorCall(a._replace(backward=True), ResolvedPattern(pattern, tuple(layout), tuple(geometry), alive))
        offset = None if a.q_offset_tensor is None else a.q_offset_tensor.clone()  # as lengths are: see `Attention`
        return Attention.apply(call, q, k, v, a.key_lengths, a.sink_logits, a.alibi_slopes, offset, *layout)
    with _C._AutoDispatchBelowAutograd():
        return forward_op(q, k, v, layout, geometry, pattern, *options)


def _batched(*args: Any) -> NoReturn:
    raise Unsupported("attention cannot be mapped by torch.func.vmap; give it the mapped dimension as batch elements")


def _autocast(device: str, key: _C.DispatchKey) -> Callable[..., tuple[Tensor, Tensor]]:
    """Under autocast q, k and v take its dtype, as for scaled_dot_product_attention; float64 stays."""
    keys = _C.DispatchKeySet(key)

    def cast_and_call(q: Tensor, k: Tensor, v: Tensor, *rest: Any) -> tuple[Tensor, Tensor]:
        dtype = torch.get_autocast_dtype(device)
        with _C._ExcludeDispatchKeyGuard(keys):
            q, k, v = (x.to(dtype) if x.is_floating_point() and x.dtype != torch.float64 else x for x in (q, k, v))
            return forward_op(q, k, v, *rest)

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
