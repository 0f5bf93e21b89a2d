"""The two loops over batches of tiles, by matrix products of torch: on any device, and with every score term."""

from __future__ import annotations

import torch
from torch import Tensor

from gossamer.kernels.blocked.batches import Batch, BatchPlan, plan_batches
from gossamer.kernels.blocked.tiles import (
    LN2,
    LOG2E,
    Scorer,
    Scratch,
    Tiled,
    Where,
    add,
    keys_of,
    rows_of,
    store,
    tile,
    uses,
    zeros,
)
from gossamer.kernels.contract import Terms
from gossamer.kernels.row_formulas import compute_dtype, row_terms, sink_gradient
from gossamer.layouts.block import BlockLayout
from gossamer.memo import Memos
from gossamer.plan.problem import Problem

_plans: Memos[BatchPlan] = Memos()  # of layouts


def batches_of(layout: BlockLayout, problem: Problem) -> BatchPlan:
    """The plan of a layout, made once for each set of shapes and kept as long as the layout."""
    p = problem
    key = (p.B, p.H, p.G, p.D, p.E, p.dtype == "float64")
    return _plans.of(layout).get_or_make(key, lambda: plan_batches(layout, problem))


def forward(
    problem: Problem, layout: BlockLayout, terms: Terms, q: Tensor, k: Tensor, v: Tensor
) -> tuple[Tensor, Tensor]:
    """(out, lse)."""
    bq, bk = layout.block_q, layout.block_kv
    plan = batches_of(layout, problem)
    there = plan.readable.attended(terms.key_lengths)
    qt = tile(there.of_rows(q), plan.query_tiles, bq)
    kt, vt = (tile(there.of_keys(x), plan.key_tiles, bk) for x in (k, v))
    dtype = qt.flat.dtype
    scratch = Scratch(qt.flat)
    scorer = Scorer(problem, plan, terms, bq, bk, scratch)
    out = zeros(problem, problem.H, plan.query_tiles, bq, problem.E, qt.flat)
    sink = None if terms.sink_logits is None else terms.sink_logits.to(qt.flat).view(1, -1, 1)
    shape = (problem.B, problem.H, plan.query_tiles * bq)
    lse = qt.flat.new_full(shape, -torch.inf) if sink is None else sink.expand(shape).contiguous()
    lse_rows = Tiled(lse.view(-1, bq, 1), problem.H, plan.query_tiles, bq)
    for batch in plan.batches:
        for where in uses(batch):
            top, total, acc = _batch(batch, where, qt, kt, vt, scorer, scratch)
            if sink is not None:
                logit = rows_of(lse_rows, batch, where)
                logit = logit * LOG2E
                both = torch.maximum(top, logit)
                shrink = torch.exp2(top - both)
                total = total * shrink + torch.exp2(logit - both)
                acc.mul_(shrink)
                top = both
            # A row that keeps anything has a total of at least 1, its largest term (or its sink).
            acc.div_(total.clamp(min=1.0))
            store(out, batch, where, acc)
            store(lse_rows, batch, where, (top + torch.log2(total)).mul_(LN2))
    lse = lse[:, :, : problem.Q]
    return out.untiled(problem.Q, q.dtype), lse.contiguous().to(compute_dtype(dtype))


def _batch(
    batch: Batch, where: Where, qt: Tiled, kt: Tiled, vt: Tiled, scorer: Scorer, scratch: Scratch
) -> tuple[Tensor, Tensor, Tensor]:
    """(maximum (n, block_q, 1) * LOG2E, sum of exp, unnormalised output (n, block_q, E)) over the pieces."""
    q = rows_of(qt, batch, where)
    lowest = torch.finfo(q.dtype).min
    state: tuple[Tensor, Tensor, Tensor] | None = None
    for piece in batch.pieces:
        keys = keys_of(kt, batch, piece, where, scorer.group, scratch, "k")
        s, _ = scorer(q, keys, batch, piece, where)
        # The clamp makes exp2(-inf - max) zero, not NaN, in a row that keeps nothing here.
        top = s.amax(-1, keepdim=True).clamp_(min=lowest)
        s.sub_(top).exp2_()
        total = s.sum(-1, keepdim=True)
        values = keys_of(vt, batch, piece, where, scorer.group, scratch, "v")
        name = "acc" if state is None else "acc_piece"
        acc = scratch.take(name, batch.n, s.shape[1], values.shape[-1])
        torch.bmm(s, values, out=acc)
        if state is not None:
            old_top, old_total, old_acc = state
            both = torch.maximum(old_top, top)
            old, new = torch.exp2(old_top - both), torch.exp2(top - both)
            top, total, acc = both, old_total * old + total * new, old_acc.mul_(old).addcmul_(acc, new)
        state = top, total, acc
    assert state is not None, "a batch has at least one piece"
    return state


