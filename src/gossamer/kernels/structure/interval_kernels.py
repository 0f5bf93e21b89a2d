"""The kernels that list the tiles of one interval of columns for each row, and that turn intervals round."""

from __future__ import annotations

from collections import namedtuple

import triton
import triton.language as tl

from gossamer.kernels.search import at_most

# The numbers of `count_tiles_kernel`, of which it is compiled for none.
CountNumbers = namedtuple("CountNumbers", "rows columns T C leads steps every")
# Those of `place_tiles_kernel`.
PlaceNumbers = namedtuple("PlaceNumbers", "rows columns T C leads room every tiles")
# What both are compiled for.
IntervalForm = namedtuple("IntervalForm", "BLOCK_ROWS BLOCK_COLUMNS ROWS COLUMNS SUMS")


@triton.jit
def _greater(x, y):
    return tl.maximum(x, y)


@triton.jit
def _turn(lo, hi, column_lo, column_hi, lead, c, some, rows, columns, steps):
    """The rows that keep each column."""
    row_offset, column_offset = lead.to(tl.int64) * rows, lead.to(tl.int64) * columns
    tl.store(column_lo + column_offset + c, at_most(hi + row_offset, rows, steps, c, some), mask=some)
    tl.store(column_hi + column_offset + c, at_most(lo + row_offset, rows, steps, c, some), mask=some)


@triton.jit(do_not_specialize=["rows", "columns", "C", "steps"])
def turn_kernel(lo, hi, column_lo, column_hi, rows, columns, C, steps, COLUMNS: tl.constexpr):
    """`layouts.device.walks.transposed`."""
    lead, c = tl.program_id(0) // C, tl.program_id(0) % C * COLUMNS + tl.arange(0, COLUMNS)
    _turn(lo, hi, column_lo, column_hi, lead, c, c < columns, rows, columns, steps)


@triton.jit
def _ceil(x, BLOCK: tl.constexpr):
    return (x + BLOCK - 1) // BLOCK


@triton.jit
def _last(lo, hi, there, BLOCK: tl.constexpr):
    """Behind the last tile that rows keep something in; those of an empty row nowhere."""
    return tl.where(there & (hi > lo), _ceil(hi, BLOCK), 0)


