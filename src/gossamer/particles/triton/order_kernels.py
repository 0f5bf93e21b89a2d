"""The place of every particle along Hilbert's curve: what `geometry` defines, to the bit.

So a product and a sum are rounded one after the other: these kernels are compiled without fused operations. Lengths
come as float32, or, with positions of float64 (WIDE), as the bits of such numbers, since Triton passes no others.
"""

from __future__ import annotations

import triton
import triton.language as tl

from gossamer.kernels.extremes import larger, smaller


@triton.jit
def length(x, WIDE: tl.constexpr):
    """A length in the type of the arithmetic."""
    return x.to(tl.float64, bitcast=True) if WIDE else x


@triton.jit
def divided(x, y, WIDE: tl.constexpr):
    """x / y, rounded once."""
    return x / y if WIDE else tl.div_rn(x, y)


@triton.jit
def size_of(size_x, size_y, size_z, AXIS: tl.constexpr, WIDE: tl.constexpr):
    """The size of the box along an axis."""
    return length(size_x if AXIS == 0 else size_y if AXIS == 1 else size_z, WIDE)


@triton.jit
def position(given, n, there, AXIS: tl.constexpr, PERIODIC: tl.constexpr, WIDE: tl.constexpr):
    """Positions along an axis in the unit of the cells, inside the box: `geometry.wrapped`.

    Args:
        given: positions x, their strides, the unit, and the size of the box along each axis.
        PERIODIC: bit AXIS says whether the axis is.
    """
    x, stride_n, stride_d, unit, size_x, size_y, size_z = given
    one = tl.load(x + n.to(tl.int64) * stride_n + AXIS * stride_d, mask=there, other=0.0)
    one = (one if WIDE else one.to(tl.float32)) * length(unit, WIDE)
    if (PERIODIC >> AXIS) & 1:
        size = size_of(size_x, size_y, size_z, AXIS, WIDE)
        one = one - size * tl.floor(divided(one, size, WIDE))
    return one


@triton.jit(do_not_specialize=["stride_n", "stride_d", "N", "each", "unit", "size_x", "size_y", "size_z"])
def extents_kernel(
    x,  # (N, d)
    parts,  # (7, programs): the least and the largest position along each axis, then 1, or NaN if any is not finite
    stride_n, stride_d, N, each, unit, size_x, size_y, size_z,
    D: tl.constexpr, PERIODIC: tl.constexpr, WIDE: tl.constexpr, BLOCK: tl.constexpr,
):  # fmt: skip
    """The extents of `each` particles. Along periodic axes nobody asks for them."""
    given = (x, stride_n, stride_d, unit, size_x, size_y, size_z)
    p, P = tl.program_id(0), tl.num_programs(0)
    first = p * each
    end = tl.minimum(first + each, N)
    sure = tl.full((BLOCK,), 1, tl.int32)
    for axis in tl.static_range(D):
        none = length(unit, WIDE) * 0 + float("inf")
        low = tl.zeros((BLOCK,), none.dtype) + none
        high = -low
        for start in range(first, end, BLOCK):
            n = start + tl.arange(0, BLOCK)
            there = n < end
            one = position(given, n, there, axis, PERIODIC, WIDE)
            sure &= tl.where(there & (tl.abs(one) < float("inf")), 1, tl.where(there, 0, 1))
            low = smaller(low, tl.where(there, one, none))
            high = larger(high, tl.where(there, one, -none))
        tl.store(parts + 2 * axis * P + p, tl.reduce(low, 0, smaller))
        tl.store(parts + (2 * axis + 1) * P + p, tl.reduce(high, 0, larger))
    tl.store(parts + 6 * P + p, tl.where(tl.min(sure, 0) == 1, 1.0, float("nan")))


@triton.jit
def _from(given, parts, P, AXIS: tl.constexpr, PERIODIC: tl.constexpr, WIDE: tl.constexpr, PARTS: tl.constexpr):
    """Where the grid begins along an axis."""
    if (PERIODIC >> AXIS) & 1:
        n = tl.arange(0, 1)
        one = position(given, n, n == 0, AXIS, PERIODIC, WIDE)
        start = tl.sum(one, 0) * 0
    else:
        p = tl.arange(0, PARTS)
        start = tl.reduce(tl.load(parts + 2 * AXIS * P + p, mask=p < P, other=float("inf")), 0, smaller)
    return start


@triton.jit
def _extent(
    parts, P, start, size_x, size_y, size_z, AXIS: tl.constexpr, PERIODIC: tl.constexpr, WIDE: tl.constexpr,
    PARTS: tl.constexpr,
):  # fmt: skip
    """The extent of the particles, or of the box, along an axis."""
    if (PERIODIC >> AXIS) & 1:
        end = start + size_of(size_x, size_y, size_z, AXIS, WIDE)
    else:
        p = tl.arange(0, PARTS)
        most = tl.load(parts + (2 * AXIS + 1) * P + p, mask=p < P, other=float("-inf"))
        end = tl.reduce(most, 0, larger) - start
    return end


