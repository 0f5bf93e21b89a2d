"""Attention over the edges of a graph, on a CPU: products that are sampled at them, and sums of the rows they name.

The score of an edge is a sampled product of two tables (SDDMM), a row of the output a sum of value rows with
probabilities as weights (SpMM). Both are operators of torch that read rows where they lie: nothing of the size edges x
features is made. The backward computes the probabilities again from lse, and sums over the transposed lists.
"""

from __future__ import annotations

import warnings
from collections.abc import Callable
from functools import cache
from math import inf
from typing import NamedTuple

import torch
from torch import Tensor

from gossamer.kernels.blocked.gather_lists import EdgeLists, GatherPart, Sums, plan_parts
from gossamer.kernels.blocked.tiles import LOG2E
from gossamer.kernels.contract import Scoring, Terms
from gossamer.kernels.row_formulas import Attended, compute_dtype, row_terms, sink_gradient
from gossamer.layouts.gather import GatherLayout
from gossamer.memo import Memos
from gossamer.plan.problem import Problem

# Numbers of edges are passed over in pieces that torch does not share among threads: a pass takes less than to wake
# them, and much less than to wait for one whose core is busy.
SERIAL = (1 << 15) - 1

_parts: Memos[tuple[GatherPart, ...]] = Memos()  # of layouts


def parts_of(layout: GatherLayout, problem: Problem) -> tuple[GatherPart, ...]:
    """The parts of a layout, made once for each set of shapes and kept as long as the layout."""
    p = problem
    return _parts.of(layout).get_or_make((p.B, p.H, p.G), lambda: plan_parts(layout, p))


def forward(
    problem: Problem, scoring: Scoring, q: Tensor, k: Tensor, v: Tensor, layout: GatherLayout, *vectors: Tensor | None
) -> tuple[Tensor, Tensor]:
    """(out, lse); the score vectors are key_lengths, sink_logits and alibi_slopes, or None."""
    p, terms = problem, Terms(*scoring, *vectors)
    dtype, there = compute_dtype(q.dtype), _attended(layout, p, terms)
    qs, ks, vs = (_table(x, dtype) for x in (there.of_rows(q), there.of_keys(k), there.of_keys(v)))
    out: Tensor | None = None
    lse = qs.new_empty(len(qs))
    sinks = None if terms.sink_logits is None else _rows_of_heads(terms.sink_logits.to(dtype), p)
    for part in parts_of(layout, p):
        lists, at = part.lists, _places(part, p)
        table = qs[at.rows]
        s, _ = _scores(part, p, terms, table, ks[at.keys], table.new_zeros(len(table)))
        top = torch.segment_reduce(s, "max", offsets=lists.starts, unsafe=True)
        # The clamp makes exp(-inf - top) zero, not NaN, in a row that keeps nothing.
        top.clamp_(min=torch.finfo(dtype).min)
        for some, rows in zip(s.split(SERIAL), lists.rows.split(SERIAL), strict=True):
            _exp(some.sub_(top.index_select(0, rows)))
        weights = s
        total = _row_sums(lists.sums, weights)
        acc = _weighted_sums(vs[at.keys], lists.keys, lists.sums, weights)
        if sinks is not None:
            logit = sinks[at.rows]
            both = torch.maximum(top, logit)
            shrink = torch.exp(top - both)
            total = total.mul_(shrink).add_(torch.exp(logit - both))
            acc.mul_(shrink[:, None])
            top = both
        # A row that keeps anything has a total of at least 1, its largest term (or its sink).
        out = _put(out, acc.div_(total.clamp(min=1.0)[:, None]), at.rows, len(qs))
        torch.add(top, total.log_(), out=lse[at.rows])
    assert out is not None, "there is a part"
    return out.to(q.dtype).view(p.B, p.H, p.Q, p.E), lse.view(p.B, p.H, p.Q)


