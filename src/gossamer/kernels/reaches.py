"""The keys that a row reaches by its position, as kernels compute them: `patterns.reach`."""

from __future__ import annotations

from collections import namedtuple

import triton
import triton.language as tl

MOST: tl.constexpr = tl.constexpr(2**31 - 1)

# Of a row at i the keys from clip(i, least, most) + left on; likewise their end; no key from `first` on; and the size
# of the block that they are in, or 0.
Reaching = namedtuple("Reaching", "left_least left_most left right_least right_most right first block")


@triton.jit
def narrowed(x, least, most):
    """`torch.structure.base.narrow`."""
    return tl.minimum(tl.maximum(x.to(tl.int64), least), most).to(tl.int32)


@triton.jit
def _moved(i, least, most, by):
    """`patterns.reach._moved`, of whose limits none leaves int32."""
    return tl.minimum(tl.maximum(i, least), most) + by


@triton.jit
def reached(i, K, reach, HAS_BLOCK: tl.constexpr):
    """`Reach.bounds`."""
    left_least, left_most, left, right_least, right_most, right, first, block = reach
    lo, hi = _moved(i, left_least, left_most, left), _moved(i, right_least, right_most, right)
    if HAS_BLOCK:
        # No remainder of a negative number is taken, which has the sign that a compiler gives it.
        end = tl.minimum((K.to(tl.int64) + block - 1) // block * block, MOST).to(tl.int32)
        inside = tl.minimum(i, end)
        begin = tl.where(inside < 0, -block, inside - tl.maximum(inside, 0) % block)
        lo = tl.maximum(lo, tl.minimum(tl.maximum(begin, 0), K))
        hi = tl.minimum(hi, _moved(begin, -block, K - block, block))
    return tl.minimum(lo, first), tl.minimum(hi, first)
