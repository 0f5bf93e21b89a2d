"""Forces: against an Ewald sum, of moved particles, and of a sound wave."""

from __future__ import annotations

import jax
import jax.numpy as jnp
import numpy as np
import pytest

from gossamer import cosmos
from gossamer.cosmos.forces import gravity, long_range, short_range
from tests.cosmos import oracle

SIZE = 16.0
BOX = cosmos.Box(size_mpc_h=SIZE, particles=16, softening_kpc_h=40.0)


def positions(kind: str) -> np.ndarray:
    rng = np.random.default_rng(3)
    if kind == "random":
        x = rng.uniform(0, SIZE, (4096, 3))
    elif kind == "clustered":  # half in 16 clumps as wide as the mean distance of particles
        centres = rng.uniform(0, SIZE, (16, 3))
        x = np.concatenate(
            [centres[rng.integers(0, 16, 2048)] + rng.normal(0, 0.5, (2048, 3)), rng.uniform(0, SIZE, (2048, 3))]
        )
    else:
        x = np.asarray(cosmos.initial_conditions(jax.random.key(1), cosmos.Cosmology(), BOX, 0.02).positions_mpc_h)
    return np.mod(x, SIZE).astype(np.float32).astype(np.float64)


@pytest.mark.parametrize("kind", ["random", "clustered", "early"])
def test_the_force_is_that_of_an_ewald_sum(kind: str) -> None:
    x = positions(kind)
    targets = np.random.default_rng(4).choice(len(x), 512, replace=False)
    expected = oracle.ewald(x, targets, SIZE)
    expected += oracle.softened(x, targets, SIZE, BOX.split_mpc_h, BOX.softening_kpc_h / 1000)
    found = np.asarray(jax.jit(gravity, static_argnums=1)(jnp.asarray(x, jnp.float32), BOX))[targets]
    error = np.sqrt(((found - expected) ** 2).sum(1).mean() / (expected**2).sum(1).mean())
    assert error < 5e-4


def test_a_translation_leaves_the_force() -> None:
    """To rounding: that of pairs by any, that of the mesh by whole cells; positions are exact after it."""
    x = np.round(positions("clustered") * 2**16) / 2**16
    shifts = (8.0, 0, 0), (0, 4.0, 0.5), (15.5, 1.0, 7.0)
    for force, more in ((gravity, ()), (short_range, ((0, 4.0, 0.25), (15.625, 1.0, 7.75)))):
        compiled = jax.jit(force, static_argnums=1)
        expected = np.asarray(compiled(jnp.asarray(x, jnp.float32), BOX))
        for shift in (*shifts, *more):
            found = np.asarray(compiled(jnp.asarray(np.mod(x + shift, SIZE), jnp.float32), BOX))
            assert np.abs(found - expected).max() < 2e-6 * np.abs(expected).max()


def test_the_forces_of_jaxpm_become_those_of_p3m() -> None:
    """The example, with our mesh in the place of JaxPM's, which is not installed here."""
    from examples.jaxpm_p3m import SOFTENING, p3m_forces

    box = cosmos.Box(size_mpc_h=16.0, particles=16, mesh=16, softening_kpc_h=1000 * SOFTENING)

    def pm_forces(x: jax.Array, mesh_shape: tuple[int, ...], r_split: float) -> jax.Array:
        assert mesh_shape == box.mesh and r_split == box.split_mpc_h
        return long_range(x, box).reshape(*mesh_shape, 3)

    x = jnp.asarray(positions("random"), jnp.float32)
    expected = gravity(x, box)
    assert float(jnp.abs(p3m_forces(pm_forces, x, box.mesh) - expected).max()) < 1e-5 * float(jnp.abs(expected).max())
