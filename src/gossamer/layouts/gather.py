"""GatherLayout: for patterns whose tiles would be nearly empty, the list of columns that each group of rows keeps.

A kernel gathers the listed columns into a dense tile and masks it by bits; groups of one row need no bits. Arrays are
numpy arrays or torch tensors; nothing here imports a framework. A layout is a value: nothing writes to its arrays
after it is built.
"""

from __future__ import annotations

import math
from dataclasses import dataclass, field, replace
from functools import cached_property
from typing import NamedTuple

import numpy as np

from gossamer.checks import show
from gossamer.layouts.base import Array, Layout, WalkArrays
from gossamer.layouts.work_list import FEWEST_TILES, PARTS_PER_PROCESSOR
from gossamer.patterns.base import Pattern
from gossamer.patterns.grid import WORD, ranges, unpack_bits
from gossamer.patterns.pairs import PAIRS_AT_ONCE, pair_chunks

# Rows that are gathered for together, and how many columns are gathered at a time for each.
WIDTHS = {1: 1, 16: 32, 32: 32, 64: 64}
TILE = 64  # rows, of queries and heads, that gather together where heads share a list
# The longest list that one item of a launch gathers, in columns.
LONGEST_ITEM = 1024


def queries_of(heads: int) -> int:
    """The number of queries whose rows of so many heads fill a tile of 64 rows: a power of two.

    Raises:
        ValueError: heads have more rows.
    """
    if not 1 <= heads <= TILE:
        raise ValueError(f"heads whose rows share a tile must be from 1 to {TILE}, got {heads}")
    return 1 << ((TILE // heads).bit_length() - 1)


def item_limit(
    groups: int, copies: int, steps: float, width: int, processors: int, fewest: int = FEWEST_TILES // 2
) -> int:
    """The most steps of an item of a launch, each of `width` columns.

    Where groups are few, their lists are cut until every processor has a part, and those much longer than the others,
    for which all would wait, in shorter parts.

    Args:
        groups: of rows; copies: how often they are computed, by batch elements and heads that share their lists.
        steps: of all groups; fewest: that are worth a part of their own then.
    """
    most = max(FEWEST_TILES, LONGEST_ITEM // width)
    programs = processors * PARTS_PER_PROCESSOR
    if groups * copies >= 4 * programs:
        return most
    return min(most, max(fewest, int(2 * steps) // groups, int(steps * copies) // programs))


@dataclass(frozen=True, eq=False)
class GatherWalk(WalkArrays):
    """One direction: for each group of `block_rows` rows, the columns that any of them keeps, ascending.

    The list of group t is `indices[starts : starts + counts]`; it is padded with -1 to a multiple of `width`, and
    starts at one. Bit c of word [w, r] says that row r of the group keeps the column `indices[32 w + c]`.

    Bl is 1 or B, Hl is 1, G or H: the query heads of a key head share its lists; T = ceil(rows / block_rows).

    Where `heads` query heads share a list, their rows of `block_rows` queries (`queries_of`) gather together, 64
    columns at a time.
    """

    rows: int
    columns: int
    block_rows: int  # of the array `bits`, too, which tells the number where only arrays are known
    starts: Array  # (Bl, Hl, T) int32
    counts: Array  # (Bl, Hl, T) int32
    indices: Array  # (n,) int32
    bits: Array  # (n // 32, block_rows) uint32 (torch: int32); (0, 1) for groups of one row, which keep all they list
    heads: int = 1  # query heads whose rows gather together

    @property
    def width(self) -> int:
        """Columns that are gathered at a time: lists are padded to a multiple of it."""
        return WIDTHS[self.block_rows] if self.heads == 1 else TILE

    @property
    def has_bits(self) -> bool:
        """Whether a bit says which row of a group keeps a column: one row alone keeps all."""
        return self.block_rows > 1 or self.heads > 1

    @property
    def lead(self) -> tuple[int, int]:
        """(Bl, Hl)."""
        shape = self.counts.shape
        return int(shape[0]), int(shape[1])

    def for_heads(self, heads: int) -> GatherWalk:
        """The same with lists for each of so many heads, where a key head has one for several; entries are shared."""
        _, Hl = self.lead
        if Hl in (1, heads):
            return self
        repeat = np.repeat if self.device is None else _repeat_of_tensors
        starts, counts = (repeat(x, heads // Hl, 1) for x in (self.starts, self.counts))
        return replace(self, starts=starts, counts=counts)

    def arrays(self) -> list[Array]:
        """Every array in a fixed order (see `with_arrays`)."""
        return [self.starts, self.counts, self.indices, self.bits]

    def with_arrays(self, arrays: list[Array]) -> GatherWalk:
        """The same walk over other arrays, in the order of `arrays()`."""
        starts, counts, indices, bits = arrays
        return replace(self, starts=starts, counts=counts, indices=indices, bits=bits)


def _repeat_of_tensors(x: Array, times: int, axis: int) -> Array:
    return x.repeat_interleave(times, axis)


@dataclass(frozen=True)
class GatherStats:
    """Averages are over the layout's batch elements and heads (Bl x Hl)."""

    useful_pairs: float  # pairs kept
    executed_pairs: float  # rows of a group times its padded list
    gathered: float  # columns listed, of all groups
    density: float  # useful over Q * K
    bytes: int  # of all arrays, the transpose not counted

    @property
    def fill(self) -> float:
        """Useful over executed pairs: 1.0 is perfect."""
        return self.useful_pairs / self.executed_pairs if self.executed_pairs else 1.0


@dataclass(frozen=True, eq=False)
class GatherLayout(Layout[GatherWalk]):
    """The keys to gather for each group of queries. `columns` is the transpose, built on first use.

    `apart` says that no two lists of a walk share entries, so that all together are no longer than `indices`: where
    only a device knows the lists, their work is cut by that.
    """

    apart: bool = field(default=False, repr=False)

    def _transposed(self, walk: GatherWalk) -> GatherWalk:
        return transpose(walk)

    def expand(self) -> np.ndarray:
        """The dense boolean matrix (Q, K), or (Bl, Hl, Q, K) unless Bl == Hl == 1. The oracle of the builder."""
        return expand_gather(self.rows.on_host())

    @cached_property
    def stats(self) -> GatherStats:
        """Counts of pairs and gathered columns."""
        walk = self.rows.on_host()
        copies, counts = math.prod(walk.lead), walk.counts.astype(np.int64)
        padded = -(-counts // walk.width) * walk.width
        useful = executed = 0
        for at in np.ndindex(*walk.lead):
            first, last = walk.starts[at].astype(np.int64), walk.starts[at].astype(np.int64) + padded[at]
            executed += int(padded[at].sum()) * walk.block_rows
            if not walk.has_bits:
                useful += int(counts[at].sum())
            else:
                _, word = ranges(first // WORD, last // WORD)
                useful += int(np.bitwise_count(walk.bits[word]).sum(dtype=np.int64))
        return GatherStats(
            useful / copies,
            executed / copies,
            int(counts.sum()) / copies,
            useful / copies / (walk.rows * walk.columns),
            sum(int(a.nbytes) for a in walk.arrays()),
        )

    def __repr__(self) -> str:
        listed = int(self.rows.indices.shape[0])
        return f"GatherLayout(Q={self.Q}, K={self.K}, block_q={self.block_q}, lead={self.lead}, indices={listed})"


# -- building ---------------------------------------------------------------------------------------------------


class _Lists(NamedTuple):
    """The lists of some groups: counts (T,), padded lengths (T,), indices and bits as in a GatherWalk."""

    counts: np.ndarray
    padded: np.ndarray
    indices: np.ndarray
    bits: np.ndarray


def build_gather(pattern: Pattern, Q: int, K: int, *, block_q: int, q_offset: int | None = None) -> GatherLayout:
    """The gather layout of a pattern, as numpy arrays; `q_offset` defaults to K - Q.

    Raises:
        ValueError: the pattern does not fit Q and K, or block_q is not 1, 16, 32 or 64.
    """
    sizes = pattern._sizes(Q, K, q_offset)
    if block_q not in WIDTHS:
        sizes_of_groups = ", ".join(map(str, WIDTHS))
        raise ValueError(f"block_q of a gather layout must be one of {sizes_of_groups}, got {show(block_q)}")
    pattern.check(sizes.Q, sizes.K, placed=q_offset is not None)
    parts, slot = pattern.distinct()
    built = []
    for part in parts:
        chunks = list(pair_chunks(part, sizes))
        lists = [_lists(rows - start, keys, stop - start, sizes.K, block_q) for start, stop, rows, keys in chunks]
        built.append(_concatenated(lists))
    return GatherLayout(_assemble(sizes.Q, sizes.K, block_q, slot, built))


def _lists(rows: np.ndarray, columns: np.ndarray, n: int, size: int, block_rows: int) -> _Lists:
    """Lists of n rows from their pairs; `columns` are below `size`, pairs in row-major order without repetition."""
    if block_rows == 1:
        counts = np.bincount(rows, minlength=n)
        return _Lists(counts, counts, columns.astype(np.int32), np.zeros((0, 1), dtype=np.uint32))
    width, tiles = WIDTHS[block_rows], -(-n // block_rows)
    pairs = np.sort((rows // block_rows * size + columns) * block_rows + rows % block_rows)
    key, row = np.divmod(pairs, block_rows)
    new = np.diff(key, prepend=-1) != 0
    tile, column = np.divmod(key[new], size)
    counts = np.bincount(tile, minlength=tiles)
    padded = -(-counts // width) * width
    place = np.arange(len(tile)) + np.repeat(np.cumsum(padded) - padded - (np.cumsum(counts) - counts), counts)
    indices = np.full(int(padded.sum()), -1, dtype=np.int32)
    indices[place] = column
    place = place[np.cumsum(new) - 1]
    bits = np.zeros((len(indices) // WORD) * block_rows, dtype=np.uint32)
    # Each pair is there once, so adding bits is setting them.
    np.add.at(bits, place // WORD * block_rows + row, np.uint32(1) << (place % WORD).astype(np.uint32))
    return _Lists(counts, padded, indices, bits.reshape(-1, block_rows))


def _concatenated(parts: list[_Lists]) -> _Lists:
    return _Lists(*map(np.concatenate, zip(*parts, strict=True)))


def _assemble(rows: int, columns: int, block_rows: int, slot: np.ndarray, lists: list[_Lists]) -> GatherWalk:
    """The lists of each batch element and head, which of them `slot` says; equal patterns share theirs."""
    counts, padded = np.stack([p.counts for p in lists]), np.stack([p.padded for p in lists])
    ends = np.cumsum(padded.reshape(-1), dtype=np.int64).reshape(padded.shape)
    total = int(padded.sum(dtype=np.int64))
    if total >= 2**31:
        raise ValueError(f"the layout would list {total} columns; at most {2**31 - 1} can be addressed")
    whole = _concatenated(lists)
    return GatherWalk(
        rows, columns, block_rows, (ends - padded).astype(np.int32)[slot], counts.astype(np.int32)[slot],
        whole.indices, whole.bits,
    )  # fmt: skip


def _pairs(walk: GatherWalk, b: int, h: int) -> tuple[np.ndarray, np.ndarray]:
    """The pairs (row, column) of one batch element and head, in no particular order."""
    starts, counts = walk.starts[b, h].astype(np.int64), walk.counts[b, h].astype(np.int64)
    if not walk.has_bits:
        rows, at = ranges(starts, starts + counts)
        return rows, walk.indices[at].astype(np.int64)
    group, word = ranges(starts // WORD, -(-(starts + counts) // WORD))
    found_rows, found_columns = [np.zeros(0, dtype=np.int64)], [np.zeros(0, dtype=np.int64)]
    step = max(1, PAIRS_AT_ONCE // (WORD * walk.block_rows))
    for first in range(0, len(word), step):
        some = word[first : first + step]
        listed, row, bit = np.nonzero(unpack_bits(walk.bits[some][:, :, None]))
        found_rows.append(group[first + listed] * walk.block_rows + row)
        found_columns.append(walk.indices[some[listed] * WORD + bit].astype(np.int64))
    return np.concatenate(found_rows), np.concatenate(found_columns)


def transpose(walk: GatherWalk) -> GatherWalk:
    """The walk of the transposed matrix, of numpy arrays."""
    seen: dict[tuple[bytes, bytes], int] = {}
    order: list[int] = []
    lists: list[_Lists] = []
    for b, h in np.ndindex(*walk.lead):
        key = walk.starts[b, h].tobytes(), walk.counts[b, h].tobytes()
        if key not in seen:
            seen[key] = len(lists)
            rows, columns = _pairs(walk, b, h)
            columns, rows = np.divmod(np.sort(columns * walk.rows + rows), walk.rows)
            lists.append(_lists(columns, rows, walk.columns, walk.rows, walk.block_rows))
        order.append(seen[key])
    return _assemble(walk.columns, walk.rows, walk.block_rows, np.array(order).reshape(walk.lead), lists)


def expand_gather(walk: GatherWalk) -> np.ndarray:
    """The dense boolean matrix of a numpy walk, slow and plain."""
    dense = np.zeros((*walk.lead, walk.rows, walk.columns), dtype=bool)
    for b, h, t in np.ndindex(*walk.counts.shape):
        start, count = int(walk.starts[b, h, t]), int(walk.counts[b, h, t])
        listed = walk.indices[start : start + count]
        if (np.diff(listed) <= 0).any() or (count and (listed[0] < 0 or listed[-1] >= walk.columns)):
            raise ValueError(f"the list of group {t} of batch element {b}, head {h} must ascend within the columns")
        for r in range(min(walk.block_rows, walk.rows - t * walk.block_rows)):
            kept = np.ones(count, dtype=bool)
            if walk.has_bits:
                packed = walk.bits[start // WORD : -(-(start + count) // WORD), r]
                bits = unpack_bits(np.ascontiguousarray(packed)[None])[0]
                if bits[count:].any():
                    raise ValueError(f"row {r} of group {t} has bits past the end of its list")
                kept = bits[:count]
            dense[b, h, t * walk.block_rows + r, listed[kept]] = True
    return dense.squeeze((0, 1)) if walk.lead == (1, 1) else dense
