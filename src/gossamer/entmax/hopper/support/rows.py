"""The rows of a block, and the key tiles that it walks."""

from __future__ import annotations

from typing import Any, NamedTuple

import cutlass
import cutlass.cute as cute
from cutlass import Int32, const_expr


class BlockRows(NamedTuple):
    """The rows of a block and their tiles."""

    batch: Any
    head: Any
    group: Any
    tile: Any  # the tile of rows of its head
    begin: Any  # the first key tile
    sample: Any  # the number of tiles of the sample, which is even
    tiles: Any  # the number of all tiles, rounded up to an even one


def rows_of(block: Any) -> BlockRows:
    """The rows of this block; the last rows of a head come first."""
    a, c = block.arguments, block.config
    H, Q = cute.size(a.q.tensor, mode=[2]), cute.size(a.q.tensor, mode=[0])
    G, K = cute.size(a.k.tensor, mode=[2]), cute.size(a.k.tensor, mode=[0])
    x, _, _ = cute.arch.block_idx()
    number = a.first_block + x
    blocks = cute.ceil_div(Q, c.rows)
    lead, tile = number // blocks, blocks - 1 - number % blocks
    head = lead % H
    first, end = Int32(0), Int32(K)
    last_row = cutlass.min(tile * c.rows + c.rows, Q) - 1
    if const_expr(c.bounds == "causal"):
        end = cutlass.max(cutlass.min(last_row + a.offset + 1, Int32(K)), Int32(0))
    elif const_expr(c.bounds == "intervals"):
        first, end = a.lo[tile * c.rows], a.hi[last_row]
    begin = first // c.step
    tiles = cutlass.max(cute.ceil_div(end, c.step) - begin, Int32(0))
    sample = 2 * cutlass.max(tiles // (2 * a.every), Int32(1))
    return BlockRows(lead // H, head, head // (H // G), tile, begin, sample, tiles + tiles % 2)


def steps_of(rows: BlockRows) -> Any:
    """The number of tiles that are loaded: the sample, then all, then one whose product nobody reads."""
    return rows.sample + rows.tiles + 1


@cute.jit
def tile_of(rows, step, every):
    """The tile of a step; it may lie past the last one, which no row sees."""
    tile = step * every if step < rows.sample else step - rows.sample
    return rows.begin + tile
