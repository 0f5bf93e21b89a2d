"""The gather layout of lists of keys, one for each query, and perhaps of an interval of keys for each query.

The lists are data: unsorted, with repeated and missing entries.
"""

from __future__ import annotations

from gossamer.checks import show
from gossamer.layouts.base import Array
from gossamer.layouts.device.arrays import Arrays
from gossamer.layouts.device.walks import (
    Bounds,
    ascending,
    check_bounds,
    check_capacity,
    check_lists,
    check_sizes,
    not_listed,
)
from gossamer.layouts.gather import TILE, WIDTHS, GatherLayout, GatherWalk, queries_of
from gossamer.patterns.grid import WORD

MOST_SORTED = 2048  # entries of a list that a kernel sorts
SPARSEST = 64  # keys for each entry of a group, up to which its union is marked in bits


def key_list_layout(
    indices: Array, counts: Array | None, lo: Array | None, hi: Array | None, Q: int, K: int, *, block_q: int = 1,
    heads: int = 1, xp: Arrays, transpose: bool = True,
) -> GatherLayout:  # fmt: skip
    """The gather layout in which each query keeps the keys of its list.

    With `lo` and `hi` only those keys j of them with lo[r] <= j < hi[r]. Values are not checked: they are on the
    device. Groups of more than one query gather the union of their lists. The transpose is of single keys, whatever
    block_q is: the queries that keep a key are seldom those of the next one.

    Args:
        indices: (Bl, Hl, Q, n) int32 or int64, keys in any order. Those that are repeated count once, and those outside
            [0, K), as -1 is, not at all.
        counts: (Bl, Hl, Q), how many of each list are read, from its first; None for all.
        lo, hi: (bl, hl, Q) int32, bl 1 or Bl, hl 1 or Hl; both None for all keys.
        Q, K: the numbers of queries and keys.
        block_q: queries of a group: 1, 16, 32 or 64.
        heads: query heads whose rows gather together; with several block_q is that of `layouts.gather.queries_of`.
        xp: the array framework's operations.
        transpose: with the transpose, which gradients need.

    Raises:
        ValueError: shapes or block_q are wrong, or there may be more entries than int32 addresses.
    """
    Bl, Hl, n = _check(indices, counts, lo, hi, Q, K, block_q, heads)
    if not n:  # a list with room for one key that is not there: no step below is made for none
        indices = xp.full((Bl, Hl, Q, 1), -1, indices)
    kernels = xp.fused(indices)
    if kernels is not None and _marked(block_q, n, K) and heads * block_q > 1 and not transpose:
        room = _room(block_q, heads, max(n, 1), K)
        made = kernels.key_unions(indices, counts, lo, hi, Q, K, block_q, room)
        return GatherLayout(GatherWalk(Q, K, block_q, *made, heads), _transpose=[], apart=True)
    if kernels is not None and block_q == heads == 1 and n <= MOST_SORTED:
        own, none = kernels.key_rows(indices, counts, lo, hi, Q, K, transpose), xp.full((0, 1), 0, indices)
        columns = [GatherWalk(K, Q, 1, own.column_starts, own.column_counts, own.queries, none)] if transpose else []
        return GatherLayout(
            GatherWalk(Q, K, 1, own.starts, own.counts, own.listed, none), _transpose=columns, apart=True
        )
    keys = _ascending(indices, counts, Bounds(lo, hi) if lo is not None and hi is not None else None, K, xp)
    rows = _rows(keys, K, xp) if block_q == heads == 1 else _unions(keys, K, block_q, heads, xp)
    return GatherLayout(rows, _transpose=[_columns(keys, K, xp)] if transpose else [], apart=True)


