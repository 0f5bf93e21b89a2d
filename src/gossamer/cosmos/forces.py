"""The force of gravity by particles and a mesh (P3M), and the pressure of an isothermal gas."""

from __future__ import annotations

import math
from typing import Any, NamedTuple

import jax.numpy as jnp
from jax import Array

from gossamer.cosmos.box import Box
from gossamer.cosmos.checks import describe, number
from gossamer.cosmos.mesh import Waves, contrast, in_cells, read
from gossamer.particles import Cells, Gaussian, ShortRangeGravity, radial_force, radial_sum


def gravity(positions_mpc_h: Array, box: Box) -> Array:
    """-grad of the potential of the density contrast, grad^2 phi = delta: (N, 3), in Mpc/h.

    The mesh's part is exp(-(k split)^2) of it: particles are assigned by the PCS window, which is divided out twice,
    and the gradient is i k. Pairs within `box.cut_mpc_h` have the rest, with softening.
    """
    return long_range(positions_mpc_h, box) + short_range(positions_mpc_h, box)


def long_range(positions_mpc_h: Array, box: Box) -> Array:
    """The mesh's part of `gravity`."""
    x = positions_mpc_h
    waves = Waves(box.mesh, box.size_mpc_h, x.dtype)
    cells = in_cells(box.mesh, box.size_mpc_h, x)
    filtered = jnp.fft.rfftn(contrast(box.mesh, cells)) * (
        waves.inverse * jnp.exp(-(box.split_mpc_h**2) * waves.squared) / waves.window**2
    )
    fields = [jnp.fft.irfftn(1j * k * filtered, box.mesh) for k in waves.odd]
    return read(box.mesh, cells, jnp.stack(fields, -1).astype(x.dtype))


def short_range(positions_mpc_h: Array, box: Box) -> Array:
    """The part of `gravity` that pairs have."""
    cells = Cells.build(positions_mpc_h, box.cut_mpc_h, box.size_mpc_h)
    law = ShortRangeGravity(box.split_mpc_h, softening=box.softening_mpc_h)
    return radial_force(cells, pair_mass(box), law)


def pair_mass(box: Box) -> float:
    """The mass of a particle in units in which the density contrast is the source of `gravity`."""
    return box.volume_mpc3_h3 / (4 * math.pi * box.num_particles)


class Gas(NamedTuple):
    """An isothermal gas: its speed of sound, and the width of the Gaussian that its density is smoothed with.

    Examples:
        >>> cosmos.Gas(sound_speed_km_s=20.0, smoothing_mpc_h=1.0)
        Gas(sound_speed_km_s=20.0, smoothing_mpc_h=1.0)
    """

    sound_speed_km_s: float
    smoothing_mpc_h: float


REACH = 5.0  # of the Gaussian, in its widths: exp(-12.5) is left out


def pressure(positions_mpc_h: Array, box: Box, gas: Gas) -> Array:
    """-c^2 grad(density) / density: (N, 3) in (km/s)^2 h/Mpc.

    With a density that is smoothed by a Gaussian of width h it is -(c / h)^2 (m(x) - x), where m(x) is what Gaussian
    attention of positions to positions gives: the mean of its neighbours, weighted by exp(-r^2 / (2 h^2)).
    """
    x = positions_mpc_h
    size = jnp.asarray(box.size_mpc_h, x.dtype)
    cells = Cells.build(x, REACH * gas.smoothing_mpc_h, box.size_mpc_h)
    # Means of coordinates are right away from the seam of the box: there are two of them, with seams half a box apart.
    here = jnp.mod(x, size) - size / 2
    there = here - jnp.where(here < 0, -size / 2, size / 2)
    values = jnp.concatenate([jnp.ones_like(x[:, :1]), here, there], 1)
    weight, mean_here, mean_there = jnp.split(radial_sum(cells, values, Gaussian(gas.smoothing_mpc_h)), [1, 4], 1)
    shift = jnp.where(jnp.abs(here) < size / 4, mean_here / weight - here, mean_there / weight - there)
    return -((gas.sound_speed_km_s / gas.smoothing_mpc_h) ** 2) * shift


def check_gas(gas: Any, box: Box) -> None:
    """Raises ValueError unless it is a gas whose Gaussian reaches a quarter of the box at most."""
    if not isinstance(gas, Gas):
        raise ValueError(f"gas must be a Gas or None; got {describe(gas)}")
    number("sound_speed_km_s", gas.sound_speed_km_s, 0, 1e5)
    most = min(box.size_mpc_h) / (4 * REACH)
    if not (isinstance(gas.smoothing_mpc_h, (int, float)) and 0 < gas.smoothing_mpc_h <= most):
        raise ValueError(
            f"smoothing_mpc_h must be a number over 0, to {most:g} (a 20th of the box); "
            f"got {describe(gas.smoothing_mpc_h)}"
        )
