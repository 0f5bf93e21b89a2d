"""Which points are near one another: `create_sparsity_mask`, never as an N x N array.

Of numbers that are not known, as under `jit`, it is lists of neighbours, which `gossamer.particles` finds by its cells
on the device. Else it is a pattern that is made on the host: positions in one to three dimensions are sorted into cells
no smaller than the threshold, of which neighbours are looked into; features of any width are compared block by block,
by products of matrices, and again by differences where rounding could decide.
"""

from __future__ import annotations

import importlib
import math
import sys
from collections.abc import Iterator, Sequence
from fractions import Fraction
from itertools import product
from typing import Any, NamedTuple

import jax
import jax.numpy as jnp
import numpy as np
from jax import Array

from gossamer.checks import real, sized, whole
from gossamer.jax import compat
from gossamer.jax.api import attention
from gossamer.jax.arguments import describe
from gossamer.jax.choice import TILE, PlacedCSR
from gossamer.patterns import CSR
from gossamer.patterns.csr import MOST_PAIRS
from gossamer.patterns.grid import ranges

PAIRS = 2**22  # looked into at a time
MARGIN = 1 + 1e-6  # of a cell over the threshold: rounding may not move two near points two cells apart
ROUNDINGS = 64  # of a square of a distance and dimension, in float64: more than any of the sums below makes
EPS, TINY = np.finfo(float).eps, np.finfo(float).tiny
DEVIATIONS = 6  # of a count in a sample, over which hardly any is
FEWEST_CELLS = 3  # of a periodic axis: with fewer, neighbours on both sides are one
CELL_AXES = 3  # the most dimensions that have cells
PARTICLES = "gossamer.particles"  # stands above this room, and is imported where it is asked for
OF_LISTS = ("scale", "return_residual")  # the options of attention over lists of neighbours


class Near(NamedTuple):
    """Pairs of points whose distance may be within a limit."""

    rows: np.ndarray
    columns: np.ndarray
    squares: np.ndarray  # of their distances, about
    errors: np.ndarray  # of these squares, at most


