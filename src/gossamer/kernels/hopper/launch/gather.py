"""From tensors and a gather layout to kernel calls: forward and backward of one call."""

from __future__ import annotations

from collections.abc import Callable
from typing import Any, NamedTuple
from weakref import WeakKeyDictionary

import torch
from torch import Tensor

from gossamer.kernels.contract import Terms
from gossamer.kernels.devices import elsewhere, empty_from, int32_lengths, processors, template
from gossamer.kernels.hopper import compiled
from gossamer.kernels.hopper.choice import gather_config
from gossamer.kernels.hopper.device.gather.configurations import ROWS, GatherConfig, SplitConfig
from gossamer.kernels.hopper.launch.backward import (
    TERMS,
    Gradients,
    completed,
    gradient_factors,
    gradient_score,
)
from gossamer.kernels.hopper.launch.forward import (
    STEP,
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
    unused_lengths,
    without_keys,
)
from gossamer.kernels.hopper.schedule.gather import column_work, row_work
from gossamer.kernels.hopper.schedule.rows import sharing
from gossamer.kernels.rows import sink_gradient_of
from gossamer.layouts.gather import GatherLayout, GatherWalk
from gossamer.plan.problem import Problem

LARGEST_ROW_STRIDE = 1 << 30  # in 16-bit numbers: bytes fit 32 bits


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
    split: bool  # K and V, into halves of float16, before they are gathered

    def halves(self, k: Tensor) -> list[Tensor]:
        """Templates of what a kernel of float32 writes first: halves of K and V, and their powers; else none."""
        if not self.split:
            return []
        both = [template(k, (*k.shape[:3], 2 * self.size), torch.float16)] * 2
        return [*both, template(k, (*k.shape[:3], 2), torch.float32)]

    def parts(self, like: Tensor, *last: int) -> Tensor:
        """Float32 parts (slots, 64, *last); of one slot, never read, where no list is cut."""
        if not self.slots:
            return unused(like.device, 1, ROWS, *last)
        return like.new_empty((self.slots, ROWS, *last), dtype=torch.float32)

    def bound_parts(self, like: Tensor, *last: int) -> Callable[[], Tensor]:
        """What makes such parts, for a call that is bound."""
        if not self.slots:
            none = unused(like.device, 1, ROWS, *last)
            return lambda: none
        shape = template(like, (self.slots, ROWS, *last), torch.float32)
        return lambda: empty_from(shape)


def gathers(x: Tensor) -> bool:
    """Whether the kernels can gather rows of a tensor where it is: 8 numbers at a time, strides in 32 bits."""
    return readable(x) and not x.shape[-1] % STEP and x.stride(2) < LARGEST_ROW_STRIDE


