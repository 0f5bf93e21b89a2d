"""The gradient of a run against differences in float64, in a process: python -m tests.cosmos.gradients"""

from __future__ import annotations

import jax

jax.config.update("jax_enable_x64", True)

import jax.numpy as jnp  # noqa: E402
import numpy as np  # noqa: E402

from gossamer import cosmos  # noqa: E402

BOX = cosmos.Box(size_mpc_h=32.0, particles=16)
TIMES = jnp.linspace(0.05, 0.4, 9)
WEIGHTS = jax.random.normal(jax.random.key(1), (BOX.num_particles, 3))


@jax.jit
def loss(white: jax.Array, cosmology: cosmos.Cosmology) -> jax.Array:
    """Of positions, as phases so that images are alike, and of momenta."""
    state = cosmos.initial_conditions(white, cosmology, BOX, TIMES[0])
    state = cosmos.evolve(state, cosmology, BOX, TIMES)
    phases = jnp.sin(2 * jnp.pi / 32 * state.positions_mpc_h)
    return jnp.sum(WEIGHTS * phases) + jnp.sum(WEIGHTS * state.momenta_km_s) / 100


def main() -> None:
    white = jax.random.normal(jax.random.key(2), BOX.particles)
    cosmology = jax.tree.map(jnp.asarray, cosmos.Cosmology())
    assert white.dtype == jnp.float64
    gradient = jax.jit(jax.grad(loss, (0, 1)))(white, cosmology)
    nothing = jnp.zeros_like(white)
    still = jax.tree.map(jnp.zeros_like, cosmology)
    directions = {"white noise": (jax.random.normal(jax.random.key(3), BOX.particles), still)}
    for name in ("Omega_m", "Omega_b", "h", "n_s", "sigma8"):
        directions[name] = nothing, still._replace(**{name: jnp.ones(())})
    for name, direction in directions.items():
        parts = zip(jax.tree.leaves(gradient), jax.tree.leaves(direction), strict=True)
        found = sum(jnp.vdot(one, other) for one, other in parts)
        move = lambda step: jax.tree.map(lambda x, d: x + step * d, (white, cosmology), direction)  # noqa: E731, B023
        step = 1e-7  # so small that no pair crosses the cut of the short-range force, where it ends abruptly
        difference = (loss(*move(step)) - loss(*move(-step))) / (2 * step)
        error = abs(float(found / difference) - 1)
        print(f"{name}: {float(found):.9g}, difference {float(difference):.9g}, {error:.1e} apart")
        assert np.isfinite(float(found)) and error < 1e-5, name


if __name__ == "__main__":
    main()
