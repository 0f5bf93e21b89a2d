"""The arguments of `attention` in one form, and every check of them: (is it right, what the message says)."""

from __future__ import annotations

import math
from collections.abc import Iterator, Sequence
from typing import Any, NamedTuple, TypeAlias

import jax
import jax.numpy as jnp
import numpy as np
from jax import Array

from gossamer import checks
from gossamer.checks import Check, Wording, raise_first, real, whole
from gossamer.jax import compat
from gossamer.jax.tiling import Vectors
from gossamer.kernels.launch import compute_dtype
from gossamer.plan.arguments import (
    ACCEPTED,
    FLOATS,
    HEAD_SIZES,
    MAX_HEAD,
    MOST,
    POSITIONS,
    check_distance,
    factor_checks,
    listed_lengths,
    offset_check,
    shape_check,
)
from gossamer.plan.problem import SCORE_TERMS, Problem

FORMS = "(N, D), (T, N, H) or (B, T, N, H)"
Lengths: TypeAlias = Array | np.ndarray | Sequence[int]


class Arguments(NamedTuple):
    """The arguments of one call: q (B, Q, H, D), k (B, K, G, D), v (B, K, G, E)."""

    q: Any
    k: Any
    v: Any
    scale: float
    q_offset: int
    softcap: float | None
    vectors: Vectors
    dims: int  # of the arrays that were given
    implementation: str | None
    deterministic: bool
    alibi_distance: str | None = None  # of DISTANCES


def describe(value: Any) -> str:
    """What was given, for a message: the shape and dtype of an array, the repr of anything else."""
    return f"shape {tuple(value.shape)}, {value.dtype}" if is_array(value) else checks.describe(value)


def is_array(x: Any) -> bool:
    """Whether it is an array of JAX or numpy, or a shape with a dtype that stands for one."""
    return isinstance(x, (Array, np.ndarray, jax.ShapeDtypeStruct))


def shape_of(x: Any, name: str) -> tuple[int, ...]:
    """(B, N, heads, size) of an array in any accepted form.

    Raises:
        ValueError: it is no array, or has another number of dimensions.
    """
    if not is_array(x):
        raise ValueError(f"{name} must be an array of JAX or numpy; got {describe(x)}")
    if not 2 <= len(x.shape) <= 4:
        raise ValueError(f"{name} must have 2, 3 or 4 dimensions: {FORMS}; got {describe(x)}")
    if len(x.shape) == 2:
        N, size = x.shape
        return 1, N, 1, size
    return (1, *x.shape) if len(x.shape) == 3 else tuple(x.shape)


def in_four(x: Any) -> Array:
    """The array as (B, N, heads, size)."""
    x = jnp.asarray(x)
    if x.ndim == 2:
        return x[None, :, None]
    return x[None] if x.ndim == 3 else x


def as_given(out: Array, lse: Array, dims: int) -> tuple[Array, Array]:
    """out and lse with as many dimensions as q had."""
    if dims == 4:
        return out, lse
    missing = 0 if dims == 3 else (0, 2)
    return out.squeeze(missing), lse.squeeze(missing)


class AttentionOptions(NamedTuple):
    """The options of a call of `attention`, as they may be given: its documentation says what they mean."""

    scale: Any = None
    q_offset: Any = None
    key_lengths: Any = None
    softcap: Any = None
    sink_logits: Any = None
    alibi_slopes: Any = None
    alibi_distance: Any = None
    implementation: Any = None
    deterministic: Any = False


