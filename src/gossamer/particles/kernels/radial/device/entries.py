"""The entry of the kernels, as the compiler is called for it: without a GPU and without tensors."""

from __future__ import annotations

import cutlass.cute as cute
from cutlass import Float32, Int32

from gossamer.cute.entry import Entry, compact
from gossamer.particles.kernels.radial.configurations import RadialConfig
from gossamer.particles.kernels.radial.device.kernel import BOX, RadialSums


def radial(config: RadialConfig) -> Entry:
    """The sums of one term, and the types of its arguments: `RadialSums.__call__`."""
    s = cute.sym_int
    N = s()
    return Entry(
        RadialSums(config), compact(Float32, s(), config.width), compact(Float32, s(), BOX), compact(Float32, s(), BOX),
        compact(Float32, s(), BOX), compact(Int32, N), compact(Float32, 1), compact(Float32, N, config.outputs),
        *[Float32(1)] * 16,
    )  # fmt: skip
