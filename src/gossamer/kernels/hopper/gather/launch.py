"""From tensors and a gather layout to kernel calls: forward and backward of one call."""

from __future__ import annotations

from collections.abc import Callable
from typing import Any, NamedTuple
from weakref import WeakKeyDictionary

import torch
from torch import Tensor

from gossamer.kernels.contract import Problem, Terms
from gossamer.kernels.devices import elsewhere, processors
from gossamer.kernels.hopper import compile as compiled
from gossamer.kernels.hopper.gather.config import ROWS, GatherConfig, gather_config
from gossamer.kernels.hopper.gather.schedule import column_work, row_work
from gossamer.kernels.hopper.launch import (
    aligned,
    empty,
    empty_like,
    factors,
    lengths_of,
    operand,
    readable,
    score_of,
    tickets,
    unused,
    without_keys,
)
from gossamer.kernels.hopper.launch_backward import TERMS, Gradients, completed, gradient_factors, gradient_score
from gossamer.kernels.hopper.schedule import sharing
from gossamer.layouts.gather import GatherLayout, GatherWalk


class Prepared(NamedTuple):
    """What the calls of one walk, of the same sizes and kind of score, have in common."""

    run: Callable[..., None]
    arrays: tuple[Any, ...]  # items and lists, in the form that costs least to pass
    items: int
    blocks: int
    size: int  # of heads, padded
    join: Callable[..., None] | None  # of the parts of lists that were cut
    merges: Tensor
    slots: int

    def parts(self, like: Tensor, *last: int) -> Tensor:
        """Float32 parts (slots, 64, *last); of one slot, never read, where no list is cut."""
        if not self.slots:
            return unused(like.device, 1, ROWS, *last)
        return like.new_empty((self.slots, ROWS, *last), dtype=torch.float32)


_prepared: WeakKeyDictionary[GatherWalk, dict[Any, Prepared]] = WeakKeyDictionary()


def prepared(
    p: Problem, layout: GatherLayout, direction: str, score: str, lengths: bool, split: int | None,
    config: GatherConfig | None = None,
) -> Prepared:  # fmt: skip
    """Compiled kernels and items of one direction; made once and kept as long as the walk."""
    kept = _prepared.setdefault(layout.columns if direction == "columns" else layout.rows, {})
    key = (direction, p.dtype, p.B, p.H, p.G, p.D, p.E, score, lengths, split, config)
    return kept.get(key) or kept.setdefault(key, _prepare(p, layout, direction, score, lengths, split, config))


