"""The box that is simulated, and the state of its particles."""

from __future__ import annotations

import math
from collections.abc import Sequence
from dataclasses import dataclass
from typing import Any, NamedTuple

import numpy as np

from gossamer.checks import whole
from gossamer.cosmos.checks import describe, is_known

SPLIT_CELLS = 1.25  # the force split in cells of the mesh
CUT = 5.5  # the reach of the short-range force in units of the split: `ShortRangeGravity.CUT`
MOST_MESH = 2048  # cells along an axis: their number along three fits an int32 index below it
LEAST_MESH = 14  # cells along an axis, of which the short-range force reaches not quite half

Triple = tuple[int, int, int]


class State(NamedTuple):
    """Particles of equal mass at a time. A pytree.

    Attributes:
        positions_mpc_h: (N, 3) comoving, in [0, size) of the box; the order is that of the initial lattice, its last
            axis fastest.
        momenta_km_s: (N, 3) a^2 dx/dt for comoving x; `a` times the peculiar velocity.
        a: the scale factor, ().
    """

    positions_mpc_h: Any
    momenta_km_s: Any
    a: Any


@dataclass(frozen=True)
class Box:
    """A periodic box, its particles and its mesh; each number for all axes, or one for each axis.

    Args:
        size_mpc_h: comoving size in Mpc/h.
        particles: of the initial lattice along an axis.
        mesh: cells along an axis; twice the particles by default.
        softening_kpc_h: comoving softening in kpc/h (of Plummer's kind: r^2 + softening^2); a 20th of the mean distance
            of particles by default.

    Raises:
        ValueError: a number is out of range, or the short-range force would reach over half of the box.

    Examples:
        >>> box = cosmos.Box(size_mpc_h=100.0, particles=64)
        >>> box.mesh, round(box.cut_mpc_h, 2)
        ((128, 128, 128), 5.37)
    """

    size_mpc_h: Any
    particles: Any
    mesh: Any = None
    softening_kpc_h: float | None = None

    def __post_init__(self) -> None:
        size = _triple("size_mpc_h", self.size_mpc_h, float, 1e-3, 1e6)
        particles = _triple("particles", self.particles, int, 2, MOST_MESH)
        mesh = (
            tuple(2 * n for n in particles)
            if self.mesh is None
            else _triple("mesh", self.mesh, int, LEAST_MESH, MOST_MESH)
        )
        if min(mesh) < LEAST_MESH or max(mesh) > MOST_MESH or math.prod(mesh) >= 2**31:
            raise ValueError(
                f"mesh must be {LEAST_MESH} to {MOST_MESH} cells along an axis, and under 2^31 in all; got {mesh}"
            )
        for name, value in (("size_mpc_h", size), ("particles", particles), ("mesh", mesh)):
            object.__setattr__(self, name, value)
        spacing = (math.prod(size) / math.prod(particles)) ** (1 / 3)
        soft = 50.0 * spacing if self.softening_kpc_h is None else self.softening_kpc_h
        most = 1000 * self.split_mpc_h
        if isinstance(soft, bool) or not isinstance(soft, (int, float)) or not 0 < soft <= most:
            raise ValueError(f"softening_kpc_h must be a number over 0, to {most:g} (the split); got {describe(soft)}")
        object.__setattr__(self, "softening_kpc_h", float(soft))
        if self.cut_mpc_h > min(size) / 2:
            raise ValueError(
                f"the short-range force reaches {self.cut_mpc_h:g} Mpc/h ({CUT * SPLIT_CELLS:g} of the largest mesh "
                f"cells), over half of the box along an axis; got size_mpc_h={size}, mesh={mesh}"
            )

    @property
    def num_particles(self) -> int:
        """In all."""
        return math.prod(self.particles)

    @property
    def volume_mpc3_h3(self) -> float:
        """Comoving volume in (Mpc/h)^3."""
        return math.prod(self.size_mpc_h)

    @property
    def split_mpc_h(self) -> float:
        """The scale that splits the force between mesh and pairs: the mesh's is exp(-(k split)^2) of the whole."""
        return SPLIT_CELLS * max(size / cells for size, cells in zip(self.size_mpc_h, self.mesh, strict=True))

    @property
    def cut_mpc_h(self) -> float:
        """The distance at which the short-range force ends."""
        return CUT * self.split_mpc_h

    @property
    def softening_mpc_h(self) -> float:
        """Comoving softening in Mpc/h."""
        return float(self.softening_kpc_h or 0) / 1000

    @property
    def fundamental_h_mpc(self) -> float:
        """The smallest wavenumber of the longest axis."""
        return 2 * math.pi / max(self.size_mpc_h)


def _triple(name: str, given: Any, kind: type, least: float, most: float) -> tuple[Any, ...]:
    """One number for each axis, from one or three."""
    several = (isinstance(given, Sequence) and not isinstance(given, str)) or np.ndim(given) > 0
    each = list(given) if several else [given] * 3
    numbers = [x if isinstance(x, (float, np.floating)) and kind is float else whole(x) for x in each]
    if len(each) != 3 or not all(x is not None and least <= x <= most for x in numbers):
        word = "an integer" if kind is int else "a number"
        raise ValueError(f"{name} must be {word} from {least:g} to {most:g}, or three; got {describe(given)}")
    return tuple(kind(x) for x in numbers)


def check_state(state: Any, box: Any) -> State:
    """`state`, if it is one of the box.

    Raises:
        ValueError: it is not.
    """
    if not isinstance(box, Box):
        raise ValueError(f"box must be a Box; got {describe(box)}")
    if not isinstance(state, State):
        raise ValueError(f"state must be a State; got {describe(state)}")
    for name, x in (("positions_mpc_h", state.positions_mpc_h), ("momenta_km_s", state.momenta_km_s)):
        if np.shape(x) != (box.num_particles, 3):
            raise ValueError(f"{name} must be ({box.num_particles}, 3) for this box; got {describe(x)}")
    if is_known(state.a) and (np.ndim(state.a) or not 0 < float(state.a) <= 1.5):
        raise ValueError(f"a of the state must be a scale factor from 0 to 1.5; got {describe(state.a)}")
    return state