def backward(
    problem: Problem, layout: BlockLayout, terms: Terms, dout: Tensor, dlse: Tensor | None, q: Tensor, k: Tensor,
    v: Tensor, out: Tensor, lse: Tensor,
) -> tuple[Tensor, ...]:  # fmt: skip
    """(dq, dk, dv), and dsink_logits where there are sinks."""
    bq, bk, p = layout.block_q, layout.block_kv, problem
    plan = batches_of(layout, problem)
    there = plan.readable.attended(terms.key_lengths)
    dout = there.of_rows(dout)
    qt, dot = (tile(x, plan.query_tiles, bq) for x in (there.of_rows(q), dout))
    kt, vt = (tile(there.of_keys(x), plan.key_tiles, bk) for x in (k, v))
    delta, lse = row_terms(dout, dlse, out, lse, qt.flat.dtype)
    delta_t = tile(delta[..., None], plan.query_tiles, bq)
    # Rows that do not exist have probabilities of 0, whatever ALiBi makes of their scores.
    lse_t = tile((lse * LOG2E)[..., None], plan.query_tiles, bq, padding=torch.inf)
    dq = zeros(p, p.H, plan.query_tiles, bq, p.D, qt.flat)
    dk, dv = (zeros(p, p.G, plan.key_tiles, bk, size, qt.flat) for size in (p.D, p.E))
    scratch = Scratch(qt.flat)
    scorer = Scorer(problem, plan, terms, bq, bk, scratch)
    for batch in plan.batches:
        for where in uses(batch):
            rows = [rows_of(x, batch, where) for x in (qt, dot, delta_t, lse_t)]
            _batch_backward(batch, where, rows, kt, vt, dq, dk, dv, scorer, scratch)
    gradients = dq.untiled(p.Q, q.dtype), dk.untiled(p.K, k.dtype), dv.untiled(p.K, v.dtype)
    return gradients if terms.sink_logits is None else (*gradients, sink_gradient(delta, lse, terms.sink_logits))


def _batch_backward(
    batch: Batch,
    where: Where,
    rows: list[Tensor],
    kt: Tiled,
    vt: Tiled,
    dq: Tiled,
    dk: Tiled,
    dv: Tiled,
    scorer: Scorer,
    scratch: Scratch,
) -> None:
    q, do, delta, lse = rows
    scale = scorer.terms.scale
    dq_here = None
    for piece in batch.pieces:
        keys = keys_of(kt, batch, piece, where, scorer.group, scratch, "k")
        values = keys_of(vt, batch, piece, where, scorer.group, scratch, "v")
        prob, tanh = scorer(q, keys, batch, piece, where, keep_tanh=True)
        prob.sub_(lse).exp2_()
        ds = scratch.take("ds", *prob.shape)
        torch.bmm(do, values.mT, out=ds)
        share = scratch.take("dv", *values.shape)
        torch.bmm(prob.mT, do, out=share)
        add(dv, batch, piece, where, scorer.group, share)
        ds.sub_(delta).mul_(prob)
        if tanh is not None:
            ds.mul_(tanh.square_().neg_().add_(1.0))
        step = scratch.take("dq", *q.shape) if dq_here is None else dq_here
        beta = 0 if dq_here is None else 1
        dq_here = torch.baddbmm(step, ds, keys, beta=beta, alpha=scale, out=step)
        share = scratch.take("dk", *keys.shape)
        torch.baddbmm(share, ds.mT, q, beta=0, alpha=scale, out=share)
        add(dk, batch, piece, where, scorer.group, share)
    assert dq_here is not None, "a batch has at least one piece"
    store(dq, batch, where, dq_here)
