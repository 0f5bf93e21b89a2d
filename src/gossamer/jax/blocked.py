"""Attention tile by tile in plain `lax`: on any device, memory O(N x tile), with every score term.

The forward walks rows of query tiles, and so does dQ; dK and dV walk columns. Each is a loop over steps that compute
the scores of some tiles. `differentiable` code is all JAX's own: it has forward mode and gradients of any order.
"""

from __future__ import annotations

from collections.abc import Callable
from typing import Any, NamedTuple, TypeVar

import jax.numpy as jnp
from jax import Array, lax

from gossamer.jax.compat import varying_with
from gossamer.jax.tiles import TileLists
from gossamer.jax.tiling import (
    Config,
    Items,
    Numbers,
    Pairs,
    Read,
    Scored,
    Segments,
    Split,
    Streamed,
    Vectors,
    cleared,
    from_key_tiles,
    from_query_tiles,
    in_order,
    kept,
    key_tiles,
    lengths_of,
    of_items,
    over_rows,
    query_tiles,
    read_of,
    row_positions,
    score,
    slopes_of,
    split_of,
    tiles_of,
)  # fmt: skip

FEW = 64  # rows that are summed one after the other
Pieces = TypeVar("Pieces", bound=tuple[Any, ...])  # what is summed over the pieces of a row


class Results(NamedTuple):
    """What a forward gives."""

    out: Array  # (B, Q, H, E)
    lse: Array  # (B, Q, H)


class Gradients(NamedTuple):
    """What a backward gives."""

    dq: Array
    dk: Array
    dv: Array


def compute_type(x: Array) -> jnp.dtype:
    """The type of the arithmetic and of lse."""
    return jnp.dtype("float64") if x.dtype == jnp.float64 else jnp.dtype("float32")


def forward(
    config: Config,
    lists: TileLists,
    numbers: Numbers,
    q: Array,
    k: Array,
    v: Array,
    vectors: Vectors,
    differentiable: bool = False,
) -> Results:
    """out and lse.

    Args:
        lists: of the rows.
        differentiable: loops are those that JAX can turn around, which takes each row as long as the longest.
    """
    c = _Call.of(config, numbers, q, k, v)
    qt, kt, vt = c.queries(q, lists), c.streamed_keys(k), c.streamed_keys(v)

    def body(items: Items, tiles: int, pieces: int) -> tuple[Array, ...]:
        rows = c.rows(qt, items)

        def partial(piece: Array | int) -> tuple[Array, Array, Array]:
            s = tiles_of(lists, items, tiles, piece)
            pairs = c.pairs_by_rows(lists, items, s, vectors)
            keys, values = (c.streamed(x, items, s)._replace(some=pairs.streamed) for x in (kt, vt))
            scores, _ = c.by_rows(lists, pairs, items, s, c.product(cleared(pairs.resident, rows), keys), vectors)
            m = lax.stop_gradient(scores.max(-1))
            p = jnp.exp(scores - jnp.where(m == -jnp.inf, 0.0, m)[..., None])
            return m, p.sum(-1), c.apply(p, values)

        def step(piece: Array, done: tuple[Array, Array, Array]) -> tuple[Array, Array, Array]:
            (m, total, out), (m_new, total_new, out_new) = done, partial(piece)
            top = jnp.maximum(m, m_new)
            safe = jnp.where(top == -jnp.inf, 0.0, top)
            a, b = jnp.exp(m - safe), jnp.exp(m_new - safe)
            return top, a * total + b * total_new, a[..., None] * out + b[..., None] * out_new

        return c.loop(items, tiles, pieces, partial, step, differentiable)

    def joined(made: tuple[Array, ...], pieces: Segments) -> tuple[Array, ...]:
        m, total, out = made
        top = pieces.max(m)
        factor = jnp.exp(m - jnp.where(top == -jnp.inf, 0.0, top)[pieces.rows])
        return top, pieces.sum(factor * total), pieces.sum(factor[..., None] * out)

    if not (lists.groups and c.split.copies):  # no tiles, or no batch elements
        shape = (*q.shape[:3], v.shape[3])
        out, lse = jnp.zeros(shape, c.dtype), jnp.full(q.shape[:3], -jnp.inf, c.dtype)
    else:
        empty, like = (-jnp.inf, 0.0, 0.0), (q, k, v, vectors, lists)
        m, total, out = over_rows(config.rows, lists, c.split, body, empty, like, differentiable, joined)
        some = total != 0  # a sum that is no number is not that of an empty row
        total = jnp.where(some, total, 1.0)
        out = jnp.where(some[..., None], out / total[..., None], 0.0)
        lse = jnp.where(some, jnp.where(some, m, 0.0) + jnp.log(total), -jnp.inf)[..., None]
        N, block = config.rows.rows, config.rows.block_rows
        out, lse = (in_order(from_query_tiles(x, c.split, N, block), lists.back) for x in (out, lse))
        lse = lse.squeeze(-1)
    if vectors.sink_logits is not None:
        sink = vectors.sink_logits.astype(c.dtype)
        joined = jnp.logaddexp(lse, sink)
        # A row that keeps nothing is 0 whatever the gradient of its output is.
        out, lse = jnp.where(lse[..., None] == -jnp.inf, 0.0, out * jnp.exp(lse - joined)[..., None]), joined
    found: Results = varying_with(Results(out.astype(q.dtype), lse), (q, k, v, vectors))
    return found


