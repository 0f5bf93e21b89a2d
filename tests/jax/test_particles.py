"""Particles from JAX: pair sets, sums and their gradients against the definition in float64."""

from __future__ import annotations

import doctest
import importlib
import subprocess
import sys
from typing import Any

import jax
import jax.numpy as jnp
import numpy as np
import pytest
from scipy.spatial import cKDTree

import gossamer.jax as gsj
from gossamer import particles as gp
from gossamer.particles import blocked_jax, in_jax, terms
from tests.particles import oracle

CASES = [
    (1, 1, 1.0, 0.5, "uniform"),
    (700, 3, 1.0, 0.2, "uniform"),
    (700, 3, 1.0, 0.5, "clustered"),
    (500, 3, (1.0, None, 0.7), 0.1, "clustered"),
    (300, 2, (None, 1.3), 0.3, "coincident"),
    (300, 2, None, 0.05, "clustered"),
    (260, 3, 1.0, 0.1, "one place"),
    (400, 1, 1.0, 0.01, "far outside"),
]


def counts(cells: gp.Cells) -> np.ndarray:
    """How many particles are within the radius of each."""
    reach, none = blocked_jax.reach_of(cells), cells.x[:, :0]
    found = blocked_jax.pair_sums(terms.counted, None, reach, cells.runs, none, none)
    return np.asarray(found[:, 0]).astype(int)


@pytest.mark.parametrize(("N", "d", "box", "radius", "kind"), CASES)
def test_sums_are_those_of_the_definition(N: int, d: int, box: Any, radius: float, kind: str) -> None:
    rng = np.random.default_rng(N + d)
    x = oracle.cloud(rng, N, d, kind)
    cells = gp.Cells.build(jnp.asarray(x), radius, box)
    inside = oracle.wrapped(x, cells.box).astype(np.float32)  # moving into the box rounds
    tree = cKDTree(inside.astype(float), boxsize=[size or 0 for size in cells.box] if any(cells.box) else None)
    wanted = np.array([len(found) for found in tree.query_ball_point(inside.astype(float), radius)])
    near = np.abs(oracle.pairs(inside, cells.box).s / radius**2 - 1) < 1e-6  # where float32 may decide otherwise
    assert (np.abs(counts(cells) - wanted) <= near.sum(1)).all()
    assert sorted(np.asarray(cells.order)) == list(range(N))

    values = rng.standard_normal((N, 2)).astype(np.float32)
    h = radius / 3
    scale = oracle.gaussian_sum(inside, cells.box, radius, h, np.abs(values)) + 0.02 * near.sum(1)[:, None]
    error = gp.radial_sum(cells, jnp.asarray(values), gp.Gaussian(h)) - oracle.gaussian_sum(
        inside, cells.box, radius, h, values
    )
    assert (np.abs(error) <= 2e-6 * scale + 0.02 * near.sum(1)[:, None]).all()

    law = gp.ShortRangeGravity(radius / 5.5, float(rng.choice([0.0, radius / 50])))
    mass = rng.random(N).astype(np.float32)
    force, newton = oracle.gravity(inside, cells.box, law.split, law.softening, mass)
    found = gp.radial_force(cells, jnp.asarray(mass), law)
    # At the cut the force is 2e-3 of Newton's: what lies on either side by rounding is that much.
    assert (np.linalg.norm(found - force, axis=1) <= 1e-4 * newton + 4e-3 * near.sum(1) / radius**2).all()
    repeated = gp.radial_force(cells, jnp.asarray(mass), law)
    assert (np.asarray(found) == np.asarray(repeated)).all()


def test_a_translation_changes_nothing() -> None:
    """By 2^-k of the box, of positions on a grid of 2^-20 of it: all differences are exact."""
    rng = np.random.default_rng(3)
    x = np.floor(rng.random((600, 3)) * 2**20) / 2**20 * 4
    law, values = gp.ShortRangeGravity(0.05), jnp.asarray(rng.random(600), jnp.float32)
    found = []
    for k in (1, 3, 7):
        cells = gp.Cells.build(jnp.asarray(np.mod(x + 4 * 2.0**-k, 4), jnp.float32), 0.4, 4.0)
        rho, force = gp.radial_sum(cells, values, gp.Gaussian(0.1)), gp.radial_force(cells, values, law)
        found.append((counts(cells), np.asarray(rho), np.asarray(force)))
    first, *others = found
    for count, rho, force in others:
        assert (count == first[0]).all()
        np.testing.assert_allclose(rho, first[1], rtol=1e-6)
        np.testing.assert_allclose(force, first[2], atol=2e-6 * np.abs(first[2]).max())


