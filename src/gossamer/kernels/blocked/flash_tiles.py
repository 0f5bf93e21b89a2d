"""Tiles of a layout on a CPU by torch's flash attention operator, where rows keep keys that are not consecutive.

The batches are those of `batches.py`: query tiles whose keys are a view, or are gathered. Heads that share their keys
share the gathered ones, and a mask is added where a batch has partial tiles.
"""

from __future__ import annotations

from dataclasses import dataclass, field, replace
from functools import partial
from typing import NamedTuple

import torch
from torch import Tensor

from gossamer.kernels.blocked.batches import Batch, BatchPlan, Piece, plan_batches
from gossamer.kernels.blocked.flash import combined, features_of, finished, flash, flash_backward, operands, widened
from gossamer.kernels.blocked.tile_masks import KEEP_BYTES
from gossamer.kernels.blocked.tiles import Scratch, Tiled, Where, add, keys_of, rows_of, store, tile, uses
from gossamer.kernels.contract import Terms
from gossamer.kernels.row_formulas import row_terms, sink_gradient
from gossamer.layouts.block import BlockLayout
from gossamer.memo import Memos
from gossamer.plan.problem import Problem


class Bias(NamedTuple):
    """The numbers that are added to the scores of a piece."""

    scores: Tensor | None = None  # (n or 1, 1, block_q, keys): 0 or -inf; None where every pair is kept
    empty: Tensor | None = None  # (n or 1, 1, block_q): rows that keep nothing; None where there are none


@dataclass
class TilePlan:
    """The batches of a layout, with the masks of their pieces; `heads` have lists of their own, `group` share them."""

    batches: BatchPlan
    heads: int
    group: int
    block_q: int
    block_kv: int
    dtype: torch.dtype
    _kept: dict[int, Bias] = field(default_factory=dict)
    _room: int = KEEP_BYTES

    def bias(self, piece: Piece) -> Bias:
        """Made once for each piece while all are small together."""
        if not piece.masks:
            return Bias()
        bias = self._kept.get(id(piece))
        if bias is None:
            bias = self._bias(piece)
            assert bias.scores is not None
            if bias.scores.nbytes <= self._room:
                self._room -= bias.scores.nbytes
                self._kept[id(piece)] = bias
        return bias

    def _bias(self, piece: Piece) -> Bias:
        n = max(len(ids) for _, _, ids in piece.masks)
        scores = torch.zeros(n, self.block_q, piece.tiles, self.block_kv, dtype=self.dtype, device="cpu")
        for first, end, ids in piece.masks:
            scores[:, :, first:end].masked_fill_(self.batches.masks.dropped(ids).transpose(1, 2), -torch.inf)
        empty = scores.amax((2, 3)) == -torch.inf
        return Bias(scores.view(n, 1, self.block_q, -1), empty[:, None] if empty.any() else None)


_plans: Memos[TilePlan] = Memos()  # of layouts


def plan_of(layout: BlockLayout, problem: Problem) -> TilePlan:
    """The plan of a layout, made once for each set of shapes and kept as long as the layout."""
    p = problem
    key = (p.B, p.H, p.G, p.D, p.E, p.dtype == "float64")
    return _plans.of(layout).get_or_make(key, partial(_plan, layout, p))


