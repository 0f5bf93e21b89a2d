"""The sums of particles over lists of neighbours, by XLA alone: beside what `benchmarks/particles.py` measures."""

from __future__ import annotations

from collections.abc import Callable
from typing import Any

import jax
import jax.numpy as jnp
import numpy as np
from particle_clouds import Exact, timed, waited

from gossamer import particles as gp


def lists_by_cells(x: jax.Array, radius: float) -> jax.Array:
    """(N, most) neighbours of each particle, N where there is none, from a grid of cells of at least the radius."""
    N, across = len(x), max(1, int(1 / radius))
    across = 1 if across < 3 else across
    cell = jnp.minimum((x * across).astype(jnp.int32), across - 1)
    flat = (cell[:, 0] * across + cell[:, 1]) * across + cell[:, 2]
    order = jnp.argsort(flat).astype(jnp.int32)
    ends = jnp.searchsorted(flat[order], jnp.arange(across**3), side="right").astype(jnp.int32)
    starts = jnp.concatenate([jnp.zeros(1, jnp.int32), ends[:-1]])
    room = int((ends - starts).max())
    steps = np.stack(np.meshgrid(*[np.arange(-1, 2) if across > 1 else np.arange(1)] * 3), -1).reshape(-1, 3)

    def candidates(i: jax.Array) -> tuple[jax.Array, jax.Array]:
        beside = (cell[i] + steps) % across
        at = (beside[:, 0] * across + beside[:, 1]) * across + beside[:, 2]
        place = starts[at][:, None] + jnp.arange(room)
        there = (place < ends[at][:, None]).reshape(-1)
        other = order[jnp.minimum(place, N - 1)].reshape(-1)
        d = x[other] - x[i]
        d = d - jnp.round(d)
        return other, there & ((d * d).sum(1) <= radius**2)

    def of_each(function: Callable[[jax.Array], jax.Array]) -> jax.Array:
        return jax.jit(lambda: jax.lax.map(function, jnp.arange(N), batch_size=2048))()

    def compact(i: jax.Array) -> jax.Array:
        other, near = candidates(i)
        at = jnp.where(near, jnp.cumsum(near) - 1, most)
        return jnp.full(most, N, jnp.int32).at[at].set(other, mode="drop")

    most = int(of_each(lambda i: candidates(i)[1].sum()).max())
    return of_each(compact)


def listed(
    x: jax.Array, radius: float, law: gp.ShortRangeGravity, h: float, exact: Exact, pairs: float, common: dict[str, Any]
) -> list[dict[str, Any]]:
    """The same sums over lists of neighbours that were made before, by XLA alone."""
    N, mass = len(x), jnp.ones(len(x))
    lists = lists_by_cells(x, radius)
    pairs = float((lists < N).sum())
    places, masses = jnp.concatenate([x, jnp.full((1, 3), 1e9)]), jnp.concatenate([mass, jnp.zeros(1)])

    def steps(places: jax.Array, lists: jax.Array) -> tuple[jax.Array, jax.Array]:
        d = places[lists] - places[:N, None]
        d = d - jnp.round(d)
        return d, (d * d).sum(-1)

    @jax.jit
    def density(places: jax.Array, masses: jax.Array, lists: jax.Array) -> jax.Array:
        _, s = steps(places, lists)
        return jnp.where((s <= radius**2) & (lists < N), jnp.exp(-s / (2 * h * h)) * masses[lists], 0).sum(1)

    @jax.jit
    def force(places: jax.Array, masses: jax.Array, lists: jax.Array) -> jax.Array:
        d, s = steps(places, lists)
        near = (s <= law.radius**2) & (lists < N) & (s > 0)
        return (jnp.where(near, law.formula.of(jnp.where(near, s, 1.0), jnp) * masses[lists], 0)[..., None] * d).sum(1)

    found = []
    for name, function in (("density", density), ("gravity", force)):
        out = function(places, masses, lists)
        error = exact.density_error(out, h) if name == "density" else exact.force_error(out, law)
        ms = timed(lambda function=function: function(places, masses, lists))
        one = waited(lambda function=function: function(places, masses, lists))
        found.append({**common, "neighbors": pairs / N, "case": name, "implementation": "XLA list", "error": error,
                      "capacity": lists.shape[1], "ms": ms, "waited_ms": one,
                      "interactions_per_second": pairs / ms * 1e3})  # fmt: skip
    return found
