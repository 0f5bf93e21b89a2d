"""Calls of arrays that are sharded over explicit mesh axes: with automatic axes, results placed as the query is."""

from __future__ import annotations

from collections.abc import Callable
from typing import Any, NamedTuple

import jax
import numpy as np
from jax import Array
from jax.sharding import NamedSharding, PartitionSpec

from gossamer.jax import compat
from gossamer.jax.prepared import Prepared
from gossamer.plan.problem import Unsupported

NAMES = ("query", "key", "value")


class Placed(NamedTuple):
    """Where results go."""

    out: NamedSharding
    lse: NamedSharding


def placed(*given: Any) -> Placed | None:
    """Where the results of a query, a key and a value go that lie over explicit axes; None where none does.

    Raises:
        ValueError: they lie over such axes otherwise than by batch elements and heads, or not alike.
    """
    if not all(isinstance(x, Array) for x in given) or not any(compat.explicit_axes(x) for x in given):
        return None
    mesh = next(jax.typeof(x).sharding.mesh for x in given if compat.explicit_axes(x))
    lead: tuple[Any, Any] = (None, None)
    for name, x in zip(NAMES, given, strict=True):
        spec = tuple(jax.typeof(x).sharding.spec) if hasattr(jax.typeof(x), "sharding") else ()
        spec = spec + (None,) * (x.ndim - len(spec))
        if x.ndim == 2:
            positions, size = spec
            batch = heads = None
        else:
            batch, positions, heads, size = (None,) * (4 - x.ndim) + spec
        if positions is not None or size is not None:
            raise ValueError(
                f"{name} must be sharded over explicit mesh axes by batch elements and heads alone; it is as "
                f"{PartitionSpec(*spec)}: reshard it by jax.sharding.reshard"
            )
        if name == "query":
            lead = batch, heads
        elif any(mine not in (None, theirs) for mine, theirs in zip((batch, heads), lead, strict=True)):
            raise ValueError(
                f"{name} must be sharded over explicit mesh axes as query is, or not at all; it is as "
                f"{PartitionSpec(*spec)}: reshard it by jax.sharding.reshard"
            )
    query, *_ = given
    batch_axis, heads_axis = lead
    dims = (batch_axis, None, heads_axis, None)[4 - query.ndim :] if query.ndim > 2 else (None, None)
    *of_rows, _ = dims
    return Placed(*(NamedSharding(mesh, PartitionSpec(*spec)) for spec in (dims, of_rows)))


def by_auto(
    attend: Callable[..., tuple[Array, Array]], where: Placed, arguments: tuple[Any, ...], options: dict[str, Any]
) -> tuple[Array, Array]:
    """(out, lse) of `attend`, for which explicit axes are automatic.

    Args:
        arguments: query, key, value and the pattern.
        options: those of `attention`.

    Raises:
        Unsupported: a transformation that is no part of a program looks at the call.
    """
    query, key, value, pattern = arguments
    if not compat.is_staged() and any(compat.is_abstract(x) for x in (query, key, value)):
        raise Unsupported(
            "attention over explicit mesh axes has gradients and batched axes inside of jax.jit alone: "
            "jit the function that takes them"
        )
    arrays = {name: x for name, x in options.items() if isinstance(x, (Array, np.ndarray))}
    rest = {name: x for name, x in options.items() if name not in arrays}
    plan = pattern if isinstance(pattern, Prepared) else None  # which may be traced

    def call(query: Array, key: Array, value: Array, plan: Any, arrays: dict[str, Array]) -> tuple[Array, Array]:
        held = pattern if plan is None else plan
        out, lse = attend(query, key, value, held, **arrays, **rest, return_residual=True)
        return out, lse

    found: tuple[Array, Array] = jax.sharding.auto_axes(call, out_sharding=tuple(where))(
        query, key, value, plan, arrays
    )
    return found
