"""SparseK attention by operations of torch, on any device: chunks of queries over their window and a list of live keys.

Memory is that of a chunk: queries times (window + live keys). The list of a chunk is made from that of the chunk before
it and the keys that have left the window since, so that all lists together take time linear in N.
"""

from __future__ import annotations

import math
from collections.abc import Iterator
from typing import NamedTuple

import torch
from torch import Tensor

from gossamer.kernels.row_formulas import compute_dtype
from gossamer.sparse_k.launch.problem import Memory, Operands, Options, SparseKGradients

QUERIES = 256  # of a chunk at most
FEW = 64  # and where few keys are attended: a chunk has its own keys, and those that live at one of its queries alone
LOG2E = math.log2(math.e)
MOST = 2**24  # scores that are held at once, or those of one unit


class Chunk(NamedTuple):
    """Some queries of some units, a unit being a batch element and a head of u.

    The keys of the window are in the first columns of scores, one slice of all keys, those that live in the last ones.
    """

    units: slice
    rows: slice
    near: slice
    live: Tensor  # (units, n) int64
    far: Tensor  # (m, keys of the window) bool: those that are not attended
    dropped: Tensor  # (units, 1, m, n) bool: likewise of those that live
    gated: Tensor | None  # (units, 1, m, n) bool: those whose gate is inside (0, 1) and has a gradient, attended or not
    m: Tensor  # (units, 1, m, n): the gates; those of keys that are not listed are 1

    def listed(self, x: Tensor) -> Tensor:
        """The columns of the keys that live, of scores (units, R, m, keys)."""
        return x[..., self.near.stop - self.near.start :]


def forward(x: Operands, o: Options) -> tuple[Tensor, Tensor]:
    """out (B, H, N, E) in q's type, and lse (B, H, N) in the type of the scores."""
    (B, H, N, _), E = x.q.shape, x.v.shape[3]
    q, k, v = _units(x)
    out, lse = q.new_empty(*q.shape[:3], E), q.new_empty(q.shape[:3])
    for c in _chunks(x, o, gradients=False):
        s = _masked(_scores(q, k, c, o), c, o)
        if s.dtype == torch.float64:  # as it is defined: what is computed in float64 is compared with that
            row_lse, total = s.logsumexp(-1, keepdim=True), None
            p = _exp(s.sub_(row_lse))
        else:
            largest = s.amax(-1, keepdim=True)
            largest.masked_fill_(largest.abs() == torch.inf, 0)
            p = _exp(s.sub_(largest))
            total = p.sum(-1, keepdim=True)
            row_lse = largest + total.log()
        lse[c.units, :, c.rows] = row_lse.squeeze(-1)
        part = _product(_valued(p, c, o), _columns(v, c))
        out[c.units, :, c.rows] = part if total is None else part.div_(total)
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
    with_gates = o.gate is not None or o.straight
    for c in _chunks(x, o, with_gates):
        s, rows, keys = _scores(q, k, c, o), q[c.units, :, c.rows], _columns(k, c)
        row_lse, row_delta = lse[c.units, :, c.rows, None], delta[c.units, :, c.rows, None]
        douts = dout[c.units, :, c.rows]
        # What the gradient of gates reads, of which p and ds take the place.
        plain = c.listed(s).clone() if o.gate in ("kv", "logit") or o.straight else None
        p = _exp(_masked(s, c, o).sub_(row_lse))
        dp = _product(douts, _columns(v, c).mT)
        of_gates = None if c.gated is None else c.listed(dp).clone()
        if o.gate in ("v", "kv"):
            c.listed(dp).mul_(c.m)
        ds = dp.sub_(row_delta).mul_(p)
        if of_gates is not None and c.gated is not None:
            weight = c.listed(p)
            if plain is not None and (o.straight or o.gate == "logit"):
                weight = _exp(plain - row_lse)
            dm = of_gates.sub_(row_delta).mul_(weight) if o.gate == "logit" else of_gates.mul_(weight)
            if plain is not None and o.gate == "kv":
                dm.add_(plain.mul_(c.listed(ds)))
            dm = dm.masked_fill_(~c.gated, 0).to(du.dtype).sum(1)
            du[c.units].scatter_add_(1, c.live, dm.sum(1))
            dtau[c.units, c.rows] = -dm.sum(2)
        if o.gate == "kv":
            c.listed(ds).mul_(c.m)
        ds.mul_(o.scale)
        dq[c.units, :, c.rows] = _product(ds, keys)
        _add_rows(dk[c.units], c, _sums(ds, rows))
        _add_rows(dv[c.units], c, _sums(_valued(p, c, o), douts))
    dk, dv = (_sum_units(of, t) for of, t in ((dk, x.k), (dv, x.v)))
    return SparseKGradients(dq.view(x.q.shape).to(x.q.dtype), dk, dv, du.view(x.u.shape), dtau.view(x.u.shape))


def queries_of(o: Options) -> int:
    """The queries of a chunk: about as many as keys are attended."""
    return min(QUERIES, 1 << max(FEW, o.window + o.live).bit_length() - 1)


