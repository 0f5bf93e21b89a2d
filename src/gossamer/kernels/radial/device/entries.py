"""The entry of the kernels, as the compiler is called for it: without a GPU and without tensors."""

from __future__ import annotations

from typing import Any

import cutlass.cute as cute
from cutlass import Float32, Int32
from cutlass.cute.runtime import make_fake_compact_tensor

from gossamer.kernels.radial.configurations import RadialConfig
from gossamer.kernels.radial.device.kernel import BOX, Radial

OPTIONS = "--enable-tvm-ffi"


def radial(config: RadialConfig) -> Any:
    """The sums of one term, and the types of its arguments: `Radial.__call__`."""
    s = cute.sym_int
    N = s()
    return cute.compile(
        Radial(config), _compact(Float32, s(), config.width), _compact(Float32, s(), BOX), _compact(Float32, s(), BOX),
        _compact(Float32, s(), BOX), _compact(Int32, N), _compact(Float32, N, config.outputs),
        *[Float32(1)] * 15,
        cute.runtime.make_fake_stream(use_tvm_ffi_env_stream=True), options=OPTIONS,
    )  # fmt: skip


def _compact(dtype: Any, *shape: Any) -> Any:
    order = tuple(reversed(range(len(shape))))
    return make_fake_compact_tensor(dtype, shape, stride_order=order, assumed_align=16)
