"""Tensors of a call as tiles, and the tiles of a row with their scores: what both directions of `blocked` share."""

from __future__ import annotations

import math
from collections.abc import Callable
from typing import Any, NamedTuple

import jax
import jax.numpy as jnp
from jax import Array, lax

from gossamer.jax.compat import varying_with
from gossamer.jax.tiles import INTERVAL, NOTHING, Extent, TileLists

# Scores that one step computes. Measured on two cores, where fewer make short loops and more leave the cache; on a GPU
# a step is some ten kernels, each of which takes less than its launch unless it computes many.
SCORES = 2**18
SCORES_OF_GPU = 2**24
HELD = 4  # results of pieces for each row, at most, before they are joined
READ = 64  # scores of a column that take as long as reading it where it is gathered


class Vectors(NamedTuple):
    """The arrays among the score terms, or None."""

    key_lengths: Array | None = None  # (B,) int32
    sink_logits: Array | None = None  # (H,) in the type of the arithmetic
    alibi_slopes: Array | None = None  # (H,) or (B, H) likewise


class Numbers(NamedTuple):
    """The numbers among the score terms, arguments of programs: (1,) in the type of the arithmetic."""

    scale: Array
    softcap: Array | None = None


class Config(NamedTuple):
    """What is known of a call beside its arrays and numbers: the layout's extents, and how positions count."""

    rows: Extent
    columns: Extent
    q_offset: int
    absolute: bool = False  # of ALiBi's distances


def scores_at_once() -> int:
    """How many scores one step computes."""
    return SCORES if jax.default_backend() == "cpu" else SCORES_OF_GPU


class Split(NamedTuple):
    """How batch elements and heads are divided: into those of the layout's lists, and C copies that share a list.

    Where heads share the lists, the query heads of a key head are `fold` parts of one tile, whose keys are read once.
    """

    Bl: int
    batches: int  # that share a list
    lists: int  # of heads: Hl
    key_lists: int
    heads: int  # key heads that share a list
    fold: int
    share: int  # query lists of a key head

    @property
    def copies(self) -> int:
        return self.batches * self.heads


