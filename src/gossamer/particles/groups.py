"""Lists that 64 particles share, for kernels that multiply: `Groups`.

Kernels and both frameworks share their sizes, items of work, and the choice of calls.
"""

from __future__ import annotations

from typing import Any, NamedTuple

from gossamer.cute.row_items import ITEM
from gossamer.kernels.contract import Scoring
from gossamer.kernels.launch import INPUTS, Direction, Operand, Prepared, with_own
from gossamer.particles.attend import Attending
from gossamer.particles.geometry import Sizes
from gossamer.particles.kernels import attention_launch as launches
from gossamer.particles.kernels.neighbors.configurations import ROWS, STEP, ListsConfig
from gossamer.particles.kernels.radial.configurations import OPEN
from gossamer.plan.problem import Problem

SM = 90  # compute capability of the kernels that multiply
MOST = 2**31  # numbers of an array, which kernels address by 32 bits
SMALLEST, LARGEST = 8, 128  # head size
LARGEST_FLOAT32 = 64
TYPES = ("float16", "bfloat16")


class Groups(NamedTuple):
    """The lists of T groups of 64 places along the curve, with room for C places that are near any of a group.

    Arrays are those of `particles.kernels.neighbors.device.kernel.ListsArguments`.
    """

    columns: Any  # (T C,) int32
    keys: Any  # (T C,) int32: the particles at these places, -1 where there is none
    bits: Any  # (T C / 32, 64) int32
    theirs: Any  # (T C, 4): positions in the frame of the group
    mine: Any  # (64 T, 4)
    counts: Any  # (T,) int32: how many places, also where they do not fit
    far: Any  # (T,) int32: 1 where no frame holds nearest images
    particles: Any  # (64 T,) int32: those of the groups, as `named` says

    @property
    def room(self) -> int:
        """C."""
        (listed,), (T,) = self.columns.shape, self.counts.shape
        return int(listed // T)


class Most(NamedTuple):
    """The longest lists."""

    neighbors: int  # of a particle
    columns: int  # of a group; 0 where there are none
    lists: Any = None  # (places, sizes) of a larger capacity, where these were made to find the longest


def call_of(radius: float, box: Sizes) -> tuple[ListsConfig, tuple[float, ...]]:
    """(configuration, numbers in order) of the kernel of lists."""
    return ListsConfig(any(size is not None for size in box)), (*open_sizes(box), radius * radius)


def open_sizes(box: Sizes) -> list[float]:
    """The sizes of three axes, as kernels take them."""
    return [OPEN if size is None else size for size in (*box, *[None] * (3 - len(box)))]


def type_of(name: str) -> str:
    """The type of an array of `Groups` or of items."""
    return "float32" if name in ("theirs", "mine") else "int32"


def room_of(most: float) -> int:
    """The C that holds so many columns."""
    return max(1, -(-int(most) // STEP)) * STEP


def shapes_of(N: int, capacity: int, room: int) -> dict[str, tuple[int, ...]]:
    """The shapes of the arrays that the kernel of lists writes, in order: `Groups`, then sizes and places."""
    T = -(-N // ROWS)
    return {
        "columns": (T * room,), "bits": (T * room // 32, ROWS), "theirs": (T * room, 4), "mine": (T * ROWS, 4),
        "counts": (T,), "far": (T,), "sizes": (N,), "places": (N, capacity),
    }  # fmt: skip


def named(order: Any, cut: Any, over: Any, known: Any, place: Any, xp: Any) -> Any:
    """The particles of groups: -1 where there is none, -2 less the particle where its list, or its group's, is cut.

    Args:
        order: (N,) int32: the particles along the curve.
        cut: (N,): which of their lists are; over: (T,): which of the groups' are.
        known: whether all positions are finite; else no neighbour is known.
        place: the places 0 to 64 T - 1, int32.
        xp: jax.numpy or torch.
    """
    (N,) = order.shape
    at = xp.clip(place, 0, N - 1)
    wrong = cut[at] | over[place // ROWS] | ~known
    return xp.where(place < N, xp.where(wrong, -2 - order[at], order[at]), -1)


def addressed(N: int, capacity: int, room: int) -> bool:
    """Whether kernels can address the lists; they have no use for lists without room."""
    return capacity > 0 and max(N * capacity, -(-N // ROWS) * room * 4) < MOST


def attends(call: Attending, dtype: str, D: int, E: int) -> bool:
    """Whether kernels compute the forward of a call."""
    if dtype == "float32":
        return call.spread is None and 0 < E <= LARGEST_FLOAT32 and D <= LARGEST_FLOAT32
    return dtype in TYPES and 0 < E <= LARGEST and D <= LARGEST


def differentiates(dtype: str) -> bool:
    """Whether kernels compute the backward of a call whose forward they compute."""
    return dtype in TYPES


def items_of(groups: Groups, n: Any, xp: Any) -> dict[str, Any]:
    """The work of both directions, heads one after the other: neighbours along the curve read the same keys.

    Args:
        n: 0 to H T - 1, int32.
        xp: jax.numpy or torch.
    """
    C, (T,) = groups.room, groups.counts.shape
    head, group = n // T, n % T
    steps = (xp.clip(groups.counts, 0, C)[group] + STEP - 1) // STEP
    first, none, one = group * (C // STEP), n * 0, n * 0 + 1
    place = [none, head, group, none - 1]
    rows = [*place, *[none] * 4, first, steps, none, one, *[none] * 4]
    columns = [*place, group, one, one, *[none] * (ITEM - 7)]
    segments = [*[none[:T]] * 6, first[:T], steps[:T]]
    return {
        "items": xp.stack(rows, 1), "column_items": xp.stack(columns, 1), "segments": xp.stack(segments, 1),
    }  # fmt: skip


class Launched(NamedTuple):
    """The launch of one direction, and the operands that it reads."""

    prepared: Prepared
    operands: dict[str, Operand]
    given: tuple[str, ...]  # names of what the call gives, in order


def launched(
    direction: Direction, call: Attending, H: int, N: int, D: int, E: int, dtype: str, processors: int,
    lists: dict[str, Any],
) -> Launched:  # fmt: skip
    """The launch for arrays (N, H, size), which kernels see as (1, H, N, size).

    Args:
        lists: shapes of the groups' arrays and of their items, by name.
    """
    names, scale = launches.lists(direction, dtype), call.scale if call.scale is not None else 1.0
    factor = None if call.spread is None else -1 / (call.spread * scale)
    p = Problem(1, H, H, N, N, D, E, dtype, "cuda", SM, processors)
    scoring = Scoring(scale, 0)

    def features(size: int) -> Operand:
        return Operand(dtype, (1, H, N, size), (N * H * size, size, H * size, 1))

    lse = Operand("float32", (1, H, N), (N * H, 1, H))
    q, v = features(D), features(E)
    of = {"q": q, "k": q, "v": v, "out": v, "lse": lse, "dout": v, "dlse": lse}
    results = {"out": v, "lse": lse} if direction == "forward" else {"dq": q, "dk": q, "dv": v}
    given = {name: of[name] for name in INPUTS[direction]}
    given |= {name: Operand(type_of(name), tuple(lists[name]), _strides(lists[name])) for name in names}
    launch = launches.forward if direction == "forward" else launches.backward
    prepared = launch(p, scoring, given | results, factor, open_sizes(call.box))
    return Launched(with_own(prepared, results), given | results, tuple(given))


def _strides(shape: tuple[int, ...]) -> tuple[int, ...]:
    return (1,) if len(shape) == 1 else (shape[1], 1)