def create_sparsity_mask(
    x: Any, threshold: float | None = None, box: float | Sequence[float | None] | None = None, *,
    share: float | None = None, capacity: int | None = None,
) -> Any:  # fmt: skip
    """Which points attend to which: pairs whose Euclidean distance is at most the threshold, and each to itself.

    Exactly one of `threshold` and `share` is given. A share means the least threshold with which at least
    `share * N**2` of all N**2 pairs (i, j) are kept, those of points with themselves among them. Pairs at exactly that
    distance are all kept, so that equal distances may make it more; a share of at most 1 / N keeps each point with
    itself, and with points at the same place.

    Of numbers that are known the mask is made on the host, in float64, as a CSR pattern: for `sparse_attention`,
    `attention` and `prepare`, and to be joined with others by `&` and `|`. Memory is that of the pairs that are kept.

    Under `jit`, or wherever a capacity is given, it is a `gossamer.particles.Neighbors`, found by cells on the device
    from float32 (or float64) positions: for `sparse_attention`. Where a point has more neighbours than the capacity,
    `mask.overflow` is true, and its attention is NaN.

    Args:
        x: (N, d) positions or features of numbers that are known, d of any size; with a capacity positions, d from 1
            to 3.
        threshold: at least 0; with a capacity over 0, and at most half of a periodic box.
        share: over 0 and at most 1, of numbers that are known and without a capacity.
        box: the size of a periodic box, one for all axes or one for each, None for an axis that is not periodic:
            distances are to the nearest image.
        capacity: how many neighbours the list of a point has room for, itself among them; over N it is N.

    Raises:
        ValueError: an argument is wrong, both or neither of threshold and share are given, or the numbers of x are not
            known and no capacity is given.

    Examples:
        >>> features = jax.random.normal(jax.random.key(1), (1000, 64))
        >>> nearest = gsj.create_sparsity_mask(features, share=0.01)
        >>> len(nearest.indices)
        10000
        >>> x = jax.random.uniform(jax.random.key(0), (1000, 3))
        >>> mask = gsj.create_sparsity_mask(x, threshold=0.1, box=1.0)
        >>> mask.num_keys
        1000
        >>> q = jnp.ones((1000, 64))
        >>> gsj.sparse_attention(q, q, q, mask).shape
        (1000, 64)
        >>> @jax.jit
        ... def step(x, q):
        ...     mask = gsj.create_sparsity_mask(x, threshold=0.1, box=1.0, capacity=24)
        ...     return gsj.sparse_attention(q, q, q, mask), mask.overflow
        >>> out, overflow = step(x, q)
        >>> bool(overflow)
        False
    """
    if (threshold is None) == (share is None):
        given = "neither" if share is None else f"threshold={describe(threshold)} and share={describe(share)}"
        raise ValueError(f"exactly one of threshold and share must be given; got {given}")
    if capacity is not None or compat.is_abstract(x):
        if share is not None:
            raise ValueError(
                f"share must be left out under jit and with a capacity, where a threshold is needed: the distances are "
                f"ranked on the host; got {describe(share)}"
            )
        return _lists(x, threshold, box, capacity)
    points = np.asarray(x)
    if points.ndim != 2 or not points.shape[1] or (points.dtype.kind not in "fiu" and points.dtype.name != "bfloat16"):
        raise ValueError(f"x must be an array (N, d) of real numbers; got {describe(x)}")
    points = points.astype(np.float64)
    if not np.isfinite(points).all():
        raise ValueError("x must hold finite numbers")
    N, d = points.shape
    limit, part = real(threshold), real(share)
    if share is None and (limit is None or not 0 <= limit < np.inf):
        raise ValueError(f"threshold must be a finite number of at least 0; got {describe(threshold)}")
    if threshold is None and (part is None or not 0 < part <= 1):
        raise ValueError(f"share must be a number over 0 and at most 1; got {describe(share)}")
    sizes = _box(box, d)
    if not N:
        return CSR(np.zeros(1, np.int64), np.zeros(0, np.int64), 0)
    wanted = 0
    if part is not None:
        wanted = math.ceil(Fraction(repr(part)) * N * N)  # as it is written: 0.01 of 1000 * 1000 is 10000
        if wanted > MOST_PAIRS:
            raise ValueError(f"share keeps over {MOST_PAIRS} pairs, which no list of pairs holds; got {share}")
    with np.errstate(over="ignore", invalid="ignore"):  # of numbers too large to be squared
        pairs = _nearest(points, wanted, sizes) if limit is None else _within(points, limit, sizes)
    rows, columns = np.divmod(np.sort(pairs), N)
    indptr = np.concatenate([[0], np.cumsum(np.bincount(rows, minlength=N))])
    return PlacedCSR(indptr, columns, _order(points, sizes)) if d <= CELL_AXES else CSR(indptr, columns, N)


