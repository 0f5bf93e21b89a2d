"""The arguments of `attention` in one form, and every check of them: (is it right, what the message says)."""

from __future__ import annotations

import math
from collections.abc import Iterable, Iterator, Sequence
from typing import Any, NamedTuple, TypeAlias

import jax
import jax.numpy as jnp
import numpy as np
from jax import Array

from gossamer.jax import compat
from gossamer.jax.tiling import Vectors
from gossamer.kernels.launch import compute_dtype
from gossamer.numbers import real, whole
from gossamer.patterns.validate import show
from gossamer.plan.problem import DISTANCES, MAX_HEAD, SCORE_TERMS, Problem, most_offset, within_positions

FLOATS = ("float16", "bfloat16", "float32", "float64")
ACCEPTED = "float16, bfloat16, float32 or float64"
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


class Wording(NamedTuple):
    """What was given, explained in words."""

    text: str


def describe(value: Any) -> str:
    """What was given, for a message: the shape and dtype of an array, the repr of anything else."""
    if isinstance(value, Wording):
        return value.text
    if isinstance(value, (Array, np.ndarray, jax.ShapeDtypeStruct)):
        return f"shape {tuple(value.shape)}, {value.dtype}"
    return f"{show(value)} ({type(value).__name__})"


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


def arguments_of(
    q: Any, k: Any, v: Any, *, scale: Any, q_offset: Any, key_lengths: Any, softcap: Any, sink_logits: Any,
    alibi_slopes: Any, implementation: Any, deterministic: Any, names: Sequence[str], alibi_distance: Any = None,
) -> Arguments:  # fmt: skip
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
    vectors = Vectors(_lengths(key_lengths, B), *(None if x is None else x for x in (sink_logits, alibi_slopes)))
    _raise_first(_checks(q, k, v, vectors))
    q, scale = with_number(q, scale)
    scale, q_offset, softcap = numbers(scale, q_offset, softcap, Q, K, D, str(q.dtype))
    k, v = (x if len(x) == B else jnp.broadcast_to(x, (B, *x.shape[1:])) for x in (k, v))
    for name, x in (("query", q), ("key", k), ("value", v)):
        if axes := compat.explicit_axes(x):
            raise ValueError(
                f"{name} must not be sharded over explicit mesh axes, of which attention has no rule; it is over "
                f"{', '.join(axes)}: call attention inside jax.shard_map, or make the mesh with AxisType.Auto"
            )
    if implementation is not None and implementation not in names:
        raise ValueError(f"implementation must be None or one of {', '.join(names)}; got {describe(implementation)}")
    check_flags(deterministic=deterministic)
    known = alibi_distance is None or (isinstance(alibi_distance, str) and alibi_distance in DISTANCES)
    wanted = 'be "signed", slope * (j - i), "absolute", -slope * |i - j|, or None'
    _raise_first([(known, "alibi_distance", alibi_distance, wanted)])
    without = alibi_distance is None or alibi_slopes is not None
    _raise_first([(without, "alibi_distance", alibi_distance, "be None without alibi_slopes")])
    wide = jnp.dtype(compute_dtype(str(q.dtype)))
    lengths = vectors.key_lengths
    vectors = Vectors(
        None if lengths is None else _clamped(lengths, K),
        None if sink_logits is None else jnp.asarray(sink_logits).astype(wide),
        None if alibi_slopes is None else constant(jnp.asarray(alibi_slopes).astype(wide)),
    )
    return Arguments(
        q,
        k,
        v,
        scale,
        K - Q if q_offset is None else q_offset,
        softcap,
        vectors,
        dims,
        implementation,
        deterministic,
        alibi_distance,
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


class Numbers(NamedTuple):
    """The numbers of a call."""

    scale: float
    q_offset: int | None
    softcap: float | None


def numbers(scale: Any, q_offset: Any, softcap: Any, Q: int, K: int, D: int, dtype: str) -> Numbers:
    """The numbers of a call, of Python; a scale of None is D ** -0.5.

    Raises:
        ValueError: one is wrong.
    """
    scale, softcap = (x if real(x) is None else real(x) for x in (scale, softcap))
    offset = whole(q_offset)
    q_offset = q_offset if offset is None else offset
    _raise_first(_number_checks(scale, q_offset, softcap, Q, K, D, dtype))
    return Numbers(float(D**-0.5 if scale is None else scale), q_offset, None if softcap is None else float(softcap))


def check_flags(**flags: Any) -> None:
    """Raises ValueError where one is not a bool."""
    _raise_first((isinstance(x, bool), name, x, "be True or False") for name, x in flags.items())


def _lengths(x: Any, B: int) -> Any:
    """Key lengths in a list or a tuple as an array; anything else as it is."""
    if not isinstance(x, (list, tuple)):
        return x
    wanted = f"key_lengths, a list, must hold B={B} integers, one for each batch element"
    every = []
    for one in x:
        number = whole(one)
        if number is None:
            raise ValueError(f"{wanted}; it holds {describe(one)}")
        every.append(number)
    if len(every) != B:
        raise ValueError(f"{wanted}; got {describe(x)}")
    most = 2**31 - 1  # lengths over K are K, those under 0 are 0
    return np.asarray([max(0, min(one, most)) for one in every], dtype=np.int32)


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


Check = tuple[bool, str, Any, str]


def _raise_first(checks: Iterable[Check]) -> None:
    for right, name, given, accepted in checks:
        if not right:
            raise ValueError(f"{name} must {accepted}; got {describe(given)}")


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
    heads = Wording(f"G={G}, {describe(k)}")
    yield H % G == 0, "key", heads, f"have a number of heads G that divides query's H={H}"
    sizes = D, v.shape[3]
    yield max(sizes) <= MAX_HEAD, "query and value", sizes, f"have head sizes D, E up to {MAX_HEAD}"
    most = 2**31 - 2**16
    yield max(Q, K) < most, "query and key", (Q, K), f"have fewer than 2**31 - 2**16 = {most} positions Q, K"
    sizes_of = ("B", B), ("H", H), ("H", H)
    for name, x, (letter, size) in zip(vectors._fields, vectors, sizes_of, strict=True):
        if x is None:
            continue
        array, lengths = isinstance(x, (Array, np.ndarray)), name == "key_lengths"
        yield array, name, x, f"be an array{', a list of integers' * lengths} or None"
        shapes: list[tuple[int, ...]] = [(size,)]
        wanted = f"have shape ({letter},) = ({size},)"
        if name == "alibi_slopes":
            shapes, wanted = [(H,), (B, H)], f"{wanted}, or (B, H) = {(B, H)}"
        yield x.shape in shapes, name, x, wanted
        right = jnp.issubdtype(x.dtype, jnp.integer) if lengths else str(x.dtype) in FLOATS
        yield right, name, x, "be integers" if lengths else f"be {ACCEPTED}"


def _number_checks(scale: Any, q_offset: Any, softcap: Any, Q: int, K: int, D: int, dtype: str) -> Iterator[Check]:
    for name, x in (("scale", scale), ("softcap", softcap)):
        kinds = "a number, an array of floats without dimensions" if name == "scale" else "a number that is known"
        yield x is None or isinstance(x, float), name, x, f"be {kinds}, or None"
    yield from _factors(scale, softcap, D, jnp.finfo(compute_dtype(dtype)))
    yield (
        q_offset is None or type(q_offset) is int,
        "q_offset",
        q_offset,
        "be an int or None: it says where the layout's pairs are",
    )
    if q_offset is not None:
        yield abs(q_offset) <= most_offset(Q, K), "q_offset", q_offset, within_positions(Q, K)


def _factors(scale: Any, softcap: Any, D: int, limits: Any) -> Iterator[Check]:
    # Kernels multiply by up to 2 log2(e); s / softcap keeps its digits.
    most, capped = float(limits.max) / 4, float(limits.max) ** 0.5
    scale = D**-0.5 if scale is None else scale
    of_scale = f"be a finite number up to {most:.1e} in magnitude, as {limits.dtype} holds, or None for D ** -0.5"
    yield abs(scale) <= most, "scale", scale, of_scale
    of_cap = f"be a finite number over 0, from {1 / capped:.1e} to {capped:.1e} in {limits.dtype}, or None"
    yield softcap is None or 1 / capped <= softcap <= capped, "softcap", softcap, of_cap
    if softcap is not None:
        yield abs(scale) / softcap <= most, "scale / softcap", scale / softcap, f"be up to {most:.1e}"


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
