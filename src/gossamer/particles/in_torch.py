"""Particles on tensors of torch: runs along the curve, and sums over pairs of runs."""

from __future__ import annotations

from typing import Any

import torch
from torch import Tensor

from gossamer.particles import fused_torch, terms
from gossamer.particles.cells import Cells, Runs
from gossamer.particles.geometry import (
    BITS,
    MARGIN,
    RUN,
    WHOLE,
    Sizes,
    gaps,
    hilbert_keys,
    nearest,
    on_the_grid,
    squares,
    tree_of,
    wrapped,
)

PAIRS = 2**18  # of a step: measured on two cores
PIECE = 8  # runs of candidates of a step


def is_real(x: Tensor) -> bool:
    return x.is_floating_point()


def channels(name: str, values: Any, cells: Cells) -> Tensor:
    """Values in the type of the arithmetic; a number becomes one for each particle."""
    points = cells.runs.points
    values = torch.as_tensor(values, device=points.device)
    if values.is_complex() or values.dtype == torch.bool:
        raise TypeError(f"{name} must be real numbers; got {values.dtype}")
    values = values.to(points.dtype)
    return values if values.ndim else values.expand(cells.num_particles)


@torch.no_grad()
def runs_of(x: Tensor, box: Sizes) -> Runs:
    x = x if x.dtype == torch.float64 else x.float()
    N, d = x.shape
    T = -(-N // WHOLE) * (WHOLE // RUN)
    if not N:
        none = x.new_zeros(d, 0)
        return Runs(x.new_zeros(0, dtype=torch.int32), x.new_zeros(d, 0, RUN), none, none, ())
    parts = wrapped(list(x.T), box, torch)
    place = [one.int() for one in on_the_grid(parts, box, BITS[d], torch)]
    order = torch.argsort(hilbert_keys(place, BITS[d], torch), stable=True)
    at = torch.arange(T * RUN, device=x.device).clamp(max=N - 1)
    points = torch.stack(parts)[:, order[at]].reshape(d, T, RUN)
    return Runs(order.int(), points, points.amin(-1), points.amax(-1), tree_of(points, torch))


def radial_sum(cells: Cells, values: Tensor, law: Any) -> Tensor:
    found: Tensor = _RadialSum.apply(cells.x.to(values.dtype), values, law, cells)
    return found


def radial_force(cells: Cells, mass: Tensor, law: Any) -> Tensor:
    found: Tensor = _RadialForce.apply(cells.x.to(mass.dtype), mass, law, cells)
    return found


class _RadialSum(torch.autograd.Function):
    @staticmethod
    def forward(ctx: Any, x: Tensor, values: Tensor, law: Any, cells: Cells) -> Tensor:
        ctx.save_for_backward(values)
        ctx.law, ctx.cells = law, cells
        return _weighted(cells, law, values)

    @staticmethod
    @torch.autograd.function.once_differentiable
    def backward(ctx: Any, g: Tensor) -> Any:
        (values,) = ctx.saved_tensors
        to_x, to_values, *_ = ctx.needs_input_grad
        law, cells = ctx.law, ctx.cells
        dx = dv = None
        if to_x and fused_torch.serves(cells):
            dx = fused_torch.weighted_slopes(cells, law, g, values)
        elif to_x:
            rows, columns = torch.cat([g, values], 1), torch.cat([values, g], 1)
            dx = pair_sums(terms.weighted_slopes(law), cells, cells.radius, rows, columns)
        if to_values:
            dv = _weighted(cells, law, g)
        return dx, dv, None, None


class _RadialForce(torch.autograd.Function):
    @staticmethod
    def forward(ctx: Any, x: Tensor, mass: Tensor, law: Any, cells: Cells) -> Tensor:
        ctx.save_for_backward(mass)
        ctx.law, ctx.cells = law, cells
        if fused_torch.serves(cells):
            return fused_torch.force(cells, law, mass)
        return pair_sums(terms.force(law), cells, law.radius, x[:, :0], mass[:, None])

    @staticmethod
    @torch.autograd.function.once_differentiable
    def backward(ctx: Any, g: Tensor) -> Any:
        (mass,) = ctx.saved_tensors
        if fused_torch.serves(ctx.cells):
            found = fused_torch.force_slopes(ctx.cells, ctx.law, g, mass)
        else:
            both = torch.cat([g, mass[:, None]], 1)
            found = pair_sums(terms.force_slopes(ctx.law), ctx.cells, ctx.law.radius, both, both)
        return found[:, :-1], found[:, -1], None, None


def _weighted(cells: Cells, law: Any, values: Tensor) -> Tensor:
    if fused_torch.serves(cells):
        return fused_torch.weighted(cells, law, values)
    return pair_sums(terms.weighted(law), cells, cells.radius, values[:, :0], values)


def pair_sums(term: terms.Term, cells: Cells, radius: float, rows: Tensor, columns: Tensor) -> Tensor:
    """What the terms of all pairs within the radius add up to, (N, outputs), as in `in_jax`.

    Args:
        rows, columns: (N, A) and (N, B), what queries and candidates bring.
    """
    runs, box = cells.runs, cells.box
    N, (d, T) = cells.num_particles, runs.low.shape
    lanes = torch.arange(RUN, device=runs.low.device)
    if not N:
        pair = runs.points.new_zeros(1, 1, 1)
        a, b = (pair.new_zeros(1, 1, x.shape[1]) for x in (rows, columns))
        return term([pair] * d, pair, pair == 0, a, b, torch)[0][:0]
    at = runs.order.long()[torch.arange(T * RUN, device=lanes.device).clamp(max=N - 1)]
    a, b = (x.detach()[at].reshape(T, RUN, x.shape[1]) for x in (rows, columns))
    limit = radius**2
    found: list[Tensor] = []
    each = max(1, PAIRS // (RUN * RUN * PIECE))
    others_low, others_high = list(runs.low[:, None]), list(runs.high[:, None])
    for item in torch.arange(T, device=lanes.device).split(each):
        low, high = list(runs.low[:, item, None]), list(runs.high[:, item, None])
        near = gaps(low, high, others_low, others_high, box, torch) <= limit * MARGIN**2
        counts = near.sum(1)
        _, columns_of = near.nonzero(as_tuple=True)
        firsts = counts.cumsum(0) - counts
        here, mine = runs.points[:, item], a[item]
        total: Any = 0.0
        for start in range(0, int(counts.max()), PIECE):
            want = start + torch.arange(PIECE, device=lanes.device)
            there = want < counts[:, None]
            run = columns_of[(firsts[:, None] + want).clamp(max=len(columns_of) - 1)]
            place = run[:, :, None] * RUN + lanes
            usable = (there[:, :, None] & (place < N)).reshape(len(item), 1, -1)
            theirs = runs.points[:, run].reshape(d, len(item), 1, PIECE * RUN)
            parts = [
                nearest(one, other[:, :, None], size, torch)
                for one, other, size in zip(theirs, here, box, strict=True)
            ]  # fmt: skip
            s = squares(parts)
            total = total + term(
                parts, s, (s <= limit) & usable, mine, b[run].reshape(len(item), PIECE * RUN, -1), torch
            )
        found.append(total)
    made = torch.cat(found).reshape(T * RUN, -1)[:N]
    return torch.empty_like(made).index_copy_(0, runs.order.long(), made)
