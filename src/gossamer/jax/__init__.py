"""The JAX edge: `attention` and what belongs to it on arrays of JAX. torch is never imported."""

try:
    import jax as _jax  # noqa: F401  (what is missing is said before anything else fails)
except ModuleNotFoundError as error:
    if error.name != "jax":
        raise
    raise ImportError("gossamer.jax needs jax; in a checkout of gossamer: pip install '.[jax]'", name="jax") from error

import importlib
from typing import TYPE_CHECKING, Any

from gossamer.jax import nn
from gossamer.jax.api import attention
from gossamer.jax.blocks import prepare_blocks
from gossamer.jax.explain import explain
from gossamer.jax.prepared import Prepared, prepare
from gossamer.jax.sparsity import create_sparsity_mask, sparse_attention
from gossamer.jax.splash import from_splash

if TYPE_CHECKING:  # what type checkers and editors see
    from gossamer.blocks.in_jax import SelectedBlocks, topk_blocks
    from gossamer.entmax.in_jax import EntmaxAux, entmax_attention

__all__ = ["EntmaxAux", "Prepared", "attention", "create_sparsity_mask", "entmax_attention", "explain", "from_splash"]
__all__ += ["SelectedBlocks", "nn", "prepare", "prepare_blocks", "sparse_attention", "topk_blocks"]

# This file is the public interface, which no other imports. Operations have rooms of their own above those of `jax/`,
# and are loaded on their first use.
_ROOMS = {
    "EntmaxAux": "gossamer.entmax.in_jax",
    "SelectedBlocks": "gossamer.blocks.in_jax",
    "entmax_attention": "gossamer.entmax.in_jax",
    "topk_blocks": "gossamer.blocks.in_jax",
}


def __getattr__(name: str) -> Any:
    if name in _ROOMS:
        found = globals()[name] = getattr(importlib.import_module(_ROOMS[name]), name)  # looked up once
        return found
    if name != "Plan":
        raise AttributeError(f"module 'gossamer.jax' has no attribute {name!r}")
    import warnings

    warnings.warn("gossamer.jax.Plan is called gossamer.jax.Prepared", DeprecationWarning, stacklevel=2)
    return Prepared
