"""The rows of an item, the keys that they see, and the number of items."""

from __future__ import annotations

from typing import Any, NamedTuple

import cutlass
import cutlass.cute as cute
from cutlass import Int32, const_expr

from gossamer.cute.common import ROWS
from gossamer.entmax.hopper.long_rows.configurations import EIGHT, EVERY, FEWEST


class Division(NamedTuple):
    """The division of the listed rows into items."""

    split: Any  # whether the warpgroups of a block share the keys of 64 rows
    rows: Any  # the rows of an item
    items: Any  # the items of the longest list; each head has so many numbers


class KeyTiles(NamedTuple):
    """The tiles of keys [begin, end) that some rows see; every row sees those of [middle, middle_end) whole."""

    begin: Any
    end: Any
    middle: Any
    middle_end: Any


@cute.jit
def divide_rows(block):
    """The division of this launch, from the lengths of the lists."""
    a, c = block.arguments, block.config
    heads, lane = cute.size(a.row_counts), cute.arch.lane_idx()
    most, tiles = Int32(0), Int32(0)
    for first in cutlass.range(0, heads, 32, unroll=1):
        n = Int32(0)
        if first + lane < heads:
            n = a.row_counts[first + lane]
        most = cutlass.max(most, n)
        tiles = tiles + cute.ceil_div(n, ROWS)
    most = cute.arch.warp_redux_sync(most, kind="max")
    tiles = cute.arch.warp_redux_sync(tiles, kind="add")
    split = cute.arch.make_warp_uniform(Int32(1) if tiles <= a.few else Int32(0))
    rows = cute.arch.make_warp_uniform(Int32(ROWS) if split != 0 else Int32(c.rows))
    return Division(split, rows, cute.arch.make_warp_uniform(cute.ceil_div(most, rows)))


@cute.jit
def seen(block, row):
    """The keys [lo, hi) that a row sees."""
    a, c = block.arguments, block.config
    K = cute.size(a.k.tensor, mode=[0])
    lo, hi = Int32(0), Int32(K)
    if const_expr(c.bounds == "causal"):
        hi = cutlass.max(cutlass.min(row + a.offset + 1, Int32(K)), Int32(0))
    elif const_expr(c.bounds == "intervals"):
        lo, hi = a.lo[row], a.hi[row]
    return lo, hi


@cute.jit
def keys_of(block, head, first, rows):
    """The tiles of keys, at least one, that listed rows of a head see; bounds of rows do not decrease."""
    a, step = block.arguments, block.config.step
    last = cutlass.min(first + rows, a.row_counts[head]) - 1
    least_lo, least_hi = seen(block, a.row_list[head, first])
    most_lo, most_hi = seen(block, a.row_list[head, last])
    K = cute.size(a.k.tensor, mode=[0])
    begin = cutlass.min(least_lo, Int32(K) - 1) // step
    end = cutlass.max(cute.ceil_div(most_hi, step), begin + 1)
    middle = cutlass.min(cutlass.max(cute.ceil_div(most_lo, step), begin), end)
    middle_end = cutlass.max(cutlass.min(least_hi // step, end), middle)
    return KeyTiles(begin, end, middle, middle_end)


def sampled(keys: KeyTiles, group: Any, step: int) -> Any:
    """The first of eight keys of a sample, in eights: as many as a tile has, at equal distances."""
    return keys.begin * (step // EIGHT) + group * (keys.end - keys.begin)


@cute.jit
def spread(tiles):
    """The number of tiles in the larger sample of an item: one in EVERY, from the middle of the first EVERY on."""
    sampled_tiles = (tiles + (EVERY - 1 - EVERY // 2)) // EVERY
    return sampled_tiles if sampled_tiles >= FEWEST else Int32(0)


@cute.jit
def any_row(counts):
    """A number other than 0 if any list has a row."""
    lane, some = cute.arch.lane_idx(), Int32(0)
    for first in cutlass.range(0, cute.size(counts), 32, unroll=1):
        if first + lane < cute.size(counts):
            some = some | counts[first + lane]
    return cute.arch.warp_redux_sync(some, kind="max")
