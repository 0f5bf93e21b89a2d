"""What arguments are, in words, and whether their numbers can be looked at."""

from __future__ import annotations

from typing import Any

import jax
import numpy as np


def is_known(x: Any) -> bool:
    """Whether numbers are there, not traced by a transformation of JAX."""
    return not any(isinstance(leaf, jax.core.Tracer) for leaf in jax.tree.leaves(x))


def describe(x: Any) -> str:
    """A value in a message: an array by its type and shape, anything else as Python shows it, at most 80 letters."""
    if hasattr(x, "shape") and hasattr(x, "dtype") and np.ndim(x):
        return f"an array of {x.dtype} {tuple(x.shape)}"
    text = repr(x)
    return text if len(text) <= 80 else f"{text[:77]}..."


def number(name: str, value: Any, least: float, most: float) -> None:
    """Raises ValueError unless a value that is known is one number within [least, most]."""
    if not is_known(value):
        return
    right = not isinstance(value, (bool, str)) and np.ndim(value) == 0
    try:
        right = right and least <= float(value) <= most
    except (TypeError, ValueError):
        right = False
    if not right:
        raise ValueError(f"{name} must be a number from {least:g} to {most:g}; got {describe(value)}")
