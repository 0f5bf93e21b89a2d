"""From tensors and a layout to the calls of a backward.

Row terms and zeroed sums of dQ; dK, dV and those sums by the columns of the layout; parts of split columns; dQ from its
sums. A deterministic backward, one of wide heads and one of 64 x 64 tiles have no sums in memory: dQ comes from a walk
over the rows. Parts are added in slot order.
"""

from __future__ import annotations

from collections.abc import Callable
from typing import Any, NamedTuple
from weakref import WeakKeyDictionary

import torch
from torch import Tensor

from gossamer.kernels.contract import Terms
from gossamer.kernels.devices import Workspace, elsewhere, empty_from, int32_lengths, processors, template
from gossamer.kernels.hopper import compiled
from gossamer.kernels.hopper.choice import WIDE, backward_config, query_config, wide_config
from gossamer.kernels.hopper.launch.forward import LOG2E, STEP, aligned, empty_like, operand, readable, tickets, unused
from gossamer.kernels.hopper.schedule.columns import column_work
from gossamer.kernels.hopper.schedule.rows import Lists, lists, sharing, work
from gossamer.kernels.rows import row_terms, sink_gradient, sink_gradient_of
from gossamer.layouts.block import BlockLayout
from gossamer.layouts.walk import Walk
from gossamer.plan.problem import Problem

TERMS = 128  # row terms are padded to whole tiles of this many queries
TILE = 64  # rows of a tile of dQ's sums

Gradients = tuple[Tensor, Tensor, Tensor]


class Prepared(NamedTuple):
    """What the calls of one walk, of the same sizes and kind of score, have in common."""

    run: Callable[..., None]
    arrays: tuple[Any, ...]  # items and lists, in the form that costs least to pass
    items: int
    slots: int
    blocks: int
    block: int  # rows of a tile
    sizes: tuple[int, ...]  # head sizes after padding: of dK and dV, or of dQ
    sums: tuple[Callable[..., None], ...]  # of the parts of split tiles; none without
    merges: Tensor
    no_parts: tuple[Tensor, ...]  # what stands for the parts where there are none
    preprocess: Callable[..., None] | None = None
    postprocess: Callable[..., None] | None = None  # None: dQ comes from a walk over the rows
    no_sums: Tensor | None = None  # what stands for dQ's sums then


_prepared: WeakKeyDictionary[Walk, dict[Any, Prepared]] = WeakKeyDictionary()


def backward(
    problem: Problem,
    dout: Tensor,
    dlse: Tensor | None,
    q: Tensor,
    k: Tensor,
    v: Tensor,
    out: Tensor,
    lse: Tensor,
    layout: BlockLayout,
    terms: Terms,
    *,
    into: Gradients | None = None,
    split: int | None = None,
) -> tuple[Tensor, Tensor, Tensor, Tensor | None]:
    """(dq, dk, dv, dsink_logits or None).

    Args:
        into: (dq, dk, dv) that receive the gradients, of any strides; one that TMA cannot address is written by a copy.
        split: replaces the automatic split of long rows and columns.
    """
    if elsewhere(q):
        with torch.cuda.device(q.device):
            return backward(problem, dout, dlse, q, k, v, out, lse, layout, terms, into=into, split=split)

    def write(dout: Tensor, q: Tensor, k: Tensor, v: Tensor, out: Tensor, results: Gradients) -> Tensor:
        return _gradients(problem, dout, dlse, q, k, v, out, lse, layout, terms, results, split)

    return completed(problem, dout, dlse, q, k, v, out, lse, terms, into, write)


