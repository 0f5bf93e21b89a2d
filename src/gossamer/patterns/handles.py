"""Patterns as integers: what a pattern is called in an operator and in a compiled graph.

Equal patterns share a handle while any of them is alive; a handle is never used again for another pattern, so no
cache can hold a stale one. It follows from the value of a pattern, so that it is the same in every process: what a
compiler keeps on disk is found again, and an exported program means the same pattern, or none, but never another one.
"""

from __future__ import annotations

import hashlib
import itertools
import secrets
import threading
from typing import TYPE_CHECKING, Any
from weakref import WeakValueDictionary

from gossamer.checks import show

if TYPE_CHECKING:
    from gossamer.patterns.base import Pattern


class Token:
    """The value that equal patterns share: their handle, and one of them without a token, so that there is no cycle."""

    __slots__ = ("__weakref__", "handle", "pattern")

    def __init__(self, handle: int, pattern: Pattern) -> None:
        self.handle, self.pattern = handle, pattern


_by_value: WeakValueDictionary[tuple[Any, ...], Token] = WeakValueDictionary()
_by_handle: WeakValueDictionary[int, Token] = WeakValueDictionary()
_fresh = itertools.count(secrets.randbits(61))
_lock = threading.Lock()


def give_handle(pattern: Pattern) -> None:
    """Set `pattern.handle`, and what keeps it valid."""
    key = (type(pattern), pattern._key())
    with _lock:
        token = _by_value.get(key)
        if token is None:
            twin = object.__new__(type(pattern))
            twin.__dict__.update(pattern.__dict__)
            handle = _stable(key)
            while handle is None or handle in _by_handle:
                handle = next(_fresh)
            token = Token(handle, twin)
            twin.__dict__["handle"] = token.handle
            _by_value[key] = _by_handle[token.handle] = token
    pattern.__dict__["handle"] = token.handle
    pattern.__dict__["_token"] = token


def _stable(key: tuple[Any, ...]) -> int | None:
    """A number that follows from a pattern's class and value; None where they mean nothing to another process."""
    kind, value = key
    text = _plain(value) if kind.__module__.startswith("gossamer.patterns.") else None
    if text is None:
        return None
    number = hashlib.blake2b(f"{kind.__qualname__} {text}".encode(), digest_size=8).digest()
    return (int.from_bytes(number, "little") >> 2) + 2  # a compiler takes 0 and 1 for constants


def _plain(value: Any) -> str | None:
    """Numbers, names, patterns, and tuples of them as text; None for anything else, a function for example."""
    if isinstance(value, tuple):
        parts = [_plain(x) for x in value]
        return None if None in parts else f"({','.join(map(str, parts))})"
    if type(value) in (type(None), bool, int, float, str, bytes):
        return repr(value)
    handle = value.__dict__.get("handle") if hasattr(value, "__dict__") else None
    return None if handle is None else f"pattern {handle}"


def token_of(handle: int) -> Token:
    """The token of a handle; holding it keeps the handle valid.

    Raises:
        ValueError: no pattern with this handle is alive.
    """
    token = _by_handle.get(handle)
    if token is None:
        raise ValueError(f"pattern handle {show(handle)} is unknown: make the pattern that it stands for, and keep it")
    return token


def pattern_of(handle: int) -> Pattern:
    """The pattern that a handle stands for.

    Raises:
        ValueError: no pattern with this handle is alive.
    """
    return token_of(handle).pattern


def count() -> int:
    """The number of distinct patterns that are alive."""
    return len(_by_handle)
