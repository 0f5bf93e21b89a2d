"""The words of a merge of parts, as schedules write it and kernels read it: int32, and no compiler is imported."""

from __future__ import annotations

from enum import IntEnum

MERGE = 8  # words of a merge


class PartMerge(IntEnum):
    """A tile of a head whose parts are merged: COUNT of them, from SLOT on."""

    BATCH = 0
    HEAD = 1
    TILE = 2
    SLOT = 3
    COUNT = 4
