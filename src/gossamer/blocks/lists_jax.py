"""The lists of `topk_blocks` in `lax`, which define them from JAX: as `scores.py` and `lists.py` do from torch."""

from __future__ import annotations

from collections.abc import Callable
from typing import NamedTuple

import jax.numpy as jnp
from jax import Array, lax

from gossamer.jax.blocked import compute_type

MOST = 2**23  # bounds that are held at once


class Taken(NamedTuple):
    indices: Array  # (B, heads, T, n) int32
    covered: Array  # (B, heads, T) float32


class Options(NamedTuple):
    """What a choice is compiled for; as in `lists.by_operations`."""

    block: int
    n: int
    group: bool
    bound: bool
    causal: bool
    local: int
    first: int
    top_p: float | None


def chosen(options: Options, q: Array, k: Array, scale: Array) -> Taken:
    """The blocks of q (B, H, Q, D) and k (B, G, K, D)."""
    o = options
    scores = (bound_scores if o.bound else mean_scores)(q, k, o.block, scale, o.group).astype(jnp.float32)
    return _take_first(scores, *_block_masks(o, q.shape[2], k.shape[2]), o.n, o.top_p)


def in_blocks(x: Array, block: int) -> Array:
    """(..., N, D) as (..., ceil(N / block), block, D), of which the last position fills up."""
    *lead, N, D = x.shape
    C = -(-N // block)
    filled = jnp.concatenate([x, jnp.broadcast_to(x[..., -1:, :], (*lead, C * block - N, D))], -2)
    return filled.reshape(*lead, C, block, D)


def means(x: Array, block: int) -> Array:
    """The mean of each block, (..., C, D), over the positions that it has."""
    N = x.shape[-2]
    parts = in_blocks(x.astype(compute_type(x)), block)
    places = jnp.arange(parts.shape[-3] * block).reshape(-1, block, 1)
    there = places < N
    found: Array = jnp.where(there, parts, 0).sum(-2) / there.sum(-2).astype(parts.dtype)
    return found


def mean_scores(q: Array, k: Array, block: int, scale: Array, group: bool) -> Array:
    """scale * mean(q) . mean(k) of each pair of blocks: (B, heads, T, C), heads G of groups, else H."""
    B, G = q.shape[0], k.shape[1]
    queries = means(q, block)
    queries = queries.reshape(B, G, -1, *queries.shape[2:])
    if group:
        queries = queries.mean(2, keepdims=True)
    found = jnp.einsum("bgrtd,bgcd->bgrtc", queries, means(k, block), precision=lax.Precision.HIGHEST)
    return scale * found.reshape(B, -1, *found.shape[3:])


def bound_scores(q: Array, k: Array, block: int, scale: Array, group: bool) -> Array:
    """The largest bound of the rows of each block of queries: (B, heads, T, C)."""
    B, T = q.shape[0], -(-q.shape[2] // block)

    def of_blocks(first: Array, rows: Array, bounds: Array) -> Array:
        found = bounds.reshape(*bounds.shape[:3], -1, block, bounds.shape[-1]).max(-2)
        found = found.max(2, keepdims=True) if group else found
        return found.reshape(B, -1, *found.shape[3:])

    parts = over_rows(of_blocks, q, k, block, scale)  # (steps, B, heads, blocks, C)
    found = jnp.moveaxis(parts, 0, 2)
    return found.reshape(B, found.shape[1], -1, found.shape[-1])[:, :, :T]


def over_rows(step: Callable[[Array, Array, Array], Array], q: Array, k: Array, block: int, scale: Array) -> Array:
    """What a step makes of the bounds of whole blocks of queries, as many as hold MOST bounds, one step after another.

    No score of a row and a key of a block c is over its bound, sum_d max(q_d m_d, q_d M_d) * scale with the extremes m
    and M of the block: as relu(q) . M - relu(-q) . m it is two products.

    Args:
        step: of the first row, the rows (B, G, H // G, n, D), and their bounds (B, G, H // G, n, C); rows past the end
            repeat the last.
    """
    (B, H, Q, D), G = q.shape, k.shape[1]
    keys = in_blocks(k, block).astype(compute_type(k))
    least, most = keys.min(-2), keys.max(-2)
    least, most = jnp.where(scale < 0, most, least), jnp.where(scale < 0, least, most)
    T, C = -(-Q // block), least.shape[2]
    each = max(1, min(T, MOST // (B * H * block * C)))
    steps = -(-T // each)
    at = jnp.minimum(jnp.arange(steps * each * block), Q - 1).reshape(steps, -1)

    def one(rows: Array) -> Array:
        x = q[:, :, rows].astype(compute_type(q)).reshape(B, G, H // G, len(rows), D)

        def product(x: Array, y: Array) -> Array:
            return jnp.einsum("bgrnd,bgcd->bgrnc", x, y, precision=lax.Precision.HIGHEST)

        bounds = scale * (product(jnp.maximum(x, 0), most) - product(jnp.maximum(-x, 0), least))
        return step(rows[0], x, bounds)

    found: Array = one(at[0])[None] if steps == 1 else lax.map(one, at)
    return found


def _block_masks(o: Options, Q: int, K: int) -> tuple[Array, Array]:
    """The key blocks that each block of queries sees, and those that it always keeps: (T, C) bool."""
    T, C = -(-Q // o.block), -(-K // o.block)
    key_block, row = jnp.arange(C), jnp.arange(T)[:, None] * o.block
    begin = row + (K - Q)
    end = jnp.minimum(row + o.block, Q) - 1 + (K - Q)  # of the last row
    visible = key_block * o.block <= end if o.causal else jnp.ones((T, C), bool)
    low, high = jnp.maximum(begin, 0) // o.block, end // o.block
    always = jnp.broadcast_to(key_block < o.first, (T, C))
    if o.local:
        near = (key_block > low - o.local) & (key_block < high + (1 if o.causal else o.local))
        always = always | (near & (end >= 0))
    return visible, always & visible


def _take_first(score: Array, visible: Array, always: Array, n: int, top_p: float | None) -> Taken:
    """The first n blocks of each list that are visible, and that `top_p` takes."""
    score = jnp.where(visible, score, -jnp.inf)
    # Blocks are ordered by the bits of the score; equal ones by their place. 0 and -0 are one, NaN is inf.
    ranked = jnp.where(jnp.isnan(score), jnp.inf, jnp.where(score == 0, 0, score))
    bits = lax.bitcast_convert_type(ranked, jnp.int32)
    bits = jnp.where(always, 2**31 - 1, jnp.where(bits < 0, bits ^ (2**31 - 1), bits))
    _, index = lax.top_k(jnp.where(visible, bits, -(2**31)), n)

    def gathered(x: Array) -> Array:
        return jnp.take_along_axis(jnp.broadcast_to(x, score.shape), index, -1)

    used = gathered(visible)
    top = score.max(-1, keepdims=True)
    top = jnp.where(top == -jnp.inf, 0, top)
    total = jnp.log(jnp.exp(score - top).sum(-1, keepdims=True)) + top
    share = jnp.where(used, jnp.exp(gathered(score) - total), 0)
    if top_p is not None and top_p < 1:
        used = used & ((jnp.cumsum(share, -1) - share < top_p) | gathered(always))
    covered = jnp.minimum(jnp.where(used, share, 0).sum(-1), 1)
    return Taken(jnp.where(used, index, -1).astype(jnp.int32), covered)
