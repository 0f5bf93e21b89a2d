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
from gossamer.jax.compat import as_varying_as, varying_with
from gossamer.particles import blocked_jax, fused_jax, listed_jax, terms
from gossamer.particles.attend_jax import attend as attend
from gossamer.particles.blocked_jax import Reach, pair_sums, reach_of
from gossamer.particles.cells import Cells, Runs
from gossamer.particles.geometry import (
    BITS,
    RUN,
    WHOLE,
    Sizes,
    hilbert_keys,
    on_the_grid,
    times,
    tree_of,
    wrapped,
)
from gossamer.particles.groups import Groups, Most, addressed
from gossamer.particles.kernels.neighbors.configurations import ROWS, STEP
from gossamer.particles.neighbors import Neighbors
from gossamer.particles.once_jax import once

jax.tree_util.register_dataclass(Cells, data_fields=["x", "runs"], meta_fields=["radius", "box"])


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


@partial(jax.jit, static_argnums=1)
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
    return Runs(order, points, points.min(-1), points.max(-1), tree_of(points, jnp))


def sorting(x: Array, box: Sizes, unit: float) -> Callable[[Array], Runs]:
    """`runs_of` of a box and a unit."""
    return lambda x: runs_of(x, box, unit)


def _type(x: Array) -> Any:
    return x.dtype if x.dtype == jnp.float64 else jnp.float32


def finite(cells: Cells) -> Array:
    """Whether all positions are finite: a truth value on the device."""
    return jnp.isfinite(cells.runs.points).all()


def known(cells: Cells, like: Array) -> Array:
    """1, or NaN where a position is not finite: what is near such a particle nobody knows."""
    return _known(finite(cells), like)


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
        flat = len(self.given.shape) == 1
        values = self.given[:, None] if flat else self.given
        x = self.cells.x.astype(values.dtype) * self.cells.unit
        sums: Array = _sum(self.law, reach_of(self.cells), x, self.cells.runs, values)
        sums = sums * known(self.cells, sums)
        return sums[:, 0] if flat else sums


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
        mass = times(self.given, self.before)
        x, reach = self.cells.x.astype(mass.dtype) * self.cells.unit, Reach(self.reach, self.cells.sizes)
        force: Array = _force(self.law, reach, x, self.cells.runs, mass, self.after)
        return force * known(self.cells, force)


@partial(jax.custom_vjp, nondiff_argnums=(0, 1))
def _radial_sum(law: Any, reach: Reach, x: Array, runs: Runs, values: Array) -> Array:
    return _sums("sum", law, reach, runs, values[:, :0], values)


def _radial_sum_forward(law: Any, reach: Reach, *given: Any) -> Any:
    x, runs, values = custom_vjp_primal_tree_values(given)
    return _sums("sum", law, reach, runs, values[:, :0], values), (x, runs, values, _asked(given))


def _radial_sum_backward(law: Any, reach: Reach, kept: Any, g: Any) -> Any:
    x, runs, values, asked = kept
    g, d = _materialized(g), len(runs.points)
    if asked.x is None:
        gradients = _at(x, once(_sums("sum", law, reach, runs, g[:, :0], g), (x, values, g)))
        return None, None, as_varying_as(gradients, values)
    rows, columns = jnp.concatenate([g, values], 1), jnp.concatenate([values, g], 1)
    gradients = once(_sums("sum_slopes", law, reach, runs, rows, columns, asked.values is not None), (x, values, g))
    gradients = _at(x, gradients)
    dx = as_varying_as(gradients[:, :d], x)
    return dx, None, None if asked.values is None else as_varying_as(gradients[:, d:], values)


_radial_sum.defvjp(_radial_sum_forward, _radial_sum_backward, symbolic_zeros=True)


@partial(jax.custom_vjp, nondiff_argnums=(0, 1))
def _radial_force(law: Any, reach: Reach, x: Array, runs: Runs, mass: Array, factor: Any) -> Array:
    return _sums("force", law, reach, runs, x[:, :0], mass[:, None]) * factor


