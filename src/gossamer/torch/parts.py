"""A call computed as several over strided views of its tensors: residue classes, and heads of different patterns.

The views share memory with the tensors of the call, and kernels write into views of its results: nothing is copied or
permuted. Where two parts meet in a row, their results are merged by log-sum-exp; every part's backward reads the
joint out and lse, which makes its gradients shares of the exact ones, and these are added.
"""

from __future__ import annotations

from collections.abc import Iterator
from dataclasses import replace
from typing import Any, NamedTuple

import torch
from torch import Tensor

from gossamer.kernels.contract import Implementation, Terms
from gossamer.kernels.rows import compute_dtype, row_terms, sink_gradient
from gossamer.patterns import LongNet
from gossamer.plan.plan import Plan
from gossamer.plan.split import Part, Split, problem_of_fold, split_of
from gossamer.plan.table import available
from gossamer.torch.plan import placed, plan_for, terms_of
from gossamer.torch.registry import pattern_of
from gossamer.torch.validate import Arguments


def split_for(plan: Plan, terms: Terms, handle: int) -> Split | None:
    """The parts of a call, or None where it is computed as one."""
    if handle < 0:
        return None
    return plan.split(handle, terms.q_offset)


class Call(NamedTuple):
    """One part of a call, for one batch element or for all."""

    part: Part
    b: int | None  # of the call's batch elements; None: all of them
    arguments: Arguments
    plan: Plan
    terms: Terms
    implementation: Implementation
    where: Any

    def rows(self, x: Tensor) -> Tensor:
        """The view of q, out, dout or dq (B, H, Q, size), or of lse (B, H, Q)."""
        return _query_view(x, self.part, self.b)

    def keys(self, x: Tensor) -> Tensor:
        """The view of k, v or their gradients (B, G, K, size)."""
        return _key_view(x, self.part, self.b)


def calls(split: Split, a: Arguments, q_offset: int, backward: bool, sinks: bool = True) -> Iterator[Call]:
    """The calls of a split, in order.

    Args:
        sinks: whether a part that computes rows first gets the sinks of its heads: the forward's do.
    """
    for part in split.parts:
        for piece, b in _passes(part, a):
            arguments = _arguments(piece, b, a, q_offset, sinks and not part.joins)
            plan = plan_for(arguments, [])
            plan = plan.gradient if backward else plan
            terms = terms_of(arguments)
            implementation, where = placed(plan, arguments, terms, piece.pattern.handle, [], [])
            yield Call(piece, b, arguments, plan, terms, implementation, where)


def _passes(part: Part, a: Arguments) -> Iterator[tuple[Part, int | None]]:
    """The calls of a part: one, unless both batch elements and classes are many. Then the fewer pass one by one.

    So do the classes of a diagonal with terms by head: each class has heads of its own.
    """
    B, classes, h = a.q.shape[0], part.run.classes, part.heads
    own_terms = part.diagonal and not (a.sink_logits is None and a.alibi_slopes is None)
    if classes == 1:
        yield part, None
    elif classes >= B and not own_terms:
        for b in range(B):
            yield part, b
    else:
        for n in range(classes):
            heads = h._replace(start=h.start + n * part.diagonal, key_start=h.key_start + n * part.key_diagonal)
            yield replace(part, heads=heads, run=part.run.cut(n, n + 1)), None


def _view(
    x: Tensor, part: Part, b: int | None, heads: tuple[int, int, int], shift: bool, first: int, count: int
) -> Tensor:
    """(classes, heads, count, ...) of one batch element, or (B, heads, count, ...) of all of them for one class."""
    batch, head, row, *last = x.stride()
    start, many, step = heads
    offset = x.storage_offset() + start * head + first * row
    if b is None:
        size, lead = x.shape[0], batch
    else:
        size, lead = part.run.classes, row + (head if shift else 0)
        offset += b * batch
    return x.as_strided((size, many, count, *x.shape[3:]), (lead, step * head, part.dilation * row, *last), offset)


def _query_view(x: Tensor, part: Part, b: int | None) -> Tensor:
    h, run = part.heads, part.run
    return _view(x, part, b, (h.start, h.number, h.step), part.diagonal, run.row, run.Q)


def _key_view(x: Tensor, part: Part, b: int | None) -> Tensor:
    h, run = part.heads, part.run
    return _view(x, part, b, (h.key_start, h.key_number, h.key_step), part.key_diagonal, run.first, run.K)


