"""The words of an item of rows, as schedules write it and kernels read it: int32, and no compiler is imported."""

from __future__ import annotations

ITEM = 16  # words of an item, of rows and of columns
# LISTS are the first entry of each kind that an item walks and their number, LEAD is the list's row in lo and hi, VALID
# 1, SLOT -1 where a row is not split. Kernels fill in START. FIRST is that of gather kernels: the end of their columns.
BATCH, HEAD, TILE, SLOT, FULL, FULLS, INTERVAL, INTERVALS, BITS, BITSES, LEAD, VALID, START, FIRST = range(14)
LISTS = {"full": (FULL, FULLS), "interval": (INTERVAL, INTERVALS), "bits": (BITS, BITSES)}
