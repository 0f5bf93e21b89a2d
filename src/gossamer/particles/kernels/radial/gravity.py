"""The long-range part of gravity, which a mesh computes: what kernels and operations on arrays subtract."""

from __future__ import annotations

from typing import Any

# Of `long_root` at s = (R / split)^2, found by least squares whose weights grow where the error is large: at most
# 1.5e-5 of Newton's force up to s = 31.26, which is the cut with the largest softening.
ROOT = (0.00090283232, -0.062095710, 1.9381510, 4.6799458, 0.013581287, 0.046304654)
POWERS = (-43, -19, 5, 10, -9, -18)  # of the split in twelfths, in the coefficients for s = R^2


def long_root(s: Any, coefficients: tuple[Any, ...]) -> Any:
    """The square root of (erf(u) - 2 u exp(-u^2) / sqrt(pi)) R^-3, u = R / (2 split).

    A polynomial of degree 10 in five products, so that its square has degree 20: Horner's rule gives a degree of 6 in
    as many, and an error of 4e-4.
    """
    c, d, e, f, g, h = coefficients
    line = c * s + d
    square = line * s + e
    quintic = line * (square * square + f) + g
    return quintic * quintic + h


def coefficients_of(split: float) -> tuple[float, ...]:
    """The coefficients of `long_root` at s = R^2."""
    return tuple(c * split ** (power / 12) for c, power in zip(ROOT, POWERS, strict=True))
