"""The background: parameters of a universe, its expansion, and the growth of small perturbations in it."""

from __future__ import annotations

from functools import partial
from typing import Any, NamedTuple

import jax
import jax.numpy as jnp
from jax import Array, lax

from gossamer.cosmos.checks import describe, is_known, number

H0 = 100.0  # km/s/(Mpc/h): the Hubble constant in the units of this package, whatever h is
EARLIEST = 1e-5  # the scale factor where growth is integrated from: with no radiation, matter alone counts there
INTERVALS = 256  # of ln a, of equal width, to LATEST
LATEST = 1.5


class Cosmology(NamedTuple):
    """A universe of matter, a cosmological constant (or dark energy w0 + wa (1 - a)) and curvature; no radiation.

    A pytree: the numbers may be traced, and have gradients. Names are those of jax_cosmo but for `Omega_m`, the
    density of all matter, of which `Omega_b` are baryons.

    Args:
        Omega_m: matter today, in units of the critical density.
        Omega_b: baryons today, a part of `Omega_m`; they shape the transfer function alone.
        h: the Hubble constant today in units of 100 km/s/Mpc.
        n_s: the spectral index of the primordial perturbations.
        sigma8: rms of the linear density today in spheres of 8 Mpc/h.
        Omega_k: curvature.
        w0: equation of state of dark energy today.
        wa: how much it was more negative in the past: w = w0 + wa (1 - a).

    Examples:
        >>> cosmology = cosmos.Cosmology(Omega_m=0.3)
        >>> growth = cosmos.growth(cosmology, 0.5)
        >>> round(float(growth.D), 3)
        0.612
    """

    Omega_m: Any = 0.31
    Omega_b: Any = 0.049
    h: Any = 0.677
    n_s: Any = 0.966
    sigma8: Any = 0.81
    Omega_k: Any = 0.0
    w0: Any = -1.0
    wa: Any = 0.0


RANGES = {"Omega_m": (1e-3, 2.0), "Omega_b": (1e-4, 2.0), "h": (0.1, 2.0), "n_s": (-2.0, 4.0), "sigma8": (0.0, 10.0)}
RANGES |= {"Omega_k": (-1.0, 1.0), "w0": (-3.0, 0.0), "wa": (-3.0, 3.0)}


def as_cosmology(given: Any) -> Cosmology:
    """A `Cosmology`, or what has the fields of jax_cosmo's, with every number checked that is known.

    Raises:
        ValueError: it is neither, or a number is out of range.
    """
    if isinstance(given, Cosmology):
        cosmology = given
    elif all(hasattr(given, name) for name in ("Omega_c", "Omega_b", "h", "n_s", "sigma8", "Omega_k", "w0", "wa")):
        matter = given.Omega_c + given.Omega_b
        cosmology = Cosmology(
            matter, given.Omega_b, given.h, given.n_s, given.sigma8, given.Omega_k, given.w0, given.wa
        )  # fmt: skip
    else:
        raise ValueError(f"cosmology must be a Cosmology, or one of jax_cosmo's; got {describe(given)}")
    for name, (least, most) in RANGES.items():
        number(name, getattr(cosmology, name), least, most)
    if (
        is_known(cosmology.Omega_b)
        and is_known(cosmology.Omega_m)
        and float(cosmology.Omega_b) > float(cosmology.Omega_m)
    ):
        raise ValueError(
            f"Omega_b is a part of Omega_m = {cosmology.Omega_m}, and cannot be more; got {cosmology.Omega_b}"
        )
    return cosmology


def expansion(cosmology: Cosmology, a: Any) -> Array:
    """E = H / H0 at scale factors a, of any shape."""
    return jnp.sqrt(_squared(cosmology, jnp.log(a)))


def _dark(c: Cosmology, log_a: Any) -> Array:
    """The density of dark energy in units of today's critical density."""
    a = jnp.exp(log_a)
    return (1 - c.Omega_m - c.Omega_k) * jnp.exp(-3 * (1 + c.w0 + c.wa) * log_a - 3 * c.wa * (1 - a))


def _squared(c: Cosmology, log_a: Any) -> Array:
    return c.Omega_m * jnp.exp(-3 * log_a) + c.Omega_k * jnp.exp(-2 * log_a) + _dark(c, log_a)


class Growth(NamedTuple):
    """The growth of displacements, at scale factors of any shape: x = q + D psi_1 + D2 psi_2, with D = 1 today.

    Attributes:
        D: the linear growth factor; the density's is the same.
        f: its rate, dlnD / dlna.
        momentum: a^2 dD/dt / H0, the growth of a^2 dx/dt.
        D2: the growth factor of second order, about -3/7 D^2.
        momentum2: a^2 dD2/dt / H0.
    """

    D: Array
    f: Array
    momentum: Array
    D2: Array
    momentum2: Array


