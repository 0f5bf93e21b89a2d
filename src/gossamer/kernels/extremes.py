"""The larger and the smaller of two numbers, NaN where either is, for Triton kernels of several operations."""

from __future__ import annotations

import triton
import triton.language as tl


@triton.jit
def larger(x, y):
    """NaN where either is, as `amax` has it."""
    return tl.maximum(x, y, propagate_nan=tl.PropagateNan.ALL)


@triton.jit
def smaller(x, y):
    return tl.minimum(x, y, propagate_nan=tl.PropagateNan.ALL)
