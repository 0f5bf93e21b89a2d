"""Particles on tensors of torch: runs along the curve, and sums over pairs of runs."""

from __future__ import annotations

import math
from collections.abc import Callable, Iterator
from functools import partial
from typing import Any

import torch
from torch import Tensor

from gossamer.kernels.launch import ALIGNMENT
from gossamer.memo import Memo
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
from gossamer.particles.kernels.radial.functions import digest
from gossamer.particles.laws import Gaussian, RadialKernel, ShortRangeGravity
from gossamer.particles.neighbors import Neighbors
from gossamer.particles.once_torch import once
from gossamer.torch.key import Key, plain, recorded
from gossamer.torch.memory import hold_for_graphs, outlasting
from gossamer.torch.scale import with_number as with_number
from gossamer.torch.transforms import refuse_transforms

NAME = "gossamer.particles"
PAIRS = 2**18  # of a step: measured on two cores
PIECE = 8  # runs of candidates of a step

_constants: Memo[Tensor] = Memo()


def is_real(x: Tensor) -> bool:
    return x.is_floating_point()


_SIMPLE = frozenset({type(None), bool, int, float, str, Gaussian, ShortRangeGravity, RadialKernel})


def key_of(name: str, tensors: tuple[Any, ...], options: tuple[Any, ...], *facts: Any) -> Key | None:
    """What tells calls apart that are plain and eager; None for others, and for options that are not of Python.

    Args:
        tensors: tensors, numbers, or None.
        options: numbers, words, laws, and tuples of them.
        facts: more, hashable.
    """
    if torch.compiler.is_compiling():
        return None
    of = [x for x in tensors if isinstance(x, Tensor)]
    if not plain(*of):
        return None
    key: list[Any] = [name, torch.is_grad_enabled(), *facts]
    for x in tensors:
        if isinstance(x, Tensor):
            if x.layout is not torch.strided:
                return None
            key += (x.shape, x.stride(), x.dtype, x.device, x.requires_grad, x.data_ptr() % ALIGNMENT == 0)
        else:
            options = (*options, x)
    for x in options:
        kinds = tuple(map(type, x)) if type(x) is tuple else (type(x),)
        if not _SIMPLE.issuperset(kinds):
            return None
        # A function that a user wrote may read numbers that have changed.
        key += (x, kinds, digest(x.function)) if kinds == (RadialKernel,) else (x, kinds)
    return tuple(key)


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


def sorting(x: Tensor, box: Sizes, unit: float) -> Callable[[Tensor], Runs]:
    """What gives the runs of such positions in a box, both multiplied by `unit`: kernels, or their definition."""
    refuse_transforms(NAME, x)
    if fused_torch.sorts(x):
        return fused_torch.sorting(x, box, unit)
    return partial(runs_of, box=box, unit=unit)


