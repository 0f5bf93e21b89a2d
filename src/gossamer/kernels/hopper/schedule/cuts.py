"""How rows are cut: where one takes longer than each block works, and where only the device knows its length."""

from __future__ import annotations

from heapq import heapreplace

import numpy as np

from gossamer.cute.merges import MERGE, PartMerge
from gossamer.kernels.arrays import Array, descending, namespace, places, zeros
from gossamer.kernels.hopper.schedule.words import Ranges, filled, place_words
from gossamer.layouts.gather import GatherWalk
from gossamer.layouts.walk import Walk
from gossamer.layouts.work_list import FEWEST_TILES
from gossamer.layouts.work_list import split_rows as cut

START = 3  # what an item costs beside its tiles, in tiles
PART = 0.25  # what merging a part costs, in tiles
LEAST_PART = 4  # tiles of a part of one of few rows
MERGE_CALL = 6  # what the second launch costs, in tiles: 10 us, where a tile of 128 x 128 takes 1.7
PARTS_A_TILE = 40  # parts that are written, read and merged in the time of a tile
FEW = 4  # where at most one row in so many of a tile exists, its parts cost as much less
FEW_CALL = 7  # MERGE_CALL there: 3.5 us, where a tile takes 0.5
ROUNDS = 8  # items for each block, up to which their order minds no cache and cutting all rows is considered
SLACK = 1.1  # of a head's share of a block's time: what an item may take where heads follow one another
NEAR = 4  # steps: gathered rows whose lengths differ by fewer stay in order, since their columns are likely to be near
CUT_ROWS = 0.06  # of a list, for each block, at most: rows that are cut because one takes longer than a head


def item_limit(
    lengths: np.ndarray, leads: int, copies: int, blocks: int, split: int | None = None, few: bool = False
) -> int:
    """The most tiles in an item, for the rows of `leads` lists that are computed `copies` times.

    Rows are cut where one takes longer than each block works. A few rows that take longer than a head does are cut as
    well: heads can follow one another then (see `for_every_head`). Where there are few rows, whole rounds of parts may
    take less, merging included. `few`: see `whole_rounds`.
    """
    longest = max(1, int(lengths.max(initial=0)))
    if split is not None:
        return min(split, longest)
    rows = len(lengths) * copies
    if rows <= blocks:
        return max(1, whole_rounds(rows, longest, blocks, few))
    head = int(lengths.sum()) / (leads * blocks)
    share = min(longest, max(FEWEST_TILES, int(head * leads * copies)))
    if rows > ROUNDS * blocks:
        longer = int((lengths > SLACK * head).sum()) / leads
        return min(share, max(FEWEST_TILES, int(SLACK * head))) if longer <= CUT_ROWS * blocks else share

    def time(limit: int) -> float:
        _, begin, end, slot, _ = cut(lengths, limit)
        parts = int((slot >= 0).sum()) * copies
        busy = [0] * blocks
        for length in np.repeat(end - begin + START, copies).tolist():
            heapreplace(busy, busy[0] + length)
        return max(busy) + (MERGE_CALL + parts / PARTS_A_TILE if parts else 0)

    return min(sorted({share, *(-(-longest // parts) for parts in range(1, 5))}, reverse=True), key=time)


def whole_rounds(rows: int, longest: int, blocks: int, few: bool = False) -> int:
    """The most tiles in an item, for no more rows than blocks: whole rounds of items, and few parts to merge.

    `few`: at most a quarter of each tile's rows exist, and no others are written and merged.
    """
    call, share = (FEW_CALL, 1 / FEW) if few else (MERGE_CALL, 1.0)

    def time(parts: int) -> float:
        merging = call + share * rows * parts / PARTS_A_TILE if parts > 1 else 0
        return -(-rows * parts // blocks) * (-(-longest // parts) + START) + share * PART * parts + merging

    return -(-longest // min(range(1, max(1, longest // int(share * LEAST_PART)) + 1), key=time))


def cut_rows(
    walk: Walk | GatherWalk, lengths: Array, shape: tuple[int, int, int], copies: int, blocks: int,
    split: int | None, few: bool = False, most: int | None = None,
) -> Ranges:  # fmt: skip
    """The rows of a walk, longest first; cut where that is worth it.

    Args:
        shape: see `Ranges`; copies, blocks, split, few: see `item_limit`.
        most: what a row may list where only the device knows its length: see `parts_by_capacity`.
    """
    if walk.device is not None:
        return _cut_by_capacity(lengths, shape, copies, blocks, split, few, most)
    batches, heads, _ = shape
    limit = item_limit(lengths, batches * heads, copies, blocks, split, few)
    row, begin, end, slot, pieces = cut(lengths, limit)
    order = np.lexsort((slot, row, (begin - end) // (NEAR if isinstance(walk, GatherWalk) else 1)))
    cuts = np.flatnonzero(pieces > 1)
    count = pieces[cuts]
    merges = filled(place_words(cuts, shape, count.cumsum(0) - count) | {PartMerge.COUNT: count}, MERGE)
    return Ranges(shape, row[order], begin[order], end[order], slot[order], merges, int(count.sum()))


def parts_by_capacity(
    shape: tuple[int, int, int], copies: int, blocks: int, split: int | None, few: bool, most: int | None
) -> int:
    """The parts of each row, where only the device knows what it lists, as many as for rows that all list `most`.

    Only the rows of one tile are cut, as a step of decoding has them, which waits for its longest row; None, or more
    tiles: rows stay whole.
    """
    batches, heads, tiles = shape
    if not most or (tiles > 1 and split is None):
        return 1
    all_full: np.ndarray = np.full(batches * heads * tiles, most)
    return -(-most // item_limit(all_full, batches * heads, copies, blocks, split, few))


def _cut_by_capacity(
    lengths: Array, shape: tuple[int, int, int], copies: int, blocks: int, split: int | None, few: bool,
    most: int | None,
) -> Ranges:  # fmt: skip
    """The rows of a walk of tensors: each in as many equal parts as a row would have that lists `most`.

    Nothing is read back: a short row has short parts, and empty ones.
    """
    parts = parts_by_capacity(shape, copies, blocks, split, few, most)
    at = places(len(lengths) * parts, lengths)
    row, part = at // parts, at % parts
    begin, end = part * lengths[row] // parts, (part + 1) * lengths[row] // parts
    order, xp = descending(end - begin), namespace(lengths)
    if parts == 1:
        merges = zeros((1, MERGE), at)
        return Ranges(shape, row[order], begin[order], end[order], xp.full_like(row, -1), merges, 0, known=False)
    every = places(len(lengths), at)
    merges = filled(place_words(every, shape, every * parts) | {PartMerge.COUNT: xp.full_like(every, parts)}, MERGE)
    return Ranges(shape, row[order], begin[order], end[order], at[order], merges, len(at), known=False)
