"""`attention` on arrays of JAX."""

from __future__ import annotations

import logging
from collections.abc import Callable
from functools import lru_cache, partial
from typing import Any, Literal, NamedTuple, overload

import jax
import jax.numpy as jnp
import numpy as np
from jax import Array, typeof

from gossamer.jax import blocked, compat, explicit
from gossamer.jax.arguments import (
    Arguments,
    AttentionOptions,
    Lengths,
    arguments_of,
    as_given,
    describe,
    in_four,
    is_empty,
    problem_of,
)
from gossamer.jax.kernels import targets
from gossamer.jax.kernels.recipes import Recipe
from gossamer.jax.operators import FORWARD_MODE, MOST_OPERATORS, Operator, forward_of, operator
from gossamer.jax.prepared import Asked, Prepared, for_call, offset_of, why_no_kernels
from gossamer.jax.tiles import TileLists
from gossamer.jax.tiling import Config, Numbers, Vectors
from gossamer.memo import Memo
from gossamer.patterns import Dense, Pattern
from gossamer.plan.arguments import check_ahead
from gossamer.plan.problem import Unsupported

Distance = Literal["signed", "absolute"]

logger = logging.getLogger("gossamer")
_logged: set[str] = set()
_known: Memo[Known] = Memo()  # calls, by their keys
_SIMPLE = frozenset({type(None), bool, int, float, str})

NAMES = ("blocked", "hopper", "triton")


@overload
def attention(
    query: Array, key: Array, value: Array, pattern: Any = None, *, scale: float | Array | None = None,
    q_offset: int | None = None, key_lengths: Lengths | None = None, softcap: float | None = None,
    sink_logits: Array | None = None, alibi_slopes: Array | None = None,
    alibi_distance: Distance | None = None, return_residual: Literal[False] = False,
    implementation: str | None = None, deterministic: bool = False,
) -> Array: ...  # fmt: skip


@overload
def attention(
    query: Array, key: Array, value: Array, pattern: Any = None, *, scale: float | Array | None = None,
    q_offset: int | None = None, key_lengths: Lengths | None = None, softcap: float | None = None,
    sink_logits: Array | None = None, alibi_slopes: Array | None = None,
    alibi_distance: Distance | None = None, return_residual: Literal[True],
    implementation: str | None = None, deterministic: bool = False,
) -> tuple[Array, Array]: ...  # fmt: skip


