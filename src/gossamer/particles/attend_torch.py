"""Neighbour attention on tensors of torch: products by gossamer's kernels on a GPU, else chunks of particles."""

from __future__ import annotations

from typing import Any

import torch
from torch import Tensor

from gossamer.particles.attend import Attending, Features, Kept, Rows, row_gradients, rows
from gossamer.particles.neighbors import Neighbors
from gossamer.torch.api import attention
from gossamer.torch.structure import Indices

NUMBERS = 2**21  # of the features of a chunk


def attend(call: Attending, neighbors: Neighbors, q: Tensor, k: Tensor, v: Tensor) -> Rows:
    x, runs = neighbors.cells.x, neighbors.cells.runs
    dtype = runs.points.dtype
    if not len(x):
        return Rows(v, v.new_zeros(v.shape[:2], dtype=dtype))
    order = runs.order.long()
    back = torch.empty_like(order).index_copy_(0, order, torch.arange(len(order), device=order.device))
    if v.is_cuda and call.bandwidth is None and dtype == torch.float32:
        out, lse = _products(call, neighbors, *(one[order].transpose(0, 1)[None] for one in (q, k, v)))
    else:
        given = (one.to(dtype)[order] for one in (x, q, k, v))
        out, lse = _Attend.apply(call, neighbors, *given)
    return Rows(out[back].to(v.dtype), lse[back])


def _products(call: Attending, neighbors: Neighbors, q: Tensor, k: Tensor, v: Tensor) -> Rows:
    """By a gathering kernel: rows of 64 places along the curve share most of their neighbours."""
    M = neighbors.capacity
    lists = Indices(neighbors.places[None, None], neighbors.sizes.clamp(max=M)[None, None])
    out, lse = attention(q, k, v, lists, scale=call.scale, return_lse=True)
    # A product, so that gradients of what is cut are no numbers either.
    whole = torch.where(neighbors.sizes > M, float("nan"), 1.0)
    return Rows(
        out[0].transpose(0, 1) * whole[:, None, None].to(out.dtype), lse[0].transpose(0, 1) * whole[:, None]
    )  # fmt: skip


class _Attend(torch.autograd.Function):
    """By places along the curve."""

    @staticmethod
    def forward(ctx: Any, call: Attending, neighbors: Neighbors, x: Tensor, q: Tensor, k: Tensor, v: Tensor) -> Any:
        places = neighbors.places.long()
        N, M = places.shape
        points = neighbors.cells.runs.points
        features = Features(list(points.reshape(len(points), -1)[:, :N]), q, k, v)
        made = []
        for at in _chunks(N, M * (q.shape[1] * (q.shape[2] + v.shape[2]) + 8), places.device):
            lists = places[at]
            others = lists.clamp(max=N - 1)
            made.append(rows(call, _take(features, at), _take(features, others), lists < N, torch))
        out, lse = (torch.cat(parts) for parts in zip(*made, strict=True))
        cut = neighbors.sizes > M
        out[cut], lse[cut] = float("nan"), float("nan")
        ctx.save_for_backward(q, k, v, out, lse)
        ctx.call, ctx.neighbors = call, neighbors
        return out, lse

    @staticmethod
    @torch.autograd.function.once_differentiable
    def backward(ctx: Any, dout: Tensor, dlse: Tensor) -> Any:
        q, k, v, out, lse = ctx.saved_tensors
        neighbors, places = ctx.neighbors, ctx.neighbors.places.long()
        N, M = places.shape
        points = neighbors.cells.runs.points
        features = Features(list(points.reshape(len(points), -1)[:, :N]), q, k, v)
        kept = Kept(lse, (dout * out).sum(-1) - dlse, dout)
        made = []
        for at in _chunks(N, 2 * M * q.shape[1] * (q.shape[2] + v.shape[2] + 4), places.device):
            lists = places[at]
            others = lists.clamp(max=N - 1)
            mine, theirs = (Kept(*(one[which] for one in kept)) for which in (at, others))
            given = _take(features, at), _take(features, others)
            made.append(row_gradients(ctx.call, *given, mine, theirs, lists < N, torch))
        dq, dk, dv, dx = (torch.cat(parts) for parts in zip(*made, strict=True))
        cut = neighbors.sizes > M
        for one in (dq, dk, dv, dx):
            one[cut] = float("nan")
        return None, None, dx, dq, dk, dv


def _take(features: Features, at: Tensor) -> Features:
    return Features([one[at] for one in features.x], features.q[at], features.k[at], features.v[at])


def _chunks(N: int, numbers: int, device: torch.device) -> Any:
    """Places, some at a time."""
    return torch.arange(N, device=device).split(max(1, NUMBERS // numbers))
