"""The words of an item of columns and of a segment of it, as schedules write them and kernels read them: all int32.

What they mean is said in the package `backward`; an item has as many words as one of rows. No compiler is imported.
"""

from __future__ import annotations

from enum import IntEnum

SEGMENT = 8  # words of a segment


class ColumnItem(IntEnum):
    """A key tile of a key head, and its segments."""

    BATCH = 0
    GROUP = 1
    TILE = 2
    SLOT = 3  # of the parts, -1 where a column is not split
    SEGMENT_START = 4
    SEGMENT_COUNT = 5
    VALID = 6  # 1, and 0 behind the last item
    KEYS = 7  # that count, which kernels with lengths fill in
    PLACE = 8  # where dS that is kept begins, of its first query head
    NEXT_PLACE = 9  # how far on it begins for each following one
    SCRATCH = 15  # nobody reads it


class Segment(IntEnum):
    """The tiles of each kind that an item walks for one query head: the first entry in the lists, and how many."""

    HEAD = 0
    LEAD = 1  # the list's row in lo and hi
    FULL_START = 2
    FULL_COUNT = 3
    INTERVAL_START = 4
    INTERVAL_COUNT = 5
    BITS_START = 6
    BITS_COUNT = 7


LISTS = {
    "full": (Segment.FULL_START, Segment.FULL_COUNT),
    "interval": (Segment.INTERVAL_START, Segment.INTERVAL_COUNT),
    "bits": (Segment.BITS_START, Segment.BITS_COUNT),
}
