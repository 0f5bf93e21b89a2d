"""The structure of sequences over pages by a kernel, where it is made on a GPU: that of `page_tiles`."""

from __future__ import annotations

from torch import Tensor

from gossamer.layouts.device import Listed, check_tiles, listed_layout
from gossamer.patterns.reach import Reach
from gossamer.torch import device_arrays
from gossamer.torch.fused_structure import kernels
from gossamer.torch.structure.fused_bounds import reach_numbers
from gossamer.torch.structure.inputs import Tile
from gossamer.torch.structure.page_tiles import Copied, Made, Part, room_for_bits, rows_of_pool, units_of_copies


def fused_tiles(
    edges: Tensor, used: Tensor, table: Tensor, reaches: tuple[Reach, ...], tile: Tile, facts: tuple[int, ...],
    between: int | None,
) -> Made | None:  # fmt: skip
    """The structure, of tensors of any integers; None where no kernel makes it.

    Args:
        edges: (R + 1,) of the tokens.
        used: (R,), keys.
        table: (R, n).
        facts: (T, H, G, pages, page_size).
        between: as for `Table.parts`.
    """
    if device_arrays.fused(table) is None or any(len(reach.blocks) > 1 for reach in reaches):
        return None
    T, H, G, P, size = facts
    (R, n), (block_q, block_kv), ratio = table.shape, tile, H // G
    unit, units = units_of_copies(n, size, block_kv, between, reaches)
    # Of the tiles of a list, and of keys: over copies, and over the pool.
    over = [(units * unit // block_kv, R * units * unit)]
    if between is not None:
        over.append((n * size // block_kv, rows_of_pool(P, size, between)))
    rooms = [room_for_bits(reaches, tile, ratio, most) for most, _ in over]
    for (most, K), room in zip(over, rooms, strict=True):
        check_tiles(-(-T * ratio // block_q) + R, most, room, K, block_q, block_kv)
    sizes = T, ratio, n, size, P, between or 0, unit, units, block_q, block_kv, *rooms
    each, steps = [x for reach in reaches for x in reach_numbers(reach, n * size)], [reach.step for reach in reaches]
    token, head, place, pages, unseen, *lists = kernels.page_tiles(edges, used, table, sizes, each, steps)
    layouts, arrays = [], iter(lists)
    for (most, K), room in zip(over, rooms, strict=True):
        full, mixed = (Listed(next(arrays), next(arrays), each_list) for each_list in (most, room))
        layouts.append(
            listed_layout(full, mixed, next(arrays), K, block_q=block_q, block_kv=block_kv, xp=device_arrays)
        )
    over_copies, *over_pool = layouts
    parts = *(Part(x, None) for x in over_pool), Part(over_copies, Copied(pages, unseen))
    return Made(token, head, place, parts)
