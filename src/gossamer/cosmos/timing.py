"""The time of a step by pairs within the cut, and by all pairs."""

from __future__ import annotations

from functools import partial
from time import perf_counter
from typing import Any, NamedTuple

import jax
import jax.numpy as jnp
import numpy as np
from jax import Array, lax

from gossamer.cosmos.box import Box, State
from gossamer.cosmos.forces import long_range, pair_mass, short_range
from gossamer.particles import ShortRangeGravity

PAIRS = 2**28  # that the dense sum computes, at most: of as many rows as that allows
REPEATS = 3


class Timing(NamedTuple):
    """Seconds, and how far apart the numbers are."""

    mesh_s: float
    sparse_s: float
    dense_s: float  # of all rows, from those that were computed
    dense_rows: int
    difference: float  # rms over these rows, in units of the rms force


def time_a_step(state: State, box: Box) -> Timing:
    """The short-range force by `radial_force`, and by all pairs of particles, whatever their distance."""
    x = jnp.asarray(state.positions_mpc_h)
    rows = int(min(len(x), max(1, PAIRS // len(x))))
    chosen = x[:: len(x) // rows][:rows]
    mesh, _ = _best(jax.jit(partial(long_range, box=box)), x)
    sparse_s, sparse = _best(jax.jit(partial(short_range, box=box)), x)
    dense_s, dense = _best(jax.jit(partial(_dense, box=box)), chosen, x)
    expected = np.asarray(dense, np.float64)
    apart = np.asarray(sparse, np.float64)[:: len(x) // rows][:rows] - expected
    difference = float(np.sqrt((apart**2).sum() / (expected**2).sum()))
    return Timing(mesh, sparse_s, dense_s * len(x) / rows, rows, difference)


def _best(call: Any, *arguments: Array) -> tuple[float, Array]:
    result = jax.block_until_ready(call(*arguments))
    times = []
    for _ in range(REPEATS):
        start = perf_counter()
        jax.block_until_ready(call(*arguments))
        times.append(perf_counter() - start)
    return min(times), result


def _dense(rows: Array, x: Array, box: Box) -> Array:
    """Every pair: (R, 3) for rows (R, 3)."""
    law = ShortRangeGravity(box.split_mpc_h, softening=box.softening_mpc_h)
    size = jnp.asarray(box.size_mpc_h, x.dtype)

    def row(here: Array) -> Array:
        step = x - here
        step -= size * jnp.round(step / size)
        s = jnp.sum(step * step, -1)
        keep = (s > 0) & (s <= law.radius**2)
        return jnp.where(keep, law.formula.of(jnp.where(keep, s, 1), jnp), 0) @ step

    return pair_mass(box) * lax.map(row, rows, batch_size=min(len(rows), 64))