def backward(
    config: Config, rows: TileLists, columns: TileLists, numbers: Numbers, q: Array, k: Array, v: Array, lse: Array,
    dout: Array, delta: Array, vectors: Vectors,
) -> Gradients:  # fmt: skip
    """dq, dk and dv.

    Args:
        lse: (B, Q, H), +inf of a row that keeps nothing; delta: (B, Q, H), see `row_terms`.
    """
    c = _Call.of(config, numbers, q, k, v)
    of_rows = (q, dout, lse[..., None], delta[..., None])
    padding = (0.0, 0.0, jnp.inf, 0.0)

    def by_rows(items: Items, tiles: int, pieces: int) -> tuple[Array, ...]:
        q, do, lse, delta = (c.rows(x, items) for x in resident_rows)

        def partial(piece: Array | int) -> tuple[Array, ...]:
            s = tiles_of(rows, items, tiles, piece)
            pairs = c.pairs_by_rows(rows, items, s, vectors)
            keys, values = (c.streamed(x, items, s)._replace(some=pairs.streamed) for x in streamed_keys)
            scored = c.by_rows(rows, pairs, items, s, c.product(cleared(pairs.resident, q), keys), vectors)
            p = jnp.exp(scored.s - lse)
            ds = _ds(p, c.product(cleared(pairs.resident, do), values) - delta, scored)
            return (c.apply(ds, keys),)

        (dq,) = c.loop(items, tiles, pieces, partial, lambda piece, done: _added(done, partial(piece)))
        return (dq * numbers.scale,)

    def by_columns(items: Items, tiles: int, pieces: int) -> tuple[Array, ...]:
        k, v = (c.columns(x, items) for x in resident_keys)

        def partial(piece: Array | int) -> tuple[Array, ...]:
            s = tiles_of(columns, items, tiles, piece)
            q, do, lse, delta = (c.queries_of(x, items, s) for x in streamed_rows)
            pairs = c.pairs_by_columns(columns, items, s, vectors)
            q, do = (x._replace(some=pairs.streamed) for x in (q, do))
            scored = c.by_columns(columns, pairs, items, s, c.product(cleared(pairs.resident, k), q), vectors)
            p = jnp.exp(scored.s - lse.whole().swapaxes(1, 2))
            ds = _ds(p, c.product(cleared(pairs.resident, v), do) - delta.whole().swapaxes(1, 2), scored)
            return c.apply(ds, q), c.apply(p, do)

        dk, dv = c.loop(items, tiles, pieces, partial, lambda piece, done: _added(done, partial(piece)))
        return dk * numbers.scale, dv

    if not (rows.groups and c.split.copies):
        return Gradients(jnp.zeros_like(q), jnp.zeros_like(k), jnp.zeros_like(v))
    resident_rows = [c.queries(x, rows, p) for x, p in zip(of_rows, padding, strict=True)]
    streamed_rows = [c.streamed_queries(x, p) for x, p in zip(of_rows, padding, strict=True)]
    resident_keys, streamed_keys = [c.keys(x, columns) for x in (k, v)], [c.streamed_keys(x) for x in (k, v)]
    like = (q, k, v, *of_rows, vectors, rows, columns)
    (dq,) = over_rows(config.rows, rows, c.split, by_rows, (0.0,), like)
    dk, dv = over_rows(config.columns, columns, c.split, by_columns, (0.0, 0.0), like)
    dq = in_order(from_query_tiles(dq, c.split, config.rows.rows, config.rows.block_rows), rows.back)
    N, block = config.columns.rows, config.columns.block_rows
    dk, dv = (in_order(from_key_tiles(x, c.split, N, block), columns.back) for x in (dk, dv))
    return Gradients(dq.astype(q.dtype), dk.astype(k.dtype), dv.astype(v.dtype))