def _check(
    indices: Array, counts: Array | None, lo: Array | None, hi: Array | None, Q: int, K: int, block_q: int, heads: int
) -> tuple[int, int, int]:
    """(Bl, Hl, n); raise ValueError for shapes that do not fit, or a group that no layout has."""
    if heads != 1 and block_q != queries_of(heads):
        raise ValueError(f"block_q of {heads} heads must be {queries_of(heads)}; got {show(block_q)}")
    if heads == 1 and (isinstance(block_q, bool) or block_q not in WIDTHS):
        raise ValueError(f"block_q must be one of {', '.join(map(str, WIDTHS))}; got {show(block_q)}")
    check_sizes(Q=Q, K=K)
    Bl, Hl, n = check_lists(indices, counts, Q, "Q")
    check_bounds(lo, hi, Bl, Hl, Q)
    groups, room = -(-Q // block_q), _room(block_q, heads, max(n, 1), K)
    check_capacity(max(Bl * Hl * groups * room, Bl * Hl * Q * max(n, 1), Bl * Hl * K + 1, K * block_q))
    return Bl, Hl, n


def _room(block: int, heads: int, n: int, K: int) -> int:
    """The room of a group's list: for all entries of its queries, and for no more than all keys."""
    width = WIDTHS[block] if heads == 1 else TILE
    return -(-min(block * n, K) // width) * width


def _marked(block: int, n: int, K: int) -> bool:
    """Whether to mark all keys of a group takes less time than to sort its entries."""
    return SPARSEST * block * n >= K


def _ascending(indices: Array, counts: Array | None, bounds: Bounds | None, K: int, xp: Arrays) -> Array:
    """The lists (Bl, Hl, Q, n), each ascending and without repetition; K fills the rest."""
    ignored = not_listed(indices, counts, K, xp)
    if bounds is not None:
        ignored = ignored | (indices < bounds.lo[..., None]) | (indices >= bounds.hi[..., None])
    return ascending(xp.int32(xp.fill(indices, ignored, K)), K, xp)


def _rows(keys: Array, K: int, xp: Arrays) -> GatherWalk:
    """Every list has room for all of its entries."""
    Bl, Hl, Q, n = keys.shape
    starts = (xp.arange(Bl * Hl * Q, keys) * n).reshape(Bl, Hl, Q)
    listed = xp.fill(keys, keys == K, -1).reshape(-1)
    return GatherWalk(Q, K, 1, starts, xp.total(keys < K), listed, xp.full((0, 1), 0, keys))


def _unions(keys: Array, K: int, block: int, heads: int, xp: Arrays) -> GatherWalk:
    """The keys that any query of a group keeps, and a bit for each query that keeps one."""
    Bl, Hl, Q, n = keys.shape
    T = -(-Q // block)
    if not xp.divides(block, Q):
        keys = _with_rows(keys, T * block - Q, K, xp)
    room = _room(block, heads, n, K)
    # Pairs of a group by key, those of a key by query: K * block behind all.
    keys = keys.reshape(Bl, Hl, T, block, n)
    codes = xp.fill(keys * block + xp.arange(block, keys)[:, None], keys == K, K * block)
    codes = xp.sort(codes.reshape(Bl, Hl, T, block * n))
    key, there = codes // block, codes < K * block
    before = xp.concatenate([xp.full((Bl, Hl, T, 1), -1, keys), key[..., : block * n - 1]])
    new = there & (key != before)
    place = xp.cumsum(new) - 1  # among the keys of the group
    listed = xp.sums_at(xp.fill(place, ~new, room), key + 1, room + 1)[..., :room] - 1
    # Each pair is there once, so adding bits is setting them.
    bit = xp.one_bit(place % WORD)
    word = xp.fill(place // WORD * block + codes % block, ~there, room // WORD * block)
    bits = xp.sums_at(word, bit, room // WORD * block + 1)[..., : room // WORD * block]
    starts = (xp.arange(Bl * Hl * T, keys) * room).reshape(Bl, Hl, T)
    bits = bits.reshape(Bl * Hl * T * (room // WORD), block)
    return GatherWalk(Q, K, block, starts, xp.total(new), listed.reshape(-1), bits, heads)


def _with_rows(keys: Array, more: int, K: int, xp: Arrays) -> Array:
    """Lists (Bl, Hl, Q, n), and so many empty ones behind them."""
    Bl, Hl, Q, n = keys.shape
    flat = xp.concatenate([keys.reshape(Bl, Hl, Q * n), xp.full((Bl, Hl, more * n), K, keys)])
    return flat.reshape(Bl, Hl, Q + more, n)


def _columns(keys: Array, K: int, xp: Arrays) -> GatherWalk:
    """The transpose: of each key the queries that keep it, ascending; the lists of all keys follow one another."""
    Bl, Hl, Q, n = keys.shape
    lists = Bl * Hl * K
    code = keys + (xp.arange(Bl * Hl, keys) * K).reshape(Bl, Hl, 1, 1)
    ordered = xp.stable_sort(xp.fill(code, keys == K, lists).reshape(-1))
    edges = xp.searchsorted(ordered.values, xp.arange(lists + 1, keys))
    starts, counts = edges[:-1], edges[1:] - edges[:-1]
    shape = (Bl, Hl, K)
    return GatherWalk(
        K,
        Q,
        1,
        starts.reshape(shape),
        counts.reshape(shape),
        xp.int32(ordered.places // n % Q),
        xp.full((0, 1), 0, keys),
    )
