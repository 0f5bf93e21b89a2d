"""Every kind of kernel, as the compiler is called for it: without a GPU and without tensors.

To add one, write a function of its configuration that returns `cute.compile(...)` and put `@Kernel` in front: calling
it gives the compiled function, which takes torch tensors and numbers; see `store`. Imports of the compiler and of the
kernels stay inside.
"""

from __future__ import annotations

from typing import Any

from gossamer.kernels.hopper.config import ForwardConfig
from gossamer.kernels.hopper.store import Kernel

OPTIONS = "--enable-tvm-ffi"


@Kernel
def forward(config: ForwardConfig) -> Any:
    """The forward kernel of a configuration."""
    import cutlass.cute as cute
    from cutlass import Float32, Int32

    from gossamer.kernels.hopper.common import ITEM, NUMBERS
    from gossamer.kernels.hopper.forward.kernel import Forward

    n, c, s = NUMBERS[config.dtype], config, cute.sym_int
    H, G, Q = s(), s(), s()
    rows, lists = compact(Int32, s(), s()), compact(Int32, 2, s())
    return cute.compile(
        Forward(c),
        strided(n, s(), H, Q), strided(n, s(), G, s()), strided(n, s(), G, s()), strided(n, s(), H, Q),
        _rows(s(), H, Q), compact(Int32, s(), ITEM), lists, rows, compact(Int32, s(), s()),
        compact(Int32, s(), c.block_kv // 32), compact(Float32, s()),
        compact(Float32, s(), c.block_q, c.E), compact(Float32, s(), c.block_q), compact(Int32, 1),
        Float32(1), Float32(1), *[Int32(1)] * 6, cute.runtime.make_fake_stream(use_tvm_ffi_env_stream=True),
        options=OPTIONS,
    )  # fmt: skip


@Kernel
def merge(dtype: str, E: int, block_q: int) -> Any:
    """The merge of split rows."""
    import cutlass.cute as cute
    from cutlass import Float32, Int32

    from gossamer.kernels.hopper.common import NUMBERS
    from gossamer.kernels.hopper.forward.merge import MERGE, Merge

    s = cute.sym_int
    return cute.compile(
        Merge(E, block_q), strided(NUMBERS[dtype], s(), s(), s()), _rows(s(), s(), s()),
        compact(Float32, s(), block_q, E), compact(Float32, s(), block_q), compact(Int32, s(), MERGE),
        compact(Float32, s()), *[Int32(1)] * 4, cute.runtime.make_fake_stream(use_tvm_ffi_env_stream=True),
        options=OPTIONS,
    )  # fmt: skip


def strided(dtype: Any, *lead: Any) -> Any:
    """A fake (B, heads, rows, columns) tensor as TMA wants it: strides and address multiples of 16 bytes."""
    import cutlass.cute as cute
    from cutlass.cute.runtime import make_fake_tensor

    strides = tuple(cute.sym_int64(divisibility=8) for _ in range(3))
    return make_fake_tensor(dtype, (*lead, cute.sym_int()), (*strides, 1), assumed_align=16)


def _rows(*shape: Any) -> Any:
    """A fake float32 (B, H, rows) tensor of any strides."""
    import cutlass.cute as cute
    from cutlass import Float32
    from cutlass.cute.runtime import make_fake_tensor

    return make_fake_tensor(Float32, shape, tuple(cute.sym_int64() for _ in shape), assumed_align=4)


def compact(dtype: Any, *shape: Any) -> Any:
    from cutlass.cute.runtime import make_fake_compact_tensor

    order = tuple(reversed(range(len(shape))))
    return make_fake_compact_tensor(dtype, shape, stride_order=order, assumed_align=16)
