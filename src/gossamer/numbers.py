"""What counts as a whole number, the same in every room."""

from __future__ import annotations

import operator
from typing import Any


def whole(value: Any) -> int | None:
    """`value` as an int if it is a whole number of any library (`operator.index`); None for all else, booleans too.

    Every argument that is an int is read by this one. An array or tensor without dimensions that holds an integer is
    such a number where its value is known.
    """
    if isinstance(value, int):
        return None if isinstance(value, bool) else int(value)
    if str(getattr(value, "dtype", "")).endswith("bool"):
        return None
    try:
        return operator.index(value)
    except (TypeError, ValueError, RuntimeError):
        return None
