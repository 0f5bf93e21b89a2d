"""Sums over all neighbours within a radius: `radial_sum` and `radial_force`."""

from __future__ import annotations

import math
from functools import partial
from typing import Any

from gossamer.particles.cells import Cells
from gossamer.particles.edges import call_of, edge_of
from gossamer.particles.geometry import EXPONENT
from gossamer.particles.laws import Gaussian, RadialKernel, ShortRangeGravity

SMALL = 60  # masses are multiplied by 2^-60 at least, if sums can have the rest


def radial_sum(cells: Cells, values: Any, kernel: Gaussian | RadialKernel) -> Any:
    """Sum_j values_j f(|x_i - x_j|) over all j within the radius of the cells, i itself included.

    No pair is kept in memory. Distances are of differences of float32 positions, to nearest images; the order of
    summation is fixed. Gradients reach values and, through `cells`, positions; there are no higher ones, and there is
    no forward mode.

    Args:
        cells: of N particles.
        values: (N,) or (N, C), or a number, the same for all; of the framework of the cells.
        kernel: f.

    Returns:
        (N,) or (N, C), in the type that positions are computed in (float32, or float64 for such positions).

    Raises:
        TypeError, ValueError: an argument is wrong; `gossamer.Unsupported` where a gradient is differentiated again.

    Examples:
        >>> x = jax.random.uniform(jax.random.key(0), (500, 2))
        >>> cells = gp.Cells.build(x, radius=0.2, box=(1.0, None))
        >>> gp.radial_sum(cells, jnp.ones((500, 4)), gp.Gaussian(0.05)).shape
        (500, 4)
    """
    _check(cells)
    edge = edge_of(cells.x)
    key = edge.key_of("radial_sum", (cells.x, values), (cells.radius, cells.box, kernel))
    return call_of(key, lambda: _sum_call(edge, cells, values, kernel))(cells, values)


def _sum_call(edge: Any, cells: Cells, values: Any, kernel: Any) -> Any:
    """What computes the sums of such arguments, which are checked."""
    if not isinstance(kernel, (Gaussian, RadialKernel)):
        raise TypeError(f"kernel must be a Gaussian or a RadialKernel; got {kernel!r}")
    given = edge.channels("values", values, cells)
    if len(given.shape) not in (1, 2) or given.shape[0] != cells.num_particles:
        raise ValueError(f"values must be ({cells.num_particles},) or ({cells.num_particles}, C); got {given.shape}")
    if len(given.shape) == 2 and not given.shape[1]:
        return partial(_sums_of_nothing, edge, kernel)
    within = kernel.radius if isinstance(kernel, Gaussian) else None
    small = cells if within is None else cells.within(within)
    return edge.SumCall(small, values, given, kernel.scaled(small.unit), within)


def _sums_of_nothing(edge: Any, kernel: Any, cells: Cells, values: Any) -> Any:
    """Sums of no channel, which positions reach as well, with gradients of 0."""
    return edge.channels("values", values, cells) + radial_sum(cells, 0, kernel)[:, None][:, :0]


def radial_force(cells: Cells, mass: Any, law: ShortRangeGravity | RadialKernel) -> Any:
    """Sum_j mass_j w(r) (x_j - x_i) over all j within the radius of the law: the accelerations, for G = 1.

    Of a law of your own the radius is that of the cells.

    As `radial_sum`; particles at one place exert no force on one another.

    Args:
        cells: of N particles, of a radius of at least that of the law.
        mass: (N,), or a number, the same for all.
        law: w.

    Returns:
        (N, d)

    Raises:
        TypeError, ValueError: an argument is wrong; `gossamer.Unsupported` where a gradient is differentiated again.

    Examples:
        >>> x = jax.random.uniform(jax.random.key(0), (500, 3), maxval=64.0)
        >>> law = gp.ShortRangeGravity(split=1.25, softening=0.05)
        >>> gp.radial_force(gp.Cells.build(x, law.radius, box=64.0), 1.0, law).shape
        (500, 3)
    """
    _check(cells)
    edge = edge_of(cells.x)
    key = edge.key_of("radial_force", (cells.x, mass), (cells.radius, cells.box, law))
    return call_of(key, lambda: _force_call(edge, cells, mass, law))(cells, mass)


def _force_call(edge: Any, cells: Cells, mass: Any, law: Any) -> Any:
    """What computes the forces of such arguments, which are checked."""
    if not isinstance(law, (ShortRangeGravity, RadialKernel)):
        raise TypeError(f"law must be a ShortRangeGravity or a RadialKernel; got {law!r}")
    if isinstance(law, ShortRangeGravity) and law.radius > cells.radius * (1 + 1e-6):
        raise ValueError(f"the radius of the cells, {cells.radius}, must be at least that of the law, {law.radius}")
    given = edge.channels("mass", mass, cells)
    if tuple(given.shape) != (cells.num_particles,):
        raise ValueError(f"mass must be a number or ({cells.num_particles},); got {given.shape}")
    radius = cells.radius if isinstance(law, RadialKernel) else law.radius
    small = cells.within(radius)
    law = law.scaled(small.unit)
    factors = _factors(small.unit, law.formula.power)
    return edge.ForceCall(small, mass, given, law, radius, radius * small.unit, *factors)


def _factors(unit: float, power: int) -> tuple[float, float]:
    """(factor of masses, factor of sums) of a force with the power `power` of the inverse of length, less one.

    Masses take the part that makes numbers smaller, as far as they stay in range, and sums the part that makes them
    larger: so no part of a result, or of a gradient, is infinite before the result is.
    """
    _, exponent = math.frexp(unit / 2)
    both = (power - 1) * exponent
    after = both - min(0, max(power * exponent, -SMALL))
    after = min(max(after, -EXPONENT), EXPONENT)
    return 2.0 ** (both - after), 2.0**after


def _check(cells: Any) -> None:
    if not isinstance(cells, Cells):
        raise TypeError(f"cells must be Cells; got {type(cells).__qualname__}")
