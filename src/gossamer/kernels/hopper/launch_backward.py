"""From tensors and a layout to the calls of a backward.

Row terms and zeroed sums of dQ; dK, dV and those sums by the columns of the layout; parts of split columns; dQ from its
sums. A deterministic backward, and one of wide heads, has no sums in memory: dQ comes from a walk over the rows. Parts
are added in slot order.
"""

from __future__ import annotations

import math
from typing import Any

import torch
from torch import Tensor

from gossamer.kernels.contract import Problem, Terms
from gossamer.kernels.hopper import compile as compiled
from gossamer.kernels.hopper.backward.schedule import column_work
from gossamer.kernels.hopper.config import WIDE, backward_config, query_config, wide_config
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
    tile = walk.block_columns, walk.block_rows
    is_wide = max(p.D, p.E) > WIDE
    by_rows = p.deterministic or is_wide
    if is_wide:
        config: Any = wide_config(p.dtype, p.D, p.E, *tile, score)
    else:
        config = backward_config(p.dtype, p.D, p.E, *tile, score, not by_rows)
    padded_Q = -(-p.Q // ROWS) * ROWS
    rows = torch.empty((2, p.B, p.H, padded_Q), dtype=torch.float32, device=device)
    if by_rows:
        sums = unused(device, 1, 1, 1, TILE * config.D)
    else:
        sums = torch.empty((p.B, p.H, padded_Q // TILE, TILE * config.D), dtype=torch.float32, device=device)
    compiled.preprocess(p.dtype, config.E, 0 if by_rows else config.D)(
        out, dout, lse, lse if dlse is None else dlse, rows, sums, int(dlse is not None)
    )
    Bl, Hl = walk.lead
    heads = p.G if Hl == 1 else 1
    copies = heads * (p.B if Bl == 1 else 1)
    plan, known = column_work(layout, copies, p.H // p.G, processors(device), split), lists(layout, True)
    items, block = plan.items.shape[0], walk.block_rows
    part_dk, part_dv = (_parts(device, copies * plan.slots, block, n) for n in (config.D, config.E))
    shared = (
        plan.items, plan.segments, known.lists, known.lo, known.hi, known.pool, part_dk, part_dv, tickets(device),
        before, exponent, terms.scale, items, copies, heads, plan.slots,
    )  # fmt: skip
    if is_wide:
        blocks = min(processors(device), items * copies * block // config.block_kv)
        compiled.wide(config)(q, k, v, dout, rows, dk, dv, *shared, blocks)
    else:
        blocks = min(processors(device), items * copies)
        compiled.backward(config)(q, k, v, dout, rows, sums, dk, dv, *shared, blocks)
    if plan.slots:
        for result, parts, factor in ((dk, part_dk, terms.scale), (dv, part_dv, 1.0)):
            compiled.sum_parts(p.dtype, parts.shape[2], block)(
                result, parts, plan.merges, factor, copies, heads, plan.slots
            )
    if by_rows:
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