def arguments_of(q: Any, k: Any, v: Any, o: AttentionOptions, names: Sequence[str]) -> Arguments:
    """The arguments of a call, checked.

    Raises:
        ValueError: an argument is wrong.
    """
    for name, x in (("query", q), ("key", k), ("value", v)):
        if not isinstance(x, (Array, np.ndarray)):
            raise ValueError(f"{name} must be an array of JAX or numpy; got {describe(x)}")
    if not (q.ndim == k.ndim == v.ndim and 2 <= q.ndim <= 4):
        raise ValueError(
            f"query, key and value must all have 2, 3 or 4 dimensions: {FORMS}; got shapes {q.shape}, {k.shape} and "
            f"{v.shape}"
        )
    dims = q.ndim
    q, k, v = in_four(q), in_four(k), in_four(v)
    (B, Q, _, D), K = q.shape, k.shape[1]
    lengths, sinks, slopes = vectors = Vectors(_lengths(o.key_lengths, B), o.sink_logits, o.alibi_slopes)
    raise_first(_checks(q, k, v, vectors), describe)
    q, scale = with_number(q, o.scale)
    scale, q_offset, softcap = numbers(scale, o.q_offset, o.softcap, Q, K, D, str(q.dtype))
    k, v = (x if len(x) == B else jnp.broadcast_to(x, (B, *x.shape[1:])) for x in (k, v))
    for name, x in (("query", q), ("key", k), ("value", v)):
        if axes := compat.explicit_axes(x):
            raise ValueError(
                f"{name} must not be sharded over explicit mesh axes, of which this function has no rule; it is over "
                f"{', '.join(axes)}: call it inside jax.shard_map, or make the mesh with AxisType.Auto"
            )
    named = o.implementation is None or o.implementation in names
    raise_first([(named, "implementation", o.implementation, f"be None or one of {', '.join(names)}")], describe)
    check_flags(deterministic=o.deterministic)
    if o.alibi_distance is not None:
        check_distance(o.alibi_distance, slopes is not None)
    wide = jnp.dtype(compute_dtype(str(q.dtype)))
    vectors = Vectors(
        None if lengths is None else _clamped(lengths, K),
        None if sinks is None else jnp.asarray(sinks).astype(wide),
        None if slopes is None else constant(jnp.asarray(slopes).astype(wide)),
    )
    q_offset = K - Q if q_offset is None else q_offset
    return Arguments(
        q, k, v, scale, q_offset, softcap, vectors, dims, o.implementation, o.deterministic, o.alibi_distance
    )


def with_number(q: Array, scale: Any) -> tuple[Array, Any]:
    """q (..., D) and a number that together mean what q and an array without dimensions as the scale mean.

    Programs are made for numbers. So q is multiplied by what the array is over a power of two near D ** -0.5, in the
    type that scores are computed in, and rounded once to its own type. One that is known is a number by itself.
    """
    if not isinstance(scale, Array) or scale.ndim or not jnp.issubdtype(scale.dtype, jnp.floating):
        return q, scale
    if not compat.is_abstract(scale):
        return q, float(scale)
    wide, base = jnp.dtype(compute_dtype(str(q.dtype))), 2.0 ** -round(math.log2(q.shape[-1]) / 2)
    return (q.astype(wide) * (scale.astype(wide) / base)).astype(q.dtype), base


def numbers(
    scale: Any, q_offset: Any, softcap: Any, Q: int, K: int, D: int, dtype: str
) -> tuple[float, int | None, float | None]:
    """(scale, q_offset, softcap) as numbers of Python; a scale of None is D ** -0.5.

    Raises:
        ValueError: one is wrong.
    """
    scale, softcap = (x if real(x) is None else real(x) for x in (scale, softcap))
    offset = whole(q_offset)
    q_offset = q_offset if offset is None else offset
    raise_first(_number_checks(scale, q_offset, softcap, Q, K, D, dtype), describe)
    return float(D**-0.5 if scale is None else scale), q_offset, None if softcap is None else float(softcap)


def check_flags(**flags: Any) -> None:
    """Raises ValueError where one is not a bool."""
    raise_first(((isinstance(x, bool), name, x, "be True or False") for name, x in flags.items()), describe)


def _lengths(x: Any, B: int) -> Any:
    """Key lengths in a list or a tuple as an array; anything else as it is."""
    if not isinstance(x, (list, tuple)):
        return x
    return np.asarray(listed_lengths("key_lengths", x, [whole(one) for one in x], B, describe), dtype=np.int32)


def _clamped(x: Any, K: int) -> Array:
    """Integers of any type and size as int32 in [0, K]."""
    if isinstance(x, np.ndarray):  # not to be cut to 32 bits first
        return jnp.asarray(
            (np.minimum(x, K) if x.dtype == np.uint64 else np.clip(x.astype(np.int64), 0, K)).astype(np.int32)
        )
    if x.dtype.itemsize < 4:
        x = x.astype(jnp.int32)
    return jnp.minimum(jnp.maximum(x, 0), x.dtype.type(K)).astype(jnp.int32)


