"""The operations of an array framework that layouts are made by on a device: `Arrays`.

Beside them builders use what arrays of every framework have: arithmetic, comparisons, `&`, `|`, `shape`, `reshape`, and
slices. Nothing writes into an array, no shape follows from values, and nothing is read back.
"""

from __future__ import annotations

from typing import NamedTuple, Protocol

from gossamer.layouts.base import Array


class Sorted(NamedTuple):
    """Values in order, and the place that each had."""

    values: Array
    places: Array  # integers of any type


class Arrays(Protocol):
    """A framework's operations on integer arrays. "Along rows" is along the last axis, of every row of the others.

    Results are int32 unless they are said to be of the type of an argument. They have memory of their own, row-major,
    unless it is said otherwise.
    """

    def arange(self, n: int, like: Array) -> Array:
        """0 to n - 1, on the device of `like`."""

    def full(self, shape: tuple[int, ...], value: int, like: Array) -> Array:
        """One value everywhere, on the device of `like`."""

    def int32(self, x: Array) -> Array:
        """The same numbers, which fit."""

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
        """Of each row (..., m) the sums of the int32 values that are given for each of `size` places: (..., size).

        The sum of words that share no bit is their union.
        """

    def extend(self, x: Array, n: int) -> Array:
        """Rows of at most n numbers, up to n of them by their last one, of the type of x, which may be the result."""

    def divides(self, block: int, n: int) -> bool:
        """Whether n is a multiple; False too where n is a size that a compiled function leaves open."""

    def concatenate(self, parts: list[Array]) -> Array:
        """Behind one another along rows, of their common type."""
