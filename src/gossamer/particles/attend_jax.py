"""Neighbour attention in lax: chunks of particles, each with the features of its list."""

from __future__ import annotations

from collections.abc import Callable
from dataclasses import replace
from functools import partial
from typing import Any

import jax
import jax.numpy as jnp
from jax import Array, lax
from jax.custom_batching import sequential_vmap

from gossamer.jax.compat import as_varying_as, varying_with
from gossamer.particles import listed_jax
from gossamer.particles.attend import (
    Attending,
    Features,
    NeighborGradients,
    NeighborRows,
    RowTerms,
    row_gradients,
    rows,
)
from gossamer.particles.groups import differentiates
from gossamer.particles.neighbors import Neighbors
from gossamer.particles.once_jax import once

NUMBERS = 2**21  # of the features of a chunk

jax.tree_util.register_dataclass(Neighbors, data_fields=["cells", "places", "sizes", "groups"], meta_fields=[])


def attend(call: Attending, neighbors: Neighbors, q: Array, k: Array, v: Array) -> NeighborRows:
    cells, runs = neighbors.cells, neighbors.cells.runs
    x = cells.x
    dtype = runs.points.dtype
    fused = listed_jax.attends(neighbors.groups, call, q, v)
    given = (x.astype(dtype), *(one if fused else one.astype(dtype) for one in (q, k, v)))
    if not len(x):
        return NeighborRows(*varying_with((v, jnp.zeros(v.shape[:2], dtype)), (given, neighbors)))
    # The numbers of a call are in `call`; those of cells would be facts of the program.
    neighbors = replace(neighbors, cells=replace(cells, radius=1.0, box=()))
    made: NeighborRows = _attend_compiled(*((call, None) if fused else (None, call)), *given, neighbors)
    return made._replace(out=made.out.astype(v.dtype))


@partial(jax.custom_vjp, nondiff_argnums=(0,))
def _attend(
    known: Attending | None, call: Attending | None, x: Array, q: Array, k: Array, v: Array, neighbors: Neighbors
) -> NeighborRows:
    """Rows by particles: with known numbers by a kernel on a GPU, else with those that are arguments."""
    rows, _ = _forward(known, call, x, q, k, v, neighbors)
    return rows


def _forward(
    known: Attending | None, call: Attending | None, x: Array, q: Array, k: Array, v: Array, neighbors: Neighbors
) -> Any:
    made = _by_platform(_forward_blocked, known and _forward_fused, known or call, neighbors, q, k, v)
    return made, (call, x, q, k, v, neighbors, made)


def _back(neighbors: Neighbors) -> Array:
    """The place of each particle along the curve. JAX would differentiate moves by it as sums over repeated ones."""
    order = neighbors.cells.runs.order
    return jnp.zeros_like(order).at[order].set(jnp.arange(len(order), dtype=order.dtype), unique_indices=True)


def _whole(x: Array, neighbors: Neighbors, back: Array) -> Array:
    """x (by places) in the order of particles, NaN where a list is cut."""
    return jnp.where(neighbors.cut[back].reshape(-1, *[1] * (x.ndim - 1)), jnp.nan, x[back])


def _forward_fused(call: Attending, neighbors: Neighbors, q: Array, k: Array, v: Array) -> NeighborRows:
    assert neighbors.groups is not None
    if v.dtype != jnp.float32:
        return NeighborRows(*listed_jax.forward(call, neighbors.groups, q, k, v))
    out, lse = listed_jax.forward(call, neighbors.groups, q[neighbors.cells.runs.order], k, v)
    back = _back(neighbors)
    return NeighborRows(_whole(out, neighbors, back), _whole(lse, neighbors, back))


def _forward_blocked(call: Attending, neighbors: Neighbors, q: Array, k: Array, v: Array) -> NeighborRows:
    places = neighbors.padded
    N, M = places.shape
    features = _features(neighbors, q, k, v)

    def chunk(at: Array) -> NeighborRows:
        lists = places[at]
        return rows(call, _take(features, at), _take(features, jnp.minimum(lists, N - 1)), lists < N, jnp)

    made = NeighborRows(*_in_chunks(chunk, N, M * (q.shape[1] * (q.shape[2] + v.shape[2]) + 8)))
    back = _back(neighbors)
    return NeighborRows(_whole(made.out.astype(v.dtype), neighbors, back), _whole(made.lse, neighbors, back))


