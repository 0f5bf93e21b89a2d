"""Functions of the distance of two particles: what `radial_sum` and `radial_force` sum.

Each is a value: its numbers are known before anything is compiled.
"""

from __future__ import annotations

import copy
import math
from collections.abc import Callable
from dataclasses import dataclass
from typing import Any, NamedTuple

import numpy as np

from gossamer.checks import real, show
from gossamer.particles.kernels.radial.configurations import NUMBERS
from gossamer.particles.kernels.radial.functions import digest, result
from gossamer.particles.kernels.radial.gravity import ROOT, long_root


class Values(NamedTuple):
    """A function of s = r^2 and its derivative, at some distances."""

    value: Any
    slope: Any


class Pull(NamedTuple):
    """w of the force w d of two particles whose difference is d, in parts that are in range where the force is.

    With e = inverse d the force is value e. With v = inverse u the gradient w u + 2 w' (d . u) d is
    value (v - p (e . v) e) + along (e . v) e, p being the formula's `power`.
    """

    value: Any
    along: Any  # None where nobody asks for it
    inverse: Any  # an array, or 1


class GaussianFormula(NamedTuple):
    """The values of a `Gaussian`. Numbers of formulas are of Python, or arguments of a program of JAX."""

    factor: Any  # -1 / (2 h^2)

    def of(self, s: Any, xp: Any) -> Any:
        """The values at s = r^2, by the functions of numpy, jax.numpy or torch."""
        return xp.exp(s * self.factor)

    def both(self, s: Any, xp: Any) -> Values:
        """The values and their derivatives."""
        value = self.of(s, xp)
        return Values(value, value * self.factor)


class GravityFormula(NamedTuple):
    """The values of `ShortRangeGravity`."""

    softening: Any  # squared
    split: Any  # squared
    cube: Any  # 1 / split^3
    factor: Any  # -1 / (4 split^2)
    height: Any  # 1 / (2 sqrt(pi) split^3)

    @property
    def power(self) -> int:
        """Of the inverse of length that w has."""
        return 3

    def of(self, s: Any, xp: Any) -> Any:
        """w at s = r^2 > 0, by the functions of numpy, jax.numpy or torch."""
        pull = self.pull(s, xp, slope=False)
        return pull.value * pull.inverse

    def both(self, s: Any, xp: Any) -> Values:
        """w and its derivative by s."""
        value, along, inverse = self.pull(s, xp, slope=True)
        return Values(value * inverse, (along - 3 * value) * inverse * inverse * inverse / 2)

    def pull(self, s: Any, xp: Any, slope: bool) -> Pull:
        """R w and what is beside it in w' = -(3 w + exp(-u^2) / (2 sqrt(pi) split^3)) / (2 R^2)."""
        s = s + self.softening
        inverse = 1 / xp.sqrt(s)
        R, root = s * inverse, long_root(s / self.split, ROOT)
        value, along = inverse * inverse - root * root * R * self.cube, None
        if slope:
            along = -(xp.exp(s * self.factor) * self.height) * R
        return Pull(value, along, inverse)


@dataclass(frozen=True)
class OwnFormula:
    """The values of a `RadialKernel`."""

    function: Callable[..., Any]
    numbers: tuple[Any, ...]
    length: Any  # the unit of its own that s is in

    @property
    def power(self) -> int:
        """Of the inverse of length: values are what the function says."""
        return 0

    def of(self, s: Any, xp: Any) -> Any:
        """The values at s = r^2, by the functions of numpy, jax.numpy or torch."""
        return result(self.function, s * self.length * self.length, xp, self.numbers, slope=False).value

    def both(self, s: Any, xp: Any) -> Values:
        """The values and their derivatives."""
        both = result(self.function, s * self.length * self.length, xp, self.numbers, slope=True)
        return Values(both.value, both.slope * self.length * self.length)

    def pull(self, s: Any, xp: Any, slope: bool) -> Pull:
        """w and 2 w'."""
        if not slope:
            return Pull(self.of(s, xp), None, 1)
        value, along = self.both(s, xp)
        return Pull(value, 2 * along, 1)


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

    def scaled(self, unit: float) -> Gaussian:
        """The same for lengths that were multiplied by a unit."""
        return Gaussian(self.h * unit)

    @property
    def radius(self) -> float:
        """Beyond this distance it is 0, in float64 too."""
        return 64 * self.h

    @property
    def formula(self) -> GaussianFormula:
        return GaussianFormula(-0.5 / self.h / self.h)