def attention(
    query: Array,
    key: Array,
    value: Array,
    pattern: Any = None,
    *,
    scale: float | Array | None = None,
    q_offset: int | None = None,
    key_lengths: Lengths | None = None,
    softcap: float | None = None,
    sink_logits: Array | None = None,
    alibi_slopes: Array | None = None,
    alibi_distance: Distance | None = None,
    return_residual: bool = False,
    implementation: str | None = None,
    deterministic: bool = False,
) -> Array | tuple[Array, Array]:
    """softmax(scale * q k^T) v over the pairs that `pattern` keeps; exact, differentiable, never an N x N array.

    Arrays lie as `jax.nn.dot_product_attention` has them. A row that keeps nothing gives 0, an lse of -inf and zero
    gradients; there may be no keys at all, no queries or no batch elements.

    Args:
        query: (B, T, N, H), (T, N, H) or (N, D): batch, positions, heads, size; float16, bfloat16, float32 or float64.
        key: (B, S, G, H) and so on, N a multiple of G: query head n uses key head n // (N // G). A batch of 1 is for
            all batch elements.
        value: (B, S, G, E) and so on.
        pattern: what is attended: a Pattern; a `Prepared` of one, which may be an argument of a jitted function;
            a boolean array that broadcasts to (B, N, T, S), True where a pair is kept, of numbers that are
            known; a jax.experimental.sparse.BCSR matrix (T, S), of which the stored entries count; a BlockLayout of
            numpy arrays. None is every pair.
        scale: H ** -0.5 by default. A number, or an array without dimensions, which may be traced and has a gradient:
            query is multiplied by it, in 16 bits with one more rounding. `softcap` and `q_offset` are numbers.
        q_offset: position of query row 0, S - T by default.
        key_lengths: (B,) integers of any size, or a list of them; keys j >= key_lengths[b] are not attended, and may
            hold anything: a length of 0 or less keeps none, one over K all.
        softcap: scores become softcap * tanh(score / softcap).
        sink_logits: (N,), differentiable; exp(sink) joins the denominator and lse.
        alibi_slopes: (N,) or (B, N), constant; slope * (j - i) is added to the scores.
        alibi_distance: "signed" for slope * (j - i), "absolute" for -slope * |i - j|: they differ for keys after the
            query, and one has to be given where the pattern keeps such keys, and with arrays, layouts and Plans.
        return_residual: also return lse (B, T, N), the natural logarithm of the denominators, differentiable; float32,
            or float64 for float64 arrays.
        implementation: None takes what is fastest, with a gradient that is a rule of its own. "blocked" is plain `lax`,
            which JAX differentiates itself: with forward mode and gradients of any order, which take longer.
        deterministic: the same bits every time. Those of `lax` are so in any case.

    Returns:
        out (B, T, N, E) and so on, in query's dtype; with lse if asked for.

    Raises:
        ValueError: an argument is wrong; `gossamer.Unsupported` is one.

    Examples:
        >>> q, k, v = (jnp.ones((1, 100, heads, 16)) for heads in (4, 2, 2))
        >>> out, lse = gsj.attention(q, k, v, gs.SlidingWindow(32), return_residual=True)
        >>> out.shape, lse.shape
        ((1, 100, 4, 16), (1, 100, 4))
        >>> grad = jax.jit(jax.grad(lambda q: gsj.attention(q, k, v, gs.Causal()).sum()))
        >>> grad(q).shape
        (1, 100, 4, 16)
    """
    if not isinstance(return_residual, bool):
        raise ValueError(f"return_residual must be True or False; got {describe(return_residual)}")
    call_key = None
    if key_lengths is sink_logits is alibi_slopes is alibi_distance is None:
        call_key = key_of(query, key, value, pattern, scale, q_offset, softcap, implementation, deterministic)
    known = None if call_key is None else _known.get(call_key)
    if known is not None:
        out, lse = known(query, key, value)
        return (out, lse) if return_residual else out
    options = AttentionOptions(
        scale, q_offset, key_lengths, softcap, sink_logits, alibi_slopes, alibi_distance, implementation, deterministic
    )
    where = explicit.placed(query, key, value)
    if where is not None:
        out, lse = explicit.by_auto(attention, where, (query, key, value, pattern), options._asdict())
        return (out, lse) if return_residual else out
    a = arguments_of(query, key, value, options, NAMES)
    q_offset = None if q_offset is None else a.q_offset
    asked = asked_of(a, q_offset)
    plan = for_call(pattern, asked)
    if plan.recipe is None and asked.kernels:
        _check_and_log(pattern, asked, implementation)
    present = tuple(0 if x is None else x.ndim for x in a.vectors)
    config = config_of(a, plan, q_offset, pattern)
    numbers = numbers_of(a)
    run = _runs(config, present, plan.recipe, implementation)
    try:
        out, lse = run(plan.rows, plan.columns, numbers, plan.lists, a.q, a.k, a.v, a.vectors)
    except TypeError as error:
        if "forward-mode" in str(error):
            raise TypeError(FORWARD_MODE) from error
        raise
    if call_key is not None:
        again: Callable[..., Any]
        if implementation == "blocked":
            again = partial(run, plan.rows, plan.columns, numbers, plan.lists)
        else:
            again = partial(forward_of(config, present, plan.recipe), plan.rows, numbers, plan.lists.get("forward", {}))
        _known.put(call_key, Known(again, a.vectors, a.dims), plan.nbytes)
    out, lse = as_given(out, lse, a.dims)
    return (out, lse) if return_residual else out


class Known(NamedTuple):
    """A call of arrays alone that was checked and planned."""

    run: Callable[..., tuple[Array, Array]]  # compiled, without a gradient, with its lists
    vectors: Vectors  # none
    dims: int

    def __call__(self, q: Array, k: Array, v: Array) -> tuple[Array, Array]:
        """(out, lse)."""
        if self.dims != 4:
            q, k, v = in_four(q), in_four(k), in_four(v)
        out, lse = self.run(q, k, v, self.vectors)
        return (out, lse) if self.dims == 4 else as_given(out, lse, self.dims)


