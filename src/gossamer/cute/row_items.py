"""The words of an item of rows, as schedules write it and kernels read it: int32, and no compiler is imported."""

from __future__ import annotations

from enum import IntEnum

ITEM = 16  # words of an item, of rows and of columns


class RowItem(IntEnum):
    """A query tile of a head, and the tiles of each kind that it walks: the first entry in the lists, and how many."""

    BATCH = 0
    HEAD = 1
    TILE = 2
    SLOT = 3  # of the parts, -1 where a row is not split
    FULL_START = 4
    FULL_COUNT = 5
    INTERVAL_START = 6
    INTERVAL_COUNT = 7
    BITS_START = 8  # of gather kernels: the first step, counted over all lists
    BITS_COUNT = 9
    LEAD = 10  # the list's row in lo and hi
    VALID = 11  # 1, and 0 behind the last item
    FIRST_INTERVAL = 12  # column of the first interval tile, which kernels fill in
    FIRST_COLUMN = 13  # of the first tile, which kernels fill in; of gather kernels: the end of the list of columns
    PLACE = 14  # where dS that is kept begins, of its head
    SCRATCH = 15  # nobody reads it


LISTS = {
    "full": (RowItem.FULL_START, RowItem.FULL_COUNT),
    "interval": (RowItem.INTERVAL_START, RowItem.INTERVAL_COUNT),
    "bits": (RowItem.BITS_START, RowItem.BITS_COUNT),
}
