"""The words of a merge of parts, as schedules write it and kernels read it: int32, and no compiler is imported."""

from __future__ import annotations

MERGE = 8  # words of a merge
BATCH, HEAD, TILE, SLOT, COUNT = range(5)  # SLOT: the first of COUNT parts
