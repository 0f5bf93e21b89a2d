"""Patterns as integers: what a pattern is called in an operator and in a compiled graph.

Equal patterns share a handle while any of them is alive; a handle is never used again for another pattern, so no
cache can hold a stale one.
"""

from __future__ import annotations

import itertools
import threading
from typing import TYPE_CHECKING, Any
from weakref import WeakValueDictionary

if TYPE_CHECKING:
    from gossamer.patterns.base import Pattern


class Token:
    """What equal patterns have in common: their handle, and one of them without a token, so that nothing is cyclic."""

    __slots__ = ("__weakref__", "handle", "pattern")

    def __init__(self, handle: int, pattern: Pattern) -> None:
        self.handle, self.pattern = handle, pattern


_by_value: WeakValueDictionary[tuple[Any, ...], Token] = WeakValueDictionary()
_by_handle: WeakValueDictionary[int, Token] = WeakValueDictionary()
_numbers = itertools.count(2)  # a compiler takes 0 and 1 for constants
_lock = threading.Lock()


def give_handle(pattern: Pattern) -> None:
    """Set `pattern.handle`, and what keeps it valid."""
    key = (type(pattern), pattern._key())
    with _lock:
        token = _by_value.get(key)
        if token is None:
            twin = object.__new__(type(pattern))
            twin.__dict__.update(pattern.__dict__)
            token = Token(next(_numbers), twin)
            twin.__dict__["handle"] = token.handle
            _by_value[key] = _by_handle[token.handle] = token
    pattern.__dict__["handle"] = token.handle
    pattern.__dict__["_token"] = token


def token_of(handle: int) -> Token:
    """What a handle stands for; holding it keeps the handle valid.

    Raises:
        ValueError: no pattern with this handle is alive.
    """
    token = _by_handle.get(handle)
    if token is None:
        raise ValueError(f"pattern handle {handle} is unknown: no pattern it stood for is alive")
    return token


def count() -> int:
    """How many distinct patterns are alive."""
    return len(_by_handle)