GRADIENTS = """
import jax, jax.numpy as jnp
jax.config.update("jax_enable_x64", True)
from gossamer import particles as gp
x, v, m = (jax.random.uniform(jax.random.key(n), shape) for n, shape in enumerate([(150, 3), (150, 5), (150,)]))
law, box = gp.ShortRangeGravity(0.05, 0.01), (1.0, None, 0.9)
weights = jax.random.normal(jax.random.key(9), (150, 5))
def density(x, v):
    return (gp.radial_sum(gp.Cells.build(x, 0.3, box), v, gp.Gaussian(0.08)) * weights).sum()
def one(x, v):
    return (gp.radial_sum(gp.Cells.build(x, 0.3, box), v[:, 0], gp.Gaussian(0.08)) * weights[:, 0]).sum()
def force(x, m):
    return (gp.radial_force(gp.Cells.build(x, 0.3, box), m, law) * weights[:, :3]).sum()
e = 1e-6
for f, b in ((density, v), (one, v), (force, m)):
    f = jax.jit(f)
    gx, gb = jax.jit(jax.grad(f, (0, 1)))(x, b)
    for n in range(3):
        dx, db = jax.random.normal(jax.random.key(n), x.shape), jax.random.normal(jax.random.key(n + 9), b.shape)
        dx = dx * 0.01  # so that no pair crosses the radius
        for got, wanted in (((gx * dx).sum(), (f(x + e * dx, b) - f(x - e * dx, b)) / (2 * e)),
                            ((gb * db).sum(), (f(x, b + e * db) - f(x, b - e * db)) / (2 * e))):
            assert abs(got - wanted) < 1e-6 * abs(wanted) + 1e-5 * jnp.abs(gx * dx).sum(), (f, got, wanted)
print("right")
"""


def test_gradients_in_float64() -> None:
    """Against differences, in a process of its own: the precision is a setting of the process."""
    done = subprocess.run([sys.executable, "-c", GRADIENTS], capture_output=True, text=True, check=False)
    assert done.stdout == "right\n", done.stderr


def test_gradients_that_are_asked_for() -> None:
    """Those of one argument are those of both, under jit, vmap and where the other is a constant."""
    x, m = jax.random.uniform(jax.random.key(0), (200, 3)), jax.random.uniform(jax.random.key(1), (200,))

    def total(x: jax.Array, m: jax.Array) -> jax.Array:
        cells = gp.Cells.build(x, 0.3, 1.0)
        force = gp.radial_force(cells, m, gp.ShortRangeGravity(0.05, 0.01))
        return (gp.radial_sum(cells, m, gp.Gaussian(0.1)) ** 2).sum() + (force**2).sum()

    both = jax.grad(total, (0, 1))(x, m)
    for n, wanted in enumerate(both):
        near = {"rtol": 1e-5, "atol": 1e-5 * float(jnp.abs(wanted).max())}
        np.testing.assert_allclose(jax.grad(total, n)(x, m), wanted, **near)
        again = jax.jit(jax.vmap(jax.grad(total, n), (None, 0)))(x, jnp.stack([m, m]))
        np.testing.assert_allclose(again[1], wanted, **near)


def test_gradients_in_float32() -> None:
    """Those of the sums over all pairs, which JAX differentiates."""
    x = jax.random.uniform(jax.random.key(0), (200, 2))
    v = jax.random.normal(jax.random.key(1), (200,))
    h = gp.Gaussian(0.05)

    def dense(x: jax.Array, v: jax.Array) -> jax.Array:
        d = x[None] - x[:, None]
        d = d - jnp.round(d)
        s = (d * d).sum(-1)
        return (jnp.where(s <= 0.2**2, h.formula.of(s, jnp), 0) @ v) @ v

    def sparse(x: jax.Array, v: jax.Array) -> jax.Array:
        return gp.radial_sum(gp.Cells.build(x, 0.2, 1.0), v, h) @ v

    for got, wanted in zip(jax.grad(sparse, (0, 1))(x, v), jax.grad(dense, (0, 1))(x, v), strict=True):
        np.testing.assert_allclose(got, wanted, atol=2e-5 * float(jnp.abs(wanted).max()))


