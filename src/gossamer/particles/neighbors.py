"""Lists of neighbours: `Neighbors`."""

from __future__ import annotations

from collections.abc import Sequence
from dataclasses import dataclass
from typing import Any

from gossamer.particles.cells import Cells
from gossamer.particles.edges import edge_of

ROOM = 1.25  # for as many neighbours over those that there are
STEP = 8  # capacities are multiples of it


@dataclass(frozen=True, eq=False)
class Neighbors:
    """Every particle's neighbours within a radius, itself included, in lists of one capacity: made by `allocate`.

    A list that its capacity is too small for is never used in silence: `overflow` is true then, and what is computed
    of such a particle is NaN. In JAX it is a pytree.
    """

    cells: Cells
    places: Any  # (N, M) int32: the places of neighbours along the curve, by the particle's own; N for none
    sizes: Any  # (N,) int32: how many neighbours there are, by place

    @classmethod
    def allocate(
        cls, x: Any, radius: float, box: float | Sequence[float | None] | None = None, capacity: int | None = None
    ) -> Neighbors:
        """Lists of particles, with room for a quarter more than the longest has.

        Args:
            x, radius, box: as `Cells.build` takes them.
            capacity: M; needed where x is not known, as under jit.

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
        if capacity is None:
            most = edge_of(x).most_neighbors(cells)
            capacity = max(1, -(-int(most * ROOM) // STEP)) * STEP
        if isinstance(capacity, bool) or not isinstance(capacity, int) or capacity < 1:
            raise ValueError(f"capacity must be a whole number of at least 1; got {capacity!r}")
        return cls(cells, *edge_of(x).lists_of(cells, capacity))

    def update(self, x: Any) -> Neighbors:
        """The lists of as many particles that have moved, of the same capacity, radius and box."""
        _, d = self.cells.x.shape
        if tuple(x.shape) != (self.cells.num_particles, d):
            raise ValueError(f"x must be {tuple(self.cells.x.shape)}, as before; got {tuple(x.shape)}")
        return Neighbors.allocate(x, self.cells.radius, self.cells.box, self.capacity)

    @property
    def capacity(self) -> int:
        """M."""
        _, M = self.places.shape
        return int(M)

    @property
    def overflow(self) -> Any:
        """Whether any particle has more neighbours than its list has room for: a truth value on the device."""
        return (self.sizes > self.capacity).any()

    @property
    def counts(self) -> Any:
        """(N,) int32: how many neighbours each particle has, itself included."""
        return edge_of(self.cells.x).by_particle(self.cells, self.sizes)

    @property
    def indices(self) -> Any:
        """(N, M) int32: the neighbours of each particle, -1 where there is none. `gossamer.Indices` takes them."""
        return edge_of(self.cells.x).indices_of(self)
