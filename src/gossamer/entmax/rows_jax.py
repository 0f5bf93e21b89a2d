"""alpha-entmax attention over the tiles of a pattern in plain `lax`, forward and backward: the definition from JAX.

Both walk rows of query tiles. A step holds the scores of some rows with all keys that they may see, at most about MOST
of them however many keys there are. The backward computes scores again, and reads of the forward only the normaliser
of each row. With u = p^(2 - alpha) on the support, dP = dout v^T and delta = sum u dP / sum u of each row: dS = u (dP -
delta), dV = p^T dout, dQ = scale dS K, dK = scale dS^T Q, and d alpha = sum w (dP - delta), where w is `alpha_terms`.
"""

from __future__ import annotations

from collections.abc import Callable
from typing import Any, NamedTuple, TypeAlias

import jax
import jax.numpy as jnp
from jax import Array, lax

from gossamer.entmax.selection_jax import largest
from gossamer.entmax.thresholds_jax import Kind, alpha_terms, below_top, normaliser, powers, slopes
from gossamer.jax.blocked import compute_type
from gossamer.jax.compat import varying_with
from gossamer.jax.tiles import Extent, TileLists
from gossamer.jax.tiling import (
    Items,
    Split,
    cleared,
    from_key_tiles,
    from_query_tiles,
    in_order,
    in_place,
    kept,
    key_tiles,
    of_heads,
    of_items,
    query_tiles,
    read_of,
    split_of,
    tiles_of,
)  # fmt: skip

SCORES = 2**18  # that a step computes, where single rows of tiles have fewer
MOST = 2**22  # that a step computes of a longer row of tiles, which is cut into rows of queries

Carry: TypeAlias = Any


class Config(NamedTuple):
    """What a call is compiled for."""

    extent: Extent  # of rows
    kind: Kind
    top_k: int | None
    learned: bool  # alpha is an array, which has a gradient


class Operands(NamedTuple):
    """The arrays of a call: q (B, Q, H, D), k (B, K, G, D), v (B, K, G, E)."""

    q: Array
    k: Array
    v: Array
    a: Array  # (H,) alpha - 1
    scale: Array  # ()
    q_positions: Array | None = None  # (B, Q, H): a key is seen where its position is at most the query's
    k_positions: Array | None = None  # (B, K, G)


class Results(NamedTuple):
    """What a forward gives of each row."""

    out: Array  # (B, Q, H, E)
    above: Array  # (B, Q, H): the normaliser less the largest score, which the backward reads
    normaliser: Array  # (B, Q, H); inf in rows that see nothing
    support: Array  # (B, Q, H) int32
    certified: Array  # (B, Q, H) bool


class Gradients(NamedTuple):
    dq: Array
    dk: Array
    dv: Array
    dalpha: Array  # (H,), 0 where alpha is no array


def forward(config: Config, lists: TileLists, o: Operands) -> Results:
    """The results of a call."""
    c = _Call(config, lists, o)
    if not c.some:
        rows = o.q.shape[:3]
        return Results(
            jnp.zeros((*rows, o.v.shape[3]), o.q.dtype), jnp.zeros(rows, c.dtype), jnp.full(rows, jnp.inf, c.dtype),
            jnp.zeros(rows, jnp.int32), jnp.ones(rows, jnp.bool_),
        )  # fmt: skip

    def step(carry: Carry, rows: _Rows) -> tuple[Carry, tuple[Array, ...]]:
        s = c.scores(rows)
        picked = largest(s.scores, config.top_k)
        top = picked.s.max(-1, keepdims=True)
        empty = top == -jnp.inf
        x = normaliser(below_top(picked.s, top), s.a, config.kind)
        p = _weights(picked.s, top, x, s.a, config.kind)
        cut = jnp.where(s.a == 0, -jnp.inf, x - 1 / jnp.where(s.a == 0, 1, s.a))
        certified = (picked.after == -jnp.inf) | (picked.after - top <= cut)
        return carry, (
            c.apply(p, s.values), x, jnp.where(empty, jnp.inf, top + x),
            (p != 0).sum(-1, keepdims=True, dtype=jnp.int32), certified,
        )  # fmt: skip

    _, made = c.over_rows(step, (), (0.0, 0.0, jnp.inf, 0, True))
    out, *terms = (c.of_rows(x) for x in made)
    found: Results = varying_with(Results(out.astype(o.q.dtype), *(x.squeeze(-1) for x in terms)), o)
    return found


