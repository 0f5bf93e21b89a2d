"""Neighbour attention on tensors of torch: products by gossamer's kernels on a GPU, else chunks of particles."""

from __future__ import annotations

from typing import Any

import torch
from torch import Tensor

from gossamer.particles import listed_torch
from gossamer.particles.attend import Attending, Features, NeighborRows, RowTerms, row_gradients, rows
from gossamer.particles.neighbors import Neighbors
from gossamer.particles.once_torch import once
from gossamer.torch.api import attention
from gossamer.torch.structure import Indices
from gossamer.torch.transforms import refuse_transforms

NUMBERS = 2**21  # of the features of a chunk


def attend(call: Attending, neighbors: Neighbors, q: Tensor, k: Tensor, v: Tensor) -> NeighborRows:
    x, runs = neighbors.cells.x, neighbors.cells.runs
    dtype = runs.points.dtype
    refuse_transforms("neighbor_attention", x, q, k, v)
    if not len(x):  # inputs without elements have gradients without any
        none = x.sum().to(dtype) + sum(one.sum(-1).to(dtype) for one in (q, k, v))
        return NeighborRows(v + none[..., None].to(v.dtype), none)
    fused = listed_torch.attends(neighbors.groups, call, q, v)
    kernels = v.is_cuda and call.spread is None and dtype == torch.float32 and v.dtype != torch.float64
    if kernels and not fused:
        order, back = _moves(neighbors)
        products = _products(call, neighbors, *(one[order].transpose(0, 1)[None] for one in (q, k, v)))
        return NeighborRows(*_Apart.apply(x, products.out[back].to(v.dtype), products.lse[back]))
    features = (one if fused else one.to(dtype) for one in (q, k, v))
    out, lse = (_Attend if fused else _AttendBlocked).apply(call, neighbors, x.to(dtype), *features)
    return NeighborRows(out.to(v.dtype), lse)


def _moves(neighbors: Neighbors) -> tuple[Tensor, Tensor]:
    """(order, back): the indices that move arrays to places along the curve, and back."""
    order = neighbors.cells.runs.order.long()
    return order, torch.empty_like(order).index_copy_(0, order, torch.arange(len(order), device=order.device))


def _whole(x: Tensor, cut: Tensor) -> Tensor:
    """x, NaN where a list is cut."""
    return x.masked_fill(cut.reshape(-1, *[1] * (x.ndim - 1)), float("nan"))


def _products(call: Attending, neighbors: Neighbors, q: Tensor, k: Tensor, v: Tensor) -> NeighborRows:
    """Rows by a gathering kernel: 64 places along the curve share most of their neighbours."""
    places, cut = neighbors.padded, neighbors.cut
    N, M = places.shape
    lists = Indices(places[None, None], neighbors.sizes.clamp(max=M)[None, None])
    # A key that a cut list leaves out lacks that row's part of its gradient. Its own list, if whole, has the row.
    unsure = cut | (cut[places.clamp(max=N - 1).long()] & (places < N)).any(1)
    q, k, v = (_Unsure.apply(x, which) for x, which in ((q, cut), (k, unsure), (v, unsure)))
    out, lse = attention(q, k, v, lists, scale=call.scale, return_lse=True)
    # A product, so that gradients of what is cut are no numbers either.
    whole = torch.where(cut, float("nan"), 1.0)
    return NeighborRows(
        out[0].transpose(0, 1) * whole[:, None, None].to(out.dtype), lse[0].transpose(0, 1) * whole[:, None]
    )  # fmt: skip


class _Apart(torch.autograd.Function):
    """out and lse unchanged; the gradient of x, which no score reads, is 0."""

    @staticmethod
    def forward(ctx: Any, x: Tensor, out: Tensor, lse: Tensor) -> tuple[Tensor, Tensor]:
        ctx.save_for_backward(x)
        return out.view_as(out), lse.view_as(lse)

    @staticmethod
    def backward(ctx: Any, dout: Tensor, dlse: Tensor) -> tuple[Tensor, Tensor, Tensor]:
        (x,) = ctx.saved_tensors
        return torch.zeros_like(x), dout, dlse


class _Unsure(torch.autograd.Function):
    """Features (1, H, N, D) unchanged, with gradients of NaN where `unsure` (N,)."""

    @staticmethod
    def forward(ctx: Any, x: Tensor, unsure: Tensor) -> Tensor:
        ctx.save_for_backward(unsure)
        return x.view_as(x)

    @staticmethod
    def backward(ctx: Any, dx: Tensor) -> tuple[Tensor, None]:
        (unsure,) = ctx.saved_tensors
        return dx.masked_fill(unsure[:, None], float("nan")), None


