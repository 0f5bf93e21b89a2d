"""Particles in `shard_map`, on four devices, with and without `check_vma`: each slab against itself computed alone."""

from __future__ import annotations

from collections.abc import Callable
from typing import Any

import jax
import jax.numpy as jnp
import numpy as np
import pytest
from jax import Array
from jax.sharding import AxisType
from jax.sharding import PartitionSpec as P

from gossamer import particles as gp
from gossamer.jax.kernels import targets
from tests.particles import oracle

DEVICES, N, RADIUS, BOX = 4, 70, 0.25, (1.0, None, 0.9)
LAW, WIDTH = gp.ShortRangeGravity(RADIUS / 5.5, 0.002), gp.Gaussian(0.1)
X, V, W = (jax.random.uniform(jax.random.key(n), (DEVICES * N, 3)) for n in range(3))
Function = Callable[..., Any]


def own(s: Any, xp: Any, h: float) -> Any:
    return xp.where(s < h**2, xp.exp(-s / h**2), 0.3)


def density(x: Array, v: Array) -> Array:
    return gp.radial_sum(gp.Cells.build(x, RADIUS, BOX), v, WIDTH)


def many(x: Array, v: Array) -> Array:
    """Of more channels than are summed one by one."""
    return gp.radial_sum(gp.Cells.build(x, RADIUS, BOX), jnp.concatenate([v, v * v], 1), gp.RadialKernel(own, 0.1))


def force(x: Array, v: Array) -> Array:
    return gp.radial_force(gp.Cells.build(x, RADIUS, BOX), v[:, 0], LAW)


def number(x: Array, v: Array) -> Array:
    """Of a mass that is a number, the same on all devices."""
    return gp.radial_force(gp.Cells.build(x, RADIUS, BOX), 2.0, LAW) * v


def dot(x: Array, v: Array) -> Array:
    neighbors = gp.Neighbors.allocate(x, RADIUS, BOX, capacity=N)
    out, lse = gp.neighbor_attention(v, v[:, ::-1], v * v, neighbors, return_residual=True)
    return out + lse[:, None]


def gaussian(x: Array, v: Array) -> Array:
    neighbors = gp.Neighbors.allocate(x, RADIUS, BOX, capacity=N)
    return gp.neighbor_attention(None, None, v, neighbors, kernel="gaussian", bandwidth=0.1)


def both(x: Array, v: Array) -> Array:
    neighbors = gp.Neighbors.allocate(x, RADIUS, BOX, capacity=N).update(x * 0.99)
    return gp.neighbor_attention(v, 2 * v, v, neighbors, kernel="dot+gaussian", bandwidth=0.1)


def counted(x: Array, v: Array) -> Array:
    neighbors = gp.Neighbors.allocate(x, RADIUS, BOX, capacity=9)
    return jnp.where(neighbors.overflow, 0.0, 1.0) + neighbors.counts[:, None] * v


EVERY = [density, many, force, number, dot, gaussian, both, counted]


def mapped(f: Function, specs: Any, out: P, check: bool = True) -> Function:
    mesh = jax.make_mesh((DEVICES,), ("slabs",), axis_types=(AxisType.Auto,))
    return jax.shard_map(f, mesh=mesh, in_specs=specs, out_specs=out, check_vma=check)


def near(found: Any, wanted: Any) -> None:
    for one, other in zip(jax.tree.leaves(found), jax.tree.leaves(wanted), strict=True):
        np.testing.assert_allclose(one, other, rtol=2e-5, atol=3e-5 * float(jnp.abs(other).max()) + 1e-30)


def slabs(x: Array) -> list[Array]:
    return jnp.split(x, DEVICES)