def sparse_attention(q: Array, k: Array, v: Array, mask: Any, **options: Any) -> Any:
    """Attention over the pairs of a mask that `create_sparsity_mask` made: `attention` by its other name.

    Args:
        q: (N, D), (N, heads, D) or (B, N, heads, D); k and v likewise, of as many heads or a divisor of them.
        mask: what `create_sparsity_mask` gives, or anything that `attention` takes as its pattern.
        options: those of `attention`; over lists of neighbours, which `particles.neighbor_attention` computes, scale
            and return_residual.

    Raises:
        ValueError: an argument is wrong.

    Examples:
        >>> q, k, v = (jax.random.normal(jax.random.key(i), (256, 64)) for i in range(3))
        >>> mask = gsj.create_sparsity_mask(q, threshold=9.0)
        >>> gsj.sparse_attention(q, k, v, mask).shape
        (256, 64)
    """
    particles = sys.modules.get(PARTICLES)
    if particles is None or not isinstance(mask, particles.Neighbors):
        return attention(q, k, v, mask, **options)
    others = sorted(set(options) - set(OF_LISTS))
    if others:
        raise ValueError(f"over lists of neighbours the options are {' and '.join(OF_LISTS)}; got {', '.join(others)}")

    residual, scale = options.get("return_residual", False), options.get("scale")
    if not isinstance(residual, bool):
        raise ValueError(f"return_residual must be True or False; got {describe(residual)}")
    factor = real(scale)
    if factor is not None and factor <= 0:  # lists take positive ones: the rest goes to q
        q, options = q * np.sign(factor).astype(q.dtype), options | {"scale": abs(factor) or 1.0}

    def attend(q: Array, k: Array, v: Array) -> Any:
        if q.ndim == 3 == k.ndim == v.ndim and 0 < k.shape[1] < q.shape[1] and q.shape[1] % k.shape[1] == 0:
            k, v = (jnp.repeat(x, q.shape[1] // k.shape[1], axis=1) for x in (k, v))
        return particles.neighbor_attention(q, k, v, mask, **options)

    return jax.vmap(attend)(q, k, v) if jnp.ndim(q) == 4 else attend(q, k, v)


def _lists(x: Any, threshold: Any, box: Any, capacity: int | None) -> Any:
    """Lists of neighbours of points whose numbers need not be known."""
    if capacity is None:
        raise ValueError(
            "x must be of numbers that are known: make the mask outside of jit, or give the capacity of lists, how "
            "many neighbours a point has at most"
        )
    x = jnp.asarray(x)
    if x.ndim != 2 or not 1 <= x.shape[1] <= CELL_AXES or not jnp.issubdtype(x.dtype, jnp.floating):
        raise ValueError(
            f"x must be positions (N, d), d from 1 to {CELL_AXES}, where lists are made; got {describe(x)}"
        )
    limit = real(threshold)
    if limit is None or not 0 < limit < np.inf:
        raise ValueError(f"threshold must be a finite number over 0 where lists are made; got {describe(threshold)}")
    sizes = _box(box, x.shape[1])
    if limit > sizes.min() / 2:
        raise ValueError(f"threshold must be at most half the box, {sizes.min() / 2}; got {limit}")
    room = whole(capacity)
    if room is not None:  # no point has more neighbours than there are points
        capacity = min(room, len(x))
    return importlib.import_module(PARTICLES).Neighbors.allocate(x, limit, box, capacity)


def _box(box: Any, d: int) -> np.ndarray:
    """The size of the box along each axis, infinite where it is not periodic."""
    given = list(box) if sized(box) else [box] * d
    sizes = [np.inf if size is None else real(size) for size in given]
    right = len(sizes) == d and all(
        size is not None and (one is None or 0 < size < np.inf) for one, size in zip(given, sizes, strict=True)
    )
    if not right:
        raise ValueError(
            f"box must be a positive number, {d} of them or None, None for an axis that is not periodic; "
            f"got {describe(box)}"
        )
    return np.asarray(sizes)


def _cells(points: np.ndarray, limit: float, sizes: np.ndarray) -> tuple[np.ndarray, np.ndarray, np.ndarray]:
    """(first corner, size and number of cells) along each axis; about as many cells as points at most."""
    N, d = points.shape
    low = np.where(np.isfinite(sizes), 0.0, points.min(0))
    extent = np.where(np.isfinite(sizes), sizes, np.maximum(points.max(0) - low, TINY))
    most = max(1.0, np.ceil(2 * N ** (1 / d)))
    number = np.floor(np.minimum(extent / max(limit * MARGIN, TINY), most)).astype(np.int64)
    number = np.maximum(number, 1)
    number[np.isfinite(sizes) & (number < FEWEST_CELLS)] = 1
    return low, extent / number, number


def _has_cells(points: np.ndarray, limit: float, sizes: np.ndarray) -> bool:
    """Whether cells leave out most pairs."""
    _, d = points.shape
    if d > CELL_AXES:
        return False
    _, _, number = _cells(points, limit, sizes)
    return bool((number > FEWEST_CELLS).any())


def _order(points: np.ndarray, sizes: np.ndarray) -> np.ndarray:
    """Points halved along their longest axis again and again: near ones are near in this order."""
    periodic = np.isfinite(sizes)
    points = np.where(periodic, np.mod(points, np.where(periodic, sizes, 1.0)), points)
    parts, found = [np.arange(len(points))], []
    while parts:
        part = parts.pop()
        if len(part) <= TILE:
            found.append(part)
            continue
        some = points[part]
        half = -(-len(part) // (2 * TILE)) * TILE  # whole groups of rows
        cut = np.argpartition(some[:, np.argmax(some.max(0) - some.min(0))], half)
        parts += [part[cut[half:]], part[cut[:half]]]
    return np.concatenate(found)


def _near(points: np.ndarray, limit: float, sizes: np.ndarray) -> Iterator[Near]:
    """All pairs within a limit, and a few whose distance rounding leaves open."""
    by = _by_cells if _has_cells(points, limit, sizes) else _by_blocks
    return by(points, limit, sizes)


def _within(points: np.ndarray, limit: float, sizes: np.ndarray) -> np.ndarray:
    """The pairs at a distance of at most a limit, row * N + column."""
    found, total = [], 0
    for near in _near(points, limit, sizes):
        kept = near.squares < limit * limit - near.errors
        unsure = np.flatnonzero(~kept)
        kept[unsure] = _distances(points, near.rows[unsure], near.columns[unsure], sizes) <= limit
        found.append(near.rows[kept] * len(points) + near.columns[kept])
        total += len(found[-1])
        if total > MOST_PAIRS:
            raise ValueError(f"threshold keeps over {MOST_PAIRS} pairs, which no list of pairs holds; got {limit}")
    return np.concatenate(found)


def _nearest(points: np.ndarray, wanted: int, sizes: np.ndarray) -> np.ndarray:
    """The pairs within the least distance that keeps as many as wanted, row * N + column."""
    N, rank, surely, limit = len(points), wanted, 0, 0.0
    if wanted <= N:
        return _within(points, 0.0, sizes)
    while surely < wanted and limit < np.inf:
        limit = _likely(points, (rank - N) / (N * N - N), sizes)
        every = list(_near(points, limit, sizes))
        surely = sum(int((near.squares < limit * limit - near.errors).sum()) for near in every)
        rank *= 2
    rows, columns, squares, errors = (np.concatenate(parts) for parts in zip(*every, strict=True))
    # Each square is right within the error, and so is the one of that rank.
    about, error = np.partition(squares, wanted - 1)[wanted - 1], errors.max()
    kept = squares < about - 2 * error
    unsure = np.flatnonzero(~(kept | (squares > about + 2 * error)))
    distances = _distances(points, rows[unsure], columns[unsure], sizes)
    place = wanted - 1 - int(kept.sum())
    kept[unsure] = distances <= np.partition(distances, place)[place]
    found: np.ndarray = rows[kept] * N + columns[kept]
    return found


def _likely(points: np.ndarray, share: float, sizes: np.ndarray) -> float:
    """A distance that most likely keeps a share of the pairs of different points, and not many more: of a sample."""
    N, d = points.shape
    rng = np.random.default_rng(0)
    rows = rng.integers(N, size=-(-PAIRS // d))
    columns = (rows + rng.integers(1, N, size=len(rows))) % N
    place = share * len(rows)
    place = math.ceil(place + DEVIATIONS * (place**0.5 + 2))
    if place >= len(rows):
        return float("inf")
    # Rounding may not leave open whether those at this very distance are within.
    return float(np.partition(_distances(points, rows, columns, sizes), place)[place]) * MARGIN


def _by_cells(points: np.ndarray, limit: float, sizes: np.ndarray) -> Iterator[Near]:
    """Pairs of points in cells beside one another."""
    _, d = points.shape
    low, size, number = _cells(points, limit, sizes)
    periodic = np.isfinite(sizes)
    inside = np.where(periodic, np.mod(points, np.where(periodic, sizes, 1.0)), points)
    cell = np.minimum(np.floor((inside - low) / size).astype(np.int64), number - 1)
    flat = np.ravel_multi_index(tuple(cell.T), tuple(number))
    order = np.argsort(flat, kind="stable")
    ends = np.cumsum(np.bincount(flat, minlength=int(number.prod())))
    starts = np.concatenate([[0], ends[:-1]])
    steps = [range(-1, 2) if n > 1 else range(1) for n in number]
    for step in product(*steps):
        beside = cell + np.asarray(step)
        there = (periodic | ((beside >= 0) & (beside < number))).all(1)
        at = np.ravel_multi_index(tuple(np.mod(beside, number).T), tuple(number))
        counts = np.where(there, ends[at] - starts[at], 0)
        for rows in _chunks(counts):
            which, places = ranges(starts[at[rows]], starts[at[rows]] + counts[rows])
            row, column = rows[which], order[places]
            squares = _squares(points, row, column, sizes)
            errors = ROUNDINGS * d * EPS * squares + TINY
            kept = ~(squares > limit * limit + errors)
            yield Near(row[kept], column[kept], squares[kept], errors[kept])


def _chunks(counts: np.ndarray) -> Iterator[np.ndarray]:
    """Rows whose counts together are about PAIRS at most."""
    total = np.cumsum(counts)
    cuts = np.searchsorted(total, np.arange(PAIRS, int(total[-1]) + PAIRS, PAIRS), side="right")
    for rows in np.split(np.arange(len(counts)), np.unique(cuts)):
        if len(rows):
            yield rows


def _by_blocks(points: np.ndarray, limit: float, sizes: np.ndarray) -> Iterator[Near]:
    """Pairs of all points, a block of rows with a block of columns at a time."""
    N, d = points.shape
    edge = int(PAIRS**0.5)
    centred = points - points.mean(0)
    squares = (centred * centred).sum(1)
    for first, second in product(range(0, N, edge), range(0, N, edge)):
        rows, columns = slice(first, first + edge), slice(second, second + edge)
        if np.isfinite(sizes).any():
            distance = _folded_squares(points[rows], points[columns], sizes)
            rounding = ROUNDINGS * d * EPS * distance + TINY
        else:
            both = squares[rows, None] + squares[columns]
            distance = both - 2 * centred[rows] @ centred[columns].T
            rounding = ROUNDINGS * d * EPS * both + TINY
        row, column = np.nonzero(~(distance > limit * limit + rounding))
        yield Near(row + first, column + second, distance[row, column], rounding[row, column])


def _folded_squares(x: np.ndarray, y: np.ndarray, sizes: np.ndarray) -> np.ndarray:
    """Squares of the distances to nearest images, (rows, columns)."""
    total = np.zeros((len(x), len(y)))
    for axis, size in enumerate(sizes):
        step = x[:, None, axis] - y[:, axis]
        if np.isfinite(size):
            step -= size * np.round(step / size)
        total += step * step
    return total


def _distances(points: np.ndarray, rows: np.ndarray, columns: np.ndarray, sizes: np.ndarray) -> np.ndarray:
    """Distances of pairs to the nearest image, as they are defined; of few dimensions, or some pairs at a time."""
    _, d = points.shape
    every = (
        _squares(points, rows[at], columns[at], sizes)
        for at in np.array_split(np.arange(len(rows)), -(-len(rows) * d // PAIRS) or 1)
    )
    return np.sqrt(np.concatenate(list(every)))


def _squares(points: np.ndarray, rows: np.ndarray, columns: np.ndarray, sizes: np.ndarray) -> np.ndarray:
    """Their squares."""
    step = points[rows] - points[columns]
    periodic = np.isfinite(sizes)
    if periodic.any():
        size = np.where(periodic, sizes, 1.0)
        step -= np.where(periodic, size * np.round(step / size), 0.0)
    found: np.ndarray = (step * step).sum(1)
    return found
