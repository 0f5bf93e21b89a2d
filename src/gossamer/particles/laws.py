"""Functions of the distance of two particles: what `radial_sum` and `radial_force` sum.

Each is a value: its numbers are known before anything is compiled.
"""

from __future__ import annotations

import math
from collections.abc import Callable
from dataclasses import dataclass
from functools import cache
from typing import Any, NamedTuple

import numpy as np

from gossamer.kernels.radial.configurations import NUMBERS
from gossamer.kernels.radial.functions import digest, result

DEGREE = 8  # of the polynomial of the long-range part in R^2: 5e-5 of Newton's force in float32


class Values(NamedTuple):
    """A function of s = r^2 and its derivative, at some distances."""

    value: Any
    slope: Any


@dataclass(frozen=True)
class Gaussian:
    """The function exp(-r^2 / (2 h^2)).

    Args:
        h: its width, positive.

    Examples:
        >>> gp.Gaussian(0.5)
        Gaussian(h=0.5)
    """

    h: float

    def __post_init__(self) -> None:
        object.__setattr__(self, "h", positive("h", self.h))

    def of(self, s: Any, xp: Any) -> Any:
        """The values at s = r^2, by the functions of numpy, jax.numpy or torch."""
        return xp.exp(s * (-0.5 / self.h**2))

    def both(self, s: Any, xp: Any) -> Values:
        """The values and their derivatives."""
        value = self.of(s, xp)
        return Values(value, value * (-0.5 / self.h**2))


@dataclass(frozen=True)
class ShortRangeGravity:
    """Newton's force less the part that a mesh computes: what remains is cut at 5.5 times the split.

    The mesh's part is the force of a potential that is filtered by exp(-k^2 split^2). Of a particle of mass m at
    distance r along d remains the acceleration m w d, with

        w = R^-3 - (erf(u) - 2 u exp(-u^2) / sqrt(pi)) R^-3,  R^2 = r^2 + softening^2,  u = R / (2 split),

    whose second term is an entire function of R^2 (Essmann et al. 1995; GROMACS's correction of Ewald sums): a
    polynomial of degree 8 here, whose error is under 5e-5 of Newton's force.

    Args:
        split: the length at which the two parts meet, positive.
        softening: of Plummer's form, at least 0 and at most the split.

    Examples:
        >>> gp.ShortRangeGravity(split=1.0).radius
        5.5
    """

    split: float
    softening: float = 0.0

    CUT = 5.5

    def __post_init__(self) -> None:
        object.__setattr__(self, "split", positive("split", self.split))
        if isinstance(self.softening, bool) or not isinstance(self.softening, (int, float, np.number)):
            raise TypeError(f"softening must be a number; got {self.softening!r}")
        if not 0 <= self.softening <= self.split:
            raise ValueError(f"softening must be at least 0 and at most the split, {self.split}; got {self.softening}")
        object.__setattr__(self, "softening", float(self.softening))

    @property
    def radius(self) -> float:
        """Beyond this distance the force is 0."""
        return self.CUT * self.split

    def coefficients(self) -> tuple[float, ...]:
        """Of the long-range part for a split of 1: a polynomial in (R / split)^2, from its constant term on."""
        return _fit((self.softening / self.split) ** 2)

    def of(self, s: Any, xp: Any) -> Any:
        """w at s = r^2 > 0, by the functions of numpy, jax.numpy or torch."""
        s = s + self.softening**2
        inverse = 1 / xp.sqrt(s)
        return inverse * inverse * inverse - _horner(self.coefficients(), s / self.split**2) / self.split**3

    def both(self, s: Any, xp: Any) -> Values:
        """w and its derivative by s."""
        s = s + self.softening**2
        inverse = 1 / xp.sqrt(s)
        square = inverse * inverse
        cube = square * inverse
        c, t = self.coefficients(), s / self.split**2
        slopes = tuple(n * value for n, value in enumerate(c) if n)
        slope = -1.5 * cube * square - _horner(slopes, t) / self.split**5
        return Values(cube - _horner(c, t) / self.split**3, slope)


