"""Particles from JAX in any unit of length: results differ by a power of two, to the bit."""

from __future__ import annotations

from collections.abc import Callable
from typing import Any

import jax
import jax.numpy as jnp
import numpy as np
import pytest
from jax import Array

from gossamer import particles as gp
from tests.particles import units
from tests.particles.units import Result


def gaussian(s: Any, xp: Any, h: float) -> Any:
    return xp.exp(s * -0.5 / h**2)


def results(c: units.Cloud, setting: units.Setting, n: int, compiled: bool = False) -> dict[str, Result]:
    """Sums, forces, lists and attention, and their gradients."""
    x, values, mass, of_sums, of_forces = (jnp.asarray(one) for one in c)
    x, scale = x * 2.0**n, 2.0**n
    box, radius = units.scaled(setting.box, n), units.RADIUS * scale
    split = radius / 5.5
    law = gp.ShortRangeGravity(split, setting.softening * split)
    calls: dict[str, tuple[Callable[..., Array], Array, Array, tuple[int, int, int]]] = {}
    for name, h in (("sum", units.H), ("narrow sum", units.NARROW)):
        calls[name] = (
            lambda x, v, h=h: gp.radial_sum(gp.Cells.build(x, radius, box), v, gp.Gaussian(h * scale)), values, of_sums,
            (0, -1, 0),
        )  # fmt: skip
    calls["force"] = (
        lambda x, m: gp.radial_force(gp.Cells.build(x, radius, box), m, law),
        mass,
        of_forces,
        (-2, -3, -2),
    )
    own = gp.RadialKernel(gaussian, units.H * scale)
    calls["own force"] = (
        lambda x, m: gp.radial_force(gp.Cells.build(x, radius, box), m, own), mass, of_forces, (1, 0, 1)
    )  # fmt: skip
    M = len(x)
    q, k, v, dout = (jax.random.normal(jax.random.key(n), (M, 2, 16)) for n in range(4))
    lists = gp.Neighbors.allocate(x, radius, box)

    def attend(x: Array, v: Array) -> Array:
        out: Array = gp.neighbor_attention(q, k, v, lists.update(x), kernel="dot+gaussian", bandwidth=units.H * scale)
        return out

    calls["attention"] = attend, v, dout, (0, -1, 0)
    found = {"lists": Result(np.asarray(lists.indices), 0), "counts": Result(np.asarray(lists.counts), 0)}
    for name, (call, given, weights, powers) in calls.items():

        def both(x: Array, given: Array, call: Any = call, weights: Array = weights) -> Any:
            out, back = jax.vjp(call, x, given)
            return out, *back(weights)

        made = (jax.jit(both) if compiled else both)(x, given)
        for part, one, power in zip(("", " x", " v"), made, powers, strict=True):
            found[name + part] = Result(np.asarray(one), power)
    return found


@pytest.mark.parametrize("setting", units.SETTINGS[:2])
def test_any_unit(setting: units.Setting) -> None:
    """On a GPU these are the kernels, which are near the operations of another one."""
    c = units.cloud()
    first = results(c, setting, 0)
    for n in units.FEW:
        units.check(results(c, setting, n), first, n)


def test_any_unit_compiled() -> None:
    """Where lengths are constants of a program."""
    c = units.cloud()
    first = results(c, units.SETTINGS[1], 0, compiled=True)
    for n in (-60, 60):
        units.check(results(c, units.SETTINGS[1], n, compiled=True), first, n)


@pytest.mark.parametrize("split", [1.0, 2.0**-64, 2.0**64])
def test_particles_next_to_one_another(split: float) -> None:
    """Of two of them force and gradients are those of Newton, or have their signs."""
    law = gp.ShortRangeGravity(split)
    direction = np.array([0.36, -0.48, 0.8])
    push = jnp.asarray([[1.0, 2.0, -0.5], [0.25, -1.0, 2.0]])
    with np.errstate(over="ignore"):
        for distance in 10.0 ** -np.arange(4, 18):
            x = jnp.asarray(np.stack([0 * direction, distance * direction]) * split, jnp.float32)
            r = np.linalg.norm(np.asarray(x[1], np.float64))
            out, back = jax.vjp(lambda x: gp.radial_force(gp.Cells.build(x, law.radius), 1.0, law), x)
            (dx,) = back(push)
            wanted = np.stack([direction, -direction]) / r**2
            u = np.asarray(push[1] - push[0], np.float64)
            slope = (u - 3 * (u @ direction) * direction) / r**3
            for found, right in ((out, wanted), (dx, np.stack([slope, -slope]))):
                same = np.asarray(found) == right.astype(np.float32)
                assert (same | (np.abs(found - right) <= 1e-4 * np.abs(right).max() + 1e-37)).all()
