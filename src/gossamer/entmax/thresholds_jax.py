"""Normalisers of alpha-entmax over rows of scores in `lax`: the formulas of `thresholds.py`, in the type of the scores.

With a = alpha - 1 the weights are p = exp_a(s - lam), exp_a(t) = [1 + a t]_+^(1 / a), which is exp at a = 0. Scores
are taken less the largest of their row, and lam likewise: x = lam - top keeps its digits whatever the scores are.
"""

from __future__ import annotations

from typing import Literal, NamedTuple

import jax.numpy as jnp
from jax import Array, lax

from gossamer.jax.compat import varying_with

# The alphas that need no power: 1, 1.5 and 2 of all heads. "any" is by heads, of numbers that need not be known.
Kind = Literal["softmax", "entmax15", "sparsemax", "any"]
KINDS: dict[float, Kind] = {1.0: "softmax", 1.5: "entmax15", 2.0: "sparsemax"}
GROUPS = 64  # of keys, whose largest scores say where a row's normaliser is looked for
BOUND_STEPS = 3
CLOSE = 512  # units: a step of this size leaves less than one, as the steps are Newton's
MOST_STEPS = 120  # every fourth one halves the bracket, at most log(n) wide


class Powers(NamedTuple):
    """p = exp_a(t), and u = p^(1 - a) on the support, 0 elsewhere."""

    p: Array
    u: Array


def powers(t: Array, a: Array, kind: Kind) -> Powers:
    """p and u of scores less their normaliser; a broadcasts to t."""
    if kind == "softmax":
        p = jnp.exp(t)
        return Powers(p, p)
    if kind == "entmax15":
        y = jnp.maximum(0.5 * t + 1, 0)
        return Powers(y * y, y)
    if kind == "sparsemax":
        y = jnp.maximum(t + 1, 0)
        return Powers(y, (y != 0).astype(y.dtype))
    y = jnp.maximum(a * t, -1)
    p = jnp.exp(jnp.where(a == 0, t, jnp.log1p(y) / jnp.where(a == 0, 1, a)))
    return Powers(p, jnp.where(y > -1, p / (1 + y), jnp.where(y == -1, 0, p)))


def below_top(s: Array, top: Array) -> Array:
    """Scores less the largest of their row, and a number far below for those that are -inf."""
    return jnp.maximum(s - jnp.where(top == -jnp.inf, 0, top), jnp.finfo(s.dtype).min / 4)


def normaliser(t: Array, a: Array, kind: Kind) -> Array:
    """x of which exp_a(t - x) sum to 1, (..., 1), of `below_top` scores t (..., n); any number in rows without a key.

    Newton's method on the norm of the row, which ends every step at or below the root, in a bracket that every fourth
    step halves. Where there are many scores it begins from what the largest of a few groups of them give.

    Args:
        a: alpha - 1, (..., 1).
    """
    if kind == "softmax":
        return jnp.log(jnp.exp(t).sum(-1, keepdims=True))
    n = t.shape[-1]
    log = jnp.full_like(a, jnp.log(n))
    highest = _over(-jnp.expm1(-a * log), a, log)  # the most that lam can be over the largest of so many scores
    x = jnp.zeros_like(t[..., :1])
    if n >= 4 * GROUPS:
        each = n // GROUPS
        largest = t[..., : each * GROUPS].reshape(*t.shape[:-1], each, GROUPS).max(-2)
        for _ in range(BOUND_STEPS):
            x = _step(largest, x, a, kind).x
        x = jnp.clip(jnp.where(jnp.isnan(x), 0, x) - 16 * jnp.finfo(t.dtype).eps * (1 + x), 0, highest)
        x = jnp.where(jnp.isnan(x), 0, x)
    none = jnp.zeros_like(x)

    def unfinished(state: _Search) -> Array:
        return (state.number < MOST_STEPS) & ~state.done

    def step(state: _Search) -> _Search:
        found = _step(t, state.x, a, kind)
        low = jnp.where(found.total >= 1, state.x, state.low)
        high = jnp.where(found.total < 1, state.x, state.high)
        move = found.x - state.x
        new = jnp.minimum(jnp.maximum(found.x, low), high)
        # Of NaN, and of rows without a key, there is nothing to find.
        moved = jnp.where(jnp.abs(move) < jnp.inf, jnp.abs(move) / (1 + state.x), 0)
        near = moved <= CLOSE * jnp.finfo(t.dtype).eps
        halved = jnp.where(near | (state.number % 4 != 3), new, (low + high) / 2)
        return _Search(state.number + 1, halved, low, high, jnp.all(near))

    begin = _Search(jnp.int32(0), x, none, none + highest, jnp.bool_(False))
    begin = _Search(*varying_with(tuple(begin), (t, a)))
    return lax.while_loop(unfinished, step, begin).x


class _Search(NamedTuple):
    number: Array
    x: Array
    low: Array
    high: Array
    done: Array


class _Step(NamedTuple):
    x: Array
    total: Array


def _step(t: Array, x: Array, a: Array, kind: Kind) -> _Step:
    """One step of Newton on the norm, and the sum of the weights before it."""
    p, u = powers(t - x, a, kind)
    total = p.sum(-1, keepdims=True)
    log = jnp.log(total)
    move = jnp.exp((1 - a) * log) * _over(jnp.expm1(a * log), a, log) / u.sum(-1, keepdims=True)
    return _Step(x + move, total)


def _over(x: Array, a: Array, limit: Array) -> Array:
    """x / a, and `limit` where a is 0."""
    return jnp.where(a == 0, limit, x / jnp.where(a == 0, 1, a))


def slopes(p: Array, a: Array, kind: Kind) -> Array:
    """u = p^(1 - a) of probabilities, 0 where p is 0."""
    if kind == "softmax":
        return p
    if kind == "entmax15":
        return jnp.sqrt(p)
    if kind == "sparsemax":
        return jnp.where(p > 0, 1, p)
    return jnp.where(p > 0, jnp.exp((1 - a) * jnp.log(jnp.where(p > 0, p, 1))), p)


def alpha_terms(p: Array, a: Array) -> Array:
    """w = dp/dalpha at a fixed lam: p log(p)^2 phi(a log p), 0 where p is 0; see `thresholds.alpha_terms`."""
    log = jnp.log(jnp.where(p > 0, p, 1))
    z = -a * log  # from 0 up
    near = z < 0.5
    small, far = jnp.where(near, z, 0), jnp.where(near, 1, z)
    term = series = jnp.full_like(z, 0.5)
    for n in range(3, 15):
        term = term * small / n
        series = series + term
    return -p * log * log * jnp.where(near, series, (jnp.expm1(far) - far) / (far * far))
