"""The entry of the kernel, as the compiler is called for it."""

from __future__ import annotations

import cutlass.cute as cute
from cutlass import Float32, Int32

from gossamer.cute.common import NUMBERS
from gossamer.cute.entry import Entry, compact, loose, strided
from gossamer.sparse_k.hopper.configurations import GatedConfig
from gossamer.sparse_k.hopper.kernel import Gated


def gated(config: GatedConfig) -> Entry:
    """The forward of gated attention."""
    n, s = NUMBERS[config.dtype], cute.sym_int
    B, H, G, N, units, tiles = s(), s(), s(), s(), s(), s()
    q, k = strided(n, B, H, N), strided(n, B, G, N)
    of_keys = [compact(x, units, N) for x in (Float32, Float32, Int32)]
    return Entry(
        Gated(config), q, k, strided(n, B, G, N), strided(n, B, H, N), loose(Float32, B, H, N), *of_keys,
        compact(Int32, units, tiles, s()), compact(Int32, units, tiles, 2), compact(Int32, units, 1, N),
        compact(Int32, units, 1, s()), compact(Int32, 1), Float32(1), *[Int32(1)] * 3,
    )  # fmt: skip
