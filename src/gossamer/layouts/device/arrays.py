"""The operations of an array framework that layouts are made by on a device: `Arrays`.

Beside them builders use what arrays of every framework have: arithmetic, comparisons, `&`, `|`, `shape`, `reshape`, and
slices. Nothing writes into an array, no shape follows from values, and nothing is read back.
"""

from __future__ import annotations

from typing import NamedTuple, Protocol

from gossamer.layouts.base import Array
from gossamer.patterns.reach import Bounds


class Sorted(NamedTuple):
    """Values in order, and the place that each had."""

    values: Array
    places: Array  # integers of any type


class BlockLists(NamedTuple):
    """The tiles of lists of blocks in both directions, of each kind: the full ones, and those of an interval if any."""

    row_starts: Array  # (kinds, Bl, Hl, T): lists have room for n entries each, the full tiles before the others
    row_counts: Array  # (kinds + 1, Bl, Hl, T): of each kind, and zeros
    row_indices: Array  # (Bl * Hl * T * n,)
    column_starts: Array  # (kinds, Bl, Hl, C)
    column_counts: Array  # (kinds + 1, Bl, Hl, C)
    column_indices: Array  # of as many; entries that no list refers to are undefined


class IntervalLists(NamedTuple):
    """The tiles of one interval of keys for each query, in both directions."""

    of_rows: Array  # (5, Bl, Hl, T): where full tiles start, their number, the same of interval tiles, and zeros
    of_columns: Array  # (5, Bl, Hl, C)
    column_lo: Array  # (Bl, Hl, K): the queries of each key
    column_hi: Array
    indices: Array  # interval tiles, with room for 2 (T + C) of each head and direction; 0 to max(T, C) - 1 behind them


class KeyUnions(NamedTuple):
    """The keys that any query of a group lists, and who lists them."""

    starts: Array  # (Bl, Hl, T): every list has the same room
    counts: Array
    listed: Array  # (Bl * Hl * T * room,): ascending, -1 behind
    bits: Array  # (Bl * Hl * T * room / 32, block): bit c of word [w, r] says that query r keeps key listed[32 w + c]


class KeyRows(NamedTuple):
    """The keys that each query lists, and of each key the queries that list it."""

    starts: Array  # (Bl, Hl, Q): every list has the same room
    counts: Array
    listed: Array  # (Bl * Hl * Q * n,): ascending, -1 behind
    column_starts: Array  # (Bl, Hl, K): the lists of all keys follow one another
    column_counts: Array
    queries: Array  # as many as `listed`, ascending in each list; what no list refers to is undefined


class Fused(Protocol):
    """Builders as operations of their own, where a framework has kernels for them: the same arrays in fewer launches.

    What they give is defined by the functions that use them, in terms of `Arrays`.
    """

    def block_lists(
        self, indices: Array, counts: Array | None, lo: Array | None, hi: Array | None, Q: int, K: int, block: int,
        row_kinds: int, column_kinds: int, transpose: bool,
    ) -> BlockLists:  # fmt: skip
        """The lists of `block_list_layout`, whose arguments these are; arrays may have any strides.

        Args:
            row_kinds, column_kinds: 2 with tiles of an interval, else 1 and all tiles are full.
            transpose: else all that is said of columns is empty.
        """

    def key_unions(
        self, indices: Array, counts: Array | None, lo: Array | None, hi: Array | None, Q: int, K: int, block: int,
        room: int,
    ) -> KeyUnions:  # fmt: skip
        """The groups of `block` queries of `key_list_layout`, whose arguments these are; arrays may have any strides.

        Args:
            room: of a list, a multiple of 32 that holds every one.
        """

    def key_rows(
        self, indices: Array, counts: Array | None, lo: Array | None, hi: Array | None, Q: int, K: int, transpose: bool
    ) -> KeyRows:
        """The lists of single queries of `key_list_layout`, whose arguments these are; arrays may have any strides.

        Args:
            transpose: else all that is said of keys is empty.
        """

    def interval_lists(
        self, lo: Array, hi: Array, K: int, block_q: int, block_kv: int, transpose: bool
    ) -> IntervalLists:
        """The lists of `interval_layout`, whose arguments these are."""

    def turned(self, lo: Array, hi: Array, columns: int) -> Bounds:
        """The rows that keep each column, of rows that keep [lo, hi): see `walks.transposed`."""


class Arrays(Protocol):
    """A framework's operations on integer arrays. "Along rows" is along the last axis, of every row of the others.

    Results are int32 unless they are said to be of the type of an argument. They have memory of their own, row-major,
    unless it is said otherwise.
    """

    def fused(self, like: Array) -> Fused | None:
        """Kernels for arrays on the device of `like`; None: there are none, and builders take the steps below."""

    def arange(self, n: int, like: Array) -> Array:
        """0 to n - 1, on the device of `like`."""

    def full(self, shape: tuple[int, ...], value: int, like: Array) -> Array:
        """One value everywhere, on the device of `like`."""

    def int32(self, x: Array) -> Array:
        """x as int32, which its numbers fit."""

    def broadcast_to(self, x: Array, shape: tuple[int, ...]) -> Array:
        """Repeated along axes of 1, of the type of x."""

    def where(self, condition: Array, x: Array, y: Array) -> Array:
        """x where the condition holds, else y; of their common type."""

    def fill(self, x: Array, condition: Array, value: int) -> Array:
        """x, but the value where the condition holds; of the type of x."""

    def minimum(self, x: Array, y: Array) -> Array:
        """The lesser of each two numbers of one type, and of that type."""

    def maximum(self, x: Array, y: Array) -> Array:
        """The greater of each two numbers of one type, and of that type."""

    def at_least(self, x: Array, low: int) -> Array:
        """The greater of each number and `low`, of the type of x."""

    def total(self, x: Array) -> Array:
        """The sum along rows, of integers or truth values: (...,)."""

    def cumsum(self, x: Array) -> Array:
        """The sum along rows up to each place, of integers or truth values."""

    def cummax(self, x: Array) -> Array:
        """The greatest number along rows up to each place, of the type of x."""

    def sort(self, x: Array) -> Array:
        """Ascending along rows, of the type of x."""

    def stable_sort(self, x: Array) -> Sorted:
        """A vector (n,) ascending, equal numbers in the order in which they were."""

    def searchsorted(self, ordered: Array, x: Array, right: bool = False) -> Array:
        """How many numbers of an ascending row are less than each x of that row, of one type; `right`: or equal."""

    def take(self, x: Array, places: Array) -> Array:
        """The elements at places (..., m) of rows (..., n), of the type of x; the other axes are equal."""

    def one_bit(self, places: Array) -> Array:
        """The word of which only the bit at a place in [0, 32) is set."""

    def bits_below(self, places: Array) -> Array:
        """The words of which the bits at places below each number are set: none for one under 1, all from 32 on."""

    def sums_at(self, places: Array, values: Array, size: int) -> Array:
        """The sums of the int32 values that each row (..., m) gives for each of `size` places: (..., size).

        The sum of words that share no bit is their union.
        """

    def extend(self, x: Array, n: int) -> Array:
        """Rows of at most n numbers, up to n of them by their last one, of the type of x, which may be the result."""

    def divides(self, block: int, n: int) -> bool:
        """Whether n is a multiple; False too where n is a size that a compiled function leaves open."""

    def concatenate(self, parts: list[Array]) -> Array:
        """Behind one another along rows, of their common type."""
