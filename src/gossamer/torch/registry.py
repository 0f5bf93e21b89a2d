"""Patterns in compiled graphs: a graph holds the handle of a pattern, an integer, and is guarded by it.

Where torch lets a plain class be a constant of a graph (2.13), a pattern may even be made inside the compiled
function. Elsewhere the handle is read as an integer attribute of a pattern that was made outside.
"""

from __future__ import annotations

from typing import Any

from gossamer.patterns import Pattern
from gossamer.patterns.handles import Token, token_of

_compiled: dict[int, Token] = {}


def _compiled_handle(self: Pattern) -> int:
    """The handle of a pattern that a compiled graph keeps; called while it is traced, with the real object."""
    _compiled.setdefault(self.handle, token_of(self.handle))
    return self.handle


def _fx_repr(self: Pattern) -> tuple[str, dict[str, type]]:
    raise ValueError(
        f"{self!r} was made inside a compiled function that broke its graph: make the pattern outside, which also "
        "shows the error of a call that was refused"
    )


def _register() -> bool:
    """Make patterns constants of torch.compile, guarded by their equality; whether this torch can."""
    try:
        from torch._library.opaque_object import MemberType, register_opaque_type

        Pattern._compiled_handle = _compiled_handle  # type: ignore[attr-defined]
        Pattern.__fx_repr__ = _fx_repr  # type: ignore[attr-defined]
        members: dict[str, Any] = {"_compiled_handle": MemberType.USE_REAL, "device_rule": MemberType.USE_REAL}
        register_opaque_type(Pattern, typ="value", members=members)
    except (ImportError, TypeError):  # an older torch: only classes with a metaclass of its own
        return False
    return True


constants = _register()
