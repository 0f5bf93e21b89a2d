"""The kernels of sums on arrays of JAX, which jax-tvm-ffi turns into targets of XLA's foreign functions."""

from __future__ import annotations

from functools import cache
from typing import Any, NamedTuple

import jax
import jax.numpy as jnp
import numpy as np
from jax import Array

from gossamer.jax.kernels import targets
from gossamer.jax.kernels.targets import chip
from gossamer.particles.calls import CHANNELS, call_of
from gossamer.particles.cells import Runs
from gossamer.particles.geometry import Sizes
from gossamer.particles.kernels.compiled import compiles_for, radial
from gossamer.particles.kernels.radial.configurations import FAR, RadialConfig


class Known(NamedTuple):
    """The numbers of a call that kernels take: they are attributes, known when a program is made."""

    law: Any
    radius: float
    box: Sizes


@cache
def available() -> bool:
    """Whether kernels run in this process."""
    device = chip()
    return device is not None and not targets.missing() and compiles_for(*divmod(device.sm, 10))


def serves(runs: Runs) -> bool:
    """Whether kernels compute sums of these particles where they are on a GPU."""
    return runs.points.dtype == jnp.float32 and runs.order.shape[0] > 0 and available()


def sums(term: str, given: Known, runs: Runs, columns: Array, values: bool) -> Array:
    """The sums of a term by kernels, as `blocked_jax.pair_sums` gives them; `columns` (N, B) are those of candidates.

    Args:
        values: whether gradients of values are requested; else they are left out.
    """
    if term == "force_slopes":
        columns = jnp.concatenate([columns[:, -1:], columns[:, :-1]], 1)
    if term not in CHANNELS:
        return _run(term, given, runs, columns, 1, values)
    most = CHANNELS[term]
    if term == "sum":
        parts = [columns[:, n : n + most] for n in range(0, columns.shape[1], most)]
        return jnp.concatenate([_run(term, given, runs, part, part.shape[1]) for part in parts], 1)
    mine, g = jnp.split(columns, 2, 1)
    (d, _, _), positions, others = runs.points.shape, [], []
    for n in range(0, mine.shape[1], most):
        part = jnp.concatenate([mine[:, n : n + most], g[:, n : n + most]], 1)
        slopes = _run(term, given, runs, part, part.shape[1] // 2, values)
        positions.append(slopes[:, :d])
        others.append(slopes[:, d:])
    return jnp.concatenate([sum(positions[1:], start=positions[0]), *others], 1)


def _run(term: str, given: Known, runs: Runs, payload: Array, channels: int, values: bool = True) -> Array:
    (N,), (d, T, run) = runs.order.shape, runs.points.shape
    config, numbers = call_of(term, *given, channels, values)
    more = T * run - N
    positions = runs.points.reshape(d, -1).T
    positions = positions.at[N:, 0].set(FAR) if more else positions
    brought = jnp.pad(payload[runs.order], ((0, more), (0, config.width - 3 - payload.shape[1])))
    particles = jnp.concatenate([jnp.pad(positions, ((0, 0), (0, 3 - d))), brought], 1)
    call = jax.ffi.ffi_call(
        _target(config), jax.ShapeDtypeStruct((N, config.outputs), jnp.float32), vmap_method="sequential"
    )
    named = {targets.number(at): np.float32(x) for at, x in enumerate(numbers)}
    out: Array = call(particles, *runs.tree, runs.order, jnp.ones(1, jnp.float32), **named)
    if term in ("force_slopes", "sum_slopes"):
        return out if d == 3 else jnp.concatenate([out[:, :d], out[:, 3:]], 1)
    return out[:, :d] if term == "force" else out


@cache
def _target(config: RadialConfig) -> str:
    """The name under which a kernel is registered."""
    _, numbers = call_of("count", None, 1.0, ())
    return targets.registered(f"gossamer.{radial.path(config).stem}", lambda: radial(config), len(numbers))
