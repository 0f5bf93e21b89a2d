"""What Triton kernels look up in ascending numbers."""

from __future__ import annotations

import triton
import triton.language as tl


@triton.jit
def at_most(ordered, n, steps, x, some):
    """How many of n ascending numbers are not greater than each x."""
    low, high = tl.zeros_like(x), tl.zeros_like(x) + n
    for _ in range(steps):
        middle = low + (high - low) // 2  # their sum may be over int32
        open = some & (low < high)
        less = tl.load(ordered + middle, mask=open, other=0) <= x
        high = tl.where(open & (less == 0), middle, high)
        low = tl.where(open & less, middle + 1, low)
    return low
