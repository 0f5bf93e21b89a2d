"""Pattern: what is attended. A pure, frozen, hashable description, composable with & | ~.

A pattern answers questions about pairs (`keep`, `materialize`) and, for the layout builder, questions about whole
tiles: which tiles may hold a kept pair (`tile_candidates`), whether a tile is empty, full or mixed (`tile_classes`),
which mixed tiles are surely alike (`tile_ids`), and what a mixed tile holds (`tile_masks`). Every default below is
right for any pattern that defines `_keep`; the overrides make it fast.
"""

from __future__ import annotations

import inspect
from abc import ABCMeta, abstractmethod
from collections.abc import Callable
from functools import lru_cache
from typing import TYPE_CHECKING, Any, ClassVar, TypeVar

import numpy as np

from gossamer.checks import integer, optional_integer, show
from gossamer.patterns.grid import (
    ELEMENTS_AT_ONCE,
    EMPTY,
    FULL,
    MIXED,
    WORD,
    Grid,
    Sizes,
    all_tiles,
    combine_ids,
    interval_masks,
    one_of_each,
    pack_bits,
    ranges,
)
from gossamer.patterns.handles import give_handle
from gossamer.patterns.reach import Rule

if TYPE_CHECKING:
    from gossamer.layouts import BlockLayout

Intervals = tuple[np.ndarray, np.ndarray]  # lo (Q,), hi (Q,) int64, both non-decreasing
Tiles = tuple[np.ndarray, np.ndarray]  # tile rows, tile columns
Pairs = tuple[np.ndarray, np.ndarray]  # query rows, keys
# A pattern of offsets with more of them than this is looked into by tiles.
OFFSETS_LISTED = 2**13


class Above:
    """The functions of files above this one that methods of patterns call: each file gives its own when imported."""

    conjunction: Callable[[Pattern, Pattern], Pattern]
    union: Callable[[Pattern, Pattern], Pattern]
    complement: Callable[[Pattern], Pattern]
    count_pairs: Callable[[Pattern, Sizes], int]
    reordered: Callable[[Any], Any]
    build: Callable[..., BlockLayout]


above = Above()

P = TypeVar("P", bound="Pattern")


class _PatternMeta(ABCMeta):
    """Gives every pattern its handle once it is made."""

    # The type of an instance, for checkers that would else not look at the constructor.
    def __call__(cls: type[P], *args: Any, **kwargs: Any) -> P:  # type: ignore[misc]
        pattern: P = super().__call__(*args, **kwargs)  # type: ignore[misc]
        _check_key(pattern)
        try:
            give_handle(pattern)
        except TypeError as error:
            message = f"{cls.__name__}._key must give what can be hashed, of an array its digest: {error}"
            raise TypeError(message) from None
        return pattern

    @property
    def __signature__(cls) -> inspect.Signature:
        """The constructor's, which `__call__` would hide from help() and error messages."""
        signature = inspect.signature(cls.__init__)  # type: ignore[misc]
        return signature.replace(parameters=list(signature.parameters.values())[1:])


def _check_key(pattern: Pattern) -> None:
    """Raise TypeError where two patterns that differ would be taken for equal, or one could change."""
    kind = type(pattern)
    if kind._key is not Pattern._key:
        return
    unknown = vars(pattern).keys() - getattr(kind, "__dataclass_fields__", {}).keys()
    settings = getattr(kind, "__dataclass_params__", None)
    if unknown or (settings is not None and not settings.frozen):
        names = f"; {', '.join(sorted(unknown))} would not tell two of them apart" if unknown else ""
        raise TypeError(f"{kind.__name__} must be a frozen dataclass or define _key{names}")


