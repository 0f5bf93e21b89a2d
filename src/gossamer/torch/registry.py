"""Patterns as integers: what a pattern is called in an operator and in a compiled graph.

Equal patterns share a handle while any of them is alive; the registry holds none of them, except those whose handle
was compiled into a graph. A handle is never used again for another pattern, so it can be stale in no cache.
"""

from __future__ import annotations

import atexit
import itertools
import threading
from typing import Any, NamedTuple
from weakref import ref

import torch

from gossamer.patterns import Pattern


class _Group(NamedTuple):
    """Equal patterns that are alive."""

    handle: int
    key: tuple[Any, ...]
    members: dict[int, ref[Pattern]]


_by_id: dict[int, tuple[ref[Pattern], _Group]] = {}
_by_value: dict[tuple[Any, ...], _Group] = {}
_by_handle: dict[int, _Group] = {}
_compiled: dict[int, Pattern] = {}
_numbers = itertools.count()
_lock = threading.RLock()


def handle_of(pattern: Pattern) -> int:
    """The handle of a pattern, the same for equal ones; valid while one of them is alive."""
    known = _by_id.get(id(pattern))
    if known is not None and known[0]() is pattern:
        return known[1].handle
    key = (type(pattern), pattern._key())
    with _lock:
        group = _by_value.get(key)
        if group is None:
            group = _Group(next(_numbers), key, {})
            _by_value[key] = _by_handle[group.handle] = group
        number = id(pattern)
        weak = ref(pattern, lambda dead: _forget(number, dead, group))
        group.members[number] = weak
        _by_id[number] = weak, group
    return group.handle


def _forget(number: int, weak: ref[Pattern], group: _Group) -> None:
    with _lock:
        if group.members.get(number) is weak:
            del group.members[number]
        known = _by_id.get(number)
        if known is not None and known[0] is weak:
            del _by_id[number]
        if not group.members:
            _by_value.pop(group.key, None)
            _by_handle.pop(group.handle, None)


@atexit.register
def _close() -> None:
    """Drop the weak references while what they call still exists."""
    for group in list(_by_handle.values()):
        group.members.clear()
    _by_id.clear()


def pattern_of(handle: int) -> Pattern:
    """The pattern a handle stands for."""
    group = _by_handle.get(handle)
    for weak in list(group.members.values()) if group is not None else ():
        pattern = weak()
        if pattern is not None:
            return pattern
    raise ValueError(f"pattern handle {handle} is unknown: no pattern it stood for is alive")


def count() -> int:
    """How many distinct patterns are known."""
    return len(_by_handle)


def _compiled_handle(self: Pattern) -> int:
    """The handle of a pattern that a compiled graph keeps; called while it is traced, with the real object."""
    handle = handle_of(self)
    _compiled.setdefault(handle, self)
    return handle


def _fx_repr(self: Pattern) -> tuple[str, dict[str, type]]:
    raise NotImplementedError("a graph holds the handle of a pattern, never the pattern")


def _register() -> str | None:
    """Make patterns constants of torch.compile, guarded by their equality; the reason where torch cannot."""
    try:
        from torch._library.opaque_object import MemberType, register_opaque_type
    except ImportError as error:
        return f"torch {torch.__version__} cannot hold a pattern as a constant: {error}"
    Pattern._compiled_handle = _compiled_handle  # type: ignore[attr-defined]
    Pattern.__fx_repr__ = _fx_repr  # type: ignore[attr-defined]
    register_opaque_type(Pattern, typ="value", members={"_compiled_handle": MemberType.USE_REAL})
    return None


not_compiled = _register()
