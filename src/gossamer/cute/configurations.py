"""The parts that configurations of kernels share: the memory of the chip, and clearing. No compiler is imported."""

from __future__ import annotations

from enum import IntEnum
from typing import Any

SHARED_MEMORY = 227 * 1024
MULTIPROCESSOR = 228 * 1024  # shared memory of a multiprocessor; each block takes 1024 bytes more than it asks for


def queries_of(heads: int) -> int:
    """The number of queries whose rows of so many heads fill a tile of 64 rows: a power of two."""
    return 1 << ((64 // heads).bit_length() - 1)


def check_memory(config: Any) -> None:
    """Refuse a configuration of which a multiprocessor does not hold so many blocks."""
    limit = min(SHARED_MEMORY, MULTIPROCESSOR // config.blocks - 1024)
    if config.shared_bytes > limit:
        raise ValueError(f"{config} needs {config.shared_bytes} bytes of shared memory, there are {limit}")


class Clears(IntEnum):
    """The tiles that a kernel zeroes as they are loaded, beside keys past a length: their content must not count.

    Each but the first has queries that keep nothing, in the backward.
    """

    NOTHING = 0
    QUERIES = 1
    INTERVALS = 2  # and keys, as far as intervals tell
    KEYS = 3  # and keys, which the last rows of the pool tell