def _prepare(
    p: Problem, layout: GatherLayout, direction: str, score: str, lengths: bool, split: int | None,
    config: GatherConfig | None,
) -> Prepared:  # fmt: skip
    from tvm_ffi import from_dlpack

    config = config or gather_config(direction, p.dtype, p.D, p.E, score, lengths)
    walk: Any = layout.columns if direction == "columns" else layout.rows
    copies, heads = sharing(p.G if direction == "columns" else p.H, p.B, walk)
    blocks = config.blocks * processors(walk.indices.device)
    if direction == "columns":
        plan: Any = column_work(layout, copies, heads, p.H // p.G, blocks, split)
        of_items = [plan.items, plan.segments]
    else:
        plan = row_work(layout, copies, heads, blocks, split)
        of_items = [plan.items]
    join = None
    if plan.slots:
        make = compiled.merge if direction == "forward" else compiled.sum_parts
        join = make(p.dtype, config.size, ROWS)
    # A kernel argument needs an address.
    indices = walk.indices if walk.indices.numel() else walk.indices.new_full((ROWS,), -1)
    bits = walk.bits if walk.bits.numel() else walk.bits.new_zeros((2, ROWS))
    return Prepared(
        compiled.gather(config), tuple(from_dlpack(x) for x in (*of_items, indices, bits)), plan.items.shape[0],
        min(blocks, plan.items.shape[0]), config.size, join, plan.merges, plan.slots,
    )  # fmt: skip


def forward(
    problem: Problem,
    q: Tensor,
    k: Tensor,
    v: Tensor,
    layout: GatherLayout,
    terms: Terms,
    *,
    split: int | None = None,
    into: tuple[Tensor, Tensor] | None = None,
    config: GatherConfig | None = None,
) -> tuple[Tensor, Tensor]:
    """(out, lse).

    Args:
        split: replaces the automatic split of long lists, in steps of 64 columns.
        into: (out (B, H, Q, E), lse (B, H, Q) float32) that receive the results, of any strides; an out that TMA cannot
            address is written by a copy.
    """
    if elsewhere(q):
        with torch.cuda.device(q.device):
            return forward(problem, q, k, v, layout, terms, split=split, into=into, config=config)
    if into is not None and not readable(into[0]):
        out, _ = forward(problem, q, k, v, layout, terms, split=split, into=(empty(q, into[0].shape), into[1]))
        into[0].copy_(out)
        return into
    p, device = problem, q.device
    if into is None:
        out = empty_like(q) if p.E == p.D else empty(q, (p.B, p.H, p.Q, p.E))
        lse = q.new_empty((p.B, p.H, p.Q), dtype=torch.float32)
    else:
        out, lse = into
    if not lse.numel():
        return out, lse
    if not p.K:
        return without_keys(out, lse, terms)
    score = score_of(terms)
    call = prepared(p, layout, "forward", score, terms.key_lengths is not None, split, config)
    sinks = unused(device, 1) if terms.sink_logits is None else aligned(terms.sink_logits.float())
    has_sinks = int(terms.sink_logits is not None)
    part_out, part_lse = call.parts(q, call.size), call.parts(q)
    call.run(
        operand(q), operand(k), operand(v), out, lse, *call.arrays, sinks, part_out, part_lse,
        lengths_of(terms, device), tickets(device), *factors(terms, score), call.items, has_sinks, call.blocks,
    )  # fmt: skip
    if call.join is not None:
        call.join(out, lse, part_out, part_lse, call.merges, sinks, has_sinks)
    return (out, lse) if into is not None else (out.contiguous(), lse)


def backward(
    problem: Problem,
    dout: Tensor,
    dlse: Tensor | None,
    q: Tensor,
    k: Tensor,
    v: Tensor,
    out: Tensor,
    lse: Tensor,
    layout: GatherLayout,
    terms: Terms,
    *,
    split: int | None = None,
    into: Gradients | None = None,
) -> tuple[Tensor, Tensor, Tensor, Tensor | None]:
    """(dq, dk, dv, dsink_logits or None); `split` and `into` as for the forward."""
    if elsewhere(q):
        with torch.cuda.device(q.device):
            return backward(problem, dout, dlse, q, k, v, out, lse, layout, terms, split=split, into=into)
    p = problem

    def write(dout: Tensor, q: Tensor, k: Tensor, v: Tensor, out: Tensor, results: Gradients) -> Tensor:
        dq, dk, dv = results
        rows = row_terms_of(p, dout, dlse, out, lse)
        key_gradients(p, q, k, v, dout, rows, layout, terms, dk, dv, split)
        query_gradient(p, q, k, v, dout, rows, layout, terms, dq, split)
        return rows

    return completed(p, dout, dlse, q, k, v, out, lse, terms, into, write)


def row_terms_of(p: Problem, dout: Tensor, dlse: Tensor | None, out: Tensor, lse: Tensor) -> Tensor:
    """(2, B, H, padded Q) float32: lse in base 2, and delta."""
    size = gather_config("query", p.dtype, p.D, p.E, "fold").size
    rows = out.new_empty((2, p.B, p.H, -(-p.Q // TERMS) * TERMS), dtype=torch.float32)
    sums = unused(out.device, 1, 1, 1, ROWS * size)  # that this kernel zeroes for others
    compiled.preprocess(p.dtype, size, 0)(
        out, dout, lse, lse if dlse is None else dlse, rows, sums, int(dlse is not None)
    )
    return rows


def query_gradient(
    p: Problem, q: Tensor, k: Tensor, v: Tensor, dout: Tensor, rows: Tensor, layout: GatherLayout, terms: Terms,
    dq: Tensor, split: int | None = None, config: GatherConfig | None = None,
) -> None:  # fmt: skip
    """Write dq, a tensor that TMA can address; `rows` are the row terms."""
    call = prepared(p, layout, "query", gradient_score(terms), terms.key_lengths is not None, split, config)
    part = call.parts(q, call.size)
    call.run(
        q, k, v, dout, rows, dq, *call.arrays, part, lengths_of(terms, q.device), tickets(q.device),
        *gradient_factors(terms), call.items, call.blocks,
    )  # fmt: skip
    if call.join is not None:
        call.join(dq, part, call.merges, terms.scale)


def key_gradients(
    p: Problem, q: Tensor, k: Tensor, v: Tensor, dout: Tensor, rows: Tensor, layout: GatherLayout, terms: Terms,
    dk: Tensor, dv: Tensor, split: int | None = None, config: GatherConfig | None = None,
) -> None:  # fmt: skip
    """Write dk and dv, tensors that TMA can address; `rows` are the row terms."""
    call = prepared(p, layout, "columns", gradient_score(terms), terms.key_lengths is not None, split, config)
    part_dk, part_dv = call.parts(q, call.size), call.parts(q, call.size)
    call.run(
        q, k, v, dout, rows, dk, dv, *call.arrays, part_dk, part_dv, lengths_of(terms, q.device), tickets(q.device),
        *gradient_factors(terms), call.items, call.blocks,
    )  # fmt: skip
    if call.join is not None:
        for result, part, factor in ((dk, part_dk, terms.scale), (dv, part_dv, 1.0)):
            call.join(result, part, call.merges, factor)
