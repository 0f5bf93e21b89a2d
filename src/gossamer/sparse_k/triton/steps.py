"""The parts that kernels of SparseK attention share: gates, scores and weights of a tile, and rows of a matrix."""

from __future__ import annotations

from collections import namedtuple

import triton
import triton.language as tl

# What kernels are compiled for: FOLD is of the forward, STRAIGHT and what is behind it of the gradients.
Form = namedtuple("Form", "D E SIZE_D SIZE_E GATE PRECISION BLOCK_M BLOCK_N FOLD STRAIGHT OVER CHUNKS")
LOG2E = tl.constexpr(1.4426950408889634)
LN2 = tl.constexpr(0.6931471805599453)


@triton.jit
def rows(ptr, row, stride, there, size: tl.constexpr, SIZE: tl.constexpr, WHOLE: tl.constexpr):
    """(n, SIZE): rows of a matrix, zero where there are none. WHOLE: none is missing."""
    column = tl.arange(0, SIZE)
    at = ptr + row.to(tl.int64)[:, None] * stride + column[None, :]
    if size == SIZE:
        return tl.load(at) if WHOLE else tl.load(at, mask=there[:, None], other=0.0)
    return tl.load(at, mask=there[:, None] & (column < size)[None, :], other=0.0)


@triton.jit
def store_rows(ptr, row, stride, there, size: tl.constexpr, value, SIZE: tl.constexpr):
    """Write rows of a matrix in its type."""
    column = tl.arange(0, SIZE)
    at = ptr + row.to(tl.int64)[:, None] * stride + column[None, :]
    tl.store(at, value.to(ptr.dtype.element_ty), mask=there[:, None] & (column < size)[None, :])


@triton.jit
def live_keys(list_ptr, entry, end, over, capacity, WHOLE: tl.constexpr):
    """The keys of some entries of a list, or of every key where the list is over its capacity, and which there are.

    WHOLE: all are, and they are listed.
    """
    if WHOLE:
        key = tl.load(list_ptr + entry)
        return key, key >= 0
    there = entry < end
    return tl.where(over, entry, tl.load(list_ptr + entry, mask=there & (entry < capacity), other=0)), there


@triton.jit
def of_keys(ptr, key, there, other, WHOLE: tl.constexpr):
    """What keys have; `other` of keys that are not there."""
    return tl.load(ptr + key) if WHOLE else tl.load(ptr + key, mask=there, other=other)


@triton.jit
def gates(u, tau):
    """m = clip(u - tau, 0, 1) of operands that broadcast."""
    return tl.minimum(tl.maximum(u - tau, 0.0), 1.0)


@triton.jit
def gated_scores(s, m, factor, GATE: tl.constexpr):
    """Scores in base 2 from products of q and k."""
    s = s * factor
    if GATE == "kv":
        s = s * m
    elif GATE == "logit":
        s += tl.where(m > 0, tl.log2(tl.where(m > 0, m, 1.0)), float("-inf"))
    return s


@triton.jit
def through_gate(s, p, dp, m, delta, lse2, factor, GATE: tl.constexpr, STRAIGHT: tl.constexpr):
    """(dS of the products of q and k before their scale, dm before it is known to be inside).

    Args:
        s: products of q and k.
        p: weights; zero of pairs that are not attended.
        dp: products of dO and v.
    """
    of_weights = dp
    if GATE == "v" or GATE == "kv":
        of_weights = dp * m
    ds = p * (of_weights - delta)
    if GATE == "logit":
        dm = ds / tl.where(m > 0, m, 1.0)
    elif STRAIGHT:
        # A key that is not kept would have this weight beside those that are.
        dm = tl.exp2(s * factor - lse2) * dp
    else:
        dm = p * dp
    if GATE == "kv":
        dm += ds * s * (factor / 1.4426950408889634)
        ds = ds * m
    return ds, dm
