"""What differs between releases of JAX, and what none of them has a public name for. The only file that asks."""

from __future__ import annotations

from contextlib import AbstractContextManager
from typing import Any

import jax
import jax.numpy as jnp
from jax import lax
from jax._src import config, core
from jax._src.array import ArrayImpl

__all__ = ["ArrayImpl"]  # the type of arrays that are there, no tracers

OLDEST = (0, 10, 2)  # the oldest release that the tests run with
if jax.__version_info__ < OLDEST:
    raise ImportError(f"gossamer.jax needs jax of at least {'.'.join(map(str, OLDEST))}, got {jax.__version__}")


def is_staged() -> bool:
    """Whether what is computed here is written into a program (`jit`, `scan`, `export`), not computed at once."""
    return isinstance(jnp.zeros(()), jax.core.Tracer)


def is_plain() -> bool:
    """Whether no transformation is under way (`jit`, `grad`, `vmap`): what is computed here is computed at once."""
    return bool(core.trace_state_clean())


def constants_staged() -> AbstractContextManager[Any]:
    """A context in which constants are computed within the program, in `jax.ensure_compile_time_eval` too."""
    folding: AbstractContextManager[Any] = config.eager_constant_folding(False)
    return folding


def is_abstract(x: Any) -> bool:
    """Whether the numbers of an array are not known here."""
    return isinstance(x, jax.core.Tracer)


def varying_axes(x: Any) -> frozenset[str]:
    """The manual axes of a mesh over which an array differs (`shard_map` with check_vma)."""
    kind = jax.typeof(x)
    found = getattr(kind, "manual_axis_type", None)
    names: frozenset[str] = found.varying if found is not None else getattr(kind, "vma", frozenset())
    return names


def as_varying_as(x: Any, primal: Any) -> Any:
    """A gradient in the type of what it is the gradient of: summed over axes along which that is the same."""
    have, want = varying_axes(x), varying_axes(primal)
    if have - want:
        x = lax.psum(x, tuple(sorted(have - want)))
    if want - have:
        x = lax.pcast(x, tuple(sorted(want - have)), to="varying")
    return x


def varying_with(results: Any, given: Any) -> Any:
    """Results of a foreign function, which says nothing of it, as varying as the arrays that it was given."""
    axes: frozenset[str] = frozenset().union(*(varying_axes(x) for x in jax.tree.leaves(given)))

    def of(x: Any) -> Any:
        missing = axes - varying_axes(x)
        return lax.pcast(x, tuple(sorted(missing)), to="varying") if missing else x

    return jax.tree.map(of, results)


def explicit_axes(x: Any) -> tuple[str, ...]:
    """The axes of a mesh of explicit axis types along which an array is sharded."""
    sharding = getattr(jax.typeof(x), "sharding", None)
    if sharding is None or not hasattr(sharding, "spec"):
        return ()
    explicit = set(getattr(sharding.mesh, "explicit_axes", ()))
    names: list[str] = []
    for part in sharding.spec:
        for name in part if isinstance(part, tuple) else (part,):
            if name in explicit:
                names.append(name)
    return tuple(names)
