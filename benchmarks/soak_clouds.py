"""Random clouds of particles: where they are, the box around them, a radius.

For `soak_particles.py` and `soak_neighbors.py`. A cloud is made in a unit of length that is a power of two: positions,
box and radius are multiplied by it, all numbers else are near 1.
"""

from __future__ import annotations

import math
import random
from typing import Any, NamedTuple

import numpy as np
import torch
from soak_arguments import laid_out
from soak_pairs import Precision, Sizes
from torch import Tensor

KINDS = (
    "uniform", "uniform", "uniform", "clustered", "clustered", "coincident", "one place", "near", "near", "outside",
    "lattice", "lattice", "line", "seam", "offset", "two",
)  # fmt: skip
TYPES = (torch.float32,) * 6 + (torch.float64,) * 3 + (torch.float16, torch.bfloat16)
PLACES = (
    "plain", "plain", "plain", "within NaN", "unaligned", "columns", "every other row", "part of a row",
    "features first",
)  # fmt: skip
GRID = 16  # points of a lattice in a unit


class Cloud(NamedTuple):
    """N particles in d dimensions, but for the numbers, which a seed makes."""

    N: int
    d: int
    dtype: torch.dtype
    kind: str
    box: Sizes
    boxed: str  # how the box is given
    radius: float  # before it is moved to where no pair has that distance, in units
    numbers: str  # how the radius is given
    exponent: int  # the unit of length is 2**exponent
    place: str  # how positions lie in memory
    bad: float | None  # a number that one position has

    @property
    def unit(self) -> float:
        return 2.0**self.exponent

    @property
    def exact(self) -> bool:
        """Whether differences and their squares are numbers of the type."""
        whole = all(size is None or (size * GRID).is_integer() for size in self.box)
        return self.kind == "lattice" and whole and self.dtype in (torch.float32, torch.float64)


class Made(NamedTuple):
    """A cloud's arguments."""

    x: Tensor  # (N, d), as it lies in memory
    box: Any
    sizes: Sizes  # of the box, as floats
    radius: float


def cloud(r: random.Random, sizes: tuple[int, ...], exponents: int) -> Cloud:
    """A cloud of one of these sizes, in units of up to 2 to the power of `exponents`."""
    d, kind = r.choice([1, 2, 2, 3, 3, 3]), r.choice(KINDS)
    lengths = (1.0, 1.0, 2.0, 1.5, 0.9, 1.3, 3.0)
    form = r.choice(["none", "none", "one", "one", "one", "each", "mixed", "mixed"])
    one = r.choice(lengths)
    box: Sizes = (None,) * d if form == "none" else (one,) * d
    if form in ("each", "mixed"):
        box = tuple(None if form == "mixed" and r.random() < 0.5 else r.choice(lengths) for _ in range(d))
    boxed = r.choice(["tuple", "list"] if form in ("each", "mixed") else ["number", "number", "tuple", "whole"])
    shortest = min((size for size in box if size is not None), default=2.0)
    radius = shortest / 2 * r.choice([1.0, r.random() ** 2, r.uniform(0.3, 1.0), 10 ** r.uniform(-3, -0.5)])
    radius = max(radius, 1e-4)
    if kind == "lattice":
        radius = max(1, math.floor(radius * GRID)) / GRID
    dtype = r.choice(TYPES)
    exponent = 0 if r.random() < 0.5 or dtype in (torch.float16, torch.bfloat16) else r.randint(-exponents, exponents)
    return Cloud(
        r.choice(sizes), d, dtype, kind, box, boxed, radius, r.choice(["float", "float", "numpy", "float32"]),
        exponent, r.choice(PLACES), r.choice([math.nan, math.inf, -math.inf]) if r.random() < 0.03 else None,
    )  # fmt: skip


def make(c: Cloud, rng: np.random.Generator, device: str, reach: float = 1.0) -> Made:
    """The arguments of a cloud; no pair has a distance of `reach` radii, or nearly so, where that can be."""
    places = torch.as_tensor(_places(c, rng)).to(c.dtype)
    reached = _apart(places.double().numpy(), c.box, c.radius * reach) if not c.exact else c.radius * reach
    radius = reached / reach
    shortest = min((size for size in c.box if size is not None), default=math.inf)
    radius = min(radius, shortest / 2)
    if c.bad is not None and c.N:
        places[rng.integers(c.N), rng.integers(c.d)] = c.bad
    x = laid_out(c.place, (places * c.unit).to(device)[None, None])[0, 0]
    given: Any = radius * c.unit
    if c.numbers == "float32":
        given = np.float32(given)
        radius = float(given) / c.unit
        if radius > shortest / 2:
            given = np.nextafter(given, np.float32(0))
    elif c.numbers == "numpy":
        given = np.float64(given)
    sizes = tuple(None if size is None else size * c.unit for size in c.box)
    box: Any = list(sizes) if c.boxed == "list" else sizes
    if c.boxed in ("number", "whole"):
        box, *_ = sizes
        if c.boxed == "whole" and box is not None and box.is_integer():
            box = int(box)
    return Made(x, box, sizes, given)


def precision(c: Cloud, frame: bool = False) -> Precision:
    """What sums over a cloud are computed with; `frame` is that of `Precision`."""
    kept = torch.finfo(torch.float64 if c.dtype == torch.float64 else torch.float32)
    return Precision(kept.eps, kept.smallest_normal, c.exact, frame)


def _places(c: Cloud, rng: np.random.Generator) -> np.ndarray:
    """Positions in units, in float64."""
    N, d = c.N, c.d
    sizes = np.array([1.0 if size is None else size for size in c.box])
    x: np.ndarray = rng.random((N, d)) * sizes
    if c.kind == "clustered":
        x = 0.5 + 0.2 * rng.standard_normal((N, d)) ** 3
    elif c.kind == "coincident":
        x = x[rng.integers(0, max(1, N // 5), N)] if N else x
    elif c.kind == "one place":
        x[:] = 0.3
    elif c.kind == "near":
        x = x[rng.integers(0, max(1, N // 3), N)] if N else x
        x = x + 10.0 ** rng.uniform(-9, -3) * rng.standard_normal((N, d))
    elif c.kind == "outside":
        x = x + rng.integers(-3, 4, (N, d)) * sizes
    elif c.kind == "lattice":
        x = rng.integers(0, np.ceil(GRID * sizes).astype(int), (N, d)) / GRID
    elif c.kind == "line":
        x[:, 1:] = x[:1, 1:]
    elif c.kind == "seam":
        near = 10.0 ** rng.uniform(-9, -1, (N, d)) * rng.choice([-1, 1, 0], (N, d))
        x = rng.choice([0, 1], (N, d)) * sizes + near
    elif c.kind == "offset":
        x = 100 + 0.01 * x
    elif c.kind == "two":
        x = 0.1 * x + rng.integers(0, 2, (N, 1)) * np.array([1e3 if size is None else size / 2 for size in c.box])
    return x


def _apart(x: np.ndarray, box: Sizes, radius: float) -> float:
    """A radius near one, in the widest gap between the distances of pairs."""
    s = np.zeros((len(x), len(x)))
    for axis, size in enumerate(box):
        step = x[None, :, axis] - x[:, None, axis]
        s += (step if size is None else step - size * np.round(step / size)) ** 2
    r = np.sqrt(s)
    r = np.unique(np.concatenate([r[(r > 0.8 * radius) & (r < radius)], [0.8 * radius, radius]]))
    at = int(np.argmax(np.diff(r)))
    return float(r[at] + r[at + 1]) / 2