def split_of(lead: tuple[int, int], B: int, H: int, G: int) -> Split:
    """Of q with B batch elements and H heads, and k with G heads."""
    Bl, Hl = lead
    batches = B // Bl
    return Split(Bl, batches, 1, 1, G, H // G, 1) if Hl == 1 else Split(Bl, batches, H, G, 1, 1, H // G)


def query_tiles(x: Array, split: Split, tiles: int, block: int, padding: float = 0.0) -> Array:
    """(B, N, H, size) as (C, Bl * Hl * T, fold * block, size)."""
    return _tiles(x, split, split.lists, split.fold, tiles, block, padding)


def key_tiles(x: Array, split: Split, tiles: int, block: int) -> Array:
    """(B, N, G, size) as (C, lists of keys * T, block, size)."""
    return _tiles(x, split, split.key_lists, 1, tiles, block, 0.0)


def _tiles(x: Array, split: Split, lists: int, fold: int, tiles: int, block: int, padding: float) -> Array:
    _, N, _, size = x.shape
    if tiles * block > N:
        x = jnp.pad(x, ((0, 0), (0, tiles * block - N), (0, 0), (0, 0)), constant_values=padding)
    x = x.reshape(split.Bl, split.batches, tiles, block, lists, split.heads, fold, size)
    x = x.transpose(1, 5, 0, 4, 2, 6, 3, 7)
    return x.reshape(split.copies, split.Bl * lists * tiles, fold * block, size)


def from_query_tiles(x: Array, split: Split, N: int, block: int) -> Array:
    """(C, Bl * Hl * T, fold * block, size) as (B, N, H, size)."""
    return _from_tiles(x, split, split.lists, split.fold, N, block)


def from_key_tiles(x: Array, split: Split, N: int, block: int) -> Array:
    """(C, Bl * Hl * T, block, size) as (B, N, G, size): summed over the query lists of a key head."""
    if split.share > 1:
        copies, rows, block, size = x.shape
        tiles = rows // (split.Bl * split.lists)
        x = x.reshape(copies, split.Bl * split.key_lists, split.share, tiles, block, size).sum(2)
        x = x.reshape(copies, -1, block, size)
    return _from_tiles(x, split, split.key_lists, 1, N, block)


def _from_tiles(x: Array, split: Split, lists: int, fold: int, N: int, block: int) -> Array:
    *_, size = x.shape
    x = x.reshape(split.batches, split.heads, split.Bl, lists, -1, fold, block, size)
    x = x.transpose(2, 0, 4, 6, 3, 1, 5, 7)
    return x.reshape(split.Bl * split.batches, -1, lists * split.heads * fold, size)[:, :N]


class Items(NamedTuple):
    """Rows of tiles that are computed together, each for one copy."""

    row: Array  # (c,) int32, counted over all lists
    copy: Array  # (c,) int32
    first: Array  # (c,) int32: where its tiles begin
    count: Array  # (c,) int32


class Streamed(NamedTuple):
    """The tiles that a step reads for each item."""

    columns: Array  # (c, P) int32
    masks: Array  # (c, P) int32


class Segments(NamedTuple):
    """The pieces of rows that are joined."""

    rows: Array  # of pieces
    number: int  # of rows
    in_order: bool = True  # the rows ascend

    def sum(self, x: Array) -> Array:
        """Of the pieces of each row."""
        found: Array = jax.ops.segment_sum(x, self.rows, self.number, indices_are_sorted=self.in_order)
        return found

    def max(self, x: Array) -> Array:
        """Of the pieces of each row; -inf of one that has none."""
        found: Array = jax.ops.segment_max(x, self.rows, self.number, indices_are_sorted=self.in_order)
        return found


def sums(made: tuple[Array, ...], pieces: Segments) -> tuple[Array, ...]:
    """The results of rows, of which those of pieces are summands."""
    return tuple(pieces.sum(x) for x in made)


def over_rows(
    extent: Extent, lists: TileLists, split: Split, body: Callable[[Items, int, int], tuple[Array, ...]],
    empty: tuple[float, ...], like: Any, checkpointed: bool = False,
    joined: Callable[[tuple[Array, ...], Segments], tuple[Array, ...]] = sums,
) -> tuple[Array, ...]:  # fmt: skip
    """What `body` computes of every row of tiles and copy: each result (C, L * T, ...).

    Args:
        body: of some items, whose rows visit at most `tiles` tiles in each of `pieces` steps: (c, ...) each.
        empty: of a row that visits no tile, for each result.
        like: all arrays that the body reads.
        checkpointed: a gradient of JAX's own computes a step again, and keeps its inputs alone.
        joined: what rows have of the results of their pieces, where columns are gathered.
    """
    if extent.gathers:
        return _over_pieces(extent, lists, split, body, empty, like, checkpointed, joined)
    found: list[tuple[Array, ...]] = []
    block = extent.block_rows * extent.block_columns * split.fold
    for rows, width in zip(lists.groups, extent.widths, strict=True):
        tiles, n = min(width, extent.piece), rows.shape[0] * split.copies
        steps = -(-n // max(1, scores_at_once() // (block * tiles)))
        each = -(-n // steps)
        item = jnp.arange(steps * each, dtype=jnp.int32) % n  # the last ones are computed twice
        row, copy = jnp.asarray(rows)[item % rows.shape[0]], item // rows.shape[0]
        items = Items(row, copy, jnp.asarray(lists.starts)[row], jnp.asarray(lists.counts)[row])

        def step(items: Items, tiles: int = tiles, width: int = width) -> tuple[Array, ...]:
            return body(items, tiles, -(-width // tiles))

        step = jax.checkpoint(step) if checkpointed else step
        if steps == 1:
            made = step(items)
        else:
            made = lax.map(step, jax.tree.map(lambda x, n=steps: x.reshape(n, -1), items))
            made = tuple(x.reshape(steps * each, *x.shape[2:]) for x in made)
        found.append(tuple(x[:n].reshape(split.copies, rows.shape[0], *x.shape[1:]) for x in made))
    every = zip(*found, strict=True)
    return tuple(in_place(list(parts), lists.places, value) for parts, value in zip(every, empty, strict=True))


def _over_pieces(
    extent: Extent, lists: TileLists, split: Split, body: Callable[[Items, int, int], tuple[Array, ...]],
    empty: tuple[float, ...], like: Any, checkpointed: bool,
    joined: Callable[[tuple[Array, ...], Segments], tuple[Array, ...]],
) -> tuple[Array, ...]:  # fmt: skip
    """`over_rows` of gathered columns: steps of equal sizes, as many as the pieces that there are take.

    Results of pieces are joined when there are HELD times as many as rows.
    """
    (rows,), (width,), copies = lists.groups, extent.widths, split.copies
    n, most = rows.shape[0] * copies, math.prod(extent.lead) * extent.tiles * copies
    each = min(n, max(1, scores_at_once() // (max(extent.block_rows * split.fold, READ) * width)))
    held = min(-(-n // each), max(1, HELD * most // each))
    chunks = -(-n // (held * each))
    at = jnp.arange(chunks * held * each, dtype=jnp.int32)
    there, at = at < n, jnp.minimum(at, n - 1)
    piece, copy = at // copies, at % copies
    row = jnp.asarray(rows)[piece]
    items = Items(row, copy, jnp.asarray(lists.starts)[piece], jnp.where(there, jnp.asarray(lists.counts)[piece], 0))
    items = jax.tree.map(lambda x: x.reshape(chunks, held, each), items)
    ids = (row * copies + copy).reshape(chunks, -1)
    steps = -(-jnp.asarray(lists.places).squeeze() * copies // each)

    def step(items: Items) -> tuple[Array, ...]:
        made: tuple[Array, ...] = varying_with(tuple(body(items, width, 1)), like)
        return made

    shapes = jax.eval_shape(step, Items(*[jax.ShapeDtypeStruct((each,), jnp.int32)] * len(Items._fields)))

    def none(*lead: int) -> tuple[Array, ...]:
        made = (jnp.full((*lead, *x.shape[1:]), value, x.dtype) for x, value in zip(shapes, empty, strict=True))
        filled: tuple[Array, ...] = varying_with(tuple(made), like)
        return filled

    def chunk(number: Array | int) -> tuple[Array, ...]:
        mine = jax.tree.map(lambda x: x[number], items)
        if checkpointed:
            made = lax.map(jax.checkpoint(step), mine)
        else:

            def one(at: Array, made: tuple[Array, ...]) -> tuple[Array, ...]:
                found = step(jax.tree.map(lambda x: x[at], mine))
                return tuple(lax.dynamic_update_index_in_dim(x, new, at, 0) for x, new in zip(made, found, strict=True))

            made = lax.fori_loop(0, jnp.clip(steps - number * held, 0, held), one, none(held, each))
        return tuple(x.reshape(held * each, *x.shape[2:]) for x in made)

    def add(number: Array, done: tuple[Array, ...]) -> tuple[Array, ...]:
        every = tuple(jnp.concatenate(parts) for parts in zip(done, chunk(number), strict=True))
        all_ids = jnp.concatenate([jnp.arange(most, dtype=jnp.int32), ids[number]])
        return joined(every, Segments(all_ids, most, in_order=False))

    if chunks == 1:
        every = joined(chunk(0), Segments(ids.reshape(-1), most))
    else:
        every = lax.fori_loop(0, chunks if checkpointed else -(-steps // held), add, none(most))
    return tuple(x.reshape(-1, copies, *x.shape[1:]).swapaxes(0, 1) for x in every)


def in_place(parts: list[Array], places: Array, empty: float) -> Array:
    """The results of all groups (C, n, ...), by rows; `empty` of those in no group."""
    first, *_ = parts
    nothing = jnp.full_like(lax.slice_in_dim(first, 0, 1, axis=1), empty)
    return jnp.concatenate([*parts, nothing], axis=1)[:, places]


def of_items(x: Array, items: Items, tiles: int, share: int = 1) -> Array:
    """The tile of each item's row, (c, block, size), of x (C, lists * T, block, size).

    Args:
        tiles: T; share: lists of rows that one list of x is for.
    """
    row = items.row if share == 1 else items.row // (tiles * share) * tiles + items.row % tiles
    return taken(x.reshape(-1, *x.shape[2:]), items.copy * x.shape[1] + row)


def read_of(x: Array, items: Items, s: Streamed, extent: Extent, dtype: Any, share: int = 1) -> Read:
    """The tiles that a step reads of x (C, lists * tile columns, block, size)."""
    first = items.row // (extent.tiles * share) * extent.tile_columns
    at = (items.copy * x.shape[1] + first)[:, None] + s.columns
    return Read(x.reshape(-1, *x.shape[2:]), at, dtype)


def taken(x: Array, at: Array) -> Array:
    """x[at], of places that exist."""
    return x.at[at].get(mode="promise_in_bounds")


def tiles_of(lists: TileLists, items: Items, tiles: int, piece: Any) -> Streamed:
    """The tiles of one piece of each item's row."""
    at = piece * tiles + jnp.arange(tiles, dtype=jnp.int32)
    there = at < items.count[:, None]
    # Behind the last tile the first is read again: another might hold what no pair of the row has.
    place = items.first[:, None] + jnp.where(there, at, 0)
    masks = jnp.asarray(lists.masks)[place] if lists.masks.shape[0] else place
    return Streamed(jnp.asarray(lists.columns)[place], jnp.where(there, masks, NOTHING))


def kept(extent: Extent, lists: TileLists, items: Items, s: Streamed) -> Array:
    """Which pairs of these tiles are attended, (c, block_rows, P, block_columns)."""
    if extent.gathers:
        return _kept_of_gathered(extent, lists, s)
    at = s.columns[:, :, None] * extent.block_columns + jnp.arange(extent.block_columns, dtype=jnp.int32)
    low: Array | int = 0
    high = jnp.where(s.masks == NOTHING, 0, extent.columns)[:, None]  # (c, 1, P)
    if lists.lo.size:
        interval, rows = (s.masks == INTERVAL)[:, None], items.row
        lo, hi = (jnp.asarray(x).reshape(-1, extent.block_rows)[rows][:, :, None] for x in (lists.lo, lists.hi))
        low, high = jnp.where(interval, lo, 0)[..., None], jnp.where(interval, hi, high)
    found = (at[:, None] < high[..., None]) & (at[:, None] >= low)
    if lists.pool.shape[0]:
        words = jnp.asarray(lists.pool)[jnp.maximum(s.masks, 0)]  # (c, P, block_rows, words)
        words = jnp.where((s.masks >= 0)[:, :, None, None], words, jnp.uint32(2**32 - 1))
        bits = (words[..., None] >> jnp.arange(32, dtype=jnp.uint32)) & 1
        found = found & (bits.reshape(*words.shape[:3], -1).swapaxes(1, 2) == 1)
    c = len(items.row)
    return jnp.broadcast_to(found, (c, extent.block_rows, s.columns.shape[1], extent.block_columns))


def _kept_of_gathered(extent: Extent, lists: TileLists, s: Streamed) -> Array:
    """Which pairs of gathered columns are attended, (c, block_rows, P, 1)."""
    found = (s.masks != NOTHING)[:, None]
    if lists.pool.shape[0]:
        rows = jnp.arange(extent.block_rows, dtype=jnp.uint32)
        words = jnp.asarray(lists.pool)[jnp.maximum(s.masks, 0)].swapaxes(1, 2)  # (c, block_rows / 32, P)
        bits = (jnp.repeat(words, 32, axis=1) >> (rows % 32)[:, None]) & 1
        found = found & (bits == 1)
    return found[..., None]


def in_order(x: Array, order: Array) -> Array:
    """Rows (B, N, ...) in an order; an empty one leaves them as they are."""
    return x[:, order] if order.shape[0] else x


def row_positions(extent: Extent, lists: TileLists, items: Items) -> Array:
    """The rows of items, (c, block_rows) int32; of those past the end any."""
    at = (items.row % extent.tiles)[:, None] * extent.block_rows + jnp.arange(extent.block_rows, dtype=jnp.int32)
    return jnp.asarray(lists.order)[jnp.minimum(at, extent.rows - 1)] if lists.order.shape[0] else at


class Pairs(NamedTuple):
    """The pairs of a step: which are attended, and which rows of both operands any of them reads."""

    keep: Array  # with axes of its own: see `blocked._Call.by_rows` and `by_columns`
    resident: Array | None  # (c, n) bool; None where all are read
    streamed: Array | None  # (c, m) bool


def cleared(some: Array | None, x: Array) -> Array:
    """`x` (..., size), and 0 in rows that no pair reads: 0 times NaN is NaN, in gradients of JAX's own as well."""
    return x if some is None else jnp.where(some[..., None], x, 0)


class Read(NamedTuple):
    """Tiles that a step reads, P of n rows for each of c items: once more wherever they are used."""

    x: Array  # (tiles, n, size)
    at: Array  # (c, P)
    dtype: Any
    some: Array | None = None  # (c, P * n) bool: what any pair reads; None: all

    @property
    def rows(self) -> int:
        """Of an item."""
        return self.at.shape[1] * self.x.shape[1]

    def whole(self) -> Array:
        """(c, P * n, size)."""
        *_, size = self.x.shape
        return cleared(self.some, taken(self.x, self.at).reshape(len(self.at), -1, size).astype(self.dtype))

    def row(self, place: int) -> Array:
        """(c, size), the one at a place of each item."""
        tile, row = divmod(place, self.x.shape[1])
        found = taken(self.x, self.at[:, tile])[:, row].astype(self.dtype)
        return cleared(None if self.some is None else self.some[:, place], found)


class Scored(NamedTuple):
    """Scores of pairs, with a key axis and a query axis in either order."""

    s: Array
    tanh: Array | None  # of the score over its soft cap


def score(config: Config, numbers: Numbers, s: Array, keep: Array, i: Array, j: Array, slopes: Any) -> Scored:
    """Products as scores, -inf of a pair that is not attended.

    Args:
        s: q k^T; keep, i, j, slopes: broadcast to it. i and j are rows of queries and keys.
    """
    s, tanh = s * numbers.scale, None
    if numbers.softcap is not None:
        tanh = jnp.tanh(s / numbers.softcap)
        s = tanh * numbers.softcap
    if slopes is not None:
        distance = (j - (i + config.q_offset)).astype(s.dtype)
        s = s + slopes * (-jnp.abs(distance) if config.absolute else distance)
    return Scored(jnp.where(keep, s, -jnp.inf), tanh)


def lengths_of(split: Split, vectors: Vectors, items: Items, tiles: int) -> Array | None:
    """The key length of each item, (c,)."""
    if vectors.key_lengths is None:
        return None
    return vectors.key_lengths[_batch_of(split, items, tiles)]


def _batch_of(split: Split, items: Items, tiles: int) -> Array:
    """The batch element of each item, (c,)."""
    return items.row // (tiles * split.lists) * split.batches + items.copy // split.heads


def slopes_of(split: Split, vectors: Vectors, items: Items, tiles: int) -> Array | None:
    """The slopes of each item's query heads, (c, fold)."""
    return None if vectors.alibi_slopes is None else of_heads(split, vectors.alibi_slopes, items, tiles)


def of_heads(split: Split, x: Array, items: Items, tiles: int) -> Array:
    """Numbers of heads, (H,) or (B, H), for each item's query heads: (c, fold)."""
    by_list = x.reshape(*x.shape[:-1], split.lists * split.heads, split.fold)
    head = items.row // tiles % split.lists if split.lists > 1 else items.copy % split.heads
    return by_list[head] if x.ndim == 1 else by_list[_batch_of(split, items, tiles), head]
