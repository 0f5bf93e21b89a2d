"""What a pair of particles adds to a sum, for `radial_sum`, `radial_force` and their gradients.

A term is called for the pairs of c runs of queries (rows) with K candidates (columns) each, by the functions of
jax.numpy or torch: `steps` are the d parts of x_column - x_row (c, 32, K) each, `s` is r^2, `keep` says which pairs are
within the radius, `a` (c, 32, A) and `b` (c, K, B) are what rows and columns bring. It gives (c, 32, outputs).
"""

from __future__ import annotations

from collections.abc import Callable, Sequence
from typing import Any

FEW = 4  # channels that are summed one by one; more of them are a product of matrices

Term = Callable[[Sequence[Any], Any, Any, Any, Any, Any], Any]


def weighted(law: Any) -> Term:
    """sum_j f(r^2) b_j: the values of `radial_sum`."""

    def term(steps: Sequence[Any], s: Any, keep: Any, a: Any, b: Any, xp: Any) -> Any:
        return _sums(xp.where(keep, law.of(s, xp), 0 * s), b, xp)

    return term


def weighted_slopes(law: Any) -> Term:
    """The gradients of `weighted` to positions (d), then values (channels).

    Rows bring gradients g, then values v, columns the other way round: -sum_j 2 f'(r^2) (g_i . v_j + v_i . g_j)
    (x_j - x_i), and sum_j f(r^2) g_j.
    """

    def term(steps: Sequence[Any], s: Any, keep: Any, a: Any, b: Any, xp: Any) -> Any:
        value, slope = law.both(s, xp)
        slope = xp.where(keep & (s > 0), -2 * slope, 0 * s) * _inner(a, b, xp)  # which may be infinite at 0
        positions = xp.stack([(slope * step).sum(-1) for step in steps], -1)
        *_, both = b.shape
        return xp.concatenate([positions, _sums(xp.where(keep, value, 0 * s), b[:, :, both // 2 :], xp)], -1)

    return term


def force(law: Any) -> Term:
    """sum_j b_j w(r^2) (x_j - x_i), b being masses: `radial_force`."""

    def term(steps: Sequence[Any], s: Any, keep: Any, a: Any, b: Any, xp: Any) -> Any:
        apart = keep & (s > 0)
        w = xp.where(apart, law.of(xp.where(apart, s, s * 0 + 1), xp), 0 * s) * b[:, None, :, 0]
        return xp.stack([(w * step).sum(-1) for step in steps], -1)

    return term


def force_slopes(law: Any) -> Term:
    """The gradients of `force` to positions (d), then masses (1); a and b are gradients of the force (d) and masses.

    Of the position of i, with u = m_i g_j - m_j g_i and d = x_j - x_i: sum_j w u + 2 w' (d . u) d, since i is both a
    query and a source. Of the mass of i: -sum_j w (g_j . d).
    """

    def term(steps: Sequence[Any], s: Any, keep: Any, a: Any, b: Any, xp: Any) -> Any:
        apart = keep & (s > 0)
        w, slope = law.both(xp.where(apart, s, s * 0 + 1), xp)
        w, slope = xp.where(apart, w, 0 * s), xp.where(apart, slope, 0 * s)
        d = len(steps)
        mine, theirs = a[:, :, None, d], b[:, None, :, d]
        turned = [mine * b[:, None, :, n] - theirs * a[:, :, None, n] for n in range(d)]
        along = 2 * slope * sum(step * u for step, u in zip(steps, turned, strict=True))
        found = [(w * u + along * step).sum(-1) for step, u in zip(steps, turned, strict=True)]
        mass = -(w * sum(step * b[:, None, :, n] for n, step in enumerate(steps))).sum(-1)
        return xp.stack([*found, mass], -1)

    return term


def counted(law: Any) -> Term:
    """How many particles are within the radius, each itself included."""

    def term(steps: Sequence[Any], s: Any, keep: Any, a: Any, b: Any, xp: Any) -> Any:
        return xp.where(keep, 0 * s + 1, 0 * s).sum(-1)[..., None]

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
