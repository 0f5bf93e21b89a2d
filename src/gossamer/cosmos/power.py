"""Linear theory: the transfer function of Eisenstein and Hu (1998), tables of others, and sigma8."""

from __future__ import annotations

from typing import Any, NamedTuple

import jax.numpy as jnp
import numpy as np
from jax import Array

from gossamer.cosmos.checks import describe, is_known
from gossamer.cosmos.cosmology import Cosmology, as_cosmology, growth

T_CMB = 2.7255  # K
RADIUS_MPC_H = 8.0  # of sigma8
FEWEST_ROWS = 16  # of a table
CLOSE = 0.1  # a table's sigma8 may differ from the cosmology's by this part
LOG_K = (-4.5, 1.7, 1024)  # decades of k in h/Mpc, and points between, of the integral of sigma8


class PowerTable(NamedTuple):
    """The linear power spectrum at a = 1: k in h/Mpc, increasing, and P in (Mpc/h)^3, both (n,)."""

    k_h_mpc: Any
    power_mpc3_h3: Any


def transfer(cosmology: Cosmology, k_h_mpc: Any) -> Array:
    """The transfer function with baryons and their oscillations, 1 at small k: equations 2 to 24 of the paper."""
    c = cosmology
    k = jnp.maximum(jnp.asarray(k_h_mpc, dtype=float), 1e-12) * c.h  # 1/Mpc
    matter, baryons, theta = c.Omega_m * c.h**2, c.Omega_b * c.h**2, T_CMB / 2.7
    part = baryons / matter
    z_equal = 2.5e4 * matter * theta**-4
    k_equal = 0.0746 * matter * theta**-2
    drag1 = 0.313 * matter**-0.419 * (1 + 0.607 * matter**0.674)
    drag2 = 0.238 * matter**0.223
    z_drag = 1291 * matter**0.251 / (1 + 0.659 * matter**0.828) * (1 + drag1 * baryons**drag2)
    ratio_drag, ratio_equal = (31.5e3 * baryons * theta**-4 / z for z in (z_drag, z_equal))
    root = (jnp.sqrt(1 + ratio_drag) + jnp.sqrt(ratio_drag + ratio_equal)) / (1 + jnp.sqrt(ratio_equal))
    sound = 2 / (3 * k_equal) * jnp.sqrt(6 / ratio_equal) * jnp.log(root)  # the sound horizon, Mpc
    k_silk = 1.6 * baryons**0.52 * matter**0.73 * (1 + (10.4 * matter) ** -0.95)
    q, ks = k / (13.41 * k_equal), k * sound

    a1 = (46.9 * matter) ** 0.670 * (1 + (32.1 * matter) ** -0.532)
    a2 = (12.0 * matter) ** 0.424 * (1 + (45.0 * matter) ** -0.582)
    alpha_dark = a1**-part * a2 ** -(part**3)
    b1 = 0.944 / (1 + (458 * matter) ** -0.708)
    b2 = (0.395 * matter) ** -0.0266
    beta_dark = 1 / (1 + b1 * ((1 - part) ** b2 - 1))

    def pressureless(alpha: Any, beta: Any) -> Array:
        log = jnp.log(jnp.e + 1.8 * beta * q)
        return log / (log + (14.2 / alpha + 386 / (1 + 69.9 * q**1.08)) * q**2)

    mix = 1 / (1 + (ks / 5.4) ** 4)
    dark = mix * pressureless(1.0, beta_dark) + (1 - mix) * pressureless(alpha_dark, beta_dark)

    y = (1 + z_equal) / (1 + z_drag)
    edge = jnp.sqrt(1 + y)
    suppressed = y * (-6 * edge + (2 + 3 * y) * jnp.log((edge + 1) / (edge - 1)))
    alpha_baryon = 2.07 * k_equal * sound * (1 + ratio_drag) ** -0.75 * suppressed
    beta_baryon = 0.5 + part + (3 - 2 * part) * jnp.sqrt((17.2 * matter) ** 2 + 1)
    shifted = ks / (1 + (8.41 * matter**0.435 / ks) ** 3) ** (1 / 3)
    wave = jnp.where(shifted < 1e-2, 1 - shifted**2 / 6, jnp.sin(shifted) / jnp.maximum(shifted, 1e-2))
    damped = alpha_baryon / (1 + (beta_baryon / ks) ** 3) * jnp.exp(-((k / k_silk) ** 1.4))
    baryon = (pressureless(1.0, 1.0) / (1 + (ks / 5.2) ** 2) + damped) * wave
    return part * baryon + (1 - part) * dark


def linear_power(cosmology: Any, k_h_mpc: Any, a: Any = 1.0, power: Any = None) -> Array:
    """The linear power spectrum in (Mpc/h)^3, of Eisenstein and Hu with the cosmology's sigma8, or of a table.

    Args:
        cosmology: a `Cosmology`, or one of jax_cosmo's.
        k_h_mpc: wavenumbers in h/Mpc, of any shape.
        a: the scale factor.
        power: (k, P) at a = 1, k in h/Mpc and P in (Mpc/h)^3, taken as it is; interpolated in logarithms.

    Raises:
        ValueError: an argument is wrong, or the table is in other units, or has no P at a k.

    Examples:
        >>> cosmos.linear_power(cosmos.Cosmology(), jnp.array([0.01, 0.1, 1.0])).shape
        (3,)
    """
    cosmology = as_cosmology(cosmology)
    k = jnp.asarray(k_h_mpc, dtype=float)
    today = _shaped(cosmology, k) if power is None else _looked_up(check_table(power, cosmology), k)
    return today * growth(cosmology, a).D ** 2


