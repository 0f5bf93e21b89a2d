"""SparseK attention by operations of torch, on any device: chunks of queries over keys near them and keys that live.

The columns of a chunk are a run of keys, those of its windows, and a list of the keys before these that live at its
first query; where the run from the first key on is hardly longer, it takes the list's place. Memory is that of a chunk.
The list of a chunk is made from that of the chunk before it and the keys that have left the window since, so that all
lists together take time linear in N.

On a CPU an operation that reads a mask takes twenty times as long as arithmetic: which pairs are attended is a term of
the scores, and gates and their gradients are clamps.
"""

from __future__ import annotations

from collections.abc import Iterator
from typing import NamedTuple

import torch
from torch import Tensor

from gossamer.kernels.row_formulas import compute_dtype
from gossamer.sparse_k.launch.problem import Memory, Operands, Options, SparseKGradients

QUERIES = 256  # of a chunk at most
FEW = 64  # and where few keys are attended: a chunk has its own keys, and those that live at one of its queries alone
MOST = 2**24  # scores that are held at once, or those of one unit
MOST_IN_CACHE = 2**19  # likewise on a CPU
HARDLY_LONGER = 2  # a run of so many times the columns is taken without a list: gathers and sums by key are saved


class Columns(NamedTuple):
    """The keys of a chunk: a run of all units, then a list of each."""

    run: slice
    listed: Tensor | None  # (units, n) int64, none of them in the run; -1: no key

    def of(self, x: Tensor) -> Tensor:
        """The entries (units, columns, ...) of x (units, N, ...)."""
        if self.listed is None:
            return x[:, self.run]
        return torch.cat([x[:, self.run], x.gather(1, self._index(x))], 1)

    def add(self, x: Tensor, to: Tensor) -> None:
        """Add x (units, columns, ...) to the entries of `to` (units, N, ...)."""
        run = self.run.stop - self.run.start
        to[:, self.run] += x[:, :run]
        if self.listed is not None:
            to.scatter_add_(1, self._index(to), x[:, run:])

    def _index(self, x: Tensor) -> Tensor:
        assert self.listed is not None
        keys = self.listed.clamp(min=0)
        return keys if x.ndim == 2 else keys[..., None].expand(-1, -1, x.shape[2])


class Chunk(NamedTuple):
    """Some queries of some units, a unit being a batch element and a head of u: m rows, n columns."""

    units: slice
    queries: slice
    steps: slice  # of these queries
    columns: Columns
    dropped: Tensor  # (units, m, n): 0 where a pair is attended, else so low that it has no weight
    ungated: Tensor | None  # likewise of the pairs whose gates have a gradient, where these are others
    gates: Tensor | None  # (units, m, n) in the type of u: those of the window are 1
    m: Tensor | None  # the same in the type of the scores
    empty: Tensor | None  # (units, R m, 1) bool: rows without a pair of any weight, where there may be such


def forward(x: Operands, o: Options) -> tuple[Tensor, Tensor]:
    """out (B, H, Q, E) in q's type, and lse (B, H, Q) in the type of the scores."""
    (B, H, Q, _), E = x.q.shape, x.v.shape[3]
    q, k, v = _units(x, o)
    R, out, lse = q.shape[1], q.new_empty(*q.shape[:3], E), q.new_empty(q.shape[:3])
    for c in _chunks(x, o, with_gates=o.gate is not None):
        s, _ = _scores(_rows(q, c), c.columns.of(k[c.units]), c, o)
        if s.dtype == torch.float64:  # as it is defined: what is computed in float64 is compared with that
            row_lse = s.logsumexp(-1)
            p = s.sub_(row_lse[..., None]).exp_()
        else:
            p = s.softmax(-1)
            row_lse = s.amax(-1) - p.amax(-1).log()
        if c.empty is not None:
            p.masked_fill_(c.empty, 0)
            row_lse = row_lse.masked_fill(c.empty[..., 0], -torch.inf)
        lse[c.units, :, c.queries] = row_lse.unflatten(1, (R, -1))
        weighted = torch.bmm(_gated(p, c, o, ("v", "kv")), c.columns.of(v[c.units]))
        out[c.units, :, c.queries] = weighted.unflatten(1, (R, -1))
    return out.view(B, H, Q, E).to(x.q.dtype), lse.view(B, H, Q)


