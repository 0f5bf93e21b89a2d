"""What the roles of a kernel share: how an item is drawn, barriers, places in a ring."""

from __future__ import annotations

from typing import Any

import cutlass
import cutlass.cute as cute
from cutlass import Int32

from gossamer.kernels.hopper.device.row_items import ITEM

WARPGROUP = 128
ROWS = 64  # query rows of a warpgroup
TURN = 1  # named barriers 1, 2, 3: a warpgroup's turn at the tensor cores
READ = 4  # named barriers 4, 5, 6: every warp of a warpgroup has read its Q
OUT = 7  # named barriers 7, 8, 9: a warpgroup's output is in shared memory
BOUNDS = 10  # named barriers 10, 11, 12: the bounds of an item's rows are in shared memory
FAR = 1 << 30
MOST_KEYS = 2**31 - 2**16  # of a call; a tile more is still an int32
NUMBERS = {"bfloat16": cutlass.BFloat16, "float16": cutlass.Float16, "float32": cutlass.Float32}


def ring(count: Int32, stages: int) -> tuple[Any, Any]:
    """(stage, phase) of the `count`-th use of a ring."""
    if stages & (stages - 1) == 0:
        return count & (stages - 1), (count >> (stages.bit_length() - 1)) & 1
    return count % stages, (count // stages) & 1


class Env:
    """What a role's functions share. Opaque to the tracer, which would thread a namespace through every branch."""

    def __init__(self, **values: Any) -> None:
        self.__dict__.update(values)

    def __extract_mlir_values__(self) -> list[Any]:
        return []

    def __new_from_mlir_values__(self, values: list[Any]) -> Env:
        return self

    def __getattr__(self, name: str) -> Any:
        raise AttributeError(name)


@cute.jit
def within_keys(length):
    """A key length of any int32, clamped so that sums with the sizes of tiles do not wrap."""
    length = length if length > 0 else Int32(0)
    return length if length < MOST_KEYS else Int32(MOST_KEYS)


@cute.jit
def load_item(env, w, pieces: cutlass.Constexpr = 1):
    """This lane's word of the description of item `w`; all zero (not valid) past the end.

    Each item that is listed makes `pieces` of the kernel's.
    """
    lane = cute.arch.lane_idx()
    word = Int32(0)
    if w < env.items and lane < ITEM:
        word = env.work[w // pieces, lane]
    return word


@cute.jit
def ticket(env):
    """The number of the next item that nobody has taken. Each block starts with the item of its own index.

    There is one draw for each item, made near its end: blocks that are late take fewer items. The last draw of all
    resets the counter.
    """
    drawn = Int32(0)
    blocks, _, _ = cute.arch.grid_dim()
    if cute.arch.lane_idx() == 0:
        drawn = cute.arch.atomic_add(env.tickets.iterator, Int32(1), sem="relaxed", scope="gpu")
        if drawn == env.items - 1:
            env.tickets[0] = Int32(0)
    return cute.arch.shuffle_sync(drawn, 0) + blocks
