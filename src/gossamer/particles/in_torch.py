"""Particles on tensors of torch: runs along the curve, and sums over pairs of runs."""

from __future__ import annotations

from collections.abc import Iterator
from typing import Any

import torch
from torch import Tensor

from gossamer.particles import fused_torch, listed_torch, terms
from gossamer.particles.attend_torch import attend as attend
from gossamer.particles.cells import Cells, Runs
from gossamer.particles.geometry import (
    BITS,
    MARGIN,
    RUN,
    WHOLE,
    Seen,
    Sizes,
    gaps,
    hilbert_keys,
    nearest,
    on_the_grid,
    squares,
    times,
    tree_of,
    wrapped,
)
from gossamer.particles.groups import Groups, Most, addressed
from gossamer.particles.kernels.neighbors.configurations import ROWS
from gossamer.particles.neighbors import Neighbors
from gossamer.particles.once_torch import once
from gossamer.torch.scale import with_number as with_number
from gossamer.torch.transforms import refuse_transforms

NAME = "gossamer.particles"
PAIRS = 2**18  # of a step: measured on two cores
PIECE = 8  # runs of candidates of a step


def is_real(x: Tensor) -> bool:
    return x.is_floating_point()


def is_learned(scale: Any) -> bool:
    """Whether a scale is a tensor with a gradient or on another device than the CPU, for `with_number`."""
    return isinstance(scale, Tensor) and not scale.ndim and (scale.requires_grad or not scale.is_cpu)


def channels(name: str, values: Any, cells: Cells) -> Tensor:
    """Values in the type of the arithmetic; a number becomes one for each particle."""
    points = cells.runs.points
    refuse_transforms(NAME, values, cells.x)
    values = torch.as_tensor(values, device=points.device)
    if values.is_complex() or values.dtype == torch.bool:
        raise TypeError(f"{name} must be real numbers; got {values.dtype}")
    values = values.to(points.dtype)
    return values if values.ndim else values.expand(cells.num_particles)


@torch.no_grad()
def runs_of(x: Tensor, box: Sizes, unit: float) -> Runs:
    """The runs of positions in a box, both multiplied by `unit`."""
    refuse_transforms(NAME, x)
    x = (x if x.dtype == torch.float64 else x.float()) * unit
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


def finite(cells: Cells) -> Tensor:
    """Whether all positions are finite: a truth value on the device."""
    return torch.isfinite(cells.runs.points).all()


def known(cells: Cells, like: Tensor) -> Tensor:
    """1, or NaN if any position is not finite: then no neighbour is known."""
    return torch.where(finite(cells), 1.0, float("nan")).to(like.dtype)


def _known(cells: Cells, gradient: Tensor, factor: float) -> Tensor:
    """A gradient times a factor; NaN if any position is not finite, also where no pair was found."""
    return torch.where(finite(cells), times(gradient, factor), float("nan"))


def radial_sum(cells: Cells, values: Tensor, law: Any) -> Tensor:
    sums: Tensor = _RadialSum.apply(cells.x.to(values.dtype), values, law, cells)
    return sums


def radial_force(cells: Cells, mass: Tensor, law: Any, radius: float, factor: float) -> Tensor:
    """A factor times the sums; the law and its radius are in the unit of the cells."""
    force: Tensor = _RadialForce.apply(cells.x.to(mass.dtype), mass, law, radius, factor, cells)
    return force


class _RadialSum(torch.autograd.Function):
    @staticmethod
    def forward(ctx: Any, x: Tensor, values: Tensor, law: Any, cells: Cells) -> Tensor:
        ctx.save_for_backward(x, values)
        ctx.law, ctx.cells = law, cells
        return _weighted(cells, law, values)

    @staticmethod
    @once
    def backward(ctx: Any, g: Tensor) -> Any:
        _, values = ctx.saved_tensors
        to_x, to_values, *_ = ctx.needs_input_grad
        law, cells = ctx.law, ctx.cells
        if not to_x:
            return None, _known(cells, _weighted(cells, law, g), 1.0) if to_values else None, None, None
        if fused_torch.serves(cells):
            gradients = fused_torch.weighted_slopes(cells, law, g, values, to_values)
        else:
            rows, columns = torch.cat([g, values], 1), torch.cat([values, g], 1)
            gradients = pair_sums(terms.weighted_slopes(law), cells, cells.reach, rows, columns)
        dx, dv = gradients.tensor_split([len(cells.runs.points)], 1)
        return _known(cells, dx, cells.unit), _known(cells, dv, 1.0) if to_values else None, None, None


