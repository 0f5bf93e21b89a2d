"""The arguments that kernels of several kinds take, named in a launch."""

from __future__ import annotations

import math
from typing import Any, NamedTuple

from gossamer.kernels.contract import Scoring
from gossamer.kernels.hopper.schedule.rows import Work
from gossamer.kernels.launch import EDGE, Builder, Kernel, Operand, Shape

LOG2E = 1.0 / math.log(2.0)
STEP = 8  # 16-bit numbers in the 16 bytes to which TMA wants addresses and strides aligned
LARGEST_ROW_STRIDE = 1 << 30  # of what is gathered, in 16-bit numbers: bytes fit 32 bits


def kernel(name: str, *key: Any) -> Kernel:
    """A kernel of `hopper.compiled`."""
    return Kernel("hopper", name, key, "exchanged")


def readable(x: Operand) -> bool:
    """Whether TMA can read a (B, heads, rows, columns) array of 16-bit numbers where it is."""
    *lead, last = x.strides
    return x.aligned and last == 1 and all(stride > 0 and stride % STEP == 0 for stride in lead)


def gathers(x: Operand) -> bool:
    """Whether the kernels can gather rows of an array where it is: 8 numbers at a time, strides in 32 bits."""
    return readable(x) and x.shape[3] % STEP == 0 and x.strides[2] < LARGEST_ROW_STRIDE


def operand(b: Builder, name: str) -> str:
    """The array itself when TMA can read it, else a copy whose rows are padded to 16 bytes."""
    return name if readable(b[name]) else b.copied(name, whole(b[name].shape[3]))


def gathered(b: Builder, name: str) -> str:
    """The array itself when its rows can be gathered, else a copy; what a row lacks of 8 numbers is zero."""
    return name if gathers(b[name]) else b.copied(name, whole(b[name].shape[3]), 0.0)


def result(b: Builder, name: str, dtype: str, shape: Shape, pairs: bool = False) -> str:
    """Memory for a result (B, heads, rows, columns) that TMA can address: its own, or padded and copied at last.

    Args:
        pairs: numbers are written two at a time.
    """
    (*_, columns) = shape
    able = name in b.operands and readable(b[name]) and not (pairs and columns % 2)
    return b.result(name, dtype, shape, in_place=able, columns=whole(columns))


def whole(columns: int) -> int:
    """Columns of rows that are padded to 16 bytes."""
    return -(-columns // STEP) * STEP


def unread(b: Builder, name: str, dtype: str, *shape: int) -> str:
    """What stands for an argument that the kernel does not read."""
    return b.array(name, dtype, shape, 0.0, "launch")


def parts(b: Builder, name: str, slots: int, *shape: int) -> str:
    """Float32 parts of rows that are cut, one a slot."""
    return b.array(name, "float32", (slots, *shape)) if slots else unread(b, name, "float32", 1, *shape)


def tile_counter(b: Builder) -> str:
    """The counter of work items: kernels of one stream follow one another, and leave it at zero."""
    return "tile_counter" if "tile_counter" in b else b.array("tile_counter", "int32", (1,), 0.0, "stream")


def lengths(b: Builder, K: int) -> str | None:
    """Key lengths as the kernels want them, where the call has any."""
    if "key_lengths" not in b or b["key_lengths"].dtype == "int32":
        return b.contiguous("key_lengths") if "key_lengths" in b else None
    of_int32 = Operand("int32", b["key_lengths"].shape, (1,))
    b.function(Kernel(EDGE, "int32_lengths", (K,)), "key_lengths", returns={"lengths": of_int32})
    return "lengths"


def sinks(b: Builder) -> str:
    """Sink logits (H,), or what stands for them."""
    return b.contiguous("sink_logits") if "sink_logits" in b else unread(b, "no_sinks", "float32", 1)


def score_of(scoring: Scoring, gradient: bool = False) -> str:
    """The kind of score, for which kernels are compiled; those of a gradient fold a scale of any sign."""
    if scoring.softcap is not None:
        return "softcap"
    return "fold" if gradient or scoring.scale > 0 else "scale"


def factors(scoring: Scoring, gradient: bool = False) -> tuple[float, float]:
    """Factors of a score before its soft cap, and of the exponent in base 2."""
    if scoring.softcap is not None:
        return scoring.scale / scoring.softcap, scoring.softcap * LOG2E
    folded = score_of(scoring, gradient) == "fold"
    return (1.0, scoring.scale * LOG2E) if folded else (scoring.scale, LOG2E)


class Schedule(NamedTuple):
    """The work of one kernel, named in a launch."""

    arrays: list[str]  # items and lists, in the order in which kernels take them
    merges: str  # of rows that are cut
    items: int
    slots: int
    blocks: int  # of the grid
    rows: int  # of a tile


def schedule(
    b: Builder, walk: str, work: Work, blocks: int, rows: int, item_rows: int | None = None, **lists: Any
) -> Schedule:
    """Name the work of a kernel.

    Args:
        walk: goes before the names.
        blocks: draw items at the same time, at most.
        rows: of a tile; item_rows: of what is drawn, where that is less.
        lists: the layout's, in the order in which the kernel takes them.
    """
    arrays = {"items": work.items, "segments": work.segments, **lists}
    names = b.layout(**{f"{walk}_{name}": x for name, x in arrays.items() if x is not None})
    (merges,) = b.layout(**{f"{walk}_merges": work.merges})
    items = work.items.shape[0]
    return Schedule(names, merges, items, work.slots, min(blocks, items * rows // (item_rows or rows)), rows)
