"""Between particles and a mesh, by the piecewise cubic spline (PCS): 4 cells along an axis, 64 in all.

`painted` and `read` are each other's transpose, so each is the other's gradient by values; those by positions read
with the spline's derivative. Rules of their own keep what a gradient saves to positions and mesh.
"""

from __future__ import annotations

import math
from functools import partial

import jax
import jax.numpy as jnp
from jax import Array, lax

POINTS = 4  # of the spline along an axis
Triple = tuple[int, int, int]


def _splines(t: Array) -> Array:
    """(..., 4) weights of the cells at -1, 0, 1, 2 from the one that a particle is in, at t in [0, 1) of its way on."""
    s = 1 - t
    middle = lambda x: 2 / 3 - x**2 + x**3 / 2  # noqa: E731
    return jnp.stack([s**3 / 6, middle(t), middle(s), t**3 / 6], -1)


def _slopes(t: Array) -> Array:
    """Their derivatives by t."""
    s = 1 - t
    middle = lambda x: -2 * x + 1.5 * x**2  # noqa: E731
    return jnp.stack([-(s**2) / 2, middle(t), -middle(s), t**2 / 2], -1)


def _cells(mesh: Triple, x: Array) -> tuple[Array, Array]:
    """The cells (N, 3, 4) along each axis that a position in cells touches, and its way to the next one (N, 3)."""
    whole = jnp.floor(x)
    sizes = jnp.asarray(mesh, jnp.int32)
    first = whole.astype(jnp.int32) - 1
    return (first[..., None] + jnp.arange(POINTS, dtype=jnp.int32)) % sizes[:, None], x - whole


def _flat(mesh: Triple, cells: Array, row: Array) -> Array:
    """(N, 4) places in the flat mesh of one of the 16 rows of cells along the last axis."""
    i, j = row // POINTS, row % POINTS
    return ((cells[:, 0, i] * mesh[1] + cells[:, 1, j]) * mesh[2])[:, None] + cells[:, 2]


@partial(jax.custom_vjp, nondiff_argnums=(0,))
def painted(mesh: Triple, x: Array, values: Array) -> Array:
    """The sum over particles of their values times the spline about them, (*mesh, C).

    Args:
        mesh: cells along each axis.
        x: (N, 3) positions in cells, of any image.
        values: (N, C).
    """
    cells, t = _cells(mesh, x)
    w = _splines(t)

    def add(row: Array, field: Array) -> Array:
        weight = (w[:, 0, row // POINTS] * w[:, 1, row % POINTS])[:, None] * w[:, 2]
        return field.at[_flat(mesh, cells, row)].add(weight[..., None] * values[:, None])

    field = jnp.zeros((mesh[0] * mesh[1] * mesh[2], values.shape[-1]), values.dtype)
    return lax.fori_loop(0, POINTS**2, add, field).reshape(*mesh, values.shape[-1])


@partial(jax.custom_vjp, nondiff_argnums=(0,))
def read(mesh: Triple, x: Array, field: Array) -> Array:
    """The field (*mesh, C) at the positions, by the same spline: (N, C)."""
    cells, t = _cells(mesh, x)
    w, flat = _splines(t), field.reshape(-1, field.shape[-1])

    def add(row: Array, total: Array) -> Array:
        weight = (w[:, 0, row // POINTS] * w[:, 1, row % POINTS])[:, None] * w[:, 2]
        return total + jnp.sum(weight[..., None] * flat[_flat(mesh, cells, row)], 1)

    return lax.fori_loop(0, POINTS**2, add, jnp.zeros((len(x), field.shape[-1]), field.dtype))


def _read_slopes(mesh: Triple, x: Array, field: Array, values: Array) -> Array:
    """The gradient by position of sum(values * read(field)), (N, 3)."""
    cells, t = _cells(mesh, x)
    w, d, flat = _splines(t), _slopes(t), field.reshape(-1, field.shape[-1])

    def add(row: Array, total: Array) -> Array:
        i, j = row // POINTS, row % POINTS
        read = jnp.sum(flat[_flat(mesh, cells, row)] * values[:, None], -1)  # (N, 4)
        along, across = jnp.sum(read * w[:, 2], 1), jnp.sum(read * d[:, 2], 1)
        parts = d[:, 0, i] * w[:, 1, j] * along, w[:, 0, i] * d[:, 1, j] * along, w[:, 0, i] * w[:, 1, j] * across
        return total + jnp.stack(parts, -1)

    return lax.fori_loop(0, POINTS**2, add, jnp.zeros_like(x))


def _painted_forward(mesh: Triple, x: Array, values: Array) -> tuple[Array, tuple[Array, Array]]:
    return painted(mesh, x, values), (x, values)


def _painted_backward(mesh: Triple, saved: tuple[Array, Array], g: Array) -> tuple[Array, Array]:
    x, values = saved
    return _read_slopes(mesh, x, g, values), read(mesh, x, g)


def _read_forward(mesh: Triple, x: Array, field: Array) -> tuple[Array, tuple[Array, Array]]:
    return read(mesh, x, field), (x, field)


def _read_backward(mesh: Triple, saved: tuple[Array, Array], g: Array) -> tuple[Array, Array]:
    x, field = saved
    return _read_slopes(mesh, x, field, g), painted(mesh, x, g)


painted.defvjp(_painted_forward, _painted_backward)
read.defvjp(_read_forward, _read_backward)


def in_cells(mesh: Triple, size: tuple[float, float, float], x: Array) -> Array:
    """Positions (N, 3) in cells, from those in the units of `size`."""
    return x / jnp.asarray([length / n for length, n in zip(size, mesh, strict=True)], x.dtype)


def contrast(mesh: Triple, x: Array) -> Array:
    """The density of particles at x, in cells, over its mean: a mesh."""
    return painted(mesh, x, jnp.full((len(x), 1), math.prod(mesh) / len(x), x.dtype))[..., 0]


def window(cells: int, count: int) -> Array:
    """The spline's transform along an axis of so many cells, at the first `count` frequencies of their FFT."""
    frequency = jnp.arange(count)
    return jnp.sinc(jnp.where(2 * frequency > cells, frequency - cells, frequency) / cells) ** POINTS


class Waves:
    """Wavenumbers of a real FFT of a mesh, by axis: arrays that broadcast to its (nx, ny, nz // 2 + 1)."""

    def __init__(self, mesh: Triple, size: tuple[float, float, float], dtype: jnp.dtype) -> None:
        self.k, self.odd, windows = [], [], []
        for axis, (cells, length) in enumerate(zip(mesh, size, strict=True)):
            last = axis == len(mesh) - 1
            count = cells // 2 + 1 if last else cells
            shape = [count if other == axis else 1 for other in range(3)]
            n = jnp.arange(count)
            n = jnp.where(2 * n > cells, n - cells, n)
            k = (2 * jnp.pi / length * n).astype(dtype).reshape(shape)
            self.k.append(k)
            # An odd function of k has no value at the highest frequency of an even number of cells.
            self.odd.append(jnp.where(2 * n.reshape(shape) == cells, 0, k))
            windows.append(window(cells, count).astype(dtype).reshape(shape))
        self.squared = self.k[0] ** 2 + self.k[1] ** 2 + self.k[2] ** 2
        self.inverse = jnp.where(self.squared > 0, 1 / jnp.where(self.squared > 0, self.squared, 1), 0)
        self.window = windows[0] * windows[1] * windows[2]