def backward(config: Config, lists: TileLists, o: Operands, above: Array, dout: Array) -> Gradients:
    """The gradients of a call."""
    c = _Call(config, lists, o)
    if not c.some:
        return Gradients(*(jnp.zeros_like(x) for x in (o.q, o.k, o.v, o.a)))
    terms = c.queries(above[..., None]), c.queries(dout)

    def step(carry: Carry, rows: _Rows) -> tuple[Carry, tuple[Array, ...]]:
        s = c.scores(rows)
        picked = largest(s.scores, config.top_k).s
        x, do = (c.part_of(of_items(one, rows.items, config.extent.tiles), rows) for one in terms)
        do = cleared(s.seeing, do.astype(c.dtype))
        top = picked.max(-1, keepdims=True)
        p = _weights(picked, top, x.astype(c.dtype), s.a, config.kind)
        u = slopes(p, s.a, config.kind)
        dp = c.product(do, s.values)
        # Where nothing has a weight both sums are 0.
        dp = dp - (u * dp).sum(-1, keepdims=True) / jnp.maximum(u.sum(-1, keepdims=True), jnp.finfo(u.dtype).tiny)
        dalpha = (alpha_terms(p, s.a) * dp).sum(-1, keepdims=True) if config.learned else jnp.zeros_like(top)
        # A row that is computed twice counts once.
        there = rows.there[:, None, None]
        ds, p = jnp.where(there, u * dp, 0) * o.scale, jnp.where(there, p, 0)
        dk, dv = carry
        dk, dv = c.add(dk, s, c.transposed(ds, s.queries)), c.add(dv, s, c.transposed(p, do))
        return (dk, dv), (c.apply(ds, s.keys), dalpha)

    nothing = tuple(jnp.zeros(x.shape, c.dtype) for x in (c.keys, c.values))
    (dk, dv), (dq, dalpha) = c.over_rows(step, varying_with(nothing, (o, above, dout)), (0.0, 0.0))
    dk, dv = (from_key_tiles(x, c.split._replace(share=1), o.k.shape[1], config.extent.block_columns) for x in (dk, dv))
    dq, dk, dv = (x.astype(y.dtype) for x, y in ((c.of_rows(dq), o.q), (dk, o.k), (dv, o.v)))
    return Gradients(dq, dk, dv, c.of_rows(dalpha).squeeze(-1).sum((0, 1)).astype(o.a.dtype))


def _weights(s: Array, top: Array, x: Array, a: Array, kind: Kind) -> Array:
    """The probabilities of rows of scores with their normalisers, NaN where a score is not finite."""
    p = powers(below_top(s, top) - x, a, kind).p
    p = jnp.where(top == -jnp.inf, 0, p / p.sum(-1, keepdims=True))
    return jnp.where(top == jnp.inf, jnp.nan, p)


class _Rows(NamedTuple):
    """The rows of a step: of each item, a part of a row of tiles."""

    items: Items
    part: Array  # (c,) int32
    there: Array  # (c,) bool; others fill up
    width: int  # tiles of the longest
    parts: int  # of a row of tiles


class _Scores(NamedTuple):
    """The scores of a step with what they are made of: n rows of each of c items, and m keys."""

    scores: Array  # (c, n, m); -inf where a row does not see a key, inf for NaN
    a: Array  # (c, n, 1)
    queries: Array  # (c, n, D)
    keys: Array  # (c, m, D)
    values: Array  # (c, m, E)
    seeing: Array | None  # (c, n) bool: rows that see a key; None for all
    at: Array  # (c, tiles): where the tiles of keys are


