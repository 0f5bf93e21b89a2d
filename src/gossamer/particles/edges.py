"""The framework that computes: that of the given arrays. Neither is imported before it is used."""

from __future__ import annotations

import importlib
import sys
from typing import Any

ONCE = "particles have first derivatives alone: their gradients cannot be differentiated again"
MODULES = {"jax": "gossamer.particles.in_jax", "torch": "gossamer.particles.in_torch"}


def edge_of(x: Any) -> Any:
    """The module that computes with such an array.

    Raises:
        TypeError: it is of neither framework.
    """
    jax, torch = sys.modules.get("jax"), sys.modules.get("torch")
    if jax is not None and isinstance(x, jax.Array):
        return importlib.import_module(MODULES["jax"])
    if torch is not None and isinstance(x, torch.Tensor):
        return importlib.import_module(MODULES["torch"])
    raise TypeError(f"particles must be arrays of jax or torch; got {type(x).__module__}.{type(x).__qualname__}")
