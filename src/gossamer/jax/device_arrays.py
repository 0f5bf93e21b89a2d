"""JAX's operations for `gossamer.layouts.device`: the functions of this module are an `Arrays`."""

from __future__ import annotations

import jax
import jax.numpy as jnp
from jax import Array, lax

from gossamer.layouts.device.arrays import Sorted


def fused(like: Array) -> None:
    """No kernels of its own: XLA joins the operations."""


def arange(n: int, like: Array) -> Array:
    return jnp.arange(n, dtype=jnp.int32)


def full(shape: tuple[int, ...], value: int, like: Array) -> Array:
    return jnp.full(shape, value, dtype=jnp.int32)


def int32(x: Array) -> Array:
    return x.astype(jnp.int32)


def broadcast_to(x: Array, shape: tuple[int, ...]) -> Array:
    return jnp.broadcast_to(x, shape)


def where(condition: Array, x: Array, y: Array) -> Array:
    return jnp.where(condition, x, y)


def fill(x: Array, condition: Array, value: int) -> Array:
    return jnp.where(condition, x.dtype.type(value), x)


def minimum(x: Array, y: Array) -> Array:
    return jnp.minimum(x, y)


def maximum(x: Array, y: Array) -> Array:
    return jnp.maximum(x, y)


def at_least(x: Array, low: int) -> Array:
    return jnp.maximum(x, x.dtype.type(low))


def total(x: Array) -> Array:
    return x.sum(-1, dtype=jnp.int32)


def cumsum(x: Array) -> Array:
    return x.cumsum(-1, dtype=jnp.int32)


def cummax(x: Array) -> Array:
    return lax.cummax(x, axis=x.ndim - 1)


def sort(x: Array) -> Array:
    return jnp.sort(x, axis=-1)


def stable_sort(x: Array) -> Sorted:
    places = jnp.argsort(x, stable=True)
    return Sorted(x[places], places)


def searchsorted(ordered: Array, x: Array, right: bool = False) -> Array:
    side = "right" if right else "left"

    def of_row(row: Array, x: Array) -> Array:
        return jnp.searchsorted(row, x, side=side).astype(jnp.int32)

    for _ in range(ordered.ndim - 1):
        of_row = jax.vmap(of_row)
    return of_row(ordered, x)


def take(x: Array, places: Array) -> Array:
    return x[places] if x.ndim == 1 else jnp.take_along_axis(x, places, axis=-1)


def one_bit(places: Array) -> Array:
    return jnp.left_shift(jnp.ones_like(places), places)


def bits_below(places: Array) -> Array:
    part = jnp.left_shift(jnp.ones_like(places), jnp.clip(places, 0, 31)) - 1
    return jnp.where(places >= 32, -1, part)


def sums_at(places: Array, values: Array, size: int) -> Array:
    *lead, m = places.shape
    flat = jnp.zeros((*lead, size), values.dtype).reshape(-1, size)
    rows = jnp.arange(flat.shape[0])[:, None]
    return flat.at[rows, places.reshape(-1, m)].add(values.reshape(-1, m)).reshape(*lead, size)


def extend(x: Array, n: int) -> Array:
    more = n - x.shape[-1]
    last = x[..., x.shape[-1] - 1 :]
    return jnp.concatenate([x, jnp.broadcast_to(last, (*x.shape[:-1], more))], -1) if more else x


def divides(block: int, n: int) -> bool:
    return n % block == 0


def concatenate(parts: list[Array]) -> Array:
    return jnp.concatenate(parts, -1)
