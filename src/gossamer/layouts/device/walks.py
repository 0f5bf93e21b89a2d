"""The parts that device builders share: walks without bits, tiles of rows, the queries of a key, checks of sizes."""

from __future__ import annotations

from typing import NamedTuple

from gossamer.layouts.base import Array
from gossamer.layouts.device.arrays import Arrays
from gossamer.layouts.walk import TileList, Walk
from gossamer.patterns.grid import WORD
from gossamer.patterns.reach import Bounds

FIRST = 0  # row of a tile
MOST_POSITIONS = 2**31 - 2**16  # the end of the tile that holds the last one is an int32 too


def without_bits(
    rows: int, columns: int, block_rows: int, block_columns: int, full: TileList, interval: TileList | None,
    bounds: Bounds | None, xp: Arrays, nothing: Array | None = None,
) -> Walk:  # fmt: skip
    """A walk of full and interval tiles; without bounds where no interval tile can be, which has no padding either.

    Args:
        nothing: zeros of the shape of counts, where there are any already.
    """
    nothing = xp.full(full.counts.shape, 0, full.counts) if nothing is None else nothing
    none = TileList(nothing, nothing, xp.full((0,), 0, nothing))
    if bounds is None or interval is None:  # kernels read row bounds where an interval list has entries
        interval, bounds = none, Bounds(*[xp.full((1, 1, 0), 0, nothing)] * 2)
    return Walk(
        rows, columns, block_rows, block_columns, full=full, interval=interval, bits=none, lo=bounds.lo, hi=bounds.hi,
        pool_index=none.indices, pool=xp.full((0, block_rows, block_columns // WORD), 0, nothing),
    )  # fmt: skip


def transposed(bounds: Bounds, columns: int, xp: Arrays) -> Bounds:
    """The rows that keep each column: an interval too, since neither bound decreases along rows."""
    kernels = xp.fused(bounds.lo)
    if kernels is not None:
        return kernels.turned(*bounds, columns)
    *lead, _ = bounds.lo.shape
    column = xp.broadcast_to(xp.arange(columns, bounds.lo), (*lead, columns))
    return Bounds(xp.searchsorted(bounds.hi, column, right=True), xp.searchsorted(bounds.lo, column, right=True))


def fill_tiles(bounds: Bounds, block: int, xp: Arrays) -> Bounds:
    """Rows (..., n) up to whole tiles (..., T * block): by the last one, which adds nothing to what a tile keeps."""
    *_, n = bounds.lo.shape
    return Bounds(*(xp.extend(x, -(-n // block) * block) for x in bounds))


class AllKept(NamedTuple):
    """The tiles of columns that all rows of a tile keep whole, up to the last one's edge."""

    first: Array  # (..., T) int32
    behind: Array  # (..., T) int32; not over `first` where there are none


def all_kept(tiles: Bounds, block_columns: int) -> AllKept:
    """From bounds in tiles (..., T, block_rows): the last row begins and the first one ends within them."""
    *_, block_rows = tiles.lo.shape
    last = tiles.lo[..., block_rows - 1]
    return AllKept((last + (block_columns - 1)) // block_columns, tiles.hi[..., FIRST] // block_columns)


def check_lists(indices: Array, counts: Array | None, rows: int, name: str, formula: str = "") -> tuple[int, int, int]:
    """(Bl, Hl, n) of lists (Bl, Hl, rows, n); raise ValueError for other shapes, which names the number of rows."""
    shape = tuple(indices.shape)
    Bl, Hl, listed, n = shape if len(shape) == 4 else (0, 0, 0, 0)
    if listed != rows or not Bl or not Hl:
        raise ValueError(f"indices must be of shape (Bl, Hl, {name}, n), {name} = {formula}{rows}; got {shape}")
    if counts is not None and tuple(counts.shape) != (Bl, Hl, rows):
        raise ValueError(f"counts must be of shape (Bl, Hl, {name}) = {(Bl, Hl, rows)}; got {tuple(counts.shape)}")
    return Bl, Hl, n


def not_listed(indices: Array, counts: Array | None, entries: int, xp: Arrays) -> Array:
    """The entries of lists (..., n) that stand for nothing: those behind their counts, or outside [0, entries)."""
    *_, n = indices.shape
    outside = (indices < 0) | (indices >= entries)
    return outside if counts is None else outside | (xp.arange(n, counts) >= counts[..., None])


def ascending(x: Array, most: int, xp: Arrays) -> Array:
    """Lists (..., n) of numbers from 0 to `most`, each in order and without repetition; `most` fills the rest."""
    *lead, n = x.shape
    x = xp.sort(x)
    if n == 1:
        return x
    before = xp.concatenate([xp.full((*lead, 1), -1, x), x[..., : n - 1]])
    return xp.sort(xp.fill(x, x == before, most))


def check_bounds(lo: Array | None, hi: Array | None, Bl: int, Hl: int, Q: int) -> None:
    """Raise ValueError unless an interval of keys for each query is given for every list, or none at all."""
    if (lo is None) != (hi is None):
        raise ValueError("lo and hi must both be given, or neither")
    for name, x in (("lo", lo), ("hi", hi)):
        if x is None:
            continue
        shape = tuple(x.shape)
        bl, hl, n = shape if len(shape) == 3 else (0, 0, 0)
        if bl not in (1, Bl) or hl not in (1, Hl) or n != Q:  # in no set, whose elements have to be known numbers
            raise ValueError(f"{name} must be of shape (1 or Bl, 1 or Hl, Q) = {(Bl, Hl, Q)}; got {shape}")
    if lo is not None and hi is not None and tuple(lo.shape) != tuple(hi.shape):
        raise ValueError(f"lo and hi must be of one shape; got {tuple(lo.shape)} and {tuple(hi.shape)}")


def check_sizes(**sizes: int) -> None:
    """Raise ValueError unless every number of positions is at least 1, and all of them are int32."""
    for name, n in sizes.items():
        if not 1 <= n <= MOST_POSITIONS:
            raise ValueError(f"{name} must be from 1 to 2**31 - 2**16, got {n}")


def check_capacity(listed: int) -> None:
    """Raise ValueError where int32 would not address as many entries as there may be."""
    if listed >= 2**31:
        raise ValueError(f"the layout may list {listed} tiles; at most {2**31 - 1} can be addressed")


def every_nth(step: int, first: Array, xp: Arrays) -> Array:
    """Words in which every step-th bit is set, from the bit `first` on, which is less than the step."""
    if step >= WORD:  # one bit of a word, or none
        none = first >= WORD
        return xp.fill(xp.one_bit(xp.fill(first, none, 0)), none, 0)
    bit = xp.arange(WORD, first)
    rest = xp.arange(step, first)[:, None]
    # The bits of a word are apart: their sum is their union.
    words = xp.total(xp.fill(xp.broadcast_to(xp.one_bit(bit), (step, WORD)), bit % step != rest, 0))
    return xp.take(words, first.reshape(-1)).reshape(first.shape)
