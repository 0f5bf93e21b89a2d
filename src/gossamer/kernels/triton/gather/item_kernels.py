"""The kernels that cut lists, of whose lengths a device alone knows, into items, the longest first.

A list is cut in as few parts as `limit` allows. Items are ordered by classes of lengths, in each as rows are, so that
their columns are likely to be near each other: programs count the items of each class, then each item has its place.
"""

from __future__ import annotations

from collections import namedtuple

import triton
import triton.language as tl

from gossamer.kernels.search import at_most

# The numbers of `items_kernel`, of which it is compiled for none, and what it is compiled for.
ItemNumbers = namedtuple("ItemNumbers", "rows tiles width more slots steps n_items programs")
ItemForm = namedtuple("ItemForm", "CUT ITEM MERGE CLASSES BLOCK")


@triton.jit(do_not_specialize=["rows", "width", "limit"])
def parts_kernel(counts, parts, rows, width, limit, BLOCK: tl.constexpr):
    """Of each list (3, rows): its parts, these where there are several, and whether there are."""
    r = tl.program_id(0) * BLOCK + tl.arange(0, BLOCK)
    there = r < rows
    length = (tl.load(counts + r, mask=there, other=0) + (width - 1)) // width
    number = tl.maximum((length + (limit - 1)) // limit, 1)
    cut = number > 1
    tl.store(parts + r, number, mask=there)
    tl.store(parts + rows + r, tl.where(cut, number, 0), mask=there)
    tl.store(parts + 2 * rows + r, cut.to(tl.int32), mask=there)


@triton.jit(do_not_specialize=["numbers"])
def items_kernel(
    starts, counts, sums, items, classes, of_classes, merges, numbers: ItemNumbers, FORM: tl.constexpr
):  # fmt: skip
    """Some items in the order of rows, the class of each, and how many there are of each class; and some merges.

    Args:
        sums: (3 * rows,): of `parts`, up to each place.
        of_classes: (programs, CLASSES).
        numbers: the first `programs` make items, those behind them merges; of the `slots`, of partial results, the last
            is of no row.
    """
    CUT: tl.constexpr = FORM.CUT
    CLASSES: tl.constexpr = FORM.CLASSES
    BLOCK: tl.constexpr = FORM.BLOCK
    rows, tiles, width, steps, programs = numbers.rows, numbers.tiles, numbers.width, numbers.steps, numbers.programs
    own = tl.program_id(0)
    if own < programs:
        at = own * BLOCK + tl.arange(0, BLOCK)
        there = at < numbers.n_items
        of, piece, number = at, at * 0, at * 0 + 1
        if CUT:
            of = at_most(sums, rows, steps, at, there)
        some = there & (of < rows)
        of = tl.minimum(of, rows - 1)
        slot = at * 0 - 1
        if CUT:
            end = tl.load(sums + of)
            number = end - tl.load(sums + of - 1, mask=of > 0, other=0)
            piece = at - (end - number)
            behind = tl.load(sums + rows + of) - tl.load(sums + rows - 1)
            slot = tl.where(some, tl.where(number > 1, behind - number + piece, -1), numbers.slots - 1)
        length = ((tl.load(counts + of) + (width - 1)) // width).to(tl.int64)
        begin = tl.where(some, length * piece // number, 0).to(tl.int32)
        end = tl.where(some, length * (piece + 1) // number, 0).to(tl.int32)
        # A class for every 4 steps up to 64, above for every power of two: the exponent of a float.
        quarter = (end - begin + 3) // 4
        power = ((quarter - 1).to(tl.float32).to(tl.int32, bitcast=True) >> 23) - 126
        near = CLASSES - 1 - tl.where(quarter <= 16, quarter, 16 + power)
        first = tl.load(starts + of) // width
        to = items + at.to(tl.int64) * FORM.ITEM
        tl.store(to, tl.where(some, of // tiles, 0), mask=there)
        tl.store(to + 1, tl.where(some, of % tiles, 0), mask=there)
        tl.store(to + 2, first + begin, mask=there)
        tl.store(to + 3, first + end, mask=there)
        tl.store(to + 4, slot, mask=there)
        tl.store(to + 5, (begin > 0).to(tl.int32), mask=there)
        tl.store(classes + at, near, mask=there)
        c = tl.arange(0, CLASSES)
        same = there[:, None] & (near[:, None] == c[None, :])
        tl.store(of_classes + own * CLASSES + c, tl.sum(same.to(tl.int32), 0))
    elif CUT:
        at = (own - programs) * BLOCK + tl.arange(0, BLOCK)
        there = at < numbers.more
        of = at_most(sums + 2 * rows, rows, steps, at + tl.load(sums + 2 * rows - 1), there)
        some = of < rows
        of = tl.minimum(of, rows - 1)
        behind = tl.load(sums + rows + of) - tl.load(sums + rows - 1)
        number = tl.load(sums + of) - tl.load(sums + of - 1, mask=of > 0, other=0)
        to = merges + at * FORM.MERGE
        tl.store(to, of // tiles, mask=there)
        tl.store(to + 1, tl.where(some, of % tiles, tiles), mask=there)
        tl.store(to + 2, behind - number, mask=there)
        tl.store(to + 3, tl.where(some, number, 0), mask=there)


@triton.jit(do_not_specialize=["n_items", "programs"])
def place_kernel(
    items, classes, of_classes, ordered, n_items, programs, ITEM: tl.constexpr, CLASSES: tl.constexpr,
    BLOCK: tl.constexpr, PROGRAMS: tl.constexpr,
):  # fmt: skip
    """Some items in their places: behind all of lower classes, and those of their own in the order of rows."""
    own, c = tl.program_id(0), tl.arange(0, CLASSES)
    total, before = c * 0, c * 0
    for p0 in range(0, programs, PROGRAMS):
        p = p0 + tl.arange(0, PROGRAMS)[:, None]
        number = tl.load(of_classes + p * CLASSES + c[None, :], mask=p < programs, other=0)
        total += tl.sum(number, 0)
        before += tl.sum(tl.where(p < own, number, 0), 0)
    at = own * BLOCK + tl.arange(0, BLOCK)
    there = at < n_items
    same = (there[:, None] & (tl.load(classes + at, mask=there, other=0)[:, None] == c[None, :])).to(tl.int32)
    place = tl.cumsum(same, 0) - 1 + (tl.cumsum(total, 0) - total + before)[None, :]
    place = tl.sum(same * place, 1).to(tl.int64)
    for field in range(ITEM):
        x = tl.load(items + at.to(tl.int64) * ITEM + field, mask=there, other=0)
        tl.store(ordered + place * ITEM + field, x, mask=there)


@triton.jit(do_not_specialize=["n_items", "groups", "each"])
def longest_kernel(items, longest, n_items, groups, each, ITEM: tl.constexpr, BLOCK: tl.constexpr):
    """Of each group of so many items the steps of the longest; negative where one is a part of a cut list."""
    group = tl.program_id(0) * BLOCK + tl.arange(0, BLOCK)
    most, slot = group * 0, group * 0 - 1
    for j in range(each):
        at = group * each + j
        to, there = items + at.to(tl.int64) * ITEM, at < n_items
        length = tl.load(to + 3, mask=there, other=0) - tl.load(to + 2, mask=there, other=0)
        most = tl.maximum(most, length)
        slot = tl.maximum(slot, tl.load(to + 4, mask=there, other=-1))
    tl.store(longest + group, tl.where(slot < 0, most, -most), mask=group < groups)
