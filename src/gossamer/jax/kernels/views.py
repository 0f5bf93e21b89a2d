"""Views of flat memory, by offset, shape and strides, as XLA's own operations read and write them."""

from __future__ import annotations

from typing import NamedTuple

import jax.numpy as jnp
import numpy as np
from jax import Array

from gossamer.kernels.launch import Shape


class Place(NamedTuple):
    """Elements of flat memory."""

    shape: Shape
    strides: Shape
    offset: int = 0


class Slices(NamedTuple):
    """The same as slices of the memory in another shape, whose dimensions go from the largest stride to the least."""

    shape: Shape  # of the memory
    slices: tuple[slice, ...]
    order: tuple[int, ...]  # of the view, in which its dimensions lie there


def read(memory: Array, place: Place) -> Array:
    """The elements of a view, in its shape."""
    found = _slices(memory.size, place)
    if found is None:
        return memory.reshape(-1)[_indices(place)]
    inverse = np.argsort(found.order)
    part = memory.reshape(found.shape)[found.slices]
    return part.reshape([place.shape[at] for at in found.order]).transpose(inverse)


def written(memory: Array, place: Place, value: Array) -> Array:
    """The memory, flat, with the elements of a view replaced."""
    found, flat = _slices(memory.size, place), memory.reshape(-1)
    if found is None:
        return flat.at[_indices(place)].set(value)
    part = value.transpose(found.order)
    whole = memory.reshape(found.shape)
    sizes = [s.stop - s.start for s in found.slices]
    if list(found.shape) == sizes:
        return part.reshape(-1)
    return whole.at[found.slices].set(part.reshape(sizes)).reshape(-1)


def _indices(place: Place) -> Array:
    """Where each element is."""
    at = jnp.asarray(place.offset, jnp.int32)
    for size, stride in zip(place.shape, place.strides, strict=True):
        at = at[..., None] + jnp.arange(size, dtype=jnp.int32) * stride
    return at


def _slices(size: int, place: Place) -> Slices | None:
    """A view as slices, where it is some of memory of `size` elements in a row-major shape."""
    order = tuple(int(at) for at in np.argsort([-s for s in place.strides], kind="stable"))
    shape: list[int] = []
    slices: list[slice] = []
    above, offset = size, place.offset
    for at in order:
        n, stride = place.shape[at], place.strides[at]
        if n == 1:  # lies anywhere
            shape.append(1)
            slices.append(slice(0, 1))
            continue
        if stride < 1 or above % stride:
            return None
        start, offset = divmod(offset, stride)
        shape.append(above // stride)
        slices.append(slice(start, start + n))
        if start + n > above // stride:
            return None
        above = stride
    if above > 1:  # elements between those of the last dimension
        shape.append(above)
        slices.append(slice(offset, offset + 1))
    elif offset:
        return None
    return Slices(tuple(shape), tuple(slices), order)
