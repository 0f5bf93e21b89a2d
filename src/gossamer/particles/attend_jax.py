"""Neighbour attention in lax: chunks of particles, each with the features of its list."""

from __future__ import annotations

from functools import partial
from typing import Any

import jax
import jax.numpy as jnp
from jax import Array, lax

from gossamer.particles.attend import Attending, Features, Gradients, Kept, Rows, row_gradients, rows
from gossamer.particles.neighbors import Neighbors

NUMBERS = 2**21  # of the features of a chunk

jax.tree_util.register_dataclass(Neighbors, data_fields=["cells", "places", "sizes"], meta_fields=[])


def attend(call: Attending, neighbors: Neighbors, q: Array, k: Array, v: Array) -> Rows:
    x, runs = neighbors.cells.x, neighbors.cells.runs
    dtype = runs.points.dtype
    given = tuple(one.astype(dtype) for one in (x, q, k, v))
    if not len(x):
        return Rows(v, jnp.zeros(v.shape[:2], dtype))
    order = lax.stop_gradient(runs.order)
    made = _attend(call, *(one[order] for one in given), neighbors)
    out, lse = (jnp.zeros_like(one).at[order].set(one, unique_indices=True) for one in made)
    return Rows(out.astype(v.dtype), lse)


@partial(jax.custom_vjp, nondiff_argnums=(0,))
def _attend(call: Attending, x: Array, q: Array, k: Array, v: Array, neighbors: Neighbors) -> Rows:
    """By places along the curve."""
    found, _ = _forward(call, x, q, k, v, neighbors)
    return found


def _forward(call: Attending, x: Array, q: Array, k: Array, v: Array, neighbors: Neighbors) -> Any:
    places = neighbors.places
    N, M = places.shape
    features = _features(neighbors, q, k, v)

    def chunk(at: Array) -> Rows:
        lists = places[at]
        return rows(call, _take(features, at), _take(features, jnp.minimum(lists, N - 1)), lists < N, jnp)

    made = Rows(*_in_chunks(chunk, N, M * (q.shape[1] * (q.shape[2] + v.shape[2]) + 8)))
    cut = neighbors.sizes > M
    made = Rows(jnp.where(cut[:, None, None], jnp.nan, made.out), jnp.where(cut[:, None], jnp.nan, made.lse))
    return made, (features, neighbors, made)


def _backward(call: Attending, kept: Any, given: Rows) -> Any:
    features, neighbors, made = kept
    places = neighbors.places
    N, M = places.shape
    mine = Kept(made.lse, (given.out * made.out).sum(-1) - given.lse, given.out)

    def chunk(at: Array) -> Gradients:
        lists = places[at]
        others, keep = jnp.minimum(lists, N - 1), lists < N
        of = jax.tree.map(lambda one: one[at], mine), jax.tree.map(lambda one: one[others], mine)
        return row_gradients(call, _take(features, at), _take(features, others), *of, keep, jnp)

    *_, H, E = features.v.shape
    found = _in_chunks(chunk, N, 2 * M * H * (features.q.shape[2] + E + 4))
    cut = neighbors.sizes > M
    dq, dk, dv, dx = (jnp.where(cut.reshape(-1, *[1] * (one.ndim - 1)), jnp.nan, one) for one in found)
    return dx, dq, dk, dv, None


_attend.defvjp(_forward, _backward)


def _features(neighbors: Neighbors, q: Array, k: Array, v: Array) -> Features:
    points = neighbors.cells.runs.points
    return Features(list(points.reshape(len(points), -1)[:, : len(v)]), q, k, v)


def _take(features: Features, at: Array) -> Features:
    found: Features = jax.tree.map(lambda one: one[at], features)
    return found


def _in_chunks(chunk: Any, N: int, numbers: int) -> Any:
    """What a function of places gives for all of them, some at a time."""
    each = min(N, max(1, NUMBERS // numbers))
    steps = -(-N // each)
    with jax.default_matmul_precision("highest"):
        found = lax.map(chunk, (jnp.arange(steps * each) % N).reshape(steps, each))
    return jax.tree.map(lambda one: one.reshape(steps * each, *one.shape[2:])[:N], found)
