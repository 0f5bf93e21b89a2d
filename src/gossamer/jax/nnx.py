"""`MultiHeadAttention` of `gossamer.jax.nn`, on Flax's NNX."""

from __future__ import annotations

from typing import Any

import jax.numpy as jnp
from flax import nnx
from jax import Array

from gossamer.checks import integer
from gossamer.jax.api import attention
from gossamer.jax.prepared import Prepared


class MultiHeadAttention(nnx.Module):
    """Self-attention of a layer over the pairs that a pattern keeps: linear layers around `attention`.

    Args:
        dim: of x and of the result, a multiple of `heads`.
        heads: query heads, each of dim / heads numbers.
        pattern: as `attention` takes it, for every call that is given none.
        kv_heads: heads of keys and values, of which `heads` is a multiple; by default as many.
        use_bias: of the linear layers; dtype and param_dtype: likewise.
        rngs: of the parameters.

    Examples:
        >>> layer = gsj.nn.MultiHeadAttention(32, 4, gs.SlidingWindow(16), kv_heads=2, rngs=nnx.Rngs(0))
        >>> layer(jnp.ones((2, 100, 32))).shape
        (2, 100, 32)
    """

    def __init__(
        self, dim: int, heads: int, pattern: Any = None, *, kv_heads: int | None = None, use_bias: bool = False,
        dtype: Any = None, param_dtype: Any = jnp.float32, rngs: nnx.Rngs,
    ) -> None:  # fmt: skip
        self.dim, self.heads = integer("dim", dim, minimum=1), integer("heads", heads, minimum=1)
        self.kv_heads = self.heads if kv_heads is None else integer("kv_heads", kv_heads, minimum=1)
        if self.dim % self.heads or self.heads % self.kv_heads:
            raise ValueError(
                f"dim must be a multiple of heads, and heads of kv_heads; got dim={dim}, heads={heads}, "
                f"kv_heads={self.kv_heads}"
            )
        self.pattern = nnx.data(pattern) if isinstance(pattern, Prepared) else nnx.static(pattern)
        size = self.dim // self.heads
        options: dict[str, Any] = {"use_bias": use_bias, "dtype": dtype, "param_dtype": param_dtype, "rngs": rngs}
        self.query = nnx.Linear(dim, dim, **options)
        self.key, self.value = (nnx.Linear(dim, self.kv_heads * size, **options) for _ in range(2))
        self.out = nnx.Linear(dim, dim, **options)

    def __call__(self, x: Array, pattern: Any = None, **terms: Any) -> Array:
        """(B, T, dim) of x (B, T, dim); terms: further arguments of `attention`."""
        if x.ndim != 3 or x.shape[2] != self.dim:
            raise ValueError(f"x must be (B, T, {self.dim}); got shape {x.shape}")
        B, T, _ = x.shape
        q = self.query(x).reshape(B, T, self.heads, -1)
        k, v = (of(x).reshape(B, T, self.kv_heads, -1) for of in (self.key, self.value))
        out = attention(q, k, v, self.pattern if pattern is None else pattern, **terms)
        return self.out(out.reshape(B, T, -1))