@torch.no_grad()
def runs_of(x: Tensor, box: Sizes, unit: float) -> Runs:
    """The runs of positions in a box, both multiplied by `unit`."""
    refuse_transforms(NAME, x)
    x = (x if x.dtype == torch.float64 else x.float()) * unit
    N, d = x.shape
    T = -(-N // WHOLE) * (WHOLE // RUN)
    if not N:
        none = x.new_zeros(d, 0)
        return Runs(x.new_zeros(0, dtype=torch.int32), x.new_zeros(d, 0, RUN), none, none, (), x.new_ones(1))
    parts = wrapped(list(x.T), box, torch)
    place = [one.int() for one in on_the_grid(parts, box, BITS[d], torch)]
    order = torch.argsort(hilbert_keys(place, BITS[d], torch), stable=True)
    at = torch.arange(T * RUN, device=x.device).clamp(max=N - 1)
    points = torch.stack(parts)[:, order[at]].reshape(d, T, RUN)
    known = torch.where(torch.isfinite(points).all(), 1.0, float("nan")).to(x.dtype)[None]
    return Runs(order.int(), points, points.amin(-1), points.amax(-1), tree_of(points, torch), known)


def finite(cells: Cells) -> Tensor:
    """Whether all positions are finite: a truth value on the device."""
    return cells.runs.known[0] == 1


def constant(number: float, points: Tensor) -> Tensor:
    """A number in the type of the arithmetic (1,), which a GPU does not wait for when it comes again."""
    dtype, device = points.dtype, points.device

    def make() -> Tensor:
        rounded = float(torch.as_tensor(number, device="cpu").to(dtype))
        return outlasting(device, lambda: torch.full((1,), rounded, dtype=dtype, device=device))

    return _constants.get_or_make((number, type(number), math.copysign(1, number), dtype, device), make)


class _Kept:
    """A call that was checked: it keeps no tensor but that of a number which all particles have."""

    name = ""

    def __init__(self, cells: Cells, given: Any, law: Any, reach: float) -> None:
        self.law, self.reach, self.unit = law, reach, cells.unit
        self.kernels = fused_torch.sums_of(law, reach, cells.sizes) if fused_torch.serves(cells) else None
        self.number = constant(given, cells.runs.points) if type(given) in (int, float) and not recorded() else None

    def columns(self, cells: Cells, given: Any) -> Tensor:
        """What particles bring, in the type of the arithmetic; it was checked in this call or in one of its key."""
        if self.number is None:
            plain = isinstance(given, Tensor) and given.ndim
            return given.to(cells.runs.points) if plain else channels(self.name, given, cells)
        if self.number.is_cuda and torch.cuda.is_current_stream_capturing():
            hold_for_graphs(self.number)
        return self.number.expand(cells.num_particles)


class SumCall(_Kept):
    """A call of `radial_sum`; its law is in the unit of the cells."""

    name = "values"

    def __init__(self, cells: Cells, values: Any, given: Tensor, law: Any, within: float | None) -> None:
        super().__init__(cells, values, law, cells.reach)
        self.within, self.flat = within, given.ndim == 1

    def __call__(self, cells: Cells, values: Any) -> Tensor:
        if self.within is not None:
            cells = cells.within(self.within)
        values = self.columns(cells, values)
        sums: Tensor = _RadialSum.apply(cells.x.to(values.dtype), values, self, cells)
        return sums

    def sums(self, cells: Cells, values: Tensor) -> Tensor:
        """(N,) or (N, C), as the values are."""
        if self.kernels is not None:
            return self.kernels.weighted(cells.runs, values)
        of = values[:, None] if self.flat else values
        sums = pair_sums(terms.weighted(self.law.formula), cells, self.reach, of[:, :0], of)
        return (sums[:, 0] if self.flat else sums) * cells.runs.known

    def slopes(self, cells: Cells, g: Tensor, values: Tensor, both: bool) -> tuple[Tensor, Tensor | None]:
        """The gradients of positions, and with `both` of values."""
        runs = cells.runs
        if self.kernels is not None:
            dx, dv = self.kernels.weighted_slopes(runs, g, values, both)
        else:
            mine, theirs = (x[:, None] if self.flat else x for x in (g, values))
            rows, columns = torch.cat([mine, theirs], 1), torch.cat([theirs, mine], 1)
            found = pair_sums(terms.weighted_slopes(self.law.formula), cells, self.reach, rows, columns) * runs.known
            dx, dv = found.tensor_split([len(runs.points)], 1)
        return times(dx, self.unit), dv.reshape(values.shape) if both else None


class ForceCall(_Kept):
    """A call of `radial_force`; its law and the law's reach are in the unit of the cells."""

    name = "mass"

    def __init__(
        self, cells: Cells, mass: Any, given: Tensor, law: Any, radius: float, reach: float, before: float,
        after: float,
    ) -> None:  # fmt: skip
        super().__init__(cells, mass, law, reach)
        self.radius, self.before, self.after = radius, before, after  # the factors are of masses and of sums

    def __call__(self, cells: Cells, mass: Any) -> Tensor:
        cells = cells.within(self.radius)
        mass = self.columns(cells, mass)
        force: Tensor = _RadialForce.apply(cells.x.to(mass.dtype), mass, self, cells)
        return force

    def forces(self, cells: Cells, mass: Tensor) -> Tensor:
        if self.kernels is not None:
            return self.kernels.force(cells.runs, mass, self.before, self.after)
        mass = times(mass, self.before)[:, None]
        force = pair_sums(terms.force(self.law.formula), cells, self.reach, mass[:, :0], mass)
        return times(force, self.after) * cells.runs.known

    def slopes(self, cells: Cells, g: Tensor, mass: Tensor, both: bool) -> tuple[Tensor, Tensor | None]:
        """The gradients of positions, and with `both` of masses."""
        runs, mass = cells.runs, times(mass, self.before)
        if self.kernels is not None:
            dx, dm = self.kernels.force_slopes(runs, g, mass, both)
        else:
            of = torch.cat([g, mass[:, None]], 1)
            found = pair_sums(terms.force_slopes(self.law.formula), cells, self.reach, of, of) * runs.known
            dx, dm = found[:, :-1], found[:, -1]
        return times(dx, self.after * self.unit), times(times(dm, self.after), self.before) if both else None


class _RadialSum(torch.autograd.Function):
    @staticmethod
    def forward(ctx: Any, x: Tensor, values: Tensor, call: SumCall, cells: Cells) -> Tensor:
        ctx.save_for_backward(x, values)
        ctx.call, ctx.cells = call, cells
        return call.sums(cells, values)

    @staticmethod
    @once
    def backward(ctx: Any, g: Tensor) -> Any:
        _, values = ctx.saved_tensors
        to_x, to_values, *_ = ctx.needs_input_grad
        if to_x:
            return *ctx.call.slopes(ctx.cells, g, values, to_values), None, None
        return None, ctx.call.sums(ctx.cells, g) if to_values else None, None, None


class _RadialForce(torch.autograd.Function):
    @staticmethod
    def forward(ctx: Any, x: Tensor, mass: Tensor, call: ForceCall, cells: Cells) -> Tensor:
        ctx.save_for_backward(x, mass)
        ctx.call, ctx.cells = call, cells
        return call.forces(cells, mass)

    @staticmethod
    @once
    def backward(ctx: Any, g: Tensor) -> Any:
        _, mass = ctx.saved_tensors
        _, to_mass, *_ = ctx.needs_input_grad
        return *ctx.call.slopes(ctx.cells, g, mass, to_mass), None, None


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
