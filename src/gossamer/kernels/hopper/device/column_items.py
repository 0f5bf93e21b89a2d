"""The words of an item of columns and of a segment of it, as schedules write them and kernels read them: all int32.

What they mean is said in the package `backward`; an item has as many words as one of rows. No compiler is imported.
"""

from __future__ import annotations

BATCH, GROUP, TILE, SLOT, SEGMENTS, COUNT, VALID, KEYS = range(8)
SCRATCH = 15  # a word that nobody reads
SEGMENT = 8  # words of a segment
HEAD, LEAD, FULL, FULLS, INTERVAL, INTERVALS, BITS, BITSES = range(8)
LISTS = {"full": (FULL, FULLS), "interval": (INTERVAL, INTERVALS), "bits": (BITS, BITSES)}
