"""What is kept of results that take long to make: bounded by number and memory, the least recently used goes first."""

from __future__ import annotations

import ctypes
import math
from collections import OrderedDict
from collections.abc import Callable, Hashable
from functools import cache
from itertools import count
from threading import Lock
from typing import Any, Generic, TypeVar

Value = TypeVar("Value")

# Entries: these many in any case; and these many, where they are asked for again, that hold no more than these bytes.
LEAST_KEPT, MOST_KEPT, KEPT_BYTES = 64, 1024, 2**28
TRIMMED_EVERY = 128  # entries that are forgotten, of any kind: some ten calls of new sizes or more

_evictions = count(1)


@cache
def _trim() -> Callable[[int], Any]:
    """glibc's malloc_trim, which gives free memory back to the system; nothing where the C library has no such call.

    What is kept lies between the tensors of the calls that made it. Where sizes are ever new, the free places in
    between fit no later tensor, and the process would grow by hundreds of megabytes.
    """
    try:
        return ctypes.CDLL(None).malloc_trim
    except (AttributeError, OSError, TypeError):
        return lambda pad: None


class Kept(Generic[Value]):
    """Values by key. `least` stay whatever they hold; more, up to `most`, while all hold no more than `limit` bytes.

    A model whose layers all differ has an entry for each and asks for them in turn: forgetting the oldest, or the least
    recently used, of one entry too few would forget each just before its turn. Patterns that change in every step are
    never asked for again, and keeping many of them is for nothing. So there is room for `least`, and for twice as many
    each time that one comes back which was forgotten (its hash is remembered).
    One that was asked for since it came up last for being forgotten is passed over once (`get` only marks it, since
    moving it would take as long as finding it).
    """

    def __init__(self, least: int, most: int | None = None, limit: float = math.inf) -> None:
        self.least, self.most, self.limit = least, most or least, limit
        self._room = least
        self._forgotten: OrderedDict[int, None] = OrderedDict()  # hashes of keys
        self._entries: OrderedDict[Hashable, list[Any]] = OrderedDict()  # [value, bytes, asked for]
        self._bytes = 0
        self._lock = Lock()

    def __len__(self) -> int:
        return len(self._entries)

    def __contains__(self, key: Hashable) -> bool:
        return key in self._entries

    def get(self, key: Hashable) -> Value | None:
        """The value of a key, or None."""
        entry = self._entries.get(key)
        if entry is None:
            return None
        entry[2] = True
        return entry[0]

    def put(self, key: Hashable, value: Value, size: int = 0) -> Value:
        """Keep a value that holds `size` bytes; returns what is kept, which is an earlier one if there is one."""
        with self._lock:
            entry = self._entries.get(key)
            if entry is not None:
                return entry[0]
            number = hash(key)
            if number in self._forgotten:
                del self._forgotten[number]
                self._room = min(2 * self._room, self.most)
            while self._entries and self._full(size):
                oldest, entry = self._entries.popitem(last=False)
                if entry[2]:
                    entry[2] = False
                    self._entries[oldest] = entry
                else:
                    self._bytes -= entry[1]
                    if next(_evictions) % TRIMMED_EVERY == 0:
                        _trim()(0)
                    self._forgotten[hash(oldest)] = None
                    if len(self._forgotten) > self.most:
                        self._forgotten.popitem(last=False)
            self._entries[key] = [value, size, False]
            self._bytes += size
            return value

    def _full(self, size: int) -> bool:
        """Whether one more of this size is too many."""
        n = len(self._entries) + 1
        return n > self._room or (n > self.least and self._bytes + size > self.limit)

    def clear(self) -> None:
        """Forget everything."""
        with self._lock:
            self._entries.clear()
            self._forgotten.clear()
            self._bytes, self._room = 0, self.least