def _backward(known: Attending | None, kept: Any, given: NeighborRows) -> Any:
    call, x, q, k, v, neighbors, made = kept
    kernels = _backward_fused if known and differentiates(str(given.out.dtype)) else None
    gradients = _by_platform(_backward_blocked, kernels, known or call, q, k, v, neighbors, made, given)
    gradients = once(gradients, (x, q, k, v, given))
    return (
        None,
        *(as_varying_as(dx, x) for dx, x in ((gradients.x, x), (gradients.q, q), (gradients.k, k), (gradients.v, v))),
        None,
    )


def _by_platform(blocked: Any, kernels: Any, call: Any, *arrays: Any) -> Any:
    """What `blocked` gives of the numbers of a call and arrays, or on a GPU `kernels`, if that is given."""
    if kernels is None:
        return blocked(call, *arrays)
    kernels = sequential_vmap(partial(kernels, call))
    return lax.platform_dependent(*arrays, cuda=_like(kernels), default=_like(partial(blocked, call)))


def _like(function: Callable[..., Any]) -> Callable[..., Any]:
    """The function with results that vary over all axes of a `shard_map` over which any argument does."""
    return lambda *given: varying_with(function(*given), given)


def _backward_fused(
    call: Attending, q: Array, k: Array, v: Array, neighbors: Neighbors, made: NeighborRows, given: NeighborRows
) -> NeighborGradients:
    assert neighbors.groups is not None
    _, d = neighbors.cells.x.shape
    arrays = {"dout": given.out, "dlse": given.lse, "q": q, "k": k, "v": v, "out": made.out, "lse": made.lse}
    return NeighborGradients(*listed_jax.backward(call, neighbors.groups, d, **arrays))


def _backward_blocked(
    call: Attending, q: Array, k: Array, v: Array, neighbors: Neighbors, made: NeighborRows, given: NeighborRows
) -> NeighborGradients:
    places, order = neighbors.padded, neighbors.cells.runs.order
    N, M = places.shape
    features = _features(neighbors, q, k, v)
    made, given = (jax.tree.map(lambda one: one[order], rows) for rows in (made, given))
    dout = given.out.astype(made.lse.dtype)
    mine = RowTerms(made.lse, (dout * made.out).sum(-1) - given.lse, dout)

    def chunk(at: Array) -> NeighborGradients:
        lists = places[at]
        others, keep = jnp.minimum(lists, N - 1), lists < N
        of = jax.tree.map(lambda one: one[at], mine), jax.tree.map(lambda one: one[others], mine)
        return row_gradients(call, _take(features, at), _take(features, others), *of, keep, jnp)

    *_, H, E = features.v.shape
    by_place: NeighborGradients = _in_chunks(chunk, N, 2 * M * H * (features.q.shape[2] + E + 4))
    back = _back(neighbors)
    dq, dk, dv, dx = (_whole(one, neighbors, back) for one in by_place)
    dx = jnp.zeros_like(dx) if call.spread is None else dx
    return NeighborGradients(dq.astype(q.dtype), dk.astype(k.dtype), dv.astype(v.dtype), dx)


_attend.defvjp(_forward, _backward)
_attend_compiled = jax.jit(_attend, static_argnums=0)  # found again by a call that is computed at once


def _features(neighbors: Neighbors, q: Array, k: Array, v: Array) -> Features:
    runs = neighbors.cells.runs
    points, order = runs.points, runs.order
    x = list(points.reshape(len(points), -1)[:, : len(v)])
    return Features(x, *(one[order].astype(points.dtype) for one in (q, k, v)))


def _take(features: Features, at: Array) -> Features:
    taken: Features = jax.tree.map(lambda one: one[at], features)
    return taken


def _in_chunks(chunk: Any, N: int, numbers: int) -> Any:
    """The results of a function of places, computed for a bounded number of places at a time."""
    each = min(N, max(1, NUMBERS // numbers))
    steps = -(-N // each)
    with jax.default_matmul_precision("highest"):
        chunks = lax.map(chunk, (jnp.arange(steps * each) % N).reshape(steps, each))
    return jax.tree.map(lambda one: one.reshape(steps * each, *one.shape[2:])[:N], chunks)
