"""The entry of the kernel, as the compiler is called for it."""

from __future__ import annotations

import cutlass.cute as cute
from cutlass import Float32, Int32

from gossamer.cute.common import NUMBERS
from gossamer.cute.entry import Entry, compact, loose, strided
from gossamer.sparse_k.hopper.configurations import SparseKConfig
from gossamer.sparse_k.hopper.kernel import SparseKForward


def forward(config: SparseKConfig) -> Entry:
    """The kernel of the forward."""
    n, s = NUMBERS[config.dtype], cute.sym_int
    B, H, G, N, units, tiles = s(), s(), s(), s(), s(), s()
    q, k = strided(n, B, H, N), strided(n, B, G, N)
    key_terms = [compact(x, units, N) for x in (Float32, Float32, Int32)]
    return Entry(
        SparseKForward(config), q, k, strided(n, B, G, N), strided(n, B, H, N), loose(Float32, B, H, N), *key_terms,
        compact(Int32, units, tiles, s()), compact(Int32, units, tiles, 2), compact(Int32, units, 1, N),
        compact(Int32, units, 1, s()), compact(Int32, 1), Float32(1), *[Int32(1)] * 3,
    )  # fmt: skip
