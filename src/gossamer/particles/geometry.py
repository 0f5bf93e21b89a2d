"""Geometry of particles: the order along Hilbert's curve, the boxes of runs of it, distances to nearest images.

`xp` is numpy, jax.numpy or torch; positions are lists of one array an axis.
"""

from __future__ import annotations

import math
from collections.abc import Sequence
from typing import Any, NamedTuple

RUN = 32  # consecutive particles along the curve that share a bounding box: a cell
WHOLE = 256  # particles are filled up to a multiple of it by the last one
LEVELS = (8, 32, 32)  # a box of each level of the tree holds so many particles, or boxes of the level before
ROUNDING = 1 + 1e-6  # factor of the half width of a box in the tree, which must not be too small
BITS = {1: 24, 2: 15, 3: 10}  # bits of each axis of the curve, by the number of axes: float32 holds all places
MARGIN = 1 + 1e-5  # margin of the distance between boxes, so that rounding leaves out no pair

EXPONENT = 126  # the largest power of two that float32 holds with its inverse
USUAL = 2.0 ** (EXPONENT - 1)  # factors below it are one number of `factors_of`

Sizes = tuple[float | None, ...]  # the sizes of the box, None along open axes


class Seen(NamedTuple):
    """The pairs that a step visits: c runs of queries with K candidates each."""

    steps: list[Any]  # the d parts of x_candidate - x_query, (c, 32, K)
    s: Any  # r^2
    keep: Any  # within the radius
    item: Any  # (c,): the runs of queries
    place: Any  # (c, K): the candidates, by their places along the curve


def unit_of(radius: float) -> float:
    """The factor of lengths that makes the radius about 1: a power of two, so that nothing is rounded."""
    _, exponent = math.frexp(radius)
    return 2.0**-exponent


def times(x: Any, factor: float) -> Any:
    """An array times a positive number, which may be out of float32's range where the product is in it."""
    if factor == 1:
        return x
    if 1 / USUAL < factor < USUAL:
        return x * factor
    return times_all(x, factors_of(factor))


