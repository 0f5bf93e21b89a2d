"""Compiling the kernels, without a GPU and without tensors: once for each configuration and process."""

from __future__ import annotations

import logging
import os
from collections.abc import Callable
from threading import Lock
from time import perf_counter
from typing import Any

from gossamer.kernels.hopper.config import ForwardConfig

_compiled: dict[Any, Callable[..., None]] = {}
_lock = Lock()
log = logging.getLogger("gossamer")


def forward(config: ForwardConfig) -> Callable[..., None]:
    """The compiled forward kernel of a configuration; takes torch tensors and numbers."""
    return _compiled.get(config) or _make(config, _forward)


def merge(dtype: str, E: int, block_q: int) -> Callable[..., None]:
    """The compiled merge of split rows."""
    key = ("merge", dtype, E, block_q)
    return _compiled.get(key) or _make(key, _merge)


def _make(key: Any, build: Callable[[Any], Callable[..., None]]) -> Callable[..., None]:
    with _lock:
        found = _compiled.get(key)
        if found is None:
            # The kernels use sm_90a instructions; without a GPU the compiler cannot see that for itself.
            os.environ.setdefault("CUTE_DSL_ARCH", "sm_90a")
            start = perf_counter()
            found = _compiled[key] = build(key)
            log.info("compiled %s in %.1f s", key, perf_counter() - start)
        return found


def _forward(config: ForwardConfig, options: str = "--enable-tvm-ffi") -> Callable[..., None]:
    import cutlass.cute as cute
    from cutlass import Float32, Int32

    from gossamer.kernels.hopper.common import ITEM, NUMBERS
    from gossamer.kernels.hopper.forward.kernel import Forward

    n, c, s = NUMBERS[config.dtype], config, cute.sym_int
    H, G, Q = s(), s(), s()
    rows, lists = _compact(Int32, s(), s()), _compact(Int32, 2, s())
    return cute.compile(
        Forward(c),
        _strided(n, s(), H, Q), _strided(n, s(), G, s()), _strided(n, s(), G, s()), _strided(n, s(), H, Q),
        _rows(s(), H, Q), _compact(Int32, s(), ITEM), lists, rows, _compact(Int32, s(), s()),
        _compact(Int32, s(), c.block_kv // 32), _compact(Float32, s()),
        _compact(Float32, s(), c.block_q, c.E), _compact(Float32, s(), c.block_q), _compact(Int32, 1),
        Float32(1), Float32(1), *[Int32(1)] * 6, cute.runtime.make_fake_stream(use_tvm_ffi_env_stream=True),
        options=options,
    )  # fmt: skip


def _merge(key: tuple[str, str, int, int]) -> Callable[..., None]:
    import cutlass.cute as cute
    from cutlass import Float32, Int32

    from gossamer.kernels.hopper.common import NUMBERS
    from gossamer.kernels.hopper.forward.merge import MERGE, Merge

    _, dtype, E, block_q = key
    s = cute.sym_int
    return cute.compile(
        Merge(E, block_q), _strided(NUMBERS[dtype], s(), s(), s()), _rows(s(), s(), s()),
        _compact(Float32, s(), block_q, E), _compact(Float32, s(), block_q), _compact(Int32, s(), MERGE),
        _compact(Float32, s()), *[Int32(1)] * 4, cute.runtime.make_fake_stream(use_tvm_ffi_env_stream=True),
        options="--enable-tvm-ffi",
    )  # fmt: skip


def _strided(dtype: Any, *lead: Any) -> Any:
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


def _compact(dtype: Any, *shape: Any) -> Any:
    from cutlass.cute.runtime import make_fake_compact_tensor

    order = tuple(reversed(range(len(shape))))
    return make_fake_compact_tensor(dtype, shape, stride_order=order, assumed_align=16)