def backward(
    problem: Problem, scoring: Scoring, dout: Tensor, dlse: Tensor | None, q: Tensor, k: Tensor, v: Tensor, out: Tensor,
    lse: Tensor, layout: GatherLayout, *vectors: Tensor | None,
) -> tuple[Tensor, ...]:  # fmt: skip
    """(dq, dk, dv), and dsink_logits where there are sinks."""
    p, terms = problem, Terms(*scoring, *vectors)
    dtype, there = compute_dtype(q.dtype), _attended(layout, p, terms)
    cleared = there.of_rows(dout)
    qs, ks, vs, douts = (_table(x, dtype) for x in (there.of_rows(q), there.of_keys(k), there.of_keys(v), cleared))
    delta, lse = row_terms(cleared, dlse, out, lse, dtype)
    minus_lse, minus_delta = lse.neg().view(-1), delta.mul(-terms.scale).view(-1)
    dq: Tensor | None = None
    dk: Tensor | None = None
    dv: Tensor | None = None
    for part in parts_of(layout, p):
        lists, at = part.lists, _places(part, p)
        turned = lists.transposed
        weights, tanh = _scores(part, p, terms, qs[at.rows], ks[at.keys], minus_lse[at.rows])
        ds = minus_delta[at.rows].index_select(0, lists.rows)
        _sampled(lists, douts[at.rows], vs[at.keys], terms.scale, ds)
        for some, some_ds in zip(weights.split(SERIAL), ds.split(SERIAL), strict=True):
            some_ds.mul_(_exp(some))
        if tanh is not None:
            ds.mul_(tanh.square_().neg_().add_(1.0))
        dq = _put(dq, _weighted_sums(ks[at.keys], lists.keys, lists.sums, ds), at.rows, len(qs))
        key_sums = _weighted_sums(douts[at.rows], turned.rows, turned.sums, weights.index_select(0, turned.edges))
        dv = _put(dv, key_sums, at.keys, len(vs), part.again)
        key_sums = _weighted_sums(qs[at.rows], turned.rows, turned.sums, ds.index_select(0, turned.edges))
        dk = _put(dk, key_sums, at.keys, len(ks), part.again)
    assert dq is not None and dk is not None and dv is not None, "there is a part"
    gradients = tuple(dx.to(x.dtype).view(x.shape) for dx, x in ((dq, q), (dk, k), (dv, v)))
    return gradients if terms.sink_logits is None else (*gradients, sink_gradient(delta, lse, terms.sink_logits))


DIRECTIONS: dict[str, Callable[..., tuple[Tensor, ...]]] = {"gather_forward": forward, "gather_backward": backward}


def _attended(layout: GatherLayout, p: Problem, terms: Terms) -> Attended:
    """The rows and keys that are read: only listed keys are, so that lengths alone leave some out.

    A row without keys is read where it has a sink, whose gradient is a sum over all rows.
    """
    walk, lengths = layout.rows.for_heads(p.H), terms.key_lengths
    if lengths is None:
        return Attended(None if terms.sink_logits is None else (walk.counts > 0)[..., None], None)
    some, lengths = walk.counts > 0, lengths[:, None, None]
    first = walk.indices[torch.where(some, walk.starts, 0)] if len(walk.indices) else walk.counts  # lists ascend
    below = torch.arange(p.K, device=lengths.device) < lengths
    return Attended((some & (first < lengths))[..., None], below[..., None])


class _Places(NamedTuple):
    """Where a part lies in the tables of all heads."""

    rows: slice
    keys: slice


