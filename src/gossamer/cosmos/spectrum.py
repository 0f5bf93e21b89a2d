"""The power spectrum of particles."""

from __future__ import annotations

import math
from functools import partial
from typing import NamedTuple

import jax
import jax.numpy as jnp
import numpy as np
from jax import Array

from gossamer.cosmos.box import Box, State, check_state
from gossamer.cosmos.mesh import Waves, contrast, in_cells


class PowerSpectrum(NamedTuple):
    """Means over shells of wavenumbers, one fundamental mode wide.

    Attributes:
        k_h_mpc: (n,) the mean wavenumber of a shell in h/Mpc.
        power_mpc3_h3: (n,) the mean power in (Mpc/h)^3.
        modes: (n,) the number of independent waves of a shell: of a wave and its opposite one.
    """

    k_h_mpc: Array
    power_mpc3_h3: Array
    modes: Array


def power_spectrum(state: State, box: Box) -> PowerSpectrum:
    """The power spectrum of the density, up to the Nyquist wavenumber of the particles.

    Particles are assigned to the mesh by the PCS window, which is divided out. Shot noise is not subtracted: particles
    that began on a lattice have less of it.

    Args:
        state: of the box.
        box: the box.

    Raises:
        ValueError: an argument is wrong.

    Examples:
        >>> box = cosmos.Box(size_mpc_h=64.0, particles=16)
        >>> state = cosmos.initial_conditions(jax.random.key(0), cosmos.Cosmology(), box, a=0.02)
        >>> k, P, modes = cosmos.power_spectrum(state, box)
        >>> k.shape, int(modes[0])
        ((8,), 9)
    """
    check_state(state, box)
    return _spectrum(jnp.asarray(state.positions_mpc_h), box)


@partial(jax.jit, static_argnames="box")
def _spectrum(x: Array, box: Box) -> PowerSpectrum:
    waves = Waves(box.mesh, box.size_mpc_h, x.dtype)
    density = jnp.fft.rfftn(contrast(box.mesh, in_cells(box.mesh, box.size_mpc_h, x))) / waves.window
    power = jnp.abs(density) ** 2 * (box.volume_mpc3_h3 / math.prod(box.mesh) ** 2)
    # A real FFT holds one of a wave and its opposite, but for the planes where both are there.
    last = np.arange(box.mesh[2] // 2 + 1)
    twice = np.where((last == 0) | (2 * last == box.mesh[2]), 1.0, 2.0)
    nyquist = min(np.pi * n / size for n, size in zip(box.particles, box.size_mpc_h, strict=True))
    width = box.fundamental_h_mpc
    shells = max(int(nyquist / width + 1e-6), 1)
    k = jnp.sqrt(waves.squared)
    shell = jnp.where(k > 0, jnp.round(k / width).astype(jnp.int32), 0)
    weight = jnp.broadcast_to(jnp.asarray(twice, x.dtype), k.shape).ravel()

    def summed(values: Array) -> Array:
        return jax.ops.segment_sum(values, jnp.minimum(shell, shells + 1).ravel(), shells + 2)[1:-1]

    count = summed(weight)
    safe = jnp.maximum(count, 1)
    return PowerSpectrum(summed(weight * k.ravel()) / safe, summed(weight * power.ravel()) / safe, count / 2)
