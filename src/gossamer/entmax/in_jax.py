"""`entmax_attention` on arrays of JAX."""

from __future__ import annotations

from functools import lru_cache, partial
from typing import Any, Literal, NamedTuple, overload

import jax
import jax.numpy as jnp
import numpy as np
from jax import Array

from gossamer.checks import boolean
from gossamer.entmax import rows_jax
from gossamer.entmax.checks import check_alpha, check_alphas_inside, check_positions, number_of_keys
from gossamer.entmax.rows_jax import Config, Operands
from gossamer.entmax.thresholds_jax import KINDS
from gossamer.jax import compat
from gossamer.jax.arguments import AttentionOptions, arguments_of, describe, problem_of
from gossamer.jax.blocked import compute_type
from gossamer.jax.once import once
from gossamer.jax.prepared import Asked, for_call
from gossamer.jax.tiles import TileLists
from gossamer.patterns import Causal, Pattern
from gossamer.patterns.compose import And
from gossamer.plan.problem import Unsupported

ONCE = "entmax_attention has no forward mode and no second derivative (jvp, jacfwd, hessian, grad of grad)"
SEVERAL = "an array"
INTEGERS = ("int8", "uint8", "int16", "int32", "int64")


class EntmaxAux(NamedTuple):
    """Statistics of each row, from `return_aux=True`: of query's shape without its size, without a gradient.

    Examples:
        >>> x = jnp.asarray([[2.0], [1.0], [0.0]])
        >>> _, aux = gsj.entmax_attention(x[:1], x, x, alpha=2, top_k=1, scale=0.25, return_aux=True)
        >>> [one.item() for one in aux]  # scores 1, 0.5 and 0: sparsemax over all keys is 0.75, 0.25, 0
        [0.0, 1, False]
    """

    tau: Array  # the threshold; float32, or float64 for float64 inputs
    support: Array  # int32: how many keys have a weight over 0
    certified: Array  # bool: whether the weights are those of entmax over all keys that the row may see


@overload
def entmax_attention(
    query: Array, key: Array, value: Array, pattern: Any = None, *, alpha: float | Array = 1.5,
    top_k: int | None = None, causal: bool = False, q_positions: Array | None = None, k_positions: Array | None = None,
    scale: float | Array | None = None, return_aux: Literal[False] = False,
) -> Array: ...  # fmt: skip


@overload
def entmax_attention(
    query: Array, key: Array, value: Array, pattern: Any = None, *, alpha: float | Array = 1.5,
    top_k: int | None = None, causal: bool = False, q_positions: Array | None = None, k_positions: Array | None = None,
    scale: float | Array | None = None, return_aux: Literal[True],
) -> tuple[Array, EntmaxAux]: ...  # fmt: skip


