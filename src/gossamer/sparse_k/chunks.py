"""SparseK attention by operations of torch, on any device: chunks of queries over their window and a list of live keys.

Memory is that of a chunk: queries times (window + live keys). The list of a chunk is made from that of the chunk before
it and the keys that have left the window since, so that all lists together take time linear in N.
"""

from __future__ import annotations

from collections.abc import Iterator
from typing import NamedTuple

import torch
from torch import Tensor

from gossamer.kernels.row_formulas import compute_dtype
from gossamer.sparse_k.launch.problem import Memory, Operands, Options, SparseKGradients

QUERIES = 256  # of a chunk
MOST = 2**24  # scores that are held at once, or those of one unit


class Chunk(NamedTuple):
    """Some queries of some units, a unit being a batch element and a head of u."""

    units: slice
    rows: slice
    columns: Tensor  # (units, n) int64: the keys of the window, then those that live
    pairs: Tensor  # (units, 1, m, n) bool: those that are attended
    gated: Tensor  # (units, 1, m, n) bool: those whose gate is inside (0, 1) and has a gradient, attended or not
    m: Tensor  # (units, 1, m, n): the gates, 1 in the window


def forward(x: Operands, o: Options) -> tuple[Tensor, Tensor]:
    """out (B, H, N, E) in q's type, and lse (B, H, N) in the type of the scores."""
    (B, H, N, _), E = x.q.shape, x.v.shape[3]
    q, k, v = _units(x)
    out, lse = q.new_empty(*q.shape[:3], E), q.new_empty(q.shape[:3])
    for c in _chunks(x, o):
        s = _scores(q, k, c, o)
        row_lse = torch.logsumexp(_masked(s, c, o), -1)
        p = _weights(s, row_lse, c, o)
        out[c.units, :, c.rows] = _valued(p, c, o) @ _columns(v, c)
        lse[c.units, :, c.rows] = row_lse
    return out.view(B, H, N, E).to(x.q.dtype), lse.view(B, H, N)


def backward(dout: Tensor, dlse: Tensor | None, out: Tensor, lse: Tensor, x: Operands, o: Options) -> SparseKGradients:
    """The gradients, each in the type of its operand."""
    q, k, v = _units(x)
    units, R, N, _ = q.shape
    dout = dout.to(q.dtype).reshape(units, R, N, -1)
    delta = (dout * out.to(q.dtype).view(dout.shape)).sum(-1)
    if dlse is not None:
        delta = delta - dlse.view(delta.shape)
    lse = lse.view(delta.shape)
    dq, dk, dv = (torch.zeros_like(t) for t in (q, k, v))
    du, dtau = (x.u.new_zeros(units, N) for _ in range(2))
    for c in _chunks(x, o):
        s = _scores(q, k, c, o)
        row_lse, rows = lse[c.units, :, c.rows], q[c.units, :, c.rows]
        p = _weights(s, row_lse, c, o)
        douts = dout[c.units, :, c.rows]
        dp = douts @ _columns(v, c).mT
        dp_less_delta = (dp * c.m if o.gate in ("v", "kv") else dp) - delta[c.units, :, c.rows, None]
        ds = p * dp_less_delta
        if o.gate is not None or o.straight:
            weight = torch.exp(s - row_lse[..., None]) if o.straight or o.gate == "logit" else p
            dm = weight * (dp_less_delta if o.gate == "logit" else dp)
            dm = dm + ds * s if o.gate == "kv" else dm
            dm = torch.where(c.gated, dm, 0).to(du.dtype).sum(1)
            du[c.units].scatter_add_(1, c.columns, dm.sum(1))
            dtau[c.units, c.rows] = -dm.sum(2)
        ds = (ds * c.m if o.gate == "kv" else ds) * o.scale
        dq[c.units, :, c.rows] = ds @ _columns(k, c)
        _add_rows(dk[c.units], c, (ds.mT @ rows).sum(1))
        _add_rows(dv[c.units], c, (_valued(p, c, o).mT @ douts).sum(1))
    dk, dv = (_sum_units(of, t) for of, t in ((dk, x.k), (dv, x.v)))
    return SparseKGradients(dq.view(x.q.shape).to(x.q.dtype), dk, dv, du.view(x.u.shape), dtau.view(x.u.shape))