@pytest.mark.parametrize("f", EVERY, ids=lambda f: f.__name__)
def test_each_device_its_own(f: Function) -> None:
    """Forward, and gradients taken inside and outside; `check_vma` is on by default."""

    def loss(x: Array, v: Array) -> Array:
        return (f(x, v) ** 2).sum()

    @jax.jit
    def alone(x: Array, v: Array) -> Any:
        return f(x, v), *jax.grad(loss, (0, 1))(x, v)

    each = [alone(x, v) for x, v in zip(slabs(X), slabs(V), strict=True)]
    wanted = jax.tree.map(lambda *parts: jnp.concatenate(parts), *each)
    outside = mapped(f, P("slabs"), P("slabs"))

    @jax.jit
    def every(x: Array, v: Array) -> Any:
        inside = mapped(jax.grad(loss, (0, 1)), P("slabs"), P("slabs"))(x, v)
        return outside(x, v), inside, jax.grad(lambda x, v: (outside(x, v) ** 2).sum(), (0, 1))(x, v)

    found, inside, grads = every(X, V)
    near((found, inside, grads), (wanted[0], wanted[1:], wanted[1:]))


def test_computed_at_once() -> None:
    """Without jit, where JAX has no symbolic zeros; and without `check_vma`."""
    specs = P("slabs"), P("slabs")
    for f in (density, gaussian):
        wanted = jnp.concatenate([f(*one) for one in zip(slabs(X), slabs(V), strict=True)])
        near(mapped(f, specs, P("slabs"))(X, V), wanted)
    plain, unchecked = (mapped(force, specs, P("slabs"), check=check) for check in (True, False))
    wanted = jax.jit(jax.grad(lambda x, v: (unchecked(x, v) ** 2).sum(), (0, 1)))(X, V)
    near(jax.grad(lambda x, v: (plain(x, v) ** 2).sum(), (0, 1))(X, V), wanted)


@pytest.mark.parametrize("shared", ["positions", "values"])
def test_what_all_devices_share(shared: str) -> None:
    """The gradient of what is the same everywhere is the sum of all devices'."""
    one, parts = (X[:N], V) if shared == "positions" else (V[:N], X)
    specs = (P(), P("slabs")) if shared == "positions" else (P("slabs"), P())

    def order(share: Array, part: Array) -> tuple[Array, Array]:
        return (share, part) if shared == "positions" else (part, share)

    def f(x: Array, v: Array) -> Any:
        return jnp.concatenate([density(x, v), force(x, v), number(x, v), dot(x, v), both(x, v)], 1)

    @jax.jit
    def alone(share: Array, part: Array) -> Any:
        return jax.value_and_grad(lambda *given: (f(*order(*given)) ** 2).sum(), (0, 1))(share, part)

    each = [alone(one, part) for part in slabs(parts)]
    wanted = sum(a for _, (a, _) in each), jnp.concatenate([b for _, (_, b) in each])
    inside = mapped(f, specs, P("slabs"))
    total, grads = jax.jit(jax.value_and_grad(lambda *given: (inside(*order(*given)) ** 2).sum(), (0, 1)))(one, parts)
    near((total, grads), (sum(value for value, _ in each), wanted))


def test_cells_of_all_devices() -> None:
    """Made outside, the same everywhere; each device has channels of its own."""
    values = jnp.asarray(np.random.default_rng(0).standard_normal((N, 2 * DEVICES)), jnp.float32)

    def total(x: Array, values: Array) -> Array:
        cells = gp.Cells.build(x, RADIUS, BOX)
        f = mapped(lambda cells, v: gp.radial_sum(cells, v, WIDTH), (P(), P(None, "slabs")), P(None, "slabs"))
        return (f(cells, values) ** 2).sum()

    def plain(x: Array, values: Array) -> Array:
        return (gp.radial_sum(gp.Cells.build(x, RADIUS, BOX), values, WIDTH) ** 2).sum()

    near(jax.jit(jax.grad(total, (0, 1)))(X[:N], values), jax.grad(plain, (0, 1))(X[:N], values))


