"""Pairs of particles within a radius in lax, on any device: runs of queries, each with the runs that are near it."""

from __future__ import annotations

from collections.abc import Callable
from functools import partial
from typing import Any, NamedTuple

import jax
import jax.numpy as jnp
from jax import Array, lax

from gossamer.jax.compat import varying_with
from gossamer.particles import terms
from gossamer.particles.cells import Cells, Runs
from gossamer.particles.geometry import MARGIN, RUN, Seen, Sizes, gaps, nearest, squares
from gossamer.particles.groups import Groups
from gossamer.particles.kernels.neighbors.configurations import ROWS, WORD
from gossamer.particles.listed_jax import particles_of

PAIRS = 2**18  # of a step: measured on two cores
PIECE = 8  # runs of candidates of a step
FEW = 512  # runs of which all are compared to find one: a search compiles longer


class Reach(NamedTuple):
    """The radius and the box of a sum, in the unit of the cells: arguments of programs."""

    radius: Any
    square: Any  # of the radius
    near: Any  # likewise, with a margin: between the boxes of runs
    box: Any  # `Sizes`

    @classmethod
    def of(cls, radius: float, box: Sizes) -> Reach:
        square = radius * radius
        return cls(radius, square, square * MARGIN**2, box)


def reach_of(cells: Cells) -> Reach:
    return Reach.of(cells.reach, cells.sizes)


