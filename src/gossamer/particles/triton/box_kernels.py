"""Kernels that gather what particles have in the order of the curve: positions and boxes, payloads, names of groups."""

from __future__ import annotations

import triton
import triton.language as tl

from gossamer.kernels.extremes import larger, smaller
from gossamer.particles.triton.order_kernels import length, position


@triton.jit
def _store_box(boxes, at, low, high, there, rounding, AXIS: tl.constexpr, D: tl.constexpr):
    """The centre and the half width of boxes along an axis, and zeros behind the last one: `geometry.tree_of`."""
    centre = (low + high) * 0.5  # a division by 2 would be an approximate one
    half = larger(high - centre, centre - low) * rounding
    tl.store(boxes + at * 8 + AXIS, centre, mask=there)
    tl.store(boxes + at * 8 + 4 + AXIS, half, mask=there)
    if AXIS == 0:
        for more in tl.static_range(D, 4):
            tl.store(boxes + at * 8 + more, low * 0, mask=there)
            tl.store(boxes + at * 8 + 4 + more, low * 0, mask=there)


@triton.jit
def _group_box(
    given, sorted, groups, group, N, rounding, D: tl.constexpr, PERIODIC: tl.constexpr, WIDE: tl.constexpr,
    MEMBERS: tl.constexpr, PART: tl.constexpr,
):  # fmt: skip
    """The box of a group, PART particles at a time."""
    first = group * MEMBERS
    end, row = tl.minimum(first + MEMBERS, N), group + tl.arange(0, 1)
    for axis in tl.static_range(D):
        at = tl.load(sorted + tl.minimum(first + tl.arange(0, PART), end - 1))
        low = position(given, at, at >= 0, axis, PERIODIC, WIDE)
        high = low
        for start in range(first + PART, end, PART):
            at = tl.load(sorted + tl.minimum(start + tl.arange(0, PART), end - 1))
            one = position(given, at, at >= 0, axis, PERIODIC, WIDE)
            low, high = smaller(low, one), larger(high, one)
        lowest = tl.reduce(tl.reshape(low, (1, PART)), 1, smaller)
        highest = tl.reduce(tl.reshape(high, (1, PART)), 1, larger)
        _store_box(groups, row, lowest, highest, row >= 0, rounding, axis, D)


