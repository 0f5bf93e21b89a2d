"""Calls in parts that were computed before, bound: each part to its views and to what its implementation has bound."""

from __future__ import annotations

from collections.abc import Callable
from typing import Any

import torch
from torch import _C, Tensor

from gossamer.kernels.contract import Binding, Terms
from gossamer.kernels.devices import empty_from, template
from gossamer.kernels.rows import compute_dtype
from gossamer.plan.plan import Plan
from gossamer.plan.split import Split
from gossamer.torch.parts import backward, calls, folded
from gossamer.torch.plan import held
from gossamer.torch.validate import Arguments

# Sizes, strides, and how many elements after the first one of its base a view begins.
View = tuple[torch.Size, tuple[int, ...], int]


def bound_parts(
    split: Split, plan: Plan, a: Arguments, terms: Terms, handle: int
) -> tuple[Callable[..., tuple[Tensor, Tensor]] | None, int]:
    """((q, k, v) -> (out, lse), the bytes of its layouts); see `kernels.contract.Binding`.

    None where parts meet in a row or leave some out, where there are tensors among the terms, and where an
    implementation binds nothing.
    """
    E, given = a.v.shape[3], (a.q, a.k, a.v)
    if terms.has_tensors or split.rows_left or split.depth > 1 or E * a.q.element_size() % 16:
        return None, 0
    out_like = template(a.q, (*a.q.shape[:3], E))
    lse_like = template(a.q, a.q.shape[:3], compute_dtype(a.q.dtype))
    results = empty_from(out_like), empty_from(lse_like)
    split, a = folded(split, a, plan, terms, handle)
    if split.depth > 1 or split.rows_left:
        return None, 0
    rows = results[0].view(*a.q.shape[:3], E), results[1].view(a.q.shape[:3])
    parts: list[tuple[Any, ...]] = []
    size = 0
    for call in calls(split, a, terms.q_offset, backward=False):
        x, into = call.arguments, (call.rows(rows[0]), call.rows(rows[1]))
        inputs = (x.q, x.k, x.v)
        if not isinstance(call.implementation, Binding) or any(y.data_ptr() % 16 for y in (*inputs, into[0])):
            return None, 0
        run = call.implementation.bound_forward(call.plan.problem, *inputs, call.where, call.terms, into)
        if run is None:
            return None, 0
        views = [_seen_from(base, view) for base, view in zip((*given, *results), (*inputs, *into), strict=True)]
        parts.append((run, *views))
        size += held(call.where)

    def call_parts(q: Tensor, k: Tensor, v: Tensor) -> tuple[Tensor, Tensor]:
        with _C._AutoDispatchBelowAutograd():
            out, lse = empty_from(out_like), empty_from(lse_like)
            for run, of_q, of_k, of_v, of_out, of_lse in parts:
                run(_view(q, of_q), _view(k, of_k), _view(v, of_v), into=(_view(out, of_out), _view(lse, of_lse)))
        return out, lse

    return call_parts, size


def bound_parts_backward(
    split: Split, plan: Plan, a: Arguments, terms: Terms, handle: int, dout: Tensor, out: Tensor, lse: Tensor
) -> tuple[Callable[..., tuple[Tensor, ...]] | None, int]:  # fmt: skip
    """((dout, dlse or None, q, k, v, out, lse) -> (dq, dk, dv), the bytes of its layouts), as `bound_parts`.

    `plan` is that of the backward. None where parts add to the same gradients, too.
    """
    given = a.q, a.k, a.v, dout, out, lse
    whole, options = split, a[3:]
    sizes = a.q.shape[3], a.v.shape[3]
    if terms.has_tensors or any(size * a.q.element_size() % 16 for size in sizes) or not _contiguous(dout, out, lse):
        return None, 0
    split, a = folded(split, a, plan, terms, handle)
    if split.depth > 1 or split.key_depth > 1 or split.rows_left or split.keys_left:
        return None, 0
    likes = [template(x, x.shape) for x in given[:3]]
    # What lies as the gradients will; nothing is written here.
    results = [x if x.is_contiguous() else empty_from(like) for x, like in zip(given[:3], likes, strict=True)]
    lead = a.q.shape[:3]
    rows = dout.view(*lead, -1), out.view(*lead, -1), lse.view(lead)
    grads = [x.view(y.shape) for x, y in zip(results, (a.q, a.k, a.v), strict=True)]
    strides = tuple(x.stride() for x in given)
    parts: list[tuple[Any, ...]] = []
    size = 0
    for call in calls(split, a, terms.q_offset, backward=True, sinks=False):
        x = call.arguments
        of_rows = [call.rows(y) for y in rows]
        into = call.rows(grads[0]), call.keys(grads[1]), call.keys(grads[2])
        inputs = x.q, x.k, x.v
        if not isinstance(call.implementation, Binding) or any(
            y.data_ptr() % 16 for y in (*inputs, *of_rows[:2], *into)
        ):
            return None, 0
        run = call.implementation.bound_backward(
            call.plan.problem, of_rows[0], x.q, x.k, x.v, of_rows[1], of_rows[2], call.where, call.terms, into
        )
        if run is None:
            return None, 0
        bases = (*given, *results)
        views = [_seen_from(base, view) for base, view in zip(bases, (*inputs, *of_rows, *into), strict=True)]
        parts.append((run, *views))
        size += held(call.where)

    def call_parts(
        dout: Tensor, dlse: Tensor | None, q: Tensor, k: Tensor, v: Tensor, out: Tensor, lse: Tensor
    ) -> tuple[Tensor, ...]:
        alike = tuple([x.stride() for x in (q, k, v, dout, out, lse)]) == strides and not (
            q.data_ptr() | k.data_ptr() | v.data_ptr() | dout.data_ptr() | out.data_ptr()
        ) % 16  # fmt: skip
        if not alike or (dlse is not None and not dlse.is_contiguous()):
            return backward(whole, plan, Arguments(q, k, v, *options), terms, handle, dout, dlse, out, lse)[:3]
        dq, dk, dv = empty_from(likes[0]), empty_from(likes[1]), empty_from(likes[2])
        for run, of_q, of_k, of_v, of_dout, of_out, of_lse, of_dq, of_dk, of_dv in parts:
            run(
                _view(dout, of_dout), None if dlse is None else _view(dlse, of_lse), _view(q, of_q), _view(k, of_k),
                _view(v, of_v), _view(out, of_out), _view(lse, of_lse),
                into=(_view(dq, of_dq), _view(dk, of_dk), _view(dv, of_dv)),
            )  # fmt: skip
        return dq, dk, dv

    return call_parts, size


def _contiguous(*tensors: Tensor) -> bool:
    return all(x.is_contiguous() for x in tensors)


def _seen_from(base: Tensor, view: Tensor) -> View:
    return view.shape, view.stride(), int(view.storage_offset() - base.storage_offset())


def _view(x: Tensor, view: View) -> Tensor:
    shape, strides, first = view
    return x.as_strided(shape, strides, x.storage_offset() + first)