def factors_of(factor: float) -> tuple[float, ...]:
    """Numbers in float32's range, whose product with an array, one after the other, is that with a positive number."""
    _, exponent = math.frexp(factor)
    parts = 1 + abs(exponent) // EXPONENT
    steps = []
    for _ in range(parts - 1):
        steps.append(2.0 ** (exponent // parts))
        factor /= steps[-1]
    return *steps, factor


def times_all(x: Any, factors: Sequence[Any]) -> Any:
    """An array times one number after the other."""
    for factor in factors:
        x = x * factor
    return x


def hilbert_keys(place: list[Any], bits: int, xp: Any) -> Any:
    """The place along Hilbert's curve of cells of a grid with 2^bits cells along each axis (Skilling 2004).

    Args:
        place: integers in [0, 2^bits), one array an axis.
    """
    x = list(place)
    first, *_ = x
    for level in range(bits - 1, 0, -1):  # undo the rotations
        low = (1 << level) - 1
        for axis, here in enumerate(x):
            high = (here >> level) & 1
            start = x[0]
            swapped = (start ^ here) & low
            x[0] = xp.where(high == 1, start ^ low, start ^ swapped)
            if axis:
                x[axis] = xp.where(high == 1, here, here ^ swapped)
    for axis in range(1, len(x)):  # Gray code
        x[axis] = x[axis] ^ x[axis - 1]
    turn = first * 0
    for level in range(bits - 1, 0, -1):
        turn = xp.where((x[-1] >> level) & 1 == 1, turn ^ ((1 << level) - 1), turn)
    key = first * 0
    for here in x:
        key = (key << 1) | _spread(here ^ turn, bits, len(x))
    return key


def _spread(x: Any, bits: int, distance: int) -> Any:
    """Whole numbers whose bits lie so far apart."""
    size = 1 << (bits - 1).bit_length()
    while distance > 1 and size > 1:
        size //= 2  # of the groups of bits that stay together
        mask = sum(1 << (bit // size * size * distance + bit % size) for bit in range(bits))
        x = (x | (x << ((distance - 1) * size))) & mask
    return x


def wrapped(x: list[Any], box: Sizes, xp: Any) -> list[Any]:
    """Positions in [0, size] along periodic axes; those that are there stay, bit for bit."""
    return [one if size is None else one - size * xp.floor(one / size) for one, size in zip(x, box, strict=True)]


def on_the_grid(x: list[Any], box: Sizes, bits: int, xp: Any) -> list[Any]:
    """The cells of wrapped positions among 2^bits along each axis, as whole numbers of their own type.

    Cells are cubes: the longest axis has 2^bits of them.
    """
    low = [one.min() if size is None else one[0] * 0 for one, size in zip(x, box, strict=True)]
    extents = [
        (one - start).max() if size is None else start + size for one, start, size in zip(x, low, box, strict=True)
    ]
    longest = extents[0]
    for extent in extents[1:]:
        longest = xp.maximum(longest, extent)
    # Equal positions along open axes have an extent of 0, and all get cell 0.
    # An inverse times a power of two has the same bits in every library, some of which divide so themselves.
    scale = xp.where(longest > 0, 1 / xp.where(longest > 0, longest, longest + 1) * 2.0**bits, longest)
    cells = [xp.floor((one - start) * scale) for one, start in zip(x, low, strict=True)]
    # What is no number is in cell 0: as an integer it would be another one on each device.
    return [xp.where(cell > 0, xp.clip(cell, None, 2**bits - 1), 0) for cell in cells]


def nearest(x: Any, y: Any, size: float | None, xp: Any) -> Any:
    """x - y to the nearest image of wrapped positions, as exact as a difference of near numbers.

    Positions on both sides of the seam are moved next to one another before they are subtracted: the one near the
    box's size loses it without rounding.
    """
    if size is None:
        return x - y
    step = x - y
    return xp.where(step > size / 2, x - size, x) - xp.where(step < -size / 2, y - size, y)


def gaps(low: Sequence[Any], high: Sequence[Any], others_low: Sequence[Any], others_high: Sequence[Any], box: Sizes,
         xp: Any) -> Any:  # fmt: skip
    """Lower bounds of the squared distances between boxes: each argument is one array an axis, and they broadcast."""
    total = None
    for a, b, c, d, size in zip(low, high, others_low, others_high, box, strict=True):
        ahead, behind = c - b, a - d  # how far the other begins after this one ends, and before it begins
        if size is not None:  # or its image on the other side
            ahead, behind = xp.maximum(ahead, behind), size - xp.maximum(d, b) + xp.minimum(a, c)
            gap = xp.minimum(xp.clip(ahead, 0, None), xp.clip(behind, 0, None))
        else:
            gap = xp.clip(xp.maximum(ahead, behind), 0, None)
        total = gap * gap if total is None else total + gap * gap
    return total


def apart(s: Any, xp: Any) -> Any:
    """Whether two particles are at different places: a square under the least normal number counts as 0."""
    return s >= xp.finfo(s.dtype).tiny


def squares(steps: Sequence[Any]) -> Any:
    """r^2 of the parts of a difference."""
    first, *rest = steps
    total = first * first
    for step in rest:
        total = total + step * step
    return total


def tree_of(points: Any, xp: Any) -> tuple[Any, ...]:
    """The boxes of clusters of 8 particles, of blocks of 32 clusters and of groups of 32 blocks, for the kernels.

    Args:
        points: (d, T, 32).

    Returns:
        (n, 8) each: the centre (3), 0, the half widths (3), 0.
    """
    d, *_ = points.shape
    low = high = points.reshape(d, -1)
    levels = []
    for size in LEVELS:
        n = -(-low.shape[1] // size)
        if n * size > low.shape[1]:
            more = n * size - low.shape[1]
            low, high = (xp.concatenate([x, xp.broadcast_to(x[:, -1:], (d, more))], 1) for x in (low, high))
        low, high = xp.amin(low.reshape(d, n, size), 2), xp.amax(high.reshape(d, n, size), 2)
        centre = (low + high) / 2
        half = xp.maximum(high - centre, centre - low) * ROUNDING
        none = [low[0] * 0]
        parts = [*list(centre), *none * (4 - d), *list(half), *none * (4 - d)]
        levels.append(xp.stack(parts, 1))
    return tuple(levels)