@dataclass(frozen=True)
class ShortRangeGravity:
    """Newton's force less the part that a mesh computes: what remains is cut at 5.5 times the split.

    The mesh's part is the force of a potential that is filtered by exp(-k^2 split^2). Of a particle of mass m at
    distance r along d remains the acceleration m w d, with

        w = R^-3 - (erf(u) - 2 u exp(-u^2) / sqrt(pi)) R^-3,  R^2 = r^2 + softening^2,  u = R / (2 split),

    whose second term is an entire function of R^2 (Essmann et al. 1995; GROMACS's correction of Ewald sums): the square
    of a polynomial here, whose error is 1.5e-5 of Newton's force.

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
        softening = known("softening", self.softening)
        if not 0 <= softening <= self.split:
            raise ValueError(f"softening must be at least 0 and at most the split, {self.split}; got {softening}")
        object.__setattr__(self, "softening", softening)

    @property
    def radius(self) -> float:
        """Beyond this distance the force is 0."""
        return self.CUT * self.split

    def scaled(self, unit: float) -> ShortRangeGravity:
        """The same for lengths that were multiplied by a unit."""
        return ShortRangeGravity(self.split * unit, self.softening * unit)

    @property
    def formula(self) -> GravityFormula:
        square, cube = self.split**2, self.split**3
        return GravityFormula(self.softening**2, square, 1 / cube, -0.25 / square, 0.5 / (math.sqrt(math.pi) * cube))


class RadialKernel:
    """A function of r^2 that you write: what `radial_sum` sums, or w in `radial_force`.

    It is one small function for all devices: on a CPU it computes with arrays, and for a GPU it is traced into the
    kernel of the sum (CuTe DSL), which is compiled once and kept under a digest of the function. Gradients to positions
    need no second function: the derivative follows by the chain rule.

    Args:
        function: called as function(s, xp, *numbers): s is r^2 in your own unit of length, `xp` has exp, log, sqrt,
            rsqrt, sin, cos, tanh, abs, minimum, maximum and where, and gives f(r^2) by these and by + - * / and ** of
            whole numbers. It has no branches (comparisons, which & and | join, are for `where`), and reads numbers,
            functions and modules alone. In sums it must be finite at r = 0, where each particle meets itself; its
            derivative there is not used.
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
        self.function, self.numbers = function, tuple(known("a number of a radial kernel", n) for n in numbers)
        self.length = 1.0  # the unit of its own that s is in: see `scaled`
        digest(function)  # raises where there is none
        with np.errstate(all="ignore"):
            values = self.formula.both(np.array([0.25, 1.0]), np)
        if any(np.shape(x) != (2,) for x in values):
            raise TypeError(
                f"function must give one number for each r^2; got the shape {np.shape(values.value)} for (2,)"
            )

    def __repr__(self) -> str:
        return f"RadialKernel({', '.join([getattr(self.function, '__name__', '?'), *map(repr, self.numbers)])})"

    def __eq__(self, other: object) -> bool:
        return isinstance(other, RadialKernel) and self._key == other._key

    def __hash__(self) -> int:
        return hash(self._key)

    @property
    def _key(self) -> Any:
        return self.function, self.numbers, self.length

    def scaled(self, unit: float) -> RadialKernel:
        """The same for lengths that were multiplied by a unit: the function still gets them as they were."""
        made = copy.copy(self)
        made.length = self.length / unit
        return made

    @property
    def formula(self) -> OwnFormula:
        return OwnFormula(self.function, self.numbers, self.length)


def known(name: str, value: Any) -> float:
    """A number of Python or numpy, or an array without dimensions of any library, whose value is known.

    Raises:
        TypeError: it is none, or is traced, or a gradient of it is asked for.
    """
    number = real(value)
    if number is None:
        raise TypeError(
            f"{name} must be a number that is known before anything is compiled, and has no gradient; got {show(value)}"
        )
    return number


def positive(name: str, value: Any) -> float:
    """Such a number that is finite and over 0."""
    number = known(name, value)
    if not 0 < number < math.inf:
        raise ValueError(f"{name} must be positive and finite; got {number}")
    return number
