"""Particles in units of length that are powers of two: what results in another unit are, for torch and JAX."""

from __future__ import annotations

from typing import Any, NamedTuple

import numpy as np

EXPONENTS = range(-60, 61)
FEW = (-60, -37, 1, 22, 60)
WRITTEN = 40  # the largest exponent of functions that users write: they compute in their own unit
LEAST = 2.0**-126  # of float32: smaller numbers are rounded, or 0
RADIUS, H, NARROW = 1.4, 0.3, 2.0**-18


class Setting(NamedTuple):
    box: tuple[float | None, ...] | None
    softening: float  # in splits


SETTINGS = [Setting(None, 0.0), Setting((4.0, None, 5.0), 0.02), Setting((4.0,) * 3, 0.0), Setting(None, 1.0)]


class Cloud(NamedTuple):
    x: np.ndarray  # (N, 3)
    values: np.ndarray  # (N, 2)
    mass: np.ndarray  # (N,)
    sums: np.ndarray  # gradients of results, as these have shapes
    forces: np.ndarray


def cloud(seed: int | None = None, N: int = 60) -> Cloud:
    """Particles, of which some are at one place, 1e-8 apart, or on both sides of the seam."""
    rng = np.random.default_rng(seed)
    x = 4 * rng.random((N, 3))
    x[:6] = 1e-8 * rng.standard_normal((6, 3))
    x[6] = x[7] = x[8]
    x[9], x[10] = x[11] * (1, 0, 1), x[11] * (1, 0, 1) + (0, 3.99999, 0)
    shapes = (N, 2), N, (N, 2), (N, 3)
    return Cloud(x.astype(np.float32), *(rng.uniform(0.5, 2, shape).astype(np.float32) for shape in shapes))


def scaled(sizes: Any, n: int) -> Any:
    """Lengths in a unit that is 2^-n of the one before."""
    return sizes and tuple(None if size is None else size * 2.0**n for size in sizes)


class Result(NamedTuple):
    """What a call gives, and the power of length that it has."""

    value: np.ndarray
    power: int


def check(found: dict[str, Result], first: dict[str, Result], n: int, exact: bool = True) -> None:
    """That results in a unit are those of the first one, to the bit: what leaves float32 is 0, or has its sign."""
    for name, (value, power) in found.items():
        if "own" in name and abs(n) > WRITTEN:
            continue
        right = first[name].value
        with np.errstate(all="ignore"):
            wanted = np.ldexp(right.astype(np.float64), power * n).astype(right.dtype)
        with np.errstate(invalid="ignore"):
            error = np.where(value == wanted, 0.0, np.abs(value.astype(np.float64) - wanted))
        limit = LEAST + (0.0 if exact else 1e-5 * np.abs(wanted).max())
        assert (error <= limit).all(), (name, n, error.max())
        assert np.isfinite(right).all() and right.any(), name
