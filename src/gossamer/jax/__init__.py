"""The JAX edge: `attention` and what belongs to it on arrays of JAX. torch is never imported."""

try:
    import jax as _jax  # noqa: F401  (what is missing is said before anything else fails)
except ModuleNotFoundError as error:
    if error.name != "jax":
        raise
    raise ImportError("gossamer.jax needs jax; in a checkout of gossamer: pip install '.[jax]'", name="jax") from error

from typing import Any

from gossamer.jax import nn
from gossamer.jax.api import attention
from gossamer.jax.blocks import prepare_blocks
from gossamer.jax.explain import explain
from gossamer.jax.prepared import Prepared, prepare
from gossamer.jax.sparsity import create_sparsity_mask, sparse_attention
from gossamer.jax.splash import from_splash

__all__ = ["Prepared", "attention", "create_sparsity_mask", "explain", "from_splash", "nn", "prepare"]
__all__ += ["prepare_blocks", "sparse_attention"]


def __getattr__(name: str) -> Any:
    if name != "Plan":
        raise AttributeError(f"module 'gossamer.jax' has no attribute {name!r}")
    import warnings

    warnings.warn("gossamer.jax.Plan is called gossamer.jax.Prepared", DeprecationWarning, stacklevel=2)
    return Prepared
