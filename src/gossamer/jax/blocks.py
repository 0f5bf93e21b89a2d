"""Plans of lists of key blocks that are arrays: chosen by the data, made where they are, inside of `jit` too."""

from __future__ import annotations

from typing import Any

import jax.numpy as jnp
from jax import Array

from gossamer.checks import show, whole
from gossamer.jax import device_arrays
from gossamer.jax.arguments import describe, shape_of
from gossamer.jax.prepared import Label, Prepared, without_tiles
from gossamer.jax.tiles import FULL, INTERVAL, Extent, TileLists, Walked
from gossamer.layouts.device.block_lists import block_list_layout
from gossamer.layouts.walk import TileList, Walk
from gossamer.patterns import Dense, Pattern
from gossamer.patterns.reach import EVERY_KEY, Bounds
from gossamer.plan.arguments import most_offset, within_positions

RULED = "Dense, Causal, Local, SlidingWindow without sinks, or any & of them"


def prepare_blocks(
    indices: Array, query: Any, key: Any, *, block_size: int = 64, counts: Array | None = None,
    pattern: Pattern | None = None, q_offset: int | None = None,
) -> Prepared:  # fmt: skip
    """The prepared form of lists of key blocks, one list for each block of queries: what a router or a selection chose.

    Nothing is read back and all sizes follow from shapes, so that it may be made inside of `jit`. Rows are counted from
    0. Blocks in any order; those that are repeated count once, those that do not exist, as -1, not at all.

    Args:
        indices: (B, N, rows, n) integers, rows = ceil(T / block_size), B and N (key or query heads) 1 where they share
            lists; leading dimensions may be left out.
        query: (B, T, N, H), (T, N, H) or (N, D), of which the shape is read; key likewise.
        block_size: a multiple of 32.
        counts: (B, N, rows), how many of each list count, from its first; None for all.
        pattern: what else has to keep a pair: one that says by positions alone which interval of keys a query sees.
        q_offset: position of query row 0, for `pattern`; S - T by default.

    Raises:
        ValueError: a shape or the pattern is wrong.

    Examples:
        >>> q = jnp.ones((1, 256, 2, 16))
        >>> @jax.jit
        ... def step(q, indices):
        ...     return gsj.attention(q, q, q, gsj.prepare_blocks(indices, q, q, pattern=gs.Causal()))
        >>> step(q, jnp.asarray([[0, -1], [1, 0], [2, 0], [3, 1]])).shape
        (1, 256, 2, 16)
    """
    (B, Q, H, _), (_, K, G, _) = shape_of(query, "query"), shape_of(key, "key")
    indices = jnp.asarray(indices)
    block = whole(block_size) or 0
    rows = -(-Q // block) if block > 0 else 0
    wanted = f"indices must be integers (B, N, rows, n), rows = ceil(T / block_size) = {rows}"
    if not 2 <= indices.ndim <= 4 or not jnp.issubdtype(indices.dtype, jnp.integer):
        raise ValueError(f"{wanted}; got {describe(indices)}")
    four = indices.reshape((1,) * (4 - indices.ndim) + indices.shape).astype(jnp.int32)
    Bl, heads, listed, n = four.shape
    if Bl not in (1, B) or heads not in (1, G, H) or listed != rows:
        raise ValueError(f"{wanted}, B 1 or {B}, N 1, {G} or {H}; got {describe(indices)}")
    if counts is not None:
        counts = jnp.asarray(counts)
        if counts.shape != indices.shape[:-1] or not jnp.issubdtype(counts.dtype, jnp.integer):
            raise ValueError(
                f"counts must be integers {indices.shape[:-1]}, as indices have lists; got {describe(counts)}"
            )
        counts = jnp.clip(counts.astype(jnp.int32), 0, n).reshape(four.shape[:-1])
    if heads not in (1, H):
        four, counts = (None if x is None else jnp.repeat(x, H // heads, axis=1) for x in (four, counts))
    offset = K - Q if q_offset is None else whole(q_offset)
    if offset is None or abs(offset) > most_offset(Q, K):
        raise ValueError(f"q_offset must {within_positions(Q, K)}; got {describe(q_offset)}")
    lo, hi = _bounds(pattern, offset, Q, K)
    name = f"blocks of {block_size}{'' if pattern is None else f' & {show(pattern)}'}"
    Bl, heads, *_ = four.shape
    if not (Q and K and Bl):
        return without_tiles(name, Q, K, (max(Bl, 1), heads), offset)
    layout = block_list_layout(four, counts, lo, hi, Q, K, block=block_size, xp=device_arrays)
    by_rows, by_columns = _walked(layout.rows, max(n, 1)), _walked(layout.columns, rows)
    return Prepared(by_rows.lists, by_columns.lists, by_rows.extent, by_columns.extent, offset, Label(name))


def _bounds(pattern: Pattern | None, offset: int, Q: int, K: int) -> tuple[Array | None, Array | None]:
    """The interval of keys of each query, (1, 1, Q); None for all keys."""
    rule = EVERY_KEY if pattern is None or isinstance(pattern, Dense) else _rule(pattern)
    reach = None if rule is None else rule.interval
    if reach is None:
        raise ValueError(f"pattern must be one that lists of blocks are joined with: {RULED}; got {show(pattern)}")
    if rule.every:
        return None, None
    found: Bounds = reach.bounds(jnp.arange(Q, dtype=jnp.int32) + offset, K)
    return found.lo[None, None], jnp.maximum(found.lo, found.hi)[None, None]


def _rule(pattern: Any) -> Any:
    """What a pattern says by positions alone; None where it says more."""
    return pattern.device_rule() if isinstance(pattern, Pattern) else None


def _walked(walk: Walk, most: int) -> Walked:
    """A walk of arrays whose numbers are not known as lists: of one group, in which a row has up to `most` tiles."""
    Bl, Hl = walk.lead
    T = Bl * Hl * walk.tiles
    every = [_entries(tiles, mask, T) for tiles, mask in ((walk.full, FULL), (walk.interval, INTERVAL))]
    row, column, mask = (jnp.concatenate(parts) for parts in zip(*every, strict=True))
    order = jnp.lexsort((column, row))  # columns of a row ascend
    counts = (walk.full.counts + walk.interval.counts).reshape(-1)
    starts = jnp.cumsum(counts, dtype=jnp.int32) - counts
    extent = Extent(
        walk.rows, walk.columns, walk.block_rows, walk.block_columns, (Bl, Hl), (most,)
    )  # fmt: skip
    lo = hi = jnp.zeros((0, 0), jnp.int32)
    if walk.lo.size:
        missing = extent.tiles * extent.block_rows - extent.rows
        lo, hi = (jnp.pad(x.reshape(-1, extent.rows), ((0, 0), (0, missing))) for x in (walk.lo, walk.hi))
    pool = jnp.zeros((0, walk.block_rows, walk.block_columns // 32), jnp.uint32)
    rows = jnp.arange(T, dtype=jnp.int32)
    return Walked(extent, TileLists(starts, counts, column[order], mask[order], lo, hi, pool, (rows,), rows))


def _entries(tiles: TileList, mask: int, rows: int) -> tuple[Array, Array, Array]:
    """(row, column, mask) of every place of a list; the row of one that none refers to is behind all others."""
    starts, counts = tiles.starts.reshape(-1), tiles.counts.reshape(-1)
    at = jnp.arange(len(tiles.indices), dtype=jnp.int32)
    # Of rows that begin at the same place only the last one has entries.
    row = jnp.searchsorted(starts, at, side="right").astype(jnp.int32) - 1
    there = (row >= 0) & (at - starts[row] < counts[row])
    return jnp.where(there, row, rows), jnp.asarray(tiles.indices), jnp.full(len(at), mask, jnp.int32)
