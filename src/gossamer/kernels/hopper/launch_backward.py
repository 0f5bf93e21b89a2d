"""From tensors and a layout to the calls of a backward.

Row terms and zeroed sums of dQ; dK, dV and those sums by the columns of the layout; parts of split columns; dQ from its
sums. A deterministic backward has no sums in memory: dQ comes from a walk over the rows, parts are added in slot order.
"""

from __future__ import annotations

import math

import torch
from torch import Tensor

from gossamer.kernels.contract import Problem, Terms
from gossamer.kernels.hopper import compile as compiled
from gossamer.kernels.hopper.backward.schedule import column_work
from gossamer.kernels.hopper.config import backward_config, query_config
from gossamer.kernels.hopper.launch import LOG2E, empty, operand, processors, readable, tickets, unused
from gossamer.kernels.hopper.schedule import lists, work
from gossamer.kernels.rows import row_terms, sink_gradient
from gossamer.layouts.block import BlockLayout

ROWS = 128  # row terms are padded to whole tiles of this many queries
TILE = 64  # rows of a tile of dQ's sums

Gradients = tuple[Tensor, Tensor, Tensor]


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
    if q.device.index != torch.cuda.current_device():
        with torch.cuda.device(q.device):
            return backward(problem, dout, dlse, q, k, v, out, lse, layout, terms, into=into, split=split)
    p = problem
    shapes = (p.B, p.H, p.Q, p.D), (p.B, p.G, p.K, p.D), (p.B, p.G, p.K, p.E)
    if into is None:
        dq, dk, dv = (empty(q, shape) for shape in shapes)
    else:
        dq, dk, dv = (x if readable(x) else empty(q, x.shape) for x in into)
    sink = None
    if not (p.B * p.H * p.Q and p.K):
        for gradient in (dq, dk, dv):
            gradient.zero_()
        if terms.sink_logits is not None:
            sink = sink_gradient(*row_terms(dout, dlse, out, lse, torch.float32), terms)
    else:
        q, k, v, dout = operand(q), operand(k), operand(v), operand(dout)
        sink = _gradients(p, dout, dlse, q, k, v, operand(out), lse, layout, terms, (dq, dk, dv), split)
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
) -> Tensor | None:
    """Write dq, dk and dv, tensors that TMA can address; returns the gradient of the sink logits."""
    dq, dk, dv = results
    walk, device = layout.columns, q.device
    score, before, exponent = "fold", 1.0, terms.scale * LOG2E
    if terms.softcap is not None:
        score, before, exponent = "softcap", terms.scale / terms.softcap, terms.softcap * LOG2E
    config = backward_config(p.dtype, p.D, p.E, walk.block_columns, walk.block_rows, score, not p.deterministic)
    padded_Q = -(-p.Q // ROWS) * ROWS
    rows = torch.empty((2, p.B, p.H, padded_Q), dtype=torch.float32, device=device)
    if p.deterministic:
        sums = unused(device, 1, 1, 1, TILE * config.D)
    else:
        sums = torch.empty((p.B, p.H, padded_Q // TILE, TILE * config.D), dtype=torch.float32, device=device)
    compiled.preprocess(p.dtype, config.E, 0 if p.deterministic else config.D)(
        out, dout, lse, lse if dlse is None else dlse, rows, sums, int(dlse is not None)
    )
    Bl, Hl = walk.lead
    heads = p.G if Hl == 1 else 1
    copies = heads * (p.B if Bl == 1 else 1)
    plan, known = column_work(layout, copies, p.H // p.G, processors(device), split), lists(layout, True)
    items = plan.items.shape[0]
    part_dk, part_dv = (_parts(device, copies * plan.slots, config.block_kv, n) for n in (config.D, config.E))
    compiled.backward(config)(
        q, k, v, dout, rows, sums, dk, dv, plan.items, plan.segments, known.lists, known.lo, known.hi, known.pool,
        part_dk, part_dv, tickets(device), before, exponent, terms.scale, items, copies, heads, plan.slots,
        min(processors(device), items * copies),
    )  # fmt: skip
    if plan.slots:
        for result, parts, factor in ((dk, part_dk, terms.scale), (dv, part_dv, 1.0)):
            compiled.sum_parts(p.dtype, parts.shape[2], config.block_kv)(
                result, parts, plan.merges, factor, copies, heads, plan.slots
            )
    if p.deterministic:
        query_gradient(p, q, k, v, dout, rows, layout, terms, dq, split)
    else:
        compiled.postprocess(p.dtype, config.D)(sums, dq, terms.scale)
    if terms.sink_logits is None:
        return None
    # A row is empty only under a sink of -inf; +inf makes its share of the sink 0.
    return sink_gradient(rows[1, :, :, : p.Q], lse.masked_fill(lse == -math.inf, math.inf), terms)


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
    walk, device = layout.rows, q.device
    score, before, exponent = "fold", 1.0, terms.scale * LOG2E
    if terms.softcap is not None:
        score, before, exponent = "softcap", terms.scale / terms.softcap, terms.softcap * LOG2E
    config = query_config(p.dtype, p.D, p.E, walk.block_rows, walk.block_columns, score)
    Bl, Hl = walk.lead
    heads = p.H if Hl == 1 else 1
    copies = heads * (p.B if Bl == 1 else 1)
    plan, known = work(layout, copies, processors(device), split), lists(layout)
    items = plan.items.shape[0]
    parts = _parts(device, copies * plan.slots, config.block_q, config.D)
    compiled.query_gradient(config)(
        q, k, v, dout, rows, dq, plan.items, known.lists, known.lo, known.hi, known.pool, parts, tickets(device),
        before, exponent, terms.scale, items, copies, heads, plan.slots,
        min(config.blocks_per_processor * processors(device), items * copies),
    )  # fmt: skip
    if plan.slots:
        compiled.sum_parts(p.dtype, config.D, config.block_q)(
            dq, parts, plan.merges, terms.scale, copies, heads, plan.slots
        )


def _parts(device: torch.device, n: int, rows: int, size: int) -> Tensor:
    """Float32 parts of split tiles, or what stands for none."""
    if not n:
        return unused(device, 1, rows, size)
    return torch.empty((n, rows, size), dtype=torch.float32, device=device)
