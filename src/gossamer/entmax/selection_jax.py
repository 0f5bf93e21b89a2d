"""The k largest scores of each row in `lax`, exactly and without sorting: by halvings of a threshold.

Scores are compared as integers of the same order. A threshold that just k scores reach is found as soon as one is met;
where scores are equal, the place up to which they count is found in the same way.
"""

from __future__ import annotations

from typing import NamedTuple

import jax.numpy as jnp
from jax import Array, lax

from gossamer.jax.compat import varying_with

GROUPS = 64  # of keys, whose largest scores bound the threshold from below
FEW = 16  # the most keys for which they do: they are sorted


class Picked(NamedTuple):
    """The scores of which a row's weights are computed."""

    s: Array  # (..., m): -inf for those that were left out
    after: Array  # (..., 1): the largest score that was left out, or -inf


def largest(s: Array, k: int | None) -> Picked:
    """The k largest of the scores (..., m), ties to the lowest key; all of them where k is None or m at most."""
    *lead, m = s.shape
    if k is None or k >= m:
        return Picked(s, jnp.full((*lead, 1), -jnp.inf, s.dtype))
    bits = _ordered(s)
    none = _ordered(jnp.full((*lead, 1), -jnp.inf, s.dtype))
    all_kept = (s > -jnp.inf).sum(-1, keepdims=True) <= k

    def reach(threshold: Array) -> Array:
        return (bits >= threshold).sum(-1, keepdims=True, dtype=jnp.int32)

    low, high = none, bits.max(-1, keepdims=True) + 1
    if k <= FEW and m >= 4 * GROUPS:
        each = m // GROUPS
        maxima = bits[..., : each * GROUPS].reshape(*lead, each, GROUPS).max(-2)
        low = lax.top_k(maxima, k)[0][..., k - 1 :]  # at least k scores reach it
    low = jnp.where(all_kept, none, low)

    def halve(state: _Bracket) -> _Bracket:
        low, high, done = state
        middle = (low & high) + ((low ^ high) >> 1)  # of which nothing overflows
        many = reach(middle)
        low, high = (jnp.where(done, old, new) for old, new in (
            (low, jnp.where(many >= k, middle, low)), (high, jnp.where(many >= k, high, middle)),
        ))  # fmt: skip
        return _Bracket(low, high, done | (many == k) | (high <= low + 1))

    begin = _Bracket(*varying_with((low, high, all_kept | (high <= low + 1)), s))
    low = lax.while_loop(lambda state: ~state.done.all(), halve, begin).low
    # Where more reach it, it is the k-th score, which several have.
    equal = bits == low
    left = k - (bits > low).sum(-1, keepdims=True, dtype=jnp.int32)
    place = jnp.arange(m, dtype=jnp.int32)
    first = jnp.where(all_kept | (reach(low) == k), m - 1, 0).astype(jnp.int32)

    def narrow(state: tuple[Array, Array]) -> tuple[Array, Array]:
        first, last = state
        middle = (first + last) // 2
        enough = (equal & (place <= middle)).sum(-1, keepdims=True, dtype=jnp.int32) >= left
        return jnp.where(enough, first, jnp.minimum(middle + 1, last)), jnp.where(enough, middle, last)

    places = varying_with((first, jnp.full_like(first, m - 1)), s)
    _, last = lax.while_loop(lambda state: (state[0] < state[1]).any(), narrow, places)
    kept = (bits > low) | (equal & (place <= last))
    return Picked(jnp.where(kept, s, -jnp.inf), jnp.where(kept, -jnp.inf, s).max(-1, keepdims=True))


class _Bracket(NamedTuple):
    """A threshold that k scores or more reach, one that fewer reach, and whether the first needs no more."""

    low: Array
    high: Array
    done: Array


def _ordered(s: Array) -> Array:
    """Integers in the order of the scores; 0 and -0 are one."""
    kind = jnp.int64 if s.dtype == jnp.float64 else jnp.int32
    bits = lax.bitcast_convert_type(jnp.where(s == 0, 0, s), kind)
    return jnp.where(bits < 0, bits ^ jnp.iinfo(kind).max, bits)
