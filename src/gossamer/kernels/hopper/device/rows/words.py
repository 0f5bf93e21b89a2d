"""The words of an item, as `layouts.items` has them for what writes items: no compiler is imported."""

from __future__ import annotations

from enum import IntEnum


class Word(IntEnum):
    """Which row of which list, and which of its columns; a slot of its own for each part of a list that is cut."""

    LEAD = 0
    TILE = 1
    BEGIN = 2
    END = 3
    SLOT = 4
    PART = 5
