"""Launches of Triton kernels past Triton's own look-up, which takes several times as long as a small kernel."""

from __future__ import annotations

from collections.abc import Callable, Hashable
from typing import Any

import torch
from torch import Tensor
from triton import knobs

MOST_KNOWN = 1024

Known = dict[Any, tuple[Callable[..., None], list[Any], list[int]]]


def strides(name: str, x: Tensor) -> dict[str, int]:
    """The strides of (B, heads, rows) as kernel arguments."""
    return {f"stride_{name}{axis}": x.stride(i) for i, axis in enumerate("bhn")}


def launch(
    known: Known,
    kernel: Any,
    grid: tuple[int, ...],
    key: Hashable,
    tensors: dict[str, Tensor | None],
    floats: dict[str, float],
    rest: Callable[[], dict[str, Any]],
) -> None:
    """Run a kernel; one that was launched before in the same way is given new addresses and numbers alone.

    Args:
        known: launches of before; kept where everything that `rest` holds lives as long.
        key: fixes the grid, the device and all that `rest` returns: sizes, constants, options and tensors that do not
            change.
        tensors: what changes from call to call, by the names of the kernel; types, strides and alignment are looked at.
        floats: numbers that change; Triton compiles nothing for their values.
        rest: all other arguments by name, strides among them, and launch options.
    """
    addresses = [None if x is None else x.data_ptr() for x in tensors.values()]
    kinds = [
        None if x is None else (x.dtype, x.stride(), (address or 0) % 16)
        for x, address in zip(tensors.values(), addresses, strict=True)
    ]
    key = (kernel, key, *kinds)
    found = known.get(key)
    if found is not None:
        run, arguments, places = found
        arguments = arguments.copy()
        for place, value in zip(places, (*addresses, *floats.values()), strict=True):
            arguments[place] = value
        run(*arguments)
        return
    more = rest()
    compiled = kernel[grid](**tensors, **floats, **more)
    if compiled is None:  # the interpreter compiles nothing
        return
    if len(known) >= MOST_KNOWN:
        known.clear()
    order = {name: place for place, name in enumerate(kernel.arg_names)}
    fixed = [more.get(name) for name in order]
    fixed = [x.data_ptr() if isinstance(x, Tensor) else x for x in fixed]
    known[key] = _runner(compiled, grid), fixed, [order[name] for name in (*tensors, *floats)]


def _runner(compiled: Any, grid: tuple[int, ...]) -> Callable[..., None]:
    """What launches a compiled kernel on the current stream, and passes over Triton's hooks while there are none."""
    grid = (*grid, 1, 1)[:3]  # as a compiled kernel wants it
    hooked = compiled[grid]  # loads the kernel
    run, function, metadata = compiled.run, compiled.function, compiled.packed_metadata
    device, stream = torch.cuda.current_device(), torch._C._cuda_getCurrentRawStream
    enter, leave = knobs.runtime.launch_enter_hook, knobs.runtime.launch_exit_hook

    def quick(*arguments: Any) -> None:
        if enter.calls or leave.calls:
            hooked(*arguments)
        else:
            run(*grid, stream(device), function, metadata, None, None, None, *arguments)

    return quick
