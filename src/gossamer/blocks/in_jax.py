"""`topk_blocks` on arrays of JAX."""

from __future__ import annotations

from dataclasses import dataclass, fields
from functools import partial
from typing import Literal

import jax
import jax.numpy as jnp
from jax import Array, lax

from gossamer.blocks.checks import checked
from gossamer.blocks.lists_jax import Options, chosen, over_rows
from gossamer.checks import whole
from gossamer.jax.arguments import AttentionOptions, arguments_of, describe
from gossamer.jax.blocked import compute_type
from gossamer.jax.blocks import prepare_blocks
from gossamer.jax.prepared import Prepared
from gossamer.patterns import Causal
from gossamer.plan.problem import Unsupported

ARRAYS = ["indices", "covered", "query", "key", "scale"]
FACTS = ["options", "dims"]


@partial(jax.tree_util.register_dataclass, data_fields=["rows", "columns", "lists", *ARRAYS],
         meta_fields=["row_extent", "column_extent", "q_offset", "name", "recipe", *FACTS])  # fmt: skip
@dataclass(frozen=True, kw_only=True, repr=False)
class SelectedBlocks(Prepared):
    """The result of `topk_blocks`: a `Prepared`, causal where they were chosen so, and how much they cover.

    Attributes:
        indices: (B, heads, rows, n) int32, rows = ceil(T / block_size), heads N or, where a group shares its list, G.
            Blocks that are always kept come first, then the others by their score; -1 where fewer are kept.
        covered: (B, heads, rows) float32, the share of the softmax over the scores of all visible blocks that the
            chosen ones hold. Less than `top_p` where `topk` left no room for more.

    Examples:
        >>> q = jax.random.normal(jax.random.key(0), (1, 256, 2, 32))
        >>> chosen = gsj.topk_blocks(q, q, topk=2, causal=True)
        >>> chosen.indices[0, 0, :2].tolist()  # each with the first block and its own, as far as there are two
        [[0, -1], [0, 1]]
        >>> chosen.covered.shape
        (1, 2, 4)
        >>> chosen = gsj.topk_blocks(q, q, topk=3, causal=True, score="bound")
        >>> out, lse = gsj.attention(q, q, q, chosen, return_residual=True)
        >>> every = gsj.attention(q, q, q, gs.Causal(), return_residual=True)[1]
        >>> bool((chosen.kept_mass(lse) <= jnp.exp(lse - every) * (1 + 1e-5)).all())
        True
    """

    indices: Array
    covered: Array
    query: Array  # (B, H, Q, D)
    key: Array
    scale: Array
    options: Options
    dims: int  # of the query that was given

    def __repr__(self) -> str:
        return f"SelectedBlocks({tuple(self.indices.shape)}, {self.options.block}, causal={self.options.causal})"

    def kept_mass(self, lse: Array) -> Array:
        """A certified lower bound of the probability that each row keeps: of its attention over all visible keys.

        With L the lse of the kept keys and b_c the bound of a row's scores in block c, no score in c is over b_c, so
        that the dropped keys weigh at most X = sum of n_c * exp(b_c) over the visible dropped blocks of n_c visible
        keys each, and the row keeps at least exp(L) / (exp(L) + X).

        Rounding is on the safe side. Of `lse` an error of up to u * ((2 D + 64) S + 4 |lse| + K / 16 + 320) is taken
        off, with u = 2**-24 (2**-53 of float64) and S = |scale| * sum_d |q_d| max_j |k_jd|; bounds and X, which are
        computed in the type of lse, are taken as larger by 2 u * ((2 D + 8) S + |X| + C + 1024) in their logarithm.

        Args:
            lse: (B, T, N), of `attention` of the same query, key and scale over this selection, without other score
                terms, `q_offset` or lengths; float32, or float64 for float64 arrays.

        Returns:
            Of lse's shape and type, in [0, 1]; 1 of a row that drops nothing that it could see.

        Raises:
            Unsupported: the blocks were chosen with another score than "bound".
            ValueError: `lse` is no such array.
        """
        o, q, k = self.options, self.query, self.key
        if not o.bound:
            raise Unsupported(
                'kept_mass needs blocks that were chosen with score="bound", which bounds every score; '
                "these were chosen with score='mean'"
            )
        (B, H, Q, _), wide = q.shape, compute_type(q)
        shape = {4: (B, Q, H), 3: (Q, H), 2: (Q,)}[self.dims]
        if not isinstance(lse, Array) or lse.shape != shape or lse.dtype != wide:
            raise ValueError(f"lse must be an array of shape {shape}, {wide}; got {describe(lse)}")
        if 0 in q.shape or 0 in k.shape:
            return jnp.ones_like(lse)  # nothing is dropped
        lse = lax.stop_gradient(lse).reshape(B, Q, H).transpose(0, 2, 1)
        mass = _kept_mass(o, q, k, self.indices, self.scale, lse)
        return mass.transpose(0, 2, 1).reshape(shape)


