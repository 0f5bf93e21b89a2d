"""Lists of neighbours: `Neighbors`."""

from __future__ import annotations

from collections.abc import Sequence
from dataclasses import dataclass
from typing import Any

from gossamer.checks import integer
from gossamer.layouts.base import Array
from gossamer.particles.cells import Cells
from gossamer.particles.edges import edge_of
from gossamer.particles.groups import Groups, room_of

ROOM = 1.25  # lists have room for so many times the neighbours that there are
LIKELY, FEW = 8, 512  # columns of a group with a given capacity: so many times that, and so many more
STEP = 8  # capacities are multiples of it; larger ones of 1/16 to 1/8 of themselves, so that fewer programs serve all


@dataclass(frozen=True, eq=False)
class Neighbors:
    """Every particle's neighbours within a radius, itself included, in lists of one capacity: made by `allocate`.

    A list that its capacity is too small for is never used in silence: `overflow` is true then, and what is computed
    of such a particle is NaN. In JAX it is a pytree.
    """

    cells: Cells
    places: Array  # (N, M) int32: the places of neighbours along the curve, by the particle's own; N for none
    sizes: Array  # (N,) int32: how many neighbours there are, by place
    groups: Groups | None = None  # lists that 64 of them share, where kernels multiply

    @classmethod
    def allocate(
        cls, x: Any, radius: float, box: float | Sequence[float | None] | None = None, capacity: int | None = None
    ) -> Neighbors:
        """Lists of particles, with room for a quarter more than the longest has.

        Args:
            x, radius, box: as `Cells.build` takes them.
            capacity: M, at least 0; needed where x is not known, as under jit.

        Raises:
            TypeError, ValueError: an argument is wrong.

        Examples:
            >>> x = jax.random.uniform(jax.random.key(0), (200, 3))
            >>> neighbors = gp.Neighbors.allocate(x, radius=0.2, box=1.0)
            >>> neighbors = jax.jit(lambda n, x: n.update(x))(neighbors, x + 0.01)
            >>> bool(neighbors.overflow)
            False
            >>> int(neighbors.indices[0, 0]) in range(200)
            True
        """
        cells = Cells.build(x, radius, box)
        room = None
        if capacity is None:
            most = edge_of(x).most_neighbors(cells)
            capacity = capacity_of(most.neighbors)
            room = room_of(most.columns * ROOM) if most.columns else None
            if most.lists is not None:
                places, sizes = most.lists
                _, most_of_all = places.shape
                if capacity <= most_of_all:
                    return cls(cells, places[:, :capacity], sizes)
        return cls._made(cells, integer("capacity", capacity, minimum=0), room)

    @classmethod
    def _made(cls, cells: Cells, capacity: int, room: int | None) -> Neighbors:
        """Lists of a capacity; `room` is that of a group's list, None for a likely number."""
        N = cells.num_particles
        room = min(room or room_of(LIKELY * capacity + FEW), room_of(max(N, 1)))
        return cls(cells, *edge_of(cells.x).lists_of(cells, capacity, room))

    def update(self, x: Any) -> Neighbors:
        """The lists of as many particles that have moved, of the same capacity, radius and box."""
        _, d = self.cells.x.shape
        if tuple(x.shape) != (self.cells.num_particles, d):
            raise ValueError(f"x must be {tuple(self.cells.x.shape)}, as before; got {tuple(x.shape)}")
        cells = Cells.build(x, self.cells.radius, self.cells.box)
        return Neighbors._made(cells, self.capacity, self.groups and self.groups.room)

    @property
    def capacity(self) -> int:
        """M."""
        _, M = self.places.shape
        return int(M)

    @property
    def padded(self) -> Array:
        """The places in lists of at least one, of which the maximum is taken."""
        return self.places if self.capacity else edge_of(self.cells.x).without_neighbors(self.cells)

    @property
    def overflow(self) -> Any:
        """Whether any list is too short for its neighbours: a truth value on the device."""
        return self.cut.any()

    @property
    def cut(self) -> Array:
        """(N,) bool, by place: whether a particle's list, or its group's, is cut; all if a position is not finite."""
        edge = edge_of(self.cells.x)
        cut = (self.sizes > self.capacity) | ~edge.finite(self.cells)
        if self.groups is None:
            return cut
        over = self.groups.counts > self.groups.room
        return cut | edge.spread_groups(over, self.cells.num_particles)

    @property
    def counts(self) -> Array:
        """(N,) int32: how many neighbours each particle has, itself included."""
        return edge_of(self.cells.x).by_particle(self.cells, self.sizes)

    @property
    def indices(self) -> Array:
        """(N, M) int32: the neighbours of each particle, -1 where there is none. `gossamer.Indices` takes them."""
        return edge_of(self.cells.x).indices_of(self)


def capacity_of(neighbors: int) -> int:
    """The capacity of lists of at most so many neighbours."""
    wanted = max(1, int(neighbors * ROOM))
    step = max(STEP, 2 ** (wanted.bit_length() - 4))
    return -(-wanted // step) * step
