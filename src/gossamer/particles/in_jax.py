"""Particles on arrays of JAX: runs along the curve, and sums over pairs of runs in lax."""

from __future__ import annotations

from collections.abc import Callable
from functools import partial
from typing import Any, NamedTuple

import jax
import jax.numpy as jnp
from jax import Array, lax
from jax.custom_derivatives import SymbolicZero, custom_vjp_primal_tree_values

from gossamer.jax.arguments import with_number as with_number
from gossamer.jax.compat import as_varying_as, is_abstract, varying_with
from gossamer.particles import blocked_jax, fused_jax, listed_jax, terms
from gossamer.particles.attend_jax import attend as attend
from gossamer.particles.blocked_jax import PlaceLists, Reach, pair_sums, reach_of
from gossamer.particles.cells import Cells, Runs
from gossamer.particles.fused_jax import Known
from gossamer.particles.geometry import (
    BITS,
    RUN,
    WHOLE,
    Sizes,
    factors_of,
    hilbert_keys,
    on_the_grid,
    times_all,
    tree_of,
    wrapped,
)
from gossamer.particles.groups import Groups, Most, addressed
from gossamer.particles.kernels.neighbors.configurations import ROWS, STEP
from gossamer.particles.laws import OwnFormula
from gossamer.particles.neighbors import Neighbors, capacity_of
from gossamer.particles.once_jax import once

jax.tree_util.register_dataclass(Cells, data_fields=["x", "runs"], meta_fields=["radius", "box"])
jax.tree_util.register_dataclass(OwnFormula, data_fields=["numbers", "length"], meta_fields=["function"])

WIDE = 2**20  # numbers of the lists, of at least `LEAST` for each particle, that one program makes for all capacities
LEAST = 64


def is_real(x: Array) -> bool:
    return bool(jnp.issubdtype(x.dtype, jnp.floating))


def key_of(*_: Any) -> None:
    """No call is kept here: `jax.jit` keeps programs."""


def is_learned(scale: Any) -> bool:
    """Whether a scale is an array whose number is not known, for `with_number`."""
    return isinstance(scale, jax.core.Tracer) and not scale.ndim and is_real(scale)


def channels(name: str, values: Any, cells: Cells) -> Array:
    """Values in the type of the arithmetic; a number becomes one for each particle."""
    values = jnp.asarray(values)
    if not jnp.issubdtype(values.dtype, jnp.number) or jnp.iscomplexobj(values):
        raise TypeError(f"{name} must be real numbers; got {values.dtype}")
    values = values.astype(cells.runs.points.dtype)
    return values if values.ndim else jnp.broadcast_to(values, (cells.num_particles,))