class RadialKernel:
    """A function of r^2 that you write: what `radial_sum` sums, or w in `radial_force`.

    It is one small function for all devices: on a CPU it computes with arrays, and for a GPU it is traced into the
    kernel of the sum (CuTe DSL), which is compiled once and kept under a digest of the function. Gradients to positions
    need no second function: the derivative is found by the chain rule.

    Args:
        function: called as function(s, xp, *numbers): s is r^2, `xp` has exp, log, sqrt, rsqrt, sin, cos, tanh, abs,
            minimum, maximum and where, and gives f(r^2) by these and by + - * / and ** of whole numbers. It has no
            branches, and reads numbers, functions and modules alone. In sums it must be finite at r = 0, where each
            particle meets itself; its derivative there is not used.
        numbers: at most 10, which may change without anything being compiled again.

    Raises:
        TypeError, ValueError: the function or a number is wrong.

    Examples:
        >>> def spline(s, xp, h):
        ...     u = xp.sqrt(s) / h
        ...     return xp.where(u < 1, 1 - 1.5 * u**2 + 0.75 * u**3, xp.where(u < 2, 0.25 * (2 - u) ** 3, 0.0))
        >>> x = jax.random.uniform(jax.random.key(0), (500, 3))
        >>> gp.radial_sum(gp.Cells.build(x, 0.2, 1.0), 1.0, gp.RadialKernel(spline, 0.1)).shape
        (500,)
    """

    def __init__(self, function: Callable[..., Any], *numbers: float) -> None:
        if not callable(function):
            raise TypeError(f"function must be a function of (s, xp, *numbers); got {function!r}")
        if len(numbers) >= NUMBERS:
            raise ValueError(f"a radial kernel takes at most {NUMBERS - 1} numbers; got {len(numbers)}")
        for n in numbers:
            if isinstance(n, bool) or not isinstance(n, (int, float, np.number)):
                raise TypeError(f"numbers must be known before anything is compiled; got {n!r}")
        self.function, self.numbers = function, tuple(float(n) for n in numbers)
        digest(function)  # raises where there is none
        with np.errstate(all="ignore"):
            found = self.both(np.array([0.25, 1.0]), np)
        if any(np.shape(x) != (2,) for x in found):
            raise TypeError(
                f"function must give one number for each r^2; got the shape {np.shape(found.value)} for (2,)"
            )

    def __repr__(self) -> str:
        return f"RadialKernel({', '.join([getattr(self.function, '__name__', '?'), *map(repr, self.numbers)])})"

    def __eq__(self, other: object) -> bool:
        return isinstance(other, RadialKernel) and (self.function, self.numbers) == (other.function, other.numbers)

    def __hash__(self) -> int:
        return hash((self.function, self.numbers))

    def of(self, s: Any, xp: Any) -> Any:
        """The values at s = r^2, by the functions of numpy, jax.numpy or torch."""
        return result(self.function, s, xp, self.numbers, slope=False).value

    def both(self, s: Any, xp: Any) -> Values:
        """The values and their derivatives."""
        found = result(self.function, s, xp, self.numbers, slope=True)
        return Values(found.value, found.slope)


def positive(name: str, value: Any) -> float:
    """A finite number over 0."""
    if isinstance(value, bool) or not isinstance(value, (int, float, np.number)):
        raise TypeError(f"{name} must be a number that is known before anything is compiled; got {value!r}")
    if not 0 < value < math.inf:
        raise ValueError(f"{name} must be positive and finite; got {value}")
    return float(value)


def _horner(coefficients: tuple[float, ...], s: Any) -> Any:
    *rest, last = coefficients
    total = s * 0 + last
    for c in reversed(rest):
        total = total * s + c
    return total


def long_range(s: np.ndarray) -> np.ndarray:
    """(erf(u) - 2 u exp(-u^2) / sqrt(pi)) R^-3 at s = R^2, for a split of 1."""
    u2 = s / 4
    # Where the difference cancels, its series: sum over n of (-1)^n u^(2n) 2 / (n! (2n + 3)), times u^3 2 / sqrt(pi).
    series = sum((-1) ** n * u2**n * 2 / (math.factorial(n) * (2 * n + 3)) for n in range(12))
    u = np.sqrt(np.maximum(u2, 0.04))
    erf = np.array([math.erf(x) for x in u.ravel()]).reshape(u.shape)
    closed = (erf - 2 * u * np.exp(-u * u) / math.sqrt(math.pi)) / (8 * u**3)
    return np.where(u2 < 0.04, series * 2 / math.sqrt(math.pi) / 8, closed)


@cache
def _fit(softening: float) -> tuple[float, ...]:
    """The polynomial in s = R^2 whose error relative to Newton's force, times R^3, is least at most (Lawson 1961).

    Args:
        softening: the least s, for a split of 1.
    """
    high = ShortRangeGravity.CUT**2 * 1.0001 + softening
    t = np.cos(np.linspace(0, np.pi, 600))
    s = (t + 1) / 2 * (high - softening) + softening
    basis = np.polynomial.chebyshev.chebvander(t, DEGREE)
    scale = s**1.5
    weights = np.ones_like(s)
    found, least = np.zeros(DEGREE + 1), math.inf
    for _ in range(200):
        root = np.sqrt(weights)[:, None]
        c, *_ = np.linalg.lstsq(root * scale[:, None] * basis, root[:, 0] * scale * long_range(s), rcond=None)
        error = np.abs(basis @ c - long_range(s)) * scale
        if error.max() < least:
            found, least = c, error.max()
        weights = weights * error
        weights = weights / weights.sum() + 1e-12
    power = np.polynomial.chebyshev.Chebyshev(found, domain=[softening, high]).convert(
        kind=np.polynomial.polynomial.Polynomial, domain=[-1, 1], window=[-1, 1]
    )
    return tuple(float(c) for c in power.coef)