def growth(cosmology: Any, a: Any) -> Growth:
    """Growth factors at scale factors from 1e-5 to 1.5.

    The equations D'' + (2 + dlnH/dlna) D' = 3/2 Omega_m(a) D, and D2'' + (2 + dlnH/dlna) D2' = 3/2 Omega_m(a) (D2 -
    D^2), with primes for d/dlna, are integrated by the classical Runge-Kutta method, and interpolated by cubics that
    have the derivatives right (Bouchet et al. 1995, for the second order).

    Args:
        cosmology: a `Cosmology`, or one of jax_cosmo's.
        a: scale factors of any shape.

    Raises:
        ValueError: a number is out of range.

    Examples:
        >>> growth = cosmos.growth(cosmos.Cosmology(), jnp.array([0.5, 1.0]))
        >>> growth.D.shape, round(float(growth.f[1]), 3)
        ((2,), 0.522)
    """
    cosmology = as_cosmology(cosmology)
    a = jnp.asarray(a, dtype=float)
    if is_known(a) and a.size and not (float(a.min()) >= EARLIEST and float(a.max()) <= LATEST):
        raise ValueError(f"scale factors must be from {EARLIEST} to {LATEST}; got {describe(a)}")
    return _interpolated(cosmology, table(cosmology), a)


class Table(NamedTuple):
    """(D, dD/dlna, D2, dD2/dlna) and their derivatives by ln a, (INTERVALS + 1, 4): D is 1 today."""

    values: Array
    rates: Array


def _rate(c: Cosmology, log_a: Array, y: Array) -> Array:
    squared = _squared(c, log_a)
    matter = 1.5 * c.Omega_m * jnp.exp(-3 * log_a) / squared
    slope = jax.jvp(partial(_squared, c), (log_a,), (jnp.ones_like(log_a),))[1]
    friction = 2 + slope / (2 * squared)
    D, D_rate, D2, D2_rate = jnp.moveaxis(y, -1, 0)
    second = (matter * D - friction * D_rate, matter * (D2 - D * D) - friction * D2_rate)
    return jnp.stack([D_rate, second[0], D2_rate, second[1]], -1)


def _width() -> float:
    import math

    return (math.log(LATEST) - math.log(EARLIEST)) / INTERVALS


@jax.jit
def table(cosmology: Cosmology) -> Table:
    """Growth at every interval of ln a."""
    times = jnp.log(EARLIEST) + _width() * jnp.arange(INTERVALS + 1, dtype=float)
    # In units of the first scale factor, so that no number is far from 1 in float32.
    first = jnp.array([1.0, 1.0, -3 / 7, -6 / 7], dtype=float) * EARLIEST ** jnp.array([1.0, 1.0, 2.0, 2.0])
    step = _width()

    def advance(y: Array, time: Array) -> tuple[Array, Array]:
        one = _rate(cosmology, time, y)
        two = _rate(cosmology, time + step / 2, y + step / 2 * one)
        three = _rate(cosmology, time + step / 2, y + step / 2 * two)
        four = _rate(cosmology, time + step, y + step * three)
        return y + step / 6 * (one + 2 * two + 2 * three + four), y

    last, values = lax.scan(advance, first, times[:-1])
    values = jnp.concatenate([values, last[None]])
    rates = _rate(cosmology, times, values)
    today, *_ = _hermite(values, rates, jnp.zeros((), values.dtype))
    scale = jnp.stack([today, today, today**2, today**2])
    return Table(values / scale, rates / scale)


def _hermite(values: Array, rates: Array, log_a: Array) -> Array:
    """Rows of a table at ln a of any shape, by cubics."""
    at = (log_a - jnp.log(EARLIEST)) / _width()
    left = jnp.clip(jnp.floor(at).astype(int), 0, INTERVALS - 1)
    t = (at - left)[..., None]
    low, high, low_rate, high_rate = values[left], values[left + 1], rates[left] * _width(), rates[left + 1] * _width()
    return (
        (1 + 2 * t) * (1 - t) ** 2 * low
        + t * (1 - t) ** 2 * low_rate
        + t**2 * (3 - 2 * t) * high
        + t**2 * (t - 1) * high_rate
    )


def _interpolated(cosmology: Cosmology, known: Table, a: Array) -> Growth:
    D, D_rate, D2, D2_rate = jnp.moveaxis(_hermite(known.values, known.rates, jnp.log(a)), -1, 0)
    speed = a**2 * expansion(cosmology, a)
    return Growth(D, D_rate / D, speed * D_rate, D2, speed * D2_rate)
