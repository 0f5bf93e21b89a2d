"""JaxPM's forces, which are soft below a few cells, made P3M by one term more: python -m examples.jaxpm_p3m

Needs jaxpm and jax_cosmo beside jax. JaxPM has positions in cells, and as many particles as cells; its `r_split` leaves
the short range to a partner.
"""

from __future__ import annotations

import math
from typing import Any

import jax
import jax.numpy as jnp
from jax import Array

from gossamer import cosmos
from gossamer import particles as gp
from gossamer.cosmos.forces import gravity

SPLIT = 1.25  # cells
SOFTENING = 0.05  # cells


def p3m_forces(pm_forces: Any, x: Array, mesh_shape: tuple[int, int, int]) -> Array:
    """(N, 3) forces of particles of mass 1, grad^2 phi = density, at positions (N, 3) in cells."""
    law = gp.ShortRangeGravity(split=SPLIT, softening=SOFTENING)
    cells = gp.Cells.build(x, law.radius, box=mesh_shape)
    far = pm_forces(x, mesh_shape=mesh_shape, r_split=SPLIT).reshape(x.shape)
    return far + gp.radial_force(cells, 1 / (4 * math.pi), law)


def main() -> None:
    from jaxpm.pm import pm_forces

    n = 32
    box = cosmos.Box(size_mpc_h=n, particles=n, softening_kpc_h=1000 * SOFTENING)  # a cell is 1 Mpc/h
    state = cosmos.initial_conditions(jax.random.key(0), cosmos.Cosmology(), box, a=0.3, order=1)
    x = state.positions_mpc_h
    expected = jax.jit(gravity, static_argnums=1)(x, box)  # right to 1e-4: docs/cosmos.md
    forces = {
        "JaxPM alone": pm_forces(x, mesh_shape=(n,) * 3).reshape(x.shape),
        "with pairs": p3m_forces(pm_forces, x, (n, n, n)),
    }
    for name, found in forces.items():
        error = jnp.sqrt(jnp.sum((found - expected) ** 2) / jnp.sum(expected**2))
        print(f"{name}: rms error {float(error):.1%} of the force")


if __name__ == "__main__":
    main()
