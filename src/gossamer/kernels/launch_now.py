"""Launches of Triton kernels from code of torch, past Triton's own look-up: see `relaunch`."""

from __future__ import annotations

import inspect
from collections.abc import Callable
from functools import lru_cache, partial
from typing import Any

import torch
from triton import knobs

from gossamer.kernels import relaunch
from gossamer.kernels.launch import ALIGNMENT, Launched, observer
from gossamer.kernels.relaunch import Pointer, Programs, without_values


def launch(function: Any, grid: tuple[int, ...], *arguments: Any, **named: Any) -> None:
    """function[grid](*arguments, **named), which Triton looks up for the first of equal launches alone.

    The others take a fraction. Equal are those of the same integers, and of tensors of the same types and alignment.

    Args:
        arguments: tensors, numbers and tuples of integers, by place.
        named: other arguments, the kernel's constants, and options of the launch.
    """
    numbers = len(arguments)
    given = arguments + tuple([named.pop(name) for name in _names(function.fn)[numbers:]])
    if knobs.runtime.interpret:
        Launched(partial(function[grid], **named), given, False).start()
        return
    facts: list[Any] = []
    passed: list[Any] = []
    for at, x in enumerate(given):
        if isinstance(x, torch.Tensor):
            address = x.data_ptr()
            facts += x.dtype, address % ALIGNMENT == 0
            passed.append(address)
        else:
            facts.append(float if at < numbers and type(x) is float else x)  # Triton compiles for no float's value
            passed.append(x)
    run = _kept(function, grid, torch.cuda.current_device(), tuple(facts), tuple(named.items()))
    through = observer()
    if through is None:
        run(*passed)
    else:
        through(Launched(run, given, True))


@lru_cache
def _names(function: Any) -> tuple[str, ...]:
    """The arguments of a kernel, of its function of Python: one of Triton takes a lock to be looked up."""
    return tuple(inspect.signature(function).parameters)


@lru_cache(1024)
def _kept(
    function: Any, grid: tuple[int, ...], device: int, facts: tuple[Any, ...], options: tuple[tuple[str, Any], ...]
) -> Callable[..., None]:
    """`launcher` on the current device; of a tensor the facts are its type, and behind it whether it is aligned."""
    left = iter(facts)
    signature = [
        Pointer(str(x).removeprefix("torch."), next(left)) if isinstance(x, torch.dtype) else 0.5 if x is float else x
        for x in left
    ]
    return relaunch.launcher(function, Programs(grid, options, without_values(function, signature)))