def _shaped(c: Cosmology, k: Array) -> Array:
    unscaled = lambda k: k**c.n_s * transfer(c, k) ** 2  # noqa: E731
    return c.sigma8**2 / _variance(unscaled(_grid())) * unscaled(k)


def _grid() -> Array:
    low, high, points = LOG_K
    return jnp.logspace(low, high, points, dtype=float)


def _variance(power: Array) -> Array:
    """The variance of the density in spheres of 8 Mpc/h, for the power at `_grid`."""
    k = _grid()
    x = RADIUS_MPC_H * k
    series = 1 - x**2 / 10 + x**4 / 280  # where the difference would lose digits
    sphere = jnp.where(x < 0.3, series, 3 * (jnp.sin(x) - x * jnp.cos(x)) / jnp.maximum(x, 0.3) ** 3)
    low, high, points = LOG_K
    width = (high - low) / (points - 1) * jnp.log(10.0)
    weights = jnp.ones_like(k).at[jnp.array([0, -1])].set(0.5)
    return jnp.sum(weights * k**3 * power * sphere**2) * width / (2 * jnp.pi**2)


def _looked_up(table: PowerTable, k: Array) -> Array:
    known, power = jnp.asarray(table.k_h_mpc, dtype=float), jnp.asarray(table.power_mpc3_h3, dtype=float)
    if is_known((k, known)) and k.size:
        wanted = k[k > 0]
        if wanted.size and not (known.min() <= wanted.min() and wanted.max() <= known.max()):
            raise ValueError(
                f"power must hold k from {float(wanted.min()):.4g} to {float(wanted.max()):.4g} h/Mpc; its table goes "
                f"from {float(known.min()):.4g} to {float(known.max()):.4g}"
            )
    return jnp.exp(jnp.interp(jnp.log(jnp.maximum(k, 1e-12)), jnp.log(known), jnp.log(power)))


def check_table(power: Any, cosmology: Cosmology) -> PowerTable:
    """A table with its shape, order and units checked: those by its sigma8, which is the cosmology's.

    Raises:
        ValueError: it is no table, or in other units.
    """
    try:
        k, P = power
        shapes = np.shape(k), np.shape(P)
    except (TypeError, ValueError):
        raise ValueError(f"power must be (k in h/Mpc, P in (Mpc/h)^3), two arrays; got {describe(power)}") from None
    if len(shapes[0]) != 1 or shapes[0] != shapes[1] or shapes[0] < (FEWEST_ROWS,):
        raise ValueError(f"power must be two arrays (n,) of at least {FEWEST_ROWS} numbers; got shapes {shapes}")
    table = PowerTable(k, P)
    if not is_known((table, cosmology)):
        return table
    k, P = (np.asarray(x, dtype=np.float64) for x in table)
    if not (np.isfinite(k).all() and np.isfinite(P).all() and (k > 0).all() and (P > 0).all()):
        raise ValueError("power must hold finite numbers over 0")
    if not (np.diff(k) > 0).all():
        raise ValueError("power must have its k in increasing order")
    wanted, h = float(cosmology.sigma8), float(cosmology.h)
    sigma8 = _table_sigma8(k, P)
    if abs(sigma8 / wanted - 1) <= CLOSE:
        return table
    others = {
        "k in 1/Mpc and P in Mpc^3": _table_sigma8(k / h, P * h**3),
        "k in 1/Mpc": _table_sigma8(k / h, P),
        "P in Mpc^3": _table_sigma8(k, P * h**3),
        "k in h/kpc and P in (kpc/h)^3": _table_sigma8(k * 1e3, P / 1e9),
        "the dimensionless k^3 P / (2 pi^2)": _table_sigma8(k, P * 2 * np.pi**2 / k**3),
    }
    hint = [name for name, value in others.items() if abs(value / wanted - 1) <= CLOSE / 3]
    raise ValueError(
        f"power must be k in h/Mpc and P in (Mpc/h)^3 at a = 1, with the cosmology's sigma8 of {wanted:g} to "
        f"{CLOSE:.0%}; this table has {sigma8:.4g}" + (f". It would be right as {hint[0]}" if hint else "")
    )


def _table_sigma8(k: np.ndarray, P: np.ndarray) -> float:
    """Over the wavenumbers of the table; what it does not reach counts nothing."""
    x = RADIUS_MPC_H * k
    sphere = np.where(x < 1e-2, 1 - x**2 / 10, 3 * (np.sin(x) - x * np.cos(x)) / np.maximum(x, 1e-2) ** 3)
    return float(np.sqrt(np.trapezoid(k**3 * P * sphere**2, np.log(k)) / (2 * np.pi**2)))
