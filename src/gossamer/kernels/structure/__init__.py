"""Structure made on a GPU in few launches: what the array operations of `layouts.device` define, in Triton.

Nothing is read back and nothing is added in an order that is left open: the same numbers give the same arrays.
"""

from __future__ import annotations

from functools import cache
from importlib.util import find_spec


@cache
def has_triton() -> bool:
    """Whether Triton is installed, which these kernels and those of `hopper.schedule` are written in."""
    try:
        return find_spec("triton") is not None
    except ImportError:
        return False