class _Attend(torch.autograd.Function):
    """Attention of arrays by particles, by kernels that gather them by lists."""

    @staticmethod
    def forward(ctx: Any, call: Attending, neighbors: Neighbors, x: Tensor, q: Tensor, k: Tensor, v: Tensor) -> Any:
        out, lse = listed_torch.forward(call, neighbors, q, k, v)
        ctx.save_for_backward(x, q, k, v, out, lse)
        ctx.call, ctx.neighbors = call, neighbors
        return out, lse

    @staticmethod
    @once
    def backward(ctx: Any, dout: Tensor, dlse: Tensor) -> Any:
        x, q, k, v, out, lse = ctx.saved_tensors
        _, _, to_x, *_ = ctx.needs_input_grad
        dq, dk, dv, dx = listed_torch.backward(ctx.call, ctx.neighbors, to_x, dout, dlse, q, k, v, out, lse)
        return None, None, torch.zeros_like(x) if to_x and dx is None else dx, dq, dk, dv


class _AttendBlocked(torch.autograd.Function):
    """Attention in chunks of particles along the curve, to whose order arrays are moved."""

    @staticmethod
    def forward(ctx: Any, call: Attending, neighbors: Neighbors, x: Tensor, q: Tensor, k: Tensor, v: Tensor) -> Any:
        (order, back), cut = _moves(neighbors), neighbors.cut
        out, lse = _blocked(call, neighbors, *(one[order] for one in (q, k, v)))
        lse = _whole(lse, cut)  # and so are all gradients of such rows
        ctx.save_for_backward(x, q, k, v, out, lse, order, back, cut)
        ctx.call, ctx.neighbors = call, neighbors
        return _whole(out[back], cut[back]), lse[back]

    @staticmethod
    @once
    def backward(ctx: Any, dout: Tensor, dlse: Tensor) -> Any:
        _, q, k, v, out, lse, order, back, cut = ctx.saved_tensors
        q, k, v, dout, dlse = (one[order] for one in (q, k, v, dout, dlse))
        kept = RowTerms(lse, (dout * out).sum(-1) - dlse, dout)
        dq, dk, dv, dx = (
            _whole(one[back], cut[back]) for one in _blocked_gradients(ctx.call, ctx.neighbors, q, k, v, kept)
        )
        return None, None, torch.zeros_like(dx) if ctx.call.spread is None else dx, dq, dk, dv


def _blocked(call: Attending, neighbors: Neighbors, q: Tensor, k: Tensor, v: Tensor) -> tuple[Tensor, Tensor]:
    """out and lse, chunks of particles one after the other."""
    places = neighbors.padded.long()
    N, M = places.shape
    features, made = _features(neighbors, q, k, v), []
    for at in _chunks(N, M * (q.shape[1] * (q.shape[2] + v.shape[2]) + 8), places.device):
        lists = places[at]
        others = lists.clamp(max=N - 1)
        made.append(rows(call, _take(features, at), _take(features, others), lists < N, torch))
    out, lse = (torch.cat(parts) for parts in zip(*made, strict=True))
    return out, lse


def _blocked_gradients(call: Attending, neighbors: Neighbors, q: Tensor, k: Tensor, v: Tensor, kept: RowTerms
                       ) -> list[Tensor]:  # fmt: skip
    """dq, dk, dv and dx, likewise."""
    places = neighbors.padded.long()
    N, M = places.shape
    features, made = _features(neighbors, q, k, v), []
    for at in _chunks(N, 2 * M * q.shape[1] * (q.shape[2] + v.shape[2] + 4), places.device):
        lists = places[at]
        others = lists.clamp(max=N - 1)
        mine, theirs = (RowTerms(*(one[which] for one in kept)) for which in (at, others))
        given = _take(features, at), _take(features, others)
        made.append(row_gradients(call, *given, mine, theirs, lists < N, torch))
    dq, dk, dv, dx = (torch.cat(parts) for parts in zip(*made, strict=True))
    return [dq.to(q.dtype), dk.to(k.dtype), dv.to(v.dtype), dx]


def _features(neighbors: Neighbors, q: Tensor, k: Tensor, v: Tensor) -> Features:
    """The features in the type of the arithmetic."""
    points = neighbors.cells.runs.points
    x = list(points.reshape(len(points), -1)[:, : len(v)])
    return Features(x, *(one.to(points.dtype) for one in (q, k, v)))


def _take(features: Features, at: Tensor) -> Features:
    return Features([one[at] for one in features.x], features.q[at], features.k[at], features.v[at])


def _chunks(N: int, numbers: int, device: torch.device) -> Any:
    """Places, some at a time."""
    return torch.arange(N, device=device).split(max(1, NUMBERS // numbers))
