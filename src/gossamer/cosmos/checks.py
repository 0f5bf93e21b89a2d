"""Descriptions of arguments for messages, and checks whether their numbers can be read."""

from __future__ import annotations

from typing import Any

import jax
import numpy as np

from gossamer.checks import real, show


def is_known(x: Any) -> bool:
    """Whether numbers are there, not traced by a transformation of JAX."""
    return not any(isinstance(leaf, jax.core.Tracer) for leaf in jax.tree.leaves(x))


def describe(x: Any) -> str:
    """A value in a message: an array by its type and shape, anything else as Python shows it, cut."""
    return f"an array of {x.dtype} {tuple(x.shape)}" if hasattr(x, "dtype") and np.ndim(x) else show(x)


def number(name: str, value: Any, least: float, most: float) -> None:
    """Raises ValueError unless a value that is known is one number within [least, most]."""
    known = real(value)
    if is_known(value) and (known is None or not least <= known <= most):
        raise ValueError(f"{name} must be a number from {least:g} to {most:g}; got {describe(value)}")