def memory(x: Operands, o: Options) -> Memory:
    """The bytes of five times the scores of a chunk, and of its keys and values; supports have their expected size."""
    (B, H, N, D), E, size = x.q.shape, x.v.shape[3], compute_dtype(x.q.dtype).itemsize
    queries = min(queries_of(o), N)
    columns = max(1, min(N, min(o.window, N) * (1 if o.causal else 2) + o.live) + queries)
    scores = min(MOST, B * H * queries * columns)
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


def _chunks(x: Operands, o: Options, gradients: bool) -> Iterator[Chunk]:
    """Every chunk; with few units at a time where many scores would be held at once.

    Args:
        gradients: whether `gated` is wanted.
    """
    u, tau, last, last_gated = (t.flatten(0, 1) for t in (x.u, x.tau, x.last, x.last_gated))
    wide = compute_dtype(x.q.dtype)
    (units, N), R = u.shape, x.q.shape[1] // x.u.shape[1]
    for rows, live in _lists(last_gated, o):
        near = slice(max(rows.start - o.window, 0), rows.stop if o.causal else min(rows.stop + o.window, N))
        query = torch.arange(rows.start, rows.stop, device=u.device)[:, None]
        key = torch.arange(near.start, near.stop, device=u.device)
        far = (key < query - o.window) | (key > (query if o.causal else query + o.window))
        step = max(1, MOST // (R * (rows.stop - rows.start) * (len(key) + live.shape[1])))
        for unit in range(0, units, step):
            of = slice(unit, unit + step)
            keys = live[of].clamp(min=0)
            past = torch.where(live[of] < 0, N, keys)[:, None] < query - o.window
            if not o.causal:
                past = past | ((keys[:, None] > query + o.window) & (live[of] >= 0)[:, None])
            kept = past & (query <= last[of].gather(1, keys)[:, None])
            m = (u[of].gather(1, keys)[:, None] - tau[of, rows, None]).clamp_(0, 1)
            gated = None
            if gradients:  # before the rounding of scores of float64
                gated = past & (query <= last_gated[of].gather(1, keys)[:, None]) if o.straight else kept
                gated = (gated & (m > 0) & (m < 1))[:, None]
            m = m.masked_fill_(~past, 1).to(wide)
            yield Chunk(of, rows, near, keys, far, ~kept[:, None], gated, m[:, None])


def _lists(last_gated: Tensor, o: Options) -> Iterator[tuple[slice, Tensor]]:
    """(queries, keys (units, n)) of each chunk: the keys that live past their window, ascending, then -1."""
    units, N = last_gated.shape
    queries = queries_of(o)
    keys = torch.arange(N, device=last_gated.device)
    if not o.causal:
        live = _compact(keys.expand(units, -1), last_gated >= 0, o.live if o.certain else None)
        for start in range(0, N, queries):
            yield slice(start, min(start + queries, N)), live
        return
    # Keys that are never kept past their window are in no list.
    last_gated = torch.where(last_gated > keys + o.window, last_gated, -1)
    live, seen = keys.new_empty(units, 0), 0
    most = o.live + queries if o.certain else None
    for start in range(0, N, queries):
        end = min(start + queries, N)
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
    """Rows (units, n, size) of k or v."""
    x = x[c.units]
    return torch.cat([x[:, c.near], x.gather(1, c.live[..., None].expand(-1, -1, x.shape[2]))], 1)


def _add_rows(x: Tensor, c: Chunk, rows: Tensor) -> None:
    near = c.near.stop - c.near.start
    x[:, c.near] += rows[:, :near]
    x.scatter_add_(1, c.live[..., None].expand(-1, -1, x.shape[2]), rows[:, near:])


def _product(x: Tensor, y: Tensor) -> Tensor:
    """(units, R, m, n) times (units, n, size)."""
    return torch.bmm(x.flatten(1, 2), y).unflatten(1, x.shape[1:3])


def _sums(x: Tensor, y: Tensor) -> Tensor:
    """(units, n, size): the sums over all rows of (units, R, m, n) times (units, R, m, size)."""
    return torch.bmm(x.flatten(1, 2).mT, y.flatten(1, 2))


def _scores(q: Tensor, k: Tensor, c: Chunk, o: Options) -> Tensor:
    """s (units, R, m, n) before any gate."""
    return _product(q[c.units, :, c.rows] * o.scale, _columns(k, c).mT)


def _masked(s: Tensor, c: Chunk, o: Options) -> Tensor:
    """The scores under their gates, -inf where nothing is attended, in place."""
    listed = c.listed(s)
    if o.gate == "kv":
        listed.mul_(c.m)
    elif o.gate == "logit":
        listed.add_(c.m.log())
    listed.masked_fill_(c.dropped, -torch.inf)
    s[..., : c.far.shape[1]].masked_fill_(c.far, -torch.inf)
    return s


def _exp(x: Tensor) -> Tensor:
    """exp in place: in float32 torch's own takes twenty times as long where it underflows, as at every dropped pair."""
    return x.exp_() if x.dtype == torch.float64 else x.mul_(LOG2E).exp2_()


def _valued(p: Tensor, c: Chunk, o: Options) -> Tensor:
    """The weights of values, in place: p, times the gates where these multiply values."""
    if o.gate in ("v", "kv"):
        c.listed(p).mul_(c.m)
    return p