def _arguments(part: Part, b: int | None, a: Arguments, q_offset: int, sinks: bool) -> Arguments:
    h, run, d = part.heads, part.run, part.dilation

    def of_heads(x: Tensor | None) -> Tensor | None:
        if x is None:
            return None
        assert not part.diagonal or run.classes == 1, "a class of a diagonal has heads of its own"
        return x[h.start : h.start + h.number * h.step : h.step]

    lengths = a.key_lengths
    if lengths is not None:
        lengths = lengths if b is None else lengths[b : b + 1]
        if d > 1:  # of L keys a class has those at first, first + d, ... below L: ceil((L - first) / d)
            first = torch.arange(run.first, run.first + run.classes, device=lengths.device, dtype=torch.int32)
            lengths = (lengths if lengths.itemsize > 4 else lengths.int()).clamp(0, a.k.shape[2])
            lengths = torch.div(first - lengths, d, rounding_mode="floor").neg_()
    slopes = of_heads(a.alibi_slopes)
    return a._replace(
        q=_query_view(a.q, part, b),
        k=_key_view(a.k, part, b),
        v=_key_view(a.v, part, b),
        q_offset=q_offset if d == 1 else run.q_offset,
        q_offset_tensor=None,
        key_lengths=lengths,
        sink_logits=of_heads(a.sink_logits) if sinks else None,
        alibi_slopes=slopes if slopes is None or d == 1 else slopes * d,
    )


def folded(split: Split, a: Arguments, plan: Plan, terms: Terms, handle: int) -> tuple[Split, Arguments]:
    """The split and arguments with the batch elements seen as heads, where all lie at one stride; else as they are.

    Then the classes of every batch element are one call.
    """
    B, pattern, inputs = a.q.shape[0], pattern_of(handle), (a.q, a.k, a.v)
    if B == 1 or a.key_lengths is not None or pattern.lead != (1, 1) or isinstance(pattern, LongNet):
        return split, a  # a head of LongNet has its own class, a batch element has not
    if any(x.stride(0) != x.shape[1] * x.stride(1) for x in inputs):
        return split, a
    found = split_of(pattern, problem_of_fold(plan.problem), terms.q_offset, plan.tiles, plan.gathers)
    if found is None:
        return split, a
    q, k, v = (x.as_strided((1, B * x.shape[1], *x.shape[2:]), x.stride()) for x in inputs)
    sinks, slopes = (None if x is None else x.repeat(B) for x in (a.sink_logits, a.alibi_slopes))
    return found, a._replace(q=q, k=k, v=v, sink_logits=sinks, alibi_slopes=slopes)


def forward(split: Split, plan: Plan, a: Arguments, terms: Terms, handle: int) -> tuple[Tensor, Tensor]:
    """(out (B, H, Q, E), lse (B, H, Q)), contiguous."""
    shape, dtype = a.q.shape[:3], compute_dtype(a.q.dtype)
    split, a = folded(split, a, plan, terms, handle)
    out = _rows(a.q, (*a.q.shape[:3], a.v.shape[3]), _sum_dtype(a, plan, split.depth))
    lse = torch.empty(a.q.shape[:3], dtype=dtype, device=a.q.device)
    if split.rows_left:
        out.zero_()
        lse.copy_(lse.new_full((), -torch.inf) if a.sink_logits is None else a.sink_logits[:, None])
    for call in calls(split, a, terms.q_offset, backward=False):
        x, more = call.arguments, call.part.joins > 0
        wanted = call.rows(out), call.rows(lse)
        into = _room(wanted[0], call, more), torch.empty_like(wanted[1]) if more else wanted[1]
        call.implementation.forward(call.plan.problem, x.q, x.k, x.v, call.where, call.terms, into=into)
        if more:
            _merge(*wanted, *into)
        elif into[0] is not wanted[0]:
            wanted[0].copy_(into[0])
    return out.to(a.q.dtype).contiguous().view(*shape, -1), lse.view(shape)