def walk(
    reach: Reach, runs: Runs, start: Callable[[int], Any], visit: Callable[[Any, Seen], Any], *read: Array
) -> Any:  # fmt: skip
    """Fold `visit` over all pairs within the radius, from `start`; (N, ...) by the places of queries along the curve.

    Queries are taken run by run; for each, the boxes of all runs are compared, and those that are near enough are
    visited one after the other, however many there are.

    Args:
        start: the state of c runs of queries, arrays (c, 32, ...).
        visit: the state after the pairs of a step.
        read: the other arrays that `visit` reads: in `shard_map` results differ where these do.
    """
    N, T = len(runs.order), runs.low.shape[1]
    each = min(T, max(1, PAIRS // (RUN * RUN * PIECE)))
    steps = -(-T // each)
    items = (jnp.arange(steps * each, dtype=jnp.int32) % T).reshape(steps, each)
    search = "compare_all" if T <= FEW else "scan"

    def step(item: Array) -> Any:
        low, high = (list(x[:, item][..., None]) for x in (runs.low, runs.high))
        others_low, others_high = (list(x[:, None]) for x in (runs.low, runs.high))
        near = gaps(low, high, others_low, others_high, reach.box, jnp) <= reach.near
        rank = near.cumsum(-1, dtype=jnp.int32)
        count = rank[:, -1]
        here = runs.points[:, item]

        def piece(state: Any) -> Any:
            p, before = state
            want = p * PIECE + jnp.arange(PIECE, dtype=jnp.int32)
            at = jax.vmap(partial(jnp.searchsorted, v=want + 1, method=search))(rank).astype(jnp.int32)
            place = (at[:, :, None] * RUN + jnp.arange(RUN, dtype=jnp.int32)).reshape(each, -1)
            there = place[:, None] < N  # past the last run where there are no more
            points = runs.points[:, jnp.minimum(at, T - 1)].reshape(-1, each, 1, PIECE * RUN)
            parts = [
                nearest(theirs, mine[:, :, None], size, jnp)
                for theirs, mine, size in zip(list(points), list(here), reach.box, strict=True)
            ]
            s = squares(parts)
            return p + 1, visit(before, Seen(parts, s, (s <= reach.square) & there, item, place))

        before = varying_with(start(each), (runs, read))
        _, after = lax.while_loop(lambda state: state[0] * PIECE < count.max(), piece, (0, before))
        return after

    visited = lax.map(step, items)
    return jax.tree.map(lambda x: x.reshape(steps * each * RUN, *x.shape[3:])[:N], visited)


@partial(jax.jit, static_argnums=0)
def pair_sums(make: Any, formula: Any, reach: Reach, runs: Runs, rows: Array, columns: Array) -> Array:
    """The sums of the terms of all pairs within the radius, (N, outputs).

    Args:
        rows, columns: (N, A) and (N, B), the numbers of queries and candidates.
    """
    term: terms.Term = make(formula)
    N, dtype = len(runs.order), runs.points.dtype
    outputs = jax.eval_shape(lambda: _probe(term, runs, rows, columns)).shape[-1]
    if not N:
        nothing: Array = varying_with(jnp.zeros((0, outputs), dtype), (runs, rows, columns))
        return nothing
    order = runs.order
    T = runs.low.shape[1]
    a = rows[order[jnp.minimum(jnp.arange(T * RUN), N - 1)]].reshape(T, RUN, rows.shape[1])
    b = columns[order]

    def visit(total: Array, seen: Seen) -> Array:
        theirs = b[jnp.minimum(seen.place, len(b) - 1)]
        return total + term(seen.steps, seen.s, seen.keep, a[seen.item], theirs, jnp)

    by_place = walk(reach, runs, lambda c: jnp.zeros((c, RUN, outputs), dtype), visit, rows, columns)
    return jnp.zeros_like(by_place).at[runs.order].set(by_place, unique_indices=True)


class PlaceLists(NamedTuple):
    """The neighbours of each particle, by places along the curve."""

    places: Array  # (N, M) int32, ascending within what a step looks at; N past the last one
    counts: Array  # (N,) int32: how many there are, also where they do not fit


@partial(jax.jit, static_argnums=2)
def lists_of(reach: Reach, runs: Runs, M: int) -> PlaceLists:
    N = len(runs.order)
    if not N:
        none: PlaceLists = varying_with(PlaceLists(jnp.zeros((0, M), jnp.int32), jnp.zeros(0, jnp.int32)), runs)
        return none

    def start(c: int) -> PlaceLists:
        return PlaceLists(jnp.full((c, RUN, M), N, jnp.int32), jnp.zeros((c, RUN), jnp.int32))

    def visit(lists: PlaceLists, seen: Seen) -> PlaceLists:
        c, _, K = seen.keep.shape
        rank = lists.counts[..., None] + seen.keep.cumsum(-1, dtype=jnp.int32)
        to = jnp.where(seen.keep, rank - 1, M)
        item, query = jnp.arange(c)[:, None, None], jnp.arange(RUN)[:, None]
        place = jnp.broadcast_to(seen.place[:, None], (c, RUN, K))
        return PlaceLists(lists.places.at[item, query, to].set(place, mode="drop"), rank[..., -1])

    lists: PlaceLists = walk(reach, runs, start, visit)
    return lists


def groups_of(reach: Reach, runs: Runs, M: int, room: int) -> tuple[Array, Array, Groups]:
    """places, sizes and groups, as the kernel makes them."""
    places, sizes = lists_of(reach, runs, M)
    d, *_ = runs.points.shape
    (N,), T = runs.order.shape, -(-len(runs.order) // ROWS)
    points = jnp.pad(runs.points.reshape(d, -1)[:, :N], ((0, 3 - d), (0, T * ROWS - N)), mode="edge")
    rows = jnp.pad(places, ((0, T * ROWS - N), (0, 0)), constant_values=N).reshape(T, ROWS, M)
    box = (*reach.box, *[None] * (3 - d))

    def group(given: Any) -> Any:
        lists, x = given
        kept = jnp.zeros((ROWS, N + 1), bool).at[jnp.arange(ROWS)[:, None], lists].set(True)[:, :N]
        some = kept.any(0)
        columns = jnp.nonzero(some, size=room, fill_value=N)[0].astype(jnp.int32)
        listed = columns < N
        bit = (kept[:, jnp.minimum(columns, N - 1)] & listed).reshape(ROWS, room // WORD, WORD)
        words = jnp.where(bit, jnp.uint32(1) << jnp.arange(WORD, dtype=jnp.uint32), jnp.uint32(0)).sum(-1, jnp.uint32)
        low, high = x.min(1), x.max(1)
        centre, widths = (low + high) / 2, high - low
        far = [2 * (w + reach.radius) > size for w, size in zip(widths, box, strict=True) if size is not None]
        theirs = points[:, jnp.minimum(columns, N - 1)]
        parts = zip(theirs, centre, box, strict=True)
        apart = jnp.stack([nearest(x, c, size, jnp) for x, c, size in parts], -1)
        mine = jnp.pad((x - centre[:, None]).T, ((0, 0), (0, 1)))
        apart = jnp.pad(jnp.where(listed[:, None], apart, 0), ((0, 0), (0, 1)))
        is_far = jnp.asarray(far, bool).any().astype(jnp.int32)
        bits = lax.bitcast_convert_type(words.T, jnp.int32)
        return jnp.where(listed, columns, -1), bits, apart, mine, some.sum(dtype=jnp.int32), is_far

    columns, bits, theirs, mine, counts, far = lax.map(group, (rows, points.reshape(3, T, ROWS).swapaxes(0, 1)))
    keys = jnp.where(columns < 0, -1, runs.order[jnp.maximum(columns, 0)])
    flat = columns.reshape(-1), keys.reshape(-1), bits.reshape(-1, ROWS), theirs.reshape(-1, 4), mine.reshape(-1, 4)
    particles = particles_of(runs, sizes > M, counts > room)
    return places, sizes, Groups(*flat, counts, far, particles)


def _probe(term: terms.Term, runs: Runs, rows: Array, columns: Array) -> Array:
    """One pair of a term, for the number of its outputs."""
    pair = jnp.zeros((1, 1, 1), runs.points.dtype)
    a, b = (jnp.zeros((1, 1, x.shape[1]), x.dtype) for x in (rows, columns))
    return term([pair] * len(runs.points), pair, pair == 0, a, b, jnp)
