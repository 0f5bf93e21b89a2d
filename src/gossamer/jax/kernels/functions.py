"""The functions that steps of a launch name and that are no kernels, by JAX: those of `torch.functions` that it needs.

Each takes what its key holds, then its arrays in the shapes of the step. One that writes arguments returns what they
hold then; `WRITES` says how many, from the last.
"""

from __future__ import annotations

from collections.abc import Callable
from typing import Any

import jax
import jax.numpy as jnp
from jax import Array

WRITES = {"copy": 1, "add": 1, "zero": 1, "sums_of_groups": 1, "empty_rows": 2, "combine": 2}


def copy(source: Array, target: Array) -> tuple[Array]:
    """The source in the target's type."""
    return (source.astype(target.dtype),)


def add(share: Array, target: Array) -> tuple[Array]:
    """Their sum."""
    return ((target + share.astype(target.dtype)).astype(target.dtype),)


def zero(target: Array) -> tuple[Array]:
    """Zeros."""
    return (jnp.zeros_like(target),)


def sums_of_groups(x: Array, result: Array) -> tuple[Array]:
    """(B, G, rows, size) from the shares of G * n heads."""
    B, G, *rest = result.shape
    return (x.reshape(B, G, -1, *rest).sum(2).astype(result.dtype),)


def empty_rows(sinks: Array | None, out: Array, lse: Array) -> tuple[Array, Array]:
    """What rows that keep nothing have: out 0, and an lse of -inf or their sink."""
    of_rows = jnp.full_like(lse, -jnp.inf)
    return jnp.zeros_like(out), of_rows if sinks is None else jnp.broadcast_to(sinks[:, None], lse.shape)


def rows_of_results(dout: Array, dlse: Array | None, out: Array, lse: Array) -> tuple[Array, Array]:
    """(delta, lse), each (B, H, Q): see `kernels.row_formulas.row_terms`."""
    empty = lse == -jnp.inf
    delta = jnp.where(out == 0, 0.0, dout.astype(lse.dtype) * out.astype(lse.dtype)).sum(-1)
    delta = delta if dlse is None else delta - dlse
    return jnp.where(empty, 0.0, delta), jnp.where(empty, jnp.inf, lse)


def combine(part_out: Array, part_lse: Array, out: Array, lse: Array) -> tuple[Array, Array]:
    """Two attentions over the same rows as one."""
    # Of two weights near 0 and 1, neither is made of the other: it would lose its digits. Without keys both are NaN.
    weight, rest = (jnp.nan_to_num(jax.nn.sigmoid(x), nan=0.0)[..., None] for x in (part_lse - lse, lse - part_lse))
    wide = out.astype(lse.dtype) * rest + part_out.astype(lse.dtype) * weight
    return wide.astype(out.dtype), jnp.logaddexp(lse, part_lse)


def class_lengths(first: int, classes: int, step: int, K: int, lengths: Array) -> Array:
    """Key lengths (B or classes,) of residue classes from those of a call: of L keys, ceil((L - first) / step)."""
    of_class = jnp.arange(first, first + classes, dtype=jnp.int32)
    return -((of_class - jnp.clip(lengths, 0, K)) // step)


def repeated(times: int, x: Array) -> Array:
    """A vector, several times."""
    return jnp.tile(x, times)


FUNCTIONS: dict[str, Callable[..., Any]] = {
    function.__name__: function
    for function in (copy, add, zero, sums_of_groups, empty_rows, rows_of_results, combine, class_lengths, repeated)
}