def _radial_force_forward(law: Any, reach: Reach, *given: Any) -> Any:
    x, runs, mass, factor = custom_vjp_primal_tree_values(given)
    force = _sums("force", law, reach, runs, x[:, :0], mass[:, None]) * factor
    return force, (x, runs, mass, factor, _asked(given))


def _radial_force_backward(law: Any, reach: Reach, kept: Any, g: Any) -> Any:
    x, runs, mass, factor, asked = kept
    g, d = _materialized(g), len(runs.points)
    both = jnp.concatenate([g, mass[:, None]], 1)
    gradients = once(
        _sums("force_slopes", law, reach, runs, both, both, asked.values is not None) * factor, (x, mass, g)
    )
    gradients = _at(x, gradients)
    dx = as_varying_as(gradients[:, :d], x)
    return dx, None, None if asked.values is None else as_varying_as(gradients[:, d], mass), None


_radial_force.defvjp(_radial_force_forward, _radial_force_backward, symbolic_zeros=True)

# Compiled, since `shard_map` has no symbolic zeros where it computes at once.
_sum, _force = (jax.jit(one, static_argnums=(0, 1)) for one in (_radial_sum, _radial_force))


class Asked(NamedTuple):
    """The requested gradients: () or None each, so that they are known under jit."""

    x: tuple[()] | None
    values: tuple[()] | None


def _asked(given: Any) -> Asked:
    x, _, values, *_ = given
    return Asked(() if x.perturbed else None, () if values.perturbed else None)


def _materialized(g: Any) -> Array:
    return jnp.zeros(g.shape, g.dtype) if isinstance(g, SymbolicZero) else g


@partial(jax.jit, static_argnums=(0, 1, 2, 6))
def _sums(term: str, law: Any, reach: Reach, runs: Runs, rows: Array, columns: Array, values: bool = True) -> Array:
    """The sums of a term: by a kernel on a GPU that has one, else in lax. `values` as in `fused_jax.sums`."""

    def blocked(runs: Runs, rows: Array, columns: Array) -> Array:
        sums = pair_sums(terms.TERMS[term], law, reach, runs, rows, columns)
        return sums if values else sums[:, : len(runs.points)]

    if not fused_jax.serves(runs):
        return blocked(runs, rows, columns)

    def fused(runs: Runs, rows: Array, columns: Array) -> Array:
        sums = fused_jax.sums(term, law, reach.radius, reach.box, runs, columns, values)
        made: Array = varying_with(sums, (runs, rows, columns))
        return made

    sums: Array = lax.platform_dependent(runs, rows, columns, cuda=fused, default=blocked)
    return sums


def most_neighbors(cells: Cells) -> Most:
    """The longest list of neighbours, and of a group of particles where kernels make such."""
    if not cells.num_particles:
        return Most(0, 0)
    if isinstance(cells.x, jax.core.Tracer):
        raise ValueError("capacity must be given where positions are not known, as under jit")
    if not finite(cells):
        raise ValueError("x must be finite")
    if listed_jax.serves(cells.runs):
        _, sizes, groups = lists_of(cells, 1, STEP)
        assert groups is not None
        return Most(int(sizes.max()), int(groups.counts.max()))
    none = jnp.zeros((cells.num_particles, 0), cells.runs.points.dtype)
    counts = _sums("count", None, reach_of(cells), cells.runs, none, none)
    return Most(int(counts.max()), 0)


def lists_of(cells: Cells, capacity: int, room: int) -> tuple[Array, Array, Groups | None]:
    return _lists_of(reach_of(cells), cells.runs, capacity, room)


@partial(jax.jit, static_argnums=(0, 2, 3))
def _lists_of(reach: Reach, runs: Runs, capacity: int, room: int) -> tuple[Array, Array, Groups | None]:
    """places, sizes and groups: by a kernel on a GPU that has one, else in lax."""
    N = len(runs.order)
    if not listed_jax.serves(runs) or not addressed(N, capacity, room):
        return *blocked_jax.lists_of(reach, runs, capacity), None

    def fused(runs: Runs) -> Any:
        return varying_with(listed_jax.lists_of(reach.radius, reach.box, runs, capacity, room), runs)

    def blocked(runs: Runs) -> Any:
        return varying_with(blocked_jax.groups_of(reach, runs, capacity, room), runs)

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
