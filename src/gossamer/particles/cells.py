"""Particles in the order of Hilbert's curve, and the boxes of runs of them: `Cells`."""

from __future__ import annotations

import math
from collections.abc import Sequence
from dataclasses import dataclass, replace
from typing import Any, NamedTuple

from gossamer.checks import show, sized
from gossamer.particles.edges import call_of, edge_of
from gossamer.particles.geometry import BITS, EXPONENT, Sizes, times, unit_of
from gossamer.particles.laws import positive

FAR_SMALLER = 2.0**16  # a radius is far smaller by this factor
LARGEST = 2.0**120  # the largest periodic box, in radii: float32 holds its multiples


class Runs(NamedTuple):
    """The particles in order, T runs of 32, filled up with the last particle. Constants."""

    order: Any  # (N,) int32: the particle at each place
    points: Any  # (d, T, 32): positions in the unit of the cells, within the box along periodic axes
    low: Any  # (d, T): the boxes of the runs
    high: Any
    tree: tuple[Any, ...]  # the boxes that kernels descend: `geometry.tree_of`
    known: Any = None  # of torch (1,): 1, or NaN if any position is not finite


@dataclass(frozen=True, eq=False)
class Cells:
    """The positions of particles, sorted for sums over neighbours within a radius: made by `Cells.build`.

    A cell is a run of 32 particles along Hilbert's curve with the box around them. There are N / 32 of them however
    particles are distributed, so nothing has a capacity and nothing overflows.

    In JAX it is a pytree, made under jit as well as outside, and gradients of sums reach positions through it.

    Everything is computed in a unit of length that is near the radius, a power of two: so results are alike, to the
    bit, whatever unit positions are given in.
    """

    x: Any  # (N, d) as given
    runs: Runs
    radius: float
    box: Sizes  # of each axis; None along those that are open

    @classmethod
    def build(cls, x: Any, radius: float, box: float | Sequence[float | None] | None = None) -> Cells:
        """Sort particles.

        Args:
            x: (N, d) positions in 1 to 3 dimensions, of jax or torch, float32 or float64 (others become float32); along
                periodic axes they are taken modulo the box.
            radius: within which neighbours are, at most half the box along periodic axes: a number, or an array
                without dimensions, that is known before anything is compiled.
            box: the size of a periodic box, one for all axes or one for each, None for an axis that is open; likewise.

        Raises:
            TypeError: x is no array of jax or torch, or a number is of another type.
            ValueError: a shape, the radius or the box is wrong.

        Examples:
            >>> x = jax.random.uniform(jax.random.key(0), (1000, 3))
            >>> cells = gp.Cells.build(x, radius=0.1, box=1.0)
            >>> cells.num_particles
            1000
            >>> gp.radial_sum(cells, 1.0, gp.Gaussian(0.03)).shape
            (1000,)
        """
        edge = edge_of(x)
        made = call_of(edge.key_of("cells", (x,), (radius, box)), lambda: _Built.of(edge, x, radius, box))
        return cls(x, made.runs_of(x), made.radius, made.box)

    @property
    def num_particles(self) -> int:
        N, _ = self.x.shape
        return int(N)

    @property
    def order(self) -> Any:
        """(N,) int32: the particle at each place along the curve."""
        return self.runs.order

    @property
    def unit(self) -> float:
        """The factor of lengths in `runs`: a power of two."""
        return unit_of(self.radius)

    @property
    def reach(self) -> float:
        """The radius in that unit."""
        return self.radius * self.unit

    @property
    def sizes(self) -> Sizes:
        """The box in that unit."""
        return times_unit(self.box, self.unit)

    def within(self, radius: float) -> Cells:
        """The same cells for sums that are 0 beyond a radius, in a unit near it if that is far smaller."""
        if radius * FAR_SMALLER >= self.radius:
            return self
        held("the radius of the function", radius, self.x)
        made, runs = replace(self, radius=radius), self.runs
        low, high, points, *tree = (
            times(x, made.unit / self.unit) for x in (runs.low, runs.high, runs.points, *runs.tree)
        )
        return replace(made, runs=runs._replace(points=points, low=low, high=high, tree=tuple(tree)))


class _Built(NamedTuple):
    """What `Cells.build` has checked, and how runs are made of such positions."""

    runs_of: Any
    radius: float
    box: Sizes

    @classmethod
    def of(cls, edge: Any, x: Any, radius: Any, box: Any) -> _Built:
        if len(x.shape) != 2 or x.shape[1] not in BITS or not edge.is_real(x):
            raise ValueError(
                f"x must be an array (N, d) of real numbers, d from 1 to 3; got {tuple(x.shape)} {x.dtype}"
            )
        _, d = x.shape
        sizes, radius = box_sizes(box, d), held("radius", positive("radius", radius), x)
        shortest = min((size for size in sizes if size is not None), default=math.inf)
        if radius > shortest / 2:
            raise ValueError(f"radius must be at most half the box, {shortest / 2}; got {radius}")
        unit = unit_of(radius)
        scaled = times_unit(sizes, unit)
        if any(size is not None and size > LARGEST for size in scaled):
            raise ValueError(f"box must be at most {LARGEST:.2g} times the radius, {radius}; got {box!r}")
        return cls(edge.sorting(x, scaled, unit), radius, sizes)


def held(name: str, radius: float, x: Any) -> float:
    """A radius whose powers are in the range of the type that positions are computed in."""
    most = 2.0 ** (4 * EXPONENT if str(x.dtype).endswith("float64") else EXPONENT - 1)
    if not 1 / most <= radius <= most:
        raise ValueError(f"{name} must be from {1 / most:.2g} to {most:.2g} for positions of {x.dtype}; got {radius}")
    return radius


def times_unit(sizes: Sizes, unit: float) -> Sizes:
    return tuple(None if size is None else size * unit for size in sizes)


def box_sizes(box: Any, d: int) -> Sizes:
    """The size of the box along each axis, None where it is open."""
    given = list(box) if sized(box) else [box] * d
    if len(given) != d:
        raise ValueError(f"box must be a positive number, {d} of them, or None; got {show(box)}")
    return tuple(None if size is None else positive("box", size) for size in given)