@jax.jit
def runs_of(x: Array, box: Sizes, unit: float) -> Runs:
    """The runs of positions in a box, both multiplied by `unit`."""
    x = lax.stop_gradient(x).astype(_type(x)) * unit
    N, d = x.shape
    T = -(-N // WHOLE) * (WHOLE // RUN)
    if not N:
        none = jnp.zeros((d, 0), x.dtype)
        runs = Runs(jnp.zeros(0, jnp.int32), jnp.zeros((d, 0, RUN), x.dtype), none, none, ())
        empty: Runs = varying_with(runs, x)
        return empty
    x = wrapped(list(x.T), box, jnp)
    place = [one.astype(jnp.int32) for one in on_the_grid(x, box, BITS[d], jnp)]
    order = jnp.argsort(hilbert_keys(place, BITS[d], jnp), stable=True).astype(jnp.int32)
    at = jnp.minimum(jnp.arange(T * RUN, dtype=jnp.int32), N - 1)
    points = jnp.stack(x)[:, order[at]].reshape(d, T, RUN)
    runs = Runs(order, points, points.min(-1), points.max(-1), ())
    return runs._replace(tree=tree_of(points, jnp)) if fused_jax.serves(runs) else runs


def sorting(x: Array, box: Sizes, unit: float) -> Callable[[Array], Runs]:
    """`runs_of` of a box and a unit."""
    return lambda x: runs_of(x, box, unit)


def _type(x: Array) -> Any:
    return x.dtype if x.dtype == jnp.float64 else jnp.float32


def finite(cells: Cells) -> Array:
    """Whether all positions are finite: a truth value on the device."""
    return _finite(cells.runs)


@jax.jit
def _finite(runs: Runs) -> Array:
    return jnp.isfinite(runs.points).all()


def _known(sure: Array, like: Array) -> Array:
    return jnp.where(sure, 1.0, jnp.nan).astype(like.dtype)


def _at(x: Array, gradients: Array) -> Array:
    """Gradients of sums over positions x; NaN if any is not finite, also where no pair was found."""
    return gradients * _known(jnp.isfinite(x).all(), gradients)


class SumCall(NamedTuple):
    """A call of `radial_sum`; its law is in the unit of the cells."""

    cells: Cells
    values: Any
    given: Array  # in the type of the arithmetic
    law: Any
    within: float | None

    def __call__(self, *_: Any) -> Array:
        cells = self.cells
        numbers = numbers_of(cells.runs, self.law, cells.reach, cells.sizes)
        sums: Array = _sum(*numbers, cells.unit, cells.x, cells.runs, self.given)
        return sums


class ForceCall(NamedTuple):
    """A call of `radial_force`; its law and the law's reach are in the unit of the cells."""

    cells: Cells
    mass: Any
    given: Array
    law: Any
    radius: float
    reach: float
    before: float  # factors of masses and of sums
    after: float

    def __call__(self, *_: Any) -> Array:
        cells, before = self.cells, factors_of(self.before)
        numbers = numbers_of(cells.runs, self.law, self.reach, cells.sizes)
        force: Array = _force(*numbers, cells.unit, before, self.after, cells.x, cells.runs, self.given)
        return force


class Numbers(NamedTuple):
    """The numbers of sums, arguments of their program."""

    formula: Any  # of the law; None for counts
    reach: Reach

    @classmethod
    def of(cls, law: Any, radius: float, box: Sizes) -> Numbers:
        return cls(law and law.formula, Reach.of(radius, box))


def numbers_of(runs: Runs, law: Any, radius: float, box: Sizes) -> tuple[Known | None, Numbers | None]:
    """The numbers of sums: either as a program of kernels is made for them, or as arguments of one without kernels,
    which another law of a kind, another radius or box does not compile again.
    """
    if fused_jax.serves(runs):
        return Known(law, radius, box), None
    return None, Numbers.of(law, radius, box)


@partial(jax.custom_vjp, nondiff_argnums=(0,))
def _radial_sum(known: Known | None, numbers: Numbers | None, x: Array, runs: Runs, values: Array) -> Array:
    return _sums("sum", known, numbers, runs, values[:, :0], values)


def _radial_sum_forward(known: Known | None, *given: Any) -> Any:
    numbers, x, runs, values = custom_vjp_primal_tree_values(given)
    return _radial_sum(known, numbers, x, runs, values), (numbers, x, runs, values, _asked(given))


def _radial_sum_backward(known: Known | None, kept: Any, g: Any) -> Any:
    numbers, x, runs, values, asked = kept
    g, d = _materialized(g), len(runs.points)
    if asked.x is None:
        gradients = _at(x, once(_sums("sum", known, numbers, runs, g[:, :0], g), (x, values, g)))
        return None, None, None, as_varying_as(gradients, values)
    rows, columns = jnp.concatenate([g, values], 1), jnp.concatenate([values, g], 1)
    gradients = _sums("sum_slopes", known, numbers, runs, rows, columns, asked.values is not None)
    gradients = _at(x, once(gradients, (x, values, g)))
    dx = as_varying_as(gradients[:, :d], x)
    return None, dx, None, None if asked.values is None else as_varying_as(gradients[:, d:], values)


_radial_sum.defvjp(_radial_sum_forward, _radial_sum_backward, symbolic_zeros=True)


@partial(jax.custom_vjp, nondiff_argnums=(0,))
def _radial_force(
    known: Known | None, numbers: Numbers | None, x: Array, runs: Runs, mass: Array, factor: Any
) -> Array:
    return _sums("force", known, numbers, runs, x[:, :0], mass[:, None]) * factor


def _radial_force_forward(known: Known | None, *given: Any) -> Any:
    numbers, x, runs, mass, factor = custom_vjp_primal_tree_values(given)
    return _radial_force(known, numbers, x, runs, mass, factor), (numbers, x, runs, mass, factor, _asked(given))


def _radial_force_backward(known: Known | None, kept: Any, g: Any) -> Any:
    numbers, x, runs, mass, factor, asked = kept
    g, d = _materialized(g), len(runs.points)
    both = jnp.concatenate([g, mass[:, None]], 1)
    gradients = _sums("force_slopes", known, numbers, runs, both, both, asked.values is not None) * factor
    gradients = _at(x, once(gradients, (x, mass, g)))
    dx = as_varying_as(gradients[:, :d], x)
    return None, dx, None, None if asked.values is None else as_varying_as(gradients[:, d], mass), None


_radial_force.defvjp(_radial_force_forward, _radial_force_backward, symbolic_zeros=True)


# Compiled, since `shard_map` has no symbolic zeros where it computes at once.
@partial(jax.jit, static_argnums=0)
def _sum(known: Known | None, numbers: Numbers | None, unit: Any, x: Array, runs: Runs, given: Array) -> Array:
    """(N,) or (N, C), as the values are; NaN where a position is not finite: what is near it nobody knows."""
    values = given[:, None] if given.ndim == 1 else given
    sums: Array = _radial_sum(known, numbers, x.astype(values.dtype) * unit, runs, values)
    return (sums * _known(_finite(runs), sums)).reshape(given.shape)


@partial(jax.jit, static_argnums=0)
def _force(
    known: Known | None, numbers: Numbers | None, unit: Any, before: Any, after: Any, x: Array, runs: Runs, mass: Array
) -> Array:
    """(N, d), likewise; `before` are factors of masses, `after` is one of forces."""
    mass = times_all(mass, before)
    force: Array = _radial_force(known, numbers, x.astype(mass.dtype) * unit, runs, mass, after)
    return force * _known(_finite(runs), force)


class Asked(NamedTuple):
    """The requested gradients: () or None each, so that they are known under jit."""

    x: tuple[()] | None
    values: tuple[()] | None


def _asked(given: Any) -> Asked:
    _, x, _, values, *_ = given
    return Asked(() if x.perturbed else None, () if values.perturbed else None)


def _materialized(g: Any) -> Array:
    return jnp.zeros(g.shape, g.dtype) if isinstance(g, SymbolicZero) else g


@partial(jax.jit, static_argnums=(0, 1, 6))
def _sums(
    term: str, known: Known | None, numbers: Numbers | None, runs: Runs, rows: Array, columns: Array,
    values: bool = True,
) -> Array:  # fmt: skip
    """The sums of a term: by a kernel on a GPU that has one, else in lax. `values` as in `fused_jax.sums`."""
    formula, reach = numbers or Numbers.of(*known)  # type: ignore[misc]

    def blocked(runs: Runs, rows: Array, columns: Array) -> Array:
        sums = pair_sums(terms.TERMS[term], formula, reach, runs, rows, columns)
        return sums if values else sums[:, : len(runs.points)]

    if known is None:
        return blocked(runs, rows, columns)

    def fused(runs: Runs, rows: Array, columns: Array) -> Array:
        made: Array = varying_with(fused_jax.sums(term, known, runs, columns, values), (runs, rows, columns))
        return made

    sums: Array = lax.platform_dependent(runs, rows, columns, cuda=fused, default=blocked)
    return sums


def most_neighbors(cells: Cells) -> Most:
    """The longest list of neighbours, and of a group of particles where kernels make such."""
    if not cells.num_particles:
        return Most(0, 0)
    if isinstance(cells.x, jax.core.Tracer):
        raise ValueError("capacity must be given where positions are not known, as under jit")
    N, runs = cells.num_particles, cells.runs
    columns: Any = 0
    lists = None
    if listed_jax.serves(runs):
        _, sizes, groups = lists_of(cells, 1, STEP)
        assert groups is not None
        longest, columns, known = sizes.max(), groups.counts.max(), finite(cells)
    elif _wide(N):
        lists, longest, known = _wide_lists(reach_of(cells), runs, _wide(N))
    else:
        longest, known = _longest(*numbers_of(runs, None, cells.reach, cells.sizes), runs)
    if not known:
        raise ValueError("x must be finite")
    return Most(int(longest), int(columns), lists)


@partial(jax.jit, static_argnums=0)
def _longest(known: Known | None, numbers: Numbers | None, runs: Runs) -> tuple[Array, Array]:
    """How many neighbours a particle has at most, and whether all positions are finite."""
    none = jnp.zeros((len(runs.order), 0), runs.points.dtype)
    return _sums("count", known, numbers, runs, none, none).max(), _finite(runs)


def _wide(N: int) -> int:
    """The capacity of the lists that one program makes for all smaller ones; 0 of many particles, for which it would
    make more than `WIDE` numbers.
    """
    return min(WIDE // N, capacity_of(N)) if 0 < N <= WIDE // LEAST else 0


@partial(jax.jit, static_argnums=2)
def _wide_lists(reach: Reach, runs: Runs, capacity: int) -> tuple[PlaceLists, Array, Array]:
    """Lists, how many neighbours a particle has at most, and whether all positions are finite."""
    lists = blocked_jax.lists_of(reach, runs, capacity)
    return lists, lists.counts.max(), _finite(runs)


def lists_of(cells: Cells, capacity: int, room: int) -> tuple[Array, Array, Groups | None]:
    """places, sizes and groups. Of few particles one program serves all capacities where it is run at once."""
    runs, wide = cells.runs, _wide(cells.num_particles)
    if listed_jax.serves(runs) and addressed(cells.num_particles, capacity, room):
        return _groups_of(Known(None, cells.reach, cells.sizes), runs, capacity, room)
    if not 0 < capacity <= wide or is_abstract(runs.points):
        return *blocked_jax.lists_of(reach_of(cells), runs, capacity), None
    (places, sizes), *_ = _wide_lists(reach_of(cells), runs, wide)
    return places[:, :capacity], sizes, None


@partial(jax.jit, static_argnums=(0, 2, 3))
def _groups_of(known: Known, runs: Runs, capacity: int, room: int) -> tuple[Array, Array, Groups]:
    """places, sizes and groups: by a kernel on a GPU, else in lax."""

    def fused(runs: Runs) -> Any:
        return varying_with(listed_jax.lists_of(known.radius, known.box, runs, capacity, room), runs)

    def blocked(runs: Runs) -> Any:
        return varying_with(blocked_jax.groups_of(Reach.of(known.radius, known.box), runs, capacity, room), runs)

    lists: tuple[Array, Array, Groups] = lax.platform_dependent(runs, cuda=fused, default=blocked)
    return lists


def without_neighbors(cells: Cells) -> Array:
    """Lists of one place, where nobody is."""
    return jnp.full((cells.num_particles, 1), cells.num_particles, jnp.int32)


def spread_groups(x: Array, N: int) -> Array:
    """The numbers of groups, repeated for their places."""
    return jnp.repeat(x, ROWS)[:N]


def by_particle(cells: Cells, x: Array) -> Array:
    """x (by places) in the order of particles."""
    return jnp.zeros_like(x).at[cells.runs.order].set(x, unique_indices=True)


def indices_of(neighbors: Neighbors) -> Array:
    N, order = neighbors.cells.num_particles, neighbors.cells.runs.order
    if not N:
        return neighbors.places
    places = neighbors.places
    return by_particle(neighbors.cells, jnp.where(places < N, order[jnp.minimum(places, N - 1)], -1))
