"""The framework that computes: that of the given arrays. Neither is imported before it is used."""

from __future__ import annotations

import importlib
import sys
from collections.abc import Callable
from typing import Any, TypeVar

from gossamer.memo import Memo

ONCE = "particles have first derivatives alone: their gradients cannot be differentiated again"
MODULES = {"jax": "gossamer.particles.in_jax", "torch": "gossamer.particles.in_torch"}

Call = TypeVar("Call")

known: Memo[Any] = Memo()  # calls that were checked and prepared, by the keys of `key_of` of an edge


def edge_of(x: Any) -> Any:
    """The module that computes with such an array.

    Raises:
        TypeError: it is of neither framework.
    """
    jax, torch = sys.modules.get("jax"), sys.modules.get("torch")
    if jax is not None and isinstance(x, jax.Array):
        return _module("jax")
    if torch is not None and isinstance(x, torch.Tensor):
        return _module("torch")
    raise TypeError(f"particles must be arrays of jax or torch; got {type(x).__module__}.{type(x).__qualname__}")


def _module(name: str) -> Any:
    return sys.modules.get(MODULES[name]) or importlib.import_module(MODULES[name])


def call_of(key: Any, make: Callable[[], Call]) -> Call:
    """The call of a key: a kept one, or one that is made, and kept if there is a key."""
    if key is None:
        return make()
    found: Call | None = known.get(key)
    return known.put(key, make()) if found is None else found