@triton.jit
def _cell(one, start, scale, BITS: tl.constexpr):
    """The cell of a position: `geometry.on_the_grid`."""
    cell = tl.floor((one - start) * scale)
    return tl.where(cell > 0, tl.minimum(cell, (1 << BITS) - 1.0), 0.0).to(tl.int32)


@triton.jit
def _turned(first, here, level: tl.constexpr):
    """A step of `geometry.hilbert_keys` for an axis and the first one."""
    low: tl.constexpr = (1 << level) - 1
    high = (here >> level) & 1
    swapped = (first ^ here) & low
    return tl.where(high == 1, first ^ low, first ^ swapped), tl.where(high == 1, here, here ^ swapped)


@triton.jit
def _hilbert_keys(x, y, z, D: tl.constexpr, BITS: tl.constexpr):
    """`geometry.hilbert_keys` of one to three axes."""
    for level in tl.static_range(BITS - 1, 0, -1):
        x = tl.where((x >> level) & 1 == 1, x ^ ((1 << level) - 1), x)
        if D > 1:
            x, y = _turned(x, y, level)
        if D > 2:
            x, z = _turned(x, z, level)
    last = x
    if D > 1:
        y ^= x
        last = y
    if D > 2:
        z ^= y
        last = z
    turn = x * 0
    for level in tl.static_range(BITS - 1, 0, -1):
        turn = tl.where((last >> level) & 1 == 1, turn ^ ((1 << level) - 1), turn)
    x, y, z = x ^ turn, y ^ turn, z ^ turn
    key = x * 0
    for level in tl.static_range(BITS - 1, -1, -1):
        key = (key << 1) | ((x >> level) & 1)
        if D > 1:
            key = (key << 1) | ((y >> level) & 1)
        if D > 2:
            key = (key << 1) | ((z >> level) & 1)
    return key


@triton.jit(do_not_specialize=["P", "stride_n", "stride_d", "N", "unit", "size_x", "size_y", "size_z"])
def keys_kernel(
    x,  # (N, d)
    parts,  # (7, P) of `extents_kernel`
    keys,  # (N,) int32
    known,  # (1,): 1, or NaN if any position is not finite
    P, stride_n, stride_d, N, unit, size_x, size_y, size_z,
    D: tl.constexpr, PERIODIC: tl.constexpr, WIDE: tl.constexpr, BITS: tl.constexpr, PARTS: tl.constexpr,
    BLOCK: tl.constexpr,
):  # fmt: skip
    """The places along the curve."""
    given = (x, stride_n, stride_d, unit, size_x, size_y, size_z)
    if tl.program_id(0) == 0:
        p = tl.arange(0, PARTS)
        tl.store(known, tl.reduce(tl.load(parts + 6 * P + p, mask=p < P, other=1.0), 0, larger))
    from_x = _from(given, parts, P, 0, PERIODIC, WIDE, PARTS)
    longest = _extent(parts, P, from_x, size_x, size_y, size_z, 0, PERIODIC, WIDE, PARTS)
    from_y, from_z = from_x, from_x
    if D > 1:
        from_y = _from(given, parts, P, 1, PERIODIC, WIDE, PARTS)
        longest = larger(longest, _extent(parts, P, from_y, size_x, size_y, size_z, 1, PERIODIC, WIDE, PARTS))
    if D > 2:
        from_z = _from(given, parts, P, 2, PERIODIC, WIDE, PARTS)
        longest = larger(longest, _extent(parts, P, from_z, size_x, size_y, size_z, 2, PERIODIC, WIDE, PARTS))
    some = tl.where(longest > 0, longest, longest + 1)
    scale = tl.where(longest > 0, divided(some * 0 + 1, some, WIDE) * (1 << BITS), longest)

    n = tl.program_id(0) * BLOCK + tl.arange(0, BLOCK)
    there = n < N
    at_x = position(given, n, there, 0, PERIODIC, WIDE)
    cell_x = _cell(at_x, from_x, scale, BITS)
    cell_y, cell_z = cell_x, cell_x
    if D > 1:
        at_y = position(given, n, there, 1, PERIODIC, WIDE)
        cell_y = _cell(at_y, from_y, scale, BITS)
    if D > 2:
        at_z = position(given, n, there, 2, PERIODIC, WIDE)
        cell_z = _cell(at_z, from_z, scale, BITS)
    tl.store(keys + n, _hilbert_keys(cell_x, cell_y, cell_z, D, BITS), mask=there)