@triton.jit(do_not_specialize=["stride_n", "stride_d", "N", "G", "P", "unit", "size_x", "size_y", "size_z", "rounding"])
def boxes_kernel(
    x,  # (N, d)
    sorted,  # (N,) int64: the particle at each place
    order,  # (N,) int32: the same
    points,  # (d, P)
    low, high,  # (d, P / RUN): the boxes of runs
    clusters, blocks, groups,  # (n, 8): three levels of boxes
    stride_n, stride_d, N, G, P, unit, size_x, size_y, size_z, rounding,
    D: tl.constexpr, PERIODIC: tl.constexpr, WIDE: tl.constexpr, RUN: tl.constexpr, CLUSTER: tl.constexpr,
    BLOCK: tl.constexpr, FAN: tl.constexpr, PART: tl.constexpr,
):  # fmt: skip
    """Positions in order, filled up by the last one, and boxes of them.

    The first G programs make the boxes of groups of FAN blocks, for which each reads its positions by itself; the
    others have a block each.
    """
    pid, rounding = tl.program_id(0), length(rounding, WIDE)
    given = (x, stride_n, stride_d, unit, size_x, size_y, size_z)
    if pid < G:
        _group_box(given, sorted, groups, pid, N, rounding, D, PERIODIC, WIDE, FAN * BLOCK, PART)
    else:
        block = pid - G
        place = block * BLOCK + tl.arange(0, BLOCK)
        at = tl.load(sorted + tl.minimum(place, N - 1))
        tl.store(order + place, at.to(tl.int32), mask=place < N)
        run = block * (BLOCK // RUN) + tl.arange(0, BLOCK // RUN)
        cluster = block * (BLOCK // CLUSTER) + tl.arange(0, BLOCK // CLUSTER)
        whole = block + tl.arange(0, 1)
        for axis in tl.static_range(D):
            one = position(given, at, at >= 0, axis, PERIODIC, WIDE)
            tl.store(points + axis * P.to(tl.int64) + place, one)
            runs = tl.reshape(one, (BLOCK // RUN, RUN))
            tl.store(low + axis * (P // RUN) + run, tl.reduce(runs, 1, smaller))
            tl.store(high + axis * (P // RUN) + run, tl.reduce(runs, 1, larger))
            few = tl.reshape(one, (BLOCK // CLUSTER, CLUSTER))
            few_low, few_high = tl.reduce(few, 1, smaller), tl.reduce(few, 1, larger)
            _store_box(clusters, cluster, few_low, few_high, cluster >= 0, rounding, axis, D)
            every = tl.reshape(one, (1, BLOCK))
            every_low, every_high = tl.reduce(every, 1, smaller), tl.reduce(every, 1, larger)
            _store_box(blocks, whole, every_low, every_high, whole >= 0, rounding, axis, D)


@triton.jit(do_not_specialize=["N", "P", "stride_an", "stride_ac", "stride_bn", "stride_bc", "factor", "far"])
def records_kernel(
    points,  # (d, P)
    order,  # (N,) int32
    a, b,  # (N, A) and (N, B), by particle
    records,  # (P, WIDTH): positions, then what particles bring; behind the last one they are far away
    N, P, stride_an, stride_ac, stride_bn, stride_bc, factor, far,
    D: tl.constexpr, A: tl.constexpr, B: tl.constexpr, WIDTH: tl.constexpr, BLOCK: tl.constexpr,
):  # fmt: skip
    """The particles that kernels of sums and of lists read."""
    place = tl.program_id(0) * BLOCK + tl.arange(0, BLOCK)
    inside, there = place < P, place < N
    to = records + place.to(tl.int64) * WIDTH
    none = tl.zeros((BLOCK,), tl.float32)
    for axis in tl.static_range(3):
        one = none
        if axis < D:
            one = tl.load(points + axis * P.to(tl.int64) + place, mask=inside, other=0.0)
        if axis == 0:
            one = tl.where(there, one, far)
        tl.store(to + axis, one, mask=inside)
    if A + B > 0:
        at = tl.load(order + place, mask=there, other=0).to(tl.int64)
        for c in tl.static_range(A):
            one = tl.load(a + at * stride_an + c * stride_ac, mask=there, other=0.0)
            tl.store(to + 3 + c, one * factor, mask=inside)
        for c in tl.static_range(B):
            one = tl.load(b + at * stride_bn + c * stride_bc, mask=there, other=0.0)
            tl.store(to + 3 + A + c, one, mask=inside)
    for c in tl.static_range(3 + A + B, WIDTH):
        tl.store(to + c, none, mask=inside)


@triton.jit(do_not_specialize=["N", "T", "C", "M", "programs"])
def names_kernel(
    order,  # (N,) int32
    known,  # (1,)
    columns, counts, sizes,  # (T C,), (T,) and (N,) int32: of the kernel of lists
    keys,  # (T C,) int32: the particles at these places, -1 where there is none
    particles,  # (ROWS T,) int32: those of the groups: `groups.named`
    N, T, C, M, programs,
    ROWS: tl.constexpr, BLOCK: tl.constexpr,
):  # fmt: skip
    """The particles of groups and of their columns: the first `programs` have the groups."""
    pid = tl.program_id(0)
    if pid < programs:
        place = pid * BLOCK + tl.arange(0, BLOCK)
        inside, there = place < T * ROWS, place < N
        at = tl.load(order + place, mask=there, other=0)
        wrong = tl.load(sizes + place, mask=there, other=0) > M
        wrong |= tl.load(counts + place // ROWS, mask=inside, other=0) > C
        wrong |= tl.load(known + 0 * place) != 1
        tl.store(particles + place, tl.where(there, tl.where(wrong, -2 - at, at), -1), mask=inside)
    else:
        n = (pid - programs).to(tl.int64) * BLOCK + tl.arange(0, BLOCK)
        inside = n < T.to(tl.int64) * C
        column = tl.load(columns + n, mask=inside, other=-1)
        at = tl.load(order + tl.minimum(tl.maximum(column, 0), N - 1))
        tl.store(keys + n, tl.where(column < 0, -1, at), mask=inside)


@triton.jit(do_not_specialize=["T", "C", "n"])
def items_kernel(
    counts,  # (T,) int32: columns of groups
    items, column_items,  # (n, ITEM) int32: the work of heads, one after the other: `groups.items_of`
    segments,  # (T, 8) int32
    T, C, n, STEP: tl.constexpr, ITEM: tl.constexpr, BLOCK: tl.constexpr,
):  # fmt: skip
    """The work of both directions."""
    at = tl.program_id(0) * BLOCK + tl.arange(0, BLOCK)
    there = at < n
    head, group = at // T, at % T
    steps = (tl.minimum(tl.load(counts + group, mask=there, other=0), C) + STEP - 1) // STEP
    first, none = group * (C // STEP), at * 0
    row, column = items + at.to(tl.int64) * ITEM, column_items + at.to(tl.int64) * ITEM
    for word in tl.static_range(ITEM):
        of_row, of_column = none, none
        if word == 1:
            of_row, of_column = head, head
        if word == 2:
            of_row, of_column = group, group
        if word == 3:
            of_row, of_column = none - 1, none - 1
        if word == 4:
            of_column = group
        if word == 5 or word == 6:
            of_column = none + 1
        if word == 8:
            of_row = first
        if word == 9:
            of_row = steps
        if word == 11:
            of_row = none + 1
        tl.store(row + word, of_row, mask=there)
        tl.store(column + word, of_column, mask=there)
    there &= at < T
    for word in tl.static_range(8):
        of_segment = none
        if word == 6:
            of_segment = first
        if word == 7:
            of_segment = steps
        tl.store(segments + at * 8 + word, of_segment, mask=there)
