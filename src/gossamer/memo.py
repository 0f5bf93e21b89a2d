"""Results that take long to make, by key: bounded by number and memory, and clearable, each and all together."""

from __future__ import annotations

import ctypes
from collections import OrderedDict
from collections.abc import Callable, Hashable
from functools import cache
from itertools import count
from threading import Lock
from typing import Any, ClassVar, Generic, TypeVar
from weakref import WeakKeyDictionary, WeakSet

Value = TypeVar("Value")

# Entries: these many in any case; and these many, where they are asked for again, that hold no more than these bytes.
LEAST, MOST, BYTES = 64, 1024, 2**28
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


class _Entry(Generic[Value]):
    __slots__ = ("bytes", "referenced", "value")

    def __init__(self, value: Value, size: int) -> None:
        self.value, self.bytes, self.referenced = value, size, False


class Memo(Generic[Value]):
    """A memo of bounded size with second-chance replacement (CLOCK) and a ghost list that widens it.

    The oldest entry is forgotten first; one that was asked for since it came up last is passed over once, which needs
    no move on a hit, as the least recently used would (Corbato, "A Paging Experiment with the Multics System", 1968).
    The hashes of those forgotten are remembered: `least` entries stay whatever they hold, and for each one that comes
    back there is room for twice as many, up to `most`, while all hold no more than `limit` bytes (ghost lists, as in
    ARC: Megiddo and Modha, FAST 2003). A model whose layers all differ asks for an entry of each in turn and gets
    room for all of them; patterns that change in every step never come back, and stay `least`.
    """

    _every: ClassVar[WeakSet[Memo[Any]]] = WeakSet()

    def __init__(self, least: int | None = None, most: int | None = None, limit: float = BYTES) -> None:
        """A memo of LEAST to MOST entries; of `least` where that is given alone."""
        self.least = LEAST if least is None else least
        self.most = most or (MOST if least is None else least)
        self.limit = limit
        self._room = self.least
        self._ghosts: OrderedDict[int, None] = OrderedDict()
        self._entries: OrderedDict[Hashable, _Entry[Value]] = OrderedDict()
        self._bytes = 0
        self._lock = Lock()
        Memo._every.add(self)

    def __len__(self) -> int:
        return len(self._entries)

    def __contains__(self, key: Hashable) -> bool:
        return key in self._entries

    def values(self) -> list[Value]:
        """The kept values, the oldest first."""
        return [entry.value for entry in self._entries.values()]

    def get(self, key: Hashable) -> Value | None:
        """The value of a key, or None."""
        entry = self._entries.get(key)
        if entry is None:
            return None
        entry.referenced = True
        return entry.value

    def get_or_make(
        self, key: Hashable, make: Callable[[], Value], size: Callable[[Value], int] | None = None
    ) -> Value:
        """The value of a key; where there is none it is made, and kept with its `size` in bytes."""
        value = self.get(key)
        if value is None:
            made = make()
            value = self.put(key, made, 0 if size is None else size(made))
        return value

    def put(self, key: Hashable, value: Value, size: int = 0) -> Value:
        """Keep a value that holds `size` bytes; returns what is kept, which is an earlier one if there is one."""
        with self._lock:
            entry = self._entries.get(key)
            if entry is not None:
                return entry.value
            number = hash(key)
            if number in self._ghosts:
                del self._ghosts[number]
                self._room = min(2 * self._room, self.most)
            while self._entries and self._full(size):
                oldest, entry = self._entries.popitem(last=False)
                if entry.referenced:
                    entry.referenced = False
                    self._entries[oldest] = entry
                else:
                    self._bytes -= entry.bytes
                    if next(_evictions) % TRIMMED_EVERY == 0:
                        _trim()(0)
                    self._ghosts[hash(oldest)] = None
                    if len(self._ghosts) > self.most:
                        self._ghosts.popitem(last=False)
            self._entries[key] = _Entry(value, size)
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
            self._ghosts.clear()
            self._bytes, self._room = 0, self.least


class Memos(Generic[Value]):
    """A memo for each owner, which goes with it: of LEAST entries, by what else they are made from."""

    def __init__(self) -> None:
        self._of: WeakKeyDictionary[Any, Memo[Value]] = WeakKeyDictionary()
        self._lock = Lock()

    def of(self, owner: Any) -> Memo[Value]:
        """The memo of an owner; no value in it may hold the owner, which would live for ever."""
        memo = self._of.get(owner)
        if memo is None:
            with self._lock:
                memo = self._of.setdefault(owner, Memo(LEAST))
        return memo

    def clear(self) -> None:
        """Forget everything."""
        with self._lock:
            self._of.clear()


def forget_all() -> None:
    """Clear every memo: calls, plans, layouts and their costs. Work that was bound to a captured graph stays."""
    for memo in list(Memo._every):
        memo.clear()
