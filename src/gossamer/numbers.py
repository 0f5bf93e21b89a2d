"""What counts as a number, the same in every room."""

from __future__ import annotations

import math
import operator
from collections.abc import Iterable
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


def real(value: Any) -> float | None:
    """`value` as a float if it is a real number whose value is known; None for all else, booleans too.

    A number of Python or numpy, or an array of any library without dimensions. One that is traced has no value yet, and
    one that asks for a gradient would lose it.
    """
    if hasattr(value, "shape"):
        kind = str(value.dtype).rpartition(".")[2]
        known = not len(value.shape) and kind.startswith(("int", "uint", "float", "bfloat"))
        if not known or getattr(value, "requires_grad", False):
            return None
    elif isinstance(value, bool) or not isinstance(value, (int, float)):
        return None
    try:
        return float(value)
    except OverflowError:  # of an int of Python
        return math.inf if value > 0 else -math.inf
    except (TypeError, ValueError, RuntimeError):
        return None


def sized(value: Any) -> bool:
    """Whether it is several numbers, not one: an iterable, or an array with dimensions."""
    return len(value.shape) > 0 if hasattr(value, "shape") else isinstance(value, Iterable)
