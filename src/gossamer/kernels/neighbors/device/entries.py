"""The entry of the kernel, as the compiler is called for it: without a GPU and without tensors."""

from __future__ import annotations

from typing import Any

import cutlass.cute as cute
from cutlass import Float32, Int32
from cutlass.cute.runtime import make_fake_compact_tensor

from gossamer.kernels.neighbors.configurations import POINT, ROWS, ListsConfig
from gossamer.kernels.neighbors.device.kernel import BOX, Lists

OPTIONS = "--enable-tvm-ffi"


def lists(config: ListsConfig) -> Any:
    """Lists of groups, and the types of the arguments: `Lists.__call__`."""
    s = cute.sym_int
    N, T, L = s(), s(), s()
    boxes = [_compact(Float32, s(), BOX) for _ in range(3)]
    return cute.compile(
        Lists(config), _compact(Float32, s(), POINT), *boxes,
        _compact(Int32, L), _compact(Int32, s(), ROWS), _compact(Float32, L, POINT), _compact(Float32, s(), POINT),
        _compact(Int32, T), _compact(Int32, T), _compact(Int32, N), _compact(Int32, N, s()), *[Float32(1)] * 4,
        cute.runtime.make_fake_stream(use_tvm_ffi_env_stream=True), options=OPTIONS,
    )  # fmt: skip


def _compact(dtype: Any, *shape: Any) -> Any:
    order = tuple(reversed(range(len(shape))))
    return make_fake_compact_tensor(dtype, shape, stride_order=order, assumed_align=16)
