"""The fields of a work item and of a merge of parts, as schedules write them and kernels read them: int32."""

from __future__ import annotations

ITEM = 6  # fields of an item
# LEAD is b * Hl + h, SLOT -1 where a row is done by one item, PART 1 behind the first part of a row that is cut (where
# a kernel reads it: of gathered columns).
LEAD, TILE, BEGIN, END, SLOT, PART = range(ITEM)
MERGE = 4  # fields of a merge, which begins as an item does
FIRST, COUNT = 2, 3  # its first slot, and the number of its slots