def _places(part: GatherPart, p: Problem) -> _Places:
    first, last, group = part.first, part.first + part.heads - 1, p.H // p.G
    rows = slice(first * p.Q + part.begin, last * p.Q + part.end)
    return _Places(rows, slice(first // group * p.K, (last // group + 1) * p.K))


def _table(x: Tensor, dtype: torch.dtype) -> Tensor:
    """(B, heads, positions, features) as (B * heads * positions, features); a copy only where needed."""
    return x.to(dtype).contiguous().view(-1, x.shape[-1])


def _rows_of_heads(x: Tensor, p: Problem) -> Tensor:
    """Values of heads (H,) for each row (B * H * Q,)."""
    return x.repeat_interleave(p.Q).repeat(p.B)


def _put(whole: Tensor | None, part: Tensor, at: slice, size: int, add: bool = False) -> Tensor:
    """Results of all parts (size, features), with those of one at its place; of one part alone, its own."""
    if whole is None:
        if len(part) == size:
            return part
        whole = part.new_empty(size, part.shape[1])
    if add:
        whole[at].add_(part)
    else:
        whole[at].copy_(part)
    return whole


def _scores(
    part: GatherPart, p: Problem, terms: Terms, q: Tensor, k: Tensor, added: Tensor
) -> tuple[Tensor, Tensor | None]:
    """(scores (edges,) and a number of each row, `added` (rows,); tanh(s / softcap) or None)."""
    lists, cap = part.lists, terms.softcap
    s = added.index_select(0, lists.rows)
    head = torch.arange(part.first, part.first + part.heads, device="cpu")
    keys = lists.keys
    if terms.alibi_slopes is not None or terms.key_lengths is not None:
        group = p.H // p.G
        keys = keys - lists.of_heads((torch.div(head, group, rounding_mode="floor") - part.first // group) * p.K)
    if terms.alibi_slopes is not None:
        rows = lists.rows - lists.of_heads((head - part.first) * p.Q - part.begin - terms.q_offset)
        distance = (keys - rows).to(s.dtype)
        distance = distance.abs_().neg_() if terms.absolute else distance
        s.addcmul_(distance, lists.of_heads(terms.alibi_slopes.to(s.dtype).expand(p.B, p.H).reshape(-1)[head]))
    tanh = None
    if cap is None:
        _sampled(lists, q, k, terms.scale, s)
    else:
        tanh = _sampled(lists, q, k, terms.scale / cap, torch.zeros_like(s)).tanh_()
        s.add_(tanh, alpha=cap)
    if terms.key_lengths is not None:
        lengths = terms.key_lengths[torch.div(head, p.H, rounding_mode="floor")]
        s.masked_fill_(keys >= lists.of_heads(lengths), -inf)
    return s, tanh


def _exp(x: Tensor) -> Tensor:
    """exp in place: torch's own is slower than exp2, where it underflows many times."""
    return x.mul_(LOG2E).exp2_()


@cache
def _warned() -> None:
    """torch says once in a process that its sparse tensors may change; that is no matter of our user's."""
    with warnings.catch_warnings():
        warnings.simplefilter("ignore")
        torch.sparse_csr_tensor([0, 0], [], [], size=(1, 1), device="cpu")


def _sampled(lists: EdgeLists, a: Tensor, b: Tensor, scale: float, added: Tensor) -> Tensor:
    """scale * a[row] . b[key] of each edge, added to what is there, in place."""
    if len(added):
        _warned()
        size = len(a), len(b)
        edges = torch.sparse_csr_tensor(
            lists.starts, lists.keys, added, size=size, check_invariants=False, device="cpu"
        )
        torch.sparse.sampled_addmm(edges, a, b.T, alpha=scale, out=edges)
    return added


def _weighted_sums(table: Tensor, places: Tensor, sums: Sums, weights: Tensor) -> Tensor:
    """The sum of the table's rows that each list names, times their weights."""
    bag = torch.ops.aten._embedding_bag_forward_only.default
    run_sums, *_ = bag(table, places, sums.ends, False, 0, False, weights, True)
    return sums.whole(run_sums)


def _row_sums(sums: Sums, weights: Tensor) -> Tensor:
    """The sum of each row's weights."""
    return sums.whole(torch.segment_reduce(weights, "sum", offsets=sums.ends, unsafe=True))
