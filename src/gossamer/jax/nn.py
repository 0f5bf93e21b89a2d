"""Attention layers for JAX's libraries of modules: a module of Flax NNX, and a function around a layer of Equinox.

Neither library is imported before it is asked for.
"""

from __future__ import annotations

import importlib
from typing import Any

import jax
from jax import Array

from gossamer.jax.api import attention
from gossamer.jax.arguments import describe

__all__ = ["MultiHeadAttention", "multihead_attention"]  # noqa: F822  (the first is made by __getattr__)


def __getattr__(name: str) -> Any:
    """`MultiHeadAttention`, whose base is a class of Flax."""
    if name != "MultiHeadAttention":
        raise AttributeError(f"module {__name__!r} has no attribute {name!r}")
    try:
        importlib.import_module("flax.nnx")
    except ModuleNotFoundError as error:
        raise ImportError(
            "gossamer.jax.nn.MultiHeadAttention needs flax, which no extra installs", name="flax"
        ) from error
    return importlib.import_module("gossamer.jax.nnx").MultiHeadAttention


def multihead_attention(
    layer: Any, query: Array, key: Array | None = None, value: Array | None = None, pattern: Any = None, **terms: Any
) -> Array:
    """What an `equinox.nn.MultiheadAttention` computes, without dropout, over the pairs that a pattern keeps.

    As in Equinox, arrays have no batch: `jax.vmap` gives one.

    Args:
        layer: its projections, and its numbers of heads and sizes, are read; any object with these names will do.
        query: (T, size).
        key: (S, size), by default the query.
        value: (S, size), by default the key.
        pattern: as `attention` takes it.
        terms: further arguments of `attention`.

    Returns:
        (T, size).

    Raises:
        ValueError: an array has another number of dimensions, or `attention` refuses one.

    Examples:
        >>> import equinox
        >>> layer = equinox.nn.MultiheadAttention(num_heads=4, query_size=32, key=jax.random.key(0))
        >>> x = jax.random.normal(jax.random.key(1), (2, 100, 32))
        >>> run = lambda x: gsj.nn.multihead_attention(layer, x, pattern=gs.SlidingWindow(16))
        >>> jax.vmap(run)(x).shape
        (2, 100, 32)
    """
    key = query if key is None else key
    value = key if value is None else value
    for name, x in (("query", query), ("key", key), ("value", value)):
        if getattr(x, "ndim", None) != 2:
            raise ValueError(
                f"{name} must be (positions, size), without a batch: jax.vmap gives one; got {describe(x)}"
            )

    def projected(by: Any, x: Array, size: int) -> Array:
        return jax.vmap(by)(x).reshape(len(x), -1, size)

    q = projected(layer.query_proj, query, layer.qk_size)
    k = projected(layer.key_proj, key, layer.qk_size)
    v = projected(layer.value_proj, value, layer.vo_size)
    out = attention(q, k, v, pattern, **terms)
    return jax.vmap(layer.output_proj)(out.reshape(len(query), -1))