def _plan(layout: BlockLayout, problem: Problem) -> TilePlan:
    _, hl = layout.lead
    heads = problem.G if hl == 1 else problem.H
    batches = plan_batches(layout, replace(problem, H=heads))
    dtype = torch.float64 if problem.dtype == "float64" else torch.float32
    return TilePlan(batches, heads, problem.H // heads, layout.block_q, layout.block_kv, dtype)


def _queries(plan: TilePlan, x: Tensor, padding: float = 0.0) -> Tiled:
    """(B, H, Q, features) in tiles, each with the rows of all heads of a group."""
    T, edge = plan.batches.query_tiles, plan.block_q
    tiled = tile(x, T, edge, padding)
    if plan.group == 1:
        return tiled
    size = x.shape[-1]
    flat = tiled.flat.view(-1, plan.group, T, edge, size).transpose(1, 2).reshape(-1, plan.group * edge, size)
    return Tiled(flat, plan.heads, T, plan.group * edge)


def _untiled(plan: TilePlan, x: Tiled, problem: Problem) -> Tensor:
    """Back to (B, H, Q, features)."""
    p, size = problem, x.flat.shape[-1]
    flat = x.flat
    if plan.group > 1:
        flat = flat.view(p.B * plan.heads, x.tiles, plan.group, plan.block_q, size).transpose(1, 2)
    return flat.reshape(p.B, p.H, x.tiles * plan.block_q, size)[:, :, : p.Q]


def _keys(plan: TilePlan, x: Tensor) -> Tiled:
    return tile(x, plan.batches.key_tiles, plan.block_kv)


def forward(plan: TilePlan, problem: Problem, terms: Terms, q: Tensor, k: Tensor, v: Tensor) -> tuple[Tensor, Tensor]:
    """(out, lse)."""
    S, dtype, there = features_of(problem, None), q.dtype, plan.batches.readable.attended(None)
    qt = _queries(plan, widened(there.of_rows(q), S))
    kt, vt = (_keys(plan, widened(there.of_keys(x), S)) for x in (k, v))
    out, lse = qt._replace(flat=torch.zeros_like(qt.flat)), qt._replace(flat=qt.flat.new_full(_sums(qt), -torch.inf))
    scratch = Scratch(qt.flat)
    for batch in plan.batches.batches:
        for where in uses(batch):
            rows, result = _heads(plan, rows_of(qt, batch, where)), None
            for piece in batch.pieces:
                keys, values = (_piece(plan, x, batch, piece, where, scratch, n) for x, n in ((kt, "k"), (vt, "v")))
                bias = plan.bias(piece)
                tile_out, sums = flash(rows, keys, values, 0.0, False, attn_mask=bias.scores, scale=terms.scale)
                if bias.empty is not None:
                    sums = sums.masked_fill(bias.empty, -torch.inf)
                result = (tile_out, sums) if result is None else combined(*result, tile_out, sums)
            assert result is not None, "a batch has at least one piece"
            tile_out, sums = result
            store(out, batch, where, tile_out.reshape(batch.n, qt.edge, S))
            store(lse, batch, where, sums.reshape(batch.n, qt.edge, 1))
    sums = _untiled(plan, lse, problem).squeeze(-1).contiguous()
    return finished(_untiled(plan, out, problem)[..., : problem.E], sums, terms.sink_logits, dtype)


def _sums(x: Tiled) -> tuple[int, int, int]:
    """The shape of a number for each row."""
    tiles, edge, _ = x.flat.shape
    return tiles, edge, 1


def _heads(plan: TilePlan, x: Tensor) -> Tensor:
    """The rows of query tiles (n, group * block_q, features) as (n, group, block_q, features)."""
    return x.view(len(x), plan.group, plan.block_q, -1)


def _piece(plan: TilePlan, x: Tiled, batch: Batch, piece: Piece, where: Where, scratch: Scratch, name: str) -> Tensor:
    """Keys or values of a piece, (n, group, keys, features), which the heads of a group share."""
    heads = 1 if plan.group > 1 else plan.heads // x.heads  # of the lists, for each head of keys
    return keys_of(x, batch, piece, where, heads, scratch, name)[:, None].expand(-1, plan.group, -1, -1)


def backward(
    plan: TilePlan, problem: Problem, terms: Terms, dout: Tensor, dlse: Tensor | None, q: Tensor, k: Tensor, v: Tensor,
    out: Tensor, lse: Tensor,
) -> tuple[Tensor, ...]:  # fmt: skip
    """(dq, dk, dv), and dsink_logits where there are sinks."""
    p, there = problem, plan.batches.readable.attended(None)
    dout, q, k, v = there.of_rows(dout), there.of_rows(q), there.of_keys(k), there.of_keys(v)
    given = operands(dout, dlse, q, k, v, out, lse, features_of(p, dlse), some_empty=True)
    dot, qt, outs = (_queries(plan, x) for x in (given.dout, given.q, given.out))
    sums = _queries(plan, given.lse[..., None], padding=torch.inf)
    kt, vt = _keys(plan, given.k), _keys(plan, given.v)
    dq, dk, dv = (x._replace(flat=torch.zeros_like(x.flat)) for x in (qt, kt, vt))
    scratch, per_key = Scratch(qt.flat), 1 if plan.group > 1 else plan.heads // p.G
    for batch in plan.batches.batches:
        for where in uses(batch):
            do, rows, o = (_heads(plan, rows_of(x, batch, where)) for x in (dot, qt, outs))
            row_sums, mine = _heads(plan, rows_of(sums, batch, where)).squeeze(-1), None
            for piece in batch.pieces:
                keys, values = (_piece(plan, x, batch, piece, where, scratch, n) for x, n in ((kt, "k"), (vt, "v")))
                drows, *shares = flash_backward(
                    do, rows, keys, values, o, row_sums, 0.0, False, attn_mask=plan.bias(piece).scores,
                    scale=terms.scale,
                )  # fmt: skip
                mine = drows if mine is None else mine.add_(drows)
                for x, share in zip((dk, dv), shares, strict=True):
                    add(x, batch, piece, where, per_key, share.squeeze(1) if plan.group == 1 else share.sum(1))
            assert mine is not None, "a batch has at least one piece"
            store(dq, batch, where, mine.reshape(batch.n, qt.edge, -1))
    gradients = (
        _untiled(plan, dq, p)[..., : p.D].to(q.dtype).contiguous(),
        dk.positions(p.K)[..., : p.D].to(k.dtype).contiguous(),
        dv.positions(p.K)[..., : p.E].to(v.dtype).contiguous(),
    )
    if terms.sink_logits is None:
        return gradients
    return (*gradients, sink_gradient(*row_terms(dout, dlse, out, lse, given.q.dtype), terms.sink_logits))