def memory(x: Operands, o: Options) -> Memory:
    """The bytes of five times the scores of a chunk, and of its keys and values; supports have their expected size."""
    (B, H, N, D), E, size = x.q.shape, x.v.shape[3], compute_dtype(x.q.dtype).itemsize
    columns = max(1, min(N, min(o.window, N) * (1 if o.causal else 2) + o.live) + min(QUERIES, N))
    scores = min(MOST, B * H * min(QUERIES, N) * columns)
    lists_bytes = size * (5 * scores + min(B * x.u.shape[1], 1 + MOST // columns) * columns * (D + E))
    return Memory(lists_bytes, size * B * H * N * (D + E))


def _units(x: Operands) -> tuple[Tensor, Tensor, Tensor]:
    """q (units, R, N, D), k (units, N, D) and v (units, N, E) in the type of the scores."""
    U, G, wide = x.u.shape[1], x.k.shape[1], compute_dtype(x.q.dtype)
    q = x.q.to(wide).unflatten(1, (U, -1)).flatten(0, 1)
    k, v = (t.to(wide).repeat_interleave(U // G, 1).flatten(0, 1) for t in (x.k, x.v))
    return q, k, v


def _sum_units(gradients: Tensor, like: Tensor) -> Tensor:
    """The gradient of k or v, summed over the units that share a key head; `gradients` is (units, N, size)."""
    B, G = like.shape[:2]
    return gradients.view(B, G, -1, *gradients.shape[1:]).sum(2).to(like.dtype)


def _chunks(x: Operands, o: Options) -> Iterator[Chunk]:
    """Every chunk; with few units at a time where many scores would be held at once."""
    u, tau, last, last_gated = (t.flatten(0, 1) for t in (x.u, x.tau, x.last, x.last_gated))
    wide = compute_dtype(x.q.dtype)
    (units, N), R = u.shape, x.q.shape[1] // x.u.shape[1]
    for rows, live in _lists(last_gated, o):
        first = max(rows.start - o.window, 0)
        end = rows.stop if o.causal else min(rows.stop + o.window, N)
        near = torch.arange(first, end, device=u.device)
        step = max(1, MOST // (R * (rows.stop - rows.start) * (len(near) + live.shape[1])))
        for unit in range(0, units, step):
            of = slice(unit, unit + step)
            columns = torch.cat([near.expand(len(live[of]), -1), live[of].clamp(min=0)], 1)
            query = torch.arange(rows.start, rows.stop, device=u.device)[:, None]
            distance = query - columns[:, None]
            inside = (distance >= 0 if o.causal else distance.abs() >= 0) & (distance.abs() <= o.window)
            past = (distance if o.causal else distance.abs()) > o.window
            listed = torch.arange(columns.shape[1], device=u.device) >= len(near)
            there = torch.cat([near.expand(len(live[of]), -1), live[of]], 1)[:, None] >= 0
            past = past & listed & there
            kept = past & (query <= last[of].gather(1, columns)[:, None])
            gated = past & (query <= last_gated[of].gather(1, columns)[:, None]) if o.straight else kept
            inside = inside & ~listed
            m = (u[of].gather(1, columns)[:, None] - tau[of, rows, None]).clamp(0, 1)
            gated = gated & (m > 0) & (m < 1)  # before the rounding of scores of float64
            m = torch.where(past, m, 1).to(wide)
            yield Chunk(of, rows, columns, (inside | kept)[:, None], gated[:, None], m[:, None])


def _lists(last_gated: Tensor, o: Options) -> Iterator[tuple[slice, Tensor]]:
    """(queries, keys (units, n)) of each chunk: the keys that live past their window, ascending, then -1."""
    units, N = last_gated.shape
    keys = torch.arange(N, device=last_gated.device)
    if not o.causal:
        live = _compact(keys.expand(units, -1), last_gated >= 0, o.live if o.certain else None)
        for start in range(0, N, QUERIES):
            yield slice(start, min(start + QUERIES, N)), live
        return
    # Keys that are never kept past their window are in no list.
    last_gated = torch.where(last_gated > keys + o.window, last_gated, -1)
    live, seen = keys.new_empty(units, 0), 0
    most = o.live + QUERIES if o.certain else None
    for start in range(0, N, QUERIES):
        end = min(start + QUERIES, N)
        out = max(end - o.window - 1, seen)
        live = torch.cat([live, keys[seen:out].expand(units, -1)], 1)
        there = (live >= 0) & (last_gated.gather(1, live.clamp(min=0)) >= start)
        live, seen = _compact(live, there, most), out
        yield slice(start, end), live


def _compact(keys: Tensor, there: Tensor, most: int | None) -> Tensor:
    """The keys that are there, in order, then -1. Where `most` is None the host reads their number."""
    size = int(there.sum(1).max()) if most is None else min(most, keys.shape[1])
    place = torch.where(there, there.cumsum(1) - 1, keys.shape[1])
    compact = keys.new_full((keys.shape[0], keys.shape[1] + 1), -1).scatter_(1, place, keys)
    return compact[:, :size]


def _columns(x: Tensor, c: Chunk) -> Tensor:
    """Rows (units, 1, n, size) of k or v."""
    return x[c.units].gather(1, c.columns[..., None].expand(-1, -1, x.shape[2]))[:, None]


def _add_rows(x: Tensor, c: Chunk, rows: Tensor) -> None:
    x.scatter_add_(1, c.columns[..., None].expand_as(rows), rows)


def _scores(q: Tensor, k: Tensor, c: Chunk, o: Options) -> Tensor:
    """s (units, R, m, n) before any gate."""
    return (q[c.units, :, c.rows] * o.scale) @ _columns(k, c).mT


def _gated_scores(s: Tensor, c: Chunk, o: Options) -> Tensor:
    if o.gate == "kv":
        return s * c.m
    return s + c.m.log() if o.gate == "logit" else s


def _masked(s: Tensor, c: Chunk, o: Options) -> Tensor:
    return _gated_scores(s, c, o).masked_fill(~c.pairs, -torch.inf)


def _weights(s: Tensor, lse: Tensor, c: Chunk, o: Options) -> Tensor:
    return torch.exp(_masked(s, c, o) - lse[..., None])


def _valued(p: Tensor, c: Chunk, o: Options) -> Tensor:
    """The weights of values: p, times the gates where these multiply values."""
    return p * c.m if o.gate in ("v", "kv") else p