class RowTerms(NamedTuple):
    """What a backward reads of each row, (B, Q, H)."""

    lse: Array
    delta: Array


def row_terms(out: Array, lse: Array, dout: Array, dlse: Array) -> RowTerms:
    """delta = rowsum(dout * out) - dlse; an lse of -inf becomes +inf, with which every probability is exactly 0."""
    empty, dtype = lse == -jnp.inf, lse.dtype
    # Under a sink a row that keeps nothing has another lse; its out is 0, whatever dout is.
    delta = jnp.where(out == 0, 0.0, dout.astype(dtype) * out.astype(dtype)).sum(-1) - dlse
    return RowTerms(jnp.where(empty, jnp.inf, lse), jnp.where(empty, 0.0, delta))


def _ds(p: Array, dp: Array, scored: Scored) -> Array:
    """dS = P * (dP - delta), through the soft cap."""
    return p * dp if scored.tanh is None else p * dp * (1 - scored.tanh * scored.tanh)


def _added(one: tuple[Array, ...], other: tuple[Array, ...]) -> tuple[Array, ...]:
    return tuple(a + b for a, b in zip(one, other, strict=True))


class _Call(NamedTuple):
    """What the steps of one call share."""

    config: Config
    numbers: Numbers
    split: Split
    dtype: jnp.dtype
    precision: lax.Precision

    @classmethod
    def of(cls, config: Config, numbers: Numbers, q: Array, k: Array, v: Array) -> _Call:
        B, _, H, _ = q.shape
        # A product of floats in 32 bits must not be one of fewer; those of 16 bits are exact in any case.
        whole = q.dtype.itemsize > 2
        precision = lax.Precision.HIGHEST if whole else lax.Precision.DEFAULT
        return cls(config, numbers, split_of(config.rows.lead, B, H, k.shape[2]), compute_type(q), precision)

    def queries(self, x: Array, lists: TileLists, padding: float = 0.0) -> Array:
        rows = self.config.rows
        return query_tiles(in_order(x, lists.order), self.split, rows.tiles, rows.block_rows, padding)

    def streamed_queries(self, x: Array, padding: float = 0.0) -> Array:
        columns = self.config.columns
        return query_tiles(x, self.split, columns.tile_columns, columns.block_columns, padding)

    def keys(self, x: Array, lists: TileLists) -> Array:
        columns = self.config.columns
        return key_tiles(in_order(x, lists.order), self.split, columns.tiles, columns.block_rows)

    def streamed_keys(self, x: Array) -> Array:
        rows = self.config.rows
        return key_tiles(x, self.split, rows.tile_columns, rows.block_columns)

    def rows(self, x: Array, items: Items) -> Array:
        """The tiles of queries of items of rows."""
        return of_items(x, items, self.config.rows.tiles).astype(self.dtype)

    def columns(self, x: Array, items: Items) -> Array:
        """The tiles of keys of items of columns."""
        return of_items(x, items, self.config.columns.tiles, self.split.share).astype(self.dtype)

    def streamed(self, x: Array, items: Items, s: Streamed) -> Read:
        """Tiles of keys, P of block."""
        return read_of(x, items, s, self.config.rows, self.dtype, self.split.share)

    def queries_of(self, x: Array, items: Items, s: Streamed) -> Read:
        """Tiles of queries, P of fold * block."""
        return read_of(x, items, s, self.config.columns, self.dtype)

    def product(self, x: Array, y: Read) -> Array:
        """x y^T of each item. One row is multiplied as the others are gathered, which takes half as long on a CPU."""
        c, n, size = x.shape
        if n > 1:
            return jnp.einsum("cxd,cyd->cxy", x, y.whole(), precision=self.precision)
        terms, ones = (x * y.whole()).reshape(-1, size), jnp.ones(size, x.dtype)
        return jnp.dot(terms, ones, precision=self.precision).reshape(c, 1, -1)

    def apply(self, p: Array, y: Read) -> Array:
        """p y of each item; one row likewise."""
        _, n, _ = p.shape
        if n > 1 or y.rows > FEW:
            return jnp.einsum("cxy,cyd->cxd", p, y.whole(), precision=self.precision)
        weights = p.squeeze(1)
        return sum(weights[:, at, None] * y.row(at) for at in range(y.rows))[:, None]

    def clears(self, vectors: Vectors) -> bool:
        """Whether there may be queries that keep nothing, or keys that no query keeps."""
        return self.config.rows.unkept or vectors.key_lengths is not None

    def pairs_by_rows(self, lists: TileLists, items: Items, s: Streamed, vectors: Vectors) -> Pairs:
        """Of tiles of queries: (c, 1, block_q, P * block_kv), which all heads of a fold share."""
        extent, fold, c = self.config.rows, self.split.fold, s.columns.shape[0]
        keep = kept(extent, lists, items, s).reshape(c, 1, extent.block_rows, -1)
        lengths = lengths_of(self.split, vectors, items, extent.tiles)
        if lengths is not None:
            j = _positions(extent.block_columns, s.columns).reshape(c, 1, 1, -1)
            keep = keep & (j < lengths[:, None, None, None])
        if not self.clears(vectors):
            return Pairs(keep, None, None)
        rows = jnp.broadcast_to(keep.any(3), (c, fold, extent.block_rows)).reshape(c, -1)
        return Pairs(keep, rows, keep.any((1, 2)))

    def by_rows(
        self, lists: TileLists, pairs: Pairs, items: Items, s: Streamed, product: Array, vectors: Vectors
    ) -> Scored:
        """The scores of tiles of queries (c, fold * block_q, P * block_kv)."""
        extent, fold, c = self.config.rows, self.split.fold, product.shape[0]
        i, j = row_positions(extent, lists, items), _positions(extent.block_columns, s.columns)
        slopes = slopes_of(self.split, vectors, items, extent.tiles)
        slopes = None if slopes is None else slopes[:, :, None, None]
        product = product.reshape(c, fold, extent.block_rows, -1)
        found = score(
            self.config, self.numbers, product, pairs.keep, i[:, None, :, None], j.reshape(c, 1, 1, -1), slopes
        )
        flat = (c, fold * extent.block_rows, -1)
        return Scored(found.s.reshape(flat), None if found.tanh is None else found.tanh.reshape(flat))

    def pairs_by_columns(self, lists: TileLists, items: Items, s: Streamed, vectors: Vectors) -> Pairs:
        """Of tiles of keys: (c, block_kv, P, 1, block_q), which all heads of a fold share."""
        extent, fold, c = self.config.columns, self.split.fold, s.columns.shape[0]
        keep = kept(extent, lists, items, s)[:, :, :, None]
        lengths = lengths_of(self.split, vectors, items, extent.tiles)
        if lengths is not None:
            j = row_positions(extent, lists, items)[:, :, None, None, None]
            keep = keep & (j < lengths[:, None, None, None, None])
        if not self.clears(vectors):
            return Pairs(keep, None, None)
        _, _, tiles, _, block_q = keep.shape
        queries = jnp.broadcast_to(keep.any(1), (c, tiles, fold, block_q)).reshape(c, -1)
        return Pairs(keep, keep.any((2, 3, 4)), queries)

    def by_columns(
        self, lists: TileLists, pairs: Pairs, items: Items, s: Streamed, product: Array, vectors: Vectors
    ) -> Scored:
        """The scores of tiles of keys (c, block_kv, P * fold * block_q)."""
        extent, fold, c = self.config.columns, self.split.fold, product.shape[0]
        i, j = _positions(extent.block_columns, s.columns), row_positions(extent, lists, items)
        slopes = slopes_of(self.split, vectors, items, extent.tiles)
        slopes = None if slopes is None else slopes[:, None, None, :, None]
        product = product.reshape(c, extent.block_rows, -1, fold, extent.block_columns)
        found = score(
            self.config, self.numbers, product, pairs.keep, i[:, None, :, None], j[:, :, None, None, None], slopes
        )
        flat = (c, extent.block_rows, -1)
        return Scored(found.s.reshape(flat), None if found.tanh is None else found.tanh.reshape(flat))

    def loop(
        self, items: Items, tiles: int, pieces: int, partial: Callable[..., Pieces],
        step: Callable[[Array, Pieces], Pieces], differentiable: bool = False,
    ) -> Pieces:  # fmt: skip
        """What all pieces of rows give, joined by `step`; only as many as the longest row of these items has.

        The first piece is computed outside of the loop, which then carries what it computes, in `shard_map` too.
        """
        first = partial(0)
        if pieces == 1:
            return first
        most = pieces if differentiable else -(-items.count.max() // tiles)
        done: Pieces = lax.fori_loop(1, most, step, first)
        return done


def _positions(block: int, tile: Array) -> Array:
    """The positions of tiles, (..., block) int32."""
    return tile[..., None] * block + jnp.arange(block, dtype=jnp.int32)