class _RadialForce(torch.autograd.Function):
    @staticmethod
    def forward(ctx: Any, x: Tensor, mass: Tensor, law: Any, radius: float, factor: float, cells: Cells) -> Tensor:
        ctx.save_for_backward(x, mass)
        ctx.law, ctx.radius, ctx.factor, ctx.cells = law, radius, factor, cells
        if fused_torch.serves(cells):
            return times(fused_torch.force(cells, law, radius, mass), factor)
        return times(pair_sums(terms.force(law), cells, radius, x[:, :0], mass[:, None]), factor)

    @staticmethod
    @once
    def backward(ctx: Any, g: Tensor) -> Any:
        _, mass = ctx.saved_tensors
        _, to_mass, *_ = ctx.needs_input_grad
        if fused_torch.serves(ctx.cells):
            gradients = fused_torch.force_slopes(ctx.cells, ctx.law, ctx.radius, g, mass, to_mass)
        else:
            both = torch.cat([g, mass[:, None]], 1)
            gradients = pair_sums(terms.force_slopes(ctx.law), ctx.cells, ctx.radius, both, both)
        dx, dm = gradients.tensor_split([len(ctx.cells.runs.points)], 1)
        to = _known(ctx.cells, dm[:, 0], ctx.factor) if to_mass else None
        return _known(ctx.cells, dx, ctx.factor * ctx.cells.unit), to, None, None, None, None


def _weighted(cells: Cells, law: Any, values: Tensor) -> Tensor:
    if fused_torch.serves(cells):
        return fused_torch.weighted(cells, law, values)
    return pair_sums(terms.weighted(law), cells, cells.reach, values[:, :0], values)