def test_a_kernel_of_ones_own() -> None:
    """The Gaussian written by hand: the same sums and gradients, under jit too; another width traces alone."""

    def gaussian(s: Any, xp: Any, h: float) -> Any:
        return xp.exp(s * -0.5 / h**2)

    x, v = jax.random.uniform(jax.random.key(0), (300, 3)), jax.random.normal(jax.random.key(1), (300, 2))

    def gradients(kernel: Any) -> Any:
        def total(x: jax.Array, v: jax.Array) -> jax.Array:
            cells = gp.Cells.build(x, 0.3, 1.0)
            return (gp.radial_sum(cells, v, kernel) ** 2).sum() + (gp.radial_force(cells, v[:, 0], law) ** 3).sum()

        law = gp.RadialKernel(gaussian, 0.1)
        return jax.jit(jax.value_and_grad(total, (0, 1)))(x, v)

    for h in (0.1, 0.07):
        for got, wanted in zip(
            jax.tree.leaves(gradients(gp.RadialKernel(gaussian, h))), jax.tree.leaves(gradients(gp.Gaussian(h))),
            strict=True,
        ):  # fmt: skip
            np.testing.assert_allclose(got, wanted, atol=2e-5 * float(jnp.abs(wanted).max()))


def test_transformations() -> None:
    """vmap over values and over particles, scan, and what there is not."""
    x = jax.random.uniform(jax.random.key(0), (2, 100, 3))
    v = jax.random.normal(jax.random.key(1), (4, 100))
    first, _ = x
    h = gp.Gaussian(0.1)
    cells = gp.Cells.build(first, 0.3, 1.0)
    together = gp.radial_sum(cells, v.T, h).T
    np.testing.assert_allclose(jax.vmap(lambda v: gp.radial_sum(cells, v, h))(v), together, rtol=1e-6, atol=1e-6)

    def total(x: jax.Array) -> jax.Array:
        return gp.radial_sum(gp.Cells.build(x, 0.3, 1.0), 1.0, h).sum()

    each = jnp.stack([jax.grad(total)(one) for one in x])
    np.testing.assert_allclose(jax.vmap(jax.grad(total))(x), each, rtol=1e-5, atol=1e-5)
    _, sums = jax.lax.scan(lambda carry, one: (carry, total(one)), 0, x)
    np.testing.assert_allclose(sums, [total(one) for one in x], rtol=1e-6)
    with pytest.raises(TypeError, match="custom_vjp"):
        jax.jvp(total, (first,), (first,))


def test_no_particles() -> None:
    cells = gp.Cells.build(jnp.zeros((0, 3)), 0.1, 1.0)
    assert gp.radial_sum(cells, jnp.zeros((0, 2)), gp.Gaussian(0.1)).shape == (0, 2)
    assert gp.radial_force(cells, 1.0, gp.ShortRangeGravity(0.01)).shape == (0, 3)


@pytest.mark.parametrize("skipped", [False, pytest.param(True, id="pairs are skipped")])
def test_a_position_that_is_not_finite_leaves_no_number(skipped: bool, monkeypatch: pytest.MonkeyPatch) -> None:
    """Nor gradients of values, also of particles without a neighbour, of which kernels, that skip pairs, sum 0."""
    radius, h = 2e-3, 5e-4
    N = 29 if skipped else 9  # by which programs are kept
    if skipped:

        def nothing(term: str, *given: Any) -> Any:
            _, _, runs, _, _, *values = given
            d, of_values = len(runs.points), int(values != [False])
            widths = {"sum": 1, "force": d, "sum_slopes": d + of_values, "force_slopes": d + of_values}
            return jnp.zeros((len(runs.order), widths[term]))

        monkeypatch.setattr(in_jax, "_sums", nothing)
    x = jnp.asarray(np.random.default_rng(1).random((N, 3)), jnp.float32).at[4, 1].set(jnp.inf)
    values = jnp.ones(N, jnp.float32)

    def total(x: jax.Array, values: jax.Array) -> jax.Array:
        return gp.radial_sum(gp.Cells.build(x, radius, 1.0), values, gp.Gaussian(h)).sum()

    def pull(x: jax.Array, values: jax.Array) -> jax.Array:
        return gp.radial_force(gp.Cells.build(x, radius, 1.0), values, gp.ShortRangeGravity(h / 5.5)).sum()

    for f in (total, pull):
        for asked in (0, 1, (0, 1)):
            for one in jax.tree.leaves(jax.grad(f, asked)(x, values)):
                assert jnp.isnan(one).all()


def test_momentum_is_conserved() -> None:
    x = jax.random.uniform(jax.random.key(0), (1000, 3))
    m = jax.random.uniform(jax.random.key(1), (1000,))
    force = gp.radial_force(gp.Cells.build(x, 0.2, 1.0), m, gp.ShortRangeGravity(0.03, 0.001)) * m[:, None]
    assert (jnp.abs(force.sum(0)) <= 1e-6 * jnp.abs(force).sum(0)).all()