class Pattern(metaclass=_PatternMeta):
    """A set of (query, key) pairs. Query row r has position i = r + q_offset, key j has position j.

    `q_offset` defaults to K - Q (aligned at the end). Positions may be negative and never wrap.

    A subclass is a frozen dataclass, whose fields tell two patterns apart, and defines `_keep`.

    Examples:
        >>> import dataclasses
        >>> @dataclasses.dataclass(frozen=True, eq=False)
        ... class Even(gs.Pattern):
        ...     def _keep(self, i, j, sizes):
        ...         return j % 2 == 0
        ...
        >>> (gs.Causal() & Even() | gs.SlidingWindow(0)).materialize(4, 4).astype(int)
        array([[1, 0, 0, 0],
               [1, 1, 0, 0],
               [1, 0, 1, 0],
               [1, 0, 1, 1]])
        >>> (~gs.Causal()).density(100, 100)
        0.495
    """

    handle: int  # what operators and compiled graphs call it; equal patterns share one
    # Whether it joins other patterns by operators of its own, also from the right: it is computed in another order.
    _ordered: ClassVar[bool] = False

    # -- what a subclass says -----------------------------------------------------------------------------------

    @abstractmethod
    def _keep(self, i: np.ndarray, j: np.ndarray, sizes: Sizes) -> np.ndarray:
        """Kept or not, for int64 positions i and j, which may be anything; what is said of absent pairs is ignored."""

    def _key(self) -> tuple[Any, ...]:
        """The value by which two patterns of this class are equal."""
        return tuple(getattr(self, name) for name in getattr(self, "__dataclass_fields__", ()))

    def _check(self, Q: int, K: int) -> None:
        """Raise ValueError when the pattern cannot describe Q rows by K keys."""

    _has_positions = False  # whether it, or what it is made of, may hold a number for each position

    def _check_positions(self, K: int, placed: bool) -> None:
        """Raise ValueError when the pattern has other positions than K, or fewer where rows are `placed`."""

    @property
    def lead(self) -> tuple[int, int]:
        """(Bp, Hp): 1 where batch elements or query heads share the pattern, else how many it describes."""
        return 1, 1

    def at(self, b: int, h: int) -> Pattern:
        """The pattern of batch element b and query head h, which is what `_keep` and the questions about tiles are for.

        Also where `lead` is (1, 1): a pattern of one batch element or head may be told by an array that has them.
        """
        return self

    def device_rule(self) -> Rule | None:
        """The rule by which a row sees keys by its position alone; None where it depends on more.

        It is what `attention` reads of a pattern whose rows have positions that are known on the device alone.
        """
        return None

    @property
    def reads_positions(self) -> bool:
        """Whether `q_offset` has a meaning: not where rows are counted from 0 whatever it is."""
        return True

    @property
    def _period(self) -> tuple[int, int]:
        """Batch elements, and heads, that are equal modulo these have equal patterns: `lead` where none is shorter."""
        return self.lead

    def distinct(self) -> tuple[list[Pattern], np.ndarray]:
        """The patterns that any batch element or head has, each once, and which of them each one has (Bp, Hp)."""
        numbers: dict[Pattern, int] = {}
        (B, H), (every_b, every_h) = self.lead, self._period
        which = np.empty((every_b, every_h), dtype=np.int64)
        for b, h in np.ndindex(every_b, every_h):
            which[b, h] = numbers.setdefault(self.at(b, h), len(numbers))
        return list(numbers), which[np.arange(B) % every_b][:, np.arange(H) % every_h]

    def lower(self, sizes: Sizes) -> Pattern:
        """An equal pattern made of simpler ones; itself when it is simple."""
        return self

    # -- pairs --------------------------------------------------------------------------------------------------

    def keep(self, i: Any, j: Any, Q: int, K: int, q_offset: int | None = None) -> np.ndarray:
        """The kept pairs, for integer arrays of positions i and j that broadcast against each other.

        Returns a boolean array of the broadcast shape, behind (Bp, Hp) when `lead` is not (1, 1). Keys outside
        [0, K) are never kept.

        Examples:
            >>> gs.Causal().keep(2, [1, 2, 3], Q=4, K=4)
            array([ True,  True, False])
        """
        sizes = self._sizes(Q, K, q_offset)
        self.check(sizes.Q, sizes.K, placed=q_offset is not None)
        i, j = np.asarray(i), np.asarray(j)
        for name, given in (("i", i), ("j", j)):
            if given.dtype.kind not in "iu":
                raise ValueError(f"{name} must hold integer positions, got dtype {given.dtype}")
        i, j = i.astype(np.int64), j.astype(np.int64)
        exists = (j >= 0) & (j < sizes.K)
        shape = np.broadcast_shapes(i.shape, j.shape)
        kept = np.empty((*self.lead, *shape), dtype=bool)
        for b, h in np.ndindex(*self.lead):
            kept[b, h] = self.at(b, h)._keep(i, j, sizes) & exists
        return kept[0, 0] if self.lead == (1, 1) else kept

    def materialize(self, Q: int, K: int, q_offset: int | None = None) -> np.ndarray:
        """The dense boolean matrix (Q, K), or (Bp, Hp, Q, K): slow, plain, trusted.

        Examples:
            >>> gs.Causal().materialize(2, 3, q_offset=0)
            array([[ True, False, False],
                   [ True,  True, False]])
        """
        sizes = self._sizes(Q, K, q_offset)
        i = np.arange(sizes.Q)[:, None] + sizes.q_offset
        j = np.arange(sizes.K)[None, :]
        rows = max(1, 2**23 // max(1, sizes.K))
        parts = [self.keep(i[at : at + rows], j, Q, K, q_offset) for at in range(0, sizes.Q, rows)]
        return np.concatenate(parts, axis=-2)

    def density(self, Q: int, K: int, q_offset: int | None = None) -> float:
        """Kept pairs over Q x K, averaged over heads and batch elements. Counted by tiles, never materialised.

        Examples:
            >>> gs.SlidingWindow(9).density(1000, 1000)
            0.009955
        """
        sizes = self._sizes(Q, K, q_offset)
        self.check(sizes.Q, sizes.K, placed=q_offset is not None)
        return above.count_pairs(self, sizes) / (sizes.Q * sizes.K * self.lead[0] * self.lead[1])

    def layout(self, Q: int, K: int, *, block_q: int, block_kv: int, q_offset: int | None = None) -> BlockLayout:
        """The tiles to visit, as numpy arrays: see `gossamer.layouts.BlockLayout`.

        Examples:
            >>> gs.Causal().layout(128, 128, block_q=64, block_kv=64).stats.full_tiles
            1.0
        """
        return above.build(self, Q, K, block_q=block_q, block_kv=block_kv, q_offset=q_offset)

    def check(
        self, Q: int, K: int, H: int | None = None, B: int | None = None, *, placed: bool = False
    ) -> None:  # fmt: skip
        """Raise ValueError unless the pattern fits Q rows, K keys, H query heads and B batch elements.

        Args:
            placed: q_offset is given, so that it is clear where the rows are among more positions than keys.
        """
        Bp, Hp = self.lead
        if B is not None and Bp not in (1, B):
            raise ValueError(f"pattern {show(self)} describes {Bp} batch elements, the inputs have {B}")
        if H is not None and Hp not in (1, H):
            raise ValueError(f"pattern {show(self)} describes {Hp} query heads, the inputs have {H}")
        self._check(Q, K)
        if self._has_positions:
            self._check_positions(K, placed)

    @staticmethod
    def _sizes(Q: Any, K: Any, q_offset: Any = None) -> Sizes:
        Q, K = integer("Q", Q, minimum=1), integer("K", K, minimum=1)
        q_offset = optional_integer("q_offset", q_offset, minimum=1 - 2**31, none="K - Q")
        return Sizes(Q, K, K - Q if q_offset is None else q_offset)

    # -- composition --------------------------------------------------------------------------------------------

    def __and__(self, other: Any) -> Pattern:
        if isinstance(other, Pattern) and not other._ordered:
            return above.conjunction(self, other)
        joined = getattr(other, "__rand__", None)  # asked for by name: torch 2.11 compiles no reflected operator
        return NotImplemented if joined is None else joined(self)

    def __or__(self, other: Any) -> Pattern:
        return above.union(self, other) if isinstance(other, Pattern) and not other._ordered else NotImplemented

    def __invert__(self) -> Pattern:
        return above.complement(self)

    def __bool__(self) -> bool:
        raise ValueError(
            f"the truth value of a pattern is not defined: compose patterns with & | ~ "
            f"instead of `and`, `or`, `not` (got {show(self)})"
        )

    def __eq__(self, other: object) -> bool:
        if self is other:
            return True
        return type(self) is type(other) and isinstance(other, Pattern) and self._key() == other._key()

    def __hash__(self) -> int:
        try:
            return self.__dict__["_hash"]
        except KeyError:
            value = hash((type(self).__name__, self._key()))
            object.__setattr__(self, "_hash", value)
            return value

    def __getstate__(self) -> dict[str, Any]:
        # A handle and a hash mean nothing in another process.
        return {name: value for name, value in self.__dict__.items() if name not in ("handle", "_token", "_hash")}

    def __setstate__(self, state: dict[str, Any]) -> None:
        for value in state.values():
            if isinstance(value, np.ndarray):
                value.setflags(write=False)
        self.__dict__.update(state)
        give_handle(self)

    # -- tiles, for the layout builder --------------------------------------------------------------------------

    def _intervals(self, sizes: Sizes) -> Intervals | None:
        """lo, hi when row r keeps exactly the keys [lo[r], hi[r]), both non-decreasing; None for any other form."""
        return None

    def intervals(self, sizes: Sizes) -> Intervals | None:
        """`_intervals`, remembered for the last few patterns."""
        return _remembered_intervals(self, sizes)

    def keeps_intervals(self, sizes: Sizes) -> bool:
        """Whether every row of every head keeps one interval of keys: its tiles are dense."""
        parts = [self.at(0, 0)] if self.lead == (1, 1) else self.distinct()[0]
        return all(part.lower(sizes).intervals(sizes) is not None for part in parts)

    def tile_bound(self, grid: Grid) -> int:
        """An upper bound of how many tiles `tile_candidates` lists over all rows."""
        interval = self.intervals(grid.sizes)
        if interval is None:
            return grid.nq * grid.nk
        first, last = _interval_tiles(interval, grid, 0, grid.nq)
        return int(np.maximum(last - first, 0).sum())

    def tile_candidates(self, grid: Grid, start: int, stop: int) -> Tiles:
        """Tiles of tile rows [start, stop) that may hold a kept pair: all that do, perhaps some more or twice."""
        interval = self.intervals(grid.sizes)
        if interval is None:
            return all_tiles(grid, start, stop)
        which, tj = ranges(*_interval_tiles(interval, grid, start, stop))
        return which + start, tj

    def tile_classes(self, grid: Grid, ti: np.ndarray, tj: np.ndarray) -> np.ndarray:
        """EMPTY, MIXED or FULL for each tile, of its existing pairs; MIXED is always a right answer."""
        interval = self.intervals(grid.sizes)
        if interval is None:
            return np.full(len(ti), MIXED, dtype=np.int8)
        lo, hi = interval
        r0, r1 = grid.row_bounds(ti)
        c0, c1 = grid.key_bounds(tj)
        full = (lo[r1 - 1] <= c0) & (hi[r0] >= c1)
        empty = (lo[r0] >= c1) | (hi[r1 - 1] <= c0)
        return np.where(full, FULL, np.where(empty, EMPTY, MIXED)).astype(np.int8)

    def tile_ids(self, grid: Grid, ti: np.ndarray, tj: np.ndarray) -> np.ndarray:
        """Equal ids mean equal content, for tiles that cross the same ragged edges. All different by default."""
        return np.arange(len(ti), dtype=np.int64)

    def tile_masks(self, grid: Grid, ti: np.ndarray, tj: np.ndarray) -> np.ndarray:
        """Packed masks (T, block_q, block_kv // 32) uint32 of the kept pairs; pairs that do not exist may be set."""
        sizes = grid.sizes
        interval = self.intervals(sizes)
        if interval is not None:
            return interval_masks(*interval, grid, ti, tj)
        packed = np.empty((len(ti), grid.block_q, grid.block_kv // WORD), dtype=np.uint32)
        step = max(1, ELEMENTS_AT_ONCE // (grid.block_q * grid.block_kv))
        for at in range(0, len(ti), step):
            i, j = grid.pairs(ti[at : at + step], tj[at : at + step])
            kept = self._keep(i, j, sizes)
            packed[at : at + step] = pack_bits(np.broadcast_to(kept, (len(i), grid.block_q, grid.block_kv)))
        return packed

    def shared_tile_masks(self, grid: Grid, ti: np.ndarray, tj: np.ndarray) -> np.ndarray:
        """`tile_masks`, evaluated once for each distinct id."""
        ids = combine_ids(self.tile_ids(grid, ti, tj), grid.ragged(ti, tj))
        one, which = one_of_each(ids)
        return self.tile_masks(grid, ti[one], tj[one])[which]

    def listed_pairs(self, sizes: Sizes, start: int, stop: int) -> Pairs | None:
        """The kept pairs of query rows [start, stop), each once in row-major order; None to look into tiles."""
        return None

    def pairs_kept(self, sizes: Sizes) -> int | None:
        """The number of kept pairs by a formula; None to count by tiles."""
        interval = self.intervals(sizes)
        if interval is None:
            return None
        return int(np.maximum(interval[1] - interval[0], 0).sum())


def _interval_tiles(interval: Intervals, grid: Grid, start: int, stop: int) -> tuple[np.ndarray, np.ndarray]:
    """First and one past the last tile column that the rows of each tile row of [start, stop) may reach."""
    lo, hi = interval
    r0, r1 = grid.row_bounds(np.arange(start, stop))
    return lo[r0] // grid.block_kv, -(-hi[r1 - 1] // grid.block_kv)


class Offsets(Pattern):
    """A pattern that depends on i - j alone."""

    def _offset_range(self, sizes: Sizes) -> tuple[int, int]:
        """The least and the greatest i - j that can be kept, within what the sizes allow."""
        return sizes.q_offset - sizes.K + 1, sizes.q_offset + sizes.Q - 1

    @abstractmethod
    def _keep_offset(self, offset: np.ndarray) -> np.ndarray:
        """Kept or not by offset i - j."""

    def _keep(self, i: np.ndarray, j: np.ndarray, sizes: Sizes) -> np.ndarray:
        return self._keep_offset(i - j)

    def _table(self, sizes: Sizes) -> tuple[int, np.ndarray]:
        """(d, c) with c[n] = how many of the offsets d, d + 1, ..., d + n - 1 are kept."""
        return _remembered_table(self, sizes)

    def _count(self, sizes: Sizes, first: np.ndarray, last: np.ndarray) -> np.ndarray:
        """The number of offsets in [first, last] that are kept."""
        least, counts = self._table(sizes)
        top = len(counts) - 1
        return counts[np.clip(last - least + 1, 0, top)] - counts[np.clip(first - least, 0, top)]

    def _tile_shifts(self, grid: Grid) -> np.ndarray:
        """The values of `grid.shift` at which a tile may hold a kept pair."""
        sizes = grid.sizes
        step = int(np.gcd(grid.block_q, grid.block_kv))
        least = grid.q_offset - (grid.nk - 1) * grid.block_kv
        shifts = np.arange(least, grid.q_offset + (grid.nq - 1) * grid.block_q + 1, step)
        kept = self._count(sizes, shifts - grid.block_kv + 1, shifts + grid.block_q - 1)
        return shifts[kept > 0]

    def tile_bound(self, grid: Grid) -> int:
        step = int(np.gcd(grid.block_q, grid.block_kv))
        return grid.nq * min(grid.nk, len(self._tile_shifts(grid)) * step // grid.block_kv + 1)

    def tile_candidates(self, grid: Grid, start: int, stop: int) -> Tiles:
        ti = np.arange(start, stop)[:, None]
        distance = grid.q_offset + ti * grid.block_q - self._tile_shifts(grid)[::-1]
        tj, rest = np.divmod(distance, grid.block_kv)
        listed = (rest == 0) & (tj >= 0) & (tj < grid.nk)
        return np.nonzero(listed)[0] + start, tj[listed]

    def tile_classes(self, grid: Grid, ti: np.ndarray, tj: np.ndarray) -> np.ndarray:
        sizes = grid.sizes
        r0, r1 = grid.row_bounds(ti)
        c0, c1 = grid.key_bounds(tj)
        first, last = grid.q_offset + r0 - c1 + 1, grid.q_offset + r1 - 1 - c0
        kept = self._count(sizes, first, last)
        return np.where(kept == 0, EMPTY, np.where(kept == last - first + 1, FULL, MIXED)).astype(np.int8)

    def tile_ids(self, grid: Grid, ti: np.ndarray, tj: np.ndarray) -> np.ndarray:
        return grid.shift(ti, tj)

    def _kept_offsets(self, sizes: Sizes) -> np.ndarray:
        """The offsets i - j that are kept, ascending."""
        least, counts = self._table(sizes)
        return least + np.nonzero(np.diff(counts))[0]

    def listed_pairs(self, sizes: Sizes, start: int, stop: int) -> Pairs | None:
        offsets = self._kept_offsets(sizes)
        if len(offsets) > OFFSETS_LISTED:
            return None
        rows = np.arange(start, stop)
        keys = (rows + sizes.q_offset)[:, None] - offsets[::-1]
        exists = (keys >= 0) & (keys < sizes.K)
        return np.repeat(rows, exists.sum(axis=1)), keys[exists]

    def pairs_kept(self, sizes: Sizes) -> int | None:
        offsets = self._kept_offsets(sizes) - sizes.q_offset
        rows = np.minimum(sizes.Q - 1, sizes.K - 1 + offsets) - np.maximum(0, offsets) + 1
        return int(np.maximum(rows, 0).sum())


@lru_cache(maxsize=8)
def _remembered_intervals(pattern: Pattern, sizes: Sizes) -> Intervals | None:
    return pattern._intervals(sizes)


@lru_cache(maxsize=8)
def _remembered_table(pattern: Offsets, sizes: Sizes) -> tuple[int, np.ndarray]:
    least, greatest = sizes.q_offset - sizes.K + 1, sizes.q_offset + sizes.Q - 1
    first, last = pattern._offset_range(sizes)
    first, last = max(first, least), min(last, greatest)
    kept = np.zeros(greatest - least + 2, dtype=np.int64)
    if first <= last:
        kept[first - least + 1 : last - least + 2] = pattern._keep_offset(np.arange(first, last + 1))
    return least, np.cumsum(kept)
