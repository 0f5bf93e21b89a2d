"""Calls of `attention` on the inputs of the oracle."""

from __future__ import annotations

from collections.abc import Callable
from typing import Any

import jax
import jax.numpy as jnp
import numpy as np

import gossamer as gs
import gossamer.jax as gsj
from gossamer.testing.cases import Case
from tests.jax.oracle import Expected, Inputs

ROUNDING = {"float16": 2.0**-10, "bfloat16": 2.0**-7, "float32": 2.0**-22, "float64": 2.0**-51}


def inputs_of(case: Case, dtype: str, seed: int = 0) -> Inputs:
    """Fresh inputs of a case."""
    rng = np.random.default_rng(seed)
    pattern, c = case.pattern(), case
    wide = np.float64 if dtype == "float64" else np.float32
    of_slopes = (c.B, c.H) if c.alibi_slopes == "each" else c.H
    slopes = (rng.standard_normal(of_slopes) * 0.05).astype(wide) if c.alibi_slopes else None
    sinks = rng.standard_normal(c.H).astype(wide) if c.sink_logits else None
    lengths = None if c.key_lengths is None else np.asarray(c.key_lengths)
    offset = c.K - c.Q if c.q_offset is None else c.q_offset
    return made(
        rng, (c.B, c.H, c.G, c.Q, c.K, c.D, c.E), dtype, kept(pattern, c.Q, c.K, offset), scale=c.D**-0.5,
        q_offset=offset, softcap=c.softcap, key_lengths=lengths, sink_logits=sinks, alibi_slopes=slopes,
        alibi_distance=c.alibi_distance,
    )  # fmt: skip


def kept(pattern: gs.Pattern, Q: int, K: int, q_offset: int) -> np.ndarray:
    """The dense mask of a pattern, which broadcasts to (B, H, Q, K)."""
    mask = pattern.materialize(Q, K, q_offset)
    return mask if mask.ndim == 4 else mask[None, None]


def made(
    rng: np.random.Generator, sizes: tuple[int, ...], dtype: str, keep: np.ndarray, **terms: Any
) -> Inputs:  # fmt: skip
    """Inputs from a standard normal distribution, rounded to a type."""
    B, H, G, Q, K, D, E = sizes
    shapes = (B, Q, H, D), (B, K, G, D), (B, K, G, E), (B, Q, H, E)
    q, k, v, dout = (rng.standard_normal(shape).astype(jnp.dtype(dtype)) for shape in shapes)
    wide = np.float64 if dtype == "float64" else np.float32
    return Inputs(q, k, v, dout, rng.standard_normal((B, Q, H)).astype(wide), keep, **terms)


def run(x: Inputs, pattern: Any, implementation: str | None = None) -> Expected:
    """What `attention` and its gradient give, in one compiled function."""
    return runner(x, pattern, implementation)(x)


def runner(x: Inputs, pattern: Any, implementation: str | None = None) -> Callable[[Inputs], Expected]:
    """`run` for inputs of the same shapes and numbers, compiled once."""
    options: dict[str, Any] = {"scale": x.scale, "softcap": x.softcap, "implementation": implementation}
    options["alibi_distance"] = x.alibi_distance
    (_, K, *_), (_, Q, *_) = x.k.shape, x.q.shape
    if x.q_offset != K - Q:
        options["q_offset"] = x.q_offset

    @jax.jit
    def both(arrays: Any, dout: Any, dlse: Any) -> Any:
        q, k, v, sinks, lengths, slopes = arrays

        def forward(q: Any, k: Any, v: Any, sinks: Any) -> Any:
            return gsj.attention(
                q, k, v, pattern, sink_logits=sinks, key_lengths=lengths, alibi_slopes=slopes, return_residual=True,
                **options,
            )  # fmt: skip

        (out, lse), back = jax.vjp(forward, q, k, v, sinks)
        return out, lse, *back((dout, jnp.where(lse == -jnp.inf, 0.0, dlse)))

    def call(x: Inputs) -> Expected:
        lengths = None if x.key_lengths is None else np.clip(x.key_lengths, 0, K).astype(np.int32)
        return Expected(*both((x.q, x.k, x.v, x.sink_logits, lengths, x.alibi_slopes), x.dout, x.dlse))

    return call


def scattered(Q: int, K: int, each: int, long: int = 0) -> gs.Pattern:
    """So many random keys a query, of some queries none; the first few keep nearly all."""
    rng = np.random.default_rng(Q + each)
    rows, columns = np.repeat(np.arange(Q), each), rng.integers(0, K, Q * each)
    some = rows % 7 != 3
    hubs = [np.repeat(np.arange(long), K - 5), np.tile(np.arange(K - 5), long)]
    pairs = np.unique(np.concatenate([np.stack([rows, columns])[:, some], np.stack(hubs)], 1), axis=1)
    return gs.CSR.from_edge_index(pairs[::-1].astype(np.int64), (K, Q))