@pytest.mark.parametrize(
    ("error", "said", "build"),
    [
        (TypeError, "arrays of jax or torch; got numpy.ndarray", lambda x: gp.Cells.build(np.asarray(x), 0.1)),
        (ValueError, r"\(N, d\) of real numbers, d from 1 to 3", lambda x: gp.Cells.build(jnp.zeros((5, 4)), 0.1)),
        (ValueError, r"\(N, d\) of real numbers", lambda x: gp.Cells.build(jnp.zeros((5, 3), int), 0.1)),
        (ValueError, "at most half the box, 0.5; got 0.6", lambda x: gp.Cells.build(x, 0.6, (1.0, None, 2.0))),
        (ValueError, "radius must be positive", lambda x: gp.Cells.build(x, 0.0)),
        (TypeError, "radius must be a number", lambda x: jax.jit(gp.Cells.build)(x, jnp.float32(0.1))),
        (TypeError, "radius must be a number", lambda x: jax.grad(lambda r: gp.Cells.build(x, r).x.sum())(0.1)),
        (TypeError, "box must be a number", lambda x: jax.jit(gp.Cells.build, static_argnums=1)(x, 0.1, jnp.ones(3))),
        (TypeError, "box must be a number", lambda x: jax.jit(gp.Cells.build, static_argnums=1)(x, 0.1, 1.0)),
        (TypeError, "no branches", lambda x: gp.RadialKernel(lambda s, xp: s if s < 1 else 1 / s)),
        (ValueError, "box must be a positive number, 3", lambda x: gp.Cells.build(x, 0.1, (1.0, 1.0))),
        (ValueError, "box must be positive", lambda x: gp.Cells.build(x, 0.1, -1.0)),
        (ValueError, r"values must be \(9,\)", lambda x: gp.radial_sum(cells(x), jnp.ones(8), gp.Gaussian(1.0))),
        (TypeError, "values must be real", lambda x: gp.radial_sum(cells(x), 1j, gp.Gaussian(1.0))),
        (TypeError, "kernel must be a Gaussian or a RadialKernel", lambda x: gp.radial_sum(cells(x), 1.0, 0.3)),
        (TypeError, "cells must be Cells", lambda x: gp.radial_sum(x, 1.0, gp.Gaussian(1.0))),
        (ValueError, "at least that of the law", lambda x: gp.radial_force(cells(x), 1.0, gp.ShortRangeGravity(1.0))),
        (ValueError, "mass must be", lambda x: gp.radial_force(cells(x), x, gp.ShortRangeGravity(0.01))),
        (ValueError, "softening must be at least 0", lambda x: gp.ShortRangeGravity(1.0, 2.0)),
        (ValueError, "h must be positive", lambda x: gp.Gaussian(float("nan"))),
    ],
)
def test_what_is_refused(error: type[Exception], said: str, build: Any) -> None:
    with pytest.raises(error, match=said):
        build(jnp.zeros((9, 3)))


def test_numbers_that_are_arrays() -> None:
    """Concrete ones without dimensions, as widths and boxes: the same as numbers of Python."""
    x = jax.random.uniform(jax.random.key(0), (50, 2))
    half, one, small = (jnp.float32(n) for n in (0.5, 1.0, 0.125))
    found = gp.Cells.build(x, half, one)
    assert (found.radius, found.box) == (0.5, (1.0, 1.0))
    assert gp.Cells.build(x, 0.1, jnp.ones(2)).box == (1.0, 1.0)
    assert gp.Gaussian(small) == gp.Gaussian(0.125)
    assert gp.ShortRangeGravity(small, jnp.zeros(())) == gp.ShortRangeGravity(0.125, 0.0)
    lists = gp.Neighbors.allocate(x, half, [one, None])
    given = {"kernel": "dot+gaussian", "bandwidth": 0.125, "scale": 0.5}
    wanted = gp.neighbor_attention(x, x, x, lists, **given)
    again = gp.neighbor_attention(x, x, x, lists, **given | {"bandwidth": small, "scale": half})
    np.testing.assert_array_equal(again, wanted)
    near = gsj.create_sparsity_mask(x, half, one)
    assert near == gsj.create_sparsity_mask(x, 0.5, 1.0)
    assert gsj.create_sparsity_mask(x, half, one, capacity=50).cells.radius == 0.5


def cells(x: jax.Array) -> gp.Cells:
    return gp.Cells.build(x, 0.1, 1.0)


@pytest.mark.parametrize("name", gp.__all__)
def test_every_public_name_has_an_example_that_runs(name: str) -> None:
    thing = getattr(gp, name)
    module = importlib.import_module(thing.__module__)
    found = [one for one in doctest.DocTestFinder().find(thing, name, module=module) if one.examples]
    assert found
    for test in found:
        test.globs = {"gp": gp, "jax": jax, "jnp": jnp}
        failed, _ = doctest.DocTestRunner(optionflags=doctest.FAIL_FAST).run(test)
        assert not failed
