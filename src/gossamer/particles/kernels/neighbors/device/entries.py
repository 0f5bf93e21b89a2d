"""The entry of the kernel, as the compiler is called for it: without a GPU and without tensors."""

from __future__ import annotations

import cutlass.cute as cute
from cutlass import Float32, Int32

from gossamer.cute.entry import Entry, compact
from gossamer.particles.kernels.neighbors.configurations import POINT, ROWS, ListsConfig
from gossamer.particles.kernels.neighbors.device.kernel import BOX, ListsKernel


def lists(config: ListsConfig) -> Entry:
    """Lists of groups, and the types of the arguments: `ListsKernel.__call__`."""
    s = cute.sym_int
    N, T, L = s(), s(), s()
    boxes = [compact(Float32, s(), BOX) for _ in range(3)]
    return Entry(
        ListsKernel(config), compact(Float32, s(), POINT), *boxes,
        compact(Int32, L), compact(Int32, s(), ROWS), compact(Float32, L, POINT), compact(Float32, s(), POINT),
        compact(Int32, T), compact(Int32, T), compact(Int32, N), compact(Int32, N, s()), *[Float32(1)] * 4,
    )  # fmt: skip
