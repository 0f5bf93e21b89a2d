"""The kernels of SparseK that `gossamer compile` makes in advance."""

from __future__ import annotations

import itertools
from functools import cache

from gossamer.cute.shipped import Shipped
from gossamer.sparse_k.hopper.configurations import SIZES, SparseKConfig

MODULE = "gossamer.sparse_k.hopper.compiled"


@cache
def shipped() -> tuple[Shipped, ...]:
    """A forward for each type and padded head size."""
    heads = {64: (64,), 128: (96, 128)}
    return tuple(
        Shipped(MODULE, "forward", (SparseKConfig(dtype, size, True),), dtype, frozenset((D, D) for D in heads[size]))
        for size, dtype in itertools.product(SIZES, ("bfloat16", "float16"))
    )