def key_of(q: Any, k: Any, v: Any, pattern: Any, *options: Any) -> tuple[Any, ...] | None:
    """What tells calls apart that are computed at once, of arrays and a pattern; None for any other.

    Args:
        options: those of `attention` that are no arrays.
    """
    if not (pattern is None or isinstance(pattern, Pattern)) or not _SIMPLE.issuperset(map(type, options)):
        return None
    if any(type(x) is not compat.ArrayImpl for x in (q, k, v)) or not len(q.shape) == len(k.shape) == len(v.shape):
        return None
    if len(q.shape) == 4 and len(k) != len(q):  # k and v of one batch element, for all
        return None
    types = tuple(map(type, options))
    return (pattern, typeof(q), typeof(k), typeof(v), *options, *types) if compat.is_plain() else None


def config_of(a: Arguments, plan: Prepared, q_offset: int | None, pattern: Any) -> Config:
    """What a call is compiled for.

    Args:
        pattern: as it was given.

    Raises:
        ValueError: slopes meet keys after their query, and nothing says how they count them.
    """
    offset = offset_of(plan, q_offset, a.vectors.alibi_slopes is not None)
    if a.vectors.alibi_slopes is not None and a.alibi_distance is None:
        held = Dense() if pattern is None else pattern
        of_pattern = held if isinstance(held, Pattern) else None
        check_ahead(of_pattern, plan.Q, plan.K, offset, "an array, a layout or a Prepared")
    if a.vectors.alibi_slopes is None:  # else no program reads it: lists say which keys a query sees
        offset = 0
    absolute = a.alibi_distance == "absolute"
    return Config(plan.row_extent, plan.column_extent, offset, absolute)


def numbers_of(a: Arguments) -> Numbers:
    """The numbers of a call, on the device where it is computed at once."""
    dtype = blocked.compute_type(a.q)
    made = Numbers(np.full(1, a.scale, dtype), None if a.softcap is None else np.full(1, a.softcap, dtype))
    return made if compat.is_staged() else jax.tree.map(jnp.asarray, made)


def asked_of(a: Arguments, q_offset: int | None) -> Asked:
    """A call without its arrays; `q_offset` as it was given."""
    kernels = a.implementation != "blocked" and not is_empty(a.q, a.k)
    named = a.implementation if kernels else None
    return Asked(problem_of(a, jax.default_backend()), a.scale, q_offset, kernels, named)


def _check_and_log(pattern: Any, asked: Asked, implementation: str | None) -> None:
    """Refuse a call by kernels that none compute; say once on a GPU why a kind of call runs in lax.

    Raises:
        Unsupported: kernels were named.
    """
    if implementation is None and (targets.chip() is None or not logger.isEnabledFor(logging.INFO)):
        return
    reasons = why_no_kernels(pattern, asked)
    if implementation is not None:
        raise Unsupported(f"implementation={implementation!r} cannot compute this problem: {', '.join(reasons)}")
    text = ", ".join(reasons)
    if text not in _logged:
        _logged.add(text)
        logger.info(f"attention in {asked.problem.dtype} runs by blocked, in lax (not by kernels: {text})")


def _runs(
    config: Config, present: tuple[int, ...], recipe: Recipe | None, implementation: str | None
) -> Operator:  # fmt: skip
    """What computes a call."""
    return _plain(config) if implementation == "blocked" else operator(config, present, recipe)


@lru_cache(MOST_OPERATORS)
def _plain(config: Config) -> Operator:
    """The code of `blocked` as JAX differentiates it."""

    @jax.jit
    def attend(
        rows: TileLists, columns: TileLists, numbers: Numbers, lists: Any, q: Array, k: Array, v: Array,
        vectors: Vectors,
    ) -> tuple[Array, Array]:  # fmt: skip
        out, lse = blocked.forward(config, rows, numbers, q, k, v, vectors, differentiable=True)
        return out, lse

    return attend