def backward(dout: Tensor, dlse: Tensor | None, out: Tensor, lse: Tensor, x: Operands, o: Options) -> SparseKGradients:
    """The gradients, each in the type of its operand."""
    q, k, v = _units(x, o)
    units, R, Q, _ = q.shape
    dout = dout.to(q.dtype).reshape(units, R, Q, -1)
    delta = (dout * out.to(q.dtype).view(dout.shape)).sum(-1)
    if dlse is not None:
        delta = delta - dlse.view(delta.shape)
    lse = lse.view(delta.shape)
    dq, dk, dv = (torch.zeros_like(t) for t in (q, k, v))
    du, dtau = (x.u.new_zeros(units, x.u.shape[2]) for _ in range(2))
    for c in _chunks(x, o, with_gates=o.gate is not None or o.straight):
        rows, keys, douts = _rows(q, c), c.columns.of(k[c.units]), _rows(dout, c)
        s, plain = _scores(rows, keys, c, o)
        row_lse = _rows(lse[..., None], c)
        p = s.sub_(row_lse).exp_() if s.dtype == torch.float64 else s.softmax(-1)
        if c.empty is not None:
            p.masked_fill_(c.empty, 0)
        dp = torch.bmm(douts, c.columns.of(v[c.units]).mT)
        dm = None
        if plain is not None and c.ungated is not None:
            plain.unflatten(1, (R, -1)).add_(c.ungated[:, None])
            dm = plain.sub_(row_lse).exp_().mul_(dp)
        elif o.gate in ("v", "kv"):
            dm = dp * p
        ds = _gated(dp, c, o, ("v", "kv")).sub_(_rows(delta[..., None], c)).mul_(p)
        if c.m is not None and o.gate == "logit":
            dm = (ds.unflatten(1, (R, -1)) / c.m.clamp(min=torch.finfo(c.m.dtype).tiny)[:, None]).view(ds.shape)
        elif dm is not None and plain is not None and o.gate == "kv":
            dm.addcmul_(plain, ds)
        if dm is not None and c.gates is not None:
            # Inside (0, 1), and 0 elsewhere, whatever is there.
            dm = torch.ops.aten.hardtanh_backward(dm.unflatten(1, (R, -1)).sum(1).to(du.dtype), c.gates, 0.0, 1.0)
            c.columns.add(dm.sum(1), du[c.units])
            dtau[c.units, c.steps] = -dm.sum(2)
        ds = _gated(ds, c, o, ("kv",))
        dq[c.units, :, c.queries] = torch.bmm(ds, keys).unflatten(1, (R, -1))
        c.columns.add(torch.bmm(ds.mT, rows), dk[c.units])
        c.columns.add(torch.bmm(_gated(p, c, o, ("v", "kv")).mT, douts), dv[c.units])
    dk, dv = (_sum_units(of, t) for of, t in ((dk, x.k), (dv, x.v)))
    dq = dq.mul_(o.scale).view(x.q.shape).to(x.q.dtype)
    return SparseKGradients(dq, dk, dv, du.view(x.u.shape), dtau.view(x.u.shape))


def queries_of(o: Options) -> int:
    """The queries of a chunk: about as many as keys are attended."""
    return min(QUERIES, 1 << max(FEW, o.window + o.live).bit_length() - 1)