def backward(
    split: Split,
    plan: Plan,
    a: Arguments,
    terms: Terms,
    handle: int,
    dout: Tensor,
    dlse: Tensor | None,
    out: Tensor,
    lse: Tensor,
) -> tuple[Tensor, Tensor, Tensor, Tensor | None]:
    """(dq, dk, dv, dsink_logits or None), contiguous."""
    inputs = (a.q, a.k, a.v)
    dsink = _sink_gradient(dout, dlse, out, lse, terms)
    split, a = folded(split, a, plan, terms, handle)
    if a.q is not inputs[0]:
        lead = a.q.shape[:3]
        dout, out, lse = dout.reshape(*lead, -1), out.reshape(*lead, -1), lse.reshape(lead)
        dlse = None if dlse is None else dlse.reshape(lead)
    dq = _rows(a.q, a.q.shape, _sum_dtype(a, plan, split.depth))
    dk, dv = (_rows(x, x.shape, _sum_dtype(a, plan, split.key_depth)) for x in (a.k, a.v))
    for x, left in ((dq, split.rows_left), (dk, split.keys_left), (dv, split.keys_left)):
        if left:
            x.zero_()
    for call in calls(split, a, terms.q_offset, backward=True, sinks=False):
        given, adds = call.arguments, call.part.adds
        wanted, more = (call.rows(dq), call.keys(dk), call.keys(dv)), (call.part.joins > 0, adds, adds)
        into = _room(wanted[0], call, more[0]), _room(wanted[1], call, adds), _room(wanted[2], call, adds)
        call.implementation.backward(
            call.plan.problem, call.rows(dout), None if dlse is None else call.rows(dlse), given.q, given.k, given.v,
            call.rows(out), call.rows(lse), call.where, call.terms, into=into,
        )  # fmt: skip
        for place, found, add in zip(wanted, into, more, strict=True):
            if add:
                place.add_(found)
            elif found is not place:
                place.copy_(found)
    dq, dk, dv = (g.to(x.dtype).contiguous().view(x.shape) for g, x in zip((dq, dk, dv), inputs, strict=True))
    return dq, dk, dv, dsink


def _sum_dtype(a: Arguments, plan: Plan, depth: int) -> torch.dtype:
    """In what the results of `depth` parts are joined: float32, unless two that come in 16 bits are all there is."""
    rounded = not plan.implementations[0].capability.float32_results
    return a.q.dtype if depth == 1 or (depth == 2 and rounded) else compute_dtype(a.q.dtype)


def _rows(like: Tensor, shape: Any, dtype: torch.dtype) -> Tensor:
    """An uninitialised tensor whose rows are padded to 16 bytes, as wide stores need them."""
    step = 16 // dtype.itemsize
    x = torch.empty((*shape[:-1], -(-shape[-1] // step) * step), dtype=dtype, device=like.device)
    return x if x.shape[-1] == shape[-1] else x[..., : shape[-1]]


def _room(wanted: Tensor, call: Call, more: bool) -> Tensor:
    """Where a kernel writes: the result itself, or a tensor to be merged with it or to be copied."""
    dtype = call.arguments.q.dtype
    wide = wanted.dtype != dtype
    able = call.implementation.capability.float32_results
    if not more and (not wide or able):
        return wanted
    return _rows(wanted, wanted.shape, wanted.dtype if able else dtype)


def _merge(out: Tensor, lse: Tensor, part_out: Tensor, part_lse: Tensor) -> None:
    """Join the results of another part into out and lse, in place."""
    if out.is_cuda and out.dtype != torch.float64 and not available("triton"):
        from gossamer.kernels.triton.join import join

        join(out, lse, part_out, part_lse)
        return
    # Of two weights near 0 and 1, neither is made of the other: it would lose its digits. Without keys both are NaN.
    weight, rest = (torch.sigmoid(x).nan_to_num_(0.0)[..., None] for x in (part_lse - lse, lse - part_lse))
    out.mul_(rest.to(out.dtype)).addcmul_(part_out.to(out.dtype), weight.to(out.dtype))
    torch.logaddexp(lse, part_lse, out=lse)


def _sink_gradient(dout: Tensor, dlse: Tensor | None, out: Tensor, lse: Tensor, terms: Terms) -> Tensor | None:
    """Of the whole call, head by head: the product of dout and out is as large as they are."""
    sinks = terms.sink_logits
    if sinks is None:
        return None
    found = []
    for h in range(len(sinks)):
        mine = slice(h, h + 1)
        shares = None if dlse is None else dlse[:, mine]
        delta, full = row_terms(dout[:, mine], shares, out[:, mine], lse[:, mine], lse.dtype)
        found.append(sink_gradient(delta, full, replace(terms, sink_logits=sinks[mine])))
    return torch.cat([x for x in found if x is not None])
