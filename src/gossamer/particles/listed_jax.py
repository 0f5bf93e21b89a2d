"""Lists of neighbours by kernels on arrays of JAX, and attention over them."""

from __future__ import annotations

from functools import cache, lru_cache
from typing import Any

import jax
import jax.numpy as jnp
import numpy as np
from jax import Array

from gossamer.jax.kernels import bind, targets
from gossamer.jax.kernels.targets import chip
from gossamer.kernels.launch import Direction
from gossamer.particles import fused_jax
from gossamer.particles import groups as group_lists
from gossamer.particles.attend import Attending
from gossamer.particles.cells import Runs
from gossamer.particles.geometry import Sizes, times_all
from gossamer.particles.groups import (
    SM,
    SMALLEST,
    Groups,
    Launched,
    call_of,
    items_of,
    launched,
    named,
    shapes_of,
    type_of,
)
from gossamer.particles.kernels.compiled import lists
from gossamer.particles.kernels.neighbors.configurations import ROWS, ListsConfig
from gossamer.particles.kernels.radial.configurations import FAR


def serves(runs: Runs) -> bool:
    """Whether kernels list the neighbours of these particles where they are on a GPU."""
    device = chip()
    return fused_jax.serves(runs) and device is not None and device.sm == SM


def lists_of(radius: float, box: Sizes, runs: Runs, capacity: int, room: int) -> tuple[Array, Array, Groups]:
    """places, sizes and groups."""
    (N,), (d, T, run) = runs.order.shape, runs.points.shape
    config, numbers = call_of(radius, box)
    particles = runs.points.reshape(d, -1).T
    particles = particles.at[N:, 0].set(FAR) if T * run > N else particles
    particles = jnp.pad(particles, ((0, 0), (0, 4 - d)))
    shapes = {
        name: jax.ShapeDtypeStruct(shape, jnp.dtype(type_of(name)))
        for name, shape in shapes_of(N, capacity, room).items()
    }
    call = jax.ffi.ffi_call(_target(config), list(shapes.values()), vmap_method="sequential")
    named = {targets.number(at): np.float32(x) for at, x in enumerate(numbers)}
    made = dict(zip(shapes, call(particles, *runs.tree, **named), strict=True))
    places, sizes = made.pop("places"), made.pop("sizes")
    keys, particles = keys_of(made["columns"], runs), particles_of(runs, sizes > capacity, made["counts"] > room)
    return places, sizes, Groups(**made, keys=keys, particles=particles)


def keys_of(columns: Array, runs: Runs) -> Array:
    """The particles at places; any behind the lists, where nothing is written."""
    return jnp.where(columns < 0, -1, runs.order[jnp.clip(columns, 0, len(runs.order) - 1)])


def particles_of(runs: Runs, cut: Array, over: Array) -> Array:
    """The particles of groups: see `groups.named`."""
    place = jnp.arange(ROWS * len(over), dtype=jnp.int32)
    return named(runs.order, cut, over, jnp.isfinite(runs.points).all(), place, jnp)


def attends(groups: Groups | None, call: Attending, q: Array, v: Array) -> bool:
    """Whether kernels compute a call."""
    (*_, D), (*_, E) = q.shape, v.shape
    return groups is not None and q.dtype == v.dtype and group_lists.attends(call, str(v.dtype), D, E)


def forward(call: Attending, groups: Groups, q: Array, k: Array, v: Array) -> tuple[Array, Array]:
    """out (N, H, E) and lse (N, H), by particles; of float32 as q is, by places along the curve."""
    if call.scale is None:  # no products: those of zeros
        q = k = jnp.zeros((*v.shape[:2], SMALLEST), v.dtype)
    results = _run("forward", call, groups, {"q": q, "k": k, "v": v})
    return results["out"].reshape(v.shape), results["lse"].reshape(v.shape[:2])


def backward(call: Attending, groups: Groups, d: int, **given: Array) -> tuple[Array, Array, Array, Array]:
    """dq, dk, dv and dx (N, d) of what `kernels.launch.INPUTS` names, by particles."""
    q, v = given["q"], given["v"]
    N, H, _ = v.shape
    if call.scale is None:
        given["q"] = given["k"] = jnp.zeros((N, H, SMALLEST), v.dtype)
    gradients = _run("backward", call, groups, given)
    if call.spread is None:
        dx = jnp.zeros((N, d), jnp.float32)
    else:
        pulls = (gradients[f"pull_{name}"].reshape(H, N, -1)[..., :d].sum(0) for name in ("rows", "columns"))
        dx = times_all(sum(pulls), call.pull)
    dq, dk = (jnp.zeros_like(q) if call.scale is None else gradients[name].reshape(q.shape) for name in ("dq", "dk"))
    return dq, dk, gradients["dv"].reshape(v.shape), dx


def _run(direction: Direction, call: Attending, groups: Groups, given: dict[str, Array]) -> dict[str, Array]:
    N, H, D = given["q"].shape
    *_, E = given["v"].shape
    arrays = {**groups._asdict(), **items_of(groups, jnp.arange(H * len(groups.counts), dtype=jnp.int32), jnp)}
    shapes = tuple((name, tuple(x.shape)) for name, x in arrays.items())
    made = _launched(direction, call, (H, N, D, E), str(given["v"].dtype), shapes)
    every = {**given, **arrays}
    return bind.run(made.prepared.launch, made.operands, {}, {name: every[name] for name in made.given})


@lru_cache(maxsize=256)
def _launched(direction: Direction, call: Attending, sizes: tuple[int, int, int, int], dtype: str, shapes: Any
              ) -> Launched:  # fmt: skip
    device = chip()
    assert device is not None, "kernels are described where there is a device"
    return launched(direction, call, *sizes, dtype, device.processors, dict(shapes))


@cache
def _target(config: ListsConfig) -> str:
    """The name under which a kernel is registered."""
    _, numbers = call_of(1.0, ())
    return targets.registered(f"gossamer.{lists.path(config).stem}", lambda: lists(config), len(numbers))
