"""Initial conditions: Lagrangian perturbation theory of first or second order, from white noise."""

from __future__ import annotations

from typing import Any

import jax
import jax.numpy as jnp
import numpy as np
from jax import Array

from gossamer.checks import whole
from gossamer.cosmos.box import Box, State
from gossamer.cosmos.checks import describe, is_known, number
from gossamer.cosmos.cosmology import H0, as_cosmology, growth
from gossamer.cosmos.mesh import Waves
from gossamer.cosmos.power import linear_power


def initial_conditions(noise: Any, cosmology: Any, box: Box, a: Any, *, order: int = 2, power: Any = None) -> State:
    """Particles displaced from a lattice as perturbation theory says (Zel'dovich 1970; Bouchet et al. 1995).

    Args:
        noise: a key of `jax.random`, or white noise: an array of `box.particles` numbers of variance 1. The same noise
            on another box of as many particles has the same structure.
        cosmology: a `Cosmology`, or one of jax_cosmo's.
        box: the box.
        a: the scale factor at which to begin, early enough for perturbations to be small: 0.02, say.
        order: 1 (Zel'dovich) or 2.
        power: (k, P) of the linear power at a = 1, k in h/Mpc and P in (Mpc/h)^3; that of Eisenstein and Hu by default.

    Returns:
        The state, differentiable by white noise, by the cosmology and by P.

    Raises:
        ValueError: an argument is wrong, or a table is in other units.

    Examples:
        >>> box = cosmos.Box(size_mpc_h=64.0, particles=16)
        >>> state = cosmos.initial_conditions(jax.random.key(0), cosmos.Cosmology(), box, a=0.02)
        >>> state.positions_mpc_h.shape, state.momenta_km_s.shape
        ((4096, 3), (4096, 3))
    """
    if not isinstance(box, Box):
        raise ValueError(f"box must be a Box; got {describe(box)}")
    cosmology = as_cosmology(cosmology)
    number("a", a, 1e-4, 1.0)
    terms = whole(order)
    if terms not in (1, 2):
        raise ValueError(f"order must be 1 or 2; got {describe(order)}")
    white = _white(noise, box)
    first, second = displacements(white, cosmology, box, terms, power)
    rates = growth(cosmology, jnp.asarray(a, white.dtype))
    axes = [np.arange(n) * (size / n) for n, size in zip(box.particles, box.size_mpc_h, strict=True)]
    lattice = jnp.asarray(np.stack(np.meshgrid(*axes, indexing="ij"), -1).reshape(-1, 3), white.dtype)
    x = lattice + rates.D * first + rates.D2 * second
    p = H0 * (rates.momentum * first + rates.momentum2 * second)
    return State(wrapped(x, box), p.astype(white.dtype), jnp.asarray(a, white.dtype))


def wrapped(x: Array, box: Box) -> Array:
    """Positions in the box."""
    size = jnp.asarray(box.size_mpc_h, x.dtype)
    # A position just under 0 is the size itself after rounding.
    return jnp.where((inside := jnp.mod(x, size)) >= size, 0, inside)


def _white(noise: Any, box: Box) -> Array:
    if isinstance(noise, Array) and (
        jnp.issubdtype(noise.dtype, jax.dtypes.prng_key) or (noise.dtype == jnp.uint32 and noise.shape == (2,))
    ):
        return jax.random.normal(noise, box.particles, dtype=float)
    if (
        not hasattr(noise, "shape")
        or tuple(noise.shape) != box.particles
        or not jnp.issubdtype(noise.dtype, jnp.floating)
    ):
        raise ValueError(
            f"noise must be a key of jax.random, or white noise: an array of floats {box.particles}; "
            f"got {describe(noise)}"
        )
    white = jnp.asarray(noise)
    if is_known(white) and not bool(jnp.isfinite(white).all()):
        raise ValueError("noise must hold finite numbers")
    return white


def density_waves(white: Array, cosmology: Any, box: Box, power: Any = None) -> Array:
    """The linear density today as a real FFT, (nx, ny, nz // 2 + 1), of white noise."""
    waves = Waves(box.particles, box.size_mpc_h, white.dtype)
    k = jnp.sqrt(jnp.where(waves.squared > 0, waves.squared, box.fundamental_h_mpc**2))
    P = jnp.where(waves.squared > 0, linear_power(cosmology, k, 1.0, power), 0)
    # Of a field of N numbers of variance 1 the mean square of a wave is N, and of the density N^2 P / V.
    scale = jnp.sqrt(jnp.where(P > 0, P, 1) * (box.num_particles / box.volume_mpc3_h3)) * (P > 0)
    return jnp.fft.rfftn(white) * scale.astype(white.dtype)


def displacements(white: Array, cosmology: Any, box: Box, order: int, power: Any = None) -> tuple[Array, Array]:
    """(psi_1, psi_2) of x = q + D psi_1 + D2 psi_2 at the lattice, (N, 3) in Mpc/h."""
    waves = Waves(box.particles, box.size_mpc_h, white.dtype)
    potential = -density_waves(white, cosmology, box, power) * waves.inverse

    def gradient(field: Array) -> Array:
        parts = [jnp.fft.irfftn(1j * k * field, box.particles) for k in waves.odd]
        return jnp.stack(parts, -1).reshape(-1, 3).astype(white.dtype)

    first = -gradient(potential)
    if order == 1:
        return first, jnp.zeros_like(first)

    def second(i: int, j: int) -> Array:
        product = waves.k[i] * waves.k[j] if i == j else waves.odd[i] * waves.odd[j]
        return jnp.fft.irfftn(-product * potential, box.particles)

    xx, yy, zz = second(0, 0), second(1, 1), second(2, 2)
    source = xx * yy + yy * zz + zz * xx - second(0, 1) ** 2 - second(1, 2) ** 2 - second(0, 2) ** 2
    return first, gradient(-jnp.fft.rfftn(source) * waves.inverse)
