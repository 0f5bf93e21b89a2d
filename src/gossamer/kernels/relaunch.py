"""Steps that run Triton kernels: described with every argument by its name, launched past Triton's own look-up.

That look-up takes several times as long as a small kernel. All that a kernel is compiled for is in the key of its step,
so a bound step passes addresses and numbers alone.
"""

from __future__ import annotations

import inspect
from collections.abc import Callable, Mapping
from functools import lru_cache
from typing import Any, NamedTuple

import torch
from triton import knobs
from triton.tools.tensor_descriptor import TensorDescriptor

from gossamer.kernels.launch import ALIGNMENT, Builder, Constant, Kernel, Operand


class Pointer(NamedTuple):
    """What Triton compiles for of an array."""

    dtype: str
    aligned: bool


class Blocks(NamedTuple):
    """The same of a tensor descriptor."""

    dtype: str
    shape: tuple[int, ...]
    strides: tuple[int, ...]
    block: tuple[int, ...]


class Programs(NamedTuple):
    """How a kernel is launched: the key of its step."""

    grid: tuple[int, ...]
    options: tuple[tuple[str, Any], ...]
    signature: tuple[Any, ...]  # of each argument a Pointer, Blocks, or the number that it is


def padded(size: int) -> int:
    """The power of two, at least 16, that holds a head size."""
    return max(16, 1 << (size - 1).bit_length())


def strides(name: str, x: Operand) -> dict[str, int]:
    """The strides of (B, heads, rows) as kernel arguments."""
    return {f"stride_{name}{axis}": x.strides[i] for i, axis in enumerate("bhn")}


def step(
    b: Builder, implementation: str, name: str, function: Any, grid: tuple[int, ...], values: Mapping[str, Any],
    options: Mapping[str, Any],
) -> None:  # fmt: skip
    """Add a launch of a Triton kernel, if it has any programs.

    Args:
        name: by which the implementation finds the function again.
        values: every argument by its name in the kernel: the name of an array, or a constant.
        options: of the launch (num_warps and others).
    """
    if not all(grid):
        return
    assert set(values) == set(parameters(function)), set(values) ^ set(parameters(function))
    given = [values[parameter] for parameter in parameters(function)]
    names = {x for x in given if isinstance(x, str) and x in b}
    signature = tuple(_specialization(b, x) if x in names else x for x in given)
    key = Programs(grid, tuple(options.items()), signature)
    passes: Any = "arrays" if knobs.runtime.interpret else "addresses"
    b.step(Kernel(implementation, name, key, passes), *(x if x in names else Constant(x) for x in given))


def _specialization(b: Builder, name: str) -> Pointer | Blocks:
    block = b.block_of(name)
    known = b[name]
    if block is not None:
        return Blocks(known.dtype, known.shape, known.strides, block)
    return Pointer(known.dtype, known.aligned)


@lru_cache
def parameters(function: Any) -> tuple[str, ...]:
    """The names of a kernel's arguments in order."""
    return tuple(inspect.signature(function.fn).parameters)


class _Memory:
    """Stands for an array while a kernel is compiled."""

    def __init__(self, dtype: str, aligned: bool) -> None:
        self.dtype: torch.dtype = getattr(torch, dtype)
        self.address = 0 if aligned else ALIGNMENT // 2

    def data_ptr(self) -> int:
        return self.address


def _stand_in(argument: Any) -> Any:
    if isinstance(argument, Pointer):
        return _Memory(argument.dtype, argument.aligned)
    if isinstance(argument, Blocks):
        dtype, *lists = argument
        return TensorDescriptor(_Memory(dtype, True), *map(list, lists))
    return argument


def launcher(function: Any, programs: Programs) -> Callable[..., None]:
    """What runs a kernel on the current stream, with all its arguments in order."""
    grid, options = programs.grid, dict(programs.options)
    if knobs.runtime.interpret:
        return lambda *arguments: function[grid](*arguments, **options)
    compiled = function.warmup(*map(_stand_in, programs.signature), grid=grid, **options)
    x, y, z, *_ = *grid, 1, 1
    whole = x, y, z  # as a compiled kernel wants it
    hooked = compiled[whole]  # loads the kernel
    run, handle, metadata = compiled.run, compiled.function, compiled.packed_metadata
    device, stream = torch.cuda.current_device(), torch._C._cuda_getCurrentRawStream
    enter, leave = knobs.runtime.launch_enter_hook, knobs.runtime.launch_exit_hook

    def quick(*arguments: Any) -> None:
        if enter.calls or leave.calls:  # of a profiler
            hooked(*arguments)
        else:
            run(*whole, stream(device), handle, metadata, None, None, None, *arguments)

    return quick