class _Call:
    """What the steps of one call share."""

    def __init__(self, config: Config, lists: TileLists, o: Operands) -> None:
        (B, _, H, _), (_, _, G, _) = o.q.shape, o.k.shape
        extent = config.extent
        self.config, self.lists, self.o, self.dtype = config, lists, o, compute_type(o.q)
        self.split: Split = split_of(extent.lead, B, H, G)
        self.some = bool(lists.groups and self.split.copies)  # there are tiles, and batch elements
        # A product of floats in 32 bits must not be one of fewer.
        self.precision = lax.Precision.HIGHEST if o.q.dtype.itemsize > 2 else lax.Precision.DEFAULT
        self.rows = self.queries(o.q)
        self.keys, self.values = self._key_tiles(o.k), self._key_tiles(o.v)
        self.positions = None
        if o.q_positions is not None and o.k_positions is not None:
            self.positions = self.queries(o.q_positions[..., None]), self._key_tiles(o.k_positions[..., None])
        self.height = self.split.fold * extent.block_rows  # of a row of tiles

    def queries(self, x: Array) -> Array:
        """x (B, Q, H, size) as tiles."""
        extent = self.config.extent
        return query_tiles(in_order(x, self.lists.order), self.split, extent.tiles, extent.block_rows)

    def _key_tiles(self, x: Array) -> Array:
        return key_tiles(x, self.split, self.config.extent.tile_columns, self.config.extent.block_columns)

    def of_rows(self, x: Array) -> Array:
        """Tiles of queries as (B, Q, H, size)."""
        extent = self.config.extent
        return in_order(from_query_tiles(x, self.split, extent.rows, extent.block_rows), self.lists.back)

    def product(self, x: Array, y: Array) -> Array:
        """x y^T of each item."""
        return jnp.einsum("cxd,cyd->cxy", x, y, precision=self.precision)

    def apply(self, p: Array, y: Array) -> Array:
        return jnp.einsum("cxy,cyd->cxd", p, y, precision=self.precision)

    def transposed(self, p: Array, x: Array) -> Array:
        return jnp.einsum("cxy,cxd->cyd", p, x, precision=self.precision)

    def part_of(self, x: Array, rows: _Rows) -> Array:
        """The rows of the parts, (c, n, ...), of those of whole rows of tiles."""
        if rows.parts == 1:
            return x
        return x.reshape(len(x), rows.parts, -1, *x.shape[2:])[jnp.arange(len(x)), rows.part]

    def scores(self, rows: _Rows) -> _Scores:
        """The scores of the rows of a step."""
        extent, items, split = self.config.extent, rows.items, self.split
        s = tiles_of(self.lists, items, rows.width, 0)
        keep = kept(extent, self.lists, items, s)
        c, m = len(keep), rows.width * extent.block_columns
        keep = keep.reshape(c, 1, extent.block_rows, m)
        keep = self.part_of(jnp.broadcast_to(keep, (c, split.fold, extent.block_rows, m)).reshape(c, -1, m), rows)
        read = [read_of(x, items, s, extent, self.dtype, split.share) for x in (self.keys, self.values)]
        seeing = seen = None
        if self.positions is not None:
            q_positions, k_positions = self.positions
            mine = self.part_of(of_items(q_positions, items, extent.tiles), rows)
            theirs = read_of(k_positions, items, s, extent, k_positions.dtype, split.share).whole()
            keep = keep & (theirs.squeeze(-1)[:, None] <= mine)
        if self.positions is not None or extent.unkept:
            seeing, seen = keep.any(-1), keep.any(-2)
        keys, values = (x._replace(some=seen).whole() for x in read)
        queries = self.part_of(of_items(self.rows, items, extent.tiles).astype(self.dtype), rows)
        queries = cleared(seeing, queries)
        products = self.product(queries, keys) * self.o.scale
        products = jnp.where(jnp.isnan(products), jnp.inf, products)  # a row with either is NaN
        a = jnp.broadcast_to(
            of_heads(split, self.o.a, items, extent.tiles)[:, :, None], (c, split.fold, extent.block_rows)
        )
        a = self.part_of(a.reshape(c, -1, 1), rows)
        return _Scores(jnp.where(keep, products, -jnp.inf), a, queries, keys, values, seeing, read[0].at)

    def add(self, total: Array, s: _Scores, x: Array) -> Array:
        """Sums of tiles of keys with what the items of a step, (c, m, size), add to theirs."""
        flat = total.reshape(-1, *total.shape[2:])
        flat = flat.at[s.at.reshape(-1)].add(x.reshape(-1, *flat.shape[1:]), mode="promise_in_bounds")
        return flat.reshape(total.shape)

    def over_rows(
        self, step: Callable[[Carry, _Rows], tuple[Carry, tuple[Array, ...]]], carry: Carry, empty: tuple[Any, ...]
    ) -> tuple[Carry, tuple[Array, ...]]:
        """What is carried through the steps of all rows, and what they compute as tiles of queries.

        Args:
            empty: of a row that sees no tile, for each result.
        """
        extent, lists, copies = self.config.extent, self.lists, self.split.copies
        found: list[tuple[Array, ...]] = []
        for rows, width in zip(lists.groups, extent.widths, strict=True):
            scores, parts = self.height * width * extent.block_columns, 1
            while scores // parts > MOST and self.height % (2 * parts) == 0:
                parts *= 2
            n = rows.shape[0] * copies * parts
            steps = -(-n // max(1, SCORES // (scores // parts)))
            each = -(-n // steps)
            number = jnp.arange(steps * each, dtype=jnp.int32)
            there, number = number < n, jnp.minimum(number, n - 1)
            at, part = number // parts, number % parts
            row, copy = jnp.asarray(rows)[at % rows.shape[0]], at // rows.shape[0]
            items = Items(row, copy, jnp.asarray(lists.starts)[row], jnp.asarray(lists.counts)[row])
            every = jax.tree.map(lambda x, lead=(steps, each): x.reshape(lead), (items, part, there))

            def one(
                carry: Carry, x: tuple[Items, Array, Array], width: int = width, parts: int = parts
            ) -> tuple[Carry, tuple[Array, ...]]:
                items, part, there = x
                return step(carry, _Rows(items, part, there, width, parts))

            carry, made = lax.scan(one, carry, every)
            made = [x.reshape(steps * each, *x.shape[2:])[:n] for x in made]
            found.append(tuple(x.reshape(copies, rows.shape[0], self.height, *x.shape[2:]) for x in made))
        joined = (
            in_place(list(x), lists.places, value) for x, value in zip(zip(*found, strict=True), empty, strict=True)
        )
        return carry, tuple(joined)