def test_slabs_with_halos() -> None:
    """As docs/particles.md says: results and gradients of slabs are those of all particles at once."""
    rng, room = np.random.default_rng(5), N
    x = rng.random((DEVICES * N, 3)).astype(np.float32)
    x[:, 0] = np.sort(rng.random(DEVICES * N)) / DEVICES + np.repeat(np.arange(DEVICES), N) / DEVICES
    mass = rng.random(DEVICES * N).astype(np.float32)

    def shifted(x: Array, way: int) -> Array:
        return jax.lax.ppermute(x, "slabs", [(n, (n + way) % DEVICES) for n in range(DEVICES)])

    def slab(x: Array, mass: Array) -> Array:
        others = [shifted(x, way) for way in (1, -1)]
        masses = [shifted(mass, way) for way in (1, -1)]
        low = jax.lax.axis_index("slabs") / DEVICES
        distance = [jnp.abs((one[:, 0] - low - 0.5 / DEVICES + 0.5) % 1.0 - 0.5) - 0.5 / DEVICES for one in others]
        masses = [jnp.where(d <= 0.2, m, 0.0) for d, m in zip(distance, masses, strict=True)]
        cells = gp.Cells.build(jnp.concatenate([x, *others]), 0.2, 1.0)
        return gp.radial_force(cells, jnp.concatenate([mass, *masses]), gp.ShortRangeGravity(0.2 / 5.5, 0.002))[:room]

    def whole(x: Array, mass: Array) -> Array:
        return gp.radial_force(gp.Cells.build(x, 0.2, 1.0), mass, gp.ShortRangeGravity(0.2 / 5.5, 0.002))

    inside = mapped(slab, P("slabs"), P("slabs"))
    wanted, _ = oracle.gravity(x, (1.0, 1.0, 1.0), 0.2 / 5.5, 0.002, mass)
    found = jax.jit(inside)(x, mass)
    assert np.abs(found - wanted).max() <= 1e-4 * np.abs(wanted).max()
    grads = [jax.jit(jax.grad(lambda x, m, f=f: (f(x, m) ** 2).sum(), (0, 1)))(x, mass) for f in (inside, whole)]
    near(*grads)


@pytest.mark.gpu
@pytest.mark.skipif(targets.chip() is None or targets.chip().sm != 90, reason="needs a GPU of capability 9.0")
@pytest.mark.parametrize("name", ["sum", "force", "dot", "gaussian", "dot+gaussian"])
def test_kernels_in_a_mesh_of_one(name: str) -> None:
    """What kernels give, which say nothing of a mesh, has the type that the mesh asks for; gradients too."""
    mesh = jax.make_mesh((1,), ("slabs",), axis_types=(AxisType.Auto,))
    x, v = X[:200], V[:200]

    def f(x: Array, v: Array) -> Array:
        if name in ("sum", "force"):
            return density(x, v) if name == "sum" else force(x, v)
        neighbors = gp.Neighbors.allocate(x, RADIUS, BOX, capacity=128)
        heads = jnp.repeat(v[:, None], 8, axis=2).astype(jnp.bfloat16)
        q, k, width = (None, None, 0.1) if name == "gaussian" else (heads, heads, None if name == "dot" else 0.1)
        return gp.neighbor_attention(q, k, heads, neighbors, kernel=name, bandwidth=width).astype(jnp.float32)

    def total(f: Function) -> Function:
        return lambda x, v: (f(x, v) ** 2).sum()

    inside = jax.shard_map(f, mesh=mesh, in_specs=P("slabs"), out_specs=P("slabs"))
    one = jax.jit(jax.value_and_grad(total(inside), (0, 1)))(x, v)
    other = jax.jit(jax.value_and_grad(total(f), (0, 1)))(x, v)
    near(one, other)
    by_each = jax.shard_map(jax.grad(total(f), (0, 1)), mesh=mesh, in_specs=P("slabs"), out_specs=P("slabs"))
    near(jax.jit(by_each)(x, v), other[1])
    shared = jax.shard_map(f, mesh=mesh, in_specs=(P(), P("slabs")), out_specs=P("slabs"))
    near(jax.jit(jax.grad(total(shared), (0, 1)))(x, v), other[1])