def gathered(x: Tensor) -> Tensor:
    """The tensor itself when the kernels can gather its rows, else a copy; what a row lacks of 8 numbers is zero."""
    if gathers(x):
        return x
    columns = x.shape[-1]
    return x.new_zeros((*x.shape[:-1], -(-columns // STEP) * STEP))[..., :columns].copy_(x)


_prepared: WeakKeyDictionary[GatherWalk, dict[Any, Prepared]] = WeakKeyDictionary()


def prepared(
    p: Problem, layout: GatherLayout, direction: str, score: str, lengths: bool, split: int | None,
    config: GatherConfig | SplitConfig | None = None,
) -> Prepared:  # fmt: skip
    """Compiled kernels and items of one direction; made once and kept as long as the walk."""
    kept = _prepared.setdefault(layout.columns if direction == "columns" else layout.rows, {})
    key = (direction, p.dtype, p.B, p.H, p.G, p.D, p.E, score, lengths, split, config)
    return kept.get(key) or kept.setdefault(key, _prepare(p, layout, direction, score, lengths, split, config))


def _prepare(
    p: Problem, layout: GatherLayout, direction: str, score: str, lengths: bool, split: int | None,
    config: GatherConfig | SplitConfig | None,
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
        isinstance(config, SplitConfig),
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
    config: GatherConfig | SplitConfig | None = None,
) -> tuple[Tensor, Tensor]:
    """(out, lse). Float32 numbers of v must be below 2^103 in magnitude: see docs/kernels/gather.md.

    Args:
        split: replaces the automatic split of long lists, in steps of 64 columns.
        into: (out (B, H, Q, E), lse (B, H, Q) float32) that receive the results, of any strides; an out that TMA cannot
            address, or of float32 whose E is odd, is written by a copy.
        config: replaces the configuration for these head sizes.
    """
    if elsewhere(q):
        with torch.cuda.device(q.device):
            return forward(problem, q, k, v, layout, terms, split=split, into=into, config=config)
    # Results of float32 are written two numbers at a time.
    if into is not None and (not readable(into[0]) or (q.dtype == torch.float32 and problem.E % 2)):
        found = forward(problem, q, k, v, layout, terms, split=split, config=config)
        return into[0].copy_(found[0]), into[1].copy_(found[1])
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
        operand(q), gathered(k), gathered(v), *map(empty_from, call.halves(k)), out, lse, *call.arrays, sinks,
        part_out, part_lse, lengths_of(terms.key_lengths, p.K, device), tickets(device),
        *factors(terms, score), call.items, has_sinks,
        call.blocks,
    )  # fmt: skip
    if call.join is not None:
        call.join(out, lse, part_out, part_lse, call.merges, sinks, has_sinks)
    return (out, lse) if into is not None else (out.contiguous(), lse)


def bound_forward(
    problem: Problem, q: Tensor, k: Tensor, v: Tensor, layout: GatherLayout, terms: Terms,
    into: tuple[Tensor, Tensor] | None = None,
) -> Callable[..., tuple[Tensor, Tensor]] | None:  # fmt: skip
    """See `kernels.contract.Binding`."""
    p, device, score = problem, q.device, score_of(terms)
    if not (p.B and p.Q and p.K and readable(q) and gathers(k) and gathers(v)):
        return None
    if into is not None and not readable(into[0]):
        return None
    kept = prepared(p, layout, "forward", score, terms.key_lengths is not None, None)
    run, join, plain = kept.run, kept.join, terms.having(None, None, None)
    out_like, lse_like = template(q, (p.B, p.H, p.Q, p.E)), template(q, (p.B, p.H, p.Q), torch.float32)
    part_out, part_lse, halves = kept.bound_parts(q, kept.size), kept.bound_parts(q), kept.halves(k)
    no_sinks, no_lengths, has_sinks = unused(device, 1), unused_lengths(device), int(terms.sink_logits is not None)
    after = (*factors(terms, score), kept.items, has_sinks, kept.blocks)

    def call(
        q: Tensor, k: Tensor, v: Tensor, lengths: Tensor | None = None, sinks: Tensor | None = None,
        slopes: Tensor | None = None, into: tuple[Tensor, Tensor] | None = None,
    ) -> tuple[Tensor, Tensor]:  # fmt: skip
        if elsewhere(q):
            return forward(problem, q, k, v, layout, plain.having(lengths, sinks, slopes), into=into)
        results = out, lse = into or (empty_from(out_like), empty_from(lse_like))
        sums, sums_lse = part_out(), part_lse()
        end = no_lengths if lengths is None else aligned(int32_lengths(lengths, p.K))
        sink = no_sinks if sinks is None else aligned(sinks.float())
        run(
            q, k, v, *map(empty_from, halves), out, lse, *kept.arrays, sink, sums, sums_lse, end, tickets(device),
            *after,
        )  # fmt: skip
        if join is not None:
            join(out, lse, sums, sums_lse, kept.merges, sink, has_sinks)
        return results

    return call


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
        q, k, v, dout = (gathered(x) for x in (q, k, v, dout))
        rows = row_terms_of(p, dout, dlse, out, lse)
        key_gradients(p, q, k, v, dout, rows, layout, terms, dk, dv, split)
        query_gradient(p, q, k, v, dout, rows, layout, terms, dq, split)
        return rows

    return completed(p, dout, dlse, q, k, v, out, lse, terms, into, write)


def bound_backward(
    problem: Problem, dout: Tensor, q: Tensor, k: Tensor, v: Tensor, out: Tensor, lse: Tensor, layout: GatherLayout,
    terms: Terms,
) -> Callable[..., tuple[Tensor, ...]] | None:  # fmt: skip
    """See `kernels.contract.Binding`."""
    p, device, inputs = problem, q.device, (q.stride(), k.stride(), v.stride())
    if not (p.B and p.Q and p.K and all(gathers(x) for x in (q, k, v))):
        return None
    of_terms = gradient_score(terms), terms.key_lengths is not None, None
    by_rows = prepared(p, layout, "query", *of_terms)
    by_columns = prepared(p, layout, "columns", *of_terms)
    terms_like, no_sums, preprocess = _row_terms(p, q)
    likes = [template(x, x.shape) for x in (q, k, v)]
    part_dq, part_dk, part_dv = (x.bound_parts(q, x.size) for x in (by_rows, by_columns, by_columns))
    plain, no_lengths, numbers = terms.having(None, None, None), unused_lengths(device), gradient_factors(terms)

    def call(
        dout: Tensor, dlse: Tensor | None, q: Tensor, k: Tensor, v: Tensor, out: Tensor, lse: Tensor,
        lengths: Tensor | None = None, sinks: Tensor | None = None, slopes: Tensor | None = None,
    ) -> tuple[Tensor, ...]:  # fmt: skip
        alike = (
            # What was saved may have been elsewhere meanwhile, by hooks.
            (q.stride(), k.stride(), v.stride()) == inputs and out.is_contiguous() and lse.is_contiguous()
            and not (q.data_ptr() | k.data_ptr() | v.data_ptr() | out.data_ptr()) % 16
            and (dlse is None or dlse.is_contiguous()) and gathers(dout)
        )  # fmt: skip
        given = plain.having(lengths, sinks, slopes)
        if not alike or elsewhere(q):
            found = backward(p, dout, dlse, q, k, v, out, lse, layout, given)
            return found if sinks is not None else found[:3]  # type: ignore[return-value]
        dq, dk, dv = empty_from(likes[0]), empty_from(likes[1]), empty_from(likes[2])
        rows = empty_from(terms_like)
        preprocess(out, dout, lse, lse if dlse is None else dlse, rows, no_sums, int(dlse is not None))
        end = no_lengths if lengths is None else aligned(int32_lengths(lengths, p.K))
        sums_dk, sums_dv, sums_dq = part_dk(), part_dv(), part_dq()
        by_columns.run(
            q, k, v, dout, rows, dk, dv, *by_columns.arrays, sums_dk, sums_dv, end, tickets(device), *numbers,
            by_columns.items, by_columns.blocks,
        )  # fmt: skip
        if by_columns.join is not None:
            by_columns.join(dk, sums_dk, by_columns.merges, plain.scale)
            by_columns.join(dv, sums_dv, by_columns.merges, 1.0)
        by_rows.run(
            q, k, v, dout, rows, dq, *by_rows.arrays, sums_dq, end, tickets(device), *numbers, by_rows.items,
            by_rows.blocks,
        )  # fmt: skip
        if by_rows.join is not None:
            by_rows.join(dq, sums_dq, by_rows.merges, plain.scale)
        if sinks is None:
            return dq, dk, dv
        dsink = sink_gradient_of(rows, lse, given)
        assert dsink is not None
        return dq, dk, dv, dsink

    return call


def row_terms_of(p: Problem, dout: Tensor, dlse: Tensor | None, out: Tensor, lse: Tensor) -> Tensor:
    """(2, B, H, padded Q) float32: lse in base 2, and delta."""
    like, no_sums, preprocess = _row_terms(p, out)
    rows = empty_from(like)
    preprocess(out, dout, lse, lse if dlse is None else dlse, rows, no_sums, int(dlse is not None))
    return rows


def _row_terms(p: Problem, like: Tensor) -> tuple[Tensor, Tensor, Callable[..., None]]:
    """The template of row terms, what stands for the sums that their kernel zeroes for others, and that kernel."""
    size = gather_config("query", p.dtype, p.D, p.E, "fold").size
    shape = (2, p.B, p.H, -(-p.Q // TERMS) * TERMS)
    return (
        template(like, shape, torch.float32), unused(like.device, 1, 1, 1, ROWS * size),
        compiled.preprocess(p.dtype, size, 0),
    )  # fmt: skip


def query_gradient(
    p: Problem, q: Tensor, k: Tensor, v: Tensor, dout: Tensor, rows: Tensor, layout: GatherLayout, terms: Terms,
    dq: Tensor, split: int | None = None, config: GatherConfig | None = None,
) -> None:  # fmt: skip
    """Write dq, a tensor that TMA can address. `rows` are the row terms; rows of k and v can be gathered."""
    call = prepared(p, layout, "query", gradient_score(terms), terms.key_lengths is not None, split, config)
    part = call.parts(q, call.size)
    call.run(
        q, k, v, dout, rows, dq, *call.arrays, part, lengths_of(terms.key_lengths, p.K, q.device), tickets(q.device),
        *gradient_factors(terms), call.items, call.blocks,
    )  # fmt: skip
    if call.join is not None:
        call.join(dq, part, call.merges, terms.scale)


def key_gradients(
    p: Problem, q: Tensor, k: Tensor, v: Tensor, dout: Tensor, rows: Tensor, layout: GatherLayout, terms: Terms,
    dk: Tensor, dv: Tensor, split: int | None = None, config: GatherConfig | None = None,
) -> None:  # fmt: skip
    """Write dk and dv, tensors that TMA can address. `rows` are the row terms; rows of q and dout can be gathered."""
    call = prepared(p, layout, "columns", gradient_score(terms), terms.key_lengths is not None, split, config)
    part_dk, part_dv = call.parts(q, call.size), call.parts(q, call.size)
    call.run(
        q, k, v, dout, rows, dk, dv, *call.arrays, part_dk, part_dv,
        lengths_of(terms.key_lengths, p.K, q.device), tickets(q.device),
        *gradient_factors(terms), call.items, call.blocks,
    )  # fmt: skip
    if call.join is not None:
        for result, part, factor in ((dk, part_dk, terms.scale), (dv, part_dv, 1.0)):
            call.join(result, part, call.merges, factor)