def completed(
    p: Problem,
    dout: Tensor,
    dlse: Tensor | None,
    q: Tensor,
    k: Tensor,
    v: Tensor,
    out: Tensor,
    lse: Tensor,
    terms: Terms,
    into: Gradients | None,
    write: Callable[..., Tensor],
) -> tuple[Tensor, Tensor, Tensor, Tensor | None]:
    """(dq, dk, dv, dsink_logits or None), as `backward` returns them.

    Args:
        write: called with (dout, q, k, v, out, results), all of which TMA can address, where there are pairs; it
            writes the results dq, dk and dv, and returns the row terms (2, B, H, padded Q).
    """
    if into is None:
        dq, dk, dv = empty_like(q), empty_like(k), empty_like(v)
    else:
        dq, dk, dv = [x if readable(x) else empty_like(x) for x in into]
    sink = None
    if p.B and p.Q and p.K:
        rows = write(operand(dout), operand(q), operand(k), operand(v), operand(out), (dq, dk, dv))
        if terms.sink_logits is not None:
            sink = sink_gradient_of(rows, lse, terms)
    else:
        for gradient in (dq, dk, dv):
            gradient.zero_()
        if terms.sink_logits is not None:
            sink = sink_gradient(*row_terms(dout, dlse, out, lse, torch.float32), terms)
    if into is None:
        return dq.contiguous(), dk.contiguous(), dv.contiguous(), sink
    for given, made in zip(into, (dq, dk, dv), strict=True):
        if given is not made:
            given.copy_(made)
    return *into, sink