@jax.custom_vjp
def constant(slopes: Array) -> Array:
    """Slopes as they are, whose gradient raises: none is computed for them."""
    return slopes


def _no_gradient(saved: None, cotangent: Array) -> Any:
    raise ValueError(
        "alibi_slopes must be a constant, for which no gradient is computed; give jax.lax.stop_gradient(alibi_slopes)"
    )


constant.defvjp(lambda slopes: (slopes, None), _no_gradient)


def _checks(q: Array, k: Array, v: Array, vectors: Vectors) -> Iterator[Check]:
    """(right, argument, value given, what it must do); each may rely on the ones before it."""
    for name, x in (("query", q), ("key", k), ("value", v)):
        known = all(isinstance(n, int) for n in x.shape)
        yield known, name, Wording(f"shape {x.shape}"), "be of sizes that are known; symbolic ones are not taken"
    yield str(q.dtype) in FLOATS, "query", q, f"be an array of {ACCEPTED}"
    B, Q, H, D = q.shape
    for name, x in (("key", k), ("value", v)):
        yield x.dtype == q.dtype, name, x, f"be an array of query's dtype, {q.dtype}"
        yield x.shape[0] in (1, B), name, x, f"have B={B} batch elements, as query has, or one for all"
    for name, x in (("query", q), ("key", k), ("value", v)):
        yield min(x.shape[2:]) > 0, name, x, "have heads, and a head size of at least 1"
    _, K, G, _ = k.shape
    yield k.shape[3] == D, "key", k, f"have the head size of query, D={D}"
    yield v.shape[1:3] == (K, G), "value", v, f"have the positions and heads of key, (K, G) = {(K, G)}"
    if H % (G or H + 1):
        yield False, "key", Wording(f"G={G}, {describe(k)}"), f"have a number of heads G that divides query's H={H}"
    yield max(D, v.shape[3]) <= MAX_HEAD, "query and value", (D, v.shape[3]), HEAD_SIZES
    yield max(Q, K) < MOST, "query and key", (Q, K), POSITIONS
    for name, x in zip(vectors._fields, vectors, strict=True):
        if x is None:
            continue
        array, lengths = isinstance(x, (Array, np.ndarray)), name == "key_lengths"
        yield array, name, x, f"be an array{', a list of integers' * lengths} or None"
        yield shape_check(name, x, B, H)
        right = jnp.issubdtype(x.dtype, jnp.integer) if lengths else str(x.dtype) in FLOATS
        yield right, name, x, "be integers" if lengths else f"be {ACCEPTED}"


def _number_checks(scale: Any, q_offset: Any, softcap: Any, Q: int, K: int, D: int, dtype: str) -> Iterator[Check]:
    for name, x in (("scale", scale), ("softcap", softcap)):
        kinds = "a number, an array of floats without dimensions" if name == "scale" else "a number that is known"
        yield x is None or isinstance(x, float), name, x, f"be {kinds}, or None"
    yield from factor_checks(scale, softcap, D, dtype)
    known = q_offset is None or type(q_offset) is int
    yield known, "q_offset", q_offset, "be an int or None: it says where the layout's pairs are"
    if q_offset is not None:
        yield offset_check(q_offset, Q, K)


def is_empty(q: Any, k: Any) -> bool:
    """Whether there are no batch elements, no queries or no keys: (B, positions, heads, size)."""
    return 0 in (*q.shape[:2], k.shape[1])


def problem_of(a: Arguments, platform: str, backward: bool = True) -> Problem:
    """The static facts of a call on a platform ("cpu", "cuda", ...)."""
    B, Q, H, D = a.q.shape
    (_, K, G, _), (*_, E) = a.k.shape, a.v.shape
    terms = {name for name in SCORE_TERMS if getattr(a.vectors, name, None) is not None}
    if a.softcap is not None:
        terms.add("softcap")
    if a.q_offset != K - Q:
        terms.add("q_offset")
    if a.alibi_distance == "absolute":
        terms.add("alibi_distance")
    return Problem(
        B=B, H=H, G=G, Q=Q, K=K, D=D, E=E, dtype=str(a.q.dtype), device=platform, score_terms=frozenset(terms),
        backward=backward, deterministic=a.deterministic, softcap=a.softcap,
    )  # fmt: skip
