"""A kernel and the types of its arguments, as the compiler is called for it: without a GPU and without tensors."""

from __future__ import annotations

from typing import Any

import cutlass.cute as cute
from cutlass import Int32
from cutlass.cute.runtime import make_fake_compact_tensor, make_fake_tensor

OPTIONS = "--enable-tvm-ffi"


class Entry:
    """A kernel, and the types of its arguments: fake tensors and numbers, None for one that it does not read."""

    def __init__(self, kernel: Any, *arguments: Any) -> None:
        self.kernel, self.arguments = kernel, arguments


def compiled(kernel: Any, *arguments: Any) -> Any:
    """The compiled kernel: a function of such arguments, on the current stream of its caller."""
    stream = cute.runtime.make_fake_stream(use_tvm_ffi_env_stream=True)
    return cute.compile(kernel, *arguments, stream, options=OPTIONS)


def strided(dtype: Any, *lead: Any) -> Any:
    """A fake (B, heads, rows, columns) tensor as TMA wants it: strides and address multiples of 16 bytes."""
    strides = tuple(cute.sym_int64(divisibility=8) for _ in range(3))
    return make_fake_tensor(dtype, (*lead, cute.sym_int()), (*strides, 1), assumed_align=16)


def loose(dtype: Any, *shape: Any) -> Any:
    """A fake tensor of any strides, whose numbers are read one at a time."""
    return make_fake_tensor(dtype, shape, tuple(cute.sym_int64() for _ in shape), assumed_align=4)


def compact(dtype: Any, *shape: Any) -> Any:
    """A fake contiguous tensor."""
    order = tuple(reversed(range(len(shape))))
    return make_fake_compact_tensor(dtype, shape, stride_order=order, assumed_align=16)


def lengths_of(config: Any) -> Any:
    """Key lengths of the batch elements, where a configuration of the backward reads them: else no argument."""
    return compact(Int32, cute.sym_int()) if config.lengths else None
