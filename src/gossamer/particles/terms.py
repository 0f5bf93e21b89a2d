"""The terms of a pair of particles in the sums of `radial_sum`, `radial_force` and their gradients.

A term is called for the pairs of c runs of queries (rows) with K candidates (columns) each, by the functions of
jax.numpy or torch: `steps` are the d parts of x_column - x_row (c, 32, K) each, `s` is r^2, `keep` says which pairs are
within the radius, `a` (c, 32, A) and `b` (c, K, B) are what rows and columns bring. It gives (c, 32, outputs).
"""

from __future__ import annotations

from collections.abc import Callable, Sequence
from typing import Any

from gossamer.particles.geometry import apart

FEW = 4  # channels that are summed one by one; more of them are a product of matrices

Term = Callable[[Sequence[Any], Any, Any, Any, Any, Any], Any]


def weighted(formula: Any) -> Term:
    """sum_j f(r^2) b_j: the values of `radial_sum`."""

    def term(steps: Sequence[Any], s: Any, keep: Any, a: Any, b: Any, xp: Any) -> Any:
        return _sums(xp.where(keep, formula.of(s, xp), 0), b, xp)

    return term


def weighted_slopes(formula: Any) -> Term:
    """The gradients of `weighted` to positions (d), then values (channels).

    Rows bring gradients g, then values v, columns the other way round: -sum_j 2 f'(r^2) (g_i . v_j + v_i . g_j)
    (x_j - x_i), and sum_j f(r^2) g_j.
    """

    def term(steps: Sequence[Any], s: Any, keep: Any, a: Any, b: Any, xp: Any) -> Any:
        value, slope = formula.both(s, xp)
        slope = xp.where(keep & apart(s, xp), -2 * slope, 0) * _inner(a, b, xp)  # which may be infinite at 0
        positions = xp.stack([(slope * step).sum(-1) for step in steps], -1)
        *_, both = b.shape
        return xp.concatenate([positions, _sums(xp.where(keep, value, 0), b[:, :, both // 2 :], xp)], -1)

    return term


def force(formula: Any) -> Term:
    """sum_j b_j w(r^2) (x_j - x_i), b being masses: `radial_force`."""

    def term(steps: Sequence[Any], s: Any, keep: Any, a: Any, b: Any, xp: Any) -> Any:
        two = keep & apart(s, xp)
        pull = formula.pull(xp.where(two, s, 1), xp, slope=False)
        w = xp.where(two, pull.value, 0) * b[:, None, :, 0]
        return xp.stack([(w * (step * pull.inverse)).sum(-1) for step in steps], -1)

    return term


def force_slopes(formula: Any) -> Term:
    """The gradients of `force` to positions (d), then masses (1); a and b are gradients of the force (d) and masses.

    Of the position of i, with u = m_i g_j - m_j g_i and d = x_j - x_i: sum_j w u + 2 w' (d . u) d, since i is both a
    query and a source. Of the mass of i: -sum_j w (g_j . d).
    """

    def term(steps: Sequence[Any], s: Any, keep: Any, a: Any, b: Any, xp: Any) -> Any:
        two = keep & apart(s, xp)
        w, along, inverse = formula.pull(xp.where(two, s, 1), xp, slope=True)
        w, along = xp.where(two, w, 0), xp.where(two, along, 0)
        d = len(steps)
        steps = [step * inverse for step in steps]
        mine, theirs = a[:, :, None, d] * inverse, b[:, None, :, d] * inverse
        turned = [mine * b[:, None, :, n] - theirs * a[:, :, None, n] for n in range(d)]
        dot = sum(step * u for step, u in zip(steps, turned, strict=True))
        along = along * dot
        if formula.power:  # a difference of numbers, not of products with w, which may be infinite
            turned = [u - formula.power * dot * step for step, u in zip(steps, turned, strict=True)]
        positions = [(w * u + along * step).sum(-1) for step, u in zip(steps, turned, strict=True)]
        mass = -(w * sum(step * b[:, None, :, n] for n, step in enumerate(steps))).sum(-1)
        return xp.stack([*positions, mass], -1)

    return term


def counted(formula: Any) -> Term:
    """The number of particles within the radius, each itself included."""

    def term(steps: Sequence[Any], s: Any, keep: Any, a: Any, b: Any, xp: Any) -> Any:
        return xp.where(keep, xp.ones_like(s), 0).sum(-1)[..., None]

    return term


def _sums(w: Any, b: Any, xp: Any) -> Any:
    *_, channels = b.shape
    if channels > FEW:
        return xp.matmul(w, b)
    return xp.stack([(w * b[:, None, :, n]).sum(-1) for n in range(channels)], -1)


def _inner(a: Any, b: Any, xp: Any) -> Any:
    *_, channels = b.shape
    if channels > FEW:
        return xp.matmul(a, b.swapaxes(-1, -2))
    return sum(a[:, :, None, n] * b[:, None, :, n] for n in range(channels))


TERMS = {"sum": weighted, "sum_slopes": weighted_slopes, "force": force, "force_slopes": force_slopes, "count": counted}
