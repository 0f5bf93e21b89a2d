"""Particles on arrays of JAX: runs along the curve, and sums over pairs of runs in lax."""

from __future__ import annotations

from functools import partial
from typing import Any, NamedTuple

import jax
import jax.numpy as jnp
from jax import Array, lax

from gossamer.particles import fused_jax, terms
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

jax.tree_util.register_dataclass(Cells, data_fields=["x", "runs"], meta_fields=["radius", "box"])


class Reach(NamedTuple):
    """What is known of a sum beside its arrays."""

    radius: float
    box: Sizes


def is_real(x: Array) -> bool:
    return bool(jnp.issubdtype(x.dtype, jnp.floating))


def channels(name: str, values: Any, cells: Cells) -> Array:
    """Values in the type of the arithmetic; a number becomes one for each particle."""
    values = jnp.asarray(values)
    if not jnp.issubdtype(values.dtype, jnp.number) or jnp.iscomplexobj(values):
        raise TypeError(f"{name} must be real numbers; got {values.dtype}")
    values = values.astype(cells.runs.points.dtype)
    return values if values.ndim else jnp.broadcast_to(values, (cells.num_particles,))


@partial(jax.jit, static_argnums=1)
def runs_of(x: Array, box: Sizes) -> Runs:
    x = lax.stop_gradient(x).astype(_type(x))
    N, d = x.shape
    T = -(-N // WHOLE) * (WHOLE // RUN)
    if not N:
        none = jnp.zeros((d, 0), x.dtype)
        return Runs(jnp.zeros(0, jnp.int32), jnp.zeros((d, 0, RUN), x.dtype), none, none, ())
    x = wrapped(list(x.T), box, jnp)
    place = [one.astype(jnp.int32) for one in on_the_grid(x, box, BITS[d], jnp)]
    order = jnp.argsort(hilbert_keys(place, BITS[d], jnp), stable=True).astype(jnp.int32)
    at = jnp.minimum(jnp.arange(T * RUN, dtype=jnp.int32), N - 1)
    points = jnp.stack(x)[:, order[at]].reshape(d, T, RUN)
    return Runs(order, points, points.min(-1), points.max(-1), tree_of(points, jnp))


def _type(x: Array) -> Any:
    return x.dtype if x.dtype == jnp.float64 else jnp.float32


def radial_sum(cells: Cells, values: Array, law: Any) -> Array:
    return _radial_sum(law, Reach(cells.radius, cells.box), cells.x.astype(values.dtype), cells.runs, values)


def radial_force(cells: Cells, mass: Array, law: Any) -> Array:
    return _radial_force(law, Reach(law.radius, cells.box), cells.x.astype(mass.dtype), cells.runs, mass)


@partial(jax.custom_vjp, nondiff_argnums=(0, 1))
def _radial_sum(law: Any, reach: Reach, x: Array, runs: Runs, values: Array) -> Array:
    return _sums("sum", law, reach, runs, values[:, :0], values)


def _radial_sum_forward(law: Any, reach: Reach, x: Array, runs: Runs, values: Array) -> Any:
    return _radial_sum(law, reach, x, runs, values), (runs, values)


def _radial_sum_backward(law: Any, reach: Reach, kept: Any, g: Array) -> Any:
    runs, values = kept
    rows, columns = jnp.concatenate([g, values], 1), jnp.concatenate([values, g], 1)
    dx = _sums("sum_slopes", law, reach, runs, rows, columns)
    return dx, None, _sums("sum", law, reach, runs, g[:, :0], g)


_radial_sum.defvjp(_radial_sum_forward, _radial_sum_backward)


@partial(jax.custom_vjp, nondiff_argnums=(0, 1))
def _radial_force(law: Any, reach: Reach, x: Array, runs: Runs, mass: Array) -> Array:
    return _sums("force", law, reach, runs, x[:, :0], mass[:, None])


def _radial_force_forward(law: Any, reach: Reach, x: Array, runs: Runs, mass: Array) -> Any:
    return _radial_force(law, reach, x, runs, mass), (runs, mass)


def _radial_force_backward(law: Any, reach: Reach, kept: Any, g: Array) -> Any:
    runs, mass = kept
    both = jnp.concatenate([g, mass[:, None]], 1)
    found = _sums("force_slopes", law, reach, runs, both, both)
    return found[:, :-1], None, found[:, -1]


_radial_force.defvjp(_radial_force_forward, _radial_force_backward)


@partial(jax.jit, static_argnums=(0, 1, 2))
def _sums(term: str, law: Any, reach: Reach, runs: Runs, rows: Array, columns: Array) -> Array:
    """The sums of a term: by a kernel on a GPU that has one, else in lax."""
    blocked = partial(pair_sums, terms.TERMS[term], law, reach)
    if not fused_jax.serves(runs):
        return blocked(runs, rows, columns)

    def fused(runs: Runs, rows: Array, columns: Array) -> Array:
        return fused_jax.sums(term, law, reach.radius, reach.box, runs, columns)

    found: Array = lax.platform_dependent(runs, rows, columns, cuda=fused, default=blocked)
    return found


@partial(jax.jit, static_argnums=(0, 1, 2))
def pair_sums(make: Any, law: Any, reach: Reach, runs: Runs, rows: Array, columns: Array) -> Array:
    """What the terms of all pairs within the radius add up to, (N, outputs).

    Queries are taken run by run; for each, the boxes of all runs are compared, and those that are near enough are
    visited one after the other, however many there are.

    Args:
        rows, columns: (N, A) and (N, B), what queries and candidates bring.
    """
    term: terms.Term = make(law)
    N, T = len(runs.order), runs.low.shape[1]
    outputs = jax.eval_shape(lambda: _probe(term, runs, rows, columns)).shape[-1]
    if not N:
        return jnp.zeros((0, outputs), runs.points.dtype)
    a, b = _in_runs(rows, runs), _in_runs(columns, runs)
    each = min(T, max(1, PAIRS // (RUN * RUN * PIECE)))
    steps = -(-T // each)
    item = (jnp.arange(steps * each, dtype=jnp.int32) % T).reshape(steps, each)
    limit = reach.radius**2

    def step(item: Array) -> Array:
        low, high = (list(x[:, item][..., None]) for x in (runs.low, runs.high))
        others_low, others_high = (list(x[:, None]) for x in (runs.low, runs.high))
        near = gaps(low, high, others_low, others_high, reach.box, jnp) <= limit * MARGIN**2
        rank = near.cumsum(-1, dtype=jnp.int32)
        count = rank[:, -1]
        here = runs.points[:, item]

        def piece(state: Any) -> Any:
            p, total = state
            want = p * PIECE + jnp.arange(PIECE, dtype=jnp.int32)
            at = jax.vmap(partial(jnp.searchsorted, v=want + 1))(rank).astype(jnp.int32)
            place = at[:, :, None] * RUN + jnp.arange(RUN, dtype=jnp.int32)
            there = (place < N).reshape(each, 1, -1)  # past the last run where there are no more
            at = jnp.minimum(at, T - 1)
            found = runs.points[:, at].reshape(-1, each, 1, PIECE * RUN)
            parts = [
                nearest(theirs, mine[:, :, None], size, jnp)
                for theirs, mine, size in zip(list(found), list(here), reach.box, strict=True)
            ]
            s = squares(parts)
            added = term(parts, s, (s <= limit) & there, a[item], b[at].reshape(each, PIECE * RUN, -1), jnp)
            return p + 1, total + added

        start = jnp.zeros((each, RUN, outputs), runs.points.dtype)
        _, total = lax.while_loop(lambda state: state[0] * PIECE < count.max(), piece, (0, start))
        return total

    found = lax.map(step, item).reshape(steps * each * RUN, outputs)[:N]
    return jnp.zeros_like(found).at[runs.order].set(found, unique_indices=True)


def _in_runs(values: Array, runs: Runs) -> Array:
    """(N, C) as (T, 32, C)."""
    N, T = len(runs.order), runs.low.shape[1]
    at = runs.order[jnp.minimum(jnp.arange(T * RUN, dtype=jnp.int32), N - 1)]
    return values[at].reshape(T, RUN, -1)


def _probe(term: terms.Term, runs: Runs, rows: Array, columns: Array) -> Array:
    """One pair of a term, for the number of its outputs."""
    pair = jnp.zeros((1, 1, 1), runs.points.dtype)
    a, b = (jnp.zeros((1, 1, x.shape[1]), x.dtype) for x in (rows, columns))
    return term([pair] * len(runs.points), pair, pair == 0, a, b, jnp)