def entmax_attention(
    query: Array,
    key: Array,
    value: Array,
    pattern: Any = None,
    *,
    alpha: float | Array = 1.5,
    top_k: int | None = None,
    causal: bool = False,
    q_positions: Array | None = None,
    k_positions: Array | None = None,
    scale: float | Array | None = None,
    return_aux: bool = False,
) -> Array | tuple[Array, EntmaxAux]:
    """alpha-entmax attention (Peters et al., 2019): exact and differentiable; softmax at alpha 1, sparse over it.

    The weights of a row are p_j = [(alpha - 1) s_j - tau]_+^(1 / (alpha - 1)) with s = scale * q k^T and the tau of
    which they sum to 1, over the keys that the row may see: those of `pattern`, `causal` and the positions, all at
    once. A row that may see nothing gives 0 and zero gradients. One with a score of NaN or inf gives NaN; a key of
    score -inf is as one that is not seen.

    It is computed in `lax` on any device, a bounded number of scores at a time; nothing N x N is held.

    Args:
        query: (B, T, N, H), (T, N, H) or (N, D), as in `attention`; 16 bits are computed in float32.
        key: (B, S, G, H) and so on, N a multiple of G.
        value: (B, S, G, E) and so on.
        pattern: which keys a row may see, in every form that `attention` accepts, but of a `Prepared` one of tiles;
            None is every key.
        alpha: a number in [1, 2], or an array of such numbers, one for each head (N,) or one of shape (); with its
            gradient, also at 1. 1 is softmax, 1.5 entmax-1.5, 2 sparsemax. The values of an array are checked where
            they are known; where they are traced, a head whose alpha is outside becomes NaN.
        top_k: the k largest scores of a row, ties to the lowest key, and the entmax over these alone. None is all.
        causal: key j is seen by query row r where j <= r + S - T; where positions are given, these say it.
        q_positions: integers (int8, uint8, int16, int32 or int64) that broadcast to (B, N, T): a key is seen where its
            position is at most the query's. S - T + r for row r by default, where `k_positions` is given.
        k_positions: such integers that broadcast to (B, N, S) or (B, G, S); j for key j by default, where `q_positions`
            is given.
        scale: H ** -0.5 by default; a number, or an array without dimensions with its gradient, as in `attention`.
        return_aux: also return tau, the sizes of the supports, and whether `top_k` left out no key with a weight.

    Returns:
        out (B, T, N, E) and so on, in query's dtype; with `EntmaxAux` if asked for. Its tau is -1 at alpha 1, and inf
        in a row that may see nothing.

    Raises:
        ValueError: an argument is wrong; `Unsupported` for a `Prepared` that gathers keys.
        TypeError: forward mode, or a second derivative.

    Examples:
        >>> q, k, v = (jax.random.normal(jax.random.key(n), (1, 100, n, 16)) for n in (4, 2, 2))
        >>> out, aux = gsj.entmax_attention(q, k, v, gs.SlidingWindow.of_size(64), alpha=1.5, return_aux=True)
        >>> out.shape, bool(aux.support.max() <= 64)
        ((1, 100, 4, 16), True)
        >>> soft = gsj.entmax_attention(q, k, v, alpha=1, causal=True)
        >>> bool(jnp.allclose(soft, gsj.attention(q, k, v, gs.Causal()), atol=1e-5))
        True
        >>> loss = lambda alpha: gsj.entmax_attention(q, k, v, alpha=alpha, top_k=8).sum()
        >>> jax.grad(loss)(jnp.full(4, 1.5)).shape  # learned for each head
        (4,)
    """
    a = arguments_of(query, key, value, AttentionOptions(scale), ())
    return_aux, causal = boolean("return_aux", return_aux), boolean("causal", causal)
    top_k = number_of_keys("top_k", top_k)
    (B, Q, H, _), (_, K, G, _) = a.q.shape, a.k.shape
    dtype = compute_type(a.q)
    alphas = _alphas(alpha, H, dtype)
    k, v = a.k, a.v
    positions: tuple[Array | None, Array | None] = (None, None)
    if q_positions is not None or k_positions is not None:
        rows = _positions("q_positions", q_positions, ((B, H, Q),))
        keys = _positions("k_positions", k_positions, ((B, H, K), (B, G, K)))
        rows = jnp.arange(K - Q, K, dtype=jnp.int32) if rows is None else rows
        keys = jnp.arange(K, dtype=jnp.int32) if keys is None else keys
        if keys.ndim > 1 and keys.shape[-2] == H != G:  # keys of query heads
            k, v = (jnp.repeat(x, H // G, axis=2) for x in (k, v))
        positions = _by_rows(rows, (B, H, Q)), _by_rows(keys, (B, k.shape[2], K))
    elif causal and pattern is not None and not isinstance(pattern, Pattern):
        rows, keys = jnp.arange(K - Q, K, dtype=jnp.int32), jnp.arange(K, dtype=jnp.int32)
        positions = _by_rows(rows, (B, H, Q)), _by_rows(keys, (B, G, K))
    elif causal:
        pattern = Causal() if pattern is None else And(pattern, Causal())
    plan = for_call(pattern, Asked(problem_of(a, jax.default_backend()), a.scale, None, kernels=False, by_rows=True))
    if plan.row_extent.gathers:
        raise Unsupported(
            f"pattern must be a Prepared of tiles; {plan!r} gathers keys: give what it was prepared of, or prepare it "
            f"by the tiles of pattern.layout(Q, K)"
        )
    kind = "any" if alphas.learned else KINDS.get(alphas.number, "any")
    config = Config(plan.row_extent, kind, None if top_k is None or top_k >= K else top_k, alphas.learned)
    operands = Operands(a.q, k, v, alphas.less_one, jnp.asarray(a.scale, dtype), *positions)
    try:
        out, _, lam, support, certified = _operator(config)(plan.rows, operands)
    except TypeError as error:
        if "forward-mode" in str(error):
            raise TypeError(ONCE) from error
        raise
    missing = {4: (), 3: (0,), 2: (0, 2)}[a.dims]
    out = out.squeeze(missing)
    if not return_aux:
        return out
    less_one = jax.lax.stop_gradient(alphas.less_one)
    tau = jnp.where(lam < jnp.inf, less_one * lam - 1, lam)
    return out, EntmaxAux(*(x.squeeze(missing) for x in (tau, support, certified)))


class _Alphas(NamedTuple):
    less_one: Array  # (H,) alpha - 1 of each head, NaN of one that is outside of [1, 2]
    number: float  # of all heads, where it is no array
    learned: bool  # it is an array


def _alphas(alpha: Any, H: int, dtype: Any) -> _Alphas:
    """The alphas of a call.

    Raises:
        ValueError: they are none.
    """
    if isinstance(alpha, (np.floating, np.integer)):
        alpha = alpha.item()
    if not isinstance(alpha, (Array, np.ndarray)):
        check_alpha(alpha, describe, SEVERAL)
        return _Alphas(jnp.full(H, float(alpha) - 1, dtype), float(alpha), False)
    if alpha.shape not in ((H,), ()) or not jnp.issubdtype(alpha.dtype, jnp.floating):
        raise ValueError(
            f"alpha must be a number, or an array of floating point of shape (N,) = ({H},) or (); got {describe(alpha)}"
        )
    if not compat.is_abstract(alpha):
        known = np.asarray(alpha, np.float64).reshape(-1)
        check_alphas_inside(known[~((known >= 1) & (known <= 2))].tolist(), SEVERAL)
    less_one = jnp.broadcast_to(jnp.asarray(alpha).astype(dtype), (H,)) - 1
    return _Alphas(jnp.where((less_one >= 0) & (less_one <= 1), less_one, jnp.nan), 0.0, True)


def _positions(name: str, x: Any, shapes: tuple[tuple[int, ...], ...]) -> Array | None:
    """Positions as an array of JAX.

    Raises:
        ValueError: they are none.
    """
    if x is None:
        return None
    if not isinstance(x, (Array, np.ndarray)):
        raise ValueError(f"{name} must be an array of integers or None; got {describe(x)}")
    if str(x.dtype) not in INTEGERS:
        raise ValueError(f"{name} must be integers (int8, uint8, int16, int32 or int64); got {describe(x)}")
    check_positions(name, x, shapes, describe)
    wide = jnp.dtype("int64" if jax.config.jax_enable_x64 else "int32")
    if isinstance(x, np.ndarray) and x.size and not (np.iinfo(wide).min <= x.min() <= x.max() <= np.iinfo(wide).max):
        raise ValueError(f"{name} must be integers that {wide} holds, or jax_enable_x64 be set; got {x.max()}")
    return jnp.asarray(x).astype(wide)


def _by_rows(x: Array, shape: tuple[int, int, int]) -> Array:
    """Positions that broadcast to (B, heads, N), as (B, N, heads)."""
    return jnp.broadcast_to(x, shape).swapaxes(1, 2)


@lru_cache(1024)
def _operator(config: Config) -> Any:
    """The results of (lists, operands), with a gradient of its own."""
    forward = jax.jit(partial(rows_jax.forward, config))
    forward_once, backward_once = once(forward, ONCE), once(jax.jit(partial(rows_jax.backward, config)), ONCE)

    @jax.custom_vjp
    def attend(lists: TileLists, operands: Operands) -> Any:
        return tuple(forward(lists, operands))

    def with_residuals(lists: TileLists, operands: Operands) -> Any:
        results = forward_once(lists, operands)
        return tuple(results), (lists, operands, results.above)

    def gradients(saved: Any, cotangents: Any) -> Any:
        lists, o, above = saved
        dout, *_ = cotangents
        dq, dk, dv, dalpha = backward_once(lists, o, above, dout)
        dq, dk, dv, dalpha = (
            compat.as_varying_as(dx, x) for dx, x in ((dq, o.q), (dk, o.k), (dv, o.v), (dalpha, o.a))
        )  # fmt: skip
        return None, Operands(dq, dk, dv, dalpha, jnp.zeros_like(o.scale))

    attend.defvjp(with_residuals, gradients)
    return attend
