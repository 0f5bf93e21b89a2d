"""Launches of Triton kernels past Triton's own look-up, which takes several times as long as a small kernel."""

from __future__ import annotations

from collections.abc import Callable, Hashable, Mapping
from typing import Any, NamedTuple

import torch
from torch import Tensor
from triton import knobs

MOST_KNOWN = 1024


class Launch(NamedTuple):
    """A kernel that was launched before."""

    run: Callable[..., None]
    arguments: list[Any]  # of then
    places: list[int]  # of what changes from call to call among them


Known = dict[Any, Launch]
Bound = tuple[Callable[..., None], tuple[Any, ...]]
# What a key tells of a tensor: its type, its strides, and the bytes from a multiple of 16 to its address.
Kind = tuple[torch.dtype, tuple[int, ...], int]


def fresh(dtype: torch.dtype, shape: tuple[int, ...]) -> Kind:
    """Of a tensor of this shape that an allocator would give."""
    strides = [1]
    for size in reversed(shape[1:]):
        strides.append(strides[-1] * max(size, 1))
    return dtype, tuple(reversed(strides)), 0


def padded(size: int) -> int:
    """The power of two, at least 16, that holds a head size."""
    return max(16, 1 << (size - 1).bit_length())


def strides(name: str, x: Tensor) -> dict[str, int]:
    """The strides of (B, heads, rows) as kernel arguments."""
    return {f"stride_{name}{axis}": x.stride(i) for i, axis in enumerate("bhn")}


def launch(
    known: Known,
    kernel: Any,
    grid: tuple[int, ...],
    key: Hashable,
    tensors: Mapping[str, Tensor | None],
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
    found = known.get(_key(kernel, key, tensors))
    if found is not None:
        arguments = found.arguments.copy()
        addresses = [None if x is None else x.data_ptr() for x in tensors.values()]
        for place, value in zip(found.places, (*addresses, *floats.values()), strict=True):
            arguments[place] = value
        found.run(*arguments)
        return
    more = rest()
    compiled = kernel[grid](**tensors, **floats, **more)
    if compiled is None:  # the interpreter compiles nothing
        return
    if len(known) >= MOST_KNOWN:
        known.clear()
    order = {name: place for place, name in enumerate(kernel.arg_names)}
    given = more | floats
    fixed = [given.get(name) for name in order]
    fixed = [x.data_ptr() if isinstance(x, Tensor) else x for x in fixed]
    places = [order[name] for name in (*tensors, *floats)]
    known[_key(kernel, key, tensors)] = Launch(_runner(compiled, grid), fixed, places)


def _key(kernel: Any, key: Hashable, tensors: Mapping[str, Tensor | Kind | None]) -> Hashable:
    """What Triton compiles for, and what is passed as it was in a known launch."""
    kinds = [(x.dtype, x.stride(), x.data_ptr() % 16) if isinstance(x, Tensor) else x for x in tensors.values()]
    return (kernel, key, *kinds)


def bound(
    known: Known,
    kernel: Any,
    key: Hashable,
    tensors: Mapping[str, Tensor | Kind | None],
    floats: dict[str, float],
    first: int,
) -> Bound | None:
    """A known launch as (run, arguments after the first ones): `run(*addresses, *arguments)`; None if there is none.

    For a call whose tensors are known to have the types, strides and alignment of `tensors`, so that nothing is looked
    up. The first ones may be told by their kinds. Those after them must be the same in every call, and stay alive as
    long as it is used.

    Args:
        first: how many tensors, the first arguments of the kernel, get addresses of their own in each call.
    """
    found = known.get(_key(kernel, key, tensors))
    if found is None:
        return None
    assert found.places[:first] == list(range(first)), "the tensors that change are the kernel's first arguments"
    arguments = found.arguments.copy()
    rest = [x.data_ptr() if isinstance(x, Tensor) else None for x in tensors.values()]
    for place, value in zip(found.places, (*rest, *floats.values()), strict=True):
        arguments[place] = value
    return found.run, tuple(arguments[first:])


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