@partial(jax.jit, static_argnums=0)
def _kept_mass(o: Options, q: Array, k: Array, indices: Array, scale: Array, lse: Array) -> Array:
    """(B, H, Q): see `SelectedBlocks.kept_mass`."""
    (B, H, Q, D), (_, G, K, _) = q.shape, k.shape
    C, info = -(-K // o.block), jnp.finfo(lse.dtype)
    unit = float(info.eps) / 2
    largest = jnp.abs(k).max(2).astype(lse.dtype)  # (B, G, D)
    kept = (indices[..., None, :] == jnp.arange(C)[:, None]).any(-1)  # (B, heads, T, C)
    dropped = ~kept.reshape(B, G, -1, *kept.shape[2:])  # the heads of a group, or 1
    L = lse.reshape(B, G, H // G, Q)
    begin, end = jnp.arange(C) * o.block, jnp.minimum(jnp.arange(1, C + 1) * o.block, K)

    def step(first: Array, rows: Array, bounds: Array) -> Array:
        at = jnp.minimum(first + jnp.arange(rows.shape[3]), Q - 1)
        stop = jnp.minimum(end, at[:, None] + (K - Q) + 1) if o.causal else end
        seen = jnp.maximum(stop - begin, 0)
        left = dropped[:, :, :, at // o.block] & (seen > 0)
        heaviest = jnp.where(left, bounds + jnp.log(jnp.maximum(seen, 1).astype(bounds.dtype)), -jnp.inf)
        weight = jax.nn.logsumexp(heaviest, -1)
        size = jnp.abs(scale) * (jnp.abs(rows) * largest[:, :, None, None]).sum(-1)  # S
        mine = L[..., at]
        mine = mine - unit * ((2 * D + 64) * size + 4 * jnp.abs(mine) + K / 16 + 320)
        some = weight > -jnp.inf
        weight = weight + 2 * unit * ((2 * D + 8) * size + jnp.where(some, jnp.abs(weight), 0) + C + 1024)
        share = jax.nn.sigmoid(mine - weight) * (1 - 64 * unit)
        share = jnp.where(share >= info.tiny, share, 0)  # what is less is rounded up, too
        return jnp.where(left.any(-1), share, 1)

    parts = jnp.moveaxis(over_rows(step, q, k, o.block, scale), 0, 3)  # (B, G, H // G, steps, rows)
    return parts.reshape(B, H, -1)[..., :Q]


def topk_blocks(
    query: Array, key: Array, *, causal: bool, block_size: int = 64, topk: int | None = None,
    top_p: float | None = None, score: Literal["mean", "bound"] = "mean", local: int = 1, first: int = 1,
    per: Literal["head", "group"] = "head", scale: float | Array | None = None,
) -> SelectedBlocks:  # fmt: skip
    """The key blocks of the highest scores for each block of queries, as a `Prepared` that `attention` takes.

    `per="head"`, a list for every query head, is the choice of video sparse attention (VSA) and, but for whole blocks
    of queries instead of single ones, of MoBA; `per="group"`, one list for the query heads of a key head, that of NSA.
    Kept are first the blocks that always are, then those of the highest scores, equal ones by ascending position:
    `topk` in all or as many as reach `top_p`. Nothing is read back to the host, so that it may be made inside of `jit`,
    and it is a constant: no gradient passes through the choice.

    Scores are scaled as those of attention and computed in float32 (of float64 arrays in float64, and compared in
    float32). Memory is that of (rows, columns) blocks.

    - "mean": the mean query of a block and the mean key, over the positions that it has. In a group the mean of heads.
    - "bound": an upper bound of every score q_i . k_j of the pair of blocks, from the least and the largest value of
      each dimension of its keys, as in Quest: the largest of its rows, and of the heads of a group. Some blocks of
      queries at a time. With it `kept_mass` of the result says how much probability is kept at least.

    Args:
        query, key: (B, T, N, H) and (B, S, G, H), or as `attention` takes them.
        causal: whether a row sees keys up to its position alone. Then blocks that no row of the block of queries sees
            are not chosen, and what is returned has `Causal` in it, aligned at the end as that is.
        block_size: of queries and keys: 64 or 128.
        topk: the most key blocks of a list, those that are always kept included; a hard limit, over which `top_p` does
            not go. None, with `top_p`: all.
        top_p: in (0, 1]: the least number of blocks whose part of the softmax over the scores of all visible blocks
            reaches it, after those that are always kept. `covered` of the result says what was reached.
        score: "mean" or "bound".
        local: the key block, or two, at the positions of the block of queries, and `local` - 1 before it (and after it,
            unless causal) are always kept; 0 for none.
        first: so many first blocks are always kept.
        per: "head" or "group".
        scale: of the scores, as in `attention`, whose it is; None for H ** -0.5.

    Raises:
        ValueError: an argument is none of these, or `topk` leaves no room for the blocks that are always kept.

    Examples:
        >>> q, k, v = (jax.random.normal(jax.random.key(n), (1, 1024, 4, 64)) for n in range(3))
        >>> chosen = gsj.topk_blocks(q, k, topk=4, causal=True)
        >>> chosen.indices.shape
        (1, 4, 16, 4)
        >>> gsj.attention(q, k, v, chosen).shape
        (1, 1024, 4, 64)
        >>> most = gsj.topk_blocks(q, k, top_p=0.9, topk=8, causal=True)
        >>> bool(((most.covered >= 0.9) | (most.indices >= 0).all(-1)).all())
        True
    """
    query, key, scale = (lax.stop_gradient(x) if isinstance(x, Array) else x for x in (query, key, scale))
    a = arguments_of(query, key, key, AttentionOptions(scale), ())
    Q, K = a.q.shape[1], a.k.shape[1]
    block, n, local, first = checked(
        Q, K, causal, block_size, topk, top_p, score, local, first, per, whole, describe
    )  # fmt: skip
    options = Options(block, n, per == "group", score == "bound", causal, local, first, top_p)
    q, k = a.q.swapaxes(1, 2), a.k.swapaxes(1, 2)
    number = jnp.asarray(a.scale, compute_type(q))
    if 0 in q.shape or 0 in k.shape:
        shape = (q.shape[0], (k if options.group else q).shape[1], -(-Q // block))
        indices, covered = jnp.full((*shape, n), -1, jnp.int32), jnp.zeros(shape, jnp.float32)
    else:
        indices, covered = _chosen(options, q, k, number)
    plan = prepare_blocks(indices, a.q, a.k, block_size=block, pattern=Causal() if causal else None)
    return SelectedBlocks(
        **{field.name: getattr(plan, field.name) for field in fields(Prepared)}, indices=indices, covered=covered,
        query=q, key=k, scale=number, options=options, dims=a.dims,
    )  # fmt: skip


_chosen = jax.jit(chosen, static_argnums=0)