def walk(cells: Cells, radius: float) -> Iterator[Iterator[Seen]]:
    """The pairs within a radius (in the cells' unit), as `blocked_jax.walk` visits them: for some runs of queries the
    steps, one after the other.
    """
    runs, box, N = cells.runs, cells.sizes, cells.num_particles
    d, T = runs.low.shape
    device, limit = runs.low.device, radius * radius
    each = max(1, PAIRS // (RUN * RUN * PIECE))
    others_low, others_high = list(runs.low[:, None]), list(runs.high[:, None])
    for item in torch.arange(T, device=device).split(each):
        low, high = list(runs.low[:, item, None]), list(runs.high[:, item, None])
        near = gaps(low, high, others_low, others_high, box, torch) <= limit * MARGIN**2
        near |= item[:, None] == torch.arange(T, device=device)  # itself, also where it is nowhere
        counts = near.sum(1)
        _, columns = near.nonzero(as_tuple=True)
        firsts = counts.cumsum(0) - counts
        here = runs.points[:, item]

        def step(start: int) -> Seen:
            want = start + torch.arange(PIECE, device=device)
            there = want < counts[:, None]  # noqa: B023
            run = columns[(firsts[:, None] + want).clamp(max=len(columns) - 1)]  # noqa: B023
            place = run[:, :, None] * RUN + torch.arange(RUN, device=device)
            place = torch.where(there[:, :, None], place, N).reshape(len(run), -1)
            points = runs.points[:, run].reshape(d, len(run), 1, PIECE * RUN)
            pairs = zip(points, here, box, strict=True)  # noqa: B023
            steps = [nearest(theirs, mine[:, :, None], size, torch) for theirs, mine, size in pairs]
            s = squares(steps)
            return Seen(steps, s, (s <= limit) & (place[:, None] < N), item, place)  # noqa: B023

        yield (step(start) for start in range(0, int(counts.max()), PIECE))


def pair_sums(term: terms.Term, cells: Cells, radius: float, rows: Tensor, columns: Tensor) -> Tensor:
    """The sums of the terms of all pairs within the radius, (N, outputs), as in `blocked_jax`.

    Args:
        rows, columns: (N, A) and (N, B), the numbers of queries and candidates.
    """
    runs, N = cells.runs, cells.num_particles
    d, T = runs.low.shape
    if not N:
        pair = runs.points.new_zeros(1, 1, 1)
        a, b = (pair.new_zeros(1, 1, x.shape[1]) for x in (rows, columns))
        return term([pair] * d, pair, pair == 0, a, b, torch)[0][:0]
    order = runs.order.long()
    a = rows.detach()[order[torch.arange(T * RUN, device=order.device).clamp(max=N - 1)]].reshape(T, RUN, rows.shape[1])
    b = columns.detach()[order]
    sums = []
    for steps in walk(cells, radius):
        parts = (term(x.steps, x.s, x.keep, a[x.item], b[x.place.clamp(max=N - 1)], torch) for x in steps)
        sums.append(sum(parts))
    made = torch.cat(sums).reshape(T * RUN, -1)[:N]
    return torch.empty_like(made).index_copy_(0, order, made)


def most_neighbors(cells: Cells) -> Most:
    """The longest list of neighbours, and of a group of particles where kernels make such."""
    if not cells.num_particles:
        return Most(0, 0)
    if not finite(cells):
        raise ValueError("x must be finite")
    if listed_torch.serves(cells):
        return listed_torch.most(cells)
    if fused_torch.serves(cells):
        return Most(int(fused_torch.count(cells).max()), 0)
    none = cells.runs.points.new_zeros(cells.num_particles, 0)
    return Most(int(pair_sums(terms.counted(None), cells, cells.reach, none, none).max()), 0)


def lists_of(cells: Cells, capacity: int, room: int) -> tuple[Tensor, Tensor, Groups | None]:
    """places, sizes and groups."""
    if listed_torch.serves(cells) and addressed(cells.num_particles, capacity, room):
        return listed_torch.lists_of(cells, capacity, room)
    return *_lists_of(cells, capacity), None


def without_neighbors(cells: Cells) -> Tensor:
    """Lists of one place, which is empty."""
    return cells.runs.order.new_full((cells.num_particles, 1), cells.num_particles)


def spread_groups(x: Tensor, N: int) -> Tensor:
    """The numbers of groups, repeated for their places."""
    return x.repeat_interleave(ROWS)[:N]


@torch.no_grad()
def _lists_of(cells: Cells, capacity: int) -> tuple[Tensor, Tensor]:
    """The places of the neighbours of each place, (N, capacity), and how many there are."""
    N, device = cells.num_particles, cells.runs.points.device
    places, sizes = [], []
    for steps in walk(cells, cells.reach) if N else ():
        seen = list(steps)
        keep = torch.cat([x.keep for x in seen], 2).flatten(0, 1)
        place = torch.cat([x.place for x in seen], 1).repeat_interleave(RUN, 0)
        row, column = keep.nonzero(as_tuple=True)
        count = keep.sum(1)
        rank = torch.arange(len(row), device=device) - (count.cumsum(0) - count)[row]
        lists = torch.full((len(keep), capacity), N, dtype=torch.int32, device=device)
        fits = rank < capacity
        lists[row[fits], rank[fits]] = place[row[fits], column[fits]].int()
        places.append(lists)
        sizes.append(count.int())
    if not N:
        return cells.order.new_zeros(0, capacity), cells.order.new_zeros(0)
    return torch.cat(places)[:N], torch.cat(sizes)[:N]


def by_particle(cells: Cells, x: Tensor) -> Tensor:
    """x (by places) in the order of particles."""
    return torch.empty_like(x).index_copy_(0, cells.runs.order.long(), x)


def indices_of(neighbors: Neighbors) -> Tensor:
    places, order = neighbors.places, neighbors.cells.runs.order
    N, _ = places.shape
    if not N:
        return places
    particles = torch.where(places < N, order[places.clamp(max=N - 1).long()], -1)
    return by_particle(neighbors.cells, particles)
