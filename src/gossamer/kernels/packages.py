"""The installed packages in which kernels are written; nothing is imported to know it."""

from __future__ import annotations

from functools import cache
from importlib.util import find_spec


@cache
def has_triton() -> bool:
    """Whether Triton is. A module of kernels whose import fails all the same is broken, and its error is not caught."""
    try:
        return find_spec("triton") is not None
    except ImportError:  # of a finder that blocks it
        return False