def memory(x: Operands, o: Options) -> Memory:
    """The bytes of five times the scores of a chunk, and of its keys and values; supports have their expected size."""
    (B, H, Q, D), E, size = x.q.shape, x.v.shape[3], compute_dtype(x.q.dtype).itemsize
    (_, U, N), queries = x.u.shape, min(queries_of(o), Q)
    columns = min(N, HARDLY_LONGER * (min(o.window, N) * (1 if o.causal else 2) + queries + o.live))
    of_unit = H // max(1, U) * queries * columns
    most = min(MOST, MOST_IN_CACHE) if x.q.device.type == "cpu" else MOST
    units = min(B * U, max(1, most // max(1, of_unit)))
    return Memory(size * units * (5 * of_unit + columns * (D + E)), size * B * H * N * (D + E))


def _units(x: Operands, o: Options) -> tuple[Tensor, Tensor, Tensor]:
    """q (units, R, Q, D) times the scale, k (units, N, D) and v (units, N, E) in the type of the scores."""
    U, G, wide = x.u.shape[1], x.k.shape[1], compute_dtype(x.q.dtype)
    q = (x.q.to(wide) * o.scale).unflatten(1, (U, -1)).flatten(0, 1)
    k, v = (t.to(wide) if U == G else t.to(wide).repeat_interleave(U // G, 1) for t in (x.k, x.v))
    return q, k.flatten(0, 1), v.flatten(0, 1)


def _sum_units(gradients: Tensor, like: Tensor) -> Tensor:
    """The gradient of k or v, summed over the units that share a key head; `gradients` is (units, N, size)."""
    B, G = like.shape[:2]
    return gradients.view(B, G, -1, *gradients.shape[1:]).sum(2).to(like.dtype)


def _chunks(x: Operands, o: Options, with_gates: bool) -> Iterator[Chunk]:
    """Every chunk; with few units at a time where many scores would be held at once."""
    u, tau, last, last_gated = (t.flatten(0, 1) for t in (x.u, x.tau, x.last, x.last_gated))
    u = u.nan_to_num()  # no gate is NaN beside a weight of 0
    wide = compute_dtype(x.q.dtype)
    (units, N), R = u.shape, x.q.shape[1] // x.u.shape[1]
    place = torch.arange(N, device=u.device)
    most = min(MOST, MOST_IN_CACHE) if u.device.type == "cpu" else MOST
    # The queries [begin, end] attend a key: those of its window, and those that keep it.
    hidden = None if x.hidden is None else x.hidden.flatten(0, 1)
    begin, end = _queries(last, hidden, place, o)
    gated = _queries(last_gated, hidden, place, o) if o.straight else None
    for rows, columns in _columns(last_gated, x.q.shape[2], place, o):
        row = place[: rows.stop - rows.start].to(wide)[:, None]
        n = columns.run.stop - columns.run.start + (0 if columns.listed is None else columns.listed.shape[1])
        open_pairs = _window(place[columns.run] - rows.start, row, o) if with_gates else None
        step = max(1, most // (R * len(row) * n))
        for unit in range(0, units, step):
            of = slice(unit, unit + step)
            here = columns if columns.listed is None else columns._replace(listed=columns.listed[of])
            dropped = _dropped(begin[of], end[of], here, rows, row, o)
            ungated = None if gated is None else _dropped(gated[0][of], gated[1][of], here, rows, row, o)
            gates = m = None
            if open_pairs is not None:
                gates = (here.of(u[of])[:, None] - tau[of, rows, None]).clamp_(0, 1)
                of_run = gates[..., : open_pairs.shape[1]]
                torch.maximum(of_run, open_pairs.to(gates.dtype), out=of_run)
                m = gates.to(wide)
            queries = slice(rows.start - o.offset, rows.stop - o.offset)
            empty = None if hidden is None else _empty(dropped, m, o).repeat(1, R, 1)
            yield Chunk(of, queries, rows, here, dropped, ungated, gates, m, empty)


def _queries(last: Tensor, hidden: Tensor | None, place: Tensor, o: Options) -> tuple[Tensor, Tensor]:
    """The first and the last step that attends each key, by its window or since it is kept until `last`."""
    if o.causal:
        begin, end = place.expand_as(last), torch.maximum(last, place + o.window)
    else:
        kept, N = last >= 0, len(place)
        begin, end = torch.where(kept, 0, place - o.window), torch.where(kept, N, place + o.window)
    return begin, end if hidden is None else end.masked_fill(hidden, -1)


def _empty(dropped: Tensor, m: Tensor | None, o: Options) -> Tensor:
    """(units, m, 1): the rows that attend nothing, or under a gate of 0 alone."""
    term = dropped if m is None or o.gate != "logit" else dropped + m.log()
    return term.amax(-1, keepdim=True) < torch.finfo(dropped.dtype).min / 2


def _window(keys: Tensor, row: Tensor, o: Options) -> Tensor:
    """(m, n): 1 where a key is in the window of a row, or behind it, else 0."""
    m = len(row)
    inside = (keys + o.window).clamp(-1, m).to(row.dtype) - row
    if not o.causal:
        inside = torch.minimum(inside, row - (keys - o.window).clamp(-1, m).to(row.dtype))
    return inside.add_(1).clamp_(0, 1)


def _dropped(begin: Tensor, end: Tensor, columns: Columns, rows: slice, row: Tensor, o: Options) -> Tensor:
    """(units, m, n): 0 where a row is in [begin, end] of a column, else the lowest number, or -inf."""
    lowest, m = torch.finfo(row.dtype).min, len(row)
    listed = None
    if columns.listed is not None:
        # In the run are all keys of the window, so that one in the list is kept by all rows, up to its end.
        listed = torch.where(columns.listed < 0, -1, end.gather(1, columns.listed.clamp(min=0)))
    of_run = end[:, columns.run]
    ends = of_run if listed is None else torch.cat([of_run, listed], 1)
    # Near 0, so that the differences are exact in any type.
    after = row - (ends - rows.start).clamp_(-1, m).to(row.dtype)[:, None]
    begins = (begin[:, columns.run] - rows.start).clamp(-1, m).to(row.dtype)[:, None]
    first = max(rows.start - columns.run.start, 0) if o.causal else 0
    late = after[..., first : of_run.shape[1]]
    torch.maximum(late, begins[..., first:] - row, out=late)
    return after.clamp_(min=0).mul_(lowest)


def _columns(last_gated: Tensor, Q: int, place: Tensor, o: Options) -> Iterator[tuple[slice, Columns]]:
    """(steps, columns) of each chunk of Q queries; lists hold the keys that live at its first one, ascending."""
    units, N = last_gated.shape
    queries = queries_of(o)
    most = o.live if o.certain else None
    live, seen = place.new_empty(units, 0), 0
    if not o.causal:
        live = _compact(place.expand(units, -1), last_gated >= 0, most)
    for start in range(o.offset, o.offset + Q, queries):
        rows = slice(start, min(start + queries, o.offset + Q))
        run = slice(max(start - o.window, 0), rows.stop if o.causal else min(rows.stop + o.window, N))
        whole = rows.stop if o.causal else N
        if whole <= HARDLY_LONGER * (run.stop - run.start + min(o.live, whole)):
            yield rows, Columns(slice(0, whole), None)
        elif o.causal:
            live = torch.cat([live, place[seen : run.start].expand(units, -1)], 1)
            live = _compact(live, (live >= 0) & (last_gated.gather(1, live.clamp(min=0)) >= start), most)
            seen = run.start
            yield rows, Columns(run, live)
        else:
            yield rows, Columns(run, torch.where((live >= run.start) & (live < run.stop), -1, live))


def _compact(keys: Tensor, there: Tensor, most: int | None) -> Tensor:
    """The keys that are there, in order, then -1. Where `most` is None the host reads their number."""
    size = int(there.sum(1).max()) if most is None else min(most, keys.shape[1])
    place = torch.where(there, there.cumsum(1) - 1, keys.shape[1])
    compact = keys.new_full((keys.shape[0], keys.shape[1] + 1), -1).scatter_(1, place, keys)
    return compact[:, :size]


def _rows(x: Tensor, c: Chunk) -> Tensor:
    """(units, R m, size) of x (units, R, Q, size); 0 in rows that are empty, where x may be anything."""
    rows = x[c.units, :, c.queries].flatten(1, 2)
    return rows if c.empty is None else rows.masked_fill(c.empty, 0)


def _scores(rows: Tensor, keys: Tensor, c: Chunk, o: Options) -> tuple[Tensor, Tensor | None]:
    """s (units, R m, n) under its gates, with no weight where nothing is attended; and before both if that is read."""
    m = c.dropped.shape[1]
    R = rows.shape[1] // m
    if o.gate == "kv" or o.straight:
        plain = torch.bmm(rows, keys.mT)
        s = _gated(plain.clone(), c, o, ("kv",)).unflatten(1, (R, m)).add_(c.dropped[:, None])
        return s.flatten(1, 2), plain
    term = c.dropped if c.m is None or o.gate != "logit" else c.m.log().add_(c.dropped)
    return (term if R == 1 else term.repeat(1, R, 1)).baddbmm_(rows, keys.mT), None


def _gated(x: Tensor, c: Chunk, o: Options, gates: tuple[str, ...]) -> Tensor:
    """x (units, R m, n) times m, in place, under the gates that multiply it."""
    if c.m is not None and o.gate in gates:
        x.unflatten(1, (-1, c.m.shape[1])).mul_(c.m[:, None])
    return x