def _gradients(
    p: Problem,
    dout: Tensor,
    dlse: Tensor | None,
    q: Tensor,
    k: Tensor,
    v: Tensor,
    out: Tensor,
    lse: Tensor,
    layout: BlockLayout,
    terms: Terms,
    results: Gradients,
    split: int | None,
) -> Tensor:
    """Write dq, dk and dv, tensors that TMA can address; returns the row terms (2, B, H, padded Q)."""
    dq, dk, dv = results
    call = prepared(p, layout, terms, True, split)
    assert call.preprocess is not None
    padded_Q = -(-p.Q // TERMS) * TERMS
    rows = q.new_empty((2, p.B, p.H, padded_Q), dtype=torch.float32)
    sums = call.no_sums
    if sums is None:
        sums = q.new_empty((p.B, p.H, padded_Q // TILE, TILE * call.sizes[0]), dtype=torch.float32)
    call.preprocess(out, dout, lse, lse if dlse is None else dlse, rows, sums, int(dlse is not None))
    part_dk, part_dv = call.no_parts or _parts(call, q)
    call.run(
        q, k, v, dout, rows, sums, dk, dv, *call.arrays, part_dk, part_dv, _lengths(terms, p.K), tickets(q.device),
        *gradient_factors(terms), call.items, call.blocks,
    )  # fmt: skip
    if call.sums:
        for add, result, parts, factor in zip(call.sums, (dk, dv), (part_dk, part_dv), (terms.scale, 1.0), strict=True):
            add(result, parts, call.merges, factor)
    if call.postprocess is None:
        query_gradient(p, q, k, v, dout, rows, layout, terms, dq, split)
    else:
        call.postprocess(sums, dq, terms.scale)
    return rows


def bound_backward(
    problem: Problem, dout: Tensor, q: Tensor, k: Tensor, v: Tensor, out: Tensor, lse: Tensor, layout: BlockLayout,
    terms: Terms, into: Gradients | None = None,
) -> Callable[..., tuple[Tensor, ...]] | None:  # fmt: skip
    """See `kernels.contract.Binding`."""
    p, device, inputs = problem, q.device, _strides(q, k, v, out, lse)
    if p.D % STEP or p.E % STEP or not all(readable(x) for x in (q, k, v, out, *(into or ()))):
        return None
    kept = prepared(p, layout, terms, True, None)
    kept_rows = prepared(p, layout, terms, False, None) if kept.postprocess is None else None
    padded_Q = -(-p.Q // TERMS) * TERMS
    likes = [template(x, x.shape) for x in (q, k, v)]
    shapes: list[tuple[int, ...]] = [(2, p.B, p.H, padded_Q)]  # row terms
    if kept.no_sums is None:
        shapes.append((p.B, p.H, padded_Q // TILE, TILE * kept.sizes[0]))
    shapes += [(kept.slots, kept.block, size) for size in kept.sizes if kept.slots]
    if kept_rows is not None and kept_rows.slots:
        shapes.append((kept_rows.slots, kept_rows.block, *kept_rows.sizes))
    workspace = Workspace(q, *shapes)
    preprocess, postprocess, factors = kept.preprocess, kept.postprocess, gradient_factors(terms)
    after = (*factors, kept.items, kept.blocks)
    plain = terms.having(None, None, None)
    assert preprocess is not None

    def call(
        dout: Tensor, dlse: Tensor | None, q: Tensor, k: Tensor, v: Tensor, out: Tensor, lse: Tensor,
        lengths: Tensor | None = None, sinks: Tensor | None = None, slopes: Tensor | None = None,
        into: Gradients | None = None,
    ) -> tuple[Tensor, ...]:  # fmt: skip
        alike = (
            # What was saved may have been elsewhere meanwhile, by hooks.
            _strides(q, k, v, out, lse) == inputs and readable(dout)
            and not (q.data_ptr() | k.data_ptr() | v.data_ptr() | out.data_ptr()) % 16
        )  # fmt: skip
        if not alike or elsewhere(q):
            given = plain.having(lengths, sinks, slopes)
            found = backward(p, dout, dlse, q, k, v, out, lse, layout, given, into=into)
            return found if sinks is not None else found[:3]  # type: ignore[return-value]
        dq, dk, dv = into or (empty_from(likes[0]), empty_from(likes[1]), empty_from(likes[2]))
        room, (rows, *more) = workspace.take()
        sums = more.pop(0) if kept.no_sums is None else kept.no_sums
        part_dk, part_dv, *part_dq = (*kept.no_parts, *more)
        if dlse is None:
            preprocess(out, dout, lse, lse, rows, sums, 0)
        else:
            preprocess(out, dout, lse, dlse, rows, sums, 1)
        end = None if lengths is None else aligned(int32_lengths(lengths, p.K))
        kept.run(q, k, v, dout, rows, sums, dk, dv, *kept.arrays, part_dk, part_dv, end, tickets(device), *after)
        if kept.sums:
            kept.sums[0](dk, part_dk, kept.merges, plain.scale)
            kept.sums[1](dv, part_dv, kept.merges, 1.0)
        if postprocess is not None:
            postprocess(sums, dq, plain.scale)
        elif kept_rows is not None:
            (part,) = kept_rows.no_parts or part_dq
            kept_rows.run(
                q, k, v, dout, rows, dq, *kept_rows.arrays, part, end, tickets(device), *factors, kept_rows.items,
                kept_rows.blocks,
            )  # fmt: skip
            if kept_rows.sums:
                kept_rows.sums[0](dq, part, kept_rows.merges, plain.scale)
        dsink = None if sinks is None else sink_gradient_of(rows, lse, plain.having(lengths, sinks, slopes))
        if room is not None:
            workspace.leave(room)
        return (dq, dk, dv) if dsink is None else (dq, dk, dv, dsink)

    return call


def _strides(*tensors: Tensor) -> tuple[tuple[int, ...], ...]:
    return tuple([x.stride() for x in tensors])


def query_gradient(
    p: Problem,
    q: Tensor,
    k: Tensor,
    v: Tensor,
    dout: Tensor,
    rows: Tensor,
    layout: BlockLayout,
    terms: Terms,
    dq: Tensor,
    split: int | None = None,
) -> None:
    """Write dq by a walk over the rows of the layout. `rows` are the row terms (2, B, H, padded Q)."""
    call = prepared(p, layout, terms, False, split)
    (parts,) = call.no_parts or _parts(call, q)
    call.run(
        q, k, v, dout, rows, dq, *call.arrays, parts, _lengths(terms, p.K), tickets(q.device), *gradient_factors(terms),
        call.items, call.blocks,
    )  # fmt: skip
    for add in call.sums:
        add(dq, parts, call.merges, terms.scale)


def prepared(p: Problem, layout: BlockLayout, terms: Terms, transposed: bool, split: int | None) -> Prepared:
    """Compiled kernels, items and lists of a walk; made once and kept as long as the layout."""
    walk = layout.columns if transposed else layout.rows
    kept = _prepared.get(walk)
    if kept is None:
        kept = _prepared.setdefault(walk, {})
    score = gradient_score(terms)
    # A sweep puts other configurations in the place of these two.
    replaced = compiled.backward, backward_config
    lengths = terms.key_lengths is not None
    key = (*replaced, p.dtype, p.B, p.H, p.G, p.D, p.E, p.deterministic, score, lengths, split)
    found = kept.get(key)
    if found is None:
        make = _prepare_columns if transposed else _prepare_rows
        found = kept.setdefault(key, make(p, layout, score, lengths, split))
    return found


def _prepare_columns(p: Problem, layout: BlockLayout, score: str, lengths: bool, split: int | None) -> Prepared:
    walk = layout.columns
    copies, heads = sharing(p.G, p.B, walk)
    device, block, tile = walk.lo.device, walk.block_rows, (walk.block_columns, walk.block_rows)
    # Of tiles of 64 x 64, additions in memory take longer than a second walk.
    with_sums = not p.deterministic and max(p.D, p.E) <= WIDE and block > TILE
    if max(p.D, p.E) > WIDE:
        config: Any = wide_config(p.dtype, p.D, p.E, *tile, score, lengths)
        run = compiled.wide(config)
    else:
        config = backward_config(p.dtype, p.D, p.E, *tile, score, with_sums, lengths)
        run = compiled.backward(config)
    blocks = config.blocks_per_processor * processors(device)
    plan = column_work(layout, copies, heads, p.H // p.G, blocks, split)
    sizes = config.D, config.E
    items = plan.items.shape[0]
    return Prepared(
        run,
        _arrays(lists(layout, True), plan.items, plan.segments),
        items,
        plan.slots,
        min(blocks, items * block // config.block_kv),
        block,
        sizes,
        tuple(compiled.sum_parts(p.dtype, size, block) for size in sizes) if plan.slots else (),
        plan.merges,
        () if plan.slots else tuple(unused(device, 1, block, size) for size in sizes),
        compiled.preprocess(p.dtype, config.E, config.D if with_sums else 0),
        compiled.postprocess(p.dtype, config.D) if with_sums else None,
        None if with_sums else unused(device, 1, 1, 1, TILE * config.D),
    )


def _prepare_rows(p: Problem, layout: BlockLayout, score: str, lengths: bool, split: int | None) -> Prepared:
    walk = layout.rows
    copies, heads = sharing(p.H, p.B, walk)
    config = query_config(p.dtype, p.D, p.E, walk.block_rows, walk.block_columns, score, lengths)
    blocks = config.blocks_per_processor * processors(walk.lo.device)
    plan = work(layout, copies, heads, blocks, split)
    items = plan.items.shape[0]
    return Prepared(
        compiled.query_gradient(config),
        _arrays(lists(layout, blocks=0 if lengths else blocks), plan.items),
        items,
        plan.slots,
        min(blocks, items),
        config.block_q,
        (config.D,),
        (compiled.sum_parts(p.dtype, config.D, config.block_q),) if plan.slots else (),
        plan.merges,
        () if plan.slots else (unused(walk.lo.device, 1, config.block_q, config.D),),
    )


def _arrays(known: Lists, *work_arrays: Tensor) -> tuple[Any, ...]:
    from tvm_ffi import from_dlpack

    return tuple(from_dlpack(x) for x in (*work_arrays, known.lists, known.lo, known.hi, known.pool))


def gradient_score(terms: Terms) -> str:
    """The kind of score, for which kernels of a backward are compiled."""
    return "fold" if terms.softcap is None else "softcap"


def gradient_factors(terms: Terms) -> tuple[float, float, float]:
    """Factor of a score before the soft cap, in exp2, and of the gradients."""
    if terms.softcap is None:
        return 1.0, terms.scale * LOG2E, terms.scale
    return terms.scale / terms.softcap, terms.softcap * LOG2E, terms.scale


def _lengths(terms: Terms, K: int) -> Tensor | None:
    """Key lengths as a kernel that reads them wants them."""
    return None if terms.key_lengths is None else aligned(int32_lengths(terms.key_lengths, K))


def _parts(call: Prepared, like: Tensor) -> list[Tensor]:
    """Float32 parts of split tiles, for each result."""
    return [like.new_empty((call.slots, call.block, columns), dtype=torch.float32) for columns in call.sizes]