@triton.jit
def _runs(lo, hi, n, BLOCK: tl.constexpr, ROWS: tl.constexpr):
    """The tiles that a tile of n rows visits: see `layouts.device.intervals._lists`.

    Returns:
        Its first full tile, and how many there are; the first tile on the left of those, and how many; of each row
        behind the last tile that it visits, and how many of those before no row above it does.
    """
    r = tl.arange(0, ROWS)
    there, after = r < n, (r < n) & (r > 0)
    row_lo, row_hi = tl.load(lo + r, mask=there, other=0), tl.load(hi + r, mask=there, other=0)
    first = _ceil(tl.load(lo + n - 1), BLOCK)
    number = tl.maximum(tl.load(hi) // BLOCK - first, 0)
    left = tl.load(lo) // BLOCK
    ends = tl.where(number > 0, first, left)
    end = _last(row_lo, row_hi, there, BLOCK)
    before = _last(tl.load(lo + r - 1, mask=after, other=0), tl.load(hi + r - 1, mask=after, other=0), after, BLOCK)
    visited = tl.associative_scan(tl.where(r == 0, ends + number, before), 0, _greater)
    new = tl.where(there, tl.maximum(end - tl.maximum(row_lo // BLOCK, visited), 0), 0)
    return first, number, left, ends - left, end, new


@triton.jit
def _count(
    lo, hi, told, lead, t, tiles, of_all, rows, every, BLOCK_ROWS: tl.constexpr, BLOCK: tl.constexpr,
    ROWS: tl.constexpr,
):  # fmt: skip
    at = lead.to(tl.int64) * rows + t * BLOCK_ROWS
    n = tl.minimum(BLOCK_ROWS, rows - t * BLOCK_ROWS)
    first, number, _left, on_left, _end, new = _runs(lo + at, hi + at, n, BLOCK, ROWS)
    to = told + lead.to(tl.int64) * tiles + t
    tl.store(to, every + first)
    tl.store(to + of_all, number)
    tl.store(to + 3 * of_all, on_left + tl.sum(new, 0))
    tl.store(to + 4 * of_all, number * 0)


@triton.jit(do_not_specialize=["numbers"])
def count_tiles_kernel(lo, hi, column_lo, column_hi, of_rows, of_columns, numbers: CountNumbers, FORM: tl.constexpr):
    """Count the full tiles and the interval tiles of one tile of rows or of columns, and find its first full tile.

    Args:
        of_rows, of_columns: (5, Bl * Hl, T or C): first, number, start, count, 0.
        every: the place of tile 0 among the entries.
    """
    BLOCK_ROWS: tl.constexpr = FORM.BLOCK_ROWS
    BLOCK_COLUMNS: tl.constexpr = FORM.BLOCK_COLUMNS
    ROWS: tl.constexpr = FORM.ROWS
    COLUMNS: tl.constexpr = FORM.COLUMNS
    rows, columns, T, C, leads, steps, every = numbers
    at = tl.program_id(0)
    if at < leads * T:
        _count(
            lo,
            hi,
            of_rows,
            at // T,
            at % T,
            T,
            tl.cast(leads, tl.int64) * T,
            rows,
            every,
            BLOCK_ROWS,
            BLOCK_COLUMNS,
            ROWS,
        )
    else:
        at -= leads * T
        c = at % C * BLOCK_COLUMNS + tl.arange(0, COLUMNS)
        some = (tl.arange(0, COLUMNS) < BLOCK_COLUMNS) & (c < columns)
        _turn(lo, hi, column_lo, column_hi, at // C, c, some, rows, columns, steps)
        tl.debug_barrier()
        _count(
            column_lo, column_hi, of_columns, at // C, at % C, C, tl.cast(leads, tl.int64) * C, columns, every,
            BLOCK_COLUMNS, BLOCK_ROWS, COLUMNS,
        )  # fmt: skip


@triton.jit
def _place(
    lo, hi, told, indices, base, tile, rows, BLOCK_ROWS: tl.constexpr, BLOCK: tl.constexpr, ROWS: tl.constexpr,
    SUMS: tl.constexpr,
):  # fmt: skip
    lead, t, tiles, of_all = tile
    line = told + lead.to(tl.int64) * tiles
    before = tl.zeros((SUMS,), dtype=tl.int32)
    for s0 in range(0, t, SUMS):
        s = s0 + tl.arange(0, SUMS)
        before += tl.load(line + 3 * of_all + s, mask=s < t, other=0)
    start = base + tl.sum(before, 0)
    tl.store(line + 2 * of_all + t, start.to(tl.int32))
    at = lead.to(tl.int64) * rows + t * BLOCK_ROWS
    n = tl.minimum(BLOCK_ROWS, rows - t * BLOCK_ROWS)
    _first, _number, left, on_left, end, new = _runs(lo + at, hi + at, n, BLOCK, ROWS)
    for k0 in range(0, on_left, ROWS):
        k = k0 + tl.arange(0, ROWS)
        tl.store(indices + start + k, left + k, mask=k < on_left)
    to = indices + start + on_left + tl.cumsum(new, 0) - new
    for k in range(tl.max(new, 0)):
        tl.store(to + k, end - new + k, mask=k < new)


@triton.jit(do_not_specialize=["numbers"])
def place_tiles_kernel(
    lo, hi, column_lo, column_hi, of_rows, of_columns, indices, numbers: PlaceNumbers, FORM: tl.constexpr
):
    """The tiles of the interval of one tile, ascending; the lists of a head follow one another.

    Args:
        every, tiles: from which place on, and how many, are 0, 1 and so on, of which lists of full tiles are parts.
    """
    BLOCK_ROWS: tl.constexpr = FORM.BLOCK_ROWS
    BLOCK_COLUMNS: tl.constexpr = FORM.BLOCK_COLUMNS
    SUMS: tl.constexpr = FORM.SUMS
    rows, columns, T, C, leads, room, every, tiles = numbers
    at = tl.program_id(0)
    for k0 in range(at * SUMS, tiles, tl.num_programs(0) * SUMS):
        k = k0 + tl.arange(0, SUMS)
        tl.store(indices + every + k, k, mask=k < tiles)
    if at < leads * T:
        base = (at // T).to(tl.int64) * room
        _place(
            lo, hi, of_rows, indices, base, (at // T, at % T, T, tl.cast(leads, tl.int64) * T), rows, BLOCK_ROWS,
            BLOCK_COLUMNS, FORM.ROWS, SUMS,
        )  # fmt: skip
    else:
        at -= leads * T
        base = (leads + at // C).to(tl.int64) * room
        _place(
            column_lo, column_hi, of_columns, indices, base, (at // C, at % C, C, tl.cast(leads, tl.int64) * C),
            columns, BLOCK_COLUMNS, BLOCK_ROWS, FORM.COLUMNS, SUMS,
        )  # fmt: skip
